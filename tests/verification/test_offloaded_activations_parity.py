"""Activations in host memory: the same bits as on the device in layouts of every kind, which are those of one rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from distributed_ranks import run_ranks
from layout_cases import run_of
from offloaded_runs import offload_alike
from phalanx.families.registry import bind
from phalanx.host_memory import HostMemory
from phalanx.layout import offloaded_activations
from phalanx.layout.mesh import Groups, build_mesh
from phalanx.layout.resolve import resolve_layout
from phalanx.verification.family import VerifiableModel
from phalanx.verification.verify_run import Verdict, Verifier
from whole_model import CPU

CASES: list[tuple[str, str, dict[str, Any]]] = [
    ("llama", "fp64", {"dp_shard": 4, "recompute": "full"}),
    ("olmo", "fp64", {"dp_shard": 2, "tp": 2, "recompute": "selective"}),
    ("mpt", "fp64", {"dp_replicate": 2, "cp": 2, "zero": 0}),
    ("llama", "fp64", {"dp_shard": 2, "pp": 2, "global_batch": 32}),
    ("llama", "fp64", {"pp": 2, "dp_shard": 2, "schedule": "interleaved_1f1b", "reshard_after_forward": True}),
    ("llama", "fp64", {"pp": 2, "tp": 2, "dp_shard": 1, "schedule": "gpipe"}),
    ("mixtral", "fp64", {"dp_shard": 4, "ep": 4}),
    ("llama", "fp8-tensor", {"dp_shard": 4}),
    ("llama", "fp64", {"dp_shard": 4, "gather": "stream"}),
]
"""Models, formats and layouts of four ranks."""


def record_all() -> tuple[list[bool], list[int], Verdict]:
    """On one of four ranks: of each case whether the bits are the same, and the bytes that left; and a verdict."""
    # Of models of a few kilobytes.
    offloaded_activations.SMALLEST_BYTES = 256
    left = [0] * len(CASES)
    allocate = HostMemory.allocate_like
    groups: Groups = {}
    same = []
    for place, (name, precision, words) in enumerate(CASES):
        stages = {"n_layers": 8} if words.get("pp", 1) > 1 else {}
        run = run_of(name, 4, precision, **words)
        run = run.model_copy(update={"model": run.model.model_copy(update=stages)})
        model = bind(run, VerifiableModel)
        layout = resolve_layout(model, 4)
        mesh = build_mesh(layout, CPU, groups)

        def counted(self: HostMemory, tensor: torch.Tensor, place: int = place) -> torch.Tensor:
            left[place] += tensor.nbytes
            return allocate(self, tensor)

        HostMemory.allocate_like = counted  # type: ignore[method-assign]

        same.append(offload_alike(model, layout, mesh, "offload_activations"))
    run = run_of("llama", 4, "fp64", dp_shard=2, tp=2, offload_activations=True)
    verifier = Verifier(bind(run, VerifiableModel), CPU, steps=2, activations=True, groups=groups)
    return same, left, verifier.verify(resolve_layout(bind(run), 4))


@pytest.fixture(scope="module")
def ranks() -> list[tuple[list[bool], list[int], Verdict]]:
    return run_ranks(record_all, 4, timeout_s=300.0)


def test_activations_in_host_memory_give_the_same_bits(ranks: list[tuple[list[bool], list[int], Verdict]]) -> None:
    for same, left, _ in ranks:
        assert same == [True] * len(CASES)
        assert all(left), left


def test_a_layout_with_offloaded_activations_computes_what_one_rank_computes(
    ranks: list[tuple[list[bool], list[int], Verdict]],
) -> None:
    verdict = ranks[0][2]
    assert "offload_activations=True" in verdict.layout
    assert verdict.passed, verdict.first
