"""Mixtures of experts: a router sends each token to a few of many SwiGLU networks. Plain PyTorch for one device.

A token's rows are copied to its experts sorted by expert, multiplied by the matrices of their groups, and summed back with
the router's weights. Nothing is dropped unless a capacity is asked for, nothing is padded, and nothing waits for the host.

Letters: T tokens, K experts a token, R = T K rows, E experts, D width, F hidden width of an expert.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.config.layers import Experts, MixtureConfig
from phalanx.kernels.grouped_products import IN_FORMAT_OF_ROWS, GatedGroupedLinear, GroupedLinear, GroupedProducts
from phalanx.kernels.routed_rows import CombineRows, SortRows
from phalanx.nn.declared_layers import gate_block
from phalanx.nn.layers import Linear, SwigluMLP
from phalanx.nn.precision import Precision


@dataclass(frozen=True)
class RoutingPass:
    """What routers need to know of a training pass."""

    loss_scale: Tensor | float
    """Factor of the model's loss before gradients are formed; balance losses get the same."""
    sum_over_sequence: Callable[[Tensor], Tensor] = lambda counts_BE: counts_BE
    """Adds up counts over the ranks that hold other positions of the same sequences; one device holds them all."""
    samples_B: Tensor | None = None
    """Numbers of the samples among all samples of the run: with `positions_S`, what a choice is found by when it is recorded
    or replayed (`verification.replay_routing`)."""
    positions_S: Tensor | None = None
    """Positions in the sequence of the rows that routers are given here."""


class Routing(NamedTuple):
    """Where tokens go."""

    experts_TK: Tensor
    """Numbers of the experts, int64; E for a token that its expert has no room for."""
    weights_TK: Tensor
    """Factors of the experts' results, in the router's format; 0 for a token that was dropped."""


OTHER_FIGURES = 4
"""Figures of a router beside its experts' choices: tokens, dropped choices, balance loss and z loss."""


