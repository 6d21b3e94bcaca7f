"""Runs that begin with weights of another model: what is taken, resized, new and frozen, alike in every layout."""

from __future__ import annotations

import json
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn

import materials_cases
import weather_cases
from distributed_ranks import run_ranks
from layout_runs import run_with
from phalanx.checkpoint import CheckpointStore, open_checkpoints, placed_tensors, read_tensors
from phalanx.config.families import FAMILIES, Family
from phalanx.config.load import dump_run, load_run
from phalanx.config.model import BlockModel, Model
from phalanx.config.schema import Run
from phalanx.data.prepared_folder import file_record
from phalanx.data.sources import TensorSpec
from phalanx.errors import ConfigError
from phalanx.families.blocks.bound import BoundBlocks
from phalanx.families.blocks.config import BlockRun
from phalanx.families.blocks.network import BlockNetwork
from phalanx.families.language.config import LanguageRun
from phalanx.families.language.evaluation.load_weights import open_weights
from phalanx.families.registry import bind
from phalanx.layout.apply import ParallelModel, apply_layout
from phalanx.layout.context_parallel.kernel_choice import AttentionChoice
from phalanx.layout.execute import Executor
from phalanx.layout.mesh import ONE_RANK, Groups, build_mesh
from phalanx.layout.resolve import resolve_layout
from phalanx.layout.spec import ResolvedLayout
from phalanx.nn.adapters import is_adapter, merge_adapters
from phalanx.nn.layers import Linear
from phalanx.nn.parameters import matches_any
from phalanx.nn.resizing import Resizes, match_rows, resample_grid, resample_patches
from phalanx.optimizers import set_learning_rate
from phalanx.training.checkpointing import load_module
from phalanx.training.inputs import TrainableModel
from phalanx.training.step import build_step
from phalanx.training.transfer import describe_transfer, load_transfer, plan_transfer
from phalanx.verification.family import VerifiableModel
from phalanx_processes import finish, start
from token_data import write_run_file, write_token_folder
from whole_model import CPU, Box, joined, values_of

Fields = dict[str, Any]

# --- a family of a user's own, with outputs by name --------------------------------------------------------------------


class OwnModel(BlockModel):
    family: Literal["own"] = "own"
    outputs: tuple[str, ...] = ("x", "y")


class OwnRun(BlockRun):
    model: OwnModel


class OwnBlock(Linear):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.product(x, self.bias))


class OwnEmbedding(Linear):
    def forward(self, x_BS1: Tensor, positions_S: Tensor) -> Tensor:
        return self.product(x_BS1, self.bias)


class OwnNetwork(BlockNetwork):
    @classmethod
    def make_embedding(cls, config: BlockModel) -> nn.Module:
        return OwnEmbedding(1, config.d_model, bias=False)

    @classmethod
    def make_block(cls, config: BlockModel, number: int) -> nn.Module:
        return OwnBlock(config.d_model, config.d_model, bias=True)

    @classmethod
    def make_head(cls, config: BlockModel) -> nn.Module:
        assert isinstance(config, OwnModel)
        return Linear(config.d_model, len(config.outputs), bias=True)

    @classmethod
    def specs(cls, config: BlockModel) -> tuple[TensorSpec, TensorSpec]:
        assert isinstance(config, OwnModel)
        return TensorSpec((1,)), TensorSpec((len(config.outputs),))


class BoundOwn(BoundBlocks):
    run: OwnRun
    network = OwnNetwork

    def resizes(self, path: Path, before: Model) -> Resizes:
        assert isinstance(before, OwnModel)
        if before.outputs == self.run.model.outputs:
            return []
        return [("head.*", match_rows(before.outputs, self.run.model.outputs, "outputs"))]


OWN = Family("own", OwnRun, bound=BoundOwn)


