"""`phalanx dryrun` as a person sees it: what it prints, what it refuses, and that it leaves nothing behind."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch.distributed as dist

from command_line import Call

RUN_FILE = """
model: {n_layers: 4, d_model: 32, n_heads: 8, n_kv_heads: 4, d_ff: 64, vocab_size: 61, max_positions: 32}
data: {sources: [nowhere], sequence_length: 32}
layout: {global_batch: 512, microbatch: 1}
optimizer: {lr: 1e-3}
training: {steps: 10}
"""


@pytest.fixture
def run_file(tmp_path: Path) -> str:
    path = tmp_path / "run.yaml"
    path.write_text(RUN_FILE)
    return str(path)


def test_one_rank_of_each_kind_of_stage(run_file: str, call: Call) -> None:
    outcome = call("dryrun", run_file, "layout.pp=4", "layout.tp=2", "--devices", "512", "--devices-per-node", "8")
    assert outcome.code == 0, outcome.err
    lines = outcome.out.splitlines()
    assert lines[0].startswith("512 ranks: dp_shard=64 tp=2 pp=4 ") and lines[0].endswith(
        "; 8 micro-batches of 1 a step"
    )
    assert [line for line in lines if line.startswith("rank ")] == [
        "rank 0 (stage 0)",
        "rank 256 (stage 2)",
        "rank 384 (stage 3)",
    ]
    assert "  peak 0.00 GiB on stage 0 at micro-batch " in outcome.out
    assert "collectives a step" in outcome.out and "over the node boundary" in outcome.out
    assert "ran 6 micro-batches; each further one adds what the last ones added" in outcome.out
    assert lines[-1] == "blocks ran uncompiled here; compiled, as this run has them, they hold less"
    assert not dist.is_initialized()


def test_who_waits_hears_how_far_it_is(run_file: str, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("phalanx.cli.planning.dryrun._SILENCE_S", 0.0)
    outcome = call("dryrun", run_file, "--devices", "64")
    assert outcome.code == 0
    assert "rank 0: forward of block 3, micro-batch 1, " in outcome.err
    assert "rank 0: backward of block 0, micro-batch 1, " in outcome.err
    assert outcome.out.splitlines()[1].endswith("; 41,056 parameters")


def test_a_rank_as_json(run_file: str, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    # a step that takes a moment says nothing meanwhile
    monkeypatch.setattr("phalanx.cli.planning.dryrun._SILENCE_S", 1e9)
    outcome = call("dryrun", run_file, "layout.pp=2", "--devices", "8", "--rank", "5", "--device", "cpu", "--json")
    assert (outcome.code, outcome.err) == (0, "")
    report = json.loads(outcome.out)
    assert report["world_size"] == 8 and report["device"] == "cpu" and not report["compiled_run"]
    (rank,) = report["ranks"]
    assert rank["rank"] == 5 and rank["stages"] == [1] and rank["microbatches"] == 128
    assert sum(rank["bytes_at_peak"].values()) == rank["peak_bytes"]
    assert rank["collectives"] == sum(entry["count"] for entry in rank["traffic"])
    (received,) = (entry for entry in rank["traffic"] if entry["operation"] == "receive")
    assert received == {
        "operation": "receive",
        "axis": "pp",
        "ranks": 2,
        "bytes": 32 * 32 * 2,
        "count": 128,
        "bytes_sent": 0.0,
        "bytes_over_node_boundary": 0.0,
    }
    assert max(point["peak_bytes"] for point in rank["timeline"]) <= rank["peak_bytes"]


def test_an_illegal_layout_is_refused_as_train_refuses_it(run_file: str, call: Call) -> None:
    outcome = call("dryrun", run_file, "layout.tp=3", "--devices", "6")
    assert outcome.code == 2
    assert "layout.tp=3 does not divide model.n_heads" in outcome.err and "nearest legal:" in outcome.err


def test_a_rank_that_is_not_there_is_refused(run_file: str, call: Call) -> None:
    outcome = call("dryrun", run_file, "--devices", "8", "--rank", "8")
    assert outcome.code == 2 and "--rank 8 is not one of 8 ranks; give 0 to 7" in outcome.err
