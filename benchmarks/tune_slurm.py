"""A tuning study that submits its trials as Slurm job arrays, through failures: with a stub of Slurm, or a real one.

    python benchmarks/tune_slurm.py stub --out benchmarks/results/tune/slurm-stub-200.json
    python benchmarks/tune_slurm.py real --out benchmarks/results/tune/slurm-real.json
    python benchmarks/tune_slurm.py widths --out benchmarks/results/tune/slurm-widths.json

stub: 200 trials of two ranks each. sbatch and its companions are those of `tests/stub_slurm.py`, which run jobs here and let
shares of them fail as nodes, time limits, memory and people do; what stands for training is the script of
`tests/tuned_script.py`, so what is tested is the study and its jobs.

real: some trials with the real trainer, each of two ranks on two nodes, on a Slurm that is there already and has two nodes.
Meanwhile a job is cancelled by `scancel`, the study is stopped with Ctrl-C and started again, and killed and started again;
`--fail-node CMD` and `--mend-node CMD` are run so that one node fails under a trial and comes back.

widths: what Slurm gives to trials of 2, 3, 4, 8, 12 and 16 ranks, on two nodes of eight devices of a Slurm that is there
already: as jobs of arrays, then as steps of one allocation of both nodes, all that fit at once. A rank is a program that
notes where it is and which device it would take; the script fails where that is not what it should be. The Slurm needs
eight cores a node and no devices: options that ask srun for these are left out.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from phalanx.config.load import parse_run
from phalanx.config.schema import Run
from phalanx.families.registry import bind
from phalanx.hardware.machine import Machine
from phalanx.launch.job_script import Job
from phalanx.study.hyperparameters.asha import rung_steps
from phalanx.study.hyperparameters.candidates import CandidateQueue, CostModel, measure_size
from phalanx.study.hyperparameters.configuration import finished_trials, group_configurations, open_store
from phalanx.study.hyperparameters.hyperparameter_space import build_hyperparameter_space
from phalanx.study.hyperparameters.packing import QUEUED
from phalanx.study.hyperparameters.tuner import Settings, Tuner, describe_jobs, describe_study, find_places
from phalanx.study.processes.job_arrays import JobArrays
from phalanx.study.processes.slots import find_devices, spread_over_nodes
from phalanx.study.samplers import make_sampler
from phalanx.study.trial import Trial
from stub_slurm import StubSlurm
from token_data import write_run_file, write_token_folder
from tuned_script import RUN, SCRIPT

ROOT = Path(__file__).parents[1]
Row = dict[str, Any]
RANKS = 2
SHARES = {
    "NODE_FAIL": 0.05,
    "TIMEOUT": 0.03,
    "OUT_OF_MEMORY": 0.03,
    "CANCELLED": 0.03,
    "PREEMPTED": 0.04,
    "LOST": 0.03,
    "KILLED_RANK": 0.03,
    "BAD_NODE": 0.02,
}
"""Probability with which each befalls a job of the stub."""
TUNE = """
tune:
  parameters: {optimizer.lr: {low: 1e-4, high: 1e-2, log: true}, layout.pp: [1, 2]}
  metric: loss
  trials: 6
  engine: random
  nproc: 2
  asha: {eta: 2, rungs: 2}
  time_limit_s: 600
"""
WIDTHS, DEVICES = (2, 3, 4, 8, 12, 16), 8
PLACES = r"""
import json, os, subprocess, sys, time
rank, local = int(os.environ["SLURM_PROCID"]), int(os.environ["SLURM_LOCALID"])
device = int(os.environ.get("PHALANX_TRIAL_FIRST_DEVICE", 0)) + local
time.sleep(1)
if rank == 0:
    with open(sys.argv[1] + "/job", "w") as file:
        subprocess.run(["scontrol", "show", "job", "--oneliner", os.environ["SLURM_JOB_ID"]], stdout=file)
with open(sys.argv[1] + f"/place-{rank}.json", "w") as file:
    json.dump([os.environ["SLURMD_NODENAME"], rank, device], file)
