"""Mistakes with mixtures of experts: each must make verification fail in its own module, in bfloat16 too.

In float32 and below layouts replay the choices of one rank, so that a near-tie cannot hide what else is wrong.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
from torch import Tensor

from phalanx.kernels.routed_rows import CombineRows
from phalanx.layout.apply import ParallelModel
from phalanx.layout.data_parallel.gradients import sum_gradients
from phalanx.layout.execute import Executor
from phalanx.layout.expert_parallel.token_exchange import TokenExchange
from phalanx.nn.experts import Router
from planted_mistakes import Mistake, Verdicts, found_where_it_is, verify_mistakes


def sum_experts_gradients_like_all_others() -> Any:
    right = Executor._sum_gradients

    def wrong(self: Executor) -> None:
        right(self)
        parameters = self.applied.parameters
        sum_gradients(self.mesh.shards, [parameters[name] for name in self.applied.experts])

    return patch.object(Executor, "_sum_gradients", wrong)


def leave_out_the_weights_in_backward() -> Any:
    right = CombineRows.backward

    def wrong(ctx: Any, grad_TD: Tensor) -> tuple[Tensor, None, Tensor]:
        rows_RD, position_TK, _ = ctx.saved_tensors
        grad_rows = grad_TD[position_TK.flatten().long().argsort() // position_TK.shape[1]].to(rows_RD)
        return grad_rows, None, right(ctx, grad_TD)[2]

    return patch.object(CombineRows, "backward", staticmethod(wrong))


def drop_the_last_row() -> Any:
    right = TokenExchange.finish

    def wrong(self: TokenExchange, *arguments: Any) -> list[Tensor]:
        *before, rows_RD = right(self, *arguments)
        last_RD: Tensor = rows_RD.clone()
        last_RD[-1] = 0.0
        return [*before, last_RD]

    return patch.object(TokenExchange, "finish", wrong)


def move_biases_by_local_counts() -> Any:
    return patch.object(ParallelModel, "_sum_over_copies", lambda self, x: x)


def scale_the_balance_loss_by_ranks() -> Any:
    right = Router._side_losses

    def wrong(self: Router, *arguments: Any) -> tuple[Tensor | None, Tensor | None]:
        balance, z = right(self, *arguments)
        return None if balance is None else 2.0 * balance, z

    return patch.object(Router, "_side_losses", wrong)


def choose_by_other_scores() -> Any:
    right = Router.rank_scores
    return patch.object(Router, "rank_scores", lambda self, scores_TE: right(self, scores_TE).flip(-1))


_DOUBLE = {
    "gradient over the wrong ranks": Mistake(
        sum_experts_gradients_like_all_others, "mixtral", "dp_shard=2 ep=2", "gradient", "blocks.3.mlp.experts.down"
    ),
    "no weights in backward": Mistake(
        leave_out_the_weights_in_backward, "mixtral", "dp_shard=2 ep=2", "gradient", "blocks.3.mlp.experts.down"
    ),
    "token dropped": Mistake(drop_the_last_row, "mixtral", "dp_shard=2 ep=2", "activations", "blocks.0.mlp"),
    "balance loss once a rank": Mistake(
        scale_the_balance_loss_by_ranks, "mixtral", "dp_shard=2 ep=2", "gradient", "blocks.3.mlp.router.weight"
    ),
    "choice by other scores": Mistake(
        choose_by_other_scores, "mixtral", "dp_shard=2 ep=2", "choices", "blocks.0.mlp.router"
    ),
    "biases by local counts": Mistake(
        move_biases_by_local_counts, "deepseek", "dp_shard=2 ep=2", "state", "blocks.1.mlp.router.bias", steps=2
    ),
}
MISTAKES = _DOUBLE | {f"{name}, bf16": replace(mistake, precision="bf16") for name, mistake in _DOUBLE.items()}


@pytest.fixture(scope="module")
def verdicts() -> dict[str, Verdicts]:
    return verify_mistakes(MISTAKES)


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_found_where_it_is(name: str, verdicts: dict[str, Verdicts]) -> None:
    found_where_it_is(MISTAKES[name], verdicts[name])
