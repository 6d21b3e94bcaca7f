"""Reading a run directory: what is tolerated, and what is refused by file and line."""

from __future__ import annotations

import json
import math
import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from phalanx.errors import ConfigError, PhalanxError
from phalanx.report.run_log import RunLog, RunLogError, Summary, split_wall_time, summarise_run
from report.run_dirs import EVENTS, MACHINE, RUN_YAML, TOKENS_A_STEP, event, metric, write_lines, write_run


def test_reads_everything_a_run_leaves(tmp_path: Path) -> None:
    log = RunLog.read(write_run(tmp_path))
    assert log.steps.tolist() == list(range(1, 41))
    assert log.columns["loss"].tolist() == [10 / step for step in range(1, 41)]
    assert log.columns["updated"].tolist() == [1.0] * 40
    assert [e.kind for e in log.events] == [e["kind"] for e in EVENTS]
    assert log.of_kind("evaluation")[-1].fields == {"loss": 0.5, "perplexity": 1.6487, "bits_per_byte": 0.175}
    assert log.config_text == RUN_YAML and log.config is not None and log.config["training"]["flops"] == "palm"
    assert log.machine == MACHINE
    assert log.notes == ()


def test_a_torn_last_line_is_left_out_and_noted(tmp_path: Path) -> None:
    write_run(tmp_path, steps=3)
    metrics = tmp_path / "metrics.jsonl"
    for cut in (1, 30, len(json.dumps(metric(4))) - 1):
        whole = "".join(json.dumps(metric(step)) + "\n" for step in (1, 2, 3))
        metrics.write_text(whole + json.dumps(metric(4))[:cut])
        log = RunLog.read(tmp_path)
        assert log.steps.tolist() == [1, 2, 3]
        assert log.notes == ("metrics.jsonl: its last line, 4, is cut off as by a kill, and is left out.",)


def test_a_last_line_that_lacks_only_its_line_break_counts(tmp_path: Path) -> None:
    write_run(tmp_path, steps=3)
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_bytes(metrics.read_bytes().removesuffix(b"\n"))
    log = RunLog.read(tmp_path)
    assert log.steps.tolist() == [1, 2, 3] and log.notes == ()


def test_a_character_torn_in_two_is_a_torn_line(tmp_path: Path) -> None:
    write_run(tmp_path)
    line = json.dumps(event("sample", 40, 113, prompt="", text="é"), ensure_ascii=False).encode()
    with (tmp_path / "events.jsonl").open("ab") as file:
        file.write(line[: line.index("é".encode()) + 1])
    log = RunLog.read(tmp_path)
    assert len(log.events) == len(EVENTS)
    assert log.notes == (f"events.jsonl: its last line, {len(EVENTS) + 1}, is cut off as by a kill, and is left out.",)


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ('{"step": 2, "lo', "is not JSON"),
        ("", "is not JSON"),
        ("[1, 2]", "is not a JSON object"),
        (json.dumps({k: v for k, v in metric(2).items() if k != "lr"}), "has no 'lr'"),
        (json.dumps(metric(2, step=2.5)), "has step 2.5, not a whole number from 0"),
        (json.dumps(metric(2, step=True)), "has step True, not a whole number from 0"),
        (json.dumps(metric(2, step=2**53)), "has step 9007199254740992, not a whole number from 0"),
        (json.dumps(metric(2, loss="low")), "has loss 'low', not a number"),
        (json.dumps(metric(2, mfu=[0.4])), "has mfu [0.4], not a number"),
        (json.dumps(metric(2, loss=False)), "has loss False, not a number"),
    ],
)
def test_any_other_bad_line_is_left_out_and_named(tmp_path: Path, line: str, problem: str) -> None:
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text("\n".join([json.dumps(metric(1)), line, json.dumps(metric(3)), ""]))
    log = RunLog.read(tmp_path)
    assert log.notes[0] == f"metrics.jsonl: 1 damaged line (2); it {problem}; left out."
    assert log.steps.tolist() == [1, 3]


