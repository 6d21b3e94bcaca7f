"""Sums of parts that arrived from several ranks: right numbers, in the order of the ranks, and wide memory accesses."""

from __future__ import annotations

import re

import pytest
import torch

from ahead_of_time import ASSEMBLY, NARROW, WIDE, assembly_of, needs_triton, run_interpreted, threads
from phalanx.kernels.parts_sum import add_gradient, sum_parts
from phalanx.planner.dryrun.memory_trace import StepTrace


@pytest.mark.parametrize(("parts", "total"), [("bfloat16", "float32"), ("float32", "float32"), ("float64", "float64")])
def test_sums_are_formed_in_the_wider_format(parts: str, total: str) -> None:
    values = torch.randn(3, 1000, generator=torch.Generator().manual_seed(0)).to(getattr(torch, parts))
    found = torch.empty(1000, dtype=getattr(torch, total))
    sum_parts(values, found)
    torch.testing.assert_close(found.double(), values.double().sum(0), rtol=2e-7, atol=3e-7)
    sum_parts(values, found, add=True)
    torch.testing.assert_close(found.double(), 2 * values.double().sum(0), rtol=2e-7, atol=6e-7)


def test_a_gradient_is_added_without_a_wider_copy_of_it() -> None:
    trace = StepTrace()
    with trace.watching():
        gradient = torch.ones(2**21, dtype=torch.bfloat16)
        total = add_gradient(gradient, None, torch.float32)
        held = trace.now
        assert add_gradient(gradient, total, torch.float32) is total
    assert trace.peak == held
    assert torch.equal(total, torch.full_like(total, 2.0))


@needs_triton
@pytest.mark.parametrize(("ranks", "add"), [(2, False), (8, False), (1, True)])
@pytest.mark.parametrize("element", ["bf16", "fp32"])
@pytest.mark.parametrize("target", ASSEMBLY)
def test_kernel_compiles_to_wide_accesses(target: str, element: str, ranks: int, add: bool) -> None:
    from phalanx.kernels import parts_sum_triton as module  # noqa: PLC0415

    types = {"parts": f"*{element}", "total": "*fp32", "n": "i64"}
    constants = {"RANKS": ranks, "TILE": module.TILE, "EVEN": True, "ADD": add}
    kernel = module.sum_parts_kernel
    assembly = assembly_of(kernel, target, module.WARPS, types, constants, even=(0, 1, 2))
    load, store = WIDE[ASSEMBLY[target]]
    loaded, stored = ((size * module.TILE) // (16 * threads(target, module.WARPS)) for size in (_BYTES[element], 4))
    assert len(re.findall(load, assembly)) == ranks * loaded + (stored if add else 0)
    assert len(re.findall(store, assembly)) == stored
    assert not re.findall(NARROW[ASSEMBLY[target]], assembly)


_BYTES = {"bf16": 2, "fp32": 4}


INTERPRETED = """
import torch
from phalanx.kernels.parts_sum_triton import TILE, sum_parts_kernel

for ranks, n in ((2, 2 * TILE), (3, TILE + 7), (5, 11)):
    torch.manual_seed(n)
    parts, found = torch.randn(ranks, n).bfloat16(), torch.full((n,), torch.nan)
    wanted = parts[0].float()
    for part in parts[1:]:
        wanted = wanted + part.float()
    sum_parts_kernel[(-(-n // TILE),)](parts, found, n, RANKS=ranks, TILE=TILE, EVEN=n % TILE == 0, ADD=False)
    assert torch.equal(found, wanted)
    sum_parts_kernel[(-(-n // TILE),)](parts, found, n, RANKS=ranks, TILE=TILE, EVEN=n % TILE == 0, ADD=True)
    assert torch.equal(found, wanted + wanted)
"""


@needs_triton
def test_kernel_adds_up_one_rank_after_another() -> None:
    run_interpreted(INTERPRETED)
