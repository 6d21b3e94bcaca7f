"""PyTorch's flight recorders: what each has recorded comes back as one text."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from phalanx.launch.collectives import read_collectives
from phalanx.launch.fork_server import run_ranks
from phalanx.launch.heartbeat import collectives_file
from phalanx.torch_compat.flight import last_collectives


def test_a_build_with_nccl_gives_both_recorders(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    entry = {
        "collective_seq_id": 3,
        "process_group": ["1", "undefined"],
        "profiling_name": "nccl:_reduce_scatter_base",
        "time_created_ns": 5_000_000_000,
        "state": "started",
        "retired": False,
        "is_p2p": False,
    }
    dumped = json.dumps({"version": "2.10", "entries": [entry]}).encode()
    monkeypatch.setattr(torch._C._distributed_c10d, "_dump_nccl_trace_json", lambda: dumped, raising=False)
    text = last_collectives()
    assert text is not None and len(json.loads(text)) == 2
    collectives_file(tmp_path, 0).write_text(text)
    (found,) = [one for one in read_collectives(tmp_path, 0) if one.backend == "nccl"]
    assert (found.group, found.number, found.name, found.began, found.finished) == (
        "1",
        3,
        "reduce_scatter",
        True,
        False,
    )


def record_on_ranks(folder: Path) -> list[tuple[str, int, bool]]:
    dist.barrier()
    dist.all_reduce(torch.ones(2))
    # Rank 1 never comes to the next one.
    work = dist.all_reduce(torch.ones(2), async_op=True) if dist.get_rank() == 0 else None
    deadline = time.monotonic() + 60
    while True:
        text = last_collectives()
        assert text is not None
        collectives_file(folder, dist.get_rank()).write_text(text)
        found = read_collectives(folder, dist.get_rank())
        # gloo's own thread notes the end of a collective, at times a moment after this thread goes on.
        if sum(one.finished for one in found if one.name == "all_reduce") or time.monotonic() > deadline:
            break
        time.sleep(0.01)
    del work
    return [(one.name, one.number, one.finished) for one in found]


def test_what_gloo_records_is_read(tmp_path: Path) -> None:
    first, second = run_ranks(record_on_ranks, 2, tmp_path)
    assert second[-1][0] == "all_reduce" and second[-1][2]
    assert first[-1] == ("all_reduce", second[-1][1] + 1, False)
