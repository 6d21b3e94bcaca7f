"""Copies of each rank's training state in the memory of its node and of a peer on another node.

They outlive the processes that made them (`phalanx.node_memory`): ranks that begin again in the same layout take up each its
own copy, and those of a node that was replaced are sent theirs by the peers. A copy is a checkpoint of one rank, so it is
whole or absent and every byte of it is verified when it is read. Storage remains what a run resumes from where copies of
some rank are gone.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import re
import shutil
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor

from phalanx.checkpoint import folders
from phalanx.checkpoint.folders import Checkpoint
from phalanx.checkpoint.manifest import step_name
from phalanx.checkpoint.rank_group import RankGroup, as_checkpoint_error
from phalanx.checkpoint.reader import CheckpointReader, read_state, verify_checkpoint
from phalanx.checkpoint.saver import Save, SaveHandle, Saver
from phalanx.checkpoint.shard_plan import SavedTensors
from phalanx.errors import CheckpointDamaged, CheckpointError
from phalanx.layout.place import as_place

MESSAGE_BYTES = 1 << 28
"""Bytes of one message between peers."""
MAX_HEADER_BYTES = 1 << 20
_RANK_FOLDER = re.compile(r"rank-([0-9]{5})")
_FILE_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,199}")

logger = logging.getLogger(__name__)


class CopyState(BaseModel):
    """Holds what state.json of a copy says."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    rank: Annotated[int, Field(ge=0)]
    world_size: Annotated[int, Field(ge=1)]
    places: str
    """Hash of which parts of which tensors this rank holds."""
    stored: Annotated[int, Field(ge=0)]
    """Step of the newest checkpoint on storage by then, or 0: without it the run was begun from somewhere else."""
    state: dict[str, Any]
    """JSON values of this rank; a checkpoint on storage has those of the first rank."""


@dataclass(frozen=True)
class Candidate:
    """A step of which every rank's copy lies on some node."""

    step: int
    moves: tuple[tuple[int, int], ...]
    """Rank that sends a copy, and rank that it is of, whose node has none."""


@dataclass(frozen=True)
class LoadedCopy:
    """The copy that this rank has loaded."""

    checkpoint: Checkpoint
    state: dict[str, Any]
    sent: tuple[int, ...]
    """Ranks whose copies came from a peer."""


