"""Published figures of Frontier and of MI250s: the shipped profiles give them within the bars of docs/guides/planning.md."""

from __future__ import annotations

from dataclasses import replace

import pytest

from phalanx.config.model import LanguageModel
from phalanx.config.presets import load_preset
from phalanx.hardware.machine import load_machine
from phalanx.layout.spec import LayoutTable, ResolvedLayout
from phalanx.planner.measured.measured_groups import System
from phalanx.planner.time.profile import default_profile, load_profile
from phalanx.planner.time.step_parts import steps_of
from phalanx.planner.trace.traced_model import Setting
from published.flops import megatron_hardware
from published.frameworks import framework_of
from published.groups import PublishedGroup, steps_as_sent, with_whole_logits
from published.studies import Study, calibrate_to_studies, predicted, studies

PEAK = 191.5
"""TFLOP/s of a GCD, which shares of the peak are of."""


@pytest.mark.parametrize("study", studies("frontier"), ids=lambda study: study.row)
def test_frontier_is_within_three_points(study: Study) -> None:
    found = predicted(study, load_profile("frontier"))
    points = 100 * (found - study.value) * (1.0 if study.relative else 1 / PEAK)
    assert abs(points) <= 3.0


@pytest.mark.parametrize("study", studies("aac-mi250"), ids=lambda study: study.row)
def test_mpt_on_mi250_is_within_three_percent(study: Study) -> None:
    assert predicted(study, load_profile("aac-mi250")) == pytest.approx(study.value, rel=0.03)


@pytest.mark.parametrize("name", ["frontier", "aac-mi250"])
def test_figures_that_are_judged_were_not_fitted(name: str) -> None:
    rows = (load_profile(name).fitted or {})["rows"]
    assert rows == [study.row for study in studies(name) if study.fitted]
    assert any(not study.fitted for study in studies(name))


@pytest.mark.parametrize("name", ["frontier", "aac-mi250"])
def test_a_profile_is_judged_by_rates_alone(name: str) -> None:
    # A share of throughput, whose errors cancel, would say that times are known well.
    named = load_profile(name)
    rates = [study for study in studies(name) if not study.fitted and not study.relative]
    errors = [abs(predicted(study, named) / study.value - 1) for study in rates]
    fitted = named.fitted or {}
    assert fitted["held_out"] == len(rates) == 1
    assert fitted["held_out_median_error"] == pytest.approx(errors[0], abs=2e-4)


def test_the_shipped_profile_is_what_fitting_gives() -> None:
    again, shipped = calibrate_to_studies("aac-mi250").profile, load_profile("aac-mi250").profile
    assert again.matmul_flop_s == pytest.approx(shipped.matmul_flop_s, rel=1e-3)


def test_a_slower_ramp_costs_strong_scaling_and_not_weak() -> None:
    strong, weak = (
        next(study for study in studies("frontier") if study.row == f"frontier-dash-000{number}") for number in (4, 6)
    )
    named = load_profile("frontier")
    plain = replace(named, profile=replace(named.profile, pipeline_ramp=1.0))
    assert predicted(strong, plain) > predicted(strong, named) + 0.03
    assert predicted(weak, plain) == pytest.approx(predicted(weak, named), abs=0.01)


def test_lumi_ran_with_a_stage_for_every_layer() -> None:
    """140B, 161.2 TFLOP/s a module of two GCDs on 48 nodes, 80% of that on 768: with full recompute, counted as
    Megatron-DeepSpeed does. Of 56 layers over 8 ranks Megatron makes 1 or 7 stages a rank, and 1 does not explain it."""
    model, length = load_preset("lumi-140b").model(), 5120
    assert isinstance(model, LanguageModel)
    framework = framework_of("Megatron-DeepSpeed", "flash2", True)
    assert framework is not None
    shared = {"global_batch": 768, "tp": 8, "pp": 8, "zero": 1}
    layouts = [
        ResolvedLayout(**shared, dp_shard=shards, schedule=schedule, stages_per_rank=stages)
        for schedule, stages in (("interleaved_1f1b", 7), ("1f1b", 1))
        for shards in (6, 96)
    ]
    candidates = LayoutTable.from_rows([replace(layout, recompute="full") for layout in layouts])
    machine = load_machine("lumi")
    setting = with_whole_logits(Setting(model, length, attention="flash"), framework)
    steps = steps_as_sent(steps_of(setting, candidates, machine, framework), framework)
    group = PublishedGroup(System("lumi", machine), framework, (), steps)
    seconds = group.step_times(default_profile("MI250X GCD")).total
    tokens = 768 * length / seconds / candidates.world_size
    rate = 2 * tokens[0] * megatron_hardware(model, length) / 1e12
    assert rate == pytest.approx(161.2, rel=0.05)
    assert tokens[1] / tokens[0] == pytest.approx(0.80, rel=0.05)
    assert tokens[3] / tokens[2] < 0.6
