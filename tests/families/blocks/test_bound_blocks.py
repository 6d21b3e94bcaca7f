"""What follows from a network of blocks: sizes, floating-point operations, splits, initial values and parts."""

from __future__ import annotations

from typing import Literal

import pytest
import torch
from torch import Tensor, nn

from phalanx.config.families import FAMILIES, Family, sizes_of
from phalanx.config.model import BlockModel
from phalanx.data.sources import TensorSpec
from phalanx.families.blocks.bound import BoundBlocks, part_flops
from phalanx.families.blocks.config import BlockRun
from phalanx.families.blocks.network import BlockNetwork
from phalanx.families.registry import bind, bound_class
from phalanx.nn.layers import Linear
from phalanx.nn.splits import ModelChunk, Split, Splits
from phalanx.planner.trace.traced_model import TracedModel

LENGTH, WIDTH, HIDDEN = 6, 8, 24


class PlainModel(BlockModel):
    family: Literal["plain"] = "plain"


class PlainRun(BlockRun):
    model: PlainModel


class Embedding(Linear):
    def forward(self, x_BS1: Tensor, positions_S: Tensor) -> Tensor:
        return self.product(x_BS1, self.bias)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = Linear(WIDTH, HIDDEN, bias=True)
        self.down = Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = x + self.down(torch.tanh(self.up(x)))
        return hidden


class PlainNetwork(BlockNetwork):
    @classmethod
    def make_embedding(cls, config: BlockModel) -> nn.Module:
        return Embedding(1, config.d_model, bias=False)

    @classmethod
    def make_block(cls, config: BlockModel, number: int) -> nn.Module:
        return Block()

    @classmethod
    def make_head(cls, config: BlockModel) -> nn.Module:
        return Linear(config.d_model, 3, bias=True)

    @classmethod
    def specs(cls, config: BlockModel) -> tuple[TensorSpec, TensorSpec]:
        return TensorSpec((1,)), TensorSpec((3,))

    @classmethod
    def splits(cls, config: BlockModel) -> Splits:
        return [("blocks.*.up", Split("column", 3)), ("blocks.*.down", Split("row", 3))]


class BoundPlain(BoundBlocks):
    run: PlainRun
    network = PlainNetwork


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> PlainRun:
    monkeypatch.setitem(FAMILIES._items, "plain", Family("plain", PlainRun, bound=BoundPlain))
    return PlainRun.model_validate(
        {
            "model": {"n_layers": 5, "d_model": WIDTH},
            "data": {"source": "none", "sequence_length": LENGTH},
            "layout": {"global_batch": 4},
            "optimizer": {"lr": 0.1},
            "training": {"steps": 1},
        }
    )


def test_sizes_and_operations_are_those_of_the_modules(run: PlainRun) -> None:
    block, head = WIDTH * HIDDEN + HIDDEN + HIDDEN * WIDTH, WIDTH * 3 + 3
    assert bind(run).parameter_count() == sizes_of(run.model).parameter_count(run.model) == WIDTH + 5 * block + head
    # The embedding is of the kind `embedding`, biases of another.
    assert sizes_of(run.model).matmul_parameters(run.model) == 5 * 2 * WIDTH * HIDDEN + WIDTH * 3
    # Forward, gradients of inputs and of weights: two operations a parameter and position each.
    middle, last = 6 * LENGTH * 2 * WIDTH * HIDDEN, 6 * LENGTH * WIDTH * 3
    first = 4 * LENGTH * WIDTH
    assert part_flops(run.model, LENGTH) == (first, middle, last)
    assert bind(run).flops_per_sample() == first + 5 * middle + last
    assert bind(run).block_costs() == pytest.approx((first / middle, last / middle))


def test_what_tensor_parallelism_must_divide(run: PlainRun) -> None:
    model = bind(run)
    assert {(each.count, each.together) for each in model.split_counts()} == {(HIDDEN // 3, 3)}
    assert "tp" in model.axes and "cp" not in model.axes and not model.streams_weights


def test_parts_hold_their_blocks_under_the_names_of_the_whole(run: PlainRun) -> None:
    kind = bound_class("plain", BoundBlocks).network
    whole = dict(kind(run.model).named_parameters())
    parts = [ModelChunk(range(2), last=False), ModelChunk(range(2, 5), first=False)]
    found = [name for part in parts for name, _ in kind(run.model, part=part).named_parameters()]
    assert sorted(found) == sorted(whole)


def test_samples_to_verify_with_lack_some_targets(run: PlainRun) -> None:
    model = bind(run, BoundBlocks)
    batch = model.samples(2, 1, 3, 4)
    assert batch.sample_indices.tolist() == [5, 6, 7]
    missing = batch.targets.isnan()
    assert 0 < missing.sum() < missing.numel() and not batch.samples.isnan().any()
    assert int(batch.target_counts()) == int((~missing).sum())
    assert torch.equal(batch.samples[1:2], model.samples(2, 2, 1, 4).samples)


def test_a_family_of_blocks_can_be_planned_for(run: PlainRun) -> None:
    assert isinstance(bind(run), TracedModel)
    assert bind(run, TracedModel).sample_bytes() == 4 * LENGTH * (1 + 3)
