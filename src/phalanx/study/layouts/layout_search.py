"""The search of layouts, from a run file to an answer: a study of one trial at a time whose prior is the planner."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from phalanx.config.load import dump_run, parse_run
from phalanx.config.schema import Run
from phalanx.config.studies import Search
from phalanx.errors import ConfigError
from phalanx.hardware.device import choose_device, device_name
from phalanx.hardware.device_facts import device_kind
from phalanx.hardware.machine import Machine
from phalanx.planner.rank.enumeration import CHOSEN
from phalanx.planner.rank.ranking import Planner, Task
from phalanx.study.importance import can_be_told_apart, interactions, shapley_effects, summarise_importance
from phalanx.study.layouts.layout_space import LayoutSpace
from phalanx.study.layouts.layout_trials import ProcessRunner, Runner
from phalanx.study.layouts.prior import Prior, planned_space
from phalanx.study.layouts.read_search import STUDY, list_devices, summarise_trial
from phalanx.study.layouts.simulated_cluster import SimulatedRunner, draw_truth
from phalanx.study.layouts.surrogate import PlannerSampler, Posterior, Surrogate
from phalanx.study.loop import Job, StudyLoop
from phalanx.study.processes.slots import LocalRanks, whole_nodes
from phalanx.study.samplers import Observation, Proposal, Sampler, make_sampler, observe_trials
from phalanx.study.space import Choices
from phalanx.study.store import StudyStore
from phalanx.study.trial import Trial, best_trial, count_failures, key_of

_LOST_RACES = 100
"""Times in a row that another search may be first before this one gives up."""
_AROUND_S = 60.0
"""Seconds of a trial before and after its processes run: another host counts it as running for as long."""
_SHOWN_POINTS = 10
_SHOWN_PAIRS = 3
_LIKELY = 0.5
"""Least probability of fitting of a point that counts as one that fits."""
_STEP_FIELDS = ("seed", "compile", "attention", "loss_chunk_tokens", "z_loss", "deterministic")
"""Fields of `training` that decide what a step computes, and how fast; trials set the others themselves."""
_DIGESTED_FIELDS = {
    "model": (
        *("family", "preset", "n_layers", "d_model", "n_heads", "n_kv_heads", "head_dim", "d_ff", "vocab_size"),
        *(
            "max_positions",
            "positions",
            "rope_theta",
            "rope_scaling",
            "alibi_bias_max",
            "norm",
            "norm_eps",
            "mlp",
            "bias",
        ),
        *("tied_head", "qk_norm", "clip_qkv", "dropout", "init_std"),
    ),
    "data": ("sources", "sequence_length", "document_mask", "prefetch", "verify"),
    "optimizer": (
        *("lr", "betas", "eps", "weight_decay", "no_decay", "grad_clip", "schedule", "warmup_steps", "min_lr_ratio"),
        "decay_fraction",
    ),
    "layout": (
        *("tp_across_nodes", "global_batch", "precision", "gather_blocks", "gathers_ahead", "branch_groups"),
        "peer_copies",
    ),
    "training": _STEP_FIELDS,
}
"""Fields of run files at the time when studies recorded a digest of them. Later ones are for `describe_run` alone."""

Row = dict[str, Any]


@dataclass(frozen=True)
class ExhaustiveSampler:
    """Proposes all points, in the order of the space."""

    space: LayoutSpace

    def propose(self, history: Sequence[Observation], taken: set[str]) -> Proposal | None:
        """Return the first point that is not taken."""
        free = np.flatnonzero(self.space.free_points(taken))
        return Proposal(self.space.values(int(free[0]))) if len(free) else None


LAYOUT_SAMPLERS = ("planner", "exhaustive")
"""Samplers for layouts alone, beside the general ones."""


def make_layout_sampler(name: str, space: LayoutSpace, prior: Prior, *, seed: int, stop_gain: float) -> Sampler:
    """Return the sampler of that name: planner, exhaustive or a general one. Raises ConfigError as `make_sampler` does."""
    own: tuple[Sampler, ...] = (PlannerSampler(space, prior, stop_gain), ExhaustiveSampler(space))
    return make_sampler(name, space, seed, **dict(zip(LAYOUT_SAMPLERS, own, strict=True)))


class LayoutSearch(StudyLoop[Job]):
    """Measures layouts one after the other: each trial has all devices."""

    def __init__(
        self,
        store: StudyStore,
        space: LayoutSpace,
        sampler: Sampler,
        runner: Runner,
        *,
        sampler_name: str,
        most: int,
        limit_s: float = 600.0,
        tell: Callable[[Trial], None] = lambda trial: None,
    ) -> None:
        """most: trials of `space` in the study, all searches together. tell: called when a trial begins and ends."""
        super().__init__(store, sampler_name, most=most, limit_s=limit_s)
        self.space, self.sampler, self.runner, self.tell = space, sampler, runner, tell

    def space_trials(self) -> list[Trial]:
        """Return the study's trials that this search might have chosen: others may search elsewhere."""
        return [trial for trial in self.store.trials() if self.space.find(trial.values) is not None]

    def count_before(self, trial: Trial) -> int:
        """Return how many trials that run or have ended, not interrupted, began before this one."""
        return sum(one.number < trial.number for one in self._counted())

    def begin_trials(self) -> str:
        """Begin what the sampler proposes, unless a trial runs. Returns why nothing is left to begin."""
        ranges = {one.name: Choices(one.values) for one in self.space.parameters}
        # A proposal that another search claimed first costs a look at the journal; the next one knows of it.
        for _ in range(0 if self.jobs else _LOST_RACES):
            if len(self._counted()) >= self.most:
                return f"{self.most} trials are done"
            # All trials of the study: losses are compared with the first good one, wherever it was looked for.
            before = self.store.trials()
            proposal = self.sampler.propose(observe_trials(self.space_trials()), self.store.taken())
            if proposal is None:
                return "another trial is not expected to help"
            trial = self.claim(key_of(proposal.values), proposal, ranges)
            if trial is not None:
                self.report_progress(trial)
                folder = self.store.folder / str(trial.number)
                self.jobs.append(self.runner.start(self.space, trial, folder, before))
                return ""
        return "other searches were always first"

    def report_progress(self, trial: Trial) -> None:
        """Tell whoever watches of a trial that has begun, or ended."""
        self.tell(trial)

    def _counted(self) -> list[Trial]:
        return [one for one in self.space_trials() if not one.interrupted]


