"""Scores of forecasts that several ranks share out unevenly are those of one rank."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.distributed as dist

from distributed_ranks import run_ranks
from phalanx.families.weather.evaluation.forecast_scores import EnsembleScores, ForecastScores

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
    return [dataclasses.astuple(score)[2:] for score in (*single.results(), *ensemble.results())]


def _score_a_share() -> Table:
    return _scores(dist.get_rank(), dist.get_world_size())


def test_every_rank_gets_the_scores_of_all() -> None:
    whole = _scores(0, 1)
    assert sum(row[0] for row in whole[:4]) == 2 * _FORECASTS
    for found in run_ranks(_score_a_share, 3):
        for row, expected in zip(found, whole, strict=True):
            assert row == pytest.approx(expected, rel=1e-12)
