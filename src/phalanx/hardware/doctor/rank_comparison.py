"""Compares ranks: shared devices, distant cores, versions that differ, slow devices and links. Pure functions of reports."""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import TypeVar

from phalanx.hardware.device_facts import device_kind, find_facts
from phalanx.hardware.doctor.finding import Finding, Level, format_ranks
from phalanx.hardware.doctor.rank_facts import DeviceRates, RankFacts
from phalanx.hardware.machine import Machine, cores_of

SLOW = 0.9
"""Share of the median of equal devices below which a device is slow; healthy devices differ by a few percent."""
SLOW_LINKS = 0.7
"""Share of the median of nodes below which the links of a node are slow."""
_THROTTLED = 0.5
"""Share of the highest published rate below which a device is throttled."""
_TAKEN_GIB = 2.0
"""GiB of a device's memory that the driver and this process may take before anything is trained."""

Key = TypeVar("Key", bound=Hashable)


def compare_binding(facts: Sequence[RankFacts], machine: Machine | None = None) -> list[Finding]:
    """Return findings about devices, cores and software. machine: whose binding the ranks should have."""
    return [*_compare_devices(facts, machine), *_compare_software(facts), *_compare_nodes(facts, machine)]


def compare_rates(facts: Sequence[RankFacts], rates: Sequence[DeviceRates]) -> list[Finding]:
    """Return findings about measured rates. facts, rates: of the same ranks, in the same order."""
    return [*_find_wrong_results(facts, rates), *_find_slow_devices(facts, rates), *_find_slow_links(facts, rates)]


def _group_ranks(facts: Sequence[RankFacts], key: Callable[[RankFacts], Key]) -> dict[Key, list[RankFacts]]:
    found: dict[Key, list[RankFacts]] = defaultdict(list)
    for one in facts:
        found[key(one)].append(one)
    return found


def _compare_devices(facts: Sequence[RankFacts], machine: Machine | None) -> Iterator[Finding]:
    for (host, address), ranks in _group_ranks(
        [one for one in facts if one.address], lambda x: (x.host, x.address)
    ).items():
        if len(ranks) > 1:
            numbers = tuple(one.rank for one in ranks)
            message = f"{format_ranks(numbers)} have one device, {address} of {host}"
            fix = "start one rank for each device: srun --gpus-per-task=1 with --gpu-bind, or show all devices to all ranks"
            yield Finding("failed", "shared-device", message, fix, numbers)
    devices = {one.rank: one.device for one in facts}
    yield from _find_odd_ranks(
        facts, "devices", "device", devices, "warning", "the slowest device sets the pace: take equal nodes"
    )
    for name, ranks in _group_ranks(facts, lambda one: one.device).items():
        kind = device_kind(name)
        if machine is not None and kind != machine.node.device:
            numbers = tuple(one.rank for one in ranks)
            message = f"{format_ranks(numbers)}: {kind} ({name}), where {machine.name} has {machine.node.device}"
            yield Finding("warning", "devices", message, "name the description of this machine with --cluster", numbers)
    for one in facts:
        if one.memory_gib is not None and one.free_gib is not None and one.memory_gib - one.free_gib > _TAKEN_GIB:
            taken = f"{one.memory_gib - one.free_gib:.1f} of {one.memory_gib:.1f} GiB"
            message = f"{taken} of the device of {one.words} are taken before anything is trained"
            yield Finding("warning", "device-memory", message, "end what else runs on that device", (one.rank,))


def _compare_software(facts: Sequence[RankFacts]) -> Iterator[Finding]:
    fix = "use the same environment on every node"
    for name in ("phalanx", "torch", "built for", "python"):
        values = {one.rank: one.versions[name] for one in facts}
        yield from _find_odd_ranks(facts, "versions", name, values, "warning" if name == "python" else "failed", fix)


def _find_odd_ranks(
    facts: Sequence[RankFacts], check: str, what: str, values: dict[int, str], level: Level, fix: str
) -> Iterator[Finding]:
    """Find ranks whose value is not that of most ranks."""
    usual = Counter(values.values()).most_common(1)[0][0]
    for value, ranks in _group_ranks(facts, lambda one: values[one.rank]).items():
        if value != usual:
            numbers = tuple(one.rank for one in ranks)
            hosts = ", ".join(dict.fromkeys(one.host for one in ranks))
            message = f"{format_ranks(numbers)} on {hosts}: {what} {value}, where most have {usual}"
            yield Finding(level, check, message, fix, numbers)


