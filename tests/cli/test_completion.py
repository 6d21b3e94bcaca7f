"""Completion in real shells: bash always, zsh and fish where they are installed."""

from __future__ import annotations

import os
import pty
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import typer

from cli.terminal import ROOT
from phalanx.cli.main import SUBCOMMANDS, Subcommand, app

EXPECTED = {
    "phalanx tr\t": "train",
    "phalanx config list gpt-17\t": "gpt-175b",
    "phalanx train climax-sm\t": "climax-small.yaml",
    # After a field no blank follows, so that its value can be typed and completed.
    "phalanx config check text-30m.yaml layout.recomp\tsel\t": "layout.recompute=selective",
    "phalanx train text-30m.yaml recompute=f\t": "recompute=full",
    "phalanx train text-30m.yaml model.preset=llama3-4\t": "model.preset=llama3-405b",
    # The run file says which family's fields there are.
    "phalanx train climax-small.yaml model.aggregation=h\t": "model.aggregation=hierarchical",
    "phalanx plan text-30m.yaml --cluster front\t": "frontier",
}
"""What is typed, and the last word of the line that it becomes."""
PREPARE = {
    "bash": ("--norc", "--noprofile", "-i"),
    "zsh": ("-f", "-i"),
}
BEGIN = {
    "bash": "bind 'set enable-bracketed-paste off'; bind 'set show-all-if-ambiguous off'",
    "zsh": "bindkey -e; autoload -Uz compinit; compinit -u -D",
}
SHELLS = [shell for shell in PREPARE if shutil.which(shell)]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with two run files, in which the shell starts; `phalanx` is the program of these sources."""
    for name in ("text-30m.yaml", "climax-small.yaml"):
        shutil.copy(ROOT / "examples" / name, tmp_path)
    program = tmp_path / "bin" / "phalanx"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m phalanx "$@"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "src"))
    monkeypatch.setenv("TERM", "dumb")
    return tmp_path


def _type_in_shell(command: Sequence[str], lines: Sequence[str], folder: Path) -> str:
    """Type the lines ahead in a terminal, and return all that appears on it when the shell has ended."""
    ours, theirs = pty.openpty()
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, cwd=folder, start_new_session=True):
        os.close(theirs)
        os.write(ours, "".join(f"{line}\n" for line in [*lines, "exit"]).encode())
        shown = b""
        try:
            while chunk := os.read(ours, 65536):
                shown += chunk
        except OSError:
            pass  # so Linux says that the shell has closed its side
    os.close(ours)
    return shown.decode()


@pytest.mark.parametrize("shell", SHELLS)
def test_a_line_is_completed_as_it_is_typed(shell: str, folder: Path) -> None:
    begin = [
        f"{BEGIN[shell]}; source <(phalanx completion {shell})",
        """told() { printf '\\ntold:%s:\\n' "${@: -1}"; }""",
    ]
    # Completed, the line becomes the arguments of a function that tells the last one: Ctrl-A goes to its beginning.
    shown = _type_in_shell([shell, *PREPARE[shell]], [*begin, *(f"{line}\x01told " for line in EXPECTED)], folder)
    assert re.findall(r"^told:(.*):\r?$", shown, re.MULTILINE) == list(EXPECTED.values()), shown


@pytest.mark.parametrize("shell", [shell for shell in ("fish",) if shutil.which(shell)])
def test_fish_offers_the_same(shell: str, folder: Path) -> None:
    lines = [line.split("\t")[0] for line in EXPECTED if "climax-sm\t" not in line]
    asked = "; ".join(f"complete --do-complete '{line}'" for line in lines)
    script = f"phalanx completion fish | source; {asked}"
    done = subprocess.run([shell, "--no-config", "-c", script], cwd=folder, capture_output=True, text=True, check=True)
    offered = [line.split("\t")[0] for line in done.stdout.splitlines()]
    expected = [word for word in EXPECTED.values() if word != "climax-small.yaml"]
    assert offered == ["layout.recompute=" if word == "layout.recompute=selective" else word for word in expected]


@pytest.mark.parametrize("subcommand", SUBCOMMANDS, ids=lambda subcommand: subcommand.name)
def test_every_argument_can_be_completed(subcommand: Subcommand) -> None:
    """What a parameter proposes is computed only when it is completed: nothing else finds a name that is not there."""
    group: Any = typer.main.get_command(app)
    context = group.make_context("phalanx", [subcommand.name], resilient_parsing=True)
    inner = group.get_command(context, subcommand.name).make_context(
        subcommand.name, [], parent=context, resilient_parsing=True
    )
    proposed = {one.name: one.shell_complete(inner, "") for one in inner.command.params}
    if "cluster" in proposed:
        assert "frontier" in [item.value for item in proposed["cluster"]] or subcommand.name in ("doctor", "calibrate")


def test_completion_loads_nothing_that_computes() -> None:
    program = (
        "import sys\nfrom phalanx.cli.main import main\ntry: main()\nfinally: print(*sys.modules, file=sys.stderr)"
    )
    asked = {
        "_PHALANX_COMPLETE": "complete_fish",
        "_TYPER_COMPLETE_FISH_ACTION": "get-args",
        "_TYPER_COMPLETE_ARGS": "phalanx train examples/text-30m.yaml layout.m",
    }
    environment = {**os.environ, **asked}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.stdout.split() == ["layout.microbatch="]
    assert "phalanx.config.load" in done.stderr.split()
    assert not {"torch", "numpy", "scipy"} & set(done.stderr.split())
