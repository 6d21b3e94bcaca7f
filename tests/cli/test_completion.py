"""Completion: what each shell's script asks, and in real shells: bash always, zsh and fish where they are installed."""

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
from phalanx.cli.main import SUBCOMMANDS, Subcommand, app, run_command_line

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
OF_PATHS = "phalanx train climax-sm\t"
"""Of these the shell completes names of files itself."""
IN_SHELLS = [line for line in EXPECTED if "recomp\t" in line or "preset=" in line or line in ("phalanx tr\t", OF_PATHS)]
"""Those that are typed in real shells: a word, a name of a file, a field and then its value, and a value behind its =."""
PREPARE = {
    "bash": ("--norc", "--noprofile", "-i"),
    "zsh": ("-f", "-i"),
}
BEGIN = {
    "bash": "bind 'set enable-bracketed-paste off'; bind 'set show-all-if-ambiguous off'",
    "zsh": "bindkey -e; autoload -Uz compinit; compinit -u -D",
}
SHELLS = ("bash", "zsh", "fish")


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


@pytest.mark.parametrize("shell", [shell for shell in SHELLS if shutil.which(shell)])
def test_a_line_is_completed_as_it_is_typed(shell: str, folder: Path) -> None:
    if shell == "fish":
        _ask_fish(folder)
        return
    begin = [
        f"{BEGIN[shell]}; source <(phalanx completion {shell})",
        """told() { printf '\\ntold:%s:\\n' "${@: -1}"; }""",
    ]
    # Completed, the line becomes the arguments of a function that tells the last one: Ctrl-A goes to its beginning.
    shown = _type_in_shell([shell, *PREPARE[shell]], [*begin, *(f"{line}\x01told " for line in IN_SHELLS)], folder)
    expected = [EXPECTED[line] for line in IN_SHELLS]
    assert re.findall(r"^told:(.*):\r?$", shown, re.MULTILINE) == expected, shown


def _ask_fish(folder: Path) -> None:
    """fish says without a terminal what it offers."""
    asked = "; ".join(f"complete --do-complete '{line.partition(chr(9))[0]}'" for line in IN_SHELLS)
    script = f"phalanx completion fish | source; {asked}"
    command = ["fish", "--no-config", "-c", script]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True, timeout=120)
    offered = [line.split("\t")[0] for line in done.stdout.splitlines()]
    assert offered == [_first_answer(line) for line in IN_SHELLS]


def _first_answer(line: str) -> str:
    """Return what is offered where a line is completed for the first time."""
    return "layout.recompute=" if line.count("\t") > 1 else EXPECTED[line]


@pytest.mark.parametrize("shell", SHELLS)
def test_what_each_script_asks_is_answered(
    shell: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The protocol by which a script asks, with the variables that it sets itself, whether or not there is such a shell."""
    assert run_command_line(["completion", shell]) == 0
    script = capsys.readouterr().out
    fixed = dict(re.findall(r"\b(_\w+)=([a-z][\w-]*)", script))
    assert fixed and re.search(r'\b_TYPER_COMPLETE_ARGS="', script)
    monkeypatch.chdir(folder)
    for name, value in fixed.items():
        monkeypatch.setenv(name, value)
    for line in EXPECTED:
        monkeypatch.setenv("_TYPER_COMPLETE_ARGS", line.partition("\t")[0])
        with pytest.raises(SystemExit):
            run_command_line([])
        answers = [answer.split("\t")[0] for answer in capsys.readouterr().out.splitlines()]
        assert answers == ([""] if line == OF_PATHS else [_first_answer(line)]), line


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
