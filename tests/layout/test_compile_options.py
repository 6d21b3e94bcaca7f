"""What blocks and the loss are compiled with, by the numbers that they compute in."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from layout_runs import run_with
from phalanx.families.registry import bind
from phalanx.layout.apply import apply_layout
from phalanx.layout.context_parallel.kernel_choice import AttentionChoice
from phalanx.layout.layout_model import LayoutModel
from phalanx.layout.mesh import ONE_RANK
from phalanx.layout.prepare_blocks import compile_blocks
from phalanx.layout.resolve import resolve_layout


@pytest.mark.parametrize("precision", ["fp64", "fp32", "bf16"])
def test_sums_of_64_bit_numbers_are_not_left_to_a_kernel_of_32(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_with({"training.compile": True, "model.n_layers": 2}, precision=precision, global_batch=1)
    given: list[Any] = []
    monkeypatch.setattr(nn.Module, "compile", lambda _block, options=None, **_: given.append(options))
    monkeypatch.setattr(torch, "compile", lambda _loss, options=None: given.append(options))
    apply_layout(
        bind(run, LayoutModel), resolve_layout(bind(run), 1), ONE_RANK, torch.device("cpu"), AttentionChoice("sdpa")
    )
    wanted = {"triton.mix_order_reduction": False} if precision == "fp64" else None
    assert given == [wanted] * 3


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.layer(x).relu()
        return result


@pytest.mark.parametrize(("shapes", "wanted"), [(1, [8, "any"]), (3, [8, 12, 20])])
def test_samples_of_several_shapes_have_a_program_each(
    shapes: int, wanted: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[object] = []

    def note(_self: object, graph: Any, inputs: list[Any]) -> Any:
        # A length that the program leaves open is an input of its own.
        (rows,) = [item for item in inputs if getattr(item, "ndim", 0) == 3]
        made.append("any" if any(isinstance(item, torch.SymInt | int) for item in inputs) else rows.shape[1])
        return graph.forward

    monkeypatch.setattr(torch._TorchCompileInductorWrapper, "__call__", note)
    torch._dynamo.reset()
    blocks = [_Block(), _Block()]
    compile_blocks(blocks, torch.float32, shapes)
    for length in (8, 12, 20, 8):
        for block in blocks:
            x = torch.randn(2, length, 4)
            torch.testing.assert_close(block(x), block.forward(x))
    assert made == wanted
