"""Checkpoints of placed parts: what one layout saves, uneven and shared parts included, any other loads to the bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from distributed_ranks import run_ranks
from phalanx.checkpoint import CheckpointStore, materialise_optimizer_state, placed_tensors, read_tensors
from phalanx.families.registry import bind
from phalanx.layout.mesh import Groups
from phalanx.layout.place import Place
from phalanx.layout.spec import ResolvedLayout
from phalanx.optimizers import build_optimizer, find_optimizer
from phalanx.training.step import clip_or_skip
from saved_states import assert_same_bits
from whole_model import GPT, Box, Fields, backward, box, joined, laid_out, whole_run

# --- boxes of plain tensors --------------------------------------------------------------------------------------------

WHOLE = {
    "rows": torch.arange(35.0).view(7, 5),
    "columns": torch.arange(24, dtype=torch.bfloat16).view(4, 6) / 7,
    "grid": torch.arange(77.0, dtype=torch.float64).view(7, 11) - 38.5,
    "held by two": torch.arange(15.0).view(5, 3).sqrt(),
    "behind an empty part": torch.arange(24.0).view(8, 3) / 3,
    "nothing": torch.zeros(0, 3),
    "scalar": torch.tensor(3.25),
}
Boxes = dict[str, list[tuple[list[int], list[int]] | None]]
"""For each rank, offsets and sizes of its part of a tensor; None where it has none."""

THREE_RANKS: Boxes = {
    "rows": [([0, 0], [3, 5]), ([3, 0], [3, 5]), ([6, 0], [1, 5])],
    "columns": [([0, 0], [4, 2]), ([0, 2], [4, 2]), ([0, 4], [4, 2])],
    "grid": [([0, 0], [4, 11]), ([4, 0], [3, 6]), ([4, 6], [3, 5])],
    "held by two": [([0, 0], [5, 3]), None, ([0, 0], [5, 3])],
    # The second half of this one begins where a rank that shares the first half has none of it.
    "behind an empty part": [([0, 0], [4, 3]), ([4, 0], [0, 3]), ([4, 0], [4, 3])],
    "nothing": [([0, 0], [0, 3]), ([0, 0], [0, 3]), None],
    "scalar": [([], []), ([], []), ([], [])],
}
TWO_RANKS: Boxes = {
    "rows": [([0, 0], [7, 2]), ([0, 2], [7, 3])],
    "columns": [([0, 0], [3, 6]), ([3, 0], [1, 6])],
    "grid": [([0, 0], [7, 0]), ([0, 0], [7, 11])],
    "held by two": [([0, 0], [4, 3]), ([4, 0], [1, 3])],
    "behind an empty part": [([0, 0], [8, 3]), ([8, 0], [0, 3])],
    "nothing": [([0, 0], [0, 3]), None],
    "scalar": [None, ([], [])],
}


def cut(boxes: Boxes, rank: int, *, empty: bool) -> dict[str, Place]:
    """This rank's parts, as values or as NaN to load into; strided where they are columns."""
    parts = {}
    for name, ranks in boxes.items():
        mine = ranks[rank]
        if mine is None:
            continue
        local = torch.full_like(WHOLE[name], torch.nan) if empty else WHOLE[name].clone()
        for dim, (start, length) in enumerate(zip(*mine, strict=True)):
            local = local.narrow(dim, start, length)
        parts[name] = Place(local, tuple(mine[0]), tuple(WHOLE[name].shape))
    return parts


def save_boxes(root: Path) -> None:
    with CheckpointStore(root, keep_last=1) as store:
        store.save(1, cut(THREE_RANKS, dist.get_rank(), empty=False), {"made by": "three ranks"})


def load_boxes(root: Path) -> dict[str, Box]:
    with CheckpointStore(root, keep_last=1) as store:
        parts = cut(TWO_RANKS, dist.get_rank(), empty=True)
        assert store.load(store.newest(), parts) == {"made by": "three ranks"}
    return {name: box(place) for name, place in parts.items()}


