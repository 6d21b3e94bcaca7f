"""`phalanx errors`: what a materials model gets wrong, by data set and quantity, in physical units."""

from __future__ import annotations

from phalanx.cli.console import print_json, print_lines, print_pairs
from phalanx.cli.options.models import ErrorsArguments
from phalanx.cli.ranks import start_or_join_ranks
from phalanx.families.materials.data.trained_elements import untrained_in_words
from phalanx.families.materials.evaluation.network_predictions import split_errors
from phalanx.layout.mesh import leave_process_group


def run_errors(asked: ErrorsArguments) -> None:
    """Run the subcommand."""
    ranks, device = start_or_join_ranks(asked.nproc, asked.device)
    where, found = split_errors(
        asked.checkpoint,
        asked.split,
        device,
        samples=asked.samples,
        overrides=asked.overrides or (),
        ranks=ranks.world_size,
    )
    leave_process_group()
    if not ranks.first:
        return
    if asked.as_json:
        print_json({"checkpoint": str(where), "split": asked.split, **found.as_dict()})
        return
    print_lines([f"{where} on the {asked.split} split: {found.structures:,} structures, loss {found.loss:.5g}"])
    print_pairs([(f"{row.source} {row.quantity}", row.errors_in_words) for row in found.rows])
    print_lines((f"warning: {line}" for line in untrained_in_words(found.untrained or {})), style="yellow")
