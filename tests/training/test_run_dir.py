import json
import os
import resource
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from phalanx.config.load import load_run
from phalanx.errors import PhalanxError
from phalanx.files import JsonLines, write_atomically
from phalanx.training.metrics import Peaks
from phalanx.training.run_dir import RunDirectory, describe_machine
from phalanx.training.start import train
from token_data import write_run_file, write_token_folder


def steps_in(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def test_a_resumed_log_has_no_gap_and_no_repeat(tmp_path: Path) -> None:
    log = JsonLines(tmp_path / "metrics.jsonl")
    for step in range(1, 8):
        log.append({"step": step})
    log.close()
    log.drop_after(4)
    for step in range(5, 7):
        log.append({"step": step})
    log.close()
    assert steps_in(log.path) == [1, 2, 3, 4, 5, 6]


def test_a_line_torn_by_a_kill_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"st')
    JsonLines(path).drop_after(10)
    assert steps_in(path) == [1, 2]


def test_lines_reach_the_file_at_once(tmp_path: Path) -> None:
    log = JsonLines(tmp_path / "metrics.jsonl")
    log.append({"step": 1, "loss": 2.5})
    assert json.loads(log.path.read_text()) == {"step": 1, "loss": 2.5}
    log.close()


Room = Callable[[int], None]


@pytest.fixture
def room() -> Iterator[Room]:
    """Sets the bytes that a file may have; lifted in the end."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_lines_that_the_disk_has_no_room_for_wait(tmp_path: Path, room: Room) -> None:
    log = JsonLines(tmp_path / "metrics.jsonl")
    room(40)
    for step in range(1, 5):
        log.append({"step": step, "loss": 2.5})
    assert log.failure is not None and len(log.path.read_bytes()) == 40
    with pytest.raises(OSError, match="File too large"):
        log.sync()
    room(1000)
    log.append({"step": 5})
    assert log.failure is None
    log.sync()
    log.close()
    assert steps_in(log.path) == [1, 2, 3, 4, 5]


def test_a_run_directory_on_a_full_disk_is_named(tmp_path: Path, room: Room) -> None:
    directory = RunDirectory(tmp_path)
    room(10)
    with pytest.raises(PhalanxError, match="cannot be written: File too large; make room"), directory.written():
        write_atomically(directory.run_file, "model: {n_layers: 2}")
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_does_not_end_training(tmp_path: Path, room: Room, capsys: pytest.CaptureFixture[str]) -> None:
    run_file = write_run_file(tmp_path / "run.yaml", write_token_folder(tmp_path / "data"))
    run = load_run(run_file, ["checkpoint.last=false", "checkpoint.every=39"])
    room(12_000)
    train(run, tmp_path / "run")
    said = capsys.readouterr().err
    assert "metrics.jsonl cannot be written (File too large); its lines wait" in said
    assert "warning: checkpoint of step 39 was not saved" in said and "trained to step 40" in said


DAMAGE = {
    "a character cut in two": lambda lines: [*lines, '{"step": 41, "text": "ä'.encode()[:-1]],
    "zeros after a crash": lambda lines: [*lines, b"\0" * 4096],
    "zeros in the middle": lambda lines: [*lines[:3], b"\0" * 512 + b"\n", *lines[3:]],
    "rubbish": lambda lines: [*lines[:3], b"rubbish\n", *lines[3:]],
    "bytes that are no text": lambda lines: [*lines[:3], b"\xff\xfe{}\n", *lines[3:]],
    "a flipped bit in a brace": lambda lines: [*lines[:3], bytes([lines[3][0] ^ 4]) + lines[3][1:], *lines[4:]],
    "a flipped bit in a name": lambda lines: [*lines[:3], lines[3].replace(b'"step"', b'"stgp"'), *lines[4:]],
    "no step": lambda lines: [*lines[:3], b'{"loss": 1.0}\n', *lines[3:]],
    "a step that is no number": lambda lines: [*lines[:3], b'{"step": "3"}\n', *lines[3:]],
    "a list": lambda lines: [*lines[:3], b"[3]\n", *lines[3:]],
    "brackets a million deep": lambda lines: [*lines[:3], b"[" * 1_000_000 + b"\n", *lines[3:]],
    "a number of five thousand digits": lambda lines: [*lines[:3], b'{"step": ' + b"9" * 5000 + b"}\n", *lines[3:]],
    "a line of eight megabytes": lambda lines: [*lines[:3], b'"' + b"a" * (8 << 20) + b'"\n', *lines[3:]],
    "an empty line": lambda lines: [*lines[:3], b"\n", *lines[3:]],
}
"""What a crash, a faulty disk or a person does to a log of a record a line."""
TORN = ("a character cut in two", "zeros after a crash")
LOST = ("a flipped bit in a brace", "a flipped bit in a name")


@pytest.mark.parametrize("kind", DAMAGE)
def test_damaged_lines_are_set_aside_and_the_others_kept(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = [json.dumps({"step": step, "text": "ä"}, ensure_ascii=False).encode() + b"\n" for step in range(1, 9)]
    damaged = b"".join(DAMAGE[kind](lines))
    path.write_bytes(damaged)
    said = JsonLines(path).drop_after(6)
    assert steps_in(path) == [step for step in range(1, 7) if not (kind in LOST and step == 4)]
    aside = tmp_path / "metrics.jsonl.damaged"
    if kind in TORN:
        assert said is None and not aside.exists()
        return
    assert said is not None and said.startswith("metrics.jsonl: 1 damaged line (4); it ") and str(aside) in said
    assert len(aside.read_bytes()) > 0
    if kind == "rubbish":
        assert aside.read_bytes() == b"rubbish\n"
    assert JsonLines(path).drop_after(6) is None


def test_many_damaged_lines_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(b'{"step": 0}\n' + b"x\n" * 1200 + b'{"step": 1}\n')
    said = JsonLines(path).drop_after(1)
    assert said is not None
    assert said.startswith("events.jsonl: 1,200 damaged lines (2, 3, 4, 5, 6 and 1,195 more); the first is not JSON")
    assert steps_in(path) == [0, 1]


def test_what_is_appended_before_and_after_a_rewind_is_there(tmp_path: Path) -> None:
    log = JsonLines(tmp_path / "events.jsonl")
    for step in (0, 5, 9):
        log.append({"step": step})
    log.drop_after(5)
    log.append({"step": 6})
    log.close()
    assert steps_in(log.path) == [0, 5, 6]


def tiny_run(tmp_path: Path) -> Path:
    return write_run_file(tmp_path / "run.yaml", write_token_folder(tmp_path / "data"))


def texts_of(run_dir: Path) -> list[str]:
    events = [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()]
    return [event["text"] for event in events if event["kind"] == "warning"]


def test_a_run_resumes_over_damaged_logs_and_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_file, run_dir = tiny_run(tmp_path), tmp_path / "run"
    train(load_run(run_file, ["training.steps=6"]), run_dir)
    for name in ("metrics.jsonl", "events.jsonl"):
        lines = (run_dir / name).read_bytes().splitlines(keepends=True)
        (run_dir / name).write_bytes(b"".join([lines[0], b"\0\0\0\n", *lines[1:], b'{"st\xc3']))
    train(load_run(run_file, ["training.steps=8"]), run_dir)
    assert steps_in(run_dir / "metrics.jsonl") == list(range(1, 9))
    warnings = texts_of(run_dir)
    for name in ("metrics.jsonl", "events.jsonl"):
        (said,) = [text for text in warnings if text.startswith(f"{name}: 1 damaged line (2)")]
        assert said in capsys.readouterr().err or name == "events.jsonl"


def test_a_resumed_run_says_what_is_another_than_before(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_file, run_dir = tiny_run(tmp_path), tmp_path / "run"
    train(load_run(run_file, ["training.steps=6"]), run_dir)
    assert "changed" not in capsys.readouterr().err
    machine = json.loads((run_dir / "machine.json").read_text())
    (run_dir / "machine.json").write_text(json.dumps(machine | {"torch": "0.9.1", "memory_gib": 1.0}))
    words = ["training.steps=8", "optimizer.lr=1e-3", "training.resume=must"]
    train(load_run(run_file, words), run_dir)
    said = capsys.readouterr().err
    events = [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()]
    (resumed,) = [event for event in events if event["kind"] == "resume"]
    changes = ["optimizer.lr: 0.003 -> 0.001", f"torch: 0.9.1 -> {machine['torch']}", "training.steps: 6 -> 8"]
    assert sorted(resumed["changes"]) == changes
    assert all(f"changed {change}" in said for change in changes)
    # The run file's settings are obeyed, not those of the checkpoint.
    last = json.loads((run_dir / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["step"] == 8 and last["lr"] <= 1e-3
    # What cannot be read ends no run.
    (run_dir / "run.yaml").write_text("training: [")
    train(load_run(run_file, ["training.steps=9", "optimizer.lr=1e-3"]), run_dir)
    assert "changed since the last start: not known, " in capsys.readouterr().err


def train_sabotaged(
    monkeypatch: pytest.MonkeyPatch, run_file: Path, run_dir: Path, act: Callable[[], object], *words: str
) -> str:
    """Train with `act` done after step 13 was logged; returns the error that training ended with."""
    append = JsonLines.append

    def append_and_act(log: JsonLines, record: dict[str, Any]) -> None:
        append(log, record)
        if log.path.name == "metrics.jsonl" and record["step"] == 13:
            act()

    with monkeypatch.context() as patch, pytest.raises(PhalanxError) as caught:
        patch.setattr(JsonLines, "append", append_and_act)
        train(load_run(run_file, ["training.steps=30", *words]), run_dir)
    return str(caught.value)


@pytest.mark.parametrize("how", ["removed", "renamed"])
def test_a_run_directory_that_goes_is_made_again_with_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], how: str
) -> None:
    run_file, run_dir = tiny_run(tmp_path), tmp_path / "run"
    act = partial(shutil.rmtree, run_dir) if how == "removed" else partial(run_dir.rename, tmp_path / "elsewhere")
    said = train_sabotaged(monkeypatch, run_file, run_dir, act, "checkpoint.asynchronous=false")
    assert "was removed, renamed or unmounted before the end of step 13" in said
    assert "a checkpoint of step 13; the same command resumes from there" in said
    assert f"warning: run directory {run_dir} is gone" in capsys.readouterr().err
    train(load_run(run_dir, ["training.steps=15"]), run_dir)
    assert steps_in(run_dir / "metrics.jsonl")[-2:] == [14, 15]


def test_a_run_directory_whose_file_system_goes_is_not_written_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_file, run_dir = tiny_run(tmp_path), tmp_path / "mounted" / "run"

    def unmount() -> None:
        # What lies beneath a mount point is another file system.
        shutil.rmtree(tmp_path / "mounted")
        (tmp_path / "mounted").mkdir()
        monkeypatch.setattr(RunDirectory, "_device_above", lambda _: -1)

    said = train_sabotaged(monkeypatch, run_file, run_dir, unmount)
    assert "unmounted before the end of step 13; nothing more can be kept there, so training ends" in said
    assert list((tmp_path / "mounted").iterdir()) == []


def test_another_folder_in_the_place_of_the_run_directory_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_file, run_dir = tiny_run(tmp_path), tmp_path / "run"

    def exchange() -> None:
        run_dir.rename(tmp_path / "elsewhere")
        run_dir.mkdir()

    said = train_sabotaged(monkeypatch, run_file, run_dir, exchange, "checkpoint.last=false")
    assert "nothing more can be kept there, so training ends" in said
    assert list(run_dir.iterdir()) == []


def test_logs_that_are_removed_are_said_to_be_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_file, run_dir = tiny_run(tmp_path), tmp_path / "run"

    def remove() -> None:
        for name in ("metrics.jsonl", "events.jsonl", "run.yaml"):
            (run_dir / name).unlink()

    said = train_sabotaged(monkeypatch, run_file, run_dir, remove)
    assert said.startswith("trained to step 30, but") and "its lines before step 1" in said
    assert steps_in(run_dir / "metrics.jsonl") == list(range(14, 31))
    assert texts_of(run_dir) and (run_dir / "run.yaml").exists()


@pytest.mark.parametrize(
    "name", ["metrics.jsonl", "events.jsonl", "run.yaml", "checkpoints", "tokenizer", "tensorboard"]
)
def test_links_in_a_run_directory_are_not_followed(tmp_path: Path, name: str) -> None:
    run_file, run_dir, outside = tiny_run(tmp_path), tmp_path / "run", tmp_path / "outside"
    run_dir.mkdir()
    if "." in name:
        outside.write_text("mine")
    else:
        outside.mkdir()
    (run_dir / name).symlink_to(outside)
    with pytest.raises(PhalanxError, match=rf"{name} is a link to .*outside; a run reads and writes nothing through"):
        train(load_run(run_file, ["training.steps=6"]), run_dir)
    assert outside.read_text() == "mine" if "." in name else list(outside.iterdir()) == []


def test_a_linked_tokenizer_file_is_not_written_through(tmp_path: Path) -> None:
    run_file, run_dir, outside = tiny_run(tmp_path), tmp_path / "run", tmp_path / "outside"
    (run_dir / "tokenizer").mkdir(parents=True)
    (run_dir / "tokenizer" / "tokenizer.json").symlink_to(outside)
    with pytest.raises(PhalanxError, match=r"tokenizer\.json is a link"):
        train(load_run(run_file, ["training.steps=6"]), run_dir)
    assert not outside.exists()


@pytest.mark.parametrize(("make", "words"), [(os.mkfifo, "a named pipe"), (os.mkdir, "a folder")])
def test_what_is_no_log_is_not_written_to(tmp_path: Path, make: Callable[[Path], None], words: str) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    make(run_dir / "metrics.jsonl")
    with pytest.raises(PhalanxError, match=f"metrics.jsonl is {words}, not a file; move it away"):
        RunDirectory(run_dir).create()


def test_a_run_directory_may_itself_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "scratch").mkdir()
    (tmp_path / "run").symlink_to(tmp_path / "scratch")
    train(load_run(tiny_run(tmp_path), ["training.steps=6"]), tmp_path / "run")
    assert steps_in(tmp_path / "scratch" / "metrics.jsonl") == list(range(1, 7))


def test_atomic_write_leaves_no_temporary_file(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    write_atomically(path, "first")
    write_atomically(path, "second")
    assert path.read_text() == "second"
    assert list(tmp_path.iterdir()) == [path]


def test_a_run_directory_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("a file")
    with pytest.raises(PhalanxError, match=r"run directory .*taken/run cannot be made: Not a directory"):
        RunDirectory(tmp_path / "taken" / "run").create()


def test_events_carry_kind_step_and_time(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    directory.event("checkpoint", 3, path="x")
    directory.close()
    event = json.loads((tmp_path / "events.jsonl").read_text())
    assert (event["kind"], event["step"], event["path"]) == ("checkpoint", 3, "x")
    assert event["time"].endswith("+00:00")


def test_machine_description_is_plain_json() -> None:
    machine = describe_machine(torch.device("cpu"), 1, Peaks(None, 0.5), "causal")
    assert json.loads(json.dumps(machine)) == machine
    assert machine["peak_tflops_nominal"] is None
    assert machine["memory_gib"] > 0
