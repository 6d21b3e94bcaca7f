"""Layouts that together hold every pair of features that any legal layout of a run has at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache
from itertools import combinations
from typing import Any

from phalanx.families.language.config import LanguageRun
from phalanx.families.registry import bind
from phalanx.layout.resolve import every_layout
from phalanx.layout.spec import RECOMPUTES, ResolvedLayout

SIZE = {"n_layers": 4, "d_model": 32, "n_heads": 8, "d_ff": 64, "vocab_size": 61, "max_positions": 32}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {**SIZE, "n_kv_heads": 4, "dropout": 0.1},
    "gpt": {
        **SIZE,
        "positions": "learned",
        "norm": "layernorm",
        "mlp": "gelu_tanh",
        "bias": True,
        "tied_head": True,
        "qk_norm": True,
        "dropout": 0.1,
    },
    "mpt": {**SIZE, "positions": "alibi", "norm": "layernorm", "mlp": "gelu"},
}
WIDE = {**SIZE, "d_model": 64, "n_kv_heads": 4, "dropout": 0.1}
"""With rows that hold whole blocks of 8-bit moments under `tp` too."""

MIXTURES: dict[str, dict[str, Any]] = {
    "mixtral": {
        **SIZE,
        "n_kv_heads": 4,
        "experts": {"count": 8, "active": 2, "d_ff": 24, "balance_weight": 0.1, "z_loss": 0.01},
    },
    "deepseek": {
        **SIZE,
        "n_kv_heads": 4,
        "dropout": 0.1,
        "experts": {
            "count": 8,
            "active": 3,
            "d_ff": 24,
            "shared": 1,
            "shared_d_ff": 32,
            "dense_layers": 1,
            "scoring": "sigmoid",
            "scale": 1.5,
            "groups": 4,
            "active_groups": 2,
            "bias_rate": 0.05,
            "balance": "global_batch",
            "balance_weight": 0.1,
        },
    },
    "wide mixture": {
        **SIZE,
        "d_model": 64,
        "n_kv_heads": 4,
        "experts": {"count": 4, "active": 2, "d_ff": 64, "shared": 1, "shared_d_ff": 64, "balance_weight": 0.1},
    },
    "sliced": {
        **SIZE,
        "n_kv_heads": 4,
        "dropout": 0.1,
        "experts": {
            "count": 2,
            "active": 1,
            "d_ff": 32,
            "shared": 1,
            "shared_d_ff": 32,
            "scoring": "sigmoid",
            "z_loss": 0.01,
            "balance_weight": 0.1,
        },
    },
}
"""Mixtures of experts, the last one of so few that ranks may share out each; see `verification/test_expert_parity.py`."""

VARIANTS: dict[str, dict[str, Any]] = {
    "olmo": {
        **SIZE,
        "n_kv_heads": 4,
        "norm_position": "post",
        "qk_norm": "whole",
        "qkv_bias": True,
        "dropout": 0.1,
        "rope_scaling": {"kind": "yarn", "factor": 4.0, "original_positions": 8, "beta_fast": 4.0},
        "init_std": 0.2,
    },
    "neox": {
        **SIZE,
        "norm": "layernorm",
        "mlp": "gelu",
        "bias": True,
        "parallel_residual": True,
        "rotary_fraction": 0.5,
        "qk_norm": "whole",
        "attention_scale": 0.2,
    },
    "oss": {
        **SIZE,
        "n_kv_heads": 4,
        "attention_sinks": True,
        "sliding_window": 11,
        "global_every": 2,
        "qkv_bias": True,
        "dropout": 0.1,
        "init_std": 0.2,
    },
    "latent": {
        **SIZE,
        "latent": {"query_rank": 12, "key_value_rank": 10, "rope_size": 4, "nope_size": 6, "value_size": 8},
        "dropout": 0.1,
        "init_std": 0.2,
    },
    "gemma": {
        **SIZE,
        "n_kv_heads": 4,
        "norm_offset": True,
        "norm_position": "sandwich",
        "mlp": "geglu",
        "embedding_scale": 5.0,
        "tied_head": True,
        "logit_softcap": 3.0,
        "attention_softcap": 0.5,
        "sliding_window": 5,
        "global_every": 2,
        "local_rope_theta": 100.0,
        "init_std": 0.2,
    },
}
"""Options of today's decoders; see `verification/test_variant_parity.py`."""


