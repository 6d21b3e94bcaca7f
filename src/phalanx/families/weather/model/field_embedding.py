"""From fields on a grid to tokens: patch and variable embedding, aggregation of variables, place and lead time.

ClimaX makes a token of each variable at each location, P x + c with the patch embedding P of that variable, and attends to
these with queries that are parameters. Since the queries do not depend on the fields, scores and values are linear in the
patch x before and after the softmax: q.W_k(P x + c) = (P^T W_k^T q).x + const, and the same for W_v. Multiplying the
weights first gives the same function without the V tokens of width D at each location, which are most of the memory and
the work of the published form: with P points a patch it holds V*(P+1) numbers a head and location in place of V*D for all
heads together, and as many for keys and for values; and it needs D/(P+1) times fewer operations for these.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from phalanx.counter_random import CounterDropout, DropoutContext
from phalanx.families.weather.config import ModelGrid, WeatherModel
from phalanx.families.weather.model.grid_features import (
    patch_places,
    patches_of,
    split_level,
    take_places,
    wave_features,
)
from phalanx.families.weather.model.member_noise import repeat_members
from phalanx.families.weather.sizes import FEATURES, group_sizes
from phalanx.nn.layers import Linear
from phalanx.nn.positions import Positions
from phalanx.nn.resizing import interpolate_grid

LEAD_HOURS = 1.0, 1000.0
"""Shortest and longest wave of the lead time, in hours."""
PRESSURES = 1.0, 4000.0
"""Shortest and longest wave of the pressure, in hPa."""
DISTANCES = 0.02, 4.0
"""Shortest and longest wave of a place, in radii of the sphere: 130 km of the Earth, and twice its diameter."""
AREAS = 1e-6, 4.0
"""Shortest and longest wave of a patch's area, in steradians."""


