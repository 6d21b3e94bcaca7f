import json
import resource
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from phalanx.config.load import load_run
from phalanx.errors import PhalanxError
from phalanx.files import write_atomically
from phalanx.train.metrics import Peaks
from phalanx.train.run_dir import JsonLines, RunDirectory, describe_machine
from phalanx.train.start import train
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
