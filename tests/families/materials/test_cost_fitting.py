"""Costs fitted while training: all ranks take over the same ones for the same step, a resumed run goes on with them, and
they move structures between ranks without changing what a step gives."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from distributed_ranks import run_ranks
from materials_runs import write_materials_run
from phalanx.config.load import load_run
from phalanx.families.materials.cost_fitting import Balancer, ComputeClock, CostFit, TimedMicrobatch, sum_timings
from phalanx.families.materials.data.balance import CostModel
from phalanx.families.materials.data.graph_shards import open_prepared
from phalanx.families.materials.data.graph_stream import GraphBatchStream, graph_order
from phalanx.families.materials.data.prepare_structures import prepare_graphs
from phalanx.families.materials.inputs import columns_of
from phalanx.families.registry import bind
from phalanx.layout.apply import apply_layout
from phalanx.layout.context_parallel.kernel_choice import AttentionChoice
from phalanx.layout.execute import Executor
from phalanx.layout.layout_model import LayoutModel, TrainingPass
from phalanx.layout.mesh import ONE_RANK, build_mesh
from phalanx.layout.resolve import resolve_layout
from phalanx.training.metrics import RankTimes

CPU = torch.device("cpu")
EVERY = 5
STEPS = 20


@pytest.fixture(scope="module")
def run_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = write_materials_run(tmp_path_factory.mktemp("balancing"))
    prepare_graphs(load_run(path).data, workers=1)
    return path


def stream_of(run: Any, rank: int, ranks: int = 2, parts: int = 1) -> GraphBatchStream:
    sources = open_prepared(run.data, "train")
    order = graph_order(sources, run.data, seed=1, global_batch=8)
    return GraphBatchStream(order, columns_of(run, sources), rank=rank, ranks=ranks, parts=parts, prefetch=2)


@dataclass
class SyntheticClock:
    """Seconds as they would be on a device on which edges are dear, with noise that differs between ranks."""

    stream: GraphBatchStream

    def take(self, step: int) -> list[TimedMicrobatch]:
        batch = self.stream.batch(step)
        atoms, edges, graphs = float(batch.atoms.sum()), float(batch.edges.sum()), float(len(batch.atoms))
        noise = np.random.default_rng((self.stream.rank, step)).uniform(-0.01, 0.01)
        return [TimedMicrobatch((atoms, edges, graphs), (1e-5 * atoms + 4e-5 * edges + 1e-3) * (1.0 + noise))]


def train_by_synthetic_times(
    run_file: Path, rank: int
) -> tuple[list[RankTimes], dict[str, Any], list[TimedMicrobatch]]:
    """What a rank finds in each step, the costs that it ends with, and its times."""
    run = load_run(run_file)
    layout = resolve_layout(bind(run), 2)
    stream, told = stream_of(run, rank), []
    balancer = Balancer(stream, build_mesh(layout, CPU), CPU, every=EVERY, each_waits=False)
    balancer._clock = SyntheticClock(stream_of(run, rank))  # type: ignore[assignment]
    for step in range(1, STEPS + 1):
        stream.next()
        told.append(balancer.after(step)())
    stream.close()
    clock = SyntheticClock(stream_of(run, rank))
    return told, balancer.state(), [timed for step in range(1, STEPS + 1) for timed in clock.take(step)]


def by_rank(run_file: Path) -> tuple[list[RankTimes], dict[str, Any], list[TimedMicrobatch]]:
    return train_by_synthetic_times(run_file, torch.distributed.get_rank())


def test_ranks_agree_on_costs_that_explain_all_of_their_times(run_file: Path) -> None:
    (first, state, mine), (second, other, theirs) = run_ranks(by_rank, 2, run_file, timeout_s=100.0)
    assert first == second and state == other
    for step, told in enumerate(first):
        seconds = [mine[step].seconds, theirs[step].seconds]
        assert told.compute_seconds == pytest.approx(np.mean(seconds))
        assert told.rank_wait_seconds == pytest.approx(max(seconds) - np.mean(seconds))
        assert told.imbalance == pytest.approx(max(seconds) / np.mean(seconds)) and told.imbalance_expected >= 1.0
    starts = [entry[0] for entry in state["costs"]]
    # Steps 15 and 20 end fits, used from where a step launched ahead, two batches kept ready and one being read are past.
    assert starts == [20, 25]
    fit = CostFit(CostModel(1.0, 0.3), memory=0.7)
    for begin, end in ((3, 5), (5, 10), (10, 15), (15, 20)):
        rows = np.array([(*one.sizes, one.seconds) for times in (mine, theirs) for one in times[begin:end]])
        fit.update(sum_timings(*rows.T))
    _, node, edge, graph = state["costs"][-1]
    found = fit.model()
    assert (node, edge, graph) == pytest.approx((found.node, found.edge, found.graph), rel=1e-6)
    assert edge == pytest.approx(4e-5, rel=0.25) and edge > node


def test_a_resumed_run_divides_as_the_run_would_have(run_file: Path) -> None:
    run = load_run(run_file)
    stream, resumed = stream_of(run, 0), stream_of(run, 0)
    plain = [stream.division(step).rank for step in range(1, 12)]
    stream.use_costs(CostModel(1e-6, 3e-3), first=4)
    stream.use_costs(CostModel(1e-3, 1e-9, 2e-3), first=8)
    state = Balancer(stream, ONE_RANK, CPU, every=EVERY, each_waits=False).state()
    Balancer(resumed, ONE_RANK, CPU, every=EVERY, each_waits=False).restore(state)
    fixed = stream_of(run, 0)
    Balancer(fixed, ONE_RANK, CPU, every=None, each_waits=False).restore(state)
    changed = 0
    for step, declared in enumerate(plain, 1):
        rank = stream.division(step).rank
        assert np.array_equal(rank, resumed.division(step).rank)
        assert np.array_equal(declared, fixed.division(step).rank)
        changed += not np.array_equal(rank, declared)
        assert step >= 4 or np.array_equal(rank, declared)
    assert changed


def test_costs_cannot_change_for_batches_that_may_have_been_read(run_file: Path) -> None:
    stream = stream_of(load_run(run_file), 0)
    stream.next()
    with pytest.raises(AssertionError):
        stream.use_costs(CostModel(1.0, 1.0), first=stream.reach)
    stream.use_costs(CostModel(1.0, 1.0), first=1 + stream.reach)
    stream.close()


def test_dealing_by_other_costs_changes_no_sum_of_losses_and_each_micro_batch_is_timed(run_file: Path) -> None:
    run = load_run(run_file)
    applied = apply_layout(bind(run, LayoutModel), resolve_layout(bind(run), 1), ONE_RANK, CPU, AttentionChoice("sdpa"))
    (stage,) = applied.stages
    clock = ComputeClock(stage, CPU, lambda x, inputs: (float(len(x)), float(inputs["edges_2E"].shape[1])))
    sums, timed, held = [], [], []
    for costs in (CostModel(1.0, 0.3), CostModel(1e-3, 0.0, 1.0)):
        total = torch.zeros(3, dtype=torch.float64)
        for rank in range(2):
            stream = stream_of(run, rank, parts=2)
            stream.use_costs(costs, first=1)
            for step, part in [(number, part) for number in (1, 2, 3) for part in stream.batch(number).split(2)]:
                x, inputs = part.inputs()
                held.append((float(part.atoms.sum()), float(part.edges.sum())))
                losses = stage.train()(x, part.sample_indices, training=TrainingPass(step), **inputs)
                losses.sum().backward()
                total += losses.detach()
                timed += clock.take(step)
        sums.append(total)
    Executor(applied).evaluate(part)
    assert torch.allclose(sums[0], sums[1], rtol=1e-5)
    assert clock.take(step) == []
    assert [one.sizes for one in timed] == held and sorted(held[:12]) != sorted(held[12:])
    assert len(timed) == 24 and all(one.seconds > 0.0 for one in timed if one.sizes[0])