def run_of(model: str, world: int, precision: str, **layout: Any) -> LanguageRun:
    """A run whose sequence and batch every factorisation of `world` can share out."""
    return LanguageRun.model_validate(
        {
            "model": {**MODELS, "wide": WIDE, **MIXTURES, **VARIANTS}[model],
            "data": {"sources": ["nowhere"], "sequence_length": 32, "document_mask": model == "mpt"},
            "layout": {"global_batch": 2 * world, "microbatch": 1, "precision": precision, **layout},
            "optimizer": {"lr": 0.01, "eps": 1e-3, "grad_clip": 0.5, "schedule": "constant"},
            "training": {"steps": 2, "z_loss": 1e-3 if model == "llama" else 0.0},
        }
    )


def features(layout: ResolvedLayout) -> set[str]:
    """What a layout uses."""
    found = {name for name in ("dp_replicate", "dp_shard", "tp") if getattr(layout, name) > 1}
    if layout.cp > 1:
        found.add(f"cp {layout.context}")
    if layout.pp > 1:
        found.add(f"pp {layout.schedule}")
    if layout.shards > 1 or layout.dp_replicate > 1:
        found.add(f"zero {layout.zero}")
    if layout.ep > 1:
        # The experts' own shards and replicas are other groups than those of the rest.
        several = layout.world_size // layout.pp // layout.dp_replicate > layout.ep * layout.expert_tp
        found |= {"ep", f"ep, {'several' if several else 'one'} of each"}
    if layout.expert_tp > 1:
        found.add("expert_tp")
    if layout.reshard_after_forward and layout.shards > 1:
        found.add("reshard")
    if layout.recompute != "none":
        found.add(f"recompute {layout.recompute}")
    return found


def pairs(layout: ResolvedLayout) -> set[tuple[str, ...]]:
    """Features, alone and two at a time."""
    return {pair for count in (1, 2) for pair in combinations(sorted(features(layout)), count)}


def pairs_of_all(layouts: Iterable[ResolvedLayout]) -> set[tuple[str, ...]]:
    """Features that any of `layouts` has, alone and two at a time."""
    return set().union(*map(pairs, layouts))


def covering(
    layouts: list[ResolvedLayout],
    held: Iterable[tuple[str, ...]] = (),
    count: Callable[[ResolvedLayout], set[tuple[str, ...]]] = pairs,
) -> list[ResolvedLayout]:
    """Few of `layouts` with all the pairs that all of them have, but for those in `held`: always the one that adds most.

    count: what a layout has, in place of pairs.
    """
    found = [(layout, count(layout)) for layout in layouts]
    missing = set().union(*(has for _, has in found)) - set(held)
    chosen = []
    while missing:
        best, has = max(found, key=lambda one: len(one[1] & missing))
        chosen.append(best)
        missing -= has
    return chosen


def cases(model: str, world: int) -> list[ResolvedLayout]:
    """The layouts to verify `model` in on `world` ranks: all on two, every pair of features on more."""
    layouts = list(every_layout(bind(run_of(model, world, "fp64")), world))
    return [in_few_microbatches(layout, others=False) for layout in (layouts if world == 2 else covering(layouts))]


def further_cases(model: str, world: int, tried: list[ResolvedLayout]) -> list[ResolvedLayout]:
    """The layouts to verify a further model in: every feature, and every pair of axes with the usual schedule.

    tried: those of another model; where the choice is free, others than these are taken.
    """
    found = [in_few_microbatches(x, others=False) for x in every_layout(bind(run_of(model, world, "fp64")), world)]
    return covering(sorted(found, key=tried.__contains__), count=lambda x: _each([x]) | _usual_axis_pairs(x))


