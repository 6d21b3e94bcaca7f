"""The published implementation's defects, put back one by one: each must make verification fail, and show where it sits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from distributed_ranks import run_ranks
from phalanx.counter_random import DropoutContext
from phalanx.families.registry import bind
from phalanx.families.weather.layout import WeatherStage
from phalanx.layout.execute import Executor
from phalanx.layout.mesh import Groups
from phalanx.layout.resolve import resolve_layout
from phalanx.layout.tensor_parallel.split_layers import RowLinear
from phalanx.verification.family import VerifiableModel
from phalanx.verification.verify_run import Verdict, Verifier
from weather_cases import run_of

Mutation = Callable[[], Any]


def add_the_bias_once_a_rank() -> Any:
    right = RowLinear.forward

    def wrong(self: RowLinear, x: Tensor) -> Tensor:
        extra = 0.0 if self.bias is None else self.bias.to(x.dtype) * (self.tp.size - 1)
        return right(self, x) + extra

    return patch.object(RowLinear, "forward", wrong)


def leave_out_the_norms_of_queries_and_keys() -> Any:
    right = Executor._sum_gradients

    def wrong(self: Executor) -> None:
        norms = {n: p for n, p in self.applied.parameters.items() if "query_norm" in n or "key_norm" in n}
        kept = {name: parameter.grad.clone() for name, parameter in norms.items() if parameter.grad is not None}
        right(self)
        for name, grad in kept.items():
            norms[name].grad = grad

    return patch.object(Executor, "_sum_gradients", wrong)


def drop_alike_on_all_data_ranks() -> Any:
    right = DropoutContext.of_step.__func__  # type: ignore[attr-defined]

    def wrong(cls: Any, seed: int, step: int, samples: Tensor, positions: Tensor, width: int) -> DropoutContext:
        return right(cls, seed, step, torch.arange(len(samples)), positions, width)

    return patch.object(DropoutContext, "of_step", classmethod(wrong))


def drop_alike_on_all_tensor_ranks() -> Any:
    right = DropoutContext.of_step.__func__  # type: ignore[attr-defined]

    def wrong(cls: Any, seed: int, step: int, samples: Tensor, positions: Tensor, width: int) -> DropoutContext:
        return right(cls, seed, step, samples, torch.arange(len(positions)), width)

    return patch.object(DropoutContext, "of_step", classmethod(wrong))


def take_a_part_of_the_loss_for_the_whole() -> Any:
    return patch.object(WeatherStage, "loss_is_whole", True)


MUTATIONS: dict[str, tuple[Mutation, dict[str, int], str, str]] = {
    # name: (mistake, layout, what fails first, in which module)
    "bias once a rank": (add_the_bias_once_a_rank, {"tp": 2}, "activations", "embedding"),
    "q/k norms not summed": (leave_out_the_norms_of_queries_and_keys, {"tp": 2}, "gradient", "blocks.3.attention"),
    "one mask a data rank": (drop_alike_on_all_data_ranks, {"dp_shard": 2}, "activations", "embedding"),
    "one mask a tensor rank": (drop_alike_on_all_tensor_ranks, {"tp": 2}, "activations", "embedding"),
    "loss of half the globe": (take_a_part_of_the_loss_for_the_whole, {"tp": 2}, "loss", ""),
}


def verify_mutations() -> dict[str, tuple[Verdict, Verdict]]:
    """On one of two ranks: for each mutation the verdict of the right code and of the wrong."""
    found = {}
    groups: Groups = {}
    for name, (mutation, degrees, _, _) in MUTATIONS.items():
        run = run_of("orbit", 2, **degrees)
        layout = resolve_layout(bind(run), 2)
        verifier = Verifier(bind(run, VerifiableModel), torch.device("cpu"), steps=1, activations=True, groups=groups)
        right = verifier.verify(layout)
        with mutation():
            found[name] = right, verifier.verify(layout)
    return found


@pytest.fixture(scope="module")
def verdicts() -> dict[str, tuple[Verdict, Verdict]]:
    return run_ranks(verify_mutations, 2, timeout_s=120.0)[0]


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_published_defect_is_found_where_it_is(name: str, verdicts: dict[str, tuple[Verdict, Verdict]]) -> None:
    right, wrong = verdicts[name]
    _, _, what, where = MUTATIONS[name]
    assert right.passed
    assert not wrong.passed and wrong.first is not None
    assert (wrong.first.what, wrong.first.name.startswith(where)) == (what, True), wrong.first
    assert wrong.first.error > 1e6 * wrong.first.bound


def test_norms_that_are_not_summed_are_off_by_parts_of_themselves(
    verdicts: dict[str, tuple[Verdict, Verdict]],
) -> None:
    errors = [check.error for check in verdicts["q/k norms not summed"][1].checks if "_norm.weight" in check.name]
    assert max(errors) > 0.3
