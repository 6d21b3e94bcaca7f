"""The members of an ensemble, trained runs of one family on the same data; and `ensemble.json`, which remembers them.

Reads no weights. The file says what an ensemble is for whoever uses it later (members, weights, calibration), and how well
it did. Its paths are relative to its folder, so that ensemble and runs may move together.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from phalanx.config.schema import Run
from phalanx.ensemble.residuals import FloatArray
from phalanx.errors import CheckpointError, ConfigError
from phalanx.files import replace_nonfinite, write_atomically
from phalanx.training.checkpointing import find_trained_run


@dataclass(frozen=True)
class Member:
    """A trained model, not loaded yet."""

    path: Path
    """Run directory or checkpoint, as it was named."""
    checkpoint: Path
    """Folder of the newest whole checkpoint there."""
    step: int
    """Optimizer steps it was trained for."""
    run: Run
    score: float | None = None
    """Score in the study, lower is better; None where the run comes from no study."""

    @property
    def name(self) -> str:
        """Return the name of the run directory, which tells members apart in tables."""
        folder = self.path.resolve()
        # Checkpoints lie in RUN/checkpoints/.
        return (folder.parent.parent if folder == self.checkpoint.resolve() else folder).name


def open_member(path: Path, overrides: Sequence[str] = (), score: float | None = None) -> Member:
    """Find the newest whole checkpoint of a run directory, or one checkpoint; read its run file, and no weights.

    overrides: fields of the run file to change, as "section.field=value". score: score in the study. Raises CheckpointError
    where there is no whole checkpoint.
    """
    newest, run = find_trained_run(path, overrides)
    return Member(path, newest.path, newest.step, run, score)


def require_one_family(members: Sequence[Member]) -> None:
    """Raise ConfigError for a model that is named twice and for models of different families.

    Each family checks by itself that its members predict the same numbers of the same data.
    """
    first, *others = members
    # By where links and relative paths lead: two names may be one checkpoint.
    seen: dict[Path, Path] = {first.checkpoint.resolve(): first.path}
    for other in others:
        place = other.checkpoint.resolve()
        if place in seen:
            raise ConfigError(f"{other.path} is {seen[place]} once more: a model that is named twice adds nothing")
        seen[place] = other.path
        family = other.run.model.family
        if family != first.run.model.family:
            raise ConfigError(
                f"{other.path} is of model.family={family}, {first.path} of {first.run.model.family}; members are of one"
            )


def require_same(members: Sequence[Member], described: Sequence[Mapping[str, object]], why: str) -> None:
    """Raise ConfigError for a member of which anything differs from the first one's.

    described: what must be the same, by field, one a member. why: what members of an ensemble do, behind that subject.
    """
    for member, found in zip(members, described, strict=True):
        for field, wanted in described[0].items():
            if found[field] != wanted:
                raise ConfigError(
                    f"{member.path} differs from {members[0].path} in {field}: {found[field]}, not {wanted}; members of an "
                    f"ensemble {why}"
                )


@dataclass(frozen=True)
class Share:
    """This rank among those that share the work."""

    rank: int = 0
    ranks: int = 1


ALONE = Share()


ENSEMBLE = "ensemble.json"
Kind = Literal["factor", "floor", "isotonic"]
KINDS: tuple[Kind, ...] = ("factor", "floor", "isotonic")
"""Kinds of calibration, the simplest first."""


class _FilePart(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class MemberEntry(_FilePart):
    """One member."""

    run: str
    """Run directory or checkpoint as it was named, relative to the file's folder."""
    checkpoint: str
    """Checkpoint that the calibration belongs to, relative to the file's folder."""
    step: int
    weight: float = Field(ge=0.0, le=1.0)
    score: float | None = None
    """Score in the study; None where the run comes from no study."""


