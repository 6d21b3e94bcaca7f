"""Where trials run: what a step of a Slurm allocation looks like, which device a rank takes, and parts of a CPU."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from phalanx.errors import ConfigError
from phalanx.hardware.machine import load_machine
from phalanx.layout.mesh import ranks_from_environment
from phalanx.study.processes.rank import take_device
from phalanx.study.processes.slots import LocalDevices, find_devices, spread_over_nodes
from phalanx.study.processes.trial_files import CORES, FIRST_DEVICE


def test_parts_of_a_cpu() -> None:
    cores = len(os.sched_getaffinity(0))
    places = find_devices("local", "cpu", cores, None)
    assert len({place.name for place in places}) == cores and not places[0].accelerator
    taken = [place.env(0)[CORES] for place in places]
    assert sorted(taken, key=int) == sorted(map(str, os.sched_getaffinity(0)), key=int)
    assert places[0].memory < os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / cores
    with pytest.raises(ConfigError, match="a device needs a core of its own"):
        find_devices("local", "cpu", cores + 1, None)


def test_a_rank_takes_the_device_of_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in LocalDevices("cuda", 3, 1e9).env(0).items():
        monkeypatch.setenv(name, value)
    ranks = ranks_from_environment()
    assert (ranks.rank, ranks.world_size, ranks.local_rank) == (0, 1, 3)


def test_the_ranks_of_a_step_take_devices_from_the_first_of_their_place_on(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {
        FIRST_DEVICE: "4",
        "LOCAL_WORLD_SIZE": "2",
        "SLURM_PROCID": "3",
        "SLURM_STEP_NUM_TASKS": "4",
        "SLURM_LOCALID": "1",
    }
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        # Restored afterwards, though it is the code that sets them.
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    take_device()
    ranks = ranks_from_environment()
    assert (ranks.rank, ranks.world_size, ranks.local_rank, ranks.ranks_per_node) == (3, 4, 5, 2)


@pytest.mark.parametrize(
    ("ranks", "devices", "nodes"), [(2, 8, (1, 2)), (8, 8, (1, 8)), (12, 8, (2, 6)), (9, 8, (3, 3)), (16, 4, (4, 4))]
)
def test_ranks_are_spread_evenly_over_the_fewest_nodes(ranks: int, devices: int, nodes: tuple[int, int]) -> None:
    assert spread_over_nodes(ranks, devices) == nodes


def test_steps_of_an_allocation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "scontrol").write_text("#!/bin/sh\necho node-7\necho node-8\n")
    (folder / "scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    monkeypatch.setenv("SLURM_JOB_ID", "4123456")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "node-[7-8]")
    machine = load_machine("frontier")
    places = find_devices("slurm", "auto", None, machine)
    assert len(places) == 16 and len({place.name for place in places}) == 16
    # Trials that are fewer than devices are spread over nodes.
    assert [place.name.split()[0] for place in places[:3]] == ["node-7", "node-8", "node-7"]
    place = places[5]
    command = place.command(Path("jobs/9"), 600.0)
    step = command[command.index("srun") :]
    assert {"--nodes=1", "--ntasks=1", "--nodelist=node-8", "--overlap", "--gpus-per-node=8", "--time=11"} <= set(step)
    assert "--cpu-bind=mask_cpu:0x0000000000fe0000" in step and "--gpus-per-task=1" not in step
    assert step[-4:] == ["-m", "phalanx.study.processes", "rank", "jobs/9"]
    assert place.env(0)["LOCAL_RANK"] == "2" and 50e9 < place.memory < 64e9 * 1.08
    with pytest.raises(ConfigError, match="2 nodes with 8 devices each, has room for 16 of them at once"):
        find_devices("slurm", "auto", 17, machine)
    # Trials of several devices: some of one node, the same share of several, or whole nodes.
    several = {ranks: find_devices("slurm", "auto", None, machine, ranks) for ranks in (3, 4, 12, 16)}
    assert [place.name.replace(" MI250X GCD", "") for place in several[4]] == [
        "node-7 0-3", "node-8 0-3", "node-7 4-7", "node-8 4-7",
    ]  # fmt: skip
    assert [len(places) for places in several.values()] == [4, 4, 1, 1]
    assert len(find_devices("slurm", "auto", 8, machine, 4)) == 2
    place = several[4][3]
    step = place.command(Path("jobs/9"), 600.0)
    assert {"--nodes=1", "--ntasks=4", "--ntasks-per-node=4", "--nodelist=node-8", "--gpus-per-node=8"} <= set(step)
    assert f"--cpu-bind=mask_cpu:{','.join(machine.node.cpu_masks[4:])}" in step
    env = place.env(3)
    assert (env[FIRST_DEVICE], env["LOCAL_WORLD_SIZE"], env["MASTER_ADDR"]) == ("4", "4", "node-8")
    # Trials at once meet at ports of their own.
    assert env["MASTER_PORT"] != several[4][1].env(4)["MASTER_PORT"]
    step = several[12][0].command(Path("jobs/9"), 600.0)
    assert {"--nodes=2", "--ntasks=12", "--ntasks-per-node=6", "--nodelist=node-7,node-8"} <= set(step)
    with pytest.raises(ConfigError, match="--devices 24: trials of 8 devices on each of 3 nodes"):
        find_devices("slurm", "auto", None, machine, 24)
    monkeypatch.delenv("SLURM_JOB_ID")
    with pytest.raises(ConfigError, match="needs an allocation"):
        find_devices("slurm", "auto", None, machine)
