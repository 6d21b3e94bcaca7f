"""The `phalanx` command: help, verbs, exit codes, and what is printed where."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import make_dataclass
from importlib import import_module
from types import ModuleType, SimpleNamespace
from typing import cast, get_type_hints

import pytest
import typer

from cli.terminal import ROOT, run_in_terminal, start
from command_line import Call
from phalanx import __version__
from phalanx.cli import main
from phalanx.cli.console import print_error, print_json, short_count
from phalanx.cli.guide_pages import find_page
from phalanx.cli.main import SUBCOMMANDS, Subcommand
from phalanx.config.families import FAMILIES, find_family
from phalanx.config.fields import run_sections
from phalanx.errors import CheckFailed, ConfigError, DataError, PhalanxError

QUICKSTART = "examples/quickstart.yaml"


def test_help_lists_the_verbs_in_order_of_use(call: Call) -> None:
    outcome = call("--help")
    verbs = outcome.out.split("Commands:\n")[1].split("\n\n")[0]
    assert outcome.code == 0
    names = [line.split()[0] for line in verbs.splitlines()]
    assert names == [
        "init",
        "data",
        "config",
        "plan",
        "calibrate",
        "search",
        "tune",
        "verify",
        "dryrun",
        "doctor",
        "train",
        "watch",
        "chaos",
        "bench",
        "launch",
        "evaluate",
        "generate",
        "ensemble",
        "select",
        "predict",
        "lammps",
        "forecast",
        "errors",
        "report",
        "convert",
        "completion",
    ]
    assert "..." not in verbs
    assert call().out == outcome.out


@pytest.mark.parametrize("subcommand", SUBCOMMANDS, ids=lambda subcommand: subcommand.name)
def test_every_subcommand_has_help_with_an_example(subcommand: Subcommand, call: Call) -> None:
    outcome = call(subcommand.name, "--help")
    assert outcome.code == 0
    assert f"Usage: phalanx {subcommand.name}" in outcome.out
    assert "Example" in outcome.out.split("Usage:")[1]


def test_version(call: Call) -> None:
    assert call("--version").out.startswith(f"phalanx {__version__} (torch ")


def test_no_help_loads_torch() -> None:
    """Help of every subcommand, and a refused option, in one process that must not have imported what computes."""
    program = """
