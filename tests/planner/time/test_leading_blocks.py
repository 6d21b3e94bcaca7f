"""Ranks of a pipeline whose first blocks are dense: what each holds and computes, whichever stages these blocks are in."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from dry_layouts import PLANNED_SIZES
from layout_runs import run_with
from phalanx.families.language.config import LanguageRun
from phalanx.families.registry import bind
from phalanx.hardware.collectives import default_constants
from phalanx.hardware.machine import load_machine
from phalanx.layout.resolve import resolve_layout
from phalanx.planner.dryrun.run_step import dry_run
from phalanx.planner.time.framework import EAGER
from phalanx.planner.time.part_time import PartTimes, part_times
from phalanx.planner.time.pipeline_time import stage_times
from phalanx.planner.time.profile import default_profile
from phalanx.planner.time.step_parts import Steps
from phalanx.planner.time.step_time import busiest_rank, most_trained
from phalanx.planner.time.timing import steps_of_run
from phalanx.planner.trace.traced_model import TracedModel
from phalanx.training.step import build_full_step

WORLD = 4
MACHINE = load_machine("selene")
SIZES = PLANNED_SIZES | {"model.vocab_size": 128, "model.n_layers": 8, "model.d_ff": 768, "data.sequence_length": 32}
PIPELINES: list[dict[str, Any]] = [
    {"pp": 4},
    {"pp": 4, "schedule": "interleaved_1f1b", "stages_per_rank": 2},
    {"pp": 2, "tp": 2, "schedule": "interleaved_zero_bubble", "stages_per_rank": 2},
    {"pp": 2, "tp": 2, "ep": 2, "schedule": "interleaved_1f1b", "stages_per_rank": 4},
]
"""A rank has every pp-th stage."""
LAYOUTS: list[tuple[dict[str, Any], dict[str, int]]] = [
    (PIPELINES[0], {"dense_layers": 3}),
    # The second stage of the first rank has a dense block too.
    (PIPELINES[1], {"dense_layers": 5}),
    # Experts are more than a dense MLP, and no rank but the first has dense blocks.
    (PIPELINES[2], {"dense_layers": 2, "d_ff": 768}),
    (PIPELINES[3], {"dense_layers": 3}),
    ({"pp": 2, "dp_shard": 2, "ep": 2, "zero": 1, "schedule": "zbv", "stages_per_rank": 2}, {"dense_layers": 7}),
    ({"dp_shard": 2, "dp_replicate": 2, "ep": 2}, {"dense_layers": 3}),
]


def run_of(words: dict[str, Any], experts: dict[str, int]) -> LanguageRun:
    mixture = {"count": 4, "active": 2, "d_ff": 48, "shared": 1} | experts
    return run_with(SIZES | {"model.experts": mixture}, **{"global_batch": 4, **words})


def steps_with(run: LanguageRun) -> tuple[Steps, PartTimes]:
    model = bind(run, TracedModel)
    steps = steps_of_run(model, resolve_layout(model, WORLD).table, MACHINE, EAGER)
    profile = default_profile(MACHINE.node.device).profile
    return steps, part_times(steps.parts, MACHINE, default_constants(MACHINE), profile)


@pytest.mark.parametrize(("words", "experts"), LAYOUTS, ids=str)
def test_the_fullest_rank_holds_as_many_parameters_as_the_code_updates(
    words: dict[str, Any], experts: dict[str, int]
) -> None:
    run = run_of(words, experts)
    steps, _ = steps_with(run)
    model = bind(run, TracedModel)
    layout = resolve_layout(model, WORLD)
    held = []
    for first in range(0, WORLD, WORLD // layout.pp):
        found = dry_run(model, layout, first, build_full_step, accelerator=True, devices_per_node=None)
        # AdamW keeps two numbers of four bytes for each parameter that the rank updates.
        held.append(found.categories["optimizer"] / 8)
    _, mine = most_trained(steps)
    # For each tensor AdamW keeps its step as well, which takes 512 bytes of a device's memory.
    assert mine[0] < max(held) < 1.007 * mine[0]


@pytest.mark.parametrize("words", PIPELINES, ids=str)
@pytest.mark.parametrize("dense_layers", [0, 1, 3, 7])
def test_the_busiest_rank_computes_all_of_its_stages(words: dict[str, Any], dense_layers: int) -> None:
    steps, times = steps_with(run_of(words, {"dense_layers": dense_layers}))
    stages = stage_times(steps, np.zeros(1, np.int64), times)
    layout = steps.layouts.row(0)
    per_stage = stages.forward[0] + stages.backward[0]
    # Rank by rank: every pp-th stage.
    per_rank = per_stage.reshape(-1, layout.pp).sum(axis=0)
    busiest = busiest_rank(steps, times)
    assert busiest.forward[0] + busiest.backward[0] == pytest.approx(per_rank.max())
