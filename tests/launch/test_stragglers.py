"""Who comes late to collectives, and who never came: from the flight recorder's records of ranks, made here."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path
from typing import Any

import pytest

from phalanx.launch import stragglers
from phalanx.launch.collectives import ArrivalHistory, Collective, absent_ranks, read_collectives
from phalanx.launch.faults import blame_silent, view_rank
from phalanx.launch.heartbeat import Heartbeat, collectives_file
from phalanx.launch.stragglers import StragglerWatch, read_report

RANKS, PER_STEP, STEP_S = 4, 6, 0.1


def record(entries: list[tuple[int, float, float | None]], finished: bool = True) -> str:
    """The flight recorder's text of collectives: number, when it was entered, ms on the device."""
    return json.dumps(
        [
            {
                "entries": [
                    {
                        "collective_seq_id": number,
                        "process_group": ["0", "default_pg"],
                        "profiling_name": "gloo:all_reduce",
                        "time_created_ns": round(at * 1e9),
                        "duration_ms": duration,
                        "retired": finished or number < entries[-1][0],
                        "is_p2p": False,
                    }
                    for number, at, duration in entries
                ]
            }
        ]
    )


def nccl_entry(number: int, state: str, operation: str = "_all_gather_base", group: str = "dp_shard") -> dict[str, Any]:
    """An entry as PyTorch 2.10 to 2.13 write them for NCCL with its times measured."""
    done = state == "completed"
    return {
        "record_id": number - 1,
        "pg_id": 1,
        "process_group": ["1", group],
        "collective_seq_id": number,
        "p2p_seq_id": 0,
        "op_id": number,
        "profiling_name": f"nccl:{operation}",
        "time_created_ns": number * 1_000_000,
        **({"duration_ms": 0.25} if done else {}),
        "input_sizes": [[64]],
        "input_dtypes": ["BFloat16"],
        "output_sizes": [[128]],
        "output_dtypes": ["BFloat16"],
        "state": state,
        "time_discovered_started_ns": 0 if state == "scheduled" else number * 1_000_000 + 1,
        "time_discovered_completed_ns": number * 1_000_000 + 2 if done else 0,
        "retired": done,
        "timeout_ms": 600_000,
        "is_p2p": False,
    }


def nccl_record(*entries: dict[str, Any]) -> str:
    """The text of a rank on a device: what gloo has recorded, and NCCL."""
    gloo = {
        **nccl_entry(9, "scheduled", "all_reduce"),
        "profiling_name": "gloo:all_reduce",
        "retired": True,
    }
    more = {"pg_config": {"1": {"name": "1", "desc": "dp_shard", "ranks": "[0, 1]"}}, "nccl_comm_state": {}}
    return json.dumps([{"version": "2.10", "entries": [gloo]}, {"version": "2.10", "entries": list(entries), **more}])


def who_is_absent(folder: Path, *records: str) -> tuple[list[int], list[str]]:
    """What is said of ranks that have left these records."""
    for rank, text in enumerate(records):
        collectives_file(folder, rank).write_text(text)
    return absent_ranks({rank: read_collectives(folder, rank) for rank in range(len(records))})


def test_a_rank_that_never_entered_a_collective_is_named(tmp_path: Path) -> None:
    for rank in range(RANKS):
        last = 6 if rank in (1, 3) else 7
        collectives_file(tmp_path, rank).write_text(
            record([(number, float(number), None) for number in range(1, last + 1)], finished=last == 6)
        )
    absent, sentences = absent_ranks({rank: read_collectives(tmp_path, rank) for rank in range(RANKS)})
    assert absent == [1, 3]
    assert sentences == ["ranks 1, 3 never entered all_reduce 7 of group 0 default_pg, in which ranks 0, 2 wait"]


def test_ranks_that_all_came_are_not_absent(tmp_path: Path) -> None:
    for rank in range(2):
        collectives_file(tmp_path, rank).write_text(record([(1, 1.0, None), (2, 2.0, None)], finished=False))
    assert absent_ranks({rank: read_collectives(tmp_path, rank) for rank in range(2)}) == ([], [])
    assert read_collectives(tmp_path, 7) == []


def test_of_ranks_on_devices_the_one_is_named_whose_host_launched_nothing(tmp_path: Path) -> None:
    """A host runs ahead of its device: it has launched more than the collective in which the device waits."""
    waiting = nccl_record(
        nccl_entry(1411, "completed"),
        nccl_entry(1412, "started"),
        nccl_entry(1413, "scheduled", "_reduce_scatter_base"),
    )
    absent, sentences = who_is_absent(tmp_path, waiting, nccl_record(nccl_entry(1411, "completed")))
    assert absent == [1]
    assert sentences == ["rank 1 never entered all_gather 1,412 of group 1 dp_shard, in which rank 0 waits"]


