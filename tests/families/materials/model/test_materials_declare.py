"""What is declared about parameters and sizes, against the modules themselves, for every body and option."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from atom_graphs import batch_of, random_structure
from phalanx.config.presets import load_preset, preset_names
from phalanx.families.materials.declare import DeclaredMaterials
from phalanx.families.materials.model.geometry import find_triplets
from phalanx.families.materials.model.layers import ElementTable
from phalanx.families.materials.model.network import MaterialsNetwork
from phalanx.families.materials.model_config import (
    Branch,
    DipoleHead,
    Electrostatics,
    EnergyHead,
    GatOptions,
    GlobalAttention,
    MaceOptions,
    MaterialsModel,
    NequipOptions,
    PropertyHead,
)
from phalanx.families.materials.sizes import block_flops, head_flops, matmul_parameters, model_flops, parameter_count
from phalanx.nn.parameters import InitRule
from phalanx.nn.splits import ModelChunk
from small_networks import BODIES, LIKE_MACE_TORCH, filled_network, small_model

MODELS: list[tuple[str, dict[str, Any]]] = [(body, {}) for body in BODIES]
MODELS += [(body, {"dipole": None}) for body in ("egnn", "mace", "painn")]
MODELS += [
    ("painn", {"attention": GlobalAttention(), "d_model": 12}),
    ("dimenet++", {"attention": GlobalAttention(kind="linear", heads=2)}),
    ("gatv2", {"gatv2": GatOptions(heads=2), "n_radial": 7}),
    ("mace", {"mace": MaceOptions(degree=3, hidden_degree=2, correlation=2, radial_width=6), "n_layers": 3}),
    ("mace", {"mace": MaceOptions(degree=1, hidden_degree=0, correlation=3)}),
    ("mace", {"mace": MaceOptions(degree=2, hidden_degree=0, correlation=1), "dipole": None, "n_layers": 1}),
    ("mace", {**LIKE_MACE_TORCH, "n_layers": 3}),
    ("mace", {"mace": MaceOptions(degree=2, element_mixing="matrices", density=True), "dipole": None}),
    ("nequip", {"dipole": None, "n_layers": 3}),
    ("nequip", {"nequip": NequipOptions(degree=3, radial_width=6), "n_layers": 1}),
    ("nequip", {"nequip": NequipOptions(degree=1), "attention": GlobalAttention(heads=2)}),
    ("egnn", {"dipole": DipoleHead(from_charges=True)}),
    ("painn", {"electronic_state": ["charge", "spin"]}),
    ("painn", {"electrostatics": Electrostatics(layers=3, shared=True)}),
    ("schnet", {"electrostatics": Electrostatics(from_charges=True)}),
    ("dimenet++", {"electronic_state": ["spin"]}),
    ("schnet", {"energy": EnergyHead(layers=3, shared=True), "atom_properties": PropertyHead(names=["a"], layers=1)}),
    ("pna", {"branches": [Branch(name=name) for name in ("a", "b", "c")], "d_model": 7}),
]


def built(config: MaterialsModel) -> MaterialsNetwork:
    with torch.device("meta"):
        return MaterialsNetwork(config)


@pytest.mark.parametrize(("body", "changes"), MODELS)
def test_every_parameter_is_counted_and_has_a_beginning_and_a_kind(body: str, changes: dict[str, Any]) -> None:
    config = small_model(body, **changes)
    parameters = dict(built(config).named_parameters())
    assert sum(parameter.numel() for parameter in parameters.values()) == parameter_count(config)
    rules = DeclaredMaterials(config, 1).initial_rules()
    assert [name for name, _ in rules] == list(parameters)
    # Names are patterns too: none may catch another parameter before its own rule.
    for name, rule in rules:
        assert next(other for pattern, other in rules if fnmatchcase(name, pattern)) is rule
    assert all(parameter.device.type == "meta" for parameter in parameters.values())


@pytest.mark.parametrize(("body", "changes"), MODELS)
def test_kinds_are_those_of_the_modules(body: str, changes: dict[str, Any]) -> None:
    network = built(small_model(body, **changes))
    matrices = 0
    for path, module in network.named_modules():
        for name, parameter in module.named_parameters(path, recurse=False):
            if isinstance(module, ElementTable):
                wanted = "embedding"
            elif parameter.dim() == 1:
                wanted = "norm" if name.endswith(".weight") else "bias"
            else:
                wanted = "matrix"
                matrices += parameter.numel() * (not name.endswith(".score"))
            assert DeclaredMaterials(network.config, 1).parameter_kind(name) == wanted, name
    assert matrices == matmul_parameters(network.config)


def test_building_leaves_the_generator_of_torch_alone_and_no_buffers() -> None:
    state = torch.get_rng_state()
    for body in BODIES:
        network = filled_network(small_model(body, attention=GlobalAttention()))
        assert not list(network.buffers())
    assert torch.equal(torch.get_rng_state(), state)


def test_features_keep_their_size_through_the_blocks_at_first() -> None:
    """Neither lost nor blown up, in any body, with mean_neighbors near what the data has."""
    batch = batch_of([random_structure(1, 27)])
    assert batch["edges_2E"].shape[1] / 27 == pytest.approx(20.0, abs=1.0)
    for body in BODIES:
        network = filled_network(small_model(body, d_model=32, n_layers=3, mean_neighbors=20.0))
        predicted = network.predict(**batch)
        assert predicted.energy_G is not None and predicted.forces_N3 is not None
        assert 1e-4 < predicted.forces_N3.std() < 10.0, body
        assert predicted.energy_G.abs() < 100.0, body


def test_heads_begin_small_and_egnn_hardly_moves_atoms() -> None:
    rules = dict(DeclaredMaterials(small_model("egnn", d_model=16), 1).initial_rules())
    assert rules["head.energy.copies.first.0.weight"] == InitRule.normal(0.25)
    assert rules["head.energy.copies.first.1.weight"].value == pytest.approx(0.1 / 8**0.5)
    assert rules["blocks.0.messages.coordinate.1.weight"].value == pytest.approx(1e-3 / 4)
    assert rules["embedding.elements.weight"] == InitRule.normal(1.0)


def test_names_do_not_depend_on_the_part() -> None:
    config = small_model("mace", n_layers=4)
    whole = {name: p.shape for name, p in built(config).named_parameters()}
    parts: dict[str, torch.Size] = {}
    for part in (ModelChunk(range(2), last=False), ModelChunk(range(2, 4), first=False)):
        with torch.device("meta"):
            network = MaterialsNetwork(config, part=part)
        assert hasattr(network, "embedding") == part.first and hasattr(network, "head") == part.last
        found = {name: p.shape for name, p in network.named_parameters()}
        assert not parts.keys() & found.keys()
        parts |= found
    assert parts == whole


def test_nothing_is_declared_to_be_split() -> None:
    declared = DeclaredMaterials(small_model("painn"), 1)
    assert declared.splits() == [] and declared.split_counts() == []


def test_flops_of_a_block_by_hand() -> None:
    """SchNet: three matrices an atom and two an edge; twice as much where forces are learned."""
    config = small_model("schnet", d_model=10, n_radial=5, energy=EnergyHead())
    forward = 2.0 * (3 * 100 * 20 + (50 + 100) * 300)
    assert block_flops(config, atoms=20, edges=300) == 3.0 * forward
    learned = small_model("schnet", d_model=10, n_radial=5, energy=EnergyHead(force_weight=1.0))
    assert block_flops(learned, atoms=20, edges=300) == 6.0 * forward
    whole = model_flops(config, atoms=20, edges=300)
    assert whole == 2 * 3.0 * forward + head_flops(config, 20, 0)
    declared = DeclaredMaterials(config.model_copy(update={"mean_neighbors": 15.0}), 1)
    assert declared.block_costs() == (0.0, head_flops(config, 20, 0) / (3.0 * forward))


@pytest.mark.parametrize("body", BODIES)
def test_flops_of_the_forward_pass_are_those_that_run(body: str) -> None:
    """Matrices and coupled products against PyTorch's own counter. Heads of one branch, as counted."""
    config = small_model(body, d_model=16, n_radial=16, energy=EnergyHead(), branches=[Branch()])
    network = filled_network(config)
    batch = batch_of([random_structure(1, 6)])
    counted: dict[str, Any] = {"triplets": 0}

    def remember(_module: nn.Module, args: tuple[Any, ...]) -> None:
        counted["triplets"] = len(find_triplets(args[1]).incoming_T)

    network.blocks[0].register_forward_pre_hook(remember)
    counter = FlopCounterMode(display=False)
    with torch.no_grad(), counter:
        network.predict(**batch, forces=False)
    atoms, edges = len(batch["species_N"]), batch["edges_2E"].shape[1]
    stated = model_flops(config, atoms, edges, counted["triplets"]) / 3.0
    # Harmonics, and a bias that is a column of a matrix, are a small rest.
    assert counter.get_total_flops() == pytest.approx(stated, rel=0.03)


GNN_PRESETS = [name for name in preset_names() if name.startswith("gnn-")]


@pytest.mark.parametrize("name", GNN_PRESETS)
def test_presets_hold_whole_models(name: str) -> None:
    config = MaterialsModel.model_validate(load_preset(name).fields)
    assert sum(p.numel() for p in built(config).parameters()) == parameter_count(config)
