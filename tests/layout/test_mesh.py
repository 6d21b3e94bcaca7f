"""The groups of ranks along each axis: the right ranks in the right order, and no more groups than this rank is in."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from distributed_ranks import run_ranks
from many_ranks import LAYOUT_OF_4096, meshes_of_all_ranks
from phalanx.data.batch_stream import ReadAheadStream
from phalanx.errors import ConfigError, PhalanxError
from phalanx.layout.mesh import (
    ONE_RANK,
    Groups,
    Ranks,
    build_mesh,
    join_process_group,
    ranks_from_environment,
)
from phalanx.layout.spec import ResolvedLayout

ROOT = Path(__file__).parent.parent.parent
AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
"""From outermost to innermost."""

LAYOUTS = {
    str(layout): layout
    for layout in (
        ResolvedLayout(8, tp=2, pp=2, dp_shard=2),
        ResolvedLayout(8, tp=4, cp=2),
        ResolvedLayout(8, dp_replicate=2, dp_shard=2, cp=2),
        ResolvedLayout(8, dp_replicate=2, dp_shard=4),
        ResolvedLayout(8, dp_replicate=4, tp=2, zero=0),
        ResolvedLayout(8, dp_replicate=2, cp=4, zero=0),
        ResolvedLayout(8, dp_replicate=8, zero=2),
        ResolvedLayout(8, pp=4, cp=2, zero=1),
        ResolvedLayout(8, pp=8),
        ResolvedLayout(8, pp=4, dp_shard=2, schedule="interleaved_1f1b", stages_per_rank=2),
        ResolvedLayout(8, dp_shard=8),
    )
}


def reference(layout: ResolvedLayout, rank: int) -> dict[str, list[int]]:
    """The ranks along each axis through `rank`, and of its shards and replicas."""
    sizes = [getattr(layout, name) for name in AXES]
    places = np.arange(8).reshape(sizes)
    here = tuple(int(axis[0]) for axis in np.where(places == rank))

    def along(*names: str) -> list[int]:
        return (
            places[tuple(slice(None) if name in names else at for name, at in zip(AXES, here, strict=True))]
            .ravel()
            .tolist()
        )

    shared = ("dp_shard", "cp") if layout.zero else ()
    kept = ("dp_replicate",) if layout.zero else ("dp_replicate", "dp_shard", "cp")
    first, last = (int(places[(stage, *here[1:])]) for stage in (0, layout.pp - 1))
    ends = [first, last] if layout.pp > 1 and rank in (first, last) else [0]
    return {**{name: along(name) for name in AXES}, "shards": along(*shared), "replicas": along(*kept), "tie": ends}


def meetings() -> list[str]:
    """Names of the groups whose ranks all meet, as far as this rank calls it, while meshes are built."""
    found: list[str] = []
    plain = dist.all_reduce

    def noted(*args: Any, group: dist.ProcessGroup, **named: Any) -> Any:
        found.append(group.group_desc)
        return plain(*args, group=group, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_reduce", noted)
        made: Groups = {}
        for layout in LAYOUTS.values():
            build_mesh(layout, torch.device("cpu"), made)
    return found


def describe(names: list[str]) -> dict[str, Any]:
    """What this rank sees of each layout, with the sum of the ranks that its groups exchange."""
    made: Groups = {}
    found: dict[str, Any] = {"met in": meetings()}
    for name in names:
        mesh = build_mesh(LAYOUTS[name], torch.device("cpu"), made)
        axes = {}
        for axis_name in (*AXES, "shards", "replicas", "tie"):
            axis = getattr(mesh, axis_name)
            total = torch.tensor(dist.get_rank())
            if axis.group is not None:
                dist.all_reduce(total, group=axis.group)
                assert dist.get_process_group_ranks(axis.group) == list(axis.ranks)
                assert axis.group.group_name == axis.group_name
            axes[axis_name] = {"ranks": list(axis.ranks), "rank": axis.rank, "size": axis.size, "sum": int(total)}
        data = None if mesh.data is None else (mesh.data.mesh.tolist(), mesh.data.mesh_dim_names)
        found[name] = {"axes": axes, "data": data, "data_rank": mesh.data_rank, "reads_first": mesh.reads_first}
    found["groups"] = list(made)
    return found


@pytest.fixture(scope="module")
def seen() -> list[dict[str, Any]]:
    """What each of 8 ranks sees."""
    return run_ranks(describe, 8, list(LAYOUTS))


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_axis_has_the_ranks_of_the_grid(name: str, seen: list[dict[str, Any]]) -> None:
    for rank, found in enumerate(seen):
        for axis, ranks in reference(LAYOUTS[name], rank).items():
            view = found[name]["axes"][axis]
            if view["size"] == 1:
                assert len(ranks) == 1 and view["rank"] == 0 and view["sum"] == rank
                continue
            assert (view["ranks"], view["sum"]) == (ranks, sum(ranks)), (rank, axis)
            assert (view["rank"], view["size"]) == (ranks.index(rank), len(ranks)), (rank, axis)


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_data_mesh_is_replicas_by_shards(name: str, seen: list[dict[str, Any]]) -> None:
    for rank, found in enumerate(seen):
        expected = reference(LAYOUTS[name], rank)
        shards, replicas = expected["shards"], expected["replicas"]
        if len(shards) * len(replicas) == 1:
            assert found[name]["data"] is None
        elif len(replicas) == 1:
            assert found[name]["data"] == (shards, ("shards",))
        else:
            grid, names = found[name]["data"]
            assert names == ("replicas", "shards")
            row, column = replicas.index(rank), shards.index(rank)
            assert grid[row] == shards and [line[column] for line in grid] == replicas


@pytest.mark.parametrize("name", LAYOUTS)
def test_each_share_of_the_samples_is_read_first_by_one_rank(name: str, seen: list[dict[str, Any]]) -> None:
    layout = LAYOUTS[name]
    readers = [found[name]["data_rank"] for found in seen if found[name]["reads_first"]]
    assert sorted(readers) == list(range(layout.data_ranks))
    for rank, found in enumerate(seen):
        same = [other for other in range(8) if seen[other][name]["data_rank"] == found[name]["data_rank"]]
        assert len(same) == 8 // layout.data_ranks and rank in same


def test_neighbours_share_tensor_parallel_groups(seen: list[dict[str, Any]]) -> None:
    for name, layout in LAYOUTS.items():
        for rank, found in enumerate(seen):
            if layout.tp > 1:
                start = rank // layout.tp * layout.tp
                assert found[name]["axes"]["tp"]["ranks"] == list(range(start, start + layout.tp))


def test_a_rank_makes_each_of_its_groups_once(seen: list[dict[str, Any]]) -> None:
    for rank, found in enumerate(seen):
        assert all(rank in ranks for ranks, _ in found["groups"])
        joined = [ranks for ranks, link in found["groups"] if not link]
        linked = [(ranks, link) for ranks, link in found["groups"] if link]
        assert len(set(joined)) == len(joined) and len(set(linked)) == len(linked)
        # Activations and gradients, from even and from odd ranks, for each pipeline that runs several stages a rank.
        several = {tuple(found[n]["axes"]["pp"]["ranks"]) for n, x in LAYOUTS.items() if x.stages_per_rank > 1}
        assert len(linked) == 4 * len({ranks for ranks in several if len(ranks) > 1})


def test_all_ranks_meet_once_in_each_link_before_a_message_goes_over_it(seen: list[dict[str, Any]]) -> None:
    # Connections are made when a group is first used, by all of its ranks together.
    for found in seen:
        links = sorted(link for _, link in found["groups"] if link)
        assert links and sorted(found["met in"]) == links


def test_one_rank_needs_no_group() -> None:
    assert build_mesh(ResolvedLayout(8), torch.device("cpu")) is ONE_RANK
    assert ONE_RANK.reads_first and ONE_RANK.data_rank == 0


@pytest.mark.parametrize(
    ("degrees", "groups"),
    [
        ({}, [8, 8, 16, 24]),
        ({"cp": 2, "dp_replicate": 4}, [2, 4, 8, 16, 24, 48]),
    ],
)
def test_groups_of_24576_ranks(degrees: dict[str, int], groups: list[int], tmp_path: Path) -> None:
    words = [word for name, value in degrees.items() for word in (f"--{name}", str(value))]
    script = ROOT / "benchmarks" / "mesh_startup.py"
    subprocess.run(
        [sys.executable, str(script), "--out", str(tmp_path / "out.json"), *words],
        check=True,
        capture_output=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=120,
    )
    found = json.loads((tmp_path / "out.json").read_text())
    print(f"{found['seconds']} s, peak {found['peak_mib']} MiB of which {found['peak_mib_before']} before")
    assert found["ranks"] == 24576
    assert sorted(found["groups"]) == groups
    assert found["groups_without_this_rank"] == 0
    assert found["process_groups_but_the_world"] == len(groups)
    coordinate = [found["axes"][name]["rank"] for name in AXES]
    sizes = [found["axes"][name]["size"] for name in AXES]
    assert int(np.ravel_multi_index(coordinate, sizes)) == found["rank"]
    # What the groups cost in memory must not grow with the square of the ranks; the bar itself is the benchmark's.
    assert found["peak_mib"] - found["peak_mib_before"] < 200


class Numbers:
    """Reads samples as their own numbers."""

    fingerprint = "numbers"

    def read(self, numbers: np.ndarray) -> np.ndarray:
        return numbers


def test_4096_ranks_together_read_each_sample_once(monkeypatch: pytest.MonkeyPatch) -> None:
    layout, read = LAYOUT_OF_4096, dict[int, int]()
    assert layout.world_size == 4096
    began = time.process_time()
    for rank, mesh in meshes_of_all_ranks(layout, monkeypatch):
        assert all(axis.ranks[axis.rank] == rank for axis in mesh.axes if axis.size > 1)
        stream = ReadAheadStream(Numbers(), global_batch=3072, rank=mesh.data_rank, ranks=layout.data_ranks)  # type: ignore[type-var]
        for sample in stream.batch(3).tolist():
            read[sample] = read.get(sample, 0) + mesh.reads_first
    # One of the ranks that compute the same samples counts them.
    assert read == dict.fromkeys(range(2 * 3072, 3 * 3072), 1)
    assert time.process_time() - began < 5.0


TORCHRUN = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}
SLURM = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1", "SLURM_LOCALID": "1"}


@pytest.fixture
def launcher(monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[str, str]], None]:
    """Sets the variables of a launcher, in place of any other's."""
    for name in [*TORCHRUN, *SLURM, "LOCAL_WORLD_SIZE", "SLURM_NTASKS", "SLURM_NTASKS_PER_NODE"]:
        monkeypatch.delenv(name, raising=False)
    return lambda variables: [monkeypatch.setenv(*item) for item in variables.items()] and None


