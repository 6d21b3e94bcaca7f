"""Multi-task parallelism: the body on all ranks, each branch's heads on a sub-group, and the same numbers as on one rank.

Ranks of different branches have different numbers of structures, and some have none; some steps lack a whole branch. The
defects named in tests are those of HydraGNN's MultiTaskModelMP.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from distributed_ranks import run_ranks
from phalanx.checkpoint import (
    CheckpointStore,
    materialise_optimizer_state,
    open_checkpoints,
    placed_tensors,
    read_tensors,
)
from phalanx.config.load import parse_run
from phalanx.errors import ConfigError
from phalanx.families.materials.config import MaterialsRun
from phalanx.families.materials.model.network import MaterialsNetwork
from phalanx.families.registry import bind
from phalanx.layout import execute
from phalanx.layout.apply import ParallelModel, apply_layout
from phalanx.layout.context_parallel.kernel_choice import AttentionChoice
from phalanx.layout.layout_model import LayoutModel
from phalanx.layout.mesh import Axis, Groups, build_mesh
from phalanx.layout.resolve import every_layout, resolve_layout
from phalanx.training.step import TrainStep, build_step
from phalanx.verification.family import VerifiableModel
from phalanx.verification.verify_run import Verdict, Verifier, reduced_run

CPU = torch.device("cpu")
MODEL: dict[str, Any] = {
    "family": "materials",
    "body": "painn",
    "n_layers": 2,
    "d_model": 8,
    "n_radial": 4,
    "cutoff": 3.0,
    "max_atomic_number": 6,
    "mean_neighbors": 12.0,
    "energy": {"force_weight": 10.0, "stress_weight": 3.0},
    "charges": {},
    "properties": {"names": ["gap"], "shared": True},
    "branches": [
        {"name": "first", "reference_energies": {"1": -1.0, "6": -3.5}},
        {"name": "second", "energy_scale": 2.0, "weight": 0.5},
        # A name that a head has which all branches share.
        {"name": "shared"},
    ],
}
SOURCE = {
    "path": "nowhere",
    "labels": {"energy": "eV", "forces": "eV/A", "stress": "eV/A^3", "charges": "e"},
    "properties": {"gap": "eV"},
}
LAYOUTS: dict[str, dict[str, Any]] = {
    # Few samples: the second step has none of the first branch.
    "replicas": {"dp_replicate": 4, "zero": 0, "branch_groups": [2, 1, 1], "global_batch": 4},
    "zero 1": {"dp_shard": 4, "zero": 1, "branch_groups": [1, 2, 1]},
    "two branches in one group": {"dp_shard": 2, "dp_replicate": 2, "branch_groups": [3, 1, 0]},
}


def run_of(world: int, *, model: dict[str, Any] | None = None, **layout: Any) -> MaterialsRun:
    """Two micro-batches of one sample on each of `world` ranks, on average."""
    return MaterialsRun.model_validate(
        {
            "model": {**MODEL, **(model or {})},
            "data": {
                "sources": [{"name": branch["name"], **SOURCE} for branch in {**MODEL, **(model or {})}["branches"]],
                "prepared": "nowhere",
                "cutoff": 3.0,
            },
            "layout": {"global_batch": 2 * world, "microbatch": 1, "precision": "fp64", **layout},
            "optimizer": {"lr": 0.01, "eps": 1e-3, "grad_clip": 0.5, "schedule": "constant"},
            "training": {"steps": 2},
        }
    )


# --- on four ranks -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Found:
    """What one rank saw."""

    verdicts: dict[str, Verdict]
    without_sum: Verdict
    parameters: dict[str, tuple[int, ...]]
    optimizer: set[str]
    exchanges: list[int]
    """Numbers in each sum over the sub-group, in one step."""


def laid_out(groups: Groups, **layout: Any) -> tuple[ParallelModel, TrainStep]:
    run = run_of(4, **layout)
    resolved = resolve_layout(bind(run), 4)
    applied = apply_layout(
        bind(run, LayoutModel), resolved, build_mesh(resolved, CPU, groups), CPU, AttentionChoice("sdpa")
    )
    return applied, build_step(bind(run), applied, CPU)


def on_four_ranks(folder: Path) -> Found:
    groups: Groups = {}
    verifiers = {
        batch: Verifier(bind(run_of(4, global_batch=batch), VerifiableModel), CPU, steps=2, activations=False)
        for batch in (4, 8)
    }
    verdicts = {}
    for name, fields in LAYOUTS.items():
        run = run_of(4, **fields)
        verifier = verifiers[run.layout.global_batch]  # type: ignore[index]
        verifier.model, verifier._groups = bind(run, VerifiableModel), groups
        verdicts[name] = verifier.verify(resolve_layout(bind(run), 4))
    without_sum = verify_without_sum(groups)
    applied, step = laid_out(groups, **LAYOUTS["two branches in one group"])
    exchanges = count_exchanges(applied, step)
    resave_in_other_layouts(folder, groups, applied, step)
    shapes = {name: tuple(parameter.shape) for name, parameter in applied.parameters.items()}
    state = {name for name, parameter in applied.parameters.items() if step.optimizer.state[parameter]}
    return Found(verdicts, without_sum, shapes, state, exchanges)


def verify_without_sum(groups: Groups) -> Verdict:
    """With gradients of heads left on each rank as they are."""
    run = run_of(4, **LAYOUTS["replicas"])
    right = execute.sum_gradients

    def wrong(axis: Axis, parameters: Any) -> None:
        if axis.name != "branch":
            right(axis, parameters)

    with patch.object(execute, "sum_gradients", wrong):
        return Verifier(bind(run, VerifiableModel), CPU, steps=1, activations=False, groups=groups).verify(
            resolve_layout(bind(run), 4)
        )


def count_exchanges(applied: ParallelModel, step: TrainStep) -> list[int]:
    """One optimizer step, and the sums over this rank's sub-group in it."""
    seen: list[int] = []
    right = dist.all_reduce

    def counted(tensor: Tensor, *arguments: Any, group: Any = None, **options: Any) -> Any:
        if group is not None and group is applied.mesh.branch.group:
            seen.append(tensor.numel())
        return right(tensor, *arguments, group=group, **options)

    run = run_of(4, **LAYOUTS["two branches in one group"])
    batch = bind(run, VerifiableModel).branch_samples(1, applied.layout, applied.mesh.data_rank)
    with patch.object(dist, "all_reduce", counted):
        step.run(1, batch)
    return seen


