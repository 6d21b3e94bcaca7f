"""The replayed state of a rank is that of PyTorch's own order of actions, and no row is left out that may be the most."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from torch.distributed.pipelining import schedules as torch_schedules

from phalanx.layout.spec import SCHEDULES, ZERO_BUBBLE
from phalanx.planner.memory import pipelined
from phalanx.planner.memory.pipelined import candidates_of_each_rank, cut_to_rounds, pipeline_candidates
from phalanx.planner.memory.ranks import ranks_that_may_be_worst
from phalanx.planner.memory.replay import COLUMN, COUNTS, Pipeline, Replay
from phalanx.planner.schedule.schedule_table import Pass, schedule_table
from phalanx.torch_compat.pipeline_stage import keep_gathered
from published.in_flight import peak_in_flight

SHAPES = [(2, 2, 4), (2, 5, 8), (4, 3, 8), (3, 4, 3), (4, 2, 12)]
COSTS = (0.3, 1.7)
INTERLEAVED = np.asarray(SCHEDULES.index("interleaved_1f1b"))


def pipeline(pp: int, stages_per_rank: int, microbatches: int, schedule: str = "interleaved_1f1b") -> Pipeline:
    """One over 40 layers."""
    return Pipeline(schedule, pp, stages_per_rank, microbatches, 40, COSTS, 1, 1)


@pytest.mark.parametrize("freed", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_stages_are_gathered_when_pytorch_gathers_them(shape: tuple[int, int, int], freed: bool) -> None:
    ranks = np.arange(shape[0])
    replay = Replay(pipeline(*shape), ranks, np.full(len(ranks), freed))
    table = schedule_table("interleaved_1f1b", *shape)
    for rank in ranks.tolist():
        seen = _gathered_before_each_action(table.actions(rank), freed)
        mine = replay.stages.index[rank]
        assert [set(mine[active]) for active in replay.active[rank]] == seen


def _gathered_before_each_action(actions: list[Any], freed: bool) -> list[set[int]]:
    kinds = {Pass.FORWARD: torch_schedules.FORWARD, Pass.BACKWARD: torch_schedules.FULL_BACKWARD}
    plain = [torch_schedules._Action(a.stage, kinds[a.kind], a.microbatch) for a in actions]
    lowered = torch_schedules._add_unshard_reshard(plain)
    gathered: set[int] = set()
    seen = []
    for action in lowered if freed else keep_gathered(lowered):
        name = action.computation_type.name
        if name == "UNSHARD":
            gathered.add(action.stage_index)
        elif name == "RESHARD":
            gathered.remove(action.stage_index)
        else:
            seen.append(set(gathered))
    return seen


def test_parameters_stay_after_a_backward_pass_and_go_after_a_forward_pass() -> None:
    replay = Replay(pipeline(2, 2, 4), np.arange(2), np.full(2, True))
    for rank in range(2):
        whole: dict[int, bool] = {}
        for place in range(len(replay.time)):
            for stage in range(2):
                if not replay.active[rank, place, stage]:
                    whole.pop(stage, None)
                expected = replay.active[rank, place, stage] and whole.get(stage, True)
                assert replay.gathered[rank, place, stage] == expected
            whole[int(replay.own[rank, place].argmax())] = bool(replay.backward[rank, place])


def random_weights(random: np.random.Generator) -> np.ndarray[Any, Any]:
    """Bytes of one of each count: more of anything is more, and a whole gradient more than a part."""
    one = random.exponential(size=len(COUNTS)) * random.choice([0.0, 1.0, 20.0], size=len(COUNTS))
    for name in ("blocks", "embedding", "head"):
        one[COLUMN[f"whole_{name}"]] += one[COLUMN[f"shared_{name}"]]
    message, kept = one[COLUMN["messages"]], one[COLUMN["blocks_kept"]]
    last = random.integers(2)
    one[COLUMN["sent"]], one[COLUMN["sent_lately"]] = message * last, message * (1 - last)
    one[COLUMN["received"]] = message - kept * random.random()
    return one


@pytest.mark.parametrize("freed", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_no_row_is_left_out_that_may_be_the_most(
    shape: tuple[int, int, int], freed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    random = np.random.default_rng(0)
    each = candidates_of_each_rank(pipeline(*shape), freed)
    together = pipeline_candidates(pipeline(*shape))[freed]
    monkeypatch.setattr(pipelined, "_COMPARED", 0)
    every = candidates_of_each_rank.__wrapped__(pipeline(*shape), freed)
    assert sum(len(x.counts) for x in every) > 1.5 * sum(len(x.counts) for x in each)
    for _ in range(20):
        one = random_weights(random)
        for some, all_rows in zip(each, every, strict=True):
            assert (some.counts @ one).max() == pytest.approx((all_rows.counts @ one).max(), rel=1e-12)
        assert (together.counts @ one).max() == pytest.approx(max((x.counts @ one).max() for x in every), rel=1e-12)


@pytest.mark.parametrize("freed", [True, False])
@pytest.mark.parametrize(("pp", "each", "count"), [(2, 3, 12), (4, 2, 24), (5, 2, 24)])
def test_further_rounds_hold_no_more(pp: int, each: int, count: int, freed: bool) -> None:
    cut = int(cut_to_rounds(INTERLEAVED, np.asarray(pp), np.asarray(count)))
    assert cut < count
    few, many = (candidates_of_each_rank(pipeline(pp, each, number), freed) for number in (cut, count))
    random = np.random.default_rng(1)
    for _ in range(20):
        one = random_weights(random)
        # All that is ever sent is held to the end of a step with gloo, and counted by micro-batch.
        one[COLUMN["sent_lately"]] += one[COLUMN["sent"]]
        one[COLUMN["sent"]] = one[COLUMN["later_sent"]] = 0
        for some, more in zip(few, many, strict=True):
            assert (some.counts @ one).max() == pytest.approx((more.counts @ one).max(), rel=1e-12)


def test_all_that_was_sent_grows_by_what_each_further_micro_batch_sends() -> None:
    pp, each, count = 3, 2, 21
    cut = int(cut_to_rounds(INTERLEAVED, np.asarray(pp), np.asarray(count)))
    few, many = (candidates_of_each_rank(pipeline(pp, each, number), False)[1].counts for number in (cut, count))
    sent = few[:, COLUMN["sent"]] + (count - cut) * few[:, COLUMN["later_sent"]]
    assert sent.max() == many[:, COLUMN["sent"]].max()


def test_ranks_with_the_same_layers_and_ends_are_looked_at_once() -> None:
    assert ranks_that_may_be_worst("interleaved_1f1b", 8, 2, 32, (0.0, 0.0)) == [0, 1, 7]
    ranks = ranks_that_may_be_worst("interleaved_1f1b", 8, 2, 40, COSTS)
    assert ranks[0] == 0 and ranks[-1] == 7 and 1 < len(ranks) < 8
    assert ranks_that_may_be_worst("zbv", 8, 2, 40, COSTS) == list(range(8))


@pytest.mark.parametrize(
    ("schedule", "stages_per_rank"),
    [("gpipe", 1), ("1f1b", 1), ("interleaved_1f1b", 2), ("interleaved_1f1b", 3), ("interleaved_zero_bubble", 2)],
)
@pytest.mark.parametrize("microbatches", [8, 16])
def test_micro_batches_in_flight_are_those_of_the_table(schedule: str, stages_per_rank: int, microbatches: int) -> None:
    table = schedule_table(schedule, 4, stages_per_rank, microbatches)
    found = candidates_of_each_rank(pipeline(4, stages_per_rank, microbatches, schedule), False)
    # While a forward pass runs, its own micro-batch is in flight too.
    assert [each.counts[:, COLUMN["stages_kept"]].max() for each in found] == peak_in_flight(table).tolist()


@pytest.mark.parametrize("schedule", ZERO_BUBBLE)
def test_split_backward_passes_wait_for_weights_as_in_the_table(schedule: str) -> None:
    """Blocks whose input has its gradient and whose weights have not, by a count over the table."""
    shape = (4, 2, 16)
    table = schedule_table(schedule, *shape)
    replay = Replay(pipeline(*shape, schedule), np.arange(4), np.full(4, False))
    layers = replay.stages.layers
    for rank in range(4):
        own = table.stage[rank][:, None] == table.stages_of_rank[rank]
        # The first stage computes both at once.
        later = own & (table.stages_of_rank[rank] > 0)
        change = (table.kind[rank] == Pass.INPUT).astype(int) - (table.kind[rank] == Pass.WEIGHT)
        waiting = ((np.cumsum(change[:, None] * later, axis=0) - change[:, None] * later) * layers[rank]).sum(1)
        assert replay.before[rank, :, COLUMN["waiting"]].tolist() == waiting.tolist()
