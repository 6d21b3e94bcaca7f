"""Which operations of a compiler's graph run as one kernel, and what memory such a kernel touches.

Follows what TorchInductor does, without its code generation: matmuls, attention, collectives and sums into tables stay
alone; pointwise work, casts, copies, lookups and reductions between them run together. A kernel reads what comes from
outside and writes what is used outside. Cheap pointwise work whose result only other kernels read is done again in each.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, fx

from phalanx.planner.trace.operations import FREE, SCATTERED, base_name, kind_of, tensors_in

_INLINED_READS = 4
"""Most tensors that pointwise work may read and still be repeated in every kernel that wants its result."""


@dataclass(eq=False)
class Kernel:
    """Operations that run as one, in their order."""

    nodes: list[fx.Node]
    alone: bool
    """A matmul, attention kernel, collective or sum into a table, whose memory traffic is its own."""
    reads: dict[fx.Node, int] = field(default_factory=dict)
    """Elements read of each tensor that comes from outside."""
    writes: list[fx.Node] = field(default_factory=list)
    """Results that are used outside."""
    sliced: set[fx.Node] = field(default_factory=set)
    """Tensors that it reads in another order than they are in, or in parts."""


def fuse_graph(graph: fx.Graph) -> list[Kernel]:
    """Return the kernels of a graph whose nodes carry meta tensors, in an order in which they can run."""
    return _Fusion(graph).kernels()


def source_node(node: fx.Node) -> fx.Node:
    """Return the node that made the memory which `node` is a view of."""
    while _is_view(node):
        (node,) = node.all_input_nodes[:1]
    return node


def element_count(node: fx.Node) -> int:
    """Return the elements of a node's result, all results together where it has several."""
    return sum(tensor.numel() for tensor in tensors_in(node.meta.get("val")))


def does_work(node: fx.Node) -> bool:
    """Return whether a node stands for work, not for a view or for one of several results."""
    return node.op == "call_function" and not _is_getitem(node) and not _is_view(node)


def name_of(node: fx.Node) -> str:
    """Return the base name of a node's operation."""
    return base_name(node.target)


def _is_getitem(node: fx.Node) -> bool:
    return node.op == "call_function" and getattr(node.target, "__name__", "") == "getitem"


def _is_view(node: fx.Node) -> bool:
    if node.op != "call_function":
        return False
    if _is_getitem(node):
        return _is_view(node.all_input_nodes[0])
    # Empty tensors have no inputs to be views of.
    return bool(getattr(node.target, "is_view", False)) or (name_of(node) in FREE and bool(node.all_input_nodes))


def _viewed_elements(node: fx.Node) -> int:
    """Return the elements that are read of `source_node(node)` through `node`: a slice, or all of it once."""
    smallest = element_count(node)
    while _is_view(node):
        node = node.all_input_nodes[0]
        smallest = min(smallest, element_count(node))
    return smallest


_IN_ORDER = frozenset(["view", "_unsafe_view", "alias", "detach", "unsqueeze", "squeeze", "wait_tensor"])


def _is_reordered(node: fx.Node) -> bool:
    """Return whether `node` is more than another shape of `source_node(node)`."""
    while _is_view(node):
        if _is_getitem(node) or name_of(node) not in _IN_ORDER:
            return True
        node = node.all_input_nodes[0]
    return False


