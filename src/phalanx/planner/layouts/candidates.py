"""Many layouts at once, as arrays: what enumeration makes, and what the memory and the time model judge.

Field by field the same as `layout.spec.ResolvedLayout`, with recompute beside it, since that decides memory and time too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from phalanx.layout.recompute import Recompute
from phalanx.layout.spec import ZERO_BUBBLE, ResolvedLayout

Ints = npt.NDArray[np.int64]

SCHEDULES = ("gpipe", "1f1b", "interleaved_1f1b", "interleaved_zero_bubble", "zbv")
ZERO_BUBBLE_SCHEDULES = [SCHEDULES.index(name) for name in ZERO_BUBBLE]
CONTEXTS = ("ring", "all_to_all")
GATHERS = ("layer", "stream")
RECOMPUTES: tuple[Recompute, ...] = ("none", "selective", "full")
_NAMED: dict[str, tuple[str, ...]] = {
    "schedule": SCHEDULES,
    "context": CONTEXTS,
    "recompute": RECOMPUTES,
    "gather": GATHERS,
}
"""Fields that arrays hold as positions in a list of names."""


@dataclass(frozen=True)
class Candidates:
    """Layouts; every field is an array with one entry for each of them."""

    global_batch: Ints
    """Samples an optimizer step over all ranks."""
    microbatch: Ints
    """Samples one rank computes at a time."""
    dp_replicate: Ints
    dp_shard: Ints
    cp: Ints
    tp: Ints
    pp: Ints
    zero: Ints
    schedule: Ints
    """Positions in SCHEDULES; of no meaning where `pp` is 1."""
    stages_per_rank: Ints
    context: Ints
    """Positions in CONTEXTS; of no meaning where `cp` is 1."""
    reshard_after_forward: npt.NDArray[np.bool_]
    recompute: Ints
    """Positions in RECOMPUTES."""
    gather: Ints
    """Positions in GATHERS."""

    @classmethod
    def of(cls, layouts: Sequence[ResolvedLayout], recompute: Sequence[Recompute]) -> Candidates:
        """These layouts, each with its choice of recompute."""
        assert len(layouts) == len(recompute)
        columns: dict[str, list[Any]] = {}
        for field in fields(cls):
            values = list(recompute) if field.name == "recompute" else [getattr(x, field.name) for x in layouts]
            names = _NAMED.get(field.name)
            columns[field.name] = values if names is None else [names.index(value) for value in values]
        return cls(
            **{
                name: np.asarray(values, bool if name == "reshard_after_forward" else np.int64)
                for name, values in columns.items()
            }
        )

    def __len__(self) -> int:
        return len(self.tp)

    def take(self, which: npt.ArrayLike) -> Candidates:
        """Those at these positions, or where this mask is true."""
        return Candidates(**{field.name: getattr(self, field.name)[which] for field in fields(self)})

    def layout(self, index: int) -> ResolvedLayout:
        """One of them."""
        values = {field.name: getattr(self, field.name)[index] for field in fields(self) if field.name != "recompute"}
        named = {name: _NAMED[name][value] for name, value in values.items() if name in _NAMED}
        return ResolvedLayout(**{name: value.item() for name, value in values.items()} | named)

    def recompute_of(self, index: int) -> Recompute:
        """Of one of them."""
        return RECOMPUTES[int(self.recompute[index])]

    @cached_property
    def world_size(self) -> Ints:
        """Ranks in all."""
        return self.data_ranks * self.cp * self.tp * self.pp

    @cached_property
    def data_ranks(self) -> Ints:
        """Groups of ranks that read different samples."""
        return self.dp_replicate * self.dp_shard

    @cached_property
    def accumulation(self) -> Ints:
        """Micro-batches a rank computes an optimizer step."""
        return self.global_batch // (self.data_ranks * self.microbatch)

    @cached_property
    def n_stages(self) -> Ints:
        """Pipeline stages in all."""
        return self.pp * self.stages_per_rank

    @cached_property
    def streamed(self) -> Ints:
        """Ranks around which the chunks of blocks go; 1 where blocks are gathered whole."""
        return np.where(self.gather == GATHERS.index("stream"), self.dp_shard * self.cp, 1)

    @cached_property
    def splits_backward(self) -> Ints:
        """1 where gradients of inputs and of weights come apart."""
        return ((self.pp > 1) & np.isin(self.schedule, ZERO_BUBBLE_SCHEDULES)).astype(np.int64)

    @cached_property
    def gathers_each(self) -> npt.NDArray[np.bool_]:
        """Whether parameters are gathered for every micro-batch; a pipeline keeps those that no forward pass frees."""
        return np.asarray((self.zero == 3) & ((self.pp == 1) | self.reshard_after_forward))

    @cached_property
    def reduces_each(self) -> npt.NDArray[np.bool_]:
        """Whether gradients are reduced after every micro-batch; a pipeline adds them up, and reduces them once."""
        return np.asarray((self.zero >= 2) & (self.pp == 1))

    @cached_property
    def shards(self) -> Ints:
        """Ranks that share one copy of what `zero` shares out."""
        return np.where(self.zero > 0, self.dp_shard * self.cp, 1)
