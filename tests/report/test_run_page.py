"""The page as written, parsed like a browser would: its figures, its charts, and what hostile text may not do."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.config.load import load_run
from phalanx.errors import ConfigError, PhalanxError
from phalanx.families.language.sizes import parameter_count
from phalanx.formatting import format_count
from phalanx.report.page import read_template, write_script_json
from phalanx.report.run_log import RunLog
from phalanx.report.run_page import LONGEST_SAMPLE, MOST_EVENTS, MOST_SAMPLES, write_page
from report.pages import Page, points
from report.run_dirs import EVENTS, event, metric, write_lines, write_run

HOSTILE = '</script><script>alert(1)</script><img src=x onerror="alert(2)">\n\t"quoted" & <!-- <b>bold</b> \u2028 ]]>'


def write_report(run_dir: Path, out: Path | None = None) -> Path:
    return write_page(RunLog.read(run_dir), out)


def _page(run_dir: Path) -> Page:
    return Page(write_report(run_dir).read_text(encoding="utf-8"))


def _readout(page: Page) -> dict[str, Any]:
    data: dict[str, Any] = json.loads(page.by_id("run-data").text)
    data["columns"] = {name: text.split("|") for name, text in data["columns"].items()}
    return data


def test_headline_figures_come_from_the_metrics(tmp_path: Path) -> None:
    page = _page(write_run(tmp_path / "night-run"))
    (title,) = page.all("title")[:1]
    assert title.text == "night-run: loss 0.2500, validation 0.5000, 164k tokens"
    assert page.all("h1")[0].text == "night-run"
    figures = {
        "final_loss": "0.2500",
        "validation_loss": "0.5000",
        "perplexity": "1.649",
        "bits_per_byte": "0.1750",
        "tokens": "164k",
        "tokens_per_second": "8.19k tokens/s",
        "mfu": "40.0 %",
        "mfu_measured": "50.0 %",
        "wall": "1 min 55 s",
        "data_wait": "1.00 %",
    }
    assert {key: page.figure(key) for key in figures} == figures
    status = " ".join(page.all("p", "status")[0].text.split())
    assert status == "Finished 40 of 40 steps · 8 × Accelerator 9000 · 2026-03-01 12:00 to 12:01 UTC"
    assert page.all("span", "badge", "finished")
    assert not page.all("div", "notes")


def test_mfu_stands_beside_what_it_counts(tmp_path: Path) -> None:
    text = _page(write_run(tmp_path)).text
    assert "of nominal peak; PaLM, attention not halved" in text
    assert "of measured matmul peak; PaLM, attention not halved" in text
    (tmp_path / "machine.json").unlink()
    assert "of nominal peak; convention not recorded" in _page(tmp_path).text


def test_a_run_of_materials_counts_structures(tmp_path: Path) -> None:
    write_run(tmp_path)
    (tmp_path / "run.yaml").write_text("model:\n  family: materials\n")
    page = _page(tmp_path)
    assert page.figure("tokens_per_second") == "8.19k structures/s"
    assert page.all("title")[0].text.endswith("164k structures")
    assert "of nominal peak; of a structure of mean size" in page.text
    assert "tokens/s" not in page.text


def test_every_chart_is_there_and_named_for_those_who_cannot_see_it(tmp_path: Path) -> None:
    page = _page(write_run(tmp_path))
    charts = ["loss", "lr", "grad-norm", "throughput", "memory", "step-time"]
    assert [figure.attributes["id"] for figure in page.all("figure")] == [*(f"chart-{c}" for c in charts), "time-split"]
    drawings = [svg for svg in page.all("svg") if svg.attributes.get("role") == "img"]
    assert len(drawings) == len(charts)
    for chart, svg in zip(charts, drawings, strict=True):
        assert svg.attributes["aria-labelledby"] == f"title-{chart} desc-{chart}"
        assert page.by_id(f"title-{chart}").tag == "title" and page.by_id(f"desc-{chart}").tag == "desc"
    words = page.by_id("desc-loss").text
    assert (
        "train from 10.00 at step 1 to 0.2500 at step 40; lowest 0.2500 at step 40, highest 10.00 at step 1." in words
    )
    assert "validation from 1.250 at step 10 to 0.5000 at step 40" in words


def test_curves_run_through_the_metrics(tmp_path: Path) -> None:
    page = _page(write_run(tmp_path))
    (path,) = page.paths("loss", "faint", "x-step", "y-linear")
    corners = np.array(points(path))
    losses = np.array([10 / step for step in range(1, 41)])
    np.testing.assert_allclose(corners[:, 0], 25.0 * np.arange(1, 41), atol=0.06)
    # heights are the losses on one straight scale: fit it on the ends, check all between
    slope = (corners[-1, 1] - corners[0, 1]) / (losses[-1] - losses[0])
    assert slope < 0
    np.testing.assert_allclose(corners[:, 1], corners[0, 1] + slope * (losses - losses[0]), atol=0.11)
    (path,) = page.paths("loss", "faint", "x-time", "y-log")
    heights = np.array(points(path))[:, 1]
    slope = (heights[-1] - heights[0]) / (np.log(losses[-1]) - np.log(losses[0]))
    np.testing.assert_allclose(heights, heights[0] + slope * np.log(losses / 10), atol=0.11)


def test_the_interval_that_a_run_chose_is_told(tmp_path: Path) -> None:
    fields = {"every": 1234, "step_seconds": 0.5, "stall_seconds": 2.0, "failure_seconds": 7200.0, "goodput": 0.91}
    page = _page(write_run(tmp_path, events=[*EVENTS, event("checkpoint_interval", 20, 13, **fields)]))
    assert "Checkpoints every 1,234 steps" in page.text and "chosen at step 20 to lose least" in page.text
    assert "expected goodput 91" in page.text


def test_validation_resumes_and_checkpoints_are_marked_at_their_steps(tmp_path: Path) -> None:
    page = _page(write_run(tmp_path))
    (dots,) = page.paths("loss", "dots", "colour-2", "x-step", "y-linear")
    assert [x for x, _ in points(dots)] == [250.0, 1000.0]
    for chart in ("loss", "throughput"):
        (resumes,) = page.paths(chart, "resumes", "x-step")
        (checkpoints,) = page.paths(chart, "checkpoints", "x-step")
        assert resumes.attributes["d"] == "M500.0 0V400" and checkpoints.attributes["d"] == "M500.0 400v-12"
    assert "resumed (1)" in page.text and "checkpoint (1)" in page.text


def test_the_read_out_tells_each_step(tmp_path: Path) -> None:
    page = _page(write_run(tmp_path))
    data = _readout(page)
    assert data["domains"] == {"step": [0, 40], "tokens": [0, 163840], "time": [0, 20]}
    assert data["positions"]["step"] == list(range(1, 41))
    assert data["positions"]["time"] == [0.5 * step for step in range(1, 41)]
    columns = data["columns"]
    assert {len(column) for column in columns.values()} == {40}
    row = 15
    assert {name: columns[name][row] for name in ("step", "tokens", "time")} == {
        "step": "16",
        "tokens": "65.5k",
        "time": "8 s",
    }
    assert columns["loss.train"][row] == "0.6250"
    assert columns["loss.validation"][row] == "1.250" and columns["loss.validation"][8] == "–"
    assert columns["lr.lr"][row] == "6.25e−5"
    assert columns["step-time.data"][row] == "0.005000"
    shown = {e.attributes["data-column"]: e.text for e in page.all("b") if "data-column" in e.attributes}
    assert shown == {name: column[-1] for name, column in columns.items()}


def test_samples_keep_their_white_space_and_show_the_prompt(tmp_path: Path) -> None:
    page = _page(write_run(tmp_path))
    latest, earlier = page.all("blockquote", "sample")
    assert latest.text == "Step 40\nOnce upon a time\n\tthere was"
    assert earlier.text == "Step 10\nOnce the the"
    assert [b.text for b in page.all("b") if b.text.startswith("Once")] == ["Once ", "Once "]


def test_a_sample_that_repeats_its_prompt_shows_it_once(tmp_path: Path) -> None:
    write_run(tmp_path, events=[event("sample", 40, 9, prompt="Once ", text="Once upon")])
    assert _page(tmp_path).all("blockquote", "sample")[0].text == "Step 40\nOnce upon"


def test_hostile_text_stays_text(tmp_path: Path) -> None:
    run_dir = write_run(
        tmp_path / "<b>run<i>",
        events=[
            event("sample", 3, 1, prompt=HOSTILE, text=HOSTILE + "!"),
            event("warning", 4, 2, message=HOSTILE),
            event(HOSTILE[:30], 5, 3, **{"<i>": HOSTILE}),
        ],
    )
    (run_dir / "machine.json").write_text(
        json.dumps({"device": HOSTILE, "device_count": 1, "<u>": HOSTILE, "flops_convention": HOSTILE})
    )
    (run_dir / "run.yaml").write_text(f"data: {json.dumps(HOSTILE)}\n# {HOSTILE.splitlines()[0]}\n")
    page = _page(run_dir)
    assert len(page.all("script")) == 2
    for tag in ("img", "i", "u"):
        assert not page.all(tag)
    assert not any(name.startswith("on") for element in page.elements for name in element.attributes)
    assert page.all("blockquote", "sample")[0].text == f"Step 3\n{HOSTILE}!"
    assert page.all("h1")[0].text == "<b>run<i>"
    assert page.text.count("<script>alert(1)</script>") >= 6


def test_json_inside_a_script_element_cannot_end_it() -> None:
    text = write_script_json({HOSTILE: [HOSTILE]})
    assert json.loads(text) == {HOSTILE: [HOSTILE]}
    assert not set("<>&\u2028") & set(text)


def test_only_our_script_may_run_and_nothing_is_loaded(tmp_path: Path) -> None:
    page = _page(write_run(tmp_path))
    data, script = page.all("script")
    assert data.attributes["type"] == "application/json" and script.attributes == {}
    (policy,) = [m.attributes["content"] or "" for m in page.all("meta") if "http-equiv" in m.attributes]
    digest = base64.b64encode(hashlib.sha256(script.text.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}';" in policy and "default-src 'none'" in policy
    assert not any("src" in element.attributes for element in page.elements)
    assert [e.attributes["href"] for e in page.elements if "href" in e.attributes] == ["data:,"]
    (style,) = page.all("style")
    assert "url(" not in style.text and "@import" not in style.text
    assert "http://" not in page.html and "https://" not in page.html


def test_losses_that_are_not_finite_are_gaps_with_a_mark(tmp_path: Path) -> None:
    def change(step: int) -> dict[str, float]:
        return {"loss": float("nan")} if 11 <= step <= 14 else {"loss": float("inf")} if step == 30 else {}

    page = _page(write_run(tmp_path, change=change))
    (raw,) = page.paths("loss", "faint", "curve", "x-step", "y-linear")
    assert (raw.attributes["d"] or "").count("M") == 3 and len(points(raw)) == 35
    (mark,) = page.paths("loss", "nonfinite", "x-step")
    assert mark.attributes["d"] == "M275.0 0H350.0V400H275.0ZM750.0 0H750.0V400H750.0Z"
    assert "NaN or infinite" in page.text
    assert "The loss was NaN, infinite or missing at 5 of 40 steps, first at step 11" in page.text
    columns = _readout(page)["columns"]
    assert columns["loss.train"][9:14] == ["1.000", "NaN", "NaN", "NaN", "NaN"] and columns["loss.train"][29] == "∞"


def test_a_run_that_ends_in_nan_says_so(tmp_path: Path) -> None:
    page = _page(write_run(tmp_path, change=lambda step: {"loss": float("nan"), "grad_norm": None}))
    assert page.figure("final_loss") == "NaN"
    assert "no finite value" in page.by_id("desc-loss").text


def test_a_torn_log_and_missing_files_are_told(tmp_path: Path) -> None:
    write_lines(tmp_path / "metrics.jsonl", [metric(1), metric(2)])
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "loss": 2.')
    page = _page(tmp_path)
    notes = [
        item.text for item in page.all("li") if ".jsonl" in item.text or ".yaml" in item.text or ".json" in item.text
    ]
    assert notes == [
        "metrics.jsonl: its last line, 3, is cut off as by a kill, and is left out.",
        "events.jsonl is missing: no validation loss, samples, checkpoints or resumes are shown.",
        "run.yaml is missing: the configuration of this run is unknown.",
        "machine.json is missing: the machine and the FLOPs convention of this run are unknown.",
    ]
    assert page.figure("final_loss") == "5.000" and "No events recorded" in page.text
    assert not any(page.has_id(name) for name in ("samples", "events", "machine", "configuration"))
    assert not page.has_id("figure-validation_loss")


ODD = st.sampled_from([None, 0, 0.0, -1.0, 1e-30, 1e30, float("nan"), float("inf"), float("-inf"), 1, 2.5])


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.fixed_dictionaries(dict.fromkeys(metric(1).keys() - {"step", "updated"}, ODD)), min_size=1, max_size=4)
)
def test_whatever_numbers_a_log_holds_it_makes_a_page(records: list[dict[str, Any]]) -> None:
    with TemporaryDirectory() as folder:
        write_run(Path(folder), steps=len(records), change=lambda step: records[step - 1])
        page = _page(Path(folder))
    assert page.has_id("chart-loss") and _readout(page)["positions"]["step"][-1] == len(records)
    assert not re.search(r"[ML][-\d.]* ?(nan|inf)", page.html)


def test_one_step_is_a_page(tmp_path: Path) -> None:
    page = _page(write_run(tmp_path, steps=1, events=EVENTS[:1]))
    assert "1 of 40 steps" in page.text and "Still running, or stopped" in page.text
    (dot,) = page.paths("loss", "lone", "x-step", "y-linear")
    assert points(dot)[0][0] == 1000.0


def test_a_cpu_run_without_memory_and_mfu_leaves_those_out(tmp_path: Path) -> None:
    empty = dict.fromkeys(["mfu", "mfu_measured", "memory_now_gib", "memory_peak_gib", "data_wait_seconds"])
    page = _page(write_run(tmp_path, change=lambda step: empty))
    assert not page.has_id("chart-memory") and page.has_id("chart-throughput")
    assert not page.has_id("figure-mfu") and not page.has_id("figure-data_wait")


def test_the_time_split_adds_up(tmp_path: Path) -> None:
    page = _page(write_run(tmp_path, change=lambda step: {"checkpoint_stall_seconds": 0.25 if step == 21 else 0.0}))
    # Of 115 s, 20 in steps.
    text = page.by_id("time-split").text
    assert re.findall(r"[\d.]+ %", text) == ["17.0 %", "0.17 %", "0.22 %", "82.6 %"]
    assert [name for name in ("training", "waiting for data", "checkpoints", "evaluation", "idle") if name in text] == [
        *("training", "waiting for data", "checkpoints", "idle")
    ]


def test_configuration_machine_and_events_are_shown(tmp_path: Path) -> None:
    page = _page(write_run(tmp_path))
    assert page.all("pre", "config")[0].text == (tmp_path / "run.yaml").read_text()
    rows = [" ".join(row.text.split()) for row in page.all("tr")]
    assert "DevicesEight".replace("Eight", "8") in rows
    assert "Python3.11.0" in rows and "Host memory (GiB)512" in rows
    assert "Measured matmul peak of a device (TFLOP/s)unknown" in rows
    assert "102026-03-01 12:00:06evaluationloss 1.250 · perplexity 3.490 · bits per byte 0.4500" in rows
    assert "202026-03-01 12:01:40resumeattention sdpa" in rows
    assert not any("upon a time" in row for row in rows)


def test_a_hundred_thousand_steps_fit_in_two_megabytes(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    steps = 100_000
    columns = {
        "loss": 3 + random.standard_normal(steps),
        "grad_norm": random.lognormal(size=steps),
        "lr": random.random(steps),
        "step_seconds": random.lognormal(size=steps),
        "tokens_per_second": 1e6 * random.random(steps),
        "memory_now_gib": 50 * random.random(steps),
        "memory_peak_gib": 90 * random.random(steps),
        "data_wait_seconds": random.lognormal(size=steps) / 100,
        "checkpoint_stall_seconds": random.random(steps) / 100,
    }
    columns["loss"][random.random(steps) < 0.01] = np.nan
    events = [
        made
        for step in range(50, steps + 1, 50)
        for made in (
            event("checkpoint", step, step, path=f"checkpoints/step-{step:08d}", stall_seconds=0.3),
            event("evaluation", step, step, loss=3.0 + step % 7, perplexity=20.1, bits_per_byte=0.9),
            event("sample", step, step, prompt="Once", text="word " * 5000),
            event("resume", step, step, attention="cudnn"),
        )
    ]
    write_run(tmp_path, steps, change=lambda step: {k: float(v[step - 1]) for k, v in columns.items()}, events=events)
    page = _page(tmp_path)
    assert len(page.html.encode()) < 2_000_000
    assert "100,000 of 40 steps" in page.text
    (path,) = page.paths("loss", "faint", "curve", "x-step", "y-linear")
    worst = int(np.nanargmax(columns["loss"])) + 1
    assert min(points(path), key=lambda point: point[1])[0] == pytest.approx(worst / 100, abs=0.06)
    assert len(page.all("blockquote", "sample")) == MOST_SAMPLES + 1
    assert max(len(sample.text) for sample in page.all("blockquote", "sample")) < LONGEST_SAMPLE + 100
    assert len([row for row in page.all("tr") if "2026" in row.text]) == MOST_EVENTS


def test_the_page_is_written_whole_where_it_was_asked_for(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "run")
    assert write_report(run_dir) == run_dir / "report.html"
    wanted = tmp_path / "new" / "folder" / "page.html"
    assert write_report(run_dir, wanted) == wanted
    assert wanted.read_bytes() == (run_dir / "report.html").read_bytes()
    assert sorted(path.name for path in wanted.parent.iterdir()) == ["page.html"]


def test_a_reader_of_the_old_page_never_meets_half_of_the_new_one(tmp_path: Path) -> None:
    page = write_report(write_run(tmp_path))
    before = page.read_bytes()
    with page.open("rb") as reader:
        write_report(write_run(tmp_path, steps=39))
        assert reader.read() == before != page.read_bytes()


def test_a_page_that_cannot_be_written_is_a_plain_error(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "run")
    with pytest.raises(ConfigError, match=r"is a directory: name the file to write, for example .*report\.html"):
        write_report(run_dir, tmp_path)
    with pytest.raises(PhalanxError, match=r"cannot write .*: Not a directory; name another file with --out"):
        write_report(run_dir, run_dir / "metrics.jsonl" / "folder" / "page.html")


def test_a_failed_write_leaves_the_old_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir = write_run(tmp_path)
    page = write_report(run_dir)
    before = page.read_bytes()

    def full_disk(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(PhalanxError, match="No space left on device"):
        write_report(run_dir)
    assert page.read_bytes() == before
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_what_ranks_wait_for_each_other_is_told_where_shares_are_uneven(tmp_path: Path) -> None:
    def uneven(step: int) -> dict[str, Any]:
        return {"compute_seconds": 0.3, "rank_wait_seconds": 0.05, "imbalance": 1.25, "imbalance_expected": 1.1}

    page = _page(write_run(tmp_path, change=uneven))
    assert page.figure("rank_wait") == "10.0 %"
    assert page.by_id("chart-ranks").tag == "figure"
    assert "1.100" in page.by_id("desc-ranks").text


WHOLE_RUN = """\
model: {n_layers: 2, d_model: 32, n_heads: 2, d_ff: 64, vocab_size: 257, max_positions: 32}
data: {sources: [data/books, data/code], sequence_length: 32}
layout: {global_batch: 16, tp: 2}
optimizer: {lr: 1e-3}
training: {steps: 40}
"""


def test_the_head_names_parameters_layout_and_data(tmp_path: Path) -> None:
    folder = write_run(tmp_path)
    (folder / "run.yaml").write_text(WHOLE_RUN)
    (status,) = _page(folder).all("p", "status")
    parameters = format_count(parameter_count(load_run(folder / "run.yaml").model))  # type: ignore[arg-type]
    assert f"{parameters} parameters · 8 × Accelerator 9000 · dp_shard=4 tp=2, global batch 16, bf16" in status.text
    assert "data data/books, data/code" in status.text


def test_control_characters_are_shown_and_not_written(tmp_path: Path) -> None:
    folder = write_run(
        tmp_path / "r\x1b[31mun<script>", events=[event("sample", 3, 1, prompt="a\x1b]0;b\x07", text="\tc\x00\nd")]
    )
    page = _page(folder)
    assert not set("\x00\x07\x1b") & set(page.html)
    assert page.all("h1")[0].text == "r␛[31mun<script>"
    assert page.all("pre")[0].text == "a␛]0;b␇\tc␀\nd"


def test_line_ends_of_a_sample_are_shortened(tmp_path: Path) -> None:
    folder = write_run(
        tmp_path, events=[event("sample", 3, 1, prompt="Once", text=" upon" + "\n" * 60 + "a" + "\n" * 60)]
    )
    assert _page(folder).all("pre")[0].text == "Once upon\n\na"


def test_the_legend_shows_curves_as_they_are_drawn() -> None:
    """Thin and pale for what was recorded, thicker for what is smoothed."""
    style = read_template("page.css")
    widths = {name: float(width) for name, width in re.findall(r"^\.curve(\S*) \{ stroke-width: ([\d.]+)", style, re.M)}
    assert widths[".faint"] < widths[""] and not re.search(r"\.legend \.curve", style)


def task_event(step: int, accuracy: float, at: float, *damaged: object) -> dict[str, Any]:
    """An evaluation on five tasks, of which the first is right with `accuracy`."""
    names = ("<b>first</b>", "second", "third", "fourth", "fifth")
    tasks = [
        {
            "task": name,
            "kind": "multiple_choice",
            "shots": number,
            "questions": 1200,
            "accuracy": accuracy if number == 0 else 0.5,
            "accuracy_sum": 0.25,
            "accuracy_per_character": None,
            "perplexity": 12.5,
        }
        for number, name in enumerate(names)
    ]
    return event("tasks", step, at, mean_accuracy=(accuracy + 2.0) / 5, tasks=[*tasks, *damaged])


def test_scores_on_tasks_are_a_table_and_a_curve(tmp_path: Path) -> None:
    damage = [7, {"task": "odd"}, {"task": "odd", "shots": 0, "questions": 1, "accuracy": "high"}]
    evaluated = [task_event(10, 0.0, 6), task_event(40, 1.0, 114, *damage)]
    page = _page(write_run(tmp_path, events=[*EVENTS, *evaluated, event("tasks", 20, 8, tasks="lost")]))
    section = Page(page.html.split('id="tasks"')[1].split("</h2>")[1].split("</section>")[0])
    heads, cells = ([cell.text for cell in section.all(tag)] for tag in ("th", "td"))
    assert heads == ["task", "examples", "questions", "accuracy", "at first", "by sum", "by character", "perplexity"]
    assert cells[:8] == ["<b>first</b>", "0", "1,200", "100.00%", "0.00 %", "25.00%", "", "12.50"]
    assert len(cells) == 5 * len(heads)
    assert "2 more tasks stand in the table." in page.text
    assert _readout(page)["columns"]["tasks.mean"][-1] == "0.6000"
    assert len(page.paths("tasks", "dots")) == 3 * 4


def test_errors_by_quantity_are_a_table(tmp_path: Path) -> None:
    def evaluated(step: int, mae: float, f1: float, at: float, *damaged: object) -> dict[str, Any]:
        energy = {"source": "<b>xtb</b>", "quantity": "energy", "unit": "eV/atom", "mae": mae, "rmse": 2 * mae}
        phase = {
            "source": "grains",
            "quantity": "phase",
            "unit": "",
            "mae": 1 - f1,
            "rmse": 1.0,
            "accuracy": f1,
            "f1": f1,
        }
        errors = [energy | {"accuracy": None, "f1": None}, phase, *damaged]
        return event("evaluation", step, at, loss=mae, errors=errors)

    damage = [7, {"source": "odd"}, {"source": "odd", "quantity": "q", "unit": "", "mae": "low", "rmse": 1.0}]
    events = [evaluated(10, 0.25, 0.5, 6), evaluated(20, 0.125, 0.75, 8), evaluated(40, 0.5, 0.625, 114, *damage)]
    page = _page(write_run(tmp_path, events=[*EVENTS, *events]))
    section = Page(page.html.split('id="errors"')[1].split("</h2>")[1].split("</section>")[0])
    assert [cell.text for cell in section.all("td")] == [
        *("<b>xtb</b>", "energy", "0.5000 eV/atom", "1.000 eV/atom", "", "", "0.1250 eV/atom", "20"),
        *("grains", "phase", "", "", "62.50%", "62.50%", "75.00%", "20"),
    ]
    assert "{'source'" not in page.text


def test_energy_is_a_tile_and_a_curve_of_power(tmp_path: Path) -> None:
    page = _page(write_run(tmp_path / "told", change=lambda step: {"step_joules": 3.6e5, "joules_per_token": 0.25}))
    # 40 steps of 0.1 kWh and half a second.
    assert page.figure("energy") == "4.000 kWh"
    assert "0.2500 J per token" in page.text
    assert _readout(page)["columns"]["power.watts"][-1] == "7.20e5"
    assert not _page(write_run(tmp_path / "untold")).has_id("figure-energy")


def test_a_run_without_tasks_says_nothing_of_them(tmp_path: Path) -> None:
    page = _page(write_run(tmp_path))
    assert "In-context" not in page.text and "Errors by quantity" not in page.text
