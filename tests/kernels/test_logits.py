"""Log-partitions of rows of logits and gradients in their place, beside PyTorch's own cross-entropy."""

from __future__ import annotations

import re

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ahead_of_time import ASSEMBLY, WIDE, assembly_of, needs_triton, run_interpreted
from phalanx.kernels.logits import (
    log_partition,
    log_partition_kernel,
    replace_by_gradient,
    replace_by_gradient_kernel,
)

BOUND = {"rtol": 1e-12, "atol": 1e-12}


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_the_gradient_is_that_of_cross_entropy() -> None:
    logits = 3.0 * random(5, 11, seed=1)
    logits[3] = torch.nan
    target = torch.tensor([0, 10, 4, 2, 99])
    factor = torch.tensor([1.0, 1.5, 1.0, 0.0, 1.0], dtype=torch.float64)
    log_z = log_partition(logits)
    torch.testing.assert_close(log_z, torch.logsumexp(logits, -1), equal_nan=True, **BOUND)
    probability = torch.softmax(logits, -1) * factor[:, None]
    expected = probability - F.one_hot(target.clamp(max=10), 11)
    # A row without a target is 0 whatever it held; a target among the columns of another rank is in none here.
    expected[3], expected[4] = 0.0, probability[4]
    replace_by_gradient(logits, log_z, target, factor)
    torch.testing.assert_close(logits, expected, **BOUND)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_sums_are_formed_in_float32(dtype: torch.dtype) -> None:
    logits = random(3, 1000).to(dtype)
    log_z = log_partition(logits)
    assert log_z.dtype == torch.float32
    torch.testing.assert_close(log_z.double(), torch.logsumexp(logits.double(), -1), rtol=1e-6, atol=1e-6)
    exact = torch.softmax(logits.double(), -1)
    replace_by_gradient(logits, log_z, torch.full((3,), 1000), torch.ones(3))
    assert logits.dtype == dtype
    # Half a unit in the last place, of the smallest numbers that the format has as well.
    smallest = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    bound = torch.finfo(dtype).eps * 0.51 * exact + smallest + 1e-6 * exact
    assert ((logits.double() - exact).abs() <= bound).all()


def test_compilers_see_shapes_and_what_is_written_over() -> None:
    logits, target, factor = random(4, 7).float(), torch.arange(4), torch.ones(4)
    torch.library.opcheck(log_partition_kernel, (logits,))
    torch.library.opcheck(replace_by_gradient_kernel, (logits, log_partition(logits), target, factor))


# --- the Triton kernels, compiled for devices that are not here ---------------------------------------------------------


@needs_triton
@pytest.mark.parametrize("element", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("target", ASSEMBLY)
def test_kernels_compile_to_wide_accesses(target: str, element: str) -> None:
    from phalanx.kernels import logits_triton as kernels  # noqa: PLC0415

    load, store = WIDE[ASSEMBLY[target]]
    constants = {"TILE": kernels.TILE}
    types = {"logits": f"*{element}", "log_z": "*fp32", "columns": "i32"}
    assembly = assembly_of(kernels.log_partition_kernel, target, kernels.WARPS, types, constants, even=(0, 1, 2))
    assert re.findall(load, assembly)
    types = {"logits": f"*{element}", "log_z": "*fp32", "target": "*i64", "factor": "*fp32", "columns": "i32"}
    even = tuple(range(5))
    assembly = assembly_of(kernels.replace_by_gradient_kernel, target, kernels.WARPS, types, constants, even=even)
    assert re.findall(load, assembly) and re.findall(store, assembly)


INTERPRETED = """
import torch
from phalanx.kernels import logits_triton as kernels
from phalanx.kernels.logits import log_partition_reference, replace_by_gradient_reference

class Here:
    def __init__(self, *_): ...
    def __enter__(self): ...
    def __exit__(self, *_): ...

torch.cuda.device = Here
kernels.TILE = 64
for rows, columns in ((3, 200), (2, 64), (1, 5)):
    torch.manual_seed(rows)
    logits = 20.0 * torch.randn(rows, columns)
    logits[0] -= 1000.0
    log_z = kernels.run_log_partition(logits)
    torch.testing.assert_close(log_z, log_partition_reference(logits), rtol=1e-6, atol=1e-5)
    target, factor = torch.arange(rows) * 2, torch.ones(rows) + 0.25
    factor[-1] = 0.0
    wanted = logits.clone()
    replace_by_gradient_reference(wanted, log_z, target, factor)
    kernels.run_replace_by_gradient(logits, log_z, target, factor)
    torch.testing.assert_close(logits, wanted, rtol=1e-5, atol=1e-6)
"""


@needs_triton
def test_kernels_compute_what_their_references_do() -> None:
    run_interpreted(INTERPRETED)