def test_of_ranks_on_devices_the_one_is_named_whose_device_does_something_else(tmp_path: Path) -> None:
    """Both hosts have launched the collective, but on one device a kernel before it does not end."""
    stuck = nccl_record(nccl_entry(1411, "completed"), nccl_entry(1412, "scheduled"), nccl_entry(1413, "scheduled"))
    waiting = nccl_record(nccl_entry(1411, "completed"), nccl_entry(1412, "started"))
    absent, sentences = who_is_absent(tmp_path, stuck, waiting)
    assert absent == [0]
    assert sentences == ["the device of rank 0 never began all_gather 1,412 of group 1 dp_shard, in which rank 1 waits"]


def test_a_broadcast_that_its_source_has_left_behind_is_waited_for_by_nobody_else(tmp_path: Path) -> None:
    source = nccl_record(nccl_entry(7, "completed", "broadcast"), nccl_entry(8, "started", "all_reduce"))
    behind = nccl_record(nccl_entry(7, "scheduled", "broadcast"), nccl_entry(8, "scheduled", "all_reduce"))
    absent, sentences = who_is_absent(tmp_path, source, behind)
    assert absent == [1] and "the device of rank 1 never began all_reduce 8" in sentences[0]


def test_devices_that_all_wait_in_one_collective_name_nobody(tmp_path: Path) -> None:
    text = nccl_record(nccl_entry(6, "completed"), nccl_entry(7, "started"))
    assert who_is_absent(tmp_path, text, text) == ([], [])


def test_parts_of_a_launch_that_no_event_belongs_to_are_not_pending(tmp_path: Path) -> None:
    """Operations launched together are recorded each, without events, and once more as a whole."""
    text = nccl_record(nccl_entry(6, "scheduled"), nccl_entry(6, "scheduled"), nccl_entry(6, "completed", "coalesced"))
    assert who_is_absent(tmp_path, text, nccl_record(nccl_entry(6, "completed", "coalesced"))) == ([], [])


def test_of_a_chain_of_groups_the_rank_that_waits_for_nobody_is_named(tmp_path: Path) -> None:
    """Rank 0 waits for rank 1 in one group, which waits for rank 2 in another."""
    first = nccl_record(nccl_entry(3, "started", group="tp"))
    between = nccl_record(nccl_entry(2, "completed", group="tp"), nccl_entry(5, "started", group="pp"))
    last = nccl_record(nccl_entry(4, "completed", group="pp"))
    absent, sentences = who_is_absent(tmp_path, first, between, last)
    assert absent == [2] and len(sentences) == 2


def test_the_rank_that_others_wait_for_is_blamed_though_it_went_silent_last(tmp_path: Path) -> None:
    who_is_absent(tmp_path, nccl_record(nccl_entry(2, "scheduled")), nccl_record(nccl_entry(2, "started")))
    for rank in range(2):
        Heartbeat(tmp_path, rank).enter("backward", 22)
        time.sleep(0.01)
    views = [view_rank(tmp_path, rank, 1, None, 0.0) for rank in (1, 0)]
    assert views[0].heard > views[1].heard
    blamed, _ = blame_silent({rank: read_collectives(tmp_path, rank) for rank in range(2)}, [views[0]], views)
    assert blamed.rank == 0


def test_what_a_device_has_not_yet_timed_is_compared_later(tmp_path: Path) -> None:
    ended = {**nccl_entry(2, "completed"), "retired": False}
    del ended["duration_ms"]
    collectives_file(tmp_path, 0).write_text(nccl_record(nccl_entry(1, "completed"), ended))
    assert [one.measured for one in read_collectives(tmp_path, 0)] == [True, True, False]


