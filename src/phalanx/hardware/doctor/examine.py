"""Examines a job's ranks in an order in which nothing hangs unnoticed.

Each rank first looks at itself. Then ranks report through a store, where missing ranks are named. Only then do they run
collectives, which would hang on a missing rank.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from phalanx.errors import ConfigError, PhalanxError
from phalanx.hardware.device import survives_products
from phalanx.hardware.doctor.environment import environment_findings
from phalanx.hardware.doctor.finding import PATIENCE_S, Finding, format_ranks, merge_findings
from phalanx.hardware.doctor.rank_comparison import compare_binding, compare_rates
from phalanx.hardware.doctor.rank_facts import (
    DeviceRates,
    RankFacts,
    collect_facts,
    describe_surroundings,
    measure_all_reduce,
    measure_device,
    time_lookup,
)
from phalanx.hardware.machine import Machine
from phalanx.layout.mesh import Ranks, join_process_group, open_rendezvous
from phalanx.torch_compat.process_groups import new_group


@dataclass(frozen=True)
class Examination:
    """Facts, rates and findings; of all ranks on rank 0, elsewhere of that rank alone."""

    facts: list[RankFacts]
    rates: list[DeviceRates]
    """Empty where nothing was measured."""
    findings: list[Finding]

    @property
    def passed(self) -> bool:
        """Whether training may start; warnings do not prevent it."""
        return all(finding.level != "failed" for finding in self.findings)


def examine_ranks(
    ranks: Ranks,
    device: torch.device,
    machine: Machine | None,
    *,
    measured: bool = True,
    patience_s: float = PATIENCE_S,
) -> Examination:
    """Examine this rank and, with the others, the connections between ranks. Every rank of the job calls this function.

    machine: whose documented settings and binding the ranks should have. measured: whether to measure rates. Raises
    PhalanxError, with this rank's own findings, where ranks do not report or connect within `patience_s` seconds.
    """
    mine = collect_facts(ranks, device)
    findings = _examine_self(ranks, mine, machine)
    if ranks.world_size == 1:
        rates = [measure_device(0, device)] if measured else []
        found = [*findings, *compare_binding([mine], machine), *(compare_rates([mine], rates) if measured else [])]
        return Examination([mine], rates, merge_findings(found))
    with _keep_own_findings(mine, findings):
        store = open_rendezvous(ranks, timeout_s=patience_s)
        reports = RankReports(store, ranks, patience_s)
        report = {"facts": asdict(mine), "findings": [asdict(finding) for finding in findings]}
        gathered = reports.gather("state", report)
    facts = [RankFacts.of_json(one["facts"]) for one in gathered]
    found = [Finding.of_json(finding) for one in gathered for finding in one["findings"]]
    found += compare_binding(facts, machine) if ranks.first else []
    rates = []
    if measured:
        # The device is measured before any collective: a rank whose device is slow must not be waited for unnoticed.
        alone = measure_device(ranks.rank, device)
        with _keep_own_findings(mine, findings):
            join_process_group(ranks, device, timeout_s=patience_s, store=store)
            world, right = measure_all_reduce(device, None)
            per_node = ranks.ranks_per_node or ranks.world_size
            first = ranks.rank // per_node * per_node
            node = list(range(first, min(first + per_node, ranks.world_size)))
            if len(node) == ranks.world_size:
                mine_measured = replace(alone, node_gb_s=world, world_gb_s=world, sums_right=right)
            elif len(node) == 1:
                mine_measured = replace(alone, world_gb_s=world, sums_right=right)
            else:
                within, also_right = measure_all_reduce(device, new_group(node, "doctor"))
                mine_measured = replace(alone, node_gb_s=within, world_gb_s=world, sums_right=right and also_right)
            rates = [DeviceRates(**one) for one in reports.gather("rates", asdict(mine_measured))]
        found += compare_rates(facts, rates) if ranks.first else []
    reports.end()
    return Examination(facts, rates, merge_findings(found))


def _examine_self(ranks: Ranks, mine: RankFacts, machine: Machine | None) -> list[Finding]:
    """Return the findings of this rank about itself: its environment, the lookup of rank 0's host, its number formats."""
    nodes = -(-ranks.world_size // (ranks.ranks_per_node or ranks.world_size))
    found = environment_findings(os.environ, describe_surroundings(ranks, mine, nodes), ranks.first, machine)
    address = os.environ.get("MASTER_ADDR", "")
    # PyTorch looks the name up for every connection (pytorch#159596), so that half a second adds up to minutes.
    if ranks.world_size > 1 and address and (seconds := time_lookup(address)) >= 0.5:
        # Whole seconds: ranks then report the same finding, which is merged into one.
        message = (
            f"looking up MASTER_ADDR={address} takes about {max(1, round(seconds))} s, and each connection does it"
        )
        fix = f"enter {address} and its address in /etc/hosts or the name server"
        found.append(Finding("warning", "host-names", message, fix))
    if mine.device == "cpu" and not survives_products(torch.bfloat16):
        message = "bf16 products end a process here: the CPU reports an instruction that it does not execute"
        fix = "set layout.precision=fp32 in run files for this machine"
        found.append(Finding("failed", "cpu-formats", message, fix))
    return [replace(finding, ranks=(ranks.rank,)) for finding in found]


@contextmanager
def _keep_own_findings(mine: RankFacts, findings: Sequence[Finding]) -> Iterator[None]:
    """Add this rank's findings to the PhalanxError of ranks that do not come together: nobody else would report them."""
    try:
        yield
    except ConfigError:
        raise
    except (PhalanxError, RuntimeError) as error:
        reason = str(error)
        if not isinstance(error, PhalanxError):
            reason = (reason.strip().splitlines() or [type(error).__name__])[0]
            reason = f"{mine.words} does not reach the other ranks: {reason}"
        own = [f"{finding.level}: {finding.message}; {finding.fix}" for finding in findings]
        raise PhalanxError("\n".join([reason, *own])) from error


_KEY = "doctor"


class RankReports:
    """Collects reports of the ranks that share `store`. All ranks make the same calls in the same order."""

    def __init__(self, store: dist.Store, ranks: Ranks, patience_s: float) -> None:
        """Use `store`. patience_s: seconds that rank 0 waits for the slowest report."""
        self._store, self._ranks, self._patience_s = store, ranks, patience_s

    def gather(self, about: str, mine: Any) -> list[Any]:
        """Return the reports of all ranks, in their order, on rank 0; on other ranks `[mine]`, once rank 0 has all reports.

        about: what the reports are about, in one word. mine: this rank's report, as JSON can carry it. Raises PhalanxError
        where a rank stays silent; on rank 0 the message names those ranks.
        """
        self._store.set(f"{_KEY}/{about}/{self._ranks.rank}", json.dumps(mine))
        return self._collect(about) if self._ranks.first else [self._wait_for_rank_0(about, mine)]

    def _collect(self, about: str) -> list[Any]:
        keys = [f"{_KEY}/{about}/{rank}" for rank in range(self._ranks.world_size)]
        came = _wait_until(lambda: self._store.check(keys), self._patience_s)
        missing = [] if came else [rank for rank, key in enumerate(keys) if not self._store.check([key])]
        self._store.set(f"{_KEY}/{about}/heard", "no" if missing else "yes")
        if missing:
            self._wait_for_leavers(len(keys) - len(missing))
            raise PhalanxError(
                f"{format_ranks(missing)} of {self._ranks.world_size:,} did not say their {about} within "
                f"{self._patience_s:.0f} s; look at the log of their nodes, or leave those nodes out"
            )
        return [json.loads(self._store.get(key)) for key in keys]

    def _wait_for_rank_0(self, about: str, mine: Any) -> Any:
        key = f"{_KEY}/{about}/heard"
        # Rank 0 may itself start as late as the others may, and only then begins to wait for them.
        came = _wait_until(lambda: self._store.check([key]), 2 * self._patience_s)
        if not came or self._store.get(key) != b"yes":
            self.end()
            who = "not all ranks; rank 0 names those that are missing" if came else "not even rank 0"
            raise PhalanxError(f"ranks did not say their {about} in time: {who}")
        return mine

    def end(self) -> None:
        """Leave; rank 0, whose end may end the store, waits up to 10 s for the others to leave first."""
        if self._ranks.first:
            self._wait_for_leavers(self._ranks.world_size)
        else:
            self._store.add(f"{_KEY}/left", 1)

    def _wait_for_leavers(self, present: int) -> None:
        _wait_until(lambda: self._store.add(f"{_KEY}/left", 0) >= present - 1, 10.0)


def _wait_until(condition: Callable[[], bool], seconds: float) -> bool:
    """Return whether `condition` became true within so many seconds."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        # Short enough not to be felt, long enough for thousands of ranks that ask one store.
        time.sleep(0.02)
    return True
