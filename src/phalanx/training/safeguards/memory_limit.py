"""Out of memory as an event: a run that starts again computes fewer samples at a time, and remembers that.

The rank that runs out writes `memory.json` to the run directory: the layout and the next smaller micro-batch. Whoever starts
the same layout again takes it. The global batch stays what it is, so that samples and gradients are the same; only
accumulation grows.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, TypeVar

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from phalanx.checkpoint import RankGroup
from phalanx.errors import PhalanxError
from phalanx.families.family import BoundModel
from phalanx.files import write_atomically
from phalanx.hardware.host import LESS_MEMORY
from phalanx.launch.restart import MEMORY_FILE
from phalanx.layout.legality.pipeline_rules import divides_batch, suits_schedule
from phalanx.layout.resolve import list_divisors
from phalanx.layout.spec import ResolvedLayout
from phalanx.planner.plan.remedies import find_remedies
from phalanx.planner.trace.traced_model import TracedModel

_MOST_BYTES = 100_000
RecordT = TypeVar("RecordT", bound=BaseModel)


class MemoryLimit(BaseModel):
    """What memory.json holds."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    layout: str
    """The layout that ran out, in all but the micro-batch."""
    microbatch: Annotated[int, Field(ge=1, le=10**9)]
    """Largest micro-batch to try."""


def smaller_microbatch(layout: ResolvedLayout) -> ResolvedLayout | None:
    """Return `layout` with the largest legal micro-batch of at most half the size; None where there is none.

    It divides the present one, and with it whatever that divides: the smaller batches of a warm-up too.
    """
    sizes = list_divisors(layout.microbatch)[:-1]
    if not sizes:
        return None
    sized = layout.table.vary("microbatch", sizes)
    possible = sized.take(divides_batch(sized) & suits_schedule(sized))
    return possible.row(len(possible) - 1) if len(possible) else None


def advise_remedies(model: BoundModel, layout: ResolvedLayout, device: str) -> str:
    """Return in words what takes less memory than `layout`: the three cheapest changes by the planner, where it can tell.

    device: name of the device, as machine descriptions call it.
    """
    remedies = []
    # The advice is given by a process that has no memory left: if it finds none for this either, general words will do.
    with suppress(PhalanxError, MemoryError, torch.OutOfMemoryError):
        if isinstance(model, TracedModel):
            remedies = find_remedies(model, layout, device)
    if not remedies:
        return LESS_MEMORY
    return "the cheapest changes that take less: " + "; ".join(map(str, remedies))


def note_out_of_memory(run_dir: Path, layout: ResolvedLayout, advise: Callable[[], str] = lambda: LESS_MEMORY) -> str:
    """Have the next start of the run in `layout` take a smaller micro-batch; return in words what follows.

    advise: says what else takes less memory; asked where there is no smaller micro-batch.
    """
    smaller = smaller_microbatch(layout)
    if smaller is None:
        return advise()
    limit = MemoryLimit(layout=name_layout(layout), microbatch=smaller.microbatch)
    try:
        write_atomically(run_dir / MEMORY_FILE, limit.model_dump_json() + "\n")
    except OSError as error:
        return f"{LESS_MEMORY} ({run_dir / MEMORY_FILE} cannot be written: {error.strerror})"
    return (
        f"started again, the run computes {smaller.microbatch} x {smaller.accumulation} samples in place of "
        f"{layout.microbatch} x {layout.accumulation}, which changes no gradient; otherwise {LESS_MEMORY}"
    )


def heed_memory_limit(run_dir: Path, layout: ResolvedLayout) -> ResolvedLayout:
    """Return `layout` with the micro-batch that the run in `run_dir` was left to take, the same on all ranks.

    Raises PhalanxError for a memory.json that Phalanx cannot have written.
    """
    limit = RankGroup.default().from_first(lambda: read_record(run_dir / MEMORY_FILE, MemoryLimit))
    if limit is None or limit.layout != name_layout(layout) or limit.microbatch >= layout.microbatch:
        return layout
    return replace(layout, microbatch=limit.microbatch)


def read_record(path: Path, kind: type[RecordT]) -> RecordT | None:
    """Return what a small file of a run directory holds; None where there is none. Raises PhalanxError for a damaged one."""
    if not path.is_file() or path.is_symlink():
        return None
    try:
        with path.open("rb") as file:
            return kind.model_validate_json(file.read(_MOST_BYTES))
    except (OSError, ValidationError) as error:
        raise PhalanxError(f"{path} is damaged; remove it") from error


def name_layout(layout: ResolvedLayout) -> str:
    """Return `layout` in words, in all but the micro-batch."""
    fields = asdict(layout)
    del fields["microbatch"]
    return " ".join(f"{name}={value}" for name, value in fields.items())
