"""`phalanx verify`: prove that a layout computes what one rank computes."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator

from phalanx.cli.console import print_json, print_lines
from phalanx.cli.options.planning import VerifyArguments
from phalanx.config.load import load_run
from phalanx.config.schema import Run
from phalanx.errors import CheckFailed, ConfigError
from phalanx.families.language.config import require_language
from phalanx.families.language.evaluation.width_check import FLAT, STEPS, WidthCheck, check_widths
from phalanx.files import write_atomically
from phalanx.layout.mesh import ranks_from_environment
from phalanx.report.page_sections import CHECK_FILE
from phalanx.verification.verify_run import Options, Outcome, Verdict, verify_run

_NAMED = 5
"""Failed checks that are listed before they are only counted."""


def run_verify(asked: VerifyArguments) -> None:
    """Run the subcommand."""
    loaded = load_run(asked.run, asked.layout or [])
    if asked.widths is not None:
        _compare_widths(asked, loaded)
        return
    options = Options(
        ranks=asked.all_ranks or asked.nproc,
        everything=asked.all_ranks is not None,
        full=asked.full,
        precision=asked.precision,
        steps=asked.steps,
        timeout_s=asked.timeout,
        progress=asked.all_ranks is not None and sys.stderr.isatty(),
    )
    outcome = verify_run(loaded, options)
    failed = [verdict for verdict in outcome.verdicts if not verdict.passed]
    # under torchrun every rank gets here
    if ranks_from_environment().first:
        if asked.json:
            print_json(
                {
                    "ranks": outcome.ranks,
                    "model": outcome.model,
                    "passed": not failed,
                    "layouts": [verdict.as_dict() for verdict in outcome.verdicts],
                }
            )
        else:
            print_lines(_write_outcome(outcome))
    if failed:
        raise CheckFailed(f"{len(failed)} of {len(outcome.verdicts)} layouts differ from one rank: {failed[0].first}")


def _compare_widths(asked: VerifyArguments, loaded: Run) -> None:
    """Check muP over widths, print what was found, and leave it in the folder of a run for its report."""
    if not re.fullmatch(r"\d{1,6}(,\d{1,6})*", asked.widths or ""):
        raise ConfigError(f"--widths {asked.widths}: write widths with commas between, such as 128,256,512,1024")
    found = check_widths(require_language(loaded, "--widths"), [int(width) for width in str(asked.widths).split(",")])
    if asked.run.is_dir():
        write_atomically(asked.run / CHECK_FILE, json.dumps(found.as_dict(), indent=1) + "\n")
    if asked.json:
        print_json(found.as_dict())
    else:
        print_lines(_write_widths(found))
    if not found.passed:
        growth = found.growth["muP"]["logits"]
        raise CheckFailed(f"under muP the change of the logits goes as width^{growth:.2f}, beyond width^{FLAT:g}")


def _write_widths(found: WidthCheck) -> Iterator[str]:
    """Yield a line for each width, and how the changes grow."""
    yield f"change of the logits in {STEPS} steps at a rate of {found.lr:g}, root mean square"
    yield f"{'width':>8}" + "".join(f"{name:>10}" for name in found.changes)
    for place, width in enumerate(found.widths):
        yield f"{width:>8}" + "".join(f"{parts['logits'][place]:>10.4g}" for parts in found.changes.values())
    growth = {name: parts["logits"] for name, parts in found.growth.items()}
    yield f"it goes as width^{growth['muP']:.2f} under muP, and as width^{growth['usual']:.2f} without"


def _write_outcome(outcome: Outcome) -> Iterator[str]:
    """Yield what was compared, a line or more for each layout, and how many passed."""
    yield f"{outcome.ranks} ranks against one; model: {outcome.model}"
    yield f"bound on relative errors: {outcome.verdicts[0].bound}"
    for verdict in outcome.verdicts:
        yield from _write_verdict(verdict)
    passed = sum(verdict.passed for verdict in outcome.verdicts)
    yield f"{passed} of {len(outcome.verdicts)} layouts compute what one rank computes"
    if outcome.fixed:
        yield f"tried with {outcome.fixed} alone: --all varies degrees, schedule, zero, resharding and context"


def _write_verdict(verdict: Verdict) -> list[str]:
    worst = verdict.worst("gradient")
    assert worst is not None
    furthest = verdict.worst("choices")
    if verdict.otherwise is None or furthest is None:
        replayed = []
    else:
        some, total = verdict.otherwise
        line = f"      experts as on one rank: {some:,} of {total:,} choices would have been others"
        if some:
            line += f", by at most {furthest.error:.1e} deviations of the logits ({furthest.name})"
            line += f", bound {furthest.bound:.1e}"
        replayed = [line]
    if verdict.passed:
        margin = f"largest gradient error {worst.error:.1e} ({worst.name}), bound {worst.bound:.1e}"
        return [f"PASS  {verdict.in_words}  {margin}, {verdict.seconds:.1f} s", *replayed]
    # Checks stand in the order in which a mistake would show: the first one that fails is nearest to it.
    failed = [check for check in verdict.checks if not check.passed]
    lines = [f"FAIL  {verdict.in_words}", f"      first module out of its bound: {verdict.module or 'none'}"]
    lines.append(f"      first: {failed[0]}")
    lines += [f"      then:  {check}" for check in failed[1:_NAMED]]
    if len(failed) > _NAMED:
        lines.append(f"      and {len(failed) - _NAMED} more of {len(verdict.checks)} checks")
    return lines + replayed
