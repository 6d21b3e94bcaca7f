"""Batches that cannot be learned from, or not be read: ranks leave out the same ones, keep their state and say which."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import phalanx_processes
from fault_injection import fault_words, offer_callback
from materials_runs import write_materials_run
from phalanx.checkpoint import open_checkpoints, read_state
from phalanx.config.load import load_run
from phalanx.errors import DataError
from phalanx.families.materials.config import MaterialsRun
from phalanx.families.materials.data.prepare_structures import prepare_graphs
from phalanx.training.start import train
from token_data import write_run_file, write_token_folder
from weather_runs import write_weather_run

BATCH, POISONED = 8, 3


def rows(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def write_language(folder: Path) -> Path:
    return write_run_file(folder / "run.yaml", write_token_folder(folder / "data"))


def write_materials(folder: Path) -> Path:
    run_file = write_materials_run(folder)
    run = load_run(run_file)
    assert isinstance(run, MaterialsRun)
    prepare_graphs(run.data, workers=1)
    return run_file


@pytest.mark.parametrize(
    ("write", "field", "value"),
    [
        (write_language, "", "nan"),
        # A pixel that no field has; normalisation knows nothing of it.
        (write_weather_run, "targets", "1e30"),
        (write_materials, "energy_G", "inf"),
    ],
    ids=["language", "weather", "materials"],
)
def test_a_poisoned_batch_of_one_rank_leaves_every_rank_as_it_was(
    write: Any, field: str, value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_file = write(tmp_path)
    monkeypatch.syspath_prepend(str(offer_callback(tmp_path / "package")))
    poison = fault_words("poison", record=tmp_path / "rank", field=field or "''", value=f"'{value}'", step=POISONED)
    words = ["training.steps=5", "optimizer.warmup_steps=1", "training.on_nonfinite=skip", "layout.dp_replicate=2"]
    command = ["train", str(run_file), "--run-dir", str(tmp_path / "run"), *words, "layout.zero=0", poison]
    phalanx_processes.finish(command, 2)
    expected = [{"step": n, "updated": n != POISONED, "same_bits": n == POISONED} for n in range(1, 6)]
    assert rows(tmp_path / "rank-0") == rows(tmp_path / "rank-1") == expected
    (kept,) = (tmp_path / "run" / "bad_batches").iterdir()
    record = json.loads(kept.read_text())
    samples = record["samples"]
    # Batches of structures are cut where costs are equal, and others in equal parts.
    assert record["step"] == POISONED and samples == list(range(samples[0], samples[-1] + 1))
    assert (POISONED - 1) * BATCH + BATCH // 2 in samples and abs(len(samples) - BATCH) <= 2


def altered_tokens(folder: Path) -> Path:
    """A run file of data with one id outside the vocabulary: 100 samples, of which one cannot be read."""
    data = write_token_folder(folder / "data", train_tokens=3_300)
    shard = data / "train-00000.bin"
    ids = np.fromfile(shard, "<u2")
    ids[1000] = 60_000
    ids.tofile(shard)
    return write_run_file(folder / "run.yaml", data)


def test_a_batch_that_one_rank_cannot_read_is_passed_over_by_all(tmp_path: Path) -> None:
    # One epoch of 12 batches: one of them is bad.
    words = ["training.steps=11", "data.verify=false", "safeguards.on_bad_data=skip", "layout.dp_shard=2"]
    run_dir = tmp_path / "run"
    command = ["train", str(altered_tokens(tmp_path)), "--run-dir", str(run_dir), *words, "checkpoint.every=null"]
    errors = phalanx_processes.finish(command, 2)
    (event,) = [row for row in rows(run_dir / "events.jsonl") if row["kind"] == "unread_batch"]
    step, reason = event["step"], event["reason"]
    assert "holds token id 60000, outside model.vocab_size=264" in reason
    assert f"step {step} passes over a batch that cannot be read: {reason}" in errors
    assert [row["step"] for row in rows(run_dir / "metrics.jsonl")] == list(range(1, 12))
    assert all(row["updated"] for row in rows(run_dir / "metrics.jsonl"))
    record = json.loads((run_dir / "bad_batches" / f"step-{step:08d}-unread-1.json").read_text())
    # The rank that could read its half knows the numbers of that half.
    halves = [list(range(first, first + BATCH // 2)) for first in ((step - 1) * BATCH, (step - 1) * BATCH + BATCH // 2)]
    assert record["samples"] in halves and record["reason"] == reason
    newest = open_checkpoints(run_dir).newest()
    assert newest is not None and read_state(newest.path)["safeguards"]["skipped_batches"] == 1


def test_data_that_cannot_be_read_end_the_run_by_default_and_where_there_is_no_end_of_it(tmp_path: Path) -> None:
    run_file = altered_tokens(tmp_path)
    with pytest.raises(DataError, match="holds token id 60000"):
        train(load_run(run_file, ["training.steps=12", "data.verify=false"]), tmp_path / "stopped")
    shard = tmp_path / "data" / "train-00000.bin"
    np.full(shard.stat().st_size // 2, 60_000, "<u2").tofile(shard)
    words = ["training.steps=12", "data.verify=false", "safeguards.on_bad_data=skip", "training.max_skipped_steps=2"]
    with pytest.raises(DataError, match="2 batches in a row cannot be read"):
        train(load_run(run_file, words), tmp_path / "given-up")
