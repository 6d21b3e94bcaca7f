"""The moments of an optimizer step at which a rank may hold most, and what it holds then, cause by cause.

One arithmetic for a single layout and for a million: every number may be an array. A backward pass frees the activations of
one block after another while gradients take their place; all of that is even, so only its first and last blocks matter.
Where several blocks are gathered together, each of these stands for a unit of them.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from phalanx.planner.memory.one_stage import moments_alone
from phalanx.planner.memory.pipelined import moments_piped
from phalanx.planner.memory.state import Held, Rank

MOMENTS = (
    "forward of the embedding",
    "forward of the first block",
    "forward of a block in between",
    "forward of the last block",
    "forward of the head",
    "backward of the head",
    "gradients of the head reduced",
    "backward of the last block",
    "backward of all that is gathered with the last block",
    "gradients of the last block reduced",
    "backward of the last block but one",
    "backward of all that is gathered with the last block but one",
    "gradients of the last block but one reduced",
    "backward of a block in between",
    "backward of the first block",
    "backward of all that is gathered with the first block",
    "gradients of the first block reduced",
    "next backward of the head",
    "next backward of the last block",
    "backward of the embedding",
    "gradients of the embedding reduced",
    "gradients of the first part reduced",
    "update",
)


def moments(rank: Rank) -> Iterator[tuple[str, Held]]:
    """Bytes by cause at each moment, for layouts of which either all have a pipeline or none; of pipelines those that
    `memory_turns` does not replay."""
    yield from moments_piped(rank) if np.all(rank.s.piped) else moments_alone(rank)
