"""An ensemble as a person reads it in a terminal."""

from __future__ import annotations

from typing import Any

from phalanx.cli.console import output
from phalanx.families.materials.data.trained_elements import untrained_in_words
from phalanx.report.formatting import format_number, format_percent

Row = dict[str, Any]


def print_ensemble(facts: Row) -> None:
    """Members, errors beside the best member's, and what calibration came to."""
    if facts["family"] == "weather":
        _print_forecasts(facts)
        return
    if facts["family"] == "language":
        _print_losses(facts)
        return
    console = output()
    selection, labels = facts["selection"], facts["labels"]
    console.print(f"{len(facts['members'])} of {len(facts['candidates'])} candidates:")
    for member in facts["members"]:
        console.print(f"  {member['weight']:>6.3f}  {member['checkpoint']}", soft_wrap=True)
    if len(facts["members"]) > 1 and max(member["weight"] for member in facts["members"]) == 1.0:
        console.print(
            "warning: all weight is on one member, so that members never differ and uncertainties are the same everywhere; "
            "take --weights equal, or other members",
            style="yellow",
            soft_wrap=True,
        )
    if selection["by_score"] and set(selection["by_score"]) != set(selection["members"]):
        console.print(
            f"validation error, relative: {selection['validation_error'][-1]:.4f}, "
            f"{selection['by_score_validation_error'][-1]:.4f} by score alone"
        )
    console.print(
        f"  {'on the test split':<24}{'MAE':>10}{'best one':>10}{'saved':>8}{'90% width':>11}{'CRPS':>10}"
        f"{'50%':>8}{'90%':>8}{'90% conf.':>11}{'rank':>7}  calibration"
    )
    for label in labels:
        console.print(_line(label), soft_wrap=True)
    for split, found in facts["untrained_elements"].items():
        for line in untrained_in_words(found):
            console.print(f"warning: {split} split, {line}", style="yellow", soft_wrap=True)


def _line(label: Row) -> str:
    scale, unit = (1.0, label["unit"]) if not label["unit"].startswith("eV") else (1e3, f"m{label['unit']}")
    scores, best = label["scores"], label["best_member"]["mae"]
    conformal = label["conformal"]["0.9"]["coverage"]
    saved = 1.0 - scores["mae"] / best if best else 0.0
    return (
        f"  {label['source'] + ' ' + label['quantity']:<24}{format_number(scale * scores['mae']):>10}"
        f"{format_number(scale * best):>10}{saved:>+8.1%}{format_number(scale * scores['sharpness']):>11}"
        f"{format_number(scale * scores['crps']):>10}"
        f"{format_percent(scores['coverage']['0.5']):>8}{format_percent(scores['coverage']['0.9']):>8}"
        f"{'-' if conformal is None else format_percent(conformal):>11}{scores['rank_correlation']:>7.2f}"
        f"  {label['calibration']['kind']}; {unit}"
    )


def _print_forecasts(facts: Row) -> None:
    console = output()
    console.print(f"{len(facts['members'])} members:")
    for member in facts["members"]:
        console.print(f"  {member['checkpoint']}", soft_wrap=True)
    console.print(
        f"  {'on the test split':<28}{'hours':>6}{'RMSE':>12}{'best one':>12}{'saved':>8}{'CRPS':>12}{'as is':>12}"
        f"{'spread/error':>14}{'as is':>8}"
    )
    for row in facts["forecasts"]:
        raw, scores, best = row["raw"], row["scores"], row["best_member_rmse"]
        saved = 1.0 - scores["rmse"] / best if best else 0.0
        console.print(
            f"  {row['variable']:<28}{row['lead_hours']:>6}{format_number(scores['rmse']):>12}{format_number(best):>12}{saved:>+8.1%}"
            f"{format_number(scores['crps']):>12}{format_number(raw['crps']):>12}{scores['spread_skill']:>14.2f}"
            f"{raw['spread_skill']:>8.2f}"
        )


def _print_losses(facts: Row) -> None:
    console = output()
    console.print(f"{len(facts['members'])} members on the {facts['split']} split, {facts['tokens']:,} tokens:")
    for member in facts["members"]:
        console.print(f"  loss {member['loss']:.4f}  {member['checkpoint']}", soft_wrap=True)
    console.print(
        f"  loss {facts['loss']:.4f}  their mean (perplexity {format_number(facts['perplexity'])}), "
        f"{compared_with_best(facts['loss'], facts['best_member_loss'])}"
    )


def compared_with_best(loss: float, best: float) -> str:
    """How the ensemble's loss compares with that of its best member."""
    if loss <= best:
        return f"{best - loss:.4f} below that of the best member"
    return f"{loss - best:.4f} above that of the best member: worse than it alone"
