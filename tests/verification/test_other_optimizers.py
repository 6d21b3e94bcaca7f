"""Verification of runs with an optimizer of a package: parameters are compared where it says how far they may move."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
import torch

from phalanx.config.schema import Optimizer
from phalanx.families.registry import bind
from phalanx.layout.resolve import resolve_layout
from phalanx.optimizers import OPTIMIZERS, OptimizerKind
from phalanx.optimizers.optimizer_kind import Group, HeldParameters
from phalanx.verification.family import VerifiableModel
from phalanx.verification.verify_run import Verifier
from whole_model import GPT, whole_run


class PlainDescent(OptimizerKind):
    """Gradient descent, which moves a parameter by the learning rate times its gradient."""

    state_values = 0
    value_passes = 3

    def build(self, groups: Sequence[Group], config: Optimizer, held: HeldParameters) -> torch.optim.Optimizer:
        return torch.optim.SGD(groups, lr=config.lr)


class BoundedDescent(PlainDescent):
    def update_gain(self, config: Optimizer) -> float:
        return config.lr


@pytest.fixture
def descents(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(OPTIMIZERS._items, "plain_descent", PlainDescent())
    monkeypatch.setitem(OPTIMIZERS._items, "bounded_descent", BoundedDescent())
    yield


@pytest.mark.parametrize(("name", "compared"), [("plain_descent", False), ("bounded_descent", True), ("adamw", True)])
def test_parameters_are_compared_where_their_change_is_bounded(name: str, compared: bool, descents: None) -> None:
    run = whole_run({**GPT, "optimizer.name": name, "layout.precision": "fp64"})
    verdict = Verifier(bind(run, VerifiableModel), torch.device("cpu"), steps=2, activations=False).verify(
        resolve_layout(bind(run), 1)
    )
    assert verdict.passed
    kinds = {check.what for check in verdict.checks}
    assert {"loss", "gradient", "gradient norm"} <= kinds
    assert ("parameter" in kinds) is compared
