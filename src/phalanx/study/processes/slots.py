"""Where trials run: all ranks of one trial on this machine or on Slurm nodes, or many trials on some devices of either each.

A `Launcher` says how the ranks of a trial are started. A `DeviceSlot` starts trials on devices of its own, and knows the
devices' memory, so that several trials can share them. Slots in Slurm's queue are in `job_arrays`.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from phalanx.errors import ConfigError, PhalanxError
from phalanx.hardware.device_facts import device_facts
from phalanx.hardware.host import available_cores
from phalanx.hardware.machine import Machine
from phalanx.launch.job_script import srun_command
from phalanx.study.processes.process import LimitedProcess, TrialProcess, guarded_command
from phalanx.study.processes.trial_files import CORES, FIRST_DEVICE, LOG

MODULE = (sys.executable, "-m", "phalanx.study.processes")
_SLURM_GRACE_S = 60
"""Seconds past a trial's time limit after which Slurm ends its step even if this process cannot."""
_FIRST_PORT, _PORTS = 10_000, 20_000
"""Ports at which ranks of a trial meet: below those that Linux hands out by itself, as for whole jobs."""
_AUTO_SHARING = {True: 4, False: 2}
"""Trials that share a device where nobody says how many: on an accelerator, on CPU cores."""
_USABLE_MEMORY = 0.92
"""Share of a device's memory for trials: the driver and the allocator's blocks need the rest."""


class Launcher(Protocol):
    """Starts the ranks of a trial."""

    def command(self, folder: Path, limit_s: float) -> list[str]:
        """Return the command that starts all ranks of the trial whose files are in `folder`, and ends when they have."""

    def env(self, number: int) -> Mapping[str, str]:
        """Return the environment variables that ranks of trial `number` need beside those of this process."""


class DeviceSlot(Protocol):
    """One device, or several, on which all ranks of a trial run."""

    @property
    def name(self) -> str:
        """Host and device."""

    @property
    def memory(self) -> float:
        """Bytes of each device for all trials on it."""

    @property
    def accelerator(self) -> bool:
        """Whether the device is no CPU."""

    @property
    def ranks(self) -> int:
        """Ranks of a trial, one a device."""

    def start(self, folder: Path, number: int, env: Mapping[str, str], limit_s: float) -> TrialProcess:
        """Start trial `number`, whose files are in `folder`, to run for `limit_s` seconds at most, with these variables."""


class ProcessSlot(ABC):
    """A slot whose trials are children of this process."""

    @abstractmethod
    def command(self, folder: Path, limit_s: float) -> list[str]:
        """Return the command that starts all ranks of the trial whose files are in `folder`, and ends when they have."""

    @abstractmethod
    def env(self, number: int) -> Mapping[str, str]:
        """Return the environment variables that ranks of trial `number` need beside those of this process."""

    def start(self, folder: Path, number: int, env: Mapping[str, str], limit_s: float) -> TrialProcess:
        """Start trial `number`, whose files are in `folder`, to run for `limit_s` seconds at most, with these variables."""
        return LimitedProcess(self.command(folder, limit_s), {**self.env(number), **env}, folder / LOG, limit_s)


@dataclass(frozen=True)
class LocalRanks:
    """Ranks on this machine, each on a device of its own."""

    ranks: int

    def command(self, folder: Path, limit_s: float) -> list[str]:
        """Return the local launcher's command; a single rank needs no launcher."""
        # A launcher would be one more process to start and to watch.
        if self.ranks == 1:
            return [*MODULE, "rank", str(folder)]
        return [*MODULE, "launch", str(folder), str(self.ranks), "0"]

    def env(self, number: int) -> Mapping[str, str]:
        """Return nothing: the launcher sets what ranks need."""
        return {}


