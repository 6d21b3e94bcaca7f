"""srun, sbatch, scontrol and phalanx as executables on PATH while a launch script runs for real on this machine."""

from __future__ import annotations

import getpass
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

from phalanx.layout.mesh import Ranks, ranks_from_environment

JOB_ID = 4_123_456

_SRUN = """
import os, subprocess, sys
options = dict(word[2:].partition("=")[::2] for word in sys.argv[1:] if word.startswith("--") and "=" in word)
command = next(sys.argv[i:] for i in range(1, len(sys.argv)) if not sys.argv[i].startswith("--"))
tasks, on_node = int(options["ntasks"]), int(options["ntasks-per-node"])
assert tasks == int(options["nodes"]) * on_node
if command[0] == "mkdir":
    # Nothing is made outside the test's own folder.
    with open(os.environ["FAKE_LOGS"] + "/mkdir", "a") as log:
        log.writelines(command[-1] + "\\n" for _ in range(tasks))
    sys.exit(0)
assert options["cpu-bind"] and options["distribution"] == "block"
ranks = []
for rank in range(tasks):
    step = {"SLURM_PROCID": rank, "SLURM_LOCALID": rank % on_node, "SLURM_NODEID": rank // on_node,
            "SLURM_NTASKS": tasks, "SLURM_STEP_NUM_TASKS": tasks, "SLURM_STEP_NUM_NODES": tasks // on_node}
    ranks.append(subprocess.Popen(command, env={**os.environ, **{name: str(value) for name, value in step.items()}}))
sys.exit(max(rank.wait() for rank in ranks))
"""

_SCONTROL = """
import os, sys
if sys.argv[1:3] == ["show", "hostnames"]:
    assert sys.argv[3] == os.environ["SLURM_JOB_NODELIST"]
    print(os.environ["FAKE_HOSTS"].replace(" ", "\\n"))
else:
    assert sys.argv[1] == "requeue"
    with open(os.environ["FAKE_LOGS"] + "/requeue", "a") as log:
        log.write(sys.argv[2] + "\\n")
"""

_SBATCH = """
import json, os, sys
with open(os.environ["FAKE_LOGS"] + "/sbatch", "a") as log:
    log.write(json.dumps(sys.argv[1:]) + "\\n")
sys.exit(int(os.environ.get("SBATCH_EXIT", "0")))
"""

_PHALANX = """
import json, os, sys, time
rank = os.environ["SLURM_PROCID"]
if sys.argv[1] == "doctor":
    with open(os.environ["FAKE_LOGS"] + "/doctor", "a") as log:
        log.write(json.dumps(sys.argv[1:]) + "\\n")
    sys.exit(int(os.environ.get("DOCTOR_EXIT", "0")) if rank == "0" else 0)
seen = {"environment": dict(os.environ), "arguments": sys.argv[1:], "directory": os.getcwd()}
path = os.environ["FAKE_LOGS"] + "/rank-" + rank
with open(path + ".new", "w") as file:
    json.dump(seen, file)
os.rename(path + ".new", path)
while "RANK_WAITS" in os.environ and not os.path.exists(os.environ["FAKE_LOGS"] + "/end"):
    time.sleep(0.01)
# One exit code for all attempts, or one for each.
codes = os.environ.get("RANK_EXIT", "0").split(",")
with open(os.environ["FAKE_LOGS"] + "/attempts-" + rank, "a+") as file:
    file.write("begun\\n")
    file.seek(0)
    attempt = len(file.readlines())
if rank == "0" and attempt <= int(os.environ.get("SAVES", "0")):
    os.makedirs(f"run/checkpoints/step-{attempt:08d}")
# The nodes that reports of faults name, one for each attempt.
named = os.environ.get("NAMES", "").split(",")
if rank == "0" and attempt <= len(named) and named[attempt - 1]:
    os.makedirs("run", exist_ok=True)
    with open("run/failed_nodes.txt", "a") as nodes:
        nodes.write(named[attempt - 1].replace("+", "\\n") + "\\n")
first = os.environ.get("FIRST_EXIT", "").split(",")
if rank == "0" and first[0]:
    os.makedirs("run", exist_ok=True)
    with open("run/exit_code.txt", "w") as said:
        said.write(first[min(attempt, len(first)) - 1])
sys.exit(int(codes[min(attempt, len(codes)) - 1]))
"""

_MEETING = """
import torch, torch.distributed as dist
from phalanx.layout.mesh import join_process_group, ranks_from_environment
ranks = ranks_from_environment()
join_process_group(ranks, torch.device("cpu"), timeout_s=60)
total = torch.tensor(ranks.rank)
dist.all_reduce(total)
print(f"rank {ranks.rank} of {ranks.world_size}: sum {int(total)}", flush=True)
dist.destroy_process_group()
"""

