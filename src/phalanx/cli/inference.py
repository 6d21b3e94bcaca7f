"""What the subcommands that load a model have in common. Their arguments are in `phalanx.cli.arguments`."""

from __future__ import annotations

from pathlib import Path

import torch
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from phalanx.errors import ConfigError
from phalanx.families.language.evaluation.load_weights import LoadedModel, load_for_inference
from phalanx.hardware.device import choose_device
from phalanx.precision import PRECISIONS
from phalanx.printable_console import plain_console


def load(path: Path, *, device: str, precision: str | None, tokenizer: Path | None) -> LoadedModel:
    """Load the model that the arguments of a verb ask for. Raises ConfigError for a device or format there is not."""
    dtype = None if precision is None else precision_named(precision, "--precision")
    return load_for_inference(path, choose_device(device), dtype=dtype, tokenizer=tokenizer)


def precision_named(name: str, option: str) -> torch.dtype:
    """The number format called `name`. Raises ConfigError naming the option and what is allowed."""
    if name not in PRECISIONS:
        raise ConfigError(f"{option}={name} must be {', '.join(PRECISIONS)}")
    return PRECISIONS[name].compute_dtype


def progress_bar() -> Progress:
    """A bar on stderr that disappears when it is done; nothing at all where stderr is no terminal."""
    console = plain_console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
