"""`parallelize`: a plain module trains over four ranks as it does on one."""

from __future__ import annotations

import re
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import phalanx_processes
from distributed_ranks import run_ranks
from phalanx.config.schema import Layout
from phalanx.errors import PhalanxError
from phalanx.layout.parallelize import ParallelModule, parallelize
from phalanx.nn.parameters import InitRule, InitRules
from phalanx.nn.splits import Split
from whole_model import CPU, Box, box, joined

VOCABULARY, WIDTH, BATCH, LENGTH = 24, 16, 8, 6
SPLITS: dict[str, Any] = {
    "table": "vocabulary",
    "blocks.*.up": Split("column", 4),
    "blocks.*.down": "row",
    "head": "vocabulary",
}
RULES: InitRules = [("*norm.weight", InitRule.constant(1.0)), ("*", InitRule.normal(0.3))]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor, *, scale: float) -> Tensor:
        result: Tensor = x + scale * self.down(torch.tanh(self.up(self.norm(x))))
        return result


class Network(nn.Module):
    positions: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.register_buffer("positions", torch.linspace(-1.0, 1.0, LENGTH)[:, None])

    def forward(self, tokens_BS: Tensor) -> Tensor:
        x = self.table(tokens_BS) + self.positions
        for block in self.blocks:
            x = block(x, scale=0.5)
        logits: Tensor = self.head(x)
        return logits


def filled_network() -> Network:
    torch.manual_seed(5)
    return Network()


def train(parallel: ParallelModule, *, microbatches: int = 1, steps: int = 3) -> tuple[list[float], dict[str, Box]]:
    """Gradient norms before clipping and mean losses of some steps, and this rank's parts of the parameters behind them."""
    module, losses = parallel.module, []
    optimizer = torch.optim.SGD(module.parameters(), lr=0.3)
    for step in range(steps):
        tokens = torch.randint(VOCABULARY, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(step))
        total = torch.zeros((), dtype=torch.float64)
        parts = tokens.chunk(parallel.data_ranks)[parallel.data_rank].chunk(microbatches)
        for number, part in enumerate(parts, 1):
            parallel.prepare_microbatch(last=number == len(parts))
            logits = module(part[:, :-1]).flatten(0, 1)
            loss = nn.functional.cross_entropy(logits, part[:, 1:].flatten(), reduction="sum") / (BATCH * LENGTH)
            loss.backward()
            total += parallel.sum_over_data_ranks(loss).double()
        norm = parallel.clip_gradients(0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses += [float(norm), float(total)]
    return losses, {name: box(place) for name, place in parallel.placed_parameters().items()}


LAYOUTS: dict[str, tuple[dict[str, Any], int]] = {
    "sharded": ({"tp": 2}, 1),
    "recomputed, several micro-batches, blocks gathered in pairs": (
        {"tp": 2, "recompute": "full", "gather_blocks": 2, "gathers_ahead": 2},
        2,
    ),
    "optimizer state alone": ({"tp": 2, "zero": 1}, 2),
    "replicas": ({"dp_replicate": 2, "dp_shard": 2, "zero": 3, "recompute": "selective"}, 2),
    "copy engines": ({"tp": 1, "peer_copies": True}, 2),
    "tensor parallelism alone": ({"tp": 4, "zero": 0}, 1),
}


def layout_of(words: dict[str, Any], precision: str = "fp64") -> Layout:
    return Layout(global_batch=BATCH, precision=precision, **words)  # type: ignore[arg-type]


def train_in_every_layout() -> dict[str, tuple[list[float], dict[str, Box]]]:
    found = {}
    for name, (words, microbatches) in LAYOUTS.items():
        module = filled_network()
        parallel = parallelize(module, SPLITS, list(module.blocks), layout_of(words), device=CPU)
        found[name] = train(parallel, microbatches=microbatches)
        assert parallel.data_ranks * parallel.mesh.tp.size == 4
        assert isinstance(module.blocks[0].up.weight, DTensor) == (parallel.data_ranks > 1)
    return found


def start_on_meta(words: dict[str, Any]) -> dict[str, Box]:
    """Parameters of a network that is built without memory, with buffers of its own."""
    with torch.device("meta"):
        module = Network()
    module.register_buffer("positions", filled_network().positions)
    parallel = parallelize(module, SPLITS, list(module.blocks), layout_of(words), initial=RULES, seed=9, device=CPU)
    return train(parallel)[1]


def train_in_bfloat16() -> list[float]:
    module = filled_network()
    parallel = parallelize(module, SPLITS, list(module.blocks), layout_of({"tp": 2}, "bf16"), device=CPU)
    return train(parallel)[0]


@pytest.fixture(scope="module")
def trained() -> list[dict[str, tuple[list[float], dict[str, Box]]]]:
    return run_ranks(train_in_every_layout, 4, timeout_s=300.0)


@pytest.fixture(scope="module")
def alone() -> tuple[list[float], dict[str, Box]]:
    module = filled_network()
    return train(parallelize(module, SPLITS, list(module.blocks), layout_of({}), device=CPU))


@pytest.mark.parametrize("name", LAYOUTS)
def test_four_ranks_train_as_one(
    name: str, trained: list[dict[str, tuple[list[float], dict[str, Box]]]], alone: tuple[list[float], dict[str, Box]]
) -> None:
    wanted = joined([alone[1]])
    for rank in trained:
        assert rank[name][0] == pytest.approx(alone[0], rel=1e-9)
    found = joined([rank[name][1] for rank in trained])
    assert found.keys() == wanted.keys()
    for parameter, value in found.items():
        torch.testing.assert_close(value, wanted[parameter], rtol=1e-9, atol=1e-12)


def test_one_rank_trains_as_plain_pytorch(alone: tuple[list[float], dict[str, Box]]) -> None:
    module = filled_network().double()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.3)
    for step in range(3):
        tokens = torch.randint(VOCABULARY, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(step))
        nn.functional.cross_entropy(module(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).backward()
        # PyTorch adds 1e-6 to the norm that it divides by.
        torch.nn.utils.clip_grads_with_norm_(
            module.parameters(), 0.5, torch.nn.utils.get_total_norm([p.grad for p in module.parameters()]) - 1e-6
        )
        optimizer.step()
        optimizer.zero_grad()
    for name, parameter in module.named_parameters():
        torch.testing.assert_close(alone[1][name][2], parameter.detach(), rtol=1e-9, atol=1e-12)


def test_a_module_without_memory_starts_equal_in_every_layout() -> None:
    found = joined(run_ranks(start_on_meta, 4, {"tp": 2}, timeout_s=300.0))
    for name, value in joined([start_on_meta({})]).items():
        torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-12)


