"""The forecaster: fields in, fields out. Plain PyTorch for one device; knows no mesh, rank or layout."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from phalanx.counter_random import DropoutContext
from phalanx.families.weather.model.block import Block, path_factors
from phalanx.families.weather.model.embedding import FieldEmbedding
from phalanx.families.weather.model.grid import fields_of
from phalanx.families.weather.model.head import FieldHead
from phalanx.families.weather.model.variables import outputs_among_inputs
from phalanx.families.weather.model_config import WeatherModel
from phalanx.nn.blocks import NumberedBlocks
from phalanx.nn.positions import Positions
from phalanx.nn.splits import ModelChunk


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
    ) -> Tensor:
        """Summed loss [1]; see `loss`. The number of targets is `loss.target_counts(targets)`."""
        positions = self.all_positions(fields_BVHW.device)
        hidden = self.hidden(fields_BVHW, positions, lead_hours_B=lead_hours_B, dropout=dropout)
        return self.loss(hidden, targets_BVHW, positions.rows_S, fields_BVHW=fields_BVHW)

    def hidden(
        self,
        inputs: Tensor,
        positions: Positions,
        *,
        lead_hours_B: Tensor,
        dropout: DropoutContext | None = None,
    ) -> Tensor:
        """Activations behind the last block of this part, [B, S, D].

        inputs: fields [B, V, H, W] of `config.input_names`, finite and normalised; or activations where the part does not
        hold the embedding. positions: the tokens computed here; `rows_S` are whole locations. lead_hours: from the inputs to
        what is predicted.
        """
        x_BSD = self.embedding(inputs, lead_hours_B, positions, dropout) if self.part.first else inputs
        for number, block in zip(self.part.blocks, self.blocks, strict=True):
            at_layer = None if dropout is None else dropout.at_layer(number)
            x_BSD = block(x_BSD, at_layer, path_factors(self.config, number, at_layer))
        return x_BSD

    def loss(
        self, x_BSD: Tensor, targets_BVHW: Tensor, rows_S: Tensor | None = None, *, fields_BVHW: Tensor | None = None
    ) -> Tensor:
        """Squared error weighted by area, summed over the valid targets of these rows: [1], in at least float32.

        x: activations behind the model's last block. rows: None means all. targets: whole fields of `config.output_names`,
        NaN where there is none. fields: the inputs, needed where `config.prediction` is change.
        """
        loss: Tensor = self.head(x_BSD, targets_BVHW, rows_S, fields_BVHW=fields_BVHW)
        return loss

    def predict(self, x_BSD: Tensor, *, fields_BVHW: Tensor | None = None) -> Tensor:
        """Predicted fields [B, V, H, W] of `config.output_names`, in at least float32, from activations of all rows."""
        patches_BLVP = self.head(x_BSD, None, fields_BVHW=fields_BVHW)
        return fields_of(patches_BLVP, self.config.n_lat, self.config.patch_size)

    @torch.no_grad()
    def forecast(self, fields_BVHW: Tensor, lead_hours_B: Tensor) -> Tensor:
        """Fields [B, V, H, W] of `config.output_names` predicted for `lead_hours_B` hours on; dropout is off."""
        hidden = self.hidden(fields_BVHW, self.all_positions(fields_BVHW.device), lead_hours_B=lead_hours_B)
        return self.predict(hidden, fields_BVHW=fields_BVHW)

    def next_inputs(self, fields_BVHW: Tensor, predicted_BVHW: Tensor) -> Tensor:
        """What the next step of a roll-out starts from: inputs with the predicted fields in them, all others as they are."""
        places = outputs_among_inputs(self.config)
        following = fields_BVHW.clone()
        # Exactly the mean is how points without a value look: there they stay as they are.
        before = fields_BVHW[:, places]
        following[:, places] = torch.where(before == 0.0, before, predicted_BVHW.to(fields_BVHW.dtype))
        return following

    def all_positions(self, device: torch.device) -> Positions:
        """All tokens of a sample."""
        rows_S = torch.arange(self.config.n_tokens, device=device)
        return Positions(rows_S, rows_S)
