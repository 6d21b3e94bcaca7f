"""Training steps of mace-torch's MACE, with and without cuEquivariance, beside ours: same model, structures and optimizer.

    python benchmarks/rivals/mace_torch_training.py --out FILE [--variants mace-torch ...]

One process a variant, in fp32: `mace-torch` is its own ScaleShiftMACE on e3nn, `cuequivariance` the same with its weights
moved by its own `convert_e3nn_cueq`, `phalanx` our model of the same mathematics (three hidden radial layers, matrices of
elements, functions that fade), compiled and captured as training does, `phalanx-cuequivariance` the same by cuEquivariance's
kernels, `preset` our gnn-mace-1m as it is. A step is what
mace-torch's `take_step` does: forward pass with forces, backward pass, clipping by norm, Adam with amsgrad; of ours the
gradients come from the captured step. The batch is on the device before; sizes are those of gnn-mace-1m for both.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import shlex
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from compile_time import batch, network_of, now, run_of
from data_loading import machine
from phalanx.families.materials.step_capture import StepCapture
from phalanx.hardware.device import choose_device, device_name

VARIANTS = ("phalanx", "phalanx-cuequivariance", "preset", "mace-torch", "cuequivariance")
SAME = {"mace": {"radial_layers": 3, "element_mixing": "matrices", "fades": "functions", "first_skip": False}}
"""What our model takes to compute what mace-torch's does."""
CLIP = 10.0
FORCE_WEIGHT = 10.0


def main() -> None:
    """Measure every variant in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--structures", type=int, default=256)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--warm-up", type=int, default=20)
    parser.add_argument("--narrow", action="store_true", help="width 8, to try it out on a CPU")
    parser.add_argument("--one", choices=VARIANTS, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.one is not None:
        asked.out.write_text(json.dumps(measure(asked)))
        return
    device = choose_device("auto", 0)
    about = machine() | ({} if device.type == "cpu" else {"device": device_name(device)})
    command = shlex.join(["python", "benchmarks/rivals/mace_torch_training.py", *sys.argv[1:]])
    rows = []
    for variant in asked.variants:
        rows.append({"variant": variant, **in_process(variant, asked)})
        print(json.dumps(rows[-1]), flush=True)
        asked.out.write_text(json.dumps({"command": command, "machine": about, "rows": rows}, indent=1) + "\n")


def in_process(variant: str, asked: argparse.Namespace) -> dict[str, Any]:
    """Return what a process of its own measures, or the end of what it said where it failed."""
    found = asked.out.with_suffix(f".{variant}.json")
    words = [sys.executable, __file__, *sys.argv[1:], "--one", variant, "--out", str(found)]
    root = str(Path(__file__).parents[1])
    paths = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(words, env=os.environ | {"PYTHONPATH": paths}, check=False, stderr=subprocess.PIPE, text=True)
    if done.returncode:
        return {"failed": done.stderr.splitlines()[-8:]}
    row: dict[str, Any] = json.loads(found.read_text())
    found.unlink()
    return row


def measure(asked: argparse.Namespace) -> dict[str, Any]:
    """Return milliseconds of a step, atoms a second, parameters and memory of one variant."""
    device = choose_device("auto", 0)
    model: dict[str, Any] = (SAME if asked.one != "preset" else {}) | ({"d_model": 8} if asked.narrow else {})
    if asked.one == "phalanx-cuequivariance":
        model["mace"] = model["mace"] | {"kernels": "cuequivariance"}
    run = run_of(model)
    tensors = batch(run, asked.structures, device)
    make = their_step if asked.one in ("mace-torch", "cuequivariance") else our_step
    begin = now(device)
    step, parameters, versions = make(run, tensors, asked.one == "cuequivariance")
    for _ in range(asked.warm_up):
        loss = step()
    seconds = now(device) - begin
    times = []
    for _ in range(asked.steps):
        start = now(device)
        loss = step()
        times.append(1e3 * (now(device) - start))
    atoms, middle = len(tensors["species_N"]), statistics.median(times)
    memory = torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else 0.0
    return {
        "step_ms": round(middle, 3),
        "atoms_per_second": round(1e3 * atoms / middle),
        "atoms": atoms,
        "edges": tensors["edges_2E"].shape[1],
        "parameters": sum(parameter.numel() for parameter in parameters),
        "seconds_until_warm": round(seconds, 1),
        "peak_gib": round(memory, 2),
        "loss": float(loss),
        "versions": versions,
    }


def our_step(
    run: Any, tensors: dict[str, Tensor], _cue: bool
) -> tuple[Callable[[], Tensor], list[Tensor], dict[str, str]]:
    """Return a step of our network, its parameters, and versions."""
    device = tensors["species_N"].device
    network = network_of(run, device)
    # On a CPU there is nothing to capture, and compilation takes minutes.
    capture = StepCapture(
        lambda: network_of(run, device), source=0, cutoff=run.model.cutoff, compiled=device.type != "cpu"
    )
    parameters = list(network.parameters())
    optimizer = torch.optim.Adam(parameters, lr=1e-3, amsgrad=True)

    def step() -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        losses = capture.add_gradients(tensors, parameters, 1.0)
        torch.nn.utils.clip_grad_norm_(parameters, CLIP)
        optimizer.step()
        return losses.sum()

    return step, parameters, {"torch": torch.__version__}


def their_step(
    run: Any, tensors: dict[str, Tensor], cue: bool
) -> tuple[Callable[[], Tensor], list[Tensor], dict[str, str]]:
    """Return a step of mace-torch's model, as its `take_step` makes one."""
    from importlib.metadata import version  # noqa: PLC0415

    device = tensors["species_N"].device
    model = their_model(run, cue, device)
    batch_of = their_batch(tensors, run.model.max_atomic_number)
    energy_G, forces_N3 = (tensors[name].float() for name in ("energy_G", "forces_N3"))
    has_G, has_N3 = energy_G.isfinite(), forces_N3.isfinite()
    atoms_G = tensors["graph_N"].bincount(minlength=len(energy_G))
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.Adam(parameters, lr=1e-3, amsgrad=True)

    def step() -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        found = model(batch_of, training=True, compute_force=True)
        error_G = torch.where(has_G, (found["energy"] - energy_G) / atoms_G, 0.0)
        error_N3 = torch.where(has_N3, found["forces"] - forces_N3, 0.0)
        loss: Tensor = error_G.square().mean() + FORCE_WEIGHT * error_N3.square().mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, CLIP)
        optimizer.step()
        return loss.detach()

    packages = ("torch", "mace-torch", "e3nn", *(("cuequivariance", "cuequivariance-torch") if cue else ()))
    return step, list(parameters), {name: version(name) for name in packages}


