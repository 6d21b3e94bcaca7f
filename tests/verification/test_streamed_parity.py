"""Runs with layout.gather=stream: verified against one rank through the real step, and refused where they make no sense."""

from __future__ import annotations

import pytest

import weather_cases
from distributed_ranks import run_ranks
from layout_runs import Fields, refusal, run_with
from phalanx.families.registry import bind
from phalanx.layout.mesh import Groups
from phalanx.layout.resolve import resolve_layout
from phalanx.verification.family import VerifiableModel
from phalanx.verification.verify_run import Verdict, Verifier, full_run
from whole_model import CPU, GPT

LAYOUTS: list[tuple[Fields, dict[str, object]]] = [
    ({}, {"dp_shard": 4, "global_batch": 8}),
    ({}, {"dp_shard": 2, "tp": 2, "global_batch": 8, "microbatch": 2, "recompute": "full"}),
    (GPT, {"dp_shard": 2, "dp_replicate": 2, "global_batch": 16, "microbatch": 2}),
    (GPT, {"dp_shard": 2, "tp": 2, "global_batch": 8, "peer_copies": True}),
    ({"model.qk_norm": True, "model.dropout": 0.1}, {"dp_shard": 2, "cp": 2, "global_batch": 8}),
    ({"model.qk_norm": True, "model.dropout": 0.1}, {"dp_shard": 2, "pp": 2, "global_batch": 16}),
]


WEATHER: list[dict[str, object]] = [
    {"tp": 2, "dp_shard": 2, "recompute": "full"},
    {"dp_shard": 4},
    {"dp_shard": 2, "dp_replicate": 2},
]
"""With activations and whole branches dropped, q/k norms and several tokens a location."""


def verify_all() -> list[Verdict]:
    groups: Groups = {}
    verdicts = []
    for words in WEATHER:
        run = weather_cases.run_of("orbit", 4, gather="stream", **words)
        verifier = Verifier(bind(run, VerifiableModel), CPU, steps=1, activations=True, groups=groups)
        verdicts.append(verifier.verify(resolve_layout(bind(run), 4)))
    for changes, words in LAYOUTS:
        run = full_run(run_with(changes, gather="stream", **words), "fp64", 2)
        verifier = Verifier(bind(run, VerifiableModel), CPU, steps=2, activations=True, groups=groups)
        verdicts.append(verifier.verify(resolve_layout(bind(run), 4)))
    return verdicts


def test_streaming_computes_what_one_rank_computes() -> None:
    verdicts = run_ranks(verify_all, 4, timeout_s=300.0)[0]
    assert all("gather=stream" in v.layout for v in verdicts)
    failed = [f"{v.layout}: {check}" for v in verdicts for check in v.checks if not (check.passed or ILL in check.name)]
    assert not failed
    assert max(check.error for v in verdicts for check in v.checks if check.what == "gradient") < 1e-9


ILL = "embedding.aggregation"
"""Gradients of what chooses among variables: differences of nearly equal numbers, whose rounding any layout shows."""

REFUSED: dict[str, tuple[Fields, dict[str, object], str]] = {
    "zero": ({}, {"zero": 2}, "layout.zero=2 does"),
    "selective": ({}, {"recompute": "selective"}, "layout.recompute=selective would keep them"),
    "exchange": ({}, {"dp_shard": 2, "cp": 2, "context": "all_to_all"}, "layout.context=all_to_all"),
    "zero bubble": ({}, {"dp_shard": 2, "pp": 2, "schedule": "interleaved_zero_bubble"}, "asks for them apart"),
    "scaled loss": ({}, {"precision": "fp16"}, "loss scaling of layout.precision=fp16"),
    "compiled": ({"training.compile": True}, {}, "training.compile=true cannot compile"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_layout_that_cannot_stream_says_why(name: str) -> None:
    changes, words, reason = REFUSED[name]
    lines = refusal(run_with(changes, gather="stream", **words), 4)
    assert any(line.startswith("layout.gather=stream") and reason in line for line in lines), lines
    assert any(line.startswith("nearest legal: ") for line in lines), lines


def test_one_rank_streams_nothing() -> None:
    assert resolve_layout(bind(run_with(gather="stream")), 1).gather == "layer"
    assert resolve_layout(bind(run_with(gather="stream")), 2).gather == "stream"
