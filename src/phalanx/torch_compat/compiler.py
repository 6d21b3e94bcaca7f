"""The private parts of PyTorch's compiler that cost models read. Beside `compat`, of which it is a part, because
importing the compiler takes two seconds: only what traces waits for that, and no subcommand whose traces are kept."""

from __future__ import annotations

import contextlib
import copy
import gc
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from threading import Thread
from typing import Any
from unittest import mock

import torch
from torch import Tensor, fx
from torch._dynamo.source import ConstantSource
from torch._functorch import config as functorch_config
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx._lazy_graph_module import _use_lazy_graph_module
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv
from torch.fx.passes.dialect.common.cse_pass import CSEPass, get_CSE_banned_ops
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.checkpoint import CheckpointPolicy

from phalanx.torch_compat.common import compile_options


def joint_graph(function: Callable[..., Any], tensors: Sequence[Tensor]) -> JointGraph:
    """Return the forward and backward graph of `function`, as the compiler sees it before it divides it into the two.

    Nothing is compiled or run. Raises whatever tracing raises.
    """
    from torch._functorch.aot_autograd import aot_function  # noqa: PLC0415

    found: list[JointGraph] = []

    def keep(joint: fx.GraphModule, inputs: Any, **options: Any) -> Any:
        found.append(JointGraph(joint, inputs, options))
        raise _Traced

    def run(*arguments: Tensor) -> Any:
        with _TensorScalars():
            return function(*arguments)

    with contextlib.suppress(_Traced), _write_no_code():
        aot_function(
            run, fw_compiler=_refuse_compilation, partition_fn=keep, decompositions=_inductor_decompositions()
        )(*tensors)
    (joint,) = found
    with _write_no_code():
        # The partitioner would do so at each division; equal operations have equal policies.
        passed: Any = CSEPass(_NEVER_EQUAL)(fx.GraphModule({}, joint.module.graph))
        graph: fx.Graph = passed.graph_module.graph
        joint.module.graph = graph
    return joint


@dataclass(frozen=True)
class JointGraph:
    """Forward and backward in one graph; see `joint_graph`."""

    module: fx.GraphModule
    inputs: Any
    options: dict[str, Any]

    def with_cast_inputs(self, places: Sequence[int], dtype: torch.dtype) -> JointGraph:
        """Return the graph of the same function with inputs in `dtype`, which it casts to their format here.

        Their gradients are cast back. places: of these inputs among all that the function is called with. Tracing such a
        function gives the same.
        """
        with _write_no_code():
            module = copy.deepcopy(self.module)
            graph = module.graph
            (output,) = graph.find_nodes(op="output")
            results: list[Any] = list(output.args[0])
            inputs = [node for node in graph.find_nodes(op="placeholder") if "tangents" not in str(node.target)]
            for place in places:
                node, gradient = inputs[place], self.options["num_fwd_outputs"] + place
                first = next(user for user in graph.nodes if node in user.all_input_nodes)
                inside = _insert_cast(graph, node, node.meta["val"].dtype, before=first)
                node.replace_all_uses_with(inside, delete_user_cb=lambda user, cast=inside: user is not cast)
                node.meta["val"] = node.meta["val"].to(dtype)
                results[gradient] = _insert_cast(graph, results[gradient], dtype, before=results[gradient].next)
            output.args = (type(output.args[0])(results), *output.args[1:])
        return JointGraph(module, self.inputs, self.options)

    def divide(self, policy: Callable[[Any, Sequence[Any]], CheckpointPolicy] | None) -> tuple[fx.Graph, fx.Graph]:
        """Return forward and backward graphs, what is kept and what is computed again chosen as the compiler chooses it.

        policy: what a recompute region says of an operation and its arguments; None outside of any region.
        """
        partitioners = _import_partitioners()
        with _write_no_code():
            module = copy.deepcopy(self.module)
        if policy is not None:
            for node in forward_nodes(module.graph):
                if node.target is operator.getitem:
                    # One of several results goes the way of the others.
                    node.meta["recompute"] = node.all_input_nodes[0].meta["recompute"]
                else:
                    arguments = fx.node.map_arg(node.args, lambda argument: argument.meta.get("val"))
                    node.meta["recompute"] = policy(node.target, arguments)
                node.meta["ac_graph_id"] = 0
        with _no_random_state(), _no_deduplication(), _write_no_code():
            forward, backward = partitioners.min_cut_rematerialization_partition(
                module, self.inputs, compiler="inductor", **self.options
            )
        return forward.graph, backward.graph


