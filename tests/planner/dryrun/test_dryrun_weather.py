"""Hybrid-STOP's collectives, counted in the step that trains, are those of its closed form."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from phalanx.families.registry import bind
from phalanx.families.weather.config import WeatherRun
from phalanx.layout.resolve import resolve_layout
from phalanx.planner.dryrun.run_step import dry_run
from phalanx.planner.trace.traced_model import TracedModel
from phalanx.training.step import build_full_step

WORLD, T, F, MICROBATCHES = 8, 2, 2, 3
WIDTH, HIDDEN, HEADS, TOKENS = 64, 256, 4, 32
Key = tuple[str, str, int]


def run_of(n_layers: int, **layout: Any) -> WeatherRun:
    names = ["temperature_850", "geopotential_500", "2m_temperature"]
    return WeatherRun.model_validate(
        {
            "model": {
                "family": "weather", "n_layers": n_layers, "d_model": WIDTH, "d_ff": HIDDEN, "n_heads": HEADS,
                "n_lat": 8, "n_lon": 16, "patch_size": 2, "variables": names, "qk_norm": True,
            },
            "data": {
                "sources": ["nowhere"], "inputs": names, "lead_hours": 24,
                "splits": {"train": {"first": "2000", "last": "2001"}},
            },
            "layout": {
                "tp": T, "dp_shard": F, "dp_replicate": 2, "global_batch": 4 * MICROBATCHES, "microbatch": 1,
                "precision": "bf16", **layout,
            },
            "optimizer": {"lr": 0.01},
            "training": {"steps": 1},
        }
    )  # fmt: skip


def counted(run: WeatherRun) -> Counter[Key]:
    """Collectives of a step of rank 0 by operation, axis and bytes."""
    layout = resolve_layout(bind(run), WORLD)
    report = dry_run(bind(run, TracedModel), layout, 0, build_full_step, accelerator=True, devices_per_node=None)
    found: Counter[Key] = Counter()
    for traffic in report.traffic:
        found[traffic.operation, traffic.axis, traffic.bytes] += traffic.count
    return found


def per_block(**layout: Any) -> dict[Key, float]:
    """What one more block adds, for each micro-batch, but for the one exchange a step that all blocks share."""
    more, fewer = counted(run_of(5, **layout)), counted(run_of(3, **layout))
    shared = [next(key for key in counts if key[:2] == ("all_reduce", "tp")) for counts in (more, fewer)]
    # Gradients of what tensor-parallel ranks hold alike, of this rank's shard: norms of queries and keys among them.
    assert shared[0][2] - shared[1][2] == 2 * WHOLE * 4 // F
    assert [more.pop(shared[0]), fewer.pop(shared[1])] == [1, 1]
    added = {key: (more[key] - fewer[key]) / 2 / MICROBATCHES for key in more | fewer}
    return {key: count for key, count in added.items() if count}


ACTIVATIONS = TOKENS * WIDTH * 2
"""Bytes of a sample's tokens in bfloat16."""
SPLIT = 4 * WIDTH * WIDTH + 2 * WIDTH * HIDDEN + 3 * WIDTH + HIDDEN
"""Parameters of a block that tensor-parallel ranks share out: matrices, and biases behind columns."""
WHOLE = 2 * WIDTH + 4 * WIDTH + 2 * (WIDTH // HEADS)
"""Parameters that each has: biases behind rows, norms, norms of queries and keys."""
PART = SPLIT // T + WHOLE


def test_a_block_exchanges_what_the_closed_form_says() -> None:
    """Over tp the two halves of 2 all-reduces forward and 2 backward; over dp_shard P/T gathered twice, scattered once."""
    assert per_block() == {
        ("all_gather", "tp", ACTIVATIONS): 4,
        ("reduce_scatter", "tp", ACTIVATIONS): 4,
        ("all_gather", "dp_shard", PART * 2): 2,
        ("reduce_scatter", "dp_shard", PART * 4): 1,
        # Replicas add up their shards once a step.
        ("all_reduce", "dp_replicate", PART * 4 // F): pytest.approx(1 / MICROBATCHES),
    }


def test_recomputation_repeats_all_but_the_last_exchange_of_the_forward_pass() -> None:
    found = per_block(recompute="full")
    assert found["all_gather", "tp", ACTIVATIONS] == 4 + 2
    assert found["reduce_scatter", "tp", ACTIVATIONS] == 4 + 1
    assert found["all_gather", "dp_shard", PART * 2] == 2
