"""The forecaster: fields in, fields out, through blocks of a Vision Transformer whose branches a sample may skip.

Plain PyTorch for one device; knows no mesh, rank or layout.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.counter_random import CounterDropout, DropoutContext, mix_bits
from phalanx.families.weather.config import ModelGrid, WeatherModel
from phalanx.families.weather.model.field_embedding import FieldEmbedding
from phalanx.families.weather.model.field_head import FieldHead
from phalanx.families.weather.model.grid_features import fields_of, outputs_among_inputs
from phalanx.nn.attention import attend_whole
from phalanx.nn.layers import Linear, Norm, NumberedBlocks
from phalanx.nn.positions import Positions
from phalanx.nn.splits import ModelChunk

AttentionCore = Callable[[Tensor, Tensor, Tensor], Tensor]
"""The signature of `attend_whole`."""
_PATHS = 0x5851F42D4C957F2D
"""Separates the bits of skipped branches from those of dropped elements."""


class Forecaster(nn.Module):
    """ClimaX or ORBIT, as `config` describes it; the whole of it or one part.

    Parameters are uninitialised (see `layout.initial_values`); build under `torch.device("meta")` to allocate nothing.
    """

    def __init__(
        self, config: WeatherModel, *, dtype: torch.dtype = torch.float32, part: ModelChunk | None = None
    ) -> None:
        super().__init__()
        self.part = part = part or ModelChunk(range(config.n_layers))
        self.config = config
        self.dtype = dtype
        if part.first:
            self.embedding = FieldEmbedding(config, dtype)
        self.blocks = NumberedBlocks(lambda number: Block(config), part.blocks)
        if part.last:
            self.head = FieldHead(config)

    def forward(
        self,
        fields_BVHW: Tensor,
        targets_BVHW: Tensor,
        *,
        lead_hours_B: Tensor,
        dropout: DropoutContext | None = None,
        grid: ModelGrid | None = None,
        noise_RSC: Tensor | None = None,
    ) -> Tensor:
        """Return the summed loss [1]; see `FieldHead` and, of grid and noise, `hidden`."""
        positions = self.all_positions(fields_BVHW.device, grid)
        hidden = self.hidden(
            fields_BVHW, positions, lead_hours_B=lead_hours_B, dropout=dropout, grid=grid, noise_RSC=noise_RSC
        )
        loss: Tensor = self.head(hidden, targets_BVHW, positions.rows_S, fields_BVHW=fields_BVHW, grid=grid)
        return loss

    def hidden(
        self,
        inputs: Tensor,
        positions: Positions,
        *,
        lead_hours_B: Tensor,
        dropout: DropoutContext | None = None,
        grid: ModelGrid | None = None,
        noise_RSC: Tensor | None = None,
    ) -> Tensor:
        """Return the activations behind the last block of this model chunk, [B, S, D]; with noise [R, S, D].

        inputs: fields [B, V, H, W] of `config.input_names`, finite and normalised, of several states as `FieldEmbedding`
        takes them; or activations where the part does not hold the embedding. positions: the tokens computed here; `rows_S`
        are whole locations. lead_hours: from the inputs to what is predicted. grid: that of the fields; None is the
        model's own. noise: of the members of an ensemble, whose rows R are consecutive for each sample; inputs may have a
        row a sample, or a row a member.
        """
        x_BSD = inputs
        if self.part.first:
            rows = len(inputs) if noise_RSC is None else len(noise_RSC)
            x_BSD = self.embedding(inputs, lead_hours_B, positions, dropout, grid=grid, rows=rows)
        for number, block in zip(self.part.blocks, self.blocks, strict=True):
            # Numbered over the whole model, so that a chunk drops what the whole model would.
            at_layer = None if dropout is None else dropout.at_layer(number)
            x_BSD = block(x_BSD, at_layer, path_factors(self.config, number, at_layer), noise_RSC)
        return x_BSD

    @torch.no_grad()
    def forecast(
        self,
        fields_BVHW: Tensor,
        lead_hours_B: Tensor,
        grid: ModelGrid | None = None,
        noise_RSC: Tensor | None = None,
    ) -> Tensor:
        """Return fields [B, V, H, W] of `config.output_names` predicted for `lead_hours_B` hours on; dropout is off.

        grid: that of the fields; None is the model's own. noise: of the members of an ensemble, see `hidden`; the fields are
        then [R, V, H, W].
        """
        positions = self.all_positions(fields_BVHW.device, grid)
        hidden = self.hidden(fields_BVHW, positions, lead_hours_B=lead_hours_B, grid=grid, noise_RSC=noise_RSC)
        patches_BLVP = self.head(hidden, None, fields_BVHW=fields_BVHW, grid=grid)
        return fields_of(patches_BLVP, self.config.on_grid(grid))

    def next_inputs(self, fields_BVHW: Tensor, predicted_BVHW: Tensor) -> Tensor:
        """Return the inputs of the next step of a roll-out: the predicted fields as the newest state, and the states before
        it but the oldest. Fields that are not predicted stay those of the newest state."""
        places = outputs_among_inputs(self.config)
        newest = fields_BVHW[:, : len(self.config.input_names)]
        following = newest.clone()
        # Exactly the mean is how points without a value look: there they stay as they are.
        before = newest[:, places]
        following[:, places] = torch.where(before == 0.0, before, predicted_BVHW.to(fields_BVHW.dtype))
        return torch.cat((following, fields_BVHW[:, : -newest.shape[1]]), dim=1)

    def with_forcings(self, fields_BVHW: Tensor, forcings_BTFHW: Tensor) -> Tensor:
        """Return inputs whose forcings, the last inputs of each of the T states, are these."""
        count = forcings_BTFHW.shape[2]
        if not count:
            return fields_BVHW
        states_BTVHW = fields_BVHW.unflatten(1, (self.config.history, -1))
        return torch.cat((states_BTVHW[:, :, :-count], forcings_BTFHW.to(fields_BVHW.dtype)), dim=2).flatten(1, 2)

    def all_positions(self, device: torch.device, grid: ModelGrid | None = None) -> Positions:
        """Return all tokens of a sample on `grid`; None is the model's own."""
        rows_S = torch.arange(self.config.on_grid(grid).n_tokens, device=device)
        return Positions(rows_S, rows_S)


