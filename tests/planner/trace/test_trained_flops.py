"""FLOPs of fine-tuning, by hand: a frozen matrix has no product for its gradient, an adapter has three of its own."""

from __future__ import annotations

from typing import Any

import pytest

from phalanx.config.load import parse_run
from phalanx.config.schema import Run
from phalanx.families.registry import bind
from phalanx.planner.trace.trained_flops import trained_flops_per_sample
from weather_cases import run_of

LAYERS, WIDTH, HIDDEN, LENGTH, WORDS = 3, 64, 160, 32, 512


def language_run(**training: Any) -> Run:
    run = parse_run(
        f"""
        model: {{family: language, n_layers: {LAYERS}, d_model: {WIDTH}, n_heads: 4, d_ff: {HIDDEN}, vocab_size: {WORDS},
                max_positions: {LENGTH}}}
        data: {{sources: [data/text], sequence_length: {LENGTH}}}
        layout: {{global_batch: 8}}
        training: {{steps: 10}}
        optimizer: {{lr: 0.001}}
        """,
        "run.yaml",
    )
    return run.model_copy(update={"training": run.training.model_validate(run.training.model_dump() | training)})


ATTENTION, MLP = 4 * WIDTH * WIDTH, 3 * WIDTH * HIDDEN
"""Elements of the matrices of a block."""


@pytest.mark.parametrize(
    ("frozen", "elements"),
    [
        (["blocks.*.mlp.*"], LAYERS * MLP),
        (["blocks.*.attention.*"], LAYERS * ATTENTION),
        (["blocks.*"], LAYERS * (ATTENTION + MLP)),
        (["head.*"], WORDS * WIDTH),
        # A table of rows is looked up: its gradient is no product.
        (["embedding.*"], 0),
        # Parts stand for all blocks: what is frozen in some of them only counts as trained.
        (["blocks.0.*"], 0),
    ],
)
def test_a_frozen_matrix_saves_one_product_of_three(frozen: list[str], elements: int) -> None:
    whole, some = (bind(language_run(**words)) for words in ({}, {"freeze": frozen}))
    assert trained_flops_per_sample(whole) == whole.flops_per_sample()
    saved = trained_flops_per_sample(whole) - trained_flops_per_sample(some)
    assert saved == pytest.approx(2 * LENGTH * elements)


def test_adapters_add_their_own_products() -> None:
    rank = 8
    run = bind(language_run(lora={"rank": rank, "matrices": ["blocks.*.mlp.*"]}))
    whole = bind(language_run())
    # The fused gate and up [2 h, d] and the matrix down [d, h], each with A and B, which are trained.
    adapters = LAYERS * rank * ((2 * HIDDEN + WIDTH) + (WIDTH + HIDDEN))
    frozen = LAYERS * (ATTENTION + MLP) + WORDS * WIDTH
    expected = whole.flops_per_sample() + LENGTH * (6 * adapters - 2 * frozen)
    assert trained_flops_per_sample(run) == pytest.approx(expected)


def test_forecasters_count_alike() -> None:
    run = run_of("climax", 1)
    frozen = run.model_copy(update={"training": run.training.model_copy(update={"freeze": ["blocks.*.mlp.*"]})})
    model = run.model
    saved = trained_flops_per_sample(bind(run)) - trained_flops_per_sample(bind(frozen))
    assert saved == pytest.approx(2 * model.n_tokens * model.n_layers * 2 * model.d_model * model.ff_size)
