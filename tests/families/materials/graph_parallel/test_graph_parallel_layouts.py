"""Graph parallelism beside data parallelism: training steps and held-out errors are those of one rank; what is legal."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from distributed_ranks import run_ranks
from phalanx.errors import ConfigError
from phalanx.families.materials.config import MaterialsRun
from phalanx.families.registry import bind
from phalanx.layout.apply import apply_layout
from phalanx.layout.context_parallel.kernel_choice import AttentionChoice
from phalanx.layout.execute import Executor
from phalanx.layout.layout_model import LayoutModel
from phalanx.layout.mesh import ONE_RANK, Groups, build_mesh
from phalanx.layout.resolve import every_layout, resolve_layout
from phalanx.verification.family import VerifiableModel
from phalanx.verification.verify_run import Verdict, Verifier

MODELS: dict[str, dict[str, Any]] = {
    "painn": {
        "body": "painn",
        "energy": {"force_weight": 10.0, "stress_weight": 3.0},
        "charges": {},
        "branches": [{"name": "first"}, {"name": "second", "energy_scale": 2.0, "weight": 0.5}],
    },
    "mace": {
        "body": "mace",
        "mace": {"degree": 2, "hidden_degree": 1, "correlation": 3, "radial_width": 8},
        "n_layers": 3,
        "energy": {"loss": "mae", "force_weight": 1.0, "stress_weight": 20.0},
        "electronic_state": ["spin"],
        "electrostatics": {},
    },
    # No energy: sharded block by block.
    "gatv2": {
        "body": "gatv2",
        "gatv2": {"heads": 2},
        "attention": {"heads": 2, "kind": "linear"},
        "properties": {"names": ["gap", "moment"], "pooling": "mean"},
    },
    # Nodes that are no atoms, edges that are given and have labels, classes.
    "graph": {
        "body": "pnaeq",
        "graph": {"nodes": 3, "edges": 2, "graphs": 1, "positions": True},
        "properties": {"names": ["stiffness", "phase"], "classes": {"phase": 3}},
        "atom_properties": {"names": ["hot"], "classes": {"hot": {"count": 2, "weights": [1.0, 3.0]}}},
        "edge_properties": {"names": ["flux"], "loss": "mae"},
    },
}
LAYOUTS: dict[str, list[dict[str, Any]]] = {
    "painn": [{"cp": 4}, {"cp": 2, "dp_shard": 2, "recompute": "full"}, {"cp": 2, "dp_replicate": 2, "zero": 0}],
    "mace": [{"cp": 4}],
    "gatv2": [{"cp": 2, "dp_shard": 2}],
    "graph": [{"cp": 4}, {"cp": 2, "dp_shard": 2}],
}


def run_of(model: str, **layout: Any) -> MaterialsRun:
    """Micro-batches of one structure, of 1 to 9 atoms or none."""
    size = {"n_layers": 2, "d_model": 8, "n_radial": 4, "cutoff": 3.0, "max_atomic_number": 6, "mean_neighbors": 12.0}
    return MaterialsRun.model_validate(
        {
            "model": {"family": "materials", **size, **MODELS[model]},
            "data": {"sources": [{"name": "any", "path": "nowhere"}], "prepared": "nowhere", "cutoff": 3.0},
            "layout": {"global_batch": 8, "microbatch": 1, "dp_shard": 1, "precision": "fp64", **layout},
            "optimizer": {"lr": 0.01, "eps": 1e-3, "grad_clip": 0.5, "schedule": "constant"},
            "training": {"steps": 1},
        }
    )


def measured_sums(run: MaterialsRun, world: int, groups: Groups) -> torch.Tensor:
    """Held-out losses and errors of some structures, of all ranks together."""
    device, layout = torch.device("cpu"), resolve_layout(bind(run), world)
    mesh = ONE_RANK if world == 1 else build_mesh(layout, device, groups)
    executor = Executor(apply_layout(bind(run, LayoutModel), layout, mesh, device, AttentionChoice("sdpa")))
    batch = executor.cut(bind(run, VerifiableModel).samples(1, 0, 5, 5), 1)
    x, inputs = batch.inputs()
    sums = executor.infer(x, {**inputs, "measured_sources": 2}, batch.sample_indices)
    assert sums is not None
    if world > 1:
        dist.all_reduce(sums)
    return sums.detach()


def compare_all() -> tuple[dict[str, list[Verdict]], torch.Tensor, torch.Tensor]:
    """On one of four ranks: verdicts by model; sums of one rank and of four."""
    groups: Groups = {}
    verdicts: dict[str, list[Verdict]] = {}
    for model in MODELS:
        verifier = Verifier(
            bind(run_of(model), VerifiableModel), torch.device("cpu"), steps=1, activations=True, groups=groups
        )
        verdicts[model] = []
        for fields in LAYOUTS[model]:
            verifier.run = run_of(model, **fields)
            verdicts[model].append(verifier.verify(resolve_layout(bind(verifier.run), 4)))
    alone, four = measured_sums(run_of("painn"), 1, groups), measured_sums(run_of("painn", cp=4), 4, groups)
    return verdicts, alone, four


@pytest.fixture(scope="module")
def compared() -> tuple[dict[str, list[Verdict]], torch.Tensor, torch.Tensor]:
    found: tuple[dict[str, list[Verdict]], torch.Tensor, torch.Tensor] = run_ranks(compare_all, 4, timeout_s=300.0)[0]
    return found


@pytest.mark.parametrize("model", MODELS)
def test_training_steps_are_those_of_one_rank(
    model: str, compared: tuple[dict[str, list[Verdict]], torch.Tensor, torch.Tensor]
) -> None:
    for verdict in compared[0][model]:
        assert verdict.passed, f"{verdict.layout}: {verdict.first}"
        assert max(check.error for check in verdict.checks if check.what == "gradient") < 1e-12


def test_held_out_errors_are_those_of_one_rank(
    compared: tuple[dict[str, list[Verdict]], torch.Tensor, torch.Tensor],
) -> None:
    _, alone, four = compared
    assert bool((alone != 0.0).any())
    torch.testing.assert_close(four, alone, rtol=1e-12, atol=1e-12)


def test_cp_shares_out_atoms_and_knows_no_rings() -> None:
    layouts = list(every_layout(bind(run_of("painn")), 4))
    assert {layout.cp for layout in layouts} == {1, 2, 4}
    assert {str(layout) for layout in layouts if layout.cp == 4 and layout.zero == 1} == {"cp=4 zero=1"}
    with pytest.raises(ConfigError, match=r"layout.context=ring joins positions.*\n.*context=auto"):
        resolve_layout(bind(run_of("painn", cp=2, dp_replicate=2, context="ring")), 4)
