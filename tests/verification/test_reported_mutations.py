"""Kinds of silent defects that were reported of Megatron-LM, planted in bfloat16: each is found, and its module is named.

The kinds are those of TTrace (arXiv:2506.09280), whose defects sit in tensor, sequence, context and pipeline parallelism, in
sharded optimizers, in activation recompute and in casts; here each sits where our own code does the same.
"""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx.families.language.decoder import Block
from phalanx.layout import apply, execute
from phalanx.layout.context_parallel.ring_attention import Ring
from phalanx.layout.data_parallel.gradients import local_gradient
from phalanx.layout.execute import Executor
from phalanx.layout.mesh import Axis
from phalanx.layout.place import place_of
from phalanx.layout.tensor_parallel import split_layers
from phalanx.layout.tensor_parallel.autograd_collectives import gather_values
from phalanx.layout.tensor_parallel.split_layers import ColumnLinear, GatedRowLinear, SplitEmbedding
from phalanx.nn.splits import ModelChunk
from phalanx.torch_compat import common as compat
from phalanx.training.step import TrainStep
from planted_mistakes import Mistake, Verdicts, found_where_it_is, verify_mistakes


def look_up_rows_of_other_ranks() -> Any:
    """The mask of an embedding split by vocabulary lets tokens below this rank's rows through."""

    def wrong(self: SplitEmbedding, tokens_BS: Tensor) -> Tensor:
        local_BS = tokens_BS - self.first_row
        mine_BS = local_BS < self.weight.shape[0]
        x_BSD = F.embedding(torch.where(mine_BS, local_BS.clamp(min=0), 0), self.weight).to(self.dtype)
        return split_layers.scatter_sum(torch.where(mine_BS[..., None], x_BSD, 0.0), self.tp, 1)

    return patch.object(SplitEmbedding, "lookup", wrong)


def recompute_from_another_input() -> Any:
    """A block that is computed again gets its input shifted by a position."""
    right = Block.forward

    def wrong(self: Block, x_BSD: Tensor, *rest: Any, **named: Any) -> Tensor:
        return right(self, x_BSD.roll(1, 1) if compat.in_backward_pass() else x_BSD, *rest, **named)

    return patch.object(Block, "forward", wrong)


def scale_the_loss(axis: str, *, up: bool) -> Any:
    """Every rank of an axis scales its loss by the number of its ranks."""
    right = Executor.forward_backward

    def wrong(self: Executor, step: int, batch: Any, scale: Any) -> Tensor:
        size = getattr(self.mesh, axis).size
        return right(self, step, batch, scale * size if up else scale / size)

    return patch.object(Executor, "forward_backward", wrong)


def leave_ends_untied() -> Any:
    """The embedding and the head on different stages each keep their own gradient of the table they share."""
    right = execute.sum_gradients

    def wrong(axis: Axis, parameters: list[Any]) -> None:
        if axis.name != "tie":
            right(axis, parameters)

    return patch.object(execute, "sum_gradients", wrong)


def leave_unsummed(kind: str) -> Any:
    """Gradients of unsplit parameters of this kind are not summed over tensor-parallel ranks."""
    right = Executor._sum_gradients

    def wrong(self: Executor) -> None:
        own = {name: local_gradient(p) for name, p in self.applied.parameters.items() if kind in name}
        before = {name: grad.clone() for name, grad in own.items() if grad is not None}
        right(self)
        for name, grad in before.items():
            own[name].copy_(grad)  # type: ignore[union-attr]

    return patch.object(Executor, "_sum_gradients", wrong)


def sum_over_data_ranks() -> Any:
    """Row matrices scatter their sums over the ranks of `dp_shard`, as many as those of `tp`."""
    make_context, split_module = apply.make_context, split_layers._split_module
    meshes: list[Any] = []

    def remember(layout: Any, mesh: Any, *rest: Any) -> Any:
        meshes.append(mesh)
        return make_context(layout, mesh, *rest)

    def wrong(module: Any, split: Any, tp: Axis) -> Any:
        kept = split_module(module, split, tp)
        if split.kind == "row":
            module.tp = meshes[-1].dp_shard
        return kept

    stack = ExitStack()
    stack.enter_context(patch.object(apply, "make_context", remember))
    stack.enter_context(patch.object(split_layers, "_split_module", wrong))
    return stack


def cast_to_eight_bits() -> Any:
    """The input of the MLP's row matrix goes through a narrower format."""
    right = GatedRowLinear.product

    def wrong(self: GatedRowLinear, x: Tensor, bias: Tensor | None) -> Tensor:
        return right(self, x + (x.detach().to(torch.float8_e5m2).to(x.dtype) - x.detach()), bias)

    return patch.object(GatedRowLinear, "product", wrong)


