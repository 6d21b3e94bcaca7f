"""Number formats that a CPU reports and cannot compute in.

Virtual machines may report an instruction that they do not execute. A process that tries it ends by SIGILL, without a
message, so a copy of this process tries first.
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


def require_cpu_format(dtype: torch.dtype, device: torch.device, option: str = "layout.precision") -> None:
    """Raise ConfigError where `device` is a CPU that ends a process which multiplies in `dtype`.

    option: the field or option by which the user chose the format, for the message.
    """
    if device.type == "cpu" and dtype in (torch.bfloat16, torch.float16) and not survives_products(dtype):
        name = {torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype]
        raise ConfigError(
            f"{option}={name} cannot be computed here: this CPU reports an instruction for {name} products that it does not "
            f"execute (illegal instruction)\nset {option}=fp32"
        )


@cache
def survives_products(dtype: torch.dtype) -> bool:
    """Return whether a forked copy of this process survives a matrix product in `dtype` on this CPU."""
    if sys.platform != "linux":
        return True
    with warnings.catch_warnings():
        # Python warns of forking a process with threads. The copy runs on one thread and needs none of the others.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        try:
            # The parent's handler would write a traceback of a crash that is expected.
            faulthandler.disable()
            signal.signal(signal.SIGILL, signal.SIG_DFL)
            # A copy that hangs in a lock of another thread must end all the same: by SIGALRM, after a minute.
            signal.alarm(60)
            torch.set_num_threads(1)
            # Large enough that the library takes the kernel that real models take.
            factor = torch.ones(256, 256, dtype=dtype)
            torch.mm(factor, factor.T)
        finally:
            # The copy must not run the parent's exit handlers or return into its code.
            os._exit(0)
    _, status = os.waitpid(child, 0)
    return not (os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGILL)
