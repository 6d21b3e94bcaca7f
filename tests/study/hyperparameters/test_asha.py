"""Early stopping and engines: who goes on, what is proposed, and how scores of different rungs compare."""

from __future__ import annotations

import pytest

from phalanx.config.studies import Asha
from phalanx.study.hyperparameters.asha import Standing, backfill_order, project_scores, promotable_trials, rung_steps


def standing(number: int, *scores: float, begun: int | None = None, over: bool = False) -> Standing:
    return Standing(number, dict(enumerate(scores)), len(scores) - 1 if begun is None else begun, over)


@pytest.mark.parametrize(
    ("asha", "total", "steps"),
    [
        (None, 900, (900,)),
        (Asha(), 900, (100, 300, 900)),
        (Asha(first_steps=50, eta=4, rungs=3), 1000, (50, 200, 1000)),
        (Asha(first_steps=400, eta=3, rungs=5), 900, (400, 900)),
        (Asha(first_steps=900), 900, (900,)),
        (Asha(rungs=1), 900, (900,)),
        (Asha(eta=2, rungs=3), 4, (1, 2, 4)),
    ],
)
def test_rungs(asha: Asha | None, total: int, steps: tuple[int, ...]) -> None:
    assert rung_steps(asha, total) == steps


def test_one_in_three_goes_on_the_best_first() -> None:
    at_first = [standing(number, score) for number, score in enumerate((0.5, 0.2, 0.9, 0.1, 0.7, 0.3))]
    assert [one.number for one in promotable_trials(at_first, 3, 3)] == [3, 1]
    assert promotable_trials(at_first[:2], 3, 3) == []
    # Those that went on count, whatever became of them; nobody goes on twice.
    went_on = [standing(9, 0.05, begun=1), *at_first]
    assert [one.number for one in promotable_trials(went_on, 3, 3)] == [3]
    failed = [standing(9, 0.05, over=True), *at_first]
    assert [one.number for one in promotable_trials(failed, 3, 3)] == [3]


def test_higher_rungs_first_and_early_ones_make_no_room() -> None:
    trials = [standing(n, 0.1 * n, 0.1 * n) for n in range(3)] + [standing(n, 0.1 * n) for n in range(3, 9)]
    assert [one.number for one in promotable_trials(trials, 3, 3)] == [0]
    more = [standing(n, 0.1 * n, 0.1 * n) for n in range(6)] + [standing(n, 0.1 * n) for n in range(6, 9)]
    assert [one.number for one in promotable_trials(more, 3, 3)] == [0]
    assert [one.number for one in backfill_order(more, 3)] == [0, 1, 2, 3, 4, 5, 6, 7, 8]
    assert promotable_trials(more, 3, 1) == [] and backfill_order([standing(0, 1.0, 1.0, 1.0)], 3) == []


def test_scores_of_different_rungs() -> None:
    trials = [standing(0, 1.0, 0.6, 0.5), standing(1, 2.0, 1.4), standing(2, 1.5), Standing(3)]
    found = project_scores(trials, 3)
    assert found == {0: 0.5, 1: pytest.approx(1.3), 2: pytest.approx(1.5 - 0.5 - 0.1)}
