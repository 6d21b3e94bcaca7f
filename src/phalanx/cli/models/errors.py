"""`phalanx errors`: what a materials model gets wrong, by data set and quantity, in physical units."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from phalanx.cli.console import print_json, print_lines, print_pairs
from phalanx.families.materials.data.trained_elements import untrained_in_words
from phalanx.families.materials.evaluation.network_predictions import split_errors
from phalanx.hardware.device import choose_device


def run_errors(
    *,
    checkpoint: Path,
    overrides: list[str] | None,
    split: Literal["train", "validation", "test"],
    samples: int | None,
    device: str,
    as_json: bool,
) -> None:
    """Run the subcommand; `phalanx.cli.options.models` declares its arguments."""
    where, found = split_errors(checkpoint, split, choose_device(device), samples=samples, overrides=overrides or ())
    if as_json:
        print_json({"checkpoint": str(where), "split": split, **found.as_dict()})
        return
    print_lines([f"{where} on the {split} split: {found.structures:,} structures, loss {found.loss:.5g}"])
    print_pairs([(f"{row.source} {row.quantity}", row.errors_in_words) for row in found.rows])
    print_lines((f"warning: {line}" for line in untrained_in_words(found.untrained or {})), style="yellow")
