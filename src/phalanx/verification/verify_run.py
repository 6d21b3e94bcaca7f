"""From a run file and layouts to verdicts: the same steps in a layout and on one rank, side by side.

The ranks are those that a launcher started this process among, or gloo ranks started here. Unless the model itself is asked
for, a small run of the same shape class is verified, whose layouts are legal where those of the real run are. It keeps every
kind of layer, the number of query heads a key/value head, evenness of the vocabulary, dropout, masks, z-loss and recompute;
widths, heads, layers, vocabulary, sequence and batch are made small.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from phalanx.config.check import check_run, global_batch_samples
from phalanx.config.problems import config_error
from phalanx.config.schema import Run
from phalanx.errors import ConfigError, PhalanxError
from phalanx.families.registry import bind
from phalanx.hardware.device import choose_device, require_cpu_format
from phalanx.launch.fork_server import RanksFailed, run_ranks
from phalanx.layout.mesh import (
    ONE_RANK,
    Groups,
    Mesh,
    build_mesh,
    join_process_group,
    leave_process_group,
    ranks_from_environment,
)
from phalanx.layout.resolve import every_layout, resolve_layout, stated_ranks
from phalanx.layout.spec import ONE_RANK_FIELDS, ResolvedLayout
from phalanx.nn.precision import PRECISIONS
from phalanx.optimizers import find_optimizer
from phalanx.printable import write_stderr
from phalanx.verification.compare_records import Check, ChoiceCheck, compare_records
from phalanx.verification.error_bounds import NOISE_RUNS, Bound, ErrorBound, MeasuredBound, parts_of_sums
from phalanx.verification.exchange_records import Exchange
from phalanx.verification.family import VerifiableModel
from phalanx.verification.record_training import Perturbation, Record, record_training
from phalanx.verification.replay_routing import Choices, StepRouting

MOST_RANKS = 256
"""Processes that are started here at most."""
OPTIMIZER_EPS = 1e-3
"""AdamW's epsilon while verifying, about the size of the gradients: near-zero gradients would otherwise turn rounding
errors into whole steps of either sign."""
_MOST_SAMPLES = 2
"""Samples of a micro-batch: each further one is computed as the second is."""
_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Options:
    """How to verify a run file."""

    ranks: int | None = None
    """Ranks to start where no launcher has; None takes as many as the degrees say."""
    everything: bool = False
    """Every legal layout rather than that of the run file."""
    full: bool = False
    """The model itself rather than a reduced one."""
    precision: str = "fp64"
    """Number format to compute in: the wider, the smaller a mistake that shows."""
    steps: int = 2
    """Optimizer steps; from the second on, updates and their optimizer state show too."""
    timeout_s: float = 1800.0
    """Seconds after which ranks that do not answer are given up."""
    progress: bool = False
    """Whether the first rank writes a line to stderr for each layout."""


@dataclass(frozen=True)
class Outcome:
    """Verdicts on all layouts of a run."""

    verdicts: list[Verdict]
    model: str
    """The model that ran, in words."""
    ranks: int
    fixed: str = ""
    """Choices of the run file that all layouts had in common, where every legal layout was verified."""


@dataclass(frozen=True)
class Verdict:
    """The outcome for one layout."""

    layout: str
    in_words: str
    """The layout with its micro-batches and what else it was computed with."""
    bound: str
    checks: list[Check]
    seconds: float

    @property
    def passed(self) -> bool:
        """Return whether every check is within its bound."""
        return all(check.passed for check in self.checks)

    @property
    def first(self) -> Check | None:
        """Return the first check that failed, in the order of computation; None where all passed."""
        return next((check for check in self.checks if not check.passed), None)

    @property
    def otherwise(self) -> tuple[int, int] | None:
        """Return how many choices of experts would have been other than on one rank, of how many; None without any."""
        checks = [check for check in self.checks if isinstance(check, ChoiceCheck)]
        return (sum(c.otherwise for c in checks), sum(c.tokens for c in checks)) if checks else None

    @property
    def module(self) -> str:
        """Return the first module that is out of its bound, in the order of computation; empty where there is none."""
        return next((check.module for check in self.checks if not check.passed and check.module), "")

    def worst(self, what: str) -> Check | None:
        """Return the check of this kind that comes nearest to its bound, or exceeds it most."""
        return max((c for c in self.checks if c.what == what), key=lambda c: c.error / c.bound, default=None)

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON: all that failed, and the worst of each kind."""
        kinds = dict.fromkeys(check.what for check in self.checks)
        worst = {what: check.as_dict() for what in kinds if (check := self.worst(what))}
        failed = [check.as_dict() for check in self.checks if not check.passed]
        return {
            "layout": self.layout,
            "in_words": self.in_words,
            "passed": self.passed,
            "bound": self.bound,
            "module": self.module,
            "first": self.first.as_dict() if self.first else None,
            "worst": worst,
            "failed": failed,
            "choices": None if self.otherwise is None else dict(zip(("otherwise", "of"), self.otherwise, strict=True)),
            "seconds": round(self.seconds, 3),
        }


