"""What layers declare as data: which matrices their parameters hold, and how these may be split over ranks.

Apart from the layers themselves, so that a run file is checked without torch. Names are those within the layer.
"""

from __future__ import annotations

import math

from phalanx.config.layers import AttentionConfig, MixtureConfig, MLPConfig
from phalanx.nn.parameters import MatrixRows, MatrixRules, name_matrices
from phalanx.nn.splits import Split, Splits


def gate_block(d_ff: int) -> int:
    """Return rows of `gate_up` that alternate between gate and up projection.

    One matrix holds both projections in alternating groups of this many rows, so that a contiguous part of its rows holds
    matching gate and up rows (a tensor-parallel shard is then a plain slice), while a group is still long enough for
    contiguous memory access. At least 32 groups remain where 32 divides `d_ff`; elsewhere a group is one row.
    """
    return math.gcd(d_ff // 32, 64) if d_ff % 32 == 0 else 1


def mlp_unit(config: MLPConfig) -> int:
    """Return the hidden features that tensor parallelism keeps together; see `gate_block`."""
    return gate_block(config.hidden) if config.gated else 1


def mlp_splits(config: MLPConfig) -> Splits:
    """Return how the matrices of an MLP may be split over tensor-parallel ranks, by their names in it."""
    unit = mlp_unit(config)
    first = ("gate_up", Split("column", 2 * unit)) if config.gated else ("up", Split("column"))
    return [first, ("down", Split("row", unit))]


def mlp_matrices(config: MLPConfig) -> MatrixRules:
    """Return which parameters of an MLP hold several matrices, by their names in it."""
    unit = mlp_unit(config)
    return [("gate_up.weight", MatrixRows(pattern=(unit, unit)))] if config.gated else []


def attention_matrices(config: AttentionConfig) -> MatrixRules:
    """Return which parameters of attention hold several matrices, by their names in it: queries, keys and values."""
    size = config.head_size
    return [("qkv.weight", MatrixRows(pattern=(config.group * size, size, size)))]


def attention_splits(config: AttentionConfig) -> Splits:
    """Return how attention may be split over tensor-parallel ranks, by names in it; "" is attention itself.

    Whole groups of heads stay together: query heads need the key and the value head that they share.
    """
    splits: Splits = [
        ("", Split("attention")),
        ("qkv", Split("column", (config.group + 2) * config.head_size)),
        ("output", Split("row", config.group * config.head_size)),
    ]
    if config.sinks:
        splits.append(("sinks", Split("heads", config.group)))
    if config.joint_norm:
        splits += [
            ("query_norm", Split("norm", config.group * config.head_size)),
            ("key_norm", Split("norm", config.head_size)),
        ]
    return splits


def latent_attention_matrices(config: AttentionConfig) -> MatrixRules:
    """Return which parameters of latent attention hold several matrices, by their names in it."""
    assert config.latent is not None
    latent = config.latent
    return [
        ("key_value_down.weight", MatrixRows(pattern=(latent.key_value_rank, latent.rope_size))),
        ("key_value_up.weight", MatrixRows(pattern=(latent.nope_size, latent.value_size))),
    ]


def latent_attention_splits(config: AttentionConfig) -> Splits:
    """Return how latent attention may be split over tensor-parallel ranks, by names in it; "" is attention itself.

    Heads are split. Every rank compresses its own positions; what it expands is gathered in the latents' few features.
    """
    assert config.latent is not None
    latent = config.latent
    return [
        ("", Split("attention")),
        ("query" if latent.query_rank is None else "query_up", Split("column", config.head_size)),
        ("key_value_up", Split("column", latent.nope_size + latent.value_size)),
        ("shared_key", Split("gather")),
        ("output", Split("row", latent.value_size)),
        *([("sinks", Split("heads"))] if config.sinks else []),
    ]


def mixture_matrices(config: MixtureConfig) -> MatrixRules:
    """Return which parameters of a mixture hold several matrices or none, by their names in it.

    The router's rows are vectors that tokens are compared with, one an expert, and no map between features.
    """
    count, unit = config.settings.count, gate_block(config.hidden)
    shared: MatrixRules = [] if config.shared is None else name_matrices("shared", mlp_matrices(config.shared))
    return [
        ("router.weight", None),
        ("shared_gate.weight", None),
        ("experts.gate_up", MatrixRows(count, (unit, unit))),
        ("experts.down", MatrixRows(count)),
        *shared,
    ]
