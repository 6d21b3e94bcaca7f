"""Every PyTorch API that is private, still moving, or differs between device types. Nothing else asks for versions.

Features are probed, never inferred from a version string.
"""

from __future__ import annotations

import contextlib
import os
import warnings
import weakref
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.nn.attention import SDPBackend
from torch.utils._python_dispatch import _disable_current_modes, is_traceable_wrapper_subclass


def add_matmul(total: Tensor | None, a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """Return total + a @ b in the wider `dtype`, in place where `total` is given: float32 sums of bfloat16 products, say.

    Where the device's matmul can add into a wider matrix the sum costs no pass of its own and no extra rounding.
    """
    if a.dtype == dtype:
        return a @ b if total is None else total.addmm_(a, b)
    if not _wide_matmul(torch.device("meta") if _stand_in.active else a.device, a.dtype, dtype):
        product = (a @ b).to(dtype)
        return product if total is None else total.add_(product)
    if total is None:
        return torch.mm(a, b, out_dtype=dtype)
    return torch.addmm(total, a, b, out_dtype=dtype, out=total)


@cache
def _wide_matmul(device: torch.device, narrow: torch.dtype, wide: torch.dtype) -> bool:
    """Return whether `device` adds products of `narrow` matrices into a `wide` one; tried out once, on a small case.

    Meta tensors stand for those of an accelerator.
    """
    if device.type == "meta":
        return True
    # Where tensors are fake or operations are counted, this is still tried out for real, and not counted.
    with _disable_current_modes():
        a = torch.ones(16, 16, dtype=narrow, device=device)
        total = torch.ones(16, 16, dtype=wide, device=device)
        try:
            torch.addmm(total, a, a, out_dtype=wide, out=total)
        except (RuntimeError, TypeError):
            return False
        return bool((total == 17.0).all())


class _StandIn:
    active = False


_stand_in = _StandIn()


@contextlib.contextmanager
def cpu_stands_in() -> Iterator[None]:
    """Choose kernels for CPU tensors as an accelerator would: for fake tensors, which have shapes and no elements."""
    # By a flag of the process, not an argument: kernels are chosen deep inside models that know nothing of dry runs.
    before, _stand_in.active = _stand_in.active, True
    try:
        yield
    finally:
        _stand_in.active = before


def _cpu_kernels(x: Tensor) -> bool:
    return x.device.type == "cpu" and not _stand_in.active


def float8_formats(device: torch.device) -> tuple[torch.dtype, torch.dtype]:
    """Return the 8-bit formats with 3 and with 2 digits that `device` multiplies: e4m3 and e5m2 (OCP, arXiv:2209.05433).

    MI300 has formats of its own, without negative zero, whose e4m3 ends at 240 instead of 448.
    """
    if is_rocm() and device.type == "cuda":
        name = str(getattr(torch.cuda.get_device_properties(device), "gcnArchName", ""))
        if name.startswith("gfx94"):
            return torch.float8_e4m3fnuz, torch.float8_e5m2fnuz
    return torch.float8_e4m3fn, torch.float8_e5m2


@cache
def float8_refusal(device: torch.device) -> str:
    """Return why `device` multiplies no matrices of 8-bit floating-point numbers; empty where it does. Tried out once."""
    if device.type != "cuda":
        return f"devices of type {device.type} have no products of 8-bit floating-point numbers"
    with _disable_current_modes():
        # A small case in each of the scalings that are used natively.
        x = torch.ones(32, 32, device=device).to(float8_formats(device)[0])
        one, ones = torch.ones((), device=device), torch.ones(32, 1, device=device)
        try:
            found = torch._scaled_mm(x, x.t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=True)
            by_row = torch._scaled_mm(x, x.t(), ones, ones.t(), out_dtype=torch.bfloat16, use_fast_accum=True)
        except (RuntimeError, TypeError, AttributeError) as error:
            return str(error).strip().partition("\n")[0]
    return "" if bool((found == 32.0).all() and (by_row == 32.0).all()) else "its 8-bit products are wrong"


@cache
def grouped_float8_refusal(device: torch.device) -> str:
    """Return why `device` has no grouped products of 8-bit numbers with scales of rows; empty where it does. Tried out once.

    Groups of rows are one kind of them, groups of what is summed up the other.
    """
    if refusal := float8_refusal(device):
        return refusal
    with _disable_current_modes():
        x = torch.ones(32, 32, device=device).to(float8_formats(device)[0])
        ends = torch.tensor([16, 32], device=device, dtype=torch.int32)
        scale, bf16 = torch.tensor([1.0, 2.0], device=device).repeat_interleave(32), torch.bfloat16
        try:
            matrices = torch.ones(2, 32, 32, device=device).to(x.dtype).transpose(1, 2)
            of_rows = torch._scaled_grouped_mm(x, matrices, scale[:32], scale.view(2, 32), offs=ends, out_dtype=bf16)
            of_sums = torch._scaled_grouped_mm(x, x.t(), scale, scale, offs=ends, out_dtype=bf16)
        except (RuntimeError, TypeError, ValueError, AttributeError) as error:
            return str(error).strip().partition("\n")[0]
    right = (of_rows[:16] == 32.0).all() & (of_rows[16:] == 64.0).all()
    right &= (of_sums[0] == 16.0).all() & (of_sums[1] == 64.0).all()
    return "" if bool(right) else "its grouped 8-bit products are wrong"


def compile_options(dtype: torch.dtype) -> dict[str, Any] | None:
    """Return options of `torch.compile` for what computes in `dtype`; None: PyTorch's own."""
    # Since 2.10 Inductor sums along rows and along columns in one kernel, whose sums over columns are float32 whatever is
    # added up: of 64-bit numbers Triton refuses to compile it.
    option = "triton.mix_order_reduction"
    if dtype != torch.float64 or option not in torch._inductor.list_options():
        return None
    return {option: False}


def allow_programs(count: int) -> None:
    """Let the compiler make up to `count` programs of one function, where it would make fewer and then run it uncompiled."""
    torch._dynamo.config.recompile_limit = max(count, torch._dynamo.config.recompile_limit)


def keep_float32_products() -> None:
    """Hide the compiler's advice to round products of 32-bit numbers: they are of all their bits, by choice."""
    warnings.filterwarnings("ignore", message="TensorFloat32 tensor cores for float32 matrix multiplication available")


def storage_key(tensor: Tensor) -> int:
    """Return a number of the memory behind a tensor, which no other memory has while this one is there.

    Of a sharded tensor: of the memory of this rank's part, without an operation that would give that part.
    """
    # `data_ptr` is 0 for every fake or meta tensor; the address of the storage object tells them apart.
    return int(getattr(tensor, "_local_tensor", tensor).untyped_storage()._cdata)


def wraps_tensors(tensor: Tensor) -> bool:
    """Return whether a tensor has others inside in place of memory of its own, as sharded ones do."""
    return is_traceable_wrapper_subclass(tensor)


def is_rocm() -> bool:
    """Return whether this PyTorch was built for AMD devices."""
    return torch.version.hip is not None


def amd_smi_handle(device: torch.device) -> Any:
    """Return AMD SMI's handle of a ROCm device, found among those that are visible as PyTorch does for its own readings.

    Raises RuntimeError where AMD SMI or its driver is missing, or this PyTorch does not look for it.
    """
    find = getattr(torch.cuda, "_get_amdsmi_handler", None)
    if find is None:
        raise RuntimeError("this PyTorch does not know AMD SMI")
    try:
        return find(device)
    except ModuleNotFoundError as error:
        raise RuntimeError(str(error)) from error


def device_address(device: torch.device) -> str:
    """Return the PCI address of an accelerator as Linux writes it, `0000:c1:00.0`; empty where PyTorch does not say."""
    facts = torch.get_device_module(device).get_device_properties(device)
    domain, bus, slot = (getattr(facts, name, None) for name in ("pci_domain_id", "pci_bus_id", "pci_device_id"))
    return "" if bus is None or slot is None else f"{domain or 0:04x}:{bus:02x}:{slot:02x}.0"


def full_name(name: str) -> str:
    """Return a parameter's name without the parts that torch.compile and checkpoint wrappers put into it."""
    return name.replace("_orig_mod.", "").replace("_checkpoint_wrapped_module.", "")


def memory_statistics(device: torch.device) -> dict[str, int]:
    """Return bytes now and at most allocated on an accelerator, as {"now", "peak"}, and "retries": how often it was found
    full and gave back what it kept, to go on. Empty on the CPU, which keeps no such count."""
    if device.type == "cpu":
        return {}
    # Making the flat form of the same takes time that a short step does not have.
    counts, beside = torch.get_device_module(device).memory_stats_as_nested_dict(device), SymmetricBuffer.allocated
    allocated = counts.get("allocated_bytes", {}).get("all", {})
    return {
        "now": allocated.get("current", 0) + beside,
        "peak": allocated.get("peak", 0) + beside,
        "retries": counts.get("num_alloc_retries", 0),
    }


def record_memory_history(device: torch.device) -> None:
    """Start recording the accelerator allocator's history."""
    torch.get_device_module(device).memory._record_memory_history(max_entries=1_000_000)


def dump_memory_history(device: torch.device, path: Path) -> None:
    """Write the recorded history to `path`, in the format of PyTorch's memory viewer, and stop recording."""
    # Private, and the same on CUDA and ROCm: PyTorch's own guide to memory snapshots uses these names.
    memory = torch.get_device_module(device).memory
    memory._dump_snapshot(str(path))
    memory._record_memory_history(enabled=None)


def update_scaled(optimizer: torch.optim.Optimizer, divisor: Tensor, skip: Tensor) -> None:
    """Update once by a fused optimizer with every gradient divided by `divisor`, or not at all where `skip` is 1.

    divisor, skip: 0-dim float32 tensors on the parameters' device. Both are read by the fused kernel itself, which saves
    a pass over all gradients and a wait for the device; GradScaler talks to fused optimizers through the same attributes.
    """
    # Not documented, but what GradScaler itself sets: fused kernels read both on the device.
    optimizer.grad_scale = divisor  # type: ignore[attr-defined]
    optimizer.found_inf = skip  # type: ignore[attr-defined]
    try:
        optimizer.step()
    finally:
        del optimizer.grad_scale, optimizer.found_inf  # type: ignore[attr-defined]


def all_gather(x: Tensor, group: str, size: int) -> Tensor:
    """Return every rank's `x` of the named group of `size` ranks, [size, *x.shape]; traceable, no gradient."""
    # The functional operations behind torch.distributed: torch.compile keeps them in the graph, where `dist.all_gather`
    # would break it.
    functional = torch.ops._c10d_functional
    gathered: Tensor = functional.wait_tensor(functional.all_gather_into_tensor(x.contiguous(), size, group))
    return gathered.unflatten(0, (size, x.shape[0])) if x.dim() else gathered.view(size)


def reduce_scatter(parts: Tensor, group: str, size: int) -> Tensor:
    """Return the sum over ranks of their `parts[i]` on rank i; contiguous [size, ...] -> [...]; traceable, no gradient."""
    functional = torch.ops._c10d_functional
    flat = parts.flatten(0, 1)
    result: Tensor = functional.wait_tensor(functional.reduce_scatter_tensor(flat, "sum", size, group))
    return result


def all_reduce(x: Tensor, group: str, operation: str = "sum") -> Tensor:
    """Return the sum, or another `operation`, of every rank's `x` over the named group; traceable, no gradient."""
    functional = torch.ops._c10d_functional
    total: Tensor = functional.wait_tensor(functional.all_reduce(x.contiguous(), operation, group))
    return total


def all_to_all(parts: Tensor, group: str, size: int) -> Tensor:
    """Send `parts[i]` to rank i; what comes back is what each rank sent here. [size, ...]; traceable, no gradient."""
    functional = torch.ops._c10d_functional
    each = [1] * size
    result: Tensor = functional.wait_tensor(functional.all_to_all_single(parts, each, each, group))
    return result


def begin_all_to_all_rows(rows: Tensor, send: list[int], receive: list[int], group: str) -> Tensor:
    """Send `send[i]` rows to rank i and receive `receive[i]` from each, one after another; traceable, no gradient.

    rows: [sum(send), ...]. The result is [sum(receive), ...], which nothing may read before `await_tensor` has returned.
    """
    result: Tensor = torch.ops._c10d_functional.all_to_all_single(rows.contiguous(), receive, send, group)
    return result


def await_tensor(begun: Tensor) -> Tensor:
    """Return `begun` itself, the result of a collective: what reads it from now on, on the device, waits for it."""
    result: Tensor = torch.ops._c10d_functional.wait_tensor(begun)
    return result


def process_group(name: str) -> dist.ProcessGroup:
    """Return the process group of this name, as compiled code refers to it."""
    group = _resolve_process_group(cast(Any, name))
    assert isinstance(group, dist.ProcessGroup)
    return group


def has_attention_kernel(query: Tensor) -> bool:
    """Return whether `attention_kernel` covers this format on this device."""
    return _cpu_kernels(query) or query.dtype in (torch.bfloat16, torch.float16)


def attention_kernel(query: Tensor, key: Tensor, value: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """Compute attention [B, H, Q, E] and its log-partitions [B, H, Q], of H query and K key/value heads, K dividing H."""
    aten = torch.ops.aten
    if _cpu_kernels(query):
        group = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(group, dim=1), value.repeat_interleave(group, dim=1)
        out, log_z = aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, causal)
    elif prefers_cudnn(query, key, value, causal):
        out, log_z = aten._scaled_dot_product_cudnn_attention(query, key, value, None, True, 0.0, causal)[:2]
    else:
        out, log_z = aten._scaled_dot_product_flash_attention(query, key, value, 0.0, causal)[:2]
    return out, log_z.view(out.shape[:-1])


@cache
def choose_attention_once(device: torch.device) -> None:
    """Run a tiny attention on `device`, so that an order of kernels set from now on is kept.

    PyTorch sets an order of its own when a process chooses between kernels for the first time, on Hopper cuDNN before all
    others, and so drops one that the process set before (`priority_order` in ATen's `sdp_utils.cpp`, 2.10 to 2.13).
    """
    if device.type == "cuda":
        with _disable_current_modes(), torch.no_grad():
            x = torch.zeros(1, 1, 16, 64, dtype=torch.bfloat16, device=device)
            torch.nn.functional.scaled_dot_product_attention(x, x, x)


def prefers_cudnn(query: Tensor, key: Tensor, value: Tensor, causal: bool) -> bool:
    """Return whether cuDNN's attention covers these tensors and is preferred to PyTorch's own flash attention."""
    if query.device.type != "cuda" or is_rocm():
        return False
    cudnn, flash = (int(backend.value) for backend in (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION))
    order = torch._C._get_sdp_priority_order()
    if order.index(cudnn) > order.index(flash):
        return False
    shared = query.shape[1] != key.shape[1]
    parameters = torch.backends.cuda.SDPAParams(query, key, value, None, 0.0, causal, shared)
    return bool(torch.backends.cuda.can_use_cudnn_attention(parameters))


def attention_kernel_gradients(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, log_z: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return gradients of query, key and value, from the result and the log-partitions over all keys, not these alone."""
    aten = torch.ops.aten
    if _cpu_kernels(query):
        heads = key.shape[1]
        group = query.shape[1] // heads
        key, value = key.repeat_interleave(group, dim=1), value.repeat_interleave(group, dim=1)
        grads = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad_out, query, key, value, out, log_z, 0.0, causal
        )
        grad_query, *rest = grads
        grad_key, grad_value = (grad.unflatten(1, (heads, group)).sum(2) for grad in rest)
        return grad_query, grad_key, grad_value
    # The kernel reads log-partitions as if they were contiguous.
    grad_out, out, log_z = grad_out.contiguous(), out.contiguous(), log_z.contiguous()
    # Random state of dropout, which is off: two integers that nothing reads.
    unused = torch.zeros((), dtype=torch.int64, device=query.device)
    if prefers_cudnn(query, key, value, causal):
        log_z = log_z.unsqueeze(-1)
        lengths = (None, None, query.shape[2], key.shape[2])
        grads = aten._scaled_dot_product_cudnn_attention_backward(
            grad_out, query, key, value, out, log_z, unused, unused, None, *lengths, 0.0, causal
        )
        grad_query, grad_key, grad_value = grads
        return grad_query, grad_key, grad_value
    grad_query, grad_key, grad_value = aten._scaled_dot_product_flash_attention_backward(
        grad_out,
        query,
        key,
        value,
        out,
        log_z,
        None,
        None,
        query.shape[2],
        key.shape[2],
        0.0,
        causal,
        torch.zeros(2, dtype=torch.uint64, device=query.device),
        unused,
    )
    return grad_query, grad_key, grad_value


class SymmetricBuffer:
    """Memory of an accelerator that the other ranks of `group` on this machine can read.

    All ranks make it together (`layout.data_parallel.peer_memory`). Multicast, which PyTorch would set up beside it, is not
    used and stays off.
    """

    allocated = 0
    """Bytes of all that this process has; the allocator knows nothing of them."""

    def __init__(self, size: int, device: torch.device, group: dist.ProcessGroup) -> None:
        self.size = size
        os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
        memory = getattr(torch._C._distributed_c10d, "_SymmetricMemory", None)
        if memory is None:
            raise RuntimeError("this PyTorch has no symmetric memory")
        self._own = memory.empty_strided_p2p((size,), (1,), torch.uint8, device)
        SymmetricBuffer.allocated += size
        weakref.finalize(self, SymmetricBuffer._freed, size).atexit = False
        self._handle = memory.rendezvous(self._own, group.group_name)

    @staticmethod
    def _freed(size: int) -> None:
        SymmetricBuffer.allocated -= size

    def of(self, rank: int) -> Tensor:
        """Return the buffer of the group's rank `rank`, uint8 [size]."""
        buffer: Tensor = self._handle.get_buffer(rank, (self.size,), torch.uint8)
        return buffer

    def barrier(self) -> None:
        """Wait, on the current stream, until every rank of the group is here."""
        self._handle.barrier()


def update_loss_scale(scaler: GradScaler, overflow: Tensor) -> None:
    """Lower the scale of `scaler` after a step whose gradients overflowed; raise it after many that did not.

    overflow: 0-dim, on the device of the gradients, and read there.
    """
    # `update` takes what `unscale_` found, in a pass over all gradients of its own; the norm has told already.
    scaler._per_optimizer_states[0]["found_inf_per_device"] = {overflow.device: overflow.float()}
    scaler.update()


def schedule_actions(
    schedule: type[Any], pp: int, stages_per_rank: int, microbatches: int
) -> list[list[tuple[str, int, int]]]:
    """Return what each rank of one of PyTorch's schedules with several stages a rank computes, in order.

    schedule: the class. Returns (letter, stage, micro-batch) by rank; letters: F forward, B backward, I and W gradients of
    inputs and of weights apart.
    """
    # The order is all that is wanted: working out where sends and receives go takes time quadratic in its length.
    order_only = type(schedule.__name__, (schedule,), {"_prepare_schedule_with_comms": lambda *_args, **_options: None})
    stage = {"num_stages": pp * stages_per_rank, "group_size": pp, "group_rank": 0, "submod": None}
    made = order_only([SimpleNamespace(**stage) for _ in range(stages_per_rank)], microbatches)
    return [
        [(step.computation_type.value, step.stage_index, step.microbatch_index) for step in steps if step is not None]
        for _, steps in sorted(made.pipeline_order.items())
    ]


def inside_transform() -> bool:
    """Return whether this code runs inside vmap or another transform of torch.func: they take no plain autograd.Function."""
    return bool(_probe())


_probe = getattr(torch._C, "_are_functorch_transforms_active", lambda: False)


def in_backward_pass() -> bool:
    """Return whether autograd is running a backward pass in this thread: what runs forward in it is computed again."""
    return bool(torch._C._current_graph_task_id() != -1)


_SAMPLE_CYCLES = 20_000_000
"""Cycles of a kernel that waits for about ten milliseconds."""


def keep_device_busy(device: torch.device, seconds: float) -> None:
    """Have what is launched on the current stream of a CUDA or ROCm `device` from now on begin `seconds` later.

    The host does not wait.
    """
    with torch.cuda.device(device):
        torch.cuda._sleep(round(seconds * _cycles_per_second(device)))


@cache
def _cycles_per_second(device: torch.device) -> float:
    """Return how fast the counter of `device` runs that such a kernel counts by. Waits for the device."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    # The first launch loads the kernel.
    torch.cuda._sleep(1)
    begin.record()
    torch.cuda._sleep(_SAMPLE_CYCLES)
    end.record()
    end.synchronize()
    return 1e3 * _SAMPLE_CYCLES / float(begin.elapsed_time(end))
