"""How large a network of blocks is, counted on its modules without memory."""

from __future__ import annotations

from phalanx.config.model import BlockModel
from phalanx.families.blocks.bound import whole_network


def parameter_count(model: BlockModel) -> int:
    """All trainable parameters."""
    return sum(parameter.numel() for parameter in whole_network(model).parameters())


def matmul_parameters(model: BlockModel) -> int:
    """Parameters that multiply every position: those of the kind `matrix`."""
    network = whole_network(model)
    named = network.named_parameters()
    return sum(parameter.numel() for name, parameter in named if network.parameter_kind(name) == "matrix")


def in_words(model: BlockModel) -> str:
    """The shape for a person."""
    return f"{model.family}, {model.n_layers} blocks x {model.d_model}"
