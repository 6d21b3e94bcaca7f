"""What other programs hold besides: whole logits, and activations that tensor-parallel ranks do not split."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from layout_runs import run_with
from phalanx.families.language.sizes import parameter_count
from phalanx.layout.spec import ResolvedLayout
from published.memory import published_peak
from published.runs import PublishedRun

SIZES = {
    "model.d_model": 128,
    "model.d_ff": 352,
    "model.n_layers": 4,
    "model.vocab_size": 1000,
    "model.max_positions": 1024,
    "data.sequence_length": 1024,
}


def published(framework: str, tp: int) -> PublishedRun:
    """A row of the table of published runs."""
    run = run_with(SIZES, global_batch=4)
    known: dict[str, Any] = {field.name: "" for field in fields(PublishedRun)}
    known |= {"framework": framework, "model": run.model, "sequence_length": 1024, "sequence_parallel": None}
    known |= {"layout": ResolvedLayout(global_batch=4, tp=tp), "recompute": "full", "precision": "bf16"}
    return PublishedRun(**known)


def test_other_frameworks_keep_whole_logits_and_activations_between_blocks() -> None:
    split, whole = (published_peak(published(name, 2)) for name in ("nanotron 0.5", "Megatron-DeepSpeed"))
    alone = published_peak(published("nanotron 0.5", 1))
    assert split is not None and whole is not None and alone is not None
    assert whole > split
    logits = 10 * 1024 * 1000
    model = published("", 1).model
    assert model is not None
    assert alone > logits + 18 * parameter_count(model)
    assert published_peak(published("unheard of", 1)) is None
    assert published_peak(published("", 1)) is None
