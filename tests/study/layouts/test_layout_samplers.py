"""Engines: what they propose from what is known, on a small space with a simulated truth."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from layout_runs import run_with
from phalanx.config.studies import Search
from phalanx.errors import ConfigError
from phalanx.families.registry import bind
from phalanx.planner.rank.enumeration import Limits, enumerate_layouts
from phalanx.study.layouts.layout_search import make_layout_sampler
from phalanx.study.layouts.layout_space import LayoutSpace, build_layout_space
from phalanx.study.layouts.prior import Prior
from phalanx.study.layouts.simulated_cluster import SimulatedRunner, Truth
from phalanx.study.layouts.surrogate import PlannerSampler, Surrogate
from phalanx.study.samplers import Observation, Sampler, observe_trials
from phalanx.study.trial import Trial, best_trial, key_of

ALL = ("planner", "optuna-tpe", "optuna-gp", "random", "exhaustive")


@pytest.fixture(scope="module")
def space() -> LayoutSpace:
    """The legal layouts of a small run on eight ranks."""
    run = run_with(global_batch=64)
    layouts = enumerate_layouts(bind(run), 8, limits=Limits(microbatch=8, stages_per_rank=2, positions=1))
    return build_layout_space(layouts, Search(layout={"schedule": ["1f1b"], "recompute": ["none", "full"]}))


@pytest.fixture(scope="module")
def prior(space: LayoutSpace) -> Prior:
    """Larger micro-batches and fewer splits are fast and need much memory; constants scale each of the two."""
    tp, pp, micro, full = (_values(space, name) for name in ("tp", "pp", "microbatch", "recompute"))
    compute = 1.0 + 0.5 / micro + 0.3 * full
    exchange = 0.1 * np.log2(tp) + 0.15 * np.log2(pp) * (1 + 0.2 * micro)
    seconds = compute + exchange
    sensitivity = np.stack([0.1 * compute, 0.3 * exchange], axis=1) / seconds[:, None]
    peak = 20e9 / (tp * pp) + 8e9 * micro / (tp * (1 + 3 * full))
    return Prior(seconds, sensitivity, 0.1, np.log(40e9 / peak), peak)


def _values(space: LayoutSpace, name: str) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    place = [one.name for one in space.parameters].index(name)
    one = space.parameters[place]
    values = np.arange(len(one.values)) if not one.ordered else np.asarray(one.values)
    return values[space.codes[:, place]].astype(np.float64)


def _alike(space: LayoutSpace, values: dict[str, Any]) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Points with these values."""
    found = np.ones(len(space), bool)
    for place, one in enumerate(space.parameters):
        if one.name in values:
            found &= space.codes[:, place] == one.values.index(values[one.name])
    return found


def truth_of(space: LayoutSpace, prior: Prior, seed: int) -> Truth:
    """Constants off by some percent, something of each point's own, memory off by 3%."""
    random = np.random.default_rng(seed)
    shift = prior.sensitivity @ random.standard_normal(2) + 0.007 * random.standard_normal(len(space))
    need = 0.03 * random.standard_normal(len(space))
    return Truth(prior.seconds * np.exp(shift), prior.peak * np.exp(need), need < prior.margin)


def follow(engine: Sampler, space: LayoutSpace, truth: Truth, most: int) -> list[Trial]:
    runner = SimulatedRunner(truth)
    trials: list[Trial] = []
    for number in range(most):
        proposal = engine.propose(observe_trials(trials), {trial.key for trial in trials})
        if proposal is None:
            break
        trial = Trial(number, key_of(proposal.values), proposal.values, "test", None, proposal.note)
        outcome = runner.start(space, trial, Path(), trials).poll()
        trials.append(replace(trial, outcome=outcome))
    return trials


def quality(space: LayoutSpace, truth: Truth, trials: list[Trial]) -> float:
    best = best_trial(trials)
    if best is None:
        return 0.0
    point = space.find(best.values)
    assert point is not None
    return truth.best_seconds() / float(truth.seconds[point])


