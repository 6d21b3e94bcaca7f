"""AdamW of large parameters: what PyTorch does, with wide memory accesses, whatever scale and skipped updates it is told."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

from ahead_of_time import ASSEMBLY, NARROW, WIDE, assembly_of, needs_triton, run_interpreted, threads
from phalanx.optimizers.adamw import AdamW
from phalanx.torch_compat import common as compat


def test_what_is_not_large_is_pytorchs() -> None:
    ours, theirs = (nn.Parameter(torch.linspace(-1, 1, 12)) for _ in range(2))
    optimizers = AdamW([ours], lr=0.1, fused=True), torch.optim.AdamW([theirs], lr=0.1, fused=True)
    for scale, skip in ((2.0, 0.0), (1.0, 1.0), (3.0, 0.0)):
        for optimizer, p in zip(optimizers, (ours, theirs), strict=True):
            p.grad = torch.linspace(1, 2, 12)
            compat.update_scaled(optimizer, torch.tensor(scale), torch.tensor(skip))
    assert torch.equal(ours, theirs) and float(optimizers[0].state[ours]["step"]) == 2.0


def compiled_kernel(target: str, copy: str | None, quantised: str | None, *, even: bool = True) -> str:
    """The kernel's assembly. copy, quantised: formats of the copies that it writes."""
    from phalanx.kernels import adamw_triton as module  # noqa: PLC0415

    read = ("parameter", "gradient", "first_moment", "second_moment", "rounded", "corrections", "divisor", "skip")
    tensors = (*read, "quantised", "scale", "amax")
    numbers = ("lr", "decay", "beta1", "beta2", "eps")
    types = {
        **dict.fromkeys(tensors, "*fp32"),
        "rounded": f"*{copy or 'fp32'}",
        "quantised": f"*{quantised or 'fp32'}",
        "amax": "*i32",
        "n": "i64",
        **dict.fromkeys(numbers, "fp32"),
    }
    constants = {"TILE": module.TILE, "EVEN": even, "COPY": copy is not None, "QUANTISE": quantised is not None}
    places = tuple(range(len(tensors) + even))
    return assembly_of(module.adamw_kernel, target, module.WARPS, types, constants, even=places)


@needs_triton
@pytest.mark.parametrize(("target", "quantised"), [("sm_90", "fp8e4nv"), ("gfx942", "fp8e4b8")])
def test_kernel_writes_eight_bits_and_their_largest_number(target: str, quantised: str) -> None:
    """MI250X has no 8-bit numbers: its runs have no such copies."""
    from phalanx.kernels import adamw_triton as module  # noqa: PLC0415

    assembly = compiled_kernel(target, None, quantised)
    load, store = WIDE[ASSEMBLY[target]]
    of_16_bytes = 4 * module.TILE // (16 * threads(target, module.WARPS))
    assert len(re.findall(load, assembly)) == 4 * of_16_bytes
    assert len(re.findall(store, assembly)) == 3 * of_16_bytes
    (largest,) = re.findall(r"(?:atom|red)\.\S*max\S*|global_atomic_s?max\S*", assembly)
    # As whole numbers with a sign, which the order of sizes is that of; nobody waits for what was there.
    assert "f32" not in largest and "f64" not in largest
    compiled_kernel(target, None, quantised, even=False)


