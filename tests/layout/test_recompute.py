"""Recomputing activations changes no number: loss and gradients are equal to the bit."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from phalanx.config.model import LanguageModel
from phalanx.layout.prepare_blocks import recompute_block
from phalanx.layout.spec import Recompute
from phalanx.nn.layers import Linear, choose_products
from phalanx.nn.precision import PRECISIONS
from phalanx.torch_compat import common as compat
from small_models import FAMILIES, random_decoder, random_tokens


def loss_and_gradients(
    family: str, mode: Recompute, documents: torch.Tensor | None = None
) -> tuple[torch.Tensor, dict[str, torch.Tensor | None]]:
    decoder = random_decoder(FAMILIES[family])
    for block in decoder.blocks:
        recompute_block(block, mode)
    total = decoder(random_tokens(2, 32), random_tokens(2, 32, seed=2), document_ids_BS=documents).total
    total.backward()
    return total.detach(), {name: parameter.grad for name, parameter in decoder.named_parameters()}


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("mode", ["selective", "full"])
def test_gradients_are_equal_to_the_bit(mode: Recompute, family: str, packed: bool) -> None:
    documents = torch.tensor([[0] * 10 + [1] * 22, [0] * 32]) if packed else None
    plain_loss, plain = loss_and_gradients(family, "none", documents)
    loss, gradients = loss_and_gradients(family, mode, documents)
    assert torch.equal(loss, plain_loss)
    assert gradients.keys() == plain.keys()
    for name, gradient in gradients.items():
        assert gradient is not None and torch.equal(gradient, plain[name]), name


@pytest.mark.parametrize("mode", ["none", "selective", "full"])
def test_compiled_blocks_give_the_same_gradients(mode: Recompute) -> None:
    """As the compiler traces and splits them; its generated code is another matter."""
    _, plain = loss_and_gradients("llama", "none")
    decoder = random_decoder(FAMILIES["llama"])
    for block in decoder.blocks:
        recompute_block(block, mode)
        block.compile(backend="aot_eager")
    decoder(random_tokens(2, 32), random_tokens(2, 32, seed=2)).total.backward()
    for name, parameter in decoder.named_parameters():
        torch.testing.assert_close(parameter.grad, plain[compat.full_name(name)], msg=name)


class OperationCount(TorchDispatchMode):
    """Counts the operations that really run."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[operation.overloadpacket.__name__] += 1
        return operation(*args, **(kwargs or {}))


def operation_counts(model: LanguageModel, mode: Recompute) -> Counter[str]:
    decoder = random_decoder(model)
    recompute_block(decoder.blocks[0], mode)
    with OperationCount() as operations:
        decoder(random_tokens(2, 32), random_tokens(2, 32, seed=2)).total.backward()
    return operations.counts


@pytest.mark.parametrize(
    ("mode", "attention", "activations"),
    [("none", 1, 1), ("selective", 1, 2), ("full", 2, 2)],
)
@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_computed_twice(mode: Recompute, attention: int, activations: int, family: str) -> None:
    """One layer, forward and backward: how often attention, the MLP's activation and the matrix products run."""
    model = FAMILIES[family].model_copy(update={"n_layers": 1})
    counts = operation_counts(model, mode)
    assert counts["_scaled_dot_product_flash_attention_for_cpu"] == attention
    if model.mlp == "swiglu":
        # The backward pass of the gated product forms its activation again by itself, in every mode.
        assert counts["silu"] == counts["swiglu_backward"] == 1
    else:
        assert counts["gelu"] == activations
    plain = operation_counts(model, "none")
    repeated = counts["mm"] + counts["addmm"] - plain["mm"] - plain["addmm"]
    # Selective repeats the products that widen by more than half: the MLP's first, and queries, keys and values of these
    # models. Full repeats all but the last product of the layer, which no gradient needs.
    assert repeated == {"none": 0, "selective": 2, "full": 3}[mode]


def saved_bytes(precision: str | None, sums: bool) -> int:
    """Bytes that a compiled block keeps for its backward pass in a full recompute, beside what it is called with, its
    parameters and their sums."""
    decoder = random_decoder(FAMILIES["llama"]).bfloat16()
    block = decoder.blocks[0]
    if precision is not None:
        choose_products(block, PRECISIONS[precision], torch.device("cpu"))
    recompute_block(block, "full")
    block.compile(backend="aot_eager_decomp_partition")
    held = [*block.parameters()]
    for layer in block.modules():
        if sums and isinstance(layer, Linear):
            layer.gradient_sum = torch.zeros(layer.weight.shape)
            held.append(layer.gradient_sum)
    known = {compat.storage_key(tensor) for tensor in held}
    kept: dict[object, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept[compat.storage_key(tensor)] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        decoder(random_tokens(2, 32), random_tokens(2, 32, seed=2))
    return sum(size for key, size in kept.items() if key not in known)


def test_a_compiled_block_keeps_no_more_for_gradients_of_its_own() -> None:
    """Compilers may keep what is computed inside functions that bring their own backward pass."""
    plain = saved_bytes(None, sums=False)
    assert saved_bytes(None, sums=True) == plain
    assert saved_bytes("fp8-tensor", sums=False) == plain
