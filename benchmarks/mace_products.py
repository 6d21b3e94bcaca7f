"""Milliseconds of MACE's coupled messages and symmetric contractions, ours and by cuEquivariance, on one device.

    python benchmarks/mace_products.py --out FILE [--structures 256 1024] [--narrow]

Both blocks of preset gnn-mace-1m, in fp32, on made structures. `train` is what force training does with an operation: its
results, their derivatives by all that it is given, and derivatives of those; `forward` its results alone. Both kinds are
traced and compiled for all sizes at once, as a training step is, and captured in a CUDA graph of which the median of
`--repeats` replays counts. `difference` is that of all derivatives from ours, over their norm. Without a device nothing is
compiled or captured, and cuEquivariance computes by operations of PyTorch.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from compile_time import batch, now, run_of
from data_loading import machine
from phalanx.families.materials.model.message_passing import equivariant_constants as constants
from phalanx.families.materials.model.message_passing import mace
from phalanx.families.materials.model.message_passing.segmented_products import contract_components, sum_coupled
from phalanx.hardware.device import choose_device, device_name
from phalanx.torch_compat.compiler import SizedProgram

Operation = Callable[..., Tensor]
"""Of float tensors that have derivatives, then integer tensors."""
_ATOMS = ("atoms", 0)
_EDGES = ("edges", 0)


class Case(NamedTuple):
    """An operation both ways."""

    name: str
    own: Operation
    cuequivariance: Operation
    tensors: Callable[[int, Tensor], list[Tensor]]
    """Of a number of atoms and edges [2, E]: what it is given."""
    varying: list[tuple[str, int]]
    """The size of each of these that changes."""


def main() -> None:
    """Measure every operation of both blocks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--structures", type=int, nargs="+", default=[256, 1024])
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--narrow", action="store_true", help="width 32, to try it out on a CPU")
    asked = parser.parse_args()
    device = choose_device("auto", 0)
    run = run_of({"d_model": 32} if asked.narrow else {})
    batches = [batch(run, structures, device) for structures in asked.structures]
    about = machine() | ({} if device.type == "cpu" else {"device": device_name(device)})
    command = shlex.join(["python", "benchmarks/mace_products.py", *sys.argv[1:]])
    rows: list[dict[str, Any]] = []
    for number in range(run.model.n_layers):
        for case in (message_case(run.model, number), contraction_case(run.model, number)):
            programs: dict[str, dict[str, Any]] = {}
            for tensors in batches:
                atoms, edges_2E = len(tensors["species_N"]), tensors["edges_2E"]
                row = {"operation": case.name, "block": number, "atoms": atoms, "edges": edges_2E.shape[1]}
                row |= measure(case, case.tensors(atoms, edges_2E), programs, asked.repeats)
                rows.append(row)
                print(json.dumps(row), flush=True)
                asked.out.write_text(json.dumps({"command": command, "machine": about, "rows": rows}, indent=1) + "\n")


def measure(case: Case, tensors: list[Tensor], programs: dict[str, dict[str, Any]], repeats: int) -> dict[str, Any]:
    """Return milliseconds of both ways; what is compiled is kept in `programs`."""
    row: dict[str, Any] = {}
    results: dict[str, list[Tensor]] = {}
    for way, operation in (("own", case.own), ("cuequivariance", case.cuequivariance)):
        try:
            for kind, function in (("forward", forward_of(operation)), ("train", training_of(operation))):
                key = f"{way}_{kind}"
                if key not in programs:
                    start = time.perf_counter()
                    programs[key] = {"run": compiled(function, tensors, case.varying)}
                    row[f"{key}_compile_s"] = round(time.perf_counter() - start, 2)
                milliseconds, results[key] = replay(programs[key]["run"], tensors, repeats)
                row[f"{key}_ms"] = round(milliseconds, 4)
        except Exception as error:
            row[f"{way}_failed"] = f"{type(error).__name__}: {error}"[:400]
    if {"own_train", "cuequivariance_train"} <= set(results):
        pairs = list(zip(results["own_train"], results["cuequivariance_train"], strict=True))
        apart = sum(float((a - b).double().square().sum()) for a, b in pairs)
        row["difference"] = (apart / sum(float(a.double().square().sum()) for a, _ in pairs)) ** 0.5
    return row


def forward_of(operation: Operation) -> Callable[..., list[Tensor]]:
    """Return the function that gives an operation's results."""
    return lambda *tensors: [operation(*tensors)]


def training_of(operation: Operation) -> Callable[..., list[Tensor]]:
    """Return the function that gives the first and second derivatives."""

    def train(*tensors: Tensor) -> list[Tensor]:
        with torch.enable_grad():
            real = [tensor.detach().requires_grad_() for tensor in tensors if tensor.is_floating_point()]
            rest = [tensor for tensor in tensors if not tensor.is_floating_point()]
            found = operation(*real, *rest)
            # Gradients that depend on what is derived, as those of a network's later layers do.
            first = torch.autograd.grad(found.square().sum(), real, create_graph=True)
            whole = sum((one.square().sum() for one in first), found.new_zeros(()))
            second = torch.autograd.grad(whole, real)
        return [*(one.detach() for one in first), *second]

    return train