def arrivals(
    late: dict[int, float], *, at_every: bool, seed: int, noise_s: float = 0.004
) -> dict[int, list[Collective]]:
    """Twenty steps of ranks of which some come late, to each collective of a step or to its first."""
    draw = random.Random(seed)
    found: dict[int, list[Collective]] = {rank: [] for rank in range(RANKS)}
    for number in range(20 * PER_STEP):
        for rank, collectives in found.items():
            lag = late.get(rank, 0.0) if at_every or number % PER_STEP == 0 else max(late.values(), default=0.0)
            if at_every:
                lag += number * max(late.values(), default=0.0)
            else:
                lag += (number // PER_STEP) * max(late.values(), default=0.0)
            at = number * STEP_S / PER_STEP + lag + draw.random() * noise_s
            collectives.append(Collective("0", number, "all_reduce", at, None, True))
    return found


@pytest.mark.parametrize("at_every", [False, True])
def test_how_late_a_rank_comes_is_a_share_of_time(at_every: bool) -> None:
    history = ArrivalHistory()
    history.add(arrivals({2: 0.01 if at_every else 0.06}, at_every=at_every, seed=1))
    found = history.lateness(1.5)
    assert found is not None
    # 60 ms of 160 in each step.
    assert found.late[2] == pytest.approx(0.06 / 0.16, abs=0.08)
    assert found.waits[2] < 0.1 and min(found.waits[rank] for rank in (0, 1, 3)) > 0.25
    assert history.lateness(100.0) is None


def test_what_happened_once_is_not_seen() -> None:
    records = arrivals({}, at_every=True, seed=2)
    records[1][70] = Collective("0", 70, "all_reduce", records[1][70].entered_s + 1.0, None, True)
    history = ArrivalHistory()
    history.add(records)
    found = history.lateness(1.5)
    assert found is not None and found.late[1] < 0.1


def test_of_devices_the_shortest_stay_is_the_latest_arrival() -> None:
    records = {
        rank: [
            Collective("0", n, "all_gather", n * 0.02, 0.001 if rank == 1 else 0.011, True)
            for n in range(20 * PER_STEP)
        ]
        for rank in range(RANKS)
    }
    history = ArrivalHistory()
    history.add(records)
    found = history.lateness(1.0)
    assert found is not None and found.on_device
    assert found.late[1] == pytest.approx(0.5, abs=0.05) and max(found.late[rank] for rank in (0, 2, 3)) == 0.0


def watch_run(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    late_s: float,
    data_s: float = 0.0,
    device_s: float | None = None,
) -> list[int | None]:
    """The straggler after each of 25 looks at 500 steps, of which rank 2 comes `late_s` late in each.

    device_s: how late its device comes, by what devices measure.
    """
    now = [100.0]
    monkeypatch.setattr(stragglers.time, "monotonic", lambda: now[0])
    hearts = [Heartbeat(folder, rank) for rank in range(RANKS)]
    watch, named, draw = StragglerWatch(folder, range(RANKS)), [], random.Random(3)
    entries: list[list[tuple[int, float, float | None]]] = [[] for _ in range(RANKS)]
    length = STEP_S + max(late_s, device_s or 0.0)
    for step in range(1, 501):
        start = step * length
        for number in range(PER_STEP):
            for rank in range(RANKS):
                # All leave the first collective of a step together, however late the last one came.
                lag = late_s if rank == 2 or number else 0.0
                at = start + lag + draw.random() * 0.004 + number * STEP_S / PER_STEP
                waited = None if device_s is None else 1.0 + (0.0 if rank == 2 or number else 1e3 * device_s)
                entries[rank].append((step * PER_STEP + number, at, waited))
        for rank, heart in enumerate(hearts):
            now[0] = 100.0 + start - (data_s if rank == 2 else 0.0)
            heart.enter("data", step)
            now[0] = 100.0 + start
            heart.enter("collective")
            heart.finish_step(step)
        if step % 20 == 0:
            for rank in range(RANKS):
                collectives_file(folder, rank).write_text(record(entries[rank][-512:]))
            # Each look costs what it costs: the next is far enough away.
            now[0] += 50.0
            watch.look()
            report = read_report(folder)
            named.append(None if report is None or report.straggler is None else report.straggler.rank)
            now[0] -= 50.0
            watch._next = 0.0
    return named


def test_a_rank_60_ms_slower_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    named = watch_run(tmp_path, monkeypatch, 0.06)
    assert named[stragglers.LOOKS - 1 :] == [2] * (25 - stragglers.LOOKS + 1)
    report = read_report(tmp_path)
    assert report is not None and report.straggler is not None
    assert report.straggler.cause == "host" and report.straggler.seconds == pytest.approx(0.06, abs=0.02)
    assert "rank 2 on" in report.straggler.in_words() and "its host is slow" in report.straggler.in_words()
    fast = [row for row in report.times if row.rank != 2]
    assert min(row.wait for row in fast) > 0.04 and report.times[2].wait < 0.02


def test_late_data_are_told_from_a_slow_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    watch_run(tmp_path, monkeypatch, 0.06, data_s=0.06)
    report = read_report(tmp_path)
    assert report is not None and report.straggler is not None and report.straggler.cause == "input", report


@pytest.mark.parametrize(("host_s", "cause"), [(0.0, "device"), (0.06, "host")])
def test_a_slow_device_is_told_from_its_host(
    host_s: float, cause: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In both cases the other devices wait 60 ms; only a slow host also launches later than the others."""
    named = watch_run(tmp_path, monkeypatch, host_s, device_s=0.06)
    assert named[stragglers.LOOKS - 1 :] == [2] * (25 - stragglers.LOOKS + 1)
    report = read_report(tmp_path)
    assert report is not None and report.straggler is not None
    assert report.straggler.cause == cause and report.straggler.seconds == pytest.approx(0.06, abs=0.02)


def test_500_even_steps_name_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert watch_run(tmp_path, monkeypatch, 0.0) == [None] * 25


def grouped_run(slow: int | None, *, on_device: bool, seed: int) -> dict[int, list[Collective]]:
    """Forty steps of four ranks, tp=2 x dp=2: no collective but one a step has all of them, and its moment tells nobody.

    Each rank computes for 10 ms before each collective, the slow one for 16.
    """
    draw, clocks = random.Random(seed), dict.fromkeys(range(4), 100.0)
    pairs = {"tp": [(0, 1), (2, 3)], "dp": [(0, 2), (1, 3)], "world": [(0, 1, 2, 3)]}
    counts: dict[tuple[int, ...], int] = {}
    found: dict[int, list[Collective]] = {rank: [] for rank in range(4)}
    for kind in ["tp", "tp", "tp", "tp", "dp", "world"] * 40:
        for group in pairs[kind]:
            counts[group] = counts.get(group, 0) + 1
            for rank in group:
                clocks[rank] += 0.010 + 0.006 * (rank == slow) + 0.001 * draw.random()
            released = max(clocks[rank] for rank in group)
            for rank in group:
                stay = released - clocks[rank] + 0.0002
                # A host that launches for a device is always early.
                at = 100.0 + 0.016 * len(found[rank]) + 1e-5 * draw.random() if on_device else clocks[rank]
                found[rank].append(
                    Collective(f"{kind}{group}", counts[group], "all_reduce", at, stay if on_device else None, True)
                )
                clocks[rank] = released
    return found


@pytest.mark.parametrize("on_device", [False, True], ids=["hosts", "devices"])
@pytest.mark.parametrize("slow", [0, 3])
def test_a_rank_is_named_whose_peers_in_small_groups_wait_for_it(slow: int, on_device: bool) -> None:
    """Those that it holds up come late to their other groups themselves, and are not to blame."""
    history = ArrivalHistory()
    history.add(grouped_run(slow, on_device=on_device, seed=4))
    found = history.lateness(2.0)
    assert found is not None and found.on_device == on_device and set(found.waits) == {0, 1, 2, 3}
    assert stragglers.suspect_rank(found) == slow, found
    # 6 ms of 16 at each collective.
    assert found.late[slow] == pytest.approx(6 / 16, abs=0.1)
    assert max(late for rank, late in found.late.items() if rank != slow) < 0.1


@pytest.mark.parametrize("on_device", [False, True], ids=["hosts", "devices"])
def test_even_ranks_of_small_groups_name_nobody(on_device: bool) -> None:
    history = ArrivalHistory()
    history.add(grouped_run(None, on_device=on_device, seed=5))
    found = history.lateness(2.0)
    assert found is not None and stragglers.suspect_rank(found) is None, found


def test_what_hosts_exchange_beside_hides_no_slow_device() -> None:
    """Saves in the background exchange over gloo, every few steps."""
    records = grouped_run(3, on_device=True, seed=7)
    for number in range(1, 12):
        for rank, mine in records.items():
            at = 100.0 + 0.3 * number + 0.01 * (rank == 0)
            mine.append(Collective("saves", number, "all_reduce", at, None, True))
    history = ArrivalHistory()
    history.add(records)
    found = history.lateness(2.0)
    assert found is not None and found.on_device and stragglers.suspect_rank(found) == 3, found
    assert found.host_late[3] < 0.1


def test_a_rank_whose_record_is_behind_is_compared_later() -> None:
    whole = grouped_run(3, on_device=False, seed=6)
    behind = {rank: found[:120] if rank == 3 else found for rank, found in whole.items()}
    history, at_once = ArrivalHistory(), ArrivalHistory()
    history.add(behind)
    history.add(whole)
    at_once.add(whole)
    assert history.lateness(2.0) == at_once.lateness(2.0) is not None
