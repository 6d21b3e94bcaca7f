"""Weights that mace-torch trained, as a checkpoint of ours: equal in energies, forces and stress, or refused by name.

Reads the state dict of a `MACE` or `ScaleShiftMACE` (mace-torch 0.3, Batatia et al. 2022) from a safetensors file, with two
entries that a state dict lacks: `avg_num_neighbors` and `apply_cutoff` (docs/guides/convert.md says how it is written).
e3nn's layers divide by roots of their inputs and normalise activations as they run; here both are part of the weights.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise, permutations, product
from pathlib import Path
from typing import Any

import torch
from e3nn.math import normalize2mom
from pydantic import ValidationError
from torch import Tensor

from phalanx.checkpoint import CheckpointStore
from phalanx.checkpoint.state_dict import StateDict
from phalanx.config.load import dump_run, to_yaml
from phalanx.errors import CheckpointError
from phalanx.families.materials.config import MaterialsRun
from phalanx.families.materials.data.trained_elements import TrainedElements, write_elements
from phalanx.families.materials.model.geometry import COVALENT_RADII
from phalanx.families.materials.model.message_passing.equivariant_constants import (
    count_components,
    coupling_paths,
    equivariant_polynomials,
    monomial_products,
)
from phalanx.families.materials.model.message_passing.mace import outgoing_degree
from phalanx.families.materials.model.network import MaterialsNetwork
from phalanx.families.materials.model_config import MaterialsModel
from phalanx.files import new_folder, write_atomically
from phalanx.training.transfer import MODEL

_DERIVED = (
    "*.output_mask",
    "*._compiled_main*",
    "*_zeroed",
    "*.bessel_fn.r_max",
    "*.bessel_fn.prefactor",
    "*.cutoff_fn.r_max",
)
"""Tensors that follow from others: constants of e3nn's generated code, and marks of weights that are 0."""
_TAKES = (
    "models of interactions RealAgnostic(Density)(Residual), with equally many channels of each degree and one correlation, "
    "are read"
)
_SAME = 1e-5
"""Relative difference of constants, and of coupling coefficients, that float32 leaves."""
_SILU_SCALE = float(normalize2mom(torch.nn.functional.silu).cst)
"""What e3nn multiplies silu by, so that the mean square of it of normal numbers is 1."""


@dataclass(frozen=True)
class ImportedPotential:
    """What was written."""

    target: Path
    model: MaterialsModel
    parameters: int
    elements: tuple[int, ...]
    """Atomic numbers that it was trained on."""


def import_mace_torch(source: Path, target: Path, dtype: torch.dtype = torch.float32) -> ImportedPotential:
    """Write the weights in the safetensors file `source` as the new folder `target`: checkpoints/, elements.json, run.yaml.

    dtype: number format of the weights. Raises CheckpointError where the file is none, or our MACE computes something else
    than its model, and ConfigError for a `target` in use.
    """
    state = StateDict(source, _TAKES, _DERIVED)
    model = describe_model(state)
    elements = tuple(int(z) for z in state.read("atomic_numbers"))
    tensors = convert_weights(state, model, elements)
    state.refuse_unread()
    with torch.device("meta"):
        wanted = MaterialsNetwork(model).state_dict()
    # Heads and radial networks of other shapes than the model's are told by their names as they are read.
    assert {name: tensor.shape for name, tensor in wanted.items()} == {n: t.shape for n, t in tensors.items()}
    with new_folder(target) as folder:
        content = _run_file(model, target)
        run = MaterialsRun.model_validate(content)
        with CheckpointStore(folder / "checkpoints", keep_last=1) as store:
            about = {"step": 0, "weights_only": True, "run": dump_run(run), "imported_from": source.name}
            store.save(0, {MODEL + name: tensor.to(dtype).contiguous() for name, tensor in tensors.items()}, about)
        write_elements(TrainedElements(frozenset(elements), None), folder)
        write_atomically(
            folder / "run.yaml",
            f"# Begins with the weights of mace-torch in {source.name}. Name your structures in data.sources, then:\n"
            f"#     phalanx data prepare-graphs {target}/run.yaml\n#     phalanx train {target}/run.yaml\n"
            "# Without reference_energies, training fits them to energies of another theory.\n" + to_yaml(content),
        )
    return ImportedPotential(target, model, sum(tensor.numel() for tensor in tensors.values()), elements)


