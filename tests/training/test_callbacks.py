"""Callbacks: called at every moment on every rank, named in messages, offered by installed packages."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import phalanx_processes
from phalanx.cli.main import main
from phalanx.config.load import load_run
from phalanx.errors import ConfigError, PhalanxError
from phalanx.training.callbacks import CALLBACKS, Callback, TrainingContext
from phalanx.training.metrics import StepMetrics
from phalanx.training.start import train
from token_data import write_run_file, write_token_folder

NO_WARM_UP = "optimizer.warmup_steps=0"


@pytest.fixture(scope="module")
def run_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("callbacks")
    return write_run_file(folder / "run.yaml", write_token_folder(folder / "data"))


class Diary(Callback):
    """Writes one line for each call to a file of its rank; fails where it is asked to."""

    def __init__(self, folder: str, fails_in: str = "", step: int | str = 0) -> None:
        self.path = Path(folder) / f"diary-{os.environ.get('RANK', '0')}"
        self.fails_in = fails_in
        self.step = step

    def note(self, moment: str, value: Any = None) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps([moment, value]) + "\n")
        step = value[0] if isinstance(value, list) else value
        if moment == self.fails_in and step in (self.step, None):
            raise ValueError("the diary is full")

    def on_start(self, context: TrainingContext) -> None:
        self.parameters = context.parameters
        shapes = sorted(context.parameters)
        assert context.rank == int(os.environ.get("RANK", "0")) and shapes
        self.note("start", [context.first_step, context.last_step, context.world_size])

    def on_step_begin(self, step: int) -> None:
        self.note("begin", step)

    def on_step_end(self, metrics: StepMetrics) -> None:
        finite = all(bool(torch.isfinite(p.detach()).all()) for p in self.parameters.values())
        self.note("end of step", [metrics.step, metrics.loss, finite])

    def on_checkpoint(self, step: int, path: Path) -> None:
        self.note("checkpoint", [step, path.name])

    def on_end(self, error: BaseException | None) -> None:
        self.note("end", None if error is None else type(error).__name__)


def train_with_diary(words: Sequence[str]) -> None:
    """`phalanx train` in a process that has the callback."""
    CALLBACKS.register("diary", Diary)
    main(words)


@pytest.fixture
def diary(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(CALLBACKS._items, "diary", Diary)
    yield


def asked(folder: Path, **options: object) -> str:
    """The override that has a run keep a diary in `folder`."""
    return f"training.callbacks=[{{name: diary, options: {json.dumps({'folder': str(folder), **options})}}}]"


def lines(folder: Path, rank: int = 0) -> list[list[Any]]:
    return [json.loads(line) for line in (folder / f"diary-{rank}").read_text().splitlines()]


def test_every_moment_is_told_on_every_rank(run_file: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    overrides = ["training.steps=4", NO_WARM_UP, "checkpoint.every=2", asked(tmp_path)]
    words = ["train", str(run_file), "--run-dir", str(run_dir), *overrides]
    phalanx_processes.finish(words, ranks=2, command=train_with_diary)
    losses = [json.loads(line)["loss"] for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    first, second = lines(tmp_path, 0), lines(tmp_path, 1)
    assert first == second
    expected: list[list[Any]] = [["start", [1, 4, 2]]]
    for step, loss in enumerate(losses, 1):
        expected += [["begin", step], ["end of step", [step, loss, True]]]
        if step % 2 == 0:
            expected.append(["checkpoint", [step, f"step-{step:08d}"]])
    assert first == [*expected, ["end", None]]


def test_a_resumed_run_starts_callbacks_behind_its_checkpoint(run_file: Path, tmp_path: Path, diary: None) -> None:
    train(load_run(run_file, ["training.steps=4", NO_WARM_UP]), tmp_path / "run", until=3)
    train(load_run(run_file, ["training.steps=4", NO_WARM_UP, asked(tmp_path)]), tmp_path / "run")
    found = lines(tmp_path)
    assert found[0] == ["start", [4, 4, 1]] and found[1] == ["begin", 4]
    # A run that has nothing left to train has nothing to tell.
    train(load_run(run_file, ["training.steps=4", NO_WARM_UP, asked(tmp_path)]), tmp_path / "run")
    assert lines(tmp_path) == found


@pytest.mark.parametrize(
    ("moment", "said"),
    [
        ("begin", "on_step_begin of step 2"),
        ("end of step", "on_step_end of step 2"),
        ("checkpoint", "on_checkpoint of step 2"),
    ],
)
def test_a_callback_that_fails_is_named_and_ends_the_run(
    run_file: Path, tmp_path: Path, diary: None, moment: str, said: str
) -> None:
    run = load_run(
        run_file, ["training.steps=4", NO_WARM_UP, "checkpoint.every=2", asked(tmp_path, fails_in=moment, step=2)]
    )
    with pytest.raises(PhalanxError) as raised:
        train(run, tmp_path / "run")
    words, _, log = str(raised.value).partition("\ntraceback: ")
    assert words == f"callback diary failed in {said}: ValueError: the diary is full"
    assert "in note" in Path(log).read_text()
    assert lines(tmp_path)[-1] == ["end", "PhalanxError"]


def test_a_failure_of_a_callback_does_not_hide_why_training_ended(
    run_file: Path, tmp_path: Path, diary: None, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["optimizer.lr=1e30", "optimizer.warmup_steps=0", "optimizer.grad_clip=null", "training.steps=8"]
    diverging = load_run(run_file, [*options, asked(tmp_path, fails_in="end", step="PhalanxError")])
    with pytest.raises(PhalanxError, match=r"step 2: loss=.* is not finite"):
        train(diverging, tmp_path / "run")
    assert lines(tmp_path)[-2][0] == "end of step" and lines(tmp_path)[-2][1][0] == 2
    assert "warning: callback diary failed in on_end: ValueError: the diary is full" in capsys.readouterr().err


def test_names_and_options_that_mean_nothing_are_refused_before_anything_is_made(
    run_file: Path, tmp_path: Path, diary: None
) -> None:
    unknown = load_run(run_file, ["training.callbacks=[diery]"])
    with pytest.raises(ConfigError, match=r"training\.callbacks\.0\.name=diery: .*did you mean diary\?"):
        train(unknown, tmp_path / "run")
    strange = load_run(run_file, [asked(tmp_path, colour="blue")])
    with pytest.raises(ConfigError, match=r"training\.callbacks\.0\.options=.*callback diary cannot be made.*colour"):
        train(strange, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_an_installed_package_offers_a_callback(
    run_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = """
