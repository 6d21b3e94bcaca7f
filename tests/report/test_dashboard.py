"""Runs and studies as lines of a terminal: their figures, and that they fit whatever the terminal and the log are."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.text import Text

from phalanx.report.dashboard import Raster, Room, RunFigures, draw_message, draw_run, draw_search, draw_tune
from phalanx.report.drawing import Scale
from phalanx.report.run_log import RunLog, split_wall_time
from report.run_dirs import EVENTS, event, write_run

ROOMS = [Room(80), Room(50), Room(20, 8), Room(80, 24), Room(50, 40), Room(200, 60), Room(60, 30, plain=True)]
WILD = "\x1b[31mred\x07\u202egnp.exe\ud800 \n\t" + "漢字" * 60
RUNNING = [one for one in EVENTS if one["kind"] != "end"]


def read(run_dir: Path) -> RunFigures:
    return RunFigures.of(RunLog.read(run_dir))


def words(lines: list[Text]) -> str:
    return "\n".join(line.plain for line in lines)


def row(lines: list[Text], label: str) -> str:
    """What stands behind a label, its second line included."""
    texts = [line.plain for line in lines]
    (start,) = [place for place, text in enumerate(texts) if text.startswith(label)]
    more = texts[start + 1 : start + 2] if texts[start + 1 : start + 2] and texts[start + 1].startswith("   ") else []
    return " ".join(" ".join([texts[start].removeprefix(label), *more]).split())


def search_trial(number: int, step_s: float | None, **changes: Any) -> dict[str, Any]:
    figures = {
        "number": number,
        "words": f"tp={number}",
        "state": "ok" if step_s else "out_of_memory",
        "step_s": step_s,
    }
    rest = {"planned_s": None, "expected_s": 0.5, "memory_bytes": 2.0**30, "device": "CPU"}
    return {**figures, **rest, **changes}


def search_summary(trials: list[dict[str, Any]]) -> dict[str, Any]:
    good = [one for one in trials if one["step_s"] is not None]
    titled = {"model": "gpt2", "devices": 4, "measured_on": ["CPU"], "where": "local", "cluster": "lumi"}
    counted = {"cluster_device": "CPU", "points": None, "stopped": "", "failures": {"out_of_memory": 1}}
    best = min(good, key=lambda one: one["step_s"]) if good else None
    return {**titled, **counted, "trials": trials, "best": best}


def test_the_figures_are_those_of_the_report(tmp_path: Path) -> None:
    run = read(write_run(tmp_path / "night-run"))
    lines = draw_run(run, Room(120))
    assert lines[0].plain == "night-run  finished  40 steps in 1 min 55 s"
    assert "Loss 0.2500 · lowest 0.2500 · held out 0.5000" in words(lines)
    assert row(lines, "Tokens/s") == "8.19k now, median 8.19k; 164k in all; a step takes 0.5 s"
    assert row(lines, "Memory") == "10.0 GiB after a step of the first rank, at most 20.0 GiB"
    assert row(lines, "Ranks") == "8 resumed 1 time"
    assert row(lines, "Evaluation") == "step 40 loss 0.5000 · perplexity 1.649 · bits per byte 0.1750"
    assert row(lines, "Checkpoint") == "step 20 path checkpoints/20 · stall seconds 0.1250"
    parts = split_wall_time(run.summary)
    assert sum(parts.values()) == pytest.approx(115.0) and parts["training"] == pytest.approx(0.99 * 20)
    assert row(lines, "Goodput") == "17.2 % of 1 min 55 s; 82.5 % idle"
    # the newest first, without what lines of their own tell
    kinds = [line.plain.split()[3] for line in lines if re.match(r" +\d+  2026-", line.plain)]
    assert kinds == ["end", "resume", "start"]


def test_a_run_that_goes_on_says_how_far_it_is(tmp_path: Path) -> None:
    log = read(write_run(tmp_path, 30, events=RUNNING))
    assert "training  step 30 of 40, 5 s left" in draw_run(log, Room(80))[0].plain
    quiet = draw_run(log, Room(120), quiet_s=90.0)[0].plain
    assert "no new line for 1 min 30 s  step 30 of 40; stopped, or busy between steps" in quiet
    # a step that takes a minute is no reason to worry
    slow = read(write_run(tmp_path, 30, change=lambda step: {"step_seconds": 60.0}, events=RUNNING))
    assert "training" in draw_run(slow, Room(80), quiet_s=90.0)[0].plain
    lines = draw_run(log, Room(120), faults=["rank 1 in step 3, hang", "rank 2 in step 5, signal"])
    assert row(lines, "Ranks") == "8 2 faults, the last: rank 2 in step 5, signal; resumed 1 time"


def test_a_rank_that_is_late_is_named_while_it_is(tmp_path: Path) -> None:
    def late(last: int) -> str:
        write_run(tmp_path, change=lambda step: {"straggler": 3 if step == last else None})
        return row(draw_run(read(tmp_path), Room(80)), "Ranks")

    assert late(38).startswith("8 rank 3 is slow;") and "slow" not in late(10)


def odd_run(folder: Path, kind: str) -> Path:
    """A run of which something is odd."""
    if kind == "nan":
        return write_run(folder, change=lambda step: {"loss": math.nan, "grad_norm": None, "step_seconds": 0.0})
    if kind == "hostile":
        wild = [
            event("warning", 3, 2, text=WILD),
            event(WILD, 3, 2, **{WILD: WILD}),
            event("rewind", 3, 3, passed_batches="x"),
        ]
        run_dir = write_run(
            folder / WILD[:12].replace("\x00", ""), 6, events=[*wild, event("evaluation", 6, 4, loss=WILD)]
        )
        (run_dir / "machine.json").write_text(json.dumps({"device": WILD, "device_count": WILD}))
        (run_dir / "run.yaml").write_text("training: {steps: many}\n")
        return run_dir
    if kind == "ends":
        values = (1e308, -1e308, 5e-324, math.inf, -math.inf, 0.0)
        return write_run(
            folder, 6, change=lambda step: dict.fromkeys(("loss", "tokens", "step_seconds"), values[step - 1])
        )
    if kind == "torn":
        run_dir = write_run(folder, events=[], others=False)
        with (run_dir / "metrics.jsonl").open("a") as file:
            file.write('{"step": 41, "lo')
        return run_dir
    return write_run(folder, 1 if kind == "one step" else 2000, events=EVENTS[:1])


@pytest.mark.parametrize("kind", ["one step", "long", "nan", "hostile", "ends", "torn"])
def test_every_frame_fits_its_room(tmp_path: Path, kind: str) -> None:
    log = read(odd_run(tmp_path, kind))
    for room in ROOMS:
        check_frame(draw_run(log, room, quiet_s=1e9, faults=[WILD]), room)


def check_frame(lines: list[Text], room: Room) -> None:
    assert max(line.cell_len for line in lines) <= room.width
    assert room.height is None or len(lines) <= room.height
    assert not set(words(lines).replace("\n", "")) & set("\x1b\x07\u202e\n\t\ud800")
    assert words(lines).isascii() or not room.plain


def test_a_low_terminal_keeps_the_curve_and_a_high_one_shows_more(tmp_path: Path) -> None:
    log = read(write_run(tmp_path, events=[*EVENTS, *(event("spike", 40, 120 + n) for n in range(30))]))
    curves = [sum("┤" in line.plain for line in draw_run(log, Room(80, height))) for height in (20, 26, 60)]
    assert curves[0] == 4 <= curves[1] <= curves[2] == 14
    listed = [words(draw_run(log, Room(80, height))).count("spike") for height in (26, 40, 60)]
    assert 0 < listed[0] < listed[1] < listed[2] == 30


def dots(lines: list[Text]) -> np.ndarray:
    """Which dots are set, from the lines of a raster."""
    cells = np.array([[ord(one) - 0x2800 if one > "\u2800" else 0 for one in line.plain] for line in lines])
    bits = np.array([[0x01, 0x08], [0x02, 0x10], [0x04, 0x20], [0x40, 0x80]])
    tall, wide = cells.shape
    return np.array((cells[:, None, :, None] & bits[None, :, None, :]) > 0).reshape(4 * tall, 2 * wide)


def test_a_curve_goes_where_its_values_are() -> None:
    raster = Raster(Room(24), 5, Scale(0.0, 1.0))
    raster.add_curve(np.linspace(0, 1, 11), np.linspace(1, 0, 11), "")
    drawn = dots(raster.finish("a", "b")[:-1])[:, 2 * raster.left :]
    assert drawn.any(axis=0).all()
    heights = [float(np.flatnonzero(column).mean()) for column in drawn.T]
    assert heights == sorted(heights) and drawn[0, 0] and drawn[-1, -1]
    # a value that is not there is a gap
    raster = Raster(Room(24), 5, Scale(0.0, 1.0))
    raster.add_curve(np.linspace(0, 1, 5), np.array([0.5, 0.5, np.nan, 0.5, 0.5]), "")
    across = dots(raster.finish("a", "b")[:-1])[:, 2 * raster.left :].any(axis=0)
    assert across[0] and across[-1] and not across[len(across) // 2]


def test_gaps_between_kept_points_break_a_curve() -> None:
    drawn = []
    for gaps in (np.array([0, 0]), np.array([0, 1])):
        raster = Raster(Room(24), 5, Scale(0.0, 1.0))
        raster.add_curve(np.array([0.0, 1.0]), np.array([0.5, 0.5]), "", gaps)
        drawn.append(int(dots(raster.finish("a", "b")[:-1]).sum()))
    assert drawn[0] > 30 and drawn[1] == 2


def test_a_search_is_ranked_and_says_what_runs() -> None:
    running = search_trial(3, None, state="running", progress="trial 3 step 4 loss 5.000", memory_bytes=None)
    summary = search_summary([search_trial(0, 0.4), search_trial(1, None), search_trial(2, 0.2), running])
    lines = draw_search(summary, Room(80))
    assert lines[0].plain == "gpt2 on 4 x CPU (this machine)  1 running"
    assert (row(lines, "Best step"), row(lines, "Best choice")) == ("0.2 s", "tp=2")
    assert row(lines, "Running") == "trial 3 step 4 loss 5.000"
    table = [line.plain.split() for line in lines[-5:]]
    assert table[0] == ["trial", "step", "expected", "device", "GiB", "choice"]
    assert [cells[0] for cells in table[1:]] == ["2", "0", "1", "3"]
    assert "no trial runs" in draw_search(search_summary([search_trial(0, 0.4)]), Room(80))[0].plain
    for room in ROOMS:
        check_frame(draw_search(summary, room), room)
        check_frame(draw_search(search_summary([search_trial(0, None, words=WILD)]), room), room)
        check_frame(draw_search(search_summary([]), room), room)


def test_a_study_of_hyperparameters_fits_and_names_the_best() -> None:
    trial = {
        "number": 0,
        "score": 0.25,
        "steps": 4,
        "state": "scored",
        "failed": None,
        "seconds": 3.0,
        "memory_bytes": None,
    }
    trials = [
        {**trial, "values": {"optimizer.lr": 0.001}},
        {**trial, "number": 1, "score": None, "values": {"note": WILD}},
    ]
    device = {"device": "cpu 0", "bar": "##", "idle": 0.25}
    figures = {
        "model": "gpt2",
        "metric": "loss",
        "rungs": [4, 8],
        "failures": {},
        "default": None,
        "without_packing": None,
    }
    found = {"unfinished": "no trial reached step 8", "order": [0], "best": trials[0], "trials": trials}
    summary = {**figures, **found, "devices": {"each": [device], "idle": 0.25, "packing": []}}
    lines = draw_tune(summary, Room(80))
    assert lines[0].plain == "gpt2: least loss  no trial runs" and "no trial reached step 8" in words(lines)
    assert (row(lines, "Best loss"), row(lines, "Best choice")) == ("0.2500", "optimizer.lr=0.001")
    assert row(lines, "cpu 0") == "|##| idle 25.0 %"
    for room in ROOMS:
        check_frame(draw_tune(summary, room), room)


def test_a_message_stands_above_what_has_happened() -> None:
    lines = draw_message("run", f"the first step is not done yet {WILD}", Room(60, 20))
    assert lines[0].plain == "run  waiting" and lines[1].plain.startswith("the first step is not done yet")
    for room in ROOMS:
        check_frame(draw_message(WILD, WILD, room), room)
