"""Defects of published Hybrid-STOP code, put back into streamed chains one at a time: each is found, and where it is.

And what the last of them prevents: a checkpoint of streamed pieces loads in any other layout.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

import streamed_runs
from distributed_ranks import run_ranks
from phalanx.checkpoint import CheckpointStore, placed_tensors
from phalanx.counter_random import DropoutContext
from phalanx.layout.mesh import Groups
from phalanx.layout.place import TensorSplit
from phalanx.layout.spec import ResolvedLayout
from phalanx.layout.streamed_weights.projection_pair import ProjectionPair
from phalanx.layout.streamed_weights.ring_transport import Arrivals
from streamed_runs import GPT, LLAMA, lay_out
from whole_model import joined, values_of

GRID = ResolvedLayout(8, tp=2, dp_shard=2, microbatch=4)


def bias_on_every_rank_and_chunk() -> Any:
    right = ProjectionPair.__init__

    def wrong(self: ProjectionPair, *arguments: Any) -> None:
        right(self, *arguments[:-1], ())

    return patch.object(ProjectionPair, "__init__", wrong)


def head_norms_not_summed_over_tp() -> Any:
    right = streamed_runs.sum_gradients

    def wrong(axis: Any, parameters: list[Any]) -> None:
        right(axis, [p for p in parameters if p.shape != (GPT.head_size,)])

    return patch.object(streamed_runs, "sum_gradients", wrong)


def head_norms_of_the_last_chunk() -> Any:
    right = ProjectionPair.gradients

    def wrong(self: ProjectionPair, *arguments: Any) -> Any:
        grad_x, grads = right(self, *arguments)
        return grad_x, [grad / self.plan.chunks for grad in grads]

    return patch.object(ProjectionPair, "gradients", wrong)


def equal_masks_on_all_ranks() -> Any:
    right = DropoutContext.of_step.__func__  # type: ignore[attr-defined]

    def wrong(cls: Any, seed: int, step: int, samples: Tensor, positions: Tensor, width: int) -> DropoutContext:
        return right(cls, seed, step, torch.arange(len(samples)), torch.arange(len(positions)), width)

    return patch.object(DropoutContext, "of_step", classmethod(wrong))


def gradients_that_arrive_and_are_not_added() -> Any:
    return patch.object(Arrivals, "wait", lambda self: self.transfer.wait())


DEFECTS: dict[str, tuple[Callable[[], Any], tuple[str, ...], bool]] = {
    # name: (defect, parameters of a block whose gradients show it and no other does, whether the loss shows it)
    "bias once a rank": (bias_on_every_rank_and_chunk, ("*",), True),
    "q/k norms not summed": (head_norms_not_summed_over_tp, ("query_norm", "key_norm"), False),
    "q/k norms of one chunk": (head_norms_of_the_last_chunk, ("query_norm", "key_norm"), False),
    "equal dropout masks": (equal_masks_on_all_ranks, ("*",), True),
    "gradients not added": (
        gradients_that_arrive_and_are_not_added,
        ("qkv", "output.weight", "up", "down.weight"),
        False,
    ),
}


def run_defects(folder: Path) -> dict[str, Any]:
    """On one of four ranks: loss and gradients with no defect and with each; and parts saved, with places and without."""
    made: Groups = {}
    found: dict[str, Any] = {}
    for name, defect in {"none": nullcontext, **{name: case[0] for name, case in DEFECTS.items()}}.items():
        with defect():
            laid = lay_out(GPT, GRID, made)
            found[name] = laid.step(), laid.gradients()
    laid = lay_out(LLAMA, GRID, made)
    with CheckpointStore(folder, keep_last=1) as store:
        store.save(1, placed_tensors(laid.parameters, laid.splits), {})
        found["saved"] = values_of(laid.parameters, laid.splits)
        other = lay_out(LLAMA, ResolvedLayout(8, dp_shard=4, microbatch=2), made, chunks=2)
        for parameter in other.parameters.values():
            torch.nn.init.constant_(parameter, torch.nan)
        store.load(store.newest(), placed_tensors(other.parameters, other.splits))  # type: ignore[arg-type]
        found["loaded"] = values_of(other.parameters, other.splits)
    # What a rank alone would say of its tensor-parallel part: that it is the whole.
    alone = {
        name: TensorSplit(split.dim, split.start % (split.whole // 2), split.whole // 2)
        for name, split in laid.splits.items()
    }
    found["bound"] = values_of(laid.parameters, alone)
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def ranks(folder: Path) -> list[dict[str, Any]]:
    return run_ranks(run_defects, 4, folder, timeout_s=120.0)


@pytest.fixture(scope="module")
def one_rank() -> tuple[float, dict[str, Tensor]]:
    laid = lay_out(GPT, ResolvedLayout(8, microbatch=8))
    return laid.step(), {name: p.grad for name, p in laid.parameters.items() if p.grad is not None}


def wrong_gradients(name: str, ranks: list[dict[str, Any]], expected: dict[str, Tensor]) -> set[str]:
    """Names of parameters of blocks whose gradients are off."""
    off: dict[str, float] = {}
    for rank in ranks:
        for key, (offsets, _, elements) in rank[name][1].items():
            grad = expected[key]
            for dim, (start, length) in enumerate(zip(offsets, elements.shape, strict=True)):
                grad = grad.narrow(dim, start, length)
            # Shards of a few elements may all be near zero: errors are told by the whole parameter.
            error = float((elements - grad).norm() / expected[key].norm())
            off[key] = max(off.get(key, 0.0), error)
    assert all(error < 1e-10 or error > 1e-3 for error in off.values())
    return {key for key, error in off.items() if error > 1e-3 and key.startswith("blocks")}


def test_nothing_is_wrong_without_a_defect(ranks: list[dict[str, Any]], one_rank: Any) -> None:
    assert sum(rank["none"][0] for rank in ranks) == pytest.approx(one_rank[0], rel=1e-12)
    assert wrong_gradients("none", ranks, one_rank[1]) == set()


@pytest.mark.parametrize("name", DEFECTS)
def test_a_defect_is_found_where_it_is(name: str, ranks: list[dict[str, Any]], one_rank: Any) -> None:
    loss, expected = one_rank
    _, where, in_loss = DEFECTS[name]
    off = abs(sum(rank[name][0] for rank in ranks) / loss - 1.0)
    assert off > 1e-4 if in_loss else off < 1e-12
    wrong = wrong_gradients(name, ranks, expected)
    if where == ("*",):
        assert len(wrong) > len([key for key in expected if key.startswith("blocks")]) // 2
    else:
        assert wrong and all(any(f".{part}" in key for part in where) for key in wrong)


def test_a_checkpoint_loads_in_other_layouts(ranks: list[dict[str, Any]], folder: Path) -> None:
    alone = lay_out(LLAMA, ResolvedLayout(8))
    expected = {name: p.detach().clone() for name, p in alone.parameters.items()}
    for what in ("saved", "loaded"):
        whole = joined([rank[what] for rank in ranks])
        assert all(torch.equal(whole[name], value) for name, value in expected.items()), what
    for parameter in alone.parameters.values():
        torch.nn.init.constant_(parameter, torch.nan)
    with CheckpointStore(folder, keep_last=1) as store:
        store.load(store.newest(), placed_tensors(alone.parameters, alone.splits))  # type: ignore[arg-type]
    assert all(torch.equal(alone.parameters[name], value) for name, value in expected.items())


def test_parts_that_pass_for_wholes_do_not_join(ranks: list[dict[str, Any]]) -> None:
    """The published checkpoints: what a rank of `tp` holds is saved as if it were all there is."""
    with pytest.raises(AssertionError):
        joined([rank["bound"] for rank in ranks])
