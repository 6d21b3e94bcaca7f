"""Choice of a run's attention kernel: measured on the device at hand, at the run's own shape, not assumed.

The measurement takes seconds (FlexAttention must be compiled), so its outcome is kept in the user's cache folder, keyed by
everything it depends on. On AMD devices SDPA's own choice is kept. 64-bit numbers have no fused kernel anywhere.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast, get_args

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from phalanx.config.model import LanguageModel
from phalanx.errors import ConfigError
from phalanx.files import user_cache, write_atomically
from phalanx.hardware.device import device_name, synchronize
from phalanx.kernels.flash4 import why_not_flash4
from phalanx.nn.attention import AttentionCore, AttentionKernel, attend, attend_whole, attention_context
from phalanx.torch_compat import common as compat

_BACKENDS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}


@dataclass(frozen=True)
class AttentionShape:
    """Shape and format of an attention call, on which its speed depends."""

    samples: int
    length: int
    dtype: torch.dtype
    documents: bool


@dataclass(frozen=True)
class AttentionChoice:
    """A kernel, by its name in the run file, and what was measured to choose it (milliseconds forward + backward)."""

    name: str
    milliseconds: dict[str, float] = field(default_factory=dict)
    core: AttentionCore = attend
    """Attention of whole samples by some heads."""

    @property
    def kernel(self) -> AttentionKernel:
        """The model's code path."""
        return _code_path(self.name)

    @contextlib.contextmanager
    def active(self, device: torch.device) -> Iterator[None]:
        """Let SDPA prefer this kernel on `device`; the others stay behind it for shapes it cannot run.

        What FlashAttention-4 cannot do, such as one part of a ring, is for cuDNN, the fastest but for it.
        """
        preferred = _BACKENDS.get("cudnn" if self.name == "flash4" else self.name)
        if preferred is None:
            yield
            return
        order = [preferred, *(b for b in _BACKENDS.values() if b is not preferred)]
        compat.choose_attention_once(device)
        with sdpa_kernel(order, set_priority=True):
            yield


_OF_64_BITS = AttentionChoice("math")
"""The kernel for 64-bit numbers: no fused one takes them, except FlexAttention, which would add them up in 32 bits."""


def check_attention(requested: str, device: torch.device) -> None:
    """Raise ConfigError for a kernel that cannot train on `device`."""
    if requested == "flex" and device.type == "cpu":
        raise ConfigError(
            "training.attention=flex cannot train on the CPU: FlexAttention has no backward pass there\n"
            "nearest: training.attention=auto"
        )
    reason = why_not_flash4(device) if requested == "flash4" else None
    if reason is not None:
        raise ConfigError(
            f"training.attention=flash4 cannot run on {device.type}: {reason}\nnearest: training.attention=auto"
        )


def choose_attention(
    requested: str, model: LanguageModel, shape: AttentionShape, device: torch.device
) -> AttentionChoice:
    """Return the kernel that the run file names or, for `auto`, the fastest that can run this shape on this device.

    See `choose_fastest` for runs with `training.deterministic`.
    """
    if requested != "auto":
        return AttentionChoice(requested)
    if device.type == "cpu" or compat.is_rocm():
        return AttentionChoice("sdpa")
    if shape.dtype == torch.float64:
        return _OF_64_BITS
    # A kernel that was installed since deserves a measurement; one that was removed must not be chosen.
    version = torch.__version__ + (" + flash4" if _flash4_runs(shape, device) else "")
    parts = (
        device_name(device),
        version,
        # Heads are written otherwise than by versions that could not measure the memory-efficient kernel where they share.
        f"B{shape.samples} S{shape.length} H{model.n_heads}/{model.kv_heads} E{model.head_size}",
        f"{shape.dtype} {model.positions}{' documents' if shape.documents else ''}{_describe_options(model, shape.length)}",
    )
    return choose_fastest(" | ".join(parts), lambda: _measure_all(model, shape, device))


def choose_whole_attention(
    shape: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device
) -> AttentionChoice:
    """Return the fastest kernel for queries, keys and values of `shape`, [B, S, A, E], of which none is masked."""
    if device.type == "cpu" or compat.is_rocm():
        return AttentionChoice("sdpa")
    if dtype == torch.float64:
        return _OF_64_BITS
    words = "B{} S{} H{} E{}".format(*shape)
    key = f"{device_name(device)} | {torch.__version__} | {words} | {dtype} not causal"
    return choose_fastest(key, lambda: _measure_whole(shape, dtype, device))


def _measure_whole(shape: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device) -> dict[str, float]:
    query, key, value = (
        torch.randn(shape, device=device, dtype=dtype).transpose(1, 2).requires_grad_() for _ in range(3)
    )
    found = {}
    for name in ("cudnn", "flash", "efficient"):
        # A kernel refuses shapes it does not cover with a RuntimeError: that is the answer, not a failure.
        with contextlib.suppress(RuntimeError):
            found[name] = milliseconds_of(name, lambda: attend_whole(query, key, value), torch.randn_like(query))
    return found or {"math": 0.0}


