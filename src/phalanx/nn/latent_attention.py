"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1): keys and values of all heads from one latent.

Training computes with the heads' own keys and values. Generation keeps the latents and the shared rotary keys alone, and
multiplies queries and results with the matrix that would have expanded them.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from phalanx.config.layers import AttentionConfig
from phalanx.nn.attention import CausalAttention, KeyValueCache, RotaryContext
from phalanx.nn.layers import Linear, build_norm
from phalanx.nn.positions import rotate


class SharedKey(nn.Module):
    """The rotary key that all heads share, as it is; under tensor parallelism, that of all positions."""

    def forward(self, key_BSR: Tensor) -> Tensor:
        """Return [B, S, R] unchanged."""
        return key_BSR


class LatentAttention(CausalAttention):
    """Causal self-attention whose keys and values are expanded from a latent of `key_value_rank` features.

    Features of a head's query and key: `nope_size` of the head's own, then `rope_size` rotated ones, whose key is the same
    for all heads. Rows of `key_value_up.weight` are grouped by head: its key features, then its value features.
    """

    def __init__(self, config: AttentionConfig) -> None:
        super().__init__(config)
        latent, size = config.latent, config.head_size
        assert latent is not None and config.key_norm is not None
        self.sizes = latent
        self.compresses_queries = config.query_norm is not None
        if config.query_norm is not None and latent.query_rank is not None:
            self.query_down = Linear(config.width, latent.query_rank, bias=False)
            self.query_norm = build_norm(config.query_norm)
            self.query_up = Linear(latent.query_rank, config.heads * size, bias=False)
        else:
            self.query = Linear(config.width, config.heads * size, bias=False)
        self.key_value_down = Linear(config.width, latent.key_value_rank + latent.rope_size, bias=False)
        self.key_value_norm = build_norm(config.key_norm)
        self.key_value_up = Linear(
            latent.key_value_rank, config.heads * (latent.nope_size + latent.value_size), bias=False
        )
        self.shared_key = SharedKey()
        self.output = Linear(config.heads * latent.value_size, config.width, bias=False)

    def forward(self, x_BSD: Tensor, context: RotaryContext, cache: KeyValueCache | None = None) -> Tensor:
        """Map [B, S, D] -> [B, S, D]. With `cache`, latents and rotary keys of earlier positions are attended to as well."""
        assert context.rope is not None
        sizes = (self.sizes.nope_size, self.sizes.rope_size)
        compressed = self.compresses_queries
        query = self.query_up(self.query_norm(self.query_down(x_BSD))) if compressed else self.query(x_BSD)
        nope_BSHN, turned_BSHR = query.unflatten(-1, (-1, sum(sizes))).split(sizes, dim=-1)
        turned_BSHR = rotate(turned_BSHR, *context.rope)
        down = self.key_value_down(x_BSD).split((self.sizes.key_value_rank, self.sizes.rope_size), dim=-1)
        latent_BSL = self.key_value_norm(down[0])
        shared_BS1R = rotate(self.shared_key(down[1]).unsqueeze(2), *context.rope)
        # The prompt is computed with expanded heads, as training is: of many queries that costs less.
        if cache is not None and cache.length > 0:
            keys = cache.append(latent_BSL.unsqueeze(1), shared_BS1R.transpose(1, 2))
            return self._attend_latents(nope_BSHN, turned_BSHR, *keys, context)
        if cache is not None:
            cache.append(latent_BSL.unsqueeze(1), shared_BS1R.transpose(1, 2))
        expanded = self.key_value_up(latent_BSL).unflatten(-1, (-1, self.sizes.nope_size + self.sizes.value_size))
        key_BSHN, value_BSHV = expanded.split((self.sizes.nope_size, self.sizes.value_size), dim=-1)
        key = torch.cat((key_BSHN, shared_BS1R.expand(-1, -1, key_BSHN.shape[2], -1)), dim=-1)
        query = self._scaled(torch.cat((nope_BSHN, turned_BSHR), dim=-1))
        mixed = self._mix(query.transpose(1, 2), key.transpose(1, 2), value_BSHV.transpose(1, 2), context)
        out: Tensor = self.output(mixed.transpose(1, 2).flatten(2))
        return out

    def _attend_latents(
        self,
        nope_BSHN: Tensor,
        turned_BSHR: Tensor,
        latent_B1SL: Tensor,
        shared_B1SR: Tensor,
        context: RotaryContext,
    ) -> Tensor:
        """Return attention to latents and shared keys, [B, S, D]: expanding them would cost more than one query does.

        q . (W_k c) = (W_k^T q) . c: queries become as wide as latents, and latents serve as keys and values of all heads.
        """
        up = self.key_value_up.whole_weight().to(nope_BSHN.dtype)
        up_HFL = up.unflatten(0, (-1, self.sizes.nope_size + self.sizes.value_size))
        key_HNL, value_HVL = up_HFL.split((self.sizes.nope_size, self.sizes.value_size), dim=1)
        query = torch.cat((torch.einsum("bshn,hnl->bshl", nope_BSHN, key_HNL), turned_BSHR), dim=-1)
        # Kernels divide by the root of the query's width, which is that of an expanded head in training.
        width = self.sizes.nope_size + self.sizes.rope_size
        query = self._scaled(query) * math.sqrt(query.shape[-1] / width)
        key = torch.cat((latent_B1SL, shared_B1SR), dim=-1)
        mixed_BHSL = self._mix(query.transpose(1, 2), key, latent_B1SL, context)
        value = torch.einsum("bhsl,hvl->bshv", mixed_BHSL, value_HVL)
        out: Tensor = self.output(value.flatten(2))
        return out