class MemoryCopies:
    """Copies of the state of all ranks, each in the memory of its own node and of another.

    folder: `node_memory_folder` of the run on this node. timeout_s: seconds that one rank waits for another. warn: called on
    rank 0 with one line of text, perhaps from the thread that writes. Every method is called by all ranks, in one order.
    """

    def __init__(
        self, folder: Path, *, timeout_s: float = 1800.0, warn: Callable[[str], None] = logger.warning
    ) -> None:
        self._folder = folder
        self._warn = warn
        self._ranks = RankGroup.own(timeout_s)
        # By folder as well: ranks of one host may be told to keep apart.
        nodes = self._ranks.all_gather(f"{platform.node()}:{folder}")
        peers = choose_peers(nodes)
        self.peer: int | None = peers[self._ranks.rank]
        """The rank on another node that keeps a copy of this one's state; None where there is one node alone."""
        self._wards = [rank for rank, peer in enumerate(peers) if peer == self._ranks.rank]
        """Ranks whose copies this one keeps."""
        here = [rank for rank, node in enumerate(nodes) if node == nodes[self._ranks.rank]]
        self._clears_up = here[0] == self._ranks.rank
        """Whether this rank removes what nobody on its node needs any more."""
        self._on_node = {*here, *(rank for rank, peer in enumerate(peers) if peer in here)}
        """Ranks whose copies are kept on this node."""
        self._saver = Saver(_rank_folder(folder, self._ranks.rank), RankGroup(None))
        # One thread: copies end in the order they began in.
        self._thread = ThreadPoolExecutor(1, "memory-copies")
        self._running: SaveHandle | None = None

    def save(self, step: int, tensors: SavedTensors, state: dict[str, Any], *, stored: int) -> float:
        """Copy the state after `step` to host memory, and from there in the background to this node's and the peer's.

        state: JSON values of this rank. stored: step of the newest checkpoint on storage, or 0. Of a copy that cannot be
        made a warning tells; those before stay. Returns the seconds that the caller was kept. Raises CheckpointError, on all
        ranks, for what cannot be saved.
        """
        start = time.perf_counter()
        self.wait()
        kept = CopyState(
            rank=self._ranks.rank, world_size=self._ranks.size, places=hash_places(tensors), stored=stored, state=state
        )
        error: Exception | None = None
        save: Save | None = None
        try:
            save = self._saver.prepare(step, _local_parts(tensors), kept.model_dump())
            self._saver.stage(save)
        except CheckpointError as failure:
            error = failure
        self._ranks.agree(error)
        assert save is not None
        self._running = save.handle
        self._thread.submit(self._complete, save)
        return time.perf_counter() - start

    def wait(self) -> None:
        """Return when no copy is being made."""
        if self._running is not None:
            self._running.join()
            self._running = None

    def close(self) -> None:
        """Wait for a copy that is being made, and end the thread."""
        self.wait()
        self._thread.shutdown()
        # Where all copies are forgotten nothing is to stay; otherwise they do.
        with suppress(OSError):
            self._folder.rmdir()

    def forget(self) -> None:
        """Drop all copies: the run ends, or goes on from somewhere else."""
        self.wait()
        if self._clears_up:
            for child in self._folder.iterdir():
                shutil.rmtree(child, ignore_errors=True)
        # Nobody makes a new one before the old ones are gone.
        self._ranks.agree(None)

    def load_newest(
        self,
        tensors: SavedTensors,
        *,
        stored: int,
        optional: str | None = None,
        check: Callable[[Checkpoint, dict[str, Any]], None],
    ) -> LoadedCopy | None:
        """Fill `tensors` from the newest copies that every rank's state is there of; None where there are none of use.

        Those count that are newer than `stored`, the step of the newest checkpoint on storage, or 0, and were made in this
        layout by a run that had begun from no later checkpoint. check: called with this rank's copy and its state, before
        anything is filled; raises CheckpointDamaged for one that is not to be used. `tensors` are filled on all ranks or on
        none. optional: see `CheckpointReader.load`.
        """
        for candidate in self._find_candidates(stored):
            try:
                loaded = self._fetch_verified(candidate, tensors, stored, check)
            except CheckpointError as error:
                if self._ranks.first:
                    self._warn(f"copies of step {candidate.step} in memory are of no use: {error}")
                continue
            self._fill(tensors, loaded.checkpoint, optional)
            return loaded
        return None

    def _fill(self, tensors: SavedTensors, copy: Checkpoint, optional: str | None) -> None:
        """Fill `tensors` from this rank's copy, which is verified. Raises CheckpointError, on all ranks alike."""
        error: Exception | None = None
        try:
            reader = CheckpointReader(copy.path.parent, RankGroup(None), self._warn)
            reader.load(copy, _local_parts(tensors), optional=optional)
        except CheckpointError as failure:
            error = failure
        self._ranks.agree(error)

    def _find_candidates(self, stored: int) -> list[Candidate]:
        """Return the steps after `stored` of which the copies of all ranks are there, newest first.

        Of its own copies a rank counts those alone of which every byte is as it was written: a peer may have a good one.
        """
        held, damages = _list_copies(self._folder), []
        for one in folders.list_published(_rank_folder(self._folder, self._ranks.rank)):
            try:
                if one.step > stored:
                    verify_checkpoint(one.path)
            except CheckpointDamaged as damage:
                held.discard((self._ranks.rank, one.step))
                damages.append(f"a copy in memory is damaged: {damage}")
        found = self._ranks.gather((held, damages))
        for text in (text for _, texts in found for text in texts):
            self._warn(text)
        return self._ranks.from_first(lambda: match_copies([held for held, _ in found], stored))

    def _fetch_verified(
        self,
        candidate: Candidate,
        tensors: SavedTensors,
        stored: int,
        check: Callable[[Checkpoint, dict[str, Any]], None],
    ) -> LoadedCopy:
        """Return this rank's copy, sent by a peer if need be, once all ranks' are verified. Raises CheckpointError."""
        rank, step = self._ranks.rank, candidate.step
        outgoing = [(to, _copy_folder(self._folder, to, step)) for source, to in candidate.moves if source == rank]
        incoming = [(source, _copy_folder(self._folder, to, step)) for source, to in candidate.moves if to == rank]
        self._transfer(outgoing, incoming)
        mine = Checkpoint(step, _copy_folder(self._folder, rank, step))
        error: Exception | None = None
        state: dict[str, Any] = {}
        try:
            if incoming:
                verify_checkpoint(mine.path)
            state = self._read_state(mine, tensors, stored)
            check(mine, state)
        except CheckpointError as failure:
            error = failure
        self._ranks.agree(error)
        return LoadedCopy(mine, state, tuple(to for _, to in candidate.moves))

    def _read_state(self, copy: Checkpoint, tensors: SavedTensors, stored: int) -> dict[str, Any]:
        """Return the state of a copy. Raises CheckpointError for one that is not to be used."""
        try:
            kept = CopyState.model_validate(read_state(copy.path))
        except ValidationError as error:
            raise CheckpointDamaged(f"{copy.path}/state.json is not that of a copy") from error
        if (kept.rank, kept.world_size) != (self._ranks.rank, self._ranks.size) or kept.places != hash_places(tensors):
            raise CheckpointError("they were made in another layout or by another model")
        if kept.stored > stored:
            raise CheckpointError(f"they go back to the checkpoint of step {kept.stored}, which is not there any more")
        return kept.state

    def _complete(self, save: Save) -> None:
        """Write this rank's copy, exchange copies with the peers, and drop older ones once all ranks have the new one."""
        step, rank = save.handle.step, self._ranks.rank
        error: CheckpointError | None = self._saver.complete(save)
        try:
            self._ranks.agree(error)
            outgoing = [] if self.peer is None else [(self.peer, _copy_folder(self._folder, rank, step))]
            self._transfer(outgoing, [(ward, _copy_folder(self._folder, ward, step)) for ward in self._wards])
            # Only now: until every rank has the new copy, the one before is the newest that all have.
            for kept in (rank, *self._wards):
                listed = folders.list_published(_rank_folder(self._folder, kept))
                folders.delete_checkpoints([one for one in listed if one.step != step])
            if self._clears_up:
                self._remove_strangers()
        except (CheckpointError, OSError) as failure:
            error = as_checkpoint_error(failure)
            if self._ranks.first:
                self._warn(f"copy of step {step} in memory was not made: {error}")
        finally:
            save.handle.finish(error)

    def _transfer(self, outgoing: Sequence[tuple[int, Path]], incoming: Sequence[tuple[int, Path]]) -> None:
        """Send copies to ranks and take others from ranks. Raises CheckpointError, on all ranks alike.

        outgoing: rank and the folder to send to it. incoming: rank and where the folder that it sends is to be.
        """
        error: Exception | None = None
        received: list[tuple[int, Path, list[Tensor]]] = []
        try:
            sent = [(rank, _map_files(folder)) for rank, folder in outgoing]
        except OSError as failure:
            error = failure
        self._ranks.agree(error)
        headers = [(rank, _encode([(path.name, x.numel()) for path, x in files])) for rank, files in sent]
        lengths = [(rank, torch.tensor([header.numel()])) for rank, header in headers]
        sending = [self._ranks.send(x, rank) for pair in zip(lengths, headers, strict=True) for rank, x in pair]
        for rank, folder in incoming:
            length = torch.zeros(1, dtype=torch.int64)
            self._ranks.receive(length, rank)
            header = torch.empty(min(int(length), MAX_HEADER_BYTES), dtype=torch.uint8)
            self._ranks.receive(header, rank)
            try:
                received.append((rank, folder, _make_files(folder, header)))
            except (OSError, ValueError) as failure:
                error = failure
        for work in sending:
            work()
        # Before the bytes themselves: a rank without room for them would leave its peer waiting.
        self._ranks.agree(error)
        # All of a rank's messages come in the order in which they were sent.
        sending = [
            self._ranks.send(part, rank) for rank, files in sent for _, x in files for part in x.split(MESSAGE_BYTES)
        ]
        for rank, folder, memories in received:
            for memory in memories:
                for part in memory.split(MESSAGE_BYTES):
                    self._ranks.receive(part, rank)
            folder.with_name(folder.name + folders.WRITING).rename(folder)
        for work in sending:
            work()
        self._ranks.agree(None)

    def _remove_strangers(self) -> None:
        """Remove copies of ranks that this node kept when ranks were on other nodes than now."""
        for child in self._folder.iterdir():
            match = _RANK_FOLDER.fullmatch(child.name)
            if match is None or int(match[1]) not in self._on_node:
                shutil.rmtree(child, ignore_errors=True)


