"""Trials as tasks of Slurm job arrays, against a stub of Slurm that runs jobs here: real processes, real scripts.

What stands for training is a script that a second is enough for.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from phalanx.config.load import parse_run
from phalanx.errors import Interrupted, PhalanxError
from phalanx.families.registry import bind
from phalanx.hardware.machine import Machine
from phalanx.launch.job_script import Job
from phalanx.study.hyperparameters.candidates import CandidateQueue, CostModel, measure_size
from phalanx.study.hyperparameters.configuration import finished_trials, group_configurations, open_store
from phalanx.study.hyperparameters.hyperparameter_space import build_hyperparameter_space
from phalanx.study.hyperparameters.packing import QUEUED, UNPACKED
from phalanx.study.hyperparameters.study_summary import summarise_study
from phalanx.study.hyperparameters.tuner import Settings, Tuner, describe_jobs, describe_study, find_places
from phalanx.study.processes.job_arrays import JobArrays
from phalanx.study.processes.slots import SlurmDevices, find_devices
from phalanx.study.samplers import make_sampler
from phalanx.study.trial import Trial
from stub_slurm import StubSlurm
from tuned_script import RUN, SCRIPT

RANKS = 2
MACHINE = Machine.model_validate(
    {
        "name": "here",
        "about": "this machine",
        "documents": {},
        "node": {"source": "it", "devices": RANKS, "device": "H100 SXM", "cores_per_task": 1},
        "stop": {"seconds_before_end": 1},
        "environment": ({"name": "MARK", "value": "$SLURM_JOB_ID", "reason": "To be seen.", "source": "none"},),
    }
)


@pytest.fixture
def patch(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    monkeypatch.delenv("SLURM_PROCID", raising=False)
    yield monkeypatch


def tuner(folder: Path, seeds: str, *, trials: int, at_once: int = 8, steps: int = 4, step_s: float = 0.02) -> Tuner:
    run = parse_run(RUN.replace("SEEDS", seeds), "run.yaml")
    space = build_hyperparameter_space(run)
    costs = CostModel(space.ranges, measure_size(bind(run), RANKS), accelerator=True)
    sampler = make_sampler("random", space, 0)
    queue = CandidateQueue(
        space, sampler, costs, rungs=(steps,), eta=3, trials=trials, default_first=False, ranks=RANKS
    )
    folder.mkdir(exist_ok=True)
    (folder / "run.yaml").write_text(RUN.replace("SEEDS", seeds))
    command = (sys.executable, "-IS", "-c", SCRIPT, str(step_s))
    job = Job(folder, 1, Path.cwd(), folder, seconds=60)
    arrays = JobArrays(MACHINE, job, folder, poll_s=0.1, command=command)
    settings = Settings(folder, "loss", 1, 60.0, packing=QUEUED)
    store = open_store(folder, describe_study(run, space, queue.rungs))
    return Tuner(store, queue, find_places(arrays, at_once * RANKS, RANKS), settings, arrays=arrays)


def causes(folder: Path) -> dict[str, list[str]]:
    """What came of each configuration's parts, by the job that each had last."""
    found: dict[str, list[str]] = {}
    for one in group_configurations(open_store(folder, None).trials()):
        jobs = [json.loads((folder / f"jobs/{part.number}/job.json").read_text())["job"] for part in one.parts]
        found[jobs[0]] = [part.outcome.cause if part.outcome else "runs" for part in one.parts]
    return found


def test_trials_are_tasks_of_arrays(tmp_path: Path, patch: pytest.MonkeyPatch) -> None:
    slurm = StubSlurm(tmp_path, running=4)
    patch.setenv("PATH", slurm.path)
    study = tmp_path / "a study"
    tuner(study, "[0, 3]", trials=6, at_once=6).run()
    known = group_configurations(open_store(study, None).trials())
    wrong = [one for one in known if one.values["training.seed"] == 3]
    assert len(known) == 6 and 0 < len(wrong) < 6
    assert all(one.parts[0].outcome and one.parts[0].outcome.cause == "non_finite" for one in wrong)
    assert len(finished_trials(study)) == 6 - len(wrong)
    # All began together, as one array; what a rank says of its failure is told, and not that its job failed.
    assert len(slurm.calls("sbatch")) == 1
    assert sorted(set(slurm.states().values())) == ["COMPLETED", "FAILED"] and len(slurm.states()) == 6
    script = (study / "arrays" / "1.sbatch").read_text()
    assert f"#SBATCH --nodes=1\n#SBATCH --ntasks-per-node={RANKS}\n" in script and "#SBATCH --array=0-5\n" in script
    assert "#SBATCH --no-requeue" in script and 'export MARK="$SLURM_JOB_ID"' in script
    # Every trial had both of its ranks.
    assert len(list(study.glob("jobs/*/rank-1.json"))) == 6
    facts = summarise_study(study)
    assert facts["failures"] == {"non_finite": len(wrong)} and len(facts["devices"]["each"]) == 6


