"""sbatch, squeue, sacct, scancel, srun and scontrol as executables that run job arrays here, and make some fail.

The state of a job is a file of a folder. One small process a job waits for its turn, runs the script with bash, and notes
how it ended. What befalls a job is drawn from a seed and its number, or named for it.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path

FATES = ("NODE_FAIL", "TIMEOUT", "OUT_OF_MEMORY", "CANCELLED", "PREEMPTED", "LOST", "KILLED_RANK", "BAD_NODE")
"""What may befall a job. The first five are states of Slurm, which ends the job with them. LOST: neither queue nor accounts
know it any more. KILLED_RANK: its rank gets signal 9. BAD_NODE: its script fails before a rank begins."""

_COMMON = r"""
import fcntl, glob, json, os, random, re, signal, subprocess, sys, time
FOLDER = os.path.dirname(os.path.abspath(__file__))
JOBS = FOLDER + "/jobs/"
SETTINGS = json.load(open(FOLDER + "/settings.json"))
ALIVE = ("PENDING", "RUNNING", "COMPLETING")
OPTIONS = dict(word[2:].partition("=")[::2] for word in sys.argv[1:] if word.startswith("--"))
WORDS = [word for word in sys.argv[1:] if not word.startswith("-")]
def load(job):
    with open(JOBS + job) as file:
        return json.load(file)