def choose_peers(nodes: Sequence[str]) -> list[int | None]:
    """Return, for each rank, the rank on the next node that keeps its copies; None where all ranks share one node.

    nodes: name of each rank's node.
    """
    members: dict[str, list[int]] = {}
    for rank, node in enumerate(nodes):
        members.setdefault(node, []).append(rank)
    groups = list(members.values())
    peers: list[int | None] = [None] * len(nodes)
    if len(groups) > 1:
        for group, others in zip(groups, groups[1:] + groups[:1], strict=True):
            for position, rank in enumerate(group):
                peers[rank] = others[position % len(others)]
    return peers


def match_copies(holdings: Sequence[set[tuple[int, int]]], stored: int) -> list[Candidate]:
    """Return the steps after `stored` of which some node has each rank's copy, newest first, and who sends which.

    holdings: rank and step of the copies on each rank's node.
    """
    steps = {step for held in holdings for _, step in held if step > stored}
    found = []
    for step in sorted(steps, reverse=True):
        holders = [next((at for at, held in enumerate(holdings) if (rank, step) in held), None)
                   for rank in range(len(holdings))]  # fmt: skip
        missing = [rank for rank, held in enumerate(holdings) if (rank, step) not in held]
        moves = [(source, rank) for rank in missing if (source := holders[rank]) is not None]
        if None not in holders:
            found.append(Candidate(step, tuple(moves)))
    return found


