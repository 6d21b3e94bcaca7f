"""How the ranks of a trial are started: on this machine, or as a step of a Slurm allocation."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from phalanx.errors import ConfigError, PhalanxError
from phalanx.hardware.machine import Machine
from phalanx.launch.job_script import srun_command
from phalanx.study.trials.process import guarded
from phalanx.study.trials.trial import Trial

MODULE = (sys.executable, "-m", "phalanx.study.trials")
"""What runs a trial's processes."""
AROUND_S = 60
"""Seconds past its limit after which Slurm ends a step itself."""
_FIRST_PORT, _PORTS = 10_000, 20_000
"""Below the ports that Linux hands out by itself, as for whole jobs."""


class Launcher(Protocol):
    """Where a trial's ranks are started."""

    def command(self, folder: Path, limit_s: float) -> list[str]:
        """What starts them all, and ends when they have."""

    def env(self, trial: Trial) -> Mapping[str, str]:
        """Variables they need beside those of this process."""


@dataclass(frozen=True)
class LocalLauncher:
    """Ranks on this machine, one for each of its devices that are asked for."""

    devices: int

    def command(self, folder: Path, limit_s: float) -> list[str]:
        """The launcher of `phalanx train --nproc`; a single rank needs none."""
        if self.devices == 1:
            return [*MODULE, "rank", str(folder)]
        return [*MODULE, "launch", str(folder), str(self.devices)]

    def env(self, trial: Trial) -> Mapping[str, str]:
        """None."""
        return {}


@dataclass(frozen=True)
class SlurmLauncher:
    """Ranks on whole nodes of the allocation that this process runs in."""

    machine: Machine
    nodes: int

    def command(self, folder: Path, limit_s: float) -> list[str]:
        """One step of the allocation; Slurm ends it a minute after the limit even if this process cannot."""
        # srun hands the wish to quit on to its ranks.
        return guarded(srun_command(self.machine, self.nodes, [*MODULE, "rank", str(folder)], int(limit_s) + AROUND_S))

    def env(self, trial: Trial) -> Mapping[str, str]:
        """Where the ranks meet, and what the machine's description sets for jobs."""
        hosts = allocated_hosts()
        # Trials that follow each other closely, or run side by side, do not meet at the same door.
        port = _FIRST_PORT + (int(os.environ["SLURM_JOB_ID"]) * 31 + trial.number) % _PORTS
        return {
            **machine_env(self.machine, self.nodes),
            "MASTER_ADDR": hosts[0],
            "MASTER_PORT": str(port),
            "TORCHELASTIC_RUN_ID": secrets.token_hex(16),
        }


def whole_nodes(machine: Machine, devices: int) -> SlurmLauncher:
    """Of so many devices, which have to be all of some nodes'. Raises ConfigError."""
    nodes, rest = divmod(devices, machine.node.devices)
    if rest:
        raise ConfigError(
            f"--where slurm takes whole nodes: --devices {devices} is no multiple of the "
            f"{machine.node.devices} devices of a node of {machine.name}"
        )
    return SlurmLauncher(machine, nodes)


def machine_env(machine: Machine, nodes: int) -> dict[str, str]:
    """What the machine's description sets for jobs on this number of nodes."""
    count = "one" if nodes == 1 else "several"
    return {
        one.name: os.path.expandvars(one.value)
        for one in machine.environment
        if one.nodes == "any" or (one.nodes == "one") == (count == "one")
    }


def allocated_hosts() -> list[str]:
    """The hosts of the Slurm allocation that this process runs in. Raises ConfigError where there is none."""
    node_list = os.environ.get("SLURM_JOB_NODELIST")
    if node_list is None or "SLURM_JOB_ID" not in os.environ:
        raise ConfigError(
            "--where slurm needs an allocation (SLURM_JOB_ID is not set); start it under salloc or sbatch"
        )
    asked = ["scontrol", "show", "hostnames", node_list]
    try:
        return subprocess.run(asked, capture_output=True, text=True, check=True).stdout.split()
    except (OSError, subprocess.CalledProcessError) as error:
        raise PhalanxError(f"scontrol does not name the hosts of this allocation: {error}") from error