def _insert_cast(graph: fx.Graph, node: fx.Node, dtype: torch.dtype, *, before: fx.Node) -> fx.Node:
    """Insert a conversion of a tensor, as tracing records it, right before another operation."""
    with graph.inserting_before(before):
        cast = graph.call_function(torch.ops.prims.convert_element_type.default, (node, dtype))
    cast.meta |= {key: value for key, value in node.meta.items() if key == "partitioner_tag"}
    cast.meta["val"] = node.meta["val"].to(dtype)
    return cast


def forward_nodes(graph: fx.Graph) -> list[fx.Node]:
    """Return operations of a joint graph that do not depend on gradients of results."""
    after = {node for node in graph.nodes if node.op == "placeholder" and "tangents" in str(node.target)}
    found = []
    for node in graph.nodes:
        if any(argument in after for argument in node.all_input_nodes):
            after.add(node)
        elif node.op == "call_function" and node.meta.get("partitioner_tag") != "is_backward":
            found.append(node)
    return found


@contextlib.contextmanager
def _no_random_state() -> Iterator[None]:
    """Divide graphs without handing random state to what is computed again.

    Attention kernels count as random for their dropout, which is off here, and meta tensors have no generator to save.
    """
    partitioners = _import_partitioners()
    original = partitioners.functionalize_rng_ops
    partitioners.functionalize_rng_ops = lambda _joint, forward, backward, *_: (forward, backward)
    try:
        yield
    finally:
        partitioners.functionalize_rng_ops = original


@contextlib.contextmanager
def _no_deduplication() -> Iterator[None]:
    """Divide graphs without the pass for equal operations, which has seen them already."""
    partitioners = _import_partitioners()
    original = partitioners.fx_graph_cse
    partitioners.fx_graph_cse = lambda graph: graph
    try:
        yield
    finally:
        partitioners.fx_graph_cse = original


def _import_partitioners() -> Any:
    from torch._functorch import partitioners  # noqa: PLC0415

    return partitioners


_NEVER_EQUAL = get_CSE_banned_ops() | {torch.ops.aten.empty}


@contextlib.contextmanager
def _write_no_code() -> Iterator[None]:
    """Write no graph that is made in here out as Python code, a third of the time that dividing one takes: none is run."""
    kind: Any = fx.GraphModule
    original = kind.recompile
    # Some are made by modules that have not been told to write them when they first run.
    kind.recompile = lambda _module: None
    try:
        with _use_lazy_graph_module(True):
            yield
    finally:
        kind.recompile = original


def plain_graph(function: Callable[..., Any], tensors: Sequence[Tensor]) -> fx.Graph:
    """Return the graph of a function without a backward pass, in the operations the compiler works with."""
    with _write_no_code():
        return make_fx(function, decomposition_table=_inductor_decompositions(), tracing_mode="fake")(*tensors).graph


unseen = _disable_current_modes
"""A context in which no dispatch mode that is active sees what runs."""


@cache
def load_compiler() -> None:
    """Import all of the compiler now, while the garbage collector rests."""
    # It stays for good: the collector would look through it again and again.
    with _no_collection():
        _import_partitioners()
        _inductor_decompositions()
        if gc.get_freeze_count():
            gc.freeze()


