"""The private parts of PyTorch's sharded tensors. Beside `compat`, of which it is a part, because importing them takes a
second, which no subcommand that shards nothing should wait for."""

from __future__ import annotations

import math

from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard


def with_local_part(like: Tensor, local: Tensor) -> Tensor:
    """Return `local`, on any device, as this rank's part of a tensor sharded as `like` is; of a plain one, itself."""
    if not isinstance(like, DTensor):
        return local
    # The constructor, as FSDP2 calls it: `from_local` would move the part to the device of the mesh.
    return DTensor(local, like._spec, requires_grad=False)


def local_part(tensor: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """Return this rank's part of `tensor`, and where it begins in the whole, by dim; of a plain tensor, all of it.

    PyTorch's own answer (`__create_chunk_list__`) is wrong for some uneven sizes split twice along one dim.
    """
    if not isinstance(tensor, DTensor):
        return tensor, (0,) * tensor.dim()
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None, "this rank holds no part"
    offsets, sizes = [0] * tensor.dim(), list(tensor.shape)
    # Strided shards were split after all plain ones, from the right.
    placed = list(enumerate(tensor.placements))
    strided: list[tuple[int, Shard | _StridedShard]] = [
        (axis, placement) for axis, placement in placed if isinstance(placement, _StridedShard)
    ]
    plain = [(axis, p) for axis, p in placed if type(p) is Shard]
    assert len(plain) + len(strided) == sum(not p.is_replicate() for _, p in placed), tensor.placements
    for axis, placement in [*plain, *reversed(strided)]:
        each = -(-sizes[placement.dim] // tensor.device_mesh.size(axis))
        start = min(coordinate[axis] * each, sizes[placement.dim])
        offsets[placement.dim] += start
        sizes[placement.dim] = min(each, sizes[placement.dim] - start)
    # Wrong offsets would fill, save and load the wrong elements without a word.
    local = tensor.to_local()
    assert local.numel() == math.prod(sizes) == 0 or list(local.shape) == sizes, (tensor.placements, local.shape, sizes)
    return local, tuple(offsets)