class PatchEmbedding(nn.Module):
    """A linear map from a patch to a token for each variable: weight [V, D, P], bias [V, D].

    Of several states, P are the points of the newest one's patch, then those of the one before it.
    """

    def __init__(self, config: WeatherModel) -> None:
        super().__init__()
        shape = len(config.variables), config.d_model
        self.weight = nn.Parameter(torch.empty(*shape, config.history * config.patch_size**2))
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
        self.aggregation: PatchAggregation | HierarchicalAggregation
        if config.aggregation == "hierarchical":
            self.aggregation = HierarchicalAggregation(config)
        else:
            self.aggregation = PatchAggregation(config, config.aggregation_queries)
        if config.position_embedding == "learned":
            self.positions = nn.Parameter(torch.empty(config.n_locations, width))
            self.place = None
        else:
            # None rather than no attribute, so that code may ask for it in either case.
            self.register_parameter("positions", None)
            self.place = Linear(4 * 2 * FEATURES, width, bias=True)
        self.lead = Linear(2 * FEATURES if config.lead_embedding == "fourier" else 1, width, bias=True)
        self.dropout = CounterDropout(config.dropout, site=0)

    def forward(
        self,
        fields_BVHW: Tensor,
        lead_hours_B: Tensor,
        positions: Positions,
        dropout: DropoutContext | None = None,
        grid: ModelGrid | None = None,
        rows: int | None = None,
    ) -> Tensor:
        """Embed fields as tokens [B, S, D] in the model's activation format, of the rows `positions.rows_S`.

        fields: finite and normalised, in the order of `config.input_names`, of the newest of `config.history` states,
        then of the one before it. lead_hours: hours from the newest to what is predicted. rows: whole locations, whose
        tokens follow one another. grid: that of the fields; None is the model's own. rows: those to give, of consecutive
        members of each sample; None gives one a sample.
        """
        on_grid = self.config.on_grid(grid)
        x_BSD = self.tokens(fields_BVHW, self.needed_rows(positions, on_grid), on_grid)
        rows_S = positions.rows_S
        x_BSD = x_BSD + self.places(rows_S // self.config.aggregation_queries, on_grid)
        # The same for every location: how far ahead the whole field is predicted.
        fourier = self.config.lead_embedding == "fourier"
        lead = wave_features(lead_hours_B, *LEAD_HOURS) if fourier else lead_hours_B[:, None] / 100.0
        leads_BD = self.lead(lead.to(self.dtype))
        # Embedded once for all members, which differ in the blocks alone. Before a sum: what comes out of a module must own
        # its memory.
        rows = rows or len(x_BSD)
        x_BSD = repeat_members(x_BSD, rows) + repeat_members(leads_BD, rows)[:, None]
        dropped: Tensor = self.dropout(x_BSD, dropout)
        return dropped

    def needed_rows(self, positions: Positions, on_grid: WeatherModel) -> Tensor:
        """Return the rows that `tokens` starts from: those that come out, unless ranks exchange rows on the way.

        on_grid: the model on the grid of the fields.
        """
        return positions.rows_S

    def tokens(self, fields_BVHW: Tensor, rows_S: Tensor, on_grid: WeatherModel) -> Tensor:
        """Return aggregated tokens [B, S, D] of these rows, without place and lead time. on_grid: see `needed_rows`."""
        config = self.config
        patches_BLVP = patches_of(fields_BVHW.to(self.dtype), config.patch_size)
        # A variable's token is the sum of what its states give: all their points are one patch.
        if config.history > 1:
            patches_BLVP = patches_BLVP.unflatten(2, (config.history, -1)).transpose(2, 3).flatten(3)
        # Where tokens are sharded over ranks, only their own locations are aggregated.
        if len(rows_S) != on_grid.n_tokens:
            locations = rows_S[:: config.aggregation_queries] // config.aggregation_queries
            patches_BLVP = patches_BLVP.index_select(1, locations)
        weight_VDP, offset_VD = self.variable_maps([config.variables.index(name) for name in config.input_names])
        present_BV = None
        if config.absent_inputs == "masked":
            # Exactly the mean throughout is how data hand over a field that is not there.
            present_BV = (fields_BVHW != 0.0).unflatten(1, (config.history, -1)).flatten(3).any(dim=3).any(dim=1)
        tokens: Tensor = self.aggregation(patches_BLVP, weight_VDP, offset_VD, present_BV)
        return tokens

    def variable_maps(self, variables: list[int]) -> tuple[Tensor, Tensor]:
        """Return what turns these variables' patches into tokens: weight [V, D, P] and offset [V, D], in the
        activation format."""
        weight_VDP = take_places(self.patches.weight, variables, 0).to(self.dtype)
        # Bias and variable embedding always occur as a sum; it is formed before rounding.
        offset_VD = take_places(self.patches.bias + self.variables, variables, 0).to(self.dtype)
        if self.level is not None:
            names = [self.config.variables[place] for place in variables]
            levels = [split_level(name) for name in names]
            pressures = [level[1] if level else 0 for level in levels]
            waves = wave_features(torch.tensor(pressures, dtype=torch.float64, device=offset_VD.device), *PRESSURES)
            # Variables of the surface have no pressure: zeros say so, and the table still tells them apart.
            on_level_V = torch.tensor([level is not None for level in levels], device=offset_VD.device)
            offset_VD = offset_VD + self.level(torch.where(on_level_V[:, None], waves, 0.0).to(self.dtype))
        return weight_VDP, offset_VD

    def places(self, locations_S: Tensor, on_grid: WeatherModel) -> Tensor:
        """Return the embedding of these locations, [S, D]. on_grid: see `needed_rows`."""
        if self.positions is not None:
            table_LD: Tensor = self.positions
            before, after = ((one.patch_rows, one.patch_columns) for one in (self.config, on_grid))
            # In at least float32, rounded once, as `training.init_from` would do it once for all.
            if before != after:
                wide = torch.promote_types(table_LD.dtype, torch.float32)
                table_LD = interpolate_grid(table_LD.to(wide), before, after)
            return table_LD.index_select(0, locations_S).to(self.dtype)
        assert self.place is not None
        places_S4 = patch_places(on_grid, locations_S.device).index_select(0, locations_S)
        waves = (wave_features(places_S4[:, :3], *DISTANCES).flatten(1), wave_features(places_S4[:, 3], *AREAS))
        embedded: Tensor = self.place(torch.cat(waves, dim=1).to(self.dtype))
        return embedded


class _Aggregation(nn.Module):
    """Attention of learned queries to tokens of variables. The key has no bias: it would add the same to all scores of a
    query.

    Rows of `query`, `key` and `value`, and columns of `output`, are grouped by head: a contiguous part of each is a whole
    number of heads, and a module that holds such parts computes these heads alone.
    """

    def __init__(self, config: WeatherModel, n_queries: int) -> None:
        super().__init__()
        width = config.d_model
        self.head_size = config.head_size
        self.queries = nn.Parameter(torch.empty(n_queries, width))
        self.query = Linear(width, width, bias=True)
        self.key = Linear(width, width, bias=False)
        self.value = Linear(width, width, bias=True)
        self.output = Linear(width, width, bias=True)

    def directions(self, queries_ND: Tensor) -> Tensor:
        """Return directions in token space whose product with a token is its score under each query and head, [N, A, D]."""
        query_NAE = self._heads(self.query(queries_ND) * self.head_size**-0.5)
        key_AED = self.key.whole_weight().to(queries_ND.dtype).unflatten(0, (-1, self.head_size))
        return torch.einsum("nae,aed->nad", query_NAE, key_AED)

    def _heads(self, x: Tensor) -> Tensor:
        by_head: Tensor = x.unflatten(-1, (-1, self.head_size))
        return by_head

    def finish(self, mixed_BLNAE: Tensor) -> Tensor:
        """Turn the values under each head into tokens [B, L*N, D]: add the bias of the values, project."""
        assert self.value.bias is not None
        mixed = mixed_BLNAE.flatten(-2) + self.value.bias.to(mixed_BLNAE.dtype)
        tokens: Tensor = self.output(mixed.flatten(1, 2))
        return tokens


class PatchAggregation(_Aggregation):
    """Attention to variables as they come out of the patches."""

    def forward(
        self, patches_BLVP: Tensor, weight_VDP: Tensor, offset_VD: Tensor, present_BV: Tensor | None = None
    ) -> Tensor:
        """Return tokens [B, L*N, D] of all queries; see `attend`."""
        return self.attend(patches_BLVP, weight_VDP, offset_VD, present_BV, slice(None))

    def attend(
        self, patches_BLVP: Tensor, weight_VDP: Tensor, offset_VD: Tensor, present_BV: Tensor | None, queries: slice
    ) -> Tensor:
        """Return tokens [B, L*N, D] of `queries`, over the variables given; N is the number of queries.

        A variable's token would be weight_DP x_P + offset_D. All in the format of the activations. present: bool, the
        variables that each sample has, where not all have all; those of a sample that has none all take part.
        """
        # Weights are multiplied first: scores then need no token of a variable (see the top of this module).
        direction_NAD = self.directions(self.queries[queries].to(patches_BLVP.dtype))
        # The offset as one more point of each patch, whose value is 1.
        weight_VDQ = torch.cat((weight_VDP, offset_VD[..., None]), dim=-1)
        patches_BLVQ = torch.cat((patches_BLVP, torch.ones_like(patches_BLVP[..., :1])), dim=-1)
        per_point_NAVQ = torch.einsum("nad,vdq->navq", direction_NAD, weight_VDQ)
        scores_ABLNV = torch.einsum("blvq,navq->ablnv", patches_BLVQ, per_point_NAVQ)
        if present_BV is not None:
            taken_BV = present_BV | ~present_BV.any(dim=1, keepdim=True)
            scores_ABLNV = scores_ABLNV.masked_fill(~taken_BV[:, None, None], -torch.inf)
        share_ABLNV = scores_ABLNV.softmax(dim=-1)
        value_AED = self.value.whole_weight().to(weight_VDQ.dtype).unflatten(0, (-1, self.head_size))
        # The same for values: linear in the patch, so mixed before they are projected.
        value_AVQE = torch.einsum("aed,vdq->avqe", value_AED, weight_VDQ)
        shares = share_ABLNV[..., None] * patches_BLVQ[:, :, None]
        mixed_AME = shares.flatten(1, 3).flatten(2) @ value_AVQE.flatten(1, 2)
        mixed_ABLNE = mixed_AME.unflatten(1, share_ABLNV.shape[1:4])
        return self.finish(mixed_ABLNE.permute(1, 2, 3, 0, 4))


class TokenAggregation(_Aggregation):
    """Attention to tokens of a location, few of them."""

    def forward(self, tokens_BLGD: Tensor) -> Tensor:
        """Attend to tokens [B, L, G, D]: tokens [B, L*N, D] of all queries."""
        direction_NAD = self.directions(self.queries.to(tokens_BLGD.dtype))
        share_BLNAG = torch.einsum("blgd,nad->blnag", tokens_BLGD, direction_NAD).softmax(dim=-1)
        value_BLGAE = self._heads(self.value.product(tokens_BLGD, None))
        return self.finish(torch.einsum("blnag,blgae->blnae", share_BLNAG, value_BLGAE))


class HierarchicalAggregation(nn.Module):
    """Groups of consecutive variables become one token each, and those the location's tokens (D-CHAG, arXiv:2506.21411).

    Groups have a query each and share the projections.
    """

    def __init__(self, config: WeatherModel) -> None:
        super().__init__()
        self.sizes = group_sizes(len(config.input_names), config.aggregation_groups)
        self.groups = PatchAggregation(config, config.aggregation_groups)
        self.final = TokenAggregation(config, config.aggregation_queries)

    def forward(
        self, patches_BLVP: Tensor, weight_VDP: Tensor, offset_VD: Tensor, present_BV: Tensor | None = None
    ) -> Tensor:
        """Return tokens [B, L*K, D], as of `PatchAggregation`."""
        present = [None] * len(self.sizes) if present_BV is None else present_BV.split(self.sizes, 1)
        parts = zip(
            patches_BLVP.split(self.sizes, 2),
            weight_VDP.split(self.sizes),
            offset_VD.split(self.sizes),
            present,
            strict=True,
        )
        tokens = [self.groups.attend(*part, slice(group, group + 1)) for group, part in enumerate(parts)]
        combined: Tensor = self.final(torch.stack(tokens, dim=2))
        return combined
