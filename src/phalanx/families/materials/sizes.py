"""How large a network is and what a structure costs, in closed form from its description alone.

Exact for `phalanx.families.materials.model.network`; a test compares the two. Needs no torch.

Convention for model FLOPs: 6 for each matmul parameter and row it multiplies (a multiply and an add forward, twice that
backward); 12 where forces or stress are learned, since the gradient by positions is one more pass (2) whose own
backward pass takes as much as any (4). Rows are atoms, edges or triplets; with pooling, all there were at first. Global
softmax attention adds its products of atoms with atoms, MACE its coupled products. Look-ups, sums over neighbours and
pointwise work are not counted.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from itertools import combinations_with_replacement, pairwise
from typing import Literal

from phalanx.families.materials.model_config import PROPERTY_HEADS, MaterialsModel


def parameter_count(config: MaterialsModel) -> int:
    """Return the number of trainable parameters."""
    blocks = sum(block_piece(config, number).parameters for number in range(config.n_layers))
    return embedding_piece(config).parameters + blocks + head_piece(config).parameters


def matmul_parameters(config: MaterialsModel) -> int:
    """Return the parameters of all matrices; what they multiply are atoms, edges or triplets."""
    pieces = [embedding_piece(config), head_piece(config), *(block_piece(config, n) for n in range(config.n_layers))]
    return sum(matmul.inside * matmul.outside for piece in pieces for matmul in piece.matmuls)


def in_words(config: MaterialsModel) -> str:
    """Return the shape for a person."""
    branches = f", {len(config.branches)} branches" if len(config.branches) > 1 else ""
    graph = config.graph
    sees = (
        f"cutoff {config.cutoff:g} A" if graph is None else f"of {graph.nodes} numbers a node and {graph.edges} an edge"
    )
    return f"{config.body}, {config.n_layers} layers x {config.d_model}, {sees}{branches}"


def model_flops(config: MaterialsModel, atoms: float, edges: float, triplets: float | None = None) -> float:
    """Return the floating-point operations of a training step on one structure, forward and backward.

    edges: directed. triplets: pairs of edges that meet, for DimeNet++; None takes edges * (edges / atoms - 1).
    """
    blocks = sum(_piece_flops(config, block_piece(config, n), atoms, edges, triplets) for n in range(config.n_layers))
    return embedding_flops(config, atoms, edges) + blocks + head_flops(config, atoms, edges)


def block_flops(config: MaterialsModel, atoms: float, edges: float, triplets: float | None = None) -> float:
    """Return the share of the last block in `model_flops`."""
    return _piece_flops(config, block_piece(config, config.n_layers - 1), atoms, edges, triplets)


def embedding_flops(config: MaterialsModel, atoms: float, edges: float) -> float:
    """Return the share of what stands before the blocks."""
    return _piece_flops(config, embedding_piece(config), atoms, edges, 0.0)


def head_flops(config: MaterialsModel, atoms: float, edges: float) -> float:
    """Return the share of the heads; all copies of a head are computed for every atom."""
    return _piece_flops(config, head_piece(config), atoms, edges, 0.0)


def _piece_flops(config: MaterialsModel, piece: Piece, atoms: float, edges: float, triplets: float | None) -> float:
    derived = config.energy is not None and (config.energy.force_weight, config.energy.stress_weight) != (None, None)
    # Forward and backward pass, and where forces are learned the same of a first derivative (see the top of this file).
    passes = 6.0 if derived else 3.0
    if triplets is None:
        triplets = edges * max(edges / atoms - 1.0, 0.0) if atoms else 0.0
    rows: dict[Row, float] = {"atom": atoms, "edge": edges, "triplet": triplets}
    forward = sum(2.0 * m.inside * m.outside * m.times * rows[m.row] for m in piece.matmuls)
    forward += piece.atom_products * atoms + piece.edge_products * edges + piece.pair_products * atoms * atoms
    return passes * forward


Row = Literal["atom", "edge", "triplet"]


@dataclass(frozen=True)
class Matmul:
    """One matrix of the network and what it multiplies."""

    row: Row
    inside: int
    outside: int
    bias: bool = True
    times: int = 1
    """Rows for each atom, edge or triplet: 3 for the components of a vector."""

    @property
    def parameters(self) -> int:
        """Return the elements of the matrix and of its bias."""
        return (self.inside + self.bias) * self.outside


@dataclass(frozen=True)
class Piece:
    """Matrices and other parameters of a part, and the products in its forward pass that have no parameters."""

    matmuls: tuple[Matmul, ...]
    other_parameters: int = 0
    """Tables, norms and single numbers."""
    atom_products: float = 0.0
    """Multiplications and additions for each atom."""
    edge_products: float = 0.0
    """Multiplications and additions for each edge."""
    pair_products: float = 0.0
    """Multiplications and additions for each pair of atoms of a structure."""

    @property
    def parameters(self) -> int:
        """Return all parameters."""
        return self.other_parameters + sum(matmul.parameters for matmul in self.matmuls)


def embedding_piece(config: MaterialsModel) -> Piece:
    """Describe what stands before the blocks."""
    table, width = (config.max_atomic_number + 1) * config.d_model, config.d_model
    sizes = ((width, 1), (2, width), (width, width))
    state = tuple(Matmul("atom", a, b, bias=False) for a, b in sizes) * len(config.electronic_state)
    if config.graph is not None:
        # Features of a graph are read with those of each of its nodes.
        nodes = ((config.graph.nodes + config.graph.graphs, width), (width, width))
        inside, between = config.graph.edges + config.n_radial * config.graph.positions, config.n_radial
        edges = (Matmul("edge", inside, between), Matmul("edge", between, between)) if inside else ()
        return Piece((*(Matmul("atom", a, b) for a, b in nodes), *edges))
    if config.body != "dimenet++":
        return Piece(state, table)
    ends = Matmul("atom", config.d_model, 2 * config.d_model)
    return Piece((*state, ends, Matmul("edge", config.n_radial, config.d_model, bias=False)), table)


def block_piece(config: MaterialsModel, number: int) -> Piece:
    """Describe one block, its global attention included."""
    width = config.d_model
    if config.body == "mace":
        piece = _mace_piece(config, number)
    elif config.body == "nequip":
        piece = _nequip_piece(config, number)
    else:
        other = {"gin": 1} | dict.fromkeys(("gatv2", "pna", "pna+", "pnaeq"), width)
        piece = Piece(_block_matmuls(config, number), other.get(config.body, 0))
    if config.pools_behind(number):
        piece = replace(piece, other_parameters=piece.other_parameters + width)
    if config.attention is None:
        return piece
    sizes = ((width, 3 * width), (width, width), (width, 2 * width), (2 * width, width))
    softmax = config.attention.kind == "softmax"
    # Linear attention forms a matrix of each head's size for every atom; softmax a product for every pair of atoms.
    by_atom = 0.0 if softmax else 4.0 * width * (width // config.attention.heads)
    return replace(
        piece,
        matmuls=(*piece.matmuls, *(Matmul("atom", inside, outside) for inside, outside in sizes)),
        other_parameters=piece.other_parameters + 4 * width,
        atom_products=piece.atom_products + by_atom,
        pair_products=4.0 * width if softmax else 0.0,
    )


EWALD_TAIL = 5.0
"""Where Gaussians of Ewald's sums are cut off, in their decay lengths: erfc(5) is 2e-12, exp(-25) is 1e-11."""


