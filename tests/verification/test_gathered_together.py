"""Blocks gathered several at a time, and further ahead: computes what one rank computes."""

from __future__ import annotations

from typing import Any

from distributed_ranks import run_ranks
from layout_cases import run_of
from phalanx.families.registry import bind
from phalanx.layout.mesh import Groups
from phalanx.layout.resolve import resolve_layout
from phalanx.verification.family import VerifiableModel
from phalanx.verification.verify_run import Verdict, Verifier
from whole_model import CPU

CASES: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"dp_shard": 4, "gather_blocks": 3}),
    ("llama", {"dp_shard": 4, "gather_blocks": 2, "recompute": "full", "global_batch": 16}),
    ("llama", {"dp_shard": 2, "dp_replicate": 2, "gather_blocks": 8, "zero": 2, "global_batch": 16}),
    ("gpt", {"dp_shard": 4, "gather_blocks": 4, "zero": 1, "global_batch": 16}),
    ("gpt", {"dp_shard": 2, "tp": 2, "gather_blocks": 2, "gathers_ahead": 2, "peer_copies": True}),
    ("llama", {"dp_shard": 4, "gathers_ahead": 3}),
    ("mpt", {"dp_shard": 2, "cp": 2, "gather_blocks": 3, "recompute": "selective"}),
    ("llama", {"dp_shard": 2, "pp": 2, "gather_blocks": 2, "reshard_after_forward": True}),
    ("llama", {"dp_shard": 2, "pp": 2, "gather_blocks": 2, "schedule": "zbv"}),
    ("llama", {"dp_shard": 4, "gather_blocks": 2, "gather": "stream"}),
]
"""Models and layouts of four ranks."""


def verify_all() -> list[Verdict]:
    groups: Groups = {}
    verdicts = []
    for model, words in CASES:
        run = run_of(model, 4, "fp64", **words)
        verifier = Verifier(bind(run, VerifiableModel), CPU, steps=2, activations=True, groups=groups)
        verdicts.append(verifier.verify(resolve_layout(bind(run), 4)))
    return verdicts


def test_blocks_together_compute_what_one_rank_computes() -> None:
    verdicts = run_ranks(verify_all, 4, timeout_s=300.0)[0]
    failed = [f"{verdict.layout}: {verdict.first}" for verdict in verdicts if not verdict.passed]
    assert not failed, "\n".join(failed)
    assert max(check.error for v in verdicts for check in v.checks if check.what == "gradient") < 1e-9
