"""The data of a weather run, and its evaluation: forecasts of held-out times, scored in the units of the fields."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from pydantic import ValidationError
from torch import Tensor

from phalanx.config.check import batch_sizes
from phalanx.config.model import Model
from phalanx.errors import DataError
from phalanx.families.weather.config import ModelGrid, WeatherModel, WeatherRun
from phalanx.families.weather.data.coordinates import Grid
from phalanx.families.weather.data.field_samples import Cases, FieldBatchStream, FieldReader, GridReader
from phalanx.families.weather.data.field_statistics import Climatology, FieldStatistics
from phalanx.families.weather.data.grid_turns import GridTurns
from phalanx.families.weather.data.open_fields import FieldSet, require_fields
from phalanx.families.weather.evaluation.compare_forecasts import (
    Comparison,
    ScoreRow,
    known_climatologies,
    skill_by_lead,
    skill_in_words,
)
from phalanx.families.weather.evaluation.forecast_scores import EnsembleScore
from phalanx.families.weather.model.field_head import loss_sum
from phalanx.families.weather.model.grid_features import row_latitudes, row_weights
from phalanx.layout.execute import Executor
from phalanx.layout.mesh import Mesh
from phalanx.layout.spec import ResolvedLayout
from phalanx.nn.resizing import Resizes, chain_resizes, keep_first, match_rows, resample_grid, resample_patches
from phalanx.printable import write_stderr
from phalanx.training.inputs import ExpectedEvaluation, Finding, Inputs, TrainableModel, Verification

STATISTICS = "statistics.json"
"""File of a run directory with what its fields are normalised by."""
_CLIMATOLOGY_BYTES = 4 * 2**30
"""Most bytes of fields that every rank averages as training begins; of more, evaluation has no climatology."""
_LESS_IS_BETTER = ("loss", "rmse", "mae", "seeps", "crps", "fair_crps")
"""Scores that are smaller for a better model."""
_TOLERANCE = 1e-3
"""Degrees by which latitudes of model and data may differ."""


@dataclass(frozen=True)
class FieldInputs(Inputs):
    """Opened fields of a run."""

    statistics: FieldStatistics = field(kw_only=True)
    """Statistics that the fields are normalised by."""

    def write(self, run_dir: Path) -> None:
        """Write the statistics, without which the trained model is of no use."""
        self.statistics.write(run_dir / STATISTICS)


class WeatherInputs(TrainableModel):
    """See `training.inputs.TrainableModel`."""

    run: WeatherRun

    def open_inputs(self, layout: ResolvedLayout, mesh: Mesh, device: torch.device, *, first: bool) -> Inputs:
        """See `TrainableModel`."""
        run = self.run
        fields = FieldSet(run.data)
        require_grids(run, fields.grids)
        readers = _by_grid(run, fields.readers("train", seed=run.training.seed))
        if first:
            _report_left_out(readers.values())
        # Samples of one grid, the model's own, are numbered as they always were.
        reader = readers[None] if list(readers) == [None] else GridReader(readers, GridTurns.of_run(run))
        # Pinned memory is what a device copies from while it computes.
        stream = FieldBatchStream(
            reader,
            global_batch=batch_sizes(run),
            rank=mesh.data_rank,
            ranks=layout.data_ranks,
            prefetch=run.data.prefetch,
            pin_memory=device.type != "cpu",
        )
        held_out: list[HeldOut] = []
        if run.data.splits.validation is not None:
            for grid, one in _by_grid(run, fields.readers("validation", seed=run.training.seed)).items():
                held_out.append(HeldOut(grid, one, *known_climatologies(fields, one, _CLIMATOLOGY_BYTES)))
            if first:
                _report_left_out(one.reader for one in held_out)
        starts = sum(len(source.windows.starts) for one in readers.values() for source in one.sources)
        on_grids = f" on {len(readers)} grids" if len(readers) > 1 else ""
        return FieldInputs(
            stream,
            FieldEvaluator(run, held_out, device),
            Verification([fields] if first else []),
            in_words=f"{starts:,} frames{on_grids} to start from",
            statistics=fields.statistics,
        )

    def resizes(self, path: Path, before: Model) -> Resizes:
        """See `TrainableModel`: variables go by name, another grid or patch size is interpolated, and the weights of older
        states begin at 0."""
        model = self.run.model
        if not isinstance(before, WeatherModel):
            return []
        # The two maps between patches and tokens see the same change from both ends.
        reads = writes = rows = states = None
        if before.patch_size != model.patch_size:
            reads = resample_patches(before.patch_size, model.patch_size, dim=2, reads=True)
            writes = resample_patches(before.patch_size, model.patch_size, dim=0, reads=False)
        # Of equal number too: a table in another order would give each variable the weights of another one.
        if before.variables != model.variables:
            rows = match_rows(before.variables, model.variables, "variables")
        if before.history != model.history:
            states = keep_first(before.history, model.history, "states", dim=2)
        grids = [(one.patch_rows, one.patch_columns) for one in (before, model)]
        changed = {
            "embedding.patches.weight": chain_resizes(reads, states, rows),
            "embedding.patches.bias": rows,
            "embedding.variables": rows,
            "embedding.positions": resample_grid(*grids) if grids[0] != grids[1] else None,
            "head.output.*": chain_resizes(writes, rows),
        }
        return [(name, resize) for name, resize in changed.items() if resize is not None]

    def check_inputs(self) -> str:
        """See `families.family.DataModel`. How many frames there are takes opening them all."""
        run = self.run
        for source in run.data.sources:
            require_fields(source.path)
        count = len(run.data.sources)
        return f"fields at {count} place{'s' if count > 1 else ''}"

    def expected_evaluation(self) -> ExpectedEvaluation | None:
        """See `TrainableModel`. The fields themselves stay closed: to open them may mean to read them all."""
        run = self.run
        if run.data.splits.validation is None:
            return None
        rows = [
            ScoreRow(
                variable=variable,
                lead_hours=lead,
                forecasts=0,
                rmse=0.0,
                mae=0.0,
                bias=0.0,
                acc=0.0,
                # Not 0, of which nothing could be saved: there would be no skill.
                persistence_rmse=1.0,
                persistence_acc=0.0,
                climatology_rmse=1.0,
                seeps=0.0 if variable in run.data.dry_thresholds else None,
                persistence_seeps=0.0 if variable in run.data.dry_thresholds else None,
                ensemble=EnsembleScore.unknown(variable, lead, run.model.members) if run.model.members > 1 else None,
            )
            for lead in run.data.leads
            for variable in run.data.target_variables
        ]
        return ExpectedEvaluation(_evaluation_fields(0.0, 0, rows), frozenset(_LESS_IS_BETTER))


def _evaluation_fields(loss: float, forecasts: int, rows: Sequence[ScoreRow]) -> dict[str, Any]:
    """Return the content of an evaluation's event in the run's log."""
    return {
        "loss": loss,
        "forecasts": forecasts,
        "skill_by_lead_hours": {str(at.lead_hours): at.mean for at in skill_by_lead(rows)},
        "scores": [row.as_dict() for row in rows],
    }


def _by_grid(run: WeatherRun, readers: Mapping[str | None, FieldReader]) -> dict[ModelGrid | None, FieldReader]:
    return {run.model.grid_named(name): reader for name, reader in readers.items()}


def _report_left_out(readers: Iterable[FieldReader]) -> None:
    """Write a line to stderr for each source with frames that have missing values."""
    for source in (source for reader in readers for source in reader.sources):
        if source.windows.places:
            write_stderr(f"{source.store.path}: {source.windows.report()}")


def require_grids(run: WeatherRun, grids: Mapping[str | None, Grid]) -> None:
    """Raise DataError where data lie on other grids than the run file says, or these are not of one part of the globe.

    grids: of the data, by the names that the run file gives them.
    """
    for name, grid in grids.items():
        require_grid(run, grid, name)
    (first_name, first), *others = grids.items()
    for name, grid in others:
        mine, theirs = first.longitude_bounds, grid.longitude_bounds
        # By what a column is wide at most: files of one region are cut between columns.
        slack = max(360 / one.shape[1] if one.wraps else float(np.diff(one.longitudes).max()) for one in (first, grid))
        if max(abs(a - b) for a, b in zip(mine, theirs, strict=True)) > slack:
            raise DataError(
                f"sources on {_named(name)} span {theirs[0]:g} to {theirs[1]:g} degrees of longitude, those on "
                f"{_named(first_name)} {mine[0]:g} to {mine[1]:g}; places of one model lie on one part of the globe"
            )


def _named(grid: str | None) -> str:
    return "the model's own grid" if grid is None else f"grid {grid}"


def require_grid(run: WeatherRun, grid: Grid, name: str | None = None) -> None:
    """Raise DataError where the data lie on another grid than the model's, or that of `model.grids` called `name`."""
    model = run.model.on_grid(run.model.grid_named(name))
    where = "model" if name is None else f"model.grids, {name}:"
    dot = "." if name is None else " "
    if grid.shape != (model.n_lat, model.n_lon):
        raise DataError(
            f"{where}{dot}n_lat={model.n_lat} and {where}{dot}n_lon={model.n_lon}, but the data have {grid.shape[0]} x "
            f"{grid.shape[1]} points; set {where}{dot}n_lat={grid.shape[0]} {where}{dot}n_lon={grid.shape[1]}, or name "
            "their grid among model.grids and under the source"
        )
    expected = row_latitudes(model, torch.device("cpu")).numpy()
    if np.abs(expected - grid.latitudes).max() > _TOLERANCE:
        ends = float(grid.latitudes[0]), float(grid.latitudes[-1])
        raise DataError(
            f"the model's rows lie from {expected[0]:g} to {expected[-1]:g} degrees of latitude in even steps, those of the "
            f"data, south to north, from {ends[0]:g} to {ends[1]:g}; set {where}{dot}first_latitude={ends[0]:g} "
            f"{where}{dot}last_latitude={ends[1]:g}, or regrid data whose rows are not evenly spaced"
        )