def forget_an_update_on_one_rank() -> Any:
    """One rank keeps the old values of its shard of one parameter."""
    right = TrainStep.update_parameters

    def wrong(self: TrainStep, loss: Tensor) -> Tensor:
        shard = place_of(self.applied.parameters["blocks.1.mlp.down.weight"]).local
        before = shard.detach().clone()
        result = right(self, loss)
        if self.applied.mesh.dp_shard.rank == 1:
            shard.detach().copy_(before)
        return result

    return patch.object(TrainStep, "update_parameters", wrong)


def leave_out_a_block() -> Any:
    """The second stage begins one block too late."""
    right = apply.model_chunks

    def wrong(*arguments: Any) -> dict[int, ModelChunk]:
        chunks = right(*arguments)
        return {
            stage: ModelChunk(range(chunk.blocks.start + stage, chunk.blocks.stop), chunk.first, chunk.last)
            for stage, chunk in chunks.items()
        }

    return patch.object(apply, "model_chunks", wrong)


class OwnGradientAlone(torch.autograd.Function):
    """A gather whose backward pass does not sum over ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, tp: Axis) -> Tensor:
        ctx.tp = tp
        return gather_values(x, tp).movedim(0, 1).flatten(1, 2)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None]:
        return grads[0].chunk(ctx.tp.size, 1)[ctx.tp.rank].contiguous(), None


def leave_out_the_sum_of_input_gradients() -> Any:
    def wrong(self: ColumnLinear, x_BsD: Tensor) -> Tensor:
        gathered: Tensor = OwnGradientAlone.apply(x_BsD, self.tp)
        return gathered

    return patch.object(ColumnLinear, "gather_input", wrong)


def keep_gradients_of_other_keys() -> Any:
    """Gradients of keys and values do not travel back to the rank whose keys they are."""
    return patch.object(Ring, "pass_on", lambda self, x: x)


def reported(plant: Any, layout: str, what: str, where: str, model: str = "llama") -> Mistake:
    return Mistake(plant, model, layout, what, where, precision="bf16")


TWO = {
    "embedding mask": reported(look_up_rows_of_other_ranks, "tp=2", "activations", "embedding"),
    "recompute input": reported(recompute_from_another_input, "dp_shard=2 recompute=full", "gradient", "blocks.3."),
    "loss scale over cp": reported(partial(scale_the_loss, "cp", up=True), "cp=2 context=ring", "gradient", "head"),
    "loss scale over dp": reported(partial(scale_the_loss, "dp_shard", up=False), "dp_shard=2", "gradient", "head"),
    "untied ends": reported(leave_ends_untied, "pp=2", "gradient", "embedding", "gpt"),
    "routers out of step": reported(
        partial(leave_unsummed, "router.weight"), "tp=2", "gradient", "blocks.3.mlp", "mixtral"
    ),
    "cast too narrow": reported(cast_to_eight_bits, "tp=2", "activations", "blocks.0.mlp"),
    "shard not updated": reported(forget_an_update_on_one_rank, "dp_shard=2", "update", "blocks.1.mlp"),
    "stage division": reported(leave_out_a_block, "pp=2", "activations", "blocks.2"),
    "input gradients not summed": reported(
        leave_out_the_sum_of_input_gradients, "tp=2", "input gradient", "blocks.3.mlp"
    ),
    "norms out of step": reported(
        partial(leave_unsummed, "attention_norm"), "tp=2", "gradient", "blocks.3.attention_norm"
    ),
    "attention gradients": reported(
        keep_gradients_of_other_keys, "cp=2 context=ring", "gradient", "blocks.3.attention"
    ),
}
FOUR = {
    "wrong group": reported(sum_over_data_ranks, "tp=2 dp_shard=2", "activations", "blocks.0.attention"),
    "norms out of step, tp and cp": reported(
        partial(leave_unsummed, "mlp_norm"), "tp=2 cp=2", "gradient", "blocks.3.mlp_norm"
    ),
}


@pytest.fixture(scope="module")
def verdicts() -> dict[str, Verdicts]:
    return verify_mistakes(TWO) | verify_mistakes(FOUR, ranks=4)


@pytest.mark.parametrize("name", TWO | FOUR)
def test_a_reported_mistake_is_found_where_it_is(name: str, verdicts: dict[str, Verdicts]) -> None:
    mistake = (TWO | FOUR)[name]
    found_where_it_is(mistake, verdicts[name])
    wrong = verdicts[name][1]
    assert wrong.first is not None and wrong.first.what == mistake.what, wrong.first
    # The module itself, not the block that it is in or one further on.
    assert wrong.module == mistake.where or mistake.where in ("blocks.3.", "blocks.2")
