"""A trained network, or an ensemble of them, as a model of torch-sim: many structures move or relax in one batch.

    model = PhalanxTorchSim("runs/materials-xtb", precision="fp64")
    final = torch_sim.optimize(structures, model, optimizer=torch_sim.optimizers.fire)

Energies, forces and stresses are those of the ASE calculator (`evaluation.calculator`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from phalanx.errors import ConfigError, PhalanxError
from phalanx.families.materials.evaluation.structure_predictor import GivenStructures, StructurePredictor

try:
    from torch_sim.models.interface import ModelInterface
    from torch_sim.state import SimState
except ImportError as error:
    raise PhalanxError('the model of torch-sim needs torch-sim: pip install "phalanx-train[torchsim]"') from error


class PhalanxTorchSim(ModelInterface):
    """Energy (eV), forces (eV/A) and stress (eV/A^3, tension positive; zeros where nothing is periodic) of all systems."""

    def __init__(
        self,
        checkpoint: str | Path,
        *,
        branch: str | None = None,
        device: str = "auto",
        precision: str | None = None,
        compute_stress: bool = True,
        edge_chunk: int | None = None,
        untrained_elements: bool = False,
        dispersion: str | None = None,
    ) -> None:
        """compute_stress: whether stresses are formed. All else as `StructurePredictor` has it.

        Raises ConfigError, too, where the branch was taught no energies.
        """
        super().__init__()
        self.predictor = StructurePredictor(
            checkpoint,
            branch=branch,
            device=device,
            precision=precision,
            edge_chunk=edge_chunk,
            untrained_elements=untrained_elements,
            dispersion=dispersion,
        )
        refusal = self.predictor.explain_untaught("energy")
        if refusal is not None:
            raise ConfigError(refusal)
        self._device = self.predictor.device
        # Positions, as all simulations have them; activations have the format of `precision`.
        self._dtype = torch.float64
        self._compute_stress = compute_stress
        self._compute_forces = True
        self._memory_scales_with = "n_atoms_x_density"

    def forward(self, state: SimState | dict[str, Any], **_: Any) -> dict[str, Tensor]:
        """Return energy [G], forces [N, 3] and, where asked for, stress [G, 3, 3] of a state of torch-sim.

        Total charges and multiplicities are the state's `charge` and `spin`, where it has such; else systems are neutral
        singlets. Raises DataError as `StructurePredictor.predict` does.
        """
        if isinstance(state, dict):
            state = SimState(**state, masses=torch.ones_like(state["atomic_numbers"], dtype=self.dtype))
        cells_G33 = state.row_vector_cell.double()
        graphs = len(cells_G33)
        # One flag for all directions, or one each.
        periodic_3 = torch.as_tensor(state.pbc, device=cells_G33.device).reshape(-1).expand(3)
        zeros_G = cells_G33.new_zeros(graphs)
        charge_G, multiplicity_G = getattr(state, "charge", None), getattr(state, "spin", None)
        given = GivenStructures(
            species_N=state.atomic_numbers.long(),
            positions_N3=state.positions.double(),
            cells_G33=cells_G33,
            periodic_G3=periodic_3.expand(graphs, 3),
            graph_N=state.system_idx.long(),
            total_charge_G=zeros_G if charge_G is None else charge_G.double(),
            multiplicity_G=zeros_G + 1.0 if multiplicity_G is None else multiplicity_G.double(),
        )
        found, _stds = self.predictor.predict(given, stress=self.compute_stress and bool(periodic_3.all()))
        assert found.energy_G is not None and found.forces_N3 is not None
        results = {"energy": found.energy_G, "forces": found.forces_N3.to(found.energy_G.dtype)}
        if self.compute_stress:
            results["stress"] = (
                cells_G33.new_zeros(graphs, 3, 3) if found.stress_G33 is None else found.stress_G33.double()
            )
        return results
