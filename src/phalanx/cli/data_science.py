"""`phalanx data prepare-graphs` and `prepare-fields`: what a materials or a weather run reads, prepared once.

Both read the run file: sources, labels and units stand there. What they need beyond the core is imported when they run.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
import yaml

from phalanx.cli.arguments import Json, Overrides, RunFile
from phalanx.cli.console import output, print_error, print_json
from phalanx.cli.progress import progress
from phalanx.config.load import load_run
from phalanx.errors import ConfigError
from phalanx.families.materials.config import MaterialsRun
from phalanx.families.weather.config import WeatherRun

if TYPE_CHECKING:
    from phalanx.families.materials.data.graph_shards import Manifest, Statistics


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
    prepare = import_module("phalanx.families.materials.data.prepare_structures").prepare_graphs
    try:
        with progress() as report:
            manifests: dict[str, Manifest] = prepare(loaded.data, workers=workers, progress=report)
    except KeyboardInterrupt:
        print_error("stopped; what is done is kept: the same command goes on from there")
        raise
    fitting = import_module("phalanx.families.materials.data.fitted_units").fitting_units(loaded, manifests)
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
    prepare = import_module("phalanx.families.weather.data.prepare_fields").prepare_fields
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
