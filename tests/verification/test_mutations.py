"""Mistakes that have been made in real training code: each must make verification fail, and show where it sits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from phalanx.counter_random import DropoutContext
from phalanx.families.language import layout as language
from phalanx.layout import initial_values
from phalanx.layout.context_parallel import ring_attention, split_context
from phalanx.layout.context_parallel.ring_attention import Part
from phalanx.layout.data_parallel.fully_sharded import FullySharded
from phalanx.layout.execute import Executor
from phalanx.layout.place import TensorSplit
from phalanx.layout.tensor_parallel import autograd_collectives, split_layers
from phalanx.layout.tensor_parallel.split_layers import RowLinear
from planted_mistakes import Mistake, Verdicts, found_where_it_is, verify_mistakes


def double_the_loss_on_the_last_rank() -> Any:
    right = Executor.forward_backward

    def wrong(self: Executor, step: int, batch: Any, scale: Any) -> Tensor:
        last = self.mesh.dp_shard.rank == self.mesh.dp_shard.size - 1
        return right(self, step, batch, scale * 2.0 if last else scale)

    return patch.object(Executor, "forward_backward", wrong)


def average_over_ranks_instead_of_targets() -> Any:
    right = Executor.forward_backward

    def wrong(self: Executor, step: int, batch: Any, scale: Tensor) -> Tensor:
        own = (batch.targets != -100).sum() * self.layout.data_ranks
        return right(self, step, batch, 1.0 / own)

    return patch.object(Executor, "forward_backward", wrong)


def leave_out_the_sum_over_tensor_ranks() -> Any:
    return patch.object(Executor, "_sum_gradients", lambda self: None)


def leave_out_the_reduction_of_data_ranks() -> Any:
    right = FullySharded.prepare_microbatch

    def wrong(self: FullySharded, stage: Any, *, last: bool) -> None:
        right(self, stage, last=last)
        stage.set_requires_all_reduce(False)

    return patch.object(FullySharded, "prepare_microbatch", wrong)


def add_the_bias_once_a_rank() -> Any:
    right = RowLinear.forward

    def wrong(self: RowLinear, x: Tensor) -> Tensor:
        extra = 0.0 if self.bias is None else self.bias.to(x.dtype) * (self.tp.size - 1)
        return right(self, x) + extra

    return patch.object(RowLinear, "forward", wrong)


def repeat_one_dropout_mask() -> Any:
    right = DropoutContext.of_step.__func__  # type: ignore[attr-defined]

    def wrong(cls: Any, seed: int, step: int, samples: Tensor, positions: Tensor, width: int) -> DropoutContext:
        return right(cls, seed, step, samples, torch.arange(len(positions)), width)

    return patch.object(DropoutContext, "of_step", classmethod(wrong))


def give_every_rank_the_first_heads_slopes() -> Any:
    right = split_context.split_context

    def wrong(model: Any, share: Any, *rest: Any) -> None:
        right(model, share, *rest)
        heads = model.config.n_heads // share.tp.size
        model.attention_context = split_context.partial(split_context.attention_context, heads=slice(0, heads))

    return patch.object(language, "split_context", wrong)


def forget_to_rescale_attention() -> Any:
    right = ring_attention.join_parts

    def wrong(total: Part | None, part: Part, queries: slice) -> Part:
        if total is None:
            return right(None, part)
        out, log_z = total.out[:, :, queries], total.log_z[:, :, queries]
        out.add_(part.out).div_(2)
        log_z.copy_(torch.logaddexp(log_z, part.log_z))
        return total

    return patch.object(ring_attention, "join_parts", wrong)


def shift_the_vocabulary_part() -> Any:
    right = split_layers.vocabulary_chunk_loss

    def wrong(tp: Any, start: int, *rest: Any) -> Any:
        return right(tp, start + tp.rank, *rest)

    return patch.object(split_layers, "vocabulary_chunk_loss", wrong)


def gather_in_the_wrong_order() -> Any:
    return patch.object(
        autograd_collectives, "join_parts", lambda parts, dim: parts.flip(0).movedim(0, dim).flatten(dim, dim + 1)
    )


def start_from_other_weights() -> Any:
    right = TensorSplit

    def wrong(tensor_: Tensor, name: str, rule: Any, seed: int, split: Any = None) -> None:
        fill(tensor_, name, rule, seed, right(split.dim, 0, split.whole) if split else None)

    fill = initial_values.fill_initial
    return patch.object(initial_values, "fill_initial", wrong)


_DOUBLE = {
    "one rank's loss doubled": Mistake(double_the_loss_on_the_last_rank, "llama", "dp_shard=2", "gradient", "head"),
    "mean over ranks": Mistake(average_over_ranks_instead_of_targets, "llama", "dp_shard=2", "gradient", "head"),
    "no sum over tp": Mistake(leave_out_the_sum_over_tensor_ranks, "llama", "tp=2", "gradient", "head.norm"),
    "no all-reduce": Mistake(leave_out_the_reduction_of_data_ranks, "llama", "dp_replicate=2", "gradient", "head"),
    "bias once a rank": Mistake(add_the_bias_once_a_rank, "gpt", "tp=2", "activations", "blocks.0"),
    "dropout mask repeated": Mistake(repeat_one_dropout_mask, "llama", "tp=2", "activations", "embedding"),
    "slopes of other heads": Mistake(give_every_rank_the_first_heads_slopes, "mpt", "tp=2", "activations", "blocks.0"),
    "attention not rescaled": Mistake(
        forget_to_rescale_attention, "llama", "cp=2 context=ring", "activations", "blocks.0"
    ),
    "vocabulary shifted": Mistake(shift_the_vocabulary_part, "llama", "tp=2", "loss", ""),
    "gathered out of order": Mistake(gather_in_the_wrong_order, "llama", "tp=2", "activations", "blocks.0"),
    "other weights": Mistake(start_from_other_weights, "llama", "tp=2", "activations", "embedding"),
}
MISTAKES = _DOUBLE | {f"{name}, bf16": replace(mistake, precision="bf16") for name, mistake in _DOUBLE.items()}


@pytest.fixture(scope="module")
def verdicts() -> dict[str, Verdicts]:
    return verify_mistakes(MISTAKES)


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_found_where_it_is(name: str, verdicts: dict[str, Verdicts]) -> None:
    found_where_it_is(MISTAKES[name], verdicts[name])
