"""How many numbers ranks that share structures send each other in a step, in closed form from a model's description."""

from __future__ import annotations

from phalanx.families.materials.model_config import MaterialsModel
from phalanx.families.materials.sizes import edges_sum_charges

_SPACE = 3
"""Components of a vector."""


def numbers_for_atoms(config: MaterialsModel, *, forces: bool = False, stress: bool = False) -> int:
    """Return the numbers that a training step sends for each atom which edges come from and which is elsewhere; losses and
    global attention aside.

    A pass sends rows one way, its backward pass as many the other way. Where forces or stress are formed the derivative
    repeats both, and forces travel home once more, with their gradient; the derivative does not reach what atoms tell of
    themselves before the first messages.
    """
    passes = 4 if forces or stress else 2
    columns = [_atom_columns(config, number) for number in range(config.n_layers)]
    first = config.d_model if config.body == "dimenet++" and config.graph is None else columns.pop(0)
    # Atomic numbers, which repulsion and transforms need of both atoms of a pair; nobody asks for their gradient.
    elements = int(config.energy is not None and config.energy.repulsion is not None)
    elements += int(config.distance_transform is not None)
    charges = passes * int(edges_sum_charges(config))
    return 2 * first + passes * sum(columns) + 2 * _SPACE * forces + elements + charges


def numbers_for_edges(config: MaterialsModel, *, forces: bool = False, stress: bool = False) -> int:
    """Return the same for each edge that ends at such an atom; 0 for all backbones but DimeNet++.

    Before the blocks: directions, and vectors without their gradient.
    """
    if config.body != "dimenet++":
        return 0
    angles = config.dimenet
    columns = config.n_layers * (angles.triplet_width + angles.angular * angles.basis_width)
    # Where nobody asks for derivatives by positions, directions have no gradient either.
    derived = forces or stress
    return (4 if derived else 2) * columns + _SPACE + (4 if derived else 1) * _SPACE


def _atom_columns(config: MaterialsModel, number: int) -> int:
    """Return the numbers of an atom that its messages in a block carry: what `Exchange.atoms` is given."""
    width = config.d_model
    if config.body in ("mace", "nequip"):
        degree = config.mace.hidden_degree if config.body == "mace" else config.nequip.degree
        # The first block meets features of degree 0 alone.
        return width if number == 0 else (degree + 1) ** 2 * width
    # DimeNet++ sends what edges say of each other, all others what atoms say: EGNN where they moved, too.
    return {"egnn": width + 3, "painn": 6 * width, "pnaeq": 4 * width, "dimenet++": 0}.get(config.body, width)
