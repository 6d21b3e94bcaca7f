"""`phalanx init`: five questions, and a run file with comments."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from phalanx.cli.console import print_error, print_lines, write_file
from phalanx.cli.options.starting import InitArguments
from phalanx.config.families import DEFAULT_FAMILY
from phalanx.config.starting_run import (
    GOALS,
    Answers,
    family_presets,
    find_start,
    read_data,
    read_devices,
    read_goal,
    read_size,
    starting_families,
    write_starting_run,
)
from phalanx.errors import ConfigError

Known = dict[str, Any]
"""Answers to the questions before, by option."""


@dataclass(frozen=True)
class Question:
    """One question, which an option of the same name answers too."""

    option: str
    text: str
    choices: Callable[[Known], str]
    """What may be answered, in words."""
    default: Callable[[Known], str]
    read: Callable[[str, Known], Any]
    """Turns an answer into a value; raises ConfigError for a wrong one."""
    needs: frozenset[str] = frozenset()
    """Questions whose answers it is read with."""


def _read_family(text: str, _: Known) -> str:
    find_start(text)
    return text


QUESTIONS = (
    Question(
        "family",
        "What do you train?",
        lambda _: ", ".join(starting_families()),
        lambda _: DEFAULT_FAMILY,
        _read_family,
    ),
    Question(
        "data",
        "Where are the training data?",
        lambda known: (
            f"a path or an address; where {find_start(known['family'])['data']} is not there, a sample is made"
        ),
        lambda known: str(find_start(known["family"])["data"]),
        lambda text, _: read_data(text),
    ),
    Question(
        "devices",
        "On what devices?",
        lambda _: "cpu, a number of accelerators of this machine, or CLUSTER:NUMBER as in frontier:64",
        lambda _: "1",
        lambda text, _: read_devices(text),
    ),
    Question(
        "goal",
        "What for?",
        lambda _: "; ".join(f"{name}: {meaning}" for name, meaning in GOALS.items()),
        lambda _: "try",
        lambda text, _: read_goal(text),
    ),
    Question(
        "size",
        "How large, or how long may it take?",
        lambda known: (
            f"{', '.join(family_presets(known['family']))}; or hours as in 12h (language models on a cluster)"
        ),
        lambda known: str(find_start(known["family"])["preset"]),
        lambda text, known: read_size(text, known["family"], known["devices"]),
        frozenset({"family", "devices"}),
    ),
)


def run_init(asked: InitArguments) -> None:
    """Run the subcommand."""
    _require_new(asked.file)
    starting = write_starting_run(Answers(**_answer_questions(asked)), asked.file)
    # Somebody may have written it while the questions were read.
    _require_new(asked.file)
    write_file(asked.file, starting.text)
    print_lines([f"{asked.file} is written; next:"], style="green")
    print_lines(f"  {command}" for command in starting.commands)
    if starting.remark is not None:
        print_lines([starting.remark])


def _answer_questions(asked: InitArguments) -> Known:
    """Return the value of each answer, from the options or the terminal.

    Raises ConfigError for a wrong option, and where a question is open and there is no terminal to ask it on.
    """
    missing = [f"--{one.option}" for one in QUESTIONS if getattr(asked, one.option) is None]
    if missing and not sys.stdin.isatty():
        raise ConfigError(
            f"phalanx init asks on a terminal, and there is none; give {', '.join(missing)} (phalanx init --help)"
        )
    known: Known = {}
    # Options first: nobody answers questions to be refused for what stood on the command line.
    for question in QUESTIONS:
        given = getattr(asked, question.option)
        if given is not None and known.keys() >= question.needs:
            known[question.option] = question.read(given, known)
    for question in (one for one in QUESTIONS if one.option not in known):
        given = getattr(asked, question.option)
        if given is not None:
            known[question.option] = question.read(given, known)
            continue
        print_lines([question.text], style="bold")
        print_lines([f"  {question.choices(known)}"])
        while question.option not in known:
            answer = typer.prompt(" ", default=question.default(known), prompt_suffix="> ")
            try:
                known[question.option] = question.read(str(answer).strip(), known)
            except ConfigError as error:
                print_error(str(error))
    return known


def _require_new(file: Path) -> None:
    if file.exists() or file.is_symlink():
        raise ConfigError(f"{file} is there already; name another file: phalanx init {shlex.quote(f'new-{file.name}')}")
