"""Sizes and counts of single operations, and of the kernels that a compiler makes of several."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx.planner.schedule.timeline import Costs
from phalanx.planner.trace.kernel_fusion import Kernel, fuse_graph, name_of
from phalanx.planner.trace.operations import Attention, Matmul, Scale, attention_of, kind_of, matmul_of
from phalanx.planner.trace.recorder import Recorder
from phalanx.torch_compat.compiler import joint_graph, plain_graph

ATEN = torch.ops.aten


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def test_matmul_sizes() -> None:
    assert matmul_of("mm", (meta(3, 5), meta(5, 7))) == Matmul(1, 3, 7, 5, width=4)
    assert matmul_of("addmm", (meta(7), meta(3, 5), meta(5, 7))) == Matmul(1, 3, 7, 5, width=4)
    halves = (meta(2, 3, 5, dtype=torch.bfloat16), meta(2, 5, 7, dtype=torch.bfloat16))
    assert matmul_of("bmm", halves) == Matmul(2, 3, 7, 5)
    assert matmul_of("add", (meta(3), meta(3))) is None
    assert Matmul(2, 3, 7, 5).flops == 2 * 2 * 3 * 7 * 5


def test_attention_sizes() -> None:
    q, k = meta(2, 8, 64, 16), meta(2, 4, 64, 16)
    found = attention_of(ATEN._scaled_dot_product_flash_attention.default, (q, k, k, 0.0, True), {})
    assert found == Attention(2, 8, 4, 64, 64, 16, causal=True, backward=False, width=4)
    # Two products of [64, 16] and [16, 64] a head, half of each left out.
    assert found.flops == 2 * (2 * 2 * 8 * 64 * 64 * 16) // 2
    efficient = ATEN._scaled_dot_product_efficient_attention.default
    biased = attention_of(efficient, (q, q, q, meta(2, 8, 64, 64), True, 0.0, False), {})
    assert biased is not None and biased.flops == 2 * found.flops
    assert attention_of(ATEN.add.Tensor, (q, q), {}) is None
    narrow = attention_of(efficient, (q, q, q[..., :12], None, True, 0.0, True), {})
    # Scores of keys of 16, sums of values of 12.
    assert narrow is not None and narrow.flops == 2 * 2 * 8 * 64 * 64 * (16 + 12) // 2


def test_scale_multiplies_what_the_traced_batch_divides() -> None:
    scale = Scale(traced=1009, wanted=4)
    assert [scale(n) for n in (1009 * 6, 7, 0)] == [24, 7, 0]
    assert scale.matmul(Matmul(1, 1009 * 8, 5, 3)) == Matmul(1, 32, 5, 3)
    assert Scale()(1009) == 1009


@pytest.mark.parametrize(
    ("name", "kind"),
    [("mm", "matmul"), ("sum", "reduction"), ("mul", "pointwise"), ("clone", "copy"), ("embedding", "lookup")],
)
def test_kinds(name: str, kind: str) -> None:
    assert kind_of(name) == kind


# --- one by one --------------------------------------------------------------------------------------------------------


def recorded(run: Callable[[], Any], *given: Tensor) -> Costs:
    recorder = Recorder({})
    for tensor in given:
        recorder.hold(tensor, "given")
    with recorder:
        result = run()
    recorder.timeline.output = [recorder.hold(result, "made")]
    recorder.close()
    return recorder.timeline.costs(Scale())


def test_uncompiled_operations_each_read_and_write() -> None:
    x, w = meta(64, 32), meta(16, 32)
    costs = recorded(lambda: F.silu(x @ w.T) * 2, x, w)
    assert [op.name for op in costs.operations] == ["mm", "silu", "mul"]
    assert [op.bytes_read for op in costs.operations] == [4 * (64 * 32 + 16 * 32), 4 * 64 * 16, 4 * 64 * 16]
    assert {op.bytes_written for op in costs.operations} == {4 * 64 * 16}
    # The product is freed once its activation is there: never more than two at once.
    assert costs.forward_peak == 2 * 4 * 64 * 16


def test_slices_and_repeats_are_read_once() -> None:
    x, row = meta(64, 32), meta(1, 32)
    assert recorded(lambda: x[:, :8] * 2, x).operations[0].bytes_read == 4 * 64 * 8
    assert recorded(lambda: row.expand(64, 32) * 2, row).operations[0].bytes_read == 4 * 32


def test_lookups_read_rows_not_tables() -> None:
    table, rows = meta(1000, 8), torch.zeros(5, dtype=torch.int64, device="meta")
    (operation,) = recorded(lambda: F.embedding(rows, table), table, rows).operations
    assert operation.kind == "lookup"
    assert operation.bytes_written == 4 * 5 * 8
    assert operation.bytes_read < 4 * 1000 * 8


# --- fused -------------------------------------------------------------------------------------------------------------


def kernels(function: Callable[..., Any], *tensors: Tensor) -> list[Kernel]:
    return fuse_graph(plain_graph(function, tensors))


def test_pointwise_work_between_matmuls_is_one_kernel() -> None:
    x, w, v = meta(64, 32), meta(32, 48), meta(48, 32)
    found = kernels(lambda x, w, v: (F.silu(x @ w) * 2 + 1).to(torch.float32) @ v, x, w, v)
    assert [kernel.alone for kernel in found] == [True, False, True]
    fused = found[1]
    assert list(fused.reads.values()) == [64 * 48]
    assert len(fused.writes) == 1


def test_a_norm_reads_its_input_once_and_writes_once() -> None:
    x, weight = meta(64, 32, dtype=torch.bfloat16), meta(32, dtype=torch.bfloat16)
    (kernel,) = kernels(lambda x, weight: F.rms_norm(x, (32,), weight, 1e-5), x, weight)
    assert sorted(kernel.reads.values()) == [32, 64 * 32]
    assert len(kernel.writes) == 1


def test_kernels_run_after_what_they_read() -> None:
    x, w = meta(32, 32), meta(32, 32)

    def function(x: Tensor, w: Tensor) -> Tensor:
        a = x + 1
        b = (a @ w) * 2
        return (b @ w) + a * b

    found = kernels(function, x, w)
    written: set[Any] = set()
    for kernel in found:
        made = {node for node in kernel.reads if node.op == "call_function"}
        assert made <= written
        written |= set(kernel.writes)
    assert [kernel.alone for kernel in found].count(True) == 2


def test_sums_over_rows_do_not_join_work_over_features() -> None:
    x, w = meta(64, 32), meta(32)
    graph = joint_graph(lambda x, w: (x * w) * w, [x.requires_grad_(), w.requires_grad_()]).divide(None)[1]
    names = [{name_of(node) for node in kernel.nodes} for kernel in fuse_graph(graph)]
    assert any("sum" in group for group in names)
    assert not any({"sum", "mul"} <= group for group in names)
