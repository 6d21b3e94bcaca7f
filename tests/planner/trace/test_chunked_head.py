"""What ends of a model cost in micro-batches that were not traced: what tracing them finds."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest

from phalanx.config.model import LanguageModel
from phalanx.planner.trace import part_costs as parts
from phalanx.planner.trace.chunked_head import Chunks
from phalanx.planner.trace.operations import Operation, Scale
from phalanx.planner.trace.part_costs import PartCosts, part_costs
from phalanx.planner.trace.traced_model import Setting
from small_models import FAMILIES

SEEDS = range(24)


def drawn(seed: int) -> tuple[Setting, int]:
    """A setting, and samples of a micro-batch."""
    choose = random.Random(seed)
    model: LanguageModel = choose.choice(list(FAMILIES.values()))
    tp = choose.choice([tp for tp in (1, 2, 4) if model.kv_heads % tp == 0])
    setting = Setting(
        model,
        length=choose.choice([16, 32]),
        tp=tp,
        cp=choose.choice([1, 1, 2]),
        precision=choose.choice(["bf16", "fp32"]),
        compile=choose.random() < 0.5,
        chunk_tokens=choose.choice([6, 16, 20, 56, 4096]),
        z_loss=choose.choice([0.0, 1e-4]),
    )
    return setting, choose.choice([1, 1, 2, 3, 5, 8, 12, 31])


def each_time(part: PartCosts) -> Counter[Operation]:
    """The operations of a part, and how often each of them runs."""
    found: Counter[Operation] = Counter()
    for operation in part.costs.operations:
        found[replace(operation, times=1)] += operation.times
    return found


def test_all_numbers_of_chunks_are_drawn() -> None:
    counts = {min(Chunks.of(*drawn(seed)).count, 6) for seed in SEEDS}
    assert counts >= {1, 2, 3, 6}
    assert {setting.tp for setting, _ in map(drawn, SEEDS)} >= {1, 2}


@pytest.mark.parametrize("seed", SEEDS)
def test_ends_cost_what_tracing_them_finds(seed: int) -> None:
    setting, samples = drawn(seed)
    for name in ("embedding", "head"):
        derived = part_costs(name, setting, samples)
        found = parts._trace_part(parts._Trace(name, setting, samples))
        traced = parts.PartCosts(found.timeline.costs(Scale()), found.parameters, ())
        assert derived.costs == traced.costs
        assert each_time(derived) == each_time(traced)
        assert derived.parameters == traced.parameters


def test_few_traces_serve_all_micro_batches() -> None:
    setting = replace(drawn(0)[0], chunk_tokens=40, z_loss=0.25)
    parts.part_costs.cache_clear()
    before = parts._trace_part.cache_info().currsize
    for samples in range(1, 40):
        part_costs("head", setting, samples)
    # One sample or several, one chunk or two to four.
    assert parts._trace_part.cache_info().currsize - before <= 8
