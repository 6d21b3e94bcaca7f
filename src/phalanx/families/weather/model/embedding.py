"""From fields on a grid to tokens: patch and variable embedding, aggregation, place and lead time."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from phalanx.counter_random import CounterDropout, DropoutContext
from phalanx.families.weather.model.aggregation import build_aggregation
from phalanx.families.weather.model.features import wave_features
from phalanx.families.weather.model.grid import patch_places, patches_of
from phalanx.families.weather.model.variables import input_places, pressure_level, take
from phalanx.families.weather.model_config import WeatherModel
from phalanx.families.weather.sizes import FEATURES
from phalanx.nn.layers import Linear
from phalanx.nn.positions import Positions

LEAD_HOURS = 1.0, 1000.0
"""Shortest and longest wave of the lead time, in hours."""
PRESSURES = 1.0, 4000.0
"""Shortest and longest wave of the pressure, in hPa."""
DISTANCES = 0.02, 4.0
"""Shortest and longest wave of a place, in radii of the sphere: 130 km of the Earth, and twice its diameter."""
AREAS = 1e-6, 4.0
"""Shortest and longest wave of a patch's area, in steradians."""


class PatchEmbedding(nn.Module):
    """A linear map from a patch to a token for each variable: weight [V, D, P], bias [V, D]."""

    def __init__(self, config: WeatherModel) -> None:
        super().__init__()
        shape = len(config.variables), config.d_model
        self.weight = nn.Parameter(torch.empty(*shape, config.patch_size**2))
        self.bias = nn.Parameter(torch.empty(shape))


class FieldEmbedding(nn.Module):
    """Fields -> tokens, for the locations that are asked for; nothing is computed for others."""

    positions: nn.Parameter | None
    place: Linear | None
    level: Linear | None

    def __init__(self, config: WeatherModel, dtype: torch.dtype) -> None:
        super().__init__()
        self.config = config
        self.dtype = dtype
        width = config.d_model
        self.patches = PatchEmbedding(config)
        self.variables = nn.Parameter(torch.empty(len(config.variables), width))
        fourier_level = config.level_embedding == "fourier"
        self.level = Linear(2 * FEATURES, width, bias=False) if fourier_level else None
        self.aggregation = build_aggregation(config)
        if config.position_embedding == "learned":
            self.positions = nn.Parameter(torch.empty(config.n_locations, width))
            self.place = None
        else:
            self.register_parameter("positions", None)
            self.place = Linear(4 * 2 * FEATURES, width, bias=True)
        self.lead = Linear(2 * FEATURES if config.lead_embedding == "fourier" else 1, width, bias=True)
        self.dropout = CounterDropout(config.dropout, site=0)

    def forward(
        self, fields_BVHW: Tensor, lead_hours_B: Tensor, positions: Positions, dropout: DropoutContext | None = None
    ) -> Tensor:
        """Fields -> tokens [B, S, D] in the model's activation format, of the rows `positions.rows_S`.

        fields: finite and normalised, in the order of `config.input_names`. lead_hours: hours from the fields to what is
        predicted. rows: whole locations, whose tokens follow one another.
        """
        x_BSD = self.tokens(fields_BVHW, self.needed_rows(positions))
        rows_S = positions.rows_S
        x_BSD = x_BSD + self.places(rows_S // self.config.aggregation_queries)
        x_BSD = x_BSD + self.lead(self._lead_features(lead_hours_B))[:, None]
        dropped: Tensor = self.dropout(x_BSD, dropout)
        return dropped

    def needed_rows(self, positions: Positions) -> Tensor:
        """The rows that `tokens` starts from: those that come out, unless ranks exchange rows on the way."""
        return positions.rows_S

    def tokens(self, fields_BVHW: Tensor, rows_S: Tensor) -> Tensor:
        """Aggregated tokens [B, S, D] of these rows, without place and lead time."""
        config = self.config
        patches_BLVP = patches_of(fields_BVHW.to(self.dtype), config.patch_size)
        if len(rows_S) != config.n_tokens:
            locations = rows_S[:: config.aggregation_queries] // config.aggregation_queries
            patches_BLVP = patches_BLVP.index_select(1, locations)
        weight_VDP, offset_VD = self.variable_maps(input_places(config))
        tokens: Tensor = self.aggregation(patches_BLVP, weight_VDP, offset_VD)
        return tokens

    def variable_maps(self, variables: list[int]) -> tuple[Tensor, Tensor]:
        """How these variables' patches become tokens: weight [V, D, P] and offset [V, D], in the activation format."""
        weight_VDP = take(self.patches.weight, variables, 0).to(self.dtype)
        # Bias and variable embedding always occur as a sum; it is formed before rounding.
        offset_VD = take(self.patches.bias + self.variables, variables, 0).to(self.dtype)
        if self.level is not None:
            names = [self.config.variables[place] for place in variables]
            offset_VD = offset_VD + self.level(_level_features(names, offset_VD.device).to(self.dtype))
        return weight_VDP, offset_VD

    def places(self, locations_S: Tensor) -> Tensor:
        """Embedding of these locations, [S, D]."""
        if self.positions is not None:
            return self.positions.index_select(0, locations_S).to(self.dtype)
        assert self.place is not None
        places_S4 = patch_places(self.config, locations_S.device).index_select(0, locations_S)
        waves = (wave_features(places_S4[:, :3], *DISTANCES).flatten(1), wave_features(places_S4[:, 3], *AREAS))
        embedded: Tensor = self.place(torch.cat(waves, dim=1).to(self.dtype))
        return embedded

    def _lead_features(self, lead_hours_B: Tensor) -> Tensor:
        if self.config.lead_embedding == "fourier":
            return wave_features(lead_hours_B, *LEAD_HOURS).to(self.dtype)
        return (lead_hours_B[:, None] / 100.0).to(self.dtype)


def _level_features(names: list[str], device: torch.device) -> Tensor:
    """Waves of each variable's pressure, [V, 2 * FEATURES]; zeros for variables of the surface."""
    levels = [pressure_level(name) for name in names]
    pressure_V = torch.tensor([level or 0 for level in levels], dtype=torch.float64, device=device)
    on_level_V = torch.tensor([level is not None for level in levels], device=device)
    return torch.where(on_level_V[:, None], wave_features(pressure_V, *PRESSURES), 0.0)
