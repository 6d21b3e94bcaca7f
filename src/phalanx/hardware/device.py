"""The device this process runs on: which one it is, what its vendor says of it, and how fast its matmuls really are."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import time
import warnings
from functools import cache
from typing import Any

import torch
from torch import Tensor

from phalanx.errors import ConfigError


def choose_device(requested: str, local_rank: int = 0) -> torch.device:
    """Return the device of this rank; `auto` takes the accelerator PyTorch finds, else the CPU.

    requested: `auto`, `cpu` or an accelerator type. local_rank: number of the rank on its node. Raises ConfigError for a
    device type PyTorch cannot use here, and for more ranks than devices.
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if requested == "cpu" or (requested == "auto" and accelerator is None):
        return torch.device("cpu")
    if accelerator is None or requested not in ("auto", accelerator.type):
        found = "none" if accelerator is None else accelerator.type
        raise ConfigError(
            f"cluster.device={requested} cannot be used: PyTorch {torch.__version__} finds accelerator: {found}; "
            f"allowed here: auto, cpu{'' if accelerator is None else ', ' + accelerator.type}"
        )
    count = torch.accelerator.device_count()
    if count > 1 and local_rank >= count:
        raise ConfigError(
            f"local rank {local_rank} has no device: this node shows {count}; start at most {count} ranks"
        )
    # Slurm's --gpus-per-task=1 shows each task one device, whose number is 0 whatever the local rank.
    return torch.device(accelerator.type, local_rank if count > 1 else 0)


def device_name(device: torch.device) -> str:
    """Return the name the driver reports for an accelerator, or "cpu"."""
    if device.type == "cpu":
        return "cpu"
    return str(torch.get_device_module(device).get_device_name(device))


def memory_bytes(device: torch.device) -> int | None:
    """Return the bytes of an accelerator's memory as its driver reports them; None for the CPU, whose memory is shared."""
    if device.type == "cpu":
        return None
    return int(torch.get_device_module(device).get_device_properties(device).total_memory)


def reset_peak_bytes(device: torch.device) -> None:
    """Begin to look for the most bytes that tensors take on an accelerator, for `peak_bytes`."""
    torch.get_device_module(device).reset_peak_memory_stats(device)


def peak_bytes(device: torch.device) -> int:
    """Return the most bytes that live tensors took on an accelerator since `reset_peak_bytes`."""
    return int(torch.get_device_module(device).max_memory_allocated(device))


def synchronize(device: torch.device) -> None:
    """Wait for all work queued on `device`; the CPU queues none."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


class Moment:
    """The time at which a device has finished everything launched on its current stream so far.

    On an accelerator this is an event; on the CPU, which launches nothing, the time at which the object was made.
    """

    def __init__(self, device: torch.device) -> None:
        self._at: float | None = None
        self._event: Any = None
        if device.type == "cpu":
            self._at = time.perf_counter()
        else:
            self._event = torch.get_device_module(device).Event(enable_timing=True)
            self._event.record()

    def wait(self) -> None:
        """Wait until the moment has passed."""
        if self._event is not None:
            self._event.synchronize()

    def seconds_since(self, earlier: Moment) -> float:
        """Return the seconds between two moments of one device; both must have passed."""
        if self._at is not None:
            assert earlier._at is not None
            return self._at - earlier._at
        # Events count in milliseconds.
        return float(earlier._event.elapsed_time(self._event)) / 1e3


class HostCopy:
    """An asynchronous copy of device numbers to the host.

    The copy is queued at once, so reading it later does not wait for work launched since; a plain `.tolist()` would queue
    behind that work.
    """

    def __init__(self, values: Tensor) -> None:
        self._values = values
        if values.device.type != "cpu":
            # Only copies into pinned memory are asynchronous.
            self._values = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._values.copy_(values, non_blocking=True)
        self.made = Moment(values.device)

    def read(self) -> list[Any]:
        """Wait for the copy and return the numbers."""
        self.made.wait()
        found: list[Any] = self._values.tolist()
        return found


def measure_matmul_tflops(device: torch.device, dtype: torch.dtype, *, size: int | None = None) -> float:
    """Return the TFLOP/s of the fastest of ten timed square matmuls on random data.

    size: rows and columns; by default 8192 on an accelerator, and on the CPU at most 1024.
    """
    if size is None:
        size = 8192 if device.type != "cpu" else 1024
        # A CPU without 16-bit instructions multiplies these formats a thousand times slower: 0.1 s a product is enough.
        while device.type == "cpu" and size > 128 and time_products(device, dtype, size, 1)[0] > 0.1:
            size //= 2
    # Other work on the machine makes products slower and never faster, so the fastest tells most.
    return 2 * size**3 / min(time_products(device, dtype, size, 10)) / 1e12


def time_products(device: torch.device, dtype: torch.dtype, size: int, count: int) -> list[float]:
    """Return the seconds of `count` products of two random [size, size] matrices."""
    # A generator of its own leaves the run's random numbers as they are, however many products are timed.
    generator = torch.Generator(device).manual_seed(0)
    a, b = (torch.randn(size, size, device=device, generator=generator).to(dtype) for _ in range(2))
    seconds = []
    for _ in range(count):
        synchronize(device)
        start = time.perf_counter()
        a @ b
        synchronize(device)
        seconds.append(time.perf_counter() - start)
    return seconds


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