import sys
from phalanx.cli.main import SUBCOMMANDS, run_command_line
below = (["data", "prepare"], ["data", "prepare-fields"], ["config", "check"])
codes = [run_command_line([one.name, word]) for one in SUBCOMMANDS for word in ("--help", "--no-such-option")]
codes += [run_command_line([*words, "--help"]) for words in below]
print(codes, file=sys.stderr)
sys.exit(9 if "torch" in sys.modules else 0 if sorted(set(codes)) == [0, 2] else 1)
"""
    ended = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr


@pytest.mark.parametrize(
    "subcommand",
    [subcommand for subcommand in SUBCOMMANDS if subcommand.options is not None],
    ids=lambda subcommand: subcommand.name,
)
def test_a_subcommand_does_what_its_options_declare(subcommand: Subcommand) -> None:
    arguments = getattr(
        import_module(f"phalanx.cli.options.{subcommand.options}"), f"{subcommand.name.title()}Arguments"
    )
    does = getattr(import_module(f"phalanx.cli.{subcommand.module}"), f"run_{subcommand.name}")
    assert list(get_type_hints(does).values()) == [arguments, type(None)]
    # A command without a docstring would have no help, and a dataclass without one has its signature for it.
    assert arguments.__doc__ and not arguments.__doc__.startswith(arguments.__name__)


def test_help_has_one_style(call: Call) -> None:
    for subcommand in SUBCOMMANDS:
        shown = call(subcommand.name, "--help").out
        assert shown.startswith(f"Usage: phalanx {subcommand.name}"), shown
        assert "╭" not in shown and "--install-completion" not in shown and "-h, --help" in shown, shown


@pytest.mark.parametrize(
    "arguments",
    ["--help", "--version", "config --help", "config list", "config fields", f"config show {QUICKSTART}"],
)
def test_torch_is_not_loaded(arguments: str) -> None:
    program = (
        "import sys; sys.path.insert(0, 'src'); from phalanx.cli.main import run_command_line; "
        f"code = run_command_line({arguments.split()}); "
        "sys.exit(code or (9 if 'torch' in sys.modules else 0))"
    )
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, check=False).returncode == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["trian"], "no such command 'trian'\n       nearest: train"),
        (["zzz"], "no such command 'zzz'\n       phalanx --help shows what it takes"),
        (
            ["config", "lst"],
            "no such command 'lst'\n       nearest: list",
        ),
        (["config", "list", "--jsn"], "no such option: --jsn\n       nearest: --json"),
        (["config", "show"], "missing argument 'RUN'\n       phalanx config show --help shows what it takes"),
        (
            ["train", "x", "--nproc", "0"],
            "--nproc=0 must be at least 1\n       phalanx train --help shows what it takes",
        ),
        (
            ["train", "x", "--nproc", "two"],
            "--nproc=two must be a whole number\n       phalanx train --help shows what it takes",
        ),
        (
            ["convert", "a", "b", "--to", "onnx"],
            "--to: 'onnx' is not one of 'huggingface', 'phalanx'\n       phalanx convert --help shows what it takes",
        ),
        (["--verson"], "no such option: --verson\n       nearest: --version"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_usage_mistakes(arguments: list[str], message: str, call: Call) -> None:
    outcome = call(*arguments)
    assert (outcome.code, outcome.out, outcome.err) == (2, "", f"error: {message}\n")


def test_group_without_a_verb_prints_its_help(call: Call) -> None:
    outcome = call("config")
    assert outcome.code == 0 and outcome.out.startswith("Usage: phalanx config") and outcome.err == ""


FAILURES: dict[str, tuple[BaseException, int, str]] = {
    "general": (PhalanxError("disk full\nfree 3 GB"), 1, "error: disk full\n       free 3 GB\n"),
    "config": (ConfigError("a.b=1 is wrong"), 2, "error: a.b=1 is wrong\n"),
    "data": (DataError("shard 3 is truncated"), 1, "error: shard 3 is truncated\n"),
    "check": (CheckFailed("rank 2 differs"), 3, "error: rank 2 differs\n"),
    "interrupt": (KeyboardInterrupt(), 130, ""),
    "exit": (typer.Exit(3), 3, ""),
}


def _fail(name: str) -> None:
    raise FAILURES[name][0]


def add_subcommand(monkeypatch: pytest.MonkeyPatch, name: str, function: Callable[..., None]) -> None:
    """Let `phalanx` have a subcommand that does what `function` does, and takes its arguments."""
    added = Subcommand(name, f"testing.{name}", "testing", "For this test.", ())
    monkeypatch.setattr(main, "SUBCOMMANDS", (*SUBCOMMANDS, added))
    taken = [(each, kind) for each, kind in get_type_hints(function).items() if each != "return"]
    arguments = f"{name.title()}Arguments"
    for module, attribute, value in (
        ("phalanx.cli.options.testing", arguments, make_dataclass(arguments, taken)),
        (f"phalanx.cli.testing.{name}", f"run_{name}", lambda asked: function(**vars(asked))),
    ):
        monkeypatch.setitem(sys.modules, module, cast(ModuleType, SimpleNamespace(**{attribute: value})))


@pytest.mark.parametrize("name", FAILURES)
def test_failures_end_with_their_exit_code(name: str, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    add_subcommand(monkeypatch, "fail", _fail)
    outcome = call("fail", name)
    assert (outcome.code, outcome.out, outcome.err) == (FAILURES[name][1], "", FAILURES[name][2])


def _crash() -> None:
    raise ZeroDivisionError("a defect of ours")


def test_defects_keep_their_traceback(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    add_subcommand(monkeypatch, "crash", _crash)
    with pytest.raises(ZeroDivisionError, match="a defect of ours"):
        call("crash")


def _interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(10.0)


def test_interrupt_while_running(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    add_subcommand(monkeypatch, "interrupted", _interrupt)
    outcome = call("interrupted")
    assert (outcome.code, outcome.err) == (130, "")


def test_reader_that_goes_away() -> None:
    child = start("config", "list", "--json", stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert child.stdout is not None and child.stderr is not None
    child.stdout.close()
    err = child.stderr.read()
    child.stderr.close()
    assert (child.wait(), err) == (1, b"")


@pytest.mark.parametrize(
    "arguments",
    [
        "--help",
        "config --help",
        "config list",
        "config list lumi-140b",
        "config fields",
        f"config check {QUICKSTART} --no-data",
        f"config check {QUICKSTART} layout.microbach=1 layout.zzzz=1",
    ],
)
def test_sixty_columns_are_enough(arguments: str) -> None:
    _, shown = run_in_terminal(60, *arguments.split(), NO_COLOR="1")
    examples = ("phalanx config check examples/quickstart.yaml",)  # commands stay whole so that they can be copied
    plain = re.sub(r"\x1b\[[0-9;]*m", "", shown)
    long = [line for line in plain.splitlines() if len(line) > 60 and not line.strip().startswith(examples)]
    assert plain.strip() and long == [] and "...\n" not in plain.replace("[ARGS]...", "")


def test_colour_is_for_terminals_that_want_it() -> None:
    code, shown = run_in_terminal(80, "config", "check", "no.yaml")
    assert code == 2 and shown.startswith("\x1b[1;31merror: \x1b[0mrun file no.yaml does not exist")
    # and where to read on is told, as in logs
    assert shown.splitlines()[-1] == "read on: docs/reference/run_file.md"
    _, shown = run_in_terminal(80, "config", "check", "no.yaml", NO_COLOR="1")
    assert shown.startswith("\x1b[1merror: \x1b[0mrun file")
    _, piped = start("config", "check", "no.yaml", stderr=subprocess.PIPE).communicate()
    assert piped == b"error: run file no.yaml does not exist\nread on: docs/reference/run_file.md\n"


def test_every_error_has_a_page() -> None:
    sections = [section.name for name in FAMILIES.names() for section in run_sections(find_family(name).run)]
    pages = {name: find_page(f"{name}.field=3 is wrong", "launch") for name in sections}
    pages |= {f"phalanx {one.name}": find_page("one of search.yaml is wrong", one.name) for one in SUBCOMMANDS}
    assert [name for name, page in pages.items() if not (ROOT / page).is_file()] == []
    assert pages["layout"] == "docs/guides/layouts.md" and pages["phalanx convert"] == "docs/guides/convert.md"
    assert "docs/guides/launch.md" not in {pages[name] for name in sections}


def test_long_errors_are_not_broken_in_files(capsys: pytest.CaptureFixture[str]) -> None:
    print_error("word " * 60 + "[red]end")
    assert capsys.readouterr().err == "error: " + "word " * 60 + "[red]end\n"


def test_json_holds_only_what_json_can(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"loss": float("nan"), "all": [1.5, float("inf")], "name": "é"})
    assert json.loads(capsys.readouterr().out) == {"loss": None, "all": [1.5, None], "name": "é"}


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0"),
        (999, "999"),
        (1000, "1.00K"),
        (124_439_808, "124M"),
        (999_999_999, "1.00B"),
        (6_649_024_512, "6.65B"),
        (29_956_742_144, "30.0B"),
        (1.008e12, "1.01T"),
    ],
)
def test_short_counts(number: float, text: str) -> None:
    assert short_count(number) == text
