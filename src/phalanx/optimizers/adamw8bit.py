"""AdamW whose moments are kept in 8 bits (Dettmers et al. 2022, arXiv:2110.02861): 2.25 bytes a parameter instead of 8.

Each block of 32 neighbours along the last dimension has a scale, its largest magnitude, and each element a code: the nearest
of 255 shares of the scale. A moment is decoded, updated in the format of the parameter, and coded again. Two things are not
the paper's. Blocks lie within rows of the whole parameter instead of following each other in a rank's memory, so that they,
and every update with them, are the same in all layouts: data-parallel shards are whole rows, and splits of columns within a
block are refused (`layout.legality`). And of the second moment the root is kept, never less than the smallest share: both
moments then span the same range, and no element is divided by epsilon alone because a larger one stands in its block.

On accelerators one kernel does all of this (`kernels.adamw_triton`); the operations here are its reference.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx.config.schema import MOMENT_BLOCK, Optimizer
from phalanx.kernels import triton_module
from phalanx.optimizers.optimizer_kind import (
    Group,
    HeldParameters,
    ScaledUpdates,
    ScaledUpdatesKind,
    local_part,
    refuse_options,
)

_ELEMENTS_AT_ONCE = 1 << 22
"""Elements that are decoded together: a few tensors of 16 MiB, where the moments of a large model take gigabytes."""


class AdamW8bitKind(ScaledUpdatesKind):
    """AdamW with moments in blocks of 8 bits."""

    # Of each moment a byte an element and a scale in 32 bits a block.
    state_values = 2 * (1 / 4 + 1 / MOMENT_BLOCK)
    # The kernel moves 4: gradient and parameter read, parameter written, codes of both moments read and written. To decode
    # and code takes it as long as an H100 takes to move 10.
    value_passes = 10
    per_parameter = True

    def build(self, groups: Sequence[Group], config: Optimizer, held: HeldParameters) -> AdamW8bit:
        """Return it over `groups`, with the rates and decays of the run file."""
        refuse_options(config)
        return AdamW8bit(groups, config)


ADAMW8BIT = AdamW8bitKind()


class AdamW8bit(ScaledUpdates):
    """See the module. State of a parameter: `step`, and codes and scales of `exp_avg` and of `exp_avg_sq`'s root."""

    def __init__(self, groups: Sequence[Group], config: Optimizer) -> None:
        super().__init__(groups, {"lr": config.lr, "betas": config.betas, "eps": config.eps, "weight_decay": 0.0})
        signed, unsigned = list_shares(7), list_shares(8)
        self.shares = {
            "exp_avg": torch.cat((-signed.flip(0), torch.zeros(1, dtype=signed.dtype), signed)),
            "exp_avg_sq_root": unsigned,
        }
        rows = [*self.shares.values(), *((shares[1:] + shares[:-1]) / 2 for shares in self.shares.values())]
        self.tables = torch.stack([F.pad(row, (0, 256 - len(row))) for row in rows]).float()
        """Of the kernel: shares, and the middles between them, of 256 places each."""

    def update_parameter(self, parameter: Tensor, group: dict[str, Any], divisor: Tensor, skip: Tensor) -> None:
        """See `ScaledUpdates`."""
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), device=parameter.device)
            for what in self.shares:
                state[what], state[f"{what}_scale"] = _zero_moment(parameter)
        state["step"].add_(1.0 - skip)
        # float32 would round 1 - beta^n for betas near 1. A first update that is skipped must not divide by 0.
        number = state["step"].double().clamp(min=1.0)
        mean_bias, square_bias = (1.0 - torch.pow(beta, number) for beta in group["betas"])
        assert parameter.grad is not None
        whole, gradients_RC = _as_rows(local_part(parameter)), _as_rows(local_part(parameter.grad))
        kernels = triton_module("adamw_triton")
        if whole.is_cuda and whole.dtype == torch.float32 and gradients_RC.is_contiguous() and kernels is not None:
            self.tables = self.tables.to(whole.device)
            kernels.run_adamw8bit(
                whole,
                gradients_RC,
                *(
                    (_as_rows(local_part(state[name])), _as_rows(local_part(state[f"{name}_scale"])))
                    for name in self.shares
                ),
                self.tables,
                torch.stack((mean_bias, square_bias.sqrt())).float(),
                divisor,
                skip,
                block=MOMENT_BLOCK,
                lr=float(group["lr"]),
                decay=group["weight_decay"],
                betas=group["betas"],
                eps=group["eps"],
            )
            return
        mean, root = (
            Moment(
                _as_rows(local_part(state[what])),
                _as_rows(local_part(state[f"{what}_scale"])),
                shares.to(whole.device, whole.dtype),
            )
            for what, shares in self.shares.items()
        )
        divisor, skip = divisor.to(whole.dtype), skip.to(whole.dtype)
        rate = group["lr"] * (1.0 - skip)
        mean_share, square_share = ((1.0 - beta) * (1.0 - skip) for beta in group["betas"])
        size = max(1, _ELEMENTS_AT_ONCE // whole.shape[1])
        for start in range(0, len(whole), size):
            rows = slice(start, start + size)
            # Filled, not multiplied by 0: a gradient that is not finite would stay so.
            gradient_RC = gradients_RC[rows].div_(divisor).masked_fill_(skip.bool(), 0.0)
            mean_RC = mean.decode(rows).lerp_(gradient_RC, mean_share)
            root_RC = root.decode(rows).square_().lerp_(gradient_RC.square(), square_share).sqrt_()
            # A skipped update codes what it decoded, which gives the same codes.
            mean.encode(rows, mean_RC)
            root.encode(rows, root_RC)
            root_RC.div_(square_bias.sqrt().to(whole.dtype)).add_(group["eps"])
            direction_RC = mean_RC.div_(root_RC)
            step_size = rate / mean_bias.to(whole.dtype)
            whole[rows].mul_(1.0 - rate * group["weight_decay"]).addcmul_(direction_RC, step_size, value=-1.0)


@dataclass(frozen=True)
class Moment:
    """One moment of a parameter of R rows and C columns, in 8 bits."""

    codes_RC: Tensor
    """Numbers of shares, uint8."""
    scales_RB: Tensor
    """Largest magnitude of each block, in the format of the parameter."""
    shares: Tensor
    """Shares of a scale that codes stand for, ascending."""

    def decode(self, rows: slice) -> Tensor:
        """Return the values of some rows."""
        codes_RC = self.codes_RC[rows]
        scales_RC = self.scales_RB[rows].repeat_interleave(MOMENT_BLOCK, dim=1)[:, : codes_RC.shape[1]]
        return self.shares[codes_RC.int()].mul_(scales_RC)

    def encode(self, rows: slice, values_RC: Tensor) -> None:
        """Keep the values of some rows."""
        columns = values_RC.shape[1]
        # The last block of a row may have fewer elements.
        padded = F.pad(values_RC, (0, -columns % MOMENT_BLOCK)) if columns % MOMENT_BLOCK else values_RC
        values_RBE = padded.unflatten(1, (-1, MOMENT_BLOCK))
        scales_RB = torch.linalg.vector_norm(values_RBE, float("inf"), dim=2)
        # A block of zeros has the scale 0, by which nothing can be divided.
        shares_RBE = values_RBE / scales_RB.clamp(min=torch.finfo(scales_RB.dtype).tiny).unsqueeze(2)
        nearest = torch.bucketize(shares_RBE, (self.shares[1:] + self.shares[:-1]) / 2, out_int32=True)
        self.codes_RC[rows] = nearest.flatten(1)[:, :columns]
        self.scales_RB[rows] = scales_RB


def list_shares(bits: int) -> Tensor:
    """Return the positive numbers up to 1 of dynamic tree quantisation, ascending, float64 (the paper, section 1.3).

    Each decade below the highest has half as many, at equal distances. The largest is 1, so that the largest element of
    a block is kept as it is.
    """
    decades = [
        10.0 ** (power + 1 - bits) * (0.1 + 0.9 * (torch.arange(2**power, dtype=torch.float64) + 0.5) / 2**power)
        for power in range(bits)
    ]
    shares = torch.cat(decades)
    shares[-1] = 1.0
    return shares


def _zero_moment(parameter: Tensor) -> tuple[Tensor, Tensor]:
    """Return codes and scales like `parameter`, sharded as it is, of a moment that is 0."""
    # The first column of each block. Vectors, which shards may cut anywhere, have blocks of one element: exact moments.
    blocks = parameter if parameter.dim() < 2 else parameter[..., ::MOMENT_BLOCK]
    scales = torch.zeros_like(blocks, memory_format=torch.contiguous_format)
    return torch.zeros_like(parameter, dtype=torch.uint8, memory_format=torch.contiguous_format), scales


def _as_rows(x: Tensor) -> Tensor:
    """Return the memory of `x` as a matrix of its last dimension's columns; a vector is one column."""
    return x.reshape(-1, 1) if x.dim() < 2 else x.flatten(0, -2)
