"""How many blocks each pipeline stage has, computed once for all models of the costs: some milliseconds for many stages."""

from __future__ import annotations

from functools import cache

from phalanx.layout.pipeline.stage_assignment import split_layers


@cache
def split(n_layers: int, n_stages: int, first: float, last: float) -> tuple[int, ...]:
    """Blocks of each stage; see `layout.pipeline.stage_assignment.split_layers`."""
    return tuple(len(blocks) for blocks in split_layers(n_layers, n_stages, first, last))
