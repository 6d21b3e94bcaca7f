"""Two reference models for `graph_run.py`, trained on what our run file says: their own layers, our labels and weights.

`schnet`: `torch_geometric.nn.SchNet` as it comes, with neighbours handed to it, and forces as the gradient of its energy. It
has one number a structure: without energies it learns the first property alone.

`hydragnn`: the PaiNN stack of ORNL/HydraGNN, from a checkout named on the command line, made by its own `create_model` and
trained by its own `energy_force_loss`. Its potentials have exactly one head, so charges beside energies are not learnt;
without energies it has a graph head for each property and a node head for charges. Two of its dependencies have no wheel for
current torch (torch_scatter) or are never called here (mpi4py): `stand_in` puts plain torch, and nothing, in their place.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import sys
import types
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric.nn import SchNet

from phalanx.families.materials.model_config import MaterialsModel

NUMBER = tuple[str, str, Tensor, Tensor]
"""Quantity, unit, predicted, true."""


class Reference(nn.Module):
    """A model with losses and predictions; `data` is a PyG batch as `graph_run.structures` makes them."""

    def __init__(self, config: MaterialsModel) -> None:
        super().__init__()
        self.config = config
        branch = config.branches[0]
        names = config.properties.names if config.properties else []
        self.names = list(names)
        self.register_buffer("shift", torch.tensor(branch.properties_shift or [0.0] * len(names)))
        self.register_buffer("scale", torch.tensor(branch.properties_scale or [1.0] * len(names)))

    def forward(self, data: Any) -> Tensor:
        """The loss to minimise: means over this rank's batch, weighted as the run file says."""
        raise NotImplementedError

    def predict(self, data: Any) -> list[NUMBER]:
        """Numbers in physical units beside the true ones."""
        raise NotImplementedError


class PygSchNet(Reference):
    """`torch_geometric.nn.SchNet`."""

    def __init__(self, config: MaterialsModel) -> None:
        super().__init__(config)
        self._edges: tuple[Tensor, Tensor] | None = None
        self.net = SchNet(
            hidden_channels=config.d_model,
            num_filters=config.d_model,
            num_interactions=config.n_layers,
            num_gaussians=config.n_radial,
            cutoff=config.cutoff,
            interaction_graph=lambda pos, batch: self._edges,
            readout="add" if config.energy else "mean",
        )

    def forward(self, data: Any) -> Tensor:
        """See `Reference`."""
        if self.config.energy is None:
            wanted = (data.properties[:, :1] - self.shift[:1]) / self.scale[:1]
            return F.l1_loss(self._one_number(data), wanted)
        energy_G, forces_N3 = self._potential(data, train=True)
        return potential_loss(self.config, data, energy_G, forces_N3)

    def predict(self, data: Any) -> list[NUMBER]:
        """See `Reference`."""
        if self.config.energy is None:
            found = self._one_number(data) * self.scale[:1] + self.shift[:1]
            return [(self.names[0], "", found, data.properties[:, :1])]
        energy_G, forces_N3 = self._potential(data, train=False)
        return potential_numbers(data, energy_G, forces_N3)

    def _one_number(self, data: Any) -> Tensor:
        source, target = data.edge_index
        distance = (data.pos[target] - data.pos[source] + data.edge_shifts).norm(dim=-1)
        self._edges = data.edge_index, distance
        found: Tensor = self.net(data.z, data.pos, data.batch)
        return found

    def _potential(self, data: Any, *, train: bool) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            data.pos.requires_grad_()
            energy_G = self._one_number(data)[:, 0]
            (gradient,) = torch.autograd.grad(energy_G.sum(), data.pos, create_graph=train)
        return energy_G, -gradient


