"""Traced blocks of mixtures of experts: the rows that are computed, what travels, and what each rank has."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from phalanx.config.model import Experts, LanguageModel
from phalanx.hardware.collectives import default_constants
from phalanx.hardware.machine import load_machine
from phalanx.layout.prepare_blocks import recompute_policy
from phalanx.layout.spec import Recompute
from phalanx.planner.time.framework import COMPILED
from phalanx.planner.time.part_time import part_times, parts_of
from phalanx.planner.time.profile import default_profile
from phalanx.planner.trace.accelerator_kernels import ring_operations
from phalanx.planner.trace.compiled_block import compiled_timeline
from phalanx.planner.trace.expert_loads import BALANCED, PRIOR, read_loads
from phalanx.planner.trace.operations import Scale
from phalanx.planner.trace.part_costs import PartCosts, _block_graph, _trace_part, part_costs, trace_block
from phalanx.planner.trace.traced_model import Setting, part_tracer

LENGTH, SAMPLES = 64, 3
MODEL = LanguageModel(
    n_layers=3,
    d_model=64,
    n_heads=4,
    d_ff=160,
    vocab_size=128,
    max_positions=LENGTH,
    experts={"count": 8, "active": 2, "d_ff": 48, "shared": 1, "dense_layers": 1},
)
SETTING = Setting(MODEL, LENGTH, compile=False, loads=BALANCED)


def products(costs: PartCosts, *phases: str) -> int:
    """Floating-point operations of matrix products in these phases."""
    return sum(op.flops for op in costs.costs.operations if op.matmul is not None and op.phase in phases)


@pytest.mark.parametrize("ep", [1, 4])
@pytest.mark.parametrize("compiled", [False, True])
def test_products_are_of_the_experts_that_tokens_are_sent_to(ep: int, compiled: bool) -> None:
    costs = part_costs("block", replace(SETTING, ep=ep, compile=compiled), SAMPLES)
    forward = 2 * MODEL.layer(2).matrix_parameters() * LENGTH * SAMPLES
    assert products(costs, "forward") == forward
    # The router's logits are float32 and, like all else, multiplied twice more in the backward pass.
    assert products(costs, "backward") == 2 * forward


def test_experts_in_eight_bits_multiply_as_much_in_half_the_bytes() -> None:
    row, experts = (
        part_costs("block", replace(SETTING, precision=name), SAMPLES) for name in ("fp8-row", "fp8-row-experts")
    )
    assert products(experts, "forward", "backward") == products(row, "forward", "backward")

    def grouped(costs: PartCosts) -> set[int]:
        found = [op.matmul for op in costs.costs.operations if op.matmul is not None and op.matmul.groups]
        assert len(found) == 6
        return {matmul.width for matmul in found}

    assert (grouped(row), grouped(experts)) == ({2}, {1})


REAL = LanguageModel(
    n_layers=2,
    d_model=2048,
    n_heads=32,
    n_kv_heads=4,
    d_ff=6144,
    vocab_size=128,
    max_positions=4096,
    experts={"count": 128, "active": 8, "d_ff": 768},
)
"""Blocks of qwen3-30b-a3b."""


@pytest.mark.parametrize(
    ("setting", "degrees"),
    [
        (SETTING, (2, 8)),
        (replace(SETTING, compile=True, recompute="full", casts_experts=True, loads=PRIOR), (4, 8)),
        (Setting(REAL, 4096, compile=False, recompute="full"), (4, 32)),
        (Setting(REAL, 4096, tp=2, cp=2, compile=False, casts_experts=True, loads=BALANCED), (64,)),
    ],
)
def test_one_trace_says_of_all_degrees_what_a_trace_of_each_says(setting: Setting, degrees: tuple[int, ...]) -> None:
    for ep in degrees:
        shared = replace(setting, ep=ep)
        alone = replace(shared, share=part_tracer(shared).expert_share())
        one, own = (part_costs("block", each, SAMPLES) for each in (shared, alone))
        assert one.parameters == own.parameters
        assert products(one, "forward", "backward", "recompute") == products(own, "forward", "backward", "recompute")
        assert one.costs.behind_experts == pytest.approx(own.costs.behind_experts, rel=0.005)
        assert memory(one) == pytest.approx(memory(own), rel=0.005)
        if setting.model is REAL:
            assert seconds(shared) == pytest.approx(seconds(alone), rel=0.005)


COARSE = MODEL.model_copy(update={"experts": Experts(count=4, active=2, d_ff=256, shared=1, dense_layers=1)})
"""Experts of which eight ranks have equal parts."""


@pytest.mark.parametrize(
    ("changes", "own_traces"),
    [
        ({"recompute": "selective", "casts_experts": True, "cp": 2}, (2, 4, 8)),
        ({"ep_chunks": 2, "ep_node": 2, "tp": 2}, (2, 4, 8)),
        ({"compile": True, "recompute": "full", "casts_experts": True, "loads": PRIOR}, (8,)),
    ],
)
def test_one_trace_says_of_all_parts_of_experts_exactly_what_a_trace_of_each_says(
    changes: dict[str, Any], own_traces: tuple[int, ...]
) -> None:
    settings = {slices: replace(SETTING, model=COARSE, ep=4, expert_tp=slices, **changes) for slices in (2, 4, 8)}
    before = _trace_part.cache_info().misses
    scaled = {slices: part_costs("block", setting, SAMPLES) for slices, setting in settings.items()}
    assert _trace_part.cache_info().misses == before + 1
    for slices in own_traces:
        alone = replace(settings[slices], share=part_tracer(settings[slices]).expert_share())
        one, own = scaled[slices], part_costs("block", alone, SAMPLES)
        assert one.parameters == own.parameters
        assert (one.costs, one.costs.operations) == (own.costs, own.costs.operations)
    assert _trace_part.cache_info().misses == before + 1 + len(own_traces)


def test_parts_of_experts_compute_as_much_as_whole_ones_and_send_more() -> None:
    setting = replace(SETTING, model=COARSE, ep=4)
    whole, *parts = (part_costs("block", replace(setting, expert_tp=slices), SAMPLES) for slices in (1, 2, 4))
    for slices, part in zip((2, 4), parts, strict=True):
        assert products(part, "forward", "backward") == products(whole, "forward", "backward")
        assert sent_rows(part) == slices * sent_rows(whole)
        experts = [sum(x.count for x in costs.parameters if x.expert) for costs in (whole, part)]
        assert experts[0] == slices * experts[1]


def sent_rows(costs: PartCosts) -> int:
    """Bytes that travel to experts and back."""
    return sum(op.bytes for op in costs.costs.collectives() if op.axis == "ep" and op.bytes > 1024)


def memory(block: PartCosts) -> list[int]:
    """Bytes of a block."""
    costs = block.costs
    return [costs.kept_bytes, costs.forward_peak, costs.backward_peak, costs.pending_bytes, costs.gradient_bytes]


def seconds(setting: Setting) -> float:
    """Time of a block on the devices of a large machine."""
    machine = load_machine("dgx-h100")
    parts = parts_of([("block", setting, SAMPLES)], COMPILED)
    profile = default_profile(machine.node.device).profile
    return float(part_times(parts, machine, default_constants(machine), profile).seconds.sum())


def test_a_compiled_block_with_selection_biases_is_traced() -> None:
    experts = MODEL.experts.model_copy(update={"scoring": "sigmoid", "bias_rate": 0.01})  # type: ignore[union-attr]
    biased = replace(SETTING, model=MODEL.model_copy(update={"experts": experts}))
    traced = [part_costs("block", replace(biased, compile=compiled), SAMPLES) for compiled in (False, True)]
    assert products(traced[0], "forward") == products(traced[1], "forward") > 0


def test_first_blocks_are_traced_as_what_they_are() -> None:
    leading = part_costs("leading", SETTING, SAMPLES)
    assert leading.parameter_count == MODEL.layer(0).parameter_count()
    assert part_costs("block", SETTING, SAMPLES).parameter_count == MODEL.layer(2).parameter_count()
    assert products(leading, "forward") == 2 * MODEL.layer(0).matrix_parameters() * LENGTH * SAMPLES


def test_ranks_have_their_part_of_the_experts_and_all_else() -> None:
    whole, part = (part_costs("block", replace(SETTING, ep=ep), SAMPLES) for ep in (1, 4))
    experts = 3 * 8 * 64 * 48
    assert whole.parameter_count - part.parameter_count == experts * 3 // 4
    assert sum(p.count for p in part.parameters if p.expert) == experts // 4
    assert not any(p.expert for p in whole.parameters)


@pytest.mark.parametrize(("recompute", "passes"), [("none", 4), ("full", 6)])
def test_rows_travel_there_and_back_in_each_pass(recompute: str, passes: int) -> None:
    costs = part_costs("block", replace(SETTING, ep=4, recompute=recompute), SAMPLES)
    sent = [c.bytes for c in costs.costs.collectives() if c.axis == "ep" and c.bytes > 8 * 8]
    assert sent == [SAMPLES * LENGTH * 2 * 64 * 2] * passes


def test_uneven_loads_make_a_rank_compute_and_keep_more() -> None:
    # The first of two ranks gets three quarters of the rows.
    loads = read_loads([[0.25, 0.25, 0.125, 0.125, 0.0625, 0.0625, 0.0625, 0.0625]])
    even, uneven = (part_costs("block", replace(SETTING, ep=2, loads=x), SAMPLES) for x in (BALANCED, loads))
    experts = 2 * 3 * 64 * 48 * 2 * LENGTH * SAMPLES
    assert products(uneven, "forward") - products(even, "forward") == experts // 2
    assert uneven.costs.kept_bytes > even.costs.kept_bytes


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_experts_that_are_cast_cost_what_tracing_them_says(recompute: Recompute) -> None:
    # Each sample sends rows to experts in a number of its own, as in `part_costs`.
    setting = replace(SETTING, compile=True, ep=4, casts_experts=True)
    found = []
    for joint, arguments in (_block_graph("block", setting, SAMPLES), trace_block("block", setting, SAMPLES)):
        timeline = compiled_timeline(joint, recompute_policy(recompute), arguments, {"ep": "ep"}, ring_operations())
        costs = timeline.costs(Scale(SAMPLES, SAMPLES))
        operations = sorted((op.kind, op.phase, op.flops, op.bytes_read, op.bytes_written) for op in costs.operations)
        peaks = (costs.kept_bytes, costs.forward_peak, costs.backward_peak, costs.gradient_bytes)
        found.append((operations, peaks))
    assert found[0] == found[1]
    plain = part_costs("block", replace(setting, casts_experts=False), SAMPLES).costs
    # Gradients of experts in 32 bits.
    assert found[0][1][3] > plain.gradient_bytes
