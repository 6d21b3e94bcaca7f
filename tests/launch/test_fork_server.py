"""What is loaded before ranks are forked leaves their devices to them."""

from __future__ import annotations

import subprocess
import sys

from distributed_ranks import PRELOADED
from phalanx.launch import fork_server

LOAD = """
import importlib, sys, torch

def ask(*_):
    raise AssertionError("a module asks for devices as it is loaded")

torch.cuda.is_available = torch.cuda.device_count = torch.cuda._lazy_init = ask
for name in sys.argv[1:]:
    importlib.import_module(name)
# With CUDA it asks as it is loaded.
assert "torch._inductor.runtime.benchmarking" not in sys.modules
"""


def test_modules_that_are_loaded_in_advance_ask_for_no_device() -> None:
    """A process that has asked the CUDA driver for devices cannot fork others that use them."""
    assert set(fork_server.PRELOADED) <= set(PRELOADED)
    subprocess.run([sys.executable, "-c", LOAD, *PRELOADED], check=True)
