"""What a network reads of atoms that are not at hand (`exchange.Exchange`), in closed form from its description alone.

Exact for `phalanx.families.materials.model.network`; a test compares the two. Needs no torch.
"""

from __future__ import annotations

from phalanx.families.materials.model.pieces import block_piece, embedding_piece
from phalanx.families.materials.model_config import MaterialsModel

_SPACE = 3
"""Components of a vector."""


def numbers_for_atoms(config: MaterialsModel, *, forces: bool = False, stress: bool = False) -> int:
    """Numbers that a training step sends for each atom which edges come from and which is elsewhere; losses and global
    attention aside.

    A pass sends rows one way, its backward pass as many the other way. Where forces or stress are formed the derivative
    repeats both, and forces travel home once more, with their gradient; the derivative does not reach what atoms tell of
    themselves before the first messages.
    """
    passes = 4 if forces or stress else 2
    columns = [block_piece(config, number).atom_columns for number in range(config.n_layers)]
    first = embedding_piece(config).atom_columns or columns.pop(0)
    return 2 * first + passes * sum(columns) + 2 * _SPACE * forces


def numbers_for_edges(config: MaterialsModel, *, forces: bool = False, stress: bool = False) -> int:
    """The same for each edge that ends at such an atom; 0 for all bodies but DimeNet++.

    Before the blocks: directions, and vectors without their gradient.
    """
    columns = sum(block_piece(config, number).edge_columns for number in range(config.n_layers))
    if not columns:
        return 0
    # Where nobody asks for derivatives by positions, directions have no gradient either.
    derived = forces or stress
    return (4 if derived else 2) * columns + _SPACE + (4 if derived else 1) * _SPACE
