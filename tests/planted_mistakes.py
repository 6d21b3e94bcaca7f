"""Mistakes put into the code on purpose: each is verified in a layout on a few ranks, beside the right code."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from distributed_ranks import run_ranks
from layout_cases import run_of
from phalanx.families.registry import bind
from phalanx.layout.mesh import Groups
from phalanx.layout.resolve import resolve_layout
from phalanx.verification.family import VerifiableModel
from phalanx.verification.verify_run import Verdict, Verifier

Verdicts = tuple[Verdict, Verdict]
"""Of the right code and of the wrong."""


@dataclass(frozen=True)
class Mistake:
    """A mistake and what must find it."""

    plant: Callable[[], AbstractContextManager[Any]]
    """Puts the mistake into the code for as long as the context lasts."""
    model: str
    layout: str
    what: str
    """The kind of check that fails first."""
    where: str
    """How the name of its module begins."""
    precision: str = "fp64"
    steps: int = 1


def verify_mistakes(mistakes: Mapping[str, Mistake], ranks: int = 2) -> dict[str, Verdicts]:
    """Return the verdicts on each mistake, by its name."""
    found: dict[str, Verdicts] = run_ranks(_verify_on_rank, ranks, mistakes, ranks, timeout_s=240.0)[0]
    return found


def _verify_on_rank(mistakes: Mapping[str, Mistake], ranks: int) -> dict[str, Verdicts]:
    found: dict[str, Verdicts] = {}
    groups: Groups = {}
    verifiers: dict[tuple[str, str, int], Verifier] = {}
    right: dict[tuple[str, str, str, int], Verdict] = {}
    for name, mistake in mistakes.items():
        fields = dict(word.split("=") for word in mistake.layout.split())
        degrees = {key: int(value) if value.isdecimal() else value for key, value in fields.items()}
        layout = resolve_layout(bind(run_of(mistake.model, ranks, mistake.precision, **degrees)), ranks)
        what = mistake.model, mistake.precision, mistake.steps
        if what not in verifiers:
            model = bind(run_of(mistake.model, ranks, mistake.precision), VerifiableModel)
            verifiers[what] = Verifier(model, torch.device("cpu"), steps=mistake.steps, activations=True, groups=groups)
        case = mistake.model, mistake.layout, mistake.precision, mistake.steps
        if case not in right:
            right[case] = verifiers[what].verify(layout)
        with mistake.plant():
            found[name] = right[case], verifiers[what].verify(layout)
    return found


def found_where_it_is(mistake: Mistake, verdicts: Verdicts) -> None:
    """Assert that only the mistake fails, first in its own module, and by far more than rounding."""
    right, wrong = verdicts
    assert right.passed, right.first
    assert not wrong.passed and wrong.first is not None
    if mistake.precision == "bf16":
        # A loss that is off by less than the noise of losses shows in the next check, of the same module.
        assert (wrong.first.name or wrong.module).startswith(mistake.where or "head"), wrong.first
        return
    assert (wrong.first.what, wrong.first.name.startswith(mistake.where)) == (mistake.what, True), wrong.first
    # Float32 has half the digits: what is wrong by parts of itself exceeds its bound by fewer orders of magnitude.
    assert wrong.first.error > (1e6 if mistake.precision == "fp64" else 1e2) * wrong.first.bound, wrong.first
