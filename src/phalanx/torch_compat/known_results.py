"""What operations on fake tensors return, remembered by the shapes and formats of their arguments while a mode lasts.

PyTorch remembers results too, but looks them up by 17 properties of each tensor, most of which never differ here, and goes
through all checks of a new fake tensor for each result. That is three quarters of a dry run, whose blocks and micro-batches
repeat the same operations again and again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

_CHANGE_OR_READ = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view)
"""Operations whose results depend on values, or that change the shape of what they are given."""


@dataclass(frozen=True, slots=True)
class _Made:
    """A tensor that an operation makes."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device
    base: int | None
    """Place of the argument whose memory it shares; None where it has its own."""
    attributes: dict[str, Any]
    """What PyTorch keeps beside a fake tensor."""


_Result = _Made | int | None
"""What is made, the place of the argument that is returned, or nothing."""


class _Unknown(Exception):
    """Raised for arguments and results that are not remembered."""


class KnownResults:
    """What operations returned under one mode."""

    def __init__(self, mode: FakeTensorMode) -> None:
        self._mode = mode
        self._known: dict[tuple[Any, ...], _Result | tuple[_Result, ...]] = {}

    def result(
        self, compute: Callable[..., Any], func: Any, types: Any, args: tuple[Any, ...], keywords: dict[str, Any]
    ) -> Any:
        """Return what `func` returns, computed by `compute` where these shapes and formats are new.

        The other arguments are those of `__torch_dispatch__`.
        """
        if not _depends_on_shapes_alone(func) or torch.is_inference_mode_enabled():
            return compute(func, types, args, keywords)
        key: list[Any] = [id(func), torch.get_default_dtype()]
        try:
            self._describe(key, args)
            for name, value in keywords.items():
                key.append(name)
                self._describe(key, (value,))
            found = self._known[tuple(key)]
        except (_Unknown, TypeError):
            return compute(func, types, args, keywords)
        except KeyError:
            result = compute(func, types, args, keywords)
            self._remember(tuple(key), args, result)
            return result
        return tuple(self._make(one, args) for one in found) if isinstance(found, tuple) else self._make(found, args)

    def _describe(self, key: list[Any], values: Any) -> None:
        """Add to `key` all that results may depend on; raise _Unknown for what is more than shape, format and number."""
        key.append(len(values))
        for value in values:
            kind = type(value)
            if kind is FakeTensor:
                if value.fake_mode is not self._mode or value.constant is not None or value.is_complex():
                    raise _Unknown
                key += (
                    value.dtype,
                    value.shape,
                    value.stride(),
                    value.storage_offset(),
                    value.untyped_storage().nbytes(),
                    value.requires_grad,
                    value.fake_device,
                )
            elif kind is list or kind is tuple:
                self._describe(key, value)
            elif isinstance(value, Tensor):
                raise _Unknown
            else:
                # 1, 1.0 and True are equal, but give results of other formats.
                key += (kind, value)

    def _remember(self, key: tuple[Any, ...], args: tuple[Any, ...], result: Any) -> None:
        try:
            several = isinstance(result, (tuple, list))
            found = tuple(_result_of(one, args) for one in result) if several else _result_of(result, args)
        except _Unknown:
            return
        self._known[key] = found

    def _make(self, result: _Result, args: tuple[Any, ...]) -> Any:
        if result is None:
            return None
        if isinstance(result, int):
            return args[result]
        memory = torch.empty_strided(result.shape, result.stride, dtype=result.dtype, device="meta")
        if result.base is not None:
            memory.set_(args[result.base].untyped_storage(), result.offset, result.shape, result.stride)
        # As `FakeTensor` does it, without the checks of its many optional arguments.
        made = Tensor._make_subclass(
            FakeTensor, memory, False, dispatch_device=True, device_for_backend_keys=result.device
        )
        made.__dict__.update(result.attributes)
        return made


@functools.cache
def _depends_on_shapes_alone(func: Any) -> bool:
    """Return whether results of `func` follow from shapes and formats, and it changes at most values of its arguments."""
    if not isinstance(func, OpOverload) or func.namespace not in ("aten", "prims", "phalanx", "_c10d_functional"):
        return False
    if any(tag in func.tags for tag in _CHANGE_OR_READ):
        return False
    written = [argument for argument in func._schema.arguments if argument.alias_info and argument.alias_info.is_write]
    return not any(argument.kwarg_only for argument in written)


def _result_of(value: Any, args: tuple[Any, ...]) -> _Result:
    """Describe what an operation with the arguments `args` returned; raise _Unknown for what is no plain tensor."""
    if value is None:
        return None
    for place, argument in enumerate(args):
        if argument is value:
            return place
    if type(value) is not FakeTensor or value.constant is not None or value.requires_grad or value.is_complex():
        raise _Unknown
    storage = value.untyped_storage()
    places = [place for place, one in enumerate(args) if isinstance(one, Tensor) and _shares(one, storage)]
    nested = [one for argument in args if isinstance(argument, (list, tuple)) for one in argument]
    if len(places) > 1 or any(isinstance(one, Tensor) and _shares(one, storage) for one in nested):
        raise _Unknown
    made = _Made(
        tuple(value.shape),
        value.stride(),
        int(value.storage_offset()),
        value.dtype,
        value.fake_device,
        places[0] if places else None,
        dict(value.__dict__),
    )
    alone = torch.empty_strided(made.shape, made.stride, dtype=made.dtype, device="meta")
    if made.base is None and (made.offset or alone.untyped_storage().nbytes() != storage.nbytes()):
        raise _Unknown
    return made


def _shares(tensor: Tensor, storage: torch.UntypedStorage) -> bool:
    return bool(tensor.untyped_storage()._cdata == storage._cdata)
