"""MACE's coupled messages and symmetric contractions by cuEquivariance: one kernel each for what is otherwise many.

To cuEquivariance they are segmented polynomials: components are segments of all channels, and a term multiplies a few
segments channel by channel and adds them, times a coefficient, to one of the result. The polynomials here are built from
our own constants, so results are those of `mace` up to rounding, of the same parameters. Its kernels run on NVIDIA devices;
elsewhere it computes the same by operations of PyTorch, which tests use.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from phalanx.files import user_cache
from phalanx.torch_compat.common import inside_transform, is_rocm

Segments = tuple[int, ...]
Term = tuple[Segments, float]
"""Numbers of the segments that are multiplied, then of the one that the product is added to; its coefficient."""
Polynomial = Callable[..., list[Tensor]]
_WARP = 32
"""Channels that a group of its threads computes together: other widths would leave some idle."""
_KERNEL_FOLDER = "CUEQUIVARIANCE_OPS_NVRTC_CACHE_DIR"
"""Variable of cuEquivariance for the folder of compiled kernels; without one it keeps none."""


def has_kernels(x_NSC: Tensor) -> bool:
    """Return whether cuEquivariance is installed with kernels for a tensor such as this."""
    if why_no_kernels(x_NSC.device, x_NSC.dtype, x_NSC.shape[-1]) or inside_transform():
        # They have no rule for vmap, and none for nothing.
        return False
    return bool(x_NSC.shape[0])


def why_no_kernels(device: torch.device, dtype: torch.dtype, width: int) -> str:
    """Return why cuEquivariance computes nothing of this format and so many channels on `device`; empty where it does."""
    if device.type != "cuda" or is_rocm():
        return "its kernels are for NVIDIA devices"
    if dtype not in (torch.float32, torch.float64):
        return f"it has no kernels for {str(dtype).removeprefix('torch.')}"
    if width % _WARP:
        return f"its kernels want a width that {_WARP} divides, not {width}"
    if torch.are_deterministic_algorithms_enabled():
        return "its sums over edges are in no fixed order, and training.deterministic asks for one"
    if not _kernels_are_there():
        return "cuequivariance-torch and cuequivariance-ops-torch are not both installed"
    return ""


@cache
def _kernels_are_there() -> bool:
    return find_spec("cuequivariance_torch") is not None and find_spec("cuequivariance_ops_torch") is not None


@cache
def keep_compiled_kernels() -> Path | None:
    """Have cuEquivariance keep the kernels that it compiles, and return the folder; None where none can be written.

    To be called before it is loaded. What the environment says already holds.
    """
    # Several versions of each kernel are compiled and compared: here at the same time.
    os.environ.setdefault("CUEQUIVARIANCE_OPS_PARALLEL_COMPILE", "1")
    folder = Path(os.environ.get(_KERNEL_FOLDER) or user_cache() / "cuequivariance")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return None
    os.environ[_KERNEL_FOLDER] = str(folder)
    return folder


def sum_coupled(
    terms: tuple[Term, ...],
    components: int,
    weights_EKC: Tensor,
    features_MSC: Tensor,
    harmonics_EH: Tensor,
    source_E: Tensor,
    target_E: Tensor,
    atoms: int,
) -> Tensor:
    """Return sums over the edges that end at each atom, [atoms, components, C].

    terms: path, component of the source's features, harmonic, component of the sum.
    """
    paths, width = weights_EKC.shape[1:]
    counts = ((paths, True), (features_MSC.shape[1], True), (harmonics_EH.shape[1], False), (components, True))
    polynomial = _polynomial(terms, counts, width, weights_EKC.dtype, weights_EKC.device.type)
    inputs = [weights_EKC.flatten(1), features_MSC.flatten(1), harmonics_EH]
    like = weights_EKC.new_empty((atoms, 1))
    (sums,) = polynomial(inputs, {1: source_E}, {0: like}, {0: target_E})
    sums_NSC: Tensor = sums.unflatten(1, (components, width))
    return sums_NSC


def contract_components(terms: tuple[Term, ...], components: int, weights_NKC: Tensor, features_NSC: Tensor) -> Tensor:
    """Return polynomials of the components of each atom, [N, components, C].

    terms: weight, then as many components as are multiplied, then component of the result.
    """
    weights, width = weights_NKC.shape[1:]
    counts = ((weights, True), (features_NSC.shape[1], True), (components, True))
    polynomial = _polynomial(terms, counts, width, weights_NKC.dtype, weights_NKC.device.type)
    (found,) = polynomial([weights_NKC.flatten(1), features_NSC.flatten(1)], {}, {}, {})
    found_NSC: Tensor = found.unflatten(1, (components, width))
    return found_NSC


@cache
def _polynomial(
    terms: tuple[Term, ...],
    counts: tuple[tuple[int, bool], ...],
    width: int,
    dtype: torch.dtype,
    device_type: str,
) -> Polynomial:
    """Return the sum of all terms. counts: segments of each input and of the result, and whether they have channels.

    In a term of more factors than there are inputs, all between the first and the result are of the second input.
    """
    keep_compiled_kernels()
    cue: Any = importlib.import_module("cuequivariance")
    cuet: Any = importlib.import_module("cuequivariance_torch")
    operations = []
    for factors in sorted({len(segments) for segments, _ in terms}):
        last = len(counts) - 1
        places = (0, *(range(1, last) if factors == len(counts) else [1] * (factors - 2)), last)
        product = cue.SegmentedTensorProduct.from_subscripts(",".join("u" if counts[p][1] else "" for p in places))
        for operand, place in enumerate(places):
            count, channels = counts[place]
            product.add_segments(operand, [(width,) if channels else ()] * count)
        for segments, value in terms:
            if len(segments) == factors:
                product.add_path(*segments, c=value)
        operations.append((cue.Operation(places), product))
    operands = {place: product.operands[i] for op, product in operations for i, place in enumerate(op.buffers)}
    ordered = [operands[place] for place in range(len(counts))]
    polynomial = cue.SegmentedPolynomial(ordered[:-1], ordered[-1:], operations)
    method = "uniform_1d" if device_type == "cuda" else "naive"
    found: Polynomial = cuet.SegmentedPolynomial(polynomial, method=method, math_dtype=dtype)
    return found
