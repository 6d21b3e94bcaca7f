"""Matrices whose parts lie on several ranks, each brought to one rank where an update needs it whole.

This module knows no ranks: `WholeMatrices` is the case of one, and what layouts derive from (`layout.gathered_matrices`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from phalanx.nn.parameters import MatrixRows

Work = Callable[[Tensor], Tensor]
"""Makes of N whole matrices of one shape, [N, rows, columns], as many of the same shape and format."""


class WholeMatrices:
    """The matrices among a rank's parameters, all of which it holds whole."""

    def __init__(
        self, rows: Mapping[Tensor, MatrixRows] = MappingProxyType({}), dtype: torch.dtype = torch.float32
    ) -> None:
        """Keep which parameters hold matrices, and of which these are composed. dtype: format in which the run computes."""
        self.rows = rows
        # Two bytes hold the range of a normalised matrix in bf16; fp16 would lose its small elements.
        self.dtype = torch.bfloat16 if dtype == torch.float16 else dtype

    def transform(self, parts: Mapping[Tensor, Tensor], work: Work) -> dict[Tensor, Tensor]:
        """Return what `work` makes of every matrix, as parts like those given.

        parts: this rank's elements of a tensor like each of the parameters that `rows` names, in `dtype`. Each matrix goes
        through `work` once, on one rank. All ranks call it together.
        """
        return {
            parameter: work_on_parts(part.unflatten(0, (self.rows[parameter].stack, -1)), self.rows[parameter], work)
            for parameter, part in parts.items()
        }


def work_on_parts(parts_NRC: Tensor, rows: MatrixRows, work: Work) -> Tensor:
    """Return what `work` makes of the matrices that N parts of a stack are composed of, [N R, C]."""
    matrices = [work(each) for each in _split_rows(parts_NRC, rows.pattern)]
    return _join_rows(matrices, rows.pattern).flatten(0, 1)


def _split_rows(parts_NRC: Tensor, pattern: tuple[int, ...]) -> list[Tensor]:
    """Return the matrices of some parts of a stack, [N, rows, C] each, their rows in order. pattern: see `MatrixRows`."""
    if not pattern:
        return [parts_NRC]
    repeated = parts_NRC.unflatten(1, (-1, sum(pattern)))
    return [rows.flatten(1, 2) for rows in repeated.split(pattern, dim=2)]


def _join_rows(matrices: list[Tensor], pattern: tuple[int, ...]) -> Tensor:
    """Return the parts of a stack that `_split_rows` would split into these matrices."""
    if not pattern:
        return matrices[0]
    grouped = [matrix.unflatten(1, (-1, rows)) for matrix, rows in zip(matrices, pattern, strict=True)]
    return torch.cat(grouped, dim=2).flatten(1, 2)
