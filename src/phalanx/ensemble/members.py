"""The members of an ensemble: trained runs of one family on the same data. Reads no weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from phalanx.checkpoint import open_checkpoints, read_state
from phalanx.config.load import parse_run
from phalanx.config.schema import Run
from phalanx.errors import CheckpointError, ConfigError, DataError
from phalanx.families.materials.config import MaterialsRun
from phalanx.families.materials.data.graph_shards import read_manifest
from phalanx.families.materials.data_config import GraphData
from phalanx.families.materials.evaluation.error_sums import quantities


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


def require_alike(members: Sequence[Member]) -> None:
    """Refuse members whose predictions cannot be averaged. Raises ConfigError that says which two differ, and in what.

    Widths, bodies, depths, training and layouts may differ; what is predicted and which structures are held out may not.
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
        if isinstance(first.run, MaterialsRun) and isinstance(other.run, MaterialsRun):
            _require_alike_materials(first, first.run, other, other.run)


def _require_alike_materials(first: Member, a: MaterialsRun, other: Member, b: MaterialsRun) -> None:
    compared: tuple[tuple[str, object, object], ...] = (
        ("data.sources", [source.name for source in a.data.sources], [source.name for source in b.data.sources]),
        ("model.branches", [branch.name for branch in a.model.branches], [branch.name for branch in b.model.branches]),
        ("quantities", [q.name for q in quantities(a.model)], [q.name for q in quantities(b.model)]),
        ("data.cutoff", a.data.cutoff, b.data.cutoff),
        ("data.max_neighbours", a.data.max_neighbours, b.data.max_neighbours),
    )
    for what, mine, theirs in compared:
        if mine != theirs:
            raise ConfigError(
                f"{other.path} differs from {first.path} in {what}: {_words(theirs)}, not {_words(mine)}; "
                f"members of an ensemble predict the same of the same prepared data"
            )
    for name, ours, others in zip(_names(a.data), fingerprints(a.data), fingerprints(b.data), strict=True):
        if ours != others:
            raise DataError(
                f"{other.path} was trained on other structures of source {name} than {first.path} "
                f"({b.data.prepared}, {a.data.prepared}), or on another split of them; members need the same"
            )


def fingerprints(data: GraphData) -> list[str]:
    """What tells prepared data from any other, one a source: structures, labels, edges and their split."""
    return [read_manifest(Path(data.prepared) / name).fingerprint for name in _names(data)]


def _names(data: GraphData) -> list[str]:
    return [source.name for source in data.sources]


def _words(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
