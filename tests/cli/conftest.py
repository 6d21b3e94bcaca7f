"""How the command-line tests call the program."""

from __future__ import annotations

import pytest

from command_line import Call, Outcome
from phalanx.cli.main import run_command_line


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Call:
    """Runs `phalanx ARGUMENTS` in this process."""

    def _call(*arguments: str) -> Outcome:
        capsys.readouterr()
        code = run_command_line(arguments)
        captured = capsys.readouterr()
        err, mark, page = captured.err.rpartition("read on: ")
        return (
            Outcome(code, captured.out, err, page.rstrip("\n")) if mark else Outcome(code, captured.out, captured.err)
        )

    return _call