class Router(nn.Module):
    """Scores of every expert for every token, and the choice of the best few. Computes in at least float32."""

    def __init__(self, config: MixtureConfig) -> None:
        super().__init__()
        self.settings: Experts = config.settings
        self.weight = nn.Parameter(torch.empty(self.settings.count, config.width))
        # Counted and moved by the training step, not by gradients: state, but no parameter.
        self.register_buffer("bias", torch.zeros(self.settings.count) if self.settings.biased else None)
        self.register_buffer("load", torch.full((self.settings.count,), 1.0 / self.settings.count))
        self.register_buffer("tokens", torch.zeros(self.settings.count, dtype=torch.int64), persistent=False)
        # Float64: sums over the micro-batches of a step, which training shows beside the loss.
        self.register_buffer("sums", torch.zeros(OTHER_FIGURES, dtype=torch.float64), persistent=False)
        self.bias: Tensor | None
        """Added to scores where experts are chosen, not where they are weighed; float32 [E]."""
        self.load: Tensor
        """Share of the last global batch's choices that each expert got, float32 [E]."""
        self.tokens: Tensor
        """Choices of each expert since the step began, on this rank, int64 [E]; doubled where recompute routes again."""
        self.sums: Tensor
        """Tokens, choices dropped, balance and z loss since the step began, on this rank, float64; doubled like `tokens`."""

    @property
    def figures(self) -> Tensor:
        """What was counted since the step began, on this rank: choices of each expert, then `sums`; float64 [E + 4]."""
        return torch.cat((self.tokens.to(self.sums.dtype), self.sums))

    def forward(self, x_BSD: Tensor, training: RoutingPass | None) -> Routing:
        """Return the experts of every token, [B S, K]. training: None outside training."""
        batch, length, _ = x_BSD.shape
        # Near-ties would be decided by rounding in 16 bits, and the softmax of hundreds of experts needs the digits.
        wide = torch.promote_types(x_BSD.dtype, torch.float32)
        logits_TE = F.linear(x_BSD.flatten(0, 1).to(wide), self.weight.to(wide))
        scores_TE = logits_TE.softmax(-1) if self.settings.scoring == "softmax" else logits_TE.sigmoid()
        experts_TK = self.choose_experts(scores_TE.detach(), training)
        weights_TK = scores_TE.gather(1, experts_TK)
        if self.settings.normalize and self.settings.active > 1:
            weights_TK = weights_TK / (weights_TK.sum(-1, keepdim=True) + 1e-20)
        weights_TK = weights_TK * self.settings.scale
        # Comparing with every number counts without atomics, so the same on every device.
        chosen_TE = (experts_TK[:, :, None] == torch.arange(self.settings.count, device=x_BSD.device)).any(1)
        kept_TK = None
        if self.settings.capacity_factor is not None:
            kept_TK = self._within_capacity(
                chosen_TE.view(batch, length, -1), experts_TK, self.settings.capacity_factor
            )
        if training is not None:
            balance, z = self._side_losses(logits_TE, scores_TE, chosen_TE, batch, training)
            self._count(chosen_TE, kept_TK, balance, z)
            losses = [loss for loss in (balance, z) if loss is not None]
            if losses:
                weights_TK = AddLoss.apply(weights_TK, torch.stack(losses).sum(), training.loss_scale)
        if kept_TK is not None:
            weights_TK = torch.where(kept_TK, weights_TK, 0.0)
            experts_TK = torch.where(kept_TK, experts_TK, self.settings.count)
        return Routing(experts_TK, weights_TK)

    def choose_experts(self, scores_TE: Tensor, training: RoutingPass | None = None) -> Tensor:
        """Return the numbers of each token's experts, [T, K], best first.

        training: which tokens these are; the choice does not depend on it, but who replays choices overrides this method.
        """
        return self.best_experts(self.rank_scores(scores_TE))

    def rank_scores(self, scores_TE: Tensor) -> Tensor:
        """Return the scores that experts are chosen by, [T, E], with the selection biases where there are any."""
        return scores_TE if self.bias is None else scores_TE + self.bias

    def best_experts(self, ranked_TE: Tensor) -> Tensor:
        """Return the numbers of the experts that rank highest, [T, K], best first; of the best groups alone.

        Groups bound the nodes that a token is sent to (DeepSeek-V2, arXiv:2405.04434, section 2.2.2; DeepSeek-V3,
        arXiv:2412.19437, section 2.1.2).
        """
        settings = self.settings
        if settings.groups > 1:
            group_TG = self.best_of_groups(ranked_TE)[0].sum(-1)
            ranked_TE = self.mask_groups(ranked_TE, group_TG.topk(settings.active_groups, dim=-1).indices)
        return ranked_TE.topk(settings.active, dim=-1).indices

    def best_of_groups(self, ranked_TE: Tensor) -> tuple[Tensor, Tensor]:
        """Return the experts by whose sum each group counts: ranks, and numbers within the group, both [T, G, 1 or 2]."""
        best = 2 if self.settings.group_score == "top2_sum" else 1
        ranked_TGN, numbers_TGN = ranked_TE.unflatten(-1, (self.settings.groups, -1)).topk(best, dim=-1)
        return ranked_TGN, numbers_TGN

    def mask_groups(self, ranked_TE: Tensor, groups_TN: Tensor) -> Tensor:
        """Return the ranks with those of experts outside the groups of these numbers at minus infinity."""
        ranked_TGM = ranked_TE.unflatten(-1, (self.settings.groups, -1))
        allowed_TG = torch.zeros(ranked_TGM.shape[:2], dtype=torch.bool, device=ranked_TE.device)
        allowed_TG.scatter_(1, groups_TN, True)
        masked_TE: Tensor = ranked_TGM.masked_fill(~allowed_TG[..., None], float("-inf")).flatten(1)
        return masked_TE

    @torch.no_grad()
    def finish_step(self, tokens_E: Tensor, skip: Tensor) -> None:
        """Take note of how the experts were used in an optimizer step, and begin to count anew.

        tokens: choices of each expert in the whole global batch. skip: 1 where the step leaves the model as it was, 0-dim.
        """
        counts_E = tokens_E.to(self.load.dtype)
        # Float32 holds whole numbers to 2^24 alone, but shares and signs need no more digits than that.
        keep = skip.bool()
        self.load.copy_(torch.where(keep, self.load, counts_E / counts_E.sum().clamp(min=1)))
        if self.bias is not None and self.settings.bias_rate:
            # An expert with less than its share is to be chosen more often (DeepSeek-V3, section 2.1.2).
            change = self.settings.bias_rate * torch.sign(counts_E.mean() - counts_E)
            self.bias.add_(torch.where(keep, 0.0, change))
        self.discard_counts()

    def discard_counts(self) -> None:
        """Begin to count anew."""
        self.tokens.zero_()
        self.sums.zero_()

    @torch.no_grad()
    def _count(self, chosen_TE: Tensor, kept_TK: Tensor | None, balance: Tensor | None, z: Tensor | None) -> None:
        """Add what these tokens chose, and their losses, to the figures of the step."""
        self.tokens.add_(chosen_TE.sum(0))
        zero = self.sums.new_zeros(())
        dropped = zero if kept_TK is None else (~kept_TK).sum().to(zero.dtype)
        losses = [zero if loss is None else loss.detach().to(zero.dtype) for loss in (balance, z)]
        self.sums.add_(torch.stack((zero + len(chosen_TE), dropped, *losses)))

    def _side_losses(
        self, logits_TE: Tensor, scores_TE: Tensor, chosen_TE: Tensor, batch: int, training: RoutingPass
    ) -> tuple[Tensor | None, Tensor | None]:
        """Return the summed balance and z losses of these tokens; None for one that is not asked for.

        Sums over tokens, like the model's loss, so that whoever divides that by the targets of the global batch divides
        these alike, whatever part of the tokens is here. The use of experts, which has no gradient, is that of the whole
        sequence, or of the whole global batch of the step before: then every layout of ranks and micro-batches has the
        same loss, which a use counted over a micro-batch would not.
        """
        settings, balance, z = self.settings, None, None
        if settings.balance != "none" and settings.balance_weight:
            share_TE = scores_TE / scores_TE.sum(-1, keepdim=True) if settings.scoring == "sigmoid" else scores_TE
            if settings.balance == "sequence":
                counts_BE = training.sum_over_sequence(chosen_TE.view(batch, -1, settings.count).sum(1))
                used_BE = counts_BE.to(share_TE.dtype)
                used_BE = used_BE / used_BE.sum(-1, keepdim=True)
            else:
                used_BE = self.load.to(share_TE.dtype).expand(batch, -1)
            share_BE = share_TE.view(batch, -1, settings.count).sum(1)
            # 1 for each token where all experts are used alike (Switch Transformer, equation 4).
            balance = settings.balance_weight * settings.count * (used_BE * share_BE).sum()
        if settings.z_loss:
            z = settings.z_loss * logits_TE.logsumexp(-1).square().sum()
        return balance, z

    def _within_capacity(self, chosen_BSE: Tensor, experts_TK: Tensor, factor: float) -> Tensor:
        """Return which choices are among the first that an expert takes of their sequence, bool [T, K]."""
        length = chosen_BSE.shape[1]
        capacity = math.ceil(factor * length * self.settings.active / self.settings.count)
        turn_TE = chosen_BSE.cumsum(1).flatten(0, 1)
        return turn_TE.gather(1, experts_TK) <= capacity


