"""Both ends of a model over a vocabulary: the table that tokens are looked up in, and the head that gives their losses."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.config.layers import NormConfig
from phalanx.counter_random import CounterDropout, DropoutContext
from phalanx.nn.cross_entropy import (
    IGNORED,
    ChunkLoss,
    LossSum,
    TokenScores,
    chunk_loss,
    linear_cross_entropy,
    token_scores,
)
from phalanx.nn.layers import build_norm, soft_cap


class TokenEmbedding(nn.Module):
    """Rows of the vocabulary table, plus learned positions where the model has them."""

    positions: nn.Parameter | None

    def __init__(
        self,
        vocab_size: int,
        width: int,
        *,
        learned_positions: int | None,
        dropout: float,
        dtype: torch.dtype,
        scale: float | None = None,
    ) -> None:
        """Make the tables. learned_positions: rows of the table of positions; None has none. dtype: of the activations.

        scale: factor of the rows of the token table; None leaves them.
        """
        super().__init__()
        self.dtype = dtype
        self.scale = scale
        self.weight = nn.Parameter(torch.empty(vocab_size, width))
        if learned_positions is not None:
            self.positions = nn.Parameter(torch.empty(learned_positions, width))
        else:
            # None rather than no attribute, so that code may ask for it in either case.
            self.register_parameter("positions", None)
        self.dropout = CounterDropout(dropout, site=0)

    def forward(self, tokens_BS: Tensor, positions_S: Tensor, dropout: DropoutContext | None = None) -> Tensor:
        """Embed token ids [B, S] as activations [B, S, D] in the model's activation format.

        positions_S: global positions of the rows that come out.
        """
        x_BSD = self.lookup(tokens_BS)
        if self.scale is not None:
            x_BSD = x_BSD * self.scale
        if self.positions is not None:
            x_BSD = x_BSD + F.embedding(positions_S, self.positions).to(self.dtype)
        dropped: Tensor = self.dropout(x_BSD, dropout)
        return dropped

    def lookup(self, tokens_BS: Tensor) -> Tensor:
        """Return rows of the token table [B, S, D], in the model's activation format."""
        return F.embedding(tokens_BS, self.weight).to(self.dtype)


class OutputHead(nn.Module):
    """Final norm and the projection to the vocabulary.

    A tied head beside the embedding owns no weight: it is given the table. In another part it owns a copy of the table.
    """

    weight: nn.Parameter | None

    def __init__(
        self,
        vocab_size: int,
        norm: NormConfig,
        *,
        chunk_tokens: int,
        z_loss: float,
        owns_weight: bool,
        softcap: float | None = None,
    ) -> None:
        super().__init__()
        self.norm = build_norm(norm)
        if owns_weight:
            self.weight = nn.Parameter(torch.empty(vocab_size, norm.width))
        else:
            # None rather than no attribute, so that code may ask for it in either case.
            self.register_parameter("weight", None)
        self.vocab_size = vocab_size
        self.chunk_tokens = chunk_tokens
        self.z_loss = z_loss
        self.softcap = softcap
        # Attributes, so that compiled or vocabulary-parallel forms can take their places.
        self.loss_kernel: ChunkLoss = chunk_loss
        self.score_kernel: TokenScores = token_scores

    def forward(
        self, x_BSD: Tensor, targets_BS: Tensor, tied_weight_VD: Tensor | None = None, *, apart: bool = False
    ) -> LossSum | Tensor:
        """Return summed loss of the targets, [B, S] int64, under the logits of [B, S, D]; z-loss only in training mode.

        apart: return the scores of each target instead, see `score_targets`.
        """
        # Here too: sharded parameters are gathered for a call of the module, not for one of another method.
        if apart:
            return self.score_targets(x_BSD, targets_BS, tied_weight_VD)
        return linear_cross_entropy(
            self.norm(x_BSD).flatten(0, 1),
            self._weight(tied_weight_VD),
            targets_BS.flatten(),
            chunk_tokens=self.chunk_tokens,
            # A regulariser, no part of the held-out loss.
            z_loss=self.z_loss if self.training else 0.0,
            softcap=self.softcap,
            kernel=self.loss_kernel,
        )

    @torch.no_grad()
    def score_targets(self, x_BSD: Tensor, targets_BS: Tensor, tied_weight_VD: Tensor | None = None) -> Tensor:
        """Return what `token_scores` gives of each target, float64 [2, B, S]; 0 where there is none."""
        kept_N = targets_BS.flatten() != IGNORED
        # Few positions have a target: logits of the others are not computed.
        hidden_ND, targets_N = self.norm(x_BSD).flatten(0, 1)[kept_N], targets_BS.flatten()[kept_N]
        weight = self._weight(tied_weight_VD).to(hidden_ND.dtype)
        scores_2N = torch.zeros((2, len(kept_N)), dtype=torch.float64, device=x_BSD.device)
        found = []
        for start in range(0, len(hidden_ND), self.chunk_tokens):
            rows = slice(start, start + self.chunk_tokens)
            logits = hidden_ND[rows] @ weight.T
            logits = logits if self.softcap is None else soft_cap(logits, self.softcap)
            found.append(self.score_kernel(logits, targets_N[rows]))
        if found:
            scores_2N[:, kept_N] = torch.cat(found, dim=1)
        scores: Tensor = scores_2N.unflatten(1, targets_BS.shape)
        return scores

    def logits(self, x_BSD: Tensor, tied_weight_VD: Tensor | None = None) -> Tensor:
        """Return logits [B, S, V] in the activation format."""
        logits = F.linear(self.norm(x_BSD), self._weight(tied_weight_VD).to(x_BSD.dtype))
        return logits if self.softcap is None else soft_cap(logits, self.softcap)

    def _weight(self, tied_weight_VD: Tensor | None) -> Tensor:
        weight = self.weight if tied_weight_VD is None else tied_weight_VD
        assert weight is not None
        return weight
