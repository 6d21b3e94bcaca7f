"""Gradients that wait for the last micro-batch of a step are summed in float32, by whatever kernel, as PyTorch sums them."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from distributed_ranks import run_ranks
from layout_runs import run_with
from phalanx.families.registry import bind
from phalanx.kernels.parts_sum import add_gradient
from phalanx.layout.apply import apply_layout
from phalanx.layout.context_parallel.kernel_choice import AttentionChoice
from phalanx.layout.layout_model import LayoutModel
from phalanx.layout.mesh import Groups, build_mesh
from phalanx.layout.resolve import resolve_layout
from phalanx.torch_compat import fsdp as compat_fsdp
from whole_model import CPU, backward, parts_of

WAYS = ("PyTorch's", "small", "large")


def nothing(*_: object) -> None:
    """In place of what changes how FSDP2 sums."""


def gradients(
    words: dict[str, object], in_products: bool
) -> tuple[dict[str, dict[str, Tensor]], list[tuple[bool, torch.dtype]]]:
    """Gradients of this rank's shards after a step, summed in each of WAYS; and of what sums were made: whether begun, in
    which format the gradient was."""
    found, sums = {}, []
    groups: Groups = {}

    def noted(gradient: Tensor, total: Tensor | None, dtype: torch.dtype) -> Tensor:
        sums.append((total is None, gradient.dtype))
        return add_gradient(gradient, total, dtype)

    for way in WAYS:
        theirs = way == WAYS[0]
        with (
            patch.object(compat_fsdp, "accumulate_by", nothing if theirs else compat_fsdp.accumulate_by),
            patch.object(compat_fsdp, "begin_sums", nothing if theirs or not in_products else compat_fsdp.begin_sums),
            patch("phalanx.layout.data_parallel.fully_sharded.add_gradient", noted),
            patch("phalanx.kernels.parts_sum.LARGE", 1 if way == "large" else 1 << 20),
        ):
            run = run_with({}, **{"precision": "bf16", "global_batch": 8, "microbatch": 1, **words})
            layout = resolve_layout(bind(run), 2)
            applied = apply_layout(
                bind(run, LayoutModel), layout, build_mesh(layout, CPU, groups), CPU, AttentionChoice("sdpa")
            )
            backward(run, applied)
        parts = parts_of(((name, p.grad) for name, p in applied.parameters.items()), applied.splits)
        found[way] = {name: part[2] for name, part in parts.items()}
    return found, sums


@pytest.mark.parametrize("in_products", [False, True])
@pytest.mark.parametrize("words", [{"dp_shard": 2, "zero": 1}, {"dp_replicate": 2, "dp_shard": 1, "zero": 0}])
def test_sums_over_micro_batches_are_those_of_pytorch_to_the_bit(words: dict[str, object], in_products: bool) -> None:
    for found, sums in run_ranks(gradients, 2, words, in_products):
        begun = sum(first for first, _ in sums)
        # Four micro-batches: one begins each sum, three are added.
        assert begun > 0
        assert len(sums) == 4 * begun
        assert {dtype for _, dtype in sums} == {torch.bfloat16}
        for way in WAYS[1:]:
            assert found[way].keys() == found[WAYS[0]].keys()
            for name, grad in found[way].items():
                assert grad.dtype == torch.float32
                assert torch.equal(grad, found[WAYS[0]][name]), (way, name)
                # What bfloat16 sums would lose is there.
                assert not torch.equal(grad, grad.bfloat16().float()) or grad.numel() < 64, name