def _usual_axis_pairs(layout: ResolvedLayout) -> set[tuple[str, ...]]:
    return axis_pairs(layout) if layout.schedule == "1f1b" else set()


def option_cases(model: str, world: int) -> list[ResolvedLayout]:
    """The layouts to verify an option of attention or MLP in: every pair of the axes that cut what blocks compute or hold,
    with one schedule.

    Schedules move whole blocks, and ZeRO stages and replicas whole gradients, whatever blocks compute.
    """
    # Masks that differ between samples need micro-batches in between, besides the first and the last.
    others = model == "mpt"
    chosen = covering(plain_layouts(model, world), count=axis_pairs)
    return [in_few_microbatches(layout, others=others) for layout in chosen]


def axis_pairs(layout: ResolvedLayout) -> set[tuple[str, ...]]:
    """The axes that cut what blocks compute or hold, each context apart, alone and two at a time."""
    axes = {name for name in features(layout) if name in ("dp_shard", "tp") or name.startswith(("cp", "pp"))}
    return {pair for count in (1, 2) for pair in combinations(sorted(axes), count)}


def plain_layouts(model: str, world: int) -> list[ResolvedLayout]:
    """All legal layouts on `world` ranks with the usual schedule."""
    return [x for x in every_layout(bind(run_of(model, world, "fp64")), world) if x.schedule == "1f1b"]


@cache
def expert_cases(model: str, world: int) -> list[ResolvedLayout]:
    """Few layouts to verify a mixture in on `world` ranks: of those that spread experts, every pair of features, ways to
    recompute among them; on eight ranks the pairs of axes that need so many, whatever the schedule, and every feature."""
    spread = spread_layouts(model, world)
    if world < 8:
        chosen = covering(spread)
    else:
        held = set().union(*(expert_pairs(layout) for fewer in (2, 4) for layout in expert_cases(model, fewer)))
        chosen = covering(spread, held, expert_pairs)
    return [in_few_microbatches(layout, others=False) for layout in chosen]


def expert_pairs(layout: ResolvedLayout) -> set[tuple[str, ...]]:
    """Each feature and number of ranks to spread over, and the axes two at a time, whatever the schedule and the context."""
    axes = {"pp" if name.startswith("pp ") else "cp" if name.startswith("cp ") else name for name in features(layout)}
    axes = {name for name in axes if not name.startswith(("zero", "recompute", "reshard"))}
    return _each([layout]) | {(f"ep={layout.ep}",)} | set(combinations(sorted(axes), 2))


@cache
def sliced_cases(world: int) -> list[ResolvedLayout]:
    """Few layouts on `world` ranks that share out each expert, in one schedule: on four every pair of features, on eight the
    features that need so many."""
    found = [x for x in spread_layouts("sliced", world) if x.expert_tp > 1 and (x.pp == 1 or x.schedule == "1f1b")]
    chosen = covering(found) if world < 8 else covering(found, _each(sliced_cases(4)), lambda layout: _each([layout]))
    return [in_few_microbatches(layout, others=False) for layout in chosen]


def _each(layouts: list[ResolvedLayout]) -> set[tuple[str, ...]]:
    return {(feature,) for layout in layouts for feature in features(layout)}


@cache
def spread_layouts(model: str, world: int) -> list[ResolvedLayout]:
    """All legal layouts on `world` ranks that spread experts, with each way to recompute."""
    runs = [run_of(model, world, "fp64", recompute=recompute) for recompute in RECOMPUTES]
    return [layout for run in runs for layout in every_layout(bind(run), world) if layout.ep > 1]


def in_few_microbatches(layout: ResolvedLayout, *, others: bool) -> ResolvedLayout:
    """The samples of a rank in a first, a last and, with `others`, further micro-batches, and as many as bring every
    schedule to its steady state. Where samples are left over, micro-batches hold several."""
    wanted = max(4 if others else 2, 2 * layout.pp if layout.pp > 1 else 1)
    return replace(layout, microbatch=max(1, layout.samples_per_rank // wanted))
