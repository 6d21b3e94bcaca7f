"""The places of all ranks of a large job, in one process: groups are computed and not made."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from phalanx.layout import mesh as mesh_module
from phalanx.layout.mesh import Mesh, build_mesh
from phalanx.layout.spec import ResolvedLayout

LAYOUT_OF_4096 = ResolvedLayout(3072, pp=4, dp_replicate=4, dp_shard=16, cp=2, tp=8)


def meshes_of_all_ranks(layout: ResolvedLayout, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[int, Mesh]]:
    """Yield each rank of `layout` and its mesh."""
    here = 0
    monkeypatch.setattr(dist, "get_rank", lambda: here)
    monkeypatch.setattr(dist, "get_world_size", lambda: layout.world_size)
    # Groups are made by exchanging messages, of which there are none here; which ranks they have is computed.
    monkeypatch.setattr(mesh_module, "_find_group", lambda ranks, made, link="": SimpleNamespace(group_name=""))
    monkeypatch.setattr(mesh_module, "_data_mesh", lambda *arguments: None)
    for here in range(layout.world_size):
        yield here, build_mesh(layout, torch.device("cpu"))
