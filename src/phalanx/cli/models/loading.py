"""Loads the models that subcommands ask for. The arguments they take for it are in `phalanx.cli.arguments`."""

from __future__ import annotations

from pathlib import Path

import torch

from phalanx.errors import ConfigError
from phalanx.families.language.evaluation.load_weights import LoadedModel, load_for_inference
from phalanx.hardware.device import choose_device
from phalanx.nn.precision import PRECISIONS


def load_model(path: Path, *, device: str, precision: str | None, tokenizer: Path | None) -> LoadedModel:
    """Load the model that the arguments of a subcommand name. Raises ConfigError for an unknown device or format."""
    dtype = None if precision is None else find_precision(precision, "--precision")
    return load_for_inference(path, choose_device(device), dtype=dtype, tokenizer=tokenizer)


def find_precision(name: str, option: str) -> torch.dtype:
    """Return the number format called `name`. Raises ConfigError naming the option and what is allowed."""
    if name not in PRECISIONS:
        raise ConfigError(f"{option}={name} must be {', '.join(PRECISIONS)}")
    return PRECISIONS[name].compute_dtype
