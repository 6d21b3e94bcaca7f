"""A few optimizer steps of a layout, recorded on this rank: activations, losses, gradients, parameters and their updates.

Of mixtures of experts also what routers chose and what they keep beside parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler

from phalanx.layout.apply import ParallelModel, apply_layout
from phalanx.layout.context_parallel.kernel_choice import AttentionChoice
from phalanx.layout.data_parallel.gradients import local_gradient
from phalanx.layout.initial_values import fill_part, find_rule
from phalanx.layout.mesh import Mesh
from phalanx.layout.place import Place, place_of
from phalanx.layout.spec import ResolvedLayout
from phalanx.nn.parameters import InitRule
from phalanx.training.step import TrainStep, build_optimizer_of
from phalanx.verification.family import VerifiableModel
from phalanx.verification.replay_routing import Choices, StepRouting, find_routers
from phalanx.verification.watch_modules import ModuleWatch, Rows

PERTURBATION = 0.1
"""Standard deviation added to parameters that all start equal."""


@dataclass(frozen=True)
class StepRecord:
    """One optimizer step."""

    loss: float
    """Mean loss per target of the whole global batch."""
    grad_norm: float
    """2-norm of the whole gradient before clipping."""
    gradients: dict[str, Place]
    """This rank's part of every gradient before clipping, without the loss scale, on the CPU."""
    routing: StepRouting
    """What routers chose."""
    state: dict[str, Place]
    """What the model keeps beside parameters, after the step, on the CPU."""


@dataclass(frozen=True)
class Record:
    """All steps of a layout, as one rank saw them."""

    activations: dict[str, list[Rows]]
    """What each module gave in the first step, by its name, a piece for each micro-batch (see `ModuleWatch`); empty where it
    was not asked for, and where blocks do not give rows of samples."""
    input_gradients: dict[str, list[Rows]]
    """Gradients of what each of them took, alike."""
    steps: list[StepRecord]
    parameters: dict[str, Place]
    """This rank's part of every parameter after the last step, on the CPU."""
    updates: dict[str, Place]
    """How far all steps together have moved them; empty where it was not asked for."""


@dataclass(frozen=True)
class Perturbation:
    """A change of all parameters by relative noise before the first step: of a run that does the same but for rounding."""

    number: int
    """Which one, of any number of independent ones."""
    size: float
    """Standard deviation of each element's change over the element."""


def record_training(
    model: VerifiableModel,
    layout: ResolvedLayout,
    mesh: Mesh,
    device: torch.device,
    *,
    steps: int,
    activations: bool,
    updates: bool = False,
    choices: Sequence[Choices] | None = None,
    perturbation: Perturbation | None = None,
) -> Record:
    """Train `model` for `steps` optimizer steps in `layout`, on this rank of `mesh`, with its own samples without files.

    activations: whether to keep the activations and input gradients of the first step too. updates: whether to keep how far
    parameters move, which takes another copy of them. choices: what routers are to choose in each step; None lets them
    choose. perturbation: of the parameters before the first step.
    """
    run = model.run
    applied = apply_layout(model, layout, mesh, device, AttentionChoice("sdpa"))
    _perturb_constants(applied, model)
    if perturbation is not None:
        _perturb_parameters(applied, model, perturbation)
    before = _copy_parameters(applied) if updates else {}
    optimizer = build_optimizer_of(model, applied)
    scaler = GradScaler(device.type) if model.run.layout.scales_loss else None
    step = RecordedStep(applied, optimizer, run.optimizer, device=device, scaler=scaler)
    # Each data-parallel rank has neighbouring samples of the global batch, as in training.
    share = layout.samples_per_rank
    first = mesh.data_rank * share
    watch = ModuleWatch(layout.global_batch)
    if activations:
        for stage in applied.stages:
            watch.follow(stage)
    routers = find_routers(applied.stages)
    done = []
    for number in range(1, steps + 1):
        # Ranks of a task head have samples of its data sets alone.
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
        watch.stop()
    parameters = _copy_parameters(applied)
    # Noise, if any, was added before the copy that updates are measured from.
    moved = {name: parameters[name]._replace(local=parameters[name].local - was.local) for name, was in before.items()}
    return Record(watch.activations, watch.input_gradients, done, parameters, moved)


@torch.no_grad()
def _perturb_constants(applied: ParallelModel, model: VerifiableModel) -> None:
    """Move the parameters that all start equal (biases at 0, norms at 1): a mistake with them would not show otherwise."""
    rules = model.initial_rules()
    seed, rule = model.run.training.seed, InitRule.normal(PERTURBATION)
    for name, place in _parameter_places(applied).items():
        if find_rule(name, rules).kind == "constant":
            place.local.add_(_draw_noise(place, f"{name} shaken", rule, seed))
    applied.refresh()


@torch.no_grad()
def _perturb_parameters(applied: ParallelModel, model: VerifiableModel, perturbation: Perturbation) -> None:
    seed, rule = model.run.training.seed, InitRule.normal(perturbation.size)
    for name, place in _parameter_places(applied).items():
        place.local.mul_(1.0 + _draw_noise(place, f"{name} perturbed {perturbation.number}", rule, seed))
    applied.refresh()


def _draw_noise(place: Place, name: str, rule: InitRule, seed: int) -> Tensor:
    """Return this rank's part of noise that is a function of the name and the position alone: all layouts draw the same."""
    noise = torch.empty_like(place.local)
    fill_part(place._replace(local=noise), name, rule, seed)
    return noise


class RecordedStep(TrainStep):
    """A training step that keeps a copy of the gradients it updates with."""

    gradients: dict[str, Place]

    def update_parameters(self, loss: Tensor) -> Tensor:
        """Keep the gradients, then update with them."""
        self.gradients = {}
        # Without the scale of the loss, so that records of all formats are compared alike.
        scale = 1.0 if self.scaler is None else float(self.scaler.scale(torch.ones((), device=self.device)))
        for name, parameter in self.applied.parameters.items():
            if not parameter.requires_grad:
                continue
            place = place_of(parameter, self.applied.splits.get(name))
            grad = local_gradient(parameter)
            # NaN fails every comparison: a gradient that was never formed must not pass as one of zeros.
            local = torch.full_like(place.local, torch.nan) if grad is None else grad / scale
            self.gradients[name] = _copy_to_host(place._replace(local=local))
        return super().update_parameters(loss)


def _copy_parameters(applied: ParallelModel) -> dict[str, Place]:
    return {name: _copy_to_host(place) for name, place in _parameter_places(applied).items()}


@torch.no_grad()
def _parameter_places(applied: ParallelModel) -> dict[str, Place]:
    return {name: place_of(p, applied.splits.get(name)) for name, p in applied.parameters.items()}


def _copy_to_host(place: Place) -> Place:
    return place._replace(local=place.local.detach().to("cpu", copy=True))