def test_boxes_load_into_other_boxes(tmp_path: Path) -> None:
    run_ranks(save_boxes, 3, tmp_path)
    assert_same_bits(read_tensors(tmp_path / "step-00000001"), WHOLE)
    manifest = json.loads((tmp_path / "step-00000001" / "manifest.json").read_text())
    chunks = {tensor["name"]: len(tensor["chunks"]) for tensor in manifest["tensors"]}
    expected = {
        "rows": 3,
        "columns": 3,
        "grid": 3,
        "held by two": 1,
        "behind an empty part": 2,
        "nothing": 0,
        "scalar": 1,
    }
    assert chunks == expected
    assert_same_bits(joined(run_ranks(load_boxes, 2, tmp_path)), WHOLE)


# --- a model in one layout after another -------------------------------------------------------------------------------

FOUR_RANKS = {
    "tp and fsdp": ResolvedLayout(8, tp=2, dp_shard=2, reshard_after_forward=True),
    "a table at both ends of a pipeline": ResolvedLayout(8, tp=2, pp=2),
    "a vocabulary in four uneven parts": ResolvedLayout(8, tp=4),
    "stages there and back, replicated": ResolvedLayout(
        8, pp=2, dp_replicate=2, schedule="interleaved_1f1b", stages_per_rank=2
    ),
    "shards of positions": ResolvedLayout(8, cp=2, dp_shard=2, zero=1),
}
"""Of 61 rows of the vocabulary four ranks have 16, 16, 16 and 13; two have 31 and 30, in shards of 16, 15, 15 and 15."""

MIXTURE: Fields = {
    "model.experts": {
        "count": 8,
        "active": 2,
        "d_ff": 24,
        "shared": 1,
        "dense_layers": 1,
        "scoring": "sigmoid",
        "bias_rate": 0.01,
    }
}
"""Changes that make the small model a mixture whose selection biases are saved beside its parameters."""
SPREAD_EXPERTS = {
    "two of each expert, sharded": ResolvedLayout(8, dp_shard=4, ep=2, reshard_after_forward=True),
    "one of each expert": ResolvedLayout(8, dp_shard=4, ep=4, zero=1),
    "over ranks of tp too": ResolvedLayout(8, tp=2, dp_shard=2, ep=4, zero=2),
    "each expert replicated": ResolvedLayout(8, dp_replicate=2, dp_shard=2, ep=2, zero=0),
    "in a pipeline": ResolvedLayout(8, pp=2, dp_shard=2, ep=2, zero=1),
}
EIGHT_BITS: Fields = {
    "optimizer.name": "adamw8bit",
    "model.d_model": 80,
    "model.head_dim": 32,
    "model.d_ff": 64,
    "model.experts": {"count": 2, "active": 1, "d_ff": 64, "dense_layers": 1},
}
"""Changes that keep scales of blocks of 32 columns, some rows of which end within a block."""
UNCUT_BLOCKS = {
    "tp and fsdp": ResolvedLayout(8, tp=2, dp_shard=2, ep=2, reshard_after_forward=True),
    "parts of experts": ResolvedLayout(8, dp_shard=4, ep=2, expert_tp=2, zero=2),
    "in a pipeline": ResolvedLayout(8, pp=2, cp=2, zero=1),
}
CHAINS: dict[str, tuple[Fields, dict[str, ResolvedLayout], tuple[int, ResolvedLayout]]] = {
    "gpt": (GPT, FOUR_RANKS, (3, ResolvedLayout(9, dp_shard=3))),
    "mixture": (MIXTURE, SPREAD_EXPERTS, (4, ResolvedLayout(8, cp=2, dp_shard=2, ep=4))),
    "moments in 8 bits": (EIGHT_BITS, UNCUT_BLOCKS, (3, ResolvedLayout(9, dp_shard=3))),
}
"""Models with their layouts on four ranks, and the ranks and layout that go on after one rank."""

State = dict[str, Box]


