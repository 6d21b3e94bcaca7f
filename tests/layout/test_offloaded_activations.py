"""Activations in host memory: the same bits, copies that are waited for, and what leaves the device at all."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from phalanx.copy_stream import Copies, CopyStream
from phalanx.layout import offloaded_activations
from phalanx.layout.offloaded_activations import OffloadedActivations, offload_blocks
from phalanx.layout.prepare_blocks import recompute_block
from phalanx.layout.spec import Recompute
from small_models import FAMILIES, random_decoder, random_tokens
from whole_model import CPU

Results = list[Tensor]
LAYERS = 4


@pytest.fixture(autouse=True)
def all_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let tensors of small models leave too."""
    monkeypatch.setattr(offloaded_activations, "SMALLEST_BYTES", 512)


class LateStream(CopyStream):
    """A stream whose copies are made when something waits for them, as late as a device may make them."""

    def __init__(self) -> None:
        super().__init__(CPU)
        self.waiting: list[tuple[Tensor, Tensor]] = []
        """Where to, and where from."""
        self.copied = 0
        """Bytes copied in all."""

    @contextmanager
    def behind_present(self) -> Iterator[Copies]:
        """Keep the copies that are asked for inside; what they are made to holds nothing good until then."""
        with _Deferred(self):
            yield Copies()

    def hold_present(self) -> None:
        """Make all copies so far."""
        for to, source in self.waiting:
            to.copy_(source)
        self.waiting.clear()


class _Deferred(TorchDispatchMode):
    """Puts copies off."""

    def __init__(self, stream: LateStream) -> None:
        super().__init__()
        self.stream = stream

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.ops.aten.copy_.default:
            return func(*args, **(kwargs or {}))
        to, source = args[:2]
        # What is still to be read by an earlier copy may be overwritten behind it: copies of a stream follow each other.
        if not any(to.data_ptr() == source.data_ptr() for _, source in self.stream.waiting):
            # No number in any floating-point format.
            to.fill_(0xFF)
        self.stream.copied += source.nbytes
        self.stream.waiting.append((to, source))
        return to


def results(
    family: str, *, offloaded: bool, recompute: Recompute = "none", compiled: bool = False, passes: int = 1
) -> tuple[Results, OffloadedActivations, LateStream]:
    """Losses and gradients of two micro-batches, whose forward passes may both come first, as in a pipeline."""
    decoder = random_decoder(FAMILIES[family].model_copy(update={"n_layers": LAYERS}))
    activations, stream = OffloadedActivations(CPU), LateStream()
    activations.copies = stream
    for block in decoder.blocks:
        recompute_block(block, recompute)
        if compiled:
            block.compile(backend="aot_eager")
    if offloaded:
        offload_blocks(list(decoder.blocks), activations, held_input=False)
    found: Results = []
    for turn in range(2):
        losses = [
            decoder(random_tokens(2, 32, seed=turn + at), random_tokens(2, 32, seed=2)).total for at in range(passes)
        ]
        found += [loss.detach() for loss in losses]
        for loss in losses:
            loss.backward()
    gradients = [p.grad for p in decoder.parameters()]
    assert all(gradient is not None for gradient in gradients)
    return [*found, *(g for g in gradients if g is not None)], activations, stream


@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_activations_in_host_memory_give_the_same_bits(family: str, recompute: Recompute, passes: int) -> None:
    found, _, stream = results(family, offloaded=True, recompute=recompute, passes=passes)
    wanted, *_ = results(family, offloaded=False, recompute=recompute, passes=passes)
    assert len(found) == len(wanted) and stream.copied
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    assert not stream.waiting


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_compiled_blocks_give_the_same_bits(recompute: Recompute) -> None:
    found, _, stream = results("llama", offloaded=True, recompute=recompute, compiled=True)
    wanted, *_ = results("llama", offloaded=False, recompute=recompute, compiled=True)
    assert stream.copied
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
