"""Scores of forecasts that several ranks share out unevenly are those of one rank."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from distributed_ranks import run_ranks
from phalanx.config.load import load_run
from phalanx.families.weather.evaluation.forecast_scores import EnsembleScores, ForecastScores
from phalanx.families.weather.evaluation.forecast_split import Forecasts, forecast_split, load_forecaster
from phalanx.training.start import train
from weather_runs import write_weather_run

Table = list[tuple[float, ...]]
_FORECASTS = 7


def _scores(rank: int, ranks: int) -> Table:
    """The scores of all forecasts, of which this rank adds every `ranks`-th."""
    generator = torch.Generator().manual_seed(0)
    members = torch.randn(_FORECASTS, 3, 2, 4, 5, generator=generator)
    truth, usual = (torch.randn(_FORECASTS, 2, 4, 5, generator=generator) for _ in range(2))
    hours = torch.tensor([6, 12])[torch.arange(_FORECASTS) % 2]
    weights = torch.rand(4, 5, generator=generator)
    single = ForecastScores(("z500", "t850"), (6, 12), weights)
    ensemble = EnsembleScores(("z500", "t850"), (6, 12), weights, members=3)
    mine = slice(rank, None, ranks)
    single.add(members[mine, 0], truth[mine], hours[mine], usual[mine])
    ensemble.add(members[mine], truth[mine], hours[mine])
    single.all_reduce()
    ensemble.all_reduce()
    return [
        *(dataclasses.astuple(score)[2:] for score in single.results()),
        *(dataclasses.astuple(score)[2:-1] for score in ensemble.results()),
        *(score.ranks for score in ensemble.results()),
    ]


def _score_a_share() -> Table:
    return _scores(dist.get_rank(), dist.get_world_size())


def test_every_rank_gets_the_scores_of_all() -> None:
    whole = _scores(0, 1)
    assert sum(row[0] for row in whole[:4]) == 2 * _FORECASTS
    for found in run_ranks(_score_a_share, 3):
        for row, expected in zip(found, whole, strict=True):
            assert row == pytest.approx(expected, rel=1e-12, nan_ok=True)


def _forecast(run_dir: Path, starts: int) -> Forecasts:
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    loaded = load_forecaster(run_dir, torch.device("cpu"))
    return forecast_split(loaded, hours=24, split="test", starts=starts, rank=rank, ranks=ranks)


def test_ranks_share_the_starts_of_a_split_and_all_get_its_scores_and_maps(tmp_path: Path) -> None:
    train(load_run(write_weather_run(tmp_path), ["training.steps=1"]), tmp_path / "run")
    # Of three starts one rank forecasts two; of a single one it forecasts none.
    for starts in (3, 1):
        whole = _forecast(tmp_path / "run", starts)
        for found in run_ranks(_forecast, 2, tmp_path / "run", starts):
            assert (found.starts, found.steps, len(found.maps)) == (whole.starts, whole.steps, len(whole.maps))
            for row, expected in zip(found.rows, whole.rows, strict=True):
                assert (row.variable, row.lead_hours, row.forecasts) == (
                    expected.variable, expected.lead_hours, expected.forecasts,
                )  # fmt: skip
                assert (row.rmse, row.mae, row.persistence_rmse) == pytest.approx(
                    (expected.rmse, expected.mae, expected.persistence_rmse), rel=1e-6
                )
            for one, other in zip(found.maps, whole.maps, strict=True):
                assert (one.variable, one.lead_hours, one.start) == (other.variable, other.lead_hours, other.start)
                np.testing.assert_allclose(one.forecast, other.forecast, rtol=1e-5)
