"""`phalanx errors`: what a materials model gets wrong, by data set and quantity, in physical units."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from phalanx.cli.console import print_json, print_lines, print_pairs
from phalanx.cli.options.models import ErrorsArguments
from phalanx.cli.ranks import start_or_join_ranks
from phalanx.errors import ConfigError
from phalanx.families.materials.data.trained_elements import untrained_in_words
from phalanx.families.materials.evaluation.matbench_discovery import score_discovery
from phalanx.families.materials.evaluation.network_predictions import split_errors
from phalanx.layout.mesh import leave_process_group


def run_errors(asked: ErrorsArguments) -> None:
    """Run the subcommand."""
    if asked.matbench is not None:
        if asked.overrides or asked.samples is not None or asked.nproc is not None:
            raise ConfigError(
                "--matbench scores all of a file at once: leave out --samples, --nproc and fields to change"
            )
        _print_discovery(asked.checkpoint, asked.matbench, as_json=asked.as_json)
        return
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
    print_lines(
        f"{source} has no labels of {', '.join(missing)}"
        for source, missing in (found.unlabelled or {}).items()
        if missing
    )
    print_lines((f"warning: {line}" for line in untrained_in_words(found.untrained or {})), style="yellow")


def _print_discovery(predictions: Path, summary: Path, *, as_json: bool) -> None:
    found = score_discovery(predictions, summary)
    if as_json:
        print_json({"predictions": str(predictions), **{name: asdict(one) for name, one in found.items()}})
        return
    for name, one in found.items():
        print_lines([f"{name}: {one.crystals:,} crystals, {one.missing:,} without a prediction"])
        shares = f"precision {one.precision:.3f}, recall {one.recall:.3f}, accuracy {one.accuracy:.3f}"
        print_pairs(
            [
                ("stable or not", f"F1 {one.f1:.3f}, DAF {one.daf:.3f}, {shares}"),
                ("energy above hull", f"MAE {one.mae:.3f} RMSE {one.rmse:.3f} eV/atom, R2 {one.r2:.3f}"),
            ]
        )
