"""Slow links: told from slow ranks by what collectives take once all have come, of records made here and of gloo ranks."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from distributed_ranks import run_ranks
from phalanx.launch.collectives import Collective
from phalanx.launch.heartbeat import Heartbeat
from phalanx.launch.link_times import LinkCost, TransferHistory
from phalanx.launch.stragglers import SlowLink, StragglerWatch, read_report, suspect_link
from phalanx.torch_compat.flight import last_collectives

PAIRS = {"tp": [(0, 1), (2, 3)], "dp": [(0, 2), (1, 3)], "world": [(0, 1, 2, 3)]}
STAGES = {"tp": [(0, 1), (2, 3)], "world": [(0, 1, 2, 3)]}


def run_groups(
    *,
    on_device: bool,
    link: tuple[int, ...] = (),
    slow: tuple[int, ...] = (),
    groups: dict[str, list[tuple[int, ...]]] = PAIRS,
    seed: int = 1,
) -> dict[int, list[Collective]]:
    """Forty steps of four ranks: 10 ms before each collective, 16 of `slow` ones; those of `link` take 6 ms longer."""
    draw, clocks = random.Random(seed), dict.fromkeys(range(4), 100.0)
    counts: dict[tuple[int, ...], int] = {}
    found: dict[int, list[Collective]] = {rank: [] for rank in range(4)}
    kinds = [kind for kind in ("tp", "tp", "tp", "tp", "dp", "world") if kind in groups]
    for kind in kinds * 40:
        for group in groups[kind]:
            counts[group] = counts.get(group, 0) + 1
            for rank in group:
                clocks[rank] += 0.010 + 0.006 * (rank in slow) + 0.001 * draw.random()
            came = max(clocks[rank] for rank in group)
            takes = 0.0002 + 0.006 * (group == link)
            for rank in group:
                # A host that launches for a device is always early.
                at = 100.0 + 0.02 * len(found[rank]) + 1e-5 * draw.random() if on_device else clocks[rank]
                stay = came + takes - clocks[rank] if on_device else None
                found[rank].append(Collective(f"{kind}{group}", counts[group], "all_reduce", at, stay, True))
                clocks[rank] = came + takes
    return found


def slowest(records: dict[int, list[Collective]], seconds: float = 2.0) -> LinkCost | None:
    history = TransferHistory()
    history.add(records)
    return history.slowest(seconds)


@pytest.mark.parametrize("on_device", [False, True], ids=["hosts", "devices"])
@pytest.mark.parametrize("link", [(2, 3), (0, 1)])
def test_a_slow_link_is_named_and_no_rank_for_it(link: tuple[int, ...], on_device: bool) -> None:
    found = slowest(run_groups(on_device=on_device, link=link))
    assert found is not None and suspect_link(found) == link
    # Four collectives a step of some 86 ms, or 120 as hosts launch them, take 6 ms longer.
    assert found.share == pytest.approx(4 * 6 / (120 if on_device else 86), abs=0.06)


@pytest.mark.parametrize("on_device", [False, True], ids=["hosts", "devices"])
@pytest.mark.parametrize("slow", [(3,), (2, 3), ()])
def test_slow_ranks_are_no_slow_link(slow: tuple[int, ...], on_device: bool) -> None:
    """Nor are two that share a slow host, which are late after all that they exchange."""
    for seed in range(5):
        assert suspect_link(slowest(run_groups(on_device=on_device, slow=slow, seed=seed))) is None


def test_stages_of_a_pipeline_need_not_compute_alike() -> None:
    assert slowest(run_groups(on_device=False, slow=(2, 3), groups=STAGES)) is None


def test_little_that_is_known_names_nobody() -> None:
    records = run_groups(on_device=False, link=(2, 3))
    assert slowest(records, 100.0) is None
    assert slowest({rank: found[:5] for rank, found in records.items()}, 0.01) is None
    assert slowest({0: records[0]}) is None


def test_records_that_overlap_are_counted_once() -> None:
    whole, history = run_groups(on_device=False, link=(2, 3)), TransferHistory()
    for start in range(0, 240, 40):
        history.add({rank: found[max(0, start - 20) : start + 40] for rank, found in whole.items()})
    parts, at_once = history.slowest(1.5), slowest(whole, 1.5)
    assert parts is not None and at_once is not None
    assert parts.ranks == at_once.ranks == (2, 3) and parts.share == pytest.approx(at_once.share, abs=0.05)


def test_the_line_of_a_log_names_ranks_and_hosts() -> None:
    one = SlowLink((2, 3), ("node1", "node2"), 0.024, 0.2)
    assert one.in_words().startswith(
        "the link of ranks 2, 3 between node1 and node2 is slow: their exchanges take 24 ms"
    )
    assert "on node1" in SlowLink((2, 3), ("node1",), 0.024, 0.2).in_words()


SLOW_S = 0.03


def exchange(folder: str, steps: int, slow_link: bool, slow_rank: bool) -> dict[str, object] | None:
    """Ranks of gloo, tp=2 x dp=2; the first one watches. Returns the newest look that names something.

    slow_link: both ranks of the pair 2, 3 go on from their exchange later, as the messages between them come later.
    slow_rank: rank 3 comes later to all exchanges.
    """
    rank = dist.get_rank()
    pairs = {kind: [dist.new_group(list(ranks)) for ranks in PAIRS[kind]] for kind in ("tp", "dp")}
    mine = {
        kind: next(group for group, ranks in zip(groups, PAIRS[kind], strict=True) if rank in ranks)
        for kind, groups in pairs.items()
    }
    heart = Heartbeat(Path(folder), rank)
    heart.answer(last_collectives)
    watch = StragglerWatch(Path(folder), range(4)) if rank == 0 else None
    values, named = torch.ones(64), None
    for step in range(1, steps + 1):
        heart.enter("forward", step)
        for kind in ("tp", "tp", "dp", "tp", "dp"):
            time.sleep(0.004 + SLOW_S * (slow_rank and rank == 3))
            dist.all_reduce(values, group=mine[kind])
            if slow_link and kind == "tp" and rank in (2, 3):
                time.sleep(SLOW_S)
        dist.all_reduce(values)
        heart.finish_step(step)
        if watch is not None:
            watch.look()
            report = read_report(Path(folder))
            if report is not None and (report.straggler or report.slow_link):
                link, slow = report.slow_link, report.straggler
                named = {"link": link and link.ranks, "rank": slow and slow.rank}
    return named


def exchange_all(folder: str) -> list[dict[str, object] | None]:
    """The same with a slow link, with a slow rank, and with neither."""
    found = []
    for number, slow in enumerate([(60, True, False), (60, False, True), (200, False, False)]):
        place = Path(folder, str(number))
        place.mkdir(exist_ok=True)
        dist.barrier()
        found.append(exchange(str(place), *slow))
    return found


def test_of_gloo_ranks_a_slow_link_and_a_slow_rank_are_each_named_as_what_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "512")
    link, rank, neither = run_ranks(exchange_all, 4, str(tmp_path), timeout_s=200.0)[0]
    assert link == {"link": (2, 3), "rank": None}
    assert rank == {"link": None, "rank": 3}
    assert neither is None