@cache
def begin_loading() -> Thread:
    """Start to load what makes programs of graphs, which takes seconds, while the caller does something else.

    Who needs it waits for the end of the thread that is returned, always the same one.
    """
    loading = Thread(target=_load_lowering, name="compiler", daemon=True)
    loading.start()
    return loading


def _load_lowering() -> None:
    """Import what lowers graphs, start the processes that compile kernels, and read what keys of caches are made of."""
    from torch._inductor import async_compile, compile_fx  # noqa: F401, PLC0415
    from torch._inductor.runtime.triton_compat import HAS_TRITON, triton_key  # noqa: PLC0415

    if torch.accelerator.is_available():
        # They take as long to be ready; kernels that are written before are compiled once all are written.
        async_compile.AsyncCompile.wakeup()
    _inductor_decompositions()
    if HAS_TRITON:
        # A hash of all of Triton's files, which is kept.
        triton_key()


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Keep the garbage collector from looking through graphs as they grow, which takes it a twentieth of a compilation."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


@cache
def _inductor_decompositions() -> dict[Any, Callable[..., Any]]:
    from torch._inductor.decomposition import select_decomp_table  # noqa: PLC0415

    return dict(select_decomp_table())


class _TensorScalars(TorchFunctionMode):
    """Turns numbers given to `torch.where` into tensors: traced on meta, the other form has no gradient."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a function of PyTorch."""
        if func is torch.where and len(args) == 3:
            like = next((value for value in args[1:] if isinstance(value, Tensor)), None)
            if like is not None:
                args = (args[0], *(v if isinstance(v, Tensor) else like.new_full((), v) for v in args[1:]))
        return func(*args, **(kwargs or {}))


class _Traced(Exception):
    """Ends tracing once there is a joint graph."""


def _refuse_compilation(gm: Any, example_inputs: Any) -> Any:
    raise AssertionError("nothing is compiled")