@pytest.mark.parametrize("name", ALL)
def test_nothing_is_proposed_twice_and_seeds_decide(name: str, space: LayoutSpace, prior: Prior) -> None:
    truth = truth_of(space, prior, 0)
    runs = [follow(make_layout_sampler(name, space, prior, seed=1, stop_gain=0.0), space, truth, 6) for _ in range(2)]
    assert [trial.key for trial in runs[0]] == [trial.key for trial in runs[1]]
    assert len({trial.key for trial in runs[0]}) == 6


@pytest.mark.parametrize("name", ALL)
def test_an_engine_goes_on_where_another_left_off(name: str, space: LayoutSpace, prior: Prior) -> None:
    some = space.take(np.arange(12))
    few = prior.take(np.arange(12))
    truth = truth_of(some, few, 0)
    before = follow(make_layout_sampler("random", some, few, seed=3, stop_gain=0.0), some, truth, 11)
    proposal = make_layout_sampler(name, some, few, seed=0, stop_gain=0.0).propose(
        observe_trials(before), {trial.key for trial in before}
    )
    assert proposal is not None
    (left,) = {some.key(point) for point in range(12)} - {trial.key for trial in before}
    assert key_of(proposal.values) == left
    everything = {some.key(point) for point in range(12)}
    assert (
        make_layout_sampler(name, some, few, seed=0, stop_gain=0.0).propose(observe_trials(before), everything) is None
    )


def test_the_planner_is_near_the_best_after_three(space: LayoutSpace, prior: Prior) -> None:
    found: dict[str, list[float]] = {name: [] for name in ("planner", "random")}
    for seed in range(8):
        truth = truth_of(space, prior, seed)
        for name, qualities in found.items():
            trials = follow(make_layout_sampler(name, space, prior, seed=seed, stop_gain=0.0), space, truth, 8)
            qualities += [quality(space, truth, trials[:3]), quality(space, truth, trials)]
    planner, random = (np.array(found[name]).reshape(-1, 2).mean(axis=0) for name in found)
    assert planner[0] > 0.94 and planner[1] > 0.96
    assert random[1] < planner[0]


def test_it_stops_when_nothing_is_to_be_gained(space: LayoutSpace, prior: Prior) -> None:
    truth = truth_of(space, prior, 0)
    trials = follow(PlannerSampler(space, prior, 0.01), space, truth, 60)
    assert 3 <= len(trials) < 40 and quality(space, truth, trials) > 0.94
    assert all(trial.note["expected_gain"] is None or trial.note["expected_gain"] >= 0 for trial in trials)


def test_failures_keep_optuna_away(space: LayoutSpace, prior: Prior) -> None:
    """Half of the space fails: samplers that know it propose less of that half than chance would."""
    truth = truth_of(space, prior, 0)
    place = [one.name for one in space.parameters].index("recompute")
    truth = Truth(truth.seconds, truth.memory, space.codes[:, place] == 0)
    trials = follow(make_layout_sampler("optuna-tpe", space, prior, seed=0, stop_gain=0.0), space, truth, 40)
    late = [trial.good for trial in trials[20:]]
    assert np.mean(late) > 0.7 > np.mean(truth.fits) + 0.15


def test_out_of_memory_teaches_about_neighbours(space: LayoutSpace, prior: Prior) -> None:
    surrogate = Surrogate(space, prior)
    near = int(np.argmin(np.abs(prior.margin - 0.03)))
    before = surrogate.posterior([])
    failed = Observation(space.values(near), None, "out_of_memory")
    after = surrogate.posterior([failed])
    alike = np.flatnonzero(np.abs(prior.margin - prior.margin[near]) < 0.02)
    assert before.fits[near] > 0.5 and after.fits[near] < 0.3
    assert after.fits[alike].mean() < before.fits[alike].mean() - 0.05
    roomy = Observation(space.values(near), 1.0, memory_bytes=float(prior.peak[near] * 0.9))
    good = surrogate.posterior([roomy])
    assert good.fits[near] > 0.95 and good.fits[alike].mean() > before.fits[alike].mean()


