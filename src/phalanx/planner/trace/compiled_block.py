"""What a compiled block does: its timeline, read off the graphs into which the compiler divides it.

The block is traced through AOTAutograd and divided by the partitioner that torch.compile uses, which decides what is kept
for the backward pass and what is computed again; `fusion` then says what runs as one kernel. Nothing is compiled.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from phalanx.planner.schedule.timeline import Access, Role, Step, Timeline
from phalanx.planner.trace.kernel_fusion import Kernel, element_count, fuse_graph, name_of, source_node
from phalanx.planner.trace.operations import Kind, Phase, Scale, attention_of, kind_of, matmul_of
from phalanx.planner.trace.recorder import Opaque, Recorder, collective_of
from phalanx.torch_compat.compiler import JointGraph, plain_graph, unseen


@dataclass(frozen=True)
class Argument:
    """A tensor that a traced function is called with."""

    name: str
    role: Role
    trained: bool = False
    """Whether it is a parameter that has a gradient."""
    expert: bool = False
    """Whether it belongs to experts that are sharded over ranks."""


def compiled_timeline(
    joint: JointGraph,
    policy: Callable[[Any, Sequence[Any]], Any] | None,
    arguments: Sequence[Argument],
    axes: dict[str, str],
    opaque: dict[Any, Opaque],
) -> Timeline:
    """Return the forward and backward pass of a compiled block.

    policy: see `JointGraph.divide`. arguments: of the traced function. axes, opaque: see `Recorder`.
    """
    with warnings.catch_warnings():
        # PyTorch 2.13 warns of its own way to copy a graph, which nobody who plans can change.
        warnings.filterwarnings("ignore", category=FutureWarning, module="copyreg")
        forward, backward = joint.divide(policy)
    count = joint.options["num_fwd_outputs"]
    outputs = _graph_outputs(forward)
    timeline = Timeline()
    reader = _Reader(timeline, axes, opaque)
    for node in _graph_inputs(forward):
        # The partitioner drops inputs that nothing reads and keeps their numbers, which count from 1.
        argument = arguments[int(str(node.target).removeprefix("primals_")) - 1]
        reader.place(node, argument.name, argument.role)
    timeline.forward = reader.steps(forward, lambda _: "forward")
    timeline.output = reader.buffers(outputs[:count])
    # The partitioner's forward graph returns the block's result first, then what it saves for the backward pass.
    kept = reader.buffers(outputs[count:])
    timeline.kept = [number for number in kept if timeline.buffers[number].role in ("made", "input")]
    _free_buffers(timeline, timeline.forward, {*timeline.output, *kept})

    # What is saved has the same name in both graphs; all else that the backward graph takes is the incoming gradient.
    saved = {node.name: node for node in forward.nodes}
    behind = _Reader(timeline, axes, opaque)
    for node in _graph_inputs(backward):
        if node.name in saved:
            behind.buffer[node] = reader.buffer[source_node(saved[node.name])]
        else:
            behind.place(node, "incoming", "incoming")
    timeline.backward = behind.steps(backward, _phase_by_kernel(backward))
    gradients = _graph_outputs(backward)
    # Gradients come in the order of the arguments.
    parameters = [node for node, argument in zip(gradients, arguments, strict=True) if argument.trained]
    assert all(isinstance(node, fx.Node) for node in parameters), "a parameter without gradient"
    timeline.gradients = behind.buffers(parameters)
    experts = [node for node, argument in zip(gradients, arguments, strict=True) if argument.expert]
    timeline.expert_gradients = behind.buffers(experts)
    _free_buffers(timeline, timeline.backward, set(behind.buffers(gradients)), timeline.kept)
    return timeline


def fused_steps(function: Callable[..., Any], tensors: Sequence[Tensor], recorder: Recorder) -> Any:
    """Run a compiled function without backward pass in an eager run that is being recorded; returns its results.

    tensors: [rows, ...], all with equally many rows, of which the function computes each alike. It is traced for one number
    of rows, which leads to any other.
    """
    scale = Scale(_unlike_rows(tensors), len(tensors[0]))
    with unseen():
        traced = [tensor.new_empty((scale.traced, *tensor.shape[1:])) for tensor in tensors]
    graph = _graph_of(function, traced)
    reader = _Reader(recorder.timeline, recorder.axes, recorder.opaque)
    for node, tensor in zip(_graph_inputs(graph), tensors, strict=True):
        reader.buffer[node] = recorder.hold(tensor, "made")
    buffers = recorder.timeline.buffers
    before = range(len(buffers))
    steps = [step.scaled(scale) for step in reader.steps(graph, lambda _: recorder.phase)]
    for buffer in buffers[len(before) :]:
        buffer.elements = scale(buffer.elements)
    outputs = _graph_outputs(graph)
    with unseen():
        results = [_meta_like(node.meta["val"], scale) for node in outputs]
    _free_buffers(recorder.timeline, steps, {*before, *reader.buffers(outputs)})
    for node, result in zip(outputs, results, strict=True):
        recorder.adopt(result, reader.buffer[source_node(node)])
    recorder.extend(steps)
    return tuple(results)


_PRIMES = (1009, 1013, 1019, 1021, 1031, 1033, 1039, 1049)


def _unlike_rows(tensors: Sequence[Tensor]) -> int:
    """Return a number of rows that divides no other size, so that what it divides is known to grow with them."""
    others = {size for tensor in tensors for size in tensor.shape[1:]}
    return next(prime for prime in _PRIMES if all(size % prime for size in others))


_FUSED_KINDS: tuple[Kind, ...] = ("reduction", "pointwise", "lookup", "copy")
"""Kinds of operations in a fused kernel: the first of them that it has says what kind of kernel it is."""
_graphs: dict[Any, fx.Graph] = {}


def _graph_of(function: Callable[..., Any], tensors: Sequence[Tensor]) -> fx.Graph:
    """Return the graph of `function`, traced once for sizes and formats of tensors.

    Functions are alike where they are from the same place in the code and close over equal values.
    """
    values = [cell.cell_contents for cell in function.__closure__ or ()]
    # Equal partial functions are not equal themselves: what they are made of is compared.
    closed = tuple((x.func, x.args, tuple(sorted(x.keywords.items()))) if isinstance(x, partial) else x for x in values)
    key = (function.__code__, closed, tuple((tuple(x.shape), x.stride(), x.dtype) for x in tensors))
    if key not in _graphs:
        with unseen():
            _graphs[key] = plain_graph(function, tensors)
    return _graphs[key]


def _phase_by_kernel(graph: fx.Graph) -> Callable[[Kernel], Phase]:
    """Return the phase of each kernel of a backward pass: recompute where it depends on no gradient, else backward."""
    after = {node for node in _graph_inputs(graph) if "tangents" in str(node.target)}
    for node in graph.nodes:
        if any(argument in after for argument in node.all_input_nodes):
            after.add(node)
    return lambda kernel: "backward" if any(node in after for node in kernel.nodes) else "recompute"


def _graph_inputs(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if node.op == "placeholder"]


def _graph_outputs(graph: fx.Graph) -> list[Any]:
    (results,) = next(iter(reversed(graph.nodes))).args
    return list(results) if isinstance(results, list | tuple) else [results]


def _free_buffers(timeline: Timeline, steps: list[Step], staying: set[int], before: Iterable[int] = ()) -> None:
    """Free each buffer after the last step that touches it, except those that stay. before: alive when steps begin."""
    # What is alive before and never read goes with the first step.
    last = dict.fromkeys(before, 0)
    for place, step in enumerate(steps):
        for number in (*step.makes, *(access.buffer for access in step.reads)):
            if timeline.buffers[number].role != "given":
                last[number] = place
    for number, place in last.items():
        already = any(number in step.drops for step in steps)
        if number not in staying and not already and timeline.buffers[number].role == "made":
            steps[place].drops.append(number)
    own = {number for step in steps for number in step.makes}
    # A fused kernel with one result writes it over an input in the same order that nothing reads afterwards; inputs of the
    # graph are left as they are. Kernels with several results may do the same; measured peaks lie between.
    for step in steps:
        if not step.work or len(step.makes) != 1:
            continue
        made = timeline.buffers[step.makes[0]]
        in_order = {access.buffer for access in step.reads if access.in_order}
        for number in own & in_order & set(step.drops):
            over = timeline.buffers[number]
            if (over.elements, over.itemsize) == (made.elements, made.itemsize):
                step.reuses = [number]
                break


class _Reader:
    """Makes steps of a graph's kernels."""

    def __init__(self, timeline: Timeline, axes: dict[str, str], opaque: dict[Any, Opaque]) -> None:
        self.timeline = timeline
        self.axes = axes
        self.opaque = opaque
        self.buffer: dict[fx.Node, int] = {}

    def place(self, node: fx.Node, name: str, role: Role) -> None:
        """Give the result of `node` a new buffer."""
        value = node.meta.get("val")
        if isinstance(value, Tensor):
            self.buffer[node] = self.timeline.new(name, value.numel(), value.itemsize, role)

    def buffers(self, nodes: Iterable[Any]) -> list[int]:
        """Return the buffers of the tensors among `nodes`, each once."""
        found = [self.buffer.get(source_node(node)) for node in nodes if isinstance(node, fx.Node)]
        return sorted({number for number in found if number is not None})

    def steps(self, graph: fx.Graph, phase: Callable[[Kernel], Phase]) -> list[Step]:
        """Return the steps of a graph, without what they free."""
        found: list[Step] = []
        for kernel in fuse_graph(graph):
            first = kernel.nodes[0]
            names = list(dict.fromkeys(name_of(node) for node in kernel.nodes))
            # A fused kernel is named after what it computes; after casts and copies only where there is nothing else.
            name = "+".join([one for one in names if kind_of(one) != "copy"] or names)
            for node in kernel.writes:
                self.place(node, name_of(first) if kernel.alone else name, "made")
            if first.target in self.opaque:
                found += self._looked_into(first, kernel, phase(kernel))
            else:
                found.append(self._step(kernel, name, phase(kernel)))
        return found

    def _step(self, kernel: Kernel, name: str, phase: Phase) -> Step:
        """Return the step of one kernel: the buffers it reads, writes and makes, and what it computes."""
        first = kernel.nodes[0]
        written = [node for node in kernel.writes if node in self.buffer]
        kinds = {kind_of(name_of(node)) for node in kernel.nodes}
        kind = kinds.pop() if kernel.alone else next(kind for kind in _FUSED_KINDS if kind in kinds)
        value = (written or kernel.nodes)[0].meta["val"]
        # Operations of several results, such as attention, have the format of the first.
        result = value if isinstance(value, Tensor) else value[0]
        assert isinstance(result, Tensor)
        step = Step(name, kind, phase, result.dtype)
        step.reads = [
            Access(self.buffer[node], count, in_order=node not in kernel.sliced)
            for node, count in kernel.reads.items()
            if node in self.buffer
        ]
        step.writes = [Access(self.buffer[node], element_count(node)) for node in written]
        step.makes = [self.buffer[node] for node in written]
        # A reduction works on each element of its input, which is larger than its output.
        if not kernel.alone:
            step.work = [
                max(element_count(other) for other in (node, *node.all_input_nodes))
                for node in kernel.nodes
                if kind_of(name_of(node)) in ("pointwise", "reduction")
            ]
            return step
        arguments: Any = fx.node.map_arg(first.args, lambda node: node.meta.get("val"))
        keywords: Any = fx.node.map_arg(first.kwargs, lambda node: node.meta.get("val"))
        step.matmul = matmul_of(name, arguments)
        step.attention = attention_of(first.target, arguments, keywords)
        if step.kind == "collective":
            step.collective = collective_of(name, arguments, arguments[0], first.meta["val"], self.axes)
        elif step.kind == "lookup":
            # Sums into a table touch the rows of its input, and write the whole table of sums.
            step.reads = [
                read for read in step.reads if read.elements <= step.writes[0].elements or len(step.reads) <= 2
            ]
        return step

    def _looked_into(self, node: fx.Node, kernel: Kernel, phase: Phase) -> list[Step]:
        """Return the steps behind one opaque operation, on buffers of this timeline."""
        # The compiler sees one node; what runs are many operations, so these are run on meta tensors and recorded.
        recorder = Recorder(self.axes, self.opaque)
        recorder.backward = phase != "forward"
        # Which buffer here each of the recorder's is: at first those of the arguments.
        known: dict[int, int] = {}

        def meta(argument: fx.Node) -> Any:
            value = argument.meta.get("val")
            if not isinstance(value, Tensor):
                return value
            tensor = _meta_like(value)
            known[recorder.hold(tensor, "given")] = self.buffer[source_node(argument)]
            return tensor

        arguments: Any = fx.node.map_arg(node.args, meta)
        with torch.no_grad(), recorder:
            results = self.opaque[node.target](recorder, *arguments)
        for result, user in ((results[user.args[1]], user) for user in kernel.writes):
            known[recorder.hold(result, "made")] = self.buffer[user]

        def number(old: int) -> int:
            """Return the number here of a buffer of the recorder's timeline."""
            if old not in known:
                buffer = recorder.timeline.buffers[old]
                known[old] = self.timeline.new(buffer.name, buffer.elements, buffer.itemsize)
            return known[old]

        steps = recorder.close()
        for step in steps:
            step.phase = phase
            step.reads = [Access(number(access.buffer), access.elements) for access in step.reads]
            step.writes = [Access(number(access.buffer), access.elements) for access in step.writes]
            step.makes, step.drops = [number(old) for old in step.makes], [number(old) for old in step.drops]
        return steps


def _meta_like(tensor: Tensor, scale: Scale | None = None) -> Tensor:
    """Return a meta tensor like a fake one, of other sizes where `scale` says so."""
    to = scale or Scale()
    shape, stride = ([to(size) for size in sizes] for sizes in (tensor.shape, tensor.stride()))
    return torch.empty_strided(shape, stride, dtype=tensor.dtype, device="meta")
