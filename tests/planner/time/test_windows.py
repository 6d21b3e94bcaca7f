"""Windows of attention enter the time of a step as the layers have them."""

from __future__ import annotations

import pytest

from phalanx.config.model import LanguageModel
from phalanx.planner.time.framework import COMPILED, skip_masked
from phalanx.planner.trace.operations import Operation
from phalanx.planner.trace.traced_model import Setting

LENGTH, WINDOW = 1024, 256
SIZES = {"d_model": 64, "d_ff": 128, "n_layers": 6, "n_heads": 4, "vocab_size": 64, "max_positions": LENGTH}


def attention_flops(attention: str = "flex", **fields: int) -> float:
    model = LanguageModel.model_validate(SIZES | fields)
    setting = Setting(model, LENGTH, attention=attention, compile=False)  # type: ignore[arg-type]
    operations: tuple[Operation, ...] = COMPILED.part_operations("block", setting, 1)
    return sum(op.attention.flops for op in operations if op.attention)


def test_layers_with_and_without_a_window_are_counted_as_many_as_they_are() -> None:
    everything, local = attention_flops(), attention_flops(sliding_window=WINDOW)
    # Pairs of a query and a key, a block of 128 keys further than the window.
    seen = WINDOW + 128
    pairs = sum(min(position + 1, seen) for position in range(LENGTH)) / (LENGTH * (LENGTH + 1) / 2)
    assert local / everything == pytest.approx(pairs, rel=2e-3)
    for every, global_layers in ((2, 3), (3, 2), (6, 1)):
        mixed = attention_flops(sliding_window=WINDOW, global_every=every)
        expected = (global_layers * everything + (6 - global_layers) * local) / 6
        assert mixed == pytest.approx(expected, rel=1e-6)


def test_kernels_that_add_a_mask_skip_nothing() -> None:
    # All pairs, masked or not, of which a causal call computes half.
    assert attention_flops("efficient", sliding_window=WINDOW) == 2 * attention_flops("efficient")


def test_models_without_a_window_keep_their_operations() -> None:
    setting = Setting(LanguageModel.model_validate(SIZES), LENGTH, attention="flex", compile=False)
    operations = COMPILED.part_operations("block", setting, 1)
    assert skip_masked(operations, setting) is operations
