"""PyTorch's flight recorder: the last collectives of this rank, whatever the backend. Private names are used here alone."""

from __future__ import annotations

import os

import torch

RECORDS = 512
"""Collectives that a rank remembers."""


def record_collectives() -> None:
    """Have this process remember its last collectives. Call before the first process group is made."""
    # NCCL measures how long a collective takes on the device only where it is asked to.
    for name, value in (("TORCH_FR_BUFFER_SIZE", str(RECORDS)), ("TORCH_NCCL_ENABLE_TIMING", "1")):
        os.environ.setdefault(name, value)


def last_collectives() -> str | None:
    """Return the last collectives of this rank as JSON; None where this PyTorch cannot tell."""
    dump = getattr(getattr(torch._C, "_distributed_c10d", None), "_dump_fr_trace_json", None)
    if dump is None:
        return None
    text = dump()
    return text.decode() if isinstance(text, bytes) else str(text)
