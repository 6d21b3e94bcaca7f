"""Forecasters are planned for like language models: samples for tokens, Hybrid-STOP's two ways to gather, its break-even."""

from __future__ import annotations

import numpy as np
import pytest

from phalanx.cli.planning.plan_text import write_plan_lines
from phalanx.config.load import parse_run
from phalanx.families.registry import bind
from phalanx.families.weather.config import WeatherRun
from phalanx.families.weather.sizes import model_flops_per_sample
from phalanx.hardware.machine import load_machine
from phalanx.layout.resolve import resolve_layout
from phalanx.planner.plan.make_plan import Plan, Wishes, make_plan
from phalanx.planner.plan.plan_summary import summarise_plan
from phalanx.planner.rank.cost_models import CostModels
from phalanx.planner.rank.enumeration import Limits, write_planned_run
from phalanx.planner.rank.ranking import Planner, Task
from phalanx.planner.time.profile import profile_for
from phalanx.planner.trace.traced_model import TracedModel
from phalanx.report.plan_page import render_plan

MACHINE = load_machine("h200-x4")
NAMES = ["temperature_850", "geopotential_500", "2m_temperature"]


def run_of(width: int = 2048) -> WeatherRun:
    return WeatherRun.model_validate(
        {
            "model": {
                "family": "weather", "n_layers": 4, "d_model": width, "n_heads": 16, "n_lat": 32, "n_lon": 64,
                "patch_size": 2, "variables": NAMES, "qk_norm": True,
            },
            "data": {
                "sources": ["nowhere"], "inputs": NAMES, "lead_hours": 24,
                "splits": {"train": {"first": "2000", "last": "2001"}},
            },
            "layout": {"global_batch": 16},
            "optimizer": {"lr": 0.01},
            "training": {"steps": 1000, "compile": False},
        }
    )  # fmt: skip


@pytest.fixture(scope="module")
def planner() -> Planner:
    return Planner(MACHINE, CostModels(MACHINE, profile_for(MACHINE)), limits=Limits(microbatch=4, stages_per_rank=2))


@pytest.fixture(scope="module")
def made(planner: Planner) -> Plan:
    task = Task(bind(run_of(), TracedModel), 4, {"pp": 1})
    return make_plan(planner, task, Wishes(why=("gather=stream,tp=2", "cp=2"), scale=(2, 4), amount=1_000_000))


def test_words_are_of_samples(made: Plan) -> None:
    lines = list(write_plan_lines(made, 200))
    text = "\n".join(lines)
    assert lines[0].startswith("model on 4 x H200 (1 node of h200-x4), global batch 16 samples, with pp=1")
    assert "1M samples: 62,500 steps" in text and "samples/s" in text
    assert "tokens" not in text
    assert "FSDP or Hybrid-STOP: tp x dp_shard receives fewer bytes" in text
    assert "FSDP or Hybrid-STOP" in render_plan(made, "")


def test_facts(made: Plan) -> None:
    facts, task = summarise_plan(made), made.task
    best = facts["layouts"][0]
    assert (facts["unit"], facts["samples_per_step"]) == ("samples", 16)
    assert best["samples_per_s_per_device"] == pytest.approx(16 / best["step_s"] / 4)
    assert task.device_throughput(best["step_s"]) == pytest.approx(best["samples_per_s_per_device"])
    flops = model_flops_per_sample(task.run.model)  # type: ignore[arg-type]
    assert task.model_tflops(1.0) == pytest.approx(16 * flops / 4 / 1e12)
    assert [row["tp"] for row in facts["hybrid_break_even"]] == [2, 4]
    # Blocks of 12 d^2, gradients sent by copies as they were computed, and whole norms and biases beside them.
    assert facts["hybrid_break_even"][0]["times_width"] == pytest.approx(4.5, rel=0.02)


def test_streaming_is_compared_and_illegal_choices_are_explained(made: Plan) -> None:
    stream, context = made.why
    assert stream.best is not None and stream.slower_by > 0
    assert made.best.layouts.gather[0] == 0
    assert "cp" in context.illegal


def test_streaming_is_a_candidate_where_gathered_blocks_are_large(planner: Planner) -> None:
    small = planner.legal_layouts(Task(bind(run_of(), TracedModel), 4, {"pp": 1}))
    large = planner.legal_layouts(Task(bind(run_of(16384), TracedModel), 4, {"pp": 1}))
    assert not (small.gather == 1).any()
    assert (large.gather == 1).any() and (large.zero[large.gather == 1] == 3).all()
    fixed = planner.legal_layouts(Task(bind(run_of(), TracedModel), 4, {"gather": "stream", "tp": 2}))
    assert len(fixed) and (fixed.gather[fixed.shards > 1] == 1).all()


def test_a_streamed_layout_takes_less_memory_and_is_written_as_it_is(planner: Planner) -> None:
    run = run_of(16384)
    fixed = {"tp": 2, "dp_shard": 2, "pp": 1, "zero": 3, "microbatch": 1, "recompute": "full"}
    found = {
        gather: planner.legal_layouts(
            Task(bind(run, TracedModel), 4, {**fixed, "gather": gather, "reshard_after_forward": True})
        )
        for gather in ("layer", "stream")
    }
    assert [len(one) for one in found.values()] == [1, 1]
    layer, stream = (planner.models.memory(bind(run, TracedModel), one).peak[0] for one in found.values())
    # At least one of the gathered blocks is gone: 12 d^2 parameters over tp, in bfloat16.
    assert layer - stream > 12 * 16384**2 / 2 * 2
    text = write_planned_run(run, found["stream"].row(0), "Planned.")
    written = parse_run(text, "out.yaml")
    assert resolve_layout(bind(written), 4) == found["stream"].row(0)


def test_streaming_costs_a_third_more_products_without_recompute(planner: Planner) -> None:
    run = run_of(8192)
    fixed = {"tp": 2, "dp_shard": 2, "pp": 1, "zero": 3, "microbatch": 4, "recompute": "none"}
    seconds = {}
    for gather in ("layer", "stream"):
        one = planner.legal_layouts(
            Task(bind(run, TracedModel), 4, {**fixed, "gather": gather, "reshard_after_forward": True})
        )
        seconds[gather] = planner.models.times(bind(run, TracedModel), one).causes
    matmul = seconds["stream"]["matmul"] / seconds["layer"]["matmul"]
    assert 1.2 < float(np.squeeze(matmul)) < 1.45
