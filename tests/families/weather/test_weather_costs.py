"""Costs of the weather family and of streamed blocks are those of the code that runs: memory, bytes, operations."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from layout_runs import run_with
from phalanx.config.schema import Run
from phalanx.errors import ConfigError
from phalanx.families.registry import bind
from phalanx.families.weather.config import WeatherRun
from phalanx.families.weather.sizes import (
    block_flops_per_sample,
    embedding_flops_per_sample,
    model_flops_per_sample,
    roll_out_flops_per_sample,
)
from phalanx.hardware.machine import load_machine
from phalanx.layout.resolve import resolve_layout
from phalanx.layout.spec import ResolvedLayout
from phalanx.planner.dryrun.rank_report import RankReport
from phalanx.planner.dryrun.run_step import dry_run
from phalanx.planner.memory.model import Kernels, rank_memory
from phalanx.planner.plan.compare_layouts import break_even
from phalanx.planner.rank.cost_models import CostModels
from phalanx.planner.time.profile import default_profile
from phalanx.planner.trace.part_costs import PartCosts, part_costs
from phalanx.planner.trace.streamed_block import chain_sizes
from phalanx.planner.trace.traced_model import Setting, TracedModel, bind_planned
from phalanx.training.step import build_full_step

WORLD, LAYERS = 8, 2
UNCOMPILED = Kernels("cpu", compiled=False)
WEATHER: dict[str, Any] = {
    "n_layers": LAYERS, "d_model": 1024, "d_ff": 4096, "n_heads": 16, "qk_norm": True,
    "n_lat": 32, "n_lon": 64, "patch_size": 2, "history": 2,
}  # fmt: skip
TWO_GRIDS: dict[str, Any] = {"n_lat": 16, "n_lon": 32, "grids": [{"name": "fine", "n_lat": 32, "n_lon": 64}]}
TEXT = {
    "model.d_model": 512,
    "model.d_ff": 1408,
    "model.n_heads": 8,
    "model.n_kv_heads": 8,
    "model.n_layers": LAYERS,
    "model.vocab_size": 1000,
    "model.max_positions": 128,
    "data.sequence_length": 128,
    "training.loss_chunk_tokens": 64,
}
STREAM = {"tp": 2, "dp_shard": 4, "gather": "stream"}
WEATHER_LAYOUTS: dict[str, dict[str, Any]] = {
    "FSDP, full recompute": {"dp_shard": 8, "global_batch": 16, "recompute": "full"},
    "Hybrid-STOP, replicas": {"tp": 2, "dp_shard": 2, "dp_replicate": 2, "global_batch": 8},
    # Whose larger grid is not that of the model's table: in stages, between which its tokens are sent.
    "two grids": {"pp": 2, "tp": 2, "dp_shard": 2, "global_batch": 16, "schedule": "1f1b"},
    "members in a micro-batch": {"tp": 2, "dp_shard": 4, "global_batch": 8},
    "trained roll-outs": {"dp_shard": 8, "microbatch": 2, "global_batch": 16},
    "trained roll-outs of members": {"tp": 2, "dp_shard": 4, "global_batch": 8},
    "roll-outs of members whose last step learns": {"dp_shard": 8, "global_batch": 8},
    "streamed": {**STREAM, "global_batch": 4},
    "streamed, full recompute": {**STREAM, "global_batch": 8, "recompute": "full"},
}


ROLLED: dict[str, Any] = {"rollout_hours": 8}
"""Three steps to the lead time."""
MEMBERS = {"loss": "crps", "members": 3, "noise_channels": 4}


def weather_run(
    grids: bool = False, model: dict[str, Any] | None = None, data: dict[str, Any] | None = None, **layout: Any
) -> WeatherRun:
    """A run on one grid of 32 x 64, or on a smaller one beside it. model, data: fields to change."""
    names = ["temperature_850", "geopotential_500", "2m_temperature"]
    changes = {**(TWO_GRIDS if grids else {}), **(model or {})}
    return WeatherRun.model_validate(
        {
            "model": {"family": "weather", "variables": names, **WEATHER, **changes},
            "data": {
                "sources": ["nowhere", {"path": "there", "weight": 3.0, "grid": "fine"}] if grids else ["nowhere"],
                "inputs": names,
                "history": 2,
                "lead_hours": 24,
                "splits": {"train": {"first": "2000", "last": "2001"}},
                **(data or {}),
            },
            "layout": {"precision": "bf16", **layout},
            "optimizer": {"lr": 0.01},
            "training": {"steps": 1},
        }
    )


@cache
def planned(name: str) -> tuple[Run, ResolvedLayout]:
    run: Run = text_run()
    if name in WEATHER_LAYOUTS:
        members = MEMBERS if "members" in name else {}
        data = {}
        if "roll-outs" in name:
            data = ROLLED | ({"rollout_steps": 3} if name.startswith("trained") else {})
        run = weather_run(grids=name == "two grids", model=members, data=data, **WEATHER_LAYOUTS[name])
    return run, resolve_layout(bind(run), WORLD)


def text_run() -> Run:
    return run_with(TEXT, **STREAM, global_batch=8, microbatch=2)


@cache
def dry(name: str) -> RankReport:
    run, layout = planned(name)
    return dry_run(bind(run, TracedModel), layout, 0, build_full_step, accelerator=False, devices_per_node=None)


NAMES = [*WEATHER_LAYOUTS, "streamed text"]


@pytest.mark.parametrize("name", NAMES)
def test_memory_is_that_of_a_dry_run(name: str) -> None:
    run, layout = planned(name)
    modelled, *_ = rank_memory(bind(run, TracedModel), layout, run.layout.recompute, UNCOMPILED)
    # Where replicas hold the same shards the model is above the code, and a little where products add gradients to sums.
    above = 0.07 if layout.dp_replicate > 1 else 0.03
    ratio = modelled.allocated / dry(name).peak
    assert 0.975 < ratio < 1 + above, (modelled, dry(name).categories)


# Of a pipeline a rank has some of the parts; the steps of a roll-out are not all alike.
@pytest.mark.parametrize(
    "name", [name for name in NAMES if "pp" not in WEATHER_LAYOUTS.get(name, {}) and "roll-outs" not in name]
)
def test_what_is_communicated_is_what_a_dry_run_counts(name: str) -> None:
    run, layout = planned(name)
    setting = bind(run, TracedModel).setting_of(layout, attention="cpu", compiled=False)
    block, *ends = (part_costs(part, setting, layout.microbatch) for part in ("block", "embedding", "head"))
    exchanged = LAYERS * tensor_bytes(block) + sum(tensor_bytes(part) for part in ends)
    assert exchanged * layout.accumulation == bytes_of(name, "tp", "all_gather", "reduce_scatter")
    # Weights forward and backward, and once more the first chain's where recompute needs its result; gradients home.
    passes = [3 + (run.layout.recompute == "full" and chain is not block.chains[-1]) for chain in block.chains]
    sent = sum(2 * chain.sent * times for chain, times in zip(block.chains, passes, strict=True))
    assert LAYERS * sent * layout.accumulation == bytes_of(name, "dp_shard", "send")


def tensor_bytes(part: PartCosts) -> int:
    return sum(found.bytes for found in part.costs.collectives() if found.axis == "tp")


def bytes_of(name: str, axis: str, *operations: str) -> int:
    traffic = dry(name).traffic
    return sum(t.bytes * t.count for t in traffic if t.axis == axis and t.operation in operations)


def test_a_step_takes_the_mean_of_its_grids_and_the_memory_of_the_largest() -> None:
    machine = load_machine("h200-x4")
    models = CostModels(machine, default_profile(machine.node.device))
    # In micro-batches so large that the host does not decide.
    sizes = {"global_batch": 256, "microbatch": 64}
    both, fine = weather_run(grids=True, **sizes), weather_run(**sizes)
    coarse = fine.model_copy(update={"model": fine.model.model_copy(update={"n_lat": 16, "n_lon": 32})})
    layouts = resolve_layout(bind(fine), 4).table
    times, memory = {}, {}
    for name, run in (("both", both), ("fine", fine), ("coarse", coarse)):
        model = bind(run, TracedModel)
        times[name], memory[name] = models.times(model, layouts).total[0], models.memory(model, layouts).peak[0]
    # Beside it the table of positions, that of the coarse grid, is interpolated for the fine one: a few small kernels.
    mean = 0.25 * times["coarse"] + 0.75 * times["fine"]
    assert mean < times["both"] < 1.01 * mean
    assert times["coarse"] < 0.9 * times["fine"]
    assert memory["coarse"] < 0.8 * memory["fine"] and memory["both"] == pytest.approx(memory["fine"], rel=0.01)
    bound = bind(both)
    assert bound.positions().count == 512 and "model.grids, fine" in bound.positions().field
    # Of four steps three are on the fine grid.
    assert bound.positions_through(4) == 256 * (3 * 512 + 128)
    shares = sorted(bound.relative_flops(step) for step in range(1, 5))
    assert sum(shares) == pytest.approx(4) and shares[0] < 0.3 < 1.2 < shares[1] == shares[3]


def one_device(lead_hours: int = 24, **data: Any) -> tuple[float, float, float]:
    """Return seconds of the matrix products of a step, peak bytes, and FLOPs of a sample, on one device."""
    machine = load_machine("h200-x4")
    run = weather_run(data={**data, "lead_hours": lead_hours}, global_batch=256, microbatch=64)
    run = run.model_copy(update={"training": run.training.model_copy(update={"steps": 4})})
    model = bind(run, TracedModel)
    models, layouts = CostModels(machine, default_profile(machine.node.device)), resolve_layout(model, 1).table
    causes = models.times(model, layouts).causes
    return float(causes["matmul"][0]), float(models.memory(model, layouts).peak[0]), model.flops_per_sample()


def test_a_roll_out_takes_its_passes_and_the_memory_of_one_step() -> None:
    single, memory, flops = one_device()
    for steps in (2, 3):
        last, memory_of_last, of_last = one_device(lead_hours=8 * steps, rollout_hours=8)
        # Steps before the last go forward alone, which is a third of the operations and less of the time.
        forecast = (last / single - 1) / (steps - 1)
        assert 0.22 < forecast < 0.34 and of_last == pytest.approx(flops * (1 + (steps - 1) / 3))
        assert memory < memory_of_last < 1.01 * memory
        # Every step learns, and all but the last are forecast before.
        through = one_device(rollout_hours=8, rollout_steps=steps)
        assert through[0] / single == pytest.approx(steps + (steps - 1) * forecast, rel=0.01)
        assert through[2] == steps * flops and memory_of_last < through[1] < 1.01 * memory


def test_roll_outs_that_grow_take_the_mean_of_their_lengths_and_the_memory_of_the_longest() -> None:
    each = [one_device(rollout_hours=8, rollout_steps=steps) for steps in (1, 2, 3)]
    grown = {"rollout_hours": 8, "rollout_steps": {"first": 1, "last": 3, "every": 1}}
    # Of four steps the last two are the longest.
    growing = one_device(**grown)
    for place in (0, 2):
        assert growing[place] == pytest.approx((each[0][place] + each[1][place] + 2 * each[2][place]) / 4)
    assert growing[1] == each[2][1]
    run = weather_run(data=grown, global_batch=2)
    model = bind(run.model_copy(update={"training": run.training.model_copy(update={"steps": 4})}))
    assert [model.relative_flops(step) for step in range(1, 5)] == pytest.approx([4 / 9, 8 / 9, 12 / 9, 12 / 9])


def test_every_member_embeds_its_own_fields_from_the_second_step_on() -> None:
    model = weather_run(model=MEMBERS, global_batch=2).model
    rest, embedding = (
        model_flops_per_sample(model) - embedding_flops_per_sample(model),
        embedding_flops_per_sample(model),
    )
    assert roll_out_flops_per_sample(model, 3, trained=True) == 3 * rest + (1 + 3 + 3) * embedding
    ahead = rest / 3 + embedding / 3
    assert roll_out_flops_per_sample(model, 2, trained=False) == pytest.approx(ahead + rest + 3 * embedding)


def test_roll_outs_have_no_pipeline() -> None:
    rolled = bind(weather_run(data=ROLLED, global_batch=8))
    assert "pp" in bind(weather_run(global_batch=8)).axes and "pp" not in rolled.axes
    with pytest.raises(ConfigError, match="pp"):
        resolve_layout(bind(weather_run(data=ROLLED, global_batch=8, pp=2)), 2)


def test_streaming_holds_two_chunks_and_computes_the_forward_pass_twice() -> None:
    run, layout = planned("streamed")
    stream = bind(run, TracedModel).setting_of(layout, attention="flash", compiled=False)
    whole = part_costs("block", Setting(stream.model, stream.length, tp=2, compile=False), 1)
    chunked = part_costs("block", stream, 1)
    assert chunked.costs.flops() == whole.costs.flops() + whole.costs.flops("forward")
    assert sum(p.count for p in chunked.parameters if p.streamed) == 4 * sum(chain.piece for chain in chunked.chains)
    assert chunked.parameter_count == whole.parameter_count
    # What a block keeps: the inputs of its chains and of its norms, no hidden features.
    assert chunked.costs.kept_bytes < 0.4 * whole.costs.kept_bytes


def test_more_ranks_than_heads_hold_chunks_together() -> None:
    run = weather_run(tp=2, dp_shard=16, global_batch=16, gather="stream")
    attention, mlp = chain_sizes(
        bind(run, TracedModel).setting_of(resolve_layout(bind(run), 32), attention="flash", compiled=False)
    )
    assert (attention.plan.chunks, attention.plan.group, mlp.plan.chunks) == (8, 2, 16)
    assert attention.own == attention.chunk // 2 and mlp.own == 0


def test_operations_are_those_of_the_closed_form() -> None:
    run = weather_run(global_batch=2)
    setting = Setting(run.model, run.model.n_tokens, tp=2, compile=False)
    # Flash attention repeats its scores backward: half of one forward pass more than the closed form counts.
    repeated = 2 * run.model.n_tokens**2 * run.model.d_model
    traced = part_costs("block", setting, 1).costs.flops()
    assert traced == pytest.approx((block_flops_per_sample(run.model) + repeated) / 2, rel=1e-3)


@pytest.mark.parametrize(
    ("copies", "recompute", "wanted"), [(True, "none", 4.5), (False, "none", 6), (True, "full", 3.27)]
)
def test_break_even_of_fsdp_and_hybrid_stop(copies: bool, recompute: Any, wanted: float) -> None:
    """12 d^2 (2 + 1) e (T - 1)/T bytes of parameters against 8 b s d e (T - 1)/T of activations; 11 with recompute."""
    run = weather_run(global_batch=2)
    found = break_even(bind(run, TracedModel), 8, 64, recompute, peer_copies=copies)
    assert found.times_width == pytest.approx(wanted, rel=0.02)
    assert found.positions == pytest.approx(found.times_width * 1024 / 8)
    assert found.samples == pytest.approx(found.positions * 8 / run.model.n_tokens)


def test_what_cannot_be_planned_is_refused_with_the_reason() -> None:
    run = weather_run(global_batch=2)
    materials = run.model_copy(update={"model": run.model.model_copy(update={"family": "materials"})})
    with pytest.raises(ConfigError, match="what a batch of graphs costs depends on the graphs"):
        bind_planned(materials)
