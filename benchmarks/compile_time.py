"""Seconds until a MACE training step is compiled, with empty and with full caches, and milliseconds of the step it gives.

    python benchmarks/compile_time.py --out benchmarks/results/materials/compile_time.json [--variants NAME ...]

One process a measurement, on the default device, of preset gnn-mace-1m with forces in fp32 on `--structures` small made
structures. Variants: `traced_again` has AOTAutograd trace the step's graph again, and the compiler try out padded products;
`padded` lowers the graph as it is and tries out padded products; `lowered` is what training does; `tilings` has Triton try
several tilings of each pointwise kernel; `fixed_sizes` is compiled for one size of batch alone; `captured` is not compiled;
`apart` mixes each degree by itself, and takes parts of tensors by slices; `ordered` has the compiler try other orders
of loops to fuse more.
`seconds` is what the first step takes, and `since_start` all of the process until that step is done. The compiler is loaded
in a thread from when the step is made, as in training, beside what goes before the first step: here the network runs once
(`before`), in training data are opened and parameters get their values. What is left of that (`waited`) is part of `trace`.
`trace`, `lower` and `first_run` (Triton's choices between tilings, the warm-up and the capture) add up to `seconds`.
`difference` is that of the gradients from those of the network by itself, over their norm. `inside` are the compiler's
own figures, which overlap.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import yaml

from data_loading import machine
from phalanx.config.load import load_run
from phalanx.families.materials import step_capture
from phalanx.families.materials.config import MaterialsRun
from phalanx.families.materials.model.message_passing import mace
from phalanx.families.materials.model.network import MaterialsNetwork
from phalanx.families.materials.step_capture import StepCapture
from phalanx.families.registry import bind
from phalanx.hardware.device import choose_device, device_name
from phalanx.layout.initial_values import initialise_parameters
from phalanx.torch_compat import compiler
from phalanx.verification.family import VerifiableModel

VARIANTS: dict[str, dict[str, Any]] = {
    "lowered": {},
    "traced_again": {"shape_padding": True},
    "padded": {"shape_padding": True},
    "tilings": {"triton.autotune_pointwise": True},
    "apart": {},
    "ordered": {"loop_ordering_after_fusion": True},
    "fixed_sizes": {},
    "captured": {},
}
"""Options of the compiler in each."""
INSIDE = ("compile", "pass", "prop", "codegen", "lower", "schedul", "async", "fusion", "autotune", "triton")
"""What names of the compiler's own figures hold, of those that are kept."""