@dataclass(frozen=True)
class SearchResult:
    """A search that has come to its end."""

    task: Task
    machine: Machine
    space: LayoutSpace
    prior: Prior
    trials: list[Trial]
    """Trials of the whole study, of which other searches may have looked elsewhere."""
    stopped: str
    """Why the search stopped."""
    path: Path
    """File of the study."""
    where: str
    """local, slurm or simulated."""

    @property
    def best(self) -> Trial | None:
        """The good trial of least value, of those that this search might have chosen."""
        return best_trial([trial for trial in self.trials if self.space.find(trial.values) is not None])

    def summary(self) -> Row:
        """Return all figures as plain values, with units in the names: `--json` prints them, text and page show them."""
        posterior = Surrogate(self.space, self.prior).posterior(observe_trials(self.trials))
        best = self.best
        measured = {trial.key for trial in self.trials}
        # Measured points compete by the surrogate's mean, too: the noise of one lucky trial makes no best point.
        seconds = np.where(posterior.fits >= _LIKELY, posterior.log_seconds, np.inf)
        pairs = [(self.space.find(trial.values), trial.value) for trial in self.trials if trial.good]
        # other searches of the study may have measured what this space does not have
        good = [(point, value) for point, value in pairs if point is not None]
        names = [one.name for one in self.space.parameters]
        codes, logarithms = self.space.codes[[point for point, _ in good]], np.log([value for _, value in good])
        return {
            "model": self.task.run.model.preset or "model",
            "cluster": self.machine.name,
            "devices": self.task.devices,
            "where": self.where,
            "cluster_device": self.machine.node.device,
            "measured_on": list_devices(self.trials),
            "storage": str(self.path),
            "points": len(self.space),
            "stopped": self.stopped,
            "trials": [self._summarise_trial(trial) for trial in self.trials],
            "failures": count_failures(self.trials),
            "best": None if best is None else self._summarise_trial(best),
            "next": [
                {
                    "words": self.space.describe(point),
                    "believed_s": float(np.exp(posterior.log_seconds[point])),
                    "spread": float(posterior.spread[point]),
                    "p_fits": float(posterior.fits[point]),
                    "measured": self.space.key(point) in measured,
                }
                for point in np.argsort(seconds, kind="stable")[:_SHOWN_POINTS].tolist()
            ],
            "planned": _summarise_effects(self.space, posterior),
            "measured": summarise_importance(names, codes, logarithms, "logarithm of a step's time"),
        }

    def best_run_text(self) -> str:
        """Return the run file with the best choice filled in. Raises ConfigError where no trial was good."""
        best = self.best
        point = None if best is None else self.space.find(best.values)
        if best is None or point is None:
            raise ConfigError("--write: no trial of this space was good, so there is no best layout to write")
        # A run file has no place for variables of the environment: they go into a comment.
        env = "".join(f"#   export {name}={value}\n" for name, value in self.space.env(point).items())
        on = list_devices(self.trials)
        measured = f"Measured best of {len(self.trials)} trials" + (f" on {' and '.join(on)}" if on else "")
        note = f"# {measured}: {best.value:.4g} s a step (trial {best.number}).\n"
        text = dump_run(parse_run(dump_run(self.task.run), "the run file", self.space.overrides(point)))
        return note + (f"# With these variables of the environment:\n{env}" if env else "") + text

    def _summarise_trial(self, trial: Trial) -> Row:
        point = self.space.find(trial.values)
        if point is None:
            return summarise_trial(trial, trial.key, None)
        return summarise_trial(trial, self.space.describe(point), float(self.prior.seconds[point]))


