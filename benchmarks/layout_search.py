"""Searching layouts on simulated clusters, and what matters in a published search.

    python benchmarks/layout_search.py engines --out benchmarks/results/search/engines-175b.json
    python benchmarks/layout_search.py published --out benchmarks/results/search/published-175b.json

`engines` compares the samplers of `phalanx search` for the 175B GPT on 1,024 GCDs of Frontier: same space, same truths, same
trials; the quality of a search is the true speed of its best trial over that of the fastest layout that truly fits.
DeepHyper is compared where its package is installed; `--engine knows` is one that knows how truths are drawn, though not
which one was, to see how much a better surrogate could gain. `published` takes the space that Dash et al. searched
(arXiv:2312.12705) and says which parameter matters most, as the planner sees it.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from functools import cached_property
from importlib import metadata
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from scipy.special import ndtr

from phalanx.config.load import load_run
from phalanx.config.studies import Search
from phalanx.families.language.config import LanguageRun, require_language
from phalanx.families.language.sizes import model_flops_per_token
from phalanx.families.registry import bind
from phalanx.hardware.machine import load_machine
from phalanx.layout.spec import RECOMPUTES, LayoutTable, Recompute, ResolvedLayout
from phalanx.planner.rank.cost_models import CostModels
from phalanx.planner.rank.ranking import Planner, Task
from phalanx.planner.time.profile import profile_for
from phalanx.planner.trace.traced_model import TracedModel
from phalanx.study.importance import interactions, measured_importance, shapley_effects
from phalanx.study.layouts.layout_search import make_layout_sampler
from phalanx.study.layouts.layout_space import LayoutSpace
from phalanx.study.layouts.prior import Prior, planned_space
from phalanx.study.layouts.simulated_cluster import (
    MEMORY_CHOICES,
    SHARED_CHOICES,
    Errors,
    SimulatedRunner,
    Truth,
    draw_truth,
)
from phalanx.study.layouts.surrogate import Posterior, censored_observation
from phalanx.study.samplers import Observation, Proposal, Sampler, observe_trials
from phalanx.study.trial import Trial, best_trial, key_of

ROOT = Path(__file__).parent.parent
DEVICES = 1024
AT = (3, 10, 25, 50)
"""Trials after which searches are compared."""
TRUTHS = {
    "constants": Errors(constants=0.80, choices=0.15),
    "published": Errors(constants=0.55, choices=0.35),
    "own": Errors(constants=0.0, choices=0.0),
    "device": Errors(constants=1.0, choices=0.0),
}
"""How the 10% of time arise: mostly constants of the device; as spread among near-best layouts as the errors of the
calibrated model on published runs (6.5%); each layout on its own, which nothing can be learned from; or constants alone."""
NEAR = 1.2
"""Layouts within so much of the best expected time are near it."""
_TRIES = 3
KNOWS = "knows"
_REACH = 1.4
"""Layouts whose expected time is within so much of the best may be proposed by the sampler that knows."""


@dataclass(frozen=True)
class KnowingSampler:
    """Expected improvement for one who knows how large the errors of truths are and what shares them."""

    space: LayoutSpace
    prior: Prior
    errors: Errors

    @cached_property
    def near(self) -> Any:
        """Points that may be proposed."""
        likely = self.prior.margin > -3 * self.errors.memory
        return np.flatnonzero(likely & (self.prior.seconds < _REACH * self.prior.seconds.min()))

    @cached_property
    def covariances(self) -> tuple[Any, Any]:
        """Of the logarithms of (time, memory) at `near`."""
        errors, linear = self.errors, self.prior.sensitivity
        size = np.sqrt((linear**2).sum(axis=1).mean())
        linear = linear[self.near] / size
        own = (1 - errors.constants - errors.choices) * np.eye(len(self.near))
        time_parts = errors.constants * linear @ linear.T + errors.choices * self._shared(SHARED_CHOICES) + own
        memory_parts = 0.8 * self._shared(MEMORY_CHOICES) + 0.2 * np.eye(len(self.near))
        return errors.time**2 * time_parts, errors.memory**2 * memory_parts

    def _shared(self, groups: tuple[tuple[str, ...], ...]) -> Any:
        place = {one.name: number for number, one in enumerate(self.space.parameters)}
        total = np.zeros((len(self.near), len(self.near)))
        for group in groups:
            codes = self.space.codes[self.near][:, [place[name] for name in group]]
            _, which = np.unique(codes, axis=0, return_inverse=True)
            total += which.reshape(-1)[:, None] == which.reshape(-1)[None, :]
        return total / len(groups)

    def propose(self, history: Sequence[Observation], taken: set[str]) -> Proposal | None:
        """Return the point near the best that promises most."""
        place = {int(point): number for number, point in enumerate(self.near)}
        found = [(place[point], one) for one in history if (point := self.space.find(one.values)) is not None]
        seconds, peak, margin = (one[self.near] for one in (self.prior.seconds, self.prior.peak, self.prior.margin))
        of_time, of_memory = self.covariances
        times = [(point, float(np.log(one.score / seconds[point])), 0.005**2) for point, one in found if one.score]
        shift, spread = _given(of_time, times)
        needs = [
            (point, float(np.log(one.memory_bytes / peak[point])), 0.003**2)
            for point, one in found
            if one.score and one.memory_bytes
        ]
        for point in (point for point, one in found if one.score is None):
            need, uncertain = _given(of_memory, needs)
            needs.append(
                (point, *censored_observation(float(need[point]), float(uncertain[point]), float(margin[point])))
            )
        need, uncertain = _given(of_memory, needs)
        posterior = Posterior(np.log(seconds) + shift, spread, ndtr((margin - need) / uncertain))
        best = min((one.score for one in history if one.score), default=None)
        first = np.log(np.maximum(posterior.fits, 1e-12)) - posterior.log_seconds
        value = first if best is None else posterior.improvement(best)
        value[[point for point, _ in found]] = -np.inf
        return Proposal(self.space.values(int(self.near[int(np.argmax(value))])))


def _given(covariance: Any, seen: list[tuple[int, float, float]]) -> tuple[Any, Any]:
    """(mean, standard deviation) after (point, value, variance of its noise) were seen."""
    if not seen:
        return np.zeros(len(covariance)), np.sqrt(np.diag(covariance))
    points, values, noise = (np.array(column) for column in zip(*seen, strict=True))
    across = covariance[:, points]
    weights = across @ np.linalg.inv(across[points] + np.diag(noise))
    variance = np.diag(covariance) - np.einsum("nm,nm->n", weights, across)
    return weights @ values, np.sqrt(np.maximum(variance, 1e-10))


def machine_models() -> tuple[LanguageRun, Planner, CostModels]:
    """The 175B GPT and Frontier."""
    machine = load_machine("frontier")
    run = require_language(load_run(ROOT / "examples" / "gpt-175b.yaml"), "this benchmark")
    models = CostModels(machine, profile_for(machine))
    return run, Planner(machine, models, least_p=Search().least_p_fits), models


def follow(sampler: Sampler, space: LayoutSpace, truth: Truth, seed: int, most: int) -> list[Trial]:
    """The trials of one search, without any storage."""
    runner = SimulatedRunner(truth, seed)
    trials: list[Trial] = []
    for number in range(most):
        proposal = sampler.propose(observe_trials(trials), {trial.key for trial in trials})
        if proposal is None:
            break
        trial = Trial(number, key_of(proposal.values), proposal.values, "", None, proposal.note)
        trials.append(replace(trial, outcome=runner.start(space, trial, Path(), trials).poll()))
    return trials


def quality(space: LayoutSpace, truth: Truth, trials: list[Trial]) -> float:
    """True speed of the trial that measured best, over that of the best layout; 0 where none fits."""
    best = best_trial(trials)
    if best is None:
        return 0.0
    point = space.find(best.values)
    assert point is not None
    return truth.best_seconds() / float(truth.seconds[point])


def compare(
    name: str, space: LayoutSpace, prior: Prior, truths: dict[int, Truth], most: int, errors: Errors
) -> dict[str, Any]:
    """Return one sampler's results on all truths, by their seeds. errors: how the truths were drawn."""
    start, rows = time.perf_counter(), []
    knows = KnowingSampler(space, prior, errors)
    for seed, truth in truths.items():
        sampler = knows if name == KNOWS else make_layout_sampler(name, space, prior, seed=seed, stop_gain=0.0)
        trials = follow(sampler, space, truth, seed, most)
        good = [sum(trial.good for trial in trials[:count]) for count in AT if count <= most]
        gains = [trial.note.get("expected_gain") for trial in trials]
        stop = next(
            (n for n, gain in enumerate(gains) if n >= _TRIES and gain is not None and gain < 0.002), len(trials)
        )
        rows.append(
            {
                "seed": seed,
                "quality": {count: quality(space, truth, trials[:count]) for count in AT if count <= most},
                "good": good,
                "stop": stop if name == "planner" else None,
                "quality_at_stop": quality(space, truth, trials[:stop]) if name == "planner" else None,
            }
        )
    counts = [count for count in AT if count <= most]
    table = {
        count: {
            "mean": float(np.mean([row["quality"][count] for row in rows])),
            "least": float(np.min([row["quality"][count] for row in rows])),
        }
        for count in counts
    }
    spent = (time.perf_counter() - start) / (len(truths) * most)
    return {"engine": name, "table": table, "seconds_per_proposal": spent, "searches": rows}


