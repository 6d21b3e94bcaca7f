"""Muon: matrices move along their orthogonalised momentum (Jordan et al. 2024), everything else by AdamW.

Scale and decay are those of Moonlight (Liu et al. 2025, arXiv:2502.16982, section 2.2): an update is scaled to the size that
AdamW's updates have, so that both take the same learning rate and weight decay. Each matrix of a fused parameter (query,
key, value, gate, up, every expert) is orthogonalised by itself.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from phalanx.config.schema import Optimizer
from phalanx.optimizers.adamw import build_adamw
from phalanx.optimizers.optimizer_kind import (
    Group,
    HeldParameters,
    ScaledUpdates,
    ScaledUpdatesKind,
    local_part,
    refuse_options,
)
from phalanx.optimizers.whole_matrices import WholeMatrices
from phalanx.torch_compat import common as compat

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of the quintic a x + b x^3 + c x^5 that singular values go through: steepest at 0, and near 1 for any in (0, 1] after five
steps (Jordan et al. 2024)."""
UPDATE_SCALE = 0.2
"""Root mean square of an update: about that of AdamW's (Moonlight, section 2.2)."""
_EPS = 1e-7
"""Smallest norm that a matrix is divided by."""


class MuonKind(ScaledUpdatesKind):
    """Muon for matrices, AdamW for the rest."""

    # AdamW's two moments for what is no matrix; a matrix has its momentum alone.
    state_values = 2
    matrix_state_values = 1
    # Gradient read and written twice (scaled, then the direction), momentum read and written, parameter read and written,
    # direction and update in the compute format.
    value_passes = 9

    def build(self, groups: Sequence[Group], config: Optimizer, held: HeldParameters) -> Muon:
        """Return Muon over the matrices in `groups`, and AdamW over what else is there."""
        refuse_options(config)
        return Muon(groups, config, held)

    def matrix_flops(self, config: Optimizer, rows: int, columns: int) -> float:
        """Return the operations of the Newton-Schulz steps: two products with the short side, one of short by short."""
        short, long = min(rows, columns), max(rows, columns)
        return config.newton_schulz_steps * (4.0 * short * short * long + 2.0 * short**3)

    def written_copies(self, optimizer: torch.optim.Optimizer) -> Sequence[Tensor]:
        """Return the copies that AdamW wrote."""
        assert isinstance(optimizer, Muon)
        return () if optimizer.adamw is None else optimizer.adamw.written


MUON = MuonKind()


class Muon(ScaledUpdates):
    """See the module. Groups of matrices have `whole` set; state of a matrix is its `momentum`, of the rest AdamW's."""

    def __init__(self, groups: Sequence[Group], config: Optimizer, held: HeldParameters) -> None:
        self.matrices: WholeMatrices = held.matrices
        self.momentum = config.momentum
        self.nesterov = config.nesterov
        self.steps = config.newton_schulz_steps
        matrices, others = _separate_matrices(groups, held.matrices)
        for group in others:
            ratio = config.adamw_lr_ratio * group.get("lr_ratio", 1.0)
            group |= {"lr": config.lr * ratio, "lr_ratio": ratio}
        self.adamw = build_adamw(others, config, held) if others else None
        rest = [] if self.adamw is None else self.adamw.param_groups
        whole = [{"lr": config.lr, **group, "whole": True} for group in matrices]
        super().__init__([*whole, *({**group, "whole": False} for group in rest)], {})
        # One state and one list of groups: who sets rates or saves state need not know that there are two optimizers.
        self.whole_groups = [group for group in self.param_groups if group["whole"]]
        if self.adamw is not None:
            self.adamw.param_groups = [group for group in self.param_groups if not group["whole"]]
            self.adamw.state = self.state

    @torch.no_grad()
    def update(self, divisor: Tensor, skip: Tensor) -> None:
        """Update with every gradient divided by `divisor`, or not at all where `skip` is 1 (both float32, 0-dim).

        All ranks call it together. Changes the gradients of matrices, whose memory it computes in.
        """
        if self.adamw is not None:
            compat.update_scaled(self.adamw, divisor, skip)
        directions: dict[Tensor, Tensor] = {}
        for group in self.whole_groups:
            directions |= self._advance_momentum(group["params"], divisor, skip)
        # A rate of 0 moves nothing: state can be made without orthogonalising a model for it.
        if not any(group["lr"] for group in self.param_groups):
            return
        work = partial(scaled_update, steps=self.steps)
        updates = self.matrices.transform(directions, work)
        for group in self.whole_groups:
            for parameter in group["params"]:
                local = local_part(parameter)
                rate = group["lr"] * (1.0 - skip.to(local.dtype))
                local.mul_(1.0 - rate * group["weight_decay"])
                local.addcmul_(updates[parameter].to(local.dtype), rate, value=-1.0)

    def _advance_momentum(self, parameters: list[Tensor], divisor: Tensor, skip: Tensor) -> dict[Tensor, Tensor]:
        """Add the gradients to the momenta; return the directions to orthogonalise, in the format to do that in."""
        directions = {}
        for parameter in parameters:
            state = self.state[parameter]
            if not state:
                state["momentum"] = torch.zeros_like(parameter)
            momentum = local_part(state["momentum"])
            # Experts that got no token may have no gradient, on this rank alone: every rank still moves all its matrices.
            gradient = torch.zeros_like(momentum) if parameter.grad is None else local_part(parameter.grad)
            # Filled, not multiplied by 0: a gradient that is not finite would stay so.
            gradient.div_(divisor.to(gradient.dtype)).masked_fill_(skip.bool(), 0.0)
            keep = 1.0 - (1.0 - self.momentum) * (1.0 - skip.to(momentum.dtype))
            momentum.mul_(keep).add_(gradient)
            direction = gradient.add_(momentum, alpha=self.momentum) if self.nesterov else momentum
            directions[parameter] = direction.to(self.matrices.dtype)
        return directions


def scaled_update(matrices_NRC: Tensor, *, steps: int) -> Tensor:
    """Return what a rate of 1 takes off matrices with these momenta, [N, rows, columns]."""
    return orthogonalise(matrices_NRC, steps) * (UPDATE_SCALE * math.sqrt(max(matrices_NRC.shape[1:])))


def orthogonalise(matrices_NRC: Tensor, steps: int) -> Tensor:
    """Return about U V^T of each matrix U S V^T, by Newton-Schulz steps in its own format; singular values are near 1."""
    a, b, c = COEFFICIENTS
    # The product with itself is taken over the long side: the smaller it is, the less there is to compute.
    tall = matrices_NRC.shape[1] > matrices_NRC.shape[2]
    x = matrices_NRC.mT if tall else matrices_NRC
    # Divided by the 2-norm of all elements, no singular value is above 1; summed in at least float32.
    wide = torch.promote_types(x.dtype, torch.float32)
    norm = torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True, dtype=wide).clamp(min=_EPS)
    # Divided in the norm's format, without a copy of the matrix in it.
    x = (x / norm).to(x.dtype)
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


def _separate_matrices(groups: Sequence[Group], matrices: WholeMatrices) -> tuple[list[Group], list[Group]]:
    """Return `groups` twice: with their matrices, and with their other parameters; without groups that hold nothing."""
    kinds: tuple[list[Group], list[Group]] = [], []
    for group in groups:
        for kind, whole in zip(kinds, (True, False), strict=True):
            chosen = [p for p in group["params"] if (p in matrices.rows) is whole]
            # A rank that trains nothing has one empty group, which is no matrices'.
            if chosen or not (group["params"] or whole):
                kind.append({**group, "params": chosen})
    return kinds
