"""`phalanx data sample` and the examples that read what it makes, as a person calls them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from weather_runs import EXAMPLES

if TYPE_CHECKING:
    from command_line import Call


def test_the_example_trains_and_forecasts_on_the_sample(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    made = call("data", "sample", "weather", "--out", "data/weather", "--days", "40", "--json")
    assert made.code == 0, made.err
    assert json.loads(made.out) == {"kind": "weather", "file": "data/weather/weather.nc", "days": 40, "seed": 0}
    splits = {"train": (0, 39), "validation": (46, 59), "test": (66, 79)}
    words = [
        f'data.splits.{name}={{"first": "step {first}", "last": "step {last}"}}'
        for name, (first, last) in splits.items()
    ]
    words += ["training.steps=2", "optimizer.warmup_steps=1", "layout.global_batch=4", "layout.microbatch=4"]
    words += ["evaluation.every=2", "evaluation.samples=4"]
    done = call("train", str(EXAMPLES / "climax-small.yaml"), *words)
    assert done.code == 0, done.err
    found = call("forecast", "runs/climax-small", "--hours", "72", "--json")
    assert found.code == 0, found.err
    assert {row["lead_hours"] for row in json.loads(found.out)["scores"]} == set(range(12, 73, 12))
    again = call("data", "sample", "weather", "--out", "data/weather")
    assert again.code == 1 and "weather.nc is already there" in again.err


def test_no_example_reads_files_beside_the_repository() -> None:
    for path in EXAMPLES.glob("*.yaml"):
        assert "../" not in path.read_text(), path
