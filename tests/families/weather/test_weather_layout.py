"""Weather runs in layouts: which are legal, what each rank keeps, and what verification makes small."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from layout_runs import refusal
from phalanx.config.load import load_run
from phalanx.families.registry import bind
from phalanx.families.weather.config import WeatherRun
from phalanx.layout.apply import apply_layout
from phalanx.layout.context_parallel import kernel_choice
from phalanx.layout.context_parallel.kernel_choice import AttentionChoice, choose_fastest
from phalanx.layout.context_parallel.split_context import SequenceShare
from phalanx.layout.layout_model import BuildContext, LayoutModel
from phalanx.layout.legality import reasons_against
from phalanx.layout.mesh import ONE_RANK, Axis
from phalanx.layout.resolve import every_layout, resolve_layout, with_degrees
from phalanx.layout.spec import DEGREES
from phalanx.nn.splits import ModelChunk
from phalanx.verification.family import VerifiableModel
from phalanx.verification.verify_run import reduced_run
from weather_runs import EXAMPLES, write_weather_run


def run_of(example: str, *words: str) -> WeatherRun:
    run = load_run(EXAMPLES / f"{example}.yaml", words)
    assert isinstance(run, WeatherRun)
    return run


def test_more_tensor_ranks_than_heads_are_refused() -> None:
    run = run_of("orbit-1b", "layout.tp=32", "layout.dp_shard=1", "layout.tp_across_nodes=true")
    lines = refusal(run, 32)
    assert lines[0] == "layout.tp=32 does not divide model.n_heads (16 parts)"
    assert lines[-1].startswith("nearest legal: ") and "tp=16" in lines[-1]


def test_there_is_no_context_axis() -> None:
    lines = refusal(run_of("orbit-1b", "layout.tp=1", "layout.cp=2", "layout.dp_shard=1"), 2)
    assert lines[0] == ("layout.cp=2: models of family weather are spread over dp_replicate, dp_shard, tp, pp alone")


def test_tensor_ranks_share_out_all_that_is_large() -> None:
    """Of ORBIT 113B what each of eight ranks holds whole is less than half a percent of its part of the rest."""
    run = run_of("orbit-113b")
    share = SequenceShare(Axis("cp"), Axis("tp", 3, 8), "ring")
    building = BuildContext(torch.device("cpu"), AttentionChoice("sdpa"), share)
    model, splits = bind(run, LayoutModel).build(building, ModelChunk(range(56)))
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    kept = sum(size for name, size in sizes.items() if name in splits)
    whole = sum(size for name, size in sizes.items() if name not in splits)
    assert whole < 0.005 * kept
    aggregation = {name for name in splits if "aggregation" in name}
    assert aggregation == {
        f"embedding.aggregation.{name}"
        for name in ("query.weight", "query.bias", "key.weight", "value.weight", "value.bias", "output.weight")
    }
    for name in aggregation - {"embedding.aggregation.output.weight"}:
        assert (splits[name].dim, splits[name].start, splits[name].whole) == (0, 3 * 1536, 12288)


@pytest.mark.parametrize("world", [2, 6, 8, 32])
@pytest.mark.parametrize("example", ["orbit-1b", "climax-small"])
def test_what_is_legal_for_the_run_is_legal_for_the_small_one(example: str, world: int) -> None:
    run = run_of(example, "layout.tp_across_nodes=true", f"layout.global_batch={64 * world}", "layout.microbatch=2")
    run = run.model_copy(update={"layout": run.layout.model_copy(update={"recompute": "none"})})
    small = reduced_run(bind(run, VerifiableModel), "fp64", 2, world)
    layouts = list(every_layout(bind(run), world))
    assert layouts
    for layout in layouts:
        degrees = {name: getattr(layout, name) for name in DEGREES}
        fields = {"schedule": layout.schedule, "stages_per_rank": layout.stages_per_rank, "zero": layout.zero}
        fields |= {"reshard_after_forward": layout.reshard_after_forward}
        chosen = small.model_copy(update={"layout": small.layout.model_copy(update=fields)})
        assert reasons_against(bind(chosen), with_degrees(bind(chosen), degrees), world) == []


OPTIONS: dict[str, Any] = {
    "aggregation": "hierarchical",
    "aggregation_groups": 7,
    "aggregation_queries": 3,
    "prediction": "change",
    "position_embedding": "fourier",
    "level_embedding": "fourier",
    "decoder_depth": 3,
    "dropout": 0.1,
}


def test_the_small_model_is_of_the_same_kind() -> None:
    run = run_of("orbit-113b", *(f"model.{name}={value}" for name, value in OPTIONS.items()))
    run = run.model_copy(update={"model": run.model.model_copy(update={"loss_weights": tuple(range(1, 49))})})
    model = reduced_run(bind(run, VerifiableModel), "fp64", 2, 8).model
    assert isinstance(run, WeatherRun)
    for field, value in OPTIONS.items():
        if field not in ("aggregation_groups", "aggregation_queries"):
            assert getattr(model, field) == value
    assert model.qk_norm and model.aggregation_groups == model.aggregation_queries == 2
    assert model.d_model == 64 and len(model.variables) <= 8 and model.n_layers == 17
    # Weights stay with their variables.
    by_name = dict(zip(run.model.output_names, range(1, 49), strict=True))
    assert model.loss_weights == tuple(by_name[name] for name in model.output_names)


def test_the_fastest_attention_is_measured_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    cpu = torch.device("cpu")
    # Of the kernels an accelerator has, the CPU has this one.
    found = kernel_choice._measure_whole((2, 16, 4, 8), torch.float32, cpu)
    assert found.keys() == {"flash"} and found["flash"] > 0
    choice = choose_fastest("a device", lambda: {"flash": 2.0, "cudnn": 1.0})
    assert (choice.name, choice.kernel) == ("cudnn", "sdpa")
    assert choose_fastest("a device", lambda: pytest.fail("measured again")).milliseconds == {
        "flash": 2.0,
        "cudnn": 1.0,
    }
    run = run_of("climax-small", "training.attention=math")
    assert bind(run, LayoutModel).choose_attention(resolve_layout(bind(run), 1), cpu).name == "math"
    run = run_of("climax-small")
    assert bind(run, LayoutModel).choose_attention(resolve_layout(bind(run), 1), cpu).name == "sdpa"


def test_the_last_step_of_a_roll_out_learns_from_the_ones_before(tmp_path: Path) -> None:
    """By hand: samples of one, two and four steps of 6 hours in one batch."""
    changes = {"model.init_std": 0.3, "layout.dp_shard": 1}
    run = load_run(write_weather_run(tmp_path, {**changes, "data.rollout_hours": 6}))
    assert isinstance(run, WeatherRun)
    cpu = torch.device("cpu")
    (stage,) = apply_layout(
        bind(run, LayoutModel), resolve_layout(bind(run), 1), ONE_RANK, cpu, AttentionChoice("sdpa")
    ).stages
    model, batch = stage.part, bind(run, VerifiableModel).samples(1, 0, 3, 3)
    x, inputs = batch.inputs()
    loss = stage(x, batch.sample_indices, **{**inputs, "lead_hours_B": torch.tensor([6.0, 12.0, 24.0])})
    starts = []
    for sample, steps in enumerate((1, 2, 4)):
        fields = x[sample : sample + 1]
        for _ in range(steps - 1):
            fields = torch.cat((model.forecast(fields, torch.tensor([6.0])), fields[:, 3:]), dim=1)
        starts.append(fields)
    expected = model(torch.cat(starts), batch.targets, lead_hours_B=torch.full((3,), 6.0))
    torch.testing.assert_close(loss, expected)
    assert not torch.allclose(starts[2], x[2:], atol=0.1)
    grads = [torch.autograd.grad(value.sum(), model.head.output.weight)[0] for value in (loss, expected)]
    torch.testing.assert_close(grads[0], grads[1])
    # Without targets the same steps are a forecast.
    del inputs["targets_BVHW"]
    inputs["lead_hours_B"] = torch.full((3,), 12.0)
    twice = torch.cat((model.forecast(x, torch.full((3,), 6.0)), x[:, 3:]), dim=1)
    with torch.no_grad():
        torch.testing.assert_close(
            stage(x, batch.sample_indices, **inputs), model.forecast(twice, torch.full((3,), 6.0))
        )