def hash_places(tensors: SavedTensors) -> str:
    """Return a hash of which parts of which tensors a rank holds: copies are of use in the very same layout alone."""
    places = {name: as_place(tensor) for name, tensor in tensors.items()}
    said = [(name, list(p.offsets), list(p.local.shape), list(p.shape)) for name, p in sorted(places.items())]
    return hashlib.sha256(json.dumps(said).encode()).hexdigest()


def _local_parts(tensors: SavedTensors) -> dict[str, Tensor]:
    return {name: as_place(tensor).local.detach() for name, tensor in tensors.items()}


def _rank_folder(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank:05d}"


def _copy_folder(folder: Path, rank: int, step: int) -> Path:
    return _rank_folder(folder, rank) / step_name(step)


def _list_copies(folder: Path) -> set[tuple[int, int]]:
    """Return rank and step of every copy on this node."""
    named = [(child, match) for child in folder.iterdir() if (match := _RANK_FOLDER.fullmatch(child.name))]
    return {(int(match[1]), one.step) for child, match in named for one in folders.list_published(child)}


def _map_files(folder: Path) -> list[tuple[Path, Tensor]]:
    """Return the files of a copy and their bytes, uint8 [bytes], which are not copied."""
    files = sorted(folder.iterdir())
    return [
        (file, torch.from_file(str(file), shared=False, size=file.stat().st_size, dtype=torch.uint8)) for file in files
    ]


def _encode(files: list[tuple[str, int]]) -> Tensor:
    return torch.frombuffer(bytearray(json.dumps(files).encode()), dtype=torch.uint8)


def _make_files(folder: Path, header: Tensor) -> list[Tensor]:
    """Make the files that `header` names beside `folder`; return their memory, to be filled. Raises OSError without room."""
    writing = folder.with_name(folder.name + folders.WRITING)
    for stale in (writing, folder):
        if stale.exists():
            shutil.rmtree(stale)
    writing.mkdir(parents=True)
    memories = []
    for name, size in json.loads(bytes(header.numpy())):
        if not _FILE_NAME.fullmatch(name):
            raise ValueError(f"a peer sent a file called {name!r}")
        with (writing / name).open("xb") as file:
            # Memory that is not there must be an error here; written through a map it would end the process.
            os.posix_fallocate(file.fileno(), 0, size)
        memories.append(torch.from_file(str(writing / name), shared=True, size=size, dtype=torch.uint8))
    return memories
