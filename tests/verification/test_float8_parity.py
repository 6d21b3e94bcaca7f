"""8-bit recipes give one rank's numbers in every layout: scales are those of whole tensors, rows and blocks.

In 64-bit activations nothing but the scales can differ between layouts: every product has the same 8-bit operands, so that
results agree to the last digits, and a scale that is found from a part alone shows.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from distributed_ranks import run_ranks
from layout_cases import SIZE
from phalanx.config.model import LanguageModel
from phalanx.families.language.config import LanguageRun
from phalanx.families.registry import bind
from phalanx.kernels import grouped_products
from phalanx.layout.mesh import Groups
from phalanx.layout.spec import ResolvedLayout
from phalanx.nn import float8_linear
from phalanx.nn.float8_linear import Float8Recipe, Operand
from phalanx.nn.precision import PRECISIONS
from phalanx.torch_compat import common as compat
from phalanx.verification.family import VerifiableModel
from phalanx.verification.verify_run import Verdict, Verifier

CPU = torch.device("cpu")
RECIPES = {
    "tensor": Float8Recipe("tensor"),
    "row": Float8Recipe("row", wide_gradients=True),
    "block": Float8Recipe("block"),
}
LAYOUTS = {
    "tp=2 dp_shard=2": ResolvedLayout(4, 1, tp=2, dp_shard=2, zero=3),
    "tp=2 pp=2": ResolvedLayout(4, 1, tp=2, pp=2),
    "dp_shard=4, full recompute": ResolvedLayout(
        4, 1, dp_shard=4, zero=3, reshard_after_forward=True, recompute="full"
    ),
    "tp=4": ResolvedLayout(4, 1, tp=4),
    "dp_shard=4, once a step": ResolvedLayout(4, 1, dp_shard=4, zero=1),
}
EIGHT_RANKS = {
    "tp=2 pp=2 dp_shard=2": ResolvedLayout(4, 1, tp=2, pp=2, dp_shard=2, zero=3, reshard_after_forward=True),
    "tp=4 dp_shard=2": ResolvedLayout(4, 1, tp=4, dp_shard=2, zero=2),
    "dp_replicate=4 pp=2": ResolvedLayout(4, 1, dp_replicate=4, pp=2, zero=0, schedule="gpipe"),
}

TRIED = {
    "tensor": tuple(LAYOUTS),
    "row": ("tp=2 dp_shard=2",),
    "block": ("tp=2 dp_shard=2", "dp_shard=4, once a step"),
}
"""The layouts of each recipe; blocks are too long for four ranks of tp."""


def small_run(precision: str = "fp64") -> LanguageRun:
    """Features of heads and MLP are 128 and more on each of two ranks; initial weights are large, so that sizes differ."""
    model = {**SIZE, "n_layers": 2, "d_model": 64, "head_dim": 32, "n_kv_heads": 4, "d_ff": 256, "init_std": 0.3}
    return LanguageRun.model_validate(
        {
            "model": model,
            "data": {"sources": ["nowhere"], "sequence_length": 16},
            "layout": {"global_batch": 4, "microbatch": 1, "precision": precision},
            "optimizer": {"lr": 0.01, "eps": 1e-3, "schedule": "constant"},
            "training": {"steps": 1},
        }
    )


@contextmanager
def wide(recipe: Float8Recipe) -> Iterator[None]:
    """Let fp64 multiply by `recipe`."""
    before = PRECISIONS["fp64"]
    PRECISIONS["fp64"] = replace(before, products=recipe)
    try:
        yield
    finally:
        PRECISIONS["fp64"] = before


def keep_own_amax() -> Any:
    return patch.object(float8_linear, "_agree", lambda amax, group: amax)


def take_a_neighbours_scale() -> Any:
    right = float8_linear.quantise_both

    def wrong(x: Tensor, *arguments: Any, **named: Any) -> tuple[Operand, Operand]:
        rows, columns = right(x, *arguments, **named)
        group = named.get("column_group", "")
        if not group:
            return rows, columns
        world = torch.distributed.get_world_size(compat.process_group(group))
        ranks = compat.all_gather(x.detach().abs().amax().view(1), group, world).amax(1)
        mine = float8_linear.power_of_two_scale(ranks, torch.float8_e4m3fn)
        place = torch.distributed.get_rank(compat.process_group(group))
        return Operand(rows.q, rows.scale * mine[place - 1] / mine[place]), columns

    return patch.object(float8_linear, "quantise_both", wrong)


def agree_along_the_other_dim() -> Any:
    right = float8_linear.quantise_both

    def wrong(*arguments: Any, row_group: str = "", column_group: str = "", **named: Any) -> tuple[Operand, Operand]:
        return right(*arguments, row_group=column_group, column_group=row_group, **named)

    return patch.object(float8_linear, "quantise_both", wrong)


MISTAKES = {
    "own amax": ("tensor", keep_own_amax),
    "own amax of rows": ("row", keep_own_amax),
    "a neighbour's scale": ("tensor", take_a_neighbours_scale),
    "scales of rows for those of columns": ("row", agree_along_the_other_dim),
}


def verify_recipes() -> dict[tuple[str, str], Verdict]:
    """On one of the ranks: verdicts by recipe and layout, or by recipe and mistake."""
    model, groups = bind(small_run(), VerifiableModel), Groups()
    found = {}
    for name, recipe in RECIPES.items():
        with wide(recipe):
            verifier = Verifier(model, CPU, steps=1, activations=True, groups=groups)
            for words in TRIED[name]:
                found[name, words] = verifier.verify(LAYOUTS[words])
            for words, (of, plant) in MISTAKES.items():
                if of == name:
                    with plant():
                        found[name, words] = verifier.verify(LAYOUTS["tp=2 dp_shard=2"])
    verifier = Verifier(bind(small_run("fp8-tensor"), VerifiableModel), CPU, steps=1, activations=True, groups=groups)
    found["bf16", "right"] = verifier.verify(LAYOUTS["tp=2 dp_shard=2"])
    with take_a_neighbours_scale():
        found["bf16", "wrong"] = verifier.verify(LAYOUTS["tp=2 dp_shard=2"])
    return found


def verify_on_eight() -> dict[str, Verdict]:
    """On one of the ranks: verdicts by layout, of the recipe with a scale for each row and each column."""
    with wide(RECIPES["row"]):
        verifier = Verifier(bind(small_run(), VerifiableModel), CPU, steps=1, activations=True)
        return {words: verifier.verify(layout) for words, layout in EIGHT_RANKS.items()}


@pytest.fixture(scope="module")
def verdicts() -> dict[tuple[str, str], Verdict]:
    found: dict[tuple[str, str], Verdict] = run_ranks(verify_recipes, 4, timeout_s=240.0)[0]
    return found


def test_layouts_compute_what_one_rank_computes(verdicts: dict[tuple[str, str], Verdict]) -> None:
    right = {key: verdict for key, verdict in verdicts.items() if key[1] in LAYOUTS}
    assert len(right) == sum(map(len, TRIED.values()))
    failed = [f"{key}: {verdict.first}" for key, verdict in right.items() if not verdict.passed]
    assert not failed, "\n".join(failed)


def test_layouts_of_eight_ranks_compute_what_one_rank_computes() -> None:
    verdicts: dict[str, Verdict] = run_ranks(verify_on_eight, 8, timeout_s=240.0)[0]
    failed = [f"{words}: {verdict.first}" for words, verdict in verdicts.items() if not verdict.passed]
    assert len(verdicts) == len(EIGHT_RANKS) and not failed, "\n".join(failed)


SUMMED_OVER_ROWS = ("gradient", "gradient norm", "parameter")
"""Kinds of checks of what sums over the rows of an expert, which on several ranks are those of several micro-batches."""


def verify_experts(layouts: list[ResolvedLayout], *, shared: bool) -> list[Verdict]:
    """On one of the ranks: verdicts on layouts of a mixture. shared: let all rows of an expert share scales, wrongly."""
    model = {**SIZE, "n_layers": 2, "n_kv_heads": 4, "experts": {"count": 4, "active": 2, "d_ff": 32}}
    run = small_run().model_copy(update={"model": LanguageModel.model_validate(model)})
    quantise_rows = share_scales if shared else grouped_products.quantise_rows
    with wide(Float8Recipe("row", experts=True)), patch.object(grouped_products, "quantise_rows", quantise_rows):
        verifier = Verifier(bind(run, VerifiableModel), CPU, steps=1, activations=True)
        return [verifier.verify(layout) for layout in layouts]


def share_scales(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    scale = float8_linear.power_of_two_scale(x.abs().amax().view(1), dtype)
    return float8_linear.quantise(x, scale, scale, dtype, True, False)[0], scale.expand(len(x))


@pytest.mark.parametrize(
    "layouts",
    [
        [ResolvedLayout(4, 1, dp_shard=2, zero=3, ep=2)],
        [ResolvedLayout(4, 1, tp=2, dp_shard=2, zero=1, ep=4), ResolvedLayout(4, 1, dp_shard=4, zero=3, ep=2)],
    ],
    ids=["2 ranks", "4 ranks"],
)
def test_experts_compute_what_one_rank_computes(layouts: list[ResolvedLayout]) -> None:
    def failed(verdict: Verdict) -> list[str]:
        # A number 2^14 times smaller than the largest of its column is rounded by a spacing that this sets.
        limits = dict.fromkeys(SUMMED_OVER_ROWS, 1e-4)
        return [str(check) for check in verdict.checks if check.error > limits.get(check.what, check.bound)]

    found: list[Verdict] = run_ranks(partial(verify_experts, shared=False), layouts[0].world_size, layouts)[0]
    assert [failed(verdict) for verdict in found] == [[] for _ in layouts]
    if len(layouts) == 1:
        (wrong,) = run_ranks(partial(verify_experts, shared=True), 2, layouts)[0]
        assert failed(wrong)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_scales_of_a_part_alone_are_found(mistake: str, verdicts: dict[tuple[str, str], Verdict]) -> None:
    verdict = verdicts[MISTAKES[mistake][0], mistake]
    assert not verdict.passed and verdict.first is not None
    assert verdict.first.error > 1e6 * verdict.first.bound, verdict.first


def test_activations_in_sixteen_bits_are_judged_by_measured_noise(verdicts: dict[tuple[str, str], Verdict]) -> None:
    right, wrong = verdicts["bf16", "right"], verdicts["bf16", "wrong"]
    assert right.passed, right.first
    assert "noise" in right.bound and not wrong.passed