@dataclass(frozen=True)
class SlurmNodes:
    """Ranks on whole nodes of the Slurm allocation that this process runs in, as a step of it."""

    machine: Machine
    nodes: int

    def command(self, folder: Path, limit_s: float) -> list[str]:
        """Return the srun command, under a guard: srun passes the guard's SIGQUIT on to its ranks."""
        limit = int(limit_s) + _SLURM_GRACE_S
        return guarded_command(srun_command(self.machine, self.nodes, [*MODULE, "rank", str(folder)], limit))

    def env(self, number: int) -> Mapping[str, str]:
        """Return where the ranks meet, and what the machine's description sets for jobs."""
        return {**_machine_env(self.machine, self.nodes), **_meeting_point(allocated_hosts()[0], number)}


def whole_nodes(machine: Machine, devices: int) -> SlurmNodes:
    """Return a launcher on the nodes that have so many devices. Raises ConfigError where that is no whole number."""
    nodes, rest = divmod(devices, machine.node.devices)
    if rest:
        raise ConfigError(
            f"--where slurm takes whole nodes: --devices {devices} is no multiple of the "
            f"{machine.node.devices} devices of a node of {machine.name}"
        )
    return SlurmNodes(machine, nodes)


@dataclass(frozen=True)
class LocalDevices(ProcessSlot):
    """Devices of this machine for a rank each: accelerators, or some CPU cores."""

    kind: str
    """Device type, as PyTorch calls it."""
    index: int
    """Number of the first one."""
    memory: float
    """Bytes of each."""
    cores: tuple[int, ...] = ()
    """Numbers of the cores of CPU devices, which their ranks share."""
    threads: int = 1
    """Threads of a rank."""
    ranks: int = 1

    @property
    def name(self) -> str:
        """Host, device type and numbers."""
        numbers = f"{self.index}" if self.ranks == 1 else f"{self.index}-{self.index + self.ranks - 1}"
        return f"{socket.gethostname()} {self.kind} {numbers}"

    @property
    def accelerator(self) -> bool:
        """Whether the device is no CPU."""
        return self.kind != "cpu"

    def command(self, folder: Path, limit_s: float) -> list[str]:
        """Return the command of one rank, or that of the launcher of several."""
        if self.ranks == 1:
            return [*MODULE, "rank", str(folder)]
        return [*MODULE, "launch", str(folder), str(self.ranks), str(self._first)]

    def env(self, number: int) -> Mapping[str, str]:
        """Return which device a single rank takes, as its local rank; of several ranks the launcher tells each."""
        found = {"OMP_NUM_THREADS": str(self.threads)} | (_single_rank(self._first) if self.ranks == 1 else {})
        return found | ({CORES: ",".join(map(str, self.cores))} if self.cores else {})

    @property
    def _first(self) -> int:
        return self.index if self.accelerator else 0


