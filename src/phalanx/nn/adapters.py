"""Low-rank adapters of linear layers (LoRA: Hu et al. 2021, arXiv:2106.09685), and which parameters a run trains.

An adapter is two more parameters of its `Linear`, `lora_A` and `lora_B`: they are built, sharded and saved as all others
are, by names of their own. B begins at 0, so that a model begins as what it was.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from phalanx.config.schema import LoRA, Training
from phalanx.nn.layers import Linear
from phalanx.nn.parameters import InitRule, InitRules, matches_any

DOWN, UP = "lora_A", "lora_B"
"""Names of an adapter's parameters in its layer: what maps inputs to its rank, and that to outputs."""
ADAPTER_RULES: InitRules = [(f"*.{DOWN}", InitRule.fan_in()), (f"*.{UP}", InitRule.constant(0.0))]
"""Initial values of the adapters of every family."""


@dataclass(frozen=True)
class Adapters:
    """The adapters of a run; see `config.schema.LoRA`."""

    rank: int
    scale: float
    """Factor of an adapter's product."""
    matrices: tuple[str, ...]
    train: tuple[str, ...]

    @classmethod
    def of(cls, lora: LoRA | None) -> Adapters | None:
        """Return the adapters that a run file asks for, if any."""
        if lora is None:
            return None
        return cls(lora.rank, lora.alpha / lora.rank, tuple(lora.matrices), tuple(lora.train))


@dataclass(frozen=True)
class TrainedParameters:
    """Which parameters of a model are trained, by their names in the whole model."""

    freeze: tuple[str, ...] = ()
    adapters: Adapters | None = None

    @classmethod
    def of(cls, training: Training) -> TrainedParameters:
        """Return what a run file says."""
        return cls(tuple(training.freeze), Adapters.of(training.lora))

    def freezes(self, name: str) -> bool:
        """Return whether the parameter `name` is not trained."""
        if matches_any(name, self.freeze):
            return True
        return self.adapters is not None and not is_adapter(name) and not matches_any(name, self.adapters.train)

    def apply(self, parameters: dict[str, nn.Parameter]) -> None:
        """Let nothing form gradients of those of `parameters`, by name, that are not trained."""
        for name, parameter in parameters.items():
            if self.freezes(name):
                parameter.requires_grad_(False)


EVERY_PARAMETER = TrainedParameters()


def is_adapter(name: str) -> bool:
    """Return whether `name` is that of an adapter's parameter."""
    return name.endswith((f".{DOWN}", f".{UP}"))


def adapter_names(weight: str) -> tuple[str, str]:
    """Return the names of the adapter's parameters of the parameter `weight`, down and up."""
    layer = weight.removesuffix("weight")
    return layer + DOWN, layer + UP


def add_adapters(model: nn.Module, adapters: Adapters | None) -> Iterator[str]:
    """Give the linear layers of `model` that `adapters` names their parameters, without values; yield the layers' names.

    Of a layer that is split already, the parameters are those of its part.
    """
    if adapters is None:
        return
    for name, module in model.named_modules():
        if isinstance(module, Linear) and matches_any(f"{name}.weight", adapters.matrices):
            outputs, inputs = module.weight.shape
            module.lora_A = nn.Parameter(module.weight.new_empty((adapters.rank, inputs)))
            module.lora_B = nn.Parameter(module.weight.new_empty((outputs, adapters.rank)))
            module.adapter_scale = adapters.scale
            yield name


@torch.no_grad()
def merge_adapters(model: nn.Module) -> nn.Module:
    """Add the adapters of whole layers to their weights, and take them away; returns `model`."""
    for module in model.modules():
        if isinstance(module, Linear) and module.lora_A is not None:
            assert module.lora_B is not None
            module.weight.copy_(merged_weight(module.weight, module.lora_A, module.lora_B, module.adapter_scale))
            module.lora_A = module.lora_B = None
    return model


def merged_weight(weight: Tensor, down: Tensor, up: Tensor, scale: float) -> Tensor:
    """Return weight + scale up down in the format of `weight`, rounded once; of some rows where both are those rows."""
    wide = torch.promote_types(weight.dtype, torch.float32)
    return torch.addmm(weight.to(wide), up.to(wide), down.to(wide), alpha=scale).to(weight.dtype)