def describe_model(state: StateDict) -> MaterialsModel:
    """Return the model section whose network computes what the state dict's model does. Raises CheckpointError."""
    layers = int(state.number("num_interactions"))
    elements = state.read("atomic_numbers").long().tolist()
    if layers < 2:
        state.refuse(f"num_interactions={layers} has no block whose energy is read by a network")
    if not state.number("apply_cutoff"):
        state.refuse("apply_cutoff=False fades radial weights rather than functions of distance")
    width = state.read("node_embedding.linear.weight").numel() // len(elements)
    contraction = "products.0.symmetric_contractions.contractions"
    # Degree l has 2 l + 1 components: all up to L have (L + 1)^2.
    degree = math.isqrt(state.read(f"{contraction}.0.U_matrix_1").shape[0]) - 1
    # A state dict holds no options: sizes of the networks are those of their matrices.
    radial = [state.read(f"interactions.0.conv_tp_weights.layer{n}.weight").shape for n in _layer_numbers(state)]
    if len({outside for _, outside in radial[:-1]}) != 1:
        state.refuse(f"radial_MLP={[outside for _, outside in radial[:-1]]} has layers of different widths")
    last = f"readouts.{layers - 1}"
    # A row for each head of a model that has several, else one vector.
    energies = torch.atleast_2d(state.read("atomic_energies_fn.atomic_energies"))
    every_block = f"{last}.linear_1.weight" in state
    readout = state.read(f"{last if every_block else 'readouts.0'}.linear_1.weight").numel() // (width * len(energies))
    functions, transform = _describe_distances(state)
    fields = {
        "family": "materials",
        "body": "mace",
        "n_layers": layers,
        "d_model": width,
        "max_atomic_number": max(elements),
        "cutoff": state.number("r_max"),
        "radial": functions,
        "n_radial": radial[0][0],
        "envelope_power": int(state.number("radial_embedding.cutoff_fn.p")),
        "distance_transform": transform,
        "mean_neighbors": state.number("avg_num_neighbors"),
        "mace": {
            "degree": degree,
            "hidden_degree": sum(f"{contraction}.{ell}.U_matrix_1" in state for ell in range(degree + 1)) - 1,
            "correlation": sum(f"{contraction}.0.U_matrix_{order}" in state for order in range(1, 10)),
            "radial_width": radial[0][1],
            "radial_layers": len(radial) - 1,
            "fades": "functions",
            "element_mixing": "matrices",
            "first_skip": state.read("interactions.0.skip_tp.weight").numel() == len(elements) * width**2,
            "density": "interactions.0.density_fn.layer0.weight" in state,
        },
        "energy": {
            "width": readout,
            "every_block": every_block,
            "force_weight": 1.0,
            "repulsion": "mace" if _has_repulsion(state) else None,
        },
        "branches": _describe_branches(state, elements, energies),
    }
    try:
        return MaterialsModel.model_validate(fields)
    except ValidationError as error:
        first = error.errors()[0]
        raise CheckpointError(f"{state.where}: model.{'.'.join(map(str, first['loc']))}: {first['msg']}") from None


def _layer_numbers(state: StateDict) -> range:
    count = 0
    while f"interactions.0.conv_tp_weights.layer{count}.weight" in state:
        count += 1
    if count < 2:
        state.refuse("interactions.0 has no radial network of e3nn's FullyConnectedNet")
    return range(count)


def _describe_distances(state: StateDict) -> tuple[str, str | None]:
    """Return the radial functions and the transform of distances, with constants that are checked."""
    cutoff = state.number("r_max")
    transform = None
    if "radial_embedding.distance_transform.a" in state:
        transform = "agnesi"
        for name, value in (("a", 1.0805), ("q", 0.9183), ("p", 4.5791)):
            _require_constant(state, f"radial_embedding.distance_transform.{name}", torch.tensor(value))
        _require_constant(state, "radial_embedding.distance_transform.covalent_radii", _radii())
    if "radial_embedding.bessel_fn.gaussian_weights" in state:
        centers = state.read("radial_embedding.bessel_fn.gaussian_weights")
        _require_constant(
            state, "radial_embedding.bessel_fn.gaussian_weights", torch.linspace(0.0, cutoff, len(centers))
        )
        return "gaussian", transform
    waves = state.read("radial_embedding.bessel_fn.bessel_weights")
    orders = torch.arange(1, len(waves) + 1)
    _require_constant(state, "radial_embedding.bessel_fn.bessel_weights", orders * (math.pi / cutoff))
    return "bessel", transform


def _has_repulsion(state: StateDict) -> bool:
    if "pair_repulsion_fn.c" not in state:
        return False
    constants = {"c": torch.tensor([0.1818, 0.5099, 0.2802, 0.02817]), "covalent_radii": _radii()}
    constants |= {"a_exp": torch.tensor(0.3), "a_prefactor": torch.tensor(0.4543)}
    constants["p"] = state.read("radial_embedding.cutoff_fn.p")
    for name, value in constants.items():
        _require_constant(state, f"pair_repulsion_fn.{name}", value)
    return True


def _radii() -> Tensor:
    return COVALENT_RADII.on(torch.device("cpu"), torch.float64)


