"""DimeNet++ (Gasteiger et al. 2020): messages on edges that see the angles to the edges before them.

The angular basis is radial functions times Legendre polynomials; the published one has spherical Bessel functions of each
degree, which lose all digits in float32 at short distances: closed forms of higher degrees are differences of terms that
grow with powers of 1/d. Angles meet the basis as cosines, whose derivative is finite where three atoms are in line; an
arccos would not have one there.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.families.materials.model.electronic_state import ElectronicState
from phalanx.families.materials.model.geometry import Geometry
from phalanx.families.materials.model.layers import Atoms, ElementTable, Mlp, silu
from phalanx.families.materials.model.message_passing.messages import sum_messages
from phalanx.families.materials.model_config import MaterialsModel
from phalanx.nn.layers import Linear


class DimeNetEmbedding(nn.Module):
    """Features of elements, and the first messages: of both ends and the distance."""

    def __init__(self, config: MaterialsModel) -> None:
        super().__init__()
        width = config.d_model
        self.elements = ElementTable(config.max_atomic_number, width)
        self.state = ElectronicState(config)
        self.ends = Linear(width, 2 * width, bias=True)
        self.distance = Linear(config.n_radial, width, bias=False)

    def forward(self, geometry: Geometry) -> Atoms:
        """Return atoms and edges before the first block."""
        x_NC = self.state(self.elements(geometry.species_N, geometry.radial_ER.dtype), geometry)
        from_NC, to_NC = self.ends(x_NC).chunk(2, dim=-1)
        from_MC = geometry.exchange.atoms(from_NC)
        seen_EC = from_MC.index_select(0, geometry.source_E) + to_NC.index_select(0, geometry.target_E)
        return Atoms(x_NC, edges_EC=silu(seen_EC + self.distance(geometry.radial_ER)))


class DimeNetBlock(nn.Module):
    """One interaction block, and the output block that adds its messages to the atoms they reach."""

    def __init__(self, config: MaterialsModel) -> None:
        super().__init__()
        width, options = config.d_model, config.dimenet
        self.scale = 1.0 / config.mean_neighbors
        self.angular = options.angular
        self.own = Linear(width, width, bias=True)
        self.other = Linear(width, width, bias=True)
        self.distance = Mlp(config.n_radial, options.basis_width, width, bias=False)
        self.narrow = Linear(width, options.triplet_width, bias=False)
        self.angle_inward = Linear(config.n_radial, options.angular * options.basis_width, bias=False)
        self.angle_outward = Linear(options.basis_width, options.triplet_width, bias=False)
        self.widen = Linear(options.triplet_width, width, bias=False)
        self.before = Residual(width)
        self.skip = Linear(width, width, bias=True)
        self.after = nn.Sequential(Residual(width), Residual(width))
        self.output_distance = Linear(config.n_radial, width, bias=False)
        self.output = Mlp(width, width, width)

    def forward(self, atoms: Atoms, geometry: Geometry) -> Atoms:
        """Return the next features of atoms and edges."""
        message_EC = atoms.edges_EC
        assert message_EC is not None
        triplets = geometry.triplets
        assert triplets is not None
        own_EC = silu(self.own(message_EC))
        # What edges j -> i hear from edges k -> j.
        given_EC = silu(self.other(message_EC)) * self.distance(geometry.radial_ER)
        given_EC = silu(self.narrow(given_EC)) * (geometry.envelope_E1 * self.scale)
        # The radial half of the angular basis belongs to the edge k -> j, so it is mixed before edges are paired.
        basis_EX = self.angle_inward(geometry.radial_ER)
        edges = (triplets.incoming_T, triplets.cosine_T1)
        given_FC, basis_FX = geometry.exchange.edges(given_EC), geometry.exchange.edges(basis_EX)
        shared = (given_FC, basis_FX, self.angle_outward.whole_weight())
        heard = sum_messages(_triplet_message, edges, shared, triplets.outgoing_T, len(message_EC), geometry.chunk)
        changed_EC = self.before(own_EC + silu(self.widen(heard)))
        message_EC = self.after(message_EC + silu(self.skip(changed_EC)))
        # Faded here as well: an edge's message to its own atom must vanish at the cutoff, not only what it tells others.
        faded_EC = message_EC * (self.output_distance(geometry.radial_ER) * geometry.envelope_E1)
        sums_NC = faded_EC.new_zeros((geometry.atoms, faded_EC.shape[1])).index_add(0, geometry.target_E, faded_EC)
        scalars_NC = atoms.scalars_NC + self.output(sums_NC * self.scale)
        return Atoms(scalars_NC, edges_EC=message_EC)


class Residual(nn.Module):
    """x + silu(second(silu(first(x))))."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = Linear(width, width, bias=True)
        self.second = Linear(width, width, bias=True)

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., C] to [..., C]."""
        return x + silu(self.second(silu(self.first(x))))


def _triplet_message(
    incoming_T: Tensor, cosine_T1: Tensor, given_EC: Tensor, basis_EX: Tensor, outward: Tensor
) -> Tensor:
    width = outward.shape[1]
    radial_TLW = basis_EX.index_select(0, incoming_T).unflatten(-1, (-1, width))
    angle_TL = legendre_polynomials(cosine_T1, radial_TLW.shape[1])
    basis_TW = (angle_TL[:, :, None] * radial_TLW).sum(1)
    return given_EC.index_select(0, incoming_T) * F.linear(basis_TW, outward.to(basis_TW.dtype))


def legendre_polynomials(x_T1: Tensor, count: int) -> Tensor:
    """Return Legendre polynomials of degrees 0 to count - 1, [T, count], by Bonnet's recursion."""
    values = [torch.ones_like(x_T1), x_T1]
    for degree in range(2, count):
        values.append(((2 * degree - 1) * x_T1 * values[-1] - (degree - 1) * values[-2]) / degree)
    return torch.cat(values[:count], dim=1)
