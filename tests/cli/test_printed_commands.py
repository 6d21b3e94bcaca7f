"""Every command that help texts, the README and the guides print: it is understood, and what it names is legal.

Cheap ones run as printed, those of a trained run of text on a small one in its place. Of the others, which train, measure or
plan for minutes, arguments are parsed, the run file is loaded with its overrides and the layout is resolved on as many ranks
as the command starts. None is left out.
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
from phalanx.cli.main import SUBCOMMANDS, app, run_command_line
from phalanx.config.load import load_run
from phalanx.config.schema import Run
from phalanx.families.registry import bind
from phalanx.hardware.machine import load_machine
from phalanx.layout.resolve import resolve_layout, stated_ranks
from phalanx.verification.verify_run import MOST_RANKS, with_small_batch
from token_data import write_run_file, write_token_folder

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
WRITES_A_FILE = ("init ", "completion", "data sample icl", "convert")
"""Commands that take a moment, and want no file to be there where they write theirs."""
RUNS_AS_PRINTED = ("config", "launch", "data show", "data verify", *WRITES_A_FILE[:-1])
"""Commands that take a moment."""
OF_A_RUN = ("evaluate", "generate", "convert", "report", "watch", "errors", "forecast")
"""Subcommands of a trained run: where that is one of text, they run on a small one in its place, as printed."""
RUN_NAMES = ("quickstart", "mpt-1b")
"""Runs of text whose commands work in the guides."""
KEEPS_RUNNING = ("--serve", "--nproc", "--tasks")
"""Options that serve until somebody stops them, start ranks, or want a file of tasks."""
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
    small = write_run_file(folder / "small.yaml", folder / "data" / "text")
    words = [
        "training.steps=2",
        "optimizer.warmup_steps=0",
        "evaluation.samples=2",
        "training.tensorboard=false",
        "model.max_positions=160",
    ]
    for name in RUN_NAMES:
        if name == RUN_NAMES[0]:
            assert run_command_line(["train", str(small), *words, "--run-dir", str(folder / "runs" / name)]) == 0
        else:
            shutil.copytree(folder / "runs" / RUN_NAMES[0], folder / "runs" / name)
    return folder


@pytest.mark.parametrize("command", _printed(), ids=str)
def test_a_printed_command_works(
    command: Printed, clone: Path, call: Call, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(clone)
    words = ["quickstart.yaml" if word == "..." else word for word in command.words]
    verb = words[0]
    if OWN_PACKAGE in command.text:
        # Its run files need the installed package; tests/examples/test_own_model.py installs it and runs these commands.
        assert _parsed(words)
        return
    if _runs_as_printed(command, words):
        if " ".join(words).startswith(WRITES_A_FILE):
            (tmp_path / "runs").symlink_to(clone / "runs")
            monkeypatch.chdir(tmp_path)
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


def _runs_as_printed(command: Printed, words: list[str]) -> bool:
    if command.text in RUNS_TOO:
        return True
    if words[0] in OF_A_RUN:
        of_text = len(words) > 1 and words[1].removeprefix("runs/") in RUN_NAMES
        ends = words[0] != "watch" or "--once" in words
        return of_text and ends and not {*KEEPS_RUNNING} & {*words}
    return " ".join(words).startswith(RUNS_AS_PRINTED)


def test_most_kinds_of_commands_run() -> None:
    running = {command.words[0] for command in _printed() if _runs_as_printed(command, command.words)}
    assert running >= {"init", "config", "data", "launch", "completion", "verify", "evaluate", "generate", "convert"}
    assert running >= {"report", "watch"}


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
