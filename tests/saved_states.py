"""Training states to save, and comparing them to the bit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from phalanx.checkpoint import CheckpointStore, folders
from phalanx.checkpoint.manifest import DTYPES


def every_dtype(seed: int = 0) -> dict[str, Tensor]:
    """One tensor of random bits for each dtype a checkpoint holds; NaNs of every kind are among them."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for index, (name, dtype) in enumerate(DTYPES.items()):
        raw = torch.randint(0, 256, (5 + index, 3 * dtype.itemsize), dtype=torch.uint8, generator=generator)
        tensors[f"model.{name}"] = raw % 2 == 0 if dtype == torch.bool else raw.view(dtype)
    return tensors


def small_state(seed: int) -> dict[str, Tensor]:
    """A few hundred kB of float32 tensors that depend on `seed`."""
    generator = torch.Generator().manual_seed(seed)
    return {f"model.layer{index}.weight": torch.randn(64 + index, 256, generator=generator) for index in range(6)}


def zeros_like(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors to load into."""
    return {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}


def bits(tensor: Tensor) -> Tensor:
    """The tensor's bytes, in which NaN equals itself and -0.0 does not equal 0.0."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def assert_same_bits(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Fail unless both hold the same tensors, to the last bit."""
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype and found[name].shape == tensor.shape, name
        assert torch.equal(bits(found[name]), bits(tensor)), name


def trained_model(seed: int = 0) -> tuple[nn.Module, torch.optim.AdamW]:
    """A small model with a tied head, and buffers, and an optimizer that has made two steps."""
    torch.manual_seed(seed)
    parts = {"embedding": nn.Embedding(11, 6), "norm": nn.BatchNorm1d(6), "head": nn.Linear(6, 11, bias=False)}
    model = nn.ModuleDict(parts)
    model["head"].weight = model["embedding"].weight
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    for _ in range(2):
        hidden = model["norm"](model["embedding"](torch.arange(11)))
        model["head"](hidden).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def saved_runs(run_dir: Path, steps: list[int]) -> CheckpointStore:
    """A store holding `small_state(step)` and the state {"step": step} for each of `steps`."""
    store = CheckpointStore(run_dir / "checkpoints", keep_last=len(steps))
    for step in steps:
        store.save(step, small_state(step), {"step": step})
    return store


@contextmanager
def damaged_when_published(file: str) -> Iterator[None]:
    """In here a disk changes the last bit of `file` in every checkpoint once it is published."""
    publish = folders.publish_folder

    def publish_damaged(root: Path, step: int, *texts: Any) -> None:
        publish(root, step, *texts)
        path = root / f"step-{step:08d}" / file
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)

    with patch.object(folders, "publish_folder", publish_damaged):
        yield
