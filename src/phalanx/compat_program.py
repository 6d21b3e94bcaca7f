"""Compiling a function together with the derivatives inside it; private parts of PyTorch's compiler. Part of `compat`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._dynamo.source import ConstantSource
from torch._functorch import config as functorch_config
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext


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
        """function: gives tensors or tuples of them. arguments: an example of what it takes, tensors of at least one
        dimension (the tracer takes others for numbers that the program may depend on); only their shapes count.
        varying: of each argument the name of the size that may change, and the dimension that has it; None where all is
        fixed. Sizes of different names must differ in the example."""
        shapes = ShapeEnv()
        mode = FakeTensorMode(shape_env=shapes, allow_non_fake_inputs=True)
        self._conditions = shapes.guards
        self._symbols: dict[str, Any] = {}
        self._examples: list[Tensor | int | torch.SymInt | None] = []
        for number, (argument, varies) in enumerate(zip(arguments, varying, strict=True)):
            assert argument.dim() > 0
            dynamic = [DimDynamic.STATIC] * argument.dim()
            if varies is not None:
                # Equal sizes become one symbol: those of one name are known to stay equal.
                dynamic[varies[1]] = DimDynamic.DUCK
            context: Any = StatelessSymbolicContext(dynamic_sizes=dynamic)
            example = mode.from_tensor(argument, source=ConstantSource(f"argument_{number}"), symbolic_context=context)
            if varies is not None:
                assert argument.shape[varies[1]] > 1, "a size of 0 or 1 is taken to be fixed"
                size: Any = example.shape[varies[1]]
                self._symbols[varies[0]] = size.node.expr
            self._examples.append(example)
        assert len(set(self._symbols.values())) == len(self._symbols), "two sizes of the example are equal"
        trace = make_fx(function, tracing_mode="symbolic", _allow_non_fake_inputs=True)
        self.graph: fx.GraphModule = trace(*self._examples)
        self.graph.graph.eliminate_dead_code()
        self.graph.recompile()
        self._program: Callable[..., Any] = self.graph

    def compile(self) -> SizedProgram:
        """Fuse operations into kernels of the arguments' device; of the same numbers up to rounding."""
        # Kernels are cached all the same; some versions fail to look this cache up, and warn of it.
        with torch.no_grad(), functorch_config.patch(enable_autograd_cache=False):
            self._program = torch._inductor.compile(self.graph, self._examples)
        return self

    def holds_for(self, sizes: Mapping[str, int]) -> bool:
        """Whether what was assumed of the sizes, to trace and to compile, is so for these."""
        known = {symbol: sizes[name] for name, symbol in self._symbols.items()}
        return all(bool(condition.expr.xreplace(known)) for condition in self._conditions)

    def __call__(self, *arguments: Tensor) -> Any:
        """What the function gives, of arguments whose sizes it holds for."""
        return self._program(*arguments)
