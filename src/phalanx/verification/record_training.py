"""A few optimizer steps of a layout, recorded on this rank: activations, losses, gradients and updated parameters.

Of mixtures of experts also what routers chose and what they keep beside parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from phalanx.layout.apply import ParallelModel, apply_layout
from phalanx.layout.context_parallel.kernel_choice import AttentionChoice
from phalanx.layout.data_parallel.gradients import local_gradient
from phalanx.layout.initial_values import fill_initial
from phalanx.layout.layout_model import Stage
from phalanx.layout.mesh import Mesh
from phalanx.layout.place import Place, place_of
from phalanx.layout.spec import ResolvedLayout
from phalanx.nn.experts import MixtureOfExperts
from phalanx.nn.parameters import InitRule
from phalanx.optimizers import build_optimizer
from phalanx.torch_compat import common as compat
from phalanx.training.step import TrainStep
from phalanx.verification.family import VerifiableModel
from phalanx.verification.replay_routing import Choices, StepRouting, find_routers

PERTURBATION = 0.1
"""Standard deviation added to parameters that all start equal."""


@dataclass(frozen=True)
class Activation:
    """Rows of the residual stream behind one module, for some samples and positions."""

    samples_B: Tensor
    """Numbers of the samples in the global batch."""
    positions_S: Tensor
    """Positions in the sequence that this rank computed."""
    value_BSD: Tensor
    """Activations, on the CPU."""


@dataclass(frozen=True)
class StepRecord:
    """One optimizer step."""

    loss: float
    """Mean loss per target of the whole global batch."""
    grad_norm: float
    """2-norm of the whole gradient before clipping."""
    gradients: dict[str, Place]
    """This rank's part of every gradient before clipping, on the CPU."""
    routing: StepRouting
    """What routers chose."""
    state: dict[str, Place]
    """What the model keeps beside parameters, after the step, on the CPU."""


@dataclass(frozen=True)
class Record:
    """All steps of a layout, as one rank saw them."""

    activations: dict[str, list[Activation]]
    """Activations behind the embedding and each block in the first step, by module name, a piece for each micro-batch; empty
    where they were not asked for, and where blocks do not give rows of samples."""
    steps: list[StepRecord]
    parameters: dict[str, Place]
    """This rank's part of every parameter after the last step, on the CPU."""


def record_training(
    model: VerifiableModel,
    layout: ResolvedLayout,
    mesh: Mesh,
    device: torch.device,
    *,
    steps: int,
    activations: bool,
    choices: Sequence[Choices] | None = None,
) -> Record:
    """Train `model` for `steps` optimizer steps in `layout`, on this rank of `mesh`, with its own samples without files.

    activations: whether to keep the activations of the first step too. choices: what routers are to choose in each step;
    None lets them choose.
    """
    run = model.run
    applied = apply_layout(model, layout, mesh, device, AttentionChoice("sdpa"))
    _perturb_constants(applied, model)
    held = applied.hold_parameters(model)
    optimizer = build_optimizer(applied.parameters, run.optimizer, model.parameter_kind, held)
    step = RecordedStep(applied, optimizer, run.optimizer, device=device)
    share = layout.samples_per_rank
    first = mesh.data_rank * share
    seen: dict[str, list[Activation]] = {}
    handles: list[Any] = []
    if activations:
        for stage in applied.stages:
            handles += _watch_activations(stage, seen, first, layout.microbatch)
    routers = find_routers(applied.stages)
    done = []
    for number in range(1, steps + 1):
        if layout.branch_groups:
            batch = model.branch_samples(number, layout, mesh.data_rank)
        else:
            batch = model.samples(number, first, share, layout.global_batch)
        routing = StepRouting(layout.global_batch, None if choices is None else choices[number - 1])
        for router in routers:
            router.routing = routing
        result = step.run(number, batch)
        state = {name: _copy_to_host(place_of(tensor)) for name, tensor in applied.state.items()}
        done.append(StepRecord(result.loss, result.grad_norm, step.gradients, routing, state))
        # The first step alone: after an update, activations differ by as much as the updates may.
        for handle in handles:
            handle.remove()
    parameters = {name: _copy_to_host(place_of(p, applied.splits.get(name))) for name, p in applied.parameters.items()}
    return Record(seen, done, parameters)