@dataclass(frozen=True)
class SlurmDevices(ProcessSlot):
    """Devices of the Slurm allocation that this process runs in, as many on each of some nodes; a trial there is a step with
    a task for each."""

    machine: Machine
    hosts: tuple[str, ...]
    index: int
    """Number of the first one on each host."""
    memory: float
    """Bytes of each."""
    ranks: int = 1
    program: tuple[str, ...] = (*MODULE, "rank")
    """Command of each rank, to which the trial's folder is added."""

    @property
    def name(self) -> str:
        """Hosts, device and numbers."""
        numbers = f"{self.index}" if self._each == 1 else f"{self.index}-{self.index + self._each - 1}"
        return f"{','.join(self.hosts)} {self.machine.node.device} {numbers}"

    @property
    def accelerator(self) -> bool:
        """Whether the device is no CPU: descriptions of nodes count accelerators."""
        return True

    @property
    def _each(self) -> int:
        """Return the devices on each host."""
        return self.ranks // len(self.hosts)

    def command(self, folder: Path, limit_s: float) -> list[str]:
        """Return an srun command that shares its nodes with other steps."""
        node = self.machine.node
        masks = node.cpu_masks[self.index : self.index + self._each]
        bound = f"mask_cpu:{','.join(masks)}" if masks else "cores"
        # The step sees all devices of its nodes and each rank takes one: Slurm would give a device to one step alone.
        given = [one.option for one in self.machine.job_slurm.srun if not one.option.startswith("--gpu")]
        step = [
            *("srun", f"--nodes={len(self.hosts)}", f"--ntasks={self.ranks}", f"--ntasks-per-node={self._each}"),
            *(f"--nodelist={','.join(self.hosts)}", "--distribution=block", "--overlap"),
            *(f"--gpus-per-node={node.devices}", "--gpu-bind=none"),
            *(f"--cpus-per-task={node.cores_per_task}", f"--cpu-bind={bound}", *given),
            *("--kill-on-bad-exit=1", f"--time={-(-(int(limit_s) + _SLURM_GRACE_S) // 60)}"),
        ]
        return guarded_command([*step, *self.program, str(folder)])

    def env(self, number: int) -> Mapping[str, str]:
        """Return what the machine's description sets for jobs on so many nodes, which devices the ranks take, and where
        several meet."""
        found = _machine_env(self.machine, len(self.hosts))
        if self.ranks == 1:
            return {**found, **_single_rank(self.index)}
        own = {FIRST_DEVICE: str(self.index), "LOCAL_WORLD_SIZE": str(self._each)}
        return {**found, **own, **_meeting_point(self.hosts[0], number)}


