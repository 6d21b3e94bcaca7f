"""`phalanx data prepare-graphs` and `prepare-fields`: what a materials or a weather run reads, prepared once.

Both read the run file: sources, labels and units stand there. What they need beyond the core is imported when they run.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
import yaml

from phalanx.cli.arguments import Json, Overrides, RunFile
from phalanx.cli.console import output, print_error, print_json
from phalanx.cli.progress import progress
from phalanx.config.families import MaterialsRun, WeatherRun
from phalanx.config.load import load_run
from phalanx.errors import ConfigError

if TYPE_CHECKING:
    from phalanx.data.graphs.manifest import Manifest, Statistics


def prepare_graphs_of(
    run: RunFile,
    overrides: Overrides = None,
    workers: Annotated[int | None, typer.Option(min=1, help="Processes; by default one a core.")] = None,
    json_output: Json = False,
) -> None:
    """Prepare the structures of a materials run: check them, find neighbours, write shards into data.prepared.

    Says what there is, and the units of the model's branches that fit it. Stopped at any point, the same command goes on
    where it was. Run again when all is done, it only says so.
    """
    loaded = load_run(run, overrides or [])
    if not isinstance(loaded, MaterialsRun):
        raise ConfigError(
            f"{run} has model.family={loaded.model.family}; prepare-graphs takes runs of family materials"
        )
    prepare = import_module("phalanx.data.graphs.prepare").prepare_graphs
    try:
        with progress() as report:
            manifests: dict[str, Manifest] = prepare(loaded.data, workers=workers, progress=report)
    except KeyboardInterrupt:
        print_error("stopped; what is done is kept: the same command goes on from there")
        raise
    fitting = fitting_units(loaded, manifests)
    if json_output:
        described = {name: manifest.model_dump(mode="json", include=_SHOWN) for name, manifest in manifests.items()}
        print_json({"prepared": loaded.data.prepared, "sources": described, "model": fitting})
        return
    for name, manifest in manifests.items():
        parts = ", ".join(f"{part} {counts.structures:,}" for part, counts in manifest.splits.items())
        total = manifest.totals
        words = f"{total.structures:,} structures ({parts}), {total.atoms:,} atoms, {total.edges:,} edges"
        output().print(f"{Path(loaded.data.prepared) / name}: {words}", soft_wrap=True)
        if said := charges_in_words(manifest.statistics):
            output().print(f"  {said}", soft_wrap=True)
    output().print("units that fit the training split, for the run file:", soft_wrap=True)
    output().print(yaml.safe_dump({"model": fitting}, sort_keys=False, width=120).rstrip(), soft_wrap=True)


def charges_in_words(statistics: Statistics) -> str:
    """Which total charges structures have, where not all of them are known to be neutral; else nothing."""
    counts = statistics.total_charges
    parts = [f"{charge:+d} in {count:,}" for charge, count in counts.items() if charge]
    ions = f"total charges: {', '.join(parts)}, 0 in {counts.get(0, 0):,} structures" if parts else ""
    unknown = statistics.taken_for_neutral
    taken = f"{unknown:,} structures say nothing of their total charge and are taken for neutral" if unknown else ""
    return "; ".join(part for part in (ions, taken) if part)


_SHOWN = {"totals", "splits", "statistics"}


def fitting_units(run: MaterialsRun, manifests: dict[str, Manifest]) -> dict[str, Any]:
    """Fields of the model that suit the training data: neighbours of an atom, and units of each branch.

    An energy unit is the spread of force components, so that both of the network's results are of order 1 (or where there
    are no forces, the spread of energies an atom about the reference energies).
    """
    splits = [manifest.splits["train"] for manifest in manifests.values()]
    neighbours = sum(counts.edges for counts in splits) / max(1, sum(counts.atoms for counts in splits))
    names = [branch.name for branch in run.model.branches]
    if len(names) == 1 and len(manifests) > 1:
        # One branch takes all sources, so one set of units has to fit them together.
        training = import_module("phalanx.data.graphs.shards").open_prepared(run.data, "train")
        joint = import_module("phalanx.data.graphs.statistics").joint_statistics(training)
        branches = [_branch(run, names[0], joint)]
    else:
        branches = [_branch(run, name, manifest.statistics) for name, manifest in manifests.items()]
    return {"mean_neighbors": round(neighbours, 1), "branches": branches}


def _branch(run: MaterialsRun, name: str, known: Statistics) -> dict[str, Any]:
    branch: dict[str, Any] = {"name": name}
    if run.model.energy is not None and known.reference_energies:
        spread = known.labels["forces"].std if "forces" in known.labels else known.residual_std
        branch["energy_scale"] = float(f"{spread or 1.0:.4g}")
        energies = {str(element): round(energy, 5) for element, energy in known.reference_energies.items()}
        branch["reference_energies"] = energies
    for field in ("properties", "atom_properties"):
        head = getattr(run.model, field)
        names = [] if head is None else head.names
        if any(column in known.labels for column in names):
            found = [known.labels.get(column) for column in names]
            branch[f"{field}_shift"] = [0.0 if one is None else float(f"{one.mean:.6g}") for one in found]
            branch[f"{field}_scale"] = [1.0 if one is None else float(f"{one.std or 1.0:.6g}") for one in found]
    return branch


def prepare_fields_of(
    run: RunFile,
    out: Annotated[Path, typer.Option(help="Folder to write; of several sources, one folder each inside.")],
    overrides: Overrides = None,
    json_output: Json = False,
) -> None:
    """Write the fields of a weather run in the form that is read fastest, with everything checked on the way.

    Says what to put under data.sources in place of the files. Each folder appears when it is whole.
    """
    loaded = load_run(run, overrides or [])
    if not isinstance(loaded, WeatherRun):
        raise ConfigError(f"{run} has model.family={loaded.model.family}; prepare-fields takes runs of family weather")
    data = loaded.data
    prepare = import_module("phalanx.data.fields.prepare").prepare_fields
    written: list[str] = []
    for number, source in enumerate(data.sources):
        folder = out if len(data.sources) == 1 else out / str(number)
        with progress() as report:
            prepare(
                source,
                folder,
                variables=list(dict.fromkeys([*data.inputs, *data.target_variables])),
                statics=data.static,
                skip_gaps=data.gaps == "skip",
                time_tolerance_hours=data.time_tolerance_hours,
                check_units=data.check_units,
                cache_mb=data.cache_mb,
                progress=lambda done, total, what=source.path: report(f"writing {what}", done, total),
            )
        written.append(str(folder))
    if json_output:
        print_json({"sources": written})
    else:
        output().print(f"data.sources: [{', '.join(written)}]", soft_wrap=True)