def test_a_bad_last_line_with_its_line_break_is_not_torn(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text(json.dumps(metric(1)) + '\n{"step": 2, "lo\n')
    assert RunLog.read(tmp_path).notes[0] == "metrics.jsonl: 1 damaged line (2); it is not JSON; left out."


@pytest.mark.parametrize("line", [b"[" * 1_000_000, b'{"a":' * 1_000_000, b"\0" * 5000, b"\xff\xfe", b"9" * 100_000])
def test_lines_that_crash_a_parser_are_left_out(tmp_path: Path, line: bytes) -> None:
    write_run(tmp_path)
    for name in ("metrics.jsonl", "events.jsonl"):
        (tmp_path / name).write_bytes(line + b"\n" + (tmp_path / name).read_bytes())
    log = RunLog.read(tmp_path)
    assert len(log.steps) == 40 and len(log.events) == len(EVENTS)
    assert [note.partition(";")[0] for note in log.notes] == [
        "metrics.jsonl: 1 damaged line (1)",
        "events.jsonl: 1 damaged line (1)",
    ]


@pytest.mark.parametrize("name", ["run.yaml", "machine.json"])
def test_small_files_that_crash_a_parser_are_named(tmp_path: Path, name: str) -> None:
    for content in ("[" * 100_000, " " * (2 << 20)):
        write_run(tmp_path)
        (tmp_path / name).write_text(content)
        with pytest.raises(RunLogError, match=rf"{name} is"):
            RunLog.read(tmp_path)


@pytest.mark.parametrize("name", ["metrics.jsonl", "events.jsonl", "run.yaml", "machine.json"])
def test_what_is_no_file_of_a_run_is_named_at_once(tmp_path: Path, name: str) -> None:
    write_run(tmp_path / "run")
    file = tmp_path / "run" / name
    file.rename(tmp_path / "outside")
    file.symlink_to(tmp_path / "outside")
    with pytest.raises(PhalanxError, match=f"{name} is a link to"):
        RunLog.read(tmp_path / "run")
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(PhalanxError, match=f"{name} is a named pipe, not a file"):
        RunLog.read(tmp_path / "run")


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"kind": 3}, 'has kind 3, not a name such as "evaluation"'),
        ({"step": None}, "has step None, not a whole number from 0"),
        ({"step": -1}, "has step -1, not a whole number from 0"),
        ({"time": "noon"}, "has time 'noon', not an ISO 8601 date and time"),
        ({"time": None}, "has time None, not an ISO 8601 date and time"),
    ],
)
def test_a_bad_event_is_left_out_and_named(tmp_path: Path, fields: dict[str, Any], problem: str) -> None:
    write_run(tmp_path, events=[event("start", 0, 0), {**event("end", 40, 9), **fields}])
    log = RunLog.read(tmp_path)
    assert log.notes == (f"events.jsonl: 1 damaged line (2); it {problem}; left out.",)
    assert [one.kind for one in log.events] == ["start"]


def test_no_run_directory_no_metrics_and_no_record_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere is not a directory: give the run directory"):
        RunLog.read(tmp_path / "nowhere")
    metrics = tmp_path / "metrics.jsonl"
    with pytest.raises(PhalanxError, match=r"metrics\.jsonl is missing: give a run directory in which"):
        RunLog.read(tmp_path)
    for content in ("", '{"step": 1, "lo'):
        metrics.write_text(content)
        with pytest.raises(PhalanxError, match=r"metrics\.jsonl holds no whole record: let `phalanx train` finish"):
            RunLog.read(tmp_path)


