"""Figures derived from a step's time."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from phalanx.config.load import load_run
from phalanx.families.registry import bind
from phalanx.hardware.energy import EnergyMeter
from phalanx.layout.resolve import resolve_layout
from phalanx.training.metrics import Peaks, StepMeter
from phalanx.training.start import train
from phalanx.training.step import StepResult
from token_data import write_run_file, write_token_folder


def test_no_step_is_faster_than_the_measured_peak(tmp_path: Path) -> None:
    run = load_run(write_run_file(tmp_path / "run.yaml", tmp_path), [])
    meter = StepMeter(bind(run), resolve_layout(bind(run), 1), torch.device("cpu"), Peaks(None, 1.0))
    flops = meter.sizes.final * meter.flops_per_sample

    def mfu(tflops: float) -> float | None:
        result = StepResult(loss=1.0, grad_norm=1.0, updated=True)
        return meter.measure(
            step=1, result=result, lr=0.1, seconds=flops / tflops / 1e12, data_wait=0.0, checkpoint_stall=0.0
        ).mfu_measured

    # The last one is slower than the fastest, which stays what the device is known to reach.
    assert [mfu(tflops) for tflops in (0.5, 2.0, 1.0)] == pytest.approx([0.5, 1.0, 0.5])


def test_a_peak_that_was_too_low_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("phalanx.training.metrics.measure_matmul_tflops", lambda *_: 1e-12)
    data = write_token_folder(tmp_path / "data")
    train(load_run(write_run_file(tmp_path / "run.yaml", data), ["training.steps=5"]), tmp_path / "run")
    assert capsys.readouterr().err.count("the matmul rate measured at the start, 1e-12 TFLOP/s, was too low") == 1


def test_energy_of_all_devices_follows_from_that_of_the_first_ranks(tmp_path: Path) -> None:
    run = load_run(write_run_file(tmp_path / "run.yaml", tmp_path), ["layout.dp_shard=4", "layout.microbatch=1"])
    # Two of the four ranks share the counter.
    energy = EnergyMeter(lambda: 0.0, "RAPL", ranks=2)
    energy.step_joules = lambda seconds: 30.0 * seconds  # type: ignore[method-assign]
    layout = resolve_layout(bind(run), 4)
    meter = StepMeter(bind(run), layout, torch.device("cpu"), Peaks(None, None), energy=energy)
    found = meter.measure(
        step=1, result=StepResult(1.0, 1.0, True), lr=0.1, seconds=2.0, data_wait=0.0, checkpoint_stall=0.0
    )
    assert found.step_joules == 120.0
    assert found.joules_per_token == 120.0 / (8 * 32)
