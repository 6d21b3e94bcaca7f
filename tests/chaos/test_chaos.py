"""Chaos: which faults are drawn, how they strike, and what is made of reports; real runs are in tests/faults."""

from __future__ import annotations

import json
import random
from dataclasses import asdict, replace
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from phalanx.chaos import inject
from phalanx.chaos.faults import KINDS, USUAL, PlannedFault, draw_faults, parse_kinds
from phalanx.chaos.inject import START, STEP_LOG, ChaosCallback
from phalanx.chaos.run import ChaosPlan, FaultOutcome, _list_commands, _match_reports, compare_ends, prepare_run
from phalanx.checkpoint import CheckpointDamaged, open_checkpoints, read_tensors
from phalanx.cli.chaos import write_table
from phalanx.config.load import load_run
from phalanx.errors import ConfigError
from phalanx.training.start import train
from saved_states import saved_runs
from token_data import write_run_file, write_token_folder


def draw(seed: int, *kinds: str, **changes: int) -> list[PlannedFault]:
    chosen = {"ranks": 4, "steps": 60, "every": 5, "count": 8, "first": 1, "seed": seed} | changes
    return draw_faults(kinds or USUAL, **chosen)


def test_equal_seeds_draw_equal_faults() -> None:
    assert draw(1) == draw(1) and draw(1) != draw(2) and draw(1) != draw(1, first=9)
    drawn = [fault for seed in range(40) for fault in draw(seed)]
    assert {fault.kind for fault in drawn} == set(USUAL) and {fault.rank for fault in drawn} == {0, 1, 2, 3}
    assert all(1 < fault.step <= 60 for fault in drawn)
    assert all(len({fault.step for fault in draw(seed)}) == 8 == len(draw(seed)) for seed in range(10))
    # What a run must have before: checkpoints to damage.
    assert min(fault.step for seed in range(40) for fault in draw(seed, "damage")) == 12
    # And what has to come after: a step behind the checkpoint in which a rank is killed.
    assert max(fault.step for seed in range(40) for fault in draw(seed, "save")) == 55


def test_what_changes_bits_has_a_run_of_its_own() -> None:
    for seed in range(20):
        kinds = {fault.kind for fault in draw(seed, "kill", "oom")}
        assert kinds in ({"kill"}, {"oom"}) and len(draw(seed, "oom")) == 1


def test_a_slow_rank_has_a_run_of_its_own_with_steps_before_and_behind_it() -> None:
    drawn = [fault for seed in range(40) for fault in draw(seed, "slow")]
    assert len(drawn) == 40 and min(fault.step for fault in drawn) >= 7 and max(fault.step for fault in drawn) <= 20
    assert draw(1, "slow", steps=41) == []


def test_kinds_are_named() -> None:
    assert parse_kinds(None) == USUAL and parse_kinds("hang, kill,hang") == ("hang", "kill")
    with pytest.raises(ConfigError, match=r"--faults hung: must be of kill, .*\nnearest: hang"):
        parse_kinds("kill,hung")
    with pytest.raises(ConfigError, match="--faults is empty"):
        parse_kinds(",")


@pytest.fixture(scope="module")
def run_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("chaos")
    return write_run_file(folder / "run.yaml", write_token_folder(folder / "data"))


def test_a_run_that_could_not_notice_is_refused(run_file: Path, tmp_path: Path) -> None:
    def plan(*words: str, kinds: tuple[str, ...] = ("bitflip",)) -> ChaosPlan:
        return ChaosPlan(run_file, words, 2, kinds, 0, 1.0, None, 3, tmp_path)

    with pytest.raises(ConfigError, match="no two ranks hold the same parameters"):
        prepare_run(plan())
    with pytest.raises(ConfigError, match="a slow rank is told by those that wait for it"):
        prepare_run(replace(plan(kinds=("slow",)), ranks=1))
    run, _ = prepare_run(plan("layout.dp_replicate=2"))
    assert run.safeguards.compare_replicas == 1 and run.restart.max == 1000
    run, _ = prepare_run(plan("checkpoint.every=null", kinds=("kill",)))
    assert run.checkpoint.every == 5 and run.safeguards.compare_replicas is None


