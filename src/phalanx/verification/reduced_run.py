"""Runs of the same shape class, small enough for a laptop: what is legal for the real one is legal for it.

Kept: every kind of layer, the number of query heads a key/value head, evenness of the vocabulary, dropout, masks, z-loss,
recompute. Made small: widths, heads, layers, vocabulary, sequence, batch.
"""

from __future__ import annotations

from typing import Any

from phalanx.config.schema import Run
from phalanx.families.registry import bind
from phalanx.verification.family import VerifiableModel

OPTIMIZER_EPS = 1e-3
"""AdamW's epsilon while verifying, about the size of the gradients: near-zero gradients would otherwise turn rounding
errors into whole steps of either sign."""
_MOST_SAMPLES = 2
"""Samples of a micro-batch: each further one is computed as the second is."""


def with_small_batch(run: Run, world_size: int) -> Run:
    """Return `run` with a batch that every choice of degrees for `world_size` ranks divides into enough micro-batches."""
    stated = run.layout.microbatch
    microbatch = _MOST_SAMPLES if stated == "auto" else min(stated, _MOST_SAMPLES)
    return _change_sections(run, layout={"microbatch": microbatch, "global_batch": 2 * microbatch * world_size})


def reduced_run(run: Run, precision: str, steps: int, world_size: int) -> Run:
    """Return a small run that any layout legal for `run` on `world_size` ranks, with a small batch, is legal for too."""
    small = bind(run, VerifiableModel).reduced(world_size)
    return _change_sections(with_small_batch(run, world_size), **small, **_verification_sections(precision, steps))


def full_run(run: Run, precision: str, steps: int, _world_size: int) -> Run:
    """Return the run itself, with only what verification needs changed."""
    return _change_sections(run, **_verification_sections(precision, steps))


def one_rank_run(run: Run) -> Run:
    """Return the same run on one rank."""
    degrees = {"dp_replicate": 1, "dp_shard": 1, "tp": 1, "cp": 1, "pp": 1, "zero": 3, "reshard_after_forward": "auto"}
    others = {"schedule": "1f1b", "stages_per_rank": "auto", "context": "auto", "branch_groups": "off"}
    return _change_sections(run, layout={**degrees, **others})


def _verification_sections(precision: str, steps: int) -> dict[str, dict[str, Any]]:
    """Return what every verified run has changed: no schedule and no compiler, one attention kernel, fresh weights."""
    return {
        "layout_precision": {"precision": precision},
        "optimizer": {"eps": OPTIMIZER_EPS, "schedule": "constant", "warmup_steps": 0, "lr": 1e-2},
        "training": {"steps": steps, "compile": False, "attention": "sdpa", "init_from": None},
    }


def _change_sections(run: Run, **sections: dict[str, Any]) -> Run:
    content = run.model_dump()
    sections.setdefault("layout", {}).update(sections.pop("layout_precision", {}))
    for name, fields in sections.items():
        content[name] = {**content[name], **fields}
    return type(run).model_validate(content)
