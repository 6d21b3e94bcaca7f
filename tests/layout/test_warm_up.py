"""Pipeline ranks run their stages once by themselves, so as to compile at the same time: nothing of it may remain."""

from __future__ import annotations

from dataclasses import replace
from unittest.mock import patch

import torch
from torch import Tensor

from distributed_ranks import run_ranks
from layout_runs import run_with
from phalanx.families.registry import bind
from phalanx.layout.mesh import Groups
from phalanx.layout.pipeline import Pipeline
from phalanx.layout.resolve import resolve_layout
from whole_model import backward, gradients_of, laid_out

LAYOUTS = [
    {"pp": 2, "dp_shard": 2, "global_batch": 8},
    {"pp": 2, "tp": 2, "schedule": "interleaved_1f1b", "global_batch": 8},
    {"pp": 2, "dp_shard": 2, "zero": 1, "global_batch": 8},
]


def gradients_cold_and_warm() -> list[tuple[int, list[Tensor], list[Tensor], Tensor, Tensor]]:
    """For each layout: warm-ups, then gradients and losses without one and with one, on this rank."""
    found = []
    groups: Groups = {}
    for words in LAYOUTS:
        run = run_with({"model.dropout": 0.1}, precision="bf16", microbatch=1, **words)
        applied = laid_out(run, resolve_layout(bind(run), 4), groups)
        cold_loss = backward(run, applied)
        cold = [part[2] for part in gradients_of(applied).values()]
        for parameter in applied.parameters.values():
            parameter.grad = None
        with patch.object(Pipeline, "warm_up", autospec=True, side_effect=Pipeline.warm_up) as counted:
            warm_loss = backward(run, replace(applied, compiled=True))
        warm = [part[2] for part in gradients_of(applied).values()]
        found.append((counted.call_count, cold, warm, cold_loss, warm_loss))
    return found


def test_a_warm_up_leaves_loss_and_gradients_alone() -> None:
    for rank in run_ranks(gradients_cold_and_warm, 4):
        for warm_ups, cold, warm, cold_loss, warm_loss in rank:
            assert warm_ups == 1
            assert torch.equal(cold_loss, warm_loss)
            assert len(cold) == len(warm) > 0
            assert all(torch.equal(a, b) for a, b in zip(cold, warm, strict=True))