class Calibration(_FilePart):
    """Standard deviation as a function of how far members lie apart."""

    kind: Kind
    factor: float
    """a of `factor` and `floor`; 1 for `isotonic`."""
    floor: float
    """b of `floor`; for the other kinds the least standard deviation. In the unit of the numbers."""
    spreads: tuple[float, ...] = ()
    """Spreads at the knots of `isotonic`, rising."""
    stds: tuple[float, ...] = ()
    """Standard deviations at the knots of `isotonic`, never falling."""

    def std(self, spread_n: FloatArray) -> FloatArray:
        """Return calibrated standard deviations for spreads of any shape. Beyond the last knot they grow with the spread."""
        if self.kind != "isotonic":
            return np.sqrt(np.square(self.factor * spread_n) + self.floor**2)
        inside = np.interp(spread_n, self.spreads, self.stds)
        # Beyond the last knot nothing was seen: its ratio of deviation to spread goes on.
        beyond = np.maximum(spread_n / max(self.spreads[-1], np.finfo(np.float64).tiny), 1.0)
        return np.maximum(inside * beyond, self.floor)


class Conformal(_FilePart):
    """Intervals that cover a number of a new structure as often as they promise, if structures are exchangeable."""

    calibration: Calibration
    """Calibration fitted to other structures than the quantiles."""
    quantiles: dict[str, float | None]
    """Half widths in standard deviations, by level; None where there are too few structures for that level."""

    def half_widths(self, spread_n: FloatArray, level: float) -> FloatArray | None:
        """Return half the width of the interval of a level around each mean [n]; None where the interval has no end.

        spread_n: spreads of the members. level: one of `LEVELS` or `CURVE`.
        """
        quantile = self.quantiles[str(level)]
        return None if quantile is None else quantile * self.calibration.std(spread_n)


class LabelEntry(_FilePart):
    """Calibration of one kind of number of one data set."""

    source: str
    """Data set."""
    quantity: str
    unit: str
    calibration: Calibration
    conformal: Conformal
    held_out_nll: dict[str, float]
    numbers: int
    structures: int


class EnsembleFile(_FilePart):
    """Everything a reader needs to know about an ensemble."""

    format: Literal["phalanx-ensemble"] = "phalanx-ensemble"
    version: Literal[1] = 1
    family: str
    members: list[MemberEntry] = Field(min_length=1)
    labels: list[LabelEntry] = []
    """Calibrations, of the materials family alone."""
    facts: dict[str, Any] = {}
    """How members were chosen and how the ensemble did; nothing reads it but people and reports."""

    def label(self, source: str, quantity: str) -> LabelEntry | None:
        """Return the calibration of one kind of number; None where validation had no labels of it."""
        return next((one for one in self.labels if (one.source, one.quantity) == (source, quantity)), None)

    def write(self, folder: Path) -> None:
        """Write the file into `folder`."""
        content = replace_nonfinite(self.model_dump(mode="json"))
        write_atomically(folder / ENSEMBLE, json.dumps(content, indent=1, allow_nan=False) + "\n")


def read_ensemble(folder: Path) -> EnsembleFile:
    """Read the ensemble in `folder`. Raises CheckpointError naming the file and what is wrong with it."""
    path = folder / ENSEMBLE
    try:
        return EnsembleFile.model_validate_json(path.read_bytes())
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}; make it with phalanx ensemble") from error
    except ValidationError as error:
        # The first alone: one wrong field often brings others.
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "content"
        raise CheckpointError(f"{path}: {where}: {first['msg']}; make the ensemble again") from None


def is_ensemble(folder: Path) -> bool:
    """Return whether `folder` holds an ensemble."""
    return (folder / ENSEMBLE).is_file()


def member_checkpoints(folder: Path, document: EnsembleFile) -> list[Path]:
    """Return the checkpoint of each member. Raises CheckpointError for one that is gone."""
    found = []
    for member in document.members:
        path = (folder / member.checkpoint).resolve()
        if not path.is_dir():
            raise CheckpointError(
                f"{folder / ENSEMBLE}: its member {path} is gone; make the ensemble again from checkpoints that are there"
            )
        found.append(path)
    return found


def member_entries(members: Sequence[Member], weights: Sequence[float], folder: Path) -> list[MemberEntry]:
    """Return what the file in `folder` says of these members, with one weight each."""

    def relative(path: Path) -> str:
        return os.path.relpath(path.resolve(), folder.resolve())

    return [
        MemberEntry(
            run=relative(one.path),
            checkpoint=relative(one.checkpoint),
            step=one.step,
            weight=weight,
            score=one.score,
        )
        for one, weight in zip(members, weights, strict=True)
    ]