def _summarise_effects(space: LayoutSpace, posterior: Posterior) -> Row | None:
    """Return the exact effects of parameters on the expected time, over all points that are likely to fit.

    None where they cannot be told apart.
    """
    likely = np.flatnonzero(posterior.fits >= _LIKELY)
    codes, values = space.codes[likely], posterior.log_seconds[likely]
    if not can_be_told_apart(codes):
        return None
    effects = shapley_effects([one.name for one in space.parameters], codes, values)
    # A parameter with one value left among these points has no pairs to show.
    varying = np.flatnonzero(np.ptp(codes, axis=0) > 0).tolist()
    parameters = [space.parameters[number] for number in varying]
    pairs = interactions(
        [one.name for one in parameters], codes[:, varying], values, [len(one.values) for one in parameters]
    )
    labels = {one.name: [str(value) for value in one.values] for one in parameters}
    return {
        "points": len(likely),
        "of": "logarithm of a step's time",
        "standard_deviation": effects.variance**0.5,
        "shapley_effects": dict(zip(effects.names, effects.shares.tolist(), strict=True)),
        "alone": dict(zip(effects.names, effects.alone.tolist(), strict=True)),
        "interactions": [
            {
                "of": list(pair.names),
                "share": pair.share,
                "values": [labels[name] for name in pair.names],
                "mean_s": [[None if np.isnan(cell) else float(np.exp(cell)) for cell in row] for row in pair.means],
            }
            for pair in pairs[:_SHOWN_PAIRS]
        ],
    }