class AddLoss(torch.autograd.Function):
    """Hand a tensor on and give a loss of its own the gradient `scale` in the backward pass.

    A block deep in a pipeline can add to the model's loss so, without handing it through all that follow.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor, scale: Tensor | float) -> Tensor:
        """Return x."""
        ctx.scale = scale
        ctx.like = loss.dtype
        ctx.device_of_loss = loss.device
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        """Return x's gradient as it came, and the loss's."""
        scale = torch.as_tensor(ctx.scale, dtype=ctx.like, device=ctx.device_of_loss)
        return grad, scale.reshape(()), None


class ExpertNetworks(nn.Module):
    """The SwiGLU networks of all experts of a block, each matrix of theirs in one parameter.

    `gate_up`: [E 2F, D], expert after expert, each with its gate and up rows in groups (see `nn.layers.gate_block`); `down`:
    [E D, F]. A contiguous part of the rows, in whole experts, is what expert parallelism keeps; any part, what ZeRO shards.
    """

    products: GroupedProducts = IN_FORMAT_OF_ROWS
    """Products of the run's precision; see `choose_expert_products`."""

    def __init__(self, count: int, d_model: int, d_ff: int) -> None:
        super().__init__()
        self.d_model, self.d_ff = d_model, d_ff
        self.block = gate_block(d_ff)
        self.gate_up = nn.Parameter(torch.empty(count * 2 * d_ff, d_model))
        self.down = nn.Parameter(torch.empty(count * d_model, d_ff))

    def forward(self, chunks: list[Tensor], use: Callable[[ApplyExperts, list[Tensor]], list[Tensor]]) -> list[Tensor]:
        """Return what `use` makes of the networks and of rows; gathered parameters are there while it runs.

        chunks: rows of each chunk of tokens, which may still be on their way. use: called once with what applies the
        networks to rows that have arrived, and with `chunks`.
        """
        # Cast once, and gathered once, however many chunks there are.
        gate_up_E2FD = self.gate_up.to(chunks[0].dtype).view(-1, 2 * self.d_ff, self.d_model)
        down_EDF = self.down.to(chunks[0].dtype).view(-1, self.d_model, self.d_ff)

        def apply_experts(rows_RD: Tensor, ends_E: Tensor, complete: bool) -> Tensor:
            gate_up_R2F = GroupedLinear.apply(rows_RD, gate_up_E2FD, ends_E, complete, self.products)
            out_RD: Tensor = GatedGroupedLinear.apply(
                gate_up_R2F, down_EDF, ends_E, self.block, complete, self.products
            )
            return out_RD

        return use(apply_experts, chunks)