@pytest.fixture(scope="module", autouse=True)
def registered() -> Iterator[None]:
    """The family is known to these tests alone: messages of others list every family."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FAMILIES, "_items", {**FAMILIES._items})
        FAMILIES.register("own", OWN)
        yield


def own_run(world: int, **layout: Any) -> OwnRun:
    return OwnRun.model_validate(
        {
            "model": {"n_layers": 2, "d_model": 8},
            "data": {"source": "none", "sequence_length": 6},
            "layout": {"global_batch": 2 * world, "microbatch": 1, "precision": "fp64", **layout},
            "optimizer": {"lr": 0.01, "eps": 1e-3},
            "training": {"steps": 2},
        }
    )


# --- a model before and after, for every family ------------------------------------------------------------------------

WORLD = 4
GPT = {"model.positions": "learned", "model.norm": "layernorm", "model.mlp": "gelu_tanh", "model.bias": True}
WEATHER = [*weather_cases.NAMES[:2], "u10", *weather_cases.NAMES[3:1:-1]]
"""Two variables in their places, one new, two in another order; 2m_temperature is gone."""
CHANGES: dict[str, Fields] = {
    # Rows of tokens by number, positions interpolated; a fifth block is new.
    "language": {
        "model.vocab_size": 67,
        "model.max_positions": 96,
        "model.n_layers": 5,
        "training.transfer": {
            "resize": ["embedding.*", "head.weight"],
            "new": ["blocks.4.*"],
        },
        "training.freeze": ["blocks.0.*", "embedding.weight"],
        "optimizer.lr_ratios": {"head.*": 3.0},
    },
    "weather": {
        "model.variables": WEATHER,
        "model.n_lat": 8,
        "model.n_lon": 16,
        "model.patch_size": 4,
        "model.history": 2,
        "data.history": 2,
        "data.inputs": WEATHER,
        "data.outputs": WEATHER,
        "training.transfer": {"resize": ["embedding.*", "head.output.*"]},
        "training.freeze": ["blocks.*.mlp.*"],
        "optimizer.lr_ratios": {"embedding.variables": 2.0, "head.*": 5.0},
    },
    # Two heads begin as the one of a data set that is gone, the charges are new, heavier elements are added.
    "materials": {
        "model.max_atomic_number": 8,
        "model.branches": [{"name": "first"}, {"name": "third"}, {"name": "fourth"}],
        "training.transfer": {
            "resize": ["embedding.elements.*"],
            "rename": {
                "head.*.third.*": "head.*.second.*",
                "head.energy.copies.fourth.*": "head.energy.copies.second.*",
            },
            "new": ["head.charges.copies.fourth.*"],
        },
        "training.freeze": ["blocks.0.*"],
    },
    "own": {
        "model.outputs": ["y", "z", "x"],
        "training.transfer": {"resize": ["head.*"]},
        "training.freeze": ["embedding.*"],
        "optimizer.lr_ratios": {"head.bias": 4.0},
    },
}
LAYOUTS: dict[str, Fields] = {
    "language": {"tp": 2, "dp_shard": 2},
    "weather": {"tp": 2, "dp_shard": 2},
    "materials": {"dp_replicate": 2, "dp_shard": 2},
    "own": {"pp": 2, "dp_shard": 2},
}


ADAPTERS: Fields = {
    "training.lora": {"rank": 2, "alpha": 6.0, "matrices": ["*"], "train": ["head.*.bias", "head.bias"]}
}
"""Every linear layer, and biases of heads themselves."""
ADAPTED_LAYOUTS = {**LAYOUTS, "language": {"tp": 2, "pp": 2}}


def run_before(family: str, **layout: Any) -> Run:
    """The run whose weights are taken, with a batch for four ranks."""
    if family == "language":
        return run_with(GPT, precision="fp64", global_batch=8, **layout)
    if family == "own":
        return own_run(WORLD, **layout)
    made: Any = {"weather": weather_cases, "materials": materials_cases}[family]
    return made.run_of({"weather": "climax", "materials": "painn"}[family], WORLD, **layout)  # type: ignore[no-any-return]


def changed(run: Run, changes: Fields) -> Run:
    content = json.loads(run.model_dump_json(exclude_unset=True))
    for name, value in changes.items():
        section, field = name.split(".")
        content[section][field] = value
    return type(run).model_validate_json(json.dumps(content))


def run_after(family: str, root: Path, changes: Fields | None = None, **layout: Any) -> Run:
    fields = {**CHANGES[family], "training.init_from": str(root / family), **(changes or {})}
    return changed(run_before(family, **layout), fields)


def lay_out(run: Run, made: Groups | None = None) -> tuple[ParallelModel, ResolvedLayout]:
    model = bind(run, TrainableModel)
    layout = resolve_layout(model, 1 if made is None else WORLD)
    mesh = ONE_RANK if made is None else build_mesh(layout, CPU, made)
    return apply_layout(model, layout, mesh, CPU, AttentionChoice("sdpa")), layout


def write_weights(root: Path, family: str) -> dict[str, Tensor]:
    """A checkpoint of the model before, whose parameters are far from any initial values; returns them."""
    run = run_before(family)
    applied, _ = lay_out(run)
    random = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in applied.parameters.values():
            parameter.add_(torch.randn(parameter.shape, generator=random, dtype=parameter.dtype), alpha=0.05)
    with CheckpointStore(root / family / "checkpoints", keep_last=1) as store:
        store.save(0, placed_tensors(applied.saved, applied.splits), {"run": dump_run(run)})
    return {name: parameter.detach().clone() for name, parameter in applied.parameters.items()}


def adapted_run(family: str, root: Path, **layout: Any) -> Run:
    """The run of the weights, with adapters on them. Biases of heads that some families lack are left out."""
    run = changed(run_before(family, **layout), {**ADAPTERS, "training.init_from": str(root / family)})
    names, lora = bind(run, TrainableModel).whole_shapes.parameters, ADAPTERS["training.lora"]
    there = [pattern for pattern in lora["train"] if any(fnmatchcase(name, pattern) for name in names)]
    return changed(run, {"training.lora": {**lora, "train": there}})


def begin_and_train(
    root: Path, family: str, made: Groups | None = None, *, adapted: bool = False
) -> tuple[list[dict[str, Box]], list[float]]:
    """Parameters of this rank as they begin and after two steps, and the losses of these."""
    layouts = ADAPTED_LAYOUTS if adapted else LAYOUTS
    layout_fields = layouts[family] if made is not None else {}
    run = (adapted_run if adapted else run_after)(family, root, **layout_fields)
    model = bind(run, VerifiableModel)
    assert isinstance(model, TrainableModel)
    applied, layout = lay_out(run, made)
    plan = plan_transfer(model)
    assert plan is not None
    load_transfer(plan, model, applied)
    applied.refresh()
    values = [values_of(applied.parameters, applied.splits)]
    step = build_step(model, applied, CPU)
    losses = []
    for number in (1, 2):
        set_learning_rate(step.optimizer, run.optimizer.lr)
        first = applied.mesh.data_rank * layout.samples_per_rank
        batch = model.samples(number, first, layout.samples_per_rank, layout.global_batch)
        losses.append(step.run(number, batch).loss)
    return [*values, values_of(applied.parameters, applied.splits)], losses


def on_four_ranks(root: Path) -> dict[str, Any]:
    FAMILIES.register("own", OWN)
    made: Groups = {}
    whole = {family: begin_and_train(root, family, made) for family in CHANGES}
    return {**whole, **{f"{family} adapted": begin_and_train(root, family, made, adapted=True) for family in CHANGES}}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("transfer")


@pytest.fixture(scope="module")
def weights(root: Path) -> dict[str, dict[str, Tensor]]:
    return {family: write_weights(root, family) for family in CHANGES}


@pytest.fixture(scope="module")
def one_rank(root: Path, weights: object) -> dict[str, Any]:
    whole = {family: begin_and_train(root, family) for family in CHANGES}
    return {**whole, **{f"{family} adapted": begin_and_train(root, family, adapted=True) for family in CHANGES}}


@pytest.fixture(scope="module")
def four_ranks(root: Path, weights: object) -> list[dict[str, Any]]:
    return run_ranks(on_four_ranks, WORLD, root)


@pytest.mark.parametrize("family", [*CHANGES, *(f"{family} adapted" for family in CHANGES)])
def test_ranks_begin_and_train_as_one_does(
    family: str, one_rank: dict[str, Any], four_ranks: list[dict[str, Any]]
) -> None:
    values, losses = one_rank[family]
    for moment in (0, 1):
        whole = joined([rank[family][0][moment] for rank in four_ranks])
        expected = joined([values[moment]])
        assert whole.keys() == expected.keys()
        for name, tensor in whole.items():
            assert torch.allclose(tensor, expected[name], rtol=1e-8, atol=1e-11), name
    assert all(rank[family][1] == pytest.approx(losses, rel=1e-10) for rank in four_ranks)


def begun(one_rank: dict[str, Any], family: str, moment: int = 0) -> dict[str, Tensor]:
    return joined([one_rank[family][0][moment]])


def test_language_rows_are_taken_and_positions_interpolated(
    one_rank: dict[str, Any], weights: dict[str, dict[str, Tensor]]
) -> None:
    before, after = weights["language"], begun(one_rank, "language")
    assert torch.equal(after["head.weight"][:61], before["head.weight"])
    assert torch.equal(after["blocks.3.attention.qkv.weight"], before["blocks.3.attention.qkv.weight"])
    # New rows and blocks are those of a run from scratch.
    scratch = lay_out(changed(run_before("language"), {"model.vocab_size": 67, "model.n_layers": 5}))[0].parameters
    assert torch.equal(after["embedding.weight"][61:], scratch["embedding.weight"][61:])
    assert torch.equal(after["blocks.4.mlp.up.weight"], scratch["blocks.4.mlp.up.weight"])
    # 64 positions become 96: the middle of each third one is where the middle of every second one was.
    assert torch.allclose(
        after["embedding.positions"][1::3],
        0.5 * (before["embedding.positions"][0::2] + before["embedding.positions"][1::2]),
    )


def test_weather_variables_go_by_name_and_smooth_fields_give_the_same_tokens(
    one_rank: dict[str, Any], weights: dict[str, dict[str, Tensor]]
) -> None:
    before, after = weights["weather"], begun(one_rank, "weather")
    names = list(weather_cases.NAMES)
    for place, name in enumerate(WEATHER):
        if name not in names:
            continue
        old = names.index(name)
        assert torch.equal(after["embedding.variables"][place], before["embedding.variables"][old])
        # Of a constant field every patch gives the token that it gave, whatever its size.
        assert torch.allclose(
            after["embedding.patches.weight"][place].sum(-1), before["embedding.patches.weight"][old].sum(-1)
        )
        # A head that wrote one value over a patch writes it over the larger one.
        mean = before["head.output.bias"].view(5, -1)[old].mean()
        assert torch.allclose(after["head.output.bias"].view(5, -1)[place].mean(), mean)
    assert after["embedding.patches.bias"][2].abs().max() == 0.0
    assert torch.equal(after["blocks.2.mlp.up.weight"], before["blocks.2.mlp.up.weight"])
    # 2 x 8 locations before, 2 x 4 now: means of neighbours, up to the weights of an antialiased filter.
    assert after["embedding.positions"].shape == (8, 64)


def test_materials_heads_are_copied_and_elements_added(
    one_rank: dict[str, Any], weights: dict[str, dict[str, Tensor]]
) -> None:
    before, after = weights["materials"], begun(one_rank, "materials")
    old = "head.energy.copies.second.0.weight"
    for name in ("third", "fourth"):
        assert torch.equal(after[old.replace("second", name)], before[old])
    assert torch.equal(after["embedding.elements.weight"][:7], before["embedding.elements.weight"])
    assert after["embedding.elements.weight"].shape[0] == 9


def test_outputs_of_a_users_own_family_go_by_name(
    one_rank: dict[str, Any], weights: dict[str, dict[str, Tensor]]
) -> None:
    before, after = weights["own"], begun(one_rank, "own")
    assert torch.equal(after["head.weight"][[2, 0]], before["head.weight"])
    assert not torch.isin(after["head.weight"][1], before["head.weight"]).any()


@pytest.mark.parametrize("family", CHANGES)
def test_what_is_frozen_stays_and_all_else_moves(family: str, one_rank: dict[str, Any], root: Path) -> None:
    first, last = (begun(one_rank, family, moment) for moment in (0, 1))
    plan = plan_transfer(bind(run_after(family, root), TrainableModel))
    table = list(describe_transfer(bind(run_after(family, root), TrainableModel), plan))
    frozen = [line for line in table if "  frozen" in line]
    still = [name for name in first if torch.equal(first[name], last[name])]
    patterns = {
        "language": ("blocks.0.", "embedding.weight"),
        "weather": (".mlp.",),
        "materials": ("blocks.0.",),
        "own": ("embedding.",),
    }
    # PaiNN's last block moves vectors that no head of this model reads, and a head without samples has gradients of 0.
    assert {name for name in first if any(part in name for part in patterns[family])} <= set(still)
    moved = set(first) - set(still)
    assert len(moved) > 0.5 * (len(first) - len(still)) and frozen, table


def test_larger_rates_move_further(one_rank: dict[str, Any], root: Path) -> None:
    plain = run_after("own", root, {"optimizer.lr_ratios": {}})
    model = bind(plain, VerifiableModel)
    assert isinstance(model, TrainableModel)
    applied, layout = lay_out(plain)
    plan = plan_transfer(model)
    assert plan is not None
    load_transfer(plan, model, applied)
    start_bias = applied.parameters["head.bias"].detach().clone()
    step = build_step(model, applied, CPU)
    step.run(1, model.samples(1, 0, layout.samples_per_rank, layout.global_batch))
    slow = applied.parameters["head.bias"].detach() - start_bias
    quick_run = run_after("own", root)
    quick, _ = lay_out(quick_run)
    load_transfer(plan, model, quick)
    step = build_step(bind(quick_run, TrainableModel), quick, CPU)
    step.run(1, model.samples(1, 0, layout.samples_per_rank, layout.global_batch))
    # Weight decay takes nothing of a bias.
    assert torch.allclose(quick.parameters["head.bias"].detach() - start_bias, 4.0 * slow)


@pytest.mark.parametrize("family", CHANGES)
def test_adapters_alone_are_trained(family: str, one_rank: dict[str, Any], root: Path) -> None:
    first, last = (begun(one_rank, f"{family} adapted", moment) for moment in (0, 1))
    run = adapted_run(family, root)
    trained = run.training.lora.train if run.training.lora is not None else []
    for name, tensor in first.items():
        if name.endswith("lora_B"):
            assert tensor.abs().max() == 0.0
        if not (is_adapter(name) or matches_any(name, trained)):
            assert torch.equal(tensor, last[name]), name
    # B moves in the first step, and A, whose gradient B is a factor of, in the second.
    for part in ("lora_A", "lora_B"):
        pairs = [(first[name], last[name]) for name in first if name.endswith(part)]
        assert sum(not torch.equal(*pair) for pair in pairs) > 0.7 * len(pairs)
    plan = plan_transfer(bind(run, TrainableModel))
    table = [line.split() for line in describe_transfer(bind(run, TrainableModel), plan)]
    assert {row[-2] for row in table[1:] if "lora_" not in row[0] and not matches_any(row[0], trained)} == {"frozen"}
    assert any("lora_A" in row[0] and row[1:-1] == ["new"] for row in table)


LATENT = {"key_value_rank": 14, "rope_size": 4, "nope_size": 6, "value_size": 8}
BODIES = (
    "painn",
    "mace",
    "nequip",
    "dimenet++",
    "gatv2",
    "schnet",
    "egnn",
    "gin",
    "sage",
    "mfc",
    "cgcnn",
    "pna",
    "pna+",
    "pnaeq",
)


def unadapted_run(case: str) -> Run:
    """A run of each family, and of each kind of module that multiplies by a layer's weight itself."""
    if case == "latent attention":
        return run_with({"model.latent": LATENT, "model.n_kv_heads": None}, precision="fp64", global_batch=8)
    if case not in BODIES:
        return run_before(case)
    known = case in materials_cases.MODELS
    run = materials_cases.run_of(case if known else "painn", WORLD)
    return run if known else changed(run, {"model.body": case})