class Attention(nn.Module):
    """Self-attention of all tokens with all.

    `qkv.weight` has its rows grouped by head: query, key and value of the first, then of the second. A contiguous part of
    the rows is therefore a whole number of heads, which is what tensor parallelism splits. Norms of queries and keys are
    LayerNorms over a head without bias, as in ViT-22B (Dehghani et al. 2023).
    """

    def __init__(self, config: WeatherModel) -> None:
        super().__init__()
        self.head_size = config.head_size
        self.attend: AttentionCore = attend_whole
        self.qkv = Linear(config.d_model, 3 * config.d_model, bias=True)
        self.output = Linear(config.d_model, config.d_model, bias=True)
        self.query_norm = self.key_norm = None
        if config.qk_norm:
            # Bounds the scores, whose growth lets training of very wide models diverge.
            self.query_norm = Norm(config.head_size, kind="layernorm", eps=config.norm_eps, bias=False)
            self.key_norm = Norm(config.head_size, kind="layernorm", eps=config.norm_eps, bias=False)

    def forward(self, x_BSD: Tensor) -> Tensor:
        """Map activations [B, S, D] to [B, S, D]."""
        # One matmul for all three; rows grouped by head let tensor parallelism cut it.
        query, key, value = self.qkv(x_BSD).unflatten(-1, (-1, 3, self.head_size)).unbind(-2)
        if self.query_norm is not None and self.key_norm is not None:
            query, key = self.query_norm(query), self.key_norm(key)
        mixed_BASE = self.attend(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2))
        out: Tensor = self.output(mixed_BASE.transpose(1, 2).flatten(2))
        return out


