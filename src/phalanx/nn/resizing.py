"""Parameters of one shape from those of another: rows matched by name, grids and patches interpolated.

What a family says of its own parameters when a run begins with weights of a model of another shape
(`training.inputs.TrainableModel.resizes`). Plain functions of whole tensors; knows no files and no ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Resize:
    """How a parameter is made of a stored one of another shape, or of the same shape with another meaning."""

    in_words: str
    """How a table of parameters says it, such as "rows by name: 3 of 5 known"."""
    apply: Callable[[Tensor, Tensor], Tensor]
    """Gives the values to begin with, from the stored ones and from the initial values of this model; whole tensors."""


Resizes = list[tuple[str, Resize]]
"""Patterns of parameter names (as in fnmatch) with how these are resized; the first that matches counts."""


def match_rows(before: Sequence[str], after: Sequence[str], what: str, dim: int = 0) -> Resize:
    """Return a resize that takes the parts of a parameter along `dim` by name; those of unknown names keep initial values.

    before, after: names of the parts, of the stored parameter and of this model's. Each part may hold several rows: as many
    as the parameter has for each name. what: the parts, for a person.
    """
    places = {name: place for place, name in enumerate(before)}
    pairs = [(place, places[name]) for place, name in enumerate(after) if name in places]

    def take(stored: Tensor, initial: Tensor) -> Tensor:
        made = initial.unflatten(dim, (len(after), -1)).clone()
        if pairs:
            mine, theirs = (torch.tensor(side) for side in zip(*pairs, strict=True))
            found = stored.unflatten(dim, (len(before), -1)).index_select(dim, theirs).to(made.dtype)
            made.index_copy_(dim, mine, found)
        taken: Tensor = made.flatten(dim, dim + 1)
        return taken

    return Resize(f"{what} by name: {len(pairs)} of {len(after)} known", take)


def keep_first(before: int, after: int, what: str, dim: int) -> Resize:
    """Return a resize that makes `after` parts of `before` equal parts along `dim`: the first stay, further ones are 0.

    what: the parts, for a person. With zeros a sum over parts is what it was.
    """

    def take(stored: Tensor, initial: Tensor) -> Tensor:
        parts = stored.to(initial.dtype).unflatten(dim, (before, -1))
        shape = (*parts.shape[:dim], after, *parts.shape[dim + 1 :])
        made, kept = parts.new_zeros(shape), min(before, after)
        made.narrow(dim, 0, kept).copy_(parts.narrow(dim, 0, kept))
        taken: Tensor = made.flatten(dim, dim + 1)
        return taken

    return Resize(f"{what}: the first {min(before, after)} of {before} kept, {after} in all", take)


def resample_grid(before: tuple[int, int], after: tuple[int, int]) -> Resize:
    """Return a resize that interpolates a table [rows * columns, D] to another grid, bilinearly, as images are.

    before, after: rows and columns; positions of a text are one column. Nothing is joined across the edges: tables of places
    begin as waves that do not go round the globe (the published ClimaX code resizes its table in the same way).
    """

    def interpolate(stored: Tensor, initial: Tensor) -> Tensor:
        return interpolate_grid(stored.to(torch.float64), before, after).to(initial.dtype)

    return Resize(f"grid {before[0]}x{before[1]} -> {after[0]}x{after[1]}, interpolated", interpolate)


def interpolate_grid(table: Tensor, before: tuple[int, int], after: tuple[int, int]) -> Tensor:
    """Return a table [rows * columns, D] of grid `before` on grid `after`, as `resample_grid` does; with gradients.

    By products of matrices, whose gradients are sums in one order: those of `torch.nn.functional.interpolate` are not.
    """
    rows, columns = (_line_matrix(*sizes).to(table.device, table.dtype) for sizes in zip(before, after, strict=True))
    # One after the other: a single einsum would form the matrix of all places by all places.
    by_row = torch.einsum("gh,hwd->gwd", rows, table.unflatten(0, before))
    return torch.einsum("vw,gwd->gvd", columns, by_row).flatten(0, 1)


def resample_patches(before: int, after: int, dim: int, *, reads: bool) -> Resize:
    """Return a resize that brings the points of square patches of edge `before` to edge `after`, along `dim` of a parameter.

    reads: whether the parameter multiplies patches. Then it gives of a field what it gave of the field brought to the grid
    before; otherwise it writes what it wrote, brought to the new grid. Bilinear. A dim may hold several patches.
    """
    # Rows: points that come out; columns: points that go in.
    line = _line_matrix(after, before).T if reads else _line_matrix(before, after)
    matrix = torch.kron(line, line)

    def interpolate(stored: Tensor, initial: Tensor) -> Tensor:
        points = stored.to(torch.float64).movedim(dim, -1).unflatten(-1, (-1, before**2))
        made: Tensor = (points @ matrix.T).flatten(-2).movedim(-1, dim).to(initial.dtype).contiguous()
        return made

    return Resize(f"patches of {before}x{before} -> {after}x{after}, interpolated", interpolate)


def chain_resizes(*resizes: Resize | None) -> Resize | None:
    """Return a resize that applies these one after another, of which some may be None; None where all are.

    All but the last must give what the next one takes, of whatever size: they are handed the same initial values.
    """
    found = [resize for resize in resizes if resize is not None]
    if not found:
        return None

    def apply(stored: Tensor, initial: Tensor) -> Tensor:
        for resize in found:
            stored = resize.apply(stored, initial)
        return stored

    return Resize("; ".join(resize.in_words for resize in found), apply)


def _line_matrix(before: int, after: int) -> Tensor:
    """Return the matrix that interpolates `before` equal cells of a line to `after` of them, linearly, [after, before].

    A cell's value stands for its middle, as in images. Fewer cells have weighted means of those that they join.
    """
    middles = (torch.arange(after, dtype=torch.float64) + 0.5) * before / after - 0.5
    distance = (torch.arange(before, dtype=torch.float64) - middles[:, None]).abs() / max(1.0, before / after)
    weight = (1.0 - distance).clamp(min=0.0)
    # At the ends there is nothing to interpolate with: the outermost cell goes on.
    return weight / weight.sum(dim=1, keepdim=True)
