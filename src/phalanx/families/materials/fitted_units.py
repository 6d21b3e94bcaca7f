"""Units of a model that fit its prepared training data: how many neighbours atoms have, and what each branch's numbers mean.

What the run file leaves out is taken from here; what it states stays. Knows no device and no rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from phalanx.checkpoint import RankGroup, open_checkpoints, read_state
from phalanx.config.load import parse_run
from phalanx.families.materials.config import MaterialsRun
from phalanx.families.materials.data.given_graphs import FEATURES
from phalanx.families.materials.data.graph_shards import (
    Manifest,
    Statistics,
    open_prepared,
    prepared_folder,
    read_manifest,
)
from phalanx.families.materials.data.graph_statistics import joint_statistics
from phalanx.families.materials.model_config import GRAPH_LEVELS, PROPERTY_HEADS, Branch, MaterialsModel
from phalanx.printable import write_stderr
from phalanx.remote_files import weights_path

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
    units = RankGroup.own(_TIMEOUT_S).from_first(lambda: _choose_units(run, run_dir, unstated))
    return run.model_copy(update={"model": with_units(run.model, units)})


def _choose_units(run: MaterialsRun, run_dir: Path, unstated: list[str]) -> Units:
    resume = run.training.resume
    trained = _trained_model(run_dir)
    if trained is None and resume not in ("auto", "must", "never"):
        trained = _trained_model(weights_path(resume))
    if trained is not None and len(trained.branches) == len(run.model.branches):
        return units_of(trained)
    units = fitting_units(run)
    start = None if run.training.init_from is None else _trained_model(weights_path(run.training.init_from))
    if start is not None:
        # Weights mean something in the units that they were trained in.
        units["mean_neighbors"] = start.mean_neighbors
        if start.graph is not None and "graph" in units:
            units["graph"] = start.graph.model_dump(include=set(_FEATURE_UNITS))
        known = {branch.name: branch for branch in start.branches}
        shared = run.model.energy is not None and run.model.energy.shared
        one_head = shared or len(known) == len(run.model.branches) == 1
        for fields, branch in zip(units["branches"], run.model.branches, strict=True):
            if one_head:
                # One head serves whatever the branches are called.
                before: Branch | None = known.get(branch.name, start.branches[0])
            else:
                # By the name of the head that is taken: `head.energy.copies.NAME.0.weight`.
                head = run.training.transfer.source_of(f"head.energy.copies.{branch.name}.0.weight")
                before = known.get(head.split(".")[3])
            if before is not None:
                fields["energy_scale"] = before.energy_scale
    words = "; ".join(units_in_words(with_units(run.model, units), unstated))
    write_stderr(f"the run file leaves to the training data: {words}")
    return units


def _trained_model(path: Path) -> MaterialsModel | None:
    """Return the model section of the newest checkpoint at `path`; None where there is none, or one of another family."""
    if not path.is_dir():
        return None
    # Only the first rank is here.
    newest = open_checkpoints(path, one_rank=True).newest()
    if newest is None:
        return None
    trained = parse_run(str(read_state(newest.path).get("run")), f"{newest.path}/state.json: run")
    # Loading says what does not fit.
    return trained.model if isinstance(trained, MaterialsRun) else None


Units = dict[str, Any]
"""Fields of the `model` section: `mean_neighbors`, and `branches` with a mapping of fields each."""


def fitting_units(run: MaterialsRun, manifests: Mapping[str, Manifest] | None = None) -> Units:
    """Return fields of the model that suit the training data: neighbours of an atom, and units of each branch.

    An energy unit is the spread of force components, so that both of the network's results are of order 1 (or where there
    are no forces, the spread of energies an atom about the reference energies).

    manifests: of the prepared sources, by name; None reads them. Raises DataError where a source is not prepared.
    """
    if manifests is None:
        folders = {source.name: prepared_folder(run.data, source) for source in run.data.sources}
        manifests = {name: read_manifest(folder) for name, folder in folders.items()}
    splits = [manifest.splits["train"] for manifest in manifests.values()]
    neighbours = sum(counts.edges for counts in splits) / max(1, sum(counts.atoms for counts in splits))
    names = [branch.name for branch in run.model.branches]
    if len(names) == 1 and len(manifests) > 1:
        # One branch takes all sources, so one set of units has to fit them together.
        branches = [_branch_units(run.model, names[0], joint_statistics(open_prepared(run.data, "train")))]
    elif len(names) == 1:
        branches = [_branch_units(run.model, names[0], manifest.statistics) for manifest in manifests.values()]
    else:
        branches = [_branch_units(run.model, name, manifests[name].statistics) for name in names]
    # Sums are divided by it: data without a single edge must not make it 0.
    units: Units = {"mean_neighbors": max(round(neighbours, 1), 0.1), "branches": branches}
    if run.model.graph is not None:
        units["graph"] = _feature_units(joint_statistics(open_prepared(run.data, "train")))
    return units


def unstated_units(model: MaterialsModel) -> list[str]:
    """Return the names of units that the run file leaves to the data, such as `mean_neighbors` and `xtb.energy_scale`."""
    found = [] if "mean_neighbors" in model.model_fields_set else ["mean_neighbors"]
    heads = {
        "energy": ("energy_scale", "reference_energies"),
    } | {head: (f"{head}_shift", f"{head}_scale") for head in PROPERTY_HEADS}
    used = [field for head, fields in heads.items() if getattr(model, head) is not None for field in fields]
    if model.graph is not None:
        given = model.graph.model_fields_set
        units = [
            f"{level}_{unit}" for level in GRAPH_LEVELS if getattr(model.graph, level) for unit in ("shift", "scale")
        ]
        found += [f"graph.{field}" for field in units if field not in given]
    for branch in model.branches:
        found += [f"{branch.name}.{field}" for field in used if field not in branch.model_fields_set]
    return found


def with_units(model: MaterialsModel, units: Units) -> MaterialsModel:
    """Return the model with `units` for what its run file leaves out; branches are paired in order."""
    branches = []
    for branch, known in zip(model.branches, units["branches"], strict=True):
        fields = Branch.model_fields.keys() - branch.model_fields_set - {"name", "weight"}
        branches.append(branch.model_copy(update={field: known[field] for field in fields if field in known}))
    changes: dict[str, Any] = {"branches": branches}
    if model.graph is not None:
        unstated = units["graph"].keys() - model.graph.model_fields_set
        changes["graph"] = model.graph.model_copy(update={field: units["graph"][field] for field in unstated})
    if "mean_neighbors" not in model.model_fields_set:
        changes["mean_neighbors"] = units["mean_neighbors"]
    return model.model_copy(update=changes)


def units_of(model: MaterialsModel) -> Units:
    """Return the units that a model has, stated or not."""
    units: Units = {"mean_neighbors": model.mean_neighbors}
    if model.graph is not None:
        units["graph"] = model.graph.model_dump(include=set(_FEATURE_UNITS))
    return units | {"branches": [branch.model_dump() for branch in model.branches]}


def units_in_words(model: MaterialsModel, names: list[str]) -> Iterator[str]:
    """Say what the units called `names` are in `model`; see `unstated_units`."""
    branches: dict[str, BaseModel] = {branch.name: branch for branch in model.branches}
    if model.graph is not None:
        branches["graph"] = model.graph
    for name in names:
        branch, _, field = name.partition(".")
        value = getattr(branches[branch], field) if field else getattr(model, name)
        if field == "reference_energies":
            elements = ", ".join(sorted(value, key=int))
            yield f"{name} of elements {elements}" if value else f"{name} of none (its data have no energies)"
        else:
            yield f"{name}={value}"


_FEATURE_UNITS = [f"{level}_{unit}" for level in GRAPH_LEVELS for unit in ("shift", "scale")]


def _feature_units(known: Statistics) -> dict[str, list[float]]:
    """Return mean and spread of each number of nodes, edges and graphs; of one that never varies, a spread of 1."""
    found = {}
    for level in GRAPH_LEVELS:
        columns = known.features.get(FEATURES[level], [])
        found[f"{level}_shift"] = [float(f"{one.mean:.6g}") for one in columns]
        found[f"{level}_scale"] = [float(f"{one.std or 1.0:.6g}") for one in columns]
    return found


def _branch_units(model: MaterialsModel, name: str, known: Statistics) -> dict[str, Any]:
    branch: dict[str, Any] = {"name": name}
    if model.energy is not None and ("forces" in known.labels or known.reference_energies):
        spread = known.labels["forces"].std if "forces" in known.labels else known.residual_std
        # Rounded: figures that a person can copy into a run file, alike on machines that round sums otherwise.
        branch["energy_scale"] = float(f"{spread or 1.0:.4g}")
    if model.energy is not None and known.reference_energies:
        branch["reference_energies"] = {str(z): round(energy, 5) for z, energy in known.reference_energies.items()}
    for field in PROPERTY_HEADS:
        head = getattr(model, field)
        names = [] if head is None else head.names
        if any(column in known.labels for column in names):
            found = [known.labels.get(column) for column in names]
            # A class is no number: nothing is taken off it.
            found = [None if column in head.classes else one for column, one in zip(names, found, strict=True)]
            branch[f"{field}_shift"] = [0.0 if one is None else float(f"{one.mean:.6g}") for one in found]
            branch[f"{field}_scale"] = [1.0 if one is None else float(f"{one.std or 1.0:.6g}") for one in found]
    return branch
