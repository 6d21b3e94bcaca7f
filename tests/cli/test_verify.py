"""`phalanx verify` as a person sees it: verdicts, exit codes, and what is refused."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from cli.terminal import start
from command_line import Call
from phalanx.cli.main import SUBCOMMANDS
from phalanx.config.load import load_run
from phalanx.families.registry import bind
from phalanx.layout.resolve import resolve_layout
from phalanx.report.page_sections import describe_widths
from phalanx.verification import verify_run
from report.run_dirs import write_run
from trial_processes import wait_for

RUN_FILE = """
model: {n_layers: 3, d_model: 32, n_heads: 8, n_kv_heads: 4, d_ff: 64, vocab_size: 61, max_positions: 32, dropout: 0.1}
data: {sources: [nowhere], sequence_length: 32}
layout: {global_batch: 16}
optimizer: {lr: 1e-3}
training: {steps: 10}
"""


@pytest.fixture
def run_file(tmp_path: Path) -> str:
    path = tmp_path / "run.yaml"
    path.write_text(RUN_FILE)
    return str(path)


def test_a_layout_that_equals_one_rank(run_file: str, call: Call) -> None:
    outcome = call("verify", run_file, "tp=2")
    assert outcome.code == 0, outcome.err
    lines = outcome.out.splitlines()
    assert lines[0].startswith("2 ranks against one; model: 3 layers, width 32, 4 heads (2 key/value), vocabulary ")
    assert lines[1].startswith("bound on relative errors: 16 * sqrt(")
    assert lines[2].startswith("PASS  tp=2 microbatch=2 x 4  largest gradient error ")
    assert lines[3] == "1 of 1 layouts compute what one rank computes"


def test_every_legal_layout_as_json(run_file: str, call: Call) -> None:
    outcome = call("verify", run_file, "--all", "2", "--json", "--steps", "1", "--precision", "fp32")
    assert outcome.code == 0, outcome.err
    report = json.loads(outcome.out)
    layouts = [entry["layout"] for entry in report["layouts"]]
    assert report["ranks"] == 2 and report["passed"] and len(layouts) == len(set(layouts)) == 19
    assert {"tp=2", "dp_replicate=2 zero=0"} <= set(layouts)
    worst = report["layouts"][0]["worst"]
    assert set(worst) == {"activations", "loss", "gradient", "input gradient", "gradient norm", "parameter"}
    assert all(entry["error"] <= entry["bound"] for entry in worst.values())


def test_streamed_weights_are_refused_in_fp16(run_file: str, call: Call) -> None:
    outcome = call("verify", run_file, "dp_shard=2", "gather=stream", "--precision", "fp16")
    assert outcome.code == 2
    assert "loss scaling of layout.precision=fp16" in outcome.err and "nearest legal:" in outcome.err


def test_what_a_verdict_was_reached_with_is_said(run_file: str, call: Call) -> None:
    words = ["dp_shard=2", "recompute=full", "gather_blocks=2", "microbatch=1"]
    outcome = call("verify", run_file, *words, "--steps", "1")
    assert outcome.code == 0, outcome.err
    assert (
        "PASS  dp_shard=2 reshard_after_forward=True microbatch=1 x 2 recompute=full gather_blocks=2  " in outcome.out
    )
    everything = call("verify", run_file, "--all", "1", "--steps", "1").out.splitlines()
    assert everything[-1] == (
        "tried with gather=layer gather_blocks=1 recompute=none alone: --all varies degrees, schedule, zero, resharding "
        "and context"
    )


def test_any_batch_of_the_run_file_can_be_verified_on_any_ranks(run_file: str, call: Call) -> None:
    """The small model's batch is its own: that of the run file need not divide."""
    assert call("verify", run_file, "pp=3", "global_batch=1", "--steps", "1").code == 0
    refused = call("verify", run_file, "dp_shard=3", "--full", "--steps", "1", "--nproc", "3")
    assert refused.code == 2 and "is not a multiple of 3 data-parallel ranks" in refused.err


