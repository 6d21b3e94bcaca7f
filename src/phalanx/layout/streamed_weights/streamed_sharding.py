"""`gather: stream` behind the interface of data parallelism: matrices of blocks are streamed, FSDP2 shards what is left."""

from __future__ import annotations

import torch
from torch import nn

from phalanx.layout.data_parallel.copy_engine import CopyEngine
from phalanx.layout.data_parallel.fully_sharded import FullySharded, ShardingOptions
from phalanx.layout.layout_model import Stage
from phalanx.layout.mesh import Axis, Mesh
from phalanx.layout.place import TensorSplits
from phalanx.layout.streamed_weights.ring_transport import CopyEngineRing, WeightRing
from phalanx.layout.streamed_weights.stream_pairs import Stream, stream_matrices, streamed_parameters
from phalanx.nn.splits import Splits


class StreamedSharding(FullySharded):
    """Sharding that streams the matrices of blocks; `WholeParameters` says what each method is for."""

    def __init__(
        self, mesh: Mesh, device: torch.device, options: ShardingOptions, copy_engine: CopyEngine | None = None
    ) -> None:
        super().__init__(mesh, options, copy_engine)
        ring = WeightRing(mesh.shards) if copy_engine is None else CopyEngineRing(mesh.shards, device)
        self.stream = Stream(mesh.shards, mesh.replicas, mesh.cp, ring)

    def split_parameters(self, model: nn.Module, splits: Splits, tp: Axis) -> TensorSplits:
        """Keep this rank's piece of each streamed matrix, and its tensor-parallel part of every other one."""
        return stream_matrices(model, splits, tp, self.stream)

    def parameters_apart(self, stage: Stage) -> set[nn.Parameter]:
        """Return the streamed matrices too: they are sharded already."""
        return super().parameters_apart(stage) | streamed_parameters(stage)

    def finish_gradients(self) -> None:
        """Wait for the gradients that are still on their way round, and sum them over replicas."""
        self.stream.finish()

    @property
    def buffer_bytes(self) -> int:
        """See `WholeParameters`."""
        return super().buffer_bytes + self.stream.ring.bytes
