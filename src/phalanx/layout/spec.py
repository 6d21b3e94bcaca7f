"""Layouts made concrete: every degree a number, every `auto` decided. One is a row, many are a table of arrays.

What follows from a layout's fields (ranks, micro-batches, shards) is computed by `LayoutTable` alone; a row asks its own
table. `layout.resolve` makes a row from a run file and a number of ranks, `layout.legality` says which rows can be used.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from phalanx.config.schema import Layout

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
Recompute = Literal["none", "selective", "full"]

DEGREES = ("dp_replicate", "dp_shard", "cp", "tp", "pp")
"""Names of the degrees, as fields of the run file; their product is the number of ranks."""
MESH_ORDER = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
"""The same from outermost to innermost: neighbouring ranks share the axes that talk most."""
DATA_AXES = ("dp_replicate", "dp_shard")
"""Axes whose ranks read different samples."""
SHARDING_AXES = ("dp_shard", "cp")
"""Axes over which ZeRO shards: ranks of `cp` hold the same parameters as well, and sum their gradients anyway."""
GRADIENT_AXES = (*DATA_AXES, "cp")
"""Axes over which the gradients of every parameter are summed, as shards or as replicas."""
EXPERT_AXES = ("dp_shard", "cp", "tp")
"""Innermost axes, whose ranks all have other tokens: the experts of a mixture are sharded over `ep` neighbours."""
OFFLOADS = ("offload_optimizer", "offload_activations")
"""Fields that put something into host memory."""
ONE_RANK_FIELDS: dict[str, int | str] = {
    **dict.fromkeys(DEGREES, 1),
    "ep": 1,
    "expert_tp": 1,
    "zero": 3,
    "reshard_after_forward": "auto",
    "schedule": "1f1b",
    "stages_per_rank": "auto",
    "context": "auto",
    "branch_groups": "off",
    **dict.fromkeys(OFFLOADS, False),
}
"""Fields of `layout` in a run file that make any run one on a single rank; no result depends on them."""
SCHEDULES = ("gpipe", "1f1b", "interleaved_1f1b", "interleaved_zero_bubble", "zbv")
SINGLE_STAGE = ("gpipe", "1f1b")
"""Schedules with one stage on each rank."""
ZERO_BUBBLE = ("interleaved_zero_bubble", "zbv")
"""Schedules that compute the gradients of inputs and of weights apart."""
CONTEXTS = ("ring", "all_to_all")
GATHERS = ("layer", "stream")
RECOMPUTES: tuple[Recompute, ...] = ("none", "selective", "full")
NAMED: dict[str, tuple[str, ...]] = {
    "schedule": SCHEDULES,
    "context": CONTEXTS,
    "gather": GATHERS,
    "recompute": RECOMPUTES,
}
"""Fields whose values are names. Tables hold positions in these tuples."""
_BOOLEAN = ("cuts_structures", "reshard_after_forward", *OFFLOADS)


@dataclass(frozen=True)
class ResolvedLayout:
    """One layout: degrees whose product is the world size, the choices that go with them, and what follows from both."""

    global_batch: int
    """Samples per optimizer step over all ranks."""
    microbatch: int = 1
    """Samples that one rank computes at a time."""
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    pp: int = 1
    ep: int = 1
    """Ranks of EXPERT_AXES over which the experts of a mixture are sharded; no factor of the world size."""
    expert_tp: int = 1
    """Ranks of EXPERT_AXES over which each expert is sharded; neighbours, and no factor of the world size either."""
    ep_chunks: int = 1
    """Parts of a micro-batch's tokens that travel to their experts one after the other; has no effect where `ep` is 1."""
    ep_node: int = 1
    """Ranks of a node among those that exchange rows for experts, where these go to the node first; else 1."""
    zero: int = 3
    schedule: str = "1f1b"
    """Pipeline schedule; has no effect where `pp` is 1."""
    stages_per_rank: int = 1
    context: str = "ring"
    """How attention joins positions over `cp`; has no effect where `cp` is 1 or `cuts_structures`."""
    cuts_structures: bool = False
    """Whether ranks of `cp` share the atoms of structures (graph parallelism); follows from the model's family."""
    reshard_after_forward: bool = False
    gather: str = "layer"
    branch_groups: tuple[int, ...] = ()
    """Data-parallel ranks of each task head (`layout.data_parallel.task_heads.BranchGroups.sizes`); empty where every rank
    holds all heads."""
    recompute: Recompute = "none"
    offload_optimizer: bool = False
    """Whether optimizer state lies in host memory between updates."""
    offload_activations: bool = False
    """Whether activations of blocks lie in host memory from their forward to their backward pass."""

    @cached_property
    def table(self) -> LayoutTable:
        """The table of this one layout."""
        return LayoutTable.from_rows([self])

    @property
    def world_size(self) -> int:
        """Ranks in all."""
        return int(self.table.world_size[0])

    @property
    def data_ranks(self) -> int:
        """Groups of ranks that read different samples."""
        return int(self.table.data_ranks[0])

    @property
    def samples_per_rank(self) -> int:
        """Samples per optimizer step that one rank takes part in."""
        return int(self.table.samples_per_rank[0])

    @property
    def accumulation(self) -> int:
        """Micro-batches per optimizer step of a rank."""
        return int(self.table.accumulation[0])

    @property
    def n_stages(self) -> int:
        """Pipeline stages in all."""
        return int(self.table.n_stages[0])

    @property
    def splits_backward(self) -> bool:
        """Whether input and weight gradients are computed in two separate backward passes."""
        return bool(self.table.splits_backward[0])

    @property
    def shards(self) -> int:
        """Ranks that share one copy of what `zero` shards."""
        return int(self.table.shards[0])

    def __str__(self) -> str:
        """Return every field that is not at its plain value, as it would be written on the command line."""
        words = [f"{name}={_write_value(value)}" for name, value in self._chosen()]
        return " ".join(words) or "one rank"

    def in_words(self, stated: Layout) -> str:
        """Return the layout in one line with its micro-batches and, where these are not plain, its recompute and the blocks
        that are gathered together.

        stated: what the run file says; a micro-batch that it leaves to Phalanx is marked as such.
        """
        words = [str(self), f"microbatch={self.microbatch} x {self.accumulation}"]
        if stated.microbatch == "auto":
            words.append("(auto)")
        if self.recompute != "none":
            words.append(f"recompute={self.recompute}")
        if stated.gather_blocks != 1:
            words.append(f"gather_blocks={stated.gather_blocks}")
        return " ".join(words)

    def overrides(self) -> list[str]:
        """Return the command-line words that lead from any run file to this layout (batch left as it is)."""
        return [f"layout.{name}={_write_value(value).lower()}" for name, value in self._chosen(everything=True)]

    def _chosen(self, *, everything: bool = False) -> list[tuple[str, Any]]:
        """Return fields and values that tell this layout: those that matter in it, or all."""
        # People are told what differs from a plain layout; a command line needs every field.
        plain = {field.name: field.default for field in fields(self)}
        chosen = [(name, getattr(self, name)) for name in DEGREES]
        if everything or self.ep > 1:
            chosen.append(("ep", self.ep))
        if everything or self.expert_tp > 1:
            chosen.append(("expert_tp", self.expert_tp))
        if everything or (self.ep > 1 and self.ep_chunks > 1):
            chosen.append(("ep_chunks", self.ep_chunks))
        if everything or self.ep_node > 1:
            chosen.append(("ep_node", self.ep_node))
        # Where ranks share nothing all levels of ZeRO are one program; 0 is another one wherever gradients are reduced.
        sharded = self.dp_shard * self.cp > 1
        if everything or (sharded and self.zero != 3) or (self.zero == 0 and self.dp_replicate > 1):
            chosen.append(("zero", self.zero))
        if everything or (sharded and self.zero == 3):
            chosen.append(("reshard_after_forward", self.reshard_after_forward))
        if everything or self.gather != "layer":
            chosen.append(("gather", self.gather))
        chosen += [(name, getattr(self, name)) for name in OFFLOADS if everything or getattr(self, name)]
        if everything or self.branch_groups:
            chosen.append(("branch_groups", self.branch_groups))
        if everything or self.pp > 1:
            chosen += [("schedule", self.schedule), ("stages_per_rank", self.stages_per_rank)]
        if not self.cuts_structures and (everything or self.cp > 1):
            chosen.append(("context", self.context))
        if everything:
            return [*chosen, ("recompute", self.recompute)]
        return [(name, value) for name, value in chosen if name not in DEGREES or value != plain[name]]


