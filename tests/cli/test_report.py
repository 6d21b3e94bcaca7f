"""`phalanx report`: the page's path, the figures as JSON, and plain errors."""

from __future__ import annotations

import json
import math
from pathlib import Path

from command_line import Call
from report.run_dirs import write_lines, write_run


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
    assert outcome.code == 1 and "line 1: the line has no 'loss'; mend or remove this line" in outcome.err