@pytest.mark.parametrize("case", ["language", "latent attention", "weather", "own", *BODIES])
def test_adapters_merge_into_weights(case: str, tmp_path: Path) -> None:
    """A model that begins with adapted weights and has no adapters gives what the adapted one gave: none is passed by."""
    plain = unadapted_run(case)
    adapted = changed(plain, {"training.lora": {"rank": 2, "alpha": 6.0, "matrices": ["*"]}})
    applied, layout = lay_out(adapted)
    random = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in applied.parameters.items():
            if is_adapter(name):
                parameter.copy_(torch.randn(parameter.shape, generator=random, dtype=parameter.dtype).mul_(0.1))
    with CheckpointStore(tmp_path / "checkpoints", keep_last=1) as store:
        store.save(0, placed_tensors(applied.saved, applied.splits), {"run": dump_run(adapted)})
    merged_run = changed(plain, {"training.init_from": str(tmp_path)})
    merged, _ = lay_out(merged_run)
    model = bind(merged_run, VerifiableModel)
    assert isinstance(model, TrainableModel)
    plan = plan_transfer(model)
    assert plan is not None
    load_transfer(plan, model, merged)
    assert not any(map(is_adapter, merged.parameters))
    batch = model.samples(1, 0, layout.samples_per_rank, layout.global_batch)
    with torch.no_grad():
        wanted, found, without = (Executor(each).evaluate(batch) for each in (applied, merged, lay_out(plain)[0]))
    assert torch.allclose(found, wanted, rtol=1e-9, atol=1e-12)
    assert not torch.allclose(without, wanted, rtol=1e-6, atol=0.0)
    newest = open_checkpoints(tmp_path, one_rank=True).newest()
    assert newest is not None
    if isinstance(plain, LanguageRun):
        with open_weights(newest.path) as weights:
            for name, rows in (
                ("blocks.0.attention.output.weight", slice(None)),
                ("blocks.1.mlp.down.weight", slice(5, 9)),
            ):
                assert torch.allclose(weights.read(name, rows), merged.parameters[name][rows], rtol=1e-12, atol=1e-14)
    # The way of evaluations, which build the module alone.
    module = merge_adapters(applied.stages[0].part)
    again = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
    load_module(newest.path, module, adapted.training.lora)
    for name, parameter in module.named_parameters():
        assert torch.allclose(parameter, again[name], rtol=1e-12, atol=1e-14), name