def choose_fastest(key: str, measure: Callable[[], dict[str, float]]) -> AttentionChoice:
    """Return the kernel that `measure` finds fastest, by milliseconds; its times are kept under `key` for the next start.

    With `training.deterministic` it is the first of them that can run: which one is fastest may change from start to start,
    and each rounds in its own way. cuDNN's is not among them, as PyTorch refuses it then.
    """
    if torch.are_deterministic_algorithms_enabled():
        runnable = measure()
        return AttentionChoice(next(iter(runnable)), runnable)
    cached = _read_cache().get(key)
    if cached is None:
        cached = measure()
        _write_cache(key, cached)
    return AttentionChoice(min(cached, key=lambda name: cached[name]), cached)


def _measure_all(model: LanguageModel, shape: AttentionShape, device: torch.device) -> dict[str, float]:
    # Only kernels that take a bias can mask by documents, windows or distances.
    needs_bias = shape.documents or model.biases_attention(shape.length)
    names = ["cudnn", "efficient", "flex"] if needs_bias else ["cudnn", "flash", "efficient"]
    if model.changes_softmax:
        names = ["flex"]
    if not needs_bias and _flash4_runs(shape, device):
        names.append("flash4")
    milliseconds = {}
    for name in names:
        # A kernel refuses shapes it does not cover with a RuntimeError: that is the answer, not a failure. FlashAttention-4,
        # compiled here and now, has errors of its own, some of its compiler's.
        with contextlib.suppress(Exception if name == "flash4" else RuntimeError):
            milliseconds[name] = _measure_kernel(name, model, shape, device)
    return milliseconds or {"math": 0.0}


def _measure_kernel(name: str, model: LanguageModel, shape: AttentionShape, device: torch.device) -> float:
    """Return median milliseconds of one forward and backward pass."""
    positions = torch.arange(shape.length, device=device)
    documents = torch.zeros(shape.samples, shape.length, dtype=torch.int32, device=device) if shape.documents else None
    attention = model.layer(0).attention
    context = attention_context(attention, positions, shape.dtype, kernel=_code_path(name), document_ids_BS=documents)

    def random(heads: int, size: int) -> torch.Tensor:
        x = torch.randn(shape.samples, shape.length, heads, size, device=device, dtype=shape.dtype)
        return x.transpose(1, 2).requires_grad_()

    size, value_size = attention.head_size, attention.value_size
    query, key = random(model.n_heads, size), random(model.kv_heads, size)
    value, grad = random(model.kv_heads, value_size), random(model.n_heads, value_size).detach()
    if attention.sinks:
        context = context._replace(sinks_H=torch.zeros(model.n_heads, device=device, dtype=torch.float32))
    return milliseconds_of(name, lambda: attend(query, key, value, context), grad)


def milliseconds_of(name: str, attention: Callable[[], torch.Tensor], grad: torch.Tensor) -> float:
    """Return median milliseconds of one forward and backward pass of `attention` by the kernel `name` alone.

    Raises RuntimeError for a shape that the kernel does not cover. grad: of what `attention` gives.
    """
    backend = sdpa_kernel([_BACKENDS[name]]) if name in _BACKENDS else contextlib.nullcontext()
    seconds = []
    with backend, warnings.catch_warnings():
        # SDPA warns of each reason why the one kernel that it may take cannot run. This asks whether it can: no news to a
        # user, who trains with another. What is of interest beyond is said again where the chosen kernel trains.
        warnings.simplefilter("ignore", UserWarning)
        for _ in range(8):
            synchronize(grad.device)
            start = time.perf_counter()
            attention().backward(grad)
            synchronize(grad.device)
            seconds.append(time.perf_counter() - start)
    # The first calls compile, choose algorithms and fill the allocator.
    return statistics.median(seconds[3:]) * 1e3


def _code_path(name: str) -> AttentionKernel:
    return cast(AttentionKernel, name) if name in get_args(AttentionKernel) else "sdpa"


def _flash4_runs(shape: AttentionShape, device: torch.device) -> bool:
    return shape.dtype in (torch.bfloat16, torch.float16) and why_not_flash4(device) is None


def _describe_options(model: LanguageModel, length: int) -> str:
    """Return what else a kernel's speed depends on; nothing for models that have none of it."""
    attention = model.layer(0).attention
    window = attention.window_within(length)
    values = attention.value_size if attention.latent is not None else None
    options = {"values": values, "window": window, "cap": attention.softcap, "sinks": attention.sinks or None}
    return "".join(f" {name} {value}" for name, value in options.items() if value is not None)


def _cache_path() -> Path:
    return user_cache() / "attention.json"


def _read_cache() -> dict[str, dict[str, float]]:
    try:
        content = json.loads(_cache_path().read_text())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _write_cache(key: str, milliseconds: dict[str, float]) -> None:
    # Without a writable cache the next start only measures again.
    with contextlib.suppress(OSError):
        write_atomically(_cache_path(), json.dumps({**_read_cache(), key: milliseconds}, indent=1))
