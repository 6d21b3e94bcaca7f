"""What a part of a trial teaches."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from layout_runs import run_with
from phalanx.study.hyperparameters.packing import Span
from phalanx.study.hyperparameters.tuning_job import TuningJob
from phalanx.study.trial import Trial


@pytest.mark.parametrize(("begun", "seconds"), [((0,), 0.2), ((0, 90), 2.0)])
def test_a_step_takes_what_the_process_took_that_trained_it(
    tmp_path: Path, begun: tuple[int, ...], seconds: float
) -> None:
    """Of 100 steps the last ten may have been trained by a process that went on where another was killed."""
    _write(tmp_path / "metrics.jsonl", [{"step": step, "step_seconds": 2.0} for step in range(1, 101)])
    events = [{"kind": "resume" if step else "start", "step": step} for step in begun]
    _write(tmp_path / "events.jsonl", [*events, {"kind": "end", "step": 100, "seconds": 20.0}])
    run = run_with(global_batch=8)
    trial = Trial(0, "key", {}, "test", None, {})
    job = TuningJob(trial, 0, 0, run, tmp_path, tmp_path, 0, 100, 1.0, 1e9, "loss", 60.0)
    job.spans.append(Span("device", 5.0, 25.0))
    assert job.measured_step_s() == pytest.approx(seconds)


def _write(file: Path, rows: list[dict[str, Any]]) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