def test_a_slow_kernel_says_more_of_itself_than_of_its_neighbours(space: LayoutSpace, prior: Prior) -> None:
    """Errors change abruptly: the next micro-batch is thought to have little more than half of the error, not nearly all."""
    flat = replace(prior, sensitivity=np.zeros_like(prior.sensitivity))
    here = int(np.flatnonzero(_alike(space, {"tp": 2, "pp": 2, "microbatch": 2}))[0])
    slow = Observation(space.values(here), 1.1 * float(flat.seconds[here]))
    posterior = Surrogate(space, flat).posterior([slow])
    shift = posterior.log_seconds - np.log(flat.seconds)
    chosen = {one.name: one.values[space.codes[here, place]] for place, one in enumerate(space.parameters)}
    (beside,) = np.flatnonzero(_alike(space, {**chosen, "microbatch": 4})).tolist()
    other = _alike(space, {name: chosen[name] for name in ("tp", "microbatch", "recompute")})
    assert shift[here] > 0.08
    assert 0.3 * shift[here] < shift[beside] < 0.65 * shift[here]
    assert shift[other].min() > 0.3 * shift[here]


def test_one_layout_that_fits_promises_little_for_another_kind(space: LayoutSpace, prior: Prior) -> None:
    """One needs just the memory that was expected: alike ones are then likelier to fit, others hardly."""
    surrogate = Surrogate(space, prior)
    chosen = {"tp": 1, "pp": 4, "cp": 1, "zero": 1, "microbatch": 4, "recompute": "none"}
    other = {**chosen, "tp": 2, "pp": 2, "zero": 3, "microbatch": 8}
    (here,) = np.flatnonzero(_alike(space, chosen)).tolist()
    far = _alike(space, other)
    assert far.any() and np.allclose(prior.margin[far], prior.margin[here])
    fits = Observation(space.values(here), 1.0, memory_bytes=float(prior.peak[here]))
    after = surrogate.posterior([fits]).fits
    rise = after - surrogate.posterior([]).fits
    assert rise[here] > 0.07
    assert 0 < rise[far].max() < 0.4 * rise[here]


def test_constants_are_learned_from_few_trials(space: LayoutSpace, prior: Prior) -> None:
    """A cluster whose exchanges are slower than thought by two standard deviations, and nothing else."""
    seconds = prior.seconds * np.exp(2.0 * prior.sensitivity[:, 1])
    points = np.random.default_rng(0).permutation(len(space))[:10].tolist()
    trials = [Observation(space.values(point), float(seconds[point])) for point in points]
    posterior = Surrogate(space, prior).posterior(trials)
    left = posterior.log_seconds - np.log(seconds)
    assert np.sqrt(np.mean(left**2)) < 0.35 * np.sqrt(np.mean(np.log(seconds / prior.seconds) ** 2))
    assert np.mean(np.abs(left) < 2 * posterior.spread) > 0.85


def test_a_profile_of_another_device_is_forgiven(space: LayoutSpace, prior: Prior) -> None:
    """Every trial takes a thousand times as long as expected: the order is what is left to learn from."""
    truth = truth_of(space, prior, 4)
    slow = Truth(truth.seconds * 1000, truth.memory, truth.fits)
    assert quality(space, slow, follow(PlannerSampler(space, prior), space, slow, 8)) > 0.95


def test_unknown_engines_are_refused(space: LayoutSpace, prior: Prior) -> None:
    with pytest.raises(ConfigError, match="--engine annealing is not known; give one of planner"):
        make_layout_sampler("annealing", space, prior, seed=0, stop_gain=0.0)


def test_deephyper_proposes_too(space: LayoutSpace, prior: Prior) -> None:
    try:
        engine = make_layout_sampler("deephyper", space, prior, seed=0, stop_gain=0.0)
    except ConfigError as error:
        assert "pip install deephyper" in str(error)
        return
    assert len(follow(engine, space, truth_of(space, prior, 0), 12)) == 12