def verify_run(run: Run, options: Options) -> Outcome:
    """Verify the layout of `run`, or every legal one. Under torchrun or srun every rank calls it and gets the outcome.

    Raises ConfigError before anything starts when a layout is not legal, and PhalanxError when ranks fail or hang.
    """
    model = bind(run, VerifiableModel)
    options = replace(options, steps=max(options.steps, model.least_steps()))
    ranks = ranks_from_environment()
    launched = ranks.world_size > 1
    world = ranks.world_size if launched else options.ranks or stated_ranks(run)
    if not launched and world > MOST_RANKS:
        raise ConfigError(
            f"{world:,} ranks are more than the {MOST_RANKS} that verify starts on one machine; take smaller degrees of the "
            "same kinds, which show as much, or start it with torchrun or srun"
        )
    # The batch of the small model is made to suit any degrees: that of the run file need not.
    # Legality may depend on the number format, and what is verified is that of the options.
    judged = model.rebind(_change_sections(run, {"layout": {"precision": options.precision}}))
    problems = [problem for problem in check_run(judged.run) if problem.path == ("layout", "precision")]
    if problems:
        raise config_error(problems)
    if not options.full:
        judged = judged.rebind(with_small_batch(judged.run, world))
    layouts = every_layout(judged, world) if options.everything else [resolve_layout(judged, world)]
    if not layouts:
        raise ConfigError(f"no layout is legal for {world} ranks with the other fields as they are")
    if options.full:
        verified = full_run(run, options.precision, options.steps, model.fitted_to_samples())
    else:
        verified = reduced_run(model, options.precision, options.steps, world)
    model = model.rebind(verified)
    # Ranks of our own compute on the CPU, whatever the machine has: devices are for those a launcher started.
    own_ranks = world > 1 and not launched
    device = _CPU if own_ranks else choose_device(run.cluster.device, ranks.local_rank)
    require_cpu_format(PRECISIONS[verified.layout.precision].compute_dtype, device)
    if own_ranks:
        try:
            # Every rank comes to the same verdicts.
            verdicts = run_ranks(_verify_layouts, world, model, layouts, options, timeout_s=options.timeout_s)[0]
        except RanksFailed as failure:
            raise PhalanxError(f"verification did not come to an end\n{failure}") from failure
    else:
        if launched:
            # A layout that deadlocks is a finding too: collectives give up after the time limit.
            join_process_group(ranks, device, timeout_s=options.timeout_s)
        verdicts = _verify_layouts(model, layouts, options, device)
        if launched:
            leave_process_group()
    words = (
        f"{model.in_words()}, global batch {verified.layout.global_batch}, {verified.layout.precision}, "
        f"{verified.training.steps} steps"
    )
    chosen = run.layout
    fixed = f"gather={chosen.gather} gather_blocks={chosen.gather_blocks} recompute={chosen.recompute}"
    return Outcome(verdicts, words, world, fixed if options.everything else "")


