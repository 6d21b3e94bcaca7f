"""What the materials family declares about itself, as data: how parameters begin, what kind each is, what may be split."""

from __future__ import annotations

import math
from functools import cache

import torch
from torch import nn

from phalanx.families.materials.model.layers import ElementTable
from phalanx.families.materials.model.network import MaterialsNetwork
from phalanx.families.materials.model_config import MaterialsModel
from phalanx.families.materials.sizes import block_flops, embedding_flops, head_flops
from phalanx.nn.layers import Linear, Norm
from phalanx.nn.parameters import InitRule, InitRules, ParameterKind
from phalanx.nn.splits import SplitCount, Splits

_SMALL_STEP = 1e-3
"""Standard deviation of what moves EGNN's atoms: larger steps make a deep network diverge at first (the authors' code)."""


def parameter_kind(name: str) -> ParameterKind:
    """The kind of the network's parameter `name`."""
    if name.endswith("norm.weight"):
        return "norm"
    if name.endswith((".bias", ".eps", ".sharpness")):
        return "bias"
    if name.startswith("embedding.elements.") or ".contraction." in name or ".skip_element." in name:
        return "embedding"
    return "matrix"


def initial_rules(config: MaterialsModel) -> InitRules:
    """Initial values by the exact name of each parameter.

    Matrices start normal with 1/sqrt(inputs), so that they keep the size of what flows through; the one that gives a head's
    result begins at a tenth of that, so that first predictions are close to the reference energies.
    """
    return list(_initial_rules(config.model_dump_json()))


@cache
def _initial_rules(description: str) -> tuple[tuple[str, InitRule], ...]:
    config = MaterialsModel.model_validate_json(description)
    with torch.device("meta"):
        network = MaterialsNetwork(config)
    rules = []
    for path, module in network.named_modules():
        for name, parameter in module.named_parameters(path, recurse=False):
            rules.append((name, _rule(config, name, module, parameter)))
    return tuple(rules)


def _rule(config: MaterialsModel, name: str, module: nn.Module, parameter: nn.Parameter) -> InitRule:
    if name.endswith((".bias", ".eps")):
        return InitRule.constant(0.0)
    if isinstance(module, Norm) or ".skip_element." in name or name.endswith(".sharpness"):
        return InitRule.constant(1.0)
    if isinstance(module, ElementTable):
        # Products share one sum, so each weighs the less the more there are.
        return InitRule.normal(1.0 if parameter.dim() == 2 else 1.0 / math.sqrt(parameter.shape[1]))
    fan_in = parameter.shape[1]
    if name.endswith(".coordinate.1.weight"):
        return InitRule.normal(_SMALL_STEP / math.sqrt(fan_in))
    assert isinstance(module, Linear) or name.endswith(".score"), name
    return InitRule.normal((0.1 if _gives_result(config, name) else 1.0) / math.sqrt(fan_in))


def _gives_result(config: MaterialsModel, name: str) -> bool:
    parts = name.split(".")
    if parts[0] != "head" or parts[1] == "dipole_vectors":
        return False
    return parts[-2] == str(getattr(config, parts[1]).layers - 1)


def tensor_splits(_config: MaterialsModel) -> Splits:
    """Nothing is split over tensor-parallel ranks: matrices are small, and edges, not channels, are what is many."""
    return []


def tensor_split_counts(_config: MaterialsModel) -> list[SplitCount]:
    """Nothing, likewise: tp and pp are 1 for this family."""
    return []


def relative_block_costs(config: MaterialsModel, edges_per_atom: float) -> tuple[float, float]:
    """What the embedding and the head cost beside one block, in blocks: by their floating-point operations."""
    block = block_flops(config, 1, edges_per_atom) or 1.0
    return embedding_flops(config, 1, edges_per_atom) / block, head_flops(config, 1) / block
