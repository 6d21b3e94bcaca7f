"""Parameters in the format of the arithmetic beside float32 masters, for a rank that holds whole parameters.

The model that computes has bfloat16 or float16 parameters; the model that is initialised, updated and saved holds the
masters under the same names. Masters are copied over once an optimizer step instead of once a micro-batch, and each
gradient goes from the format it is computed in straight into its float32 sum: 12 bytes of memory traffic for each
parameter and micro-batch where casting in every layer takes 26. Sharded ranks need none of this: gathering casts.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn


class WorkingCopy:
    """Keeps the parameters of `working` equal to the masters, rounded, and its gradients summed in the masters'."""

    def __init__(self, masters: nn.Module, working: nn.Module) -> None:
        """Join two modules with the same parameter names; from now on backward passes fill the masters' gradients."""
        self._masters: list[Tensor] = list(masters.parameters())
        self._working: list[Tensor] = list(working.parameters())
        names = [name for name, _ in masters.named_parameters()]
        assert names == [name for name, _ in working.named_parameters()]
        self._master_of = {id(copy): master for copy, master in zip(self._working, self._masters, strict=True)}
        for parameter in working.parameters():
            parameter.register_post_accumulate_grad_hook(self._move_gradient)

    @torch.no_grad()
    def refresh(self) -> None:
        """Round the masters into the working copy; call whenever the masters have changed."""
        torch._foreach_copy_(self._working, self._masters)

    @torch.no_grad()
    def collect(self, parameters: Iterable[Tensor]) -> None:
        """Sum up gradients of these of `working` that were set without hooks, as split backward passes set them."""
        for parameter in parameters:
            if parameter.grad is not None:
                self._move_gradient(parameter)

    def _move_gradient(self, parameter: Tensor) -> None:
        assert parameter.grad is not None
        master = self._master_of[id(parameter)]
        if master.grad is None:
            master.grad = parameter.grad.to(master.dtype)
        else:
            master.grad.add_(parameter.grad)
        parameter.grad = None