SIZED: Fields = {"resize": ["embedding.*", "head.weight"], "new": ["blocks.4.*"]}
IN_ORDER: Fields = {"model.n_lat": 4, "model.patch_size": 2}
"""Makes weights of another order of variables fit in shape."""
REFUSED: list[tuple[str, Fields, str]] = [
    (
        "language",
        {"training.lora": {"rank": 2, "matrices": ["blocks.*", "embedding.weight"]}},
        "training.lora.matrices names embedding.weight, which no weight of a linear layer is called",
    ),
    ("own", {"training.lora": {"rank": 2, "train": ["haed.*"]}}, "training.lora.train names haed.*"),
    ("language", {"training.transfer": {**SIZED, "new": []}}, "not in the weights: blocks.4."),
    (
        "language",
        {"training.transfer": {**SIZED, "resize": ["embedding.*"]}},
        "head.weight (tokens by name: 61 of 67 known)",
    ),
    ("language", {"model.n_layers": 3, "training.transfer": {"resize": ["*"]}}, "only in the weights: blocks.3."),
    ("language", {"model.d_ff": 80}, "blocks.0.mlp.up.weight (there [64, 32], here [80, 32])"),
    ("weather", {"training.transfer": {}}, "embedding.variables (variables by name: 4 of 5 known)"),
    (
        "weather",
        {**IN_ORDER, "training.transfer": {"resize": ["embedding.*"]}},
        "head.output.weight (variables by name: 4 of 5 known)",
    ),
    (
        "materials",
        {"training.transfer": {"resize": ["*"], "new": ["head.*.fourth.*", "head.*.third.*"]}},
        "only in the weights: head.",
    ),
    (
        "own",
        {"training.transfer": {"resize": ["head.*"], "drop": ["tail.*"]}},
        "training.transfer.drop names tail.*, which no parameter is called",
    ),
    ("own", {"training.freeze": ["blocks.0.wieght"]}, "which no parameter is called; nearest: blocks.0.weight"),
    ("own", {"training.freeze": ["*"]}, "training.freeze names every parameter"),
    ("own", {"optimizer.lr_ratios": {"nothing": 2.0}}, "optimizer.lr_ratios names nothing"),
]