def save(job, **changes):
    with open(FOLDER + "/lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        known = load(job) if os.path.exists(JOBS + job) else {}
        # What has ended stays as it ended.
        if known.get("state", "PENDING") in ALIVE or "gone" in changes:
            known.update(changes)
            with open(FOLDER + "/new", "w") as file:
                json.dump(known, file)
            os.rename(FOLDER + "/new", JOBS + job)
        return known
def every():
    return {job: load(job) for job in sorted(os.listdir(JOBS), key=lambda job: [int(part) for part in job.split("_")])}
def signal_group(pid, number):
    try:
        os.killpg(pid, number)
    except ProcessLookupError:
        pass
def note(*words):
    with open(FOLDER + "/calls", "a") as log:
        log.write(json.dumps(words) + "\n")
"""

_PROGRAMS = {
    "sbatch": r"""
note("sbatch", *sys.argv[1:])
if os.path.exists(FOLDER + "/refuses"):
    sys.exit("sbatch: error: Batch job submission failed: QOSMaxSubmitJobPerUserLimit")
script = WORDS[0]
asked = dict(re.findall(r"^#SBATCH --([a-z-]+)(?:=(.*))?$", open(script).read(), re.M))
with open(FOLDER + "/number", "a+") as file:
    fcntl.flock(file, fcntl.LOCK_EX)
    file.write(".")
    array = str(file.tell())
h, m, s = map(int, asked["time"].split(":"))
first, last = map(int, asked["array"].split("-"))
for task in range(first, last + 1):
    job = f"{array}_{task}"
    save(job, state="PENDING", name=asked["job-name"], script=script, output=asked["output"], array=array, task=task,
         nodes=int(asked["nodes"]), per_node=int(asked["ntasks-per-node"]), limit=h * 3600 + m * 60 + s)
    subprocess.Popen([sys.executable, "-IS", FOLDER + "/run-job", job], start_new_session=True,
                     stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
print(array)
""",
    "run-job": r"""
job = WORDS[0]
known = load(job)
chance = random.Random(f"{SETTINGS['seed']} {job}")
drawn = [name for name, share in SETTINGS["shares"].items() if chance.random() < share]
fate = SETTINGS["named"].get(job) or next(iter(drawn), None)
after = SETTINGS["after_s"] * chance.random()
slot = None
while slot is None:
    # So many jobs run at once.
    if load(job)["state"] != "PENDING":
        sys.exit()
    for number in range(SETTINGS["running"]):
        file = open(f"{FOLDER}/slot-{number}", "w")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            continue
        slot = file
        break
    else:
        time.sleep(0.05)
number = str(100000 + 1000 * int(known["array"]) + known["task"])
environment = {**os.environ, "SLURM_JOB_ID": number, "SLURM_ARRAY_TASK_ID": str(known["task"]), "STUB_JOB": job,
               "SLURM_JOB_NODELIST": "localhost", "SLURM_NTASKS_PER_NODE": str(known["per_node"])}
if fate == "BAD_NODE":
    environment["PATH"] = "/nowhere"
output = known["output"].replace("%A", known["array"]).replace("%a", str(known["task"]))
with open(output, "ab") as log:
    command = ["/bin/bash", known["script"]]
    process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
if save(job, state="RUNNING", pid=process.pid)["state"] != "RUNNING":
    fate, after = "CANCELLED", 0
began, acted = time.time(), None
while process.poll() is None:
    time.sleep(0.02)
    now = time.time() - began
    ranks = [int(open(file).read() or 0) for file in glob.glob(f"{FOLDER}/rank-{job}-*")]
    if now > known["limit"]:
        fate, after = "TIMEOUT", 0
    if load(job).get("cancel"):
        fate, after = "CANCELLED", 0
    if fate and fate != "BAD_NODE" and acted is None and ranks and now > after:
        acted = now
        if fate == "KILLED_RANK":
            os.kill(ranks[0], signal.SIGKILL)
        else:
            save(job, state="COMPLETING" if fate == "LOST" else fate)
            for pid in [process.pid, *ranks]:
                signal_group(pid, signal.SIGKILL)
    elif fate == "CANCELLED" and acted is None:
        acted = now
        save(job, state=fate)
        signal_group(process.pid, signal.SIGKILL)
if fate == "LOST" and acted is not None:
    save(job, gone=True)
else:
    save(job, state="COMPLETED" if process.returncode == 0 else "FAILED")
""",
    "srun": r"""
command = next(sys.argv[i:] for i in range(1, len(sys.argv)) if not sys.argv[i].startswith("--"))
tasks, on_node = int(OPTIONS["ntasks"]), int(OPTIONS["ntasks-per-node"])
assert tasks == int(OPTIONS["nodes"]) * on_node
ranks = []
for rank in range(tasks):
    step = {"SLURM_PROCID": rank, "SLURM_LOCALID": rank % on_node, "SLURM_NTASKS": tasks, "SLURM_STEP_NUM_TASKS": tasks,
            "SLURM_STEP_ID": 0}
    ranks.append(subprocess.Popen(command, start_new_session=True,
                                  env={**os.environ, **{name: str(value) for name, value in step.items()}}))
    with open(f"{FOLDER}/rank-{os.environ['STUB_JOB']}-{rank}", "w") as file:
        file.write(str(ranks[-1].pid))
codes = [None] * tasks
while None in codes:
    time.sleep(0.01)
    codes = [rank.poll() for rank in ranks]
    if any(codes) and OPTIONS["kill-on-bad-exit"] == "1":
        # As srun does: it leaves those that end in good order a moment.
        deadline = time.time() + 5.0
        while time.time() < deadline and any(rank.poll() is None for rank in ranks):
            time.sleep(0.01)
        for rank in ranks:
            rank.kill()
        codes = [rank.wait() for rank in ranks]
worst = next((code for code in codes if code), 0)
sys.exit(128 - worst if worst < 0 else worst)
""",
    "scancel": r"""
note("scancel", *sys.argv[1:])
for job in WORDS:
    known = load(job)
    if known["state"] not in ALIVE or OPTIONS.get("state", known["state"]) != known["state"]:
        continue
    if "signal" in OPTIONS:
        for file in glob.glob(f"{FOLDER}/rank-{job}-*"):
            signal_group(int(open(file).read()), signal.Signals["SIG" + OPTIONS["signal"]])
    elif known["state"] == "PENDING":
        save(job, state="CANCELLED")
    else:
        save(job, cancel=True)
""",
    "squeue": r"""
if os.path.exists(FOLDER + "/silent"):
    sys.exit("slurm_load_jobs error: Unable to contact slurm controller (connect failure)")
for job, known in every().items():
    if known["name"] == OPTIONS["name"] and not known.get("gone") and not known.get("aged"):
        print(f"{job}|{known['state']}")
""",
    "sacct": r"""
for job, known in every().items():
    if job in OPTIONS["jobs"].split(",") and not known.get("gone"):
        print(f"{job}|{known['state']}" + (" by 1000" if known["state"] == "CANCELLED" else ""))
""",
    "scontrol": "print('localhost')\n",
}


class StubSlurm:
    """The executables in `folder/bin`, and what they keep."""

    def __init__(
        self,
        folder: Path,
        *,
        running: int = 2,
        shares: Mapping[str, float] | None = None,
        named: Mapping[str, str] | None = None,
        after_s: float = 0.0,
        seed: int = 0,
    ) -> None:
        """Write the executables.

        running: jobs that run at once. shares: probability of each fate. named: the fate of a job such as 1_0. after_s: most
        seconds of a job before it befalls it.
        """
        self.bin = folder / "bin"
        (self.bin / "jobs").mkdir(parents=True)
        settings = {"running": running, "shares": shares or {}, "named": named or {}, "after_s": after_s, "seed": seed}
        assert {*(shares or {}), *(named or {}).values()} <= set(FATES)
        (self.bin / "settings.json").write_text(json.dumps(settings))
        for name, program in _PROGRAMS.items():
            # Without the site packages an interpreter starts in a hundredth of a second.
            (self.bin / name).write_text(f"#!{sys.executable} -IS\n{_COMMON}{program}")
            (self.bin / name).chmod(0o755)
        self.path = f"{self.bin}{os.pathsep}{os.environ['PATH']}"
        """PATH with the executables first."""

    def states(self) -> dict[str, str]:
        """Return the state of every job, in the order of their numbers; LOST for those that nobody knows."""
        found = {file.name: json.loads(file.read_text()) for file in (self.bin / "jobs").iterdir()}
        ordered = sorted(found, key=lambda job: [int(part) for part in job.split("_")])
        return {job: "LOST" if found[job].get("gone") else found[job]["state"] for job in ordered}

    def calls(self, program: str) -> list[list[str]]:
        """Return the arguments of each call of sbatch or scancel."""
        log = self.bin / "calls"
        lines = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
        return [words for name, *words in lines if name == program]

    def refuse(self, refuses: bool) -> None:
        """Have sbatch take no jobs, or take them again."""
        self._mark("refuses", refuses)

    def silence(self, silent: bool) -> None:
        """Have squeue give no answer, or answer again."""
        self._mark("silent", silent)

    def _mark(self, name: str, there: bool) -> None:
        if there:
            (self.bin / name).touch()
        else:
            (self.bin / name).unlink(missing_ok=True)
