"""What the materials family declares about itself, as data: how parameters begin and what kind each is."""

from __future__ import annotations

import math
from functools import cache

import torch
from torch import nn

from phalanx.families.family import DeclaredModel
from phalanx.families.materials.model.layers import ElementTable
from phalanx.families.materials.model.network import MaterialsNetwork
from phalanx.families.materials.model_config import MaterialsModel
from phalanx.families.materials.sizes import block_flops, embedding_flops, head_flops
from phalanx.nn.layers import Linear, Norm
from phalanx.nn.parameters import InitRule, InitRules, ParameterKind

_SMALL_STEP = 1e-3
"""Standard deviation of what moves EGNN's atoms: larger steps make a deep network diverge at first (the authors' code)."""


class DeclaredMaterials(DeclaredModel):
    """What a network's shape declares.

    Nothing is split over tensor-parallel ranks: matrices are small, and edges, not channels, are what is many.
    """

    model: MaterialsModel

    def parameter_kind(self, name: str) -> ParameterKind:
        """Return the kind of the network's parameter `name`."""
        if name.endswith("norm.weight"):
            return "norm"
        if name.endswith((".bias", ".eps", ".sharpness")):
            return "bias"
        of_elements = (".contraction.", ".skip_element.", ".message_element.")
        if name.startswith("embedding.elements.") or any(part in name for part in of_elements):
            return "embedding"
        return "matrix"

    def initial_rules(self) -> InitRules:
        """Return initial values by the exact name of each parameter.

        Matrices start normal with 1/sqrt(inputs), so that they keep the size of what flows through; the one that gives a
        head's result begins at a tenth of that, so that first predictions are close to the reference energies.
        """
        return list(_read_network(self.model.model_dump_json()))

    def block_costs(self) -> tuple[float, float]:
        """Return the floating-point operations of the embedding and of the head, in those of one block."""
        block = block_flops(self.model, 1, self.model.mean_neighbors) or 1.0
        embedding = embedding_flops(self.model, 1, self.model.mean_neighbors)
        return embedding / block, head_flops(self.model, 1, self.model.mean_neighbors) / block


@cache
def _read_network(description: str) -> tuple[tuple[str, InitRule], ...]:
    """Return name and initial value of every parameter, read off the modules of a network on meta.

    description: the model as JSON, which unlike the model itself can be a key of the cache.
    """
    config = MaterialsModel.model_validate_json(description)
    # Shapes are enough: no memory is taken.
    with torch.device("meta"):
        network = MaterialsNetwork(config)
    rules = []
    for path, module in network.named_modules():
        for name, parameter in module.named_parameters(path, recurse=False):
            rules.append((name, _choose_rule(config, name, module, parameter)))
    return tuple(rules)


def _choose_rule(config: MaterialsModel, name: str, module: nn.Module, parameter: nn.Parameter) -> InitRule:
    if name.endswith((".bias", ".eps")):
        return InitRule.constant(0.0)
    if isinstance(module, ElementTable) and parameter.dim() == 4:
        # A matrix of each element and degree keeps the size of what flows through.
        return InitRule.normal(1.0 / math.sqrt(config.d_model))
    if isinstance(module, Norm) or ".skip_element." in name or name.endswith(".sharpness"):
        return InitRule.constant(1.0)
    if isinstance(module, ElementTable):
        # Products share one sum, so each weighs the less the more there are.
        return InitRule.normal(1.0 if parameter.dim() == 2 else 1.0 / math.sqrt(parameter.shape[1]))
    fan_in = parameter.shape[1]
    if name.endswith(".coordinate.1.weight"):
        return InitRule.normal(_SMALL_STEP / math.sqrt(fan_in))
    if not isinstance(module, Linear) and not name.endswith(".score"):
        raise NotImplementedError(f"{name} has no rule for its initial values")
    parts = name.split(".")
    # The last layer of a head; what weighs vectors for a dipole gives no result of its own.
    last = parts[0] == "head" and parts[1] not in ("dipole_vectors", "early_energies")
    gives_result = parts[1] == "early_energies" or (last and parts[-2] == str(getattr(config, parts[1]).layers - 1))
    return InitRule.normal((0.1 if gives_result else 1.0) / math.sqrt(fan_in))
