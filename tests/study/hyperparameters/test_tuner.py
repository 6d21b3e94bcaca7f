"""The tuner with real processes and a real journal; what stands for training is a script that a second is enough for."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from phalanx.cli.planning.tune import write_tune_lines
from phalanx.config.load import parse_run
from phalanx.errors import Interrupted
from phalanx.families.registry import bind
from phalanx.report.study_page import render_tune
from phalanx.study.hyperparameters.asha import rung_steps
from phalanx.study.hyperparameters.candidates import CandidateQueue, CostModel, measure_size
from phalanx.study.hyperparameters.configuration import (
    Configuration,
    finished_trials,
    group_configurations,
    open_store,
)
from phalanx.study.hyperparameters.hyperparameter_space import build_hyperparameter_space
from phalanx.study.hyperparameters.packing import PACKED, UNPACKED, Packing
from phalanx.study.hyperparameters.study_summary import summarise_study
from phalanx.study.hyperparameters.tuner import Settings, Tuner, describe_study
from phalanx.study.processes.slots import ProcessSlot
from phalanx.study.samplers import make_sampler
from phalanx.study.trial import Trial
from phalanx.training.start import train
from token_data import write_run_file, write_token_folder
from tuned_script import RUN, SCRIPT

STORES = Path(__file__).parents[1] / "stores"
"""Studies that an earlier version wrote."""


@dataclass(frozen=True)
class ScriptPlace(ProcessSlot):
    """A device on which the script runs."""

    name: str
    step_s: float = 0.01
    memory: float = 1e12
    accelerator: bool = False
    ranks: int = 1

    def command(self, folder: Path, limit_s: float) -> list[str]:
        return [sys.executable, "-S", "-c", SCRIPT, str(self.step_s), str(folder)]

    def env(self, number: int) -> Mapping[str, str]:
        return {}


def tuner(
    folder: Path,
    seeds: str,
    *,
    trials: int,
    step_s: float = 0.01,
    slots: int = 2,
    packing: Packing = PACKED,
    devices: int = 2,
    limit_s: float = 60.0,
    default_first: bool = False,
) -> Tuner:
    run = parse_run(RUN.replace("SEEDS", seeds), "run.yaml")
    space, rungs = build_hyperparameter_space(run), rung_steps(run.tune.asha, run.training.steps)
    costs = CostModel(space.ranges, measure_size(bind(run)), accelerator=False)
    sampler = make_sampler("random", space, 0)
    queue = CandidateQueue(space, sampler, costs, rungs=rungs, eta=3, trials=trials, default_first=default_first)
    places = [ScriptPlace(f"device {number}", step_s) for number in range(devices)]
    settings = Settings(folder, "loss", slots, limit_s, packing=packing)
    return Tuner(open_store(folder, describe_study(run, space, rungs)), queue, places, settings)


def known(folder: Path) -> list[Configuration]:
    return group_configurations(open_store(folder, None).trials())


@pytest.mark.parametrize("packing", [PACKED, UNPACKED])
def test_a_whole_study(tmp_path: Path, packing: Packing) -> None:
    assert (
        tuner(tmp_path, "[0, 10]", trials=9, packing=packing).run()
        == "every trial has ended, and none is promoted further"
    )
    finished = finished_trials(tmp_path)
    assert len(finished) == 9 and [one.score for one in finished] == sorted(one.score for one in finished)
    for one in finished:
        assert one.score == pytest.approx(1.0 / one.steps + float(str(one.parameters["optimizer.lr"])))
        assert (one.run_dir / "done").read_text() == str(one.steps)
    # Three of nine go on, and one of these; packing may take more along.
    reached = [sum(one.steps >= steps for one in finished) for steps in (1, 3, 9)]
    # One that went on as the best of the first three need not be among the best of nine.
    assert reached[0] == 9 and 3 <= reached[1] <= (5 if packing is UNPACKED else 9) and reached[2] >= 1
    (tmp_path / "run.yaml").write_text(RUN.replace("SEEDS", "[0, 10]"))
    facts = summarise_study(tmp_path)
    assert facts["best"]["number"] == finished[0].number == facts["order"][0]
    assert [row["reached"] for row in facts["stopped"]] == reached and facts["importance"]["trials"] == 9
    assert facts["without_packing"]["reached"][0] == 9 and 0.0 < facts["without_packing"]["idle"] < 1.0
    assert 0.0 < facts["devices"]["idle"] < 1.0 and len(facts["devices"]["spans"]) == sum(reached)
    assert len(write_tune_lines(facts | {"why": ""}, 100)) > 12 and "device 1" in render_tune(facts)
    # Started again it finds nothing to do.
    before = (tmp_path / "study.log").read_bytes()
    tuner(tmp_path, "[0, 10]", trials=9, packing=packing).run()
    assert (tmp_path / "study.log").read_bytes() == before


def test_failures_are_data(tmp_path: Path) -> None:
    found: list[tuple[str, int]] = []
    one = tuner(tmp_path, "[1, 3, 4]", trials=6, limit_s=2.0)
    one.tell = lambda part, number: found.append((part.outcome.cause if part.outcome else "begun", number))
    one.run()
    causes = {1: "crash", 3: "non_finite", 4: "hang"}
    configurations_ = known(tmp_path)
    assert len(configurations_) == 6 and len({str(one.values["training.seed"]) for one in configurations_}) > 1
    for each in configurations_:
        (part,) = each.parts
        assert part.outcome is not None and part.outcome.cause == causes[int(str(each.values["training.seed"]))]
        assert "no such thing" in part.outcome.words or part.outcome.cause != "crash"
    assert not finished_trials(tmp_path) and len(found) == 12


def test_out_of_memory_beside_others_is_tried_again_alone(tmp_path: Path) -> None:
    one = tuner(tmp_path, "[0, 2]", trials=4, slots=4, devices=1)
    one.begin_trials()
    for job in one.jobs:
        # However fast the first of them ends: they began together.
        job.note_sharing(len(one.jobs))
    one.run()
    tried = [one for one in known(tmp_path) if one.values["training.seed"] == 2]
    assert tried and all(part.good for one in tried for part in one.parts)
    tuner(tmp_path / "alone", "[2, 0]", trials=4, slots=1, devices=1).run()
    failed = [one.failure for one in known(tmp_path / "alone") if one.values["training.seed"] == 2]
    assert failed and all(
        part is not None and part.outcome and part.outcome.cause == "out_of_memory" for part in failed
    )


def test_a_trial_that_moves_goes_on_elsewhere(tmp_path: Path) -> None:
    one = tuner(tmp_path, "[0, 10]", trials=1, step_s=0.1)
    one.queue.rungs = (8,)
    one.begin_trials()
    (job,) = one.jobs
    while not (job.run_dir / "done").exists():
        time.sleep(0.01)
    job.move_to(one.slots["device 1"])
    one.run()
    (part,) = known(tmp_path)[0].parts
    assert part.good and part.outcome is not None
    assert [span[0] for span in part.outcome.more["spans"]] == ["device 0", "device 1"]
    rows = [json.loads(line)["step"] for line in (job.run_dir / "metrics.jsonl").open()]
    assert rows == list(range(1, 9))


def test_it_stops_in_good_order_and_goes_on(tmp_path: Path) -> None:
    one = tuner(tmp_path, "[0, 10]", trials=3, step_s=0.3)
    # A signal that comes twice at once, to the process and to its group, is one wish.
    timers = [threading.Timer(2.0 + 0.1 * number, os.kill, (os.getpid(), signal.SIGTERM)) for number in range(2)]
    one.tell = lambda part, number: [timer.start() for timer in timers if not timer.ident and part.outcome is None][:0]
    one.queue.rungs = (20,)
    with pytest.raises(Interrupted, match="the same command goes on from there"):
        one.run()
    stopped = [part for each in known(tmp_path) for part in each.parts]
    assert stopped and all(part.outcome and part.outcome.more.get("asked") for part in stopped)
    done = {path.parent.name: int(path.read_text()) for path in tmp_path.glob("trials/*/done")}
    assert all(0 < steps < 20 for steps in done.values())
    again = tuner(tmp_path, "[0, 10]", trials=3)
    again.queue.rungs = (20,)
    again.run()
    assert [each.number for each in known(tmp_path) if each.standing().scores] == [
        each.number for each in known(tmp_path)
    ]
    for name in done:
        rows = [json.loads(line)["step"] for line in (tmp_path / "trials" / name / "metrics.jsonl").open()]
        assert rows == list(range(1, 21))


def test_the_run_file_as_it_stands_is_tried_though_a_tuner_ended_before(tmp_path: Path) -> None:
    one = tuner(tmp_path, "[0, 10]", trials=4, default_first=True, slots=1, devices=1)
    default = one.queue.space.default()
    candidates = one.queue.candidates(one.store, 4, backfill=False)
    assert candidates[0].values == default
    # A longer one begins, and nothing is left of this tuner but the journal.
    part = one._claim_part(candidates[1], {})
    assert part is not None
    again = tuner(tmp_path, "[0, 10]", trials=4, default_first=True, slots=1, devices=1)
    for _ in range(2):
        drawn = [each.values for each in again.queue.candidates(again.store, 3, backfill=False)]
        assert len(drawn) == 3 and drawn.count(default) == 1
    assert again.queue.candidates(again.store, 1, backfill=False)[0].values == default


def test_two_tuners_share_a_study(tmp_path: Path) -> None:
    mine, theirs = tuner(tmp_path, "[0, 10]", trials=8), tuner(tmp_path, "[0, 10]", trials=8)
    parts: list[Trial] = []
    theirs.begin_trials()
    assert len(theirs.jobs) == 4
    mine.tell = lambda part, number: parts.append(part)
    mine.run()
    # All that theirs have claimed is left to them.
    claimed = {job.trial.key for job in theirs.jobs}
    assert claimed.isdisjoint(part.key for part in parts)
    theirs.run()
    keys = [part.key for each in known(tmp_path) for part in each.parts]
    assert len(keys) == len(set(keys)) and len(known(tmp_path)) == 8
    assert len(finished_trials(tmp_path)) == 8


def test_a_study_of_an_earlier_version_resumes(tmp_path: Path) -> None:
    """Written before layout search and tuning shared a loop: interrupted once, resumed, with a crash among five trials."""
    shutil.copytree(STORES / "tune", tmp_path, dirs_exist_ok=True)
    before = summarise_study(tmp_path)
    assert before["best"]["number"] == 4 and before["failures"] == {"crash": 1}
    assert [(row["number"], row["steps"], row["state"]) for row in before["trials"]] == [
        *((0, 3, "scored"), (1, 1, "scored"), (2, 3, "scored"), (4, 3, "scored"), (5, 0, "crash"))
    ]
    parts = {part.key: part.outcome for one in known(tmp_path) for part in one.parts}
    tuner(tmp_path, "[0, 1, 3, 10]", trials=24).run()
    after = known(tmp_path)
    assert len(after) == 24 and {part.key: part.outcome for one in after for part in one.parts}.items() >= parts.items()
    # More trials make room at later rungs; a trial goes there from the steps that it had.
    assert any(row["steps"] == 9 for row in summarise_study(tmp_path)["trials"])
    for one in after:
        log = tmp_path / "trials" / f"{one.number:04d}" / "metrics.jsonl"
        steps = [json.loads(line)["step"] for line in log.open()] if log.exists() else []
        assert steps == list(range(1, len(steps) + 1))


def test_a_rung_is_a_part_of_the_whole_run(tmp_path: Path) -> None:
    """The real trainer: up to a rung, and on from there, is what it would have been."""
    file = write_run_file(tmp_path / "run.yaml", write_token_folder(tmp_path / "data", train_tokens=20_000))
    run = parse_run(
        file.read_text(),
        "run.yaml",
        ["training.steps=4", "optimizer.warmup_steps=1", "optimizer.schedule=cosine", "checkpoint.every=null"],
    )
    train(run, tmp_path / "straight")
    train(run, tmp_path / "rungs", until=2)
    assert (tmp_path / "rungs" / "checkpoints" / "step-00000002").is_dir()
    train(run, tmp_path / "rungs")
    logs = {}
    for name in ("straight", "rungs"):
        rows = [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").open()]
        events = [json.loads(line) for line in (tmp_path / name / "events.jsonl").open()]
        evaluated = {event["step"]: event["loss"] for event in events if event["kind"] == "evaluation"}
        logs[name] = ([(row["step"], row["loss"], row["lr"]) for row in rows], evaluated)
    assert logs["rungs"][0] == logs["straight"][0]
    assert set(logs["rungs"][1]) == {2, 4} and logs["rungs"][1][4] == logs["straight"][1][4]
