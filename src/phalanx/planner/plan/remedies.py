"""What takes less memory than one layout does, and what each such change costs in time: for a run that has none left."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from phalanx.hardware.machine import load_machine, machine_names
from phalanx.layout.spec import OFFLOADS, ResolvedLayout
from phalanx.planner.rank.cost_models import CostModels
from phalanx.planner.rank.enumeration import CHOSEN, Limits, enumerate_layouts, run_with_layout, write_overrides
from phalanx.planner.time.profile import profile_for
from phalanx.planner.trace.traced_model import TracedModel

REFERENCE = "dgx-h100"
"""Machine whose rates stand for those of a device that no description names: what is told are ratios."""
LEAST_SAVED = 0.05
"""Share of the memory that a change has to save to be one worth a try: less is within the error of the memory model."""
_CHOICES = (
    ("microbatch",),
    ("recompute",),
    *((name,) for name in OFFLOADS),
    ("zero", "reshard_after_forward"),
    ("gather",),
    ("dp_replicate", "dp_shard"),
    ("tp", "dp_shard"),
    ("cp", "dp_shard", "context"),
    ("pp", "dp_shard", "schedule", "stages_per_rank"),
)
"""Fields of a layout that change together, all others kept."""


@dataclass(frozen=True)
class Remedy:
    """One change of a layout that takes less memory."""

    words: str
    """The fields that change, as overrides."""
    memory: float
    """Bytes on the worst rank over those of the layout as it is."""
    seconds: float
    """Seconds of a step over those of the layout as it is."""

    def __str__(self) -> str:
        return f"{self.words} (takes {self.memory:.0%} of the memory and {self.seconds:.0%} of the time, as planned)"


MOST_REMEDIES = 3


def find_remedies(model: TracedModel, layout: ResolvedLayout, device: str) -> list[Remedy]:
    """Return the MOST_REMEDIES changes of `layout` that take less memory for the least time, the cheapest first.

    device: name of the devices, as machine descriptions call them. Raises ConfigError for a run that cannot be planned for.
    """
    # Any machine of such devices will do: what is compared are layouts of the same ranks.
    machines = (load_machine(name) for name in machine_names())
    machine = next((one for one in machines if one.node.device == device), None) or load_machine(REFERENCE)
    models = CostModels(machine, profile_for(machine))
    peak, seconds = models.memory(model, layout.table).peak[0], models.times(model, layout.table).total[0]
    run = model.run
    stated = run_with_layout(run, layout).layout
    values = {name: value for name in CHOSEN if (value := getattr(stated, name)) != "auto"}
    before = set(write_overrides(run, layout))
    found = []
    for free in _CHOICES:
        # One choice at a time, so that each remedy says what it alone costs.
        fixed = {name: value for name, value in values.items() if name not in free}
        limits = Limits(**dict.fromkeys(OFFLOADS, machine.node.host is not None))
        legal = enumerate_layouts(model, layout.world_size, models.machine.node.devices, fixed, limits)
        needed = models.memory(model, legal).peak
        smaller = np.flatnonzero(needed <= (1 - LEAST_SAVED) * peak)
        if len(smaller):
            total = models.times(model, legal.take(smaller)).total
            best = int(np.argmin(total))
            changed = [word for word in write_overrides(run, legal.row(int(smaller[best]))) if word not in before]
            saved, slower = float(needed[smaller[best]] / peak), float(total[best] / seconds)
            found.append(Remedy(" ".join(changed), saved, slower))
    return sorted(found, key=lambda remedy: remedy.seconds)[:MOST_REMEDIES]