def edges_sum_charges(config: MaterialsModel) -> bool:
    """Return whether a part of the energy of charges is summed over edges: of those that are narrow beside the cutoff."""
    options = config.electrostatics
    return options is not None and 2.0 * EWALD_TAIL * options.smearing < config.cutoff


def head_piece(config: MaterialsModel) -> Piece:
    """Describe all heads, with a copy for each data set where they are not shared."""
    matmuls: list[Matmul] = []
    width = config.d_model
    for name in ("energy", "electrostatics", "charges", "dipole", *PROPERTY_HEADS):
        head = getattr(config, name)
        if head is None or (name in ("electrostatics", "dipole") and head.from_charges):
            continue
        between = (getattr(head, "width", None) or max(width // 2, 1),) * (head.layers - 1)
        row: Row = "edge" if name == "edge_properties" else "atom"
        inside = 2 * width + config.n_radial if row == "edge" else width
        sizes = [inside, *between, getattr(head, "outputs", 1)]
        copies = 1 if head.shared else len(config.branches)
        matmuls += [Matmul(row, a, b) for a, b in pairwise(sizes)] * copies
        if getattr(head, "every_block", False):
            matmuls += [Matmul("atom", width, 1)] * copies * (config.n_layers - 1)
    of_mace = width if config.mace.hidden_degree else 0
    channels = {"painn": width, "pnaeq": width, "nequip": width, "egnn": 1, "mace": of_mace}.get(config.body, 0)
    if config.dipole is not None and channels:
        matmuls.append(Matmul("atom", width, channels))
    return Piece(tuple(matmuls))


def _block_matmuls(config: MaterialsModel, number: int) -> tuple[Matmul, ...]:
    """Return the matrices of a block of any backbone but MACE."""
    c, r = config.d_model, config.n_radial
    if config.body == "egnn":
        moves = (Matmul("edge", c, c), Matmul("edge", c, 1))
        moved = moves if number < config.n_layers - 1 or config.dipole is not None else ()
        seen = (Matmul("atom", c, 2 * c), Matmul("edge", r + 1, c, bias=False), Matmul("edge", c, c))
        return (*seen, *moved, Matmul("atom", 2 * c, c), Matmul("atom", c, c))
    if config.body == "dimenet++":
        return _dimenet_matmuls(config)
    if config.body in ("pna", "pna+", "pnaeq"):
        return _pna_matmuls(config)
    found: dict[str, tuple[Matmul, ...]] = {
        "gin": (Matmul("edge", r, c), Matmul("atom", c, 2 * c), Matmul("atom", 2 * c, c)),
        "sage": (Matmul("edge", r, c), Matmul("atom", c, c), Matmul("atom", c, c, bias=False)),
        "mfc": (
            Matmul("edge", r, c),
            Matmul("atom", c, config.mfc.degrees * c),
            Matmul("atom", c, config.mfc.degrees * c, bias=False),
        ),
        "cgcnn": (
            Matmul("atom", c, 2 * c),
            Matmul("atom", c, 2 * c, bias=False),
            Matmul("edge", r, 2 * c, bias=False),
        ),
        "gatv2": (
            Matmul("atom", c, c),
            Matmul("atom", c, c, bias=False),
            Matmul("edge", r, c, bias=False),
            Matmul("atom", c, c),
            Matmul("atom", c, c),
        ),
        "schnet": (
            Matmul("atom", c, c, bias=False),
            Matmul("edge", r, c),
            Matmul("edge", c, c),
            Matmul("atom", c, c),
            Matmul("atom", c, c),
        ),
        "painn": (
            Matmul("atom", c, c),
            Matmul("atom", c, 3 * c),
            Matmul("edge", r, 3 * c),
            Matmul("atom", c, 2 * c, bias=False, times=3),
            Matmul("atom", 2 * c, c),
            Matmul("atom", c, 3 * c),
        ),
    }
    return found[config.body]


def _pna_matmuls(config: MaterialsModel) -> tuple[Matmul, ...]:
    """Return the matrices of a block of PNA, PNA+ or PNAEq: of messages, then of what several aggregations give an atom."""
    c, r = config.d_model, config.n_radial
    found: dict[str, tuple[Matmul, ...]] = {
        "pna": (
            Matmul("atom", c, c),
            Matmul("atom", c, c, bias=False),
            Matmul("edge", r, c, bias=False),
            Matmul("atom", 13 * c, c),
        ),
        "pna+": (
            Matmul("atom", c, c),
            Matmul("atom", c, c, bias=False),
            Matmul("edge", r, c),
            Matmul("edge", c, c, bias=False),
            Matmul("edge", r, c, bias=False),
            Matmul("atom", 17 * c, c),
        ),
        "pnaeq": (
            Matmul("atom", c, c),
            Matmul("atom", c, c, bias=False),
            Matmul("edge", r, c),
            Matmul("edge", c, c, bias=False),
            Matmul("edge", c, c),
            Matmul("edge", c, 3 * c),
            Matmul("edge", r, 3 * c, bias=False),
            Matmul("atom", 21 * c, c),
            Matmul("atom", c, 2 * c, bias=False, times=3),
            Matmul("atom", 2 * c, c),
            Matmul("atom", c, 3 * c),
        ),
    }
    return found[config.body]


def _dimenet_matmuls(config: MaterialsModel) -> tuple[Matmul, ...]:
    c, r, options = config.d_model, config.n_radial, config.dimenet
    narrow, basis = options.triplet_width, options.basis_width
    return (
        # own, other, skip, and three residual layers of two matrices
        *[Matmul("edge", c, c)] * 9,
        Matmul("edge", r, basis, bias=False),
        Matmul("edge", basis, c, bias=False),
        Matmul("edge", c, narrow, bias=False),
        Matmul("edge", r, options.angular * basis, bias=False),
        Matmul("triplet", basis, narrow, bias=False),
        Matmul("edge", narrow, c, bias=False),
        Matmul("edge", r, c, bias=False),
        Matmul("atom", c, c),
        Matmul("atom", c, c),
    )


def _nequip_piece(config: MaterialsModel, number: int) -> Piece:
    c, options = config.d_model, config.nequip
    inside = 0 if number == 0 else options.degree
    outside = 0 if number == config.n_layers - 1 and config.dipole is None else options.degree
    kept = min(inside, outside) + 1
    paths = _count_paths(inside, options.degree, outside)
    components = sum(count * (2 * ell + 1) for ell, count in enumerate(paths))
    gates = (Matmul("atom", c, outside * c),) if outside else ()
    matmuls = (
        *(Matmul("atom", c, c, bias=False, times=2 * ell + 1) for ell in range(inside + 1)),
        Matmul("edge", config.n_radial, options.radial_width),
        Matmul("edge", options.radial_width, sum(paths) * c),
        *(Matmul("atom", count * c, c, bias=False, times=2 * ell + 1) for ell, count in enumerate(paths)),
        *(Matmul("atom", c, c, bias=False, times=2 * ell + 1) for ell in range(kept)),
        *gates,
    )
    width = (inside + 1) ** 2
    coupled = 2.0 * components * width * ((options.degree + 1) ** 2 + c)
    tables = (config.max_atomic_number + 1) * c * kept
    return Piece(matmuls, tables, edge_products=coupled)


def _count_paths(inside: int, harmonics: int, outside: int) -> list[int]:
    """Count, by resulting degree, the ways to couple features with harmonics that keep parity."""
    degrees = [(a, b) for a in range(inside + 1) for b in range(harmonics + 1)]
    return [
        sum(abs(a - ell) <= b <= a + ell and (a + b + ell) % 2 == 0 for a, b in degrees) for ell in range(outside + 1)
    ]


def _mace_piece(config: MaterialsModel, number: int) -> Piece:
    c, options, rows = config.d_model, config.mace, config.max_atomic_number + 1
    inside = 0 if number == 0 else options.hidden_degree
    outside = 0 if number == config.n_layers - 1 and config.dipole is None else options.hidden_degree
    kept = min(inside, outside) + 1
    paths = _count_paths(inside, options.degree, options.degree)
    polynomials = [
        [_polynomial_count(options.degree, order, degree) for degree in range(outside + 1)]
        for order in range(1, options.correlation + 1)
    ]
    components = sum(count * (2 * ell + 1) for ell, count in enumerate(paths))
    widths = [config.n_radial, *[options.radial_width] * options.radial_layers, sum(paths) * c]
    # Degrees that matrices of each element mix, and those of the skip connection that one matrix mixes for all.
    by_element = kept if options.element_mixing == "matrices" else 0
    if number == 0 and not options.first_skip:
        by_element, kept = options.degree + 1, 0
    mixed = 0 if by_element else kept
    matmuls = (
        *(Matmul("atom", c, c, bias=False, times=2 * ell + 1) for ell in range(inside + 1)),
        *(Matmul("edge", a, b, bias=options.fades == "weights") for a, b in pairwise(widths)),
        *((Matmul("edge", config.n_radial, 1, bias=False),) if options.density else ()),
        *(Matmul("atom", count * c, c, bias=False, times=2 * ell + 1) for ell, count in enumerate(paths)),
        *(Matmul("atom", c, c, bias=False, times=2 * ell + 1) for ell in range(outside + 1)),
        *(Matmul("atom", c, c, bias=False, times=2 * ell + 1) for ell in range(mixed)),
    )
    formed = _count_products(options.degree, options.correlation, outside)
    # Each component of a polynomial is a sum over products, and one term of a component of the result.
    products = [
        2.0 * c * sum(count * (2 * ell + 1) for ell, count in enumerate(counts)) * (distinct + (outside + 1) ** 2)
        for counts, distinct in zip(polynomials, formed, strict=True)
    ]
    width = (inside + 1) ** 2
    coupled = 2.0 * components * width * ((options.degree + 1) ** 2 + c)
    tables = rows * c * (mixed + by_element * c + sum(map(sum, polynomials)))
    # Each atom's components are multiplied by its element's matrix of their degree.
    multiplied = 2.0 * by_element**2 * c * c
    return Piece(matmuls, tables, atom_products=sum(products) + multiplied, edge_products=coupled)


@cache
def _polynomial_count(degree: int, order: int, result: int) -> int:
    """Count, by their weights, the polynomials of `order` in components up to `degree` that transform like `result`.

    As many as there are products with total weight m = result, less those with m = result + 1, parity kept.
    """
    components = [(ell, m) for ell in range(degree + 1) for m in range(-ell, ell + 1)]
    count = 0
    for factors in combinations_with_replacement(components, order):
        if (sum(ell for ell, _ in factors) + result) % 2 == 0:
            weight = sum(m for _, m in factors)
            count += (weight == result) - (weight == result + 1)
    return count


@cache
def _count_products(degree: int, correlation: int, outside: int) -> list[int]:
    """Count by order the distinct products of components that a polynomial has or a longer product is made of.

    Those that the selection rules of real harmonics allow; a few more are 0 in every polynomial.
    """
    components = [(ell, m) for ell in range(degree + 1) for m in range(-ell, ell + 1)]
    results = [(ell, m) for ell in range(outside + 1) for m in range(-ell, ell + 1)]
    counts, longer = [len(components)], set[tuple[tuple[int, int], ...]]()
    for order in range(correlation, 1, -1):
        found = {
            factors
            for factors in combinations_with_replacement(components, order)
            if factors in longer or any(_couples(factors, *result) for result in results)
        }
        counts.insert(1, len(found))
        longer = {factors[:-1] for factors in found}
    return counts


def _couples(factors: tuple[tuple[int, int], ...], ell: int, m: int) -> bool:
    """Return whether selection rules allow a product of real harmonics in a polynomial that transforms like one."""
    degrees = {0}
    for one, _ in factors:
        degrees = {total for before in degrees for total in range(abs(before - one), before + one + 1)}
    orders = {0}
    for _, one in factors:
        orders = {total for before in orders for total in (before + one, before - one)}
    # Parity, and which are odd under a reflection that keeps the axis: those of negative m.
    even = sum(one for one, _ in factors) % 2 == ell % 2
    return even and sum(one < 0 for _, one in factors) % 2 == (m < 0) and ell in degrees and m in orders
