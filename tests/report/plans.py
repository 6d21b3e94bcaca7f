"""A plan for tests of its page: quick to make, with layouts that fit and others that do not, with and without a pipeline."""

from __future__ import annotations

from functools import cache

from layout_runs import run_with
from phalanx.families.registry import bind
from phalanx.hardware.machine import load_machine
from phalanx.planner.plan.make_plan import Plan, Wishes, make_plan
from phalanx.planner.rank.cost_models import CostModels
from phalanx.planner.rank.enumeration import Limits
from phalanx.planner.rank.ranking import Planner, Task
from phalanx.planner.time.profile import default_profile
from phalanx.planner.trace.traced_model import TracedModel

LARGE = {
    "model.n_layers": 8,
    "model.d_model": 8192,
    "model.n_heads": 64,
    "model.n_kv_heads": 64,
    "model.d_ff": 32768,
    "model.vocab_size": 50000,
    "model.max_positions": 2048,
    "data.sequence_length": 2048,
}
"""Six billion parameters and a half: some layouts fit on eight devices, and others do not."""


@cache
def plan() -> Plan:
    machine = load_machine("frontier")
    planner = Planner(machine, CostModels(machine, default_profile(machine.node.device)), limits=Limits(2, 2))
    task = Task(bind(run_with(LARGE, global_batch=16), TracedModel), 8, {"recompute": "full", "cp": 1})
    return make_plan(planner, task, Wishes(why=("tp=4",)))
