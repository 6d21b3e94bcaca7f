"""Forecasters to verify, and the layouts to verify them in."""

from __future__ import annotations

from typing import Any

from layout_cases import in_few_microbatches
from phalanx.families.registry import bind
from phalanx.families.weather.config import WeatherRun
from phalanx.layout.resolve import resolve_layout
from phalanx.layout.spec import ResolvedLayout

NAMES = ("land_sea_mask", "temperature_850", "temperature_500", "geopotential_500", "2m_temperature")
SIZE = {
    "n_layers": 4, "d_model": 64, "n_heads": 8, "d_ff": 96, "n_lat": 4, "n_lon": 16, "patch_size": 2,
    "variables": list(NAMES), "dropout": 0.1, "drop_path": 0.2,
    # Attention far from uniform, where rounding errors of its gradients are those of other sums.
    "init_std": 0.2,
}  # fmt: skip
MEMBERS: dict[str, Any] = {"loss": "crps", "members": 3, "noise_channels": 2}
MODELS: dict[str, dict[str, Any]] = {
    "climax": {**SIZE},
    # Of two states and a field that no step predicts.
    "rollout": {
        **SIZE,
        "n_layers": 2,
        "prediction": "change",
        "history": 2,
        "variables": [*NAMES, "insolation"],
        "outputs": list(NAMES),
    },
    # Whose steps take turns on two grids, one with rows on the poles and patches that reach beyond it.
    "grids": {
        **SIZE,
        "n_layers": 2,
        "prediction": "change",
        "grids": [{"name": "coarse", "n_lat": 3, "n_lon": 7, "first_latitude": -90.0, "last_latitude": 90.0}],
    },
    # Whose every step learns, with gradients through all of them.
    "through": {**SIZE, "n_layers": 1, "history": 2},
    # The same of three members of each sample.
    "members through": {**SIZE, "n_layers": 1, "history": 2, **MEMBERS},
    # An ensemble of one step, in pipelines too.
    "members": {**SIZE, "n_layers": 2, "prediction": "change", **MEMBERS},
    "orbit": {
        **SIZE,
        # Whose last patches reach beyond the grid.
        "n_lat": 3,
        "n_lon": 15,
        "aggregation": "hierarchical",
        "aggregation_groups": 3,
        "aggregation_queries": 2,
        "decoder_depth": 3,
        "qk_norm": True,
        "prediction": "change",
        "inputs": ["2m_temperature", "temperature_850", "geopotential_500", "land_sea_mask"],
        "outputs": ["geopotential_500", "2m_temperature"],
        "change_scales": [0.3, 0.5],
        "loss_weights": [1.0, 2.5],
        "position_embedding": "fourier",
        "lead_embedding": "fourier",
        "level_embedding": "fourier",
        "latitude_weights": "area",
    },
}


THROUGH = ("through", "members through")
ROLLED = ("rollout", *THROUGH)


CHOSEN: dict[int, list[dict[str, Any]]] = {
    # Whatever a schedule does between stages, it does to any model.
    2: [
        {"dp_shard": 2, "reshard_after_forward": True},
        {"dp_shard": 2, "zero": 1},
        {"dp_replicate": 2, "dp_shard": 1, "zero": 0},
        {"tp": 2, "dp_shard": 1},
        {"pp": 2, "dp_shard": 1, "schedule": "1f1b"},
        {"pp": 2, "dp_shard": 1, "schedule": "zbv"},
    ],
    4: [
        {"tp": 2, "dp_shard": 2},
        {"tp": 2, "dp_shard": 2, "gather": "stream"},
        {"tp": 2, "dp_shard": 2, "zero": 1},
        {"tp": 2, "dp_shard": 2, "zero": 2},
        {"tp": 2, "dp_replicate": 2, "dp_shard": 1, "zero": 0},
        {"tp": 4, "dp_shard": 1},
        {"tp": 2, "pp": 2, "dp_shard": 1, "schedule": "zbv"},
        {"tp": 2, "pp": 2, "dp_shard": 1, "schedule": "gpipe"},
        {"dp_shard": 2, "pp": 2, "schedule": "interleaved_1f1b"},
        {"dp_shard": 2, "dp_replicate": 2},
    ],
    8: [
        {"tp": 2, "dp_shard": 2, "dp_replicate": 2},
        {"tp": 2, "dp_shard": 2, "dp_replicate": 2, "gather": "stream"},
        {"tp": 8, "dp_shard": 1},
        {"tp": 2, "dp_shard": 2, "pp": 2},
    ],
}


def run_of(model: str, world: int, precision: str = "fp64", **layout: Any) -> WeatherRun:
    """A run whose batch every factorisation of `world` can share out, in micro-batches of one sample."""
    fields = MODELS[model]
    inputs = list(fields.get("inputs", NAMES))
    return WeatherRun.model_validate(
        {
            "model": {"family": "weather", **fields},
            "data": {
                "sources": ["nowhere", *({"path": "there", "grid": grid["name"]} for grid in fields.get("grids", []))],
                "inputs": inputs,
                "outputs": fields.get("outputs", inputs),
                "forcings": ["insolation"] if "insolation" in fields["variables"] else [],
                "history": fields.get("history", 1),
                "lead_hours": [24, 48, 72],
                "rollout_hours": 24 if model in ROLLED else None,
                "rollout_steps": 2 if model in THROUGH else None,
                "splits": {"train": {"first": "2000", "last": "2001"}},
            },
            "layout": {"global_batch": 2 * world, "microbatch": 1, "precision": precision, **layout},
            "optimizer": {"lr": 0.01, "eps": 1e-3, "grad_clip": 0.5, "schedule": "constant"},
            "training": {"steps": 2},
        }
    )


FEWER: dict[str, list[dict[str, Any]]] = {
    # Earlier steps of a roll-out are forward passes alone: over tp, with gathered and with streamed weights.
    "rollout": [CHOSEN[4][0], CHOSEN[4][1], {"tp": 4, "dp_shard": 1}],
    # Later steps' gradients come back over tp: with gathered and with streamed weights, summed at once or step by step.
    "through": [CHOSEN[4][0], CHOSEN[4][1], CHOSEN[4][3], {"tp": 1, "dp_shard": 4, "zero": 1}],
    "members through": [CHOSEN[4][1], {"tp": 1, "dp_shard": 4, "zero": 1}],
    # Shapes that change from step to step matter to what splits tokens, and to pipelines.
    "grids": [CHOSEN[4][0], {"tp": 2, "pp": 2, "dp_shard": 1, "schedule": "1f1b"}, CHOSEN[4][9]],
    # Members lie in the rows of activations that go over tp and from stage to stage.
    "members": [{"tp": 2, "dp_shard": 1}, {"pp": 2, "dp_shard": 1, "schedule": "1f1b"}],
    # Single precision changes bounds, not layouts: one of each way to hold weights, and a pipeline.
    "fp32": [CHOSEN[4][0], CHOSEN[4][1], {"tp": 2, "pp": 2, "dp_shard": 1, "schedule": "zbv"}],
}


def cases(model: str, world: int, precision: str = "fp64") -> list[ResolvedLayout]:
    """The layouts to verify `model` in on `world` ranks: those of `CHOSEN` or `FEWER`."""
    chosen = FEWER.get(model) or FEWER.get(precision) or CHOSEN[world]
    layouts = [resolve_layout(bind(run_of(model, world, **fields)), world) for fields in chosen]
    return [in_few_microbatches(layout, others=model in ROLLED) for layout in layouts]
