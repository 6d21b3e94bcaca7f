"""Verification of weather runs: fields that are a function of their number, and forecasters small enough for a laptop."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from phalanx.counter_random import sample_bits, sample_normals
from phalanx.families.weather.config import WeatherModel, WeatherRun
from phalanx.families.weather.data.field_samples import FieldBatch
from phalanx.verification.family import VerifiableModel, most_stages

_HEAD_SIZE = 8
_LEAD_UNIT = 6
"""Hours that lead times are multiples of."""
_LONGEST_LEAD = 28
"""Longest lead time, in units of `_LEAD_UNIT`."""


class WeatherVerification(VerifiableModel):
    """See `verification.family.VerifiableModel`."""

    run: WeatherRun

    def samples(self, step: int, first: int, count: int, global_batch: int) -> FieldBatch:
        """Return random fields, with uneven targets and lead times; steps take the grids in use in turn."""
        grids = list(self.run.grid_weights)
        grid = grids[(step - 1) % len(grids)]
        model = self.run.model.on_grid(grid)
        numbers = torch.arange(first, first + count) + (step - 1) * global_batch
        inputs, outputs = model.history * len(model.input_names), len(model.output_names)
        data = self.run.data
        # Of every step of the longest roll-outs, where all of them learn.
        through = () if data.rollout_steps is None else (data.rollout_steps.last,)
        targets = _random_fields("targets", numbers, math.prod(through) * outputs, model).unflatten(
            1, (*through, outputs)
        )
        # Between an eighth and a half of a sample's targets, by its number: an average over ranks in place of a sum over
        # targets then shows.
        left_out = sample_bits("left out", numbers, targets[0].numel()) % 8 < 1 + numbers[:, None] % 4
        targets[left_out.view_as(targets)] = torch.nan
        unit = self.run.data.rollout_hours
        most = _LONGEST_LEAD if unit is None else data.steps_to_leads
        # A reduced model may have fewer of them.
        forced = len([name for name in model.input_names if name in data.forcings])
        steps = (*through, data.steps_to_leads)[0] - 1, model.history, forced
        forcings = _random_fields("forcings", numbers, math.prod(steps), model).unflatten(1, steps)
        leads = (unit or _LEAD_UNIT) * (1 + sample_bits("lead", numbers, 1)[:, 0] % most)
        return FieldBatch(
            fields=_random_fields("fields", numbers, inputs, model),
            forcings=forcings,
            targets=targets,
            lead_hours=leads.to(torch.float32),
            time_of_year=torch.zeros(count),
            time_of_day=torch.zeros(count),
            sample_indices=numbers,
            grid=grid,
        )

    def least_steps(self) -> int:
        """See `VerifiableModel`: a step for each grid."""
        return len(self.run.grid_weights)

    def reduced(self, world_size: int) -> dict[str, dict[str, Any]]:
        """Return small widths, heads, layers and grid, and few variables.

        Aggregation, q/k norms, embeddings, prediction, depth of the head and dropout stay as they are.
        """
        model = self.run.model
        # A legal `tp` divides the world size and the heads, and so their greatest common divisor, which heads, hidden
        # width and columns of the small model are multiples of.
        heads = math.gcd(model.n_heads, world_size)
        patch = min(model.patch_size, 2)
        # Where patches reach beyond the grid, those of the small one do too.
        beyond = [patch - 1 if points % model.patch_size else 0 for points in (model.n_lat, model.n_lon)]
        # A few variables that are predicted, read or both, and one that is neither, in the model's order.
        read, written = set(model.input_names), set(model.output_names)
        predicted = [name for name in model.variables if name in written]
        both = [name for name in predicted if name in read]
        read_alone = [name for name in model.variables if name in read - written]
        neither = [name for name in model.variables if name not in read | written]
        chosen = {*predicted[:2], *both[:3], *read_alone[:2], *neither[:1]}
        names = [name for name in model.variables if name in chosen]
        inputs = [name for name in model.input_names if name in names]
        outputs = [name for name in model.output_names if name in names]
        changes: dict[str, Any] = {
            "preset": None,
            "n_layers": min(model.n_layers, max(3, most_stages(self.run, world_size) + 1)),
            "d_model": _HEAD_SIZE * heads,
            "n_heads": heads,
            "d_ff": 4 * _HEAD_SIZE * heads,
            "n_lat": 3 * patch - beyond[0],
            "n_lon": 2 * heads * patch - beyond[1],
            "patch_size": patch,
            "variables": names,
            "inputs": inputs,
            "outputs": outputs,
            # Activations keep their size behind narrower matrices: else attention would be all but uniform, and hide
            # mistakes.
            "init_std": model.init_std * math.sqrt(model.d_model / (_HEAD_SIZE * heads)),
            "aggregation_groups": min(model.aggregation_groups, 2, len(inputs)),
            "aggregation_queries": min(model.aggregation_queries, 2),
        }
        # Of other patches each: two rows fewer, or one more.
        changes["grids"] = [
            {"name": grid.name, "n_lat": (4 if number % 2 else 2) * patch, "n_lon": 2 * heads * patch}
            for number, grid in enumerate(model.grids)
        ]
        if model.grids:
            # Small grids end apart, by half a row each: all of them are made global.
            changes |= {"first_latitude": None, "last_latitude": None}
        for field in ("change_scales", "loss_weights"):
            numbers = getattr(model, field)
            if numbers is not None:
                by_name = dict(zip(model.output_names, numbers, strict=True))
                changes[field] = [by_name[name] for name in outputs]
        return {"model": WeatherModel.model_validate({**model.model_dump(), **changes}).model_dump()}


def _random_fields(what: str, numbers: Tensor, count: int, model: WeatherModel) -> Tensor:
    """Return normal values, float32 [samples, count, H, W]."""
    shape = (count, model.n_lat, model.n_lon)
    return sample_normals(what, numbers, math.prod(shape)).view(len(numbers), *shape).float()
