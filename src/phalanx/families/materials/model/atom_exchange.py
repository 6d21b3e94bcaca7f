"""What a network asks of whatever holds the atoms that are not at hand; on one device nothing is missing.

A network may be given a part of the atoms of its structures, with all edges that end at them. Other parts then hold some of
the atoms that messages come from. Letters: N atoms at hand, M these and then the further atoms that their edges come from, E
edges at hand, F these and then further ones, A all atoms of all parts.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


class Exchange:
    """All atoms are here. Everything has derivatives of any order."""

    def atoms(self, x_NC: Tensor) -> Tensor:
        """Rows of the atoms at hand -> those, then rows of the further atoms that edges come from, [M, ...]."""
        return x_NC

    def to_owners(self, x_MC: Tensor) -> Tensor:
        """The reverse: rows of all atoms that edges touch, added up where each atom is at hand, [N, ...]."""
        return x_MC

    def senders(self, atoms: int) -> int:
        """How many rows `atoms` gives for this many, M."""
        return atoms

    def edges(self, x_EC: Tensor) -> Tensor:
        """Rows of the edges at hand -> those, then rows of all edges that end at the further atoms, [F, ...]."""
        return x_EC

    def edge_targets(self, target_E: Tensor) -> Tensor:
        """Where these edges end among the M atoms, int64 [F]."""
        return target_E

    def everyone(self, x_NC: Tensor) -> Tensor:
        """Rows of all atoms of all parts, [A, ...]; those of one graph together, graphs ascending."""
        return x_NC

    def graph_of_everyone(self, graph_N: Tensor) -> Tensor:
        """The graph of each of them, int64 [A]."""
        return graph_N

    def over_graphs(self, sums_G: Tensor) -> Tensor:
        """Sums over the atoms of each graph that are at hand -> over all of its atoms, [G, ...]."""
        return sums_G

    def atoms_by_graph(self, graph_N: Tensor, graphs: int) -> Tensor:
        """Number of all atoms of each graph, int64 [G]."""
        return torch.zeros(graphs, dtype=torch.int64, device=graph_N.device).index_add_(
            0, graph_N, torch.ones_like(graph_N)
        )

    def largest(self, max_atoms: int | None) -> int | None:
        """Most atoms at hand of one graph, where max_atoms is the most of all; None where nobody knows."""
        return max_atoms

    def in_order(self) -> AbstractContextManager[object]:
        """While a derivative is formed that will be differentiated again."""
        return nullcontext()


ALONE = Exchange()
