"""Packing trials onto devices: which one runs where now, how busy devices were, and how long it would take without packing.

Trials differ in cost by factors of a hundred. Several share a device, so that one computes while another starts; long ones
begin first, so that no device is left with a long one at the end. Idle devices are backfilled with trials that are likely to
be promoted, if these finish before the running ones; and a trial that shares its device moves to an idle one.

All here are pure functions of what runs, what is ready, and what each trial is expected to take.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from phalanx.study.hyperparameters.asha import Standing, promotable_trials

_WORTH_MOVING = 3.0
"""Starting times that a move must save."""
_SHADES = " .:-=+*#"
"""Letters for the share of its time that a device was busy, from never to always."""


# --- which trial runs where --------------------------------------------------------------------------------------------


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
    """Rules by which devices are used."""

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
QUEUED = UNPACKED
"""Trials are jobs of a cluster: a place in its queue that stays empty costs nothing."""


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
        # A trial that fits nowhere must begin somewhere: its failure says so, waiting would say nothing.
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
    # Decisions are made on a copy of the state, in which those before them are done.
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


# --- how busy devices were ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Span:
    """A trial in its training loop; starting processes, opening data and waiting for something to do are idle time."""

    device: str
    begin: float
    """Seconds on any clock that all spans share."""
    end: float
    label: str = ""


@dataclass(frozen=True)
class Window:
    """A time in which somebody had devices."""

    devices: tuple[str, ...]
    begin: float
    end: float


@dataclass(frozen=True)
class DeviceUse:
    """Seconds that a device was held, busy and shared."""

    device: str
    held_s: float
    busy_s: float
    shared_s: float
    """Busy with more than one trial."""
    trials: int
    """Parts of trials that ran on it."""

    @property
    def idle(self) -> float:
        """Share of the time that it was idle, from 0 to 1."""
        return 1.0 - self.busy_s / self.held_s if self.held_s else 0.0


def device_use(windows: Sequence[Window], spans: Sequence[Span]) -> list[DeviceUse]:
    """Return the use of each device that a window names, over all windows."""
    found = []
    for name in dict.fromkeys(name for window in windows for name in window.devices):
        held_in = [window for window in windows if name in window.devices]
        mine = [span for span in spans if span.device == name]
        seconds = [_busy_seconds(mine, window.begin, window.end) for window in held_in]
        held = sum(window.end - window.begin for window in held_in)
        found.append(DeviceUse(name, held, sum(one for one, _ in seconds), sum(two for _, two in seconds), len(mine)))
    return found


def idle_share(uses: Iterable[DeviceUse]) -> float:
    """Return the idle time of all devices over the time they were held, from 0 to 1."""
    uses = list(uses)
    held = sum(use.held_s for use in uses)
    return 1.0 - sum(use.busy_s for use in uses) / held if held else 0.0


def write_busy_bars(windows: Sequence[Window], spans: Sequence[Span], columns: int = 60) -> dict[str, str]:
    """Return a line of `columns` letters for each device, from the first window's beginning to the last one's end.

    Each letter says how much of its time the device was busy, from a blank (never) to # (always).
    """
    if not windows:
        return {}
    begin, end = min(window.begin for window in windows), max(window.end for window in windows)
    width = max(end - begin, 1e-9) / columns
    bars = {}
    for name in dict.fromkeys(name for window in windows for name in window.devices):
        mine = [span for span in spans if span.device == name]
        cells = [begin + column * width for column in range(columns)]
        shares = [_busy_seconds(mine, cell, cell + width)[0] / width for cell in cells]
        bars[name] = "".join(_SHADES[min(round(share * (len(_SHADES) - 1)), len(_SHADES) - 1)] for share in shares)
    return bars


def _busy_seconds(spans: Sequence[Span], begin: float, end: float) -> tuple[float, float]:
    """Return the seconds between `begin` and `end` that at least one span covers, and that at least two do."""
    # A sweep over the times at which the number of spans changes.
    changes: dict[float, int] = {}
    for span in spans:
        first, last = max(span.begin, begin), min(span.end, end)
        if last > first:
            changes[first] = changes.get(first, 0) + 1
            changes[last] = changes.get(last, 0) - 1
    once = twice = 0.0
    depth, before = 0, 0.0
    for time in sorted(changes):
        once += (time - before) * (depth >= 1)
        twice += (time - before) * (depth >= 2)
        depth, before = depth + changes[time], time
    return once, twice


# --- without packing ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class UnpackedStudy:
    """A simulated study of one trial a device."""

    seconds: float
    idle: float
    """Idle share of all devices, from 0 to 1: starting a process is idle time."""
    reached: list[int]
    """Trials that ran to each rung."""


def simulate_unpacked(
    trials: Sequence[tuple[float, float]], devices: int, start_s: float, rungs: Sequence[int], eta: int
) -> UnpackedStudy:
    """Simulate a study without packing: one trial a device, first come first served, ASHA's promotions behind new trials.

    trials: (seconds of a step, score at every rung) of each. start_s: seconds from starting a process to its first step.
    """
    # Events in the order of time; the heap holds when each running trial ends.
    begun: list[Standing] = []
    running: list[tuple[float, int]] = []
    now = busy = 0.0
    while True:
        while len(running) < devices:
            if len(begun) < len(trials):
                one = Standing(len(begun))
                begun.append(one)
            elif promoted := promotable_trials(begun, eta, len(rungs)):
                one = promoted[0]
                one.begun += 1
            else:
                break
            steps = rungs[one.begun] - (rungs[one.begun - 1] if one.begun else 0)
            work = steps * trials[one.number][0]
            busy += work
            heapq.heappush(running, (now + start_s + work, one.number))
        if not running:
            break
        now, number = heapq.heappop(running)
        begun[number].scores[begun[number].begun] = trials[number][1]
    reached = [sum(rung in one.scores for one in begun) for rung in range(len(rungs))]
    return UnpackedStudy(now, 1.0 - busy / (now * devices), reached)
