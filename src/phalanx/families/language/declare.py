"""What the language family declares about itself, as data: how parameters begin, what kind each is, what may be split."""

from __future__ import annotations

import math
from fnmatch import fnmatchcase

from phalanx.config.model import LanguageModel
from phalanx.families.language.sizes import block_flops_per_token, head_flops_per_token
from phalanx.nn.initial import InitRule
from phalanx.nn.kinds import ParameterKind
from phalanx.nn.layers import gate_block
from phalanx.nn.splits import Split, SplitCount, Splits

_KINDS: tuple[tuple[str, ParameterKind], ...] = (
    ("*norm.weight", "norm"),
    ("*.bias", "bias"),
    ("embedding.*", "embedding"),
    ("*", "matrix"),
)


def parameter_kind(name: str) -> ParameterKind:
    """The kind of the decoder's parameter `name`; the first matching row of the table decides."""
    return next(kind for pattern, kind in _KINDS if fnmatchcase(name, pattern))


def initial_rules(config: LanguageModel) -> list[tuple[str, InitRule]]:
    """Initial values by parameter name, first match wins.

    Matrices start normal with `init_std`; the two that write to the residual stream with 1/sqrt(2 n_layers) of it, so that
    the stream's variance does not grow with depth (GPT-2, Radford et al. 2019, section 2.3).
    """
    residual = config.init_std / math.sqrt(2 * config.n_layers)
    return [
        ("*norm.weight", InitRule.constant(1.0)),
        ("*.bias", InitRule.constant(0.0)),
        ("*.attention.output.weight", InitRule.normal(residual)),
        ("*.mlp.down.weight", InitRule.normal(residual)),
        ("*", InitRule.normal(config.init_std)),
    ]


TIED = {"head.weight": "embedding.weight"}
"""Parameters that are copies of others wherever a tied head is not in one part with the table."""


def tensor_splits(config: LanguageModel) -> Splits:
    """How modules may be split over tensor-parallel ranks; see `nn.splits`."""
    group = config.n_heads // config.kv_heads
    gate = gate_block(config.ff_size) if config.mlp == "swiglu" else 1
    return [
        ("embedding", Split("lookup")),
        ("blocks.*.attention", Split("attention")),
        ("blocks.*.attention.qkv", Split("column", (group + 2) * config.head_size)),
        ("blocks.*.attention.output", Split("row", group * config.head_size)),
        ("blocks.*.mlp.gate_up", Split("column", 2 * gate)),
        ("blocks.*.mlp.up", Split("column")),
        ("blocks.*.mlp.down", Split("row", gate)),
        ("head", Split("logits")),
    ]


def tensor_split_counts(config: LanguageModel) -> list[SplitCount]:
    """What a tensor-parallel degree must divide. The vocabulary is not among them: its parts may be uneven."""
    gate = gate_block(config.ff_size) if config.mlp == "swiglu" else 1
    return [
        SplitCount("model.n_heads", config.n_heads),
        SplitCount("model.n_kv_heads", config.kv_heads),
        SplitCount("model.d_ff", config.ff_size // gate, gate),
    ]


def relative_block_costs(config: LanguageModel, sequence_length: int) -> tuple[float, float]:
    """What the embedding and the head cost beside one block, in blocks: by their floating-point operations.

    The embedding is a lookup: memory traffic of a few rows a token, next to nothing beside a block's matmuls.
    """
    block = block_flops_per_token(config, sequence_length)
    return 0.0, head_flops_per_token(config) / block
