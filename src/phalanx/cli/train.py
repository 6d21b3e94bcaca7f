"""`phalanx train`: run a run file, or go on with a run directory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from phalanx.cli.options.training import TrainArguments
from phalanx.cli.ranks import loaded_modules, require_no_ranks
from phalanx.config.load import load_run, parse_overrides
from phalanx.config.schema import Run
from phalanx.errors import ConfigError
from phalanx.families.registry import bind
from phalanx.launch.__main__ import become_supervisor
from phalanx.launch.faults import Limits
from phalanx.launch.job_script import parse_walltime
from phalanx.launch.nodes.supervisors import find_place
from phalanx.launch.restart import RestartPolicy
from phalanx.launch.wall_time import set_time_limit
from phalanx.layout.resolve import fallback_layouts, resolve_layout
from phalanx.training.start import train


def run_train(asked: TrainArguments) -> None:
    """Run the subcommand."""
    words = asked.overrides or []
    loaded = load_run(asked.run, words)
    if asked.time is not None:
        set_time_limit(parse_walltime(asked.time))
    if asked.nproc is None:
        if (asked.nodes, asked.node_rank, asked.rendezvous) != (None, None, None):
            raise ConfigError("--nodes, --node-rank and --rendezvous need --nproc, the ranks of each node")
        train(loaded, asked.run_dir or choose_run_directory(loaded, asked.run, words), until=asked.until)
        return
    # what is wrong with the layout is said once, here, and not by every rank
    model = bind(loaded)
    place = find_place(asked.nodes, asked.node_rank, asked.rendezvous)
    layout = resolve_layout(model, asked.nproc * (1 if place is None else place.nodes), asked.nproc)
    if place is None:
        require_no_ranks(asked.nproc)
    where = [] if asked.run_dir is None else ["--run-dir", str(asked.run_dir)]
    if asked.until is not None:
        where += ["--until", str(asked.until)]
    policy = _restart_policy(loaded, asked.run_dir or choose_run_directory(loaded, asked.run, words))
    if loaded.restart.layout == "replan":
        policy = replace(policy, layouts=fallback_layouts(model, layout, None if place is None else asked.nproc))
    modules = loaded_modules()
    wanted = loaded.training.compile
    accelerated = loaded.cluster.device != "cpu" and torch.accelerator.current_accelerator() is not None
    if wanted is True or (wanted == "auto" and accelerated):
        # Not the rest of the compiler: it opens the device as it loads, and of a process that has, no rank can be forked.
        modules += ("torch._dynamo",)
    policy = replace(policy, preload=modules)
    become_supervisor(["train", str(asked.run), *where, *words], asked.nproc, asked.grace, policy, place)


def _restart_policy(run: Run, run_dir: Path) -> RestartPolicy:
    """Return how the ranks of `run` are watched and restarted."""
    wanted = run.restart
    return RestartPolicy(
        most=wanted.max,
        backoff_s=wanted.backoff_s,
        limits=Limits(wanted.heartbeat_s, wanted.slow_s),
        run_dir=run_dir,
        # by then the folder holds the run's own checkpoints
        words=("training.resume=auto",) if run.training.resume == "never" else (),
    )


def choose_run_directory(loaded: Run, run: Path, overrides: list[str]) -> Path:
    """Return where a run goes whose command has no --run-dir.

    A folder resumes where it is, though the run file in it may name another: the one it began in, before it was moved or
    copied, or the one that --run-dir was given in place of.
    """
    # a run file trains below the working directory
    default = run if run.is_dir() else Path("runs") / run.stem
    named_here = any(change.path == ("training", "run_dir") for change in parse_overrides(overrides))
    return Path(loaded.training.run_dir or default) if named_here or not run.is_dir() else default
