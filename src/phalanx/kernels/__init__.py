"""Own kernels for accelerators, each beside a plain PyTorch reference that runs everywhere.

Triton comes with every accelerator build of PyTorch for Linux, and with no other: modules with its kernels are imported
where it is there.
"""

from __future__ import annotations

import importlib
import importlib.util
from functools import cache
from types import ModuleType

from torch import Tensor

LARGE = 1 << 20
"""Elements of a tensor from which on a kernel of our own is worth its launch."""


@cache
def triton_module(name: str) -> ModuleType | None:
    """Return `phalanx.kernels.<name>`, or None where Triton is not installed."""
    # Looked for before it is imported: without Triton the module's own import would fail.
    if importlib.util.find_spec("triton") is None:
        return None
    return importlib.import_module(f"phalanx.kernels.{name}")


def kernels_for(x: Tensor, name: str) -> ModuleType | None:
    """Return `phalanx.kernels.<name>` where Triton is installed and compiles for the device of `x`, else None."""
    return triton_module(name) if x.is_cuda else None
