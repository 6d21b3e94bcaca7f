"""One part of a model on this rank: takes whole samples and computes this rank's share of their positions."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from phalanx.counter_random import DropoutContext
from phalanx.layout.context import SequenceShare
from phalanx.models.language.decoder import Decoder


class Stage(nn.Module):
    """Runs `part` on micro-batches. The last stage of a model gives a loss, the others hidden activations."""

    def __init__(self, part: Decoder, index: int, share: SequenceShare, seed: int) -> None:
        super().__init__()
        self.part = part
        self.index = index
        """Place among the model's stages."""
        self.share = share
        self.seed = seed
        self.step: int | None = None
        """Optimizer step, which dropout depends on; None leaves dropout out."""

    def forward(
        self, x: Tensor, targets_BS: Tensor, sample_indices_B: Tensor, document_ids_BS: Tensor | None = None
    ) -> Tensor:
        """Summed loss of this rank's targets, [1], or hidden activations [B, S/(cp*tp), D].

        x: the samples' token ids [B, S] in the first stage, the stage before's result in others. targets, document ids: of
        whole samples, [B, S]; sample_indices: global sample numbers, [B].
        """
        positions = self.share.positions(targets_BS.shape[1], x.device)
        whole = self.share.cp.size == 1
        if self.part.part.first and not whole:
            x = x[:, positions.tokens_S]
        dropout = None
        if self.part.config.dropout and self.step is not None:
            dropout = DropoutContext.of_step(self.seed, self.step, sample_indices_B, positions.rows_S)
        hidden = self.part.hidden(x, positions, document_ids_BS=document_ids_BS, dropout=dropout)
        if not self.part.part.last:
            return hidden
        targets = targets_BS if whole else targets_BS[:, positions.tokens_S]
        return torch.stack((self.part.loss(hidden, targets).total,))

    def hidden_shape(self, samples: int, length: int) -> torch.Size:
        """Shape of the activations between stages, for samples of `length` positions."""
        rows = length // (self.share.cp.size * self.share.tp.size)
        return torch.Size((samples, rows, self.part.config.d_model))
