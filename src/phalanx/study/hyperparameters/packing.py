"""Which trial goes to which device, now: a pure function of what runs, what is ready, and what each is expected to take.

Trials differ in cost by factors of a hundred. Several share a device, so that one computes while another starts; long ones
begin first, so that no device is left with a long one at the end; what would leave a device idle is filled with trials that
would be promoted next; and a trial that shares its device moves to one that has nothing to do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

_WORTH_MOVING = 3.0
"""Starts that a move must save."""


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
    early: bool = False
    """Whether it is only worth an idle device, and only if it ends before what runs anyway."""
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
    early: bool = False
    """Whether it was begun to fill an idle device: nothing waits for it."""


@dataclass(frozen=True)
class Start:
    """Begin a trial."""

    key: str
    device: str


@dataclass(frozen=True)
class Move:
    """Stop a trial, with a checkpoint, and let it go on elsewhere."""

    key: str
    device: str


@dataclass(frozen=True)
class Packing:
    """How devices are used."""

    share: bool = True
    """Whether trials share devices, up to their slots."""
    long_first: bool = True
    """Whether long trials begin first; else those that were ready first."""
    fill: bool = True
    """Whether idle devices get what would be promoted next."""
    move: bool = True
    """Whether trials that share a device move to an idle one."""
    start_s: float = 10.0
    """Seconds from starting a trial's processes to its first step."""


PACKED = Packing()
UNPACKED = Packing(share=False, long_first=False, fill=False, move=False)
"""One trial a device, first come first served."""


@dataclass
class _Load:
    device: Device
    running: list[Running] = field(default_factory=list)

    @property
    def empty(self) -> bool:
        return not self.running

    @property
    def seconds(self) -> float:
        return sum(one.seconds_left for one in self.running)

    def takes(self, job: Ready, share: bool) -> bool:
        """Whether it has room; an empty device takes anything, since nothing else would have more."""
        if self.empty:
            return True
        if not share or job.alone or any(one.alone for one in self.running):
            return False
        used = sum(one.memory for one in self.running)
        return len(self.running) < self.device.slots and used + job.memory <= self.device.memory


def decide(
    devices: Sequence[Device], running: Sequence[Running], ready: Sequence[Ready], packing: Packing
) -> list[Start | Move]:
    """What to do now. Of two decisions on the same state both are the same; each assumes that the ones before are done."""
    loads = {device.name: _Load(device) for device in devices}
    for one in running:
        loads[one.device].running.append(one)
    actions: list[Start | Move] = []
    regular = [job for job in ready if not job.early]
    if packing.long_first:
        regular.sort(key=lambda job: -job.seconds)
    for job in regular:
        _start(job, loads, packing, actions)
    if packing.fill:
        _fill([job for job in ready if job.early], loads, packing, actions)
    if packing.move:
        _move(loads, packing, actions)
    return actions


def _start(job: Ready, loads: dict[str, _Load], packing: Packing, actions: list[Start | Move]) -> None:
    open_ = [load for load in loads.values() if load.takes(job, packing.share)]
    if open_:
        load = min(open_, key=lambda load: (load.seconds, len(load.running)))
        _begin(job, load, packing, actions)


def _begin(job: Ready, load: _Load, packing: Packing, actions: list[Start | Move]) -> None:
    left = packing.start_s + job.seconds
    load.running.append(Running(job.key, load.device.name, left, job.memory, job.alone, False, job.early))
    actions.append(Start(job.key, load.device.name))


def _fill(ready: list[Ready], loads: dict[str, _Load], packing: Packing, actions: list[Start | Move]) -> None:
    waited_for = [one.seconds_left for load in loads.values() for one in load.running if not one.early]
    horizon = max(waited_for, default=0.0)
    for load in (load for load in loads.values() if load.empty):
        job = next((job for job in ready if packing.start_s + job.seconds <= horizon), None)
        if job is None:
            return
        ready.remove(job)
        _begin(job, load, packing, actions)


def _move(loads: dict[str, _Load], packing: Packing, actions: list[Start | Move]) -> None:
    for load in (load for load in loads.values() if load.empty):
        shared = [one for one in loads.values() if len(one.running) > 1]
        jobs = [job for one in shared for job in one.running if job.movable]
        job = max(jobs, key=lambda job: job.seconds_left, default=None)
        if job is None or job.seconds_left < _WORTH_MOVING * packing.start_s:
            return
        loads[job.device].running.remove(job)
        load.running.append(Running(job.key, load.device.name, job.seconds_left, job.memory, movable=False))
        actions.append(Move(job.key, load.device.name))
