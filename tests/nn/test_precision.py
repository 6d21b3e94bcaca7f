"""Precisions as objects: a recipe that brings its own linear product reaches every linear layer, split or whole."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from distributed_ranks import run_ranks
from layout_runs import run_with
from phalanx.families.registry import bind
from phalanx.layout.mesh import ONE_RANK
from phalanx.layout.spec import ResolvedLayout
from phalanx.nn.layers import Linear
from phalanx.nn.precision import PRECISIONS
from phalanx.training.step import build_step
from whole_model import laid_out, samples_of

CPU = torch.device("cpu")
TWO_RANKS = ResolvedLayout(8, tp=2)


class CountedProduct:
    """The plain product, counting how often it is asked for."""

    def __init__(self) -> None:
        self.calls = 0

    def of_layer(self, *_: Any) -> CountedProduct:
        return self

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None, held: None = None) -> Tensor:
        assert x.dtype == weight.dtype
        self.calls += 1
        return F.linear(x, weight, bias)


def train_with(product: CountedProduct | None, layout: ResolvedLayout) -> tuple[float, int]:
    """Loss of the second step, and the number of linear layers on this rank."""
    run = run_with({}, precision="fp64", global_batch=8)
    before = PRECISIONS["fp64"]
    PRECISIONS["fp64"] = replace(before, products=product)
    try:
        applied = laid_out(run, layout)
        step = build_step(bind(run), applied, CPU)
        losses = [step.run(number, samples_of(run, applied.layout, applied.mesh)).loss for number in (1, 2)]
    finally:
        PRECISIONS["fp64"] = before
    layers = [m for stage in applied.stages for m in stage.part.modules() if isinstance(m, Linear)]
    return losses[1], len(layers)


def compare_products(layout: ResolvedLayout) -> dict[str, Any]:
    counted = CountedProduct()
    plain, _ = train_with(None, layout)
    loss, layers = train_with(counted, layout)
    return {"plain": plain, "loss": loss, "layers": layers, "calls": counted.calls}


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_product_of_the_precision_reaches_every_linear_layer(ranks: int) -> None:
    found = [compare_products(ResolvedLayout(8))] if ranks == 1 else run_ranks(compare_products, 2, TWO_RANKS)
    for rank in found:
        microbatches = rank["calls"] / (2 * rank["layers"])
        assert rank["layers"] > 0 and microbatches >= 1 and microbatches.is_integer()
        assert rank["loss"] == pytest.approx(rank["plain"], rel=1e-12)


def test_layers_of_the_named_precisions_multiply_plainly() -> None:
    applied = laid_out(run_with({}, precision="fp32", global_batch=8), ResolvedLayout(8))
    assert applied.mesh is ONE_RANK
    layers = [m for stage in applied.stages for m in stage.part.modules() if isinstance(m, Linear)]
    assert layers and all(layer.multiply is None for layer in layers)
