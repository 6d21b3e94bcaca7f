"""Which tensors make up a training state, under names that depend on the model alone.

    model.<name>                 parameters and persistent buffers
    optimizer.<name>.<what>      what the optimizer keeps for the parameter <name>: exp_avg, exp_avg_sq, step, ...

Names do not depend on parameter groups, their order, torch.compile or recompute. Hyper-parameters (learning rate,
betas, weight decay) are no part of the state: they come from the run file, so that a changed run file is obeyed.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from phalanx.errors import CheckpointError
from phalanx.layout.place import Place, TensorSplits, place_of
from phalanx.torch_compat.common import full_name


def collect_tensors(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> dict[str, Tensor]:
    """Return the tensors of `model` and `optimizer` themselves, not copies: loading into them changes model and optimizer.

    A tensor that the model has under several names (a tied head) comes once, under the first. Raises CheckpointError for
    state that is not a tensor, and for a parameter of the optimizer that is not the model's.
    """
    tensors: dict[str, Tensor] = {}
    names: dict[int, str] = {}
    for raw_name, value in model.state_dict(keep_vars=True).items():
        name = full_name(raw_name)
        if not isinstance(value, Tensor):
            raise CheckpointError(f"model state {name} is a {type(value).__name__}, not a tensor; make it a buffer")
        # By identity, not by value: only tied weights are one tensor under two names.
        if id(value) not in names:
            names[id(value)] = name
            tensors[f"model.{name}"] = value
    if optimizer is None:
        return tensors
    for group_index, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if id(parameter) not in names:
                raise CheckpointError(
                    f"a parameter of shape {list(parameter.shape)} in optimizer group {group_index} is not one of the "
                    f"model's; make the optimizer from model.parameters()"
                )
            for what, value in optimizer.state.get(parameter, {}).items():
                name = f"optimizer.{names[id(parameter)]}.{what}"
                if isinstance(value, Tensor):
                    tensors[name] = value
                elif value is not None:
                    raise CheckpointError(f"{name} is a {type(value).__name__}, not a tensor; it would not be restored")
    return tensors


@torch.no_grad()
def materialise_optimizer_state(optimizer: torch.optim.Optimizer) -> None:
    """Make `optimizer` allocate the state it otherwise allocates in its first step, all zero, as a place to load into.

    Parameters keep their values, gradients and hyper-parameters; state that exists is left alone.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    fresh = [p for p in parameters if p.requires_grad and not optimizer.state.get(p)]
    if not fresh:
        return
    # One step with zero gradients and a learning rate of zero, so that any optimizer builds its own state in its own way.
    gradients = [p.grad for p in parameters]
    rates = [group["lr"] for group in optimizer.param_groups]
    for parameter in parameters:
        parameter.grad = None
    for parameter in fresh:
        parameter.grad = torch.zeros_like(parameter)
    for group in optimizer.param_groups:
        group["lr"] = torch.zeros_like(group["lr"]) if isinstance(group["lr"], Tensor) else 0.0
    optimizer.step()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    for parameter in fresh:
        for value in optimizer.state[parameter].values():
            if isinstance(value, Tensor):
                value.zero_()


def placed_tensors(
    parameters: Mapping[str, nn.Parameter], splits: TensorSplits, optimizer: torch.optim.Optimizer | None = None
) -> dict[str, Place]:
    """Return the tensors of a model in any layout, by names in the whole model, as `collect_tensors` does for one rank.

    Each comes as this rank's part and its place in the whole; so does optimizer state that is shaped like its parameter.
    """
    placed = {f"model.{name}": place_of(parameter, splits.get(name)) for name, parameter in parameters.items()}
    for name, parameter in parameters.items():
        state = {} if optimizer is None else optimizer.state.get(parameter, {})
        for what, value in state.items():
            key = f"optimizer.{name}.{what}"
            if not isinstance(value, Tensor):
                raise CheckpointError(f"{key} is a {type(value).__name__}, not a tensor; it would not be restored")
            like_parameter = value.shape == parameter.shape and value.dim() > 0
            placed[key] = place_of(value, splits.get(name) if like_parameter else None)
    return placed
