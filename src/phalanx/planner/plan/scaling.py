"""How a run scales with the number of devices, and how many it needs at least. Every number gets its own best layout."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

import numpy as np

from phalanx.errors import ConfigError
from phalanx.layout.spec import RECOMPUTES, ZERO_BUBBLE
from phalanx.planner.rank.ranking import Planner, RankedLayouts, Ranking, Task
from phalanx.planner.trace.traced_model import TracedModel

_LEAST_BYTES = 4
"""Bytes a parameter below which no layout goes: the master weights alone."""
_TRIED = 400
"""Numbers of nodes that are tried before giving up."""


@dataclass(frozen=True)
class Point:
    """One number of devices."""

    task: Task
    """The run on so many devices."""
    global_batch: int
    """Samples per optimizer step."""
    best: RankedLayouts | None
    """The best layout, one entry; None where there is none."""
    why: str = ""
    """Why there is none."""


@dataclass(frozen=True)
class Scaling:
    """Points from few devices to many."""

    strong: tuple[Point, ...]
    """The global batch stays."""
    weak: tuple[Point, ...]
    """The global batch grows with the devices."""


def parse_scale(words: str) -> list[int]:
    """Read `64..24576`: 64, 128, 256 and so on, and 24576; `64,96,128`: these. Raises ConfigError."""
    if match := re.fullmatch(r"(\d+)\.\.(\d+)", words):
        low, high = int(match[1]), int(match[2])
        if 0 < low <= high <= 1_000_000:
            doubled = [low << power for power in range((high // low).bit_length())]
            return sorted({*doubled, high})
    elif re.fullmatch(r"\d+(,\d+)*", words):
        counts = sorted({int(word) for word in words.split(",")})
        if counts[0] > 0:
            return counts
    raise ConfigError(f"--scale {words}: write LOW..HIGH, such as 64..4096, or numbers such as 64,96,128")


def scale_devices(planner: Planner, task: Task, counts: list[int]) -> Scaling:
    """Find the best layouts on each of `counts` devices.

    For weak scaling the global batch is that of `task` on its own number of devices, and in proportion to them otherwise.
    """
    batch = task.samples
    strong = tuple(_plan_point(planner, replace(task, devices=devices), batch) for devices in counts)
    weak = []
    for devices in counts:
        wider = replace(task, devices=devices)
        grown, rest = divmod(batch * devices, task.devices)
        if rest or not grown:
            why = f"{batch} samples x {devices} / {task.devices} devices is no whole number"
            weak.append(Point(wider, round(batch * devices / task.devices), None, why))
        else:
            weak.append(_plan_point(planner, replace(wider, model=with_batch(task.model, grown)), grown))
    return Scaling(strong, tuple(weak))


def with_batch(model: TracedModel, samples: int) -> TracedModel:
    """Return the model of the same run with another global batch."""
    layout = model.run.layout.model_copy(update={"global_batch": samples})
    return model.rebind(model.run.model_copy(update={"layout": layout}))


def _plan_point(planner: Planner, task: Task, batch: int) -> Point:
    try:
        ranking = planner.rank_layouts(task)
    except ConfigError as error:
        return Point(task, batch, None, str(error).splitlines()[0])
    if not len(ranking.ranked):
        return Point(task, batch, None, "no layout fits into memory")
    return Point(task, batch, ranking.ranked.take([0]))


def find_fewest_devices(planner: Planner, task: Task) -> Ranking | None:
    """Rank the layouts on the smallest number of devices that some layout fits on: a part of a node, or whole nodes.

    None where no number tried will do. Only layouts that need little memory are tried on the way (micro-batches as small as
    may be, everything recomputed); on the number found all are ranked.
    """
    small = dict(task.fixed)
    small.setdefault("microbatch", 1)
    # Schedules that split the backward pass compute nothing again.
    small.setdefault("recompute", "none" if small.get("schedule") in ZERO_BUBBLE else RECOMPUTES[-1])
    least = task.model.parameter_count() * _LEAST_BYTES / planner.models.device_bytes
    node, network = planner.machine.node.devices, planner.machine.network
    numbers = [devices for devices in range(1, node) if node % devices == 0]
    if network is None:
        # Without a network there is a single node.
        numbers.append(node)
    else:
        first = max(1, int(-(-least // node)))
        most = network.nodes or first + _TRIED
        numbers += [nodes * node for nodes in range(first, min(first + _TRIED, most + 1))]
    for devices in numbers:
        # Fewer devices could not even hold the main parameters.
        if devices < least:
            continue
        legal = planner.legal_layouts(replace(task, devices=devices, fixed=small))
        if len(legal) and np.any(planner.models.memory(task.model, legal).p_fits >= planner.least_p):
            return planner.rank_layouts(replace(task, devices=devices))
    return None
