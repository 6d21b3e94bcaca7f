"""The device mesh of a layout, and joining the process group that it stands on."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from phalanx.errors import ConfigError
from phalanx.layout.spec import ResolvedLayout


@dataclass(frozen=True)
class Ranks:
    """Who this process is among all ranks of the run, as the launcher says."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0

    @property
    def first(self) -> bool:
        """Whether this rank does what is done once: printing and writing logs."""
        return self.rank == 0


def ranks_from_environment() -> Ranks:
    """Read torchrun's variables (RANK, WORLD_SIZE, LOCAL_RANK), else Slurm's of a multi-task step, else one rank.

    Raises ConfigError when only some of torchrun's are set.
    """
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    found = [name for name in names if name in os.environ]
    if found and len(found) < len(names):
        missing = ", ".join(name for name in names if name not in os.environ)
        raise ConfigError(
            f"environment has {', '.join(found)} but not {missing}; start with torchrun or srun, or unset them"
        )
    if found:
        return Ranks(*(int(os.environ[name]) for name in names))
    if int(os.environ.get("SLURM_STEP_NUM_TASKS", "1")) > 1:
        return Ranks(*(int(os.environ[name]) for name in ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID")))
    return Ranks()


def join_process_group(ranks: Ranks, device: torch.device, *, timeout_s: float = 600.0) -> None:
    """Join the default process group (gloo on the CPU, the device's own backend beside gloo elsewhere).

    The store's keys carry torchrun's restart count: torchrun keeps one store for all attempts, and a restarted gloo rank
    would otherwise find the addresses of the dead attempt.
    """
    if ranks.world_size == 1 or dist.is_initialized():
        return
    address, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    if address is None or port is None:
        raise ConfigError(
            "MASTER_ADDR and MASTER_PORT are not set; torchrun sets them, under srun export them in the job"
        )
    agent_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    timeout = timedelta(seconds=timeout_s)
    tcp = dist.TCPStore(address, int(port), is_master=ranks.first and not agent_store, timeout=timeout)
    attempt = (
        f"{os.environ.get('TORCHELASTIC_RUN_ID', 'run')}/attempt_{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    )
    backend = "gloo"
    if device.type != "cpu":
        backend = f"cpu:gloo,{device.type}:{dist.get_default_backend_for_device(device)}"
    dist.init_process_group(
        backend,
        store=dist.PrefixStore(attempt, tcp),
        rank=ranks.rank,
        world_size=ranks.world_size,
        timeout=timeout,
        device_id=device if device.type != "cpu" else None,
    )


def build_mesh(layout: ResolvedLayout, device: torch.device) -> DeviceMesh:
    """The mesh [dp_replicate, dp_shard]; neighbouring ranks share shards, so that gathers stay inside a node."""
    return init_device_mesh(
        device.type, (layout.dp_replicate, layout.dp_shard), mesh_dim_names=("dp_replicate", "dp_shard")
    )
