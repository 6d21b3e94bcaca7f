"""Where trials run: the devices of this machine, or of the nodes of a Slurm allocation, one rank on one device each."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from phalanx.errors import ConfigError, PhalanxError
from phalanx.hardware.device import device_facts
from phalanx.hardware.host import available_cores
from phalanx.hardware.machine import Machine
from phalanx.study.trials.launchers import AROUND_S, MODULE, allocated_hosts, machine_env
from phalanx.study.trials.process import guarded
from phalanx.study.trials.rank import CORES

WHERE = ("local", "slurm")
_AUTO_SLOTS = {True: 4, False: 2}
"""Trials that share a device: an accelerator, CPU cores."""
_KEPT_FREE = 0.92
"""Share of a device's memory that trials may have: the driver and the allocator's blocks need some."""


class Place(Protocol):
    """One device, and how a rank is started there."""

    @property
    def name(self) -> str:
        """Of the device, with its host."""

    @property
    def memory(self) -> float:
        """Bytes for all trials on it."""

    @property
    def accelerator(self) -> bool:
        """Whether it is no CPU."""

    def command(self, folder: Path, limit_s: float) -> list[str]:
        """What starts the rank of the trial whose files are in `folder`, and ends when it has."""

    def env(self) -> Mapping[str, str]:
        """Variables that it needs beside those of this process."""


@dataclass(frozen=True)
class LocalPlace:
    """A device of this machine: an accelerator, or some CPU cores."""

    kind: str
    """Device type, as PyTorch calls it."""
    index: int
    memory: float
    cores: tuple[int, ...] = ()
    """Of a CPU device, those that it is."""
    threads: int = 1

    @property
    def name(self) -> str:
        """Host, type and number."""
        return f"{socket.gethostname()} {self.kind} {self.index}"

    @property
    def accelerator(self) -> bool:
        """Whether it is no CPU."""
        return self.kind != "cpu"

    def command(self, folder: Path, limit_s: float) -> list[str]:
        """One process."""
        return [*MODULE, "rank", str(folder)]

    def env(self) -> Mapping[str, str]:
        """Which device the rank takes: of several it is the one with the number of its local rank."""
        found = {**_one_rank(self.index if self.accelerator else 0), "OMP_NUM_THREADS": str(self.threads)}
        return found | ({CORES: ",".join(map(str, self.cores))} if self.cores else {})


@dataclass(frozen=True)
class SlurmPlace:
    """A device of a node of the allocation that this process runs in; a trial there is a step of the allocation."""

    machine: Machine
    host: str
    index: int
    memory: float

    @property
    def name(self) -> str:
        """Host, device and number."""
        return f"{self.host} {self.machine.node.device} {self.index}"

    @property
    def accelerator(self) -> bool:
        """Nodes are described by their accelerators."""
        return True

    def command(self, folder: Path, limit_s: float) -> list[str]:
        """A step of one task that shares the node with others; Slurm ends it if this process cannot."""
        node = self.machine.node
        bound = f"mask_cpu:{node.cpu_masks[self.index]}" if node.cpu_masks else "cores"
        # All devices of the node are seen, and the rank takes one: trials that share a device need that.
        given = [one.option for one in self.machine.job_slurm.srun if not one.option.startswith("--gpu")]
        step = [
            *("srun", "--nodes=1", "--ntasks=1", "--ntasks-per-node=1", f"--nodelist={self.host}", "--overlap"),
            *(f"--gpus-per-node={node.devices}", "--gpu-bind=none"),
            *(f"--cpus-per-task={node.cores_per_task}", f"--cpu-bind={bound}", *given),
            *("--kill-on-bad-exit=1", f"--time={-(-(int(limit_s) + AROUND_S) // 60)}"),
        ]
        # srun hands the wish to stop on to its rank.
        return guarded([*step, *MODULE, "rank", str(folder)])

    def env(self) -> Mapping[str, str]:
        """What the machine's description sets for jobs on one node, and which device the rank takes."""
        return {**machine_env(self.machine, 1), **_one_rank(self.index)}


def find_places(where: str, device: str, devices: int | None, machine: Machine | None) -> list[Place]:
    """The devices that trials may have.

    where: one of WHERE. device: `cluster.device` of the run file. devices: how many; None takes all accelerators, or two CPU
    cores a device. machine: of a Slurm allocation. Raises ConfigError where there are not so many.
    """
    if where == "slurm":
        return _slurm_places(devices, machine)
    if where != "local":
        raise ConfigError(f"--where {where} is not known; give one of {', '.join(WHERE)}")
    found = _describe_devices(device)
    if found["kind"] == "cpu":
        return _cpu_places(devices)
    memories = found["memory"]
    count = len(memories) if devices is None else devices
    if count > len(memories):
        raise ConfigError(
            f"--devices {count}: this machine shows {len(memories)} of type {found['kind']}; ask for fewer"
        )
    threads = max(1, available_cores() // (2 * count))
    return [LocalPlace(found["kind"], index, _KEPT_FREE * memories[index], threads=threads) for index in range(count)]


def auto_slots(places: list[Place]) -> int:
    """Trials that may share a device where nobody says how many."""
    return _AUTO_SLOTS[places[0].accelerator]


def _cpu_places(devices: int | None) -> list[Place]:
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(available_cores()))
    count = devices or max(1, len(cores) // 2)
    if count > len(cores):
        raise ConfigError(f"--devices {count}: a device needs a core of its own, and there are {len(cores)}")
    memory = _KEPT_FREE * os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / count
    each = len(cores) // count
    return [
        LocalPlace("cpu", index, memory, tuple(cores[index * each : (index + 1) * each]), each)
        for index in range(count)
    ]


def _slurm_places(devices: int | None, machine: Machine | None) -> list[Place]:
    if machine is None:
        raise ConfigError("--where slurm needs --cluster NAME, which says how steps are started there")
    hosts = allocated_hosts()
    each = machine.node.devices
    count = len(hosts) * each if devices is None else devices
    if count > len(hosts) * each:
        raise ConfigError(
            f"--devices {count}: the allocation has {len(hosts)} nodes with {each} devices each; ask for fewer"
        )
    facts = device_facts(machine.node.device).memory_bytes
    memory = float("inf") if facts is None else _KEPT_FREE * facts
    # One device of each node after the other: a few trials on many nodes have more of each node to themselves.
    all_ = [SlurmPlace(machine, host, index, memory) for index in range(each) for host in hosts]
    return list(all_[:count])


def _one_rank(index: int) -> dict[str, str]:
    return {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": str(index), "LOCAL_WORLD_SIZE": "1"}


def _describe_devices(device: str) -> dict[str, Any]:
    """Asked of another process: whoever looks at an accelerator takes some of its memory for good."""
    if device == "cpu":
        return {"kind": "cpu"}
    command = [sys.executable, "-m", "phalanx.study.hyperparameters.devices", device]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise PhalanxError(f"the devices of this machine cannot be found out: {done.stderr.strip().splitlines()[-1:]}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found
