"""Backbones that keep vectors beside scalars: PaiNN and EGNN."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from phalanx.families.materials.model.geometry import Geometry
from phalanx.families.materials.model.layers import Atoms, Mlp, cast_linear, layer_values, silu
from phalanx.families.materials.model.message_passing.messages import sum_messages
from phalanx.families.materials.model_config import MaterialsModel
from phalanx.nn.layers import Linear

_NORM_EPS = 1e-8
"""Under the root of a vector's length: its derivatives stay finite where the vector is 0."""


class PaiNNBlock(nn.Module):
    """PaiNN (Schuett, Unke & Gastegger 2021): scalars and vectors on every atom, exchanged through equivariant messages.

    One message block and one update block (equations 7 to 9).
    """

    def __init__(self, config: MaterialsModel) -> None:
        super().__init__()
        width = config.d_model
        self.scale = 1.0 / config.mean_neighbors
        self.inward = Mlp(width, width, 3 * width)
        self.filter = Linear(config.n_radial, 3 * width, bias=True)
        # No bias: a constant vector would not turn with the atoms.
        self.mix = Linear(width, 2 * width, bias=False)
        self.update = Mlp(2 * width, width, 3 * width)

    def forward(self, atoms: Atoms, geometry: Geometry) -> Atoms:
        """Return the next scalars [N, C] and vectors [N, 3, C]."""
        # The message block.
        scalars_NC, vectors_N3C = atoms.scalars_NC, atoms.vectors_NMC
        assert vectors_N3C is not None
        # What every neighbour reads of an atom, side by side, so that an edge gathers once.
        inward = (self.inward(scalars_NC) * self.scale).unflatten(-1, (3, -1))
        given_N6C = torch.cat((inward, vectors_N3C), dim=1)
        # Fading the radial functions, with a 1 for the bias among them, spares a pass over the filters.
        radial_EX = torch.cat((geometry.radial_ER, torch.ones_like(geometry.envelope_E1)), dim=1) * geometry.envelope_E1
        assert self.filter.bias is not None
        filter_XC = torch.cat((self.filter.whole_weight(), self.filter.bias[:, None]), dim=1)
        edges = (geometry.source_E, radial_EX, geometry.unit_E3)
        shared = (geometry.exchange.atoms(given_N6C), filter_XC)
        sums_N4C = sum_messages(_painn_message, edges, shared, geometry.target_E, geometry.atoms, geometry.chunk)
        scalar_N1C, vector_N3C = sums_N4C.split((1, 3), dim=1)
        scalars_NC, vectors_N3C = scalars_NC + scalar_N1C.squeeze(1), vectors_N3C + vector_N3C
        return update_vectors(scalars_NC, vectors_N3C, self.mix, self.update)


def update_vectors(scalars_NC: Tensor, vectors_N3C: Tensor, mix: Linear, update: Mlp) -> Atoms:
    """Return what PaiNN's update block makes of an atom: its scalars, and its vectors' lengths and products, tell each
    other."""
    left_N3C, right_N3C = mix(vectors_N3C).chunk(2, dim=-1)
    length_NC = (right_N3C.square().sum(1) + _NORM_EPS).sqrt()
    gate_NC, overlap_NC, change_NC = update(torch.cat((scalars_NC, length_NC), dim=-1)).chunk(3, dim=-1)
    scalars_NC = scalars_NC + change_NC + overlap_NC * (left_N3C * right_N3C).sum(1)
    return Atoms(scalars_NC, vectors_N3C + gate_NC[:, None] * left_N3C)


def _painn_message(
    source_E: Tensor, radial_EX: Tensor, unit_E3: Tensor, given_N6C: Tensor, filter_XC: Tensor
) -> Tensor:
    """Return scalar and vector messages side by side, [E, 4, C]."""
    filter_E3C = cast_linear(radial_EX, filter_XC).unflatten(-1, (3, -1))
    given_E3C, vector_E3C = given_N6C.index_select(0, source_E).split(3, dim=1)
    scalar, along, kept = (given_E3C * filter_E3C).split(1, dim=1)
    return torch.cat((scalar, kept * vector_E3C + along * unit_E3[:, :, None]), dim=1)


_LENGTH_EPS = 1e-8
"""Added to a squared length (cutoffs^2) under its root: an atom that meets another has finite derivatives."""


