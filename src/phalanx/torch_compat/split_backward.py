"""A backward pass in two parts: gradients of inputs first, those of parameters when there is time for them.

What zero-bubble schedules (Qi et al. 2024) are made of. PyTorch brings such parts, but those of 2.11 take all outputs of an
operation for one, count twice what reaches a parameter on several ways, and lose operations written in Python; these do
the same on every version.

Autograd's graph leads from outputs to inputs and parameters. A *junction* is a node from which an input is reached, with an
edge to where only parameters are. The first part notes the gradients that arrive at junctions, the second one goes on from
there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

Gradients = tuple[Tensor | None, ...]
Hook = Callable[[Gradients], Gradients | None]
"""Function that is told the gradients arriving at a node; what it gives, if anything, takes their place."""


@dataclass
class _Group:
    """Parameters that are reached from the same junctions."""

    parameters: list[int]
    junctions: list[Node]


class WeightPass:
    """The second part. Keeps what it needs of the graph alive."""

    def __init__(self, outputs: list[Tensor], parameters: list[Tensor], groups: list[_Group]) -> None:
        self._parameters = parameters
        self._groups = groups
        self._arrived: dict[Node, Gradients] = {}
        # Nodes of functions written in Python end with the last thing in C++ that leads to them.
        self._kept: list[GradientEdge] = [get_gradient_edge(output) for output in outputs]

    def listening(self) -> AbstractContextManager[None]:
        """Note in here what arrives at junctions."""

        def noting(node: Node) -> Hook:
            def note(gradients: Gradients) -> None:
                self._arrived[node] = gradients

            return note

        return _call_before({node: noting(node) for group in self._groups for node in group.junctions})

    def run(self, collect: Callable[[Sequence[Tensor]], None]) -> None:
        """Add the gradients of parameters to their `grad`, those next to the inputs first. To be called once.

        collect: told which parameters have theirs, so that it can take them before there are more.
        """
        # Between two junctions of one group lie nodes of others, whose own turn must come later.
        for group in sorted(self._groups, key=lambda group: len(group.junctions) == 1):
            self._run_group(group)
            collect([self._parameters[number] for number in group.parameters])
            for node in group.junctions:
                self._arrived.pop(node, None)
            group.junctions.clear()
        self._groups, self._kept = [], []

    def _run_group(self, group: _Group) -> None:
        several = len(group.junctions) > 1
        starts = [
            (GradientEdge(node, number), gradient)
            for node in group.junctions
            for number, gradient in enumerate(self._arrived.get(node, ()))
            if gradient is not None
        ]
        if not starts:
            return
        # What arrives at a junction holds what came from the ones above it: it must not come once more.
        with _call_before({node: partial(self._arrived.get, node) for node in group.junctions if several}):
            found: Gradients = torch.autograd.grad(
                [edge for edge, _ in starts],
                [get_gradient_edge(self._parameters[number]) for number in group.parameters],
                [gradient for _, gradient in starts],
                retain_graph=several,
                allow_unused=True,
            )
        for number, gradient in zip(group.parameters, found, strict=True):
            if gradient is not None:
                parameter = self._parameters[number]
                parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)


def input_gradients(
    outputs: Sequence[Tensor],
    gradients: Sequence[Tensor | None] | None,
    inputs: Sequence[Any],
    parameters: Sequence[Tensor],
) -> tuple[Gradients, WeightPass]:
    """Return the first part: gradients of `inputs`, None for what has none, and the part that is left.

    gradients: of the outputs; None for ones. The outputs are taken off the graph.
    """
    places = [place for place, output in enumerate(outputs) if output.requires_grad]
    reached = [outputs[place] for place in places]
    wanted = [x for x in inputs if isinstance(x, Tensor) and x.requires_grad]
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    left = WeightPass(reached, trained, _group_parameters(reached, wanted, trained))
    with left.listening():
        found = torch.autograd.grad(
            reached,
            wanted,
            [torch.ones_like(outputs[place]) if gradients is None else gradients[place] for place in places],
            # The second part walks the same graph from the junctions on.
            retain_graph=True,
            allow_unused=True,
        )
    for output in reached:
        # Whoever holds the output must not hold the graph.
        output.detach_()
    by_input = {id(x): gradient for x, gradient in zip(wanted, found, strict=True)}
    return tuple(by_input.get(id(x)) for x in inputs), left


@contextmanager
def _call_before(hooks: Mapping[Node, Hook]) -> Iterator[None]:
    """Call these hooks of nodes in here, each before its node."""
    handles = [node.register_prehook(hook) for node, hook in hooks.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _group_parameters(outputs: list[Tensor], inputs: list[Tensor], parameters: list[Tensor]) -> list[_Group]:
    """Return the junctions of the graph behind `outputs`, with the parameters that are reached from each."""
    ends = {get_gradient_edge(x).node for x in inputs}
    numbers = {get_gradient_edge(parameter).node: number for number, parameter in enumerate(parameters)}
    order = _children_first([get_gradient_edge(output).node for output in outputs])
    on_the_way: set[Node] = set()
    beside: dict[Node, set[int]] = {}
    """Parameters that a node off the way to the inputs leads to."""
    groups: list[_Group] = []
    for node in order:
        # Children come first, so that all that is asked about them is known.
        children = [child for child, _ in node.next_functions if child is not None]
        reached = {number for child in children if child not in on_the_way for number in beside[child]}
        if node in ends or any(child in on_the_way for child in children):
            on_the_way.add(node)
            if reached:
                groups.append(_Group(sorted(reached), [node]))
        else:
            beside[node] = reached | ({numbers[node]} if node in numbers else set())
    # Groups with a parameter in common become one: its gradient is computed in one go.
    of_parameter: dict[int, _Group] = {}
    for group in groups:
        met = {id(found): found for number in group.parameters if (found := of_parameter.get(number)) is not None}
        parts = [*met.values(), group]
        whole = _Group(
            sorted({number for part in parts for number in part.parameters}),
            [node for part in parts for node in part.junctions],
        )
        of_parameter |= dict.fromkeys(whole.parameters, whole)
    return list({id(group): group for group in of_parameter.values()}.values())


def _children_first(roots: list[Node]) -> list[Node]:
    """Return all nodes that are reached from `roots`, each behind those that it leads to."""
    order: list[Node] = []
    seen: set[Node] = set()
    waiting = [(root, False) for root in roots]
    while waiting:
        node, through = waiting.pop()
        if through:
            order.append(node)
        elif node not in seen:
            seen.add(node)
            waiting.append((node, True))
            waiting += [(child, False) for child, _ in node.next_functions if child is not None and child not in seen]
    return order
