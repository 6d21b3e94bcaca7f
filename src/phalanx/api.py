"""What programs of your own call: one function for each subcommand, with typed results and nothing printed.

Everything here is given by `import phalanx` under the same name, and stays as it is between versions.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import torch
from torch import nn

from phalanx.config.families import FAMILIES, Family
from phalanx.config.schema import Run
from phalanx.data.sources import DATA_SOURCES, DataSource
from phalanx.errors import PhalanxError
from phalanx.families.registry import bind
from phalanx.hardware.device import choose_device
from phalanx.hardware.machine import load_machine
from phalanx.layout.apply import ParallelModel, apply_layout
from phalanx.layout.context_parallel.kernel_choice import AttentionChoice
from phalanx.layout.execute import Executor
from phalanx.layout.mesh import ONE_RANK
from phalanx.layout.resolve import resolve_layout
from phalanx.nn.adapters import merge_adapters
from phalanx.optimizers.optimizer_kind import OPTIMIZERS, OptimizerKind
from phalanx.planner.dryrun.rank_report import RankReport
from phalanx.planner.dryrun.run_step import dry_run
from phalanx.planner.plan.make_plan import Plan, Wishes, make_plan
from phalanx.planner.rank.cost_models import CostModels
from phalanx.planner.rank.ranking import Planner, Task
from phalanx.planner.time.profile import choose_profile
from phalanx.planner.trace.traced_model import TracedModel, bind_planned
from phalanx.training.callbacks import CALLBACKS, Callback
from phalanx.training.checkpointing import find_trained_run, load_weights
from phalanx.training.inputs import Finding, TrainableModel
from phalanx.training.start import train as train_run
from phalanx.training.step import build_full_step
from phalanx.verification.verify_run import Options, Outcome, one_rank_run, verify_run


def register(item: Family | type[DataSource] | type[Callback] | OptimizerKind, name: str | None = None) -> None:
    """Make a family, a data source, a callback or an optimizer known to this process, as entry points do to every one.

    Ranks and trials that are started as processes of their own know an item only where they import what registers it.

    item: a `Family`, a subclass of `DataSource` or `Callback`, or an `OptimizerKind`. name: what run files call it; by
    default the family's name, or the class's. Raises PhalanxError for a name that is taken.
    """
    if isinstance(item, Family):
        FAMILIES.register(name or item.name, item)
    elif isinstance(item, type) and issubclass(item, DataSource):
        DATA_SOURCES.register(name or item.__name__, item)
    elif isinstance(item, type) and issubclass(item, Callback):
        CALLBACKS.register(name or item.__name__, item)
    elif isinstance(item, OptimizerKind):
        OPTIMIZERS.register(name or type(item).__name__, item)
    else:
        raise PhalanxError(
            f"phalanx.register takes a Family, a subclass of DataSource or Callback, or an OptimizerKind, not {item!r}"
        )


def plan(run: Run, cluster: str, devices: int, *, profile: str | None = None, least_probability: float = 0.9) -> Plan:
    """Return the layouts that are worth running, fastest first, with their time and memory.

    cluster: name of a machine, or path of its YAML file. devices: how many train. profile: name of the device's measured
    rates; None takes the best known ones. least_probability: that a layout fits into memory, for it to be taken.

    Raises ConfigError for a run that cannot be planned for and a machine that is not known, NothingFits where no layout
    fits.
    """
    model = bind_planned(run)
    machine = load_machine(cluster)
    planner = Planner(machine, CostModels(machine, choose_profile(machine, cluster, profile)), least_probability)
    return make_plan(planner, Task(model, devices), Wishes())


def dryrun(
    run: Run, devices: int, rank: int = 0, *, device: str = "gpu", devices_per_node: int | None = None
) -> RankReport:
    """Run one optimizer step of `rank` of `devices` without memory or neighbours, and return what it takes.

    device: "gpu" computes with an accelerator's kernels, "cpu" with the CPU's. The report has the peak in bytes, what it is
    held for, and every collective. Raises ConfigError for a layout that is not legal.
    """
    model = bind(run, TracedModel)
    layout, accelerator = resolve_layout(model, devices, devices_per_node), device == "gpu"
    return dry_run(model, layout, rank, build_full_step, accelerator=accelerator, devices_per_node=devices_per_node)


def verify(
    run: Run, ranks: int | None = None, *, every_layout: bool = False, precision: str = "fp64", steps: int = 2
) -> Outcome:
    """Compare the layout of `run`, or every legal one, with one rank: losses, gradients and updated parameters.

    ranks: processes to start on this machine; None takes as many as the degrees multiply to. The model is reduced, so that
    it runs on a CPU. Read `Outcome.verdicts`: each has `passed` and the first thing that differs. Raises ConfigError for a
    layout that is not legal, PhalanxError where ranks fail or hang.
    """
    return verify_run(run, Options(ranks, every_layout, precision=precision, steps=steps))


def train(run: Run, run_dir: Path | str, *, until: int | None = None) -> None:
    """Train `run` in the ranks that a launcher started, or in this process alone, from wherever `training.resume` says.

    run_dir: where metrics and checkpoints go. until: a step to end at before `training.steps`. Raises ConfigError, DataError
    and CheckpointError for what is wrong with the run, its data and what is on disk, Interrupted when asked to stop.
    """
    train_run(run, Path(run_dir), until=until)


def load_model(path: Path | str, *, device: str = "cpu") -> nn.Module:
    """Return the model of the newest checkpoint of a run directory, or of one checkpoint, whole and in evaluation mode.

    Any layout may have written it. The module's forward pass is that of its family. Raises CheckpointError where there is
    no whole checkpoint.
    """
    _, model = _load_on_one_rank(Path(path), choose_device(device), ())
    module: nn.Module = model.stages[0].part
    return merge_adapters(module).eval().requires_grad_(False)


def evaluate(path: Path | str, overrides: Sequence[str] = (), *, device: str = "cpu") -> list[Finding]:
    """Return what the evaluation in training would find now, for the newest checkpoint at `path`, on one rank.

    overrides: fields of its run file to change, as "data.sources=[...]". `Finding.fields` holds the numbers. Raises
    CheckpointError where there is no whole checkpoint, DataError for data that are not there.
    """
    chosen = choose_device(device)
    bound, model = _load_on_one_rank(Path(path), chosen, overrides)
    inputs = bound.open_inputs(model.layout, ONE_RANK, chosen, first=True)
    with closing(inputs.stream):
        return inputs.evaluator.evaluate(Executor(model))


def _load_on_one_rank(
    path: Path, device: torch.device, overrides: Sequence[str]
) -> tuple[TrainableModel, ParallelModel]:
    """Return the bound model of the newest checkpoint at `path`, and that model on one rank with those weights."""
    _, written = find_trained_run(path, overrides)
    bound = bind(one_rank_run(written), TrainableModel)
    model = apply_layout(bound, resolve_layout(bound, 1), ONE_RANK, device, AttentionChoice("sdpa"), fill=False)
    load_weights(path, model)
    model.refresh()
    return bound, model
