"""Which shapes are timed: few, unlike one another, and no larger than the device's memory allows."""

from __future__ import annotations

import numpy as np
import pytest

from phalanx.hardware.calibrate.measured_sizes import ACCELERATOR, PROCESSOR, shapes_for, spread_points


def test_places_far_apart_are_chosen_first() -> None:
    assert spread_points([[0.0], [0.1], [10.0], [5.0], [9.9]], 3) == [0, 2, 3]


def test_equal_places_are_chosen_once() -> None:
    assert spread_points([[1.0, 2.0], [1.0, 2.0], [3.0, 2.0]], 5) == [0, 2]


@pytest.mark.parametrize("effort", [ACCELERATOR, PROCESSOR])
def test_products_and_attention_span_what_models_have(effort: object) -> None:
    assert effort in (ACCELERATOR, PROCESSOR)
    wanted = ACCELERATOR if effort is ACCELERATOR else PROCESSOR
    shapes = shapes_for(wanted, 1e11)
    assert len(shapes.products) == len(set(shapes.products)) == wanted.matmuls
    causal = [attention for attention in shapes.attentions if attention.causal]
    assert 1 <= len(shapes.singles) <= wanted.singles and 1 <= len(causal) <= wanted.attentions
    assert len(shapes.doubles) == wanted.doubles
    assert max(product.sizes.flops for product in shapes.doubles) <= 2**37
    assert len(shapes.attentions) - len(causal) == len(wanted.whole) > 0
    assert {product.order for product in shapes.products} == {"forward", "input", "weight"}
    flops = [product.sizes.flops for product in shapes.products]
    assert max(flops) > 50 * min(flops)
    assert all(not attention.backward for attention in shapes.attentions)


def test_products_fit_into_a_quarter_of_the_memory() -> None:
    shapes = shapes_for(ACCELERATOR, 2e9)
    sizes = [x.sizes for x in shapes.products]
    assert shapes.products
    assert max(4 * x.batch * (x.m * x.n + x.m * x.k + x.n * x.k) for x in sizes) < 5e8
    assert np.isfinite(sum(x.flops for x in sizes))
