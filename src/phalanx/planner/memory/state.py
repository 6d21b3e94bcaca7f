"""Layouts as the memory model sees them: what decides what a rank holds, and how it exchanges what it shards.

What FSDP2 holds is read from its code (torch 2.11 to 2.13): a unit's parameters are gathered while the one before computes,
and the buffer that gradients were reduced from lives until the next unit's are. A unit is `layout.gather_blocks` blocks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from phalanx.planner.memory.parts import ModelBytes, PartBytes

Amount = Any
"""Bytes: a number or an array."""
Mask = npt.NDArray[np.bool_]
Allocations = dict[str, Amount]
"""Bytes by cause."""

CAUSES = (
    "master parameters",
    "working copy",
    "gradients",
    "optimizer moments",
    "activations",
    "gathered parameters",
    "gather buffers",
    "reduce buffers",
    "one part's pass",
    "whole matrices",
    "pipeline buffers",
    "samples",
)
"""What memory is held for. Gradients are those added up; those of the part that computes belong to its pass."""


@dataclass(frozen=True)
class MemoryState:
    """Everything of each layout that decides what its ranks hold. Arrays, but for the two widths."""

    sizes: ModelBytes
    width: int
    """Bytes of a parameter as it is computed with."""
    master: int
    """Bytes of a parameter as it is kept, of its gradient, and of each value that the optimizer keeps for it."""
    quantised_width: int
    """Bytes of a weight that is multiplied in 8 bits as ranks gather it."""
    copies: bool
    """Whether a rank that holds whole parameters computes with a copy of all of them; else with weights in 8 bits."""
    optimizer_values: Amount
    """Values that are kept on the device for each parameter: 2 for AdamW's moments, and those of an average."""
    matrix_values: Amount
    """The same for each element of a matrix."""
    moved_values: Amount
    """Values that an update has on the device beside these, for each parameter: those that come from host memory for it."""
    sharded: Mask
    """Whether FSDP2 has the parameters: more than one data- or context-parallel rank."""
    piped: Mask
    zero: Amount
    reshard: Mask
    """Whether gathered parameters go after the forward pass."""
    replicated: Mask
    """Whether other ranks hold the same shards."""
    lone_experts: Mask
    """Where experts have no shards: see `LayoutTable.lone_experts`."""
    accumulation: Amount
    """Backward passes of a step through the whole model."""
    tied: bool
    samples: Amount
    """Bytes of the inputs and targets of a step, and of what passes of a micro-batch hand to one another."""
    round_bytes: Amount
    """Of matrices that are whole for an update; 0 where the optimizer needs none."""
    peer_copies: bool = False
    """Whether what FSDP2 sends and receives lies beside the allocator's memory."""
    gather_blocks: int = 1
    """Blocks that are gathered and reduced together."""
    gathers_ahead: int = 1
    """Units that are gathered while one computes."""
    sends_last: bool = False
    """Whether the transport holds what was sent until it is waited for, as gloo does; NCCL and RCCL let go earlier."""

    def take(self, which: Any) -> MemoryState:
        """Those at these positions."""
        flags = ("sharded", "piped", "reshard", "replicated", "lone_experts")
        values_kept = ("optimizer_values", "matrix_values", "moved_values")
        arrays = (*flags, *values_kept, "zero", "accumulation", "samples", "round_bytes")
        values = {name: getattr(self, name)[which] for name in arrays}
        return replace(self, sizes=self.sizes.take(which), **values)


