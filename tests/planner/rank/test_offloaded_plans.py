"""Plans of what lies in host memory: time and memory, what a node's host holds, and when it is planned at all."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from layout_runs import refusal, run_with
from phalanx.config.load import load_run
from phalanx.errors import ConfigError
from phalanx.families.registry import bind
from phalanx.hardware.machine import Machine, load_machine
from phalanx.layout.resolve import resolve_layout
from phalanx.layout.spec import OFFLOADS, Recompute, ResolvedLayout
from phalanx.planner.plan.make_plan import NothingFits, Wishes, make_plan
from phalanx.planner.plan.remedies import find_remedies
from phalanx.planner.rank.cost_models import CostModels
from phalanx.planner.rank.enumeration import Limits, enumerate_layouts
from phalanx.planner.rank.ranking import Planner, Task, bound_memory
from phalanx.planner.time.host_copies import LINK_SHARE
from phalanx.planner.time.profile import default_profile
from phalanx.planner.trace.traced_model import TracedModel

LARGE = {
    "model.n_layers": 8, "model.d_model": 2048, "model.n_heads": 16, "model.d_ff": 8192, "model.vocab_size": 32768,
    "model.max_positions": 1024, "data.sequence_length": 1024,
}  # fmt: skip
LAYOUT = ResolvedLayout(global_batch=8, dp_shard=8)
OFFLOADED = replace(LAYOUT, offload_optimizer=True)


def models_of(machine: Machine) -> CostModels:
    return CostModels(machine, default_profile(machine.node.device))


def with_host(gb: float) -> Machine:
    """Nodes of eight H100 with so little host memory."""
    machine = load_machine("dgx-h100")
    host = machine.node.host
    assert host is not None
    node = machine.node.model_copy(update={"host": host.model_copy(update={"memory_gb": gb})})
    return machine.model_copy(update={"node": node})


def test_state_in_host_memory_leaves_the_device_and_makes_the_update_longer() -> None:
    model, models = bind(run_with(LARGE, global_batch=8), TracedModel), models_of(load_machine("dgx-h100"))
    here, there = (models.memory(model, layout.table) for layout in (LAYOUT, OFFLOADED))
    state = 8 * model.parameter_count() / 8
    assert there.host[0] == pytest.approx(state, rel=0.01) and here.host[0] == 0
    # Two buckets of parameters may still have theirs on the device.
    assert here.peak[0] - there.peak[0] == pytest.approx(state, rel=0.05)
    plain, longer = (models.times(model, layout.table) for layout in (LAYOUT, OFFLOADED))
    more = {name: float(longer.causes[name][0] - plain.causes[name][0]) for name in plain.causes}
    bucket = 2 * 2**27
    assert more.pop("optimizer") == pytest.approx((state + bucket) / (64e9 * LINK_SHARE), rel=0.01)
    assert not any(more.values())
    bounds = [float(bound_memory(model, layout.table)[0]) for layout in (LAYOUT, OFFLOADED)]
    assert bounds[0] - bounds[1] == pytest.approx(state, rel=0.01) and bounds[1] <= there.peak[0]


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_activations_in_host_memory_leave_the_device_and_show_what_passes_do_not_hide(recompute: Recompute) -> None:
    model, models = bind(run_with(LARGE, global_batch=64), TracedModel), models_of(load_machine("dgx-h100"))
    here = ResolvedLayout(global_batch=64, dp_shard=8, microbatch=8, recompute=recompute)
    there = replace(here, offload_activations=True)
    before, after = (models.memory(model, layout.table) for layout in (here, there))
    gone = before.peak[0] - after.peak[0]
    # All but the last block's leave. Where most is held two blocks may still have theirs, and something else may be more.
    assert before.host[0] == 0 and 0.5 * after.host[0] < gone <= after.host[0]
    plain, longer = (models.times(model, layout.table) for layout in (here, there))
    more = {name: float(longer.causes[name][0] - plain.causes[name][0]) for name in plain.causes}
    shown, copied = more.pop("offloading exposed"), 2 * after.host[0] / (64e9 * LINK_SHARE)
    assert not any(more.values())
    assert (0.5 < shown / copied < 1.0) if recompute == "none" else (0.0 < shown / copied < 0.2)
    bounds = [float(bound_memory(model, layout.table)[0]) for layout in (here, there)]
    assert bounds[1] <= bounds[0] and bounds[1] <= after.peak[0]


def test_pipelines_leave_less_in_flight_and_take_longer_to_fill() -> None:
    model, models = bind(run_with(LARGE, global_batch=64), TracedModel), models_of(load_machine("dgx-h100"))
    piped = ResolvedLayout(global_batch=64, pp=4, dp_shard=2, microbatch=2, offload_activations=True)
    plain = replace(piped, offload_activations=False)
    before, after = (models.memory(model, layout.table) for layout in (plain, piped))
    # Four micro-batches are in flight on the first rank, with one of two blocks each.
    assert before.peak[0] - after.peak[0] == pytest.approx(0.75 * after.host[0], rel=0.35)
    alone = replace(piped, pp=1, dp_shard=8)
    shown = [float(models.times(model, layout.table).causes["offloading exposed"][0]) for layout in (piped, alone)]
    assert shown[0] > 0.0 and shown[1] > 0.0


def test_a_host_that_is_too_small_fits_nothing_and_says_so() -> None:
    run = run_with(LARGE, global_batch=8, offload_optimizer=True)
    model = bind(run, TracedModel)
    assert models_of(with_host(2000)).memory(model, OFFLOADED.table).p_fits[0] > 0.9
    small = models_of(with_host(5))
    assert small.memory(model, OFFLOADED.table).p_fits[0] == 0
    assert small.memory(model, LAYOUT.table).p_fits[0] > 0.9
    planner = Planner(small.machine, small)
    reason = r"keeps \d+ GB in the host memory of a node, and 80% of 5 GB .*offload_optimizer=false"
    with pytest.raises(NothingFits, match=reason):
        make_plan(planner, Task(model, 8, {"dp_shard": 8, "dp_replicate": 1}), Wishes())


def test_a_machine_of_whose_host_nobody_says_anything_cannot_be_planned_for() -> None:
    model, models = bind(run_with(LARGE, global_batch=8), TracedModel), models_of(load_machine("aac-mi250"))
    for ask in (models.memory, models.times):
        assert ask(model, LAYOUT.table) is not None
        with pytest.raises(ConfigError, match=r"description of aac-mi250 says nothing; add node.host"):
            ask(model, OFFLOADED.table)


@pytest.mark.parametrize("name", OFFLOADS)
@pytest.mark.parametrize("offloaded", [False, True])
def test_layouts_are_listed_as_the_run_file_says_unless_both_are_asked_for(offloaded: bool, name: str) -> None:
    model = bind(run_with(global_batch=8, **{name: offloaded}))

    def listed(**how: Any) -> set[bool]:
        return set(getattr(enumerate_layouts(model, 4, **how), name))

    assert listed() == {offloaded}
    assert listed(fixed={name: True}) == {True}
    assert listed(limits=Limits(**{name: True})) == {False, True}


def test_offloading_is_among_the_remedies_where_memory_ran_out() -> None:
    model = bind(run_with(LARGE, global_batch=8, recompute="full"), TracedModel)
    found = find_remedies(model, replace(LAYOUT, recompute="full"), "H100 SXM")
    (offloading,) = [remedy for remedy in found if remedy.words == "offload_optimizer=true"]
    assert offloading.memory < 0.9 and offloading.seconds > 1.0


@pytest.mark.parametrize(
    ("words", "reason", "nearest"),
    [
        (
            {"schedule": "zbv", "pp": 2},
            "layout.schedule=zbv reads activations twice",
            "offload_activations=false, or schedule=",
        ),
        (
            {"pp": 4, "schedule": "gpipe"},
            "which are all with 4 stages and model.n_layers=4",
            "offload_activations=false",
        ),
    ],
    ids=["read twice", "one block a stage"],
)
def test_activations_that_cannot_leave_are_refused(words: dict[str, Any], reason: str, nearest: str) -> None:
    layers = {"model.n_layers": 8 if words["pp"] == 2 else 4}
    lines = refusal(run_with(layers, offload_activations=True, **words), 4)
    assert "layout.offload_activations=true" in " ".join(lines) and reason in lines[0]
    assert lines[1].startswith(f"nearest legal: {nearest}")


def test_forces_are_differentiated_twice() -> None:
    run = load_run(Path("examples/materials-quickstart.yaml"), ["layout.offload_activations=true"])
    with pytest.raises(
        ConfigError, match=r"offload_activations=true: models of family materials read activations more"
    ):
        resolve_layout(bind(run), 1)


def test_muon_works_on_many_parameters_together() -> None:
    lines = refusal(run_with({"optimizer.name": "muon"}, offload_optimizer=True), 1)
    assert "layout.offload_optimizer=true" in lines[0] and "optimizer.name=muon" in lines[0]
    assert lines[1] == "nearest legal: offload_optimizer=false, or optimizer.name=adamw"