def choose_expert_products(model: nn.Module, precision: Precision, device: torch.device) -> None:
    """Have the experts of `model` multiply on `device` as `precision` does."""
    for module in model.modules():
        if precision.products is not None and isinstance(module, ExpertNetworks):
            module.products = precision.products.of_experts(module.d_model, module.d_ff, device)


ApplyExperts = Callable[[Tensor, Tensor, bool], Tensor]
"""Applies its network to each row, [R, D]: rows sorted by expert, int32 [E] one past each expert's last row, and whether no
row is behind these; rows behind give 0."""


class OwnExperts:
    """Has rows computed by their experts, all of which this device holds. Expert parallelism puts an exchange here."""

    chunks = 1
    """Parts of the tokens that are sorted by expert, and may travel, apart."""

    def begin(self, rows: list[Tensor], ends: list[Tensor], complete: bool) -> Any:
        """Let rows set out to their experts; return what `finish` needs.

        rows, ends: of each chunk, as of `ApplyExperts`. complete: whether every row has an expert.
        """
        return rows, ends, complete

    def finish(self, networks: ExpertNetworks, begun: Any) -> list[Tensor]:
        """Return each row's network applied to it, [R, D] of each chunk; 0 for rows behind the last expert's.

        begun: from `begin`.
        """
        rows, (ends_E,), complete = begun
        result: list[Tensor] = networks(rows, lambda apply, chunks: [apply(chunks[0], ends_E, complete)])
        return result


class MixtureOfExperts(nn.Module):
    """A mixture of experts in place of an MLP, with the network that every token shares."""

    def __init__(self, config: MixtureConfig) -> None:
        super().__init__()
        self.router = Router(config)
        self.experts = ExpertNetworks(config.settings.count, config.width, config.hidden)
        self.exchange = OwnExperts()
        self.shared = self.shared_gate = None
        if config.shared is not None:
            self.shared = SwigluMLP(config.shared)
            if config.settings.shared_gate:
                self.shared_gate = Linear(config.width, 1, bias=False)

    def forward(self, x_BSD: Tensor, training: RoutingPass | None = None) -> Tensor:
        """[B, S, D] -> [B, S, D]."""
        routing, chunks = self.router(x_BSD, training), self.exchange.chunks
        orders = [sort_by_expert(each, self.router.settings.count) for each in _cut(routing.experts_TK, chunks)]
        complete = self.router.settings.capacity_factor is None
        rows = [
            SortRows.apply(x_TD, order.source_R, order.position_TK)
            for x_TD, order in zip(_cut(x_BSD.flatten(0, 1), chunks), orders, strict=True)
        ]
        begun = self.exchange.begin(rows, [order.ends_E for order in orders], complete)
        # While rows travel: nothing that the shared network needs is under way.
        shared_BSD = self._compute_shared(x_BSD)
        rows = self.exchange.finish(self.experts, begun)
        parts = [
            CombineRows.apply(rows_RD, order.position_TK, weights_TK)
            for rows_RD, order, weights_TK in zip(rows, orders, _cut(routing.weights_TK, chunks), strict=True)
        ]
        out_BSD = (parts[0] if chunks == 1 else torch.cat(parts)).view_as(x_BSD)
        return out_BSD if shared_BSD is None else out_BSD + shared_BSD

    def _compute_shared(self, x_BSD: Tensor) -> Tensor | None:
        """Return the output of the network that every token shares; None where there is none."""
        if self.shared is None:
            return None
        shared_BSD: Tensor = self.shared(x_BSD)
        return shared_BSD if self.shared_gate is None else shared_BSD * self.shared_gate(x_BSD).sigmoid()


def _cut(each_T: Tensor, chunks: int) -> Sequence[Tensor]:
    """Return the parts of tokens that are sorted apart."""
    return (each_T,) if chunks == 1 else each_T.tensor_split(chunks)


class RowOrder(NamedTuple):
    """The copies of tokens in the order of their experts."""

    source_R: Tensor
    """The token that each row is a copy of, int64."""
    position_TK: Tensor
    """The row of each copy, int32."""
    ends_E: Tensor
    """One past each expert's last row, int32."""


def sort_by_expert(experts_TK: Tensor, count: int) -> RowOrder:
    """Return the order in which the rows of `count` experts follow each other; rows of number `count` come last."""
    tokens, copies = experts_TK.shape
    # Stable: an expert's rows stay in the order of their tokens, in every layout.
    sorted_R, slot_R = experts_TK.flatten().sort(stable=True)
    position_R = torch.empty_like(slot_R)
    position_R[slot_R] = torch.arange(tokens * copies, device=slot_R.device)
    ends_E = torch.searchsorted(sorted_R, torch.arange(count, device=slot_R.device), right=True)
    return RowOrder(slot_R // copies, position_R.view(tokens, copies).int(), ends_E.int())
