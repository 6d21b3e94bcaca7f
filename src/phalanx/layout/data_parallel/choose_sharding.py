"""Which sharding a run file asks for, among those that `sharding` names."""

from __future__ import annotations

import torch

from phalanx.config.schema import Run
from phalanx.layout.data_parallel.copy_engine.exchanges import choose_copy_engine
from phalanx.layout.data_parallel.fully_sharded import FullySharded, ShardingOptions
from phalanx.layout.data_parallel.sharding import WholeParameters
from phalanx.layout.mesh import Mesh
from phalanx.layout.spec import ResolvedLayout
from phalanx.layout.streamed_weights.sharding import StreamedSharding
from phalanx.nn.precision import PRECISIONS


def choose_sharding(run: Run, layout: ResolvedLayout, mesh: Mesh, device: torch.device) -> WholeParameters:
    """Return how the data-parallel ranks of `mesh` hold the parameters of `run`; all of them call it together.

    Raises ConfigError where layout.peer_copies=true and the ranks cannot read each other's memory.
    """
    if mesh.data is None:
        return WholeParameters()
    precision = PRECISIONS[run.layout.precision]
    copy_engine = choose_copy_engine(run.layout.peer_copies, mesh.shards.group, device, precision.compute_dtype)
    options = ShardingOptions(
        precision,
        zero=layout.zero,
        reshard_after_forward=layout.reshard_after_forward,
        blocks_per_unit=run.layout.gather_blocks,
        prefetch_depth=run.layout.gathers_ahead,
    )
    if layout.gather == "stream":
        return StreamedSharding(mesh, device, options, copy_engine)
    return FullySharded(mesh.data, options, copy_engine)