def search_layouts(
    planner: Planner,
    task: Task,
    section: Search,
    where: str,
    path: Path,
    *,
    sampler_name: str,
    most: int,
    seed: int = 0,
    keep: bool = False,
    tell: Callable[[Trial, LayoutSpace], None] = lambda trial, space: None,
) -> SearchResult:
    """Search until `most` trials of the study ended, or none is expected to help.

    Args:
        planner: the planner of the machine, whose expectations are the prior.
        task: model, devices, and fields of the layout to keep.
        section: the run file's `search` section.
        where: local, slurm or simulated.
        path: the study's journal.
        sampler_name: see `make_layout_sampler`.
        most: trials of the study, all searches together.
        seed: of samplers that draw at random, and of the simulated truth.
        keep: whether run directories of trials stay.
        tell: called when a trial begins and when it has ended.

    Raises:
        ConfigError: something does not go together.
        StudyError: the file is no study.
        Interrupted: the process was asked to stop.
    """
    if where not in ("local", "slurm", "simulated"):
        raise ConfigError(f"--where {where} is not known; give one of local, slurm, simulated")
    space, prior = planned_space(planner, task, section)
    runner: Runner
    sampler = make_layout_sampler(sampler_name, space, prior, seed=seed, stop_gain=section.stop_gain)
    # A truth that is drawn around what the planner expects stands for the machine: samplers are compared without one.
    if where == "simulated":
        runner = SimulatedRunner(draw_truth(space, prior, planner.models, task.model, seed), seed)
    else:
        launcher = LocalRanks(task.devices) if where == "local" else whole_nodes(planner.machine, task.devices)
        runner = ProcessRunner(task.run, section, task.devices, launcher, keep)
    loop = LayoutSearch(
        StudyStore(path, STUDY, describe_search(planner, task, section, where, path, seed)),
        space,
        sampler,
        runner,
        sampler_name=sampler_name,
        most=most,
        limit_s=section.time_limit_s + _AROUND_S,
        tell=lambda trial: tell(trial, space),
    )
    stopped = loop.run()
    return SearchResult(task, planner.machine, space, prior, loop.store.trials(), stopped, path, where)


def describe_search(planner: Planner, task: Task, section: Search, where: str, path: Path, seed: int) -> Row:
    """Return what trials of one study have in common: others could not be compared with them."""
    run, machine, local = task.run, planner.machine, where == "local"
    recorded = StudyStore(path, STUDY, None).about.get("run") if path.exists() else None
    about = {
        "run": digest_run(run, section) if isinstance(recorded, str) else describe_run(run, section),
        "devices": task.devices,
        # Trials on this machine measure its devices, whatever cluster they are planned for.
        "cluster": "this machine" if local else machine.name,
        "device": device_kind(device_name(choose_device(run.cluster.device))) if local else machine.node.device,
        "where": where,
        "steps": [section.steps, section.skip],
    }
    return about | ({"seed": seed} if where == "simulated" else {})


def describe_run(run: Run, section: Search) -> dict[str, Row]:
    """Return all that the search does not choose and that decides what a step computes, and how fast, by section.

    Fields at their default are left out: one that a later version adds leaves the record of earlier studies as it is.
    """
    fields = run.model_dump(mode="json", include=set(_DIGESTED_FIELDS), exclude_defaults=True)
    fields["training"] = {name: fields["training"][name] for name in _STEP_FIELDS if name in fields["training"]}
    return _drop_chosen(fields, section)


def digest_run(run: Run, section: Search) -> str:
    """Return the digest that earlier versions recorded in place of what `describe_run` returns."""
    fields = run.model_dump(mode="json", include=set(_DIGESTED_FIELDS))
    kept = {place: {name: fields[place][name] for name in names} for place, names in _DIGESTED_FIELDS.items()}
    return hashlib.sha256(json.dumps(_drop_chosen(kept, section), sort_keys=True).encode()).hexdigest()[:16]


def _drop_chosen(fields: dict[str, Row], section: Search) -> dict[str, Row]:
    """Return fields of a run file, by section, without those that differ from trial to trial by intent."""
    chosen = {f"layout.{name}" for name in CHOSEN} | set(section.knobs)
    return {
        place: {name: value for name, value in values.items() if f"{place}.{name}" not in chosen}
        for place, values in fields.items()
    }