@pytest.mark.parametrize(("family", "changes", "words"), REFUSED)
def test_what_would_be_lost_in_silence_is_refused_by_name(
    family: str, changes: Fields, words: str, root: Path, weights: object
) -> None:
    with pytest.raises(ConfigError) as caught:
        plan_transfer(bind(run_after(family, root, changes), TrainableModel))
    assert words in str(caught.value)


def test_a_map_without_weights_is_refused(tmp_path: Path) -> None:
    run_file = write_run_file(tmp_path / "run.yaml", tmp_path / "data")
    with pytest.raises(
        ConfigError, match=r"new says what is taken of the weights in training\.init_from, which is null"
    ):
        load_run(run_file, ["training.transfer.new=[head.*]"])


def test_grids_and_patches() -> None:
    ramp = torch.arange(4.0)[:, None, None].expand(4, 6, 2).reshape(24, 2)
    finer = resample_grid((4, 6), (8, 6)).apply(ramp, torch.empty(48, 2)).view(8, 6, 2)
    # Bilinear between the middles of cells, held at the edges.
    assert torch.allclose(finer[:, 0, 0], torch.tensor([0.0, 0.25, 0.75, 1.25, 1.75, 2.25, 2.75, 3.0]))
    weight = torch.randn(3, 5, 16)
    smaller = resample_patches(4, 2, 2, reads=True).apply(weight, torch.empty(3, 5, 4))
    assert torch.allclose(smaller.sum(-1), weight.sum(-1), atol=1e-5)


