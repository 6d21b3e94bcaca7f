"""Every command that help texts, the README and the guides print: it is understood, and what it names is legal.

Cheap ones run as printed. Of the others, which train, measure or plan for minutes, arguments are parsed, the run file is
loaded with its overrides and the layout is resolved on as many ranks as the command starts. None is left out.
"""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import typer

from command_line import Call
from phalanx.cli.main import SUBCOMMANDS, app
from phalanx.config.load import load_run
from phalanx.config.schema import Run
from phalanx.families.registry import bind
from phalanx.hardware.machine import load_machine
from phalanx.layout.resolve import resolve_layout, stated_ranks
from phalanx.verification.verify_run import MOST_RANKS, with_small_batch
from token_data import write_token_folder

ROOT = Path(__file__).parents[2]
STANDS_FOR = {
    "run.yaml": "quickstart.yaml",
    "RUN.yaml": "quickstart.yaml",
    "finetune.yaml": "quickstart.yaml",
    "llama3-8b.yaml": "llama3-8b.yaml",
}
"""Names that guides give to the reader's own run file, and an example in its place."""
LARGE = "gpt-175b.yaml"
"""Stands for them where a plan or a search is for hundreds of devices."""
RUNS_AS_PRINTED = ("config", "launch", "data show", "data verify")
"""Subcommands that take a moment."""
RUNS_TOO = ("phalanx verify examples/quickstart.yaml tp=2 pp=2",)
"""Single commands that take some seconds."""
OWN_PACKAGE = "examples/own_model/"
"""Folder of the example that is a package of its own."""
IN_WEATHER = "climax-small.yaml"
"""Stands for the reader's own run file in the guide to weather."""


@dataclass(frozen=True)
class Printed:
    """One command as it is printed."""

    where: str
    text: str
    refused: bool
    """Whether the guide shows the error that it gives."""

    def __str__(self) -> str:
        return f"{self.where}: {self.text}"

    @property
    def words(self) -> list[str]:
        """The arguments of `phalanx`."""
        words = shlex.split(self.text)
        return words[words.index("phalanx") + 1 :]

    @property
    def ranks(self) -> int | None:
        """Ranks that the command starts: by torchrun, or by an option of its own."""
        found = re.search(r"--(?:nproc-per-node|nproc|devices) (\d+)", self.text)
        return int(found[1]) if found else None


def _commands(where: str, text: str) -> Iterator[Printed]:
    lines = text.replace("\\\n", " ").splitlines()
    for line, following in pairwise([*lines, ""]):
        stripped = line.strip().removeprefix("$ ")
        if not (line.startswith(("    ", "$ ")) or where.endswith("--help") or stripped == line):
            continue
        # Behind two blanks or a mark stands what the command is for.
        command = re.split(r"\s{2,}(?=[^-])|\s#\s", stripped)[0]
        # In brackets stands what may follow, in a line that is no command.
        if "[section.field=value" not in command and re.match(
            r"(phalanx [a-z]|torchrun .*-m phalanx |srun .*phalanx )", command
        ):
            yield Printed(where, command, following.strip().startswith("error:"))


