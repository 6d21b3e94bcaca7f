"""Batches of crystals and molecules to cut into shares, and what ranks find when they compute with theirs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from atom_graphs import CUTOFF, Structure, random_structure
from phalanx.families.materials.data.graph_batches import LABELS, GraphBatch
from phalanx.families.materials.data.neighbours import device_edges
from phalanx.families.materials.graph_parallel import halo_exchange as graph_parallel
from phalanx.families.materials.graph_parallel.cut_batches import Cutting, SharePart, cut_microbatch
from phalanx.families.materials.graph_parallel.halo_exchange import HaloExchange
from phalanx.families.materials.model.losses import learned_tasks
from phalanx.families.materials.model.network import MaterialsNetwork
from phalanx.families.materials.model_config import MaterialsModel
from phalanx.layout.mesh import Axis
from small_networks import filled_network

SHAPES = {"forces_N3": (3,), "stress_G33": (3, 3), "dipole_G3": (3,), "properties_GP": (2,), "atom_properties_NP": (1,)}


def crystal(atoms: int, seed: int = 1) -> Structure:
    """A periodic structure, its atoms in no order."""
    found = random_structure(seed, atoms, periodic=True, spread=2.2)
    mixed = np.random.default_rng(seed).permutation(atoms)
    return replace(found, species=[found.species[i] for i in mixed], positions_N3=found.positions_N3[mixed])


def graph_batch(structures: Sequence[Structure], config: MaterialsModel | None = None) -> GraphBatch:
    """The structures with a label for all that `config` learns; every third number is missing. Everything is float64."""
    sizes = torch.tensor([len(s.species) for s in structures])
    graph_N = torch.repeat_interleave(sizes)
    positions_N3 = torch.from_numpy(np.concatenate([s.positions_N3 for s in structures]))
    cells_G33 = torch.tensor(np.stack([np.zeros((3, 3)) if s.cell_33 is None else s.cell_33 for s in structures]))
    edges = device_edges(positions_N3, cells_G33, CUTOFF, graph_N=graph_N)
    draw = torch.Generator().manual_seed(1)
    labels: dict[str, Any] = dict.fromkeys(LABELS)
    learned = [] if config is None else [task.label for task in learned_tasks(config)]
    for name in learned:
        rows = len(graph_N) if "_N" in name else len(structures)
        labels[name] = torch.randn(rows, *SHAPES.get(name, ()), generator=draw, dtype=torch.float64)
        labels[name].view(-1)[::3] = torch.nan
        if name == "stress_G33":
            labels[name][cells_G33.abs().sum((1, 2)) == 0.0] = torch.nan
    arriving = torch.bincount(graph_N[edges.edges_2E[1]], minlength=len(structures))
    return GraphBatch(
        **labels,
        species_N=torch.tensor([z for s in structures for z in s.species]),
        positions_N3=positions_N3,
        graph_N=graph_N,
        edges_2E=edges.edges_2E,
        shifts_E3=edges.shifts_E3,
        cells_G33=cells_G33,
        source_G=torch.arange(len(structures)) % 2,
        total_charge_G=torch.arange(len(structures)).double(),
        multiplicity_G=1.0 + torch.arange(len(structures)).double(),
        sample_indices=torch.arange(len(structures)),
        atoms=sizes.numpy(),
        edges=arriving.numpy(),
        graphs_by_part=(len(structures),),
        tasks=tuple(learned),
    )


def cutting_for(config: MaterialsModel, rank: int, size: int) -> Cutting:
    """As a run of this model would cut."""
    everyone = config.electrostatics is not None
    everyone = everyone or (config.attention is not None and config.attention.kind == "softmax")
    triplets = config.body == "dimenet++"
    return Cutting(rank, size, triplet_cost=0.1 * triplets, edges=triplets, everyone=everyone)


def saved_bytes(run: Any, network: MaterialsNetwork) -> tuple[Tensor, int]:
    """What `run()` gives, and the bytes that autograd keeps for its backward pass, parameters aside."""
    kept: dict[int, Tensor] = {}
    parameters = {parameter.untyped_storage().data_ptr() for parameter in network.parameters()}

    def keep(x: Tensor) -> Tensor:
        if x.untyped_storage().data_ptr() not in parameters:
            kept[x.untyped_storage().data_ptr()] = x
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        result = run()
    return result, sum(x.untyped_storage().nbytes() for x in kept.values())


def worst_error(config: MaterialsModel, structures: Sequence[Structure], chunk: int | None = None) -> dict[str, float]:
    """On one of the ranks of a process group: how far losses and gradients of all shares are from those of the whole, the
    numbers that this rank sent for halos, its rows of them, and bytes saved with the share and with the whole."""
    world, batch = dist.get_world_size(), graph_batch(structures, config)
    group = dist.group.WORLD
    assert group is not None
    axis = Axis("cp", dist.get_rank(), world, group, tuple(range(world)), group.group_name)
    network = filled_network(config, edge_chunk=chunk)
    x, named = batch.inputs()
    losses, whole_bytes = saved_bytes(lambda: network(x, **named), network)
    losses.sum().backward()
    wanted = [gradient_of(parameter) for parameter in network.parameters()]
    network.zero_grad()
    part = cut_microbatch(batch, cutting_for(config, axis.rank, world))
    sent, exchanged = [0], graph_parallel._exchange_rows

    def send(rows: Tensor, *how: Any) -> Tensor:
        sent[0] += rows.numel()
        return exchanged(rows, *how)

    with patch.object(graph_parallel, "_exchange_rows", send):
        mine, bytes_saved = saved_bytes(lambda: share_losses(network, part, axis), network)
        mine.sum().backward()
    total = mine.detach().clone()
    dist.all_reduce(total)
    found = [gradient_of(parameter) for parameter in network.parameters()]
    for grad in found:
        dist.all_reduce(grad)
    size = float(torch.stack([grad.norm() for grad in wanted]).norm())
    errors = [(a - b).norm() / (b.norm() + 1e-3 * size) for a, b in zip(found, wanted, strict=True)]
    halo = part.halo
    return {
        "loss": float((total - losses).detach().abs().max() / losses.detach().abs().max()),
        "gradient": float(torch.stack(errors).max()),
        "sent": sent[0],
        "halo": halo.senders - halo.own,
        "edge_halo": 0 if halo.edge_targets is None else len(halo.edge_targets),
        "atoms": halo.own,
        "saved": bytes_saved,
        "saved_whole": whole_bytes,
    }


def gradient_of(parameter: torch.nn.Parameter) -> Tensor:
    """Its gradient; zeros where no rank's rows reach it."""
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


def share_losses(network: MaterialsNetwork, part: SharePart, axis: Axis) -> Tensor:
    """Summed losses [T] of one rank's share."""
    losses: Tensor = network(part.species_N, **part.named, exchange=HaloExchange(part.halo, axis))
    return losses
