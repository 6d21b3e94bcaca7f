"""The members of an ensemble: trained runs of one family on the same data. Reads no weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from phalanx.checkpoint import open_checkpoints, read_state
from phalanx.config.load import parse_run
from phalanx.config.schema import Run
from phalanx.errors import CheckpointError, ConfigError


@dataclass(frozen=True)
class Member:
    """A trained model, not loaded yet."""

    path: Path
    """As it was named: a run directory, or one checkpoint."""
    checkpoint: Path
    """The folder of the newest whole checkpoint there."""
    step: int
    """Optimizer steps it was trained for."""
    run: Run
    score: float | None = None
    """What the study gives it, lower is better; None where it comes from no study."""

    @property
    def name(self) -> str:
        """What tells it apart in tables: the name of its run directory."""
        folder = self.path.resolve()
        if folder == self.checkpoint.resolve():
            folder = folder.parent.parent
        return folder.name


def open_member(path: Path, overrides: Sequence[str] = (), score: float | None = None) -> Member:
    """The newest whole checkpoint of a run directory, or one checkpoint. overrides: fields of its run file to change.

    Raises CheckpointError where there is none.
    """
    newest = open_checkpoints(path).newest()
    if newest is None:
        raise CheckpointError(f"{path} holds no whole checkpoint; name the folder of a run that phalanx train wrote")
    text = str(read_state(newest.path).get("run"))
    return Member(path, newest.path, newest.step, parse_run(text, f"{newest.path}/state.json: run", overrides), score)


def require_one_family(members: Sequence[Member]) -> None:
    """Raise ConfigError for a model that is named twice and for models of different families.

    Each family checks by itself that its members predict the same numbers of the same data.
    """
    first, *others = members
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


@dataclass(frozen=True)
class Share:
    """This rank among those that work together."""

    rank: int = 0
    ranks: int = 1


ALONE = Share()
