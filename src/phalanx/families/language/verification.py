"""Language runs to verify with: samples that are a function of their number, and decoders small enough for a laptop."""

from __future__ import annotations

import math
from typing import Any

import torch

from phalanx.config.model import LanguageModel
from phalanx.counter_random import sample_bits
from phalanx.families.language.config import LanguageRun
from phalanx.families.language.data.token_batches import TokenBatch
from phalanx.nn.cross_entropy import IGNORED
from phalanx.verification.family import VerifiableModel, most_stages

_LONGEST_DOCUMENT = 16
_HEAD_SIZE = 8
_EXPERT_WIDTH = 16


class LanguageVerification(VerifiableModel):
    """See `verification.family.VerifiableModel`."""

    run: LanguageRun

    def samples(self, step: int, first: int, count: int, global_batch: int) -> TokenBatch:
        """Return random tokens, with uneven targets and documents.

        Some targets are left out, more in some samples than in others, so that an average over ranks in place of a sum
        over targets shows.
        """
        length = self.run.data.sequence_length
        numbers = torch.arange(first, first + count) + (step - 1) * global_batch
        tokens = sample_bits("tokens", numbers, length + 1) % self.run.model.vocab_size
        targets = tokens[:, 1:].clone()
        # Between an eighth and a half of a sample's targets, by its number.
        left_out = sample_bits("left out", numbers, length) % 8 < 1 + numbers[:, None] % 4
        targets[left_out] = IGNORED
        documents = None
        if self.run.data.document_mask:
            begins = sample_bits("documents", numbers, length) % _LONGEST_DOCUMENT == 0
            documents = begins.cumsum(1).to(torch.int32)
        return TokenBatch(tokens[:, :-1].contiguous(), targets, documents, numbers)

    def reduced(self, world_size: int) -> dict[str, dict[str, Any]]:
        """Return fields of a small run: widths, heads, layers, vocabulary and sequence shrink.

        Kinds of layers, query heads a key/value head, evenness of the vocabulary, dropout and masks stay.
        """
        # Two runs of positions a rank, as a ring assigns them, in any layout of so many ranks.
        length = max(2, math.ceil(32 / (2 * world_size))) * 2 * world_size
        model = self.run.model
        kv_heads = math.gcd(model.kv_heads, world_size)
        heads = kv_heads * (model.n_heads // model.kv_heads)
        ratio = model.d_model / (model.n_heads * model.head_size)
        changes: dict[str, Any] = {
            "preset": None,
            "n_layers": min(model.n_layers, max(3, most_stages(self.run, world_size) + 1)),
            "d_model": max(1, round(ratio * heads)) * _HEAD_SIZE,
            "n_heads": heads,
            "n_kv_heads": kv_heads,
            "head_dim": _HEAD_SIZE,
            "d_ff": 64 * kv_heads,
            # No rank of any `tp` may be left without a row.
            "vocab_size": min(model.vocab_size, max(96, world_size**2) + 16 * world_size + model.vocab_size % 8),
            "max_positions": length,
        }
        if model.latent is not None:
            rank = None if model.latent.query_rank is None else 2 * _HEAD_SIZE
            sizes = {"rope_size": 4, "nope_size": _HEAD_SIZE, "value_size": _HEAD_SIZE}
            changes["latent"] = {"query_rank": rank, "key_value_rank": 2 * _HEAD_SIZE, **sizes}
            changes["head_dim"] = None
        if model.sliding_window is not None:
            # Narrow enough to leave something out, and kinds of layers that alternate within so few layers.
            changes["sliding_window"] = min(model.sliding_window, max(2, length // 4))
            changes["global_every"] = min(model.global_every, 2)
        if model.rotary_fraction < 1.0:
            # An even number of features, and four at least for the kind of scaling that needs them.
            changes["rotary_fraction"] = max(4, round(_HEAD_SIZE * model.rotary_fraction / 2) * 2) / _HEAD_SIZE
        if model.experts is not None:
            # As many experts, groups and choices: any `ep` then divides them as it does those of the model.
            changes["experts"] = {
                **model.experts.model_dump(),
                "d_ff": _EXPERT_WIDTH,
                "shared_d_ff": 64 * kv_heads if model.experts.shared or model.experts.shared_d_ff else None,
                "dense_layers": min(model.experts.dense_layers, 1),
            }
        if model.rope_scaling is not None and model.rope_scaling.kind in ("llama3", "yarn"):
            changes["rope_scaling"] = {**model.rope_scaling.model_dump(), "original_positions": max(1, length // 4)}
        model = LanguageModel.model_validate({**model.model_dump(), **changes})
        return {"model": model.model_dump(), "data": {"sequence_length": length, "length_warmup": []}}

    def in_words(self) -> str:
        """Return the sizes of the decoder."""
        model = self.run.model
        experts = "" if model.experts is None else f"{model.experts.active} of {model.experts.count} experts a token, "
        return (
            f"{model.n_layers} layers, width {model.d_model}, {model.n_heads} heads ({model.kv_heads} key/value), {experts}"
            f"vocabulary {model.vocab_size}, {self.run.data.sequence_length} positions"
        )