def _in_code(text: str) -> str:
    """Return the code blocks of a guide, fenced and indented, and the commands in the second column of its tables."""
    fenced = "\n".join(re.findall(r"^```\w*\n(.*?)^```", text, re.MULTILINE | re.DOTALL))
    rest = re.sub(r"^```\w*\n.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    in_tables = re.findall(r"^\| [^|]+ \| `(phalanx [^`]+)` \|$", rest, re.MULTILINE)
    return "\n".join([fenced, *in_tables, *(line for line in rest.splitlines() if line.startswith("    "))])


@cache
def _printed() -> tuple[Printed, ...]:
    found = [
        command
        for guide in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
        # Its commands are all wrong: test_common_mistakes runs them.
        if guide.name != "mistakes.md"
        for command in _commands(guide.name, _in_code(guide.read_text("utf-8")))
    ]
    for verb in SUBCOMMANDS:
        found += [Printed(f"{verb.name} --help", text, refused=False) for text in verb.examples]
        found += [
            Printed(f"{verb.name} {name} --help", command.text, refused=False)
            for name, epilog in _epilogs(verb.name)
            for command in _commands("--help", epilog)
        ]
    return tuple(dict.fromkeys(found))


def _epilogs(verb: str) -> Iterator[tuple[str, str]]:
    """Examples of the subcommands of a subcommand."""
    group: Any = typer.main.get_command(app)
    context = group.make_context("phalanx", [verb, "--help-is-not-asked"], resilient_parsing=True)
    command = group.get_command(context, verb)
    with_subcommands = command.make_context(verb, [], parent=context, resilient_parsing=True).command
    for name, each in getattr(with_subcommands, "commands", {}).items():
        yield name, each.epilog or ""


def test_all_commands_are_found() -> None:
    found = [str(command) for command in _printed()]
    for known in (
        "train --help: torchrun --nproc-per-node 8 -m phalanx train examples/quickstart.yaml",
        "config check --help: phalanx config check examples/quickstart.yaml",
        "README.md: phalanx train examples/llama3-8b.yaml --nproc 8",
        "verify.md: phalanx verify RUN.yaml tp=2 pp=2 dp_shard=2",
        "doctor.md: srun --ntasks-per-node=8 phalanx doctor --cluster frontier",
    ):
        assert known in found
    assert len(found) > 120


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as commands expect it: the examples, run files by the guides' names, and prepared text."""
    folder = tmp_path_factory.mktemp("clone")
    shutil.copytree(ROOT / "examples", folder / "examples")
    for name, example in STANDS_FOR.items():
        shutil.copy(ROOT / "examples" / example, folder / name)
    for name in ("text", "texts", "python-stdlib"):
        write_token_folder(folder / "data" / name)
    return folder


@pytest.mark.parametrize("command", _printed(), ids=str)
def test_a_printed_command_works(command: Printed, clone: Path, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(clone)
    words = ["quickstart.yaml" if word == "..." else word for word in command.words]
    verb = words[0]
    if OWN_PACKAGE in command.text:
        # Its run files need the installed package; tests/examples/test_own_model.py installs it and runs these commands.
        assert _parsed(words)
        return
    if " ".join(words).startswith(RUNS_AS_PRINTED) or command.text in RUNS_TOO:
        outcome = call(*words)
        assert outcome.code == (2 if command.refused else 0), outcome.err
        return
    options = _parsed(words)
    file = options.get("run")
    if file is None or Path(file).suffix != ".yaml":
        return
    own = command.where == "weather.md" and Path(file).name == "run.yaml"
    place = Path("examples", IN_WEATHER) if own else _run_file(Path(file), options)
    run = load_run(place, options.get("overrides") or options.get("layout") or [])
    if run.layout.branch_groups == "auto":
        # Sizes by cost are read from prepared data; the guide gives those of this example.
        run = run.model_copy(update={"layout": run.layout.model_copy(update={"branch_groups": [2, 1, 1]})})
    if options.get("cluster") is not None:
        load_machine(options["cluster"])
    if verb in ("train", "dryrun", "bench"):
        resolve_layout(bind(run), command.ranks or 1)
    if verb == "verify":
        _require_verifiable(run, command, options["all_ranks"], full=options["full"])


def _parsed(words: list[str]) -> dict[str, Any]:
    """What the subcommand makes of its arguments. Raises typer's usage errors."""
    group: Any = typer.main.get_command(app)
    context = group.make_context("phalanx", [words[0]], resilient_parsing=True)
    command = group.get_command(context, words[0])
    inner = command.make_context(words[0], words[1:], parent=context)
    if hasattr(inner.command, "commands"):
        name, subcommand, rest = inner.command.resolve_command(inner, words[1:])
        inner = subcommand.make_context(name, rest, parent=inner)
    parameters: dict[str, Any] = inner.params
    return parameters


def _run_file(file: Path, options: dict[str, Any]) -> Path:
    if file.exists() and (options.get("devices") or 1) < 64 and "cluster" not in options:
        return file
    return Path("examples") / (file.name if (Path("examples") / file.name).exists() else LARGE)


def _require_verifiable(run: Run, command: Printed, ranks: int | None, *, full: bool) -> None:
    """As `verify` starts it: on as many ranks as the degrees multiply to, with a batch of the small model's own."""
    ranks = ranks or command.ranks or stated_ranks(run)
    assert command.text.startswith(("torchrun", "srun")) or ranks <= MOST_RANKS
    resolve_layout(bind(run if full else with_small_batch(run, ranks)), ranks)
