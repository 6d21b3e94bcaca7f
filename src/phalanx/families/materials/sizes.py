"""How large a network is and what a structure costs, in closed form from its description alone.

Exact for `phalanx.families.materials.model.network`; a test compares the two. Needs no torch.

Convention for model FLOPs: 6 for each matmul parameter and row it multiplies (a multiply and an add forward, twice that
backward); 12 where forces or stress are learned, since the gradient by positions is one more pass (2) whose own
backward pass takes as much as any (4). Rows are atoms, edges or triplets. Global softmax attention adds its products of
atoms with atoms, MACE its coupled products. Look-ups, sums over neighbours and pointwise work are not counted.
"""

from __future__ import annotations

from phalanx.families.materials.model.network_shapes import Piece, Row, block_piece, embedding_piece, head_piece
from phalanx.families.materials.model_config import MaterialsModel


def parameter_count(config: MaterialsModel) -> int:
    """All trainable parameters."""
    blocks = sum(block_piece(config, number).parameters for number in range(config.n_layers))
    return embedding_piece(config).parameters + blocks + head_piece(config).parameters


def matmul_parameters(config: MaterialsModel) -> int:
    """Parameters of all matrices; what they multiply are atoms, edges or triplets."""
    pieces = [embedding_piece(config), head_piece(config), *(block_piece(config, n) for n in range(config.n_layers))]
    return sum(matmul.inside * matmul.outside for piece in pieces for matmul in piece.matmuls)


def in_words(config: MaterialsModel) -> str:
    """The shape for a person."""
    branches = f", {len(config.branches)} branches" if len(config.branches) > 1 else ""
    return f"{config.body}, {config.n_layers} layers x {config.d_model}, cutoff {config.cutoff:g} A{branches}"


def model_flops(config: MaterialsModel, atoms: float, edges: float, triplets: float | None = None) -> float:
    """Floating-point operations of a training step on one structure, forward and backward.

    edges: directed. triplets: pairs of edges that meet, for DimeNet++; None takes edges * (edges / atoms - 1).
    """
    blocks = sum(_flops(config, block_piece(config, n), atoms, edges, triplets) for n in range(config.n_layers))
    return embedding_flops(config, atoms, edges) + blocks + head_flops(config, atoms)


def block_flops(config: MaterialsModel, atoms: float, edges: float, triplets: float | None = None) -> float:
    """Share of the last block in `model_flops`."""
    return _flops(config, block_piece(config, config.n_layers - 1), atoms, edges, triplets)


def embedding_flops(config: MaterialsModel, atoms: float, edges: float) -> float:
    """Share of what stands before the blocks."""
    return _flops(config, embedding_piece(config), atoms, edges, 0.0)


def head_flops(config: MaterialsModel, atoms: float) -> float:
    """Share of the heads; all copies of a head are computed for every atom."""
    return _flops(config, head_piece(config), atoms, 0.0, 0.0)


def _flops(config: MaterialsModel, piece: Piece, atoms: float, edges: float, triplets: float | None) -> float:
    derived = config.energy is not None and (config.energy.force_weight, config.energy.stress_weight) != (None, None)
    passes = 6.0 if derived else 3.0
    if triplets is None:
        triplets = edges * max(edges / atoms - 1.0, 0.0) if atoms else 0.0
    rows: dict[Row, float] = {"atom": atoms, "edge": edges, "triplet": triplets}
    forward = sum(2.0 * m.inside * m.outside * m.times * rows[m.row] for m in piece.matmuls)
    forward += piece.atom_products * atoms + piece.edge_products * edges + piece.pair_products * atoms * atoms
    return passes * forward