def their_model(run: Any, cue: bool, device: torch.device) -> torch.nn.Module:
    """Return mace-torch's model of our sizes with random weights, on cuEquivariance's layers where asked."""
    import numpy as np  # noqa: PLC0415
    from e3nn import o3  # noqa: PLC0415
    from mace import modules  # noqa: PLC0415

    config, options = run.model, run.model.mace
    torch.manual_seed(0)
    elements = config.max_atomic_number
    model = modules.ScaleShiftMACE(
        r_max=config.cutoff,
        num_bessel=config.n_radial,
        num_polynomial_cutoff=6,
        max_ell=options.degree,
        interaction_cls_first=modules.interaction_classes["RealAgnosticInteractionBlock"],
        interaction_cls=modules.interaction_classes["RealAgnosticResidualInteractionBlock"],
        num_interactions=config.n_layers,
        num_elements=elements,
        hidden_irreps=o3.Irreps(
            [(config.d_model, (degree, (-1) ** degree)) for degree in range(options.hidden_degree + 1)]
        ),
        MLP_irreps=o3.Irreps("16x0e"),
        gate=torch.nn.functional.silu,
        atomic_energies=np.zeros(elements),
        avg_num_neighbors=config.mean_neighbors,
        atomic_numbers=list(range(1, elements + 1)),
        correlation=options.correlation,
        radial_MLP=[options.radial_width] * options.radial_layers,
        atomic_inter_scale=1.0,
        atomic_inter_shift=0.0,
    ).to(device)
    if cue:
        from mace.cli import convert_e3nn_cueq  # noqa: PLC0415

        if device.type == "cuda":
            # Says here why it cannot be loaded; without it cuequivariance-torch takes its naive method silently.
            importlib.import_module("cuequivariance_ops_torch")
        model = convert_e3nn_cueq.run(model, device=device.type)
    return model.to(device)


def their_batch(tensors: dict[str, Tensor], elements: int) -> dict[str, Tensor]:
    """Return the same structures under mace-torch's names."""
    graph_N, cells_G33 = tensors["graph_N"], tensors["cells_G33"]
    counts = graph_N.bincount(minlength=len(cells_G33))
    shifts_E3 = tensors["shifts_E3"]
    return {
        "positions": tensors["positions_N3"].clone().requires_grad_(),
        "node_attrs": torch.nn.functional.one_hot(tensors["species_N"] - 1, elements).float(),
        "edge_index": tensors["edges_2E"],
        "shifts": shifts_E3,
        # Only read where a stress is asked for.
        "unit_shifts": torch.zeros_like(shifts_E3),
        "cell": cells_G33.flatten(0, 1),
        "batch": graph_N,
        "ptr": torch.nn.functional.pad(counts.cumsum(0), (1, 0)),
        "head": torch.zeros(len(cells_G33), dtype=torch.long, device=graph_N.device),
    }


if __name__ == "__main__":
    main()
