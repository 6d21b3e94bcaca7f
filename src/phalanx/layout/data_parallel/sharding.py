"""The one interface of data parallelism: how a rank gets the parameters it computes with, and who reduces their gradients.

`layout.apply` and `layout.execute` know this interface alone. Behind it are

    WholeParameters      one data-parallel rank: nothing to gather or reduce (here)
    FullySharded         FSDP2, its exchanges made by collectives or by copy engines (`fully_sharded`)
    StreamedSharding     FSDP2, but the matrices of blocks travel round a ring of ranks (`layout.streamed_weights`)
"""

from __future__ import annotations

from torch import nn

from phalanx.layout.mesh import Axis
from phalanx.layout.place import TensorSplits
from phalanx.layout.stage import Stage
from phalanx.layout.tensor_parallel.split_layers import split_tensors
from phalanx.nn.splits import Splits


class WholeParameters:
    """Parameters of a rank that shares its data with nobody. Other kinds of sharding derive from this one."""

    def split_parameters(self, model: nn.Module, splits: Splits, tp: Axis) -> TensorSplits:
        """Cut the parameters of `model`, still on meta, down to this rank's over `tp`, before FSDP2 sees them.

        Returns which part of which parameter this rank keeps.
        """
        return split_tensors(model, splits, tp)

    def shard_stage(self, stage: Stage) -> None:
        """Shard the parameters of `stage` over the data-parallel ranks, in place; `stage` is on meta still."""

    def prepare_microbatch(self, stage: nn.Module, *, last: bool) -> None:
        """Say what `stage` communicates in the next micro-batch; `last`: of this optimizer step."""

    def finish_gradients(self) -> None:
        """Complete the gradients of a step after its last micro-batch."""

    def publish_parameters(self) -> None:
        """Let what is gathered from now on be the present parameters; to be called whenever they have changed."""

    @property
    def buffer_bytes(self) -> int:
        """Bytes of buffers for exchanges on this rank that are not the allocator's."""
        return 0
