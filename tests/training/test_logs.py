import importlib.util
import io
import json
import re
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from phalanx.errors import ConfigError
from phalanx.families.language.config import LanguageRun
from phalanx.families.registry import bind
from phalanx.printable import PrintableConsole, plain_console
from phalanx.training import logs
from phalanx.training.inputs import Finding
from phalanx.training.logs import (
    BackgroundSink,
    ConsoleSink,
    Sink,
    TensorBoardSink,
    format_clock,
    open_sinks,
)
from phalanx.training.metrics import StepMetrics
from phalanx.training.start import train


def metrics(step: int = 7, **changes: object) -> StepMetrics:
    values = {
        "step": step,
        "loss": 3.25,
        "grad_norm": 0.5,
        "lr": 3e-4,
        "tokens": 7168,
        "step_seconds": 0.5,
        "tokens_per_second": 2048.0,
        "model_tflops": 1.5,
        "mfu": 0.25,
        "mfu_measured": 0.5,
        "memory_now_gib": None,
        "memory_peak_gib": None,
        "data_wait_seconds": 0.01,
        "checkpoint_stall_seconds": 0.0,
        "updated": True,
        **changes,
    }
    return StepMetrics(**values)  # type: ignore[arg-type]


def tiny_run(**training: object) -> LanguageRun:
    return LanguageRun.model_validate(
        {
            "model": {"n_layers": 1, "d_model": 8, "n_heads": 1, "vocab_size": 16, "max_positions": 8},
            "data": {"sources": ["somewhere"], "sequence_length": 8},
            "layout": {"global_batch": 16},
            "optimizer": {"lr": 0.1},
            "training": {"steps": 20, "tensorboard": False, **training},
        }
    )


def test_plain_lines_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    sink = ConsoleSink(total_steps=20, first_step=0, every=1)
    sink.step(metrics())
    sink.close()
    captured = capsys.readouterr()
    assert captured.out == ""
    line = captured.err.strip()
    assert "\n" not in line
    for part in (
        "step 7/20",
        "loss 3.2500",
        "grad 0.5",
        "lr 3.00e-04",
        "2,048 tok/s",
        "25.0% of nominal",
        "50.0% of measured",
    ):
        assert part in line
    assert "data wait 2.0%" in line
    assert line.endswith("ETA 0:00:06")


def test_a_device_that_was_full_is_seen(capsys: pytest.CaptureFixture[str]) -> None:
    sink = ConsoleSink(total_steps=20, first_step=0, every=1)
    for retries in (0, 3):
        sink.step(metrics(7 + retries, memory_now_gib=1.0, memory_peak_gib=2.0, memory_retries=retries))
    plain, full = capsys.readouterr().err.splitlines()
    assert "mem 1.0 peak 2.0 GiB" in plain and "full" not in plain
    assert "mem 1.0 peak 2.0 GiB  full 3 times" in full


