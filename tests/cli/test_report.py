"""`phalanx report`: the page's path, the figures as JSON, and plain errors."""

from __future__ import annotations

import json
import math
import os
import socket
from pathlib import Path

import pytest

from command_line import Call
from report.run_dirs import event, write_lines, write_run
from token_data import write_run_file, write_token_folder


def test_prints_the_path_of_the_page(call: Call, tmp_path: Path) -> None:
    write_run(tmp_path / "run")
    outcome = call("report", str(tmp_path / "run"))
    assert (outcome.code, outcome.out, outcome.err) == (0, f"{tmp_path / 'run' / 'report.html'}\n", "")
    assert (tmp_path / "run" / "report.html").read_text().startswith("<!DOCTYPE html>")


def test_out_names_the_page(call: Call, tmp_path: Path) -> None:
    write_run(tmp_path / "run")
    wanted = tmp_path / "page.html"
    outcome = call("report", str(tmp_path / "run"), "--out", str(wanted))
    assert (outcome.code, outcome.out) == (0, f"{wanted}\n") and wanted.exists()
    assert not (tmp_path / "run" / "report.html").exists()


def test_json_is_one_object_with_the_headline_figures(call: Call, tmp_path: Path) -> None:
    write_run(tmp_path, change=lambda step: {"loss": math.nan} if step == 40 else {})
    outcome = call("report", str(tmp_path), "--json")
    assert outcome.code == 0 and outcome.err == ""
    figures = json.loads(outcome.out)
    assert figures["report"] == str(tmp_path / "report.html")
    assert (figures["steps"], figures["final_loss"], figures["nonfinite_losses"]) == (40, None, 1)
    assert (figures["validation_loss"], figures["bits_per_byte"], figures["tokens"]) == (0.5, 0.175, 163840)
    assert (figures["median_mfu"], figures["flops_convention"], figures["notes"]) == (0.4, "palm", [])


def test_errors_name_the_file_and_the_fix(call: Call, tmp_path: Path) -> None:
    outcome = call("report", str(tmp_path / "nowhere"))
    assert outcome.code == 2 and outcome.out == ""
    assert "nowhere is not a directory: give the run directory that `phalanx train` printed" in outcome.err
    outcome = call("report", str(tmp_path))
    assert outcome.code == 1 and "metrics.jsonl is missing: give a run directory" in outcome.err
    write_lines(tmp_path / "metrics.jsonl", [{"step": 1}])
    outcome = call("report", str(tmp_path))
    assert outcome.code == 1 and "metrics.jsonl: 1 damaged line (1); it has no 'loss'" in outcome.err


@pytest.mark.parametrize(
    ("field", "value"),
    [(name, value) for name in ("loss", "tokens", "step_seconds", "lr") for value in (1e308, -1e308, 5e-324, math.inf)],
)
def test_figures_at_the_ends_of_the_range_make_a_page(call: Call, tmp_path: Path, field: str, value: float) -> None:
    for some in (lambda step: step == 3, lambda step: True):
        write_run(tmp_path, 6, change=lambda step, some=some: {field: value} if some(step) else {})
        outcome = call("report", str(tmp_path))
        assert outcome.code == 0, outcome.err


def test_nothing_in_a_run_acts_on_a_terminal_or_a_page(call: Call, tmp_path: Path) -> None:
    wild = "\x1b[31mred\x07\u202egnp.exe\ud800"
    run_dir = tmp_path / "run\x1b[2J"
    events = [event("sample", 3, 1, prompt=wild, text=wild), event("warning", 3, 2, text=wild), event(wild, 3, 2)]
    write_run(run_dir, 6, events=events)
    (run_dir / "machine.json").write_text(json.dumps({"device": wild, wild: wild}))
    (run_dir / "run.yaml").write_text('model: {preset: "\\x1b]0;title"}\n')
    outcome = call("report", str(run_dir))
    page = (run_dir / "report.html").read_text()
    for text in (page, outcome.out, outcome.err, call("report", str(run_dir), "--json").out):
        assert not set(text) & set("\x1b\x07\u202e")
    assert "␛[31mred" in page and "\\ud800" in page


@pytest.mark.parametrize("name", ["/dev/null", "pipe", "socket"])
def test_what_is_no_run_and_no_page_is_named(call: Call, tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / "pipe")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "socket"))
    thing = str(tmp_path / name)
    for arguments in (("report", thing), ("train", thing), ("search", thing, "--cluster", "h200-x4", "--devices", "4")):
        outcome = call(*arguments)
        assert outcome.code == 2 and Path(name).name in outcome.err, outcome.err
    write_run(tmp_path / "run")
    outcome = call("report", str(tmp_path / "run"), "--out", thing)
    assert outcome.code == 2 and "name the file to write" in outcome.err


PLACED = ("--cluster", "h200-x4", "--devices", "4")


@pytest.mark.parametrize("name", ["a" * 10_000, "a/" * 5_000, "a\0b"], ids=["name", "path", "zero"])
@pytest.mark.parametrize(
    "words",
    [
        *(
            ["report", "PATH"],
            ["watch", "PATH"],
            ["train", "PATH"],
            ["search", "PATH", *PLACED],
            ["generate", "PATH"],
            ["bench", "PATH"],
        ),
        *(
            ["evaluate", "PATH"],
            ["forecast", "PATH"],
            ["errors", "PATH"],
            ["convert", "PATH", "out"],
            ["verify", "PATH"],
        ),
        *(["config", "check", "PATH"], ["plan", "PATH", *PLACED], ["tune", "PATH", "--out", "out"]),
        *(["tune", "--show", "PATH"], ["ensemble", "PATH", "--out", "out"], ["report", "RUN", "--out", "PATH"]),
        *(
            ["data", "prepare", "PATH", "--out", "out"],
            ["data", "verify", "PATH"],
            ["dryrun", "PATH", "--devices", "8"],
        ),
        *(["data", "prepare", "RUN", "--out", "PATH"], ["train", "run.yaml", "--run-dir", "PATH"]),
        ["launch", "PATH", "--cluster", "frontier", "--nodes", "1", "--account", "ABC123"],
    ],
    ids=" ".join,
)
def test_paths_that_no_system_takes_are_errors(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], name: str
) -> None:
    write_run(tmp_path / "run")
    write_run_file(tmp_path / "run.yaml", write_token_folder(tmp_path / "data"))
    monkeypatch.chdir(tmp_path)
    outcome = call(*({"PATH": name, "RUN": "run"}.get(word, word) for word in words))
    assert outcome.code in (1, 2) and outcome.err.startswith("error: ") and "missing" not in outcome.err
