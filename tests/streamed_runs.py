"""A decoder whose matrices are streamed, on the ranks of a test: a step's gradients, what is sent, and what is held."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn

from phalanx.config.model import LanguageModel
from phalanx.counter_random import DropoutContext
from phalanx.families.language.declare import DeclaredLanguage
from phalanx.families.language.decoder import Decoder
from phalanx.layout.context_parallel.split_context import SequenceShare, split_context
from phalanx.layout.data_parallel.fully_sharded import FullySharded, ShardingOptions
from phalanx.layout.data_parallel.gradients import sum_gradients
from phalanx.layout.initial_values import fill_initial, initialise_parameters
from phalanx.layout.layout_model import Stage, WholeParameters
from phalanx.layout.mesh import ONE_RANK, Axis, Groups, Mesh, build_mesh
from phalanx.layout.place import TensorSplits
from phalanx.layout.prepare_blocks import recompute_block
from phalanx.layout.spec import ResolvedLayout
from phalanx.layout.streamed_weights.ring_transport import WeightRing
from phalanx.layout.streamed_weights.stream_pairs import Stream, stream_matrices
from phalanx.layout.streamed_weights.streamed_sharding import StreamedSharding
from phalanx.nn.parameters import InitRule
from phalanx.nn.precision import PRECISIONS
from whole_model import CPU, Box, box, place_of

_SIZE = {"n_layers": 2, "d_model": 24, "vocab_size": 31, "max_positions": 32}
LLAMA = LanguageModel(**_SIZE, n_heads=12, n_kv_heads=6, head_dim=4, d_ff=80, qk_norm=True, dropout=0.1)
"""Six head groups and 40 pairs of gate and up features of 2: uneven over 4 ranks, and over 2 tensor-parallel ones by 2."""
GPT = LanguageModel(
    **_SIZE,
    n_heads=6,
    d_ff=50,
    positions="learned",
    norm="layernorm",
    mlp="gelu_tanh",
    bias=True,
    qk_norm=True,
    dropout=0.1,
)
"""Biases everywhere; 6 heads and 50 hidden features."""
MPT = LanguageModel(**_SIZE, n_heads=8, d_ff=48, positions="alibi", norm="layernorm", mlp="gelu", bias=True)
"""A bias of its own for each head."""
MODELS = {"llama": LLAMA, "gpt": GPT, "mpt": MPT}
SAMPLES, LENGTH, SEED = 8, 16, 3


class StreamedStage(Stage):
    """What a family's stage does: positions, dropout of a step, and the summed loss."""

    def __init__(self, part: Decoder, share: SequenceShare) -> None:
        super().__init__(part, 0, share, SEED, LENGTH)

    def forward(self, tokens_BS: Tensor, targets_BS: Tensor, samples_B: Tensor) -> Tensor:  # type: ignore[override]
        positions = self.share.positions(tokens_BS.shape[1], tokens_BS.device)
        dropout = None
        if self.part.config.dropout:
            dropout = DropoutContext.of_step(SEED, 1, samples_B, positions.rows_S, self.part.config.d_model)
        hidden = self.part.hidden(tokens_BS[:, positions.tokens_S], positions, dropout=dropout)
        return self.part.loss(hidden, targets_BS[:, positions.tokens_S]).total


@dataclass
class Laid:
    """A model on this rank."""

    mesh: Mesh
    layout: ResolvedLayout
    stage: StreamedStage
    stream: Stream | None
    sharding: WholeParameters
    splits: TensorSplits
    parameters: dict[str, nn.Parameter] = field(default_factory=dict)

    def step(self) -> float:
        """Gradients of the mean loss of a step; returns this rank's part of the summed loss."""
        tokens, targets, samples = samples_of(self.stage.part.config.vocab_size)
        first, share = self.mesh.data_rank * self.layout.samples_per_rank, self.layout.samples_per_rank
        total = 0.0
        for start in range(first, first + share, self.layout.microbatch):
            part = slice(start, start + self.layout.microbatch)
            self.sharding.prepare_microbatch(self.stage, last=part.stop == first + share)
            loss = self.stage(tokens[part], targets[part], samples[part])
            (loss / (SAMPLES * LENGTH)).backward()
            total += float(loss.detach())
        self.sharding.finish_gradients()
        sum_gradients(self.mesh.tp, [p for name, p in self.parameters.items() if name not in self.splits])
        return total if self.mesh.tp.rank == 0 else 0.0

    def gradients(self) -> dict[str, Box]:
        """This rank's parts."""
        return {name: box(place_of(p.grad, self.splits.get(name))) for name, p in self.parameters.items()}  # type: ignore[arg-type]


