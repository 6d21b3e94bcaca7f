"""A layout made concrete: every degree a number, every `auto` decided, and the batch arithmetic that follows.

`layout.resolve` makes one from a run file and a number of ranks; `layout.legality` says whether it can be.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any

DEGREES = ("dp_replicate", "dp_shard", "cp", "tp", "pp")
"""Names of the degrees, as fields of the run file."""
SINGLE_STAGE = ("gpipe", "1f1b")
"""Schedules with one stage on each rank."""
ZERO_BUBBLE = ("interleaved_zero_bubble", "zbv")
"""Schedules that compute the gradients of inputs and of weights apart."""


@dataclass(frozen=True)
class ResolvedLayout:
    """Degrees whose product is the world size, the choices that go with them, and the batch arithmetic that follows."""

    global_batch: int
    """Samples an optimizer step over all ranks."""
    microbatch: int = 1
    """Samples one rank computes at a time."""
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    pp: int = 1
    zero: int = 3
    schedule: str = "1f1b"
    stages_per_rank: int = 1
    context: str = "ring"
    """How attention joins positions over `cp`; of no meaning where `cp` is 1 or ranks share out atoms."""
    cuts_structures: bool = False
    """Whether ranks of `cp` share out the atoms of structures; follows from the model's family."""
    reshard_after_forward: bool = False
    gather: str = "layer"
    branch_groups: tuple[int, ...] = ()
    """Data-parallel ranks of each branch (`families.materials.data.balance.BranchGroups.sizes`); empty: all
    branches on all."""

    @property
    def world_size(self) -> int:
        """Ranks in all."""
        return math.prod(getattr(self, name) for name in DEGREES)

    @property
    def data_ranks(self) -> int:
        """Groups of ranks that read different samples."""
        return self.dp_replicate * self.dp_shard

    @property
    def samples_per_rank(self) -> int:
        """Samples one rank takes part in an optimizer step."""
        return self.global_batch // self.data_ranks

    @property
    def accumulation(self) -> int:
        """Micro-batches a rank computes an optimizer step."""
        return self.samples_per_rank // self.microbatch

    @property
    def n_stages(self) -> int:
        """Pipeline stages in all."""
        return self.pp * self.stages_per_rank

    @property
    def splits_backward(self) -> bool:
        """Whether the backward pass runs twice: for the gradients of activations, and later for those of parameters."""
        return self.pp > 1 and self.schedule in ZERO_BUBBLE

    @property
    def shards(self) -> int:
        """Ranks that share one copy of what `zero` shares out: gradients of context-parallel ranks are summed anyway."""
        return self.dp_shard * self.cp if self.zero else 1

    def __str__(self) -> str:
        """Everything that is not at its plain value, as it would be written on the command line."""
        words = [f"{name}={_written(value)}" for name, value in self._chosen()]
        return " ".join(words) or "one rank"

    def in_words(self, recompute: str = "none", gather_blocks: int = 1) -> str:
        """Return the layout in one line with its micro-batches and, where they are not plain, the choices that a run file
        makes beside it."""
        words = [str(self), f"microbatch={self.microbatch} x {self.accumulation}"]
        if recompute != "none":
            words.append(f"recompute={recompute}")
        if gather_blocks != 1:
            words.append(f"gather_blocks={gather_blocks}")
        return " ".join(words)

    def overrides(self) -> list[str]:
        """The command-line words that lead from any run file to this layout (batch left as it is)."""
        return [f"layout.{name}={_written(value).lower()}" for name, value in self._chosen(everything=True)]

    def _chosen(self, *, everything: bool = False) -> list[tuple[str, Any]]:
        plain = {field.name: field.default for field in fields(self)}
        chosen = [(name, getattr(self, name)) for name in DEGREES]
        sharded = self.dp_shard * self.cp > 1
        if everything or (sharded and self.zero != 3) or (self.zero == 0 and self.dp_replicate > 1):
            chosen.append(("zero", self.zero))
        if everything or (sharded and self.zero == 3):
            chosen.append(("reshard_after_forward", self.reshard_after_forward))
        if everything or self.gather != "layer":
            chosen.append(("gather", self.gather))
        if everything or self.branch_groups:
            chosen.append(("branch_groups", self.branch_groups))
        if everything or self.pp > 1:
            chosen += [("schedule", self.schedule), ("stages_per_rank", self.stages_per_rank)]
        if not self.cuts_structures and (everything or self.cp > 1):
            chosen.append(("context", self.context))
        if not everything:
            chosen = [(name, value) for name, value in chosen if name not in DEGREES or value != plain[name]]
        return chosen


def _written(value: Any) -> str:
    """As in a run file; sizes without spaces, so that they are one word on a command line."""
    if isinstance(value, tuple):
        return f"[{','.join(map(str, value))}]" if value else "off"
    return str(value)
