"""Activations in host memory on the device: same bits, memory that falls as planned, copies beside the passes."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from device_runs import accelerator, busy, small_run
from layout_runs import Fields
from phalanx.families.registry import bind
from phalanx.layout.apply import apply_layout
from phalanx.layout.layout_model import LayoutModel
from phalanx.layout.mesh import ONE_RANK
from phalanx.layout.resolve import resolve_layout
from phalanx.planner.memory.model import Kernels, memory
from phalanx.planner.trace.traced_model import TracedModel
from phalanx.training.step import TrainStep, build_step

pytestmark = pytest.mark.gpu

SIZES: Fields = {
    "model.n_layers": 12,
    "model.d_model": 1024,
    "model.d_ff": 4096,
    "model.vocab_size": 4096,
    "model.max_positions": 2048,
    "data.sequence_length": 2048,
}
"""Of 8 samples, 4 at a time: a block keeps some hundred MB, and its state takes as much."""


@pytest.fixture(autouse=True, scope="module")
def deterministic() -> Iterator[None]:
    """Let kernels sum in one order: what is compared are bits."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@dataclass(frozen=True)
class Steps:
    """Two steps as they ran."""

    parameters: list[Tensor]
    """At the end, on the CPU."""
    peak: int
    """Bytes, beside what was there before."""
    planned: float
    """The same by the planner."""
    host: float
    """Bytes in host memory, by the planner."""


def build(*, offloaded: bool, recompute: str, compiled: bool, sizes: Fields = SIZES) -> tuple[TrainStep, TracedModel]:
    """Return the steps of a run on the device, and its model."""
    words = {**sizes, "layout.offload_activations": offloaded, "layout.recompute": recompute}
    run = small_run(words, "bf16", compiled=compiled)
    layout = resolve_layout(bind(run), 1)
    attention = bind(run, LayoutModel).choose_attention(layout, accelerator())
    applied = apply_layout(bind(run, LayoutModel), layout, ONE_RANK, accelerator(), attention)
    return build_step(bind(run, LayoutModel), applied, accelerator()), bind(run, TracedModel)


@cache
def run_steps(*, offloaded: bool, recompute: str, compiled: bool = True) -> Steps:
    """Run two steps, with memory counted in the second."""
    device = torch.get_device_module(accelerator())
    # Products take memory for each thread that asks for them, 32 MiB on Hopper; backward passes have a thread of their own.
    one = torch.ones(16, 16, dtype=torch.bfloat16, device=accelerator(), requires_grad=True)
    (one @ one).sum().backward()
    del one
    gc.collect()
    device.empty_cache()
    before = device.memory_allocated()
    step, model = build(offloaded=offloaded, recompute=recompute, compiled=compiled)
    layout = step.applied.layout
    torch.manual_seed(0)
    batch = model.example_batch(layout.samples_per_rank, accelerator())
    for number in (1, 2):
        device.synchronize()
        device.reset_peak_memory_stats()
        step.enqueue(number, batch)
    device.synchronize()
    planned = memory(model, layout.table, Kernels(model.likely_kernel(rocm=False), compiled))
    parameters = [parameter.detach().cpu() for parameter in step.applied.parameters.values()]
    return Steps(
        parameters, device.max_memory_allocated() - before, float(planned.allocated[0]), float(planned.host[0])
    )


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_activations_in_host_memory_give_the_same_bits(recompute: str, compiled: bool) -> None:
    there, here = (run_steps(offloaded=which, recompute=recompute, compiled=compiled) for which in (True, False))
    assert there.host > 0 and here.host == 0
    assert all(torch.equal(a, b) for a, b in zip(there.parameters, here.parameters, strict=True))


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_the_peak_falls_by_what_is_planned(recompute: str) -> None:
    there, here = (run_steps(offloaded=which, recompute=recompute) for which in (True, False))
    assert there.peak == pytest.approx(there.planned, rel=0.05), (here.peak, here.planned)
    assert here.peak - there.peak == pytest.approx(here.planned - there.planned, rel=0.1)


def test_what_is_too_much_for_the_device_fits_with_activations_in_host_memory() -> None:
    there, here = (run_steps(offloaded=which, recompute="none") for which in (True, False))
    device = torch.get_device_module(accelerator())
    total = device.get_device_properties(accelerator()).total_memory
    gc.collect()
    device.empty_cache()
    # Room for what the allocator loses to holes.
    limit = device.memory_allocated() + 0.3 * there.peak + 0.7 * here.peak
    device.set_per_process_memory_fraction(limit / total)
    try:
        for offloaded in (True, False):
            step, model = build(offloaded=offloaded, recompute="none", compiled=True)
            batch = model.example_batch(step.applied.layout.samples_per_rank, accelerator())
            if offloaded:
                step.enqueue(1, batch)
                device.synchronize()
            else:
                with pytest.raises(torch.OutOfMemoryError):
                    step.enqueue(1, batch)
            del step
            gc.collect()
            device.empty_cache()
    finally:
        device.set_per_process_memory_fraction(1.0)


def test_copies_of_inputs_go_on_beside_the_passes() -> None:
    # Blocks that compute for longer than the host takes to ask for them: else copies meet a device that waits.
    wide: Fields = {**SIZES, "model.n_layers": 6, "model.d_model": 2048, "model.n_heads": 16, "model.d_ff": 8192}
    step, model = build(offloaded=True, recompute="full", compiled=True, sizes={**wide, "model.n_kv_heads": 16})
    batch = model.example_batch(step.applied.layout.samples_per_rank, accelerator())
    device = torch.get_device_module(accelerator())
    step.enqueue(1, batch)
    device.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
        step.enqueue(2, batch)
        device.synchronize()
    spans: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
    for event in found.events():
        if event.device_type != torch.autograd.DeviceType.CPU:
            # As CUPTI and roctracer name copies between host and device.
            name = event.name.lower()
            copied = name.startswith(("memcpy", "copy")) and ("htod" in name or "dtoh" in name)
            spans[copied].append((event.time_range.start, event.time_range.end))
    copies, passes = spans[True], spans[False]
    # Two micro-batches, whose blocks but the last leave and come back.
    assert len(copies) >= 2 * 2 * 5, len(copies)
    hidden = busy(copies) + busy(passes) - busy([*copies, *passes])
    assert hidden > 0.5 * busy(copies), (hidden, busy(copies))
