"""Gathers and sums over `tp`: products hide those that copy engines make, and nothing hides collectives."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from phalanx.config.model import LanguageModel
from phalanx.hardware.collectives import default_constants
from phalanx.hardware.machine import load_machine
from phalanx.planner.time.framework import COMPILED
from phalanx.planner.time.operation_time import PartBreakdown
from phalanx.planner.time.part_time import part_times, parts_of
from phalanx.planner.time.profile import Profile, default_profile
from phalanx.planner.trace.traced_model import Setting

MACHINE = load_machine("h200-x4")
PROFILE = default_profile("H200").profile
MODEL = LanguageModel.model_validate(
    {"n_layers": 2, "d_model": 4096, "n_heads": 32, "vocab_size": 64, "max_positions": 8192, "d_ff": 14336}
)
COPIES = replace(COMPILED, overlaps_products=True)


def exposed(framework: Any = COPIES, *, profile: Profile = PROFILE, **changes: Any) -> float:
    """Seconds of a block's exchanges over `tp` that show, forward and backward."""
    parts = parts_of([("block", replace(Setting(MODEL, 8192, tp=2), **changes), 2)], framework)
    seconds = part_times(parts, MACHINE, default_constants(MACHINE), profile).seconds
    return float(seconds[0, :, PartBreakdown.TP].sum())


def test_long_products_hide_copies() -> None:
    alone = exposed(COMPILED)
    assert exposed() < 0.25 * alone
    assert alone > 1e-3
    # Copies slow down what they run beside.
    freely = replace(PROFILE, copy_slowdown=0.0, copy_share=1.0, hidden=1.0)
    assert exposed(profile=freely) < 1e-9 < exposed(profile=replace(freely, copy_slowdown=0.01))


@pytest.mark.parametrize(
    "changes", [{"recompute": "selective"}, {"length": 256}, {"joint_gradients": False}, {"precision": "fp8-row"}]
)
def test_what_runs_in_one_piece_hides_nothing(changes: dict[str, Any]) -> None:
    assert exposed(**changes) == exposed(COMPILED, **changes) > 0.0


def test_short_products_leave_a_rest() -> None:
    """Four ranks have a quarter of the products, and exchange no less."""
    two, four = (exposed(tp=tp) / exposed(COMPILED, tp=tp) for tp in (2, 4))
    assert two < four < 1.0


def test_8_bits_halve_what_is_gathered() -> None:
    def gathered(precision: str) -> int:
        operations = COMPILED.part_operations("block", replace(Setting(MODEL, 8192, tp=2), precision=precision), 2)
        found = [op.collective for op in operations if op.collective is not None]
        return sum(each.bytes for each in found if each.operation == "all_gather")

    wide = 4 * 2 * 8192 * 4096 * 2
    assert gathered("bf16") == gathered("fp8-row") == wide
    assert gathered("fp8-tensor") == wide // 2