def _write_value(value: Any) -> str:
    """Write a value as in a run file; sizes without spaces, so that they are one word on a command line."""
    if isinstance(value, tuple):
        return f"[{','.join(map(str, value))}]" if value else "off"
    return str(value)


@dataclass(frozen=True, eq=False, kw_only=True)
class LayoutTable:
    """Many layouts: every field of `ResolvedLayout` as an array of [layouts], and what follows from the fields."""

    global_batch: Ints
    microbatch: Ints
    dp_replicate: Ints
    dp_shard: Ints
    cp: Ints
    tp: Ints
    pp: Ints
    ep: Ints
    expert_tp: Ints
    ep_chunks: Ints
    ep_node: Ints
    zero: Ints
    schedule: Ints
    """Positions in SCHEDULES."""
    stages_per_rank: Ints
    context: Ints
    """Positions in CONTEXTS."""
    cuts_structures: Bools
    reshard_after_forward: Bools
    gather: Ints
    """Positions in GATHERS."""
    branch_groups: npt.NDArray[np.object_]
    """Tuples of whole numbers."""
    recompute: Ints
    """Positions in RECOMPUTES."""
    offload_optimizer: Bools
    offload_activations: Bools

    @classmethod
    def from_rows(cls, rows: Sequence[ResolvedLayout]) -> LayoutTable:
        """Return the table of these layouts, in their order."""
        return cls(**{f.name: encode_column(f.name, [getattr(row, f.name) for row in rows]) for f in fields(cls)})

    @classmethod
    def joined(cls, several: Sequence[LayoutTable]) -> LayoutTable:
        """Return the layouts of several tables, one after the other."""
        return cls(**{f.name: np.concatenate([getattr(table, f.name) for table in several]) for f in fields(cls)})

    def __len__(self) -> int:
        return len(self.tp)

    def row(self, index: int) -> ResolvedLayout:
        """Return one of the layouts."""
        values = {field.name: getattr(self, field.name)[index] for field in fields(self)}
        named = {name: names[values[name]] for name, names in NAMED.items()}
        plain = {name: value.item() for name, value in values.items() if name != "branch_groups"}
        return ResolvedLayout(**{**plain, **named, "branch_groups": values["branch_groups"]})

    def take(self, which: npt.ArrayLike) -> LayoutTable:
        """Return the layouts at these positions, or where this mask is true."""
        return LayoutTable(**{field.name: getattr(self, field.name)[which] for field in fields(self)})

    def vary(self, field: str, options: Sequence[Any], where: Bools | None = None) -> LayoutTable:
        """Return every layout with each value of a field, one after the other, in place of its own.

        options: values as in `ResolvedLayout`. where: layouts whose field varies; None is all. The others stay as they are.
        """
        varies = np.ones(len(self), np.bool_) if where is None else where
        copies = np.where(varies, len(options), 1)
        # Values of one layout follow each other, so that sorted tables stay sorted by the fields chosen before.
        source = np.repeat(np.arange(len(self)), copies)
        option = np.arange(len(source)) - np.repeat(np.cumsum(copies) - copies, copies)
        varied = self.take(source)
        column = encode_column(field, options)[np.where(varies[source], option, 0)]
        return replace(varied, **{field: np.where(varies[source], column, getattr(varied, field))})

    def has(self, field: str, *names: str) -> Bools:
        """Return where a named field is one of `names`."""
        return np.isin(getattr(self, field), [NAMED[field].index(name) for name in names])

    def ranks_along(self, axes: Sequence[str]) -> Ints:
        """Return the product of these degrees."""
        return np.asarray(np.multiply.reduce([getattr(self, name) for name in axes]))

    @cached_property
    def world_size(self) -> Ints:
        """Ranks in all."""
        return self.ranks_along(DEGREES)

    @cached_property
    def data_ranks(self) -> Ints:
        """Groups of ranks that read different samples."""
        return self.ranks_along(DATA_AXES)

    @cached_property
    def samples_per_rank(self) -> Ints:
        """Samples per optimizer step that one rank takes part in."""
        return self.global_batch // self.data_ranks

    @cached_property
    def accumulation(self) -> Ints:
        """Micro-batches per optimizer step of a rank."""
        return self.samples_per_rank // self.microbatch

    @cached_property
    def n_stages(self) -> Ints:
        """Pipeline stages in all."""
        return self.pp * self.stages_per_rank

    @cached_property
    def interleaves(self) -> Bools:
        """Where the schedule interleaves the stages of a rank."""
        return (self.pp > 1) & self.has("schedule", *(name for name in SCHEDULES if name.startswith("interleaved")))

    @cached_property
    def splits_backward(self) -> Bools:
        """Where input and weight gradients are computed in two separate backward passes."""
        return (self.pp > 1) & self.has("schedule", *ZERO_BUBBLE)

    @cached_property
    def overlaps_products(self) -> Bools:
        """Where parts of a sequence may travel over `tp` beside products, not before and behind them."""
        # What steps into single products of blocks leaves no operation that does both.
        apart = self.splits_backward | self.has("recompute", "selective") | (self.streamed > 1)
        return (self.tp > 1) & ~apart

    @cached_property
    def sharding_ranks(self) -> Ints:
        """Ranks over which ZeRO may shard."""
        return self.ranks_along(SHARDING_AXES)

    @cached_property
    def shards(self) -> Ints:
        """Ranks that share one copy of what `zero` shards."""
        return np.where(self.zero > 0, self.sharding_ranks, 1)

    @cached_property
    def replicas(self) -> Ints:
        """Ranks that hold the same shard."""
        return self.ranks_along(GRADIENT_AXES) // self.shards

    @property
    def group_sizes(self) -> tuple[Ints, ...]:
        """Ranks of each kind of process group, beside that of all ranks; 1 where there is no such group."""
        spread = self.ep > 1
        experts = (
            np.where(spread, ranks, 1) for ranks in (self.experts_over, self.expert_shards, self.expert_replicas)
        )
        return self.tp, self.cp, self.shards, self.replicas, self.pp, *experts

    @cached_property
    def expert_ranks(self) -> Ints:
        """Ranks of one pipeline stage and replica, all with other tokens: those that `ep` is a part of."""
        return self.dp_shard * self.cp * self.tp

    @cached_property
    def experts_over(self) -> Ints:
        """Ranks that hold one copy of all experts: they share these out, and each expert."""
        return self.ep * self.expert_tp

    @cached_property
    def expert_shards(self) -> Ints:
        """Ranks that share one copy of what `zero` shards of an expert."""
        return np.where(self.zero > 0, self.expert_ranks // self.experts_over, 1)

    @cached_property
    def expert_replicas(self) -> Ints:
        """Ranks that hold the same shard of the same experts."""
        return self.dp_replicate * self.expert_ranks // (self.experts_over * self.expert_shards)

    @cached_property
    def lone_experts(self) -> Bools:
        """Where no other rank has a rank's experts, though others share the rest: sharding leaves these as they are."""
        alone = (self.ep > 1) & (self.expert_shards * self.expert_replicas == 1)
        return np.asarray(alone & (self.data_ranks * self.cp > 1))

    @cached_property
    def streamed(self) -> Ints:
        """Ranks around which the chunks of streamed weights go; 1 where blocks are gathered whole."""
        return np.where(self.has("gather", "stream"), self.sharding_ranks, 1)

    @cached_property
    def gathers_each(self) -> Bools:
        """Where parameters are gathered for every micro-batch; a pipeline keeps those that no forward pass frees."""
        return np.asarray((self.zero == 3) & ((self.pp == 1) | self.reshard_after_forward))

    @cached_property
    def reduces_each(self) -> Bools:
        """Where gradients are reduced after every micro-batch; a pipeline adds them up, and reduces them once."""
        return np.asarray((self.zero >= 2) & (self.pp == 1))

    @cached_property
    def sums_in_products(self) -> Bools:
        """Where products may add gradients of weights to sums over micro-batches, there from the first pass of a step on.

        That takes no more memory where a forward pass follows the first backward pass. Other schedules have freed
        activations, or gradients of other stages, by the time that autograd would begin the sums.
        """
        again = (self.pp == 1) | (self.has("schedule", "1f1b") & (self.accumulation > self.pp))
        reduced = self.reduces_each & (self.data_ranks * self.cp > 1)
        return np.asarray((self.accumulation > 1) & again & ~reduced)


def encode_column(field: str, values: Sequence[Any]) -> npt.NDArray[Any]:
    """Return values of one field, written as in `ResolvedLayout`, as a column of a table."""
    if field in NAMED:
        return np.asarray([NAMED[field].index(value) for value in values], np.int64)
    if field == "branch_groups":
        # np.asarray would make a matrix of tuples of equal length.
        return np.fromiter(values, object, len(values))
    return np.asarray(values, np.bool_ if field in _BOOLEAN else np.int64)
