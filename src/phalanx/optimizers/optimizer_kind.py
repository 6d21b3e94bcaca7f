"""Optimizers by name: how each is built and updated, what it costs, and the learning rate of a step.

Another optimizer is a subclass of `OptimizerKind`, given to `OPTIMIZERS.register` or offered by an installed package:

    [project.entry-points."phalanx.optimizers"]
    sophia = "my_package.sophia:SOPHIA"
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from phalanx.config.schema import OWN_OPTIMIZERS, Optimizer, Run
from phalanx.errors import ConfigError
from phalanx.extensions import Registry
from phalanx.kernels.float8 import QuantisedCopy
from phalanx.nn.parameters import ParameterKind
from phalanx.optimizers.whole_matrices import WholeMatrices

Group = dict[str, Any]
"""Parameters that are updated alike, as `torch.optim.Optimizer` takes them: `params`, `weight_decay` and, where it
is not 1, `lr_ratio` with the first `lr`."""


class OptimizerKind(ABC):
    """An optimizer that run files can name: how it is built and updated, and what it costs, for the planner.

    Parameters come as this rank holds them: whole, or as DTensors of which it has a shard. State that is shaped like its
    parameter is saved and loaded in any layout; a checkpoint names it `optimizer.<parameter>.<key of the state>`. All state
    must be tensors, and must come into being in the first `step`.
    """

    state_values: float
    """Values kept for each parameter, in the format of the main parameters: 2 for AdamW's two moments; less than one for
    what is kept in fewer bits."""
    value_passes: int
    """Values that an update reads or writes for each parameter, gradient included: 7 for AdamW."""
    per_parameter: bool = False
    """Whether an update gives each parameter the same bits whichever others it is called for: `layout.offload_optimizer`
    calls it for some parameters after the others."""

    @property
    def matrix_state_values(self) -> float:
        """Values kept for each element of a matrix that is updated whole (see `matrix_flops`); by default as for others."""
        return self.state_values

    @abstractmethod
    def build(self, groups: Sequence[Group], config: Optimizer, held: HeldParameters) -> torch.optim.Optimizer:
        """Return a fresh optimizer over `groups`, with the learning rate `config.lr`.

        held: how this rank holds the parameters; most optimizers need not know. A group's `lr_ratio` multiplies every
        learning rate that it is given later. Raises ConfigError for options that it does not know.
        """

    def update(self, optimizer: torch.optim.Optimizer, divisor: Tensor, skip: Tensor) -> None:
        """Update with every gradient divided by `divisor`, or not at all where `skip` is 1 (both float32, 0-dim).

        Waits for the device, to see whether to skip; an optimizer whose kernels read both for themselves does better.
        """
        if bool(skip):
            return
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.div_(divisor.to(parameter.grad.dtype))
        optimizer.step()

    def update_gain(self, config: Optimizer) -> float | None:
        """Return the largest change of a parameter for a change of its gradient, in one update; None where nobody knows.

        Verification asks it, to tell how far rounding errors of gradients may move parameters. Without an answer it compares
        losses and gradients, and no parameters.
        """
        return None

    def matrix_flops(self, config: Optimizer, rows: int, columns: int) -> float:
        """Return the floating-point operations that an update takes for a whole matrix beyond those for its elements.

        An optimizer for which this is not 0 has each matrix gathered by one rank (`WholeMatrices`). Plans count these
        operations, what travels for them, and what ranks hold meanwhile.
        """
        return 0.0

    def written_copies(self, optimizer: torch.optim.Optimizer) -> Sequence[Tensor]:
        """Return the copies of `HeldParameters` that the last update wrote, of parameters in 8 bits `q`; none by default."""
        return ()


class ScaledUpdates(torch.optim.Optimizer):
    """An optimizer that reads on the device what divides gradients, and whether to skip; its kind is a `ScaledUpdatesKind`.

    It updates one parameter after the other by `update_parameter`, unless it replaces `update`.
    """

    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Update with the gradients as they are."""
        assert closure is None
        one = torch.ones((), device=self.param_groups[0]["params"][0].device)
        self.update(one, torch.zeros_like(one))

    @torch.no_grad()
    def update(self, divisor: Tensor, skip: Tensor) -> None:
        """Update with every gradient divided by `divisor`, or not at all where `skip` is 1 (both float32, 0-dim)."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.update_parameter(parameter, group, divisor, skip)

    def update_parameter(self, parameter: Tensor, group: dict[str, Any], divisor: Tensor, skip: Tensor) -> None:
        """Update one parameter that has a gradient, with the settings of its group."""
        raise NotImplementedError


class ScaledUpdatesKind(OptimizerKind):
    """A kind of `ScaledUpdates`."""

    def update(self, optimizer: torch.optim.Optimizer, divisor: Tensor, skip: Tensor) -> None:
        """Update without waiting for the device: `divisor` and `skip` are read there."""
        assert isinstance(optimizer, ScaledUpdates)
        optimizer.update(divisor, skip)


@dataclass(frozen=True)
class HeldParameters:
    """How a rank holds its parameters, beside their values."""

    compute_copies: Mapping[Tensor, Tensor] = field(default_factory=dict)
    """Of each main parameter that is computed with in another format, the copy in that format. An optimizer may write these
    as it updates, and then says so in `OptimizerKind.written_copies`; the others are renewed after the update."""
    quantised_copies: Mapping[Tensor, QuantisedCopy] = field(default_factory=dict)
    """Of main parameters that are multiplied in 8 bits with one scale: an optimizer may write numbers and largest size as it
    updates, and then names the numbers in `OptimizerKind.written_copies`."""
    matrices: WholeMatrices = field(default_factory=WholeMatrices)
    """Which parameters are matrices, and how they become whole where an update needs them so."""


OPTIMIZERS: Registry[OptimizerKind] = Registry(
    "phalanx.optimizers",
    built_in={name: f"phalanx.optimizers.{name}:{name.upper()}" for name in OWN_OPTIMIZERS},
    accepts=lambda item: isinstance(item, OptimizerKind),
    expected="an instance of a subclass of phalanx.optimizers.OptimizerKind",
)
"""Every optimizer that `optimizer.name` may name."""


def find_optimizer(config: Optimizer) -> OptimizerKind:
    """Return the optimizer that the run file names. Raises ConfigError where there is none of that name."""
    return OPTIMIZERS.get(config.name, "optimizer.name")


def kept_values(run: Run, *, matrix: bool = False) -> float:
    """Return the values that a run keeps for each parameter beside it: optimizer state, and the average of the weights.

    matrix: for each element of a matrix that is updated whole; else of any other parameter.
    """
    kind = find_optimizer(run.optimizer)
    return (kind.matrix_state_values if matrix else kind.state_values) + (run.training.ema is not None)


def updates_whole_matrices(config: Optimizer) -> bool:
    """Return whether the optimizer that the run file names needs each matrix whole."""
    return find_optimizer(config).matrix_flops(config, 2, 2) > 0


def build_optimizer(
    parameters: Mapping[str, nn.Parameter],
    config: Optimizer,
    parameter_kind: Callable[[str], ParameterKind],
    held: HeldParameters | None = None,
    rate_ratio: Callable[[str], float] = lambda name: 1.0,
    kind: OptimizerKind | None = None,
) -> torch.optim.Optimizer:
    """Return the optimizer that `config` names over parameters by name, those with weight decay first.

    Frozen parameters, which require no gradient, are in none of its groups.

    parameter_kind: of the parameter with this name, as its family says. held: see `OptimizerKind.build`; by default all
    parameters are whole, and none is a matrix. rate_ratio: factor of the learning rate by parameter, beside those of
    `config`. kind: what builds it; by default the optimizer of that name.
    """
    groups: dict[tuple[float, float, bool], Group] = {}
    for name, parameter in parameters.items():
        # Frozen: no update, and no state.
        if not parameter.requires_grad:
            continue
        ratio = learning_rate_ratio(name, config) * rate_ratio(name)
        decay = 0.0 if parameter_kind(name) in config.no_decay else config.weight_decay
        # One fused kernel takes either plain tensors (streamed matrices) or sharded ones, so they are groups of their own.
        alike = (decay, ratio, isinstance(parameter, DTensor))
        group = groups.setdefault(alike, {"params": [], "weight_decay": decay})
        if ratio != 1.0:
            group |= {"lr": config.lr * ratio, "lr_ratio": ratio}
        group["params"].append(parameter)
    if not groups:
        # A rank of a pipeline may hold frozen parameters alone.
        groups[0.0, 1.0, False] = {"params": [], "weight_decay": 0.0}
    ordered = sorted(groups.values(), key=lambda group: -group["weight_decay"])
    return (kind or find_optimizer(config)).build(ordered, config, held or HeldParameters())


def learning_rate_ratio(name: str, config: Optimizer) -> float:
    """Return the factor of the learning rate of the parameter `name`."""
    return next((ratio for pattern, ratio in config.lr_ratios.items() if fnmatchcase(name, pattern)), 1.0)


def set_learning_rate(optimizer: torch.optim.Optimizer, value: float) -> None:
    """Use `value` in every group from the next update on, times the group's `lr_ratio` where it has one."""
    for group in optimizer.param_groups:
        group["lr"] = value * group.get("lr_ratio", 1.0)


