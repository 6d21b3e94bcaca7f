"""Optimizer state in host memory: the same bits as on the device in layouts of every kind, which are those of one rank."""

from __future__ import annotations

from typing import Any

import pytest

from distributed_ranks import run_ranks
from layout_cases import run_of
from offloaded_runs import offload_alike
from phalanx.families.registry import bind
from phalanx.layout.mesh import Groups, build_mesh
from phalanx.layout.resolve import resolve_layout
from phalanx.optimizers import offloaded_state
from phalanx.verification.family import VerifiableModel
from phalanx.verification.verify_run import Verdict, Verifier
from whole_model import CPU

CASES: list[tuple[str, str, dict[str, Any]]] = [
    ("llama", "adamw", {"dp_shard": 4}),
    ("llama", "lion", {"dp_shard": 2, "tp": 2}),
    ("gpt", "adamw8bit", {"dp_shard": 2, "dp_replicate": 2, "zero": 2}),
    ("mpt", "adamw", {"dp_replicate": 2, "cp": 2, "zero": 0}),
    ("llama", "adamw", {"dp_shard": 2, "pp": 2, "schedule": "zbv"}),
    ("llama", "adamw", {"dp_shard": 4, "gather": "stream"}),
]
"""Models, optimizers and layouts of four ranks."""


def record_all() -> tuple[list[bool], list[int], Verdict]:
    """On one of four ranks: whether offloaded state gives the same bits in each case, the buckets it took, and a verdict."""
    # Of models of a few kilobytes, so that state comes and goes in several buckets.
    offloaded_state.BUCKET_BYTES = 8192
    buckets = [0] * len(CASES)
    split = offloaded_state.OffloadedOptimizer._split
    groups: Groups = {}
    same = []
    for place, (name, optimizer, words) in enumerate(CASES):
        run = run_of(name, 4, "fp64", **words)
        run = run.model_copy(update={"optimizer": run.optimizer.model_copy(update={"name": optimizer})})
        model = bind(run, VerifiableModel)
        layout = resolve_layout(model, 4)
        mesh = build_mesh(layout, CPU, groups)

        def counted(self: offloaded_state.OffloadedOptimizer, place: int = place) -> Any:
            found = split(self)
            buckets[place] = max(buckets[place], len(found))
            return found

        offloaded_state.OffloadedOptimizer._split = counted  # type: ignore[method-assign]

        same.append(offload_alike(model, layout, mesh, "offload_optimizer"))
    run = run_of("llama", 4, "fp64", dp_shard=2, tp=2, offload_optimizer=True)
    verifier = Verifier(bind(run, VerifiableModel), CPU, steps=2, activations=False, groups=groups)
    return same, buckets, verifier.verify(resolve_layout(bind(run), 4))


@pytest.fixture(scope="module")
def ranks() -> list[tuple[list[bool], list[int], Verdict]]:
    return run_ranks(record_all, 4, timeout_s=300.0)


def test_state_in_host_memory_gives_the_same_bits(ranks: list[tuple[list[bool], list[int], Verdict]]) -> None:
    for same, buckets, _ in ranks:
        assert same == [True] * len(CASES)
        # All but the last rank of a pipeline, which may hold little, take several.
        assert min(buckets[:4]) > 1, buckets


def test_a_layout_with_offloaded_state_computes_what_one_rank_computes(
    ranks: list[tuple[list[bool], list[int], Verdict]],
) -> None:
    verdict = ranks[0][2]
    assert "offload_optimizer=True" in verdict.layout
    assert verdict.passed, verdict.first
