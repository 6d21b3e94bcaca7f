"""Traps of PyTorch that layouts keep clear of: each with a test that would see us fall in.

What PyTorch itself does there is asserted too where that takes nothing extra: when such a test fails, the rule that keeps
clear of the trap may go.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, empty

from distributed_ranks import run_ranks
from layout_runs import Fields, refusal, run_with
from phalanx.families.language.data.token_batches import TokenBatch
from phalanx.families.registry import bind
from phalanx.layout.execute import Executor
from phalanx.layout.mesh import ONE_RANK, Groups
from phalanx.layout.spec import ResolvedLayout
from phalanx.training.gradient_noise import GradientNoise
from phalanx.training.step import build_step
from whole_model import GPT, Box, backward, gradients_of, joined, laid_out, samples_of, values_of, whole_run

LAYOUTS: dict[str, tuple[Fields, ResolvedLayout]] = {
    "tp and fsdp": ({}, ResolvedLayout(8, tp=2, dp_shard=2, reshard_after_forward=True)),
    "tp and fsdp, biases and a tied head": (GPT, ResolvedLayout(8, tp=2, dp_shard=2)),
    "tp and stages that share a table": (GPT, ResolvedLayout(8, tp=2, pp=2)),
    "replicas and shards": ({}, ResolvedLayout(8, dp_replicate=2, dp_shard=2, zero=1)),
    "replicas of positions": ({}, ResolvedLayout(8, dp_replicate=2, cp=2, zero=0)),
    "tp over an uneven vocabulary": ({}, ResolvedLayout(8, tp=4)),
}

SPLIT_BACKWARD = {
    reshard: ResolvedLayout(
        8,
        pp=2,
        dp_shard=2,
        schedule="interleaved_zero_bubble",
        stages_per_rank=2,
        reshard_after_forward=reshard,
    )
    for reshard in (False, True)
}


def everything() -> dict[str, Any]:
    """On this rank: what each test looks at."""
    made: Groups = {}
    return {
        "norms": {name: norm_of(*case, made) for name, case in LAYOUTS.items()},
        "halves": {name: halves_of(*case, made) for name, case in LAYOUTS.items()},
        "split backward": {reshard: split_backward(layout, made) for reshard, layout in SPLIT_BACKWARD.items()},
        "initial": initial_values(made),
        "random": random_by_torch(),
        "overflow": [overflow_on(rank, made) for rank in (None, 1, 3)],
    }


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    """What each of 4 ranks found."""
    return run_ranks(everything, 4)


# --- clipping over mixed meshes: some parameters are split over tp, some are not, all are sharded -----------------------


def norm_of(changes: Fields, layout: ResolvedLayout, made: Groups) -> float:
    run = whole_run(changes)
    applied = laid_out(run, layout, made)
    backward(run, applied)
    return float(applied.gradient_norm())


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_gradient_norm_is_that_of_one_rank(name: str, found: list[dict[str, Any]]) -> None:
    run = whole_run(LAYOUTS[name][0])
    applied = laid_out(run, ResolvedLayout(8))
    backward(run, applied)
    expected = math.sqrt(sum(float(p.grad.square().sum()) for p in applied.parameters.values() if p.grad is not None))
    norms = [rank["norms"][name] for rank in found]
    assert len(set(norms)) == 1
    assert norms[0] == pytest.approx(expected, rel=1e-10)


# --- a split backward pass and parameters that are freed after forward ------------------------------------------------


def split_backward(layout: ResolvedLayout, made: Groups) -> dict[str, Box]:
    run = whole_run({})
    applied = laid_out(run, layout, made)
    backward(run, applied)
    return gradients_of(applied)


def errors(found: list[dict[str, Any]], reshard: bool) -> dict[str, float]:
    """Relative error of every gradient; infinite for one that is missing."""
    run = whole_run({})
    applied = laid_out(run, ResolvedLayout(8))
    backward(run, applied)
    gradients = joined([rank["split backward"][reshard] for rank in found])
    result = {}
    for name, parameter in applied.parameters.items():
        assert parameter.grad is not None
        difference = gradients[name] - parameter.grad if name in gradients else torch.full((), torch.inf)
        result[name] = float(difference.nan_to_num(torch.inf).norm() / parameter.grad.norm())
    return result


def test_a_split_backward_pass_is_exact_where_parameters_stay(found: list[dict[str, Any]]) -> None:
    assert max(errors(found, reshard=False).values()) < 1e-9


def test_resharding_under_a_split_backward_pass_is_refused_since_it_is_wrong(found: list[dict[str, Any]]) -> None:
    run = run_with(pp=2, schedule="interleaved_zero_bubble", reshard_after_forward=True)
    assert "gives wrong gradients" in refusal(run, 4)[0]
    assert max(errors(found, reshard=True).values()) > 1e-3


# --- halves of a step, between which gradients stand as sums over ranks --------------------------------------------------


def halves_of(changes: Fields, layout: ResolvedLayout, made: Groups) -> tuple[float, float, list[int]]:
    """Norms of the mean gradient of the first half of this rank's samples, and of all; the numbers of the first half."""
    run = whole_run(changes)
    applied = laid_out(run, layout, made)
    noise, batch = GradientNoise(applied, 1), samples_of(run, layout, applied.mesh)
    _, norm = noise.run_halves(1, batch, torch.tensor(1.0 / (8 * run.data.sequence_length)))
    first = batch.sample_indices[: len(batch.sample_indices) // 2]
    return float(norm), float(applied.gradient_norm()), first.tolist()


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_norm_half_way_through_a_step_is_that_of_its_samples(name: str, found: list[dict[str, Any]]) -> None:
    changes, _ = LAYOUTS[name]
    run, layout = whole_run(changes), ResolvedLayout(8)
    half, whole, _ = found[0]["halves"][name]
    assert {rank["halves"][name][:2] for rank in found} == {(half, whole)}
    assert whole == pytest.approx(found[0]["norms"][name], rel=1e-9)
    numbers = sorted({number for rank in found for number in rank["halves"][name][2]})
    assert len(numbers) == 4
    batch = samples_of(run, layout, ONE_RANK)
    chosen = TokenBatch(batch.tokens[numbers], batch.targets[numbers], None, batch.sample_indices[numbers])
    applied = laid_out(run, replace(layout, global_batch=4))
    Executor(applied).forward_backward(1, chosen, 1.0 / (4 * run.data.sequence_length))
    assert half == pytest.approx(float(applied.gradient_norm()), rel=1e-9)


# --- random initial values of shards ------------------------------------------------------------------------------------


def initial_values(made: Groups) -> dict[str, Box]:
    applied = laid_out(whole_run({}), ResolvedLayout(8, tp=2, dp_shard=2), made)
    return values_of(applied.parameters, applied.splits)


def random_by_torch() -> Tensor:
    torch.manual_seed(0)
    tensor = empty((8, 16), device_mesh=init_device_mesh("cpu", (4,)), placements=[Shard(0)])
    return nn.init.normal_(tensor).to_local()


def test_no_two_shards_start_alike_and_all_start_as_on_one_rank(found: list[dict[str, Any]]) -> None:
    whole = joined([rank["initial"] for rank in found])
    for name, parameter in laid_out(whole_run({}), ResolvedLayout(8)).parameters.items():
        assert torch.equal(whole[name], parameter.detach()), name
    for name in ("blocks.0.attention.qkv.weight", "blocks.3.mlp.gate_up.weight"):
        shards = [rank["initial"][name][2] for rank in found]
        assert all(not torch.equal(shards[a], shards[b]) for a in range(4) for b in range(a))


def test_pytorch_starts_all_shards_alike(found: list[dict[str, Any]]) -> None:
    assert all(torch.equal(rank["random"], found[0]["random"]) for rank in found)


# --- an overflow that one rank alone sees -----------------------------------------------------------------------------


def overflow_on(rank: int | None, made: Groups) -> tuple[bool, float]:
    """Whether this rank updated its shards, and the loss scale afterwards, where `rank` alone has an infinite gradient."""
    run = run_with({}, precision="fp16", global_batch=8)
    applied = laid_out(run, ResolvedLayout(8, dp_shard=4), made)
    step = build_step(bind(run), applied, torch.device("cpu"))
    step.scaler = GradScaler("cpu", init_scale=1024.0)
    before = values_of(applied.parameters, applied.splits)
    for parameter in applied.parameters.values():
        parameter.grad = torch.ones_like(parameter)
    if dist.get_rank() == rank:
        gradient = next(iter(applied.parameters.values())).grad
        assert isinstance(gradient, DTensor) and gradient.to_local().numel()
        gradient.to_local().fill_(torch.inf)
    step.update_parameters(torch.ones(()))
    after = values_of(applied.parameters, applied.splits)
    changed = [not torch.equal(box[2], before[name][2]) for name, box in after.items() if box[2].numel()]
    assert all(changed) or not any(changed)
    return any(changed), step.scaler.get_scale()


def test_all_ranks_skip_the_update_that_overflows_on_one(found: list[dict[str, Any]]) -> None:
    for rank in found:
        assert rank["overflow"] == [(True, 1024.0), (False, 512.0), (False, 512.0)]