def large_nodes(devices: int) -> Machine:
    """A machine whose jobs take whole nodes unless they need less."""
    why = {"reason": "As large machines have it.", "source": "none"}
    options = (
        {"option": f"--gpus-per-node={devices}", "some_devices": "--gpus-per-node={devices}", **why},
        {"option": "--exclusive", "some_devices": "", **why},
    )
    node = MACHINE.node.model_dump() | {
        "devices": devices,
        "cpu_masks": tuple(hex(1 << core) for core in range(devices)),
    }
    return Machine.model_validate(MACHINE.model_dump() | {"node": node, "slurm": {"sbatch": options}})


@pytest.mark.parametrize(
    ("devices", "asked", "binding"),
    [
        # A trial of six ranks: on one node beside others, on two that it shares with others, or on three whole ones.
        (8, ["--nodes=1", "--ntasks-per-node=6", "--gpus-per-node=6"], "cores"),
        (4, ["--nodes=2", "--ntasks-per-node=3", "--gpus-per-node=3"], "cores"),
        (2, ["--nodes=3", "--ntasks-per-node=2", "--gpus-per-node=2", "--exclusive"], "mask_cpu:0x1,0x2"),
    ],
)
def test_a_job_asks_for_what_its_trial_needs(
    tmp_path: Path, patch: pytest.MonkeyPatch, devices: int, asked: list[str], binding: str
) -> None:
    slurm = StubSlurm(tmp_path, running=4)
    patch.setenv("PATH", slurm.path)
    one = tuner(tmp_path / "study", "[0, 3]", trials=1, steps=1)
    run = parse_run(RUN.replace("SEEDS", "[0, 3]") + "  nproc: 6\n", "run.yaml")
    job = Job(tmp_path, 1, Path.cwd(), tmp_path, seconds=60)
    arrays = describe_jobs(run, tmp_path / "study", large_nodes(devices), job)
    folder = tmp_path / "trial"
    folder.mkdir()
    (folder / "part.json").write_text(json.dumps({"run_dir": str(folder / "run"), "until": 1}))
    (folder / "run.yaml").write_text("training:\n  seed: 0\noptimizer:\n  lr: 0.1\n")
    assert one.arrays is not None
    arrays = replace(arrays, command=one.arrays.command, poll_s=0.1)
    task = arrays.add(folder)
    while (ended := task.poll()) is None:
        time.sleep(0.05)
    assert ended.code == 0 and len(list(folder.glob("rank-*.json"))) == 6
    script = (tmp_path / "study" / "arrays" / "1.sbatch").read_text().splitlines()
    assert all(f"#SBATCH {option}" in script for option in asked)
    assert ("#SBATCH --exclusive" in script) == ("--exclusive" in asked)
    assert f"    --cpu-bind={binding}" in script


def test_trials_of_several_devices_are_steps_of_an_allocation(tmp_path: Path, patch: pytest.MonkeyPatch) -> None:
    slurm = StubSlurm(tmp_path, running=4)
    allocation = {"SLURM_JOB_ID": "77", "SLURM_JOB_NODELIST": "localhost", "STUB_JOB": "0_0"}
    for name, value in {"PATH": slurm.path, **allocation}.items():
        patch.setenv(name, value)
    study = tmp_path / "study"
    one = tuner(study, "[0, 3]", trials=4)
    assert one.arrays is not None
    slots = find_devices("slurm", "auto", None, large_nodes(2 * RANKS), RANKS)
    assert len(slots) == 2 and all(isinstance(slot, SlurmDevices) for slot in slots)
    slots = [replace(slot, program=one.arrays.command) for slot in slots]  # type: ignore[type-var]
    Tuner(one.store, one.queue, slots, replace(one.settings, packing=UNPACKED)).run()
    known = group_configurations(open_store(study, None).trials())
    wrong = [part for part in known if part.values["training.seed"] == 3]
    assert len(known) == 4 and len(finished_trials(study)) == 4 - len(wrong)
    assert len(list(study.glob("jobs/*/rank-1.json"))) == 4


def test_what_befalls_jobs_is_told_by_name_and_lost_ones_run_again(tmp_path: Path, patch: pytest.MonkeyPatch) -> None:
    fates = ["NODE_FAIL", "TIMEOUT", "OUT_OF_MEMORY", "CANCELLED", "PREEMPTED", "LOST", "BAD_NODE", "KILLED_RANK"]
    slurm = StubSlurm(tmp_path, running=4, named={f"1_{place}": fate for place, fate in enumerate(fates)})
    patch.setenv("PATH", slurm.path)
    study = tmp_path / "study"
    said = []
    one = tuner(study, "[0, 10]", trials=9, at_once=9, step_s=0.1)
    one.tell = lambda part, number: said.append(part.outcome.describe_failure()) if part.outcome else None
    one.run()
    found = causes(study)
    assert [found[f"1_{place}"] for place in range(9)] == [
        *(
            ["interrupted", "ok"],
            ["hang"],
            ["out_of_memory"],
            ["cancelled"],
            ["interrupted", "ok"],
            ["interrupted", "ok"],
        ),
        *(["crash"], ["interrupted", "ok"], ["ok"]),
    ]
    told = " / ".join(said)
    for place, fate in enumerate(fates[:5]):
        assert f"job 1_{place}: {fate}" in told
    assert "job 1_5: Slurm knows nothing of it any more" in told and "job 1_6: FAILED" in told
    assert len(finished_trials(study)) == 5


