"""AdamW whose large parameters are updated at the speed of memory.

PyTorch's fused kernel writes the gradients that it scales back to memory, where nobody reads them again, and moves its bytes
at three quarters of the speed of an H200's memory. Parameters of over a million elements on an accelerator have a kernel of
our own (`kernels.adamw_triton`): 0.72 of the time, measured over 880 million parameters. All others are PyTorch's, as are
state and options. Where a parameter has a copy in the compute format, the kernel writes that too, instead of a pass that
reads the parameter again; and of one in 8 bits the numbers, by the scale of the update before, which suits most updates, and
the largest of them, which says whether it does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from phalanx.config.schema import Optimizer
from phalanx.kernels import LARGE, triton_module
from phalanx.kernels.float8 import QuantisedCopy
from phalanx.optimizers.optimizer_kind import Group, HeldParameters, OptimizerKind, local_part, refuse_options
from phalanx.torch_compat import common as compat


class AdamWKind(OptimizerKind):
    """AdamW (Loshchilov & Hutter 2019), fused on every device type."""

    state_values = 2
    value_passes = 7
    per_parameter = True

    def build(self, groups: Sequence[Group], config: Optimizer, held: HeldParameters) -> AdamW:
        """Return AdamW over `groups`, with the rates and decays of the run file."""
        refuse_options(config)
        return build_adamw(groups, config, held)

    def update(self, optimizer: torch.optim.Optimizer, divisor: Tensor, skip: Tensor) -> None:
        """Update without waiting for the device: the kernels read `divisor` and `skip` for themselves."""
        compat.update_scaled(optimizer, divisor, skip)

    def update_gain(self, config: Optimizer) -> float:
        """Return the gain where the second moment vanishes: a gradient is then divided by epsilon alone."""
        return config.lr / config.eps

    def written_copies(self, optimizer: torch.optim.Optimizer) -> Sequence[Tensor]:
        """Return the copies of the parameters that our own kernel updated."""
        assert isinstance(optimizer, AdamW)
        return optimizer.written


ADAMW = AdamWKind()


def build_adamw(groups: Sequence[Group], config: Optimizer, held: HeldParameters) -> AdamW:
    """Return AdamW over `groups`, of which some may have a learning rate of their own."""
    optimizer = AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=True)
    optimizer.compute_copies = held.compute_copies
    optimizer.quantised_copies = held.quantised_copies
    return optimizer


class AdamW(torch.optim.AdamW):
    """See `torch.optim.AdamW` with `fused=True`, whose gradient scale and skipped updates it knows."""

    compute_copies: Mapping[Tensor, Tensor] = MappingProxyType({})
    """Of parameters, in the compute format: each equals its parameter, rounded, whenever a step begins."""
    quantised_copies: Mapping[Tensor, QuantisedCopy] = MappingProxyType({})
    """See `HeldParameters`."""
    written: tuple[Tensor, ...] = ()
    """Copies that the last step wrote; the others are for the caller to renew."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        assert closure is None
        large = [(group, [p for p in group["params"] if self._is_large(p)]) for group in self.param_groups]
        gradients = {p: p.grad for _, parameters in large for p in parameters}
        for group, parameters in large:
            if parameters:
                self._update_large(group, parameters)
        copies = (self._copy_of(p) for p in gradients)
        in_8_bits = (copy.q for p in gradients if (copy := self._quantised_copy_of(p)) is not None)
        self.written = (*(copy for copy in copies if copy is not None), *in_8_bits)
        # PyTorch's step leaves parameters without a gradient alone: ours are done, and hidden from it.
        for p in gradients:
            p.grad = None
        super().step()
        for p, gradient in gradients.items():
            p.grad = gradient

    def _init_group(self, group: dict[str, Any], *lists: list[Tensor]) -> bool:
        """Fill `lists` with what PyTorch's step updates: this rank's parts of parameters, gradients, moments and counts.

        Of sharded tensors PyTorch would first work out how the results are sharded, anew for all shapes on every mesh, which
        takes longer than a small update. Not documented; a PyTorch that does not ask it updates alike, only slower.
        """
        is_complex: bool = super()._init_group(group, *lists)
        for tensors in lists:
            tensors[:] = [local_part(tensor) for tensor in tensors]
        return is_complex

    def _is_large(self, p: Tensor) -> bool:
        """Return whether our kernel updates `p`; the first update, which makes the state, is PyTorch's."""
        if p.grad is None or not p.is_cuda or p.dtype != torch.float32 or not self.state.get(p):
            return False
        local, gradient = local_part(p), local_part(p.grad)
        even = local.is_contiguous() and gradient.is_contiguous()
        return local.numel() >= LARGE and even and triton_module("adamw_triton") is not None

    def _copy_of(self, p: Tensor) -> Tensor | None:
        copy = self.compute_copies.get(p)
        return copy if copy is not None and copy.is_contiguous() else None

    def _quantised_copy_of(self, p: Tensor) -> QuantisedCopy | None:
        copy = self.quantised_copies.get(p)
        return copy if copy is not None and copy.q.is_contiguous() else None

    def _update_large(self, group: dict[str, Any], parameters: list[Tensor]) -> None:
        kernel = triton_module("adamw_triton")
        assert kernel is not None
        states = [self.state[p] for p in parameters]
        steps = [state["step"] for state in states]
        divisor, skip = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        divisor = torch.ones_like(steps[0]) if divisor is None else divisor
        skip = torch.zeros_like(steps[0]) if skip is None else skip
        # Counted first, as PyTorch does: the corrections of the first update divide by 1 - beta.
        torch._foreach_add_(steps, 1)
        # float32 would round 1 - beta^n for betas near 1.
        number = torch.stack(steps).double()
        bias = [1.0 - torch.pow(beta, number) for beta in group["betas"]]
        corrections = torch.stack((bias[0], bias[1].sqrt()), 1).float()
        quantised = [self._quantised_copy_of(p) for p in parameters]
        amaxes = [copy.amax for copy in quantised if copy is not None]
        if amaxes:
            # What the kernels raise; a skipped update leaves what is there.
            torch._foreach_mul_(amaxes, skip)
        for p, state, copy, correction in zip(parameters, states, quantised, corrections, strict=True):
            assert p.grad is not None
            kernel.run_adamw(
                local_part(p),
                local_part(p.grad),
                (local_part(state["exp_avg"]), local_part(state["exp_avg_sq"])),
                self._copy_of(p),
                copy,
                correction,
                divisor,
                skip,
                lr=float(group["lr"]),
                decay=group["weight_decay"],
                betas=group["betas"],
                eps=group["eps"],
            )
        # A skipped update does not count towards the corrections of later ones.
        torch._foreach_sub_(steps, [skip] * len(steps))
