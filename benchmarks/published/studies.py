"""Published figures of AMD machines, with what their sources leave out filled in (`studies.yaml`), and predictions.

A figure is a rate, or how much of a rate is left in another layout of the same model.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from phalanx.config.model import LanguageModel
from phalanx.config.presets import load_preset
from phalanx.hardware.machine import load_machine
from phalanx.layout.spec import LayoutTable, Recompute, ResolvedLayout
from phalanx.planner.measured.calibration import NOISE, fit_near_priors
from phalanx.planner.measured.measured_groups import System
from phalanx.planner.time.operation_time import Floats
from phalanx.planner.time.profile import CONSTANTS, NamedProfile, default_profile, spread_of
from phalanx.planner.time.step_parts import steps_of
from phalanx.planner.trace.traced_model import Setting
from published.flops import convention_of
from published.frameworks import framework_of
from published.groups import PublishedGroup, steps_as_sent, with_whole_logits


@dataclass(frozen=True)
class Study:
    """One figure."""

    row: str
    """Which row of the table of published runs states it."""
    profile: str
    """The profile of its machine, and the machine's name."""
    value: float
    """TFLOP/s of a device, or the share of a rate."""
    relative: bool
    """Whether it is a share."""
    fitted: bool
    length: int
    """Tokens a sample."""
    flops_per_token: float
    """As the source counts."""
    steps: PublishedGroup
    """One layout, and of a share the one it is in relation to."""


@cache
def studies(profile: str) -> tuple[Study, ...]:
    """All figures of the machine with this profile."""
    text = Path(__file__).with_name("studies.yaml").read_text("utf-8")
    return tuple(_read(row) for row in yaml.safe_load(text) if row["profile"] == profile)


def _read(row: dict[str, Any]) -> Study:
    model, length = load_preset(row["model"]["preset"]).model(), row["model"]["length"]
    assert isinstance(model, LanguageModel)
    framework = framework_of(row["software"], "flash")
    convention = convention_of(row["row"].rpartition("-")[0], "")
    assert framework is not None and convention is not None
    recompute: Recompute = row.get("recompute", "full")
    # These programs free what ZeRO-3 gathers between forward and backward.
    layouts = [
        ResolvedLayout(**layout, reshard_after_forward=layout.get("zero") == 3)
        for layout in (row["layout"], row.get("of"))
        if layout
    ]
    setting = with_whole_logits(Setting(model, length, attention="flash", compile=framework.compiled), framework)
    machine = load_machine(row["profile"])
    rows = [replace(layout, recompute=recompute) for layout in layouts]
    steps = steps_of(setting, LayoutTable.from_rows(rows), machine, framework)
    return Study(
        row=row["row"],
        profile=row["profile"],
        value=float(row["efficiency"] if "efficiency" in row else row["rate"]),
        relative="efficiency" in row,
        fitted=row.get("fitted", False),
        length=length,
        flops_per_token=convention(model, length),
        steps=PublishedGroup(System(row["profile"], machine), framework, (), steps_as_sent(steps, framework)),
    )


def predicted(study: Study, named: NamedProfile) -> float:
    """The figure by a profile, in the units of `value`."""
    layouts = study.steps.steps.layouts
    samples = layouts.global_batch / layouts.world_size / study.steps.step_times(named).total
    if study.relative:
        return float(samples[0] / samples[1])
    return float(samples[0] * study.length * study.flops_per_token / 1e12)


def calibrate_to_studies(profile: str) -> NamedProfile:
    """The profile of a machine, fitted to those of its figures that are for that, from the device's default."""
    fitted = [study for study in studies(profile) if study.fitted]
    device = fitted[0].steps.system.machine.node.device
    known = default_profile(device)
    names = tuple(name for name in CONSTANTS if spread_of(name) > 0)
    widths = np.array([spread_of(name) for name in names])

    def at(shift: Floats) -> NamedProfile:
        scaled = known.profile.scaled(dict(zip(names, np.exp(shift * widths).tolist(), strict=True)))
        return replace(known, profile=scaled)

    def errors(shift: Floats) -> Floats:
        named = at(shift)
        return np.array([np.log(predicted(study, named) / study.value) / _noise(study) for study in fitted])

    named = at(fit_near_priors(errors, np.zeros(len(names))))
    # How far a share of throughput is off says little of how far times are.
    others = [study for study in studies(profile) if not study.fitted and not study.relative]
    held_out = [abs(predicted(study, named) / study.value - 1) for study in others]
    figures = f"{len(fitted)} published figures (benchmarks/published/studies.yaml)"
    source = f"fitted to {figures}, from the default profile of the {device}"
    return replace(
        named,
        name=profile,
        source=source,
        fitted={
            "rows": [study.row for study in fitted],
            "held_out": len(others),
            "held_out_by": "rates that were not fitted",
            "held_out_median_error": round(float(np.median(held_out)), 4),
            "held_out_p95_error": round(float(np.quantile(held_out, 0.95)), 4),
        },
    )


def _noise(study: Study) -> float:
    # What is alike in both layouts cancels out of a share.
    return NOISE / 5 if study.relative else NOISE
