"""Which layouts are legal: every rule refuses with its numbers and the nearest legal choice."""

from __future__ import annotations

import pytest

from layout_runs import Fields, refusal, run_with
from phalanx.families.registry import bind
from phalanx.layout.resolve import resolve_layout

ZERO_BUBBLE: Fields = {"pp": 2, "schedule": "interleaved_zero_bubble"}

TWO_EXPERTS: Fields = {"model.experts": {"count": 2, "active": 1, "d_ff": 30}}

RULES: dict[str, tuple[Fields, Fields, int, list[str]]] = {
    "product of the degrees": (
        {"dp_shard": 2, "tp": 2, "pp": 2},
        {},
        16,
        [
            "layout.dp_shard=2 x layout.tp=2 x layout.pp=2 = 8 ranks, but 16 were started",
            "nearest legal: dp_shard=4 tp=2 pp=2, or dp_replicate=2 dp_shard=2 tp=2 pp=2",
        ],
    ),
    "shards without anything to share": (
        {"dp_shard": 4, "dp_replicate": 2, "zero": 0},
        {},
        8,
        [
            "layout.zero=0 keeps everything on every rank, so layout.dp_shard=4 has nothing to share out",
            "nearest legal: dp_replicate=8 dp_shard=1",
        ],
    ),
    "resharding what is not shared out": (
        {"zero": 2, "reshard_after_forward": True},
        {},
        4,
        [
            "layout.reshard_after_forward=true frees gathered parameters, which layout.zero=2 never shares out",
            "nearest legal: reshard_after_forward=auto, or zero=3",
        ],
    ),
    "slices of several experts": (
        {"dp_shard": 4, "expert_tp": 2},
        TWO_EXPERTS,
        4,
        [
            "layout.expert_tp=2 shares out single experts, but layout.ep=1 leaves several of model.experts.count=2 on a "
            "rank: a larger layout.ep keeps as little on each rank, and sends each row once",
            "nearest legal: expert_tp=1",
        ],
    ),
    "slices of an expert": (
        {"dp_shard": 8, "ep": 2, "expert_tp": 4},
        TWO_EXPERTS,
        8,
        [
            "layout.expert_tp=4 does not divide model.experts.d_ff (30 parts)",
            "nearest legal: expert_tp=1, or ep=1 expert_tp=1",
        ],
    ),
    "ranks for slices": (
        {"dp_shard": 2, "ep": 2, "expert_tp": 2},
        TWO_EXPERTS,
        2,
        [
            "layout.ep=2 x layout.expert_tp=2 = 4 does not divide layout.dp_shard=2 x layout.cp=1 x layout.tp=1 = 2 ranks, "
            "which it takes its ranks from",
            "nearest legal: expert_tp=1, or ep=1 expert_tp=1",
        ],
    ),
    "chunks of positions": (
        {"dp_shard": 2, "ep": 2, "ep_chunks": 5},
        TWO_EXPERTS,
        2,
        [
            "layout.ep_chunks=5 does not divide the positions of a sample on each rank: data.sequence_length=32 over "
            "layout.cp=1 x layout.tp=1",
            "nearest legal: ep_chunks=1",
        ],
    ),
    "ranks of a node that pass rows on": (
        {"dp_shard": 8, "ep": 2, "expert_tp": 4, "ep_node": 3},
        {"model.experts": {"count": 2, "active": 1, "d_ff": 32}},
        8,
        [
            "layout.ep_node=3 does not divide layout.ep=2 x layout.expert_tp=4 = 8 ranks, which it takes to be so many on a "
            "node",
            "nearest legal: ep_node=auto",
        ],
    ),
    "capacity of experts": (
        {"dp_shard": 2, "tp": 2},
        {"model.experts": {"count": 2, "active": 1, "d_ff": 30, "capacity_factor": 1.5}},
        4,
        [
            "model.experts.capacity_factor=1.5 counts the tokens of whole sequences, of which ranks of layout.tp=2 and "
            "layout.cp=1 have parts; spread experts over layout.dp_shard",
            "nearest legal: dp_shard=4 tp=1, or dp_replicate=2 dp_shard=2 tp=1",
        ],
    ),
    "heads": (
        {"tp": 8},
        {},
        8,
        [
            "layout.tp=8 does not divide model.n_kv_heads (4 parts)",
            "nearest legal: dp_shard=2 tp=4, or dp_replicate=2 tp=4",
        ],
    ),
    "the width of the MLP": (
        {"tp": 4},
        {"model.d_ff": 66},
        4,
        [
            "layout.tp=4 does not divide model.d_ff (66 parts)",
            "nearest legal: dp_shard=2 tp=2, or dp_replicate=2 tp=2",
        ],
    ),
    "blocks of 8-bit numbers with one scale": (
        {"tp": 2, "precision": "fp8-block"},
        {"model.d_ff": 256, "model.head_dim": 16},
        2,
        [
            "layout.precision=fp8-block: layout.tp=2 gives ranks 64 of the 128 features of model.n_heads, which "
            "is no multiple of the 128 that share a scale",
            "nearest legal: dp_shard=2 tp=1, or dp_replicate=2 tp=1",
        ],
    ),
    "moments in 8 bits with one scale": (
        {"tp": 2},
        {"model.d_ff": 96, "model.head_dim": 32, "optimizer.name": "adamw8bit"},
        2,
        [
            "optimizer.name=adamw8bit: layout.tp=2 gives ranks 48 of the 96 features of model.d_ff, which is no multiple of "
            "the 32 that share a scale",
            "nearest legal: optimizer.name=adamw",
        ],
    ),
    "moments of parts of an expert": (
        {"dp_shard": 8, "ep": 4, "expert_tp": 2},
        {
            "optimizer.name": "adamw8bit",
            "model.experts": {"count": 4, "active": 2, "d_ff": 32},
        },
        8,
        [
            "optimizer.name=adamw8bit: layout.expert_tp=2 cuts model.experts.d_ff within the 32 features that share a scale",
            "nearest legal: expert_tp=1, or optimizer.name=adamw",
        ],
    ),
    "moments in 8 bits of streamed matrices": (
        {"dp_shard": 2, "gather": "stream"},
        {"optimizer.name": "adamw8bit"},
        2,
        [
            "layout.gather=stream cuts matrices where features end, and with optimizer.name=adamw8bit 32 of them share a "
            "scale",
            "nearest legal: gather=layer, or optimizer.name=adamw",
        ],
    ),
    "8-bit numbers in chunks": (
        {"dp_shard": 2, "gather": "stream", "precision": "fp8-row"},
        {},
        2,
        [
            "layout.gather=stream has chunks of a matrix, and scales of layout.precision=fp8-row are found from "
            "whole ones",
            "nearest legal: gather=layer",
        ],
    ),
    "slices of experts in 8 bits": (
        {"dp_shard": 4, "ep": 2, "expert_tp": 2, "precision": "fp8-row-experts"},
        {"model.experts": {"count": 2, "active": 1, "d_ff": 64}},
        4,
        [
            "layout.expert_tp=2 cuts the features of an expert that share a scale in layout.precision=fp8-row-experts",
            "nearest legal: expert_tp=1",
        ],
    ),
    "8-bit gradients apart": (
        {"pp": 2, "schedule": "zbv", "precision": "fp8-tensor"},
        {},
        2,
        [
            "layout.schedule=zbv asks for gradients of inputs and of weights apart, which "
            "layout.precision=fp8-tensor quantises and forms together",
            "nearest legal: schedule=interleaved_1f1b",
        ],
    ),
    "rows of the vocabulary": (
        {"tp": 4},
        {"model.vocab_size": 6},
        4,
        [
            "layout.tp=4 leaves some ranks without a row of model.vocab_size=6",
            "nearest legal: dp_shard=2 tp=2, or dp_replicate=2 tp=2",
        ],
    ),
    "positions in a ring": (
        {"cp": 4},
        {"data.sequence_length": 36},
        4,
        [
            "data.sequence_length=36 is not a multiple of 2 x layout.cp (an early and a late part for each rank) = 8",
            "nearest legal: dp_shard=2 cp=2, or dp_replicate=2 cp=2",
        ],
    ),
    "positions exchanged for heads": (
        {"cp": 4, "context": "all_to_all"},
        {"data.sequence_length": 34},
        4,
        [
            "data.sequence_length=34 is not a multiple of layout.cp = 4",
            "nearest legal: dp_shard=2 cp=2, or dp_replicate=2 cp=2",
        ],
    ),
    "positions between matrices": (
        {"cp": 2, "tp": 4},
        {"data.sequence_length": 36},
        8,
        [
            "data.sequence_length=36 over layout.cp=2 ranks leaves 18 positions, which layout.tp=4 does not divide",
            "nearest legal: dp_shard=2 cp=1 tp=4, or dp_shard=2 cp=2 tp=2",
        ],
    ),
    "heads to exchange": (
        {"cp": 4, "tp": 2, "context": "all_to_all"},
        {},
        8,
        [
            "layout.context=all_to_all gives each rank whole heads, but layout.cp=4 does not divide "
            "model.n_kv_heads=4 over layout.tp=2",
            "nearest legal: context=ring",
        ],
    ),
    "heads to exchange, and too few positions for a ring": (
        {"cp": 8, "context": "all_to_all"},
        {"data.sequence_length": 8},
        8,
        [
            "layout.context=all_to_all gives each rank whole heads, but layout.cp=8 does not divide "
            "model.n_kv_heads=4 over layout.tp=1",
            "nearest legal: dp_shard=2 cp=4, or dp_replicate=2 cp=4",
        ],
    ),
    "one stage a rank": (
        {"pp": 2, "schedule": "gpipe", "stages_per_rank": 2},
        {},
        2,
        [
            "layout.schedule=gpipe has one stage on each rank, not layout.stages_per_rank=2",
            "nearest legal: stages_per_rank=1",
        ],
    ),
    "there and back again": (
        {"pp": 2, "schedule": "zbv", "stages_per_rank": 1},
        {},
        2,
        [
            "layout.schedule=zbv has two stages on each rank, not layout.stages_per_rank=1",
            "nearest legal: stages_per_rank=2",
        ],
    ),
    "stages to interleave": (
        {"pp": 2, "schedule": "interleaved_1f1b", "stages_per_rank": 1},
        {},
        2,
        [
            "layout.schedule=interleaved_1f1b needs at least two stages on each rank, not layout.stages_per_rank=1",
            "nearest legal: stages_per_rank=2, or schedule=1f1b",
        ],
    ),
    "layers for each stage": (
        {"pp": 4, "schedule": "interleaved_1f1b"},
        {"model.n_layers": 7},
        4,
        [
            "layout.pp=4 x layout.stages_per_rank=2 = 8 stages, more than the model.n_layers=7 layers they would hold",
            "nearest legal: dp_shard=2 pp=2, or dp_replicate=2 pp=2",
        ],
    ),
    "split backward passes and resharding": (
        {**ZERO_BUBBLE, "reshard_after_forward": True},
        {},
        4,
        [
            "layout.schedule=interleaved_zero_bubble with layout.reshard_after_forward=true gives wrong gradients: "
            "parameters gathered for the gradients of inputs are freed before those of weights are computed",
            "nearest legal: reshard_after_forward=auto",
        ],
    ),
    "split backward passes and recompute": (
        {**ZERO_BUBBLE, "recompute": "full"},
        {},
        4,
        [
            "layout.schedule=interleaved_zero_bubble reads activations twice, which recomputed ones "
            "(layout.recompute=full) cannot be",
            "nearest legal: recompute=none, or schedule=interleaved_1f1b",
        ],
    ),
    "split backward passes and compiled blocks": (
        {**ZERO_BUBBLE, "schedule": "zbv"},
        {"training.compile": True},
        4,
        [
            "layout.schedule=zbv splits the backward pass of a stage, which compiled blocks do not allow",
            "nearest legal: training.compile=auto, or schedule=interleaved_1f1b",
        ],
    ),
    "a tied head at both ends of one rank": (
        {**ZERO_BUBBLE, "schedule": "zbv"},
        {"model.tied_head": True},
        4,
        [
            "layout.schedule=zbv has the first and the last stage on one rank, where a tied head would be sharded twice",
            "nearest legal: schedule=interleaved_zero_bubble or interleaved_1f1b",
        ],
    ),
    "samples for each rank": (
        {"microbatch": 2, "global_batch": 18},
        {},
        4,
        [
            "layout.global_batch=18 samples is not a multiple of layout.microbatch=2 x 4 data-parallel ranks = 8",
            "nearest legal: dp_shard=1 pp=4, or dp_shard=1 tp=2 pp=2",
        ],
    ),
    "samples for each rank and micro-batches for each stage": (
        {"global_batch": 13, "pp": 4},
        {},
        8,
        [
            "layout.global_batch=13 samples is not a multiple of layout.microbatch=1 x 2 data-parallel ranks = 2",
            "nearest legal: dp_shard=1 tp=2 pp=4, or dp_shard=1 cp=2 pp=4",
        ],
    ),
    "micro-batches for each stage": (
        {"global_batch": 3, "pp": 4},
        {},
        4,
        [
            "the 3 micro-batches a rank computes (layout.global_batch over data ranks and layout.microbatch) are fewer than "
            "the 4 stages of layout.schedule=1f1b",
            "nearest legal: schedule=gpipe",
        ],
    ),
    "rounds of micro-batches": (
        {"global_batch": 11, "pp": 4, "schedule": "interleaved_1f1b"},
        {"model.n_layers": 8},
        4,
        [
            "the 11 micro-batches a rank computes (layout.global_batch over data ranks and layout.microbatch) do not divide "
            "into 2 equal rounds of layout.schedule=interleaved_1f1b",
            "nearest legal: tp=4 pp=1, or cp=2 tp=2 pp=1",
        ],
    ),
    "nodes": (
        {"tp": 4},
        {"cluster.devices_per_node": 6},
        4,
        [
            "layout.tp=4 groups do not fit into nodes of 6 devices",
            "nearest legal: tp_across_nodes=true",
        ],
    ),
    "two reasons that one change mends": (
        {**ZERO_BUBBLE, "recompute": "selective"},
        {"training.compile": True},
        2,
        [
            "layout.schedule=interleaved_zero_bubble reads activations twice, which recomputed ones "
            "(layout.recompute=selective) cannot be",
            "layout.schedule=interleaved_zero_bubble splits the backward pass of a stage, "
            "which compiled blocks do not allow",
            "nearest legal: schedule=interleaved_1f1b, or recompute=none training.compile=auto",
        ],
    ),
    "other fields and other degrees": (
        {"tp": 8, "zero": 2, "reshard_after_forward": True},
        {},
        8,
        [
            "layout.reshard_after_forward=true frees gathered parameters, which layout.zero=2 never shares out",
            "layout.tp=8 does not divide model.n_kv_heads (4 parts)",
            "nearest legal: reshard_after_forward=auto dp_shard=2 tp=4, or reshard_after_forward=auto dp_replicate=2 tp=4",
        ],
    ),
}


