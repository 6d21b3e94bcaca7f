"""Seconds of operations: what the curves promise, and what the host and uncompiled blocks take."""

from dataclasses import replace

import numpy as np
import pytest

from phalanx.config.model import LanguageModel
from phalanx.hardware.collectives import default_constants
from phalanx.hardware.machine import load_machine
from phalanx.planner.time.framework import COMPILED, EAGER
from phalanx.planner.time.operation_time import (
    Direction,
    Form,
    OperationTable,
    PartBreakdown,
    compute_seconds,
    operation_rows,
)
from phalanx.planner.time.part_time import part_times, parts_of
from phalanx.planner.time.profile import default_profile
from phalanx.planner.time.timed_operations import TimedOperation
from phalanx.planner.trace.traced_model import Setting

MODEL = LanguageModel.model_validate(
    {
        "n_layers": 4,
        "d_model": 512,
        "n_heads": 8,
        "d_ff": 2048,
        "vocab_size": 1024,
        "max_positions": 256,
        "mlp": "gelu",
        "norm": "layernorm",
    }
)
SETTING = Setting(MODEL, 256, compile=False)
PROFILE = default_profile("A100-80GB").profile


def _product(m: int, n: int, k: int, batch: int = 1, *, width: int = 2) -> tuple[float, ...]:
    traffic = width * batch * (m * n + m * k + n * k)
    sizes = (batch, m, n, k, 2 * batch * m * n * k, traffic, width)
    return (0, Direction.FORWARD, PartBreakdown.MATMUL, Form.PRODUCT, False, *sizes)


def _seconds(*rows: tuple[float, ...]) -> list[float]:
    return compute_seconds(OperationTable.of(rows), PROFILE).tolist()


def test_a_large_product_runs_at_nearly_the_full_rate() -> None:
    (seconds,) = _seconds(_product(16384, 8192, 8192))
    assert 0.95 < 2 * 16384 * 8192 * 8192 / seconds / PROFILE.matmul_flop_s < 1.0


@pytest.mark.parametrize("sizes", [(256, 4096, 4096), (4096, 256, 4096), (4096, 4096, 64)])
def test_a_narrow_side_costs_rate(sizes: tuple[int, int, int]) -> None:
    m, n, k = sizes
    narrow, wide = _seconds(_product(m, n, k), _product(4096, 4096, 4096))
    assert m * n * k / narrow < 4096**3 / wide


def test_an_odd_size_costs_time() -> None:
    odd, even = _seconds(_product(4096, 4096, 4095), _product(4096, 4096, 4096))
    assert odd > 1.5 * even


def test_32_bit_numbers_take_longer() -> None:
    slow, fast = _seconds(_product(4096, 4096, 4096, width=4), _product(4096, 4096, 4096))
    assert slow > 5 * fast


def test_64_bit_numbers_have_a_rate_of_their_own() -> None:
    profile = replace(PROFILE, matmul64_flop_s=PROFILE.matmul32_flop_s / 7)
    table = OperationTable.of([_product(8192, 8192, 8192, width=8), _product(8192, 8192, 8192, width=4)])
    slow, fast = compute_seconds(table, profile)
    assert slow / fast == pytest.approx(7, rel=0.02)


@pytest.mark.parametrize(("precision", "width"), [("bf16", 2), ("fp32", 4), ("fp64", 8)])
def test_products_and_attention_are_of_the_numbers_that_a_run_computes_with(precision: str, width: int) -> None:
    # As many positions as the model is wide: products of equal sides are no exception.
    setting = replace(SETTING, precision=precision, attention="efficient")
    rows = operation_rows(0, EAGER.part_operations("block", setting, 2))
    table = OperationTable.of(rows)
    counted = table.flops > 0
    assert counted.sum() > 10 and np.all(table.width[counted] == width)


def test_attention_of_32_bit_numbers_takes_longer_as_products_of_them_do() -> None:
    sizes = (64, 4096, 4096, 128)
    rows = [
        (0, Direction.FORWARD, PartBreakdown.ATTENTION, Form.ATTENTION, False, *sizes, 4 * 64 * 4096**2 * 128, 0.0, x)
        for x in (2, 4)
    ]
    fast, slow = _seconds(*rows)
    assert slow / fast == pytest.approx(PROFILE.matmul_flop_s / PROFILE.matmul32_flop_s, rel=0.01)
    timed = TimedOperation("attention", 64, 4096, 4096, 128, fast * 1.2, 1.2)
    table = OperationTable.of(rows)
    ratio = compute_seconds(table, replace(PROFILE, measured=(timed,))) / compute_seconds(table, PROFILE)
    # What was timed was timed with 16-bit numbers.
    assert ratio[0] > 1.15 and ratio[1] == 1.0


def test_memory_bounds_a_thin_product() -> None:
    (seconds,) = _seconds(_product(65536, 64, 1))
    assert seconds >= 2 * 65536 * 64 / PROFILE.memory_b_s


def test_faster_devices_are_never_slower() -> None:
    rows = operation_rows(0, EAGER.part_operations("block", SETTING, 2))
    table = OperationTable.of(rows)
    before = compute_seconds(table, PROFILE)
    for name in ("matmul_flop_s", "attention_flop_s", "attention_backward_flop_s", "memory_b_s"):
        assert np.all(compute_seconds(table, replace(PROFILE, **{name: getattr(PROFILE, name) * 2})) <= before), name


