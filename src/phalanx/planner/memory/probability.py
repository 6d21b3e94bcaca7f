"""Whether a layout fits a device: what lies beside the tensors, and how sure one can be.

Beside live tensors a device holds what its driver keeps, the context with the loaded kernels, buffers of the communication
library, and holes between the allocator's blocks. None of it follows from the model; these are measured figures with their
sources, and their uncertainty is part of the answer.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import from_numpy
from torch.special import erfc

from phalanx.layout.spec import LayoutTable

FloatArray = npt.NDArray[np.float64]
GIB = 2**30


@dataclass(frozen=True)
class Beside:
    """What a rank's device holds beside tensors."""

    context: float
    """Bytes of the context and its kernels."""
    communicator: float
    """Bytes for each group of ranks that communicates."""
    holes: float = 1.03
    """What the allocator takes from the device, over what it gives out, close to a full device."""
    source: str = ""


BESIDE = {
    "cuda": Beside(
        context=0.9 * GIB,
        communicator=0.35 * GIB,
        source="context: 0.3 GB for a process with few kernels (PyTorch issue 107667) to 1.6 GB with all libraries; "
        "communicators: 1.6 GB for one that reduces over a node to 6 GB for more than three with NCCL of 2023 (NCCL issue "
        "864), less since; holes: torchtitan on four H200s reserved 109.1 GiB for 99.6 GiB where 30 GiB were free "
        "(benchmarks/results/layouts), which it need not have: a full allocator gives back what it does not use",
    ),
    "rocm": Beside(
        context=0.9 * GIB,
        communicator=0.35 * GIB,
        source="no figure of our own or anyone's found: taken to be as CUDA's",
    ),
}
"""By the vendor's programming interface."""

KEPT_BY_DRIVER = 0.01
"""Share of a device's nominal memory that no program gets: an H200 of 141 GiB offers somewhat over 139."""

MODEL_SPREAD = 0.02
"""Standard deviation of the logarithm of modelled over measured bytes of tensors; see docs/guides/planning.md."""
BESIDE_SPREAD = 0.5
"""The same of what lies beside them, the holes' part among it."""


def communicators(candidates: LayoutTable) -> npt.NDArray[np.int64]:
    """Return how many groups a rank communicates in: all ranks, and each axis of several ranks that is not all of them."""
    c = candidates
    world = c.world_size
    return np.asarray(
        (world > 1).astype(np.int64) + sum(((size > 1) & (size < world)).astype(np.int64) for size in c.group_sizes)
    )


def device_bytes(allocated: FloatArray, groups: Any, beside: Beside, peer_buffers: Any = 0.0) -> FloatArray:
    """Return the bytes that a device holds. allocated: bytes of live tensors at their peak. groups: see `communicators`.

    peer_buffers: bytes that shards exchange through, see `layout.peer_copies`.
    """
    return np.asarray(allocated * beside.holes + beside.context + groups * beside.communicator + peer_buffers)


def fits(
    allocated: FloatArray,
    groups: Any,
    capacity: float,
    beside: Beside,
    peer_buffers: Any = 0.0,
    load_spread: Any = 0.0,
) -> FloatArray:
    """Return the probability that layouts fit devices of `capacity` bytes, as vendors count them.


    Other arguments are those of `device_bytes`. load_spread: one standard deviation of the bytes that uneven loads of
    experts take.

    The logarithm of what is needed is taken as normally distributed.
    """
    needed = device_bytes(allocated, groups, beside, peer_buffers)
    # Three errors add up as variances: of the model, of what lies beside tensors, and of uneven loads.
    uncertain = BESIDE_SPREAD * (needed - allocated - peer_buffers) / needed
    spread = np.sqrt(MODEL_SPREAD**2 + uncertain**2 + (load_spread / needed) ** 2)
    margin = np.log(capacity * (1 - KEPT_BY_DRIVER) / needed) / spread
    return np.asarray(0.5 * erfc(from_numpy(np.asarray(-margin / sqrt(2)))).numpy())