def engines(options: argparse.Namespace) -> dict[str, Any]:
    """The table of engines."""
    run, planner, models = machine_models()
    model = bind(run, TracedModel)
    start = time.perf_counter()
    space, prior = planned_space(planner, Task(model, DEVICES), Search())
    planned = time.perf_counter() - start
    near = prior.seconds < NEAR * prior.seconds.min()
    found: dict[str, Any] = {
        "points": len(space),
        "expected_best_s": float(prior.seconds.min()),
        "planning_s": planned,
        "truths": {},
    }
    for kind in options.truth or list(TRUTHS):
        errors = TRUTHS[kind]
        seeds = range(options.first_seed, options.first_seed + options.seeds)
        truths = {seed: draw_truth(space, prior, models, model, seed, errors) for seed in seeds}
        off = [np.log(truth.seconds / prior.seconds) for truth in truths.values()]
        rows = []
        for name in options.engine:
            rows.append(compare(name, space, prior, truths, options.trials, errors))
            shown = "  ".join(f"{count}: {100 * cell['mean']:.1f}%" for count, cell in rows[-1]["table"].items())
            print(f"{kind:10} {name:12} {shown}", file=sys.stderr, flush=True)
        found["truths"][kind] = {
            "errors": asdict(errors),
            "rms_error": float(np.sqrt(np.mean(np.square(off)))),
            "spread_near_best": float(np.mean([one[near].std() for one in off])),
            "fitting": float(np.mean([truth.fits.mean() for truth in truths.values()])),
            "engines": rows,
        }
    return found