@pytest.mark.parametrize("rule", RULES)
def test_an_illegal_layout_is_refused_with_its_numbers_and_what_is_near(rule: str) -> None:
    layout, elsewhere, world, message = RULES[rule]
    assert refusal(run_with(elsewhere, **layout), world) == message


def test_the_launcher_says_how_many_devices_a_node_has_unless_the_run_file_does() -> None:
    assert refusal(run_with(tp=4), 4, devices_per_node=2)[0] == "layout.tp=4 groups do not fit into nodes of 2 devices"
    assert resolve_layout(bind(run_with({"cluster.devices_per_node": 8}, tp=4)), 4, devices_per_node=2).tp == 4
    assert resolve_layout(bind(run_with(tp=4, tp_across_nodes=True)), 4, devices_per_node=2).tp == 4


def test_no_choice_may_be_legal() -> None:
    assert refusal(run_with({"data.sequence_length": 17}, global_batch=8, dp_shard=1, tp=67), 67) == [
        "layout.tp=67 does not divide model.n_heads (8 parts)",
        "layout.tp=67 does not divide model.n_kv_heads (4 parts)",
        "layout.tp=67 does not divide model.d_ff (64, in 32 parts of 2 that stay together)",
        "layout.tp=67 leaves some ranks without a row of model.vocab_size=61",
        "data.sequence_length=17 over layout.cp=1 ranks leaves 17 positions, which layout.tp=67 does not divide",
        "no choice of degrees is legal for 67 ranks with the other fields as they are",
    ]
