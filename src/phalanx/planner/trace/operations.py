"""What one operation of a traced model is and needs: its kind, its sizes, floating-point operations and memory traffic.

Knows PyTorch's operations and no model: a table of names says which kind each is, its arguments say how large it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor

from phalanx.kernels.float8 import BLOCK

Phase = Literal["forward", "recompute", "backward"]
Kind = Literal["matmul", "attention", "pointwise", "reduction", "lookup", "copy", "collective"]
"""pointwise: one result an element. reduction: statistics and sums, with the pointwise work fused to them. lookup: rows
of a table, and sums into them. copy: elements that only move or change their format."""


@dataclass(frozen=True)
class Matmul:
    """`batch` products of [m, k] and [k, n]."""

    batch: int
    m: int
    n: int
    k: int
    width: int = 2
    """Bytes of an element of the factors."""
    groups: int = 0
    """Matrices that groups of rows meet in one kernel, group by group; m, or k, is the rows of all. 0: a plain product."""
    ragged: Literal["m", "k"] = "m"
    """Which of the two is made of groups whose sizes the device alone knows."""

    @property
    def flops(self) -> int:
        """A multiply and an add for each term."""
        return 2 * self.batch * self.m * self.n * self.k


@dataclass(frozen=True)
class Attention:
    """One call of a fused attention kernel on one rank."""

    samples: int
    heads: int
    kv_heads: int
    queries: int
    keys: int
    head_size: int
    causal: bool
    """Queries and keys stand at the same positions and half of the score matrix is left out."""
    backward: bool
    width: int = 2
    """Bytes of an element of queries and keys."""
    seen: float = 1.0
    """Share of these scores that is computed, the mean over layers: kernels skip what lies outside of a window."""
    value_size: int | None = None
    """Size of a value's head where it is another than `head_size`, which is that of queries and keys."""

    @property
    def flops(self) -> int:
        """What the kernel computes: two matmuls forward; five backward, one of which repeats the scores."""
        scores = self.samples * self.heads * self.queries * self.keys
        values = self.value_size or self.head_size
        # Forward scores and sums of values; backward scores, gradients of queries and of keys, and two of values.
        terms = 3 * self.head_size + 2 * values if self.backward else self.head_size + values
        whole = 2 * scores * terms // (2 if self.causal else 1)
        return whole if self.seen == 1.0 else int(whole * self.seen)


@dataclass(frozen=True)
class Collective:
    """Communication along one axis of the layout."""

    operation: Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send"]
    axis: str
    """tp, cp or ep; ep_across and ep_within for the stages of an exchange between nodes."""
    size: int
    """Ranks of the axis; 1 for sums, whose arguments do not say it."""
    bytes: int
    """Size of the whole tensor as one rank holds it: gathered, not yet scattered, exchanged, or sent to the next rank."""


@dataclass(frozen=True)
class Operation:
    """One kernel or one collective: what runs at once, reads its inputs and writes its results."""

    name: str
    """PyTorch's name; of fused operations, the names of its main parts."""
    kind: Kind
    phase: Phase
    dtype: torch.dtype
    """Dtype of the first result."""
    flops: int
    """Floating-point operations executed; for pointwise work one an element and operation."""
    bytes_read: int
    bytes_written: int
    matmul: Matmul | None = None
    attention: Attention | None = None
    collective: Collective | None = None
    weight_gradient: bool = False
    """Whether it makes a parameter's gradient, which schedules may put off."""
    times: int = 1
    """How often it runs; sizes are those of one time."""
    beside: int = 0
    """Operations that run after it before the first that reads its result; counted for rows on their way to experts or back,
    else 0."""


@dataclass(frozen=True)
class ExpertShare:
    """What one rank of `ep` has of the experts and of the rows that are sent to them."""

    ranks: int
    """Ranks over which the experts are sharded."""
    local: int
    """Experts of this rank."""
    load: Fraction
    """Rows that arrive at it over those that leave it."""
    slices: int = 1
    """Ranks over which each expert is sharded."""
    features: int = 1
    """Hidden features that this rank has of each of its experts."""


