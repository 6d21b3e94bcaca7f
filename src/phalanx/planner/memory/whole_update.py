"""Bytes of an update that needs matrices whole: what `layout.gathered_matrices` and the optimizer's work make of a round."""

from __future__ import annotations

import numpy as np

from phalanx.layout.gathered_matrices import ROUND_ELEMENTS
from phalanx.layout.spec import SCHEDULES, LayoutTable
from phalanx.planner.distinct_rows import distinct_rows
from phalanx.planner.memory.ranks import rank_parts
from phalanx.planner.memory.state import Amount
from phalanx.planner.trace.traced_model import TracedModel
from phalanx.planner.trace.whole_matrices import SHARED_BY, MatrixKind, SharedUnits, block_matrices, share_of_layout


def round_bytes(model: TracedModel, candidates: LayoutTable) -> Amount:
    """Return the bytes that the rank with most matrices holds while these are whole, [candidates].

    Those of a round, the buffers they travel in, and what the work makes of them; directions and updates of a rank's own
    parameters are counted elsewhere.
    """
    names = ("schedule", "stages_per_rank", *SHARED_BY)
    first, inverse = distinct_rows([getattr(candidates, name) for name in names])
    some = candidates.take(first)
    kinds = block_matrices(model)
    found = []
    for row, pp in enumerate(some.pp.tolist()):
        pipeline = (SCHEDULES[some.schedule[row]], pp, int(some.stages_per_rank[row]))
        config = model.config
        parts = rank_parts(*pipeline, config.n_layers, model.block_costs(), config.leading_layers)
        alone = bool(some.world_size[row] == 1)
        blocks = set(zip((parts.layers - parts.leading).astype(int), parts.leading.astype(int), strict=True))
        found.append(
            max(
                _bytes_of_round(kinds, share_of_layout(kinds, some, row, *held), held, model, alone=alone)
                for held in blocks
            )
        )
    return np.asarray(found, np.float64)[inverse]


def _bytes_of_round(
    kinds: tuple[MatrixKind, ...], share: SharedUnits, blocks: tuple[int, int], model: TracedModel, *, alone: bool
) -> float:
    """Return the bytes of a round of one pipeline rank. blocks: its blocks, leading ones apart, and its leading blocks."""
    precision = model.precision
    # See `WholeMatrices`: fp16 runs do this in bf16.
    width = precision.compute_dtype.itemsize
    if alone:
        # Nothing travels: parameters are worked on one after the other, all experts of one together.
        return max((_work_bytes(kind, kind.count, width) for kind in kinds), default=0.0)
    owned = [number * kind.elements for number, kind in zip(share.owned, kinds, strict=True)]
    leaving = [size * max(1.0, copies) for size, copies in zip(owned, share.copies, strict=True)]
    # Costly units go first: a round is cut off where it is full.
    fill = min(1.0, max(ROUND_ELEMENTS, *(k.elements for k in kinds)) / max(sum(leaving), 1.0))
    whole, sent = fill * sum(owned), fill * sum(leaving)
    work = max(
        _work_bytes(kind, max(1.0, fill * number / blocks[kind.leading]), width)
        for number, kind in zip(share.owned, kinds, strict=True)
        if number
    )
    return width * whole + max(work, 2 * width * sent)


def _work_bytes(kind: MatrixKind, units: float, width: int) -> float:
    """Return the bytes that the work on so many units of one parameter makes, beside what comes of it."""
    rows, columns = kind.matrices[-1]
    last, short = units * rows * columns, min(rows, columns)
    whole = units * kind.elements
    # Matrices of a fused parameter are copied apart, and all but the last one are done.
    apart = width * (2 * whole - last) if len(kind.matrices) > 1 else 0.0
    wide = max(width, 4)
    return apart + max((wide + width) * last, 2 * width * (last + units * short * short))
