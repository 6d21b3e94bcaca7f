"""Write small models of mace-torch with random weights, and what they predict: the files beside this one.

Not a test: needs mace-torch (0.3.16 made the files, with e3nn 0.6.0, torch 2.13.0), which Phalanx does not. Run it there:

    python tests/families/materials/evaluation/mace_torch/make_fixtures.py
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
from ase import Atoms
from ase.build import bulk, molecule
from e3nn import o3
from mace import data, modules
from mace.tools import AtomicNumberTable, torch_geometric
from safetensors.torch import save_file

HERE = Path(__file__).parent
ELEMENTS = [1, 6, 8]
COMMON = {
    "r_max": 4.0,
    "num_bessel": 4,
    "hidden_irreps": o3.Irreps("4x0e + 4x1o"),
    "num_elements": len(ELEMENTS),
    "atomic_numbers": ELEMENTS,
    "gate": torch.nn.functional.silu,
    "avg_num_neighbors": 7.3,
    "MLP_irreps": o3.Irreps("3x0e"),
    "radial_MLP": [5, 5, 5],
    "num_interactions": 2,
}
TWO_HEADS = {
    "max_ell": 2,
    "correlation": 2,
    "num_polynomial_cutoff": 5,
    "interaction_cls_first": modules.interaction_classes["RealAgnosticInteractionBlock"],
    "interaction_cls": modules.interaction_classes["RealAgnosticResidualInteractionBlock"],
    "atomic_energies": np.array([[-1.0, -2.0, -3.0], [-1.5, -2.5, -3.5]]),
    "heads": ["first", "second"],
    "atomic_inter_scale": [0.7, 1.3],
    "atomic_inter_shift": [0.1, -0.2],
}
REPULSIVE = {
    "max_ell": 1,
    "correlation": 3,
    "num_polynomial_cutoff": 6,
    "interaction_cls_first": modules.interaction_classes["RealAgnosticDensityInteractionBlock"],
    "interaction_cls": modules.interaction_classes["RealAgnosticDensityResidualInteractionBlock"],
    "distance_transform": "Agnesi",
    "pair_repulsion": True,
    "atomic_energies": np.array([-1.0, -2.0, -3.0]),
    "atomic_inter_scale": 1.7,
    "atomic_inter_shift": 0.3,
}
RESIDUAL = {
    "num_interactions": 3,
    "max_ell": 2,
    "correlation": 1,
    "num_polynomial_cutoff": 5,
    "radial_type": "gaussian",
    "interaction_cls_first": modules.interaction_classes["RealAgnosticResidualInteractionBlock"],
    "interaction_cls": modules.interaction_classes["RealAgnosticResidualInteractionBlock"],
    "atomic_energies": np.array([-1.0, -2.0, -3.0]),
}
MODELS = {
    "two_heads": (modules.ScaleShiftMACE, TWO_HEADS),
    "repulsive": (modules.ScaleShiftMACE, REPULSIVE),
    "residual": (modules.MACE, RESIDUAL),
}


def structures() -> list[Atoms]:
    """A molecule, a crystal whose cell is small beside the cutoff, and a pair of atoms that nearly touch."""
    draw = np.random.default_rng(3)
    crystal = bulk("CO", "zincblende", a=3.9)
    found = [molecule("CH3CH2OH"), crystal, Atoms("HO", [[0, 0, 0], [0, 0, 0.6]])]
    for atoms in found:
        atoms.positions += 0.05 * draw.standard_normal(atoms.positions.shape)
    return found


def main() -> None:
    torch.set_default_dtype(torch.float64)
    for name, (kind, own) in MODELS.items():
        torch.manual_seed(5)
        model = kind(**COMMON | own)
        state = model.state_dict()
        state["avg_num_neighbors"] = torch.tensor(model.interactions[0].avg_num_neighbors)
        state["apply_cutoff"] = torch.tensor(getattr(model, "apply_cutoff", True))
        save_file({key: value.contiguous() for key, value in state.items()}, HERE / f"{name}.safetensors")
        predicted = []
        for head in own.get("heads", ["Default"]):
            for atoms in structures():
                config = data.config_from_atoms(atoms, head_name=head)
                heads = own.get("heads", ["Default"])
                graph = data.AtomicData.from_config(
                    config, z_table=AtomicNumberTable(ELEMENTS), cutoff=COMMON["r_max"], heads=heads
                )
                batch = next(iter(torch_geometric.dataloader.DataLoader([graph], batch_size=1)))
                found = model(batch.to_dict(), compute_stress=bool(atoms.pbc.all()))
                stress = found["stress"][0].tolist() if atoms.pbc.all() else None
                predicted.append(
                    {
                        "head": head,
                        "numbers": atoms.numbers.tolist(),
                        "positions": atoms.positions.tolist(),
                        "cell": atoms.cell.tolist() if atoms.pbc.all() else None,
                        "energy": float(found["energy"]),
                        "forces": found["forces"].tolist(),
                        "stress": stress,
                    }
                )
        (HERE / f"{name}.json").write_text(json.dumps(predicted) + "\n")


if __name__ == "__main__":
    main()