"""
"""What stands for a rank."""
STEPS = 600
"""Optimizer steps of a trial: long enough that a node is missed before it ends."""
MACHINE = """
name: here
about: two nodes of a Slurm on one machine
documents: {}
node: {source: sinfo, devices: DEVICES, device: H100 SXM, cores_per_task: 1}
stop: {seconds_before_end: 20}
"""


def main() -> None:
    """Run what is asked for and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("slurm", choices=["stub", "real", "widths", "steps"])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--trials", type=int, default=200, help="of the stub")
    parser.add_argument("--fail-node", default="", metavar="CMD", help="makes a node fail, of a real Slurm")
    parser.add_argument("--mend-node", default="", metavar="CMD", help="brings it back")
    parser.add_argument("--note", default="", help="what else ran on the machine")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="tune-slurm-") as name:
        began = time.monotonic()
        runs: dict[str, Callable[[], Row]] = {
            "stub": lambda: run_stub(Path(name), asked.trials),
            "real": lambda: run_real(Path(name), asked),
            "widths": lambda: run_widths(Path(name)),
            "steps": run_steps,
        }
        found = runs[asked.slurm]()
        result = {
            "command": shlex.join(["python", "benchmarks/tune_slurm.py", *sys.argv[1:]]),
            "when": datetime.now(UTC).isoformat(timespec="seconds"),
            "commit": subprocess.check_output(["git", "rev-parse", "HEAD"], cwd=ROOT, text=True).strip(),
            "versions": {one: metadata.version(one) for one in ("torch", "optuna")},
            "machine": {"system": platform.platform(), "load": os.getloadavg(), "note": asked.note},
            "seconds": round(time.monotonic() - began, 1),
            **found,
        }
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    asked.out.write_text(json.dumps(result, indent=1) + "\n")


def run_stub(folder: Path, trials: int) -> Row:
    """Run `trials` trials on the stub and return what came of them; raise where one is not accounted for."""
    slurm = StubSlurm(folder, running=8, shares=SHARES, after_s=0.5)
    os.environ["PATH"] = slurm.path
    run = parse_run(RUN.replace("SEEDS", "[0, 10]"), "run.yaml")
    space, rungs = build_hyperparameter_space(run), rung_steps(run.tune.asha, run.training.steps)
    costs = CostModel(space.ranges, measure_size(bind(run), RANKS), accelerator=True)
    sampler = make_sampler("random", space, 0)
    queue = CandidateQueue(space, sampler, costs, rungs=rungs, eta=3, trials=trials, default_first=False, ranks=RANKS)
    study = folder / "study"
    command = (sys.executable, "-IS", "-c", SCRIPT, "0.05")
    arrays = JobArrays(_describe(RANKS), Job(folder, 1, folder, seconds=120), study, poll_s=0.5, command=command)
    store = open_store(study, describe_study(run, space, rungs))
    settings = Settings(study, "loss", 1, 120.0, packing=QUEUED)
    said: list[str] = []

    def tell(part: Trial, number: int) -> None:
        if part.outcome is not None and not part.good:
            said.append(f"trial {number}: {part.outcome.describe_failure()}".replace(str(folder), "WORK"))

    why = Tuner(store, queue, find_places(arrays, 32 * RANKS, RANKS), settings, tell, arrays).run()
    found = summarise(study)
    assert found["trials_that_count"] == trials and found["parts"]["runs"] == 0
    states = Counter(slurm.states().values())
    return {"why": why, **found, "jobs": dict(states), "arrays": len(slurm.calls("sbatch")), "told": said}


