"""What streaming sends and holds, counted, beside its closed forms: P parameters of a chain, T = tp, F = dp_shard.

Bytes that a rank receives: (P/T)(F-1)/F forward; backward the same again for weights and once more for gradients.
Gathered weights: at most two chunks, 2 P/(T F). Exchanges over tp: one gather and one scatter a chain, forward and backward.
"""

from __future__ import annotations

from collections import Counter
from functools import partial
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from distributed_ranks import run_ranks
from phalanx.config.model import LanguageModel
from phalanx.layout.mesh import Groups
from phalanx.layout.spec import ResolvedLayout
from phalanx.layout.streamed_weights.ring_transport import CopyEngineRing
from phalanx.layout.streamed_weights.stream_pairs import Streamed
from phalanx.torch_compat import common as compat
from streamed_runs import GPT, LENGTH, LLAMA, WatchedRing, counted_messages, lay_out, samples_of
from whole_model import CPU

EVEN = LLAMA.model_copy(update={"n_heads": 8, "n_kv_heads": 8, "d_ff": 128, "dropout": 0.0})
CASES: dict[str, tuple[LanguageModel, ResolvedLayout, int | None]] = {
    "even, F=4": (EVEN, ResolvedLayout(8, dp_shard=4, microbatch=2), None),
    "even, T=2 F=2": (EVEN, ResolvedLayout(8, dp_shard=2, tp=2, microbatch=2), None),
    "even, biases, T=2 F=2": (
        GPT.model_copy(update={"n_heads": 8, "d_ff": 64}),
        ResolvedLayout(8, dp_shard=2, tp=2),
        None,
    ),
    "pairs": (EVEN, ResolvedLayout(8, dp_shard=4, microbatch=2), 2),
    "uneven": (LLAMA, ResolvedLayout(8, dp_shard=4, microbatch=2), None),
}
ITEM = 8
"""Bytes of a float64 number."""


def sizes(model: LanguageModel) -> dict[str, int]:
    """Streamed parameters of each chain of a block, in closed form."""
    heads, shared, ff, d = (
        model.n_heads * model.head_size,
        model.kv_heads * model.head_size,
        model.ff_size,
        model.d_model,
    )
    wide = ff * (2 if model.mlp == "swiglu" else 1)
    biases = {"attention": heads + 2 * shared, "mlp": wide} if model.bias else {"attention": 0, "mlp": 0}
    return {
        "attention": d * (heads + 2 * shared) + heads * d + biases["attention"],
        "mlp": d * wide + ff * d + biases["mlp"],
    }


class Widths(TorchDispatchMode):
    """The widest result of a matmul."""

    widest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
            self.widest = max(self.widest, out.shape[-1])
        return out


