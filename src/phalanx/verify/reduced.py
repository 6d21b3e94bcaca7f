"""A run of the same shape class, small enough for a laptop: what is legal for the real one is legal for it.

Kept: every kind of layer, the number of query heads a key/value head, evenness of the vocabulary, dropout, masks, z-loss,
recompute. Made small: widths, heads, layers, vocabulary, sequence, batch.
"""

from __future__ import annotations

import math
from typing import Any

from phalanx.config.model import LanguageModel
from phalanx.config.schema import Run

_HEAD_SIZE = 8
_STAGES_PER_RANK = 2
OPTIMIZER_EPS = 1e-3
"""AdamW's epsilon while verifying, about the size of the gradients: near-zero gradients would otherwise turn rounding
errors into whole steps of either sign."""


def reduced_run(run: Run, precision: str, steps: int, world_size: int) -> Run:
    """A small run that any layout legal for `run` on `world_size` ranks is legal for too."""
    length = max(2, math.ceil(32 / (2 * world_size))) * 2 * world_size
    model = _reduced_model(run.model, world_size, length)
    microbatch = min(run.layout.microbatch, 2)
    return _changed(
        run,
        model=model.model_dump(),
        data={"sequence_length": length},
        layout={"microbatch": microbatch, "global_batch": 2 * microbatch * world_size},
        **_common(precision, steps),
    )


def full_run(run: Run, precision: str, steps: int, _world_size: int) -> Run:
    """The run itself, with only what verification needs changed."""
    return _changed(run, **_common(precision, steps))


def one_rank(run: Run) -> Run:
    """The same run on one rank."""
    alone = {"dp_replicate": 1, "dp_shard": 1, "tp": 1, "cp": 1, "pp": 1, "zero": 3, "reshard_after_forward": "auto"}
    return _changed(run, layout={**alone, "schedule": "1f1b", "stages_per_rank": "auto", "context": "auto"})


def _common(precision: str, steps: int) -> dict[str, dict[str, Any]]:
    return {
        "layout_precision": {"precision": precision},
        "optimizer": {"eps": OPTIMIZER_EPS, "schedule": "constant", "warmup_steps": 0, "lr": 1e-2},
        "training": {"steps": steps, "compile": False, "attention": "sdpa", "init_from": None},
    }


def _changed(run: Run, **sections: dict[str, Any]) -> Run:
    content = run.model_dump()
    sections.setdefault("layout", {}).update(sections.pop("layout_precision", {}))
    for name, fields in sections.items():
        content[name] = {**content[name], **fields}
    return Run.model_validate(content)


def _reduced_model(model: LanguageModel, world_size: int, length: int) -> LanguageModel:
    kv_heads = math.gcd(model.kv_heads, world_size)
    heads = kv_heads * (model.n_heads // model.kv_heads)
    ratio = model.d_model / (model.n_heads * model.head_size)
    changes: dict[str, Any] = {
        "preset": None,
        "n_layers": min(model.n_layers, max(3, _STAGES_PER_RANK * world_size + 1)),
        "d_model": max(1, round(ratio * heads)) * _HEAD_SIZE,
        "n_heads": heads,
        "n_kv_heads": kv_heads,
        "head_dim": _HEAD_SIZE,
        "d_ff": 64 * kv_heads,
        # No rank of any `tp` may be left without a row.
        "vocab_size": min(model.vocab_size, max(96, world_size**2) + 16 * world_size + model.vocab_size % 8),
        "max_positions": length,
    }
    if model.rope_scaling is not None:
        changes["rope_scaling"] = {**model.rope_scaling.model_dump(), "original_positions": max(1, length // 4)}
    return LanguageModel.model_validate({**model.model_dump(), **changes})
