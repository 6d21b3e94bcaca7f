"""Errors a user can cause, and the exit code each ends the program with.

The command line prints `str(error)` of a `PhalanxError` and nothing else: no traceback. Anything that is not a
`PhalanxError` is a defect of ours and keeps its traceback.
"""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches


class PhalanxError(Exception):
    """A failure whose message is meant for the user: it names the field or file, the value found and the fix.

    `exit_code` is what the command line ends with: 1 failed while running, 2 bad usage or configuration, 3 a check
    (verify, doctor) did not pass, 128 + a signal's number stopped by that signal with everything saved.
    """

    exit_code = 1


class Interrupted(PhalanxError):
    """What was asked to stop has done so in good order, and the same command goes on from there. No failure.

    Ends with 128 + the signal's number, as shells expect; after SIGTERM, SIGUSR1 and SIGUSR2 a job may queue itself again.
    """

    def __init__(self, message: str, signal_number: int) -> None:
        super().__init__(message)
        self.exit_code = 128 + signal_number


class ConfigError(PhalanxError):
    """The run file, an override or a command-line argument is wrong. Raised before anything is allocated."""

    exit_code = 2


class DataError(PhalanxError):
    """Training data is missing, truncated or altered."""


class CheckpointError(PhalanxError):
    """A checkpoint is missing, incomplete, altered, hostile, or does not belong to this model."""


class CheckpointDamaged(CheckpointError):
    """What is on disk is not what was written: altered, truncated, missing, unreadable or made up.

    The one error that makes a run fall back to an older checkpoint. A checkpoint that is sound but belongs to another model
    raises a plain CheckpointError: an older one would not help either.
    """


class CheckFailed(PhalanxError):
    """A check (verify, doctor) ran to its end and did not pass."""

    exit_code = 3


def nearest_names(name: str, known: Sequence[str]) -> list[str]:
    """Return up to three of `known` that look most like `name`, best first."""
    return get_close_matches(name, known, n=3, cutoff=0.6)
