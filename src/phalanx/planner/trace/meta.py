"""What an operation gives on meta tensors, remembered by the formats of its arguments.

PyTorch takes many operations apart to find the formats of their results, a millisecond or more each time, and the blocks of
many layouts run the same ones again and again.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from phalanx.planner.trace.operations import tensors_in
from phalanx.torch_compat.common import storage_key

_Format = tuple[torch.Size, tuple[int, ...], torch.dtype]
_Formats = tuple[bool, tuple[_Format | None, ...]]
"""Whether there is a single result, and the format of each."""

_known: dict[Any, _Formats | None] = {}
"""By operation and formats of arguments; None where formats do not say all."""


def on_meta(operation: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
    """The result of an operation on meta tensors; new tensors where the operation gives such."""
    if not _makes_all(operation):
        return operation(*arguments, **keywords)
    try:
        key = operation, _signature(arguments), _signature(tuple(keywords.items()))
    except _Unclear:
        return operation(*arguments, **keywords)
    formats = _known.get(key)
    if formats is not None:
        single, each = formats
        made = tuple(None if one is None else _empty(one) for one in each)
        return made[0] if single else made
    result = operation(*arguments, **keywords)
    if key not in _known:
        _known[key] = _formats_of(result, tensors_in((arguments, keywords)))
    return result


class _Unclear(Exception):
    """A format of an argument does not say how it takes part."""


@cache
def _makes_all(operation: Any) -> bool:
    """Whether an operation is said to give new tensors alone, and to leave others as they are."""
    schema = operation._schema
    return all(each.alias_info is None for each in (*schema.arguments, *schema.returns))


def _signature(value: Any) -> Any:
    """All of an argument that formats of results depend on."""
    if isinstance(value, Tensor):
        if not value.dim():
            # It may stand for a number, which takes less part in what formats become.
            raise _Unclear
        return value.shape, value.stride(), value.dtype, value.device
    if isinstance(value, tuple | list):
        return tuple([_signature(each) for each in value])
    # True is 1 and 1.0 for a dictionary.
    return type(value), value


def _formats_of(result: Any, arguments: list[Tensor]) -> _Formats | None:
    """Formats of what an operation gave; None where that is no new tensor, or not all of its memory."""
    single = isinstance(result, Tensor)
    every = (result,) if single else result
    tensors = tensors_in(every)
    before, made = set(map(storage_key, arguments)), [storage_key(tensor) for tensor in tensors]
    if not isinstance(every, tuple) or len({*before, *made}) < len(before) + len(made):
        return None
    if not all(each is None or (isinstance(each, Tensor) and _is_whole(each)) for each in every):
        return None
    return single, tuple(None if each is None else _format(each) for each in every)


def _is_whole(tensor: Tensor) -> bool:
    """Whether a tensor on meta is all of its memory."""
    if tensor.device.type != "meta" or tensor.storage_offset():
        return False
    return tensor.untyped_storage().nbytes() == _empty(_format(tensor)).untyped_storage().nbytes()


def _format(tensor: Tensor) -> _Format:
    return tensor.shape, tensor.stride(), tensor.dtype


def _empty(form: _Format) -> Tensor:
    shape, stride, dtype = form
    return torch.empty_strided(shape, stride, dtype=dtype, device="meta")
