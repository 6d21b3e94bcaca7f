"""From tokens to fields: final norm, hidden layers, projection to patches, and the loss.

The loss is the squared error, or of an ensemble the almost fair CRPS, weighted by area, as a sum with a count of targets, so
that uneven batches average right.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.families.weather.config import ModelGrid, WeatherModel
from phalanx.families.weather.model.grid_features import (
    outputs_among_inputs,
    patches_of,
    row_weights,
    take_places,
)
from phalanx.families.weather.model.member_noise import repeat_members
from phalanx.nn.layers import Linear, Norm


class PatchOutput(Linear):
    """The projection to patches: rows of `weight` are grouped by variable, then by point of the patch."""

    def __init__(self, config: WeatherModel) -> None:
        points = config.patch_size**2
        super().__init__(config.aggregation_queries * config.d_model, len(config.variables) * points, bias=True)
        self.points = points
        self.selected = [config.variables.index(name) for name in config.output_names]

    def forward(self, x: Tensor) -> Tensor:
        """Project [..., in] to [..., V, P] for the variables that are predicted; the rows of others are not used."""
        assert self.bias is not None
        # A view where the variables are consecutive: no copy of the matrix.
        weight = take_places(self.whole_weight().unflatten(0, (-1, self.points)), self.selected, 0).flatten(0, 1)
        bias = take_places(self.bias.unflatten(0, (-1, self.points)), self.selected, 0).flatten()
        patches: Tensor = F.linear(x, weight.to(x.dtype), bias.to(x.dtype)).unflatten(-1, (-1, self.points))
        return patches


class FieldHead(nn.Module):
    """Norm, `decoder_depth` hidden layers for each token, and one projection for each location's tokens together."""

    def __init__(self, config: WeatherModel) -> None:
        super().__init__()
        self.config = config
        self.norm = Norm(config.d_model, kind="layernorm", eps=config.norm_eps, bias=True)
        self.layers = nn.ModuleList(
            Linear(config.d_model, config.d_model, bias=True) for _ in range(config.decoder_depth)
        )
        self.output = PatchOutput(config)

    def forward(
        self,
        x_BSD: Tensor,
        targets_BVHW: Tensor | None,
        rows_S: Tensor | None = None,
        *,
        fields_BVHW: Tensor | None = None,
        grid: ModelGrid | None = None,
    ) -> Tensor:
        """Return the summed loss [1] of these rows' patches; without targets the predicted fields, see `states`.

        x: tokens behind the last block, of the rows `rows_S` of every sample (whole locations; None means all). targets:
        [B, V, H, W] of `config.output_names`, whole fields, NaN where there is none. fields: the inputs, needed where the
        model predicts changes. grid: that of the fields; None is the model's own. Of an ensemble x has consecutive rows of
        each sample's members, and fields may have.
        """
        predicted_BLVP = self.states(x_BSD, rows_S, fields_BVHW=fields_BVHW, grid=grid)
        return predicted_BLVP if targets_BVHW is None else self.loss(predicted_BLVP, targets_BVHW, rows_S, grid)

    def loss(
        self,
        predicted_BLVP: Tensor,
        targets_BVHW: Tensor,
        rows_S: Tensor | None = None,
        grid: ModelGrid | None = None,
    ) -> Tensor:
        """Return the summed loss [1] of what `states` gave; arguments as of `forward`."""
        on_grid = self.config.on_grid(grid)
        size, device = self.config.patch_size, predicted_BLVP.device
        # Beyond the grid there is nothing to predict.
        targets_BLVP = self._located(patches_of(targets_BVHW, size, beyond=torch.nan), rows_S, 1, on_grid)
        row_H = row_weights(on_grid, device)
        weight_HW = row_H[:, None].expand(-1, on_grid.n_lon)
        # Weights are patched as targets are, so that each point keeps its own.
        weight_LP = self._located(patches_of(weight_HW[None, None], size)[0, :, 0], rows_S, 0, on_grid)
        weights = self.config.loss_weights
        weight_V = None if weights is None else torch.tensor(weights, device=device)
        return loss_sum(self.config, predicted_BLVP, targets_BLVP, weight_LP, weight_V)

    def patches(self, x_BSD: Tensor) -> Tensor:
        """Return the head's own output for each location, [B, L, V, P] in the activation format."""
        x_BSD = self.norm(x_BSD)
        for layer in self.layers:
            x_BSD = F.gelu(layer(x_BSD))
        # A location's tokens together: each alone knows only a part of its variables.
        per_location = x_BSD.unflatten(1, (-1, self.config.aggregation_queries)).flatten(2)
        out: Tensor = self.output(per_location)
        return out

    def states(
        self,
        x_BSD: Tensor,
        rows_S: Tensor | None = None,
        *,
        fields_BVHW: Tensor | None = None,
        grid: ModelGrid | None = None,
    ) -> Tensor:
        """Return the predicted fields of each location, [B, L, V, P] in at least float32; arguments as of `forward`."""
        # In at least float32: a small change of a large field survives no bfloat16 sum.
        patches_BLVP = self.patches(x_BSD)
        # A copy in any case: what comes out of a module must own its memory (see `loss_sum`).
        patches_BLVP = patches_BLVP.to(torch.promote_types(patches_BLVP.dtype, torch.float32), copy=True)
        if self.config.prediction != "change":
            return patches_BLVP
        assert fields_BVHW is not None, "prediction=change needs the input fields"
        if self.config.change_scales is not None:
            scale_V = torch.tensor(self.config.change_scales, dtype=patches_BLVP.dtype, device=patches_BLVP.device)
            patches_BLVP = patches_BLVP * scale_V[:, None]
        before_BVHW = take_places(fields_BVHW, outputs_among_inputs(self.config), 1)
        before_BLVP = patches_of(before_BVHW, self.config.patch_size)
        before_BLVP = self._located(before_BLVP, rows_S, 1, self.config.on_grid(grid))
        return repeat_members(before_BLVP.to(patches_BLVP.dtype), len(patches_BLVP)) + patches_BLVP

    def _located(self, patches: Tensor, rows_S: Tensor | None, dim: int, on_grid: WeatherModel) -> Tensor:
        """Return the patches of these rows' locations along `dim`. on_grid: the model on their grid."""
        # All rows in order: indexing would only copy.
        if rows_S is None or len(rows_S) == on_grid.n_tokens:
            return patches
        tokens = on_grid.aggregation_queries
        return patches.index_select(dim, rows_S[::tokens] // tokens)


def loss_sum(
    config: WeatherModel,
    predicted_RLVP: Tensor,
    targets_BLVP: Tensor,
    weight_LP: Tensor,
    weight_V: Tensor | None = None,
) -> Tensor:
    """Sum over valid targets of weight * loss, [1], in at least float32.

    The loss is (predicted - target)^2 of one row a sample, or with loss=crps the almost fair CRPS of the sample's rows, its
    members. Targets that are NaN are left out, and so is their gradient. With weights of mean 1 over the grid and no target
    missing, the sum of squares divided by the number of targets is ClimaX's `lat_weighted_mse`.
    """
    dtype = torch.promote_types(predicted_RLVP.dtype, torch.float32)
    # where() instead of a product with the mask: NaN times zero is NaN, and its gradient too.
    valid = ~targets_BLVP.isnan()
    predicted_RLVP, targets_BLVP = predicted_RLVP.to(dtype), torch.where(valid, targets_BLVP, 0.0).to(dtype)
    if config.loss == "crps":
        members_BMLVP = predicted_RLVP.unflatten(0, (len(targets_BLVP), -1))
        losses = almost_fair_crps(members_BMLVP, targets_BLVP, config.crps_alpha)
    else:
        losses = (predicted_RLVP - targets_BLVP).square()
    weighted = torch.where(valid, losses, 0.0) * weight_LP[:, None].to(dtype)
    if weight_V is not None:
        weighted = weighted * weight_V[:, None].to(dtype)
    # Not a view: results that others may change in place must own their memory.
    return torch.stack((weighted.sum(),))


def almost_fair_crps(members: Tensor, truth: Tensor, alpha: float) -> Tensor:
    """Return the almost fair continuous ranked probability score of each point: members [B, M, ...], truth [B, ...] ->
    [B, ...].

    mean |x_i - y| - (1 - (1 - alpha) / M) sum_ij |x_i - x_j| / (2 M (M - 1)) (Lang et al. 2024, arXiv:2412.15832).
    alpha = 1 is the fair score (Ferro 2014), unbiased where members are independent draws and no proper score of anything
    else; alpha = 0 that of the members' empirical distribution (Gneiting and Raftery 2007), proper whatever they are.
    """
    count = members.shape[1]
    distance = (members - truth.unsqueeze(1)).abs().mean(1)
    # Sorting costs M log M, all pairs M^2: the gap behind the i-th of M lies between i (M - i) pairs. Gaps are small, and
    # sums of the members themselves would round them.
    order = torch.arange(1, count, device=members.device)
    pairs = (order * (count - order)).to(members.dtype).view(-1, *[1] * (members.dim() - 2))
    difference = (members.sort(1).values.diff(dim=1) * pairs).sum(1)
    return distance - (1.0 - (1.0 - alpha) / count) / (count * (count - 1)) * difference
