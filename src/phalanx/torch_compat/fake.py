"""The private parts of PyTorch that a dry run changes while it lasts: ranks that are not there, tensors without memory.

Beside `compat`, of which it is a part, because the fake backend comes with PyTorch's own test code, which no other
subcommand should load.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.distributed.pipelining.schedules as schedules
import torch.distributed.pipelining.stage as pipelining_stage
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from phalanx.torch_compat.known_results import KnownResults

if not torch._C._dispatch_has_kernel_for_dispatch_key("c10d::allreduce_", "Meta"):
    # PyTorch 2.10 has collectives of tensors without memory in a module that it loads for none of its own needs here.
    import torch.distributed._tools.fake_collectives


@contextlib.contextmanager
def fake_process_group(rank: int, world_size: int) -> Iterator[None]:
    """Be `rank` of a default process group of `world_size` ranks that exchange nothing; it is gone afterwards."""
    assert not dist.is_initialized(), "this process is a rank already"
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextlib.contextmanager
def silent_neighbours() -> Iterator[None]:
    """Let stages of a pipeline ask their neighbours nothing before the first step."""
    with contextlib.ExitStack() as stack:
        if hasattr(schedules._PipelineSchedule, "_warmup_p2p"):
            stack.enter_context(patch.object(schedules._PipelineSchedule, "_warmup_p2p", _take_stated_shapes))
        if hasattr(_Stage, "_get_init_p2p_neighbors_ops"):
            # Up to PyTorch 2.11 neighbours greet each other before their first step.
            stack.enter_context(patch.object(_Stage, "_get_init_p2p_neighbors_ops", lambda _stage: []))
        yield


@contextlib.contextmanager
def fake_tensors_everywhere(most_sent: int | None = None) -> Iterator[FakeTensorMode]:
    """Make every tensor fake, in PyTorch's parallel code too, which by itself trips over that in three places.

    most_sent: messages that a group's transport holds at a time; None: until they are waited for.
    """
    with contextlib.ExitStack() as stack:
        for name in ("__init__", "__getitem__", "_flatten", "_concatenate", "_unflatten"):
            if name in DeviceMesh.__dict__:
                method = DeviceMesh.__dict__[name]
                stack.enter_context(
                    patch.object(
                        DeviceMesh,
                        name,
                        staticmethod(_with_real_tensors(method.__func__))
                        if isinstance(method, staticmethod)
                        else _with_real_tensors(method),
                    )
                )
        if isinstance(mesh := DeviceMesh.__dict__.get("mesh"), property):
            stack.enter_context(patch.object(DeviceMesh, "mesh", property(_with_real_tensors(mesh.fget))))
        stack.enter_context(unseen_propagation())
        stack.enter_context(silent_neighbours())
        # One object: PyTorch asks whether an operation is that very function.
        send = _Transport(most_sent).isend
        for module in (dist, distributed_c10d):
            stack.enter_context(patch.object(module, "isend", send))
        yield stack.enter_context(_FakeButMeta(allow_non_fake_inputs=True))


_isend = distributed_c10d.isend
_Stage = pipelining_stage._PipelineStageBase


class _Transport:
    """Sends, and holds on to what is sent as real transports do: some schedules wait for it at the end of a step."""

    def __init__(self, most: int | None) -> None:
        self.most = most
        self.sent: dict[tuple[int, ...], deque[weakref.ref[_HoldingWork]]] = {}
        """Works by ranks of the group; oldest first."""

    def isend(self, tensor: torch.Tensor, *arguments: Any, **keywords: Any) -> _HoldingWork:
        work = _HoldingWork(_isend(tensor, *arguments, **keywords), tensor)
        if self.most is not None:
            sent = self.sent.setdefault(tuple(dist.get_process_group_ranks(keywords.get("group"))), deque())
            sent.append(weakref.ref(work))
            if len(sent) > self.most and (oldest := sent.popleft()()) is not None:
                oldest.arrived()
        return work


class _HoldingWork:
    def __init__(self, work: dist.Work | None, tensor: torch.Tensor) -> None:
        self._work = work
        self._tensor: torch.Tensor | None = tensor

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)

    def arrived(self) -> None:
        self._tensor = None


def active_fake_mode() -> FakeTensorMode | None:
    """Return the mode that makes tensors fake here, or None."""
    mode: FakeTensorMode | None = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)
    return mode


ASK_DEVICE = torch.ops.prim.device.default
"""The operation that asks a fake tensor for its device. Two of three operations of a step are this one, so that modes answer
it at once, with the tensor's own `device`."""
_ADD_PRODUCT = torch.ops.aten.addmm.dtype_out