def _verify_layouts(
    model: VerifiableModel, layouts: Sequence[ResolvedLayout], options: Options, device: torch.device = _CPU
) -> list[Verdict]:
    """Return the verdict on each layout, as one of the ranks that compute them."""
    verifier = Verifier(model, device, steps=options.steps, activations=not options.full)
    verdicts = []
    for number, layout in enumerate(layouts, 1):
        verdicts.append(verifier.verify(layout))
        if options.progress and (not dist.is_initialized() or dist.get_rank() == 0):
            word = "PASS" if verdicts[-1].passed else "FAIL"
            write_stderr(f"{number}/{len(layouts)} {word} {verdicts[-1].in_words}")
    return verdicts


class Verifier:
    """Verifies layouts of one model, in the process group that this rank is in (or alone)."""

    def __init__(
        self,
        model: VerifiableModel,
        device: torch.device,
        *,
        steps: int,
        activations: bool,
        groups: Groups | None = None,
    ) -> None:
        """Compute the one-rank record on rank 0.

        activations: whether to compare them too; they must fit in memory. groups: process groups to share with other
        verifiers.
        """
        self.model = model
        self.device = device
        self.steps = steps
        self.activations = activations
        self.reference: Record | None = None
        self._groups: Groups = {} if groups is None else groups
        self._exchange = Exchange()
        precision = PRECISIONS[model.run.layout.precision]
        batch = global_batch_samples(model.run)
        targets = int(model.samples(1, 0, batch, batch).target_counts().max())
        self._formula = ErrorBound(precision.compute_dtype, model.run.model.n_layers, targets)
        self._measured = precision.compute_dtype.itemsize < 8
        """Whether bounds are measured: float64 leaves so little that its formula does for all tensors."""
        # Once for all layouts, and on one rank only: the others get its tensors as they compare.
        noise: dict[tuple[str, str, int], float] = {}
        if not dist.is_initialized() or dist.get_rank() == 0:
            self.reference = self._record_one_rank()
            if self._measured:
                noise = self._measure_noise(self.reference)
        finite = self.reference is None or all(math.isfinite(step.grad_norm) for step in self.reference.steps)
        if not self._exchange.from_first(finite):
            raise PhalanxError(f"gradients of one rank are not finite in {precision.name}; verify in a wider format")
        self.noise = self._exchange.from_first(noise)
        """Largest error of any perturbed one-rank run, by kind, name and step of the check; empty where none is measured."""
        self.choices: list[Choices] | None = [
            self._send_choices(None if self.reference is None else self.reference.steps[number].routing)
            for number in range(steps)
        ]
        """What routers chose on one rank in each step, which every layout replays; None lets layouts choose."""

    def verify(self, layout: ResolvedLayout) -> Verdict:
        """Compare `layout` with one rank. Every rank calls it and gets the same verdict."""
        start = time.perf_counter()
        mesh = build_mesh(layout, self.device, self._groups)
        mine = self._record(self.model, layout, mesh, self.choices)
        bound: Bound = self._formula
        if self._measured:
            bound = MeasuredBound(self._formula, self.noise, parts_of_sums(layout))
        checks = self._compare(mine, self.reference, bound)
        # Ranks' clocks differ, and all must return one verdict.
        seconds = self._exchange.from_first(time.perf_counter() - start)
        in_words = layout.in_words(self.model.run.layout)
        return Verdict(str(layout), in_words, str(bound), checks, seconds)

    def _record_one_rank(
        self,
        choices: Sequence[Choices] | None = None,
        perturbation: Perturbation | None = None,
        *,
        larger_microbatch: bool = False,
    ) -> Record:
        """Return the record of one rank, which all ranks but the first do without."""
        single = self.model.rebind(one_rank_run(self.model.run))
        layout = resolve_layout(single, 1)
        if larger_microbatch and layout.accumulation % 2 == 0:
            layout = replace(layout, microbatch=2 * layout.microbatch)
        return self._record(single, layout, ONE_RANK, choices, perturbation)

    def _record(
        self,
        model: VerifiableModel,
        layout: ResolvedLayout,
        mesh: Mesh,
        choices: Sequence[Choices] | None,
        perturbation: Perturbation | None = None,
    ) -> Record:
        return record_training(
            model,
            layout,
            mesh,
            self.device,
            steps=self.steps,
            activations=self.activations,
            # What a step adds to a parameter is less than the parameter's own rounding in 16 bits.
            updates=self._formula.in_16_bits,
            choices=choices,
            perturbation=perturbation,
        )

    def _measure_noise(self, reference: Record) -> dict[tuple[str, str, int], float]:
        """Return how far runs of one rank are from `reference` that differ from it by rounding alone."""
        # Enough to draw roundings anew. What is changed by less than its spacing moves by a whole one or not at all, and on
        # average by about as much as rounding a number moves it.
        size = self._formula.eps / 16.0
        choices = [step.routing.chosen for step in reference.steps]
        noise: dict[tuple[str, str, int], float] = {}
        for number in range(NOISE_RUNS):
            # Every second run also adds micro-batches up in another way.
            run = self._record_one_rank(choices, Perturbation(number, size), larger_microbatch=number % 2 == 1)
            for check in self._compare(run, reference, self._formula, alone=True):
                key = check.what, check.name, check.step
                noise[key] = max(noise.get(key, 0.0), check.error)
        return noise

    def _compare(self, mine: Record, reference: Record | None, bound: Bound, *, alone: bool = False) -> list[Check]:
        optimizer = self.model.run.optimizer
        gain = find_optimizer(optimizer).update_gain(optimizer)
        if gain is not None:
            gain *= max([1.0, *optimizer.lr_ratios.values()])
        layers = self.model.run.model.n_layers
        return compare_records(mine, reference, bound, layers, gain, self.model.vanishing, alone=alone)

    def _send_choices(self, routing: StepRouting | None) -> Choices:
        """Return the choices of one step on every rank. routing: what rank 0 recorded; None elsewhere."""
        names = self._exchange.from_first(None if routing is None else list(routing.chosen)) or []
        return dict(self._exchange.send_from_first(names, None if routing is None else routing.chosen))