def grid_of_data(run: WeatherRun, grid: Grid) -> ModelGrid | None:
    """Return which grid forecasts from data on `grid` are made on: the model's own (None), one that the run file names, or
    that of the data. Raises DataError where rows are not evenly spaced, or lie on another part of the globe.
    """
    for known in (None, *run.model.grids):
        try:
            require_grid(run, grid, None if known is None else known.name)
        except DataError:
            continue
        return known
    ends = float(grid.latitudes[0]), float(grid.latitudes[-1])
    try:
        found = ModelGrid(
            name="data", n_lat=grid.shape[0], n_lon=grid.shape[1], first_latitude=ends[0], last_latitude=ends[1]
        )
        tried = run.model_copy(update={"model": run.model.with_grids([found])})
    except ValidationError as error:
        raise DataError(f"the data's grid: {error.errors()[0]['msg'].removeprefix('Value error, ')}") from None
    require_grid(tried, grid, "data")
    write_stderr(f"forecasts on a grid of {grid.shape[0]} x {grid.shape[1]} points, which the model was not trained on")
    return found


@dataclass(frozen=True)
class HeldOut:
    """The validation split of the sources on one grid."""

    grid: ModelGrid | None
    """None is the model's own."""
    reader: FieldReader
    climatologies: dict[int, Climatology] | None
    without: str | None
    """Reason why there are no climatologies; None where there are."""


