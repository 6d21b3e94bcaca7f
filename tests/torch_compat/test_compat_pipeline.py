"""A pipeline stage keeps receive buffers only for micro-batches in flight."""

from __future__ import annotations

import pytest

from distributed_ranks import run_ranks
from phalanx.families.registry import bind
from phalanx.layout.mesh import Groups
from phalanx.layout.resolve import resolve_layout
from phalanx.torch_compat.pipeline_stage import LeanStage, Received
from whole_model import backward, laid_out, whole_run


def addresses(received: Received) -> set[int]:
    """Of the buffers of all micro-batches; PyTorch 2.11 notes inputs that nobody sends without one."""
    buffers = [getattr(info, "buffer", None) for infos in received.values() for info in infos]
    return {buffer.data_ptr() for buffer in buffers if buffer is not None}


def most_buffers(schedule: str) -> tuple[int, int]:
    """On one of two ranks: receive buffers of activations and of gradients that were there at once, at most."""
    run = whole_run({})
    fields = {"pp": 2, "schedule": schedule, "microbatch": 1}
    run = run.model_copy(update={"layout": run.layout.model_copy(update=fields)})
    applied = laid_out(run, resolve_layout(bind(run), 2), Groups())
    assert applied.pipeline is not None
    # Made as the first step runs.
    backward(run, applied)
    (schedule_object,) = applied.pipeline._schedules.values()
    stages = getattr(schedule_object, "_stages", None) or [schedule_object._stage]  # type: ignore[union-attr]
    most = [0, 0]

    def count(stage: LeanStage) -> None:
        for kind, received in enumerate((stage.args_recv_info, stage.grad_recv_info)):
            most[kind] = max(most[kind], len(addresses(received)))

    class Counting(LeanStage):
        def backward_one_chunk(self, *args: object, **kwargs: object) -> object:
            count(self)
            return super().backward_one_chunk(*args, **kwargs)  # type: ignore[arg-type]

    for stage in stages:
        stage.__class__ = Counting
    for _ in range(2):
        backward(run, applied)
    for stage in stages:
        for received in (stage.args_recv_info, stage.grad_recv_info):
            assert len(addresses(received)) <= 1
    return most[0], most[1]


@pytest.mark.parametrize(("schedule", "flying"), [("1f1b", 2), ("interleaved_1f1b", 4)])
def test_buffers_are_those_of_the_microbatches_in_flight(schedule: str, flying: int) -> None:
    (_, first_gradients), (second_activations, _) = run_ranks(most_buffers, 2, schedule)
    # Eight micro-batches are run; a template buffer is there beside those in flight.
    assert 0 < second_activations <= flying + 1
    assert 0 < first_gradients <= flying + 1
