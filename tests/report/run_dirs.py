"""Run directories as `phalanx train` leaves them, with figures that are easy to check."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

TOKENS_A_STEP = 4096
START = datetime(2026, 3, 1, 12, 0, tzinfo=UTC)

RUN_YAML = "model:\n  preset: gpt2\ntraining:\n  steps: 40\n  flops: palm\n"
MACHINE = {
    "device": "Accelerator 9000",
    "device_count": 8,
    "host": "node-7",
    "memory_gib": 512.0,
    "python": "3.11.0",
    "peak_tflops_nominal": 989.0,
    "peak_tflops_measured": None,
    "flops_convention": "palm",
}


def metric(step: int, /, **changes: Any) -> dict[str, Any]:
    """A record of a step: loss 10 / step, half a second, 1 % of it data wait."""
    return {
        "step": step,
        "loss": 10 / step,
        "grad_norm": 1.0 + 1 / step,
        "lr": 1e-3 / step,
        "tokens": step * TOKENS_A_STEP,
        "step_seconds": 0.5,
        "tokens_per_second": TOKENS_A_STEP / 0.5,
        "model_tflops": 400.0,
        "mfu": 0.4,
        "mfu_measured": 0.5,
        "memory_now_gib": 10.0,
        "memory_peak_gib": 20.0,
        "data_wait_seconds": 0.005,
        "checkpoint_stall_seconds": 0.0,
        "updated": True,
        **changes,
    }


def event(kind: str, step: int, at: float, /, **fields: Any) -> dict[str, Any]:
    time = (START + timedelta(seconds=at)).isoformat(timespec="seconds")
    return {"kind": kind, "step": step, "time": time, **fields}


EVENTS = [
    event("start", 0, 0, attention="sdpa"),
    event("evaluation", 10, 6, loss=1.25, perplexity=3.4903, bits_per_byte=0.45),
    event("sample", 10, 7, prompt="Once ", text="the the"),
    event("checkpoint", 20, 12, path="checkpoints/20", stall_seconds=0.125),
    event("resume", 20, 100, attention="sdpa"),
    event("evaluation", 40, 112, loss=0.5, perplexity=1.6487, bits_per_byte=0.175),
    event("sample", 40, 113, prompt="Once ", text="upon a time\n\tthere was"),
    event("end", 40, 115, seconds=15.0),
]


def write_run(
    folder: Path,
    steps: int = 40,
    change: Callable[[int], dict[str, Any]] = lambda step: {},
    events: list[dict[str, Any]] | None = None,
    others: bool = True,
) -> Path:
    """A run of `steps` steps; `change(step)` replaces fields of a step's record, `others` writes run.yaml and
    machine.json."""
    folder.mkdir(parents=True, exist_ok=True)
    write_lines(folder / "metrics.jsonl", [metric(step, **change(step)) for step in range(1, steps + 1)])
    write_lines(folder / "events.jsonl", EVENTS if events is None else events)
    if others:
        (folder / "run.yaml").write_text(RUN_YAML)
        (folder / "machine.json").write_text(json.dumps(MACHINE))
    return folder


def write_lines(path: Path, records: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