def with_small_batch(run: Run, world_size: int) -> Run:
    """Return `run` with a batch that every choice of degrees for `world_size` ranks divides into enough micro-batches."""
    stated = run.layout.microbatch
    microbatch = _MOST_SAMPLES if stated == "auto" else min(stated, _MOST_SAMPLES)
    layout = {"microbatch": microbatch, "global_batch": 2 * microbatch * world_size, "batch_warmup": []}
    return _change_sections(run, {"layout": layout, "training": {"noise_scale_every": None}})


def reduced_run(model: VerifiableModel, precision: str, steps: int, world_size: int) -> Run:
    """Return a small run for which every layout is legal that is for the model's run with a small batch.

    precision: number format to compute in. steps: optimizer steps. world_size: ranks of the layouts.
    """
    small = model.reduced(world_size)
    return _change_sections(with_small_batch(model.run, world_size), small, _verification_settings(precision, steps))


def full_run(run: Run, precision: str, steps: int, fitted: dict[str, dict[str, Any]] | None = None) -> Run:
    """Return the run itself, with only what verification needs changed.

    fitted: see `VerifiableModel.fitted_to_samples`; the other arguments are as of `reduced_run`.
    """
    return _change_sections(run, fitted or {}, _verification_settings(precision, steps))


def one_rank_run(run: Run) -> Run:
    """Return the same run on one rank."""
    return _change_sections(run, {"layout": ONE_RANK_FIELDS})


def _verification_settings(precision: str, steps: int) -> dict[str, dict[str, Any]]:
    """Return what every verified run has changed: no schedule and no compiler, one attention kernel, fresh weights."""
    return {
        "layout": {"precision": precision},
        "optimizer": {"eps": OPTIMIZER_EPS, "schedule": "constant", "warmup_steps": 0, "lr": 1e-2},
        "training": {"steps": steps, "compile": False, "attention": "sdpa", "init_from": None},
    }


def _change_sections(run: Run, *changes: dict[str, dict[str, Any]]) -> Run:
    """Return `run` with other values of some fields of some sections; later changes go before earlier ones."""
    content = run.model_dump()
    for sections in changes:
        for name, fields in sections.items():
            content[name] = {**content[name], **fields}
    return type(run).model_validate(content)
