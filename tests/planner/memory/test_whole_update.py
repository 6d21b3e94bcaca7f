"""Plans of Muon and dry runs of the code that trains with it hold the same bytes and send as many for whole matrices; those
of moments in 8 bits hold the same bytes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from dry_layouts import PLANNED_SIZES
from layout_runs import run_with
from phalanx.families.registry import bind
from phalanx.hardware.machine import load_machine
from phalanx.layout.gathered_matrices import Holding, assign_units, units_of
from phalanx.layout.resolve import resolve_layout
from phalanx.optimizers.muon import MUON
from phalanx.planner.dryrun.run_step import dry_run
from phalanx.planner.memory.model import Kernels, rank_memory
from phalanx.planner.time.profile import default_profile
from phalanx.planner.time.step_time import StepBreakdown
from phalanx.planner.time.timing import step_times
from phalanx.planner.trace.expert_loads import BALANCED
from phalanx.planner.trace.traced_model import TracedModel
from phalanx.planner.trace.whole_matrices import MatrixKind, block_matrices, share_of_layout, share_units
from phalanx.training.step import build_full_step

WORLD = 8
SIZES = PLANNED_SIZES | {"model.vocab_size": 128}
MIXTURE = {"count": 8, "active": 2, "d_ff": 384, "balance": "global_batch"}


def muon_model(experts: dict[str, Any] | None = None, **words: Any) -> TracedModel:
    """A small model trained by Muon, its experts used evenly."""
    sizes = SIZES | {"optimizer.name": "muon"} | ({"model.experts": experts} if experts else {})
    model = bind(run_with(sizes, **{"global_batch": 8, "recompute": "full", **words}), TracedModel)
    model.loads = BALANCED  # type: ignore[attr-defined]
    return model


def test_memory_of_moments_in_8_bits_is_that_of_the_code() -> None:
    words: dict[str, Any] = {"dp_shard": 1, "dp_replicate": WORLD, "global_batch": WORLD, "recompute": "full"}
    model = bind(run_with(SIZES | {"optimizer.name": "adamw8bit"}, **words), TracedModel)
    layout = resolve_layout(bind(model.run), WORLD)
    rank = rank_memory(model, layout, "full", Kernels("flash", compiled=False))[0]
    found = dry_run(model, layout, 0, build_full_step, accelerator=True, devices_per_node=None)
    assert rank.allocated == pytest.approx(found.peak, rel=0.02), (rank, found.moment, found.categories)
    # A byte an element and 4 bytes for 32, of each moment.
    of_parameters = found.categories["optimizer"] / found.categories["parameters"]
    assert of_parameters == pytest.approx(2.25 / 4, rel=0.02)


@pytest.mark.parametrize(
    ("experts", "words", "at_update"),
    [
        (None, {"dp_shard": 1, "dp_replicate": 8}, True),
        (None, {"tp": 2, "dp_shard": 4}, False),
        (MIXTURE, {"dp_shard": 4, "pp": 2, "ep": 4, "global_batch": 32}, True),
        # The last rank has a dense block before one of experts.
        (MIXTURE | {"dense_layers": 3}, {"dp_shard": 4, "pp": 2, "ep": 4, "global_batch": 32}, False),
    ],
    ids=str,
)
def test_memory_and_bytes_sent_are_those_of_the_code(
    experts: dict[str, Any] | None, words: dict[str, Any], at_update: bool
) -> None:
    model = muon_model(experts, **words)
    layout = resolve_layout(bind(model.run), WORLD)
    rank = rank_memory(model, layout, "full", Kernels("flash", compiled=False))[-1]
    found = dry_run(
        model, layout, rank.rank * WORLD // layout.pp, build_full_step, accelerator=True, devices_per_node=None
    )
    assert rank.allocated == pytest.approx(found.peak, rel=0.02), (rank, found.moment, found.categories)
    assert ("update" in str(found.moment)) is at_update
    assert (rank.moment == "update") is at_update
    kinds = block_matrices(model)
    leading = 1 if experts and "dense_layers" in experts else 0
    share = share_of_layout(kinds, layout.table, 0, 4 // layout.pp - leading, leading)
    # To the rank itself as well: one exchange takes all.
    whole = [number * kind.elements for number, kind in zip(share.owned, kinds, strict=True)]
    expected = 2 * sum(size * (1 + copies) for size, copies in zip(whole, share.copies, strict=True))
    sent = sum(t.bytes * t.count for t in found.traffic if t.operation == "all_to_all" and t.axis == "all ranks")
    assert sent == pytest.approx(expected, rel=0.03)


@pytest.mark.parametrize(("ranks", "blocks"), [(4, 3), (16, 2), (64, 1)])
def test_units_are_shared_as_the_code_assigns_them(ranks: int, blocks: int) -> None:
    """Sharded rows of matrices, and experts that pairs of ranks hold whole."""
    kinds = (MatrixKind((64, 96), 8, ((64, 96),), expert=True), MatrixKind((40, 96), 1, ((40, 96),), expert=False))
    experts = {f"e{block}": Holding(((0, 0), (8 * 64, 96)), (8 * 64, 96), 8) for block in range(blocks)}
    held = []
    for rank in range(ranks):
        groups = ranks // 2
        first = rank % groups * (8 * 64 // groups) if groups <= 8 else rank % 8 * 64
        size = 8 * 64 // min(groups, 8)
        mine = {name: Holding(((first, 0), (size, 96)), one.shape, 8) for name, one in experts.items()}
        mine |= {f"m{block}": Holding(((rank, 0), (1, 96)), (40, 96), 1) for block in range(blocks) if rank < 40}
        held.append(mine)
    parts: dict[str, Any] = {}
    for rank, mine in enumerate(held):
        for name, one in mine.items():
            parts.setdefault(name, {}).setdefault(one.box, []).append(rank)
    load = np.zeros(ranks)
    for unit in assign_units(units_of(held), parts, ranks):
        load[unit.owner] += unit.cost
    owned = share_units(kinds, (8 * blocks, blocks), ranks, max(2, ranks // 8))
    assert owned.sum(axis=1).tolist() == [8 * blocks, blocks]
    busiest = (np.asarray([kind.cost for kind in kinds]) @ owned).max()
    assert busiest == pytest.approx(load.max(), rel=0.15)


def seconds_of(name: str, **words: Any) -> np.ndarray[Any, Any]:
    """Seconds of the optimizer in the plan of a wide model."""
    sizes = SIZES | {"model.d_model": 2048, "model.d_ff": 5632, "optimizer.name": name}
    model = bind(run_with(sizes, **{"global_batch": 8, "recompute": "full", **words}), TracedModel)
    layout = resolve_layout(bind(model.run), WORLD)
    machine = load_machine("dgx-h100")
    return step_times(model, layout.table, machine, default_profile(machine.node.device).profile).of(
        StepBreakdown.OPTIMIZER
    )


def test_products_and_exchanges_enter_the_time_of_a_step() -> None:
    words = {"dp_shard": 8}
    more = float((seconds_of("muon", **words) - seconds_of("adamw", **words))[0])
    model = bind(
        run_with(SIZES | {"model.d_model": 2048, "model.d_ff": 5632, "optimizer.name": "muon"}, global_batch=8),
        TracedModel,
    )
    profile = default_profile("H100 SXM").profile
    matrices = [(kind.count, matrix) for kind in block_matrices(model) for matrix in kind.matrices]
    flops = 4 * sum(count * MUON.matrix_flops(model.run.optimizer, *matrix) for count, matrix in matrices)
    elements = 4 * sum(count * rows * columns for count, (rows, columns) in matrices)
    # No faster than at the rate of large products, evenly shared; and no slower than one rank alone would be.
    assert flops / WORLD / profile.matmul_flop_s < more < 2 * flops / profile.matmul_flop_s
    # Replicas all get the updated matrices whole.
    whole = {"dp_shard": 1, "dp_replicate": 8}
    sent = float((seconds_of("muon", **whole) - seconds_of("adamw", **whole))[0])
    assert sent > more + 2 * elements / 900e9 / 2