@dataclass(frozen=True)
class ExpertScale:
    """From the share of experts that was traced to the one that is asked for.

    As of `Scale`, the traced numbers are 1 or have a prime that divides no other size, and none of the others.
    """

    traced_rows: int
    """Rows that arrive, over those that leave for each sample."""
    traced: ExpertShare
    wanted: ExpertShare

    def __call__(self, count: int, samples: int) -> int:
        """Return how many elements the wanted share has in place of `count` of the traced one. samples: traced ones."""
        found = count
        if count % self.traced_rows == 0:
            # Multiples of a sample's rows, of which `load` makes whole ones.
            load = self.wanted.load
            found = count // self.traced_rows * self.wanted.slices * load.numerator // load.denominator * samples
        for traced, wanted in self._unlike:
            if count % traced == 0:
                found = found // traced * wanted
        return found

    @cached_property
    def _unlike(self) -> list[tuple[int, int]]:
        """Sizes of the traced share and of the wanted one, where they differ."""
        traced, wanted = self.traced, self.wanted
        sizes = [(traced.local, wanted.local), (traced.slices, wanted.slices), (traced.features, wanted.features)]
        return [(one, other) for one, other in sizes if one != other]


@dataclass(frozen=True)
class Scale:
    """From the micro-batch that was traced to the one that is asked for.

    The traced size is a number that divides no other size of the model, so a count that it divides grows with the batch.
    """

    traced: int = 1
    wanted: int = 1
    experts: ExpertScale | None = field(default=None, kw_only=True)
    """Where the trace is of any share of the experts."""

    def __call__(self, count: int) -> int:
        """Return how many elements the wanted micro-batch has in place of `count` of the traced one."""
        if self.experts is not None:
            count = self.experts(count, self.traced)
        if self.traced == self.wanted or count % self.traced:
            return count
        return count // self.traced * self.wanted

    def matmul(self, x: Matmul) -> Matmul:
        """Return `x` in the wanted micro-batch."""
        return replace(x, batch=self(x.batch), m=self(x.m), n=self(x.n), k=self(x.k), groups=self(x.groups))

    def attention(self, x: Attention) -> Attention:
        """Return `x` in the wanted micro-batch."""
        return replace(
            x,
            samples=self(x.samples),
            heads=self(x.heads),
            kv_heads=self(x.kv_heads),
            queries=self(x.queries),
            keys=self(x.keys),
        )

    def collective(self, x: Collective, itemsize: int) -> Collective:
        """Return `x`, of elements of so many bytes, in the wanted micro-batch."""
        # The trace of experts is of any number of ranks.
        size = self.experts.wanted.ranks if self.experts is not None and x.axis in ("ep", "ep_across") else x.size
        return replace(x, size=size, bytes=self(x.bytes // itemsize) * itemsize)


_MATMUL = {"mm": 0, "bmm": 0, "addmm": 1, "addmm_": 1, "baddbmm": 1}
"""Matmuls, and the position of their first factor."""
_GROUPED = frozenset(["grouped_product", "grouped_gradient", "scaled_grouped_product", "scaled_grouped_gradient"])
"""Products of groups of rows with a matrix each (`kernels.grouped_products`), the scaled ones of 8-bit numbers."""
_IN_8_BITS = frozenset(["scaled_product", "block_product"])
"""Products of 8-bit numbers, the second one transposed (`kernels.float8`)."""
QUANTISATION = frozenset(
    [
        "quantise",
        "quantise_blocks",
        "transpose_quantised",
        "row_column_amax",
        "swiglu_gradient_amax",
        "quantise_swiglu_gradient",
    ]
)
"""What makes 8-bit numbers: kernels of our own, which no compiler joins to other work."""
_ATTENTION = "_scaled_dot_product_"
"""How the names of fused attention kernels begin."""
_REDUCTION = frozenset(
    [
        "sum",
        "mean",
        "amax",
        "amin",
        "max",
        "min",
        "any",
        "all",
        "prod",
        "logsumexp",
        "var",
        "var_mean",
        "std",
        "argmax",
        "_softmax",
        "_log_softmax",
        "cumsum",
        "norm",
        "native_layer_norm",
        "native_layer_norm_backward",
        "_fused_rms_norm",
        "_fused_rms_norm_backward",
        "_softmax_backward_data",
        "_log_softmax_backward_data",
        "linalg_vector_norm",
    ]
)
_LOOKUP = frozenset(
    [
        "embedding",
        "embedding_dense_backward",
        "index",
        "gather",
        "index_put",
        "scatter",
        "scatter_add",
        "scatter_reduce",
        "index_select",
    ]
)
_COPY = frozenset(
    [
        "_to_copy",
        "convert_element_type",
        "clone",
        "copy",
        "copy_",
        "cat",
        "stack",
        "fill_",
        "zero_",
        "full",
        "zeros",
        "new_zeros",
        "combine_rows",
        "combine_rows_backward",
        "sort",
    ]
)
SCATTERED = frozenset(["embedding_dense_backward", "index_put", "scatter_add", "scatter_reduce", "scatter"])
"""Sums into rows of a table: no compiler joins them to other work."""
COLLECTIVES: dict[str, Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all"]] = {
    "all_reduce": "all_reduce",
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_to_all_single": "all_to_all",
}
FREE = frozenset(
    [
        "empty",
        "empty_like",
        "new_empty",
        "empty_strided",
        "new_empty_strided",
        "wait_tensor",
        "_unsafe_view",
        "lift_fresh",
    ]
)
"""Operations that touch no memory; those that make a tensor leave it unwritten."""


def base_name(operation: Any) -> str:
    """Return an operation's name without namespace and overload."""
    return str(operation.__name__).partition(".")[0]


def kind_of(name: str) -> Kind:
    """Return the kind of the operation with this `base_name`."""
    if name in _MATMUL or name in _GROUPED or name in _IN_8_BITS:
        return "matmul"
    if name.startswith(_ATTENTION):
        return "attention"
    if name in COLLECTIVES:
        return "collective"
    if name in _REDUCTION:
        return "reduction"
    if name in _LOOKUP:
        return "lookup"
    # What no table names computes element by element.
    return "copy" if name in _COPY or name in QUANTISATION else "pointwise"


def matmul_of(name: str, arguments: Sequence[Any]) -> Matmul | None:
    """Return the sizes of a matmul, from its arguments; None for other operations."""
    if name in ("grouped_product", "scaled_grouped_product"):
        rows, matrices = arguments[0], arguments[1]
        groups, n, k = matrices.shape
        return Matmul(1, rows.shape[0], n, k, rows.dtype.itemsize, groups)
    if name in ("grouped_gradient", "scaled_grouped_gradient"):
        ends = arguments[2 if name == "grouped_gradient" else 4]
        grad, rows, groups = arguments[0], arguments[1], len(ends)
        return Matmul(1, grad.shape[1], rows.shape[1], rows.shape[0], rows.dtype.itemsize, groups, "k")
    if name in _IN_8_BITS:
        a, b = arguments[0], arguments[1]
        # With a scale for each 128 numbers the product is a kernel of our own, at the rate of 16 bits on an H100.
        slow = name == "block_product" and arguments[5] == BLOCK
        return Matmul(1, a.shape[0], b.shape[0], a.shape[1], 2 if slow else a.dtype.itemsize)
    if name not in _MATMUL:
        return None
    # Some begin with what is added to the product.
    first = _MATMUL[name]
    a, b = arguments[first], arguments[first + 1]
    batch = a.shape[0] if a.dim() == 3 else 1
    return Matmul(batch, a.shape[-2], b.shape[-1], a.shape[-1], a.dtype.itemsize)


def attention_of(operation: Any, arguments: Sequence[Any], keywords: dict[str, Any]) -> Attention | None:
    """Return the sizes of a fused attention kernel, from its arguments; None for other operations."""
    if not base_name(operation).startswith(_ATTENTION):
        return None
    # By the names of the schema: kernels differ in the order of their arguments and in which they have.
    names = [argument.name for argument in operation._schema.arguments]
    given = {**dict(zip(names, arguments, strict=False)), **keywords}
    samples, heads, queries, size = given["query"].shape
    kv_heads, keys = given["key"].shape[1:3]
    values = given["value"].shape[-1]
    causal, backward = bool(given.get("is_causal", False)), names[0].startswith("grad")
    width = given["query"].dtype.itemsize
    return Attention(
        *(samples, heads, kv_heads, queries, keys, size, causal, backward, width),
        value_size=None if values == size else values,
    )


def tensors_in(value: Any) -> list[Tensor]:
    """Return all tensors in a nest of tuples, lists and dictionaries."""
    found: list[Tensor] = []
    _add_tensors(value, found)
    return found


def _add_tensors(value: Any, found: list[Tensor]) -> None:
    if isinstance(value, Tensor):
        found.append(value)
    elif isinstance(value, tuple | list):
        for each in value:
            _add_tensors(each, found)
    elif isinstance(value, dict):
        for each in value.values():
            _add_tensors(each, found)