def test_only_metrics_must_be_there(tmp_path: Path) -> None:
    write_lines(tmp_path / "metrics.jsonl", [metric(1)])
    log = RunLog.read(tmp_path)
    assert log.events == () and log.config is None and log.config_text is None and log.machine is None
    assert [note.split()[0] for note in log.notes] == ["events.jsonl", "run.yaml", "machine.json"]


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("run.yaml", "a: [", "is not YAML"),
        ("run.yaml", "just words", "holds no sections"),
        ("machine.json", "{", "is not JSON"),
        ("machine.json", "[]", "is not a JSON object"),
    ],
)
def test_a_broken_small_file_is_named_with_a_way_out(tmp_path: Path, name: str, content: str, problem: str) -> None:
    write_run(tmp_path)
    (tmp_path / name).write_text(content)
    with pytest.raises(RunLogError) as caught:
        RunLog.read(tmp_path)
    message = str(caught.value)
    assert f"{tmp_path / name} {problem}" in message and "or move it away to leave it out" in message
    assert "\n" not in message


def test_values_that_are_not_finite_keep_their_meaning(tmp_path: Path) -> None:
    losses = [float("nan"), float("inf"), "NaN", "Infinity", "-Infinity", None, 2]
    write_lines(tmp_path / "metrics.jsonl", [metric(i, loss=loss) for i, loss in enumerate(losses, start=1)])
    expected = [np.nan, np.inf, np.nan, np.inf, -np.inf, np.nan, 2.0]
    np.testing.assert_array_equal(RunLog.read(tmp_path).columns["loss"], expected)


def test_columns_of_others_may_hold_anything(tmp_path: Path) -> None:
    write_lines(tmp_path / "metrics.jsonl", [metric(1, scale=65536), metric(2, scale="?", note={"a": 1})])
    log = RunLog.read(tmp_path)
    np.testing.assert_array_equal(log.column("scale"), [65536, np.nan])
    assert np.isnan(log.column("note")).all() and np.isnan(log.column("unheard_of")).all()


def test_repeats_keep_the_later_record_and_gaps_are_noted(tmp_path: Path) -> None:
    steps = [1, 2, 3, 4, 3, 4, 7]
    write_lines(tmp_path / "metrics.jsonl", [metric(step, loss=float(row)) for row, step in enumerate(steps)])
    log = RunLog.read(tmp_path)
    assert log.steps.tolist() == [1, 2, 3, 4, 7]
    assert log.columns["loss"].tolist() == [0, 1, 4, 5, 6]
    assert log.notes[:2] == (
        "metrics.jsonl: 2 steps are recorded more than once; the last record of each counts.",
        "metrics.jsonl: 2 steps have no record, the first of them step 5.",
    )


def test_tokens_per_second_is_derived_where_it_was_not_recorded(tmp_path: Path) -> None:
    records = [metric(step, tokens_per_second=None) for step in (1, 2, 3, 6, 7)]
    records[1]["tokens_per_second"] = 5.0
    write_lines(tmp_path / "metrics.jsonl", records)
    rate = TOKENS_A_STEP / 0.5
    np.testing.assert_array_equal(RunLog.read(tmp_path).tokens_per_second, [rate, 5.0, rate, np.nan, rate])


@pytest.mark.parametrize("time", ["2026-03-01T12:00:00", "2026-03-01T12:00:00Z", "2026-03-01T14:30:00+02:30"])
def test_times_are_in_utc(tmp_path: Path, time: str) -> None:
    write_run(tmp_path, events=[{"kind": "start", "step": 0, "time": time}])
    (start,) = RunLog.read(tmp_path).events
    assert start.time == datetime(2026, 3, 1, 12, tzinfo=UTC) and start.time.tzinfo is UTC


def _summary(run_dir: Path) -> Summary:
    return summarise_run(RunLog.read(run_dir))


