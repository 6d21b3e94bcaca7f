"""Attention of the language model on the device, by all combinations of its options, beside float64 on the CPU."""

from __future__ import annotations

import copy
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from device_runs import CPU, accelerator, relative_error
from distributed_ranks import run_ranks
from phalanx.config.model import LanguageModel
from phalanx.layout.context_parallel.kernel_choice import AttentionChoice
from phalanx.nn.attention import Attention, KeyValueCache, attention_context

pytestmark = pytest.mark.gpu

WIDTH, HEADS, LENGTH = 192, 6, 64
COMBINATIONS = [
    (positions, kv_heads, size, qk_norm, clip, bias)
    for positions, kv_heads, qk_norm, clip, bias in product(
        ("rope", "learned", "alibi"), (2, HEADS), (False, True), (None, 0.5), (False, True)
    )
    # Rotary positions need pairs; of others a head may be of any size. Odd sizes where heads share keys alone.
    for size in ((32, 10) if positions == "rope" else (32, 9))[: 2 if kv_heads != HEADS else 1]
    # Biases change nothing about how heads lie in memory: once for each way they are read.
    if not bias or (qk_norm and clip)
]


def small_model(
    positions: str, kv_heads: int, size: int, qk_norm: bool, clip: float | None, bias: bool
) -> LanguageModel:
    fields: dict[str, Any] = {
        "n_layers": 1,
        "d_model": WIDTH,
        "n_heads": HEADS,
        "n_kv_heads": kv_heads,
        "head_dim": size,
    }
    options: dict[str, Any] = {"positions": positions, "qk_norm": qk_norm, "clip_qkv": clip, "bias": bias}
    return LanguageModel(vocab_size=16, max_positions=2 * LENGTH, **fields, **options)


def random_attention(model: LanguageModel) -> Attention:
    """Attention in float64 with weights large enough that it is far from uniform."""
    attention = Attention(model.layer(0).attention).double()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in attention.named_parameters():
            values = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(1.0 + 0.1 * values if name.endswith("norm.weight") else 0.15 * values)
    return attention


def passes(
    model: LanguageModel, master: Attention, device: torch.device, dtype: torch.dtype, *, compiled: bool
) -> dict[str, Tensor]:
    """Results and gradients of a whole sequence, and of two positions read with a cache as generation reads them."""
    torch.compiler.reset()
    attention = copy.deepcopy(master).to(device, dtype)
    if compiled:
        attention.compile()
    values = torch.randn(2, LENGTH, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    x = values.to(device, dtype).requires_grad_()
    # What `training.attention=auto` takes in training where nothing else can run.
    kernel = "efficient" if dtype == torch.float32 else "sdpa"
    places = torch.arange(LENGTH, device=device)
    out = attention(x, attention_context(model.layer(0).attention, places, dtype, kernel=kernel))
    out.square().sum().backward()
    assert x.grad is not None
    found = {"out": out.detach(), "grad of x": x.grad}
    found |= {f"grad of {name}": p.grad for name, p in attention.named_parameters() if p.grad is not None}
    with torch.no_grad():
        cache = KeyValueCache()
        for start, stop in ((0, 5), (5, 6), (6, 7)):
            context = attention_context(model.layer(0).attention, places[start:stop], dtype, past=start)
            found[f"read {start}"] = attention(x.detach()[:1, start:stop], context, cache)
    return found


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("options", COMBINATIONS, ids=str)
def test_attention_computes_what_the_cpu_computes(options: tuple[Any, ...], dtype: torch.dtype, compiled: bool) -> None:
    """Errors against float64 are those of the format: at most three times what the CPU's own arithmetic leaves in it."""
    model = small_model(*options)
    master = random_attention(model)
    wanted = passes(model, master, CPU, torch.float64, compiled=False)
    plain = passes(model, master, CPU, dtype, compiled=False)
    found = passes(model, master, accelerator(), dtype, compiled=compiled)
    noise = 2e-5 if dtype == torch.float32 else 1e-2
    for name, right in wanted.items():
        assert relative_error(found[name], right) <= 3 * relative_error(plain[name], right) + noise, name


def kernels_run(name: str) -> list[str]:
    """Operations of the first attention of a process, with the kernel that a run file names."""
    device = accelerator()
    torch.accelerator.set_device_index(device.index)
    with AttentionChoice(name).active(device), profile(activities=[ProfilerActivity.CPU]) as found:
        x = torch.randn(2, 4, 256, 64, device=device, dtype=torch.bfloat16)
        F.scaled_dot_product_attention(x, x, x, is_causal=True)
    return [event.name for event in found.events()]


@pytest.mark.parametrize("name", ["flash", "efficient", "math", *(() if torch.version.hip else ("cudnn",))])
def test_the_kernel_that_a_run_file_names_computes_from_the_first_attention_of_a_process(name: str) -> None:
    """PyTorch sets an order of its own at a process's first choice: this process has chosen already."""
    (operations,) = run_ranks(kernels_run, 1, name)
    assert any(word.startswith(f"aten::_scaled_dot_product_{name}_attention") for word in operations) or (
        name == "math" and "aten::_scaled_dot_product_attention_math" in operations
    ), operations
