"""Prints an ensemble for a person at a terminal."""

from __future__ import annotations

from typing import Any

from phalanx.cli.console import print_lines, print_table
from phalanx.families.materials.data.trained_elements import untrained_in_words
from phalanx.report.ensemble_page import saved_share, scale_label
from phalanx.report.formatting import format_number, format_percent
from phalanx.report.table import Column

Row = dict[str, Any]


def print_ensemble(facts: Row) -> None:
    """Print members, errors beside the best member's, and what calibration came to."""
    if facts["family"] == "weather":
        print_lines([f"{len(facts['members'])} members:"])
        print_lines(f"  {member['checkpoint']}" for member in facts["members"])
        print_table(FORECAST_COLUMNS, facts["forecasts"])
    elif facts["family"] == "language":
        print_lines([f"{len(facts['members'])} members on the {facts['split']} split, {facts['tokens']:,} tokens:"])
        print_lines(f"  loss {member['loss']:.4f}  {member['checkpoint']}" for member in facts["members"])
        compared = compare_with_best(facts["loss"], facts["best_member_loss"])
        mean = f"their mean (perplexity {format_number(facts['perplexity'])})"
        print_lines([f"  loss {facts['loss']:.4f}  {mean}, {compared}"])
    else:
        _print_materials(facts)


def _print_materials(facts: Row) -> None:
    members, selection = facts["members"], facts["selection"]
    print_lines([f"{len(members)} of {len(facts['candidates'])} candidates:"])
    print_lines(f"  {member['weight']:>6.3f}  {member['checkpoint']}" for member in members)
    if len(members) > 1 and max(member["weight"] for member in members) == 1.0:
        warning = (
            "warning: all weight is on one member, so that members never differ and uncertainties are the same everywhere; "
            "take --weights equal, or other members"
        )
        print_lines([warning], style="yellow")
    if selection["by_score"] and set(selection["by_score"]) != set(selection["members"]):
        ours, others = selection["validation_error"][-1], selection["by_score_validation_error"][-1]
        print_lines([f"validation error, relative: {ours:.4f}, {others:.4f} by score alone"])
    print_table(LABEL_COLUMNS, [scale_label(label) for label in facts["labels"]])
    for split, found in facts["untrained_elements"].items():
        print_lines((f"warning: {split} split, {line}" for line in untrained_in_words(found)), style="yellow")


LABEL_COLUMNS: tuple[Column[Row], ...] = (
    Column("on the test split", lambda row: row["name"], "left"),
    Column("MAE", lambda row: format_number(row["scores"]["mae"])),
    Column("best one", lambda row: format_number(row["best_member"]["mae"])),
    Column("saved", lambda row: f"{saved_share(row):+.1%}"),
    Column("90% width", lambda row: format_number(row["scores"]["sharpness"])),
    Column("CRPS", lambda row: format_number(row["scores"]["crps"])),
    Column("50%", lambda row: format_percent(row["scores"]["coverage"]["0.5"])),
    Column("90%", lambda row: format_percent(row["scores"]["coverage"]["0.9"])),
    Column(
        "90% conf.",
        lambda row: (
            "-" if row["conformal"]["0.9"]["coverage"] is None else format_percent(row["conformal"]["0.9"]["coverage"])
        ),
    ),
    Column("rank", lambda row: f"{row['scores']['rank_correlation']:.2f}"),
    Column("calibration", lambda row: f"{row['calibration']['kind']}; {row['unit']}", "left"),
)


def _saved_rmse(row: Row) -> float:
    best = row["best_member_rmse"]
    return 1.0 - float(row["scores"]["rmse"]) / float(best) if best else 0.0


FORECAST_COLUMNS: tuple[Column[Row], ...] = (
    Column("on the test split", lambda row: row["variable"], "left"),
    Column("hours", lambda row: row["lead_hours"]),
    Column("RMSE", lambda row: format_number(row["scores"]["rmse"])),
    Column("best one", lambda row: format_number(row["best_member_rmse"])),
    Column("saved", lambda row: f"{_saved_rmse(row):+.1%}"),
    Column("CRPS", lambda row: format_number(row["scores"]["crps"])),
    Column("as is", lambda row: format_number(row["raw"]["crps"])),
    Column("spread/error", lambda row: f"{row['scores']['spread_skill']:.2f}"),
    Column("as is", lambda row: f"{row['raw']['spread_skill']:.2f}"),
)


def compare_with_best(loss: float, best: float) -> str:
    """Return how the ensemble's loss compares with that of its best member."""
    if loss <= best:
        return f"{best - loss:.4f} below that of the best member"
    return f"{loss - best:.4f} above that of the best member: worse than it alone"