@needs_triton
@pytest.mark.parametrize("copy", [None, "bf16", "fp16"])
@pytest.mark.parametrize("target", ASSEMBLY)
def test_kernel_compiles_to_wide_accesses(target: str, copy: str | None) -> None:
    from phalanx.kernels import adamw_triton as module  # noqa: PLC0415

    assembly = compiled_kernel(target, copy, None)
    load, store = WIDE[ASSEMBLY[target]]
    of_16_bytes = 4 * module.TILE // (16 * threads(target, module.WARPS))
    assert len(re.findall(load, assembly)) == 4 * of_16_bytes
    assert len(re.findall(store, assembly)) == 3 * of_16_bytes + (of_16_bytes // 2 if copy else 0)
    # The four numbers that all threads read, and on AMD half as many bytes of the copy as of the parameter.
    half = "dwordx2" if copy and target != "sm_90" else "(?!)"
    narrow = [x for x in re.findall(NARROW[ASSEMBLY[target]], assembly) if not re.search(half, x)]
    assert all("store" not in access and "st." not in access for access in narrow)
    # AMD's bfloat16 is rounded by adding half of the last place, not cut off.
    assert copy != "bf16" or target == "sm_90" or "0x7fff" in assembly


INTERPRETED = """
import torch
from torch import nn
from phalanx.torch_compat import common as compat
from phalanx.kernels import adamw_triton
from phalanx.kernels.float8 import QuantisedCopy
from phalanx.optimizers import adamw

# The interpreter runs on the CPU, where PyTorch's own kernel would be chosen.
class Large(adamw.AdamW):
    def _is_large(self, p):
        return p.grad is not None and bool(self.state.get(p)) and p.numel() > 8

torch.cuda.device = lambda device: __import__("contextlib").nullcontext()
start = [torch.randn(n, generator=torch.Generator().manual_seed(n)) for n in (1024, 2 * 1024 + 5, 8)]
ours, theirs = ([nn.Parameter(x.clone()) for x in start] for _ in range(2))
def groups(p):
    return [{"params": [p[0], p[2]], "weight_decay": 0.1}, {"params": [p[1]], "weight_decay": 0.0}]
options = {"lr": 0.01, "betas": (0.9, 0.95), "eps": 1e-8, "fused": True}
# The interpreter cuts bfloat16 off where devices round: float16 it rounds.
copies = {p: p.detach().half() for p in ours}
optimizers = Large(groups(ours), **options), torch.optim.AdamW(groups(theirs), **options)
optimizers[0].compute_copies = copies
def in_8_bits(p):
    found = QuantisedCopy.empty(torch.zeros_like(p, dtype=torch.float8_e5m2))
    found.scale.fill_(2.0**-10)
    return found
quantised = {p: in_8_bits(p) for p in ours}
optimizers[0].quantised_copies = quantised
for number, (scale, skip) in enumerate(((1.0, 0.0), (2.0, 0.0), (1.0, 1.0), (0.5, 0.0), (None, None))):
    for optimizer, parameters in zip(optimizers, (ours, theirs)):
        for p in parameters:
            p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(number))
        kept = [p.grad for p in parameters]
        if scale is None:
            optimizer.step()
        else:
            compat.update_scaled(optimizer, torch.tensor(scale), torch.tensor(skip))
        assert all(p.grad is grad for p, grad in zip(parameters, kept))
    # The first update, and small parameters, are PyTorch's, which knows no copies.
    large = [copy for p in ours[:2] for copy in (copies[p], quantised[p].q)] if number else []
    assert sorted(map(id, optimizers[0].written)) == sorted(map(id, large))
    for p in ours[:2] if number else ():
        assert torch.equal(copies[p], p.to(copies[p].dtype))
        in_8_bits = quantised[p]
        # The interpreter cuts off here too, and loses the carry of what it should round up to a power of two.
        kept = torch.frexp(p.detach()).mantissa.abs() < 0.93
        found = in_8_bits.q.float() * in_8_bits.scale
        torch.testing.assert_close(found[kept], p.detach()[kept], rtol=0.3, atol=1e-4)
        assert float(in_8_bits.amax) == float(p.abs().max())
    for a, b in zip(ours, theirs):
        torch.testing.assert_close(a, b, rtol=2e-6, atol=2e-7)
        for name in ("exp_avg", "exp_avg_sq", "step"):
            found, wanted = (o.state[p][name] for o, p in zip(optimizers, (a, b)))
            torch.testing.assert_close(found, wanted, rtol=2e-6, atol=1e-7)
assert float(optimizers[0].state[ours[0]]["step"]) == 4.0
"""


@needs_triton
def test_kernel_updates_as_pytorch_does() -> None:
    """Scaled, skipped and plain updates, in groups with and without weight decay, with and without a ragged end."""
    run_interpreted(INTERPRETED)
