"""A MACE-class backbone (Batatia et al. 2022): equivariant messages, then products of up to three of them on every atom.

By default elements weigh the skip connection channel by channel and radial weights fade towards the cutoff. With the options
`element_mixing: matrices`, `fades: functions`, `first_skip` and `density` a block computes what mace-torch's interactions do
(RealAgnostic, with Residual and Density); `evaluation.mace_torch` reads its weights.

Components are those of e3nn: degree l has 2l + 1 of them, degree 1 is (x, y, z), and reflections act with (-1)^l.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from phalanx.families.materials.model.geometry import Constant, Geometry
from phalanx.families.materials.model.layers import Atoms, ElementTable, Mlp, cast_linear, layer_values, silu
from phalanx.families.materials.model.message_passing.equivariant_constants import (
    RepeatedRows,
    contraction_constants,
    contraction_terms,
    count_components,
    coupling_paths,
    coupling_terms,
    degrees_of_components,
    equivariant_polynomials,
    harmonic_steps,
    polynomial_places,
    stack_couplings,
)
from phalanx.families.materials.model.message_passing.messages import sum_messages
from phalanx.families.materials.model.message_passing.segmented_products import (
    contract_components,
    has_kernels,
    sum_coupled,
)
from phalanx.families.materials.model_config import MaterialsModel
from phalanx.nn.layers import Linear
from phalanx.torch_compat.common import inside_transform


def spherical_harmonics(degree: int, unit_E3: Tensor) -> Tensor:
    """Return all real spherical harmonics up to `degree` of unit vectors, [E, (degree + 1)^2], with squares that add to 2l
    + 1."""
    first = 3.0**0.5 * unit_E3
    found = [torch.ones_like(unit_E3[:, :1]), first]
    for step in harmonic_steps(degree):
        product_E9 = (found[-1].unsqueeze(2) * first.unsqueeze(1)).flatten(1)
        found.append(product_E9 @ step.on(unit_E3.device, unit_E3.dtype))
    return join_degrees(*found)


class EquivariantConvolution(nn.Module):
    """Sums messages that couple features of atoms with harmonics of bonds, and adds a skip connection that elements weigh.

    Interactions of MACE and NequIP begin and end so.
    """

    def __init__(
        self,
        config: MaterialsModel,
        inside: int,
        degree: int,
        reached: int,
        *,
        radial_widths: Sequence[int],
        scale: float,
        fades_functions: bool = False,
        density: bool = False,
    ) -> None:
        """inside: largest degree of the features that come in. degree: of the harmonics. reached: of the messages.
        radial_widths: hidden widths of the network of radial weights. scale: of every message. fades_functions: whether
        functions of distance fade rather than radial weights. density: whether sums are divided by a learned density."""
        super().__init__()
        width = config.d_model
        self.scale, self.fades_functions, self.fused = scale, fades_functions, config.mace.kernels == "cuequivariance"
        self.paths = coupling_paths(inside, degree, reached)
        self.couplings = stack_couplings(tuple(self.paths), count_components(inside), count_components(degree))
        self.inward = DegreeLinear([width] * (inside + 1), width)
        # Without biases where functions of distance fade: of zeros it must make no weights.
        self.radial = Mlp(config.n_radial, *radial_widths, len(self.paths) * width, bias=not fades_functions)
        counts = [sum(path.result == one for path in self.paths) for one in range(reached + 1)]
        self.outward = DegreeLinear([count * width for count in counts], width)
        self.density = Linear(config.n_radial, 1, bias=False) if density else None

    def add_skip(self, config: MaterialsModel, inside: int, outside: int, *, matrices: bool = False) -> None:
        """Make the skip connection of the degrees that both come in and go out. matrices: whether each element has its own.

        Apart from the rest, so that parameters which a body has in between keep their order.
        """
        kept, width = min(inside, outside) + 1, config.d_model
        self.skip = None if matrices else DegreeLinear([width] * kept, width)
        self.skip_element = ElementTable(config.max_atomic_number, kept, *([width, width] if matrices else [width]))

    def convolve(self, atoms: Atoms, geometry: Geometry) -> tuple[Tensor, Tensor]:
        """Return the features that come in, [N, S, C], and the sums of messages, mixed by degree, [N, S', C]."""
        features_NSC = atoms.scalars_NC.unsqueeze(1)
        if atoms.vectors_NMC is not None:
            features_NSC = join_degrees(features_NSC, atoms.vectors_NMC)
        features_NSC = first_components(features_NSC, count_components(len(self.inward) - 1))
        assert geometry.harmonics_ES is not None
        couplings, path_Q = self.couplings
        device, dtype = features_NSC.device, features_NSC.dtype
        radial_ER, envelope_E1 = geometry.radial_ER, geometry.envelope_E1
        if self.fades_functions:
            radial_ER = radial_ER * envelope_E1
        edges = (geometry.source_E, radial_ER, envelope_E1, geometry.harmonics_ES)
        given_NSC = self.inward(features_NSC) * self.scale
        shared = (geometry.exchange.atoms(given_NSC), *layer_values(self.radial))
        # Q components of all paths, those of one degree together.
        if self.fused and geometry.chunk is None and radial_ER.shape[0] and has_kernels(shared[0]):
            weights_EKC = radial_weights(self.fades_functions, radial_ER, envelope_E1, given_NSC.shape[-1], *shared[1:])
            sums_NQC = sum_coupled(
                coupling_terms(tuple(self.paths), given_NSC.shape[1], geometry.harmonics_ES.shape[1]),
                path_Q.values.size,
                weights_EKC,
                shared[0],
                geometry.harmonics_ES,
                geometry.source_E,
                geometry.target_E,
                geometry.atoms,
            )
        else:
            message = partial(
                couple_messages, couplings.on(device, dtype), path_Q.on(device, torch.int64), self.fades_functions
            )
            sums_NQC = sum_messages(message, edges, shared, geometry.target_E, geometry.atoms, geometry.chunk)
        mixed_NSC = self.outward.paths(sums_NQC)
        if self.density is not None:
            density_E1 = torch.tanh(self.density(radial_ER).square())
            density_E1 = density_E1 if self.fades_functions else density_E1 * envelope_E1
            density_N1 = density_E1.new_zeros((geometry.atoms, 1)).index_add(0, geometry.target_E, density_E1)
            mixed_NSC = mixed_NSC / (1.0 + density_N1.unsqueeze(1))
        return features_NSC, mixed_NSC

    def join_skip(self, features_NSC: Tensor, new_NSC: Tensor, species_N: Tensor) -> Tensor:
        """Add the incoming features, as elements weigh them, to the degrees that both have."""
        element = self.skip_element(species_N, features_NSC.dtype)
        count = count_components(element.shape[1] - 1)
        kept_NSC = first_components(features_NSC, count)
        if self.skip is None:
            kept_NSC = mix_degrees(kept_NSC, element)
        else:
            kept_NSC = self.skip(kept_NSC) * by_component(element)
        if new_NSC.shape[1] == count:
            return new_NSC + kept_NSC
        both_NSC, new_NSC = new_NSC.split((count, new_NSC.shape[1] - count), dim=1)
        return join_degrees(both_NSC + kept_NSC, new_NSC)


class MaceBlock(EquivariantConvolution):
    """One interaction and the symmetric contraction behind it."""

    def __init__(self, config: MaterialsModel, number: int) -> None:
        width, options = config.d_model, config.mace
        # Before the first block atoms are scalars from a table of elements.
        inside = 0 if number == 0 else options.hidden_degree
        super().__init__(
            config,
            inside,
            options.degree,
            options.degree,
            radial_widths=[options.radial_width] * options.radial_layers,
            scale=1.0 if options.density else 1.0 / config.mean_neighbors,
            fades_functions=options.fades == "functions",
            density=options.density,
        )
        self.outside = outgoing_degree(config, number)
        self.contraction = SymmetricContraction(config, self.outside)
        self.mix = DegreeLinear([width] * (self.outside + 1), width)
        self.message_element: ElementTable | None = None
        if number == 0 and not options.first_skip:
            self.message_element = ElementTable(config.max_atomic_number, options.degree + 1, width, width)
        else:
            self.add_skip(config, inside, self.outside, matrices=options.element_mixing == "matrices")

    def forward(self, atoms: Atoms, geometry: Geometry) -> Atoms:
        """Return the next features: scalars [N, C] and, above degree 0, components [N, M, C]."""
        features_NSC, sums_NSC = self.convolve(atoms, geometry)
        if self.message_element is not None:
            sums_NSC = mix_degrees(sums_NSC, self.message_element(geometry.species_N, sums_NSC.dtype))
        joined_NSC = self.mix(self.contraction(sums_NSC, geometry.species_N))
        if self.message_element is None:
            joined_NSC = self.join_skip(features_NSC, joined_NSC, geometry.species_N)
        if not self.outside:
            return Atoms(joined_NSC.squeeze(1))
        scalars_NSC, vectors_NMC = joined_NSC.split((1, joined_NSC.shape[1] - 1), dim=1)
        return Atoms(scalars_NSC.squeeze(1), vectors_NMC)


class SymmetricContraction(nn.Module):
    """Sums of products of up to `correlation` components that transform like degrees up to `outside`.

    Each atom's element weighs a basis of all such polynomials, channel by channel.
    """

    def __init__(self, config: MaterialsModel, outside: int) -> None:
        super().__init__()
        options = config.mace
        self.sizes = options.degree, options.correlation, outside
        self.outside, self.fused = outside, options.kernels == "cuequivariance"
        self.basis, self.indices = contraction_constants(*self.sizes)
        weight_of, component_of = zip(*polynomial_places(*self.sizes), strict=True)
        self.weight_of = RepeatedRows(list(weight_of), weight_of[-1] + 1)
        # Of each result the components of polynomials that add up to it.
        self.sums = Constant(
            torch.eye(count_components(outside), dtype=torch.float64, device="cpu")[:, list(component_of)]
        )
        self.counts = [
            sum(len(equivariant_polynomials(options.degree, order, result)) for result in range(outside + 1))
            for order in range(1, options.correlation + 1)
        ]
        """Polynomials by order."""
        self.weights = nn.ModuleList(
            ElementTable(config.max_atomic_number, count, config.d_model) for count in self.counts
        )

    def forward(self, features_NSC: Tensor, species_N: Tensor) -> Tensor:
        """Map [N, S, C] of all degrees to [N, S', C] of degrees up to `outside`."""
        device, dtype = features_NSC.device, features_NSC.dtype
        if self.fused and has_kernels(features_NSC):
            weights_NKC = join_degrees(*(weight(species_N, dtype) for weight in self.weights))
            terms = contraction_terms(*self.sizes)
            return contract_components(terms, count_components(self.outside), weights_NKC, features_NSC)
        products_NPC, polynomials = features_NSC, []
        for order, basis in enumerate(self.basis):
            if order:
                # Products of one more factor.
                shorter, factor = self.indices[order - 1]
                shorter_NPC = products_NPC.index_select(1, shorter.on(device, torch.int64))
                products_NPC = shorter_NPC * select_rows(features_NSC, factor)
            polynomials.append(multiply_rows(basis.on(device, dtype), products_NPC))
        weights_NKC = join_degrees(*(weight(species_N, dtype) for weight in self.weights))
        weighed_NQC = join_degrees(*polynomials) * select_rows(weights_NKC, self.weight_of)
        return multiply_rows(self.sums.on(device, dtype), weighed_NQC)


class DegreeLinear(nn.Module):
    """A linear layer for each degree, the same for all its components; no bias, which would not turn with the atoms."""

    def __init__(self, inside: list[int], outside: int) -> None:
        super().__init__()
        self.widths = inside
        for degree, width in enumerate(inside):
            self.add_module(str(degree), Linear(width, outside, bias=False))

    def __len__(self) -> int:
        return len(self._modules)

    def forward(self, x_NSC: Tensor) -> Tensor:
        """Map [N, S, C] to [N, S, C'] of layers of one width."""
        first, *others = self._layers()
        if not others:
            result: Tensor = first(x_NSC)
            return result
        # One product for all degrees: of one each, with parts taken out and joined, programs that train on forces are
        # twice as long, and so is their compilation.
        weights_LDC = torch.stack([layer.whole_weight() for layer in (first, *others)]).to(x_NSC.dtype)
        degree_S = degrees_of_components(len(weights_LDC)).on(x_NSC.device, torch.int64)
        weights_SDC = weights_LDC.index_select(0, degree_S)
        return torch.bmm(x_NSC.transpose(0, 1), weights_SDC.transpose(1, 2)).transpose(0, 1)

    def _layers(self) -> list[Linear]:
        return [layer for layer in self.children() if isinstance(layer, Linear)]

    def paths(self, x_NQC: Tensor) -> Tensor:
        """Map several paths a degree, [N, Q, C], mixed with each other, to [N, S, C'].

        The paths of a component stand together.
        """
        counts = [width // x_NQC.shape[2] for width in self.widths]
        if counts == [1] * len(counts):
            mixed_NSC: Tensor = self(x_NQC)
            return mixed_NSC
        parts = x_NQC.split([count * (2 * degree + 1) for degree, count in enumerate(counts)], dim=1)
        flat = (
            part.unflatten(1, (2 * degree + 1, count)).flatten(2)
            for degree, (count, part) in enumerate(zip(counts, parts, strict=True))
        )
        return join_degrees(*(layer(part) for layer, part in zip(self._layers(), flat, strict=True)))


def outgoing_degree(config: MaterialsModel, number: int) -> int:
    """Return the largest degree that block `number` gives: none but scalars from the last, unless a dipole is made of its
    vectors."""
    last = number == config.n_layers - 1
    return 0 if last and config.dipole is None else config.mace.hidden_degree


def by_component(x_NLC: Tensor) -> Tensor:
    """Map numbers of each degree, [N, L, C], to all components of the degrees, [N, L^2, C]."""
    return x_NLC.index_select(1, degrees_of_components(x_NLC.shape[1]).on(x_NLC.device, torch.int64))


def mix_degrees(x_NSC: Tensor, matrices_NLCC: Tensor) -> Tensor:
    """Multiply the components of each degree of each atom, [N, S, C], by the matrix of that degree and atom."""
    matrices = matrices_NLCC.unbind(1)
    parts = split_degrees(x_NSC, len(matrices))
    return join_degrees(*(part @ matrix_NCC for part, matrix_NCC in zip(parts, matrices, strict=True)))


def couple_messages(
    couplings: Tensor,
    path_Q: Tensor,
    fades_functions: bool,
    source_E: Tensor,
    radial_ER: Tensor,
    envelope_E1: Tensor,
    harmonics_ES: Tensor,
    features_NSC: Tensor,
    *layers: Tensor,
) -> Tensor:
    """Return messages of all paths, [E, Q, C]: features of the sources coupled with directions, weighed by distance.

    layers: weights of the radial network, each followed by its bias unless functions of distance fade.
    """
    weights_EKC = radial_weights(fades_functions, radial_ER, envelope_E1, features_NSC.shape[-1], *layers)
    # Directions meet the coupling coefficients first: [Q, S] of an edge is small beside its [S, C] features.
    coupled_EQS: Tensor = (harmonics_ES @ couplings).unflatten(-1, (len(path_Q), -1))
    message_EQC = torch.bmm(coupled_EQS, features_NSC.index_select(0, source_E))
    return message_EQC * weights_EKC.index_select(1, path_Q)


def radial_weights(
    fades_functions: bool, radial_ER: Tensor, envelope_E1: Tensor, width: int, *layers: Tensor
) -> Tensor:
    """Return the weights of all paths, [E, K, C], from functions of the distance.

    layers: weights of the radial network, each followed by its bias unless functions of distance fade.
    """
    each = 1 if fades_functions else 2
    weights_EK = cast_linear(radial_ER, *layers[:each])
    for start in range(each, len(layers), each):
        weights_EK = cast_linear(silu(weights_EK), *layers[start : start + each])
    if not fades_functions:
        # The envelope fades the weights, not the products: one narrow multiplication instead of a wide one.
        weights_EK = weights_EK * envelope_E1
    weights_EKC: Tensor = weights_EK.unflatten(-1, (-1, width))
    return weights_EKC


def split_degrees(x_NSC: Tensor, degrees: int) -> tuple[Tensor, ...]:
    """Return the components of each of `degrees` degrees, [N, 2l + 1, C], of all of them."""
    # At once: the derivative of a slice is a tensor of zeros with the slice in it, and a sum of such over the degrees.
    parts: tuple[Tensor, ...] = x_NSC.split([2 * degree + 1 for degree in range(degrees)], dim=1)
    return parts


def first_components(x_NSC: Tensor, count: int) -> Tensor:
    """Return the first `count` components."""
    first: Tensor = x_NSC if x_NSC.shape[1] == count else x_NSC.split((count, x_NSC.shape[1] - count), dim=1)[0]
    return first


def join_degrees(*parts_NSC: Tensor) -> Tensor:
    """Join components of several degrees, or numbers of several orders, [N, M, C] each, to [N, S, C]."""
    if len(parts_NSC) == 1:
        return parts_NSC[0]
    if inside_transform():
        return torch.cat(parts_NSC, dim=1)
    joined: Tensor = _JoinedDegrees.apply(*parts_NSC)
    return joined


class _JoinedDegrees(torch.autograd.Function):
    """A concatenation whose derivative is one split: PyTorch's is a slice a part, each with zeros in its own derivative."""

    @staticmethod
    def forward(ctx: Any, *parts_NSC: Tensor) -> Tensor:
        ctx.counts = [part.shape[1] for part in parts_NSC]
        return torch.cat(parts_NSC, dim=1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        (grad_NSC,) = grads
        parts_NSC: tuple[Tensor, ...] = grad_NSC.split(ctx.counts, dim=1)
        return parts_NSC


def select_rows(x_NSC: Tensor, selection: RepeatedRows) -> Tensor:
    """Return the rows of a selection, [N, P, C]."""
    index_P = selection.index_P.on(x_NSC.device, torch.int64)
    if inside_transform():
        return x_NSC.index_select(1, index_P)
    selected: Tensor = _SelectedRows.apply(x_NSC, index_P, selection.matrix_SP.on(x_NSC.device, x_NSC.dtype))
    return selected


def multiply_rows(matrix_QP: Tensor, x_NPC: Tensor) -> Tensor:
    """Multiply the rows of each atom by a matrix, [N, Q, C]."""
    return torch.bmm(matrix_QP.expand(x_NPC.shape[0], -1, -1), x_NPC)


class _SelectedRows(torch.autograd.Function):
    """Rows whose gradient is a product: PyTorch's own adds them up one by one, each where others add too."""

    @staticmethod
    def forward(ctx: Any, x_NSC: Tensor, index_P: Tensor, matrix_SP: Tensor) -> Tensor:
        ctx.save_for_backward(index_P, matrix_SP)
        return x_NSC.index_select(1, index_P)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return _SummedRows.apply(grads[0], *ctx.saved_tensors), None, None


class _SummedRows(torch.autograd.Function):
    """The gradient of selected rows, whose own is a selection again."""

    @staticmethod
    def forward(ctx: Any, x_NPC: Tensor, index_P: Tensor, matrix_SP: Tensor) -> Tensor:
        ctx.save_for_backward(index_P, matrix_SP)
        return multiply_rows(matrix_SP, x_NPC)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return _SelectedRows.apply(grads[0], *ctx.saved_tensors), None, None
