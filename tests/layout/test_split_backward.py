"""Zero-bubble schedules take the gradients of parameters in a pass of their own: they too must reach the masters."""

from __future__ import annotations

import pytest

from distributed_ranks import run_ranks
from layout_runs import run_with
from phalanx.families.registry import bind
from phalanx.layout.resolve import resolve_layout
from whole_model import Box, backward, gradients_of, joined, laid_out


def gradients(schedule: str, world: int) -> tuple[float, dict[str, Box]]:
    """Loss and gradients in bfloat16 beside float32 masters, of this rank."""
    words = {"pp": world, "schedule": schedule} if world > 1 else {}
    run = run_with({}, precision="bf16", global_batch=8, **words)
    applied = laid_out(run, resolve_layout(bind(run), world))
    assert all(stage.low_precision is not None for stage in applied.stages)
    return float(backward(run, applied)), gradients_of(applied)


@pytest.mark.parametrize("schedule", ["zbv", "interleaved_zero_bubble"])
def test_gradients_of_a_split_backward_pass_reach_the_masters(schedule: str) -> None:
    loss, alone = gradients("1f1b", 1)
    ranks = run_ranks(gradients, 2, schedule, 2)
    assert sum(rank[0] for rank in ranks) == pytest.approx(loss, rel=1e-2)
    together = joined([rank[1] for rank in ranks])
    assert together.keys() == alone.keys()
    for name, (_, _, wanted) in alone.items():
        assert (together[name] - wanted).norm() < 0.05 * wanted.norm(), name


def whole_batch_gradients(world: int) -> dict[str, Box]:
    """Gradients of 32 samples in bfloat16 beside float32 masters, of this rank; two ranks share out what is beyond two."""
    run = run_with({}, precision="bf16", global_batch=32, pp=2, dp_shard=world // 2, schedule="zbv")
    applied = laid_out(run, resolve_layout(bind(run), world))
    backward(run, applied)
    return gradients_of(applied)


def test_sharded_gradients_are_added_up_in_float32_too() -> None:
    """Where ranks hold whole parameters the masters' gradients are the sums, which FSDP2 left to itself makes in bfloat16
    of micro-batches whose gradients of parameters come one after the other."""
    whole, shared_out = (joined(run_ranks(whole_batch_gradients, world, world)) for world in (2, 4))
    assert whole.keys() == shared_out.keys()
    for name, wanted in whole.items():
        assert (shared_out[name] - wanted).norm() < 1e-6 * wanted.norm(), name
