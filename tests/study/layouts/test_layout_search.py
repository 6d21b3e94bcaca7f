"""The loop of a search, and what trials of one study have in common."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from layout_runs import run_with
from phalanx.config.studies import Search
from phalanx.families.registry import bind
from phalanx.planner.rank.enumeration import Limits, enumerate_layouts
from phalanx.study.layouts.layout_search import STUDY, LayoutSearch, describe_run
from phalanx.study.layouts.layout_space import LayoutSpace, build_layout_space
from phalanx.study.loop import EndedJob
from phalanx.study.samplers import Proposal
from phalanx.study.store import StudyStore
from phalanx.study.trial import OK, Outcome, Trial, best_trial


def space_of(**layout: Any) -> LayoutSpace:
    candidates = enumerate_layouts(bind(run_with(global_batch=64)), 4, limits=Limits(microbatch=4, positions=1))
    return build_layout_space(candidates, Search(layout={"schedule": ["1f1b"], "recompute": ["none"], **layout}))


@dataclass
class _InOrder:
    """Proposes one point after the other, until it has seen a good trial at the end."""

    space: LayoutSpace
    seen: list[int] = field(default_factory=list)

    def propose(self, history: Any, taken: set[str]) -> Proposal | None:
        self.seen.append(len(history))
        free = [point for point in range(len(self.space)) if self.space.key(point) not in taken]
        return Proposal(self.space.values(free[0])) if free else None


class _Slower:
    """Splits of matrices take twice as long."""

    def start(self, space: LayoutSpace, trial: Trial, *_: Any) -> EndedJob:
        return EndedJob(trial, Outcome(OK, float(trial.values["tp"])))


def test_a_narrowed_search_chooses_from_its_own_space(tmp_path: Path) -> None:
    """A study may hold better trials, of layouts that this search may not choose."""
    wide, narrow = space_of(tp=[1]), space_of(tp=[4])

    def run(space: LayoutSpace) -> tuple[LayoutSearch, _InOrder]:
        sampler = _InOrder(space)
        store = StudyStore(tmp_path / "study.log", STUDY, {"run": "one"})
        search = LayoutSearch(store, space, sampler, _Slower(), sampler_name="test", most=2)
        assert search.run() == "2 trials are done"
        return search, sampler

    first, _ = run(wide)
    best = best_trial(first.space_trials())
    assert len(first.store.trials()) == 2 and best is not None and best.value == 1.0
    second, sampler = run(narrow)
    assert sampler.seen[0] == 0
    assert len(second.store.trials()) == 4
    best = best_trial(second.space_trials())
    assert best is not None and best.value == 4.0


def test_searches_that_share_a_study_measure_no_more_together_than_was_asked_for(tmp_path: Path) -> None:
    space = space_of(tp=[1])
    study = StudyStore(tmp_path / "study.log", STUDY, {"run": "one"})

    class Late(_InOrder):
        """Another search takes the last place after this one has looked."""

        def propose(self, history: Any, taken: set[str]) -> Proposal | None:
            proposal = super().propose(history, taken)
            if len(history) == 1:
                other = StudyStore(tmp_path / "study.log", STUDY, {"run": "one"})
                LayoutSearch(other, space, _InOrder(space), _Slower(), sampler_name="test", most=2).run()
                taken = other.taken()
                free = [point for point in range(len(space)) if space.key(point) not in taken]
                return Proposal(space.values(free[0]))
            return proposal

    LayoutSearch(study, space, Late(space), _Slower(), sampler_name="test", most=2).run()
    assert sum(trial.good for trial in study.trials()) == 2


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
    assert describe_run(_run(words), Search()) != describe_run(_run({}), Search())


def test_what_a_search_chooses_makes_no_other_run() -> None:
    plain = describe_run(_run({}), Search())
    assert (
        describe_run(
            _run({"tp": 2, "dp_shard": 2, "microbatch": 2, "recompute": "full", "training.steps": 7}), Search()
        )
        == plain
    )
    knobs = Search(knobs={"layout.gather_blocks": [1, 4], "training.compile": [True, False]})
    assert describe_run(_run({"gather_blocks": 4, "training.compile": False}), knobs) == describe_run(_run({}), knobs)


def test_a_field_at_its_default_is_not_recorded() -> None:
    """So that a field which a later version adds does not make earlier studies those of another run."""
    recorded = describe_run(_run({"training.compile": "auto", "training.seed": 0}), Search())
    assert recorded == describe_run(_run({}), Search())
    assert "name" not in recorded["optimizer"] and recorded["layout"] == {"global_batch": 64}


def _run(words: dict[str, Any]) -> Any:
    dotted = {name: value for name, value in words.items() if "." in name}
    return run_with(dotted, **{"global_batch": 64} | {name: value for name, value in words.items() if "." not in name})
