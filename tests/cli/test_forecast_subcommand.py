"""`phalanx forecast` as a person calls it, on a run that was really trained."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from phalanx.cli.main import run_command_line
from weather_runs import write_weather_run

if TYPE_CHECKING:
    from command_line import Call


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("forecast")
    run_file = write_weather_run(folder)
    assert run_command_line(["train", str(run_file), "--run-dir", str(folder / "run"), "training.steps=2"]) == 0
    return folder / "run"


def test_scores_come_as_json_and_as_a_page_that_loads_nothing(call: Call, trained: Path) -> None:
    done = call("forecast", str(trained), "--hours", "48", "--starts", "5", "--json", "--device", "cpu")
    assert done.code == 0, done.err
    facts = json.loads(done.out)
    assert (facts["step"], facts["split"], facts["starts"]) == (2, "test", 5)
    assert facts["steps_hours"]["48"] == [24, 24]
    assert {(s["variable"], s["lead_hours"]) for s in facts["scores"]} == {
        (name, lead) for name in ("z500", "t850", "u10") for lead in range(6, 49, 6)
    }
    page = Path(facts["report"])
    assert page == trained / "forecast.html"
    text = page.read_text()
    # Three variables at three lead times, each as forecast, truth and error.
    assert len(re.findall('<img src="data:image/png;base64,', text)) == 3 * 3 * 3
    # Of every variable three curves of errors, two of correlations and three spectra.
    assert text.count("<polyline") == 3 * (3 + 2 + 3)
    assert len(facts["spectra"]) == 3 * 8 and len(facts["spectra"][0]["truth"]) == 8 // 2 + 1
    assert not re.search(r'(src|href)="(?!data:)', text) and "<script" not in text


def test_a_table_and_the_skill_are_printed(call: Call, trained: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    done = call("forecast", str(trained), "--hours", "12", "--html", str(page), "--map", "u10", "--device", "cpu")
    assert done.code == 0, done.err
    lines = done.out.splitlines()
    assert sum(line.startswith("  z500") for line in lines) == 2
    assert lines[-2].startswith("error saved over the better of persistence and climatology: 6 h ")
    assert lines[-1] == str(page) and "u10, 12 h from 2000-" in page.read_text()


def test_another_model_is_tested_against(call: Call, trained: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    words = ["forecast", str(trained), "--hours", "12", "--html", str(page), "--device", "cpu"]
    done = call(*words, "--against", str(trained), "--json")
    assert done.code == 0, done.err
    facts = json.loads(done.out)["against"]
    assert facts["step"] == 2 and Path(facts["checkpoint"]).is_dir()
    found = facts["differences"]
    assert [(one["variable"], one["score"]) for one in found[:3]] == [
        ("z500", "rmse"),
        ("z500", "crps"),
        ("t850", "rmse"),
    ]
    # A model is no better than itself.
    assert all(one["mean"] == 0.0 and one["p_value"] == 1.0 and not one["significant"] for one in found)
    assert {one["lead_hours"]: one["starts"] for one in found} == {6: 34, 12: 33}
    text = page.read_text()
    assert f"Against {facts['checkpoint']}, step 2" in text and "Geer 2016" in text
    done = call(*words, "--against", str(trained))
    assert done.code == 0 and "+0.00%" in done.out
    done = call("forecast", str(trained), "--from", "2000-02-01", "--out", str(tmp_path / "x.nc"), "--against", "other")
    assert done.code == 2 and "--from scores nothing that could be compared" in done.err


def test_precipitation_is_scored_where_the_run_says_which_it_is(call: Call, trained: Path, tmp_path: Path) -> None:
    # The wind stands for rain: below 1 m/s it is dry.
    words = ["forecast", str(trained), "--hours", "12", "--device", "cpu", "--html", str(tmp_path / "page.html")]
    done = call(*words, "data.dry_thresholds.u10=1.0")
    assert done.code == 0, done.err
    scores = {line.split()[0]: line.split() for line in done.out.splitlines() if line.startswith("  ")}
    assert scores["variable"][-1] == "SEEPS" and 0.0 < float(scores["u10"][-1]) < 2.0 and len(scores["z500"]) == 7
    assert (tmp_path / "page.html").read_text().count("SEEPS of persistence") == 1
    done = call(*words, "data.dry_thresholds.rain=1.0")
    assert done.code == 2 and "dry_thresholds names rain, which is not among the predicted variables" in done.err


def test_forecasts_are_written(call: Call, trained: Path, tmp_path: Path) -> None:
    words = ["forecast", str(trained), "--hours", "12", "--device", "cpu"]
    store = tmp_path / "scored.zarr"
    done = call(*words, "--starts", "2", "--out", str(store), "--html", str(tmp_path / "page.html"), "--json")
    assert done.code == 0, done.err
    assert json.loads(done.out)["forecasts"] == str(store) and (store / ".zmetadata").is_file()
    done = call(*words, "--from", "2000-01-02 06:00", "--from", "2000-01-03 00:00", "--out", str(tmp_path / "two.nc"))
    assert done.code == 0, done.err
    assert "from 2000-01-02 06:00, 2000-01-03 00:00: 6, 12 hours ahead" in done.out and (tmp_path / "two.nc").is_file()
    done = call(*words, "--from", "2000-01-02 06:00")
    assert done.code == 2 and "name --out FILE.zarr or FILE.nc" in done.err


def test_the_report_of_the_run_shows_its_skill(call: Call, trained: Path) -> None:
    assert call("report", str(trained)).code == 0
    page = (trained / "report.html").read_text()
    assert "Forecast skill" in page and all(f"{lead} h" in page for lead in (6, 12, 24))


def test_other_hours_and_folders_are_refused(call: Call, trained: Path, tmp_path: Path) -> None:
    done = call("forecast", str(trained), "--hours", "7", "--device", "cpu")
    assert done.code == 2 and "do not reach it" in done.err
    assert call("forecast", str(tmp_path), "--device", "cpu").code == 1
