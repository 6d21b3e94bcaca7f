"""What libraries say when memory or another rank is gone, in words for the user."""

from __future__ import annotations

from pathlib import Path

import pytest

from phalanx.errors import ConfigError, PhalanxError
from phalanx.layout.mesh import Ranks
from phalanx.training.stopping import explain_failures

CPU = "[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory: 8 bytes."
PEER = "[../third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:5"


def ended(error: Exception, folder: Path, ranks: Ranks, stage: str = "") -> str:
    with pytest.raises(PhalanxError) as found, explain_failures(ranks, stage, folder, lambda: "step 7"):
        raise error
    return str(found.value)


@pytest.mark.parametrize("error", [RuntimeError(CPU), MemoryError(), RuntimeError("HIP out of memory. Tried 2 GiB")])
def test_memory_that_ran_out_is_said_with_place_and_way_out(error: Exception, tmp_path: Path) -> None:
    said = ended(error, tmp_path, Ranks(3, 4), " (pipeline rank 1 of 2)")
    assert said.startswith("rank 3 (pipeline rank 1 of 2) is out of memory in step 7: ")
    assert "lower layout.microbatch, set layout.recompute=full" in said
    assert type(error).__name__ in (tmp_path / "failure-rank-3.log").read_text()
    assert ended(error, tmp_path, Ranks()).startswith("training is out of memory in step 7: ")


def test_memory_that_ran_out_inside_a_pipeline_is_found_behind_its_error(tmp_path: Path) -> None:
    wrapped = RuntimeError("[Stage 1] failed to run forward")
    wrapped.__cause__ = MemoryError("8 bytes")
    said = ended(wrapped, tmp_path, Ranks(1, 2))
    assert said.startswith("rank 1 is out of memory in step 7: 8 bytes\n")


def test_another_rank_that_is_gone_is_one_line(tmp_path: Path) -> None:
    said = ended(RuntimeError(PEER), tmp_path, Ranks(0, 2))
    assert said.startswith("rank 0 lost another rank in step 7: Connection closed by peer [127.0.0.1]:5\n")
    assert "Traceback" in (tmp_path / "failure-rank-0.log").read_text()


@pytest.mark.parametrize("error", [RuntimeError("shapes do not match"), ValueError(CPU), ConfigError("no such field")])
def test_everything_else_stays_what_it_is(error: Exception, tmp_path: Path) -> None:
    with pytest.raises(type(error)) as found, explain_failures(Ranks(0, 2), "", tmp_path, lambda: "step 7"):
        raise error
    assert found.value is error and not list(tmp_path.iterdir())


def test_one_rank_has_nobody_to_lose(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="closed by peer"), explain_failures(Ranks(), "", tmp_path, lambda: ""):
        raise RuntimeError(PEER)