def main() -> None:
    """Measure each variant twice, or one of them once in this process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--structures", type=int, default=256)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--model", default="{}", help="fields of `model`, YAML, to try it out with a narrow one")
    parser.add_argument("--seconds", type=float, default=540.0, help="after which no measurement begins")
    parser.add_argument("--one", choices=VARIANTS, help=argparse.SUPPRESS)
    parser.add_argument("--started", type=float, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.one is not None:
        asked.out.write_text(json.dumps(measure(asked.one, asked.structures, asked.steps, asked.model, asked.started)))
        return
    end, rows = time.monotonic() + asked.seconds, []
    for variant in asked.variants:
        with tempfile.TemporaryDirectory() as caches:
            for state in ("cold", "warm") if variant != "captured" else ("cold",):
                if time.monotonic() < end:
                    rows.append({"variant": variant, "caches": state, **in_process(variant, Path(caches), asked)})
                    print(json.dumps({key: value for key, value in rows[-1].items() if key != "inside"}), flush=True)
                    write(asked.out, rows)


def write(out: Path, rows: list[dict[str, Any]]) -> None:
    """Write what there is: a machine may be taken back before all is measured."""
    device = choose_device("auto", 0)
    about = machine() | ({} if device.type == "cpu" else {"device": device_name(device)})
    command = shlex.join(["python", "benchmarks/compile_time.py", *sys.argv[1:]])
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps({"command": command, "machine": about, "rows": rows}, indent=1) + "\n")


def in_process(variant: str, caches: Path, asked: argparse.Namespace) -> dict[str, Any]:
    """Return a measurement made in a process of its own, whose compiler keeps its caches in `caches`."""
    kept = {"TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"), "TRITON_CACHE_DIR": str(caches / "triton")}
    words = [sys.executable, __file__, "--one", variant, "--out", str(caches / "found.json"), "--model", asked.model]
    words += ["--structures", str(asked.structures), "--steps", str(asked.steps), "--started", str(time.time())]
    done = subprocess.run(words, env={**os.environ, **kept}, check=False, stderr=subprocess.PIPE, text=True)
    if done.returncode:
        return {"failed": done.stderr.splitlines()[-12:]}
    found: dict[str, Any] = json.loads((caches / "found.json").read_text())
    return found


def measure(variant: str, structures: int, steps: int, model: str, started: float) -> dict[str, Any]:
    """Compile and capture a step, run it `steps` times, and compare it with the network itself.

    started: time at which this process was.
    """
    device = choose_device("auto", 0)
    run = run_of(yaml.safe_load(model))
    tensors, network = batch(run, structures, device), network_of(run, device)
    set_variant(variant)
    phases: dict[str, float] = {}
    count_seconds(compiler.SizedProgram, "__init__", "trace", phases)
    count_seconds(compiler.SizedProgram, "compile", "lower", phases)
    made = time.perf_counter()
    capture = StepCapture(
        lambda: network_of(run, device), source=0, cutoff=run.model.cutoff, compiled=variant != "captured"
    )
    parameters = list(network.parameters())
    # Loaded and warm before: kernels of the network by itself, and memory.
    wanted = network(**tensors)
    gradients = torch.autograd.grad(wanted.sum(), parameters, allow_unused=True)
    begin, waited = now(device), 0.0
    if variant != "captured":
        compiler.begin_loading().join()
        waited = time.perf_counter() - begin
    capture.add_gradients(tensors, parameters, 1.0)
    seconds, since_start = now(device) - begin, time.time() - started
    phases["trace"] = phases.get("trace", 0.0) + waited
    # Later steps add to them.
    found = [None if parameter.grad is None else parameter.grad.clone() for parameter in parameters]
    milliseconds = []
    for _ in range(steps):
        start = now(device)
        capture.add_gradients(tensors, parameters, 1.0)
        milliseconds.append(1e3 * (now(device) - start))
    pairs = [(a, b) for a, b in zip(found, gradients, strict=True) if a is not None and b is not None]
    apart = sum(float((a - b).double().square().sum()) for a, b in pairs)
    whole = sum(float(b.double().square().sum()) for _, b in pairs)
    return {
        "seconds": round(seconds, 2),
        "since_start": round(since_start, 2),
        "before": round(begin - made, 2),
        "waited": round(waited, 2),
        **{name: round(value, 2) for name, value in phases.items()},
        "first_run": round(seconds - sum(phases.values()), 2),
        "step_ms": round(statistics.median(milliseconds), 3),
        "difference": (apart / whole) ** 0.5,
        "atoms": len(tensors["species_N"]),
        "edges": tensors["edges_2E"].shape[1],
        "inside": inside(),
    }


def run_of(model: dict[str, Any]) -> MaterialsRun:
    """Return the run of the preset, with `model` changed."""
    fields = {
        "model": {"preset": "gnn-mace-1m", "max_atomic_number": 54, "energy": {"force_weight": 10.0}, **model},
        "data": {
            "sources": [{"name": "made", "path": "nowhere", "labels": {"energy": "eV", "forces": "eV/A"}}],
            "prepared": "nowhere",
            "cutoff": 5.0,
        },
        "layout": {"global_batch": 8, "microbatch": 1, "precision": "fp32"},
        "optimizer": {"lr": 0.01},
        "training": {"steps": 2},
    }
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.yaml"
        path.write_text(yaml.safe_dump(fields))
        run = load_run(path)
    assert isinstance(run, MaterialsRun)
    return run


def batch(run: MaterialsRun, structures: int, device: torch.device) -> dict[str, Any]:
    """Return a batch of made structures, by name."""
    species_N, inputs = bind(run, VerifiableModel).samples(1, 0, structures, structures).inputs()
    found = {"species_N": species_N, **{name: one for name, one in inputs.items() if isinstance(one, torch.Tensor)}}
    for name in ("positions_N3", "shifts_E3", "cells_G33"):
        found[name] = found[name].float()
    return {name: one.to(device) for name, one in found.items()}


def network_of(run: MaterialsRun, device: torch.device) -> MaterialsNetwork:
    """Return the network with its initial values."""
    network = MaterialsNetwork(run.model, dtype=torch.float32)
    initialise_parameters(dict(network.named_parameters()), bind(run).initial_rules(), 0, {})
    return network.to(device)


def set_variant(variant: str) -> None:
    """Change how steps are compiled in this process."""
    compiler._QUICK.update(VARIANTS[variant])
    if variant == "traced_again":
        compiler._changes_arguments = lambda _node: True
    if variant == "apart":
        mace.DegreeLinear.forward = mix_apart  # type: ignore[assignment, method-assign]
        mace.join_degrees = lambda *parts: torch.cat(parts, dim=1)
    if variant == "fixed_sizes":
        step_capture.varying_size = lambda _name: None  # type: ignore[assignment, return-value]


def mix_apart(layers: mace.DegreeLinear, x_NSC: torch.Tensor) -> torch.Tensor:
    """Mix the components of each degree by a product of their own."""
    parts = mace.split_degrees(x_NSC, len(layers))
    return torch.cat([layer(part) for layer, part in zip(layers.children(), parts, strict=True)], dim=1)


def count_seconds(owner: Any, name: str, phase: str, phases: dict[str, float]) -> None:
    """Add the seconds that a method takes to those of `phase`."""
    method = getattr(owner, name)

    def timed(*arguments: Any, **named: Any) -> Any:
        start = time.perf_counter()
        try:
            return method(*arguments, **named)
        finally:
            phases[phase] = phases.get(phase, 0.0) + time.perf_counter() - start

    setattr(owner, name, timed)


def inside() -> dict[str, float]:
    """Return the compiler's own figures, in seconds, of what took over a twentieth of a second."""
    from torch._dynamo.utils import compilation_time_metrics  # noqa: PLC0415

    sums = {name: sum(times) for name, times in compilation_time_metrics.items()}
    kept = {name: took for name, took in sums.items() if took > 0.05 and any(word in name.lower() for word in INSIDE)}
    return {name: round(took, 2) for name, took in sorted(kept.items(), key=lambda pair: -pair[1])}


def now(device: torch.device) -> float:
    """Return the time once the device has done all that it was told."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter()


if __name__ == "__main__":
    main()