def _require_constant(state: StateDict, name: str, wanted: Tensor) -> None:
    found = state.read(name)
    if found.shape != wanted.shape or not torch.allclose(found, wanted.double(), rtol=_SAME, atol=_SAME):
        state.refuse(f"{name} is not the constant of mace-torch")


def _describe_branches(state: StateDict, elements: list[int], energies: Tensor) -> list[dict[str, Any]]:
    """Return a branch for each head, the shift of its energies added to those of its elements. energies: [H, elements]."""
    scales, shifts = torch.ones(len(energies)).double(), torch.zeros(len(energies)).double()
    if "scale_shift.scale" in state:
        scales = torch.atleast_1d(state.read("scale_shift.scale")).expand(len(energies))
        shifts = torch.atleast_1d(state.read("scale_shift.shift")).expand(len(energies))
    names = ["main"] if len(energies) == 1 else [f"head_{number}" for number in range(len(energies))]
    return [
        {
            "name": name,
            "energy_scale": float(scale),
            "reference_energies": {
                str(z): float(energy + shift) for z, energy in zip(elements, own_energies, strict=True)
            },
        }
        for name, scale, shift, own_energies in zip(names, scales, shifts, energies, strict=True)
    ]


def convert_weights(state: StateDict, model: MaterialsModel, elements: tuple[int, ...]) -> dict[str, Tensor]:
    """Return the parameters of our network by name, float64. elements: atomic numbers, in mace-torch's order."""
    width = model.d_model
    embedding = state.matrix("node_embedding.linear.weight", len(elements), width) / len(elements) ** 0.5
    tensors = {"embedding.elements.weight": _by_atomic_number(embedding, elements)}
    for number in range(model.n_layers):
        block = f"blocks.{number}.messages"
        tensors |= {
            f"{block}.{name}": one for name, one in _convert_interaction(state, model, elements, number).items()
        }
        tensors |= {f"{block}.{name}": one for name, one in _convert_products(state, model, elements, number).items()}
    return tensors | _convert_readouts(state, model)


def _by_atomic_number(rows: Tensor, elements: tuple[int, ...]) -> Tensor:
    """Map rows of elements to a table of atomic numbers, zeros where there was no such element."""
    table = rows.new_zeros((max(elements) + 1, *rows.shape[1:]))
    table[list(elements)] = rows
    return table


def _convert_interaction(
    state: StateDict, model: MaterialsModel, elements: tuple[int, ...], number: int
) -> dict[str, Tensor]:
    width, options, there = model.d_model, model.mace, f"interactions.{number}"
    inside = 0 if number == 0 else options.hidden_degree
    up = state.matrix(f"{there}.linear_up.weight", inside + 1, width, width) / width**0.5
    tensors = {f"inward.{ell}.weight": matrix.T for ell, matrix in enumerate(up)}
    paths = coupling_paths(inside, options.degree, options.degree)
    counts = [sum(path.result == ell for path in paths) for ell in range(options.degree + 1)]
    # Ours are sin(n pi d / c) sqrt(c) / d, those of mace-torch have sqrt(2 / c) in front.
    functions = 2.0**0.5 / model.cutoff if model.radial == "bessel" else 1.0
    widths = [model.n_radial, *[options.radial_width] * options.radial_layers, len(paths) * width]
    for layer, (first, second) in enumerate(pairwise(widths)):
        weight = state.matrix(f"{there}.conv_tp_weights.layer{layer}.weight", first, second).T / first**0.5
        tensors[f"radial.{layer}.weight"] = weight * (_SILU_SCALE if layer else functions)
    down = state.matrix(f"{there}.linear.weight", sum(counts) * width, width).split([n * width for n in counts])
    tensors |= {f"outward.{ell}.weight": one.T / len(one) ** 0.5 for ell, one in enumerate(down)}
    if options.density:
        density = state.matrix(f"{there}.density_fn.layer0.weight", model.n_radial, 1)
        tensors["density.weight"] = density.T * functions / model.n_radial**0.5
    mixes_messages = number == 0 and not options.first_skip
    mixed = options.degree if mixes_messages else min(inside, outgoing_degree(model, number))
    by_degree = state.matrix(f"{there}.skip_tp.weight", mixed + 1, width, len(elements), width)
    matrices = by_degree.permute(2, 0, 1, 3) / (width * len(elements)) ** 0.5
    name = "message_element.weight" if mixes_messages else "skip_element.weight"
    tensors[name] = _by_atomic_number(matrices, elements)
    return tensors