class UncompiledMode(TorchDispatchMode):
    """A dispatch mode under which nothing is compiled.

    PyTorch has modes tell its compiler at each operation to stay away, longer than most operations on fake tensors take.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


class _FakeButMeta(UncompiledMode, FakeTensorMode):
    """Leaves meta tensors as they are until they are given memory: modules cannot exchange fake parameters for others."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._known = KnownResults(self)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is ASK_DEVICE:
            return args[0].device
        if func is _ADD_PRODUCT:
            # PyTorch 2.11 decomposes it as if it were the overload without a format.
            return kwargs["out"]
        if any(issubclass(kind, FakeTensor) for kind in types):
            return self._known.result(super().__torch_dispatch__, func, types, args, kwargs or {})
        device = (kwargs or {}).get("device")
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if device is not None:
            meta = torch.device(device).type == "meta"
        else:
            meta = bool(tensors) and all(tensor.device.type == "meta" for tensor in tensors)
        if meta and not any(isinstance(tensor, FakeTensor) for tensor in tensors):
            return func(*args, **(kwargs or {}))
        return super().__torch_dispatch__(func, types, args, kwargs)


@contextlib.contextmanager
def unseen_propagation() -> Iterator[None]:
    """Hide from modes and ledgers the whole tensors on which DTensor works out shapes."""
    name = "_propagate_tensor_meta_non_cached"
    original = getattr(ShardingPropagator, name, None)
    if original is None:
        yield
        return

    @functools.wraps(original)
    def unseen(*arguments: Any, **keywords: Any) -> Any:
        with _disable_current_modes():
            return original(*arguments, **keywords)

    with patch.object(ShardingPropagator, name, unseen):
        yield


def _with_real_tensors(method: Callable[..., Any] | None) -> Callable[..., Any]:
    """Keep the tensors of ranks in a device mesh real: fake ones must not meet them."""
    assert method is not None

    @functools.wraps(method)
    def outside(*arguments: Any, **keywords: Any) -> Any:
        with unset_fake_temporarily():
            return method(*arguments, **keywords)

    return outside


def _take_stated_shapes(_schedule: Any, stages: Any, *_rest: Any) -> None:
    """Let stages take the shapes that they are told; the vote of all ranks on it would read what was never received."""
    for stage in stages:
        stage._inference_mode = pipelining_stage.InferenceMode.STATIC


@contextlib.contextmanager
def watch_resizes(resized: Callable[[torch.UntypedStorage], None]) -> Iterator[None]:
    """Call `resized` for each storage after its size was changed: FSDP2 frees gathered parameters so, unseen by modes."""
    original = torch.UntypedStorage.resize_

    def resize(storage: torch.UntypedStorage, size: int) -> Any:
        result = original(storage, size)
        resized(storage)
        return result

    with patch.object(torch.UntypedStorage, "resize_", resize):
        yield


def in_backward() -> bool:
    """Return whether the autograd engine is calling."""
    return torch._C._current_autograd_node() is not None


def group_name(argument: Any) -> str | None:
    """Return the name of the process group that an argument of a collective stands for, or None."""
    if isinstance(argument, str):
        return argument
    if isinstance(argument, dist.ProcessGroup):
        return str(argument.group_name)
    if isinstance(argument, torch.ScriptObject):
        with contextlib.suppress(RuntimeError, TypeError):
            return str(dist.ProcessGroup.unbox(argument).group_name)
    return None
