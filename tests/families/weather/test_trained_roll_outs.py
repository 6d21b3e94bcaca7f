"""Roll-outs that are trained through: samples of all steps, gradients through all of them, and how they grow."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from field_files import dataset
from phalanx.config.load import load_run
from phalanx.families.registry import bind
from phalanx.families.weather.config import RolloutSteps, WeatherRun
from phalanx.families.weather.data.field_samples import FieldBatch, FieldBatchStream
from phalanx.families.weather.data.open_fields import FieldSet
from phalanx.families.weather.layout import WeatherStage
from phalanx.families.weather.model.member_noise import member_noise
from phalanx.layout.apply import apply_layout
from phalanx.layout.context_parallel.kernel_choice import AttentionChoice
from phalanx.layout.execute import Executor
from phalanx.layout.layout_model import LayoutModel
from phalanx.layout.mesh import ONE_RANK
from phalanx.layout.resolve import resolve_layout
from phalanx.verification.family import VerifiableModel
from small_forecasters import random_forecaster
from weather_runs import write_weather_run

CPU = torch.device("cpu")
THROUGH: dict[str, Any] = {
    "model.history": 2,
    "model.variables": ["z500", "t850", "u10", "orography", "insolation"],
    "data.history": 2,
    "data.forcings": ["insolation"],
    "data.rollout_hours": 6,
    "data.rollout_steps": {"first": 1, "last": 3, "every": 2},
    "layout.dp_shard": 1,
    "layout.precision": "fp64",
    "layout.global_batch": 2,
}


def run_of(folder: Path, changes: dict[str, Any] | None = None) -> WeatherRun:
    run = load_run(write_weather_run(folder, {**THROUGH, **(changes or {})}))
    assert isinstance(run, WeatherRun)
    return run


def test_roll_outs_grow_by_a_step_at_a_time() -> None:
    steps = RolloutSteps(first=2, last=5, every=10)
    lengths = [steps.of_step(number) for number in range(1, 61)]
    assert lengths == [2] * 10 + [3] * 10 + [4] * 10 + [5] * 30
    for count in (1, 10, 15, 30, 60):
        expected = {length: lengths[:count].count(length) / count for length in lengths[:count]}
        assert steps.shares(count) == pytest.approx(expected)
    assert RolloutSteps(first=4, last=4, every=1).shares(7) == {4: 1.0}


def test_samples_have_the_targets_of_all_steps(tmp_path: Path) -> None:
    run = run_of(tmp_path)
    fields = FieldSet(run.data)
    reader = fields.reader("train", seed=1)
    stream = FieldBatchStream(reader, global_batch=4, prefetch=0)
    plain = fields.reader("train", seed=1, leads=[6])
    times = reader.sources[0].store.times.seconds
    for step, count in ((1, 1), (3, 2), (5, 3), (50, 3)):
        batch = stream.batch(step)
        assert batch.targets.shape == (4, count, 3, 6, 8) and batch.forcings.shape[1] == count - 1
        assert batch.lead_hours.tolist() == [6.0 * count] * 4
        cases = reader.locate(batch.sample_indices.numpy())
        for number in range(count):
            # The targets of a step are those of single steps from where it starts.
            moved = type(cases)(cases.source, cases.start + number, cases.start + number + 1)
            single = plain.read_cases(moved)
            torch.testing.assert_close(batch.targets[:, number], single.targets)
            forced = reader.read_forcings(0, cases.start, 6 * (number + 1))
            there = batch.fields.unflatten(1, (2, 5))[:, :, 4:] if number == 0 else batch.forcings[:, number - 1]
            torch.testing.assert_close(there, forced)
        assert (times[cases.start + count] - times[cases.start] == count * 21600).all()
    # Every sample has all the steps that there will ever be, so that growing changes no order.
    assert reader.sources[0].windows.starts.max() == 159 - 3
    other = run.data.model_copy(update={"rollout_steps": RolloutSteps(first=1, last=3, every=3)})
    assert FieldSet(other).reader("train", seed=1).fingerprint != reader.fingerprint
    # Held-out forecasts are those of the lead times.
    assert fields.reader("validation", seed=1).leads == (6, 12, 24)


def test_a_hole_costs_the_roll_outs_that_would_go_over_it(tmp_path: Path) -> None:
    path = write_weather_run(tmp_path, {**THROUGH, "data.gaps": "skip"})
    dataset(np.delete(np.arange(241) * 6, 50)).to_netcdf(tmp_path / "fields.nc")
    run = load_run(path)
    assert isinstance(run, WeatherRun)
    starts = FieldSet(run.data).reader("train", seed=1).sources[0].windows.starts
    # Frames behind the hole have no older state, those before it no target.
    assert sorted(set(range(1, 157)) - set(starts.tolist())) == [47, 48, 49, 50]


def stage_and_batch(run: WeatherRun) -> tuple[Executor, FieldBatch]:
    applied = apply_layout(bind(run, LayoutModel), resolve_layout(bind(run), 1), ONE_RANK, CPU, AttentionChoice("sdpa"))
    weights = random_forecaster(run.model, dtype=torch.float64).state_dict()
    applied.stages[0].part.load_state_dict(weights)
    batch = bind(run, VerifiableModel).samples(1, 0, 2, 2)
    assert isinstance(batch, FieldBatch)
    return Executor(applied), batch


def unrolled_loss(stage: WeatherStage, batch: FieldBatch) -> Tensor:
    """The loss of all steps of a roll-out, each built on the one before by autograd alone, as a forecaster is used."""
    members = stage.part.config.members
    part, x = stage.part, batch.fields.double().repeat_interleave(members, 0)
    total = torch.zeros(1, dtype=torch.float64)
    hours = torch.full((2 * members,), 6.0)
    positions = part.all_positions(CPU)
    for number in range(batch.targets.shape[1]):
        # Each step of a member has noise of its own.
        noise = member_noise(part.config, stage.seed, batch.sample_indices, members, positions.rows_S, step=number)
        hidden = part.hidden(x, positions, lead_hours_B=hours, noise_RSC=noise)
        total = total + part.head(hidden, batch.targets[:, number], fields_BVHW=x)
        if number + 1 < batch.targets.shape[1]:
            states = x.unflatten(1, (2, 5))
            # By hand: predicted fields, orography, the insolation of the next step, then the newest state of before.
            size = part.config.patch_size
            patches = part.head(hidden, None, fields_BVHW=x).unflatten(3, (size, size)).unflatten(1, (3, 4))
            predicted = patches.permute(0, 3, 1, 4, 2, 5).flatten(4, 5).flatten(2, 3)
            forced = batch.forcings[:, number].double().repeat_interleave(members, 0)
            x = torch.cat((predicted, states[:, 0, 3:4], forced[:, 0], states[:, 0, :4], forced[:, 1]), dim=1)
    return total


ENSEMBLE = {"model.loss": "crps", "model.members": 3, "model.noise_channels": 2}


@pytest.mark.parametrize("members", [1, 3])
@pytest.mark.parametrize("prediction", ["state", "change"])
def test_gradients_are_those_of_the_whole_roll_out(tmp_path: Path, prediction: str, members: int) -> None:
    changes = {"model.prediction": prediction, "model.dropout": 0.0, "model.drop_path": 0.0}
    executor, batch = stage_and_batch(run_of(tmp_path, {**changes, **(ENSEMBLE if members > 1 else {})}))
    (stage,) = executor.applied.stages
    assert isinstance(stage, WeatherStage)
    expected = unrolled_loss(stage, batch)
    names, parameters = zip(*stage.named_parameters(), strict=True)
    wanted = dict(zip(names, torch.autograd.grad(0.25 * expected, parameters, allow_unused=True), strict=True))
    found = executor.forward_backward(1, batch, 0.25)
    torch.testing.assert_close(found, expected.detach(), rtol=1e-12, atol=0.0)
    for name, parameter in stage.named_parameters():
        if wanted[name] is not None:
            torch.testing.assert_close(parameter.grad, wanted[name], rtol=1e-9, atol=1e-12)
    # Learning the last step alone, or each step by itself, is something else.
    executor.discard_gradients()
    last = executor.forward_backward(1, _of_steps(batch, slice(0, 1)), 0.25)
    assert last < found


def _of_steps(batch: FieldBatch, steps: slice) -> FieldBatch:
    return FieldBatch(
        batch.fields,
        batch.forcings[:, :0],
        batch.targets[:, steps],
        batch.lead_hours,
        batch.time_of_year,
        batch.time_of_day,
        batch.sample_indices,
    )


def test_the_first_step_embeds_a_sample_once_for_all_members(tmp_path: Path) -> None:
    executor, batch = stage_and_batch(run_of(tmp_path, ENSEMBLE))
    rows: list[int] = []
    (stage,) = executor.applied.stages
    stage.part.embedding.register_forward_pre_hook(lambda _, inputs: rows.append(len(inputs[0])))
    executor.forward_backward(1, batch, 1.0)
    # Of both micro-batches: two states are forecast, then the steps learn, the last one first.
    assert rows == [1, 3, 3, 3, 1] * 2


def test_dropout_is_the_same_when_a_step_is_computed_anew(tmp_path: Path) -> None:
    """Finite differences along a direction: the loss is one function, whichever pass computes its steps."""
    executor, batch = stage_and_batch(run_of(tmp_path, {"model.dropout": 0.2, "model.drop_path": 0.3}))
    (stage,) = executor.applied.stages
    weight = stage.part.head.output.weight
    direction = torch.randn(weight.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    executor.forward_backward(3, batch, 1.0)
    slope = float((weight.grad * direction).sum())
    values = []
    for sign in (1.0, -1.0):
        with torch.no_grad():
            weight += sign * 1e-6 * direction
        values.append(float(executor.forward_backward(3, batch, 1.0)))
        with torch.no_grad():
            weight -= sign * 1e-6 * direction
    assert slope == pytest.approx((values[0] - values[1]) / 2e-6, rel=1e-6)


def test_a_roll_out_keeps_the_activations_of_one_step(tmp_path: Path) -> None:
    """What autograd keeps at once does not grow with the steps."""
    executor, batch = stage_and_batch(run_of(tmp_path))
    kept: list[int] = []
    for steps in (1, 3):
        most = alive = 0

        def pack(tensor: Tensor) -> Tensor:
            nonlocal alive, most
            alive += tensor.numel()
            most = max(most, alive)
            return tensor

        def unpack(tensor: Tensor) -> Tensor:
            nonlocal alive
            alive -= tensor.numel()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            executor.forward_backward(1, _of_steps(batch, slice(0, steps)) if steps == 1 else batch, 1.0)
        kept.append(most)
    assert kept[1] < 1.1 * kept[0]