def test_figures_of_a_whole_run(tmp_path: Path) -> None:
    def change(step: int) -> dict[str, float]:
        return {"step_seconds": 8.0, "data_wait_seconds": 1.0} if step == 1 else {}

    summary = _summary(write_run(tmp_path, change=change))
    assert (summary.steps, summary.records, summary.finished, summary.resumes) == (40, 40, True, 1)
    assert summary.tokens == 40 * TOKENS_A_STEP
    assert summary.final_loss == summary.lowest_loss == 0.25
    assert (summary.validation_step, summary.validation_loss) == (40, 0.5)
    assert (summary.perplexity, summary.bits_per_byte) == (1.6487, 0.175)
    assert summary.median_step_seconds == 0.5
    assert summary.median_tokens_per_second == TOKENS_A_STEP / 0.5
    assert (summary.median_mfu, summary.median_mfu_measured, summary.flops_convention) == (0.4, 0.5, "palm")
    assert summary.step_seconds == 8.0 + 39 * 0.5
    assert summary.wall_seconds == 115
    assert summary.data_wait_share == pytest.approx((1.0 + 39 * 0.005) / 27.5, rel=1e-12)
    assert summary.checkpoint_stall_share == 0


def test_the_last_evaluation_is_that_of_the_latest_step(tmp_path: Path) -> None:
    events = [event("evaluation", 40, 9, loss=0.5), event("evaluation", 20, 10, loss=9.0)]
    assert _summary(write_run(tmp_path, events=events)).validation_loss == 0.5


def test_a_killed_run_counts_the_steps_after_its_last_event(tmp_path: Path) -> None:
    summary = _summary(write_run(tmp_path, events=EVENTS[:4]))
    assert not summary.finished
    # 12 s from the start to the checkpoint at step 20, then 20 steps of half a second
    assert summary.wall_seconds == 22 and summary.step_seconds == 20


def test_the_wall_time_is_divided_into_what_it_went_to(tmp_path: Path) -> None:
    # Two processes: 10 steps of 0.5 s, the first of which compiles for 6 s more; killed, and begun again from step 8.
    def change(step: int) -> dict[str, float]:
        seconds = 6.5 if step in (1, 9) else 0.5
        return {"step_seconds": seconds, "checkpoint_stall_seconds": 0.25 * (step == 5), "data_wait_seconds": 0.0}

    events = [
        event("start", 0, 5, start_seconds=5.0),
        event("checkpoint", 4, 13, stall_seconds=0.25),
        event("evaluated", 8, 16, evaluation_seconds=1.0),
        event("checkpoint", 8, 16, stall_seconds=0.25),
        event("resume", 8, 40, start_seconds=4.0, redone_seconds=2.0),
        event("checkpoint", 10, 50, stall_seconds=0.5),
        event("end", 10, 50),
    ]
    parts = split_wall_time(_summary(write_run(tmp_path, 10, change, events)))
    expected = {"training": 4.75, "waiting for data": 0.0, "checkpoints": 1.0, "evaluation": 1.0, "compilation": 12.0}
    expected |= {"steps done again": 2.0, "start and restart": 9.0}
    # From 5 s before the first event to the last one.
    assert parts == pytest.approx({**expected, "idle": 50.0 - sum(expected.values())})


def test_without_events_the_wall_time_is_that_of_the_steps(tmp_path: Path) -> None:
    summary = _summary(write_run(tmp_path, events=[]))
    assert summary.wall_seconds == summary.step_seconds == 20
    assert summary.validation_step is None and math.isnan(summary.validation_loss)


def test_losses_that_are_not_finite_are_counted_and_never_averaged_in(tmp_path: Path) -> None:
    def change(step: int) -> dict[str, object]:
        bad = {7: float("nan"), 9: float("inf"), 40: None}
        return {"loss": bad[step], "updated": False} if step in bad else {}

    summary = _summary(write_run(tmp_path, change=change))
    assert (summary.nonfinite_losses, summary.skipped_updates) == (3, 3)
    assert math.isnan(summary.final_loss) and summary.lowest_loss == 10 / 39


def test_columns_that_a_cpu_run_leaves_empty_give_no_figure(tmp_path: Path) -> None:
    empty = dict.fromkeys(["mfu", "mfu_measured", "data_wait_seconds", "checkpoint_stall_seconds"])
    summary = _summary(write_run(tmp_path, change=lambda step: empty))
    figures = (summary.median_mfu, summary.median_mfu_measured, summary.data_wait_share, summary.checkpoint_stall_share)
    assert all(math.isnan(figure) for figure in figures)