@torch.no_grad()
def _perturb_constants(applied: ParallelModel, model: VerifiableModel) -> None:
    """Move the parameters that all start equal (biases at 0, norms at 1): a mistake with them would not show otherwise."""
    rules = model.initial_rules()
    for name, parameter in applied.parameters.items():
        rule = next(rule for pattern, rule in rules if fnmatchcase(name, pattern))
        if rule.kind == "constant":
            noise = torch.empty_like(parameter)
            fill_initial(
                noise,
                f"{name} shaken",
                InitRule.normal(PERTURBATION),
                model.run.training.seed,
                applied.splits.get(name),
            )
            parameter.add_(noise)
    applied.refresh()


class RecordedStep(TrainStep):
    """A training step that keeps a copy of the gradients it updates with."""

    gradients: dict[str, Place]

    def update_parameters(self, loss: Tensor) -> Tensor:
        """Keep the gradients, then update with them."""
        self.gradients = {}
        for name, parameter in self.applied.parameters.items():
            if not parameter.requires_grad:
                continue
            place = place_of(parameter, self.applied.splits.get(name))
            grad = local_gradient(parameter)
            # NaN fails every comparison: a gradient that was never formed must not pass as one of zeros.
            local = torch.full_like(place.local, torch.nan) if grad is None else grad
            self.gradients[name] = _copy_to_host(place._replace(local=local))
        return super().update_parameters(loss)


def _copy_to_host(place: Place) -> Place:
    return place._replace(local=place.local.detach().to("cpu", copy=True))


def _watch_activations(stage: Stage, seen: dict[str, list[Activation]], first: int, microbatch: int) -> list[Any]:
    """Let the embedding and the blocks of `stage` add what they give to `seen`; return handles that end this.

    first: number of this rank's first sample in the global batch. A comparison of further modules (attention, norms)
    watches them here, under their names in the model.
    """
    part = stage.part
    if not stage.rows_are_positions:
        return []
    watched: dict[str, nn.Module] = {f"blocks.{number}": part.blocks[number] for number in part.blocks.numbers}
    if part.part.first:
        watched["embedding"] = part.embedding
    handles = [
        module.register_forward_hook(partial(_keep_activation, stage, seen.setdefault(name, []), first, microbatch))
        for name, module in watched.items()
    ]
    for name, module in part.named_modules():
        if isinstance(module, MixtureOfExperts):
            kept = seen.setdefault(compat.full_name(name), [])
            handles.append(module.register_forward_hook(partial(_keep_mixture, kept)))
    return handles


def _keep_mixture(seen: list[Activation], _module: nn.Module, inputs: Any, output: Tensor) -> None:
    """Keep what a mixture of experts gives, which takes the numbers of its samples with it."""
    _, routing = inputs
    samples_B, positions_S, output = routing.samples_B.cpu(), routing.positions_S.cpu(), output.detach().cpu().clone()
    # Where its block is recomputed, a mixture runs again for the same samples, and does what it did. So numbers are compared
    # in Python: selective recompute has no result of an operation that ran in one of the two passes alone.
    if samples_B.tolist() not in [one.samples_B.tolist() for one in seen]:
        seen.append(Activation(samples_B, positions_S, output))


def _keep_activation(
    stage: Stage, seen: list[Activation], first: int, microbatch: int, _module: nn.Module, _inputs: Any, output: Tensor
) -> None:
    if not torch.is_grad_enabled():
        # A forecast that a roll-out starts from, not a part of the training pass.
        return
    length = output.shape[1] * stage.share.cp.size * stage.share.tp.size
    rows = stage.share.positions(length, torch.device("cpu")).rows_S
    # Micro-batches come in order in every schedule.
    number = torch.arange(len(output)) + first + len(seen) * microbatch
    seen.append(Activation(number, rows, output.detach().to("cpu", copy=True)))
