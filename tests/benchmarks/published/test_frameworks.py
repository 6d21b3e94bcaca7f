"""Other programs, emulated: how each changes what a part of the model runs, and what its host does not pay for."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from phalanx.config.model import LanguageModel
from phalanx.hardware.collectives import default_constants
from phalanx.hardware.machine import load_machine
from phalanx.layout.spec import LayoutTable, ResolvedLayout
from phalanx.planner.measured.measured_groups import System
from phalanx.planner.time.framework import COMPILED
from phalanx.planner.time.operation_time import Direction, Form, OperationTable, PartBreakdown, operation_rows
from phalanx.planner.time.part_time import part_times, parts_of
from phalanx.planner.time.profile import NamedProfile, default_profile
from phalanx.planner.time.step_parts import steps_of
from phalanx.planner.time.step_time import StepBreakdown
from phalanx.planner.trace.expert_loads import BALANCED
from phalanx.planner.trace.operations import Attention, Operation
from phalanx.planner.trace.traced_model import Setting
from published.frameworks import OtherFramework, framework_of, times_of_parts, unfused
from published.groups import PublishedGroup

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
PLAIN = OtherFramework(compiled=False)


def _rows(
    framework: OtherFramework, tp: int = 1, recompute: str = "none", setting: Setting = SETTING
) -> OperationTable:
    setting = replace(setting, tp=tp, recompute=recompute)  # type: ignore[arg-type]
    return OperationTable.of(operation_rows(0, framework.part_operations("block", setting, 2)))


def test_unfused_attention_multiplies_whole_score_matrices() -> None:
    fused, unfused = (_rows(replace(PLAIN, fused_attention=way)) for way in (True, False))
    scores = 2 * MODEL.n_heads * 256**2 * MODEL.head_size
    flops = unfused.flops[unfused.component == PartBreakdown.ATTENTION].sum()
    assert flops == 6 * 2 * scores
    # Fused, it leaves out the upper half and computes the scores once more.
    assert fused.flops[fused.component == PartBreakdown.ATTENTION].sum() == 7 * scores


@pytest.mark.parametrize(
    ("samples", "heads", "length", "fused"), [(2, 2, 1024, True), (1, 2, 1024, False), (2, 2, 8192, False)]
)
def test_scores_pass_through_memory_once_where_the_softmax_kernel_takes_them(
    samples: int, heads: int, length: int, fused: bool
) -> None:
    attention = Attention(samples, heads, heads, length, length, 64, causal=True, backward=False, width=2)
    op = Operation("attention", "attention", "forward", torch.bfloat16, 0, 0, 0, attention=attention)
    table = OperationTable.of(operation_rows(0, unfused(op, False)))
    passes = table.bytes[table.form == Form.TRAFFIC] / (samples * heads * length**2)
    assert passes.tolist() == ([4] if fused else [6, 8, 8, 8, 6])


def test_a_bias_behind_a_split_matrix_is_added_with_the_residual() -> None:
    biased = replace(SETTING, model=MODEL.model_copy(update={"bias": True}), tp=2)
    ways = (replace(PLAIN, fused_residual=way) for way in (False, True))
    apart, together = (_rows(way, 2, setting=biased) for way in ways)
    # Behind attention and behind the MLP: a rank's half of the two samples is read and written once less, the bias read.
    half = 2 * 256 * MODEL.d_model // 2
    assert len(apart) - len(together) == 2
    assert apart.bytes.sum() - together.bytes.sum() == 2 * 2 * (2 * half + MODEL.d_model)
    # Without a bias there is nothing to add with it.
    assert len(_rows(replace(PLAIN, fused_residual=True), tp=2)) == len(_rows(PLAIN, tp=2))


def test_without_sequence_parallelism_sums_replace_gathers() -> None:
    split, whole = (_rows(replace(PLAIN, sequence_parallel=way), tp=2) for way in (True, False))
    assert np.sum(split.form == Form.ALL_GATHER) == np.sum(split.form == Form.REDUCE_SCATTER) == 4
    assert np.sum(whole.form == Form.ALL_REDUCE) == 4
    assert not np.any((whole.form == Form.ALL_GATHER) | (whole.form == Form.REDUCE_SCATTER))
    # Norms and sums pass over all positions on each rank.
    norms = [table.bytes[(table.component == PartBreakdown.MEMORY) & ~table.weight] for table in (split, whole)]
    assert norms[1].max() >= norms[0].max()


def test_plain_recompute_runs_the_forward_pass_again() -> None:
    none, full = _rows(PLAIN), _rows(PLAIN, recompute="full")
    forward = none.flops[none.direction == Direction.FORWARD].sum()
    assert full.flops.sum() == none.flops.sum() + forward


MIXTURE = LanguageModel.model_validate(
    {
        "n_layers": 2,
        "d_model": 512,
        "n_heads": 4,
        "d_ff": 512,
        "vocab_size": 1024,
        "max_positions": 256,
        "experts": {"count": 16, "active": 4, "d_ff": 256},
        "latent": {"query_rank": 96, "key_value_rank": 64, "rope_size": 32, "nope_size": 64, "value_size": 64},
    }
)
SPREAD = Setting(MIXTURE, 256, ep=8, precision="mxfp8", compile=False, loads=BALANCED)


def test_scales_of_steps_before_cost_no_pass_and_biases_none() -> None:
    setting = replace(SETTING, precision="fp8-tensor", model=MODEL.model_copy(update={"bias": True}))
    now, before = (replace(PLAIN, delayed_scales=way).part_operations("block", setting, 2) for way in (False, True))
    (seen, kept) = ([op.name for op in operations] for operations in (now, before))
    # Four layers: rows and weights forward, gradients and weights backward, whose scales are those of the forward pass.
    assert seen.count("quantise") == kept.count("quantise") == 16
    assert seen.count("abs") == 12 and "abs" not in kept
    assert seen.count("sum") - kept.count("sum") == 4
    # Sums of two tensors stay, residuals among them.
    adds = [[op for op in operations if op.phase == "forward" and op.name == "add"] for operations in (now, before)]
    assert (
        adds[1] == [op for op in adds[0] if op.bytes_read >= 2 * op.bytes_written] and len(adds[0]) > len(adds[1]) > 1
    )
    assert [op for op in now if op.matmul] == [op for op in before if op.matmul]


def test_sums_over_micro_batches_cost_megatron_bridge_no_pass_of_their_own() -> None:
    names = ("Megatron-Bridge 26.04", "Primus Megatron", "Megatron-LM")
    found = [framework for name in names if (framework := framework_of(name)) is not None]
    # Megatron-LM's gradients are 32-bit numbers.
    assert [framework.sum_bytes for framework in found] == [0, 6, 10]


def test_experts_multiply_numbers_of_8_bits_that_are_made_of_their_rows() -> None:
    ours, theirs = (_rows(replace(PLAIN, experts_in_8_bits=way), setting=SPREAD) for way in (False, True))
    grouped = [table.take(table.form == Form.GROUPED) for table in (ours, theirs)]
    assert set(grouped[0].width) == {2} and set(grouped[1].width) == {1}
    assert grouped[0].flops.tolist() == grouped[1].flops.tolist()
    # A pass before each product of rows, but for weight gradients, which meet numbers that were made before.
    assert len(theirs) - len(ours) == np.sum(~grouped[0].weight)
    plain = replace(SPREAD, precision="bf16")
    assert len(_rows(replace(PLAIN, experts_in_8_bits=True), setting=plain)) == len(_rows(PLAIN, setting=plain))


def test_rows_that_go_once_to_a_rank_are_fewer_by_those_for_several_of_its_experts() -> None:
    ours, theirs = (_rows(replace(PLAIN, rows_once_a_rank=way), setting=SPREAD) for way in (False, True))
    sent = [table.bytes[table.component == PartBreakdown.EP].sum() for table in (ours, theirs)]
    # Four draws among eight ranks.
    drawn = np.random.default_rng(0).integers(0, 8, (100_000, 4))
    ranks = np.mean([len(set(row)) for row in drawn.tolist()])
    assert sent[1] / sent[0] == pytest.approx(ranks / 4, rel=0.005)


def test_rows_go_to_the_ranks_of_the_groups_that_a_router_chose() -> None:
    assert MIXTURE.experts is not None
    experts = MIXTURE.experts.model_copy(update={"groups": 4, "active_groups": 2})
    limited = replace(SPREAD, model=MIXTURE.model_copy(update={"experts": experts}))
    tables = [_rows(replace(PLAIN, rows_once_a_rank=True), setting=setting) for setting in (SPREAD, limited)]
    sent = [table.bytes[table.component == PartBreakdown.EP].sum() for table in tables]
    # Four draws among eight ranks, and among the four of two groups.
    assert sent[1] / sent[0] == pytest.approx(4 * (1 - 0.75**4) / (8 * (1 - 0.875**4)), rel=1e-3)


def test_activations_behind_products_show_as_far_as_these_are_shorter() -> None:
    machine = load_machine("dgx-h100")
    parts = parts_of([("block", replace(SETTING, tp=8), 2)], PLAIN)
    shown, hidden = (
        times_of_parts(replace(PLAIN, hides_tp=way), parts, machine, default_constants(machine), PROFILE).seconds
        for way in (False, True)
    )
    exchanged = shown[..., PartBreakdown.TP]
    behind = np.minimum(exchanged, PROFILE.hidden * shown[..., PartBreakdown.MATMUL])
    assert np.all(behind > 0)
    assert hidden[..., PartBreakdown.TP] == pytest.approx(exchanged - (1 - PROFILE.slowdown) * behind)
    assert hidden.sum() - shown.sum() == pytest.approx(-(1 - PROFILE.slowdown) * behind.sum())


def test_rows_behind_another_micro_batch_show_as_far_as_that_computes_less() -> None:
    machine = load_machine("dgx-h100")
    constants = default_constants(machine)
    parts = parts_of([("block", SPREAD, 2)], PLAIN)
    shown, hidden = (
        times_of_parts(replace(PLAIN, hides_rows=way), parts, machine, constants, PROFILE).seconds
        for way in (False, True)
    )
    computing = shown[..., [PartBreakdown.MATMUL, PartBreakdown.ATTENTION, PartBreakdown.MEMORY]].sum(axis=2)
    exchanged = shown[..., PartBreakdown.EP]
    behind = np.minimum(exchanged, PROFILE.hidden * computing)
    assert np.all(behind > 0)
    left = exchanged - behind + PROFILE.slowdown * behind
    assert hidden[..., PartBreakdown.EP] == pytest.approx(left)
    assert hidden.sum() - shown.sum() == pytest.approx((left - exchanged).sum())


def test_attention_to_latents_sums_values_as_narrow_as_they_are() -> None:
    attention = [op.attention for op in PLAIN.part_operations("block", SPREAD, 2) if op.attention]
    scores = 2 * 4 * 256**2
    assert [x.flops for x in attention] == [scores * (96 + 64), scores * (3 * 96 + 2 * 64)]


def test_a_program_is_known_by_the_start_of_its_name() -> None:
    assert framework_of("Phalanx 0.1") == COMPILED
    assert framework_of("nobody's trainer") is None
    megatron = framework_of("Megatron-LM", "unfused", sequence_parallel=True)
    assert isinstance(megatron, OtherFramework) and megatron.sequence_parallel and not megatron.fused_attention
    flash = framework_of("GPT-NeoX", "flash2")
    assert isinstance(flash, OtherFramework) and flash.fused_attention


def test_constants_of_other_programs_hold_what_uncompiled_blocks_take() -> None:
    profile = NamedProfile("one", "H200", "", replace(PROFILE, eager_share=0.5, kernel_s=0.0))
    megatron, torchtitan = framework_of("Megatron-LM"), framework_of("torchtitan")
    assert isinstance(megatron, OtherFramework) and isinstance(torchtitan, OtherFramework)
    machine, parts = load_machine("h200-x4"), parts_of([("block", SETTING, 8)], megatron)
    slow, fast = (
        part_times(parts, machine, default_constants(machine), one.profile).seconds[0, :, PartBreakdown.MEMORY]
        for one in (profile, megatron.as_it_runs(profile))
    )
    assert slow.tolist() == pytest.approx((2 * fast).tolist())


def test_hosts_of_other_programs_do_not_pay_for_exchanges() -> None:
    machine = load_machine("h200-x4")
    layouts = [ResolvedLayout(global_batch=64, dp_shard=4, zero=3, reshard_after_forward=True)]
    for name, pays in (("Megatron-LM", False), ("torchtitan", True)):
        framework = framework_of(name)
        assert framework is not None
        candidates = LayoutTable.from_rows(layouts)
        steps = steps_of(replace(SETTING, compile=False), candidates, machine, framework)
        group = PublishedGroup(System("h200-x4", machine), framework, (), steps)
        dear, free = (
            group.step_times(NamedProfile("one", "H200", "", replace(PROFILE, shard_host_s=shard))).of(
                StepBreakdown.HOST
            )
            for shard in (1e-2, 0.0)
        )
        assert bool(dear[0] > free[0] + 1.0) == pays
