"""What makes the members of an ensemble differ: noise at every token, a pure function of seed, sample and member.

Members of a sample are consecutive rows of a micro-batch. Knows no mesh, rank or layout.
"""

from __future__ import annotations

import torch
from torch import Tensor

from phalanx.counter_random import member_normals, stream_key
from phalanx.families.weather.config import WeatherModel


def member_noise(
    config: WeatherModel, seed: int, sample_indices_B: Tensor, members: int, rows_S: Tensor, *, step: int = 0
) -> Tensor | None:
    """Return noise of mean 0 and variance 1 for each member and token, float32 [B*M, S, C]; None for models without.

    sample_indices: int64, global sample numbers. members: number of members of each sample; the first of more are those of
    fewer. rows: int64, numbers of the tokens in a sample. step: number of a roll-out's step; each has noise of its own.
    """
    if not config.noise_channels:
        return None
    channels_C = torch.arange(config.noise_channels, device=rows_S.device)
    counters_SC = rows_S[:, None] * config.noise_channels + channels_C
    noise_BMSC = member_normals(stream_key("member noise", seed, step), sample_indices_B, members, counters_SC)
    return noise_BMSC.flatten(0, 1)


def repeat_members(tensor: Tensor, rows: int) -> Tensor:
    """Return `tensor` [B, ...] with each sample once a member, `rows` in all; itself where it has as many already."""
    members = rows // len(tensor)
    return tensor if members == 1 else tensor.repeat_interleave(members, 0)


def member_indices(sample_indices_B: Tensor, members: int) -> Tensor:
    """Return a number for each row of a batch, int64 [B*M]: the sample's own where it has one member."""
    own_M = torch.arange(members, device=sample_indices_B.device)
    return (sample_indices_B[:, None] * members + own_M).flatten()
