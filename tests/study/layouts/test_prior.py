"""What the planner expects of points before anything is measured."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from layout_runs import run_with
from phalanx.config.studies import Search, Tunable
from phalanx.families.language.config import LanguageRun
from phalanx.families.registry import bind
from phalanx.hardware.machine import load_machine
from phalanx.layout.spec import LayoutTable
from phalanx.planner.rank.cost_models import CostModels
from phalanx.planner.rank.enumeration import Limits
from phalanx.planner.rank.ranking import Planner, Task
from phalanx.planner.time.profile import default_profile
from phalanx.planner.trace.traced_model import TracedModel
from phalanx.study.layouts.prior import planned_space

MACHINE = load_machine("h200-x4")
MODELS = CostModels(MACHINE, default_profile(MACHINE.node.device))
PLANNER = Planner(MACHINE, MODELS, limits=Limits(2, 1, 8))
WIDE = {"model.n_layers": 8, "model.d_model": 1024, "model.n_heads": 8, "model.n_kv_heads": 8, "model.d_ff": 4096}
RUN, GROUPED = (run_with(WIDE, global_batch=16, gather_blocks=blocks) for blocks in (1, 4))
KNOB = "layout.gather_blocks"


def searched(knobs: dict[str, Tunable]) -> Search:
    return Search(layout={"recompute": ["none"], "microbatch": [2], "pp": [1]}, knobs=knobs)


def test_a_knob_is_planned_at_each_of_its_values() -> None:
    knobs = {KNOB: Tunable(values=[1, 4], when="zero == 3 and dp_shard > 1"), "data.prefetch": Tunable(values=[0, 2])}
    space, prior = planned_space(PLANNER, Task(bind(RUN, TracedModel), 4), searched(knobs))
    grouped = 0
    for point in range(len(space)):
        plain = space.find(
            {**space.values(point), "data.prefetch": 0, **({KNOB: 1} if KNOB in space.values(point) else {})}
        )
        one = space.layouts.take([int(space.layout_of[point])])
        run = GROUPED if space.values(point).get(KNOB) == 4 else RUN
        for found, of in ((prior.seconds, _seconds), (prior.peak, _bytes)):
            np.testing.assert_allclose(found[point] / found[plain], of(run, one) / of(RUN, one))
        grouped += prior.peak[point] > prior.peak[plain] and prior.margin[point] < prior.margin[plain]
    assert grouped, "four blocks gathered at once take more memory"


def test_of_a_value_that_the_run_file_cannot_have_nothing_is_expected() -> None:
    space, prior = planned_space(PLANNER, Task(bind(RUN, TracedModel), 4), searched({KNOB: Tunable(values=[1, -3])}))
    first, second = (space.find({**space.values(0), KNOB: value}) for value in (1, -3))
    assert first is not None and second is not None
    assert prior.seconds[first] == prior.seconds[second] and prior.margin[first] == prior.margin[second]


def test_what_was_measured_beside_the_tensors_leaves_less_room() -> None:
    named = replace(default_profile(MACHINE.node.device), beside={"context": 40e9, "communicator": 1e9})
    narrow = replace(PLANNER, models=CostModels(MACHINE, named))
    (space, plain), (same, less) = (
        planned_space(one, Task(bind(RUN, TracedModel), 4), searched({})) for one in (PLANNER, narrow)
    )
    assert len(space) == len(same)
    assert np.all(less.margin < plain.margin - 0.1)


def test_a_search_chooses_in_how_many_chunks_tokens_travel() -> None:
    run = run_with(WIDE | {"model.experts": {"count": 4, "active": 2}, "training.compile": False}, global_batch=16)
    task, layout = Task(bind(run, TracedModel), 4), {"recompute": ["none"], "microbatch": [2], "pp": [1], "ep": [1, 4]}
    found, chunked = (
        planned_space(PLANNER, task, Search(layout=layout | more))[0] for more in ({}, {"ep_chunks": [2, 4]})
    )
    both = {(found.values(point)["ep"], found.values(point)["ep_chunks"]) for point in range(len(found))}
    assert both == {(1, 1), (4, 1), (4, 2)}
    assert {(chunked.values(point)["ep"], chunked.values(point)["ep_chunks"]) for point in range(len(chunked))} == {
        (4, 2)
    }


def _seconds(run: LanguageRun, one: LayoutTable) -> float:
    return float(MODELS.bound_times(bind(run, TracedModel), one).total[0])


def _bytes(run: LanguageRun, one: LayoutTable) -> float:
    return float(MODELS.memory(bind(run, TracedModel), one).peak[0])
