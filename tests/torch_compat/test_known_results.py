"""Results on fake tensors that are remembered are those that PyTorch works out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

from phalanx.torch_compat.fake import fake_tensors_everywhere
from phalanx.torch_compat.known_results import KnownResults

Operation = Callable[[Tensor, Tensor], Any]
OPERATIONS: dict[str, Operation] = {
    "sum": lambda x, _y: x.sum(0),
    "sum in another format": lambda x, _y: x.sum(dtype=torch.float64),
    "product": lambda x, y: x @ y.T,
    "integer added": lambda x, _y: x.to(torch.int32) + 1,
    "fraction added": lambda x, _y: x.to(torch.int32) + 1.0,
    "view": lambda x, _y: x.T,
    "view of a part": lambda x, _y: x[1:, 1:].unsqueeze(0),
    "view of a view": lambda x, _y: x[1:].T[1:],
    "several views": lambda x, _y: x.split([1, 2, 1]),
    "copy of a part": lambda x, _y: x[:, 1:].contiguous(),
    "changed in place": lambda x, y: x.mul_(y),
    "changed together": lambda x, y: torch._foreach_add_([x, y], 1.0),
    "several results": lambda x, _y: x.max(1),
    "norm and attention": lambda x, y: F.scaled_dot_product_attention(
        *(F.layer_norm(t, (6,))[None] for t in (x, y, y))
    ),
}


def described(value: Any, given: tuple[Tensor, ...]) -> list[Any]:
    """Shape, format and memory of all tensors: the argument that each is, and the one whose memory it shares."""
    found: list[Any] = []
    for tensor in tree_leaves(value):
        if not isinstance(tensor, Tensor):
            found.append(tensor)
            continue
        key = tensor.untyped_storage()._cdata
        same = [one is tensor for one in given]
        shared = [one.untyped_storage()._cdata == key for one in given]
        layout = (tuple(tensor.shape), tensor.stride(), tensor.storage_offset(), tensor.untyped_storage().nbytes())
        found.append((*layout, tensor.dtype, tensor.device, tensor.requires_grad, same, shared))
    return found


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_second_call_returns_what_pytorch_returns(name: str) -> None:
    expected, found = [], []
    for mode, results in ((FakeTensorMode(), expected), (fake_tensors_everywhere(), found)):
        with mode:
            for _ in range(3):
                given = (torch.ones(4, 6), torch.ones(4, 6))
                results.append(described(OPERATIONS[name](*given), given))
    assert found == expected and expected[0]


def test_gradients_flow_through_what_is_remembered() -> None:
    with fake_tensors_everywhere():
        weight = torch.ones(6, 4, requires_grad=True)
        for _ in range(2):
            x = torch.ones(3, 6, requires_grad=True)
            (x.view(3, 2, 3).transpose(1, 2).reshape(3, 6) @ weight).relu_().sum().backward()
            assert x.grad is not None and x.grad.shape == (3, 6)
        assert weight.grad is not None and weight.grad.shape == (6, 4)


def test_results_are_computed_once_for_shapes_formats_and_kinds_of_numbers() -> None:
    mode = FakeTensorMode()
    known, computed = KnownResults(mode), []

    def compute(func: Any, _types: Any, args: Any, keywords: Any) -> Any:
        computed.append(func)
        with mode:
            return func(*args, **keywords)

    def ask(func: Any, *args: Any, **keywords: Any) -> Any:
        return known.result(compute, func, (FakeTensor,), args, keywords)

    aten = torch.ops.aten
    with mode:
        x, narrow, constant = torch.empty(4, 6), torch.empty(4, 6, dtype=torch.bfloat16), torch.tensor(2.0)
    for repetition in range(2):
        for tensor in (x, narrow, x[:3], x.T):
            assert ask(aten.add.Tensor, tensor, 1).shape == tensor.shape
        assert ask(aten.add.Tensor, x, 1.0).dtype == torch.float32
        assert ask(aten.sum.default, x, dtype=torch.float64).dtype == torch.float64
        assert ask(torch.ops._c10d_functional.all_gather_into_tensor.default, x, 2, "ranks").shape == (8, 6)
        assert len(computed) == 7, repetition
    for _ in range(2):
        # What depends on values, is written to an argument by name, or changes a shape is worked out each time.
        ask(aten.mul.Tensor, constant, 2.0)
        ask(aten.add.out, x, x, out=x)
        ask(aten.squeeze_.default, x)
    assert computed[7:] == [aten.mul.Tensor, aten.add.out, aten.squeeze_.default] * 2
