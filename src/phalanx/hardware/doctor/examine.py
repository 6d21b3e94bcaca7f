"""An examination, in an order in which nothing hangs unnoticed: first what each rank knows by itself, then what the ranks
tell each other through a store, where whoever is missing is named, and only then what they exchange."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from phalanx.errors import ConfigError, PhalanxError
from phalanx.hardware.cpu_formats import survives_products
from phalanx.hardware.doctor.compare import binding_findings, rate_findings
from phalanx.hardware.doctor.environment import environment_findings
from phalanx.hardware.doctor.finding import PATIENCE_S, Finding, together
from phalanx.hardware.doctor.host import RankFacts, name_seconds, place_of, rank_facts
from phalanx.hardware.doctor.rates import Rates, device_rates, exchange_rate
from phalanx.hardware.doctor.told import Told
from phalanx.hardware.machine import Machine
from phalanx.layout.mesh import Ranks, join_process_group, meet
from phalanx.torch_compat.groups import new_group

_SLOW_NAME_S = 0.5
"""From which on looking up a host's name holds up every connection that ranks make."""


@dataclass(frozen=True)
class Examination:
    """What there is and what is wrong with it; of all ranks on rank 0, elsewhere of that rank alone."""

    facts: list[RankFacts]
    rates: list[Rates]
    """None where nothing was measured."""
    findings: list[Finding]

    @property
    def passed(self) -> bool:
        """Whether training may start: warnings do not keep it from that."""
        return all(finding.level != "failed" for finding in self.findings)


def examine(
    ranks: Ranks,
    device: torch.device,
    machine: Machine | None,
    *,
    measured: bool = True,
    patience_s: float = PATIENCE_S,
) -> Examination:
    """Examine this rank, and with the others what is between them. Every rank of the job calls this.

    machine: whose settings and binding are wanted. measured: whether rates are. Raises PhalanxError where ranks do not
    answer or reach each other within `patience_s` seconds, with what this rank found by itself.
    """
    mine = rank_facts(ranks, device)
    findings = _own_findings(ranks, mine, machine)
    if ranks.world_size == 1:
        rates = [device_rates(0, device)] if measured else []
        found = [*findings, *binding_findings([mine], machine), *(rate_findings([mine], rates) if measured else [])]
        return Examination([mine], rates, together(found))
    with _or_said(mine, findings):
        store = meet(ranks, timeout_s=patience_s)
        told = Told(store, ranks, patience_s)
        said = {"facts": asdict(mine), "findings": [asdict(finding) for finding in findings]}
        every = [_read(one) for one in told.all("state", said)]
    facts, found = [one for one, _ in every], [finding for _, of_one in every for finding in of_one]
    found += binding_findings(facts, machine) if ranks.first else []
    rates = []
    if measured:
        alone = device_rates(ranks.rank, device)
        with _or_said(mine, findings):
            join_process_group(ranks, device, timeout_s=patience_s, store=store)
            rates = [Rates(**one) for one in told.all("rates", asdict(_exchanged(ranks, device, alone)))]
        found += rate_findings(facts, rates) if ranks.first else []
    told.end()
    return Examination(facts, rates, together(found))


def _own_findings(ranks: Ranks, mine: RankFacts, machine: Machine | None) -> list[Finding]:
    """What this rank finds by itself."""
    nodes = -(-ranks.world_size // (ranks.ranks_per_node or ranks.world_size))
    found = environment_findings(os.environ, place_of(ranks, mine, nodes), ranks.first, machine)
    return [replace(finding, ranks=(ranks.rank,)) for finding in [*found, *_names(ranks), *_formats(mine)]]


def _formats(mine: RankFacts) -> list[Finding]:
    """Whether the default format of activations can be computed in, where ranks compute on the CPU."""
    if mine.device != "cpu" or survives_products(torch.bfloat16):
        return []
    message = "bf16 products end a process here: the CPU reports an instruction that it does not execute"
    return [Finding("failed", "cpu-formats", message, "set layout.precision=fp32 in run files for this machine")]


def _names(ranks: Ranks) -> list[Finding]:
    """How long the meeting point's name takes: PyTorch asks for it with every connection (pytorch#159596)."""
    address = os.environ.get("MASTER_ADDR", "")
    if ranks.world_size == 1 or not address:
        return []
    seconds = name_seconds(address)
    if seconds < _SLOW_NAME_S:
        return []
    # Rounded to whole seconds, so that ranks say alike.
    message = f"looking up MASTER_ADDR={address} takes about {max(1, round(seconds))} s, and each connection does it"
    return [
        Finding("warning", "host-names", message, f"enter {address} and its address in /etc/hosts or the name server")
    ]


def _read(said: dict[str, Any]) -> tuple[RankFacts, list[Finding]]:
    return RankFacts.of_json(said["facts"]), [Finding.of_json(finding) for finding in said["findings"]]


def _exchanged(ranks: Ranks, device: torch.device, alone: Rates) -> Rates:
    """`alone`, with what this rank's node and all ranks exchange."""
    world, right = exchange_rate(device, None)
    per_node = ranks.ranks_per_node or ranks.world_size
    first = ranks.rank // per_node * per_node
    node = list(range(first, min(first + per_node, ranks.world_size)))
    if len(node) == ranks.world_size:
        return replace(alone, node_gb_s=world, world_gb_s=world, sums_right=right)
    if len(node) == 1:
        return replace(alone, world_gb_s=world, sums_right=right)
    within, also_right = exchange_rate(device, new_group(node, "doctor"))
    return replace(alone, node_gb_s=within, world_gb_s=world, sums_right=right and also_right)


@contextmanager
def _or_said(mine: RankFacts, findings: Sequence[Finding]) -> Iterator[None]:
    """Where ranks do not come together, this rank says what it knows: nobody else will. Raises PhalanxError."""
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
