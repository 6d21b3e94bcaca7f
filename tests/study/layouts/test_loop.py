"""The loop of a search, and what trials of one study have in common."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from layout_runs import run_with
from phalanx.config.search import Search
from phalanx.planner.layouts.enumerate import Limits, enumerate_layouts
from phalanx.study.layouts.loop import search
from phalanx.study.layouts.samplers import Proposal
from phalanx.study.layouts.space import Space, build_space
from phalanx.study.layouts.study import STUDY, _digest
from phalanx.study.trials.storage import Study
from phalanx.study.trials.trial import OK, Outcome


def space_of(**layout: Any) -> Space:
    candidates = enumerate_layouts(run_with(global_batch=64), 4, limits=Limits(microbatch=4, positions=1))
    return build_space(candidates, Search(layout={"schedule": ["1f1b"], "recompute": ["none"], **layout}))


@dataclass
class _InOrder:
    """Proposes one point after the other, until it has seen a good trial at the end."""

    space: Space
    seen: list[int] = field(default_factory=list)

    def propose(self, trials: Any, taken: set[str]) -> Proposal | None:
        self.seen.append(len(trials))
        free = [point for point in range(len(self.space)) if self.space.key(point) not in taken]
        return Proposal(free[0], {}) if free else None


class _Slower:
    """Splits of matrices take twice as long."""

    def measure(self, space: Space, point: int, *_: Any) -> Outcome:
        return Outcome(OK, float(space.values(point)["tp"]))


def test_a_narrowed_search_chooses_from_its_own_space(tmp_path: Path) -> None:
    """A study may hold better trials, of layouts that this search may not choose."""
    wide, narrow = space_of(tp=[1]), space_of(tp=[4])

    def run(space: Space) -> tuple[Any, _InOrder]:
        engine = _InOrder(space)
        study = Study(tmp_path / "study.log", STUDY, {"run": "one"})
        return search(study, space, engine, _Slower(), engine_name="test", most=2), engine

    first, _ = run(wide)
    assert len(first.trials) == 2 and first.best is not None and first.best.value == 1.0
    second, engine = run(narrow)
    assert engine.seen[0] == 0
    assert len(second.trials) == 4
    assert second.best is not None and second.best.value == 4.0


def test_searches_that_share_a_study_measure_no_more_together_than_was_asked_for(tmp_path: Path) -> None:
    space = space_of(tp=[1])
    study = Study(tmp_path / "study.log", STUDY, {"run": "one"})

    class Late(_InOrder):
        """Another search takes the last place after this one has looked."""

        def propose(self, trials: Any, taken: set[str]) -> Proposal | None:
            proposal = super().propose(trials, taken)
            if len(trials) == 1:
                other = Study(tmp_path / "study.log", STUDY, {"run": "one"})
                search(other, space, _InOrder(space), _Slower(), engine_name="test", most=2)
                taken = other.taken()
                free = [point for point in range(len(space)) if space.key(point) not in taken]
                return Proposal(free[0], {})
            return proposal

    found = search(study, space, Late(space), _Slower(), engine_name="test", most=2)
    assert sum(trial.good for trial in found.trials) == 2


@pytest.mark.parametrize(
    "words",
    [
        {"training.compile": False},
        {"training.attention": "math"},
        {"gather_blocks": 4},
        {"peer_copies": False},
        {"precision": "fp32"},
        {"model.n_layers": 2},
    ],
)
def test_trials_of_other_runs_do_not_count(words: dict[str, Any]) -> None:
    assert _digest(_run(words), Search()) != _digest(_run({}), Search())


def test_what_a_search_chooses_makes_no_other_run() -> None:
    plain = _digest(_run({}), Search())
    assert (
        _digest(_run({"tp": 2, "dp_shard": 2, "microbatch": 2, "recompute": "full", "training.steps": 7}), Search())
        == plain
    )
    knobs = Search(knobs={"layout.gather_blocks": [1, 4], "training.compile": [True, False]})
    assert _digest(_run({"gather_blocks": 4, "training.compile": False}), knobs) == _digest(_run({}), knobs)


def _run(words: dict[str, Any]) -> Any:
    dotted = {name: value for name, value in words.items() if "." in name}
    return run_with(dotted, **{"global_batch": 64} | {name: value for name, value in words.items() if "." not in name})