class _Fusion:
    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        self.order = {node: place for place, node in enumerate(graph.nodes)}
        self.working = [node for node in graph.nodes if does_work(node)]
        self.inputs = {
            node: [(s, n) for n in node.all_input_nodes for s in _tensor_sources(n)] for node in self.working
        }
        self.level: dict[fx.Node, int] = {}
        """Kernels that stand alone before each node; only nodes of one level may run together. Sums over rows (gradients of
        norms' parameters, say) run apart from the work they sum, which goes the other way."""
        for node in self.working:
            makers = [_making_node(origin) for origin, _ in self.inputs[node]]
            before = [self.level[maker] + (not _is_fusible(maker)) for maker in makers if maker in self.level]
            self.level[node] = max(before, default=0) + _over_rows(node)
        alone = {origin for node in self.working if not _is_fusible(node) for origin, _ in self.inputs[node]}
        output = next(iter(reversed(graph.nodes)))
        self.demanded = alone | {origin for node in output.all_input_nodes for origin in _tensor_sources(node)}
        """What must be in memory whatever is fused: results of the graph, and inputs of kernels that stand alone."""
        self._leaves: dict[fx.Node, dict[fx.Node, int]] = {}

    def kernels(self) -> list[Kernel]:
        kernels = self._grouped()
        home = {node: kernel for kernel in kernels for node in kernel.nodes}
        for kernel in kernels:
            for node in kernel.nodes:
                for origin, through in self.inputs[node]:
                    if home.get(_making_node(origin)) is not kernel:
                        self._read(kernel, origin, through)
        # A result that no other kernel reads is never written to memory.
        wanted = {origin for kernel in kernels for origin in kernel.reads} | self.demanded
        for kernel in kernels:
            results = [node for node in kernel.nodes if node in wanted]
            several = [user for node in kernel.nodes for user in node.users if _is_getitem(user) and user in wanted]
            kernel.writes = [*results, *several]
        return self._order_kernels([kernel for kernel in kernels if kernel.writes or kernel.alone])

    def _order_kernels(self, kernels: list[Kernel]) -> list[Kernel]:
        """Return the kernels, each as early as its last operation allows, behind those whose results it reads."""
        makes = {node: kernel for kernel in kernels for node in kernel.writes}
        place = {id(kernel): max(self.order[node] for node in kernel.nodes) for kernel in kernels}
        waits = {id(k): {id(makes[n]) for n in k.reads if n in makes and makes[n] is not k} for k in kernels}
        by_id = {id(kernel): kernel for kernel in kernels}
        ready = [(place[key], key) for key, missing in waits.items() if not missing]
        heapq.heapify(ready)
        found: list[Kernel] = []
        while ready:
            _, key = heapq.heappop(ready)
            found.append(by_id[key])
            for other, missing in waits.items():
                if key in missing:
                    missing.remove(key)
                    if not missing:
                        heapq.heappush(ready, (place[other], other))
        assert len(found) == len(kernels), "kernels wait for each other"
        return found

    def _grouped(self) -> list[Kernel]:
        """Group the fusible nodes of one level that are joined by their inputs; every other node stands alone."""
        group: dict[fx.Node, list[fx.Node]] = {}
        for node in self.working:
            group[node] = [node]
            if not _is_fusible(node):
                continue
            for origin, _ in self.inputs[node]:
                if origin in group and _is_fusible(origin) and self.level[origin] == self.level[node]:
                    mine, other = group[node], group[origin]
                    if mine is not other:
                        mine.extend(other)
                        for member in other:
                            group[member] = mine
        # Lists are not hashable: members of a group share one list, known by its identity.
        unique = {id(nodes): nodes for nodes in group.values()}
        return [
            Kernel(sorted(nodes, key=self.order.__getitem__), not _is_fusible(nodes[0])) for nodes in unique.values()
        ]

    def _read(self, kernel: Kernel, origin: fx.Node, through: fx.Node) -> None:
        found = {origin: _viewed_elements(through)}
        if not kernel.alone and self._inlined(origin):
            # Inductor repeats cheap work in every kernel that reads it, instead of storing its result.
            found = self._behind(origin)
        elif _is_reordered(through):
            kernel.sliced.add(origin)
        for node, count in found.items():
            kernel.reads[node] = min(kernel.reads.get(node, 0) + count, element_count(node))

    def _inlined(self, node: fx.Node) -> bool:
        cheap = node in self.inputs and _is_fusible(node) and kind_of(name_of(node)) in ("pointwise", "copy")
        return cheap and node not in self.demanded and len(self._behind(node)) <= _INLINED_READS

    def _behind(self, node: fx.Node) -> dict[fx.Node, int]:
        """Return the tensors that must be read to compute `node` again, with the elements read of each."""
        if node not in self._leaves:
            found: dict[fx.Node, int] = {}
            for origin, through in self.inputs[node]:
                more = self._behind(origin) if self._inlined(origin) else {origin: _viewed_elements(through)}
                for leaf, count in more.items():
                    found[leaf] = min(found.get(leaf, 0) + count, element_count(leaf))
            self._leaves[node] = found
        return self._leaves[node]


def _tensor_sources(node: fx.Node) -> Iterator[fx.Node]:
    if isinstance(node.meta.get("val"), Tensor):
        yield source_node(node)


def _making_node(node: fx.Node) -> Any:
    """Return the operation that a buffer comes from."""
    return node.all_input_nodes[0] if _is_getitem(node) else node


def _is_fusible(node: fx.Node) -> bool:
    if not does_work(node):
        return False
    name = name_of(node)
    known = node.target.namespace in ("aten", "prims")  # type: ignore[union-attr]
    return known and kind_of(name) not in ("matmul", "attention", "collective") and name not in SCATTERED


def _over_rows(node: fx.Node) -> bool:
    """Return whether a node sums over other dims than the last."""
    if kind_of(name_of(node)) != "reduction" or len(node.args) < 2 or not isinstance(node.args[1], list | tuple):
        return False
    x = node.args[0]
    assert isinstance(x, fx.Node)
    dims = {int(dim) % max(1, x.meta["val"].dim()) for dim in node.args[1]}  # type: ignore[arg-type]
    return bool(dims) and x.meta["val"].dim() - 1 not in dims
