"""Tables of what each pipeline rank computes, against what PyTorch's schedules run on real ranks."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from torch.distributed.pipelining import PipelineStage, ScheduleInterleaved1F1B, ScheduleInterleavedZeroBubble

from distributed_ranks import run_ranks
from layout_runs import run_with
from phalanx.families.registry import bind
from phalanx.layout.legality import reasons_against
from phalanx.layout.mesh import Groups
from phalanx.layout.resolve import every_layout
from phalanx.layout.spec import ResolvedLayout
from phalanx.layout.stage_assignment import rank_of_stage, stages_of_rank
from phalanx.planner.schedule.bounds import in_flight
from phalanx.planner.schedule.schedule_table import LETTERS, Action, Pass, schedule_table, table_of
from phalanx.torch_compat.common import schedule_actions
from published.in_flight import microbatches_in_flight, peak_activations, peak_in_flight
from whole_model import backward, laid_out, whole_run

SCHEDULES = [
    ("gpipe", 1),
    ("1f1b", 1),
    ("interleaved_1f1b", 2),
    ("interleaved_1f1b", 3),
    ("interleaved_zero_bubble", 2),
    ("interleaved_zero_bubble", 4),
    ("zbv", 2),
]


def pipelined(schedule: str, per_rank: int, pp: int, count: int) -> ResolvedLayout:
    return ResolvedLayout(global_batch=count, pp=pp, schedule=schedule, stages_per_rank=per_rank)


def legal_counts(schedule: str, per_rank: int, pp: int, highest: int) -> list[int]:
    run = run_with({"model.n_layers": 64}, schedule=schedule, stages_per_rank=per_rank, pp=pp)
    return [
        n for n in range(1, highest + 1) if not reasons_against(bind(run), pipelined(schedule, per_rank, pp, n), pp)
    ]


# --- against a real run ------------------------------------------------------------------------------------------------

REAL = [
    *(pipelined(schedule, 1, 4, count) for schedule in ("gpipe", "1f1b") for count in (4, 7, 8)),
    pipelined("gpipe", 1, 4, 2),
    *(pipelined("interleaved_1f1b", 2, 4, count) for count in (3, 4, 8, 10)),
    *(pipelined("interleaved_zero_bubble", 2, 4, count) for count in (2, 4, 8)),
    *(pipelined("zbv", 2, 4, count) for count in (1, 5, 9)),
]


def computed(layout: ResolvedLayout, made: Groups) -> list[Action]:
    """What the stages of this rank are asked to compute in one step, in order."""
    order: list[Action] = []
    run = whole_run({"model.n_layers": 8})
    applied = laid_out(run, layout, made)
    forward, whole, weight = (
        getattr(PipelineStage, name)
        for name in ("forward_one_chunk", "backward_one_chunk", "backward_weight_one_chunk")
    )

    def recorded_forward(stage: Any, number: int, *args: Any, **rest: Any) -> Any:
        order.append(Action(Pass.FORWARD, stage.stage_index, number))
        return forward(stage, number, *args, **rest)

    def recorded_backward(stage: Any, number: int, *args: Any, full_backward: bool = True, **rest: Any) -> Any:
        order.append(Action(Pass.BACKWARD if full_backward else Pass.INPUT, stage.stage_index, number))
        return whole(stage, number, *args, full_backward=full_backward, **rest)

    def recorded_weight(stage: Any, number: int, *args: Any, **rest: Any) -> Any:
        order.append(Action(Pass.WEIGHT, stage.stage_index, number))
        return weight(stage, number, *args, **rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PipelineStage, "forward_one_chunk", recorded_forward)
        patch.setattr(PipelineStage, "backward_one_chunk", recorded_backward)
        patch.setattr(PipelineStage, "backward_weight_one_chunk", recorded_weight)
        backward(run, applied)
    return order


def compute_all() -> list[list[Action]]:
    made: Groups = {}
    return [computed(layout, made) for layout in REAL]


def test_tables_are_what_real_ranks_compute() -> None:
    found = run_ranks(compute_all, 4)
    for number, layout in enumerate(REAL):
        table = table_of(layout)
        for rank in range(layout.pp):
            assert found[rank][number] == table.actions(rank), f"{layout}, rank {rank}"


# --- completeness ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("schedule", "per_rank"), SCHEDULES)
@pytest.mark.parametrize("pp", [2, 3, 8])
def test_every_stage_computes_every_microbatch_once_each_way(schedule: str, per_rank: int, pp: int) -> None:
    for count in legal_counts(schedule, per_rank, pp, 2 * pp + 3):
        table = schedule_table(schedule, pp, per_rank, count)
        layout = pipelined(schedule, per_rank, pp, count)
        assert table.rank_of_stage.tolist() == [rank_of_stage(layout, stage) for stage in range(pp * per_rank)]
        assert table.stages_of_rank.tolist() == [stages_of_rank(layout, rank) for rank in range(pp)]
        done = Counter(action for rank in range(pp) for action in table.actions(rank))
        kinds = (Pass.FORWARD, Pass.INPUT, Pass.WEIGHT) if table.split_backward else (Pass.FORWARD, Pass.BACKWARD)
        assert table.split_backward == (schedule in ("interleaved_zero_bubble", "zbv"))
        wanted = [Action(kind, stage, n) for kind in kinds for stage in range(pp * per_rank) for n in range(count)]
        assert done == Counter(wanted)


def test_every_pipelined_layout_of_eight_ranks_has_a_table() -> None:
    layouts = {
        (layout.schedule, layout.pp, layout.stages_per_rank, layout.accumulation)
        for layout in every_layout(bind(run_with()), 8)
    }
    assert any(pp == 1 for _, pp, *_ in layouts) and any(pp == 4 for _, pp, *_ in layouts)
    for schedule, pp, per_rank, count in layouts:
        table = schedule_table(schedule, pp, per_rank, count)
        assert peak_in_flight(table).tolist() == in_flight(schedule, pp, per_rank, count, np.arange(pp)).tolist()


SECOND_RANK = [("F", 1, 0), ("F", 3, 0), ("B", 3, 0), ("B", 1, 0)]


@pytest.mark.parametrize(
    ("first_rank", "second_rank", "complaint"),
    [
        ([("F", 0, 0), ("F", 2, 0), ("B", 2, 0), ("B", 2, 0)], SECOND_RANK, "missing"),
        ([("F", 0, 0), ("F", 2, 0), ("F", 2, 0), ("B", 0, 0)], SECOND_RANK, "actions by kind"),
        ([("F", 0, 0), ("B", 2, 0), ("F", 2, 0), ("B", 0, 0)], SECOND_RANK, "out of order"),
        ([("F", 0, 0), ("F", 2, 0), ("B", 2, 0), ("B", 1, 0)], [*SECOND_RANK[:3], ("B", 0, 0)], "several ranks"),
    ],
)
def test_a_table_that_cannot_be_is_noticed(
    first_rank: Any, second_rank: Any, complaint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "phalanx.planner.schedule.schedule_table.schedule_actions", lambda *_: [first_rank, second_rank]
    )
    with pytest.raises(AssertionError, match=complaint):
        schedule_table.__wrapped__("zbv", 2, 2, 1)


# --- micro-batches in flight -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("schedule", "per_rank", "first_middle_last"),
    [
        ("gpipe", 1, [64, 64, 64]),
        ("1f1b", 1, [16, 8, 1]),
        ("interleaved_1f1b", 2, [47, 31, 17]),
        ("interleaved_1f1b", 4, [79, 63, 49]),
        ("interleaved_zero_bubble", 2, [32, 32, 32]),
        ("zbv", 2, [32, 32, 32]),
    ],
)
def test_sixteen_ranks_with_64_microbatches(schedule: str, per_rank: int, first_middle_last: list[int]) -> None:
    table = schedule_table(schedule, 16, per_rank, 64)
    assert peak_in_flight(table)[[0, 8, 15]].tolist() == first_middle_last


@pytest.mark.parametrize(("schedule", "per_rank"), SCHEDULES)
@pytest.mark.parametrize("pp", [2, 3, 5, 8])
def test_closed_forms_count_what_is_in_flight(schedule: str, per_rank: int, pp: int) -> None:
    counts = np.array(legal_counts(schedule, per_rank, pp, 3 * pp + 2))
    formula = in_flight(schedule, pp, per_rank, counts[:, None], np.arange(pp))
    tables = [peak_in_flight(schedule_table(schedule, pp, per_rank, int(count))) for count in counts]
    assert formula.tolist() == np.stack(tables).tolist()


@pytest.mark.parametrize(
    ("schedule", "of_pytorch"),
    [("interleaved_1f1b", ScheduleInterleaved1F1B), ("interleaved_zero_bubble", ScheduleInterleavedZeroBubble)],
)
@pytest.mark.parametrize(("pp", "per_rank"), [(2, 2), (3, 4), (4, 2), (8, 3)])
def test_the_interleaved_table_is_that_of_pytorch(
    schedule: str, of_pytorch: type[ScheduleInterleaved1F1B | ScheduleInterleavedZeroBubble], pp: int, per_rank: int
) -> None:
    for count in legal_counts(schedule, per_rank, pp, 4 * pp):
        table = schedule_table(schedule, pp, per_rank, count)
        found = schedule_actions(of_pytorch, pp, per_rank, count)
        expected = np.asarray([[(LETTERS[kind], stage, number) for kind, stage, number in rank] for rank in found])
        assert np.array_equal(np.stack([table.kind, table.stage, table.microbatch], axis=2), expected), count


def test_1f1b_with_fewer_microbatches_than_stages() -> None:
    table = schedule_table("1f1b", 8, 1, 3)
    assert table.actions(6)[:4] == [Action(Pass(kind), 6, number) for kind, number in ((0, 0), (0, 1), (1, 0), (0, 2))]
    assert peak_in_flight(table).tolist() == in_flight("1f1b", 8, 1, 3, np.arange(8)).tolist() == [3] * 6 + [2, 1]


def test_activations_are_weighed_by_stage_at_the_same_time() -> None:
    table = schedule_table("interleaved_1f1b", 2, 2, 4)
    # Rank 1: F1,0 F1,1 F3,0 B3,0 F3,1 B3,1 F1,2 B1,0 F1,3 B1,1 F3,2 B3,2 F3,3 B3,3 B1,2 B1,3.
    assert microbatches_in_flight(table)[1].tolist()[:7] == [[1, 0], [2, 0], [2, 1], [2, 1], [2, 1], [2, 1], [3, 0]]
    assert peak_activations(table, [1.0, 1.0, 1.0, 1.0]).tolist() == [5.0, 3.0]
    assert peak_activations(table, [0.0, 10.0, 0.0, 1.0])[1] == 30.0
    assert peak_activations(table, [0.0, 1.0, 0.0, 10.0])[1] == 12.0


def test_activations_are_held_until_the_gradients_of_weights() -> None:
    table = schedule_table("interleaved_zero_bubble", 2, 2, 4)
    for rank in range(2):
        held: Counter[tuple[int, int]] = Counter()
        for action, counts in zip(table.actions(rank), microbatches_in_flight(table)[rank], strict=True):
            held[action.stage, action.microbatch] += action.kind == Pass.FORWARD
            assert counts.tolist() == [sum(held[stage, n] for n in range(4)) for stage in table.stages_of_rank[rank]]
            held[action.stage, action.microbatch] -= action.kind == Pass.WEIGHT