def samples_of(vocabulary: int) -> tuple[Tensor, Tensor, Tensor]:
    random = torch.Generator().manual_seed(11)
    tokens = torch.randint(vocabulary, (SAMPLES, LENGTH + 1), generator=random)
    return tokens[:, :-1], tokens[:, 1:], torch.arange(SAMPLES)


def lay_out(
    model: LanguageModel,
    layout: ResolvedLayout,
    made: Groups | None = None,
    *,
    stream: bool = True,
    chunks: int | None = None,
    recompute: Any = "none",
    dtype: torch.dtype = torch.float64,
    ring: Callable[[Axis], WeightRing] = WeightRing,
) -> Laid:
    """`model` in `layout` on this rank, with the initial values of every layout, and none of them all equal."""
    mesh = ONE_RANK if layout.world_size == 1 else build_mesh(layout, CPU, made)
    precision = next(one for one in PRECISIONS.values() if one.compute_dtype == dtype)
    streams, sharding = None, WholeParameters()
    if mesh.data is not None:
        sharding = FullySharded(mesh, ShardingOptions(precision))
    if stream and mesh.shards.size > 1:
        streams = Stream(mesh.shards, mesh.replicas, mesh.cp, ring(mesh.shards))
        sharding = StreamedSharding(mesh, CPU, ShardingOptions(precision))
        sharding.stream = streams
    share = SequenceShare(mesh.cp, mesh.tp, "ring")
    with torch.device("meta"):
        decoder = Decoder(model, dtype=dtype, chunk_tokens=64)
    splits = stream_matrices(decoder, DeclaredLanguage(model, 1).splits(), mesh.tp, streams, chunks=chunks)
    split_context(decoder, share)
    decoder.to(precision.main_dtype)
    stage = StreamedStage(decoder, share)
    for block in decoder.blocks:
        recompute_block(block, recompute)
    sharding.shard_stage(stage)
    decoder.to_empty(device="cpu")
    laid = Laid(mesh, layout, stage, streams, sharding, splits, dict(decoder.named_parameters()))
    initialise_parameters(laid.parameters, DeclaredLanguage(model, 1).initial_rules(), SEED, splits)
    for name, parameter in laid.parameters.items():
        noise = torch.empty_like(parameter)
        fill_initial(noise, f"{name} shaken", InitRule.normal(0.1), SEED, splits.get(name))
        with torch.no_grad():
            parameter.add_(noise)
    return laid


# --- what is sent ----------------------------------------------------------------------------------------------------


@contextmanager
def counted_messages() -> Iterator[dict[str, int]]:
    """Bytes that this rank receives and sends point to point, and how many messages."""
    found = {"received": 0, "sent": 0, "messages": 0}
    right = dist.batch_isend_irecv

    def counting(operations: list[dist.P2POp]) -> list[dist.Work]:
        for operation in operations:
            what = "sent" if operation.op is dist.isend else "received"
            found[what] += operation.tensor.numel() * operation.tensor.itemsize
            found["messages"] += what == "received"
        return right(operations)

    with patch.object(dist, "batch_isend_irecv", counting):
        yield found


# --- what is held ----------------------------------------------------------------------------------------------------


class WatchedRing(WeightRing):
    """Knows how many bytes of weights are held, by the life of the memory behind each buffer."""

    held = 0
    peak = 0

    def weights(self, count: int, like: Tensor) -> Tensor:
        buffer = super().weights(count, like)
        storage, size = buffer.untyped_storage(), count * like.itemsize
        WatchedRing.held += size
        WatchedRing.peak = max(WatchedRing.peak, WatchedRing.held)
        weakref.finalize(storage, WatchedRing._freed, size).atexit = False

        return buffer

    @staticmethod
    def _freed(size: int) -> None:
        WatchedRing.held -= size
