"""An ensemble of forecasts: scores are those of forecasts made one by one, and a stretch makes spread and error alike."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from phalanx.cli.models.ensemble import print_ensemble
from phalanx.config.load import load_run
from phalanx.ensemble.members import Share, open_member, read_ensemble
from phalanx.errors import ConfigError
from phalanx.families.weather import ensemble as weather
from phalanx.families.weather.ensemble import build_forecasts
from phalanx.families.weather.evaluation.forecast_split import forecast_split, load_forecaster
from phalanx.report.ensemble_page import render_ensemble
from phalanx.training.start import train
from weather_runs import write_weather_run

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("weather")
    run_file = write_weather_run(folder)
    for seed, words in enumerate((["model.n_layers=1"], ["model.d_model=16"], [])):
        run = load_run(run_file, [*words, f"training.seed={seed}", "training.steps=3", "evaluation.samples=2"])
        train(run, folder / f"member-{seed}")
    return [folder / f"member-{seed}" for seed in range(3)]


def test_scores_are_those_of_members_and_of_their_mean(runs: list[Path]) -> None:
    found = build_forecasts([open_member(run) for run in runs], CPU, starts=6)
    alone = [forecast_split(load_forecaster(run, CPU), hours=24, split="test", starts=6).rows for run in runs]
    assert {row.lead_hours for row in found.rows} == {6, 12, 18, 24}
    for place, row in enumerate(found.rows):
        each = [rows[place] for rows in alone]
        assert {(one.variable, one.lead_hours, one.forecasts) for one in each} == {
            (row.variable, row.lead_hours, row.scores.forecasts)
        }
        assert row.members == pytest.approx([one.rmse for one in each], rel=1e-5)
        # the mean of all errs less than members do in the mean of squares
        assert row.raw.rmse == pytest.approx(row.scores.rmse)
        assert row.raw.rmse**2 < sum(one.rmse**2 for one in each) / 3
        assert row.scores.spread == pytest.approx(row.stretch * row.raw.spread)
        assert row.scores.spread_skill == pytest.approx(row.stretch * row.raw.spread_skill)
        assert len(row.raw.ranks) == len(row.scores.ranks) == 4 and sum(row.raw.ranks) == pytest.approx(1.0)
    off = [[abs(math.log(one.spread_skill)) for one in (row.raw, row.scores)] for row in found.rows]
    assert sum(after for _, after in off) < 0.5 * sum(before for before, _ in off)


def test_stretching_too_far_scores_worse(runs: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    members = [open_member(run) for run in runs]
    calibrated = build_forecasts(members, CPU, hours=12, starts=6)
    fitted = weather._SplitScores.stretches
    scores = [[row.scores.crps for row in calibrated.rows]]
    for factor in (4, 16, 64):
        monkeypatch.setattr(weather._SplitScores, "stretches", lambda sums, factor=factor: factor * fitted(sums))
        found = build_forecasts(members, CPU, hours=12, starts=6)
        scores.append([row.scores.crps for row in found.rows])
        # what is compared with it is scored alike, and stays
        assert [row.raw.crps for row in found.rows] == [row.raw.crps for row in calibrated.rows]
    for row in zip(*scores, strict=True):
        assert list(row) == sorted(row) and row[-1] > 10 * row[0]


def test_what_calibrates_and_what_is_scored_are_apart(runs: list[Path]) -> None:
    facts = build_forecasts([open_member(run) for run in runs[:2]], CPU, hours=6, starts=2).summary()
    # validation ends with step 199; the test begins with step 205, of which those within the longest lead time are left out
    assert (facts["calibrated_on"], facts["scored_on"], facts["hours_between"]) == ("validation", "test", 36)
    for row in facts["forecasts"]:
        assert row["raw"]["fair_crps"] <= row["raw"]["crps"] and row["scores"]["fair_crps"] is None


def test_an_ensemble_of_forecasts_is_written_shown_and_read(
    runs: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = build_forecasts([open_member(run) for run in runs[:2]], CPU, hours=12, starts=2)
    found.document(tmp_path).write(tmp_path)
    document = read_ensemble(tmp_path)
    assert document.family == "weather" and [member.weight for member in document.members] == [0.5, 0.5]
    print_ensemble(found.summary())
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4 + len(found.rows) and lines[-1].split()[0] == found.rows[-1].variable
    page = render_ensemble(found.summary())
    assert page.count('<svg viewBox="0 0 1000') == 3 * 2 and page.count("<tr>") == 1 + len(found.rows) + 1 + 2


def test_ranks_share_the_starts(runs: list[Path]) -> None:
    seen: list[int] = []
    members = [open_member(run) for run in runs[:2]]
    for rank in range(2):
        build_forecasts(
            members,
            CPU,
            hours=6,
            starts=20,
            share=Share(rank, 2),
            progress=lambda what, done, total: seen.append(total) if what == "test" and done == total else None,
        )
    assert seen == [2, 1]


def test_members_that_do_not_go_together_are_refused(runs: list[Path], tmp_path: Path) -> None:
    other = load_run(runs[0].parent / "run.yaml", ["data.lead_hours=[12]", "training.steps=1"])
    train(other, tmp_path / "other")
    with pytest.raises(ConfigError, match=r"reaches lead times of 12 hours, .* of 6, 12; members need the same"):
        build_forecasts([open_member(runs[0]), open_member(tmp_path / "other")], CPU, hours=12)
    short = load_run(
        runs[0].parent / "run.yaml",
        ['data.splits.test={"first": "step 210", "last": "step 239"}', "training.steps=1"],
    )
    train(short, tmp_path / "short")
    with pytest.raises(
        ConfigError, match=r"short differs from .* in data.splits; members of an ensemble read and predict"
    ):
        build_forecasts([open_member(runs[0]), open_member(tmp_path / "short")], CPU)
