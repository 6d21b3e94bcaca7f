"""Settle what a materials run's file leaves to its data, before a model is built: alike on all ranks, and at resuming."""

from __future__ import annotations

from pathlib import Path

from phalanx.checkpoint import RankGroup, open_checkpoints, read_state
from phalanx.config.load import parse_run
from phalanx.families.materials.config import MaterialsRun
from phalanx.families.materials.data.fitted_units import (
    Units,
    fitting_units,
    units_in_words,
    units_of,
    unstated_units,
    with_units,
)
from phalanx.families.materials.data.graph_shards import open_prepared
from phalanx.printable import write_stderr

_TIMEOUT_S = 1800.0
"""Seconds that ranks wait for the first, which may read the energies of all structures."""


def settle_units(run: MaterialsRun, run_dir: Path) -> MaterialsRun:
    """Return the run with a value for every unit of its model; every rank calls it, and the first one's values count.

    A run that goes on keeps the units that its checkpoint was trained in. One that begins with other weights
    (training.init_from) keeps their mean_neighbors and energy scales, and fits reference energies to its data, as a new run
    does with all of them. Raises DataError where data are not prepared, CheckpointError for a damaged checkpoint.
    """
    unstated = unstated_units(run.model)
    if not unstated:
        return run
    # What is wrong with the data is said by every rank, in its own words.
    open_prepared(run.data, "train")
    units = RankGroup.own(_TIMEOUT_S).from_first(lambda: _units(run, run_dir, unstated))
    return run.model_copy(update={"model": with_units(run.model, units)})


def _units(run: MaterialsRun, run_dir: Path, unstated: list[str]) -> Units:
    resume = run.training.resume
    trained = _trained_model_units(run, run_dir)
    if trained is None and resume not in ("auto", "must", "never"):
        trained = _trained_model_units(run, Path(resume))
    if trained is not None:
        return trained
    units = fitting_units(run)
    start = None if run.training.init_from is None else _trained_model_units(run, Path(run.training.init_from))
    if start is not None:
        # Weights mean something in the units that they were trained in.
        units["mean_neighbors"] = start["mean_neighbors"]
        for branch, before in zip(units["branches"], start["branches"], strict=True):
            branch["energy_scale"] = before["energy_scale"]
    words = "; ".join(units_in_words(with_units(run.model, units), unstated))
    write_stderr(f"the run file leaves to the training data: {words}")
    return units


def _trained_model_units(run: MaterialsRun, path: Path) -> Units | None:
    """Return the units of the newest checkpoint at `path`; None where there is none, or one of another model."""
    if not path.is_dir():
        return None
    # Only the first rank is here.
    newest = open_checkpoints(path, one_rank=True).newest()
    if newest is None:
        return None
    trained = parse_run(str(read_state(newest.path).get("run")), f"{newest.path}/state.json: run")
    if not isinstance(trained, MaterialsRun) or len(trained.model.branches) != len(run.model.branches):
        # Loading says what does not fit.
        return None
    return units_of(trained.model)