_SINGULARITY = """
import os, sys
assert sys.argv[1] == "run"
os.execvpe(sys.argv[3], sys.argv[3:], {**os.environ, "CONTAINER": sys.argv[2]})
"""


@dataclass(frozen=True)
class Seen:
    """What one rank was started with, and who it takes itself for."""

    environment: dict[str, str]
    arguments: list[str]
    directory: str
    ranks: Ranks


class FakeSlurm:
    """Runs launch scripts with bash; every command of Slurm is played by a small program in `folder`."""

    user = getpass.getuser()

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._bin, self._logs = folder / "bin", folder / "logs"
        self._bin.mkdir()
        self._logs.mkdir()
        for name, program in {"srun": _SRUN, "sbatch": _SBATCH, "scontrol": _SCONTROL, "phalanx": _PHALANX}.items():
            self._install(name, program)

    def install_meeting_program(self) -> None:
        """From now on the ranks join a process group, in place of only writing down what they see."""
        self._install("phalanx", _MEETING, isolated=False)

    def install_container(self) -> None:
        """Have a singularity that starts the command and tells it the image."""
        self._install("singularity", _SINGULARITY)

    def run(
        self, script: str, nodes: int, first_host: str = "node001", words: Sequence[str] = (), **extra: str
    ) -> subprocess.CompletedProcess[str]:
        """Run `script` to its end as Slurm's first shell of a job on `nodes` nodes. words: after the script's name."""
        process = self.start(script, nodes, first_host, words, **extra)
        out, err = process.communicate(timeout=60)
        return subprocess.CompletedProcess([], process.returncode, out, err)

    def start(
        self, script: str, nodes: int, first_host: str = "node001", words: Sequence[str] = (), **extra: str
    ) -> subprocess.Popen[str]:
        """As `run`, but does not wait."""
        file = self.folder / "script.sbatch"
        file.write_text(script)
        hosts = [first_host, *(f"node{number:03d}" for number in range(2, nodes + 1))]
        job = {
            "SLURM_JOB_ID": JOB_ID,
            "SLURM_JOB_NODELIST": f"node[001-{nodes:03d}]",
            "SLURM_SUBMIT_DIR": self.folder,
            "SLURM_NTASKS_PER_NODE": _asked(script, "ntasks-per-node"),
            "USER": self.user,
            "FAKE_HOSTS": " ".join(hosts),
            "FAKE_LOGS": self._logs,
            "PATH": f"{self._bin}:/usr/bin:/bin",
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
            "BASH_FUNC_module%%": '() { echo "$*" >> "$FAKE_LOGS/modules"; }',
        }
        return subprocess.Popen(
            ["bash", str(file), *words],
            env={**{name: str(value) for name, value in job.items()}, **extra},
            cwd="/",
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def wait_for_ranks(self, count: int) -> None:
        """Wait until `count` ranks have begun."""
        deadline = time.monotonic() + 30
        while len(list(self._logs.glob("rank-?"))) < count:
            assert time.monotonic() < deadline, "the ranks did not start"
            time.sleep(0.01)

    def let_ranks_end(self) -> None:
        """End ranks that were started with RANK_WAITS."""
        (self._logs / "end").touch()

    def seen(self) -> list[Seen]:
        """What each rank was started with, in order; who it is says the program's own reading of its environment."""
        found = []
        for path in self._logs.glob("rank-*"):
            record = json.loads(path.read_text())
            with mock.patch.dict(os.environ, record["environment"], clear=True):
                found.append(Seen(**record, ranks=ranks_from_environment()))
        return sorted(found, key=lambda rank: rank.ranks.rank)

    def examined(self) -> list[list[str]]:
        """The arguments of each `phalanx doctor` that ran, one a rank."""
        return [json.loads(line) for line in self._log("doctor")]

    def made_folders(self) -> list[str]:
        """Folders that the script made, once for each node."""
        return self._log("mkdir")

    def requeued(self) -> list[str]:
        """Jobs that were put back into the queue."""
        return self._log("requeue")

    def submitted(self) -> list[list[str]]:
        """The arguments of each sbatch."""
        return [json.loads(line) for line in self._log("sbatch")]

    def attempts(self) -> int:
        """How often the first rank was started."""
        return len(self._log("attempts-0"))

    def modules(self) -> list[str]:
        """Calls of `module`."""
        return self._log("modules")

    def _log(self, name: str) -> list[str]:
        path = self._logs / name
        return path.read_text().splitlines() if path.exists() else []

    def _install(self, name: str, program: str, *, isolated: bool = True) -> None:
        path = self._bin / name
        # Without the site packages an interpreter starts in a hundredth of a second.
        path.write_text(f"#!{sys.executable}{' -IS' if isolated else ''}\n{program}")
        path.chmod(0o755)


def _asked(script: str, option: str) -> str:
    line = next(line for line in script.splitlines() if line.startswith(f"#SBATCH --{option}="))
    return line.partition("=")[2]
