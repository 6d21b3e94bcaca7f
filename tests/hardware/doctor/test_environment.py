"""What is wrong with variables and limits, and nothing else."""

from __future__ import annotations

from dataclasses import replace

import pytest

from phalanx.hardware.doctor.environment import Surroundings, environment_findings
from phalanx.hardware.doctor.finding import Finding
from phalanx.hardware.machine import described_names, load_machine

HERE = Surroundings(
    world_size=8,
    nodes=1,
    cores=7,
    interfaces=frozenset(["lo", "hsn0", "hsn1", "eth0"]),
    open_files=65536,
    python="/opt/env",
    rocm=False,
    shared=lambda path: "lustre" if path.startswith("/lustre") else None,
)


def found(environment: dict[str, str], place: Surroundings = HERE, *, first: bool = True) -> list[Finding]:
    return environment_findings(environment, place, first)


def checks(findings: list[Finding]) -> list[tuple[str, str]]:
    return [(finding.level, finding.check) for finding in findings]


def test_an_environment_that_is_as_it_should_be_is_not_spoken_of() -> None:
    good = {
        "NCCL_SOCKET_IFNAME": "hsn",
        "GLOO_SOCKET_IFNAME": "hsn0",
        "NCCL_NET": "OFI",
        "FI_CXI_RDZV_PROTO": "alt_read",
        "FI_MR_CACHE_MONITOR": "kdreg2",
        "OMP_NUM_THREADS": "7",
        "CUDA_VISIBLE_DEVICES": "0,1",
        "HOME": "/lustre/me",
        "NCCL_SOMETHING_QUITE_DIFFERENT": "1",
    }
    assert found(good) == []


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("FI_CXI_RDV_PROTO", "FI_CXI_RDZV_PROTO"),
        ("MIOPEN_USER_DB", "MIOPEN_USER_DB_PATH"),
        ("NCCL_SOCKET_IFNAMES", "NCCL_SOCKET_IFNAME"),
    ],
)
def test_misspelt_names_are_told_what_was_meant(written: str, meant: str) -> None:
    (finding,) = found({written: "x"})
    assert (finding.level, finding.check) == ("warning", "misspelt")
    assert written in finding.message and f"{meant} is" in finding.message
    # Set rightly beside it, the other one does no harm.
    assert found({written: "x", meant: "lo"}) == []


@pytest.mark.parametrize(
    ("name", "value"), [("FI_MR_CACHE_MONITOR", "memhooks"), ("NCCL_P2P_DISABLE", "1"), ("CUDA_LAUNCH_BLOCKING", "1")]
)
def test_settings_that_cost_jobs_name_their_source(name: str, value: str) -> None:
    (finding,) = found({name: value})
    assert (finding.level, finding.check) == ("warning", "setting")
    assert finding.message.startswith(f"{name}={value}: ") and finding.message.endswith(")")
    assert found({name: "0"}) == []


@pytest.mark.parametrize("name", described_names())
def test_no_setting_of_a_description_is_taken_for_a_misspelt_one(name: str) -> None:
    wanted = {one.name: one.value for one in load_machine(name).environment}
    assert "misspelt" not in [finding.check for finding in found(wanted)]


def test_devices_that_are_counted_twice() -> None:
    (finding,) = found({"ROCR_VISIBLE_DEVICES": "4", "HIP_VISIBLE_DEVICES": "4"})
    assert finding.check == "visible-devices" and finding.fix == "unset HIP_VISIBLE_DEVICES"
    assert found({"HIP_VISIBLE_DEVICES": "4", "CUDA_VISIBLE_DEVICES": "4"}) == []


@pytest.mark.parametrize(
    ("name", "value", "there"),
    [
        ("NCCL_SOCKET_IFNAME", "hsn", True),
        ("NCCL_SOCKET_IFNAME", "=hsn", False),
        ("NCCL_SOCKET_IFNAME", "=hsn1,ib0", True),
        ("NCCL_SOCKET_IFNAME", "ib", False),
        ("NCCL_SOCKET_IFNAME", "^lo", True),
        ("GLOO_SOCKET_IFNAME", "hsn", False),
        ("GLOO_SOCKET_IFNAME", "eth0", True),
    ],
)
def test_interfaces_that_are_not_there(name: str, value: str, there: bool) -> None:
    assert checks(found({name: value})) == ([] if there else [("failed", "interfaces")])


def test_more_threads_than_cores() -> None:
    (finding,) = found({"OMP_NUM_THREADS": "56"})
    assert "56" in finding.message and finding.fix.startswith("export OMP_NUM_THREADS=7")


def test_databases_and_caches_on_shared_file_systems() -> None:
    home = {"HOME": "/lustre/me"}
    amd, many = replace(HERE, rocm=True), replace(HERE, nodes=4, world_size=32)
    assert checks(found(home, amd)) == [("failed", "miopen-database")]
    assert found({**home, "MIOPEN_USER_DB_PATH": "/tmp/db"}, amd) == []
    assert checks(found(home, many)) == [("warning", "compile-cache")]
    assert found({**home, "TRITON_CACHE_DIR": "/tmp/triton"}, many) == []
    large = replace(HERE, world_size=1024, python="/lustre/env")
    assert checks(found({}, large)) == [("warning", "python-environment")]


def test_rank_0_needs_a_socket_for_each_rank() -> None:
    many = replace(HERE, world_size=1024, open_files=1024)
    assert checks(found({}, many)) == [("failed", "open-files")]
    assert found({}, many, first=False) == []


def test_settings_of_a_machine_are_looked_for() -> None:
    frontier = load_machine("frontier")
    several = replace(HERE, nodes=2, world_size=16, interfaces=frozenset(f"hsn{number}" for number in range(4)))
    wanted = {one.name: one.value for one in frontier.environment if one.nodes != "one"}
    # A folder that carries the job's number is another one in each job.
    wanted |= {"MIOPEN_USER_DB_PATH": "/tmp/me-miopen-7", "MIOPEN_CUSTOM_CACHE_DIR": "/tmp/me-miopen-7"}
    assert environment_findings(wanted, several, True, frontier) == []
    without = {name: value for name, value in wanted.items() if name != "NCCL_CROSS_NIC"} | {"NCCL_NET": "Socket"}
    messages = [finding.message for finding in environment_findings(without, several, True, frontier)]
    assert len(messages) == 2
    assert messages[0].startswith("NCCL_NET is Socket; frontier wants OFI: ")
    assert messages[1].startswith("NCCL_CROSS_NIC is not set; frontier wants 1: ")
