from typing import Any

import pytest

from phalanx.errors import ConfigError
from phalanx.families.language.config import LanguageRun
from phalanx.families.registry import bind
from phalanx.layout.resolve import resolve_layout


def run_with(**layout: Any) -> LanguageRun:
    return LanguageRun.model_validate(
        {
            "model": {"n_layers": 1, "d_model": 8, "n_heads": 1, "vocab_size": 16, "max_positions": 8},
            "data": {"sources": ["somewhere"], "sequence_length": 8},
            "layout": {"global_batch": 16, **layout},
            "optimizer": {"lr": 0.1},
            "training": {"steps": 1},
        }
    )


def test_auto_takes_the_ranks_that_replicas_leave() -> None:
    layout = resolve_layout(bind(run_with(dp_replicate=2)), 8)
    assert (layout.dp_replicate, layout.dp_shard, layout.data_ranks) == (2, 4, 8)


def test_batch_arithmetic() -> None:
    layout = resolve_layout(bind(run_with(microbatch=2, global_batch=32)), 4)
    assert (layout.samples_per_rank, layout.accumulation) == (8, 4)


def test_a_batch_stated_in_tokens_is_exact() -> None:
    assert resolve_layout(bind(run_with(global_batch="128 tokens")), 1).global_batch == 16


@pytest.mark.parametrize(
    ("fields", "world", "message"),
    [
        (
            {"dp_replicate": 3},
            8,
            "layout.dp_replicate=3 does not divide the world size 8\nnearest legal: dp_replicate=2",
        ),
        (
            {"dp_replicate": 2, "dp_shard": 2},
            8,
            "layout.dp_replicate=2 x layout.dp_shard=2 = 4 ranks, but 8 were started\n"
            "nearest legal: dp_replicate=2 dp_shard=4, or dp_replicate=4 dp_shard=2",
        ),
        (
            {"microbatch": 4, "global_batch": 24},
            4,
            "layout.global_batch=24 samples is not a multiple of layout.microbatch=4 x 4 data-parallel ranks = 16\n"
            "nearest legal: microbatch=3",
        ),
        (
            {"microbatch": 1, "global_batch": 2},
            4,
            "layout.global_batch=2 samples is not a multiple of layout.microbatch=1 x 4 data-parallel ranks = 4\n"
            "nearest legal: dp_shard=2 cp=2, or dp_replicate=2 dp_shard=1 cp=2",
        ),
    ],
)
def test_illegal_layouts_name_numbers_and_the_nearest_legal_one(fields: dict, world: int, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve_layout(bind(run_with(**fields)), world)
    assert str(caught.value) == message
