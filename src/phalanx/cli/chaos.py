"""`phalanx chaos`: inject a mixture of faults into a real run, and say how each was found, named and recovered from."""

from __future__ import annotations

import json
import shlex
import statistics
from collections.abc import Iterator
from dataclasses import asdict

from phalanx.chaos.faults import KINDS, parse_kinds
from phalanx.chaos.run import ChaosOutcome, ChaosPlan, FaultOutcome, train_under_faults
from phalanx.cli.console import print_json, print_lines
from phalanx.cli.options.training import ChaosArguments
from phalanx.cli.ranks import require_no_ranks
from phalanx.errors import CheckFailed
from phalanx.files import write_atomically
from phalanx.formatting import format_percent
from phalanx.printable import write_stderr
from phalanx.report.table import Column, write_text_table


def run_chaos(asked: ChaosArguments) -> None:
    """Run the subcommand. Raises CheckFailed where a fault was not survived as it should be."""
    require_no_ranks(asked.nproc)
    plan = ChaosPlan(
        run=asked.run,
        words=tuple(asked.overrides or ()),
        ranks=asked.nproc * asked.nodes,
        nodes=asked.nodes,
        start=tuple(shlex.split(asked.start)),
        kinds=parse_kinds(asked.faults),
        seed=asked.seed,
        minutes=asked.minutes,
        most=asked.count,
        in_each=asked.in_each,
        folder=asked.out,
    )
    outcome = train_under_faults(plan, write_stderr)
    rows = [asdict(one) | {"survived": one.survived} for one in outcome.outcomes]
    found = asdict(outcome) | {"outcomes": rows}
    write_atomically(asked.out / "chaos.json", json.dumps(found, indent=1) + "\n")
    if asked.json:
        print_json(found)
    else:
        print_lines(write_table(outcome))
    # The table is printed first: whoever reads of a failure wants it.
    failed = [one for one in outcome.outcomes if not one.survived]
    if failed or outcome.failures:
        raise CheckFailed(f"{len(failed)} faults and {len(outcome.failures)} runs did not end as they should")


def _format_seconds(value: float | None) -> str:
    return "never" if value is None else f"{value:.1f}"


COLUMNS: tuple[Column[FaultOutcome], ...] = (
    Column("fault", lambda one: one.fault.kind, "left"),
    Column("run", lambda one: one.run),
    Column("rank", lambda one: one.fault.rank),
    Column("step", lambda one: one.fault.step),
    Column("detected (s)", lambda one: _format_seconds(one.detected_s)),
    Column("found as", lambda one: one.found_as or "nothing", "left"),
    Column("right", lambda one: "yes" if one.named_right else "no", "left"),
    Column("training again (s)", lambda one: _format_seconds(one.training_s)),
    Column(
        "same bits",
        lambda one: (
            "did not end" if one.same_bits is None else "yes" if one.same_bits else f"differs by {one.difference:.1e}"
        ),
        "left",
    ),
)


def _name_group(one: FaultOutcome) -> str:
    cause = KINDS[one.fault.kind].cause
    if cause is None:
        return "slow ranks" if one.fault.kind == "slow" else "flipped bits"
    return "hangs" if cause in ("hang", "stopped") else "ended ranks"


def write_table(outcome: ChaosOutcome) -> Iterator[str]:
    """Yield the table of all faults, and what they come to in sum."""
    yield from write_text_table(COLUMNS, outcome.outcomes, width=None)
    yield from outcome.failures
    rows = outcome.outcomes
    survived = sum(one.survived for one in rows)
    yield f"{survived} of {len(rows)} faults in {outcome.runs} runs were found, called right and left no trace"
    for words in ("ended ranks", "hangs", "flipped bits", "slow ranks"):
        some = [one for one in rows if _name_group(one) == words]
        for what, values in (
            ("detected after", [one.detected_s for one in some if one.detected_s is not None]),
            ("training again after", [one.training_s for one in some if one.training_s is not None]),
        ):
            if values:
                yield f"{words}: {what} {statistics.median(values):.1f} s (median), {max(values):.1f} s (longest)"
    if outcome.runs:
        share = format_percent(outcome.undisturbed_s / outcome.disturbed_s)
        yield (
            f"goodput {share}: a run took {outcome.disturbed_s:.0f} s with faults and {outcome.undisturbed_s:.0f} s "
            "without"
        )
