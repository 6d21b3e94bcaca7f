"""Phalanx trains foundation models on AMD, NVIDIA or plain CPU devices with one program.

This is the whole of its stable Python interface; `docs/extend.md` explains it. Nothing is imported before it is used, so
that `import phalanx` takes no time.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from phalanx.api import dryrun, evaluate, load_model, plan, register, train, verify
    from phalanx.config.families import Family
    from phalanx.config.load import load_run
    from phalanx.config.model import BlockModel
    from phalanx.config.schema import Layout, Run
    from phalanx.data.sources import DataSource, TensorSpec
    from phalanx.families.blocks.bound import BoundBlocks
    from phalanx.families.blocks.config import BlockRun
    from phalanx.families.blocks.network import BlockNetwork
    from phalanx.layout.parallelize import parallelize
    from phalanx.optimizers import OptimizerKind
    from phalanx.training.callbacks import Callback

__version__: str
"""Version of the installed package."""

_PLACES = {
    **dict.fromkeys(("dryrun", "evaluate", "load_model", "plan", "register", "train", "verify"), "phalanx.api"),
    "Family": "phalanx.config.families",
    "load_run": "phalanx.config.load",
    "BlockModel": "phalanx.config.model",
    "Layout": "phalanx.config.schema",
    "Run": "phalanx.config.schema",
    "DataSource": "phalanx.data.sources",
    "TensorSpec": "phalanx.data.sources",
    "BoundBlocks": "phalanx.families.blocks.bound",
    "BlockRun": "phalanx.families.blocks.config",
    "BlockNetwork": "phalanx.families.blocks.network",
    "parallelize": "phalanx.layout.parallelize",
    "OptimizerKind": "phalanx.optimizers",
    "Callback": "phalanx.training.callbacks",
}
"""Module of each name."""
__all__ = [
    "BlockModel",
    "BlockNetwork",
    "BlockRun",
    "BoundBlocks",
    "Callback",
    "DataSource",
    "Family",
    "Layout",
    "OptimizerKind",
    "Run",
    "TensorSpec",
    "dryrun",
    "evaluate",
    "load_model",
    "load_run",
    "parallelize",
    "plan",
    "register",
    "train",
    "verify",
]


def __getattr__(name: str) -> Any:
    """Import what is asked for; the version is the installed package's, which its git tag gave it when it was built."""
    if name == "__version__":
        metadata = import_module("importlib.metadata")
        try:
            return str(metadata.version("phalanx-train"))
        except metadata.PackageNotFoundError:
            return "0+unknown"
    if name not in _PLACES:
        raise AttributeError(f"module 'phalanx' has no attribute {name!r}")
    return getattr(import_module(_PLACES[name]), name)


def __dir__() -> list[str]:
    """Return the names of the interface."""
    return [*__all__, "__version__"]