def find_devices(
    where: str, device: str, devices: int | None, machine: Machine | None, ranks: int = 1
) -> list[DeviceSlot]:
    """Return the devices that trials of `ranks` ranks may have, each slot with as many.

    where: local or slurm. device: `cluster.device` of the run file. devices: how many; None takes all accelerators, or two
    CPU cores a device. machine: description of a Slurm allocation. Raises ConfigError where there are not so many.
    """
    if devices is not None and devices % ranks:
        raise ConfigError(
            f"--devices {devices} is no multiple of the {ranks} devices of a trial (--nproc, tune.nproc)\n"
            f"nearest legal: --devices {max(1, round(devices / ranks)) * ranks}"
        )
    if where == "slurm":
        return _find_slurm_devices(devices, machine, ranks)
    if where != "local":
        raise ConfigError(f"--where {where} is not known; give one of local, slurm, sbatch")
    found: dict[str, Any] = {"kind": "cpu"}
    if device != "cpu":
        # Asked of another process: one that looks at an accelerator keeps some of its memory for good.
        done = subprocess.run([*MODULE, "devices", device], capture_output=True, text=True, check=False)
        if done.returncode:
            last = done.stderr.strip().splitlines()[-1:]
            raise PhalanxError(f"the devices of this machine cannot be found out: {last}")
        found = json.loads(done.stdout)
    if found["kind"] == "cpu":
        return _split_cpu(devices, ranks)
    memories = found["memory"]
    count = len(memories) // ranks * ranks if devices is None else devices
    if count > len(memories) or not count:
        raise ConfigError(
            f"--devices {count or ranks}: this machine shows {len(memories)} of type {found['kind']}; ask for fewer"
        )
    # Half of the cores: data loading and the trials that share a device need the others.
    threads = max(1, available_cores() // (2 * count))
    return [
        LocalDevices(found["kind"], first, _USABLE_MEMORY * min(memories[first : first + ranks]), (), threads, ranks)
        for first in range(0, count, ranks)
    ]


def automatic_sharing(devices: Sequence[DeviceSlot]) -> int:
    """Return how many trials may share a device where nobody says."""
    return _AUTO_SHARING[devices[0].accelerator]


def _split_cpu(devices: int | None, ranks: int) -> list[DeviceSlot]:
    """Split the cores that this process may use among so many devices, two cores each by default, `ranks` a slot."""
    # macOS has no affinity to ask for.
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(available_cores()))
    count = devices or max(1, len(cores) // 2 // ranks) * ranks
    if count > len(cores):
        raise ConfigError(f"--devices {count}: a device needs a core of its own, and there are {len(cores)}")
    memory = _USABLE_MEMORY * os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / count
    each = len(cores) // count
    return [
        LocalDevices("cpu", first, memory, tuple(cores[first * each : (first + ranks) * each]), each, ranks)
        for first in range(0, count, ranks)
    ]


def spread_over_nodes(ranks: int, devices: int) -> tuple[int, int]:
    """Return the fewest nodes of so many devices over which ranks are spread evenly, and the ranks of each."""
    nodes = next(count for count in range(-(-ranks // devices), ranks + 1) if ranks % count == 0)
    return nodes, ranks // nodes


def _find_slurm_devices(devices: int | None, machine: Machine | None, ranks: int) -> list[DeviceSlot]:
    if machine is None:
        raise ConfigError("--where slurm needs --cluster NAME, which says how steps are started there")
    hosts = allocated_hosts()
    each = machine.node.devices
    facts = device_facts(machine.node.device).memory_bytes
    # A device whose memory is not known is shared by slots alone.
    memory = float("inf") if facts is None else _USABLE_MEMORY * facts
    nodes, on_node = spread_over_nodes(ranks, each)
    groups = [tuple(hosts[first : first + nodes]) for first in range(0, len(hosts) - nodes + 1, nodes)]
    # The first devices of every node before further ones of any: few trials on many nodes then share less of a node.
    found = [
        SlurmDevices(machine, group, index, memory, ranks)
        for index in range(0, each - on_node + 1, on_node)
        for group in groups
    ]
    wanted = len(found) if devices is None else devices // ranks
    if wanted > len(found) or not found:
        raise ConfigError(
            f"--devices {max(wanted, 1) * ranks}: trials of {on_node} devices on each of {nodes} nodes; the allocation, "
            f"{len(hosts)} nodes with {each} devices each, has room for {len(found)} of them at once; ask for fewer"
        )
    return list(found[:wanted])


def allocated_hosts() -> list[str]:
    """Return the hosts of the Slurm allocation that this process runs in. Raises ConfigError where there is none."""
    # Inside an allocation alone: a login node may have Slurm's commands, too.
    node_list = os.environ.get("SLURM_JOB_NODELIST")
    if node_list is None or "SLURM_JOB_ID" not in os.environ:
        raise ConfigError(
            "--where slurm needs an allocation (SLURM_JOB_ID is not set); start it under salloc or sbatch"
        )
    command = ["scontrol", "show", "hostnames", node_list]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    except (OSError, subprocess.CalledProcessError) as error:
        raise PhalanxError(f"scontrol does not name the hosts of this allocation: {error}") from error


def _machine_env(machine: Machine, nodes: int) -> dict[str, str]:
    """Return what the machine's description sets for jobs on this number of nodes."""
    count = "one" if nodes == 1 else "several"
    # Descriptions name paths such as /tmp/$SLURM_JOB_ID, which a job script's shell would expand.
    return {one.name: os.path.expandvars(one.value) for one in machine.environment if one.nodes in ("any", count)}


def _meeting_point(host: str, number: int) -> dict[str, str]:
    """Return where the ranks of trial `number` meet, the first of them on `host`."""
    # Trials that run at once or follow each other closely must not meet at the same port.
    port = _FIRST_PORT + (int(os.environ["SLURM_JOB_ID"]) * 31 + number) % _PORTS
    # The last tells this trial's ranks from those of another job that happens to meet at the same port.
    return {"MASTER_ADDR": host, "MASTER_PORT": str(port), "TORCHELASTIC_RUN_ID": secrets.token_hex(16)}


def _single_rank(index: int) -> dict[str, str]:
    return {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": str(index), "LOCAL_WORLD_SIZE": "1"}
