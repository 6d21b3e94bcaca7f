"""Number formats of a run, by the names that run files give them (`layout.precision`), and what each of them is for.

Layers cast their parameters to the format of the activations where they use them, so that one rank and sharded ranks run the
same model code; which format that is stands here, and nowhere else. A recipe that multiplies in a narrower format than its
activations have, as FP8 does, is another `Precision`: it brings a `linear_product`, which the linear layers then call.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from phalanx.errors import ConfigError

LinearProduct = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""x [..., in], weight [out, in], bias [out] or None -> x W^T + bias [..., out], each in the format of the activations."""


@dataclass(frozen=True)
class Precision:
    """The formats that a run computes, keeps and reduces numbers in."""

    name: str
    """Name in run files."""
    compute_dtype: torch.dtype
    """Format of activations, of their gradients, and of parameters while they are used."""
    main_dtype: torch.dtype
    """Format of main parameters, which the optimizer updates, and of the optimizer's state."""
    reduce_dtype: torch.dtype
    """Format of parameters' gradients as they are summed over micro-batches and ranks."""
    linear_product: LinearProduct | None = None
    """Differentiable product of the linear layers; None for the plain one. The output head stays with the plain one."""

    @property
    def copies_parameters(self) -> bool:
        """Whether parameters are computed with in another format than they are kept in."""
        return self.compute_dtype != self.main_dtype


PRECISIONS = {
    precision.name: precision
    for precision in (
        Precision("fp64", torch.float64, torch.float64, torch.float64),
        Precision("fp32", torch.float32, torch.float32, torch.float32),
        Precision("bf16", torch.bfloat16, torch.float32, torch.float32),
        Precision("fp16", torch.float16, torch.float32, torch.float32),
    )
}
"""Every precision that `layout.precision` may name."""


def find_number_format(name: str | None, option: str) -> torch.dtype | None:
    """Return the number format that an option of the command line names; None for None.

    Raises ConfigError that names the option and what it may be.
    """
    if name is None:
        return None
    if name not in PRECISIONS:
        raise ConfigError(f"{option}={name} must be {', '.join(PRECISIONS)}")
    return PRECISIONS[name].compute_dtype
