"""What the features of atoms know of a structure's electrons beyond its nuclei: the total charge and the spin.

After SpookyNet (Unke et al. 2021, Nature Communications 12, 7273, "electronic embeddings"): each atom gets a part of the
charge, or of the unpaired electrons, in proportion to a positive number that its element decides. The parts add up to the
whole, so that a crystal of twice as many cells and twice the charge has the same features. A structure without charge and
unpaired electrons has those of a network without this part.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.families.materials.model.geometry import Geometry
from phalanx.families.materials.model.layers import silu
from phalanx.families.materials.model_config import MaterialsModel
from phalanx.nn.layers import Linear


class ElectronicState(nn.Module):
    """Adds to the first scalars of atoms what each quantity of `electronic_state` changes; nothing where there is none."""

    def __init__(self, config: MaterialsModel) -> None:
        super().__init__()
        self.quantities = nn.ModuleDict({name: SharedQuantity(config.d_model) for name in config.electronic_state})

    def forward(self, x_NC: Tensor, geometry: Geometry) -> Tensor:
        """Map scalars [N, C] of elements to [N, C]."""
        unpaired_G = None if geometry.multiplicity_G is None else geometry.multiplicity_G - 1.0
        amounts = {"charge": geometry.total_charge_G, "spin": unpaired_G}
        changes_NC = x_NC
        for name, quantity in self.quantities.items():
            amount_G = amounts[name]
            if amount_G is None:
                amount_G = x_NC.new_zeros(geometry.graphs)
            changes_NC = changes_NC + quantity(x_NC, amount_G, geometry)
        return changes_NC


class SharedQuantity(nn.Module):
    """A quantity of a structure, shared out among its atoms, as features of each."""

    def __init__(self, width: int) -> None:
        super().__init__()
        # Without a bias: one that all atoms share hardly changes their parts.
        self.share = Linear(width, 1, bias=False)
        self.inward = Linear(2, width, bias=False)
        self.outward = Linear(width, width, bias=False)

    def forward(self, x_NC: Tensor, amount_G: Tensor, geometry: Geometry) -> Tensor:
        """Return features [N, C] of each atom's part of `amount_G`; zeros where that is 0."""
        # Float64 as all sums over structures: parts of a large one are small.
        weight_N1 = F.softplus(self.share(x_NC).double())
        sums_G1 = weight_N1.new_zeros((geometry.graphs, 1)).index_add(0, geometry.graph_N, weight_N1)
        # A structure without atoms on any rank, as padding is, has no part to be read.
        of_one_G1 = amount_G.double()[:, None] / geometry.exchange.over_graphs(sums_G1).clamp(min=1e-30)
        part_N1 = weight_N1 * of_one_G1.index_select(0, geometry.graph_N)
        # The size beside the sign: what an electron too many changes is not the opposite of what one too few does.
        parts_N2 = torch.cat((part_N1, part_N1.abs()), dim=1).to(x_NC.dtype)
        features_NC: Tensor = self.outward(silu(self.inward(parts_N2)))
        return features_NC