@dataclass(frozen=True)
class FieldEvaluator:
    """Forecasts the same held-out cases again and again."""

    run: WeatherRun
    held_out: Sequence[HeldOut]
    """By grid; empty where the run has no validation split."""
    device: torch.device

    def evaluate(self, executor: Executor) -> list[Finding]:
        """Score about `evaluation.samples` forecasts at most, spread over grids, sources and the split, each start with all
        its lead times."""
        if not self.held_out:
            return []
        losses, forecasts, whole = 0.0, 0, None
        for one in self.held_out:
            loss, count, comparison = self._score(executor, one)
            # Grids count by their forecasts, not by their points: a finer one says nothing more of a model.
            losses, forecasts = losses + loss * count, forecasts + count
            if whole is None:
                whole = comparison
            else:
                whole.merge(comparison)
        assert whole is not None
        loss, rows = losses / forecasts, whole.rows()
        fields = _evaluation_fields(loss, forecasts, rows)
        without = next((one.without for one in self.held_out if one.without is not None), None)
        if without is not None:
            fields["without_climatology"] = without
        return [Finding("evaluation", fields, f"held-out loss {loss:.5f}; {skill_in_words(rows)}")]

    def _score(self, executor: Executor, held_out: HeldOut) -> tuple[float, int, Comparison]:
        """Return the mean loss of forecasts on one grid, their number and their scores, of all ranks together."""
        mesh, reader = executor.mesh, held_out.reader
        # Of grids without a climatology nothing else has one either: scores are means over all forecasts.
        known = all(one.climatologies is not None for one in self.held_out)
        members = self.run.model.members
        comparison = Comparison(reader, held_out.climatologies if known else None, self.device, members)
        sums = torch.zeros(2, dtype=torch.float64, device=self.device)
        cases = spread_cases(reader, max(1, self.run.evaluation.samples // len(self.held_out)))
        size = executor.layout.microbatch
        for first in range(0, len(cases), size * executor.layout.data_ranks):
            # As many micro-batches as every other rank, all of one size: a sharded model needs all ranks, a pipeline equal
            # micro-batches. What is missing from the last ones repeats the last case, and is not scored.
            numbers = first + mesh.data_rank * size + np.arange(size)
            real = int((numbers < len(cases)).sum())
            mine = cases.take(np.minimum(numbers, len(cases) - 1))
            batch = replace(reader.read_cases(mine, reader.start_seconds(mine)), grid=held_out.grid).to(self.device)
            x, inputs = batch.inputs()
            # Without targets the last stage gives fields in place of a loss.
            targets = inputs.pop("targets_BVHW")[:real]
            predicted = executor.infer(x, inputs, batch.sample_indices)
            # Ranks of `tp` hold the same fields: one of them scores them.
            if predicted is None or mesh.tp.rank or not real:
                continue
            predicted = predicted[: real * members]
            loss = self._loss(predicted, targets, held_out.grid)
            sums += torch.stack((loss, (~targets.isnan()).sum().double()))
            comparison.add(mine.take(slice(real)), reader.denormalise(predicted.float()))
        comparison.all_reduce()
        if mesh.world is not None:
            dist.all_reduce(sums, group=mesh.world)
        # Sum over count of all ranks: they score unequal numbers of targets.
        return float(sums[0] / sums[1]), len(cases), comparison

    def _loss(self, predicted_RVHW: Tensor, targets_BVHW: Tensor, grid: ModelGrid | None) -> Tensor:
        """Return the summed loss as training forms it, float64 [], of normalised fields."""
        model = self.run.model.on_grid(grid)
        weights = None if model.loss_weights is None else torch.tensor(model.loss_weights, device=self.device)
        weight_HW = row_weights(model, self.device)[:, None].expand(-1, model.n_lon)
        # Rows stand for locations, columns for the points of a patch.
        total = loss_sum(model, predicted_RVHW.transpose(1, 2), targets_BVHW.transpose(1, 2), weight_HW, weights)
        return total[0].double()


def spread_cases(reader: FieldReader, count: int) -> Cases:
    """Return about `count` cases or fewer: starts evenly spread over each source, each with all its lead times."""
    chosen = []
    for source in range(len(reader.sources)):
        cases = reader.cases(source)
        starts = np.unique(cases.start)
        wanted = max(1, min(len(starts), count * len(starts) // (len(cases) * len(reader.sources))))
        # Over all of the split: its first starts are of one season.
        kept = starts[np.linspace(0, len(starts) - 1, wanted).round().astype(np.int64)]
        chosen.append(cases.take(np.flatnonzero(np.isin(cases.start, kept))))
    return Cases(*(np.concatenate([getattr(one, name) for one in chosen]) for name in ("source", "start", "target")))
