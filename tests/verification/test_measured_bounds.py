"""Bounds below float64: measured on one rank for each tensor, and wider where a layout rounds the parts of a sum."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from distributed_ranks import run_ranks
from layout_cases import run_of
from phalanx.errors import PhalanxError
from phalanx.families.registry import bind
from phalanx.layout.mesh import Groups
from phalanx.layout.resolve import resolve_layout
from phalanx.verification.compare_records import compare_records
from phalanx.verification.error_bounds import ErrorBound, MeasuredBound, parts_of_sums
from phalanx.verification.family import VerifiableModel
from phalanx.verification.verify_run import Verdict, Verifier
from phalanx.verification.watch_modules import Rows
from whole_model import CPU

FORMULA = ErrorBound(torch.bfloat16, layers=4, targets=100)
NOISE = {("gradient", "quiet", 1): 1e-6, ("gradient", "noisy", 1): 0.1, ("loss", "", 1): 0.0}
LAYOUTS: tuple[dict[str, Any], ...] = (
    {"tp": 2, "recompute": "full"},
    {"pp": 2, "schedule": "zbv"},
)


def verifier_of(model: str, precision: str, **options: Any) -> Verifier:
    return Verifier(
        bind(run_of(model, 2, precision), VerifiableModel), CPU, **{"steps": 1, "activations": True, **options}
    )


def test_each_tensor_has_a_bound_of_its_own() -> None:
    router = "blocks.0.mlp.router"
    bound = MeasuredBound(FORMULA, {**NOISE, ("choices", router, 1): 0.01, ("choices", router, 2): 0.3})
    assert bound.of("gradient", "noisy", 1, 0.0) == pytest.approx(0.2)
    # Runs that agree by chance leave the rounding of the format.
    assert bound.of("gradient", "quiet", 1, 0.0) == pytest.approx(2 * 2**-9)
    assert bound.of("loss", "", 1, 0.0) == pytest.approx(2 * 2**-9 / 10)
    # Choices have their formula; products of 8-bit numbers round more than it knows.
    assert bound.of("choices", router, 1, 0.0) == FORMULA.choices(router, 1) > 0.02
    assert bound.of("choices", router, 2, 0.0) == pytest.approx(0.6)


def test_noise_counts_in_float32_where_it_is_above_the_formula() -> None:
    formula = ErrorBound(torch.float32, layers=4, targets=100)
    bound = MeasuredBound(formula, {("gradient", "quiet", 1): 1e-9, ("gradient", "noisy", 1): 0.1})
    assert bound.of("gradient", "quiet", 1, 0.0) == formula.gradient("quiet")
    assert bound.of("gradient", "noisy", 1, 0.0) == pytest.approx(0.2)


def test_rounding_the_parts_of_a_sum_widens_the_bound() -> None:
    model = bind(run_of("llama", 4, "bf16"))
    layouts = [{"dp_shard": 4}, {"tp": 2, "dp_shard": 2}, {"tp": 2, "cp": 2}, {"pp": 2, "dp_replicate": 2}]
    parts = [parts_of_sums(resolve_layout(bind(run_of("llama", 4, "bf16", **fields)), 4)) for fields in layouts]
    assert parts == [1, 2, 4, 1]
    assert parts_of_sums(resolve_layout(model, 1)) == 1
    ratio = MeasuredBound(FORMULA, NOISE, 4).of("gradient", "noisy", 1, 0.0) / 0.2
    assert ratio == pytest.approx(2.0)


def test_noise_is_that_of_the_format() -> None:
    """A narrower format is noisier by the ratio of its spacings; sums that cancel are noisier than others."""
    sixteen = {precision: verifier_of("gpt", precision).noise for precision in ("bf16", "fp16")}
    names = [key for key in sixteen["bf16"] if key[0] == "gradient"]
    ratios = [sixteen["bf16"][key] / sixteen["fp16"][key] for key in names]
    assert len(names) == 60 and 4.0 < sorted(ratios)[30] < 16.0
    noise = sixteen["bf16"]
    quiet, noisy = (
        noise["gradient", f"blocks.1.{name}", 1] for name in ("mlp.down.weight", "attention.query_norm.weight")
    )
    assert 2**-9 < quiet < noisy < 0.5
    assert not verifier_of("gpt", "fp64").noise


def test_what_overflows_on_one_rank_is_no_verdict() -> None:
    run = run_of("llama", 1, "fp16")
    model = bind(run.model_copy(update={"training": run.training.model_copy(update={"z_loss": 1e9})}), VerifiableModel)
    with pytest.raises(PhalanxError, match="not finite in fp16"):
        Verifier(model, CPU, steps=1, activations=False)


def test_rows_that_no_rank_computed_are_missed() -> None:
    verifier = verifier_of("llama", "fp64")
    reference = verifier.reference
    assert reference is not None

    def errors(seen: dict[str, list[Rows]]) -> dict[str, float]:
        mine = replace(reference, activations=seen)
        checks = compare_records(mine, reference, FORMULA, 4, None)
        return {check.name: check.error for check in checks if check.what == "activations"}

    assert set(errors(reference.activations).values()) == {0.0}
    fewer = {**reference.activations, "blocks.1.mlp": reference.activations["blocks.1.mlp"][1:]}
    without = {name: rows for name, rows in reference.activations.items() if name != "blocks.2"}
    assert [name for name, error in errors(fewer).items() if error == math.inf] == ["blocks.1.mlp"]
    assert [name for name, error in errors(without).items() if error == math.inf] == ["blocks.2"]


def test_a_gradient_that_cancels_is_measured_by_its_module() -> None:
    verifier = verifier_of("gpt", "fp64")
    reference = verifier.reference
    assert reference is not None
    names = "blocks.0.mlp.down.bias", "blocks.0.mlp.down.weight"
    step = reference.steps[0]

    def with_bias(value: float) -> Any:
        place = step.gradients[names[0]]
        changed = {**step.gradients, names[0]: place._replace(local=torch.full_like(place.local, value))}
        return replace(reference, steps=[replace(step, gradients=changed)])

    def error(mine: float, wanted: float) -> float:
        checks = compare_records(with_bias(mine), with_bias(wanted), FORMULA, 4, None)
        return next(check.error for check in checks if (check.what, check.name) == ("gradient", names[0]))

    scale = float(step.gradients[names[1]].local.norm())
    assert error(1e-17, 0.0) == pytest.approx(1e-17 * 32**0.5 / scale)
    # What is formed of nothing but should be there is as wrong as ever, and so is a small gradient that is off by itself.
    assert error(1.0, 0.0) > 1.0
    assert error(0.0, 1e-4) == pytest.approx(1.0)


def test_checks_follow_the_computation() -> None:
    verifier = verifier_of("llama", "fp64")
    verdict = verifier.verify(resolve_layout(bind(run_of("llama", 1, "fp64")), 1))
    order = [(check.what, check.name) for check in verdict.checks]
    inner = ["attention_norm", "attention", "mlp_norm", "mlp"]
    forward = ["embedding", *(f"blocks.{n}{name}" for n in range(4) for name in [*(f".{x}" for x in inner), ""])]
    assert [name for what, name in order if what == "activations"] == forward
    back = [name for what, name in order if what == "input gradient"]
    assert back == [
        "head",
        *(f"blocks.{n}{name}" for n in (3, 2, 1, 0) for name in [*(f".{x}" for x in inner[::-1]), ""]),
    ]
    start = order.index(("gradient", "blocks.3.mlp.down.weight"))
    assert order[start : start + 5] == [
        ("gradient", "blocks.3.mlp.down.weight"),
        ("gradient", "blocks.3.mlp.gate_up.weight"),
        ("input gradient", "blocks.3.mlp"),
        ("gradient", "blocks.3.mlp_norm.weight"),
        ("input gradient", "blocks.3.mlp_norm"),
    ]


def verify_in_fp16() -> list[Verdict]:
    """On one of two ranks: verdicts with the loss scaled."""
    groups: Groups = {}
    verifier = verifier_of("llama", "fp16", steps=2, groups=groups)
    layouts = [resolve_layout(bind(run_of("llama", 2, "fp16", **fields)), 2) for fields in LAYOUTS]
    return [verifier.verify(layout) for layout in layouts]


def test_layouts_pass_in_fp16() -> None:
    verdicts = run_ranks(verify_in_fp16, 2, timeout_s=300.0)[0]
    for verdict in verdicts:
        assert verdict.passed, f"{verdict.layout}: {verdict.first}"
        kinds = {check.what for check in verdict.checks}
        assert kinds == {"activations", "loss", "gradient", "input gradient", "gradient norm", "update"}
        # float16 has 8 times the digits of bfloat16: a bound that let a per cent pass would find little.
        assert sorted(check.bound for check in verdict.checks)[len(verdict.checks) // 2] < 0.01
