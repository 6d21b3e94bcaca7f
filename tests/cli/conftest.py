"""How the command-line tests call the program."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from phalanx.cli.main import run


@dataclass(frozen=True)
class Outcome:
    code: int
    out: str
    err: str


Call = Callable[..., Outcome]


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Call:
    """Runs `phalanx ARGUMENTS` in this process."""

    def _call(*arguments: str) -> Outcome:
        capsys.readouterr()
        code = run(arguments)
        captured = capsys.readouterr()
        return Outcome(code, captured.out, captured.err)

    return _call
