"""Fine-tune a MACE that mace-torch trained, beside the same network from scratch, on molecules of xtb_6k.

    python benchmarks/mace_torch_finetune.py MOLECULES --out benchmarks/results/transfer/mace_torch.json [--seconds 90]

Needs mace-torch beside Phalanx. mace-torch trains a small `ScaleShiftMACE` on molecules of at most 16 atoms and even
qm9_index for some seconds; `phalanx convert` reads it, and `phalanx train` goes on with molecules of odd index, of any size.
Errors are those of `phalanx errors` on the same 100 test structures: of the weights as they came, fine-tuned, and from
scratch.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import tempfile
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch
from ase import Atoms
from e3nn import o3
from mace import data, modules
from mace.tools import AtomicNumberTable, torch_geometric
from safetensors.torch import save_file

ELEMENTS = AtomicNumberTable([1, 6, 7, 8, 9])
CUTOFF = 4.0
TRAINED = [
    *("layout.global_batch=8", "optimizer.lr=3e-3", "optimizer.warmup_steps=10", "training.compile=false"),
    *("training.tensorboard=false", "model.energy.loss=mae", "model.energy.weight=2.0", "evaluation.samples=60"),
]
"""Fields of both runs of Phalanx."""


def main() -> None:
    """Train, convert, go on, and write the errors."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("molecules", type=Path, help="folder with xtb_6k.npz")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=90.0, help="seconds of mace-torch's training")
    parser.add_argument("--steps", type=int, default=160, help="steps of each run of Phalanx")
    asked = parser.parse_args()
    arrays = dict(np.load(asked.molecules / "xtb_6k.npz"))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        steps = train_there(arrays, asked.seconds, folder / "mace.safetensors")
        write_odd(arrays, folder / "odd.npz")
        phalanx("convert", folder / "mace.safetensors", folder / "own")
        run_file = folder / "own" / "run.yaml"
        fields = [f"data.sources.0.path={folder}/odd.npz", "data.sources.0.group_by=qm9_index"]
        fields += [f"data.prepared={folder}/graphs", "data.test_fraction=0.2", "data.validation_fraction=0.1"]
        phalanx("data", "prepare-graphs", run_file, *fields)
        own = [*fields, *TRAINED, f"training.steps={asked.steps}"]
        phalanx("train", run_file, "--run-dir", folder / "tuned", *own)
        phalanx("train", run_file, "--run-dir", folder / "scratch", *own, "training.init_from=null")
        found = {
            "as they came": errors(folder / "own", *fields),
            "fine-tuned": errors(folder / "tuned"),
            "from scratch": errors(folder / "scratch"),
        }
    packages = ("mace-torch", "e3nn", "torch")
    content = {
        "command": f"python benchmarks/mace_torch_finetune.py MOLECULES --out {asked.out} --seconds {asked.seconds:g} "
        f"--steps {asked.steps}",
        "machine": platform.processor() or platform.machine(),
        "versions": {package: metadata.version(package) for package in packages},
        "steps_of_mace_torch": steps,
        "mean_absolute_errors": found,
    }
    asked.out.write_text(json.dumps(content, indent=1) + "\n")
    print(json.dumps(content, indent=1))


def train_there(arrays: dict[str, np.ndarray], seconds: float, out: Path) -> int:
    """Train with mace-torch for `seconds`, write the state dict, and return the steps done."""
    torch.manual_seed(0)
    sizes = np.diff(arrays["ptr"])
    chosen = np.flatnonzero((arrays["qm9_index"] % 2 == 0) & (sizes <= 16))[:640]
    rows = [slice(*arrays["ptr"][number : number + 2]) for number in chosen]
    counts = np.array([[(arrays["z"][row] == z).sum() for z in ELEMENTS.zs] for row in rows])
    references = np.linalg.lstsq(counts, arrays["energy"][chosen], rcond=None)[0]
    keys = data.KeySpecification(info_keys={"energy": "REF_energy"}, arrays_keys={"forces": "REF_forces"})
    graphs = []
    for number, row in zip(chosen, rows, strict=True):
        atoms = Atoms(arrays["z"][row], arrays["pos"][row])
        atoms.info["REF_energy"] = float(arrays["energy"][number])
        atoms.arrays["REF_forces"] = arrays["forces"][row].astype(float)
        config = data.config_from_atoms(atoms, key_specification=keys)
        graphs.append(data.AtomicData.from_config(config, z_table=ELEMENTS, cutoff=CUTOFF))
    interaction = modules.interaction_classes["RealAgnosticResidualInteractionBlock"]
    model = modules.ScaleShiftMACE(
        r_max=CUTOFF,
        num_bessel=8,
        num_polynomial_cutoff=5,
        max_ell=2,
        interaction_cls=interaction,
        interaction_cls_first=interaction,
        num_interactions=2,
        num_elements=len(ELEMENTS),
        hidden_irreps=o3.Irreps("16x0e + 16x1o"),
        MLP_irreps=o3.Irreps("16x0e"),
        atomic_energies=references,
        avg_num_neighbors=10.0,
        atomic_numbers=ELEMENTS.zs,
        correlation=2,
        gate=torch.nn.functional.silu,
        atomic_inter_scale=3.6,
        atomic_inter_shift=0.0,
    )
    batches = torch_geometric.dataloader.DataLoader(graphs, batch_size=8, shuffle=True)
    optimizer = torch.optim.Adam(model.parameters())
    start, steps = time.perf_counter(), 0
    while (passed := (time.perf_counter() - start) / seconds) < 1.0:
        batch = next(iter(batches))
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 * max(0.05, 1.0 - passed)
        found: dict[str, Any] = model(batch.to_dict(), training=True)
        by_atom = (found["energy"] - batch.energy) / (batch.ptr[1:] - batch.ptr[:-1])
        loss = (found["forces"] - batch.forces).abs().mean() + 2.0 * by_atom.abs().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        steps += 1
    state = model.state_dict()
    state["avg_num_neighbors"] = torch.tensor(model.interactions[0].avg_num_neighbors)
    state["apply_cutoff"] = torch.tensor(model.apply_cutoff)
    save_file({name: tensor.contiguous() for name, tensor in state.items()}, out)
    return steps


def write_odd(arrays: dict[str, np.ndarray], out: Path) -> None:
    """Write 1,000 molecules of odd qm9_index, which mace-torch did not see."""
    chosen = np.flatnonzero(arrays["qm9_index"] % 2 == 1)[:1000]
    rows = [slice(*arrays["ptr"][number : number + 2]) for number in chosen]
    atoms = {name: np.concatenate([arrays[name][row] for row in rows]) for name in ("z", "pos", "forces")}
    starts = np.cumsum([0, *(row.stop - row.start for row in rows)])
    np.savez(out, ptr=starts, **atoms, **{name: arrays[name][chosen] for name in ("energy", "qm9_index")})


def phalanx(*words: str | Path) -> str:
    """Run a subcommand and return what it printed."""
    done = subprocess.run(["phalanx", *map(str, words)], check=True, capture_output=True, text=True)
    return done.stdout


def errors(where: Path, *fields: str) -> dict[str, float]:
    """Return mean absolute errors by quantity, energies in eV/atom."""
    found = json.loads(phalanx("errors", where, *fields, "--device", "cpu", "--samples", "100", "--json"))
    return {row["quantity"]: row["mae"] for row in found["errors"]}


if __name__ == "__main__":
    main()
