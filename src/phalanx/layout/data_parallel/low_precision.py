"""Low-precision compute parameters beside float32 main parameters, for a rank that holds whole parameters.

The model that computes has bfloat16 or float16 parameters; the model that is initialised, updated and saved holds the main
parameters under the same names. Main parameters are copied over once an optimizer step instead of once a micro-batch, the
large ones by the optimizer as it updates them, and each gradient goes from the format it is computed in straight into its
float32 sum: 10 bytes of memory traffic for each parameter and micro-batch where casting in every layer takes 26. Sharded
ranks need none of this: gathering casts.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

import torch
from torch import Tensor, nn

from phalanx.kernels.parts_sum import add_gradient
from phalanx.nn.layers import Linear


class LowPrecisionParameters:
    """Keeps the parameters of `compute` equal to the main ones, rounded, and its gradients summed in the main ones'."""

    def __init__(self, main: nn.Module, compute: nn.Module) -> None:
        """Join two modules with the same parameter names; from now on backward passes fill the gradients of `main`."""
        self._main: list[Tensor] = list(main.parameters())
        self._compute: list[Tensor] = list(compute.parameters())
        names = [name for name, _ in main.named_parameters()]
        assert names == [name for name, _ in compute.named_parameters()]
        self._summing: list[Linear] = []
        """Layers that add to sums of gradients by themselves, from `begin_sums` to `end_sums`."""
        # By identity: tensors are compared element by element.
        self._main_of = {id(one): main for one, main in zip(self._compute, self._main, strict=True)}
        for parameter in compute.parameters():
            # Frozen ones have no gradients to follow.
            if not parameter.requires_grad:
                continue
            parameter.register_post_accumulate_grad_hook(self._move_gradient)

    @property
    def of_main(self) -> dict[Tensor, Tensor]:
        """Compute parameters by their main parameters."""
        return dict(zip(self._main, self._compute, strict=True))

    @torch.no_grad()
    def refresh(self, written: Collection[Tensor] = ()) -> None:
        """Round the main parameters into the compute parameters; to be called whenever the main ones have changed.

        written: compute parameters that hold their main parameter's value already.
        """
        # By identity: tensors compare element by element.
        done = {id(one) for one in written}
        stale = [place for place, one in enumerate(self._compute) if id(one) not in done]
        torch._foreach_copy_([self._compute[place] for place in stale], [self._main[place] for place in stale])

    def begin_sums(self, layers: Iterable[Linear]) -> None:
        """Let `layers` of the module that computes add to the gradients of their main parameters, which are 0 at first."""
        self._summing = list(layers)
        for layer in self._summing:
            main = self._main_of[id(layer.weight)]
            if main.grad is None:
                main.grad = torch.zeros_like(main)
            layer.gradient_sum = main.grad

    def end_sums(self) -> None:
        """Let the layers give autograd their gradients again."""
        for layer in self._summing:
            layer.gradient_sum = None

    @torch.no_grad()
    def collect(self, parameters: Iterable[Tensor]) -> None:
        """Sum up gradients of compute parameters that were set without hooks, as split backward passes set them."""
        for parameter in parameters:
            self._move_gradient(parameter)

    def _move_gradient(self, parameter: Tensor) -> None:
        # Autograd calls this too where a layer has added the gradient to the sum by itself, and given none.
        if parameter.grad is None:
            return
        # Summed in the main parameter's format, micro-batch by micro-batch: bfloat16 sums would lose small addends.
        main = self._main_of[id(parameter)]
        main.grad = add_gradient(parameter.grad, main.grad, main.dtype)
        # Autograd would add the next micro-batch's gradient to this one.
        parameter.grad = None
