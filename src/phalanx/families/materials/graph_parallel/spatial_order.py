"""The order in which ranks share out atoms: along a curve that fills space, so that runs of it are compact.

Every rank computes it for itself from the same numbers, so only operations are used whose results are exact or rounded alike
on all processors: sums, products and quotients, one at a time.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from phalanx.families.materials.data.array_files import Int64Array

Floats = npt.NDArray[np.float64]
_BITS = 12
"""Bits of a coordinate along the curve: 4,096 steps across the longest side of a structure."""


def spatial_order(positions_N3: npt.NDArray[Any], cells_G33: npt.NDArray[Any], graph_N: Int64Array) -> Int64Array:
    """Return atoms [N] in the order of their structures, and within each along a Hilbert curve.

    positions_N3: in any unit of length, inside their cells or not. cells_G33: lattice vectors as rows, in that unit; a
    structure whose cell has no volume is taken as it lies. graph_N: the structure of each atom, ascending.
    """
    if not len(graph_N):
        return np.zeros(0, dtype=np.int64)
    positions, (a, b, c) = positions_N3.astype(np.float64), cells_G33.astype(np.float64).transpose(1, 0, 2)
    # Into the cells, along lattice vectors at right angles to each other: by the inverse of the cell, formed by hand.
    normals = [
        np.stack([x[:, i - 2] * y[:, i - 1] - x[:, i - 1] * y[:, i - 2] for i in range(3)], axis=-1)
        for x, y in ((b, c), (c, a), (a, b))
    ]
    volumes = _dot_product(a, normals[0])
    lengths = np.stack([np.sqrt(_dot_product(x, x)) for x in (a, b, c)], axis=1)
    solid = (np.abs(volumes) > 1e-6 * lengths.prod(1)) & (volumes != 0.0)
    divisor = np.where(solid, volumes, 1.0)[:, None]
    fractions = np.stack([_dot_product(positions, (normal / divisor)[graph_N]) for normal in normals], axis=1)
    wrapped = (fractions - np.floor(fractions)) * lengths[graph_N]
    # A flat or absent cell has no inside: its atoms stay where they are.
    places = np.where(solid[graph_N, None], wrapped, positions)
    first_G = np.flatnonzero(np.diff(graph_N, prepend=-1))
    dense_N = np.cumsum(np.diff(graph_N, prepend=graph_N[0]) != 0)
    low = np.minimum.reduceat(places, first_G)
    # One scale for all three axes, so that steps along the curve are of equal length in space.
    extent = (np.maximum.reduceat(places, first_G) - low).max(1).clip(min=1e-9)
    # Clipped: the farthest point would lie one step beyond the curve.
    steps = ((places - low[dense_N]) / extent[dense_N, None] * 2**_BITS).astype(np.int64).clip(max=2**_BITS - 1)
    return np.lexsort((hilbert_numbers(steps, _BITS), graph_N)).astype(np.int64)


def _dot_product(a: Floats, b: Floats) -> Floats:
    products: Floats = a * b
    return products[..., 0] + products[..., 1] + products[..., 2]


def hilbert_numbers(steps_N3: Int64Array, bits: int) -> Int64Array:
    """Return the place of each point of a cube of 2^bits points a side along its Hilbert curve (Skilling 2004), int64 [N].

    Points that follow each other on the curve are neighbours in the cube. steps_N3: 0 to 2^bits - 1. bits: at most 21.
    """
    axes = [steps_N3[:, i].copy() for i in range(3)]
    for bit in reversed(range(1, bits)):
        mask = (1 << bit) - 1
        for axis in range(3):
            # Where the bit is set, the first axis is mirrored below it; elsewhere it changes places with this one.
            mirrored = (axes[axis] >> bit) & 1
            swapped = np.where(mirrored == 1, 0, (axes[0] ^ axes[axis]) & mask)
            axes[axis] ^= swapped
            axes[0] ^= np.where(mirrored == 1, mask, swapped)
    # Gray encoding, then the transposed bits are woven into one number.
    axes[1] ^= axes[0]
    axes[2] ^= axes[1]
    turned = np.zeros_like(axes[0])
    for bit in range(1, bits):
        turned ^= np.where((axes[2] >> bit) & 1 == 1, (1 << bit) - 1, 0)
    numbers = np.zeros_like(axes[0])
    for bit in reversed(range(bits)):
        for axis in range(3):
            numbers = (numbers << 1) | (((axes[axis] ^ turned) >> bit) & 1)
    return numbers
