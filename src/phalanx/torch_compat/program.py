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
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

from phalanx.torch_compat.common import compile_options


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
        """function: gives tensors or tuples of them. arguments: an example of what it takes, contiguous; only their shapes
        and formats count. varying: of each argument the name of the size that may change, and the dimension that has it;
        None where all is fixed."""
        shapes = ShapeEnv()
        mode = FakeTensorMode(shape_env=shapes, allow_non_fake_inputs=True)
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
                    self._symbols[name] = _make_symbol(shapes, name, sizes[dimension])
                sizes[dimension] = self._symbols[name]
            with mode:
                self._examples.append(torch.empty(sizes, dtype=argument.dtype, device=argument.device))
        trace = make_fx(function, tracing_mode="symbolic", _allow_non_fake_inputs=True)
        self.graph: fx.GraphModule = trace(*self._examples)
        self.graph.graph.eliminate_dead_code()
        self.graph.recompile()
        self._program: Callable[..., Any] = self.graph

    def compile(self, dtype: torch.dtype) -> SizedProgram:
        """Fuse operations into kernels of the arguments' device; of the same numbers up to rounding.

        dtype: what most is computed in.
        """
        # Kernels are cached all the same; some versions fail to look this cache up, and warn of it.
        with torch.no_grad(), functorch_config.patch(enable_autograd_cache=False):
            self._program = torch._inductor.compile(self.graph, self._examples, compile_options(dtype))
        return self

    def holds_for(self, sizes: Mapping[str, int]) -> bool:
        """Return whether what was assumed of the sizes, to trace and to compile, is so for these."""
        known = {symbol.node.expr: sizes[name] for name, symbol in self._symbols.items()}
        return all(bool(condition.expr.xreplace(known)) for condition in self._conditions)

    def __call__(self, *arguments: Tensor) -> Any:
        """What the function gives, of arguments whose sizes it holds for."""
        return self._program(*arguments)


def _make_symbol(shapes: ShapeEnv, name: str, example: int) -> Any:
    """Return a size of its own."""
    source = ConstantSource(name)
    symbol = shapes.create_symbol(example, source=source, dynamic_dim=DimDynamic.DYNAMIC)
    return shapes.create_symintnode(symbol, hint=example, source=source)