def compiled(
    function: Callable[..., list[Tensor]], tensors: Sequence[Tensor], varying: Sequence[tuple[str, int]]
) -> Callable[..., Sequence[Tensor]]:
    """Return a function as training compiles a step; as it is without a device."""
    if tensors[0].device.type == "cpu":
        return function
    # Constants are on the device from then on.
    function(*tensors)
    return SizedProgram(lambda *given: tuple(function(*given)), tensors, varying).compile(torch.float32)


def replay(run: Callable[..., Sequence[Tensor]], tensors: list[Tensor], repeats: int) -> tuple[float, list[Tensor]]:
    """Return the median milliseconds of a captured run, and its results."""
    device = tensors[0].device
    again: Callable[[], object] = lambda: run(*tensors)  # noqa: E731
    if device.type != "cpu":
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            for _ in range(3):
                run(*tensors)
        torch.cuda.current_stream().wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results = run(*tensors)
        again = graph.replay
    else:
        results = run(*tensors)
    times = []
    for _ in range(repeats):
        start = now(device)
        again()
        times.append(1e3 * (now(device) - start))
    return statistics.median(times), list(results)


def message_case(model: Any, number: int) -> Case:
    """Return sums of coupled messages: of radial weights, features and harmonics."""
    options = model.mace
    inside = constants.count_components(0 if number == 0 else options.hidden_degree)
    paths = tuple(constants.coupling_paths(0 if number == 0 else options.hidden_degree, options.degree, options.degree))
    harmonics = constants.count_components(options.degree)
    couplings, path_of = constants.stack_couplings(paths, inside, harmonics)
    terms = constants.coupling_terms(paths, inside, harmonics)

    def own(weights: Tensor, features: Tensor, directions: Tensor, source: Tensor, target: Tensor) -> Tensor:
        path_Q = path_of.on(weights.device, torch.int64)
        coupled = (directions @ couplings.on(weights.device, weights.dtype)).unflatten(-1, (len(path_Q), -1))
        messages = torch.bmm(coupled, features.index_select(0, source)) * weights.index_select(1, path_Q)
        return features.new_zeros((features.shape[0], *messages.shape[1:])).index_add(0, target, messages)

    def fused(weights: Tensor, features: Tensor, directions: Tensor, source: Tensor, target: Tensor) -> Tensor:
        components = path_of.values.size
        return sum_coupled(terms, components, weights, features, directions, source, target, features.shape[0])

    def tensors(atoms: int, edges_2E: Tensor) -> list[Tensor]:
        edges, device = edges_2E.shape[1], edges_2E.device
        shapes = ((edges, len(paths), model.d_model), (atoms, inside, model.d_model), (edges, harmonics))
        drawn = torch.Generator(device).manual_seed(0)
        made = [torch.randn(shape, device=device, generator=drawn) for shape in shapes]
        return [*made, *(ends.contiguous() for ends in edges_2E)]

    return Case("message", own, fused, tensors, [_EDGES, _ATOMS, _EDGES, _EDGES, _EDGES])


def contraction_case(model: Any, number: int) -> Case:
    """Return symmetric contractions: of the elements' weights and of features."""
    outside = mace.outgoing_degree(model, number)
    contraction = mace.SymmetricContraction(model, outside)
    weights, sizes = sum(contraction.counts), contraction.counts
    terms = constants.contraction_terms(*contraction.sizes)

    class Given:
        """Weights of an order that are there already."""

        def __init__(self, part_NKC: Tensor) -> None:
            self.part_NKC = part_NKC

        def __call__(self, _species: Tensor, _dtype: torch.dtype) -> Tensor:
            return self.part_NKC

    def own(weights_NKC: Tensor, features_NSC: Tensor) -> Tensor:
        contraction.fused = False
        contraction._modules["weights"] = [Given(part) for part in weights_NKC.split(sizes, dim=1)]  # type: ignore[assignment]
        return contraction(features_NSC, features_NSC)  # type: ignore[no-any-return]

    def fused(weights_NKC: Tensor, features_NSC: Tensor) -> Tensor:
        return contract_components(terms, constants.count_components(outside), weights_NKC, features_NSC)

    def tensors(atoms: int, edges_2E: Tensor) -> list[Tensor]:
        device, components = edges_2E.device, constants.count_components(model.mace.degree)
        drawn = torch.Generator(device).manual_seed(0)
        shapes = ((atoms, weights, model.d_model), (atoms, components, model.d_model))
        return [torch.randn(shape, device=device, generator=drawn) for shape in shapes]

    return Case("contraction", own, fused, tensors, [_ATOMS, _ATOMS])


if __name__ == "__main__":
    main()