PUBLISHED = {
    "pp": (1, 2, 4, 8, 16),
    "tp": (1, 2, 4, 8),
    "mbs": tuple(range(4, 21)),
    "accumulation": (5, 10),
    "zero1": (0, 1),
    "nodes": (12, 16),
}
"""The space of the published search."""


def published_points(recompute: Recompute) -> tuple[np.ndarray[Any, Any], LayoutTable]:
    """(positions in PUBLISHED, layouts) of every point whose degrees divide the devices."""
    codes, rows = [], []
    for places in product(*(range(len(values)) for values in PUBLISHED.values())):
        pp, tp, mbs, steps, zero, nodes = (
            values[place] for values, place in zip(PUBLISHED.values(), places, strict=True)
        )
        data, rest = divmod(8 * nodes, tp * pp)
        if rest:
            continue
        codes.append(places)
        replicate, shard = (1, data) if zero else (data, 1)
        rows.append(
            ResolvedLayout(
                global_batch=data * mbs * steps,
                microbatch=mbs,
                dp_replicate=replicate,
                dp_shard=shard,
                tp=tp,
                pp=pp,
                zero=zero,
                recompute=recompute,
            )
        )
    return np.array(codes), LayoutTable.from_rows(rows)


def published(options: argparse.Namespace) -> dict[str, Any]:
    """What matters in the published space, for each kind of recompute: the paper does not say which its search had."""
    run, _, models = machine_models()
    found = {kind: matters(run, models, kind, options.seeds) for kind in RECOMPUTES}
    return {"values": PUBLISHED, "recompute": found}


