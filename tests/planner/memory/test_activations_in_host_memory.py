"""Plans of activations in host memory agree with dry runs of the code: bytes on devices, and in host memory."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from dry_layouts import PLANNED_SIZES
from layout_runs import run_with
from phalanx.families.registry import bind
from phalanx.layout import offloaded_activations
from phalanx.layout.resolve import resolve_layout
from phalanx.planner.dryrun.run_step import dry_run
from phalanx.planner.memory.model import Kernels, memory, rank_memory
from phalanx.planner.trace.traced_model import TracedModel
from phalanx.training.step import build_full_step

LAYOUTS: list[dict[str, Any]] = [
    {"dp_shard": 1, "microbatch": 4, "global_batch": 4},
    {"dp_shard": 1, "microbatch": 2, "recompute": "full"},
    {"dp_shard": 4, "tp": 2, "recompute": "selective"},
    {"dp_shard": 2, "cp": 2, "microbatch": 2, "gather_blocks": 2},
    {"dp_shard": 4, "gather": "stream", "microbatch": 2},
    {"dp_shard": 1, "pp": 4, "microbatch": 2, "global_batch": 16},
    {"dp_shard": 2, "pp": 2, "schedule": "gpipe", "recompute": "full", "reshard_after_forward": True},
    {"dp_shard": 2, "pp": 2, "schedule": "interleaved_1f1b", "microbatch": 2},
    {"dp_shard": 2, "pp": 2, "ep": 2, "experts": {"count": 4, "active": 2, "d_ff": 352, "dense_layers": 3}},
]


@pytest.mark.parametrize("words", LAYOUTS, ids=str)
def test_offloaded_activations_take_what_the_code_takes(words: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offloaded_activations, "SMALLEST_BYTES", 4096)
    world = math.prod(words.get(name, 1) for name in ("dp_shard", "tp", "pp", "cp"))
    fields = {"global_batch": 16, "offload_activations": True, **words}
    sizes: dict[str, Any] = {"model.n_layers": 8 if "pp" in words else 4, "model.d_model": 256}
    if "experts" in words:
        sizes["model.experts"] = fields.pop("experts")
    # Wide enough that what FSDP2 pads is little.
    run = run_with(PLANNED_SIZES | sizes, **fields)
    layout, traced = resolve_layout(bind(run), world), bind(run, TracedModel)
    kernels = Kernels("flash", compiled=False)
    ranks = rank_memory(traced, layout, layout.recompute, kernels)
    reports = [
        dry_run(traced, layout, rank, build_full_step, accelerator=True, devices_per_node=None)
        for rank in range(0, world, world // layout.pp)
    ]
    for planned, found in zip(ranks, reports, strict=True):
        assert planned.allocated == pytest.approx(found.peak, rel=0.01), (planned, found.moment, found.categories)
    held = memory(traced, layout.table, kernels)
    assert held.allocated[0] == pytest.approx(max(one.allocated for one in ranks))
    assert held.host[0] == pytest.approx(max(report.host for report in reports), rel=0.01)
    plain = memory(traced, replace(layout, offload_activations=False).table, kernels)
    assert plain.host[0] == 0 and plain.allocated[0] > held.allocated[0]
