"""The order of test files: what takes longest begins first, so that no core waits for another at the end.

Tests run on the CPU whatever devices the machine has, but for those marked `gpu`, which `make test-gpu` runs alone. And what
all of them load is not looked through for garbage again: dry runs collect it several times each. SIGINT and SIGQUIT work,
also where the tests run in the background of a shell, which lets its jobs and all they start ignore them. The user's cache
is left alone.
"""

from __future__ import annotations

import gc
import os
import shutil
import signal
import sys
import tempfile
from pathlib import Path

import pytest

from phalanx.launch.collectives import RECORDER_VARIABLES

_LONGEST_FIRST = (
    "verification/test_expert_parity.py",
    "cli/test_printed_commands.py",
    "memory/test_agreement.py",
    "examples/test_notebooks.py",
    "verification/test_parity.py",
    "cli/test_tune.py",
    "dryrun/test_dryrun.py",
    "verification/test_optimizer_parity.py",
    "weather/test_weather_parity.py",
    "cli/test_search.py",
    "memory/test_expert_agreement.py",
    "verification/test_variant_parity.py",
    "cli/test_bench.py",
    "verification/test_offloaded_activations_parity.py",
    "examples/test_own_model.py",
    "cli/test_train.py",
    "weather/test_weather_run.py",
    "tensor_parallel/test_overlapped_products.py",
    "expert_parallel/test_token_exchange.py",
    "examples/test_fresh_clone.py",
    "verification/test_streamed_parity.py",
    "safeguards/test_memory_limit.py",
    "training/test_layout_resume.py",
    "time/test_leading_blocks.py",
    "language/test_variants.py",
    "materials/test_materials_parity.py",
    "graph_parallel/test_halo_exchange.py",
    "verification/test_reported_mutations.py",
    "verification/test_gathered_together.py",
    "data/test_field_packages.py",
    "verification/test_float8_parity.py",
    "verification/test_mutations.py",
    "verification/test_offloaded_parity.py",
    "verification/test_replayed_routing.py",
)
"""Files of 15 CPU seconds or more, those of their ranks included; of `verification`, else among the last, of 12 or more."""
_PLACE = {name: place for place, name in enumerate(_LONGEST_FIRST)}


_OWN_CACHE = "PYTEST_OF_PHALANX_CACHE"
"""Set by the process that made the cache of these tests, whose workers share it."""


_VISIBLE_DEVICES = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")


def pytest_configure(config: pytest.Config) -> None:
    """Set up the environment before any test module loads torch; processes that tests start inherit it."""
    # Until all is loaded: it would look through torch again and again.
    gc.disable()
    if config.option.markexpr == "gpu":
        # Each test process compiles its kernels in so many more; by default one a core.
        os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "2")
    else:
        os.environ.update(dict.fromkeys(_VISIBLE_DEVICES, "-1"))
    os.environ.update(RECORDER_VARIABLES)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGQUIT, signal.SIG_DFL)
    if _OWN_CACHE not in os.environ:
        os.environ["XDG_CACHE_HOME"] = os.environ[_OWN_CACHE] = tempfile.mkdtemp(prefix="phalanx-tests-")
        config.add_cleanup(lambda: shutil.rmtree(os.environ[_OWN_CACHE], ignore_errors=True))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort by file alone: tests of a file keep their order, and files that are not named follow in theirs."""
    items.sort(key=lambda item: _PLACE.get(Path(*item.path.parts[-2:]).as_posix(), len(_PLACE)))


def pytest_collection_finish() -> None:
    """All modules of all tests are loaded now."""
    if ranks := sys.modules.get("distributed_ranks"):
        # Before a test starts the process's only fork server with less loaded: a hundred ranks would load torch again.
        ranks.start_fork_server()
    gc.collect()
    gc.freeze()
    gc.enable()