@pytest.mark.parametrize(("done", "shown"), [(0, ["1/7", "5/7", "7/7"]), (2, ["3/7", "5/7", "7/7"])])
def test_log_every_leaves_lines_out_but_not_the_first_and_the_last(
    done: int, shown: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    sink = ConsoleSink(total_steps=7, first_step=done, every=5)
    for step in range(done + 1, 8):
        sink.step(metrics(step))
    assert [line.split()[1] for line in capsys.readouterr().err.splitlines()] == shown


def test_a_step_without_update_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    ConsoleSink(total_steps=20, first_step=0, every=1).step(metrics(updated=False))
    assert "NOT UPDATED: gradient not finite" in capsys.readouterr().err


def show_on_terminal(monkeypatch: pytest.MonkeyPatch, width: int, every: int, steps: tuple[int, ...]) -> list[str]:
    """What a run of 20 steps shows on a terminal, without styles, a line for each drawing of the bar."""
    shown = io.StringIO()

    def console(**_: object) -> PrintableConsole:
        return plain_console(stderr=False, file=shown, force_terminal=True, width=width, no_color=True)

    monkeypatch.setattr(logs, "plain_console", console)
    sink = ConsoleSink(total_steps=20, first_step=0, every=every)
    sink.note("layout  tp=2 dp_shard=4 microbatch=2 (auto) x 16; bf16, attention flash, recompute selective")
    for step in steps:
        sink.step(metrics(step, tokens_per_second=10.0 ** (3 + step % 3), memory_now_gib=61.2, memory_peak_gib=74.0))
        assert sink._progress is not None
        sink._progress.refresh()
    sink.close()
    return [line.rstrip() for line in re.split(r"[\r\n]+", re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", shown.getvalue()))]


@pytest.mark.parametrize("width", [100, 80, 60, 40, 24])
def test_a_run_fits_the_terminal(monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    lines = show_on_terminal(monkeypatch, width, 10, (1, 2, 9, 10))
    assert max(map(len, lines)) <= width and "…" not in "".join(lines)
    # how far it is is never left out, and of a figure no part stands on another line
    assert [line for line in lines if line.startswith("step  9/20")]
    text = "\n".join(lines)
    for figure in ("grad 0.5", "lr 3.00e-04", "tok/s", "1.5 TFLOP/s"):
        assert figure in text
    assert any("━" in line for line in lines) == (width > 60)
    assert width < 40 or re.search("step  9/20  loss 3.250  ETA 0:00:06", text)


def test_a_note_is_broken_below_its_label(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = show_on_terminal(monkeypatch, 60, 10, ())
    start = next(place for place, line in enumerate(lines) if line.startswith("layout"))
    assert lines[start] == "layout  tp=2 dp_shard=4 microbatch=2 (auto) x 16; bf16,"
    assert lines[start + 1] == "        attention flash, recompute selective"


def test_the_bar_stays_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = show_on_terminal(monkeypatch, 80, 1, (10, 11, 12, 13))
    # from the widest rate on
    drawn = [line for line in lines if "━" in line and "tok/s" in line]
    wide = next(place for place, line in enumerate(drawn) if "100,000 tok" in line)
    assert len({line.index("━") for line in drawn[wide:]}) == 1 and len(drawn[wide:]) >= 3


def test_durations() -> None:
    assert format_clock(2499.6) == "0:41:40"
    assert format_clock(100 * 3600) == "100:00:00"


def test_tensorboard_files_hold_the_loss(tmp_path: Path) -> None:
    sink = TensorBoardSink(tmp_path, first_step=0)
    sink.step(metrics())
    finding = Finding("tasks", {"mean_accuracy": 0.5, "tasks": []}, "", {"one 0-shot": 0.25})
    sink.scores(7, finding.curves)
    sink.close()
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # noqa: PLC0415

    events = EventAccumulator(str(tmp_path)).Reload()
    assert [(e.step, e.value) for e in events.Scalars("train/loss")] == [(7, 3.25)]
    assert [(e.step, e.value) for e in events.Scalars("tasks/mean_accuracy")] == [(7, 0.5)]
    assert [(e.step, e.value) for e in events.Scalars("tasks/one 0-shot")] == [(7, 0.25)]
    assert "train/memory_now_gib" not in events.Tags()["scalars"]


@pytest.mark.parametrize("tracker", ["wandb", "mlflow"])
def test_a_missing_tracker_names_the_extra(tracker: str, tmp_path: Path) -> None:
    if importlib.util.find_spec(tracker) is not None:
        pytest.skip(f"{tracker} is installed here, so it cannot be missing")
    with pytest.raises(ConfigError, match=rf"training.{tracker}=mine needs the package {tracker}; install the extra"):
        open_sinks(bind(tiny_run(**{tracker: "mine"})), tmp_path, 0)
    # Before anything is made, not when a checkpoint is loaded already.
    with pytest.raises(ConfigError, match=rf"training.{tracker}=mine needs the package"):
        train(tiny_run(**{tracker: "mine"}), tmp_path / "run")


def test_a_run_directory_keeps_its_identity_in_a_tracker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A resumed run goes on where it logged before; a run directory of the same name elsewhere is another run."""
    asked: list[str] = []
    tracker = SimpleNamespace(init=lambda **how: asked.append(how["id"]))
    monkeypatch.setitem(sys.modules, "wandb", tracker)
    for folder in ("one", "one", "other"):
        (tmp_path / folder / "run").mkdir(parents=True, exist_ok=True)
        open_sinks(bind(tiny_run(wandb="mine")), tmp_path / folder / "run", 0)
    assert asked[0] == asked[1] != asked[2]


class DeadSink(Sink):
    """A tracker whose service fails, or never answers, from the second step on."""

    def __init__(self, seen: list[int], *, hangs: bool) -> None:
        self.seen, self.hangs = seen, hangs

    def step(self, metrics: StepMetrics) -> None:
        if self.seen and self.hangs:
            threading.Event().wait()
        if self.seen:
            raise ConnectionError("no route to host")
        self.seen.append(metrics.step)


@pytest.mark.parametrize(
    ("hangs", "words"),
    [
        (False, "warning: tracker failed (ConnectionError: no route to host); nothing more is logged there"),
        (True, "warning: tracker has not taken all of the record 0.2 s after the end; nothing more is logged there"),
    ],
)
def test_a_dead_tracker_is_given_up_and_training_goes_on(
    hangs: bool, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[int] = []
    sink = BackgroundSink("tracker", lambda: DeadSink(seen, hangs=hangs), patience_s=0.2 if hangs else 30.0)
    for step in range(7, 20):
        sink.step(metrics(step))
        sink.scores(step, {"loss": 1.0})
    sink.close()
    assert seen == [7] and capsys.readouterr().err.count(words) == 1


def test_a_tracker_that_cannot_be_opened_is_a_warning_and_a_wrong_field_an_error(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(error: Exception) -> Sink:
        raise error

    sink = BackgroundSink("tracker", lambda: fail(TimeoutError("no answer")))
    sink.step(metrics())
    sink.close()
    assert capsys.readouterr().err.startswith("warning: tracker failed (TimeoutError: no answer); nothing more")
    silent = BackgroundSink("tracker", lambda: fail(threading.Event().wait() or OSError()), patience_s=0.1)
    silent.close()
    assert "tracker does not answer for 0.1 s" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="wrong"):
        BackgroundSink("tracker", lambda: fail(ConfigError("wrong")))


def test_a_tracker_gets_all_of_a_record_in_order() -> None:
    class Slow(Sink):
        def step(self, metrics: StepMetrics) -> None:
            time.sleep(0.002)
            seen.append(metrics.step)

        def close(self) -> None:
            seen.append(-1)

    seen: list[int] = []
    sink = BackgroundSink("tracker", Slow)
    for step in range(20):
        sink.step(metrics(step))
    sink.close()
    assert seen == [*range(20), -1]


def test_metrics_are_plain_json() -> None:
    assert json.loads(json.dumps(metrics().as_dict()))["loss"] == 3.25


def test_tensorboard_gives_up_on_a_full_disk_and_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    writer = SimpleNamespace(SummaryWriter=lambda *_, **__: SimpleNamespace(add_scalar=refuse, close=refuse))
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", writer)
    sink = TensorBoardSink(tmp_path, 0)
    sink.step(metrics(7))
    sink.step(metrics(8))
    sink.close()
    assert capsys.readouterr().err == "warning: TensorBoard files end at step 7: No space left on device\n"