def count(name: str, made: Groups) -> dict[str, Any]:
    model, layout, chunks = CASES[name]
    laid = lay_out(model, layout, made, chunks=chunks, ring=WatchedRing)
    tokens, targets, samples = (x[: layout.microbatch] for x in samples_of(model.vocab_size))
    exchanged: Counter[str] = Counter()

    def counting(what: str) -> Any:
        right = getattr(compat, what)

        def wrong(x: Tensor, *rest: Any) -> Tensor:
            # [..., S or S/T, D]: exchanges of positions, not of losses.
            exchanged[what] += x.shape[-1] == model.d_model
            return right(x, *rest)

        return patch.object(compat, what, wrong)

    WatchedRing.held = WatchedRing.peak = 0
    with counting("all_gather"), counting("reduce_scatter"):
        with counted_messages() as forward, Widths() as widths:
            loss = laid.stage(tokens, targets, samples)
        between = dict(exchanged)
        with counted_messages() as backward:
            loss.backward()
            assert laid.stream is not None
            laid.stream.finish()
    chains = {key: module.pair.plan for key, module in laid.stage.named_modules() if isinstance(module, Streamed)}
    shards = laid.mesh.shards.rank
    return {
        "forward": forward,
        "backward": backward,
        "over tp": (between, dict(exchanged)),
        "held": WatchedRing.held,
        "peak": WatchedRing.peak,
        "widest": widths.widest,
        "pieces": {key: plan.piece_size(shards) for key, plan in chains.items()},
        "chunks": {key: [plan.chunk_size(n) for n in range(plan.chunks)] for key, plan in chains.items()},
        "own": {key: shards // plan.group for key, plan in chains.items()},
    }


def copied(made: Groups) -> int:
    """Bytes of the buffers that copies go through, after two steps."""
    laid = lay_out(EVEN, ResolvedLayout(8, dp_shard=4, microbatch=2), made, ring=partial(CopyEngineRing, device=CPU))
    laid.step()
    laid.step()
    assert laid.stream is not None and isinstance(laid.stream.ring, CopyEngineRing)
    return laid.stream.ring.bytes


def recomputed(dropout: float, made: Groups) -> int:
    """Bytes received in the backward pass of blocks that are recomputed."""
    layout = ResolvedLayout(8, dp_shard=4, microbatch=2)
    laid = lay_out(EVEN.model_copy(update={"dropout": dropout}), layout, made, recompute="full")
    loss = laid.stage(*(x[:2] for x in samples_of(EVEN.vocab_size)))
    with counted_messages() as found:
        loss.backward()
    assert laid.stream is not None
    laid.stream.finish()
    return found["received"]


def count_all() -> dict[str, Any]:
    made: Groups = {}
    found: dict[str, Any] = {name: count(name, made) for name in CASES}
    return found | {"copies": copied(made), "recomputed": [recomputed(dropout, made) for dropout in (0.0, 0.1)]}


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return run_ranks(count_all, 4, timeout_s=120.0)


@pytest.mark.parametrize("name", CASES)
def test_bytes_over_the_shards(name: str, ranks: list[dict[str, Any]]) -> None:
    model, layout, _ = CASES[name]
    part = {chain: size // layout.tp for chain, size in sizes(model).items()}
    for rank in ranks:
        found = rank[name]
        own = {chain: found["pieces"][f"part.blocks.0.{chain}"] for chain in part}
        weights = model.n_layers * sum(part[chain] - own[chain] for chain in part) * ITEM
        gradients = model.n_layers * sum(own.values()) * (layout.dp_shard - 1) * ITEM
        assert found["forward"]["received"] == weights
        assert found["backward"]["received"] == weights + gradients
        if name.startswith("even"):
            block = sum(part.values())
            assert weights == model.n_layers * block * (layout.dp_shard - 1) // layout.dp_shard * ITEM == gradients
            assert found["forward"]["sent"] == weights and found["backward"]["sent"] == 2 * weights
    total = sum(rank[name]["forward"]["received"] for rank in ranks)
    assert total == model.n_layers * sum(part.values()) * layout.tp * (layout.dp_shard - 1) * ITEM


@pytest.mark.parametrize("name", CASES)
def test_two_chunks_are_held_and_none_is_kept(name: str, ranks: list[dict[str, Any]]) -> None:
    model, layout, chunks = CASES[name]
    for rank in ranks:
        found = rank[name]
        assert found["held"] == 0
        pairs = []
        for chain, own in found["chunks"].items():
            order = [own[(found["own"][chain] + step) % len(own)] for step in range(len(own))]
            pairs += [a + b for a, b in pairwise(order)]
        assert found["peak"] == max(pairs) * ITEM
        if name.startswith("even"):
            assert found["peak"] == 2 * max(sizes(model).values()) // (layout.tp * layout.dp_shard) * ITEM
        if chunks:
            assert found["peak"] == 2 * max(sizes(model).values()) // (layout.tp * chunks) * ITEM


def test_copies_go_through_two_chunks_of_weights_and_two_of_gradients(ranks: list[dict[str, Any]]) -> None:
    assert {rank["copies"] for rank in ranks} == {4 * max(sizes(EVEN).values()) // 4 * ITEM}


def test_a_recomputed_block_streams_what_its_last_chain_reads_and_no_more(ranks: list[dict[str, Any]]) -> None:
    """Attention once more, since the MLP's input needs it; the MLP itself only where a mask behind it is needed as well."""
    each = {chain: EVEN.n_layers * size * 3 // 4 * ITEM for chain, size in sizes(EVEN).items()}
    twice = 2 * sum(each.values())
    for rank in ranks:
        assert rank["recomputed"] == [twice + each["attention"], twice + sum(each.values())]


def test_hidden_features_are_those_of_a_chunk(ranks: list[dict[str, Any]]) -> None:
    for name in ("even, F=4", "even, T=2 F=2"):
        assert {rank[name]["widest"] for rank in ranks} == {2 * EVEN.ff_size // 4}


def test_positions_are_exchanged_over_tp_once_a_chain_and_pass(ranks: list[dict[str, Any]]) -> None:
    for name, (model, layout, _) in CASES.items():
        for rank in ranks:
            forward, both = rank[name]["over tp"]
            # Two chains a block, and once more before the output head and behind the embedding.
            each = (2 * model.n_layers + 1) * (layout.tp > 1)
            assert forward.get("all_gather", 0) == forward.get("reduce_scatter", 0) == each
            assert both.get("all_gather", 0) == both.get("reduce_scatter", 0) == 2 * each
    assert LENGTH % 2 == 0
