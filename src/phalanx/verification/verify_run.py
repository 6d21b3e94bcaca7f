"""From a run file and layouts to verdicts: in the ranks this process is among, or in gloo ranks started for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from phalanx.config.schema import Run
from phalanx.errors import ConfigError, PhalanxError
from phalanx.families.registry import bind
from phalanx.hardware.cpu_formats import require_cpu_format
from phalanx.hardware.device import choose_device
from phalanx.launch.fork_server import RanksFailed, run_ranks
from phalanx.layout.mesh import Ranks, join_process_group, leave_process_group, ranks_from_environment
from phalanx.layout.resolve import every_layout, resolve_layout, stated_ranks
from phalanx.layout.spec import ResolvedLayout
from phalanx.precision import PRECISIONS
from phalanx.printable import write_stderr
from phalanx.verification.family import VerifiableModel
from phalanx.verification.reduced_run import full_run, reduced_run, with_small_batch
from phalanx.verification.verifier import Verdict, Verifier

MOST_RANKS = 256
"""Processes that are started here at most."""


@dataclass(frozen=True)
class Options:
    """What to verify, besides the run file."""

    ranks: int | None = None
    """Ranks to start where no launcher has; None takes as many as the degrees say."""
    everything: bool = False
    """Every legal layout rather than that of the run file."""
    full: bool = False
    """The model itself rather than a reduced one."""
    precision: str = "fp64"
    steps: int = 2
    timeout_s: float = 1800.0
    """Seconds after which ranks that do not answer are given up."""
    progress: bool = False
    """Whether the first rank writes a line to stderr for each layout."""


@dataclass(frozen=True)
class Outcome:
    """Verdicts and what they are about."""

    verdicts: list[Verdict]
    model: str
    """The model that ran, in words."""
    ranks: int
    fixed: str = ""
    """Choices of the run file that all layouts were tried with, where every legal layout was."""


def verify_run(run: Run, options: Options) -> Outcome:
    """Verify the layout of `run`, or every legal one. Under torchrun or srun every rank calls it and gets the outcome.

    Raises ConfigError before anything starts when a layout is not legal, and PhalanxError when ranks fail or hang.
    """
    ranks = ranks_from_environment()
    world = ranks.world_size if ranks.world_size > 1 else options.ranks or stated_ranks(run)
    if ranks.world_size == 1 and world > MOST_RANKS:
        raise ConfigError(
            f"{world:,} ranks are more than the {MOST_RANKS} that verify starts on one machine; take smaller degrees of the "
            "same kinds, which show as much, or start it with torchrun or srun"
        )
    # The batch of the small model is made to suit any degrees: that of the run file need not.
    judged = run if options.full else with_small_batch(run, world)
    layouts = list(every_layout(judged, world)) if options.everything else [resolve_layout(judged, world)]
    if not layouts:
        raise ConfigError(f"no layout is legal for {world} ranks with the other fields as they are")
    change = full_run if options.full else reduced_run
    small = change(run, options.precision, options.steps, world)
    # Ranks of our own compute on the CPU, whatever the machine has: devices are for those a launcher started.
    own_ranks = ranks.world_size == 1 and world > 1
    device = _CPU if own_ranks else choose_device(run.cluster.device, ranks.local_rank)
    require_cpu_format(PRECISIONS[small.layout.precision].compute_dtype, device)
    if ranks.world_size > 1:
        verdicts = _verify_under_launcher(small, layouts, options, ranks)
    elif world == 1:
        verdicts = _verify_all(small, layouts, options, device)
    else:
        verdicts = _verify_in_own_ranks(small, layouts, options, world)
    chosen = run.layout
    fixed = f"gather={chosen.gather} gather_blocks={chosen.gather_blocks} recompute={chosen.recompute}"
    return Outcome(verdicts, _describe_run(small), world, fixed if options.everything else "")


def _verify_under_launcher(run: Run, layouts: list[ResolvedLayout], options: Options, ranks: Ranks) -> list[Verdict]:
    device = choose_device(run.cluster.device, ranks.local_rank)
    join_process_group(ranks, device, timeout_s=options.timeout_s)
    verdicts = _verify_all(run, layouts, options, device)
    leave_process_group()
    return verdicts


def _verify_in_own_ranks(run: Run, layouts: list[ResolvedLayout], options: Options, world: int) -> list[Verdict]:
    try:
        results = run_ranks(_verify_all, world, run, layouts, options, timeout_s=options.timeout_s)
    except RanksFailed as failure:
        raise PhalanxError(f"verification did not come to an end\n{failure}") from failure
    # Every rank comes to the same verdicts.
    verdicts: list[Verdict] = results[0]
    return verdicts


_CPU = torch.device("cpu")


def _verify_all(
    run: Run, layouts: Sequence[ResolvedLayout], options: Options, device: torch.device = _CPU
) -> list[Verdict]:
    verifier = Verifier(run, device, steps=options.steps, activations=not options.full)
    verdicts = []
    for number, layout in enumerate(layouts, 1):
        verdicts.append(verifier.verify(layout))
        if options.progress and (not dist.is_initialized() or dist.get_rank() == 0):
            word = "PASS" if verdicts[-1].passed else "FAIL"
            write_stderr(f"{number}/{len(layouts)} {word} {verdicts[-1].in_words}")
    return verdicts


def _describe_run(run: Run) -> str:
    model = bind(run, VerifiableModel).in_words()
    return f"{model}, global batch {run.layout.global_batch}, {run.layout.precision}, {run.training.steps} steps"