def refuse_options(config: Optimizer) -> None:
    """Raise ConfigError where `optimizer.options` holds anything: for optimizers whose settings are fields."""
    if config.options:
        raise ConfigError(f"optimizer.options={config.options}: {config.name} has none; leave them out")


def local_part(tensor: Tensor) -> Tensor:
    """Return this rank's elements of `tensor`: the memory itself, not a copy."""
    local: Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local


DECAYS: dict[str, Callable[[float], float]] = {
    "constant": lambda progress: 1.0,
    "linear": lambda progress: 1.0 - progress,
    "cosine": lambda progress: 0.5 * (1.0 + math.cos(math.pi * progress)),
    "wsd": lambda progress: 1.0 - progress,
}
"""How far above its minimum the rate is, 1 to 0, by the progress of its decay, 0 to 1, for each `optimizer.schedule`."""


@dataclass(frozen=True)
class LearningRateSchedule:
    """The learning rates of a run of `total_steps` optimizer steps.

    Linear warm-up reaches the peak at `warmup_steps`. cosine and linear then fall to `min_lr_ratio` of it at the last step;
    wsd (Hu et al. 2024, section 4) stays at the peak and falls linearly over the last `decay_fraction` of all steps.
    """

    config: Optimizer
    total_steps: int

    def rate(self, step: int) -> float:
        """Return the learning rate of optimizer step `step`, counted from 1."""
        config = self.config
        if step < config.warmup_steps:
            return config.lr * step / config.warmup_steps
        decay_start = config.warmup_steps
        if config.schedule == "wsd":
            # Rounded to the nearest step: rounding up would add one wherever the product is not exact.
            decay_start = max(decay_start, self.total_steps - round(config.decay_fraction * self.total_steps))
        # A run that is extended past its last step stays at the minimum.
        progress = min(1.0, max(0.0, (step - decay_start) / max(1, self.total_steps - decay_start)))
        above_minimum = DECAYS[config.schedule](progress)
        return config.lr * (config.min_lr_ratio + (1.0 - config.min_lr_ratio) * above_minimum)
