"""`phalanx select`: structures that an ensemble knows least about, to be labelled next."""

from __future__ import annotations

from typing import Any

from phalanx.cli.console import print_json, print_lines, print_table
from phalanx.cli.options.models import SelectArguments
from phalanx.cli.ranks import start_or_join_ranks
from phalanx.ensemble.members import Share
from phalanx.errors import PhalanxError
from phalanx.families.materials.ensemble.select_structures import select_structures, write_selection
from phalanx.layout.mesh import leave_process_group
from phalanx.report.table import Column

COLUMNS: list[Column[dict[str, Any]]] = [
    Column("forces, meV/A", lambda row: f"{1e3 * row['forces']:.1f}"),
    Column("energy, meV/atom", lambda row: f"{1e3 * row['energy']:.2f}"),
    Column("structure", lambda row: f"{row['file']}: {row['place']}", align="left"),
]
_SHOWN = 10
"""Structures that are printed; the file has all."""


def run_select(asked: SelectArguments) -> None:
    """Run the subcommand."""
    ranks, device = start_or_join_ranks(asked.nproc, asked.device)
    found = select_structures(
        asked.ensemble,
        asked.pools,
        top=asked.top,
        by=asked.by,
        branch=asked.branch,
        device=device,
        share=Share(ranks.rank, ranks.world_size),
    )
    leave_process_group()
    # What ranks found of their shares was put together on all of them.
    if not ranks.first:
        return
    try:
        write_selection(found, asked.out)
    except OSError as error:
        raise PhalanxError(f"cannot write {asked.out}: {error.strerror}; name another file") from error
    rows = [
        {"file": one.structure.raw.file, "place": one.structure.raw.place, "energy": one.energy, "forces": one.forces}
        for one in found.chosen
    ]
    if asked.as_json:
        unknown = {str(element): count for element, count in sorted(found.unknown.items())}
        facts = {"out": str(asked.out), "by": asked.by, "ranked": found.ranked, "median": found.median}
        print_json({**facts, "left_out": unknown, "chosen": rows})
        return
    unit, least = "meV/A" if asked.by == "forces" else "meV/atom", min(getattr(one, asked.by) for one in found.chosen)
    print_lines(
        [
            f"{len(rows):,} of {found.ranked:,} structures written to {asked.out}: members are {1e3 * least:.3g} {unit} "
            f"apart or more about their {asked.by}, {1e3 * found.median:.3g} in the median of all"
        ]
    )
    print_table(COLUMNS, rows[:_SHOWN])
    print_lines(
        (
            f"warning: {count:,} structures with atomic number {element} are left out: a member was not trained on it"
            for element, count in sorted(found.unknown.items())
        ),
        style="yellow",
    )
