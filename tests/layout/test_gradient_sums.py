"""Weight gradients of micro-batches that are summed inside the products that form them: what autograd sums, to the bit.

On the CPU a product adds nothing by itself: it is rounded as ever and added, so that both ways give the same numbers.
"""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from distributed_ranks import run_ranks
from layout_runs import Fields, run_with
from phalanx.families.registry import bind
from phalanx.kernels.parts_sum import add_weight_gradient
from phalanx.layout.apply import ParallelModel
from phalanx.layout.execute import Executor
from phalanx.layout.layout_model import Stage
from phalanx.layout.mesh import Groups
from phalanx.layout.resolve import resolve_layout
from phalanx.nn.layers import Linear
from phalanx.torch_compat import common as compat
from whole_model import backward, gradients_of, laid_out

LINEAR_WEIGHTS = 4 * 4
"""Of the small model: four in each of four blocks."""
ONE_RANK: dict[str, Fields] = {
    "plain": {},
    "selective": {"layout.recompute": "selective"},
    "full": {"layout.recompute": "full"},
    "offloaded": {"layout.recompute": "full", "layout.offload_activations": True},
    "biases": {"model.mlp": "gelu", "model.norm": "layernorm", "model.bias": True},
    "compiled": {"training.compile": True},
    "compiled, selective": {"training.compile": True, "layout.recompute": "selective"},
    "compiled, full": {"training.compile": True, "layout.recompute": "full"},
}
FOUR_RANKS: dict[str, Fields] = {
    "replicas": {"dp_replicate": 4, "zero": 0},
    "zero 1": {"dp_shard": 4, "zero": 1},
    "1f1b": {"pp": 4},
    "1f1b, shards": {"pp": 2, "dp_shard": 2},
    "exchanges beside products": {"tp": 2, "dp_replicate": 2, "zero": 0, "peer_copies": True},
}
APART: dict[str, Fields] = {
    "reduced each time": {"dp_shard": 4, "zero": 2},
    "one micro-batch": {"dp_shard": 4, "zero": 1, "microbatch": 4},
    "interleaved": {"pp": 2, "tp": 2, "schedule": "interleaved_1f1b"},
    "gpipe": {"pp": 2, "dp_shard": 2, "zero": 1, "schedule": "gpipe"},
    "as many micro-batches as stages": {"pp": 4, "microbatch": 4},
    "two passes": {"pp": 2, "dp_replicate": 2, "zero": 0, "schedule": "interleaved_zero_bubble"},
}
"""Layouts whose weight gradients autograd gets one by one."""