def run_real(folder: Path, asked: argparse.Namespace) -> Row:
    """Run the real trainer on the Slurm that is there; return what came of the trials and what was said."""
    file, machine, study = folder / "run.yaml", folder / "here.yaml", folder / "study"
    write_run_file(file, write_token_folder(folder / "data"))
    file.write_text(file.read_text() + TUNE)
    machine.write_text(MACHINE.replace("DEVICES", "1"))
    command = [sys.executable, "-m", "phalanx", "tune", str(file), "--out", str(study), "--where", "sbatch"]
    command += ["--cluster", str(machine), "--devices", "4", f"training.steps={STEPS}"]
    lines: list[str] = []

    def start() -> subprocess.Popen[bytes]:
        lines.append("$ " + shlex.join(["phalanx", *command[3:]]))
        return subprocess.Popen(command, stdout=(folder / "said").open("ab"), stderr=subprocess.STDOUT)

    def shell(text: str) -> None:
        lines.append("$ " + text)
        done = subprocess.run(["bash", "-c", text], capture_output=True, text=True, check=False)
        lines.extend((done.stdout + done.stderr).splitlines())

    def take_said() -> None:
        lines.extend((folder / "said").read_text().splitlines())
        (folder / "said").write_text("")

    def running() -> str:
        return subprocess.run(
            ["squeue", "--noheader", "--array", "--states=RUNNING", "--format=%i"],
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()

    def training() -> bool:
        return bool(running()) and any(
            time.time() - log.stat().st_mtime < 5 for log in study.glob("trials/*/metrics.jsonl")
        )

    shell("sinfo --version; sinfo --Node --long")
    process = start()
    wait_until(training)
    shell(f"scancel {running().split()[0]}")
    wait_until(lambda: b"cancelled" in (folder / "said").read_bytes())
    wait_until(training)
    if asked.fail_node:
        shell(asked.fail_node)
        wait_until(lambda: b"NODE_FAIL" in (folder / "said").read_bytes())
        shell("sinfo --Node --long")
        shell(asked.mend_node)
        wait_until(training)
    process.send_signal(signal.SIGINT)
    process.wait()
    take_said()
    shell("squeue --states=all --array")
    process = start()
    wait_until(training)
    shell(f"kill -9 {process.pid}")
    process.wait()
    take_said()
    shell("squeue --array")
    process = start()
    assert process.wait() == 0
    take_said()
    shell("squeue --states=all --array")
    text = "\n".join(lines).replace(str(folder), "WORK")
    return {**summarise(study), "said": text.splitlines()}


def run_widths(folder: Path) -> Row:
    """Run trials of several widths as jobs, and as steps of an allocation; return what they asked for and where they ran."""
    jobs = []
    for ranks in WIDTHS:
        study = folder / f"study-{ranks}"
        study.mkdir()
        arrays = describe_jobs(_run_of(ranks), study, _whole_nodes(), Job(folder, 1, folder, seconds=300))
        arrays = replace(arrays, poll_s=1.0, command=(sys.executable, "-IS", "-c", PLACES))
        tasks = [arrays.add(_trial_folder(study, number)) for number in range(2)]
        wait_until(lambda: all(task.poll() is not None for task in tasks))  # noqa: B023
        assert all(task.ended and task.ended.code == 0 for task in tasks), [
            (task.folder / "log").read_text() for task in tasks
        ]
        places = [_read_places(task.folder, ranks) for task in tasks]
        nodes, each = spread_over_nodes(ranks, DEVICES)
        for one in places:
            assert sorted(rank for _, rank, _ in one) == list(range(ranks))
            assert Counter(Counter(host for host, _, _ in one).values()) == {each: nodes}
        script = (study / "arrays" / "1.sbatch").read_text().splitlines()
        known = (tasks[0].folder / "job").read_text()
        jobs.append(
            {
                "ranks": ranks,
                "asked": [line.removeprefix("#SBATCH ") for line in script if line.startswith("#SBATCH")],
                "given": dict(re.findall(r"(NumNodes|NumTasks|TRES|OverSubscribe|TresPerNode)=(\S+)", known)),
                "host, rank, device": places,
            }
        )
    out, wrapper = folder / "steps.json", folder / "bin" / "srun"
    wrapper.parent.mkdir()
    # The Slurm has cores in the place of devices.
    lines = ["#!/bin/bash", 'for word; do [[ $word == --gpu* ]] || kept+=("$word"); done']
    wrapper.write_text("\n".join([*lines, f'exec {shutil.which("srun")} "${{kept[@]}}"', ""]))
    wrapper.chmod(0o755)
    environment = {**os.environ, "PATH": f"{wrapper.parent}{os.pathsep}{os.environ['PATH']}"}
    command = ["salloc", "--nodes=2", "--exclusive", "--time=10", sys.executable, __file__, "steps", "--out", str(out)]
    subprocess.run(command, check=True, env=environment)
    version = subprocess.check_output(["sinfo", "--version"], text=True).strip()
    return {"slurm": version, "jobs": jobs, "steps": json.loads(out.read_text())["steps"]}


def run_steps() -> Row:
    """Run trials of several widths as steps of the allocation that this runs in, all that fit at once."""
    found = []
    with tempfile.TemporaryDirectory(prefix="tune-steps-") as name:
        for ranks in WIDTHS:
            slots = find_devices("slurm", "auto", None, _whole_nodes(), ranks)
            folders = [_trial_folder(Path(name), 100 * ranks + number) for number in range(len(slots))]
            program = (sys.executable, "-IS", "-c", PLACES)
            running = [
                replace(slot, program=program).start(folder, number, {}, 120.0)  # type: ignore[type-var]
                for number, (slot, folder) in enumerate(zip(slots, folders, strict=True))
            ]
            wait_until(lambda: all(one.poll() is not None for one in running))  # noqa: B023
            places = [_read_places(folder, ranks) for folder in folders]
            taken = [(host, device) for one in places for host, _, device in one]
            # No two ranks take one device.
            assert len(set(taken)) == len(taken) == len(slots) * ranks
            found.append({"ranks": ranks, "slots": [slot.name for slot in slots], "host, rank, device": places})
    return {"steps": found}


def _run_of(ranks: int) -> Run:
    return parse_run(RUN.replace("SEEDS", "[0, 10]") + f"  nproc: {ranks}\n", "run.yaml")


def _whole_nodes() -> Machine:
    """Return the description of nodes of which jobs take all devices, or some if they need less."""
    option = {"option": "--exclusive", "some_devices": "", "reason": "Jobs have whole nodes.", "source": "it"}
    return Machine.model_validate(_describe(DEVICES).model_dump() | {"slurm": {"sbatch": (option,)}})


def _trial_folder(parent: Path, number: int) -> Path:
    folder = parent / f"trial-{number}"
    folder.mkdir(parents=True)
    return folder


def _read_places(folder: Path, ranks: int) -> list[list[Any]]:
    """Return host, rank and device of each rank of a trial."""
    return [json.loads((folder / f"place-{rank}.json").read_text()) for rank in range(ranks)]


def wait_until(what: Callable[[], bool], seconds: float = 600.0) -> None:
    """Wait until `what` holds; raise where it does not within `seconds`."""
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.5)


def summarise(study: Path) -> Row:
    """Return what came of each part of all configurations, and how often parts were tried."""
    known = group_configurations(open_store(study, None).trials())
    parts = [part for one in known for part in one.parts]
    causes = Counter(part.outcome.cause if part.outcome else "runs" for part in parts)
    tries = Counter(Counter(part.key for part in parts).values())
    finished = finished_trials(study)
    return {
        "trials": len(known),
        "trials_that_count": sum(one.counted for one in known),
        "scored": len(finished),
        "best": {"score": finished[0].score, "steps": finished[0].steps, "values": finished[0].parameters},
        "parts": {"runs": 0, **causes},
        "tries_of_a_part": {str(count): number for count, number in sorted(tries.items())},
    }


def _describe(devices: int) -> Machine:
    return Machine.model_validate(
        {
            "name": "here",
            "about": "this machine",
            "documents": {},
            "node": {"source": "it", "devices": devices, "device": "H100 SXM", "cores_per_task": 1},
            "stop": {"seconds_before_end": 1},
        }
    )


if __name__ == "__main__":
    main()