def resave_in_other_layouts(folder: Path, groups: Groups, applied: ParallelModel, step: TrainStep) -> None:
    """With sub-groups, from there without, and from there with others: one folder each."""
    save(folder / "apart", applied, step)
    for source, target, fields in (("apart", "plain", {"dp_shard": 4}), ("plain", "again", LAYOUTS["zero 1"])):
        fresh, fresh_step = laid_out(groups, **fields)
        with torch.no_grad():
            for parameter in fresh.parameters.values():
                parameter.fill_(torch.nan)
        materialise_optimizer_state(fresh_step.optimizer)
        reader = open_checkpoints(folder / source)
        reader.load_newest_usable(placed_tensors(fresh.parameters, fresh.splits, fresh_step.optimizer))
        save(folder / target, fresh, fresh_step)


def save(root: Path, applied: ParallelModel, step: TrainStep) -> None:
    with CheckpointStore(root, keep_last=1) as store:
        store.save(1, placed_tensors(applied.parameters, applied.splits, step.optimizer), {})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("multitask")


@pytest.fixture(scope="module")
def found(folder: Path) -> list[Found]:
    return run_ranks(on_four_ranks, 4, folder, timeout_s=300.0)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_sub_groups_compute_what_one_rank_computes(layout: str, found: list[Found]) -> None:
    verdict = found[0].verdicts[layout]
    assert verdict.passed, f"{verdict.layout}: {verdict.first}"
    checked = {check.what for check in verdict.checks}
    assert {"loss", "gradient", "gradient norm", "parameter"} <= checked
    assert max(check.error for check in verdict.checks if check.what == "gradient") < 1e-12


def test_heads_that_are_not_summed_are_found(found: list[Found]) -> None:
    verdict = found[0].without_sum
    wrong = {check.name for check in verdict.checks if not check.passed and check.what == "gradient"}
    assert wrong and all(".copies.first." in name for name in wrong)


def test_samples_are_uneven_and_some_ranks_and_branches_have_none() -> None:
    for name, steps in {
        "replicas": [[[0], [0], [1], [2]], [[], [], [1], [2]]],
        "two branches in one group": [[[0], [0], [], [1, 2, 1, 2]], [[0], [0], [], [2, 1, 2, 1]]],
    }.items():
        run = run_of(4, **LAYOUTS[name])
        layout = resolve_layout(bind(run), 4)
        for step, sources in enumerate(steps, 1):
            batches = [bind(run, VerifiableModel).branch_samples(step, layout, rank) for rank in range(4)]
            assert [batch.source_G.tolist() for batch in batches] == sources, name
            size = layout.global_batch
            whole = bind(run, VerifiableModel).samples(step, 0, size, size).sample_indices.tolist()
            assert sorted(number for batch in batches for number in batch.sample_indices.tolist()) == whole


def test_a_rank_holds_the_heads_of_its_branches_alone(found: list[Found]) -> None:
    with torch.device("meta"):
        whole = {name: tuple(p.shape) for name, p in MaterialsNetwork(run_of(4).model).named_parameters()}
    body = {name for name in whole if ".copies." not in name or "properties" in name}
    for rank, seen in enumerate(found):
        branches = {"first"} if rank < 3 else {"second", "shared"}
        heads = {name for name in whole if name not in body and name.split(".")[3] in branches}
        assert heads and seen.parameters == {name: whole[name] for name in body | heads}
        assert seen.optimizer == body | heads


