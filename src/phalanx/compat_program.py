"""Compiling a function together with the derivatives inside it; private parts of PyTorch's compiler. Part of `compat`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx


def compiled_program(function: Callable[..., Any], arguments: Sequence[Tensor]) -> Callable[..., Any]:
    """`function` of tensors of the shapes of `arguments`, with all its derivatives compiled as one graph."""
    with torch.no_grad():
        compiled: Callable[..., Any] = torch._inductor.compile(traced_program(function, arguments), list(arguments))
    return compiled


def traced_program(function: Callable[..., Any], arguments: Sequence[Tensor]) -> fx.GraphModule:
    """The graph of all operations of `function`, those that its derivatives consist of included.

    `torch.compile` has no second derivative; here the first is part of what is traced, and nothing is left to derive.
    """
    graph = make_fx(function, tracing_mode="real")(*arguments)
    graph.graph.eliminate_dead_code()
    graph.recompile()
    return graph
