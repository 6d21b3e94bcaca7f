"""Number formats that a CPU says it has and cannot compute in.

Virtual machines may report an instruction that they do not execute; the process that tries ends by SIGILL, without a word.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import warnings
from functools import cache

import torch

from phalanx.errors import ConfigError

_SIZE = 256
"""Rows and columns of the products: enough for the kernels of real models."""
_PATIENCE_S = 60


def require_cpu_format(dtype: torch.dtype, device: torch.device, option: str = "layout.precision") -> None:
    """Raise ConfigError where `device` is a CPU that ends a process which multiplies in `dtype`.

    option: what the user chose the format by.
    """
    if device.type == "cpu" and dtype in (torch.bfloat16, torch.float16) and not survives_products(dtype):
        name = {torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype]
        raise ConfigError(
            f"{option}={name} cannot be computed here: this CPU reports an instruction for {name} products that it does not "
            f"execute (illegal instruction)\nset {option}=fp32"
        )


@cache
def survives_products(dtype: torch.dtype) -> bool:
    """Return whether a process survives matrix products in `dtype` on this CPU; a copy of this one tries."""
    if sys.platform != "linux":
        return True
    with warnings.catch_warnings():
        # The copy runs on one thread and asks nothing of the others, which it lacks.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        _multiply(dtype)
    _, status = os.waitpid(child, 0)
    return not (os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGILL)


def _multiply(dtype: torch.dtype) -> None:
    """Multiply, and end this process."""
    try:
        faulthandler.disable()
        signal.signal(signal.SIGILL, signal.SIG_DFL)
        signal.alarm(_PATIENCE_S)
        torch.set_num_threads(1)
        factor = torch.ones(_SIZE, _SIZE, dtype=dtype)
        torch.mm(factor, factor.T)
    finally:
        os._exit(0)
