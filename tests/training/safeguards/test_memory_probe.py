"""The micro-batch that a run finds by the planner and one step, with a device's memory played on the CPU."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

import phalanx_processes
from fault_injection import fault_words, offer_callback
from phalanx.cli.main import main
from phalanx.config.load import load_run
from phalanx.errors import PhalanxError
from phalanx.families.registry import bind
from phalanx.layout.spec import ResolvedLayout
from phalanx.planner.memory.model import Kernels, memory
from phalanx.planner.memory.probability import Beside
from phalanx.planner.rank import cost_models
from phalanx.planner.trace.traced_model import TracedModel
from phalanx.training import start
from phalanx.training.safeguards import memory_probe
from phalanx.training.safeguards.memory_probe import PROBE_FILE, recall_microbatch
from token_data import write_run_file, write_token_folder

NOTHING = Beside(context=0.0, communicator=0.0, holes=1.0)
STEPS = 6


@pytest.fixture(scope="module")
def run_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("probe")
    offer_callback(folder / "package")
    return write_run_file(folder / "run.yaml", write_token_folder(folder / "data"))


@pytest.fixture(scope="module")
def planned(run_file: Path) -> dict[int, float]:
    """Bytes of tensors on a device by the planner, by the micro-batch."""
    model = bind(load_run(run_file, ["layout.microbatch=auto"]), TracedModel)
    kernels = Kernels.on_accelerators(model, rocm=False)
    sizes = (1, 2, 4, 8)
    return {size: float(memory(model, ResolvedLayout(8, size).table, kernels).allocated[0]) for size in sizes}


def train_on(capacity: int, took: int, words: Sequence[str]) -> None:
    """The command on a device of `capacity` bytes of which a step takes `took`, in a process of its own."""
    with (
        mock.patch.object(start, "memory_bytes", lambda device: capacity),
        mock.patch.object(memory_probe, "reset_peak_bytes", lambda device: None),
        mock.patch.object(memory_probe, "peak_bytes", lambda device: took),
        mock.patch.dict(cost_models.BESIDE, cuda=NOTHING, rocm=NOTHING),
    ):
        main(words)


def train(run_file: Path, run_dir: Path, *words: str, capacity: float = 0.0, took: float = 0.0, ranks: int = 1) -> str:
    given = ["train", str(run_file), "--run-dir", str(run_dir), f"training.steps={STEPS}", *words]
    command = partial(train_on, int(capacity), int(took)) if capacity else main
    return phalanx_processes.finish(given, ranks, command=command)


def rows(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def losses(run_dir: Path) -> list[float]:
    return [row["loss"] for row in rows(run_dir / "metrics.jsonl")]


@pytest.mark.parametrize(("error", "size"), [(1.0, 2), (0.5, 4), (1.3, 1)])
def test_what_a_step_took_corrects_the_plan(
    error: float, size: int, run_file: Path, planned: dict[int, float], tmp_path: Path
) -> None:
    # The planner thinks that 2 samples fit and 4 do not. Steps take more or less than it thinks.
    capacity, run_dir = 1.1 * planned[2], tmp_path / "run"
    assert planned[1] * 1.3 < 0.95 * capacity < planned[2] * 1.3
    assert planned[4] * 0.5 < 0.95 * capacity < planned[8] * 0.5
    said = train(run_file, run_dir, "layout.microbatch=auto", capacity=capacity, took=error * planned[2])
    assert "one step with 2 x 4 samples took" in said
    assert (f"steps take {size} x {8 // size}" in said) == (size != 2)
    (event,) = [event for event in rows(run_dir / "events.jsonl") if event["kind"] == "microbatch"]
    assert (event["planned"], event["microbatch"], event["step"]) == (2, size, 0)
    assert event["peak_bytes"] == int(error * planned[2]) and event["start_seconds"] > 0
    if size != 4:
        return
    # The step left nothing behind: the same bits as with that number in the run file.
    train(run_file, tmp_path / "stated", f"layout.microbatch={size}")
    assert losses(run_dir) == losses(tmp_path / "stated") and len(losses(run_dir)) == STEPS
    # The next start of the run takes what was found, without another step.
    more = f"training.steps={STEPS + 2}"
    said = train(run_file, run_dir, "layout.microbatch=auto", more, capacity=capacity, took=planned[8])
    assert "one step with" not in said and f"microbatch={size} x {8 // size} (auto)" in said
    assert len(losses(run_dir)) == STEPS + 2


def test_two_ranks_choose_alike(run_file: Path, planned: dict[int, float], tmp_path: Path) -> None:
    # By the planner 2 of each rank's 4 samples; what they really take leaves room for all 4.
    words = ("layout.microbatch=auto", "layout.dp_replicate=2", "layout.dp_shard=1", "layout.zero=0")
    said = train(run_file, tmp_path / "run", *words, capacity=1.1 * planned[2], took=0.4 * planned[2], ranks=2)
    assert "steps take 4 x 1" in said
    assert json.loads((tmp_path / "run" / PROBE_FILE).read_text())["microbatch"] == 4
    train(run_file, tmp_path / "stated", "layout.microbatch=4", *words[1:], ranks=2)
    assert losses(tmp_path / "run") == losses(tmp_path / "stated")


def test_memory_that_runs_out_in_the_probe_halves_the_micro_batch(
    run_file: Path, planned: dict[int, float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(run_file.parent / "package"))
    fault = fault_words(kind="full", rank=0, step=0, samples=1)
    capacity = 1.1 * planned[2]
    said = train(run_file, tmp_path / "run", "layout.microbatch=auto", fault, capacity=capacity, took=planned[2])
    assert "step 1 ran out of memory: it is done again with 1 x 8 samples in place of 2 x 4" in said
    assert "one step with" not in said and not (tmp_path / "run" / PROBE_FILE).exists()
    assert len(losses(tmp_path / "run")) == STEPS


def test_another_layout_or_device_recalls_nothing(tmp_path: Path) -> None:
    layout = ResolvedLayout(8, 2)
    found = {"layout": memory_probe.name_layout(layout), "capacity": 1000, "microbatch": 4}
    (tmp_path / PROBE_FILE).write_text(json.dumps(found))
    recalled = recall_microbatch(tmp_path, layout, 1000)
    assert recalled is not None and recalled.microbatch == 4
    assert recall_microbatch(tmp_path, layout, 2000) is None
    assert recall_microbatch(tmp_path, ResolvedLayout(8, 2, recompute="full"), 1000) is None
    (tmp_path / PROBE_FILE).write_text("{}")
    with pytest.raises(PhalanxError, match="is damaged; remove it"):
        recall_microbatch(tmp_path, layout, 1000)