def test_bfloat16_stays_near_float64(alone: tuple[list[float], dict[str, Box]]) -> None:
    for found in run_ranks(train_in_bfloat16, 4, timeout_s=300.0):
        assert found == pytest.approx(alone[0], rel=0.02)
        assert found != alone[0]


def tied_network() -> Network:
    network = filled_network()
    network.head.weight = network.table.weight
    return network


WRONG: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "a pipeline": ({"pp": 2}, {}, "layout.pp=2 is not for a loop of your own: a pipeline must know which layers"),
    "context parallelism": ({"cp": 2}, {}, "layout.cp=2 is not for a loop of your own: attention must know"),
    "streamed weights": ({"gather": "stream"}, {}, "layout.gather=stream is not for a loop"),
    "more ranks than there are": ({"tp": 2}, {}, "dp_replicate=1 * dp_shard=1 * tp=2 is 2 ranks, but there are 1"),
    "low precision on one rank": ({"precision": "bf16"}, {}, "take precision=fp32 with torch.autocast"),
    "no such module": ({}, {"splits": {"nowhere.*": "row"}}, "splits: no module is named nowhere.*"),
    "a norm": ({}, {"splits": {"*.norm": "column"}}, "blocks.0.norm is a LayerNorm, which cannot be split as 'column'"),
    "a table by columns": ({}, {"splits": {"table": "row"}}, "table is a Embedding, which cannot be split as 'row'"),
    "features": (
        {},
        {"splits": {"*.up": Split("column", 5)}},
        "has 64 features in units of 5, which layout.tp=1 does not",
    ),
    "a tied head": ({}, {"module": tied_network}, "table.weight and head.weight are one parameter"),
    "no values": ({}, {"module": lambda: Network().to("meta")}, "table.weight, blocks.0.norm.weight"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_is_refused(name: str) -> None:
    words, changes, said = WRONG[name]
    module = changes.get("module", filled_network)()
    layout = layout_of({k: v for k, v in words.items() if k != "precision"}, words.get("precision", "fp64"))
    with pytest.raises(PhalanxError, match=re.escape(said)):
        parallelize(module, changes.get("splits", SPLITS), list(module.blocks), layout, device=CPU)


def test_the_example_trains_on_four_ranks_as_on_one() -> None:
    """The notebook `own_model` starts it by torchrun itself, on two."""
    words = ["--precision", "fp64", "--steps", "2"]
    said = []
    for ranks, tp in ((1, "1"), (4, "2")):
        started = phalanx_processes.start([*words, "--tp", tp], ranks, run_example)
        code, errors = started.finish()
        assert code == 0, errors[-2000:]
        printed = Path(started.folder.name, "out-0").read_text()
        said.append([float(number) for number in re.findall(r"\d+\.\d+", printed)])
    assert len(said[0]) == 4 and said[1] == pytest.approx(said[0], rel=1e-9)


def run_example(words: Sequence[str]) -> None:
    script = str(Path(__file__).parents[2] / "examples" / "own_loop.py")
    sys.argv = [script, *words]
    runpy.run_path(script, run_name="__main__")
