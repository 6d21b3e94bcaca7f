"""Attention in parts and around a ring of ranks against attention on one device, in float64."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from distributed_ranks import run_ranks
from phalanx.layout.context_parallel.ring_attention import (
    Part,
    attend_part,
    join_parts,
    part_gradients,
    ring_attention,
    ring_positions,
)
from phalanx.layout.mesh import build_mesh
from phalanx.layout.spec import ResolvedLayout
from phalanx.nn.attention import dense_bias

BOUND = {"rtol": 1e-12, "atol": 1e-12}
SAMPLES, HEADS, LENGTH, WIDTH = 2, 6, 16, 8
CPU = torch.device("cpu")

Tensors = tuple[Tensor, ...]


@dataclass(frozen=True)
class Case:
    """A kind of attention."""

    kv_heads: int = 2
    alibi: bool = False
    documents: bool = False
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False

    def inputs(self, length: int = LENGTH, dtype: torch.dtype = torch.float64) -> Tensors:
        """Query, key, value and the gradient of the result, for heads apart and all positions."""
        random = torch.Generator().manual_seed(5)
        sizes = (HEADS, self.kv_heads, self.kv_heads, HEADS)
        return tuple(
            torch.randn(SAMPLES, n, length, WIDTH, generator=random, dtype=torch.float64).to(dtype) for n in sizes
        )

    @property
    def slopes(self) -> Tensor | None:
        return 2.0 ** -torch.arange(1, HEADS + 1) if self.alibi else None

    @property
    def sink_logits(self) -> Tensor | None:
        return torch.linspace(-2.0, 3.0, HEADS, dtype=torch.float64) if self.sinks else None

    def document_ids(self, length: int = LENGTH) -> Tensor | None:
        if not self.documents:
            return None
        return torch.stack((torch.arange(length) // 3, (torch.arange(length) >= 7).long()))

    def bias(self, queries: Tensor, keys: Tensor) -> Tensor | None:
        """The mask as a bias, where there is one beside the causal mask."""
        if not (self.alibi or self.documents or self.window):
            return None
        ids = self.document_ids()
        documents = None if ids is None else (ids[:, queries], ids[:, keys])
        return dense_bias(self.slopes, queries, keys, torch.float64, documents, self.window)


CASES = {
    "all heads alike": Case(kv_heads=6),
    "grouped heads": Case(),
    "one key head": Case(kv_heads=1),
    "alibi": Case(alibi=True),
    "documents": Case(documents=True),
    "alibi and documents": Case(alibi=True, documents=True, kv_heads=3),
    "window": Case(window=5),
    "cap": Case(softcap=0.7),
    "sinks": Case(sinks=True),
    "everything": Case(alibi=True, documents=True, window=3, softcap=0.7, sinks=True),
}


def plainly(case: Case, length: int = LENGTH) -> Tensors:
    """Result and gradients of query, key, value and sinks, by autograd through plain softmax of the whole score matrix."""
    query, key, value, grad = case.inputs(length)
    sinks = case.sink_logits
    leaves = [x.clone().requires_grad_() for x in (query, key, value, sinks) if x is not None]
    wide_key, wide_value = (x.repeat_interleave(HEADS // case.kv_heads, dim=1) for x in leaves[1:3])
    scores = leaves[0] @ wide_key.mT / WIDTH**0.5
    if case.softcap is not None:
        scores = case.softcap * (scores / case.softcap).tanh()
    distance = torch.arange(length)[None, :] - torch.arange(length)[:, None]
    if case.slopes is not None:
        scores = scores + case.slopes[:, None, None] * distance
    forbidden = (distance > 0)[None, None]
    if case.window is not None:
        forbidden = forbidden | (distance <= -case.window)
    ids = case.document_ids(length)
    if ids is not None:
        forbidden = forbidden | (ids[:, None, :, None] != ids[:, None, None, :])
    scores = scores.masked_fill(forbidden, -torch.inf)
    if sinks is not None:
        scores = torch.cat((scores, leaves[3][:, None, None].expand(*scores.shape[:3], 1)), dim=-1)
    out = scores.softmax(-1)[..., :length] @ wide_value
    out.backward(grad)
    return (out.detach(), *(x.grad for x in leaves if x.grad is not None))


# --- parts -------------------------------------------------------------------------------------------------------------


def in_parts(case: Case, cuts: list[int]) -> Tensors:
    """The same, over consecutive parts of the keys joined."""
    query, key, value, grad = case.inputs()
    everything = torch.arange(LENGTH)
    bounds = list(zip([0, *cuts], [*cuts, LENGTH], strict=True))

    def mask(keys: slice) -> dict[str, Any]:
        bias = case.bias(everything, everything[keys])
        if bias is None:
            bias = dense_bias(None, everything, everything[keys], torch.float64, None)
        return {"causal": False, "bias": bias, "softcap": case.softcap}

    total: Part | None = None
    for start, stop in bounds:
        keys = slice(start, stop)
        total = join_parts(total, attend_part(query, key[:, :, keys], value[:, :, keys], **mask(keys)))
    assert total is not None
    grad_query, grad_key, grad_value = (torch.zeros_like(x) for x in (query, key, value))
    for start, stop in bounds:
        keys = slice(start, stop)
        parts = part_gradients(grad, query, key[:, :, keys], value[:, :, keys], total, **mask(keys))
        grad_query += parts[0]
        grad_key[:, :, keys] += parts[1]
        grad_value[:, :, keys] += parts[2]
    return total.out, grad_query, grad_key, grad_value


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    st.sampled_from(sorted(name for name, case in CASES.items() if not case.sinks)),
    st.sets(st.integers(1, LENGTH - 1), max_size=4),
)
def test_parts_of_the_keys_join_to_the_whole(name: str, cuts: set[int]) -> None:
    for found, expected in zip(in_parts(CASES[name], sorted(cuts)), plainly(CASES[name]), strict=True):
        torch.testing.assert_close(found, expected, **BOUND)


@pytest.mark.parametrize("kv_heads", [6, 2, 1])
@pytest.mark.parametrize("causal", [True, False])
def test_the_kernel_and_the_formulas_give_the_same_part(kv_heads: int, causal: bool) -> None:
    query, key, value, grad = Case(kv_heads).inputs()
    nothing = torch.zeros(1, 1, LENGTH, LENGTH, dtype=torch.float64)
    bias = nothing.masked_fill(torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1), -torch.inf) if causal else nothing
    by_kernel = attend_part(query, key, value, causal=causal, bias=None)
    by_formula = attend_part(query, key, value, causal=False, bias=bias)
    torch.testing.assert_close(tuple(by_kernel), tuple(by_formula), **BOUND)
    torch.testing.assert_close(
        part_gradients(grad, query, key, value, by_formula, causal=causal, bias=None),
        part_gradients(grad, query, key, value, by_formula, causal=False, bias=bias),
        **BOUND,
    )


def test_queries_without_a_key_in_a_part_take_nothing_from_it() -> None:
    query, key, value, _ = Case().inputs()
    nobody = torch.full((1, 1, LENGTH, LENGTH), -torch.inf, dtype=torch.float64)

    def whole() -> Part:
        return attend_part(query, key, value, causal=True, bias=None)

    def nothing() -> Part:
        return attend_part(query, key, value, causal=False, bias=nobody)

    assert torch.equal(nothing().out, torch.zeros_like(query)) and bool((nothing().log_z == -torch.inf).all())
    for joined in (join_parts(whole(), nothing()), join_parts(join_parts(None, nothing()), whole())):
        torch.testing.assert_close(tuple(joined), tuple(whole()), **BOUND)
    twice = join_parts(join_parts(None, nothing()), nothing())
    assert torch.equal(twice.out, torch.zeros_like(query)) and not bool(twice.log_z.isnan().any())


def test_a_part_of_some_queries_joins_those_alone() -> None:
    query, key, value, _ = Case().inputs()
    late = slice(LENGTH // 2, LENGTH)
    before = attend_part(query, key, value, causal=True, bias=None)
    other = attend_part(query[:, :, late], value, key, causal=False, bias=None)
    expected = join_parts(Part(before.out[:, :, late].clone(), before.log_z[:, :, late].clone()), other)
    joined = join_parts(attend_part(query, key, value, causal=True, bias=None), other, late)
    torch.testing.assert_close((joined.out[:, :, late], joined.log_z[:, :, late]), tuple(expected), **BOUND)
    rest = slice(0, LENGTH // 2)
    assert torch.equal(joined.out[:, :, rest], before.out[:, :, rest])
    assert torch.equal(joined.log_z[:, :, rest], before.log_z[:, :, rest])


def test_joining_is_wide_whatever_the_format() -> None:
    query, key, value, _ = Case().inputs(dtype=torch.bfloat16)
    total = join_parts(None, attend_part(query, key, value, causal=True, bias=None))
    assert (total.out.dtype, total.log_z.dtype) == (torch.float32, torch.float32)


# --- positions ---------------------------------------------------------------------------------------------------------


@settings(max_examples=50, deadline=None, derandomize=True)
@given(st.integers(1, 9), st.integers(1, 6))
def test_ring_positions_share_out_all_positions_and_equal_work(size: int, half: int) -> None:
    held = [ring_positions(rank, size, 2 * half, CPU) for rank in range(size)]
    assert torch.cat(held).sort().values.tolist() == list(range(2 * half * size))
    # A query at position p meets p + 1 keys.
    assert len({int((positions + 1).sum()) for positions in held}) == 1
    assert all(bool((positions.diff() > 0).all()) for positions in held)


# --- ranks -------------------------------------------------------------------------------------------------------------


def around_the_ring(names: list[str]) -> dict[str, Any]:
    """On this rank: result and gradients of each case, called plainly and from a compiled function."""
    axis = build_mesh(ResolvedLayout(1, cp=dist.get_world_size()), CPU).cp
    found: dict[str, Any] = {}
    for name in names:
        case = CASES[name]
        mine = ring_positions(axis.rank, axis.size, LENGTH // axis.size, CPU)
        query, key, value, grad = (x[:, :, mine] for x in case.inputs())
        mask = (case.slopes, case.document_ids())
        place = (case.window, case.softcap, axis.group_name, axis.rank, axis.size)
        # One function for all cases would be compiled more often than the compiler allows.
        torch.compiler.reset()
        compiled = torch.compile(lambda *x: ring_attention(*x)[0] * 2.0, backend="aot_eager", fullgraph=True)
        for how in ("", ", compiled"):
            leaves = [x.clone().requires_grad_() for x in (query, key, value)]
            sinks = None if case.sink_logits is None else case.sink_logits.requires_grad_()
            out = (
                compiled(*leaves, *mask, sinks, *place) / 2.0
                if how
                else ring_attention(*leaves, *mask, sinks, *place)[0]
            )
            out.backward(grad)
            found[name + how] = (out.detach(), *(x.grad for x in leaves))
            if sinks is not None:
                # Each rank knows what its own queries say of them.
                dist.all_reduce(sinks.grad)
                found[name + how] += (sinks.grad,)
    place = (*mask, None, *place)
    half = [x.to(torch.bfloat16) for x in (query, key, value)]
    out, log_z = ring_attention(*half, *place)
    assert not log_z.requires_grad
    found["formats"] = (out.dtype, log_z.dtype)
    unbiased = (None, None, None, None, None, axis.group_name, axis.rank, axis.size)
    # In memory positions stand before heads, as a model's projections leave them.
    strided = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (query, key, value)]
    for how, arguments in {"by kernel": (*strided, *unbiased), "by formula": (*strided, *place)}.items():
        leaves = [x.detach().requires_grad_() for x in arguments[:3]]
        checks = torch.library.opcheck(ring_attention, (*leaves, *arguments[3:]), raise_exception=False)
        found[f"opcheck {how}"] = {name: str(result) for name, result in checks.items()}
    return found


@pytest.fixture(scope="module", params=[2, 4])
def ring(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    return run_ranks(around_the_ring, request.param, list(CASES))


@pytest.mark.parametrize("how", ["", ", compiled"])
@pytest.mark.parametrize("name", CASES)
def test_a_ring_gives_what_one_device_gives(name: str, how: str, ring: list[dict[str, Any]]) -> None:
    expected = plainly(CASES[name])
    for rank, found in enumerate(ring):
        mine = ring_positions(rank, len(ring), LENGTH // len(ring), CPU)
        for part, whole in zip(found[name + how], expected, strict=True):
            torch.testing.assert_close(part, whole[:, :, mine] if whole.dim() == 4 else whole, **BOUND)


def test_results_keep_the_format_and_partitions_are_wide(ring: list[dict[str, Any]]) -> None:
    assert all(found["formats"] == (torch.bfloat16, torch.float32) for found in ring)


@pytest.mark.parametrize("how", ["by kernel", "by formula"])
def test_the_operation_is_declared_as_it_behaves(how: str, ring: list[dict[str, Any]]) -> None:
    for found in ring:
        checks = found[f"opcheck {how}"]
        assert set(checks.values()) == {"SUCCESS"}, checks
