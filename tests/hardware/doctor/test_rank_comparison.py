"""What is wrong between ranks, from what they said of themselves."""

from __future__ import annotations

from dataclasses import replace

from phalanx.hardware.doctor.finding import Finding
from phalanx.hardware.doctor.rank_comparison import compare_binding, compare_rates
from phalanx.hardware.doctor.rank_facts import DeviceRates, RankFacts
from phalanx.hardware.machine import cores_of, load_machine

FRONTIER = load_machine("frontier")
VERSIONS = {"phalanx": "1", "torch": "2.11", "built for": "ROCm 7", "python": "3.12"}


def ranks(nodes: int = 2) -> list[RankFacts]:
    """Those of a job on Frontier that is as it should be."""
    return [
        RankFacts(
            rank=node * 8 + local,
            local_rank=local,
            host=f"nid{node}",
            cores=tuple(cores_of(FRONTIER.node.cpu_masks[local])),
            device="AMD Instinct MI250X",
            address=f"0000:c{local}:00.0",
            near=(),
            memory_gib=64.0,
            free_gib=63.5,
            versions=VERSIONS,
        )
        for node in range(nodes)
        for local in range(8)
    ]


def rates(facts: list[RankFacts]) -> list[DeviceRates]:
    return [DeviceRates(one.rank, 110.0 + one.rank % 3, 1300.0, True, "a1", 80.0, 40.0) for one in facts]


def only(findings: list[Finding]) -> tuple[str, str, tuple[int, ...]]:
    (finding,) = findings
    return finding.level, finding.check, finding.ranks


def test_a_job_that_is_as_it_should_be_is_not_spoken_of() -> None:
    facts = ranks()
    assert compare_binding(facts, FRONTIER) == [] and compare_rates(facts, rates(facts)) == []


def test_two_ranks_with_one_device() -> None:
    facts = ranks()
    facts[3] = replace(facts[3], address=facts[2].address)
    assert only(compare_binding(facts)) == ("failed", "shared-device", (2, 3))
    # On another host the same address is another device.
    facts[3] = replace(facts[3], address=facts[11].address)
    assert compare_binding(facts) == []


def test_another_pytorch_on_one_node() -> None:
    facts = [replace(one, versions=VERSIONS | {"torch": "2.12"}) if one.host == "nid1" else one for one in ranks(3)]
    assert only(compare_binding(facts)) == ("failed", "versions", tuple(range(8, 16)))


def test_ranks_away_from_their_devices_cores() -> None:
    facts = ranks()
    facts[9] = replace(facts[9], cores=(1, 2, 3))
    assert only(compare_binding(facts, FRONTIER)) == ("warning", "binding", (9,))
    (finding,) = compare_binding(facts, FRONTIER)
    assert finding.message.startswith("rank 9 (nid1, device 1) runs on cores 1-3, not on 57-63")
    # Without a description, what the host says of the device.
    near = [replace(one, near=(40, 41)) if one.rank == 9 else one for one in facts]
    assert only(compare_binding(near)) == ("warning", "binding", (9,)) and compare_binding(facts) == []


def test_ranks_on_too_few_cores() -> None:
    facts = [replace(one, cores=(0, 1)) if one.host == "nid0" else one for one in ranks()]
    assert only(compare_binding(facts)) == ("warning", "binding", tuple(range(8)))


def test_uneven_nodes_taken_memory_and_other_devices() -> None:
    assert (
        compare_binding(ranks()[:-1])[0].message == "nid1 has 7 of the ranks and nid0 8: layouts take nodes to be alike"
    )
    taken = [replace(one, free_gib=30.0) if one.rank == 5 else one for one in ranks()]
    assert only(compare_binding(taken)) == ("warning", "device-memory", (5,))
    assert "34.0 of 64.0 GiB of the device of rank 5 (nid0, device 5)" in compare_binding(taken)[0].message
    others = [replace(one, device="NVIDIA H200") for one in ranks()]
    assert only(compare_binding(others, FRONTIER)) == ("warning", "devices", tuple(range(16)))


def test_a_slow_device_is_named_with_its_host() -> None:
    facts = ranks()
    slow = rates(facts)
    slow[13] = replace(slow[13], matmul_tflops=90.0)
    assert only(compare_rates(facts, slow)) == ("warning", "slow-device", (13,))
    assert compare_rates(facts, slow)[0].message.startswith("rank 13 (nid1, device 5): products at 90 TFLOP/s")
    slow[13] = replace(slow[13], matmul_tflops=110.0, copy_gb_s=1000.0)
    assert "copies in memory at 1000 GB/s" in compare_rates(facts, slow)[0].message


def test_devices_that_are_all_slow() -> None:
    facts = ranks()
    (finding,) = compare_rates(facts, [replace(rate, matmul_tflops=50.0) for rate in rates(facts)])
    assert finding.check == "slow-device" and finding.ranks == () and "known elsewhere" in finding.message


def test_slow_links_of_a_node() -> None:
    facts = ranks(3)
    slow = [
        replace(rate, node_gb_s=50.0) if facts[place].host == "nid2" else rate
        for place, rate in enumerate(rates(facts))
    ]
    assert only(compare_rates(facts, slow)) == ("warning", "slow-links", tuple(range(16, 24)))


def test_wrong_results_fail() -> None:
    facts = ranks()
    for change, check in (({"same": False}, "results"), ({"sums_right": False}, "sums"), ({"digest": "b2"}, "results")):
        wrong = rates(facts)
        wrong[6] = replace(wrong[6], **change)  # type: ignore[arg-type]
        assert only(compare_rates(facts, wrong)) == ("failed", check, (6,))
    # Where no result is what most have, nobody knows who is wrong; and other devices may differ.
    each = [replace(rate, digest=str(rate.rank)) for rate in rates(facts)]
    assert compare_rates(facts, each) == []


def test_ranks_of_a_cpu_slow_each_other_down() -> None:
    facts = [replace(one, device="cpu", address="") for one in ranks()]
    uneven = [replace(rate, matmul_tflops=float(rate.rank + 1), digest="") for rate in rates(facts)]
    assert compare_rates(facts, uneven) == []