class HydraGnn(Reference):
    """HydraGNN's PaiNN; elements go in one-hot, which is kinder to it than the atomic number as a number."""

    def __init__(self, config: MaterialsModel, checkout: Path, device: torch.device) -> None:
        super().__init__(config)
        stand_in(checkout)
        create_model = importlib.import_module("hydragnn.models.create").create_model
        width, potential = config.d_model, config.energy is not None
        dense = {"num_headlayers": 1, "dim_headlayers": [width]}
        shared = {"num_sharedlayers": 1, "dim_sharedlayers": width}
        node = [{"type": "branch-0", "architecture": {**dense, "type": "mlp"}}]
        graph = [{"type": "branch-0", "architecture": {**dense, **shared}}]
        kinds = ["node"] if potential else ["graph"] * len(self.names) + ["node"] * (config.charges is not None)
        used = {"node": node, "graph": graph}
        energy = config.energy
        self.net = create_model(
            "PAINN",
            input_dim=config.max_atomic_number + 1,
            hidden_dim=width,
            output_dim=[1] * len(kinds),
            pe_dim=0,
            global_attn_engine="",
            global_attn_type="",
            global_attn_heads=0,
            output_type=kinds,
            output_heads={kind: used[kind] for kind in dict.fromkeys(kinds)},
            activation_function="silu",
            loss_function_type="mae",
            task_weights=[1.0] * len(kinds),
            num_conv_layers=config.n_layers,
            num_radial=config.n_radial,
            radius=config.cutoff,
            equivariance=True,
            enable_interatomic_potential=potential,
            energy_peratom_weight=energy.weight if energy else 0.0,
            force_weight=(energy.force_weight or 0.0) if energy else 0.0,
            graph_pooling="add" if potential else "mean",
            use_gpu=device.type != "cpu",
        )

    def forward(self, data: Any) -> Tensor:
        """See `Reference`."""
        found = self._run(data)
        if self.config.energy is not None:
            loss: Tensor = self.net.energy_force_loss(found, data)[0]
            return loss
        weights = self.config.properties.weight if self.config.properties else 0.0
        wanted = (data.properties - self.shift) / self.scale
        count = len(self.names)
        total = weights * sum(F.l1_loss(found[i][:, 0], wanted[:, i]) for i in range(count)) / max(count, 1)
        if self.config.charges is not None:
            total = total + self.config.charges.weight * F.l1_loss(found[-1][:, 0], data.charges)
        return torch.as_tensor(total)

    def predict(self, data: Any) -> list[NUMBER]:
        """See `Reference`."""
        if self.config.energy is not None:
            with torch.enable_grad():
                atoms_N = self._run(data)[0][:, 0]
                energy_G = atoms_N.new_zeros(data.num_graphs).index_add(0, data.batch, atoms_N)
                (gradient,) = torch.autograd.grad(energy_G.sum(), data.pos)
            return potential_numbers(data, energy_G, -gradient)
        found = self._run(data)
        numbers: list[NUMBER] = []
        for i, name in enumerate(self.names):
            numbers.append((name, "", found[i][:, 0] * self.scale[i] + self.shift[i], data.properties[:, i]))
        if self.config.charges is not None:
            numbers.append(("charges", "e", found[-1][:, 0], data.charges))
        return numbers

    def _run(self, data: Any) -> Any:
        data.x = F.one_hot(data.z, self.config.max_atomic_number + 1).to(data.pos.dtype)
        if self.config.energy is not None:
            data.pos.requires_grad_()
        return self.net(data)


def potential_loss(config: MaterialsModel, data: Any, energy_G: Tensor, forces_N3: Tensor) -> Tensor:
    """Absolute errors of energies an atom and of force components, weighted as ours."""
    assert config.energy is not None
    by_atom = config.energy.weight * ((energy_G - data.energy).abs() / data.atoms).mean()
    return by_atom + (config.energy.force_weight or 0.0) * F.l1_loss(forces_N3, data.forces)


def potential_numbers(data: Any, energy_G: Tensor, forces_N3: Tensor) -> list[NUMBER]:
    """Energies an atom and forces, beside the true ones."""
    return [
        ("energy", "eV/atom", energy_G / data.atoms, data.energy / data.atoms),
        ("forces", "eV/A", forces_N3, data.forces),
    ]


def stand_in(checkout: Path) -> None:
    """Make HydraGNN's modules importable from `checkout`, which holds the folder hydragnn."""
    if not (checkout / "hydragnn" / "models" / "create.py").exists():
        raise SystemExit(f"{checkout} holds no hydragnn/models/create.py: give a checkout of ORNL/HydraGNN")
    if importlib.util.find_spec("torch_scatter") is None:
        _module("torch_scatter", scatter=_scatter, scatter_add=_scatter_add, scatter_mean=_scatter_mean)
    if importlib.util.find_spec("mpi4py") is None:
        _module("mpi4py", MPI=type("NoMpi", (), {"__getattr__": lambda self, name: None})())
    # Its top module imports every data format; the models need none.
    _module("hydragnn", __path__=[str(checkout / "hydragnn")])


def _module(name: str, **content: Any) -> None:
    module = types.ModuleType(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package="__path__" in content)
    vars(module).update(content)
    sys.modules[name] = module


def _scatter(
    src: Tensor, index: Tensor, dim: int = -1, out: None = None, dim_size: int | None = None, reduce: str = "sum"
) -> Tensor:
    dim %= src.dim()
    size = int(index.max()) + 1 if dim_size is None else dim_size
    shape = [size if at == dim else length for at, length in enumerate(src.shape)]
    if index.dim() == 1:
        index = index.view([-1 if at == dim else 1 for at in range(src.dim())])
    operation = {"add": "sum", "max": "amax", "min": "amin"}.get(reduce, reduce)
    return src.new_zeros(shape).scatter_reduce(
        dim, index.expand_as(src), src, operation, include_self=operation == "sum"
    )


def _scatter_add(src: Tensor, index: Tensor, dim: int = -1, out: None = None, dim_size: int | None = None) -> Tensor:
    return _scatter(src, index, dim, out, dim_size, "sum")


def _scatter_mean(src: Tensor, index: Tensor, dim: int = -1, out: None = None, dim_size: int | None = None) -> Tensor:
    return _scatter(src, index, dim, out, dim_size, "mean")