def _compare_nodes(facts: Sequence[RankFacts], machine: Machine | None) -> Iterator[Finding]:
    # Ranks are placed as if each node had as many.
    counts = {host: len(ranks) for host, ranks in _group_ranks(facts, lambda one: one.host).items()}
    if len(set(counts.values())) > 1:
        few, many = min(counts, key=lambda h: counts[h]), max(counts, key=lambda h: counts[h])
        message = f"{few} has {counts[few]} of the ranks and {many} {counts[many]}: layouts take nodes to be alike"
        yield Finding("warning", "ranks-per-node", message, "start as many ranks on each node")
    # The description of a machine knows which cores are near which device; without one the kernel is asked.
    masks = () if machine is None else machine.node.cpu_masks
    for host, ranks in _group_ranks([one for one in facts if one.cores], lambda one: one.host).items():
        # Ranks share fewer cores than there are ranks where no launcher has spread them.
        numbers = tuple(one.rank for one in ranks)
        cores = {core for one in ranks for core in one.cores}
        if len(cores) < len(ranks):
            message = f"{format_ranks(numbers)} of {host} share {len(cores)} core{'s' if len(cores) > 1 else ''}"
            yield Finding(
                "warning", "binding", message, "give each rank cores of its own: srun --cpus-per-task", numbers
            )
        for one in [one for one in ranks if one.device != "cpu"]:
            wanted = tuple(cores_of(masks[one.local_rank])) if one.local_rank < len(masks) else ()
            if wanted and not set(one.cores) <= set(wanted):
                source = f"{machine.name}'s description" if machine is not None else ""
                yield _misbound_finding(one, wanted, f"where {source} puts its device")
            elif not wanted and one.near and not set(one.cores) & set(one.near):
                yield _misbound_finding(one, one.near, "nearest to its device")


def _misbound_finding(one: RankFacts, wanted: Sequence[int], why: str) -> Finding:
    message = f"{one.words} runs on cores {_format_cores(one.cores)}, not on {_format_cores(wanted)}, {why}"
    return Finding(
        "warning", "binding", message, "bind as the scripts of phalanx launch do (srun --cpu-bind)", (one.rank,)
    )


def _format_cores(cores: Sequence[int]) -> str:
    # The ranges of `format_ranks` without the word before them.
    return format_ranks(cores).partition(" ")[2]


def _find_wrong_results(facts: Sequence[RankFacts], rates: Sequence[DeviceRates]) -> Iterator[Finding]:
    fix = "leave that node out (sbatch --exclude) and have it looked at"
    for one, rate in zip(facts, rates, strict=True):
        if not rate.same:
            message = f"one product of the same numbers gave different results on {one.words}"
            yield Finding("failed", "results", message, fix, (one.rank,))
        if not rate.sums_right:
            yield Finding("failed", "sums", f"an all-reduce gave wrong sums on {one.words}", fix, (one.rank,))
    # Equal devices with equal builds give equal bits: the odd one out is at fault.
    digests = {one.rank: rate.digest for one, rate in zip(facts, rates, strict=True)}
    alike = _group_ranks(
        [one for one in facts if digests[one.rank]], lambda one: (one.device, one.versions["built for"])
    )
    for ranks in alike.values():
        counts = Counter(digests[one.rank] for one in ranks)
        usual, often = counts.most_common(1)[0]
        for one in ranks:
            if digests[one.rank] != usual and often > len(ranks) / 2:
                others = f"{often} of {len(ranks)} equal devices"
                message = f"{one.words} computes another product of the same numbers than {others}"
                yield Finding("failed", "results", message, fix, (one.rank,))


def _find_slow_devices(facts: Sequence[RankFacts], rates: Sequence[DeviceRates]) -> Iterator[Finding]:
    by_rank = {rate.rank: rate for rate in rates}
    # Ranks on one CPU share its cores and memory and slow each other down, which says nothing about the CPU.
    for name, ranks in _group_ranks([one for one in facts if one.device != "cpu"], lambda one: one.device).items():
        for what, unit, of in (
            ("products", "TFLOP/s", lambda rate: rate.matmul_tflops),
            ("copies in memory", "GB/s", lambda rate: rate.copy_gb_s),
        ):
            usual = statistics.median(of(by_rank[one.rank]) for one in ranks)
            for one in ranks:
                reached = of(by_rank[one.rank])
                if reached < SLOW * usual:
                    message = f"{one.words}: {what} at {reached:.4g} {unit}, where the median is {usual:.4g}"
                    fix = "leave that node out (sbatch --exclude), or look at its clocks, temperature and other users"
                    yield Finding("warning", "slow-device", message, fix, (one.rank,))
        # Equal devices may all be slow: then only what is known of others tells.
        known = find_facts(name)
        best = None if known is None else known.matmul_tflops.get("bf16") or known.peak_tflops.get("bf16")
        reached = statistics.median(by_rank[one.rank].matmul_tflops for one in ranks)
        if best is not None and reached < _THROTTLED * best:
            message = (
                f"products in bf16 run at {reached:.4g} TFLOP/s on {name}, of which {best:.4g} are known elsewhere"
            )
            yield Finding("warning", "slow-device", message, "look at power limits, clocks and what else runs there")


def _find_slow_links(facts: Sequence[RankFacts], rates: Sequence[DeviceRates]) -> Iterator[Finding]:
    by_rank = {rate.rank: rate for rate in rates}
    hosts = {
        host: min(found)
        for host, ranks in _group_ranks(facts, lambda one: one.host).items()
        if (found := [rate for one in ranks if (rate := by_rank[one.rank].node_gb_s) is not None])
    }
    if not hosts:
        return
    usual = statistics.median(hosts.values())
    for host, reached in hosts.items():
        if reached < SLOW_LINKS * usual:
            message = (
                f"devices of {host} all-reduce at {reached:.4g} GB/s, where the median of the nodes is {usual:.4g}"
            )
            numbers = tuple(one.rank for one in facts if one.host == host)
            yield Finding("warning", "slow-links", message, "leave that node out (sbatch --exclude)", numbers)
