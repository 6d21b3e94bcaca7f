"""Steps of layouts: causes add up, better hardware is never slower, bounds lie below simulated pipelines."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from phalanx.config.load import parse_run
from phalanx.families.registry import bind
from phalanx.hardware.collectives import default_constants
from phalanx.hardware.machine import load_machine
from phalanx.layout.spec import LayoutTable, Recompute, ResolvedLayout
from phalanx.planner.dryrun.run_step import dry_run
from phalanx.planner.time.framework import COMPILED, EAGER, FrameworkProfile
from phalanx.planner.time.operation_time import PartBreakdown, compute_seconds
from phalanx.planner.time.part_time import part_times
from phalanx.planner.time.pipeline_time import bound_pipelines, simulate_pipelines
from phalanx.planner.time.profile import default_profile
from phalanx.planner.time.step_parts import Steps
from phalanx.planner.time.step_time import DataParallel, StepBreakdown, time_steps
from phalanx.planner.time.timing import our_framework, step_times, steps_of_run
from phalanx.planner.trace.traced_model import TracedModel
from phalanx.training.step import build_full_step

MACHINE = load_machine("selene")
CONSTANTS = default_constants(MACHINE)
PROFILE = default_profile("A100-80GB").profile
BATCH = 96

RUN = parse_run(
    """
    model: {family: language, n_layers: 24, d_model: 1024, n_heads: 16, d_ff: 4096, vocab_size: 8192, max_positions: 1024}
    data: {sources: [data/text], sequence_length: 1024}
    layout: {global_batch: 96}
    training: {steps: 10, compile: false}
    optimizer: {lr: 0.001, warmup_steps: 2}
    """,
    "run.yaml",
)


def _layouts(*changes: dict[str, object], recompute: Recompute = "none") -> LayoutTable:
    layouts = [ResolvedLayout(**{"global_batch": BATCH, **change}) for change in changes]  # type: ignore[arg-type]
    return LayoutTable.from_rows([replace(layout, recompute=recompute) for layout in layouts])


MANY = _layouts(
    {},
    {"dp_shard": 8, "zero": 3, "reshard_after_forward": True},
    {"dp_shard": 8, "zero": 2},
    {"dp_shard": 8, "zero": 1, "microbatch": 2},
    {"dp_replicate": 8, "zero": 0},
    {"dp_replicate": 4, "dp_shard": 8},
    {"tp": 8, "dp_shard": 4, "microbatch": 4},
    {"tp": 2, "pp": 4, "zero": 0},
    {"tp": 2, "pp": 4, "dp_shard": 4, "zero": 1, "schedule": "interleaved_1f1b", "stages_per_rank": 2},
    {"pp": 4, "schedule": "interleaved_zero_bubble", "stages_per_rank": 2},
    {"pp": 4, "schedule": "zbv", "stages_per_rank": 2},
    {"cp": 2, "dp_shard": 4},
    {"cp": 2, "context": "all_to_all", "dp_shard": 4},
)


@pytest.fixture(scope="module")
def steps() -> Steps:
    return steps_of_run(bind(RUN, TracedModel), MANY, MACHINE, EAGER)


def _seconds(
    steps: Steps, profile: object = PROFILE, constants: object = CONSTANTS, framework: FrameworkProfile = COMPILED
) -> np.ndarray:
    times = part_times(steps.parts, MACHINE, constants, profile)  # type: ignore[arg-type]
    return time_steps(steps, times, profile, constants, framework).seconds  # type: ignore[arg-type]


def test_every_cause_is_counted_once_and_none_is_negative(steps: Steps) -> None:
    seconds = _seconds(steps)
    assert np.all(seconds >= -1e-12)
    assert np.all(seconds[:, StepBreakdown.MATMUL] > 0)


def test_blocks_that_wait_for_many_nodes_straggle_and_others_do_not() -> None:
    shards = ({"dp_shard": 8}, {"dp_shard": 64, "global_batch": 192}, {"dp_shard": 64, "zero": 1, "global_batch": 192})
    found = steps_of_run(bind(RUN, TracedModel), _layouts(*shards), MACHINE, EAGER)
    even, uneven = (_seconds(found, replace(PROFILE, straggling=share)).sum(axis=1) for share in (0.0, 0.02))
    added = uneven - even
    assert added[0] == added[2] == 0.0
    # What the host takes to gather in small micro-batches is not what others wait for.
    compute = _seconds(found, replace(PROFILE, straggling=0.0, shard_host_s=0.0))[1, : len(PartBreakdown)].sum()
    # Eight nodes of eight devices are three doublings.
    assert added[1] == pytest.approx(3 * 0.02 * compute, rel=0.1)


def test_one_rank_takes_what_its_operations_take(steps: Steps) -> None:
    alone = Steps.joined_up([steps]).parts
    seconds = compute_seconds(alone.operations, PROFILE)
    layers = RUN.model.n_layers
    weights = {int(steps.embedding[0]): 1, int(steps.block[0]): layers, int(steps.head[0]): 1}
    kernels = sum(seconds[alone.operations.part == part].sum() * count for part, count in weights.items())
    found = _seconds(steps)[0]
    of_parts = found[: len(PartBreakdown)].sum()
    # The host may be slower than the device, and gradients of further micro-batches are added.
    assert of_parts >= BATCH * kernels
    quick = _seconds(steps, replace(PROFILE, host_s=0.0))[0, : len(PartBreakdown)].sum()
    added = (BATCH - 1) * steps.ranks.blocks[0].max() * steps.block_parameters[0] * 6 / PROFILE.memory_b_s
    assert quick == pytest.approx(BATCH * kernels + added, rel=0.02)
    assert np.all(
        found[[StepBreakdown.TP, StepBreakdown.CP, StepBreakdown.BUBBLE, StepBreakdown.TRANSFER, StepBreakdown.DATA]]
        == 0
    )


def test_whole_parameters_have_a_copy_whose_gradients_are_passed_on(steps: Steps) -> None:
    times = part_times(steps.parts, MACHINE, CONSTANTS, PROFILE)
    without = replace(COMPILED, low_precision_copy=False)
    one, other = (time_steps(steps, times, PROFILE, CONSTANTS, framework).seconds for framework in (COMPILED, without))
    passed = (one - other)[:, StepBreakdown.MEMORY]
    # The first layout holds all of them, three pipelines those of a stage; the rest have ranks to reduce with, some at once,
    # some when all micro-batches are done.
    whole = (MANY.data_ranks == 1) & (MANY.cp == 1)
    reduced_once = (MANY.zero < 2) & (MANY.accumulation > 1) & ~whole
    assert np.array_equal(passed > 0, whole | reduced_once) and whole.sum() == 4 and reduced_once.any()
    parameters = (
        RUN.model.n_layers * steps.block_parameters[0] + steps.embedding_parameters[0] + steps.head_parameters[0]
    )
    assert passed[0] == pytest.approx(6 * parameters / PROFILE.memory_b_s)
    assert COMPILED.computing_in("fp16").low_precision_copy and not COMPILED.computing_in("fp32").low_precision_copy


def test_a_rank_that_waits_for_no_other_has_less_between_its_steps(steps: Steps) -> None:
    rest = _seconds(steps)[:, StepBreakdown.REST] - _seconds(steps, replace(PROFILE, step_s=0.0))[:, StepBreakdown.REST]
    alone = MANY.world_size == 1
    assert alone.sum() == 1
    assert rest == pytest.approx(np.where(alone, COMPILED.single_rank_overhead, 1.0) * PROFILE.step_s)


@pytest.mark.parametrize(("precision", "width"), [("bf16", 2), ("fp32", 4), ("fp64", 8)])
def test_what_ranks_exchange_and_pass_over_grows_with_the_numbers(precision: str, width: int) -> None:
    run = RUN.model_copy(update={"layout": RUN.layout.model_copy(update={"precision": precision})})
    framework = our_framework(bind(run, TracedModel), MACHINE)
    assert framework.gather_bytes == width and framework.reduce_bytes == max(4, width)
    # Master, moments and gradient read, all but the gradient written; beside masters of 16-bit numbers a copy.
    assert framework.optimizer_bytes == {2: 30, 4: 28, 8: 56}[width]
    found = steps_of_run(bind(run, TracedModel), _layouts({"pp": 4}), MACHINE, framework, attention="math")
    assert found.hidden_bytes[0] == 1024 * 1024 * width


def test_products_add_to_the_sums_that_are_reduced_once_a_step(steps: Steps) -> None:
    def memory(steps: Steps, sums_in_products: bool) -> np.ndarray:
        framework = replace(COMPILED, sums_in_products=sums_in_products)
        return _seconds(steps, framework=framework)[:, StepBreakdown.MEMORY]

    saved = memory(steps, False) - memory(steps, True)
    # One rank alone, ZeRO 1 and 0, and the pipeline of 1F1B.
    assert np.flatnonzero(saved > 0).tolist() == [0, 3, 4, 7]
    # Of a product that adds nothing is written in 16 bits and read again.
    blocks = RUN.model.n_layers * steps.block_parameters[0]
    assert saved[0] == pytest.approx(4 * (MANY.accumulation[0] - 1) * blocks / PROFILE.memory_b_s)
    assert COMPILED.computing_in("fp16").sums_in_products and not COMPILED.computing_in("fp32").sums_in_products
    # Products of 8 bits, nearly all of a block's, cannot.
    eight = _steps_in("fp8-row")
    assert (memory(eight, False) - memory(eight, True) < 0.01 * saved + 1e-12).all()


def _steps_in(precision: str) -> Steps:
    """The steps of `MANY` in another precision."""
    run = RUN.model_copy(update={"layout": RUN.layout.model_copy(update={"precision": precision})})
    return steps_of_run(bind(run, TracedModel), MANY, MACHINE, EAGER, attention="math")


def test_weights_with_several_scales_are_read_again_behind_the_update() -> None:
    steps = _steps_in("fp8-row")
    seconds = {
        precision: _seconds(steps, framework=COMPILED.computing_in(precision))[:, StepBreakdown.OPTIMIZER]
        for precision in ("bf16", "fp8-tensor", "fp8-row")
    }
    weights = steps.sum_quantised().max(axis=1) / steps.layouts.shards
    assert (weights > 0).all()
    assert (seconds["fp8-tensor"] == seconds["bf16"]).all()
    assert seconds["fp8-row"] - seconds["bf16"] == pytest.approx(9 * weights / PROFILE.memory_b_s)


def test_weights_in_eight_bits_are_gathered_in_half_the_time() -> None:
    table = _layouts({"dp_shard": 8, "zero": 3, "reshard_after_forward": True})
    # Nothing hides what is exchanged.
    shown = replace(PROFILE, hidden=0.0)
    seconds: dict[str, float] = {}
    for precision in ("mxfp8", "fp8-row"):
        run = RUN.model_copy(update={"layout": RUN.layout.model_copy(update={"precision": precision})})
        framework = our_framework(bind(run, TracedModel), MACHINE)
        assert framework.quantised_bytes == {"mxfp8": 2, "fp8-row": 1}[precision]
        steps = steps_of_run(bind(run, TracedModel), table, MACHINE, framework, attention="math")
        times = part_times(steps.parts, MACHINE, CONSTANTS, shown)
        seconds[precision] = float(time_steps(steps, times, shown, CONSTANTS, framework).seconds[0, StepBreakdown.DATA])
    block = steps.block_parameters[0]
    assert 0.99 * block < steps.quantised_parameters[0] < block
    # Of six bytes a parameter (gathered twice in 16 bits, reduced in 32) blocks save two; beside them there are the ends.
    ends = steps.embedding_parameters[0] + steps.head_parameters[0]
    saved = 2 * RUN.model.n_layers * block / (8 * (RUN.model.n_layers * block + ends))
    assert seconds["fp8-row"] / seconds["mxfp8"] == pytest.approx(1 - saved, rel=0.03)


@pytest.mark.parametrize(
    "name",
    ["matmul_flop_s", "attention_flop_s", "memory_b_s", "optimizer_b_s", "link_share", "network_share", "hidden"],
)
def test_more_of_anything_is_never_slower(steps: Steps, name: str) -> None:
    slower = replace(PROFILE, **{name: getattr(PROFILE, name) * 0.7})
    assert np.all(_seconds(steps, slower).sum(axis=1) >= _seconds(steps).sum(axis=1) * (1 - 1e-9))


def test_where_time_goes_is_where_the_layout_says(steps: Steps) -> None:
    seconds = _seconds(steps)
    layouts = steps.layouts
    assert np.array_equal(seconds[:, StepBreakdown.TP] > 0, layouts.tp > 1)
    assert np.array_equal(seconds[:, StepBreakdown.CP] > 0, layouts.cp > 1)
    assert np.array_equal(seconds[:, StepBreakdown.BUBBLE] > 0, layouts.pp > 1)
    assert np.array_equal(seconds[:, StepBreakdown.DATA] > 0, layouts.data_ranks * layouts.cp > 1)


def test_layouts_take_as_long_beside_others_as_alone(steps: Steps) -> None:
    together = _seconds(steps)
    for place in range(len(steps)):
        alone = _seconds(steps_of_run(bind(RUN, TracedModel), MANY.take([place]), MACHINE, EAGER))
        np.testing.assert_allclose(together[place], alone[0], rtol=1e-12)
    some = steps_of_run(bind(RUN, TracedModel), MANY.take([7, 1, 5]), MACHINE, EAGER)
    twice = _seconds(Steps.joined_up([steps, some]))
    np.testing.assert_allclose(twice, together[[*range(len(steps)), 7, 1, 5]], rtol=1e-12)


def test_larger_units_save_latency_and_show_more_at_the_ends() -> None:
    layouts = _layouts({"dp_shard": 64, "global_batch": 64, "reshard_after_forward": True})
    run = RUN.model_copy(update={"layout": RUN.layout.model_copy(update={"gather_blocks": 6})})
    alone, together = (steps_of_run(bind(one, TracedModel), layouts, MACHINE, EAGER) for one in (RUN, run))
    assert together.unit.tolist() == [6]
    slow, quick = (replace(CONSTANTS, launch_s=latency, step_s=0.0, step_across_s=0.0) for latency in (0.01, 0.0))
    exposed = [
        [_seconds(one, PROFILE, each)[0, StepBreakdown.DATA] for each in (slow, quick)] for one in (alone, together)
    ]
    # Two gathers and a reduction of each unit, a gather before the first one; embedding and head are units as before.
    units = RUN.model.n_layers
    latencies = [exposed[place][0] - exposed[place][1] for place in range(2)]
    assert latencies[0] - latencies[1] >= 0.01 * (3 * units - 3 * units / 6) * (1 - PROFILE.hidden)
    assert exposed[1][1] > exposed[0][1]


def test_zero_3_gathers_more_than_zero_1(steps: Steps) -> None:
    seconds = _seconds(steps)[:, StepBreakdown.DATA]
    assert seconds[1] > seconds[2] > seconds[3]


SHARED: list[dict[str, Any]] = [
    {"dp_shard": 2, "zero": 3, "reshard_after_forward": True},
    {"dp_shard": 2, "pp": 2, "zero": 2},
    {"dp_shard": 2, "pp": 2, "zero": 3},
    {"dp_shard": 2, "pp": 2, "zero": 3, "reshard_after_forward": True},
    {"dp_shard": 2, "pp": 2, "zero": 2, "schedule": "interleaved_1f1b", "stages_per_rank": 2},
    {"dp_shard": 2, "pp": 2, "zero": 1, "schedule": "interleaved_1f1b", "stages_per_rank": 5},
]


@pytest.mark.parametrize("words", SHARED, ids=str)
def test_blocks_are_gathered_and_reduced_as_often_as_the_code_does_it(words: dict[str, Any]) -> None:
    layers = max(4, words.get("pp", 1) * words.get("stages_per_rank", 1))
    few = {"n_layers": layers, "d_model": 64, "n_heads": 4, "d_ff": 128, "vocab_size": 128, "max_positions": 64}
    run = RUN.model_copy(
        update={
            "model": RUN.model.model_copy(update=few),
            "data": RUN.data.model_copy(update={"sequence_length": 64}),
        }
    )
    layouts = _layouts({"global_batch": 16, **words})
    found = dry_run(bind(run, TracedModel), layouts.row(0), 0, build_full_step, accelerator=True, devices_per_node=None)
    units = layers // words.get("pp", 1)
    # Beside the blocks the embedding and the head, on one rank where there is no pipeline; a head stays gathered.
    ends = 1 if "pp" in words else 2
    counts = {
        operation: sum(one.count for one in found.traffic if one.axis == "dp_shard" and one.operation == operation)
        for operation in ("all_gather", "reduce_scatter")
    }
    # Nothing hides, and every exchange takes a second more.
    steps = steps_of_run(bind(run, TracedModel), layouts, MACHINE, EAGER)
    costly = replace(CONSTANTS, launch_s=1.0)
    profile = replace(PROFILE, hidden=0.0, straggling=0.0)
    times = part_times(steps.parts, MACHINE, CONSTANTS, profile)
    latency = sum(
        sign * time_steps(steps, times, profile, constants, COMPILED).seconds[0, StepBreakdown.DATA]
        for sign, constants in ((1, costly), (-1, CONSTANTS))
    )
    micro_batches = int(layouts.accumulation[0])
    # One gather of a micro-batch may be counted as one of the step.
    assert latency == pytest.approx(sum(counts.values()), abs=micro_batches), counts
    assert counts["reduce_scatter"] == (units + ends) * (micro_batches if layouts.reduces_each[0] else 1)


def test_shards_on_one_node_exchange_faster_than_across_slow_nodes() -> None:
    wide = _layouts({"dp_shard": 32, "zero": 3, "reshard_after_forward": True})
    narrow = _layouts({"dp_shard": 8, "dp_replicate": 4, "zero": 3, "reshard_after_forward": True})
    found = [steps_of_run(bind(RUN, TracedModel), one, MACHINE, EAGER) for one in (wide, narrow)]
    slow = replace(PROFILE, network_share=0.2)
    assert _seconds(found[0], slow)[0, StepBreakdown.DATA] > 1.5 * _seconds(found[1], slow)[0, StepBreakdown.DATA]


@pytest.mark.parametrize("pp", [2, 4, 8])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved_1f1b", "zbv"])
def test_bounds_lie_just_below_the_simulation(pp: int, schedule: str) -> None:
    each = 1 if schedule in ("gpipe", "1f1b") else 2
    layouts = _layouts({"pp": pp, "schedule": schedule, "stages_per_rank": each, "microbatch": 4, "zero": 0})
    for ramp in (0.5, 1.0, 3.7):
        profile = replace(PROFILE, pipeline_ramp=ramp)
        bound, simulated = (
            step_times(bind(RUN, TracedModel), layouts, MACHINE, profile, pipelines=model).total[0]
            for model in (bound_pipelines, simulate_pipelines)
        )
        # Stages of 24 blocks and a head differ by up to a block; a ramp above 1 multiplies what the bound leaves out.
        assert (1 - 0.07 * max(1.0, ramp)) * simulated < bound <= simulated * (1 + 1e-12)


def test_copies_replace_collectives_within_a_node_only() -> None:
    layouts = _layouts(
        {"dp_shard": 8, "zero": 3, "reshard_after_forward": True},
        {"dp_shard": 32, "zero": 3, "reshard_after_forward": True},
    )
    copying = our_framework(bind(RUN, TracedModel), MACHINE)
    assert copying.copy_engines
    steps = steps_of_run(bind(RUN, TracedModel), layouts, MACHINE, copying)
    times = part_times(steps.parts, MACHINE, CONSTANTS, PROFILE)
    with_copies, without = (
        time_steps(steps, times, PROFILE, CONSTANTS, framework).of(StepBreakdown.DATA) for framework in (copying, EAGER)
    )
    assert with_copies[0] < without[0]
    assert with_copies[1] == without[1]


FROZEN = RUN.model_copy(
    update={"training": RUN.training.model_copy(update={"freeze": ["blocks.*.mlp.*", "embedding.*", "head.*"]})}
)


def test_what_is_frozen_is_neither_updated_nor_summed_up_and_costs_no_gradient_products(steps: Steps) -> None:
    found = steps_of_run(bind(FROZEN, TracedModel), MANY, MACHINE, EAGER)
    whole, frozen = _seconds(steps), _seconds(found)
    assert np.array_equal(found.block_parameters, steps.block_parameters)
    share = found.trained.block / steps.trained.block
    # Attention has 4 d^2 elements, the MLP 12 d^2.
    assert np.all((share > 0.25) & (share < 0.251))
    assert not found.trained.embedding.any() and not found.trained.head.any()
    # A stage holds the same layers in both; what it trains of them decides.
    held = steps.ranks.blocks.max(axis=1) * found.trained.block
    mine = np.where(MANY.shards > 0, held / MANY.shards, 0.0)
    np.testing.assert_allclose(
        frozen[:, StepBreakdown.OPTIMIZER], mine * COMPILED.optimizer_bytes / PROFILE.optimizer_b_s, rtol=1e-9
    )
    # Of a block's 16 d^2, forward and input gradients count for all, weight gradients, which run fastest, for a quarter.
    products = frozen[:, StepBreakdown.MATMUL] / whole[:, StepBreakdown.MATMUL]
    assert np.all((products > 0.70) & (products < 0.92))
    exchanging = whole[:, StepBreakdown.DATA] > 0
    assert exchanging.sum() > 5
    assert np.all(frozen[exchanging, StepBreakdown.DATA] < whole[exchanging, StepBreakdown.DATA])


def test_frozen_parameters_are_still_gathered_and_their_gradients_not_reduced(steps: Steps) -> None:
    nothing = RUN.model_copy(
        update={"training": RUN.training.model_copy(update={"freeze": ["blocks.*", "embedding.*"]})}
    )
    found = steps_of_run(bind(nothing, TracedModel), MANY, MACHINE, EAGER)
    assert not found.trained.block.any() and not found.trained_tensors.block.any()
    assert np.array_equal(found.tensors.block, steps.tensors.block)
    times = part_times(found.parts, MACHINE, CONSTANTS, PROFILE)
    data = DataParallel.of(found, times, None, PROFILE, CONSTANTS, COMPILED)._exchanges(found)
    sharded = MANY.shards > 1
    assert np.all(data.gather.unit[sharded] > 0) and not data.scatter.unit.any()
    assert data.summed is not None and not data.summed.unit.any() and np.all(data.scatter.head[sharded] > 0)