class SizedProgram:
    """A function of tensors as one program for tensors of many sizes, its derivatives included.

    `torch.compile` has no second derivative; here the first is part of what is traced, and nothing is left to derive.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        arguments: Sequence[Tensor],
        varying: Sequence[tuple[str, int] | None],
    ) -> None:
        """Trace `function`, which gives tensors or tuples of them.

        arguments: an example of what it takes, contiguous; only their shapes and formats count. varying: of
        each argument the name of the size that may change, and the dimension that has it; None where all is fixed.
        """
        shapes = ShapeEnv()
        mode = FakeTensorMode(shape_env=shapes, allow_non_fake_inputs=True)
        # Of each operation it would note what came out, in a second run: few come twice with the same sizes.
        mode.cache_enabled = False
        self._conditions = shapes.guards
        self._symbols: dict[str, Any] = {}
        self._examples: list[Tensor | int | torch.SymInt | None] = []
        for argument, varies in zip(arguments, varying, strict=True):
            sizes: list[Any] = list(argument.shape)
            if varies is not None:
                name, dimension = varies
                assert sizes[dimension] > 1, "a size of 0 or 1 is taken to be fixed"
                # One symbol a name: sizes of different names are told apart where they happen to be equal in the example.
                if name not in self._symbols:
                    example = sizes[dimension]
                    source = ConstantSource(name)
                    symbol = shapes.create_symbol(example, source=source, dynamic_dim=DimDynamic.DYNAMIC)
                    self._symbols[name] = shapes.create_symintnode(symbol, hint=example, source=source)
                sizes[dimension] = self._symbols[name]
            with mode:
                self._examples.append(torch.empty(sizes, dtype=argument.dtype, device=argument.device))
        begin_loading().join()
        # In the compiler's own operations: it can then take the graph as it is, without tracing it twice more.
        trace = make_fx(
            function,
            decomposition_table=_inductor_decompositions(),
            tracing_mode="symbolic",
            _allow_non_fake_inputs=True,
        )
        with _no_collection():
            traced = trace(*self._examples)
        # Without the symbols' environment, which it holds as well: the compiler's cache has no key for that.
        self.graph = fx.GraphModule(traced, traced.graph)
        self.graph.graph.eliminate_dead_code()
        self.graph.recompile()
        self._program: Callable[..., Any] = self.graph

    def compile(self, dtype: torch.dtype) -> SizedProgram:
        """Fuse operations into kernels of the arguments' device; of the same numbers up to rounding.

        dtype: what most is computed in.
        """
        options = compile_options(dtype) or {}
        with torch.no_grad(), _no_collection():
            if any(_changes_arguments(node) for node in self.graph.graph.nodes):
                # AOTAutograd makes a graph without changes in place of it. Kernels are cached all the same; some versions
                # fail to look its own cache up, and warn of it.
                with functorch_config.patch(enable_autograd_cache=False):
                    self._program = torch._inductor.compile(self.graph, self._examples, options)
            else:
                self._program = _lower_graph(self.graph, self._examples, {**_QUICK, **options})
        return self

    def holds_for(self, sizes: Mapping[str, int]) -> bool:
        """Return whether what was assumed of the sizes, to trace and to compile, is so for these."""
        known = {symbol.node.expr: sizes[name] for name, symbol in self._symbols.items()}
        return all(bool(condition.expr.xreplace(known)) for condition in self._conditions)

    def __call__(self, *arguments: Tensor) -> Any:
        """Return what the function gives for arguments whose sizes it holds for."""
        return self._program(*arguments)


_QUICK = {
    "shape_padding": False,
    "triton.autotune_pointwise": False,
    "loop_ordering_after_fusion": False,
    "graph_partition": False,
}
"""Options of programs that are lowered from their graph: neither are products tried out with padded factors, shape by shape,
nor several tilings of each pointwise kernel, nor orders of loops for more to fuse; and nothing is parted, since a capture is
made of the whole. A step of MACE is as fast (`benchmarks/compile_time.py`)."""


def _changes_arguments(node: fx.Node) -> bool:
    """Return whether an operation writes to what it is given."""
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def _lower_graph(
    module: fx.GraphModule, examples: Sequence[Any], options: Mapping[str, Any]
) -> Callable[..., Tensor | Sequence[Tensor]]:
    """Return a graph of the compiler's own operations, none of which writes to its arguments, as fused kernels.

    `torch._inductor.compile` would have AOTAutograd trace it twice more with symbols in the place of sizes, which takes
    longer than all the rest: there is no derivative left to find.
    """
    from torch._inductor import compile_fx, config  # noqa: PLC0415
    from torch._inductor.virtualized import V  # noqa: PLC0415

    (output,) = module.graph.find_nodes(op="output")
    single = isinstance(output.args[0], fx.Node)
    results = [output.args[0]] if single else list(output.args[0])
    output.args = (tuple(results),)
    # Their strides stay as traced.
    output.meta["user_visible_output_idxs"] = list(range(len(results)))
    module.recompile()
    mode = next(example.fake_mode for example in examples if isinstance(example, FakeTensor))
    with config.patch(dict(options)), V.set_fake_mode(mode), tracing(TracingContext(mode)):
        for node in module.graph.find_nodes(op="get_attr"):
            node.meta.setdefault("val", mode.from_tensor(getattr(module, node.target)))
        # Passes over forward and backward pass as one graph have nothing to do here, and take a second.
        # Shapes and strides are those of the trace: to find them again would take two seconds more.
        with mock.patch.object(compile_fx, "fake_tensor_prop", lambda *_: mode):
            lowered: Any = compile_fx.compile_fx_inner(module, examples, is_inference=True)

    def run(*arguments: Tensor) -> Tensor | Sequence[Tensor]:
        found = lowered(list(arguments))
        result: Tensor | Sequence[Tensor] = found[0] if single else tuple(found)
        return result

    return run