class NoiseConditioning(Linear):
    """What the noise of a token makes of the norms of one block: a scale and a shift of each.

    Conditional layer norms as those of AIFS-CRPS (Lang et al. 2024, arXiv:2412.15832), by one matrix a block where that
    model has an MLP too, which all blocks share: shared parameters would tie the stages of a pipeline together.
    """

    def __init__(self, config: WeatherModel) -> None:
        super().__init__(config.noise_channels, 4 * config.d_model, bias=False)

    def norm_changes(self, x_BSD: Tensor, noise_BSC: Tensor) -> tuple[Tensor, ...]:
        """Return scale and shift of the first norm, then of the second, [B, S, D] each, in the format of x."""
        changes: Tensor = self(noise_BSC.to(x_BSD.dtype))
        return changes.chunk(4, dim=-1)


class MLP(nn.Module):
    """down(gelu(up(x))), exact GELU."""

    def __init__(self, config: WeatherModel) -> None:
        super().__init__()
        self.up = Linear(config.d_model, config.ff_size, bias=True)
        self.down = Linear(config.ff_size, config.d_model, bias=True)

    def forward(self, x_BSD: Tensor) -> Tensor:
        """Map activations [B, S, D] to [B, S, D]."""
        hidden: Tensor = self.down(F.gelu(self.up(x_BSD)))
        return hidden


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)), where noise scales and shifts what the norms give."""

    noise: NoiseConditioning | None

    def __init__(self, config: WeatherModel) -> None:
        super().__init__()
        self.attention_norm = Norm(config.d_model, kind="layernorm", eps=config.norm_eps, bias=True)
        self.attention = Attention(config)
        self.mlp_norm = Norm(config.d_model, kind="layernorm", eps=config.norm_eps, bias=True)
        self.mlp = MLP(config)
        self.attention_dropout = CounterDropout(config.dropout, site=0)
        self.mlp_dropout = CounterDropout(config.dropout, site=1)
        self.noise = NoiseConditioning(config) if config.noise_channels else None

    def forward(
        self,
        x_BSD: Tensor,
        dropout: DropoutContext | None = None,
        kept_2B: Tensor | None = None,
        noise_BSC: Tensor | None = None,
    ) -> Tensor:
        """Map activations [B, S, D] to [B, S, D]. kept: factor of each sample's attention and MLP branch, from
        `path_factors`. noise: of each member and token, where the model has any."""
        normed, second = self.attention_norm(x_BSD), None
        if self.noise is not None and noise_BSC is not None:
            scale, shift, *second = self.noise.norm_changes(x_BSD, noise_BSC)
            normed = normed * (1.0 + scale) + shift
        mixed = self.attention_dropout(self.attention(normed), dropout)
        x_BSD = x_BSD + _scale_branch(mixed, kept_2B, 0)
        normed = self.mlp_norm(x_BSD)
        if second is not None:
            normed = normed * (1.0 + second[0]) + second[1]
        hidden = self.mlp_dropout(self.mlp(normed), dropout)
        return x_BSD + _scale_branch(hidden, kept_2B, 1)


def _scale_branch(branch_BSD: Tensor, kept_2B: Tensor | None, branch: int) -> Tensor:
    return branch_BSD if kept_2B is None else branch_BSD * kept_2B[branch, :, None, None].to(branch_BSD.dtype)


def path_factors(config: WeatherModel, layer: int, dropout: DropoutContext | None) -> Tensor | None:
    """Return the factors of the two residual branches of block `layer` for each sample, float64 [2, B]; None where nothing
    is dropped.

    A branch of a sample is left out with a chance that grows linearly from 0 in the first block to `drop_path` in the last,
    and divided by the chance of being kept otherwise (stochastic depth, Huang et al. 2016). Whether it is left out is a
    function of (seed, step, layer, branch, sample). dropout: the context of that layer. The factors are formed outside the
    block, so that equal blocks share one compiled program.
    """
    chance = config.drop_path * layer / max(config.n_layers - 1, 1)
    if dropout is None or chance == 0.0:
        return None
    # A function of the sample's number: the same whatever ranks and micro-batches share the batch.
    branches = torch.arange(2, device=dropout.sample_indices_B.device)[:, None]
    bits_2B = mix_bits(mix_bits(dropout.key + _PATHS) + dropout.sample_indices_B * 2 + branches)
    kept_2B = (bits_2B >> 33) & 0x7FFFFFFF >= int(chance * 2**31)
    return kept_2B.to(torch.float64) / (1.0 - chance)
