"""`phalanx doctor`: what it says of this machine, of ranks that are missing, and of one that computes wrong."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from command_line import Call
from phalanx.cli.main import main
from phalanx.errors import ConfigError, PhalanxError
from phalanx.hardware.doctor import rank_facts
from phalanx.hardware.doctor.examine import examine_ranks
from phalanx.layout.mesh import Ranks
from phalanx_processes import free_port, start


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing in the environment that is worth a word."""
    for name in list(os.environ):
        if name.startswith(("NCCL_", "GLOO_", "FI_", "MIOPEN_", "HSA_", "TORCH_NCCL_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    # Rates are not what is looked at here.
    monkeypatch.setattr(rank_facts, "_CPU_SIDE", 64)
    monkeypatch.setattr(rank_facts, "_CPU_COPIED", 2**16)


def test_one_rank_passes(call: Call) -> None:
    outcome = call("doctor", "--device", "cpu")
    assert (outcome.code, outcome.err) == (0, "")
    lines = outcome.out.splitlines()
    assert re.fullmatch(r"1 rank on 1 host: 1 x cpu; phalanx \S+, torch \S+, Python \S+", lines[0])
    assert re.fullmatch(r"  products: \S+ TFLOP/s", lines[1]) and lines[-1] == "PASS"


def test_a_failure_ends_with_3_and_json_says_what(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "nowhere")
    monkeypatch.setenv("FI_CXI_RDV_PROTO", "alt_read")
    outcome = call("doctor", "--device", "cpu", "--quick", "--json")
    assert outcome.code == 3 and outcome.err == "error: not fit to train on: interfaces\n"
    facts = json.loads(outcome.out)
    assert not facts["passed"] and facts["rates"] == []
    assert [(one["level"], one["check"]) for one in facts["findings"]] == [
        ("failed", "interfaces"),
        ("warning", "misspelt"),
    ]
    assert (
        call("doctor", "--device", "cpu", "--quick")
        .out.splitlines()[-1]
        .startswith("warning  misspelt: FI_CXI_RDV_PROTO ")
    )


def test_wrong_arguments(call: Call) -> None:
    assert call("doctor", "--cluster", "frontierr").code == 2
    assert call("doctor", "--patience", "0").code == 2


def _two_a_node(words: Sequence[str]) -> None:
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    main(words)


def _wrong_on_rank_2(words: Sequence[str]) -> None:
    true_sum = dist.all_reduce

    def wrong(x: torch.Tensor, *arguments: Any, **options: Any) -> Any:
        done = true_sum(x, *arguments, **options)
        if dist.get_rank() == 2:
            x[0] += 1
        return done

    dist.all_reduce = wrong
    _two_a_node(words)


def test_ranks_tell_rank_0() -> None:
    command = start(["doctor", "--device", "cpu", "--json"], 4, _two_a_node)
    code, errors = command.finish(60)
    assert code == 0, errors
    facts = json.loads(Path(command.folder.name, "out-0").read_text())
    assert [one["rank"] for one in facts["ranks"]] == [one["rank"] for one in facts["rates"]] == [0, 1, 2, 3]
    for one in facts["rates"]:
        assert one["sums_right"] and one["same"] and one["node_gb_s"] > 0 and one["world_gb_s"] > 0
        assert one["node_gb_s"] != one["world_gb_s"]
    assert all(not Path(command.folder.name, f"out-{rank}").read_text() for rank in (1, 2, 3))


def test_a_rank_that_adds_up_wrong_is_named() -> None:
    command = start(["doctor", "--device", "cpu"], 4, _wrong_on_rank_2)
    code, errors = command.finish(60)
    assert code == 3 and "not fit to train on: sums" in errors
    said = Path(command.folder.name, "out-0").read_text()
    assert (
        "failed   sums: an all-reduce gave wrong sums on rank 2 (" in said and "rank 1 (" not in said.split("failed")[1]
    )


def test_ranks_that_say_nothing_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nowhere")
    with pytest.raises(PhalanxError) as failure:
        examine_ranks(Ranks(0, 3, 0, 3), torch.device("cpu"), None, patience_s=0.2)
    first, own = str(failure.value).splitlines()
    assert first.startswith("ranks 1-2 of 3 did not say their state within 0 s")
    assert own.startswith("failed: GLOO_SOCKET_IFNAME=nowhere names no network interface")


def test_several_ranks_need_a_place_to_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with pytest.raises(ConfigError, match="MASTER_ADDR and MASTER_PORT are not set"):
        examine_ranks(Ranks(1, 2, 1, 2), torch.device("cpu"), None)
