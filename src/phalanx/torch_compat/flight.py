"""PyTorch's flight recorders: the last collectives of this rank, whatever the backend. Private names are used here alone.

Backends that measure with events of a device, NCCL and RCCL, have a recorder of their own; gloo writes to another. A run on
devices has groups of both.
"""

from __future__ import annotations

import torch

_DUMPS = ("_dump_fr_trace_json", "_dump_nccl_trace_json")
"""Functions that give a recorder's text: gloo's, and that of NCCL or RCCL, which a build for the CPU does not have."""


def last_collectives() -> str | None:
    """Return the last collectives of this rank as JSON: a list of what each recorder gives; None where PyTorch has none.

    A recorder on a device asks for the state of events, which another thread's capture of a CUDA graph forbids unless it is
    "thread_local", as all captures here and those of the compiler are. Raises RuntimeError where the device has failed.
    """
    module = getattr(torch._C, "_distributed_c10d", None)
    dumps = [dump for name in _DUMPS if (dump := getattr(module, name, None)) is not None]
    if not dumps:
        return None
    # Joined as text: to read and to write them again would keep Python's lock for milliseconds.
    texts = [text.decode() if isinstance(text, bytes) else text for text in (dump() for dump in dumps)]
    return f"[{','.join(texts)}]"