def test_a_trial_whose_nodes_fail_again_and_again_is_given_up(tmp_path: Path, patch: pytest.MonkeyPatch) -> None:
    slurm = StubSlurm(tmp_path, named={f"{array}_0": "NODE_FAIL" for array in (1, 2, 3)})
    patch.setenv("PATH", slurm.path)
    study = tmp_path / "study"
    tuner(study, "[0, 10]", trials=1, at_once=1, step_s=0.1).run()
    # It counts as tried: else a study whose nodes always fail would never end.
    assert causes(study) == {"1_0": ["interrupted"] * 3} and not finished_trials(study)


def test_a_study_that_is_stopped_goes_on(tmp_path: Path, patch: pytest.MonkeyPatch) -> None:
    slurm = StubSlurm(tmp_path, running=2)
    patch.setenv("PATH", slurm.path)
    study = tmp_path / "study"
    one = tuner(study, "[0, 10]", trials=4, steps=20, step_s=0.2)
    timer = threading.Thread(target=_interrupt_when, args=(study / "trials", 2))
    timer.start()
    with pytest.raises(Interrupted, match="the same command goes on from there"):
        one.run()
    timer.join()
    assert sorted(slurm.states().values()) == ["CANCELLED", "CANCELLED", "FAILED", "FAILED"]
    done = {file.parent.name: int(file.read_text()) for file in study.glob("trials/*/done")}
    assert len(done) == 2 and all(0 < steps < 20 for steps in done.values())
    tuner(study, "[0, 10]", trials=4, steps=20, step_s=0.01).run()
    assert len(finished_trials(study)) == 4
    for name in done:
        rows = [json.loads(line)["step"] for line in (study / "trials" / name / "metrics.jsonl").open()]
        assert rows == list(range(1, 21))


def test_jobs_of_a_killed_study_are_taken_over(tmp_path: Path, patch: pytest.MonkeyPatch) -> None:
    slurm = StubSlurm(tmp_path, running=2)
    patch.setenv("PATH", slurm.path)
    study = tmp_path / "study"
    killed = tuner(study, "[0, 10]", trials=4, step_s=0.2)
    killed.begin_trials()
    killed.collect_ended()
    # Of a process that is killed nothing is left but its files and its jobs; these go on.
    assert len(slurm.calls("sbatch")) == 1
    tuner(study, "[0, 10]", trials=4).run()
    assert len(slurm.calls("sbatch")) == 1 and not slurm.calls("scancel")
    assert causes(study) == {f"1_{task}": ["ok"] for task in range(4)}


def test_one_process_alone_submits(tmp_path: Path, patch: pytest.MonkeyPatch) -> None:
    slurm = StubSlurm(tmp_path)
    patch.setenv("PATH", slurm.path)
    study = tmp_path / "study"
    first = tuner(study, "[0, 10]", trials=1)
    second = tuner(study, "[0, 10]", trials=1)

    def run_second(part: Trial, number: int) -> None:
        if part.outcome is None:
            with pytest.raises(PhalanxError, match="another"):
                second.run()

    first.tell = run_second
    first.run()
    assert len(slurm.calls("sbatch")) == 1 and len(finished_trials(study)) == 1


def test_a_scheduler_that_refuses_or_is_silent(tmp_path: Path, patch: pytest.MonkeyPatch) -> None:
    slurm = StubSlurm(tmp_path)
    patch.setenv("PATH", slurm.path)
    study = tmp_path / "study"
    slurm.refuse(True)
    with pytest.raises(PhalanxError, match=r"sbatch refused 2 trials: .*QOSMaxSubmitJobPerUserLimit"):
        tuner(study, "[0, 10]", trials=2).run()
    slurm.refuse(False)
    one = tuner(study, "[0, 10]", trials=2, at_once=1)

    def disturb(part: Trial, number: int) -> None:
        # Once a trial has ended: a full queue is waited for, and nothing is concluded from silence.
        if part.good:
            slurm.refuse(True)
            slurm.silence(True)
            threading.Timer(1.0, lambda: (slurm.silence(False), slurm.refuse(False))).start()

    one.tell = disturb
    one.run()
    assert len(finished_trials(study)) == 2


def _interrupt_when(trials: Path, count: int) -> None:
    deadline = time.monotonic() + 60
    while len(list(trials.glob("*/done"))) < count and time.monotonic() < deadline:
        time.sleep(0.02)
    time.sleep(0.3)
    os.kill(os.getpid(), signal.SIGINT)
