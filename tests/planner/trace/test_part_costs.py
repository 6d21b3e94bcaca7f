"""Costs of real parts against closed forms, real runs on the CPU and the compiler's own decisions."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table
from torch.utils._pytree import tree_leaves, tree_map

from phalanx.config.model import LanguageModel
from phalanx.families.language.sizes import matmul_parameters, model_flops_per_token, parameter_count
from phalanx.layout.prepare_blocks import recompute_block
from phalanx.nn.adapters import Adapters, TrainedParameters
from phalanx.nn.attention import Attention, attend
from phalanx.planner.trace import part_costs as parts
from phalanx.planner.trace.kernel_fusion import element_count, source_node
from phalanx.planner.trace.operations import Scale
from phalanx.planner.trace.part_costs import PartCosts, part_costs
from phalanx.planner.trace.traced_model import Kernel, PartParameter, Setting, build_stage, example_batch
from phalanx.torch_compat.compiler import _no_random_state
from small_models import FAMILIES, GPT, LLAMA, MPT

WIDE = LanguageModel(
    n_layers=3, d_model=512, n_heads=8, n_kv_heads=4, d_ff=1024, vocab_size=1024, max_positions=256, rope_theta=1e4
)
PLAIN = LanguageModel(
    n_layers=2,
    d_model=512,
    n_heads=8,
    vocab_size=1024,
    max_positions=256,
    positions="learned",
    norm="layernorm",
    mlp="gelu_tanh",
    dropout=0.1,
)
LENGTH = 256


def setting(model: LanguageModel = WIDE, **changes: Any) -> Setting:
    return replace(Setting(model, LENGTH, chunk_tokens=128), **changes)


@pytest.mark.parametrize("compiled", [True, False])
def test_blocks_with_adapters_form_no_gradients_of_their_matrices(compiled: bool) -> None:
    """Backward, each matrix costs what it costs forward, for the gradient of its input; adapters cost 3 times their own."""
    rank = 4
    adapters = Adapters(rank, 2.0, ("blocks.*",), ())
    adapted = part_costs("block", setting(trained=TrainedParameters(adapters=adapters), compile=compiled), 2)
    plain = part_costs("block", setting(compile=compiled), 2)
    frozen = {parameter.name: parameter for parameter in adapted.parameters if parameter.frozen}
    assert frozen.keys() == {parameter.name for parameter in plain.parameters}
    small = sum(parameter.count for parameter in adapted.parameters) - sum(p.count for p in plain.parameters)
    assert small == sum(rank * sum(p.shape) for p in plain.parameters if p.kind == "matrix")
    products = {
        (costs, phase): sum(
            op.flops * op.times for op in part.costs.operations if op.kind == "matmul" and op.phase == phase
        )
        for costs, part in (("adapted", adapted), ("plain", plain))
        for phase in ("forward", "backward")
    }
    tokens = 2 * LENGTH
    assert products["adapted", "forward"] == products["plain", "forward"] + 2 * tokens * small
    assert products["adapted", "backward"] == products["plain", "backward"] // 2 + 4 * tokens * small
    assert any(op.weight_gradient for op in plain.costs.operations)


# --- floating-point operations -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "tp", "cp", "context", "compiled"),
    [
        (WIDE, 1, 1, "ring", False),
        (WIDE, 4, 1, "ring", True),
        (PLAIN, 2, 1, "ring", True),
        (PLAIN, 1, 1, "ring", False),
        (WIDE, 2, 2, "all_to_all", False),
        (WIDE, 1, 4, "ring", False),
    ],
)
def test_operations_of_all_parts_are_the_model_flops(
    model: LanguageModel, tp: int, cp: int, context: str, compiled: bool
) -> None:
    chosen = setting(model, tp=tp, cp=cp, context=context, compile=compiled)
    block, head = (part_costs(name, chosen, 2).costs for name in ("block", "head"))
    # Kernels repeat the scores in their backward pass: a fifth of it, which no model needs.
    repeated = sum(op.flops for op in block.operations if op.attention and op.attention.backward) // 5
    counted = model.n_layers * (block.flops() - repeated) + head.flops()
    expected = model_flops_per_token(model, LENGTH) * 2 * LENGTH // (tp * cp)
    if context == "ring" and cp > 1:
        # The ring leaves out half of other ranks' keys; along its own diagonal it does as every kernel.
        assert counted == pytest.approx(expected, rel=0.02)
    else:
        assert counted == expected
    assert part_costs("embedding", chosen, 2).costs.flops() == 0


@pytest.mark.parametrize("compiled", [False, True])
def test_full_recompute_repeats_the_forward_pass_but_for_its_last_matmul(compiled: bool) -> None:
    plain, full = (
        part_costs("block", setting(recompute=mode, compile=compiled), 1).costs  # type: ignore[arg-type]
        for mode in ("none", "full")
    )
    down = 2 * LENGTH * WIDE.d_model * WIDE.ff_size
    assert full.flops("recompute") == plain.flops("forward") - down
    assert full.flops("forward", "backward") == plain.flops()
    assert plain.flops("recompute") == 0


# --- what is kept ------------------------------------------------------------------------------------------------------


def test_kept_bytes_of_a_compiled_gated_block() -> None:
    h, f, a, g = WIDE.d_model, WIDE.ff_size, WIDE.n_heads, WIDE.kv_heads
    kv = h * g // a
    # Both norms' inputs and results; queries, keys and values as projected, of which only values are used, since a part of
    # a matrix keeps all of it; turned queries and keys; attention's result; its projection, from which the second norm's
    # input is added up again; the MLP's two halves, not their product; and what the norms and softmax keep of each row.
    numbers = (h + h) + (h + 2 * kv) + (h + kv) + h + h + h + 2 * f
    expected = LENGTH * (2 * numbers + 4 * a + 8)
    kept = part_costs("block", setting(), 1).costs.kept_bytes
    assert kept == pytest.approx(expected, abs=64)  # random state of attention's dropout


def wide_kept(kernel: Kernel, precision: str, *, compiled: bool = False) -> int:
    """Bytes kept of one sample, of numbers that have no kernel that shares keys and values."""
    chosen = setting(precision=precision, attention=kernel, compile=compiled)
    return part_costs("block", chosen, 1).costs.kept_bytes


def test_kept_bytes_of_32_bit_numbers_hold_keys_and_values_for_every_query_head() -> None:
    h, a, f = WIDE.d_model, WIDE.n_heads, WIDE.ff_size
    # Both norms' inputs and results; queries, keys, values and what attention makes of them, of as many heads each; the
    # MLP's two halves; one number a row and head, and one a row and norm. Nothing of the scores.
    numbers = 2 * (h + h) + 4 * h + 2 * f
    expected = LENGTH * 4 * (numbers + a + 2)
    assert wide_kept("efficient", "fp32") == pytest.approx(expected, abs=64)
    # A compiled block may keep another of equally many numbers, never more.
    assert wide_kept("efficient", "fp32", compiled=True) <= expected + 64


@pytest.mark.parametrize(("precision", "width"), [("fp64", 8), ("fp32", 4)])
def test_the_math_kernel_keeps_its_probabilities(precision: str, width: int) -> None:
    h, a, e, f = WIDE.d_model, WIDE.n_heads, WIDE.head_size, WIDE.ff_size
    probabilities = width * a * LENGTH**2
    rows = LENGTH * width * (2 * (h + h) + 4 * h + 2 * f + 2)
    # Tables of rotary angles are brought to 64 bits by each that uses them: sine and cosine, of queries and keys.
    tables = 4 * LENGTH * e // 2 * width if precision == "fp64" else 0
    assert wide_kept("math", precision) == pytest.approx(rows + tables + probabilities, abs=64)
    without = wide_kept("efficient", precision, compiled=True)
    # What the fused kernel keeps of each row is its own.
    difference = wide_kept("math", precision, compiled=True) - without
    assert difference == pytest.approx(probabilities, rel=0.05) and difference >= 0.95 * probabilities


@pytest.mark.parametrize("compiled", [False, True])
def test_scores_of_the_math_kernel_are_there_beside_their_probabilities(compiled: bool) -> None:
    scores = 8 * WIDE.n_heads * LENGTH**2
    costs = part_costs("block", setting(precision="fp64", attention="math", compile=compiled), 1).costs
    # Backward there are the probabilities, their gradients and those of the scores.
    assert costs.backward_peak > 3 * scores
    assert costs.forward_peak > (1 if compiled else 2) * scores
    # They are read and written by what runs, forward and backward.
    fused = part_costs("block", setting(precision="fp64", attention="efficient", compile=compiled), 1).costs
    assert costs.traffic() - fused.traffic() > 10 * scores


def test_kept_bytes_of_a_gelu_block_are_those_of_the_literature() -> None:
    # Korthikanti et al. 2022, section 4.1: 34 bytes a token and feature without what attention keeps of its scores.
    # Two of them are masks of dropout. Fused kernels keep one number a row and head, norms two a row.
    kept = part_costs("block", setting(PLAIN, compile=False), 1).costs.kept_bytes
    expected = LENGTH * (34 * PLAIN.d_model + 4 * PLAIN.n_heads + 2 * 8)
    assert kept == pytest.approx(expected, abs=64)


@pytest.mark.parametrize("compiled", [False, True])
def test_full_recompute_keeps_the_input_alone(compiled: bool) -> None:
    costs = part_costs("block", setting(recompute="full", compile=compiled, tp=2), 2).costs
    # PyTorch 2.11 keeps empty tensors in place of what is computed again.
    assert [kept.name for kept in costs.kept if kept.bytes] == ["input"]
    assert costs.kept_bytes == costs.input_bytes == costs.output_bytes == 2 * LENGTH // 2 * WIDE.d_model * 2


@pytest.mark.parametrize("samples", [1, 3])
@pytest.mark.parametrize("family", FAMILIES)
def test_kept_bytes_are_those_of_a_run_on_the_cpu(family: str, samples: int) -> None:
    model = FAMILIES[family]
    chosen = replace(setting(model), length=32, precision="fp32", attention="cpu", compile=False)
    assert part_costs("block", chosen, samples).costs.kept_bytes == kept_on_the_cpu(chosen, samples)


def kept_on_the_cpu(chosen: Setting, samples: int) -> int:
    """Bytes that autograd holds after a real forward pass of one block, parameters and shared tables left out."""
    stage = build_stage("block", chosen)
    arguments: Any = parts.block_arguments(stage, example_batch("block", stage, chosen, samples))
    (block,) = stage.part.blocks
    for module in block.modules():
        if isinstance(module, Attention):
            module.attend = attend
    block.to_empty(device="cpu")
    for parameter in block.parameters():
        nn.init.ones_(parameter)
    arguments = tree_map(real, arguments)
    given = [*block.parameters(), *(leaf for leaf in tree_leaves(arguments[1:]) if isinstance(leaf, Tensor))]
    known = {tensor.untyped_storage()._cdata for tensor in given}
    kept: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage()._cdata] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = block(*arguments)
    held = sum(tensor.untyped_storage().nbytes() for key, tensor in kept.items() if key not in known)
    result.sum().backward()
    return held


def real(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return torch.zeros(value.shape, dtype=value.dtype).requires_grad_(value.requires_grad)


@pytest.mark.parametrize(
    ("model", "tp", "recompute"), [(WIDE, 2, "none"), (WIDE, 2, "selective"), (PLAIN, 1, "none"), (WIDE, 1, "full")]
)
def test_compiled_blocks_keep_what_torch_compile_keeps(model: LanguageModel, tp: int, recompute: Any) -> None:
    chosen = setting(model, tp=tp, recompute=recompute)
    if model.dropout:
        # Traced on meta, PyTorch loses the gradient of dropout; see compat_compiler.
        chosen = setting(model.model_copy(update={"dropout": 0.0}), tp=tp, recompute=recompute)
    kept = part_costs("block", chosen, 3).costs.kept
    assert sum(part.bytes for part in kept if part.name != "input") == kept_by_torch_compile(chosen, 3)


def kept_by_torch_compile(chosen: Setting, samples: int) -> int:
    """Bytes that the forward program of a block hands to the backward program, by torch.compile itself."""
    torch._dynamo.reset()
    stage = build_stage("block", chosen)
    arguments = parts.block_arguments(stage, example_batch("block", stage, chosen, samples))
    (block,) = stage.part.blocks
    recompute_block(block, chosen.recompute)
    graphs: list[fx.Graph] = []

    def compiler(module: fx.GraphModule, _inputs: Any) -> Any:
        graphs.append(module.graph)
        results = outputs(module.graph)

        def run(*_: Any) -> list[Any]:
            values = [node.meta["val"] if isinstance(node, fx.Node) else node for node in results]
            return [torch.empty_like(v, device="meta") if isinstance(v, Tensor) else v for v in values]

        return make_boxed_func(run)

    backend = aot_autograd(
        fw_compiler=compiler,
        bw_compiler=compiler,
        partition_fn=partial(min_cut_rematerialization_partition, compiler="inductor"),
        decompositions=select_decomp_table(),
    )
    block.compile(backend=backend, dynamic=False)
    with _no_random_state():
        block(*arguments)
    kept = {source_node(node) for node in outputs(graphs[0])[1:] if isinstance(node, fx.Node)}
    return sum(element_count(node) * node.meta["val"].itemsize for node in kept if node.op == "call_function")


def outputs(graph: fx.Graph) -> list[Any]:
    return list(next(iter(reversed(graph.nodes))).args[0])  # type: ignore[arg-type]


# --- peaks -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_peaks_hold_what_must_be_there_at_once(compiled: bool, recompute: Any) -> None:
    costs = part_costs("block", setting(compile=compiled, recompute=recompute, tp=2, cp=2), 2).costs
    made = costs.kept_bytes - costs.input_bytes
    assert costs.forward_peak >= made + costs.output_bytes
    assert costs.backward_peak >= costs.kept_bytes + costs.output_bytes
    assert costs.backward_peak >= costs.gradient_bytes + costs.input_bytes
    everything = costs.traffic() + costs.kept_bytes + costs.output_bytes
    assert max(costs.forward_peak, costs.backward_peak) < everything


def test_the_head_never_holds_all_logits() -> None:
    samples = 64
    few, many = (part_costs("head", setting(chunk_tokens=chunk), samples).costs for chunk in (1024, samples * LENGTH))
    logits = samples * LENGTH * WIDE.vocab_size * 2
    # Logits and their gradients at once; with sixteen chunks of tokens also the gradients of the chunk before, which the
    # loop still holds, and the weight's gradient in float32.
    weight = WIDE.vocab_size * WIDE.d_model * 4
    assert many.forward_peak - few.forward_peak == pytest.approx(2 * logits - 3 * logits / 16 - weight, abs=64)
    assert few.flops() == many.flops()
    assert few.kept_bytes == many.kept_bytes


# --- communication -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("tp", [2, 4])
def test_tensor_parallel_blocks_gather_twice_and_scatter_twice_each_way(tp: int, compiled: bool) -> None:
    costs = part_costs("block", setting(tp=tp, compile=compiled), 2).costs
    whole = 2 * LENGTH * WIDE.d_model * 2
    for phase in ("forward", "backward"):
        found = costs.collectives(phase)
        assert [c.operation for c in found].count("all_gather") == 2
        assert [c.operation for c in found].count("reduce_scatter") == 2
        assert {(c.axis, c.size, c.bytes) for c in found} == {("tp", tp, whole)}
    assert part_costs("block", setting(), 2).costs.collectives() == []


@pytest.mark.parametrize("compiled", [False, True])
def test_a_ring_sends_keys_and_values_round_and_their_gradients_home(compiled: bool) -> None:
    size = 4
    costs = part_costs("block", setting(cp=size, compile=compiled), 2).costs
    own = 2 * WIDE.kv_heads * WIDE.head_size * 2 * LENGTH // size * 2
    forward, backward = ([c.bytes for c in costs.collectives(phase)] for phase in ("forward", "backward"))
    assert forward == [own] * (size - 1)
    # Gradients travel in float32 and make one more step than keys and values.
    assert sorted(backward) == [own] * (size - 1) + [2 * own] * size


@pytest.mark.parametrize("compiled", [False, True])
def test_exchanged_heads_travel_as_queries_keys_values_and_results(compiled: bool) -> None:
    costs = part_costs("block", setting(cp=4, context="all_to_all", compile=compiled), 1).costs
    q, kv = (heads * WIDE.head_size * LENGTH // 4 * 2 for heads in (WIDE.n_heads, WIDE.kv_heads))
    for phase in ("forward", "backward"):
        assert sorted(c.bytes for c in costs.collectives(phase)) == [kv, kv, q, q]  # type: ignore[arg-type]


# --- other micro-batches -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "compiled"),
    [
        ({}, False),
        ({"tp": 2, "recompute": "selective"}, True),
        ({"tp": 2, "cp": 2, "recompute": "full"}, True),
        ({"cp": 4, "context": "all_to_all"}, False),
        ({"model": PLAIN}, True),
        ({"model": MPT.model_copy(update={"d_model": 96}), "attention": "efficient", "length": 64}, False),
        ({"precision": "fp32", "attention": "math"}, False),
    ],
)
def test_derived_costs_are_the_traced_ones(changes: dict[str, Any], compiled: bool) -> None:
    chosen = setting(compile=compiled, **{"model": WIDE, **changes})
    traced = parts._trace_part(parts._Trace("block", chosen, 4))
    costs, derived = traced.timeline.costs(Scale()), part_costs("block", chosen, 4)
    assert derived.costs == costs
    assert derived.costs.operations == costs.operations
    assert derived.shared == parts._kept_together(traced, Scale())


@pytest.mark.parametrize("tp", [1, 2])
def test_a_compiled_loss_of_any_number_of_tokens_is_the_traced_one(tp: int, monkeypatch: pytest.MonkeyPatch) -> None:
    # 512 tokens in chunks of 192: two whole ones, and one of 128.
    chosen = setting(compile=True, tp=tp, chunk_tokens=192)
    derived = parts._trace_part(parts._Trace("head", chosen, 2)).timeline.costs(Scale())
    monkeypatch.setattr("phalanx.planner.trace.compiled_block._unlike_rows", lambda tensors: len(tensors[0]))
    traced = parts._trace_part.__wrapped__(parts._Trace("head", chosen, 2)).timeline.costs(Scale())
    assert derived == traced
    assert derived.operations == traced.operations


# --- parameters --------------------------------------------------------------------------------------------------------


def count_multiplied(part: PartCosts) -> int:
    return sum(parameter.count for parameter in part.parameters if parameter.kind == "matrix")


@pytest.mark.parametrize("model", [WIDE, PLAIN, LLAMA, GPT, MPT])
def test_parts_hold_the_parameters_of_the_model(model: LanguageModel) -> None:
    embedding, block, head = (part_costs(name, setting(model), 1) for name in ("embedding", "block", "head"))
    by_name = {parameter.name: parameter for part in (embedding, head) for parameter in part.parameters}
    ends = sum(parameter.count for parameter in by_name.values())
    assert ends + model.n_layers * block.parameter_count == parameter_count(model)
    if not model.tied_head:
        multiplied = count_multiplied(head) + model.n_layers * count_multiplied(block)
        assert multiplied == matmul_parameters(model)
    assert count_multiplied(embedding) == 0


def test_gradients_cover_the_parameters_and_are_marked() -> None:
    for compiled in (False, True):
        part = part_costs("block", setting(tp=2, compile=compiled), 1)
        assert part.costs.gradient_bytes == 2 * part.parameter_count
        marked = [op for op in part.costs.operations if op.weight_gradient and op.matmul]
        assert len(marked) == 4
        assert {op.phase for op in marked} == {"backward"}


def test_sharded_rows_are_padded() -> None:
    parameter = PartParameter("blocks.0.mlp.down.weight", (10, 6), "matrix", split=False)
    assert [parameter.sharded_count(ranks) for ranks in (1, 2, 4, 10, 64)] == [60, 30, 18, 6, 6]


def test_parameters_say_whether_tensor_parallel_ranks_hold_them_alike() -> None:
    part = part_costs("block", setting(tp=4), 1)
    alike = {parameter.name for parameter in part.parameters if not parameter.split}
    assert alike == {"blocks.0.attention_norm.weight", "blocks.0.mlp_norm.weight"}
    assert part.largest_parameter.shape == (2 * WIDE.ff_size // 4, WIDE.d_model)


@pytest.mark.parametrize("model", [LLAMA, MPT])
def test_streamed_blocks_in_a_ring_compute_what_whole_ones_do(model: LanguageModel) -> None:
    chosen = setting(model, length=32, cp=2, compile=False)
    whole, streamed = (part_costs("block", replace(chosen, streamed=ranks), 2) for ranks in (1, 4))
    assert streamed.chains
    assert streamed.costs.flops("forward") == whole.costs.flops("forward") > 0


@pytest.mark.parametrize("kernel", ["flex", "math"])
@pytest.mark.parametrize("compiled", [False, True])
def test_sinks_are_part_of_attention_and_get_gradients(kernel: Kernel, compiled: bool) -> None:
    sizes = {"n_layers": 2, "d_model": 64, "n_heads": 4, "d_ff": 128, "vocab_size": 64, "max_positions": 128}
    plain, joined = (
        part_costs(
            "block", Setting(LanguageModel.model_validate(sizes | more), 128, attention=kernel, compile=compiled), 1
        )
        for more in ({"sliding_window": 32}, {"sliding_window": 32, "attention_sinks": True})
    )
    assert joined.parameter_count == plain.parameter_count + 4
    assert joined.costs.gradient_bytes == plain.costs.gradient_bytes + 4 * 2


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("precision", ["fp8-tensor", "fp8-row", "fp8-block"])
def test_weights_in_8_bits_are_there_when_a_pass_begins(precision: str, compiled: bool) -> None:
    # In bytes as they are read from 16 bits, of all matrices of a block: q, k, v and output, and the three of its MLP.
    weights = 2 * (512 * (512 + 2 * 256) + 512 * 512 + 3 * 512 * 1024)
    read = {}
    for once in (True, False):
        chosen = setting(precision=precision, compile=compiled, quantises_once=once)
        costs = part_costs("block", chosen, 1).costs
        forward = [op for op in costs.operations if op.phase == "forward"]
        read[once] = sum(op.bytes_read for op in forward)
    # One finds the largest numbers, where blocks do not have their own: of a tensor in two steps where nothing is fused.
    passes = {"fp8-tensor": 2 if compiled else 3, "fp8-row": 2, "fp8-block": 1}[precision]
    assert read[False] - read[True] == pytest.approx(passes * weights, rel=0.03)
