"""Out of memory as an event: a run that starts again takes less of it, and remembers that.

The rank that runs out writes `memory.json` to the run directory: the layout, and the next smaller micro-batch or what else
`safeguards.on_out_of_memory` allows. Whoever starts the same layout again takes it. The global batch stays what it is, so
that samples and gradients are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any, TypeVar

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from phalanx.checkpoint import RankGroup
from phalanx.config.schema import LessMemory
from phalanx.errors import PhalanxError
from phalanx.families.family import BoundModel
from phalanx.files import write_atomically
from phalanx.hardware.host import LESS_MEMORY
from phalanx.launch.restart import MEMORY_FILE
from phalanx.layout.legality import reasons_against
from phalanx.layout.legality.pipeline_rules import divides_batch, suits_schedule
from phalanx.layout.resolve import list_divisors
from phalanx.layout.spec import OFFLOADS, RECOMPUTES, Recompute, ResolvedLayout
from phalanx.optimizers import find_optimizer
from phalanx.planner.plan.remedies import find_remedies
from phalanx.planner.trace.traced_model import TracedModel

_MOST_BYTES = 100_000
RecordT = TypeVar("RecordT", bound=BaseModel)


class MemoryLimit(BaseModel):
    """What memory.json holds."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    layout: str
    """The layout of the run file that ran out, in all but the micro-batch."""
    microbatch: Annotated[int, Field(ge=1, le=10**9)]
    """Largest micro-batch to try."""
    recompute: Recompute | None = None
    """What to recompute; null leaves it as the layout has it."""
    offload_optimizer: bool = False
    """Whether to keep optimizer state in host memory, whatever the layout says."""
    offload_activations: bool = False
    """The same of activations."""

    def apply(self, layout: ResolvedLayout) -> ResolvedLayout:
        """Return the layout of the run file with what takes less memory."""
        return replace(
            layout,
            microbatch=min(self.microbatch, layout.microbatch),
            recompute=self.recompute or layout.recompute,
            offload_optimizer=self.offload_optimizer or layout.offload_optimizer,
            offload_activations=self.offload_activations or layout.offload_activations,
        )


def lighter_layout(
    model: BoundModel, layout: ResolvedLayout, ways: Sequence[LessMemory], devices_per_node: int | None
) -> ResolvedLayout | None:
    """Return the first legal layout that takes less memory than `layout` by one of `ways`, in their order; None without any.

    devices_per_node: as for `layout.resolve.resolve_layout`.
    """
    for way in ways:
        if way == "halve":
            smaller = smaller_microbatch(layout)
            tried = [] if smaller is None else [smaller]
        elif way == "recompute":
            more = RECOMPUTES[RECOMPUTES.index(layout.recompute) + 1 :]
            tried = [replace(layout, recompute=mode) for mode in more]
        else:
            tried = _offloaded_more(model, layout)
        for lighter in tried:
            if not reasons_against(model, lighter, lighter.world_size, devices_per_node):
                return lighter
    return None


def _offloaded_more(model: BoundModel, layout: ResolvedLayout) -> list[ResolvedLayout]:
    """Return `layout` with more of it in host memory, legal or not: optimizer state, then activations."""
    # Asked here as well: the rules do not load optimizers of other packages.
    possible = not layout.offload_optimizer and find_optimizer(model.run.optimizer).per_parameter
    state = [replace(layout, offload_optimizer=True)] if possible else []
    return state if layout.offload_activations else [*state, replace(layout, offload_activations=True)]


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


def note_out_of_memory(
    run_dir: Path,
    layout: ResolvedLayout,
    stated: ResolvedLayout,
    lighter: ResolvedLayout | None,
    advise: Callable[[], str] = lambda: LESS_MEMORY,
) -> str:
    """Have the next start of the run take `lighter` in place of `layout`; return in words what follows.

    stated: the layout as the run file has it. advise: says what else takes less memory; asked where `lighter` is None.
    """
    if lighter is None:
        return advise()
    limit = MemoryLimit(
        layout=name_layout(stated),
        microbatch=lighter.microbatch,
        recompute=None if lighter.recompute == stated.recompute else lighter.recompute,
        offload_optimizer=lighter.offload_optimizer,
        offload_activations=lighter.offload_activations,
    )
    try:
        write_atomically(run_dir / MEMORY_FILE, limit.model_dump_json() + "\n")
    except OSError as error:
        return f"{LESS_MEMORY} ({run_dir / MEMORY_FILE} cannot be written: {error.strerror})"
    return f"started again, the run {_describe_change(layout, lighter)}, which changes no gradient; otherwise {LESS_MEMORY}"


def _describe_change(layout: ResolvedLayout, lighter: ResolvedLayout) -> str:
    """Return in words what another layout does to take less memory than `layout`."""
    if lighter.microbatch != layout.microbatch:
        return (
            f"computes {lighter.microbatch} x {lighter.accumulation} samples in place of "
            f"{layout.microbatch} x {layout.accumulation}"
        )
    if lighter.recompute != layout.recompute:
        return f"takes layout.recompute={lighter.recompute} in place of {layout.recompute}"
    added = [f"layout.{name}=true" for name in OFFLOADS if getattr(lighter, name) and not getattr(layout, name)]
    return f"takes {' '.join(added)}"


def less_memory(lighter: ResolvedLayout, layout: ResolvedLayout) -> dict[str, Any]:
    """Return the fields of the event that a run takes a lighter layout than `layout`."""
    fields: dict[str, Any] = {
        "microbatch": lighter.microbatch,
        "accumulation": lighter.accumulation,
        "spared": layout.microbatch - lighter.microbatch,
    }
    names = ("recompute", *OFFLOADS)
    return fields | {name: getattr(lighter, name) for name in names if getattr(lighter, name) != getattr(layout, name)}


def heed_memory_limit(run_dir: Path, layout: ResolvedLayout) -> ResolvedLayout:
    """Return `layout` with what the run in `run_dir` was left to take less memory by, the same on all ranks.

    Raises PhalanxError for a memory.json that Phalanx cannot have written.
    """
    limit = RankGroup.default().from_first(lambda: read_record(run_dir / MEMORY_FILE, MemoryLimit))
    return layout if limit is None or limit.layout != name_layout(layout) else limit.apply(layout)


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