def test_a_difference_is_named_and_ends_with_code_3(run_file: str, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    right, seeds = verify_run.record_training, iter((0, 1))

    def other_weights(model: Any, *rest: Any, **options: Any) -> Any:
        training = model.run.training.model_copy(update={"seed": next(seeds)})
        return right(model.rebind(model.run.model_copy(update={"training": training})), *rest, **options)

    monkeypatch.setattr(verify_run, "record_training", other_weights)
    outcome = call("verify", run_file, "--nproc", "1")
    assert outcome.code == 3
    lines = outcome.out.splitlines()
    assert lines[2] == "FAIL  one rank microbatch=2 x 2"
    assert lines[3] == "      first module out of its bound: embedding"
    assert lines[4].startswith("      first: activations of embedding in step 1 differs by 1.")
    assert lines[5].startswith("      then:  activations of blocks.0.attention_norm in step 1 differs by ")
    assert lines[-1] == "0 of 1 layouts compute what one rank computes"
    assert outcome.err.startswith("error: 1 of 1 layouts differ from one rank: activations of embedding in step 1")


def test_an_illegal_layout_is_refused_with_the_nearest_legal_one(run_file: str, call: Call) -> None:
    outcome = call("verify", run_file, "tp=3", "--nproc", "3")
    assert outcome.code == 2
    assert "layout.tp=3 does not divide model.n_heads (8 parts)" in outcome.err
    assert "nearest legal:" in outcome.err


@pytest.mark.parametrize("degree", [300, 10_000_000])
def test_more_ranks_than_a_machine_takes_are_refused_at_once(degree: int, run_file: str, call: Call) -> None:
    outcome = call("verify", run_file, f"dp_replicate={degree}")
    assert outcome.code == 2 and f"{degree:,} ranks are more than the 256 that verify starts" in outcome.err


@pytest.mark.parametrize("example", [words for verb in SUBCOMMANDS if verb.name == "verify" for words in verb.examples])
def test_layouts_of_the_examples_are_legal(example: str) -> None:
    words = example.partition(" verify ")[2].split()
    fields = [word for word in words[1:] if "=" in word and not word.startswith("--")]
    if words[0].startswith("examples/") and fields:
        run = load_run(Path(__file__).parents[2] / words[0], fields)
        ranks = math.prod(int(field.partition("=")[2]) for field in fields if field[1:].startswith("p="))
        assert resolve_layout(bind(run), ranks).world_size == ranks


def test_an_unknown_field_is_refused(run_file: str, call: Call) -> None:
    outcome = call("verify", run_file, "tpp=2")
    assert outcome.code == 2 and "tpp=2" in outcome.err


def test_widths_are_compared_and_left_for_the_report(tmp_path: Path, call: Call) -> None:
    folder = write_run(tmp_path / "run", 3)
    (folder / "run.yaml").write_text(RUN_FILE)
    outcome = call("verify", str(folder), "--widths", "16,32,64", "optimizer.lr=0.01")
    assert outcome.code == 0, outcome.err
    kept = json.loads((folder / "coordinate_check.json").read_text())
    assert kept["widths"] == [16, 32, 64] and kept["passed"]
    section = describe_widths(folder)
    assert section is not None and f"width^{kept['growth']['muP']['logits']:.2f} under muP" in section.words
    assert call("report", str(folder)).code == 0
    assert "Coordinate check" in (folder / "report.html").read_text()
    for damaged in ("{", json.dumps({**kept, "widths": [16, -1, 64]}), json.dumps({**kept, "widths": [16]})):
        (folder / "coordinate_check.json").write_text(damaged)
        assert describe_widths(folder) is None
    refused = call("verify", str(folder), "--widths", "16;32")
    assert refused.code == 2 and "write widths with commas between" in refused.err


def test_ctrl_c_while_ranks_are_started_leaves_no_traceback() -> None:
    """The terminal interrupts all processes, the one that loads torch for the ranks among them."""
    words = ("verify", "examples/quickstart.yaml", "tp=2", "pp=2")
    process = start(*words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True)
    wait_for(None, lambda: _has_fork_server(process.pid) and not _ignores_interrupts(process.pid), 120)
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130 and b"Traceback" not in errors, errors
    wait_for(None, lambda: not _has_members(process.pid), 30)


def _has_fork_server(process: int) -> bool:
    children = Path(f"/proc/{process}/task/{process}/children").read_text().split()
    return any("forkserver" in Path(f"/proc/{child}/cmdline").read_text() for child in children)


def _has_members(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def _ignores_interrupts(process: int) -> bool:
    (mask,) = re.findall(r"^SigIgn:\s*(\w+)", Path(f"/proc/{process}/status").read_text(), re.MULTILINE)
    return bool(int(mask, 16) >> (signal.SIGINT - 1) & 1)
