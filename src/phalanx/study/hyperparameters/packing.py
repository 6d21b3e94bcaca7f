"""Which trial runs on which device now: a pure function of what runs, what is ready, and what each is expected to cost.

Trials differ in cost by factors of a hundred. Several share a device, so that one computes while another starts; long ones
begin first, so that no device is left with a long one at the end. Idle devices are backfilled with trials that are likely to
be promoted, if these finish before the running ones; and a trial that shares its device moves to an idle one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

_WORTH_MOVING = 3.0
"""Starting times that a move must save."""


@dataclass(frozen=True)
class Device:
    """Something that trials compute on."""

    name: str
    slots: int = 1
    """Trials that may share it."""
    memory: float = float("inf")
    """Bytes for all trials on it."""


@dataclass(frozen=True)
class Ready:
    """A trial, or a further part of one, that may begin."""

    key: str
    seconds: float
    """Expected time on a device of its own."""
    memory: float = 0.0
    """Bytes that it is expected to need."""
    backfill: bool = False
    """Whether it is a backfill: worth an idle device alone, and only if it finishes before the running trials."""
    alone: bool = False
    """Whether it must have the device to itself: it ran out of memory beside others."""


@dataclass(frozen=True)
class Running:
    """A trial that runs."""

    key: str
    device: str
    seconds_left: float
    """Expected time until it ends, if things stay as they are."""
    memory: float = 0.0
    alone: bool = False
    movable: bool = True
    backfill: bool = False
    """Whether it was begun as a backfill: nothing waits for it."""


@dataclass(frozen=True)
class Start:
    """Begin a trial."""

    key: str
    device: str


@dataclass(frozen=True)
class Move:
    """Stop a trial, with a checkpoint, and resume it elsewhere."""

    key: str
    device: str


@dataclass(frozen=True)
class Packing:
    """How devices are used."""

    share: bool = True
    """Whether trials share devices, up to their slots."""
    long_first: bool = True
    """Whether long trials begin first; otherwise those that were ready first."""
    fill: bool = True
    """Whether idle devices are backfilled."""
    move: bool = True
    """Whether trials that share a device move to an idle one."""
    start_s: float = 10.0
    """Seconds from starting a trial's processes to its first step."""


PACKED = Packing()
UNPACKED = Packing(share=False, long_first=False, fill=False, move=False)
"""One trial a device, first come first served."""


@dataclass
class _Load:
    """A device and what runs there, decisions of this call included."""

    device: Device
    running: list[Running] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        return sum(one.seconds_left for one in self.running)

    def has_room(self, job: Ready, share: bool) -> bool:
        """Return whether a trial may begin here; an empty device takes any, since no other would have more memory."""
        if not self.running:
            return True
        if not share or job.alone or any(one.alone for one in self.running):
            return False
        used = sum(one.memory for one in self.running)
        return len(self.running) < self.device.slots and used + job.memory <= self.device.memory


def decide_actions(
    devices: Sequence[Device], running: Sequence[Running], ready: Sequence[Ready], packing: Packing
) -> list[Start | Move]:
    """Return what to do now, in order: each action assumes that those before it are done.

    It is a pure function: the same state gives the same actions.
    """
    loads = {device.name: _Load(device) for device in devices}
    for one in running:
        loads[one.device].running.append(one)
    actions: list[Start | Move] = []

    def start(job: Ready, load: _Load) -> None:
        left = packing.start_s + job.seconds
        load.running.append(Running(job.key, load.device.name, left, job.memory, job.alone, False, job.backfill))
        actions.append(Start(job.key, load.device.name))

    # First what must run anyway; idle devices are backfilled with what is left.
    regular = [job for job in ready if not job.backfill]
    if packing.long_first:
        regular.sort(key=lambda job: -job.seconds)
    for job in regular:
        with_room = [load for load in loads.values() if load.has_room(job, packing.share)]
        if with_room:
            start(job, min(with_room, key=lambda load: (load.seconds, len(load.running))))
    if packing.fill:
        waiting = [job for job in ready if job.backfill]
        # Backfills are no reason for further ones: the study would never end for them.
        regular_left = [one.seconds_left for load in loads.values() for one in load.running if not one.backfill]
        horizon = max(regular_left, default=0.0)
        for load in (load for load in loads.values() if not load.running):
            fitting = next((job for job in waiting if packing.start_s + job.seconds <= horizon), None)
            if fitting is None:
                break
            waiting.remove(fitting)
            start(fitting, load)
    # Last: a device that a ready trial can have needs no process restarted.
    if packing.move:
        for load in (load for load in loads.values() if not load.running):
            shared = [one for one in loads.values() if len(one.running) > 1]
            movable = [one for other in shared for one in other.running if one.movable]
            longest = max(movable, key=lambda one: one.seconds_left, default=None)
            if longest is None or longest.seconds_left < _WORTH_MOVING * packing.start_s:
                break
            loads[longest.device].running.remove(longest)
            moved = Running(longest.key, load.device.name, longest.seconds_left, longest.memory, movable=False)
            load.running.append(moved)
            actions.append(Move(longest.key, load.device.name))
    return actions
