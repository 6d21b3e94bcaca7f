"""The language family under parallelism: decoders split over `tp` and `cp`, run on token batches."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from phalanx.counter_random import DropoutContext
from phalanx.families.language.config import LanguageRun
from phalanx.families.language.data.token_batches import TokenBatch
from phalanx.families.language.decoder import Decoder
from phalanx.layout.context_parallel.kernel_choice import AttentionChoice, AttentionShape, choose_attention
from phalanx.layout.context_parallel.split_context import SequenceShare, split_context
from phalanx.layout.expert_parallel.token_exchange import split_experts
from phalanx.layout.layout_model import BuildContext, LayoutModel, Stage, TrainingPass
from phalanx.layout.place import TensorSplits
from phalanx.layout.spec import ResolvedLayout
from phalanx.nn.experts import OTHER_FIGURES, ExpertNetworks, MixtureOfExperts, Router, RoutingPass
from phalanx.nn.splits import ModelChunk
from phalanx.torch_compat import common as compat

EACH_TARGET = "each_target"
"""Name of an input that asks a stage for the scores of each target; its value does not matter."""


class LanguageStage(Stage):
    """Token ids in, hidden activations between stages, the summed loss of the next tokens out."""

    loss_is_whole = True

    def __init__(self, part: Decoder, index: int, share: SequenceShare, seed: int, length: int) -> None:
        super().__init__(part, index, share, seed, length)
        self.shares_table = part.config.tied_head

    def forward(
        self, x: Tensor, sample_indices_B: Tensor, *, training: TrainingPass | None = None, **inputs: Tensor
    ) -> Tensor:
        """See `Stage`. x: token ids [B, S] in the first stage.

        inputs: targets_BS and, at will, document_ids_BS. With one named `EACH_TARGET` the last stage returns the scores
        of each target instead of the loss, float64 [2, B, S] of whole samples (`nn.cross_entropy.token_scores`).
        """
        targets_BS = inputs["targets_BS"]
        positions = self.share.positions(targets_BS.shape[1], x.device)
        # Ranks of `cp` read whole samples, so that the order of data is that of any layout, and take their positions.
        whole = self.share.cp.size == 1
        if self.part.part.first and not whole:
            x = x[:, positions.tokens_S]
        dropout = None
        if self.part.config.dropout and training is not None:
            width = self.part.config.d_model
            dropout = DropoutContext.of_step(self.seed, training.step, sample_indices_B, positions.rows_S, width)
        routing = None
        if self.part.config.experts is not None and training is not None:
            routing = RoutingPass(training.scale, self.share.sum_over_ranks, sample_indices_B, positions.rows_S)
        hidden: Tensor = self.part.hidden(
            x, positions, document_ids_BS=inputs.get("document_ids_BS"), dropout=dropout, routing=routing
        )
        if not self.part.part.last:
            return hidden
        targets = targets_BS if whole else targets_BS[:, positions.tokens_S]
        if EACH_TARGET in inputs:
            scores: Tensor = self.part.score_targets(hidden, targets)
            if whole:
                return scores
            # Each rank of `cp` has the scores at its own positions.
            joined_2BS = scores.new_zeros((2, *targets_BS.shape))
            joined_2BS[:, :, positions.tokens_S] = scores
            return compat.all_reduce(joined_2BS, self.share.cp.group_name)
        return torch.stack((self.part.loss(hidden, targets).total,))

    def finish_step(self, skip: Tensor, sum_over_ranks: Callable[[Tensor], Tensor]) -> Tensor | None:
        """Move the selection biases of routers by what experts got of the whole global batch; return what all of them did.

        The figures are those of `nn.experts.Router.figures`, float64 [layers of the model, X]; 0 for layers without experts
        and for those of other stages. None for a dense model.
        """
        config = self.part.config
        if config.experts is None:
            return None
        found = {
            number: block.mlp.router
            for number, block in zip(self.part.part.blocks, self.part.blocks, strict=True)
            if isinstance(block.mlp, MixtureOfExperts)
        }
        figures_LX = torch.zeros(
            (config.n_layers, config.experts.count + OTHER_FIGURES), dtype=torch.float64, device=skip.device
        )
        if found:
            # One exchange for the routers of all layers.
            summed = sum_over_ranks(torch.stack([router.figures for router in found.values()]))
            for (number, router), figures_X in zip(found.items(), summed, strict=True):
                router.finish_step(figures_X[: config.experts.count], skip)
                figures_LX[number] = figures_X
        return figures_LX

    def discard_counts(self) -> None:
        """Forget what routers have counted."""
        for module in self.part.modules():
            if isinstance(module, Router):
                module.discard_counts()

    def expert_networks(self) -> list[nn.Module]:
        """Return the experts of every mixture."""
        return [module for module in self.part.modules() if isinstance(module, ExpertNetworks)]

    def compile_loss(self) -> None:
        """Compile the loss of one chunk of logits."""
        options = compat.compile_options(self.part.dtype)
        self.part.head.loss_kernel = torch.compile(self.part.head.loss_kernel, options=options)


class LanguageLayout(LayoutModel):
    """See `layout.layout_model.LayoutModel`."""

    run: LanguageRun

    compiles_blocks = True

    def build(self, building: BuildContext, part: ModelChunk) -> tuple[Decoder, TensorSplits]:
        """Return a chunk of the decoder on meta, split over `tp` and `cp`, and which part of each parameter a rank keeps."""
        run = self.run
        # On meta: a rank never holds more than its shards, which are filled in after splitting and sharding.
        with torch.device("meta"):
            model = Decoder(
                run.model,
                dtype=self.precision.compute_dtype,
                kernel=building.attention.kernel,
                chunk_tokens=loss_chunk_tokens(run, building.device, building.share.tp.size),
                z_loss=run.training.z_loss,
                part=part,
            )
        splits = building.split_parameters(model, self.splits())
        splits |= split_experts(
            model,
            building.ep,
            slices=building.expert_tp,
            chunks=building.ep_chunks,
            stages=building.ep_stages,
        )
        split_context(model, building.share, building.attention.core)
        return model, splits

    def build_stage(self, building: BuildContext, part: ModelChunk, index: int) -> tuple[Stage, TensorSplits]:
        """Return what runs a part of the decoder."""
        decoder, splits = self.build(building, part)
        length = self.run.data.sequence_length
        return LanguageStage(decoder, index, building.share, self.run.training.seed, length), splits

    def example_batch(self, samples: int, device: torch.device) -> TokenBatch:
        """Return tokens, targets and, where attention heeds them, documents; all are 0."""
        run = self.run
        shape = (samples, run.data.sequence_length)
        documents = torch.zeros(shape, dtype=torch.int32, device=device) if run.data.document_mask else None
        tokens, targets = (torch.zeros(shape, dtype=torch.int64, device=device) for _ in range(2))
        return TokenBatch(tokens, targets, documents, torch.arange(samples, device=device))

    def choose_attention(self, layout: ResolvedLayout, device: torch.device) -> AttentionChoice:
        """Return the kernel that the run file names, or the fastest."""
        run = self.run
        dtype = self.precision.compute_dtype
        # Stages with shorter samples are masked too, but few: the kernel is that of the steps after them.
        shape = AttentionShape(layout.microbatch, run.data.sequence_length, dtype, run.data.document_mask)
        return choose_attention(run.training.attention, run.model, shape, device)


def loss_chunk_tokens(run: LanguageRun, device: torch.device, tp: int = 1) -> int:
    """Return the tokens whose logits are held at once; `auto` keeps a rank's logits near 2^29 elements (2^24 on the CPU)."""
    if run.training.loss_chunk_tokens != "auto":
        return run.training.loss_chunk_tokens
    elements = 2**24 if device.type == "cpu" else 2**29
    return max(128, elements * tp // run.model.vocab_size // 128 * 128)
