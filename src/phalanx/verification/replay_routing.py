"""Choices of routers, recorded on one rank and replayed in a layout: discrete choices must not hide behind rounding.

A token whose scores nearly tie may choose other experts in another layout, because a sum had another order. Its gradients
then differ by all of themselves, and say nothing. So every layout takes the choices of one rank, and what it would have
chosen itself is judged apart: how far its scores would have to move for the replayed choice to be theirs too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from phalanx.layout.layout_model import Stage
from phalanx.nn.experts import Router, RoutingPass
from phalanx.torch_compat import common as compat

Choices = Mapping[str, Tensor]
"""Experts of every token of a step by router, int32 [samples, positions, K]; sample i of the global batch in row i."""


@dataclass
class StepRouting:
    """What routers did in one optimizer step on this rank."""

    samples: int
    """Samples of the global batch."""
    replayed: Choices | None
    """The choices to take; None lets routers choose, and records that."""
    chosen: dict[str, Tensor] = field(default_factory=dict)
    """The choices that were made, by router, like `replayed`; -1 for tokens that other ranks have."""
    margins: dict[str, Tensor] = field(default_factory=dict)
    """How far each token was from the replayed choice by its own scores (see `choice_margins`), float64 [samples,
    positions]; 0 where both agree, NaN for tokens that other ranks have."""

    def take(self, name: str, router: Router, scores_TE: Tensor, training: RoutingPass) -> Tensor:
        """Return the experts that the router `name` sends these tokens to, [T, K], and note what it would have chosen."""
        assert training.samples_B is not None and training.positions_S is not None
        # Numbers of samples go on from step to step, those of one global batch are consecutive: the rest tells them apart.
        rows_B1 = training.samples_B.cpu()[:, None] % self.samples
        positions_S = training.positions_S.cpu()
        ranked_TE = router.rank_scores(scores_TE)
        own_TK = router.best_experts(ranked_TE)
        if self.replayed is None:
            taken_TK, margins_T = own_TK, torch.zeros(len(own_TK), dtype=torch.float64)
        else:
            # int32 travels between ranks, int64 indexes.
            taken_TK = self.replayed[name][rows_B1, positions_S].flatten(0, 1).to(own_TK)
            margins_T = choice_margins(router, scores_TE, taken_TK).cpu()
        # One rank has all positions, and every layout replays a rank's choices: both tell the length of a sequence.
        length = int(positions_S.max()) + 1 if self.replayed is None else self.replayed[name].shape[1]
        shape = (self.samples, length)
        chosen_BSK = self.chosen.setdefault(name, torch.full((*shape, taken_TK.shape[1]), -1, dtype=torch.int32))
        margins_BS = self.margins.setdefault(name, torch.full(shape, torch.nan, dtype=torch.float64))
        # Written, not added: a block that is recomputed routes its tokens again.
        chosen_BSK[rows_B1, positions_S] = taken_TK.view(len(rows_B1), len(positions_S), -1).cpu().int()
        margins_BS[rows_B1, positions_S] = margins_T.view(len(rows_B1), len(positions_S))
        return taken_TK


class ReplayedRouter(Router):
    """A router whose choices are recorded or replayed, as `routing` says. A subclass, like parallel layers."""

    routing: StepRouting
    name: str

    def choose_experts(self, scores_TE: Tensor, training: RoutingPass | None = None) -> Tensor:
        """See `Router.choose_experts`; outside training nothing is replayed."""
        if training is None:
            return super().choose_experts(scores_TE, training)
        return self.routing.take(self.name, self, scores_TE, training)


def find_routers(stages: Sequence[Stage]) -> list[ReplayedRouter]:
    """Turn every router of `stages` into one that replays, and return them; each has its name in the whole model."""
    found = []
    for stage in stages:
        for name, module in stage.part.named_modules():
            if isinstance(module, Router):
                router: Any = module
                router.__class__ = ReplayedRouter
                router.name = compat.full_name(name)
                found.append(router)
    return found


@torch.no_grad()
def choice_margins(router: Router, scores_TE: Tensor, chosen_TK: Tensor) -> Tensor:
    """Return how far each token's logits would have to move for it to choose these experts, float64 [T].

    Measured in the standard deviation of the token's own logits, so that it is a relative error of them. 0 where the
    router chooses the same experts, in whatever order. To first order: a gap between two scores closes when both logits
    move by the gap over the sum of the scores' slopes. Where groups limit the choice, the gap between groups counts too.
    """
    scores_TE = scores_TE.double()
    ranked_TE = router.rank_scores(scores_TE)
    softmax = router.settings.scoring == "softmax"
    # Where one logit falls as another rises, the sum of all exponentials stays: each score of a softmax moves by itself.
    slopes_TE = scores_TE if softmax else scores_TE * (1.0 - scores_TE)
    moves_T = torch.zeros_like(scores_TE[:, 0])
    if router.settings.groups > 1:
        settings = router.settings
        best_TGN, numbers_TGN = router.best_of_groups(ranked_TE)
        group_TG = best_TGN.sum(-1)
        # A group's sum moves with each expert in it.
        slope_TG = slopes_TE.unflatten(-1, (settings.groups, -1)).gather(-1, numbers_TGN).sum(-1)
        needed_TG = _mark_chosen(chosen_TK // (settings.count // settings.groups), group_TG)
        own_TN = group_TG.topk(settings.active_groups, dim=-1).indices
        # Groups of the chosen experts first, whatever they count; experts may have left one of the best groups empty.
        taken_TN = group_TG.masked_fill(needed_TG, float("inf")).topk(settings.active_groups, dim=-1).indices
        moves_T = _closing_move(group_TG, slope_TG, _mark_chosen(own_TN, group_TG), _mark_chosen(taken_TN, group_TG))
        ranked_TE = router.mask_groups(ranked_TE, taken_TN)
    own_TE = _mark_chosen(ranked_TE.topk(chosen_TK.shape[1], dim=-1).indices, ranked_TE)
    moves_T = torch.maximum(moves_T, _closing_move(ranked_TE, slopes_TE, own_TE, _mark_chosen(chosen_TK, ranked_TE)))
    # Logits but for a constant, which moves no standard deviation.
    logits_TE = scores_TE.log() if softmax else torch.logit(scores_TE)
    return moves_T / logits_TE.std(-1)


def _mark_chosen(numbers_TN: Tensor, like_TX: Tensor) -> Tensor:
    """Return which of X things have one of these numbers, bool [T, X]."""
    return torch.zeros_like(like_TX, dtype=torch.bool).scatter_(1, numbers_TN, True)


def _closing_move(ranked_TX: Tensor, slopes_TX: Tensor, own_TX: Tensor, taken_TX: Tensor) -> Tensor:
    """Return how far logits would have to move for `taken` to rank above all else, [T]; 0 where that is `own`."""
    none = float("inf")
    above_T, over_T = ranked_TX.masked_fill(~own_TX | taken_TX, -none).max(-1)
    below_T, under_T = ranked_TX.masked_fill(~taken_TX | own_TX, none).min(-1)
    slopes_T = (slopes_TX.gather(1, over_T[:, None]) + slopes_TX.gather(1, under_T[:, None])).squeeze(1)
    return torch.where((own_TX == taken_TX).all(-1), 0.0, (above_T - below_T) / slopes_T)