def test_a_step_smaller_than_its_job_has_the_ranks_of_the_step(launcher: Callable[[dict[str, str]], None]) -> None:
    launcher({**SLURM, "SLURM_NTASKS": "16"})
    assert ranks_from_environment() == Ranks(1, 2, 1)


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({**TORCHRUN, "RANK": "first"}, "environment variable RANK is 'first', no whole number"),
        ({**TORCHRUN, "RANK": "2"}, "RANK=2 is not below WORLD_SIZE=2"),
        ({**TORCHRUN, "LOCAL_WORLD_SIZE": ""}, "environment variable LOCAL_WORLD_SIZE is '', no whole number"),
        ({"SLURM_STEP_NUM_TASKS": "2"}, "environment variable SLURM_PROCID is not set"),
        ({**SLURM, "SLURM_PROCID": "7"}, "SLURM_PROCID=7 is not below SLURM_STEP_NUM_TASKS=2"),
    ],
)
def test_variables_that_cannot_be_are_named(
    launcher: Callable[[dict[str, str]], None], variables: dict[str, str], message: str
) -> None:
    launcher(variables)
    with pytest.raises(ConfigError, match=message):
        ranks_from_environment()


def test_a_meeting_point_that_is_none_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    for port, message in (("x", "MASTER_PORT is 'x', no whole number"), ("99999", "MASTER_PORT=99999 is no port")):
        monkeypatch.setenv("MASTER_PORT", port)
        with pytest.raises(ConfigError, match=message):
            join_process_group(Ranks(0, 2), torch.device("cpu"))
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    with socket.create_server(("", 0)) as taken:
        monkeypatch.setenv("MASTER_PORT", str(taken.getsockname()[1]))
        with pytest.raises(
            PhalanxError, match=r"rank 0 of 2 does not meet the others at MASTER_ADDR=.*address already in"
        ):
            join_process_group(Ranks(0, 2), torch.device("cpu"))