class Exchanges:
    """How each layout gathers parameters and reduces gradients, and in which buffers."""

    def __init__(self, s: MemoryState) -> None:
        self.s = s
        self.several = s.accumulation > 1
        self.early = s.sharded & (s.zero >= 2) & ~s.piped
        """Gradients are reduced after every micro-batch."""
        self.whole = s.sharded & ~self.early & (self.several | s.piped)
        """Gradients are added up before they are shared out."""
        self.dropped = s.sharded & s.reshard & (s.zero == 3)
        """Gathered parameters go after each block's forward pass."""
        self.sharded_many = s.sharded & (s.sizes.shards > 1)
        shared_out = s.sizes.shards > 1
        self.copied = shared_out & s.peer_copies
        """Shards exchange by peer copies: without buffers in the allocator's memory."""
        self.arriving = shared_out
        """Parameters that are being gathered take as much as gathered ones: in a buffer, with peer copies in their place."""
        self.received = shared_out & ~self.copied
        """Parameters stay in the buffer they arrived in, which goes when the next one has arrived."""
        self.spread = s.sizes.experts.gathered > 0
        """Experts are a unit of their own inside their block's."""
        self.experts_arrived = np.where(s.sizes.expert_shards > 1, s.width, 0)
        """Bytes of a parameter of experts in the buffer it arrived in; nobody asks for them before they compute."""
        self.sent = np.where(self.copied, np.where(self.whole, s.master, s.width), s.master)
        """Bytes of a parameter's gradient as it is sent, in a buffer or, with peer copies, from its place; until the next
        is."""

    def gathered_bytes(self, part: PartBytes) -> Amount:
        """Return the bytes of a part's parameters once they are gathered."""
        return self.s.width * part.gathered - (self.s.width - self.s.quantised_width) * part.quantised_gathered

    def published_bytes(self, part: PartBytes) -> Amount:
        """Return the bytes of a part's shards as they are gathered."""
        whole = self.s.width * (part.shard - part.streamed)
        return whole - (self.s.width - self.s.quantised_width) * part.quantised_shard

    def state_of(self, part: PartBytes) -> Allocations:
        """Bytes of parameters and optimizer state of a part, by cause."""
        s = self.s
        in_8_bits = s.quantised_width == 1
        # A rank with whole parameters casts all of them once a step, or only weights in 8 bits.
        alone = s.width * part.count if s.copies else in_8_bits * part.quantised
        return {
            "master parameters": self.s.master * part.shard,
            "working copy": np.where(s.sharded, in_8_bits * part.quantised_shard, alone),
            "optimizer moments": self.s.master
            * (self.s.optimizer_values * (part.trained_shard - part.matrices) + self.s.matrix_values * part.matrices),
        }

    def own_gradients(self, part: PartBytes) -> Amount:
        """Gradients of a part in the format they are computed in; 0 where they are added up until the last micro-batch."""
        return self.s.width * part.trained_count * ~self.whole

    def reducing(self, part: PartBytes) -> Amount:
        """What FSDP2 makes to reduce the gradients of a part, beside these themselves.

        The gradients go when all is in the buffer it is sent from, before there is room for the sum; with peer copies there
        is no such buffer.
        """
        master = self.s.master
        # A single shard is divided by the number of replicas into a copy.
        total = master * part.trained_shard + np.where(self.s.sizes.shards > 1, 0, master) * part.trained_gathered
        buffered = self.sent * part.trained_gathered + np.maximum(total - self.own_gradients(part), 0)
        return self.s.sharded * np.where(self.copied, total, buffered)

    def experts_reduced(self) -> tuple[Amount, Amount]:
        """What the reduction of a block's experts adds to what is held then, and what it leaves until the next one.

        As `reducing`, but by collectives alone; the experts' gradients are counted here, as they are in no other moment.
        """
        master, experts = self.s.master, self.s.sizes.experts
        shared_out = self.s.sizes.expert_shards > 1
        total = master * experts.trained_shard + np.where(shared_out, 0, master) * experts.trained_gathered
        buffered = master * experts.trained_gathered
        # FSDP2's loop over gradients holds on to the last one, that of `down`, until there is room for the sum.
        own = self.own_gradients(experts)
        now = buffered + np.maximum(total + own / 3, own)
        return self.spread * now, self.spread * (buffered + master * experts.trained_shard * ~self.whole)
