"""Checkpoints of mixtures go on with any other `ep`, `expert_tp` and ZeRO level: losses and state are those of one rank."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from distributed_ranks import run_ranks
from layout_cases import run_of
from phalanx.checkpoint import CheckpointStore, read_tensors
from phalanx.families.registry import bind
from phalanx.layout.apply import apply_layout
from phalanx.layout.context_parallel.kernel_choice import AttentionChoice
from phalanx.layout.mesh import ONE_RANK, Groups, build_mesh
from phalanx.layout.spec import ResolvedLayout
from phalanx.training.step import build_full_step
from phalanx.verification.family import VerifiableModel

CPU = torch.device("cpu")
JOURNEYS = {
    # Its routers keep biases and loads beside their parameters.
    "deepseek": {
        "ep=4, zero=3": ResolvedLayout(8, dp_shard=4, ep=4, zero=3, reshard_after_forward=True),
        "ep=2, zero=1": ResolvedLayout(8, dp_shard=4, ep=2, zero=1),
        "ep=4 over tp, zero=1": ResolvedLayout(8, dp_shard=2, tp=2, ep=4, zero=1),
        "ep=2, zero=2": ResolvedLayout(8, dp_shard=4, ep=2, zero=2),
        "ep=4, zero=2": ResolvedLayout(8, dp_shard=4, ep=4, zero=2),
        "ep=2 in a pipeline, zero=3": ResolvedLayout(8, dp_shard=2, pp=2, ep=2, zero=3),
        "ep=4 over cp, zero=3": ResolvedLayout(8, dp_shard=2, cp=2, ep=4, zero=3),
        "ep=1, zero=3": ResolvedLayout(8, dp_shard=4, zero=3),
    },
    "sliced": {
        "slices, zero=3": ResolvedLayout(8, dp_shard=4, ep=2, expert_tp=2, zero=3),
        "ep=2, zero=1": ResolvedLayout(8, dp_shard=4, ep=2, zero=1),
        "slices over tp, zero=2": ResolvedLayout(8, dp_shard=2, tp=2, ep=2, expert_tp=2, zero=2),
    },
}
"""One step in each, from the checkpoint of the one before; the first one goes on from one rank, which goes on at the end."""


@dataclass(frozen=True)
class Journey:
    """Losses and gradient norms by step, and what the last checkpoint holds."""

    steps: list[tuple[float, float]]
    state: dict[str, Tensor]


def train_in(
    root: Path, mixture: str, numbers: range, layout: ResolvedLayout, made: Groups
) -> list[tuple[float, float]]:
    """Train the steps of these numbers in `layout`, from the newest checkpoint where there is one; save the last."""
    # Other initial values wherever a checkpoint is loaded: what it leaves out would show.
    run = run_of(mixture, 4, "fp64")
    run = run.model_copy(update={"training": run.training.model_copy(update={"seed": numbers[0]})})
    model = bind(run, VerifiableModel)
    mesh = ONE_RANK if layout.world_size == 1 else build_mesh(layout, CPU, made)
    applied = apply_layout(model, layout, mesh, CPU, AttentionChoice("sdpa"))
    step = build_full_step(model, applied, CPU)
    with CheckpointStore(root, keep_last=1) as store:
        newest = store.newest()
        if newest is not None:
            store.load(newest, step.saved_tensors())
            applied.refresh()
        # Dropout is a function of the seed: that of the first part for all.
        for stage in applied.stages:
            stage.seed = 1
        share, results = layout.samples_per_rank, []
        for number in numbers:
            batch = model.samples(number, mesh.data_rank * share, share, layout.global_batch)
            result = step.run(number, batch)
            results.append((result.loss, result.grad_norm))
        store.save(numbers[-1], step.saved_tensors(), {})
    return results


def train_spread(folders: dict[str, Path]) -> dict[str, list[tuple[float, float]]]:
    """On one of four ranks: what each step gave, by mixture. folders: where each has its checkpoints."""
    made = Groups()
    return {
        mixture: [
            train_in(folders[mixture], mixture, range(n, n + 1), layout, made)[0]
            for n, layout in enumerate(JOURNEYS[mixture].values(), 3)
        ]
        for mixture in JOURNEYS
    }


@pytest.fixture(scope="module")
def journeys(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Journey, Journey]]:
    """By mixture: one rank from the first step to the last, and the way through all layouts."""
    alone = ResolvedLayout(8)
    folders = {mixture: tmp_path_factory.mktemp(mixture) for mixture in JOURNEYS}
    begun = {mixture: train_in(root, mixture, range(1, 3), alone, {}) for mixture, root in folders.items()}
    spread = run_ranks(train_spread, 4, folders)[0]
    found = {}
    for mixture, root in folders.items():
        straight, last = tmp_path_factory.mktemp("straight"), len(JOURNEYS[mixture]) + 3
        expected = train_in(straight, mixture, range(1, last + 1), alone, {})
        steps = [*begun[mixture], *spread[mixture], *train_in(root, mixture, range(last, last + 1), alone, {})]
        whole, visited = (read_tensors(folder / f"step-{last:08d}") for folder in (straight, root))
        found[mixture] = Journey(expected, whole), Journey(steps, visited)
    return found


@pytest.mark.parametrize("mixture", JOURNEYS)
def test_losses_and_norms_are_those_of_one_rank(journeys: dict[str, tuple[Journey, Journey]], mixture: str) -> None:
    expected, found = journeys[mixture]
    names = [*["one rank"] * 2, *JOURNEYS[mixture], "one rank"]
    for name, step, wanted in zip(names, found.steps, expected.steps, strict=True):
        assert step == pytest.approx(wanted, rel=1e-9), name


@pytest.mark.parametrize("mixture", JOURNEYS)
def test_parameters_optimizer_state_and_routers_arrive(
    journeys: dict[str, tuple[Journey, Journey]], mixture: str
) -> None:
    expected, found = (journey.state for journey in journeys[mixture])
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(
            found[name], tensor, rtol=1e-7, atol=1e-9, msg=lambda said, name=name: f"{name}: {said}"
        )
    assert any(name.endswith("router.bias") for name in expected) == (mixture == "deepseek")
    assert {name.rpartition(".")[2] for name in expected if "experts.down" in name} >= {"exp_avg", "exp_avg_sq", "step"}