def test_a_bias_slows_attention_down() -> None:
    operations = EAGER.part_operations("block", SETTING, 2)
    plain, biased = (OperationTable.of(operation_rows(0, operations, biased=way)) for way in (False, True))
    slow, fast = compute_seconds(biased, PROFILE), compute_seconds(plain, PROFILE)
    attention = plain.component == PartBreakdown.ATTENTION
    assert attention.sum() == 2 and np.all(slow[attention] > fast[attention])
    assert np.array_equal(slow[~attention], fast[~attention])


def test_a_measured_shape_is_as_it_was_measured_and_a_far_one_as_the_curve_says() -> None:
    shape = (1, 4096, 4096, 4096)
    (curve,) = _seconds(_product(*shape[1:]))
    timed = TimedOperation("matmul", *shape, curve * 1.1, 1.1)
    profile = replace(PROFILE, measured=(timed,))

    def ratio(*rows: tuple[float, ...]) -> list[float]:
        table = OperationTable.of(rows)
        return (compute_seconds(table, profile) / compute_seconds(table, PROFILE)).tolist()

    same, near, far, other = ratio(
        _product(*shape[1:]),
        _product(4096, 4096, 6144),
        _product(64, 256, 256),
        _product(4096, 4096, 4096, width=4),
    )
    assert same == pytest.approx(1.1, abs=0.01)
    assert 1.03 < near < same
    assert far == pytest.approx(1.0, abs=1e-6) and other == 1.0


def test_uncompiled_blocks_pass_over_memory_more_slowly() -> None:
    machine = load_machine("h200-x4")
    for compiled, factor in ((True, 1.0), (False, 2.0)):
        parts = parts_of([("block", replace(SETTING, compile=compiled), 8)], COMPILED)
        slow, fast = (
            part_times(
                parts, machine, default_constants(machine), replace(PROFILE, eager_share=share, kernel_s=0.0)
            ).seconds
            for share in (0.5, 1.0)
        )
        assert fast[0, :, PartBreakdown.MEMORY].all()
        assert slow[0, :, PartBreakdown.MEMORY].tolist() == pytest.approx(
            (factor * fast[0, :, PartBreakdown.MEMORY]).tolist()
        )
        assert slow[0, :, PartBreakdown.MATMUL].tolist() == fast[0, :, PartBreakdown.MATMUL].tolist()


def test_an_exchange_is_one_call_of_the_host_however_finely_a_program_cuts_up_its_work() -> None:
    machine, profile = load_machine("h200-x4"), replace(PROFILE, exchange_host_s=0.0)

    def issued(work: float, tp: int) -> float:
        parts = parts_of([("block", replace(SETTING, tp=tp), 8)], replace(EAGER, host_work=work))
        return float(part_times(parts, machine, default_constants(machine), profile).issued.sum())

    # Four gathers and four scatters, two of each in either pass.
    exchanges = 8 * PROFILE.host_s
    assert issued(3.0, 1) == pytest.approx(3 * issued(1.0, 1))
    assert issued(3.0, 2) - exchanges == pytest.approx(3 * (issued(1.0, 2) - exchanges))


def test_groups_of_rows_take_longer_than_one_product_and_small_groups_longest() -> None:
    def grouped(groups: int, rows: int) -> tuple[float, ...]:
        sizes = (groups, rows // groups, 1536, 2048, 2 * rows * 1536 * 2048, 2 * rows * (1536 + 2048), 2)
        return (0, Direction.FORWARD, PartBreakdown.MATMUL, Form.GROUPED, False, *sizes)

    plain, few, many = _seconds(_product(262144, 1536, 2048), grouped(32, 262144), grouped(2048, 262144))
    # 613 of 754 TFLOP/s with 128 groups of 2,048 rows on one H100.
    (measured,) = _seconds(grouped(128, 262144))
    assert plain / measured == pytest.approx(613 / 754, rel=0.05)
    assert plain < few < measured < many


def test_gradients_of_experts_take_as_long_whether_or_not_groups_have_an_odd_number_of_rows() -> None:
    """64 experts of Qwen3-30B-A3B between two H100s (benchmarks/results/experts/expert_chunks_h100_x2.json)."""

    def gradient(rows: int) -> tuple[float, ...]:
        sizes = (64, 1536, 2048, rows, 64 * 2 * rows * 1536 * 2048, 64 * 2 * (rows * (1536 + 2048) + 1536 * 2048), 2)
        return (0, Direction.BACKWARD, PartBreakdown.MATMUL, Form.GROUPED_SUMS, False, *sizes)

    table = OperationTable.of([gradient(rows) for rows in (2048, 2049, 1024, 512)])
    even, odd, *chunks = compute_seconds(table, default_profile("H100 SXM").profile).tolist()
    assert odd == pytest.approx(even * 2049 / 2048, rel=1e-3)
    assert [even, *chunks] == pytest.approx([1.261e-3, 0.727e-3, 0.450e-3], rel=0.12)