def test_heads_travel_in_one_exchange_of_their_sub_group(found: list[Found]) -> None:
    # HydraGNN sums gradients parameter by parameter. The rank alone in its group has nobody to sum with.
    heads = [
        math.prod(shape)
        for name, shape in found[0].parameters.items()
        if ".copies." in name and "properties" not in name
    ]
    assert len(heads) > 4 and [seen.exchanges for seen in found] == [[sum(heads)]] * 3 + [[]]


def test_a_checkpoint_is_the_whole_model_s_whatever_the_groups(found: list[Found], folder: Path) -> None:
    apart, plain, again = (read_tensors(folder / name / "step-00000001") for name in ("apart", "plain", "again"))
    with torch.device("meta"):
        names = [name for name, _ in MaterialsNetwork(run_of(4).model).named_parameters()]
    kinds = [("model", ""), ("optimizer", ".exp_avg"), ("optimizer", ".exp_avg_sq"), ("optimizer", ".step")]
    # HydraGNN joins the names of two state dicts, which may clash.
    assert sorted(apart) == sorted(f"{kind}.{name}{what}" for kind, what in kinds for name in names)
    assert apart.keys() == plain.keys() == again.keys()
    for name, tensor in apart.items():
        assert torch.equal(tensor, plain[name]) and torch.equal(tensor, again[name]), name
    assert all(apart[f"optimizer.head.energy.copies.{branch}.0.weight.exp_avg"].any() for branch in ("first", "second"))


# --- which layouts are legal -----------------------------------------------------------------------------------------


def refusal(run: MaterialsRun, world: int) -> str:
    with pytest.raises(ConfigError) as caught:
        resolve_layout(bind(run), world)
    return str(caught.value)


def test_sizes_that_cannot_be_are_refused_with_the_numbers() -> None:
    too_many = refusal(run_of(4, branch_groups=[2, 1, 1]), 2)
    assert too_many.startswith(
        "layout.branch_groups=[2, 1, 1] is 4 ranks, but the layout has 2 data-parallel ones; auto"
    )
    assert "has 2 sizes for the 3 branches" in refusal(run_of(4, branch_groups=[2, 2]), 4)
    assert "before the first there is none" in refusal(run_of(4, branch_groups=[0, 2, 2]), 4)
    assert "a single sub-group with all branches" in refusal(run_of(4, branch_groups=[4, 0, 0]), 4)
    assert "layout.cp=2" in refusal(run_of(4, cp=2, dp_shard=2, branch_groups=[1, 1, 0]), 4)
    single = {"branches": [{"name": "first"}]}
    assert "needs heads of several branches" in refusal(run_of(4, model=single, branch_groups="auto"), 4)
    shared = {head: {**MODEL[head], "shared": True} for head in ("energy", "charges")}
    assert "needs heads of several branches" in refusal(run_of(4, model=shared, branch_groups=[2, 1, 1]), 4)
    for choice in ([2, 2], [0, 2, 2], [4, 0, 0]):
        assert refusal(run_of(4, branch_groups=choice), 4).endswith("nearest legal: branch_groups=off")


def test_a_layout_is_written_so_that_it_is_read_again() -> None:
    for fields in LAYOUTS.values():
        run = run_of(4, **fields)
        layout = resolve_layout(bind(run), 4)
        assert f"branch_groups=[{','.join(map(str, fields['branch_groups']))}]" in str(layout)
        content = run_of(4, global_batch=layout.global_batch).model_dump_json(exclude_none=True)
        again = parse_run(content, "run.yaml", layout.overrides())
        assert resolve_layout(bind(again), 4) == layout
    plain = resolve_layout(bind(run_of(4)), 4)
    assert "branch" not in str(plain) and "layout.branch_groups=off" in plain.overrides()


def test_every_layout_of_a_run_with_sub_groups_has_them() -> None:
    layouts = list(every_layout(bind(run_of(4, branch_groups=[2, 1, 1])), 4))
    assert len(layouts) > 5 and {layout.branch_groups for layout in layouts} == {(2, 1, 1)}


def test_a_small_run_to_verify_keeps_all_branches_that_groups_are_sized_for() -> None:
    branches = {"branches": [{"name": name} for name in ("first", "second", "shared", "fourth", "fifth")]}
    for choice, kept in (("off", 3), ([1, 0, 1, 1, 1], 5)):
        run = run_of(4, model=branches, branch_groups=choice)
        assert len(reduced_run(bind(run, VerifiableModel), "fp64", 2, 4).model.branches) == kept  # type: ignore[attr-defined]
