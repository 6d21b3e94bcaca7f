"""`phalanx init`: asked on a terminal, answered by options, and what it leaves behind."""

from __future__ import annotations

import os
import pty
import signal
from pathlib import Path

import pytest

from cli.terminal import run_in_terminal, start
from command_line import Call
from phalanx.config.load import load_run
from token_data import write_token_folder

OPTIONS = {"family": "language", "data": "data/text", "devices": "2", "goal": "try", "size": "nano-10m"}


def _words(**changes: str | None) -> list[str]:
    chosen = {**OPTIONS, **changes}
    return [word for name, value in chosen.items() if value is not None for word in (f"--{name}", value)]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"family": "weather", "size": "climax-small", "data": "data/weather/weather.nc"},
        {"family": "materials", "size": "gnn-painn-600k", "goal": "train"},
        {"devices": "frontier:64", "size": "24h", "goal": "train"},
    ],
)
def test_what_options_answer_passes_the_check(
    changes: dict[str, str], call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    written = call("init", "run.yaml", *_words(**changes))
    assert (written.code, written.err) == (0, "")
    first, *commands = written.out.splitlines()
    assert first == "run.yaml is written; next:"
    check = next(line.split() for line in commands if "config check" in line)
    checked = call(*check[1:], "--no-data")
    assert checked.code == 0 and "run.yaml is sound" in checked.out, checked.err


def test_the_check_finds_the_data_that_it_names(call: Call, tmp_path: Path) -> None:
    data = write_token_folder(tmp_path / "data")
    run = str(tmp_path / "run.yaml")
    assert call("init", run, *_words(data=str(data), devices="cpu")).code == 0
    assert call("config", "check", run, "data.sequence_length=16").code == 0


def test_nothing_is_written_over(call: Call, tmp_path: Path) -> None:
    run = tmp_path / "run.yaml"
    run.write_text("mine")
    refused = call("init", str(run), *_words())
    assert refused.code == 2 and run.read_text() == "mine"
    assert refused.err == f"error: {run} is there already; name another file: phalanx init new-run.yaml\n"
    (tmp_path / "link.yaml").symlink_to("nowhere")
    assert call("init", str(tmp_path / "link.yaml"), *_words()).code == 2


def test_without_a_terminal_the_open_options_are_named(call: Call, tmp_path: Path) -> None:
    run = tmp_path / "run.yaml"
    refused = call("init", str(run), *_words(goal=None, data=None))
    assert refused.code == 2 and not run.exists()
    assert refused.err == (
        "error: phalanx init asks on a terminal, and there is none; give --data, --goal (phalanx init --help)\n"
    )


def test_questions_are_asked_until_they_are_answered(tmp_path: Path) -> None:
    run = tmp_path / "run.yaml"
    # The second answer is wrong and asked for again; empty ones take what is proposed.
    code, shown = run_in_terminal(100, "init", str(run), "--goal", "try", typed="weather\n\ngpu\n3\n\n", NO_COLOR="1")
    assert code == 0, shown
    assert "What for?" not in shown and "On what devices?" in shown
    assert "error: --devices gpu must be cpu, a number of devices" in shown.replace("\x1b[1m", "").replace(
        "\x1b[0m", ""
    )
    loaded = load_run(run)
    assert (loaded.model.preset, loaded.layout.global_batch) == ("climax-small", 18)
    assert shown.rstrip().endswith(f"phalanx train {run} --nproc 3")


@pytest.mark.parametrize(
    "words", [("--family", "speech"), ("--goal", "win"), ("--family", "weather", "--devices", "2", "--size", "gpt-7b")]
)
def test_a_wrong_option_is_refused_before_anything_is_asked(words: tuple[str, ...], tmp_path: Path) -> None:
    code, shown = run_in_terminal(100, "init", str(tmp_path / "run.yaml"), *words, typed="", NO_COLOR="1")
    assert code == 2 and f"{words[-2]} {words[-1]} must be" in shown and "?" not in shown, shown


def test_an_interrupt_leaves_nothing(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    child = start("init", str(tmp_path / "run.yaml"), stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    os.write(ours, b"language\n")
    shown = b""
    while b"Where are the training data?" not in shown:
        shown += os.read(ours, 65536)
    child.send_signal(signal.SIGINT)
    assert child.wait() == 130
    os.close(ours)
    assert list(tmp_path.iterdir()) == []