def matters(run: LanguageRun, models: CostModels, recompute: Recompute, seeds: int) -> dict[str, Any]:
    """What matters in the published space with one kind of recompute."""
    codes, layouts = published_points(recompute)
    names, sizes = tuple(PUBLISHED), [len(values) for values in PUBLISHED.values()]
    seconds = models.times(bind(run, TracedModel), layouts).total
    fits = models.memory(bind(run, TracedModel), layouts).p_fits
    length = run.data.sequence_length
    flops = model_flops_per_token(run.model, length, run.training.flops)
    rate = layouts.global_batch * length * flops / seconds / layouts.world_size / 1e12
    good = fits >= 0.5
    figures: dict[str, tuple[Any, Any]] = {
        "tflops_of_those_that_fit": (good, rate),
        "tflops_failures_as_0": (np.ones(len(rate), bool), np.where(good, rate, 0.0)),
        "tflops_failures_as_the_slowest": (np.ones(len(rate), bool), np.where(good, rate, rate[good].min())),
        "whether_it_fits": (np.ones(len(rate), bool), good.astype(np.float64)),
    }
    found: dict[str, Any] = {"points": len(rate), "fitting": int(good.sum()), "figures": {}}
    for name, (which, figure) in figures.items():
        effects = shapley_effects(names, codes[which], figure[which])
        pairs = interactions(names, codes[which], figure[which], sizes)
        found["figures"][name] = {
            "shapley_effects": dict(zip(effects.names, effects.shares.tolist(), strict=True)),
            "alone": dict(zip(effects.names, effects.alone.tolist(), strict=True)),
            "standard_deviation": effects.variance**0.5,
            "interactions": [{"of": pair.names, "share": pair.share} for pair in pairs[:3]],
        }
        print(
            recompute,
            name,
            {key: round(float(share), 3) for key, share in zip(effects.names, effects.shares, strict=True)},
            file=sys.stderr,
        )
    figure = figures["tflops_failures_as_0"][1]
    found["studies"] = [_study(names, codes, figure, size, seed) for size in (25, 50) for seed in range(seeds)]
    for place, name in enumerate(names):
        means = [float(rate[good & (codes[:, place] == code)].mean()) for code in np.unique(codes[good, place])]
        found.setdefault("mean_tflops", {})[name] = means
    return found


def _study(names: tuple[str, ...], codes: Any, figure: Any, size: int, seed: int) -> dict[str, Any]:
    """What a forest makes of so many random trials."""
    some = np.random.default_rng(seed).permutation(len(codes))[:size]
    measured = measured_importance(names, codes[some], figure[some], resampled=10, seed=seed)
    return {"trials": size, "seed": seed, "order": measured.names, "importance": measured.importance.tolist()}


def versions() -> dict[str, str]:
    """Of what the figures depend on."""
    found = {"python": platform.python_version(), "machine": platform.machine()}
    for name in ("numpy", "scipy", "scikit-learn", "optuna", "deephyper", "torch"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def main() -> None:
    """Run one comparison and write its figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("engines", "published"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--trials", type=int, default=50)
    parser.add_argument("--engine", action="append")
    parser.add_argument("--truth", action="append", choices=list(TRUTHS))
    options = parser.parse_args()
    options.engine = options.engine or ["planner", "random", "optuna-tpe", "optuna-gp"]
    runs: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {"engines": engines, "published": published}
    found = runs[options.what](options)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    document = {
        "command": f"python benchmarks/layout_search.py {' '.join(sys.argv[1:])}",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": versions(),
        **found,
    }
    options.out.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
