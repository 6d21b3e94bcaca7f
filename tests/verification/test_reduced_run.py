"""The small run that stands for a large one: of the same kind, and legal wherever the large one is."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from phalanx.families.language.config import LanguageRun
from phalanx.families.registry import bind
from phalanx.layout.legality import reasons_against
from phalanx.layout.resolve import every_layout, resolve_layout, with_degrees
from phalanx.layout.spec import DEGREES
from phalanx.verification.error_bounds import ErrorBound, layer_of
from phalanx.verification.family import VerifiableModel
from phalanx.verification.verify_run import reduced_run


def run_of(preset: str, world: int, **data: Any) -> LanguageRun:
    return LanguageRun.model_validate(
        {
            "model": PRESETS[preset],
            "data": {"sources": ["nowhere"], "sequence_length": 2048, **data},
            "layout": {"global_batch": 64 * world, "microbatch": 2},
            "optimizer": {"lr": 1e-3},
            "training": {"steps": 10},
        }
    )


PRESETS: dict[str, dict[str, Any]] = {
    "llama3-8b": {
        "n_layers": 32, "d_model": 4096, "n_heads": 32, "n_kv_heads": 8, "d_ff": 14336, "vocab_size": 128256,
        "max_positions": 8192, "rope_scaling": {"original_positions": 8192},
    },
    "gpt-175b": {
        "n_layers": 96, "d_model": 12288, "n_heads": 96, "vocab_size": 50257, "max_positions": 2048,
        "positions": "learned", "norm": "layernorm", "mlp": "gelu_tanh", "bias": True, "tied_head": True,
    },
}  # fmt: skip


@pytest.mark.parametrize("world", [2, 6, 8, 32])
@pytest.mark.parametrize("preset", PRESETS)
def test_what_is_legal_for_the_run_is_legal_for_the_small_one(preset: str, world: int) -> None:
    run = run_of(preset, world)
    small = reduced_run(bind(run, VerifiableModel), "fp64", 2, world)
    layouts = list(every_layout(bind(run), world))
    assert layouts
    for layout in layouts:
        degrees = {name: getattr(layout, name) for name in DEGREES}
        fields = {"schedule": layout.schedule, "stages_per_rank": layout.stages_per_rank, "zero": layout.zero}
        fields |= {"context": layout.context, "reshard_after_forward": layout.reshard_after_forward}
        chosen = small.model_copy(update={"layout": small.layout.model_copy(update=fields)})
        assert reasons_against(bind(chosen), with_degrees(bind(chosen), degrees), world) == []


def test_the_small_model_has_a_layer_for_each_stage_that_the_run_file_asks_for() -> None:
    run = run_of("llama3-8b", 2)
    fields = {"pp": 2, "dp_shard": 1, "schedule": "interleaved_1f1b", "stages_per_rank": 8}
    run = run.model_copy(update={"layout": run.layout.model_copy(update=fields)})
    resolve_layout(bind(run), 2)
    assert resolve_layout(bind(reduced_run(bind(run, VerifiableModel), "fp64", 2, 2)), 2).n_stages == 16


@pytest.mark.parametrize("preset", PRESETS)
def test_the_small_model_is_of_the_same_kind(preset: str) -> None:
    run = run_of(preset, 8)
    small, model = reduced_run(bind(run, VerifiableModel), "fp64", 2, 8).model, run.model
    for field in ("positions", "norm", "mlp", "bias", "tied_head", "qk_norm", "dropout"):
        assert getattr(small, field) == getattr(model, field)
    assert small.n_heads // small.kv_heads == model.n_heads // model.kv_heads
    assert small.vocab_size % 2 == model.vocab_size % 2
    assert small.n_layers <= model.n_layers and small.d_model < 300


def test_the_bound_grows_with_the_way_to_the_loss() -> None:
    bound = ErrorBound(torch.float64, layers=4, targets=100)
    names = ["head.weight", "blocks.3.mlp.up.weight", "blocks.0.mlp.up.weight", "embedding.weight"]
    assert [layer_of(name, 4) for name in names] == [5, 4, 1, 0]
    limits = [bound.gradient(name) for name in names]
    assert limits == sorted(limits) and limits[0] == bound.loss == 16.0 * 10.0 * torch.finfo(torch.float64).eps
