"""Parameters in the format of the arithmetic beside float32 masters, for a rank that holds whole parameters.

The model that computes has bfloat16 or float16 parameters; the model that is initialised, updated and saved holds the
masters under the same names. Masters are copied over once an optimizer step instead of once a micro-batch, the large ones
by the optimizer as it updates them, and each gradient goes from the format it is computed in straight into its float32
sum: 10 bytes of memory traffic for each parameter and micro-batch where casting in every layer takes 26. Sharded ranks
need none of this: gathering casts.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

import torch
from torch import Tensor, nn

from phalanx.kernels.parts_sum import added_up


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

    @property
    def of_masters(self) -> dict[Tensor, Tensor]:
        """The working parameter of each master."""
        return dict(zip(self._masters, self._working, strict=True))

    @torch.no_grad()
    def refresh(self, written: Collection[Tensor] = ()) -> None:
        """Round the masters into the working copy; call whenever the masters have changed. written: what holds its master's
        value already."""
        done = {id(copy) for copy in written}
        stale = [place for place, copy in enumerate(self._working) if id(copy) not in done]
        torch._foreach_copy_([self._working[place] for place in stale], [self._masters[place] for place in stale])

    @torch.no_grad()
    def collect(self, parameters: Iterable[Tensor]) -> None:
        """Sum up gradients of these of `working` that were set without hooks, as split backward passes set them."""
        for parameter in parameters:
            if parameter.grad is not None:
                self._move_gradient(parameter)

    def _move_gradient(self, parameter: Tensor) -> None:
        assert parameter.grad is not None
        master = self._master_of[id(parameter)]
        master.grad = added_up(parameter.grad, master.grad, master.dtype)
        parameter.grad = None