def gradients_both_ways(run: Any, world: int, made: Groups | None) -> tuple[dict[str, Tensor], dict[str, Tensor], int]:
    """This rank's gradients of a step as autograd sums them and as products do, and the sums that products made."""
    found, calls = [], []

    def counted(total: Tensor | None, a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
        # The head begins a sum of its own in each micro-batch, over chunks of tokens, of which there is one here.
        if total is not None:
            calls.append(total.shape)
        return add_matmul(total, a, b, dtype)

    add_matmul = compat.add_matmul
    for begins in (False, True):
        applied = laid_out(run, resolve_layout(bind(run), world), made)
        # Options of the compiler are for accelerators; what is asked here is how graphs are traced and split.
        with (
            patch.object(ParallelModel, "begin_sums", ParallelModel.begin_sums if begins else lambda _: None),
            patch.object(compat, "compile_options", lambda _: {}),
            patch.object(compat, "add_matmul", counted),
        ):
            backward(run, applied)
        found.append({name: part[2] for name, part in gradients_of(applied).items()})
        for stage in applied.stages:
            assert all(layer.gradient_sum is None for layer in stage.modules() if isinstance(layer, Linear))
    return found[0], found[1], len(calls)


def require_equal(autograd: dict[str, Tensor], products: dict[str, Tensor]) -> None:
    assert autograd.keys() == products.keys()
    assert autograd
    for name, gradient in products.items():
        assert gradient.dtype == torch.float32
        assert torch.equal(gradient, autograd[name]), name


@pytest.mark.parametrize("way", ONE_RANK)
def test_one_rank_sums_as_autograd_does(way: str) -> None:
    layout = {name.removeprefix("layout."): value for name, value in ONE_RANK[way].items() if "layout." in name}
    others = {name: value for name, value in ONE_RANK[way].items() if "layout." not in name}
    run = run_with(others, precision="bf16", global_batch=6, microbatch=2, dp_shard=1, **layout)
    autograd, products, count = gradients_both_ways(run, 1, None)
    require_equal(autograd, products)
    assert count == 3 * LINEAR_WEIGHTS


def layouts_both_ways() -> dict[str, tuple[dict[str, Tensor], dict[str, Tensor], int]]:
    groups: Groups = {}
    return {
        name: gradients_both_ways(
            run_with({}, **{"precision": "bf16", "global_batch": 16, "microbatch": 1, **words}), 4, groups
        )
        for name, words in (FOUR_RANKS | APART).items()
    }


@pytest.fixture(scope="module")
def by_layout() -> list[dict[str, tuple[dict[str, Tensor], dict[str, Tensor], int]]]:
    return run_ranks(layouts_both_ways, 4, timeout_s=300.0)


@pytest.mark.parametrize("name", FOUR_RANKS)
def test_layouts_sum_as_autograd_does(name: str, by_layout: list[Any]) -> None:
    for found in by_layout:
        autograd, products, count = found[name]
        require_equal(autograd, products)
        samples, blocks = 16 // FOUR_RANKS[name].get("dp_replicate", FOUR_RANKS[name].get("dp_shard", 1)), 4
        assert count == samples * 4 * blocks // FOUR_RANKS[name].get("pp", 1)


@pytest.mark.parametrize("name", APART)
def test_gradients_that_nobody_sums_over_micro_batches_come_one_by_one(name: str, by_layout: list[Any]) -> None:
    for found in by_layout:
        autograd, products, count = found[name]
        require_equal(autograd, products)
        assert count == 0


def sums_after_a_failure(words: Fields) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """This rank's gradients of a step, and of one whose second micro-batch failed before and was done again."""
    run = run_with({}, **{"global_batch": 8, "microbatch": 1, **words})
    groups: Groups = {}
    passes, begun, found = Stage.training_passes, [], []

    def failing(*arguments: Any) -> Any:
        begun.append(True)
        if len(begun) == 2:
            raise MemoryError
        return passes(*arguments)

    for fails in (False, True):
        applied = laid_out(run, resolve_layout(bind(run), 2), groups)
        if fails:
            with patch.object(Stage, "training_passes", failing), pytest.raises(MemoryError):
                backward(run, applied)
            Executor(applied).discard_gradients()
        backward(run, applied)
        found.append({name: part[2] for name, part in gradients_of(applied).items()})
    return found[0], found[1]


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("words", [{"dp_shard": 2, "zero": 1}, {"tp": 2, "dp_shard": 1}])
def test_a_failed_step_leaves_no_sums(words: Fields, precision: str) -> None:
    for clean, again in run_ranks(sums_after_a_failure, 2, {**words, "precision": precision}):
        assert clean.keys() == again.keys()
        assert all(torch.equal(again[name], gradient) for name, gradient in clean.items())


def test_graphs_of_several_micro_batches_add_to_one_sum() -> None:
    total, x, grad = torch.ones(3, 2), torch.randn(5, 2).bfloat16(), torch.randn(5, 3).bfloat16()
    add_weight_gradient(total, grad, x)
    add_weight_gradient(total, grad, x)
    assert torch.equal(total, 1.0 + (grad.t() @ x).float() + (grad.t() @ x).float())
    # Autograd would refuse a graph that keeps what has changed.
    assert total._version == 0
