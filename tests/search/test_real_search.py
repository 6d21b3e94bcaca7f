"""What a search expects, beside what real trials on two H200s gave (benchmarks/results/search)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from phalanx.cluster.machine import load_machine
from phalanx.config.load import parse_run
from phalanx.cost.profile import load_profile
from phalanx.plan.cost_models import CostModels
from phalanx.plan.judge import Planner, Task
from phalanx.search.prior import planned_space

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


def test_time_and_memory_of_long_sequences_on_two_devices() -> None:
    """Memory of tensor parallelism alone: shards that peers copy were gathered through other buffers when this was run."""
    found = json.loads((RESULTS / "search" / "h200_x2_llama3_3b_long.json").read_text())
    run = parse_run(found["run"].replace("DATA", "data/text"), "the run file", [])
    machine = load_machine("h200-x4")
    models = CostModels(machine, load_profile(str(RESULTS / "planner" / "h200-x4.profile.yaml")))
    space, prior = planned_space(Planner(machine, models, least_p=run.search.least_p_fits), Task(run, 2), run.search)
    points = {space.key(point): point for point in range(len(space))}
    assert len(points) == len(found["trials"]) == 7
    full, whole = [], []
    for trial in found["trials"]:
        point, outcome = points[trial["key"]], trial["outcome"]
        if outcome["cause"] == "out_of_memory":
            full.append(prior.margin[point])
            continue
        assert prior.seconds[point] == pytest.approx(outcome["value"], rel=0.015)
        if json.loads(trial["key"])["tp"] == 2:
            whole.append(prior.peak[point] / outcome["memory_bytes"])
        assert prior.margin[point] > 0
    assert whole == pytest.approx([1.0, 1.0], rel=0.003)
    # The one that did not fit was not expected to.
    assert len(full) == 1 and full[0] < 0
