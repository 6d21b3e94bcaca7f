"""The grid: fields as patches and back, latitudes, and how much of the sphere each point stands for."""

from __future__ import annotations

from math import pi

import torch
from torch import Tensor

from phalanx.families.weather.model_config import WeatherModel


def patches_of(fields_BVHW: Tensor, patch_size: int) -> Tensor:
    """[B, V, H, W] -> [B, L, V, P]: locations row by row from the first latitude, points of a patch row by row too."""
    tiles = fields_BVHW.unflatten(-1, (-1, patch_size)).unflatten(-3, (-1, patch_size))
    patches_BLVP: Tensor = tiles.permute(0, 2, 4, 1, 3, 5).flatten(4, 5).flatten(1, 2)
    return patches_BLVP


def fields_of(patches_BLVP: Tensor, n_lat: int, patch_size: int) -> Tensor:
    """The inverse of `patches_of` for a grid of `n_lat` rows: [B, L, V, P] -> [B, V, H, W]."""
    tiles = patches_BLVP.unflatten(3, (patch_size, patch_size)).unflatten(1, (n_lat // patch_size, -1))
    fields_BVHW: Tensor = tiles.permute(0, 3, 1, 4, 2, 5).flatten(4, 5).flatten(2, 3)
    return fields_BVHW


def latitudes(config: WeatherModel, device: torch.device) -> Tensor:
    """Latitudes of the rows' points in degrees, float64 [H]: evenly spaced."""
    rows = torch.arange(config.n_lat, dtype=torch.float64, device=device)
    if config.first_latitude is None or config.last_latitude is None:
        return (rows + 0.5) * (180.0 / config.n_lat) - 90.0
    return config.first_latitude + rows * (config.last_latitude - config.first_latitude) / (config.n_lat - 1)


def cell_edges(config: WeatherModel, device: torch.device) -> Tensor:
    """Latitudes between which the rows' cells lie, degrees, float64 [H + 1].

    Halfway between points, and as far beyond the outer points; cells end at the poles (a row of points on a pole has a
    polar cap of half the height).
    """
    lat_H = latitudes(config, device)
    half = (lat_H[1] - lat_H[0]) / 2 if len(lat_H) > 1 else torch.full((), 90.0, dtype=lat_H.dtype, device=device)
    return torch.cat((lat_H - half, lat_H[-1:] + half)).clamp(-90.0, 90.0)


def row_weights(config: WeatherModel, device: torch.device) -> Tensor:
    """Weight of a point in each row, float64 [H], with mean 1 over the grid.

    `cos`: cosine of the latitude (ClimaX). `area`: the exact area of the cell, from the sines of its edges (WeatherBench 2,
    Rasp et al. 2024), which is not 0 for points on a pole.
    """
    if config.latitude_weights == "cos":
        weight_H = torch.cos(latitudes(config, device) * (pi / 180.0))
    else:
        weight_H = torch.sin(cell_edges(config, device) * (pi / 180.0)).diff().abs()
    return weight_H / weight_H.mean()


def patch_places(config: WeatherModel, device: torch.device) -> Tensor:
    """Where each patch lies, float64 [L, 4]: its centre as a point (x, y, z) of the unit sphere, and its area in steradians.

    Longitudes go round the globe in even steps. The centre halves the area.
    """
    rows, columns = config.n_lat // config.patch_size, config.n_lon // config.patch_size
    edges = torch.sin(cell_edges(config, device)[:: config.patch_size] * (pi / 180.0))
    height = torch.asin((edges[1:] + edges[:-1]) / 2)
    turn = (torch.arange(columns, dtype=torch.float64, device=device) + 0.5) * (2 * pi / columns)
    ring = torch.cos(height)[:, None]
    area = edges.diff().abs() * (2 * pi / columns)
    parts = (ring * torch.cos(turn), ring * torch.sin(turn), torch.sin(height)[:, None], area[:, None])
    return torch.stack([part.expand(rows, columns) for part in parts], dim=-1).flatten(0, 1)
