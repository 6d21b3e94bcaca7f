"""The decoder: token embedding, blocks, output head. Plain PyTorch for one device; knows no mesh, rank or layout."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from phalanx.config.layers import AttentionConfig, LayerConfig, MixtureConfig
from phalanx.config.model import LanguageModel
from phalanx.counter_random import CounterDropout, DropoutContext
from phalanx.nn.attention import (
    Attention,
    AttentionKernel,
    ContextBuilder,
    KeyValueCache,
    RotaryContext,
    attention_context,
)
from phalanx.nn.cross_entropy import LossSum
from phalanx.nn.experts import MixtureOfExperts, RoutingPass
from phalanx.nn.latent_attention import LatentAttention
from phalanx.nn.layers import Norm, NumberedBlocks, build_mlp, build_norm
from phalanx.nn.positions import Positions
from phalanx.nn.splits import ModelChunk
from phalanx.nn.vocabulary import OutputHead, TokenEmbedding


class Block(nn.Module):
    """One decoder layer: attention, then an MLP or a mixture of experts, each added to the residual stream.

    Norms stand before them (`attention_norm`, `mlp_norm`), behind them (`attention_out_norm`, `mlp_out_norm`), or both.
    """

    def __init__(self, config: LayerConfig) -> None:
        super().__init__()
        before, behind = config.norm_position != "post", config.norm_position != "pre"
        self.attention_norm = build_norm(config.norm) if before else None
        latent = config.attention.latent is not None
        self.attention = LatentAttention(config.attention) if latent else Attention(config.attention)
        self.attention_out_norm = build_norm(config.norm) if behind else None
        self.mlp_norm = build_norm(config.norm) if before else None
        self.mlp_out_norm = build_norm(config.norm) if behind else None
        self.parallel = config.parallel
        self.mlp = MixtureOfExperts(config.mlp) if isinstance(config.mlp, MixtureConfig) else build_mlp(config.mlp)
        self.attention_dropout = CounterDropout(config.dropout, site=0)
        self.mlp_dropout = CounterDropout(config.dropout, site=1)

    def forward(
        self,
        x_BSD: Tensor,
        context: RotaryContext,
        dropout: DropoutContext | None = None,
        cache: KeyValueCache | None = None,
        routing: RoutingPass | None = None,
    ) -> Tensor:
        """Map activations [B, S, D] to [B, S, D]. routing: what routers need to know in training."""
        # The residual stream itself is never normalised, which keeps deep models trainable.
        mixed = self.attention(_normalise(self.attention_norm, x_BSD), context, cache)
        mixed_BSD = x_BSD + self.attention_dropout(_normalise(self.attention_out_norm, mixed), dropout)
        normed = _normalise(self.mlp_norm, x_BSD if self.parallel else mixed_BSD)
        hidden = self.mlp(normed, routing) if isinstance(self.mlp, MixtureOfExperts) else self.mlp(normed)
        dropped: Tensor = self.mlp_dropout(_normalise(self.mlp_out_norm, hidden), dropout)
        result: Tensor = mixed_BSD + dropped
        return result


def _normalise(norm: Norm | None, x_BSD: Tensor) -> Tensor:
    """Return `x_BSD` behind a norm, where there is one."""
    if norm is None:
        return x_BSD
    normed: Tensor = norm(x_BSD)
    return normed


class Decoder(nn.Module):
    """A decoder-only transformer as `config` describes it; the whole of it or one part.

    Parameters are uninitialised (see `layout.initial_values`); build under `torch.device("meta")` to allocate nothing.
    """

    def __init__(
        self,
        config: LanguageModel,
        *,
        dtype: torch.dtype = torch.float32,
        kernel: AttentionKernel = "sdpa",
        chunk_tokens: int = 4096,
        z_loss: float = 0.0,
        part: ModelChunk | None = None,
    ) -> None:
        super().__init__()
        self.part = part = part or ModelChunk(range(config.n_layers))
        self.config = config
        self.dtype = dtype
        self.kernel: AttentionKernel = kernel
        # An attribute, so that context parallelism can build what its own attention needs.
        self.attention_context: ContextBuilder = attention_context
        if part.first:
            self.embedding = TokenEmbedding(
                config.vocab_size,
                config.d_model,
                learned_positions=config.max_positions if config.positions == "learned" else None,
                dropout=config.dropout,
                dtype=dtype,
                scale=config.embedding_scale,
            )
        # Numbers of the whole model, so that a chunk of a pipeline builds the layers that are its own.
        self.layer_configs = [config.layer(number) for number in part.blocks]
        """What each block is."""
        self.blocks = NumberedBlocks(lambda number: Block(config.layer(number)), part.blocks)
        if part.last:
            self.head = OutputHead(
                config.vocab_size,
                config.residual_norm,
                chunk_tokens=chunk_tokens,
                z_loss=z_loss,
                owns_weight=not self._tied_here(),
                softcap=config.logit_softcap,
            )

    def forward(
        self,
        tokens_BS: Tensor,
        targets_BS: Tensor,
        *,
        document_ids_BS: Tensor | None = None,
        dropout: DropoutContext | None = None,
    ) -> LossSum:
        """Return summed next-token loss. tokens, targets: int64 [B, S]; document_ids: [B, S] to keep attention in
        documents."""
        positions_S = torch.arange(tokens_BS.shape[1], device=tokens_BS.device)
        # One device computes all positions; context parallelism hands in those of its own rows.
        positions = Positions(positions_S, positions_S)
        hidden = self.hidden(tokens_BS, positions, document_ids_BS=document_ids_BS, dropout=dropout)
        return self.loss(hidden, targets_BS)

    def hidden(
        self,
        inputs: Tensor,
        positions: Positions,
        *,
        document_ids_BS: Tensor | None = None,
        dropout: DropoutContext | None = None,
        routing: RoutingPass | None = None,
    ) -> Tensor:
        """Return the activations behind the last block of this model chunk, [B, S, D].

        inputs: token ids [B, S], or activations [B, S, D] where the part does not hold the embedding. document_ids: of
        whole samples, whatever part of their positions is computed here.
        """
        contexts = self._contexts(positions.tokens_S, self.kernel, document_ids_BS=document_ids_BS)
        x_BSD = self.embedding(inputs, positions.rows_S, dropout) if self.part.first else inputs
        for number, layer, block in zip(self.part.blocks, self.layer_configs, self.blocks, strict=True):
            dropped = None if dropout is None else dropout.at_layer(number)
            x_BSD = block(x_BSD, contexts[layer.attention], dropped, routing=routing)
        return x_BSD

    def loss(self, x_BSD: Tensor, targets_BS: Tensor) -> LossSum:
        """Return summed loss of activations behind the model's last block."""
        loss: LossSum = self.head(x_BSD, targets_BS, self._tied_weight())
        return loss

    def score_targets(self, x_BSD: Tensor, targets_BS: Tensor) -> Tensor:
        """Return each target's loss and the likeliest token, float64 [2, B, S], of activations behind the last block."""
        scores: Tensor = self.head(x_BSD, targets_BS, self._tied_weight(), apart=True)
        return scores

    @torch.no_grad()
    def logits(
        self, tokens_BS: Tensor, caches: list[KeyValueCache] | None = None, *, last_only: bool = False
    ) -> Tensor:
        """Return logits [B, S, V] in the activation format, for generation and scoring; dropout is off.

        With `caches` (one a layer, from `new_caches`), tokens_BS continues what the caches have seen. last_only: logits of
        the last position alone, [B, 1, V].
        """
        past = caches[0].length if caches else 0
        positions_S = torch.arange(past, past + tokens_BS.shape[1], device=tokens_BS.device)
        # Only the plain kernel takes the bias that positions behind a cache need.
        kernel: AttentionKernel = "sdpa" if caches else self.kernel
        contexts = self._contexts(positions_S, kernel, past=past)
        x_BSD = self.embedding(tokens_BS, positions_S)
        for index, (layer, block) in enumerate(zip(self.layer_configs, self.blocks, strict=True)):
            x_BSD = block(x_BSD, contexts[layer.attention], None, caches[index] if caches else None)
        result: Tensor = self.head.logits(x_BSD[:, -1:] if last_only else x_BSD, self._tied_weight())
        return result

    def _contexts(
        self, positions_S: Tensor, kernel: AttentionKernel, *, document_ids_BS: Tensor | None = None, past: int = 0
    ) -> dict[AttentionConfig, RotaryContext]:
        """Return masks and rotary tables for each kind of attention of this chunk, made once for all layers of the kind."""
        # A mask of S x S numbers is far larger than what one layer keeps of it: layers of a kind share it.
        return {
            attention: self.attention_context(
                attention, positions_S, self.dtype, kernel=kernel, document_ids_BS=document_ids_BS, past=past
            )
            for attention in {layer.attention: None for layer in self.layer_configs}
        }

    def _tied_weight(self) -> Tensor | None:
        return self.embedding.weight if self._tied_here() else None

    def _tied_here(self) -> bool:
        """Return whether this part holds both the table and the head that shares it."""
        return self.config.tied_head and self.part.first

    def new_caches(self) -> list[KeyValueCache]:
        """Return empty key/value caches, one a layer."""
        return [KeyValueCache() for _ in self.blocks]