def rewrite_tokenizer(folder: Path, tokenizer: Fields) -> None:
    """Put another tokenizer into a prepared folder, and into its manifest."""
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["tokenizer"]["file"] = file_record(folder / "tokenizer.json").model_dump()
    (folder / "manifest.json").write_text(json.dumps(manifest))


def read_model(run_dir: Path) -> dict[str, Tensor]:
    newest = open_checkpoints(run_dir, one_rank=True).newest()
    assert newest is not None
    return read_tensors(newest.path, "model.")


def test_a_tokenizer_of_other_tokens_is_matched_by_text(tmp_path: Path) -> None:
    """Through the command: a run with other token numbers begins with the rows of the same texts, and prints its table."""
    first, second = (write_token_folder(tmp_path / name, train_tokens=4_000) for name in ("first", "second"))
    tokenizer = json.loads((second / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    # The numbers of all bytes turned round.
    last = max(number for text, number in vocabulary.items() if text != "<|endoftext|>")
    tokenizer["model"]["vocab"] = {text: n if n > last else last - n for text, n in vocabulary.items()}
    rewrite_tokenizer(second, tokenizer)
    run_file = write_run_file(tmp_path / "run.yaml", first)
    few = ("training.steps=1", "optimizer.warmup_steps=0", "evaluation.samples=2", "checkpoint.every=null")
    finish(["train", str(run_file), "--run-dir", str(tmp_path / "a"), *few])
    onward = ["train", str(run_file), "--run-dir", str(tmp_path / "b"), *few, f"data.sources=[{second}]"]
    onward += [f"training.init_from={tmp_path / 'a'}", "optimizer.lr=1e-12"]
    code, errors = start(onward).finish()
    assert code == 1 and "was prepared with another tokenizer than the weights" in errors
    said = finish([*onward, "training.transfer.resize=[embedding.weight]"])
    assert "embedding.weight" in said and "resized: tokens by name: 264 of 264 known" in said
    before, after = (read_model(tmp_path / name) for name in ("a", "b"))
    assert torch.allclose(
        after["model.embedding.weight"][:256], before["model.embedding.weight"][:256].flip(0), atol=1e-6
    )