class EgnnBlock(nn.Module):
    """EGNN (Satorras, Hoogeboom & Welling 2021): invariant messages that also move the atoms.

    Equations 3 to 6, with radial functions of the true distance beside the squared distance after moving. Atoms keep how far
    they have moved rather than where they are, so that periodic images move with them.

    Messages fade towards the cutoff of the true distance; a step is along r / (|r| + 1), as in the authors' own code.
    """

    def __init__(self, config: MaterialsModel, number: int) -> None:
        super().__init__()
        width = config.d_model
        # Behind the last block nobody asks where atoms went, unless a dipole does.
        self.moves = number < config.n_layers - 1 or config.dipole is not None
        self.scale = 1.0 / config.mean_neighbors
        # Lengths in cutoffs are of order 1, whatever the unit of the data.
        self.inverse_cutoff = 1.0 / config.cutoff
        self.ends = Linear(width, 2 * width, bias=True)
        self.distances = Linear(config.n_radial + 1, width, bias=False)
        self.message = Linear(width, width, bias=True)
        if self.moves:
            self.coordinate = Mlp(width, width, 1)
        self.update = Mlp(2 * width, width, width)

    def forward(self, atoms: Atoms, geometry: Geometry) -> Atoms:
        """Return the next scalars [N, C] and displacements [N, 3, 1] in units of the cutoff."""
        moved_N31 = atoms.vectors_NMC
        assert moved_N31 is not None
        # The first layer of the message's network, before its inputs are gathered: atoms are fewer than edges.
        from_NC, to_NC = self.ends(atoms.scalars_NC).chunk(2, dim=-1)
        moved_N3 = moved_N31.squeeze(-1)
        vector_E3 = (geometry.vector_E3 * self.inverse_cutoff).to(moved_N3.dtype)
        edges = (geometry.source_E, geometry.target_E, geometry.radial_ER, geometry.envelope_E1, vector_E3)
        given = geometry.exchange.atoms(torch.cat((from_NC, moved_N3), dim=1))
        from_MC, moved_M3 = given.split((from_NC.shape[1], 3), dim=1)
        shared = (from_MC, to_NC, moved_M3, self.distances.whole_weight(), *layer_values(self.message))
        if self.moves:
            shared = (*shared, *layer_values(self.coordinate))
        sums = (
            sum_messages(_egnn_message, edges, shared, geometry.target_E, geometry.atoms, geometry.chunk) * self.scale
        )
        step, received_NC = sums.split((3 * self.moves, atoms.scalars_NC.shape[1]), dim=-1)
        change_NC: Tensor = self.update(torch.cat((atoms.scalars_NC, received_NC), dim=-1))
        return Atoms(atoms.scalars_NC + change_NC, moved_N31 + step[:, :, None] if self.moves else None)


def _egnn_message(
    source_E: Tensor,
    target_E: Tensor,
    radial_ER: Tensor,
    envelope_E1: Tensor,
    vector_E3: Tensor,
    from_NC: Tensor,
    to_NC: Tensor,
    moved_N3: Tensor,
    distances: Tensor,
    weight: Tensor,
    bias: Tensor,
    *coordinate: Tensor,
) -> Tensor:
    """Return the step of the target, where atoms move, then the message to it, [E, 3 + C]. Lengths are in cutoffs."""
    now_E3 = vector_E3 + moved_N3.index_select(0, target_E) - moved_N3.index_select(0, source_E)
    squared_E1 = now_E3.square().sum(1, keepdim=True)
    inside = cast_linear(torch.cat((radial_ER, squared_E1), dim=-1), distances)
    inside = inside + from_NC.index_select(0, source_E) + to_NC.index_select(0, target_E)
    message_EC = silu(cast_linear(silu(inside), weight, bias)) * envelope_E1
    if not coordinate:
        return message_EC
    weight_1, bias_1, weight_2, bias_2 = coordinate
    size_E1 = cast_linear(silu(cast_linear(message_EC, weight_1, bias_1)), weight_2, bias_2) * envelope_E1
    step_E3 = now_E3 * (size_E1 / ((squared_E1 + _LENGTH_EPS).sqrt() + 1.0))
    return torch.cat((step_E3, message_EC), dim=-1)
