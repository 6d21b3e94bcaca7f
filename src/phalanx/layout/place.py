"""Places of parts in whole parameters: which elements a rank holds of what tensor parallelism and FSDP2 cut."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor


@dataclass(frozen=True)
class TensorSplit:
    """The part of a parameter that this rank keeps, over `tp` or `ep`."""

    dim: int
    start: int
    """First element along `dim` in the whole parameter."""
    whole: int
    """Elements along `dim` in the whole parameter."""
    across: TensorSplit | None = None
    """What it keeps of that along another dim; None is all."""


TensorSplits = dict[str, TensorSplit]
"""Splits by parameter name; parameters not in it are whole on every tensor-parallel rank."""


class Place(NamedTuple):
    """One contiguous box of a whole tensor."""

    local: Tensor
    """This rank's elements: memory of the tensor itself, not a copy."""
    offsets: tuple[int, ...]
    """First element of the box by dim, in the whole tensor."""
    shape: tuple[int, ...]
    """Shape of the whole tensor."""


def place_of(tensor: Tensor, split: TensorSplit | None = None) -> Place:
    """Return this rank's part of a parameter or a tensor like it: its data-parallel shard of its tensor-parallel part."""
    # What only reads of splits, as plans do, need not load sharded tensors.
    from phalanx.torch_compat.sharded import local_part  # noqa: PLC0415

    shape = list(tensor.shape)
    local, begins = local_part(tensor)
    offsets = list(begins)
    # FSDP2 cuts the tensor-parallel part further: its offsets count within that part.
    while split is not None:
        offsets[split.dim] += split.start
        shape[split.dim] = split.whole
        split = split.across
    return Place(local, tuple(offsets), tuple(shape))


def as_place(part: Tensor | Place) -> Place:
    """Return `part` itself, or the place of a tensor that says so itself (plain or DTensor)."""
    return part if isinstance(part, Place) else place_of(part)
