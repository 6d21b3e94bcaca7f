"""Comparison of parameters that several ranks hold alike, by an exact hash of their bits.

A flipped bit in one replica changes no loss that anybody would notice, and stays. Ranks therefore compare a hash of 8 bytes
for each parameter, along every axis of the layout that holds it more than once.
"""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.checkpoint import RankGroup
from phalanx.layout.apply import ParallelModel
from phalanx.layout.mesh import Axis
from phalanx.layout.place import as_place

CHUNK = 1 << 22
"""Elements hashed at once: bounds the memory of their 64-bit copies to 64 MiB."""
ODD = 0x9E3779B97F4A7C15 - 2**64
"""An odd factor with bits everywhere (Knuth, volume 3, section 6.4), as a signed number."""
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

Hashes = dict[str, int]
"""Hash of each parameter's local part by name."""


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors of one type and size hold the same bits; NaN equals itself, and 0 is not -0."""
    return torch.equal(one.detach().reshape(-1).view(torch.uint8), other.detach().reshape(-1).view(torch.uint8))


@torch.no_grad()
def hash_bits(x: Tensor) -> Tensor:
    """Return an int64 hash of the bits of `x`, 0-dim, on its device: exact, the same in any order of summation.

    Each element counts with an odd weight, modulo 2**64, so that a change of any one element changes the hash.
    """
    flat = x.detach().reshape(-1).view(_BITS[x.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=x.device)
    weights = (2 * torch.arange(min(len(flat), CHUNK), device=x.device) + 1) * ODD
    for chunk in flat.split(CHUNK):
        total = total * ODD + (chunk.long() * weights[: len(chunk)]).sum()
    return total


@dataclass(frozen=True)
class Disagreement:
    """Parameters whose replicas differ."""

    step: int
    groups: frozenset[tuple[str, tuple[int, ...]]]
    """Each parameter that differs, with the ranks that should hold it alike."""
    hashes: Mapping[int, Hashes]
    """Of all parameters, on every rank."""
    hosts: Mapping[int, str]

    @property
    def names(self) -> list[str]:
        """Names of the parameters that differ."""
        return sorted({name for name, _ in self.groups})

    @property
    def ranks(self) -> set[int]:
        """Ranks that hold one of them."""
        return {rank for _, ranks in self.groups for rank in ranks}

    def suspects(self) -> tuple[int, ...]:
        """Return the ranks that differ from the majority of a parameter's replicas; all of them where there is none."""
        found: set[int] = set()
        for name, ranks in self.groups:
            held = {rank: self.hashes[rank][name] for rank in ranks}
            (value, votes), *_ = Counter(held.values()).most_common(1)
            majority = 2 * votes > len(held)
            found |= {rank for rank, one in held.items() if not majority or one != value}
        return tuple(sorted(found))

    def wrong_against(self, right: Mapping[int, Hashes]) -> tuple[int, ...]:
        """Return the ranks whose hashes are others than `right`, those of the same step done again."""
        return tuple(sorted(rank for rank in self.ranks if self.hashes[rank] != right[rank]))

    def name_ranks(self, ranks: Iterable[int]) -> str:
        """Return ranks with their hosts, for a message."""
        return ", ".join(f"rank {rank} ({self.hosts[rank]})" for rank in ranks)


class ReplicaComparison:
    """Compares the parameters of `applied` that other ranks hold alike. Every rank calls it at the same steps."""

    def __init__(self, applied: ParallelModel) -> None:
        self._parameters = applied.parameters
        self._axes = [(axis, names) for axis, names in _copies(applied) if axis.size > 1 and names]

    def local_hashes(self) -> Hashes:
        """Return the hashes of this rank's parts."""
        parts = {name: as_place(parameter.detach()).local for name, parameter in self._parameters.items()}
        if not parts:
            return {}
        values = torch.stack([hash_bits(part) for part in parts.values()]).tolist()
        return dict(zip(parts, values, strict=True))

    def compare(self, step: int) -> Disagreement | None:
        """Return what differs after `step`, the same on all ranks; None where all replicas are alike."""
        hashes = self.local_hashes()
        differing = {(n, axis.ranks) for axis, names in self._axes for n in self._differing(axis, names, hashes)}
        ranks = RankGroup.default()
        if not ranks.any(torch.tensor([bool(differing)], dtype=torch.uint8, device=self._device())).item():
            return None
        gathered = ranks.gather((hashes, differing, socket.gethostname()))
        return ranks.from_first(lambda: _join_findings(step, gathered))

    def gather_hashes(self) -> dict[int, Hashes]:
        """Return every rank's hashes, on every rank: once, after a disagreement."""
        ranks = RankGroup.default()
        gathered = ranks.gather(self.local_hashes())
        return ranks.from_first(lambda: dict(enumerate(gathered)))

    def _differing(self, axis: Axis, names: Sequence[str], hashes: Hashes) -> list[str]:
        values = torch.tensor([hashes[name] for name in names], dtype=torch.int64, device=self._device())
        # The smallest is the complement of the largest complement: one reduction finds both.
        both = torch.stack((values, ~values))
        dist.all_reduce(both, op=dist.ReduceOp.MAX, group=axis.group)
        largest, complement = both
        unequal = (largest != ~complement).tolist()
        return [name for name, differs in zip(names, unequal, strict=True) if differs]

    def _device(self) -> torch.device:
        return next((parameter.device for parameter in self._parameters.values()), torch.device("cpu"))


def _copies(applied: ParallelModel) -> list[tuple[Axis, list[str]]]:
    """Return each axis along which parameters are held more than once, and the names of these."""
    mesh, names = applied.mesh, list(applied.parameters)
    plain = [name for name in names if name not in applied.experts and name not in applied.branch]
    return [
        (mesh.replicas, plain),
        (mesh.expert_replicas, [name for name in names if name in applied.experts]),
        (mesh.branch, [name for name in names if name in applied.branch]),
        (mesh.tp, [name for name in plain if name not in applied.splits]),
        (mesh.tie, [name for name in names if name in applied.tied]),
    ]


def _join_findings(step: int, gathered: Sequence[tuple[Hashes, set[tuple[str, tuple[int, ...]]], str]]) -> Disagreement:
    groups = frozenset(group for _, differing, _ in gathered for group in differing)
    hashes = {rank: found for rank, (found, _, _) in enumerate(gathered)}
    return Disagreement(step, groups, hashes, {rank: host for rank, (*_, host) in enumerate(gathered)})
