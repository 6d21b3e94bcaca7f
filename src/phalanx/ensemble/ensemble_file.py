"""`ensemble.json`: what an ensemble is, for whoever uses it later: members, weights, calibration; and how well it did.

Paths are kept relative to the file's folder, so that ensemble and runs may move together.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from phalanx.ensemble.calibrate import Calibration, Conformal
from phalanx.ensemble.members import Member
from phalanx.errors import CheckpointError
from phalanx.files import finite, write_atomically

ENSEMBLE = "ensemble.json"


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class MemberEntry(_Part):
    """One member."""

    run: str
    """The run directory, or checkpoint, as it was named; relative to the file's folder."""
    checkpoint: str
    """The checkpoint that the calibration belongs to; relative to the file's folder."""
    step: int
    weight: float = Field(ge=0.0, le=1.0)
    score: float | None = None
    """What the study gave it."""


class LabelEntry(_Part):
    """How one kind of number of one data set is calibrated."""

    source: str
    quantity: str
    unit: str
    calibration: Calibration
    conformal: Conformal
    held_out_nll: dict[str, float]
    numbers: int
    structures: int


class EnsembleFile(_Part):
    """Everything a reader needs to know about an ensemble."""

    format: Literal["phalanx-ensemble"] = "phalanx-ensemble"
    version: Literal[1] = 1
    family: str
    members: list[MemberEntry] = Field(min_length=1)
    labels: list[LabelEntry] = []
    """Of the materials family."""
    facts: dict[str, Any] = {}
    """How members were chosen and how the ensemble did, for reading alone."""

    def label(self, source: str, quantity: str) -> LabelEntry | None:
        """The calibration of one kind of number; None where validation had no labels of it."""
        return next((one for one in self.labels if (one.source, one.quantity) == (source, quantity)), None)

    def write(self, folder: Path) -> None:
        """Write it into `folder`."""
        content = finite(self.model_dump(mode="json"))
        write_atomically(folder / ENSEMBLE, json.dumps(content, indent=1, allow_nan=False) + "\n")


def read_ensemble(folder: Path) -> EnsembleFile:
    """Read the ensemble in `folder`. Raises CheckpointError naming the file and what is wrong with it."""
    path = folder / ENSEMBLE
    try:
        return EnsembleFile.model_validate_json(path.read_bytes())
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}; make it with phalanx ensemble") from error
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "content"
        raise CheckpointError(f"{path}: {where}: {first['msg']}; make the ensemble again") from None


def is_ensemble(folder: Path) -> bool:
    """Whether `folder` holds an ensemble."""
    return (folder / ENSEMBLE).is_file()


def member_checkpoints(folder: Path, document: EnsembleFile) -> list[Path]:
    """The checkpoint of each member. Raises CheckpointError for one that is gone."""
    found = []
    for member in document.members:
        path = (folder / member.checkpoint).resolve()
        if not path.is_dir():
            raise CheckpointError(
                f"{folder / ENSEMBLE}: its member {path} is gone; make the ensemble again from checkpoints that are there"
            )
        found.append(path)
    return found


def entries(members: Sequence[Member], weights: Sequence[float], folder: Path) -> list[MemberEntry]:
    """What `folder` says of these members."""
    return [
        MemberEntry(
            run=_relative(one.path, folder),
            checkpoint=_relative(one.checkpoint, folder),
            step=one.step,
            weight=weight,
            score=one.score,
        )
        for one, weight in zip(members, weights, strict=True)
    ]


def _relative(path: Path, folder: Path) -> str:
    return os.path.relpath(path.resolve(), folder.resolve())
