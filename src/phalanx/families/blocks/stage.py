"""A stage of a network of blocks: takes whole samples and computes this rank's positions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from phalanx.data.sources import TensorSpec
from phalanx.families.blocks.network import BlockNetwork
from phalanx.layout.context_parallel.sequence_share import SequenceShare
from phalanx.layout.stage import Stage, TrainingPass


class BlockStage(Stage):
    """Samples in, hidden activations between stages, the summed loss of this rank's positions out."""

    loss_is_whole = False

    def __init__(self, part: BlockNetwork, index: int, share: SequenceShare, seed: int, length: int) -> None:
        super().__init__(part, index, share, seed, length)
        self.inputs: TensorSpec = part.specs(part.config)[0]

    def forward(
        self, x: Tensor, sample_indices_B: Tensor, *, training: TrainingPass | None = None, **inputs: Any
    ) -> Tensor:
        """See `Stage`. x: samples [B, S, ...] in the first stage. inputs: targets [B, S, ...]; without them the last stage
        gives predictions of this rank's positions."""
        rows_S = self.share.positions(self.length, x.device).rows_S
        # Batches are whole samples: each rank of `tp` takes its positions of inputs and of targets.
        if self.part.part.first:
            x = self.part.embedding(x[:, rows_S], rows_S).to(self.part.dtype)
        for block in self.part.blocks:
            x = block(x)
        if not self.part.part.last:
            return x
        predicted: Tensor = self.part.head(x)
        targets = inputs.get("targets")
        if targets is None:
            return predicted
        loss: Tensor = self.part.loss(predicted, targets[:, rows_S])
        # Not a view, which FSDP2 warns of.
        return torch.stack((loss,))

    def example_input(self, samples: int) -> Tensor:
        """Samples."""
        return torch.empty((samples, self.length, *self.inputs.shape), dtype=self.inputs.dtype)
