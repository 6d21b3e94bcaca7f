"""Which positions of every sample a rank computes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from phalanx.layout.context_parallel.ring_attention import ring_positions
from phalanx.layout.mesh import Axis
from phalanx.nn.positions import Positions


@dataclass(frozen=True)
class SequenceShare:
    """Which positions of every sample this rank computes."""

    cp: Axis
    tp: Axis
    context: str
    """ring or all_to_all."""

    def positions(self, length: int, device: torch.device) -> Positions:
        """Return global positions of this rank's tokens, and of the rows of its residual stream."""
        tokens_S = self._tokens(length, device)
        return Positions(tokens_S, tokens_S.chunk(self.tp.size)[self.tp.rank])

    def _tokens(self, length: int, device: torch.device) -> Tensor:
        if self.context == "ring" and self.cp.size > 1:
            return ring_positions(self.cp.rank, self.cp.size, length // self.cp.size, device)
        each = length // self.cp.size
        return torch.arange(self.cp.rank * each, (self.cp.rank + 1) * each, device=device)
