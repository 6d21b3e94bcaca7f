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
from phalanx.layout.resolve import resolve_layout


@pytest.mark.parametrize("precision", ["fp64", "fp32", "bf16"])
def test_sums_of_64_bit_numbers_are_not_left_to_a_kernel_of_32(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_with({"training.compile": True, "model.n_layers": 2}, precision=precision, global_batch=1)
    given: list[Any] = []
    monkeypatch.setattr(nn.Module, "compile", lambda _block, options=None: given.append(options))
    monkeypatch.setattr(torch, "compile", lambda _loss, options=None: given.append(options))
    apply_layout(
        bind(run, LayoutModel), resolve_layout(bind(run), 1), ONE_RANK, torch.device("cpu"), AttentionChoice("sdpa")
    )
    wanted = {"triton.mix_order_reduction": False} if precision == "fp64" else None
    assert given == [wanted] * 3
