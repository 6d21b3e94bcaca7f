"""Optimizer state in host memory on the device: same bits, memory that is really free, copies both ways at once."""

from __future__ import annotations

import gc
import json
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from device_runs import accelerator, busy
from phalanx.checkpoint import read_tensors
from phalanx.cli.main import run_command_line as call
from phalanx.config.schema import Optimizer
from phalanx.nn.parameters import ParameterKind
from phalanx.optimizers import HeldParameters, OffloadedOptimizer, build_optimizer, choose_kind, offloaded_state
from token_data import write_run_file, write_token_folder

pytestmark = pytest.mark.gpu

PARAMETERS = 16
ELEMENTS = 16 * 2**20
"""Of each of so many parameters: 1 GiB in all, whose AdamW state takes 2 GiB; a bucket holds two of them."""


def kind_of(name: str) -> ParameterKind:
    """The kind of each parameter: all are matrices."""
    return "matrix"


def updated(name: str, *, offloaded: bool) -> list[Tensor]:
    """Parameters, copies in bf16 and state after three updates, one of them skipped, of large and of small parameters."""
    device, config = accelerator(), Optimizer(name=name, lr=1e-2)
    generator = torch.Generator(device).manual_seed(0)
    shapes = ((2048, 1024), (1000,), (1024, 2048), (64, 64), (1536, 1024))
    parameters = {
        f"p{number}": nn.Parameter(torch.randn(shape, generator=generator, device=device))
        for number, shape in enumerate(shapes)
    }
    copies: dict[Tensor, Tensor] = {p: p.detach().bfloat16() for p in parameters.values()}
    kind = choose_kind(config, offloaded=offloaded)
    optimizer = build_optimizer(parameters, config, kind_of, HeldParameters(copies), kind=kind)
    written: set[int] = set()
    for step in range(3):
        for parameter in parameters.values():
            parameter.grad = torch.randn(parameter.shape, generator=generator, device=device)
        divisor, skip = torch.tensor(2.0, device=device), torch.tensor(float(step == 1), device=device)
        kind.update(optimizer, divisor, skip)
        written |= {id(copy) for copy in kind.written_copies(optimizer)}
    if isinstance(optimizer, OffloadedOptimizer):
        optimizer.synchronise()
        kept = [value for state in optimizer.state.values() for value in state.values() if value.dim()]
        assert kept and all(value.is_pinned() for value in kept)
    state = [value.cpu() for p in parameters.values() for value in optimizer.state[p].values()]
    same_written = torch.tensor([id(copy) in written for copy in copies.values()])
    return [*(p.detach().cpu() for p in parameters.values()), *(c.cpu() for c in copies.values()), *state, same_written]


@pytest.mark.parametrize("name", ["adamw", "adamw8bit", "lion"])
def test_state_in_host_memory_gives_the_same_bits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a bucket for each large parameter: the kernels run for some after the others."""
    monkeypatch.setattr(offloaded_state, "BUCKET_BYTES", 2**20)
    for found, wanted in zip(updated(name, offloaded=True), updated(name, offloaded=False), strict=True):
        assert torch.equal(found, wanted)


def test_a_run_with_offloaded_state_ends_with_the_same_weights_and_resumes_without(tmp_path: Path) -> None:
    run_file = write_run_file(tmp_path / "run.yaml", write_token_folder(tmp_path / "data"))
    words = ["training.deterministic=true", "layout.precision=bf16", "optimizer.schedule=constant", "training.steps=6"]
    words += [
        "optimizer.warmup_steps=2",
        "model.d_model=256",
        "model.d_ff=1024",
        f"cluster.device={accelerator().type}",
    ]
    for name, more in (
        ("here", []),
        ("there", ["layout.offload_optimizer=true"]),
        ("both", ["layout.offload_optimizer=true", "training.steps=3"]),
        ("both", []),
    ):
        assert call(["train", str(run_file), "--run-dir", str(tmp_path / name), *words, *more]) == 0
    losses = [
        [json.loads(line)["loss"] for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        for name in ("here", "there", "both")
    ]
    assert losses[0] == losses[1] == losses[2] and len(losses[0]) == 6
    here, there, both = (
        read_tensors(tmp_path / name / "checkpoints" / "step-00000006") for name in ("here", "there", "both")
    )
    assert here.keys() == there.keys() == both.keys()
    for name, tensor in here.items():
        assert torch.equal(tensor, there[name]) and torch.equal(tensor, both[name]), name


def large_update(*, offloaded: bool) -> tuple[int, int, OffloadedOptimizer | torch.optim.Optimizer, list[nn.Parameter]]:
    """Bytes between updates and at the peak of an update of `PARAMETERS`, beside what was there before."""
    device, config = accelerator(), Optimizer(lr=1e-3)
    memory = torch.get_device_module(device)
    gc.collect()
    memory.synchronize()
    memory.empty_cache()
    before = memory.memory_allocated()
    parameters = [nn.Parameter(torch.zeros(4096, ELEMENTS // 4096, device=device)) for _ in range(PARAMETERS)]
    kind = choose_kind(config, offloaded=offloaded)
    optimizer = build_optimizer({f"p{n}": p for n, p in enumerate(parameters)}, config, kind_of, kind=kind)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    one = torch.ones((), device=device)
    for _ in range(2):
        memory.synchronize()
        memory.reset_peak_memory_stats()
        kind.update(optimizer, one, torch.zeros_like(one))
    memory.synchronize()
    return memory.memory_allocated() - before, memory.max_memory_allocated() - before, optimizer, parameters


def test_the_device_holds_less_by_the_size_of_the_state_and_two_buckets_while_it_updates() -> None:
    state, bucket = 8 * PARAMETERS * ELEMENTS, 2 * offloaded_state.BUCKET_BYTES
    between, peak = large_update(offloaded=True)[:2]
    plain_between, plain_peak = large_update(offloaded=False)[:2]
    assert plain_between - between == pytest.approx(state, rel=0.01)
    assert plain_peak - peak >= 0.99 * (state - 2 * bucket)


def test_state_arrives_while_other_state_leaves() -> None:
    *_, optimizer, parameters = large_update(offloaded=True)
    assert isinstance(optimizer, OffloadedOptimizer) and len(parameters) == PARAMETERS
    one = torch.ones((), device=accelerator())
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
        optimizer.update(one, torch.zeros_like(one))
        optimizer.synchronise()
    copies = [
        (event.time_range.start, event.time_range.end)
        for event in found.events()
        # As CUPTI and roctracer name them; of some kilobytes at least.
        if event.device_type != torch.autograd.DeviceType.CPU
        and event.name.lower().startswith(("memcpy", "copy"))
        and event.time_range.end - event.time_range.start > 100.0
    ]
    assert len(copies) >= 4 * PARAMETERS, [event.name for event in found.events()][:50]
    both_ways = sum(end - start for start, end in copies)
    assert busy(copies) < 0.9 * both_ways, (busy(copies), both_ways)