def visit(root: Path, model: str, step: int, layout: ResolvedLayout, made: Groups | None = None) -> State:
    """Train one step from new (step 1), or load the newest checkpoint into other weights; save it as `step`."""
    run = whole_run({**CHAINS[model][0], "training.seed": step})
    applied = laid_out(run, layout, made)
    optimizer = build_optimizer(applied.parameters, run.optimizer, bind(run).parameter_kind)
    if step == 1:
        backward(run, applied)
        divisor, skip = clip_or_skip(torch.ones(()), applied.gradient_norm(), None)
        find_optimizer(run.optimizer).update(optimizer, divisor, skip)
        applied.finish_step(skip)
    materialise_optimizer_state(optimizer)
    tensors = placed_tensors(applied.saved, applied.splits, optimizer)
    with CheckpointStore(root, keep_last=99) as store:
        if step > 1:
            assert store.load(store.newest(), tensors) == {"step": step - 1}
        store.save(step, tensors, {"step": step})
    return {name: box(place) for name, place in tensors.items()}


def visit_four_ranks(root: Path) -> dict[str, list[State]]:
    made: Groups = {}
    return {
        model: [visit(root / model, model, step, layout, made) for step, layout in enumerate(layouts.values(), 1)]
        for model, (_, layouts, _) in CHAINS.items()
    }


@pytest.fixture(scope="module")
def visits(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """By model: whole tensors in every layout that the state went through, one after another, and each checkpoint's."""
    root = tmp_path_factory.mktemp("visits")
    ranks = run_ranks(visit_four_ranks, 4, root)
    found = {}
    for model, (_, layouts, (world, other)) in CHAINS.items():
        seen = {name: joined([rank[model][index] for rank in ranks]) for index, name in enumerate(layouts)}
        last = len(layouts)
        seen["one rank"] = joined(run_ranks(visit, 1, root / model, model, last + 1, ResolvedLayout(8)))
        seen["others"] = joined(run_ranks(visit, world, root / model, model, last + 2, other))
        saved = [read_tensors(root / model / f"step-{step:08d}") for step in range(1, last + 3)]
        found[model] = {"layouts": seen, "checkpoints": saved}
    return found


@pytest.mark.parametrize(
    ("model", "name"), [(model, name) for model in CHAINS for name in (*CHAINS[model][1], "one rank", "others")]
)
def test_every_layout_holds_the_state_of_the_first(model: str, name: str, visits: dict[str, dict[str, Any]]) -> None:
    assert_same_bits(visits[model]["layouts"][name], visits[model]["checkpoints"][0])


@pytest.mark.parametrize("model", CHAINS)
def test_every_checkpoint_is_the_same(model: str, visits: dict[str, dict[str, Any]]) -> None:
    first, *others = visits[model]["checkpoints"]
    for other in others:
        assert_same_bits(other, first)


def test_biases_of_experts_were_moved_and_saved(visits: dict[str, dict[str, Any]]) -> None:
    state = visits["mixture"]["checkpoints"][0]
    biases = [tensor for name, tensor in state.items() if name.endswith("router.bias")]
    assert biases and all(bool((bias != 0).any()) for bias in biases)


def test_moments_in_8_bits_have_a_scale_for_each_block(visits: dict[str, dict[str, Any]]) -> None:
    state = visits["moments in 8 bits"]["checkpoints"][0]
    for what, columns, blocks in (("gate_up", 80, 3), ("down", 64, 2)):
        codes, scales = (state[f"optimizer.blocks.0.mlp.{what}.weight.{of}"] for of in ("exp_avg", "exp_avg_scale"))
        assert codes.shape[1] == columns and codes.dtype == torch.uint8
        assert scales.shape == (len(codes), blocks) and bool((scales > 0).all())


def test_the_state_is_the_models_and_was_trained(visits: dict[str, dict[str, Any]]) -> None:
    state: dict[str, Tensor] = visits["gpt"]["checkpoints"][0]
    names = laid_out(whole_run(GPT), ResolvedLayout(8)).parameters.keys()
    assert state.keys() == {
        *(f"model.{name}" for name in names),
        *(f"optimizer.{name}.{what}" for name in names for what in ("exp_avg", "exp_avg_sq", "step")),
    }
    assert "head.weight" not in names
    assert all(not bool(tensor.isnan().any()) for tensor in state.values())
    assert bool((state["optimizer.embedding.weight.exp_avg"] != 0).any(dim=1).sum() > 50)
    assert float(state["optimizer.blocks.0.mlp.up.weight.step"]) == 1.0