from pathlib import Path
from phalanx.training.callbacks import Callback

class Lowest(Callback):
    def __init__(self, file):
        self.file, self.lowest = Path(file), float("inf")

    def on_step_end(self, metrics):
        self.lowest = min(self.lowest, metrics.loss)

    def on_end(self, error):
        self.file.write_text(repr(self.lowest))
"""
    (tmp_path / "lowest_loss.py").write_text(source)
    (tmp_path / "lowest_loss-1.0.dist-info").mkdir()
    metadata = "Metadata-Version: 2.1\nName: lowest-loss\nVersion: 1.0\n"
    (tmp_path / "lowest_loss-1.0.dist-info" / "METADATA").write_text(metadata)
    entries = "[phalanx.callbacks]\nlowest = lowest_loss:Lowest\n"
    (tmp_path / "lowest_loss-1.0.dist-info" / "entry_points.txt").write_text(entries)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(CALLBACKS, "_installed", None)
    monkeypatch.setattr(CALLBACKS, "_items", {})
    options = f"training.callbacks=[{{name: lowest, options: {{file: {tmp_path / 'lowest'}}}}}]"
    train(load_run(run_file, ["training.steps=3", NO_WARM_UP, options]), tmp_path / "run")
    losses = [json.loads(line)["loss"] for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert float((tmp_path / "lowest").read_text()) == min(losses)
    sys.modules.pop("lowest_loss")
    monkeypatch.setattr(CALLBACKS, "_installed", None)
