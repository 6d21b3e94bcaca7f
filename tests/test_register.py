"""`phalanx.register`: extensions of every kind under the names that run files give them."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

import phalanx
from phalanx.config.schema import Optimizer
from phalanx.errors import PhalanxError
from phalanx.optimizers import OPTIMIZERS
from phalanx.optimizers.optimizer_kind import Group, HeldParameters
from phalanx.training.callbacks import CALLBACKS


class Silent(phalanx.Callback):
    pass


class Descent(phalanx.OptimizerKind):
    state_values = 0
    value_passes = 3

    def build(self, groups: Sequence[Group], config: Optimizer, held: HeldParameters) -> torch.optim.Optimizer:
        return torch.optim.SGD(groups, lr=config.lr)


@pytest.fixture(autouse=True)
def nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CALLBACKS, "_items", {})
    monkeypatch.setattr(OPTIMIZERS, "_items", {})


def test_callbacks_and_optimizers_are_found_by_name() -> None:
    descent = Descent()
    phalanx.register(Silent)
    phalanx.register(Silent, "quiet")
    phalanx.register(descent, "descent")
    assert CALLBACKS.get("Silent") is CALLBACKS.get("quiet") is Silent
    assert OPTIMIZERS.get("descent") is descent


def test_a_taken_name_and_another_object_are_refused() -> None:
    with pytest.raises(PhalanxError, match="'adamw' is registered already"):
        phalanx.register(Descent(), "adamw")
    with pytest.raises(PhalanxError, match=r"phalanx\.register takes .* or an OptimizerKind, not <class '.*Descent'>"):
        phalanx.register(Descent, "descent")  # type: ignore[arg-type]