def test_a_run_of_several_nodes_has_a_supervisor_each_or_is_started_as_said(
    run_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = ChaosPlan(run_file, (), 4, ("kill",), 0, 1.0, None, 3, tmp_path, nodes=2)
    here = _list_commands(plan, tmp_path, ["training.steps=9"])
    said = [dict(pairwise(words)) for words in here]
    assert [(words["--nproc"], words["--nodes"], words["--node-rank"]) for words in said] == [
        ("2", "2", "0"),
        ("2", "2", "1"),
    ]
    assert said[0]["--rendezvous"] == said[1]["--rendezvous"]
    (srun,) = _list_commands(replace(plan, start=("srun", "--ntasks-per-node=1")), tmp_path, [])
    assert srun[:2] == ["srun", "--ntasks-per-node=1"] and "--nodes" not in srun
    prepare_run(plan)
    monkeypatch.setattr("torch.accelerator.is_available", lambda: True)
    with pytest.raises(ConfigError, match="--nodes 2 without --start"):
        prepare_run(plan)


def scheduled(folder: Path, *faults: PlannedFault) -> Path:
    folder.mkdir()
    path = folder / "schedule.json"
    path.write_text(json.dumps([asdict(fault) for fault in faults]))
    return path


def test_an_injected_error_strikes_once_and_leaves_no_trace(run_file: Path, tmp_path: Path) -> None:
    train(load_run(run_file, ["training.steps=12"]), tmp_path / "undisturbed")
    schedule = scheduled(tmp_path / "faults", PlannedFault(1, "error", 0, 8, 3), PlannedFault(2, "error", 1, 3, 3))
    callbacks = json.dumps([{"name": "chaos", "options": {"schedule": str(schedule)}}])
    run = load_run(run_file, ["training.steps=12", f"training.callbacks={callbacks}"])
    with pytest.raises(RuntimeError, match="made to fail"):
        train(run, tmp_path / "run")
    assert compare_ends(tmp_path / "run", tmp_path / "undisturbed")[0] is False
    train(run, tmp_path / "run")
    assert compare_ends(tmp_path / "run", tmp_path / "undisturbed") == (True, 0.0)
    # Step 6 and 7 were done again; the fault of the rank that is not there never was.
    steps = [line.split()[1] for line in (schedule.parent / STEP_LOG).read_text().splitlines()]
    assert steps == [START, *map(str, range(1, 8)), START, *map(str, range(6, 13))]
    assert sorted(path.name for path in schedule.parent.glob("happened-*")) == ["happened-1.json"]


def callback(folder: Path, **context: Any) -> ChaosCallback:
    made = ChaosCallback(str(scheduled(folder)))
    made.on_start(SimpleNamespace(rank=0, **context))  # type: ignore[arg-type]
    return made


def test_a_flipped_bit_of_a_checkpoint_is_found_when_it_is_read(tmp_path: Path) -> None:
    made = callback(tmp_path / "faults", run_dir=tmp_path)
    saved_runs(tmp_path, [5]).close()
    assert made.flip_checkpoint(random.Random(1)) is None
    saved_runs(tmp_path, [5, 10]).close()
    assert made.flip_checkpoint(random.Random(1)) == 10
    newest, before = open_checkpoints(tmp_path).list()
    with pytest.raises(CheckpointDamaged):
        read_tensors(newest.path)
    read_tensors(before.path)


def test_one_bit_of_one_parameter_flips(tmp_path: Path) -> None:
    parameters = {name: torch.nn.Parameter(torch.randn(7, 5)) for name in "ab"}
    before = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    callback(tmp_path / "faults", parameters=parameters).flip_parameter(random.Random(5))
    changed = {
        name: int((before[name].view(torch.int32) ^ parameter.detach().view(torch.int32)).count_nonzero())
        for name, parameter in parameters.items()
    }
    assert sorted(changed.values()) == [0, 1]


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_a_slow_rank_waits_where_it_computes(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice as long as the fastest step took, forty times: less would be hidden in what a device waits for its host."""
    waited: dict[str, list[float]] = {"cpu": [], "cuda": []}
    monkeypatch.setattr(inject.time, "sleep", waited["cpu"].append)
    monkeypatch.setattr(inject, "keep_device_busy", lambda device, seconds: waited[device.type].append(seconds))
    schedule = scheduled(tmp_path / "faults", PlannedFault(1, "slow", 0, 12, 0))
    made = ChaosCallback(str(schedule))
    made.on_start(SimpleNamespace(rank=0, device=torch.device(kind)))  # type: ignore[arg-type]
    for step in range(1, 71):
        made.on_step_begin(step)
        # The first step compiles, and what a slow rank makes of its steps does not make it slower.
        seconds = 30.0 if step == 1 else 0.25 if step < 12 else 0.75
        made.on_step_end(SimpleNamespace(step=step, step_seconds=seconds))  # type: ignore[arg-type]
    assert waited == {"cpu": [], "cuda": []} | {kind: [0.5] * 40}
    assert (schedule.parent / "happened-1.json").exists()


def test_a_slow_rank_is_found_by_the_event_that_names_it(tmp_path: Path) -> None:
    planned = [PlannedFault(1, "slow", 1, 12, 0)]
    beside, run_dir = tmp_path / "faults", tmp_path / "run"
    beside.mkdir()
    run_dir.mkdir()
    planned[0].marker_file(beside).write_text(json.dumps({"time": 1000.0}))
    (beside / STEP_LOG).write_text(f"990.0 {START}\n999.0 11\n1001.0 12\n1004.0 13\n")
    run_dir.with_suffix(".log").write_text("")
    (missed,) = _match_reports(planned, 1, run_dir, beside)
    assert (missed.found_as, missed.named_right, missed.detected_s) == ("", False, None)
    for rank, right in ((0, False), (1, True)):
        events = [{"kind": "straggler", "step": 13, "time": iso(1003.5), "rank": rank, "cause": "device"}]
        (run_dir / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
        (found,) = _match_reports(planned, 1, run_dir, beside)
        assert (found.detected_s, found.found_as, found.named_right, found.training_s) == (
            3.5,
            f"rank {rank}: straggler (device)",
            right,
            4.0,
        )


def iso(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds")


def test_reports_are_matched_to_what_happened(tmp_path: Path) -> None:
    kinds = ["kill", "hang", "damage", "bitflip", "kill"]
    planned = [PlannedFault(n, kind, 1, 10 * n, 0) for n, kind in enumerate(kinds, 1)]
    beside, run_dir = tmp_path / "faults", tmp_path / "run"
    beside.mkdir()
    run_dir.mkdir()
    for fault in planned[:4]:
        marker = {"time": 1000.0 * fault.number, "damaged": 25}
        fault.marker_file(beside).write_text(json.dumps(marker))
    # The second report blames another rank, and nobody has noticed the damage.
    causes = [(1001.5, 1, "signal"), (2004.0, 0, "hang"), (3001.0, 1, "signal")]
    rows = [{"time": iso(at), "rank": rank, "cause": cause} for at, rank, cause in causes]
    (run_dir / "faults.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    reason = "step 41: 1 parameters that ranks hold alike differ, first x: rank 1 (a), rank 0 (a)"
    # A rank that is woken before it is ended may still end its step, as at 2004.1.
    begun = {1008.0, 2010.0, 3080.0}
    steps = [
        (999, 8),
        (1001, 9),
        (1010, 6),
        (2004.1, 20),
        (2014.5, 16),
        (3100, 26),
        (3999, 39),
        (4000.25, 36),
        (4002, 37),
    ]
    log = [*steps, *((at, START) for at in begun)]
    (beside / STEP_LOG).write_text("".join(f"{at} {what}\n" for at, what in sorted(log)))
    said = f"warning: {reason}\n"
    run_dir.with_suffix(".log").write_text(f"checkpoint of step 30 is damaged\n{said}")
    found = list(_match_reports(planned, 1, run_dir, beside))
    assert [one.named_right for one in found] == [True, False, False, True]
    assert [one.detected_s for one in found] == pytest.approx([1.5, 4.0, 1.0, 0.25])
    assert [one.training_s for one in found] == pytest.approx([10.0, 14.5, 100.0, 2.0])
    # One that strikes before ranks are ended for another, or while they are, is reported with it; one on its own is not.
    for at in (1001.4, 1003.0):
        planned[4].marker_file(beside).write_text(json.dumps({"time": at}))
        first, second, *_ = _match_reports(planned, 1, run_dir, beside)
        assert (first.found_as, second.found_as) == ("rank 1: signal", "together with the one before")
        assert second.training_s == pytest.approx(1010.0 - at)
    planned[4].marker_file(beside).write_text(json.dumps({"time": 5000.0}))
    last = list(_match_reports(planned, 1, run_dir, beside))[-1]
    assert (last.found_as, last.named_right, last.detected_s) == ("", False, None)
    run_dir.with_suffix(".log").write_text("checkpoint of step 25 is damaged\n")
    assert not list(_match_reports(planned, 1, run_dir, beside))[3].named_right
    assert list(_match_reports(planned, 1, run_dir, beside))[2].named_right


def test_a_bit_that_another_fault_overtakes_is_gone_with_it(tmp_path: Path) -> None:
    planned = [PlannedFault(1, "bitflip", 0, 22, 0), PlannedFault(2, "stop", 1, 21, 0)]
    beside, run_dir = tmp_path / "faults", tmp_path / "run"
    beside.mkdir()
    run_dir.mkdir()
    # The suspended rank is woken before it is ended, and so a bit flips that step 22 would have shown.
    for fault, at in zip(planned, (1003.0, 1000.0), strict=True):
        fault.marker_file(beside).write_text(json.dumps({"time": at}))
    (run_dir / "faults.jsonl").write_text(json.dumps({"time": iso(1003.1), "rank": 1, "cause": "stopped"}) + "\n")
    log = [(990, START), (999, 20), (1003, 21), (1005, START), (1006, 16), (1010, 22), (1020, 16)]
    (beside / STEP_LOG).write_text("".join(f"{at} {what}\n" for at, what in log))
    run_dir.with_suffix(".log").write_text("")
    stopped, flipped = _match_reports(planned, 1, run_dir, beside)
    assert (stopped.found_as, stopped.named_right) == ("rank 1: stopped", True)
    assert (flipped.found_as, flipped.named_right, flipped.training_s) == ("gone with another fault", True, 3.0)


def test_a_step_done_again_in_place_counts_as_found(tmp_path: Path) -> None:
    planned = [PlannedFault(1, "oom", 0, 3, 0)]
    beside, run_dir = tmp_path / "faults", tmp_path / "run"
    beside.mkdir()
    run_dir.mkdir()
    planned[0].marker_file(beside).write_text(json.dumps({"time": 1000.0}))
    events = [{"kind": "less_memory", "step": 3, "time": iso(1000.5), "microbatch": 2}]
    (run_dir / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    (beside / STEP_LOG).write_text(f"990.0 {START}\n999.0 2\n1001.5 3\n")
    run_dir.with_suffix(".log").write_text("")
    (found,) = _match_reports(planned, 1, run_dir, beside)
    assert (found.detected_s, found.training_s, found.named_right) == (0.5, 1.5, True)


def test_what_counts_as_survived() -> None:
    def outcome(kind: str, *, same: bool | None, difference: float | None) -> FaultOutcome:
        return FaultOutcome(PlannedFault(1, kind, 0, 2, 0), 1, 0.5, "x", True, 3.0, same, difference)

    assert outcome("kill", same=True, difference=0.0).survived
    assert not outcome("kill", same=False, difference=1e-9).survived
    assert not outcome("kill", same=None, difference=None).survived
    assert outcome("oom", same=False, difference=1e-6).survived
    assert not outcome("oom", same=False, difference=0.5).survived
    rows = (outcome("kill", same=True, difference=0.0), outcome("hang", same=False, difference=0.25))
    lines = list(write_table(SimpleNamespace(outcomes=rows, runs=2, undisturbed_s=5.0, disturbed_s=20.0, failures=())))  # type: ignore[arg-type]
    assert lines[0].split()[:4] == ["fault", "run", "rank", "step"] and "differs by 2.5e-01" in lines[2]
    assert "1 of 2 faults in 2 runs were found, called right and left no trace" in lines
    assert "goodput 25" in lines[-1] and len(KINDS) == 12
