"""`phalanx verify`: prove that a layout computes what one rank computes."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from phalanx.cli.console import print_json, print_lines
from phalanx.cli.options.planning import VerifyArguments
from phalanx.config.load import load_run
from phalanx.errors import CheckFailed
from phalanx.layout.mesh import ranks_from_environment
from phalanx.verification.verify_run import Options, Outcome, Verdict, verify_run

_NAMED = 5
"""Failed checks that are listed before they are only counted."""


def run_verify(asked: VerifyArguments) -> None:
    """Run the subcommand."""
    loaded = load_run(asked.run, asked.layout or [])
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
    replayed = _write_choices(verdict)
    if verdict.passed:
        margin = f"largest gradient error {worst.error:.1e} ({worst.name}), bound {worst.bound:.1e}"
        return [f"PASS  {verdict.in_words}  {margin}, {verdict.seconds:.1f} s", *replayed]
    failed = [check for check in verdict.checks if not check.passed]
    lines = [f"FAIL  {verdict.in_words}", f"      first module out of its bound: {verdict.module or 'none'}"]
    lines.append(f"      first: {failed[0]}")
    lines += [f"      then:  {check}" for check in failed[1:_NAMED]]
    if len(failed) > _NAMED:
        lines.append(f"      and {len(failed) - _NAMED} more of {len(verdict.checks)} checks")
    return lines + replayed


def _write_choices(verdict: Verdict) -> list[str]:
    """Return a line on tokens that would have gone to other experts; none for a dense model."""
    furthest = verdict.worst("choices")
    if verdict.otherwise is None or furthest is None:
        return []
    some, total = verdict.otherwise
    line = f"      experts as on one rank: {some:,} of {total:,} choices would have been others"
    if some:
        line += (
            f", by at most {furthest.error:.1e} deviations of the logits ({furthest.name}), bound {furthest.bound:.1e}"
        )
    return [line]
