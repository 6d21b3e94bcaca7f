"""Networks with conservative forces in every data-parallel layout on 2, 4 and 8 ranks compute what one rank computes.

Forces are derivatives inside the forward pass, so every gradient is a second derivative. Ranks have different numbers of
structures, atoms and targets; some have no structure in a micro-batch, some none in a whole step.
"""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch

from distributed_ranks import run_ranks
from materials_cases import LAYOUTS, cases, run_of
from phalanx.errors import ConfigError
from phalanx.families.materials.layout import MaterialsStage
from phalanx.families.registry import bind
from phalanx.launch.fork_server import RanksFailed
from phalanx.layout.mesh import Groups
from phalanx.layout.resolve import every_layout, resolve_layout
from phalanx.training.step import TrainStep
from phalanx.verification.family import VerifiableModel
from phalanx.verification.verify_run import Verdict, Verifier

LIMITS = {"fp64": 1e-10, "fp32": 1e-4}
"""Largest relative error of any gradient."""
RUNS = [
    (2, "painn", "fp64"),
    (2, "mace", "fp64"),
    (2, "nequip", "fp64"),
    (2, "dimenet++", "fp64"),
    (2, "gatv2", "fp64"),
    (2, "schnet", "fp64"),
    (4, "painn", "fp64"),
    (4, "gatv2", "fp32"),
    (8, "painn", "fp64"),
]


def verify_all(world: int) -> dict[tuple[str, str], list[Verdict]]:
    """On one of `world` ranks: verdicts by model and precision."""
    verdicts = {}
    groups: Groups = {}
    for _, model, precision in (run for run in RUNS if run[0] == world):
        # In the layouts, not on the one rank, MACE's messages are computed again, a few edges at a time.
        recompute = "full" if model == "mace" else "none"
        run = run_of(model, world, precision)
        verifier = Verifier(bind(run, VerifiableModel), torch.device("cpu"), steps=2, activations=True, groups=groups)
        verifier.run = run_of(model, world, precision, recompute=recompute)
        with patch("phalanx.families.materials.layout._EDGE_CHUNK", 7):
            verdicts[model, precision] = [verifier.verify(layout) for layout in cases(model, world, precision)]
    return verdicts


def verify_captured(world: int) -> list[Verdict]:
    """On one of `world` ranks: steps run as programs on padded batches, as they are captured on accelerators."""
    groups: Groups = {}
    run = run_of("painn", world)
    with patch("phalanx.families.materials.layout._captures_steps", return_value=True):
        # Of the blocks' activations a program tells nothing.
        verifier = Verifier(bind(run, VerifiableModel), torch.device("cpu"), steps=2, activations=False, groups=groups)
        return [verifier.verify(layout) for layout in cases("painn", world)]


def test_captured_steps_compute_the_same_in_every_layout() -> None:
    found = run_ranks(verify_captured, 2, 2, timeout_s=600.0)[0]
    assert [verdict.layout for verdict in found if not verdict.passed] == []
    assert len(found) == len(LAYOUTS[2])
    # Rounding differs, or nothing was captured.
    assert all(max(check.error for check in verdict.checks) > 0.0 for verdict in found)


@pytest.fixture(scope="module")
def verdicts() -> dict[tuple[int, str, str], list[Verdict]]:
    return {
        (world, *key): found
        for world in LAYOUTS
        for key, found in run_ranks(verify_all, world, world, timeout_s=600.0)[0].items()
    }


@pytest.mark.parametrize("run", RUNS, ids=str)
def test_layouts_compute_what_one_rank_computes(
    run: tuple[int, str, str], verdicts: dict[tuple[int, str, str], list[Verdict]]
) -> None:
    failed = [f"{v.layout}: {v.first}" for v in verdicts[run] if not v.passed]
    assert not failed, "\n".join(failed)
    for verdict in verdicts[run]:
        worst = max(check.error for check in verdict.checks if check.what == "gradient")
        assert worst < LIMITS[run[2]], verdict.layout


def test_samples_leave_ranks_with_uneven_and_with_no_work() -> None:
    run = run_of("painn", 4)
    shares = [bind(run, VerifiableModel).samples(step, first, 2, 8) for step in (1, 2) for first in (0, 2, 4, 6)]
    assert {len(share.atoms) for share in shares} == {0, 2}
    assert len({len(share.species_N) for share in shares}) > 4
    counts = torch.stack([share.target_counts() for share in shares])
    assert (counts == 0).any() and all(len(set(task)) > 2 for task in counts.T.tolist())
    whole = bind(run, VerifiableModel).samples(1, 0, 8, 8)
    assert torch.equal(torch.cat([share.positions_N3 for share in shares[:4]]), whole.positions_N3)
    # Crystals and molecules, and atoms that see images of themselves.
    assert 0 < int((whole.cells_G33.abs().sum((1, 2)) == 0.0).sum()) < len(whole.atoms)
    assert bool(whole.shifts_E3.any())


def verify_means_of_ranks() -> Verdict:
    """With losses divided by each rank's own targets, and the mean taken over ranks."""
    run = run_of("painn", 2, dp_shard=2)
    verifier = Verifier(bind(run, VerifiableModel), torch.device("cpu"), steps=1, activations=False)

    def own_targets(self: TrainStep, value: torch.Tensor) -> torch.Tensor:
        # The losses of both ranks are still added up; targets, which are whole numbers, are each rank's own.
        return value.clamp(min=1) * 2 if not value.is_floating_point() else sum_over_ranks(self, value)

    sum_over_ranks = TrainStep._sum_over_ranks
    with patch.object(TrainStep, "_sum_over_ranks", own_targets):
        return verifier.verify(resolve_layout(bind(run), 2))


def test_means_over_ranks_in_place_of_sums_over_targets_are_found() -> None:
    verdict = run_ranks(verify_means_of_ranks, 2, timeout_s=100.0)[0]
    assert verdict.first is not None and verdict.first.what == "loss"
    assert verdict.first.error > 1e-3


def sharded_by_block() -> Any:
    right = MaterialsStage.__init__

    def wrong(self: MaterialsStage, *arguments: Any) -> None:
        right(self, *arguments)
        self.one_unit = False

    return patch.object(MaterialsStage, "__init__", wrong)


def verify_sharded_by_block() -> bool:
    run = run_of("painn", 2, dp_shard=2)
    with sharded_by_block():
        return (
            Verifier(bind(run, VerifiableModel), torch.device("cpu"), steps=1, activations=False)
            .verify(resolve_layout(bind(run), 2))
            .passed
        )


def test_forces_are_what_keeps_blocks_from_being_sharded_one_by_one() -> None:
    with pytest.raises(RanksFailed, match="storage of size 0"):
        run_ranks(verify_sharded_by_block, 2, timeout_s=100.0)


def test_matrices_are_not_split_and_blocks_not_placed_apart() -> None:
    layouts = list(every_layout(bind(run_of("painn", 4)), 4))
    assert len(layouts) > 5
    assert {(layout.tp, layout.pp) for layout in layouts} == {(1, 1)}
    with pytest.raises(
        ConfigError, match=r"layout.tp=2: models of family materials are spread over dp_replicate, dp_sh"
    ):
        resolve_layout(bind(run_of("painn", 4, tp=2)), 4)