def _convert_products(
    state: StateDict, model: MaterialsModel, elements: tuple[int, ...], number: int
) -> dict[str, Tensor]:
    width, options, there = model.d_model, model.mace, f"products.{number}"
    outside = outgoing_degree(model, number)
    weights: list[list[Tensor]] = [[] for _ in range(options.correlation)]
    for order, degree in product(range(1, options.correlation + 1), range(outside + 1)):
        contraction = f"{there}.symmetric_contractions.contractions.{degree}"
        place = "weights_max" if order == options.correlation else f"weights.{options.correlation - 1 - order}"
        coefficients = state.read(f"{contraction}.U_matrix_{order}")
        weight = state.matrix(f"{contraction}.{place}", len(elements), coefficients.shape[-1], width)
        change = _change_of_basis(state, f"{contraction}.U_matrix_{order}", options.degree, order, degree)
        weights[order - 1].append(torch.einsum("mk,ekc->emc", change, weight))
    tensors = {
        f"contraction.weights.{order}.weight": _by_atomic_number(torch.cat(of_order, dim=1), elements)
        for order, of_order in enumerate(weights)
    }
    mixed = state.matrix(f"{there}.linear.weight", outside + 1, width, width) / width**0.5
    return tensors | {f"mix.{ell}.weight": matrix.T for ell, matrix in enumerate(mixed)}


def _change_of_basis(state: StateDict, name: str, degree: int, order: int, result: int) -> Tensor:
    """Return our basis polynomials in each of mace-torch's, [ours, theirs]. Raises CheckpointError where that is none.

    mace-torch has a coefficient for each sequence of factors, ours one for each distinct product.
    """
    count, theirs = count_components(degree), state.read(name)
    theirs = theirs.reshape(2 * result + 1, *[count] * order, -1).movedim(0, -1)
    factors = torch.arange(count)[:, None]
    for one in range(2, order + 1):
        table = monomial_products(count, one)
        factors = torch.cat((factors[table.shorter_P], table.factor_P[:, None]), dim=1)
    joined = theirs.new_zeros((len(factors), *theirs.shape[-2:]))
    # A product with equal factors is met once for each permutation that leaves it, as one sequence.
    repeats = torch.zeros(len(factors), dtype=torch.float64)
    for places in permutations(range(order)):
        sequence = factors[:, list(places)]
        joined += theirs[sequence.unbind(1)]
        repeats += (sequence == factors).all(dim=1)
    joined = joined / repeats[:, None, None]
    ours = equivariant_polynomials(degree, order, result)
    change = torch.einsum("mip,pki->mk", ours, joined) / (2 * result + 1)
    rest = joined - torch.einsum("mip,mk->pki", ours, change)
    if float(rest.abs().max()) > _SAME * max(float(joined.abs().max()), 1.0):
        state.refuse(f"{name} couples components in a way that does not turn like degree {result} with its parity")
    return change


def _convert_readouts(state: StateDict, model: MaterialsModel) -> dict[str, Tensor]:
    energy, width, names = model.energy, model.d_model, [branch.name for branch in model.branches]
    assert energy is not None and energy.width is not None
    tensors: dict[str, Tensor] = {}
    heads, hidden = len(names), energy.width
    early = model.n_layers - 1 if energy.every_block else 0
    for number in range(early):
        linear = state.matrix(f"readouts.{number}.linear.weight", width, heads) / width**0.5
        for name, column in zip(names, linear.unbind(1), strict=True):
            copy = f"head.early_energies.{number}.copies.{name}.0"
            tensors |= {f"{copy}.weight": column[None], f"{copy}.bias": torch.zeros(1)}
    there = f"readouts.{early}"
    first = state.matrix(f"{there}.linear_1.weight", width, heads, hidden) / width**0.5
    # Of the product with all heads' hidden numbers, mace-torch masks those of other heads.
    second = state.matrix(f"{there}.linear_2.weight", heads, hidden, heads) * _SILU_SCALE / (heads * hidden) ** 0.5
    for number, name in enumerate(names):
        copy = f"head.energy.copies.{name}"
        tensors |= {f"{copy}.0.weight": first[:, number].T, f"{copy}.0.bias": torch.zeros(hidden)}
        tensors |= {f"{copy}.1.weight": second[number, :, number][None], f"{copy}.1.bias": torch.zeros(1)}
    return tensors


def _run_file(model: MaterialsModel, target: Path) -> dict[str, Any]:
    """Return the sections of a run that begins with these weights; its structures are for a person to name."""
    labels = {"energy": "eV", "forces": "eV/A"}
    return {
        "model": {"family": "materials", **model.model_dump(mode="json", exclude_none=True, exclude_defaults=True)},
        "data": {
            "sources": [
                {"name": branch.name, "path": f"{branch.name}.extxyz", "labels": labels} for branch in model.branches
            ],
            "prepared": "data/graphs/imported",
            "cutoff": model.cutoff,
        },
        "layout": {"global_batch": 16, "precision": "fp32"},
        "optimizer": {"lr": 1e-4, "warmup_steps": 100},
        "training": {"steps": 2000, "init_from": str(target)},
    }
