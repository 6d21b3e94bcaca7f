"""Networks to verify, and the layouts to verify them in."""

from __future__ import annotations

from typing import Any

from phalanx.families.materials.config import MaterialsRun
from phalanx.families.registry import bind
from phalanx.layout.resolve import resolve_layout
from phalanx.layout.spec import ResolvedLayout

SIZE = {
    "family": "materials",
    "n_layers": 2,
    "d_model": 8,
    "n_radial": 4,
    "cutoff": 3.0,
    "max_atomic_number": 6,
    "mean_neighbors": 12.0,
}
ENERGY = {"force_weight": 10.0, "stress_weight": 3.0}
BRANCHES = [
    {"name": "first", "reference_energies": {"1": -1.0, "6": -3.5}},
    {"name": "second", "energy_scale": 2.0, "weight": 0.5},
]
MODELS: dict[str, dict[str, Any]] = {
    "painn": {
        **SIZE,
        "body": "painn",
        "energy": ENERGY,
        "charges": {},
        "electronic_state": ["charge", "spin"],
        "branches": BRANCHES,
    },
    # Charges by edges, waves and pairs.
    "schnet": {**SIZE, "body": "schnet", "energy": ENERGY, "electrostatics": {"smearing": 0.1}, "branches": BRANCHES},
    "mace": {
        **SIZE,
        "body": "mace",
        "mace": {"degree": 2, "hidden_degree": 1, "correlation": 2, "radial_width": 8},
        "energy": ENERGY,
        "dipole": {},
    },
    "nequip": {**SIZE, "body": "nequip", "nequip": {"degree": 2, "radial_width": 8}, "energy": ENERGY, "dipole": {}},
    "dimenet++": {
        **SIZE,
        "body": "dimenet++",
        "dimenet": {"angular": 3, "triplet_width": 6, "basis_width": 4},
        "energy": ENERGY,
    },
    # Attention among all atoms, and no energy: sharded block by block.
    "gatv2": {
        **SIZE,
        "body": "gatv2",
        "gatv2": {"heads": 2},
        "attention": {"heads": 2},
        "properties": {"names": ["gap", "moment"]},
        "atom_properties": {"names": ["spin"]},
        "branches": BRANCHES,
    },
}

LAYOUTS: dict[int, list[dict[str, Any]]] = {
    2: [
        {"dp_shard": 1, "dp_replicate": 2, "zero": 0},
        {"dp_shard": 2, "zero": 1},
        {"dp_shard": 2, "zero": 2},
        {"dp_shard": 2, "reshard_after_forward": True},
        {"dp_shard": 2, "reshard_after_forward": False},
    ],
    4: [
        {"dp_shard": 2, "dp_replicate": 2},
        {"dp_shard": 1, "dp_replicate": 4},
        {"dp_shard": 4, "zero": 2},
        {"dp_shard": 4},
    ],
    8: [{"dp_shard": 4, "dp_replicate": 2}, {"dp_shard": 8, "zero": 1}],
}


def run_of(model: str, world: int, precision: str = "fp64", **layout: Any) -> MaterialsRun:
    """A run in micro-batches of one sample, two on each of `world` ranks: gradients accumulate everywhere."""
    return MaterialsRun.model_validate(
        {
            "model": MODELS[model],
            "data": {"sources": [{"name": "any", "path": "nowhere"}], "prepared": "nowhere", "cutoff": 3.0},
            "layout": {"global_batch": 2 * world, "microbatch": 1, "precision": precision, **layout},
            "optimizer": {"lr": 0.01, "eps": 1e-3, "grad_clip": 0.5, "schedule": "constant"},
            "training": {"steps": 2},
        }
    )


def cases(model: str, world: int, precision: str = "fp64") -> list[ResolvedLayout]:
    """The layouts to verify `model` in on `world` ranks.

    All for PaiNN, and on two ranks for what is sharded block by block; how gradients are summed and shards are gathered does
    not depend on the body, nor on the precision.
    """
    few = model in ("mace", "nequip", "dimenet++", "schnet") or precision == "fp32"
    chosen = [LAYOUTS[world][0], LAYOUTS[world][-1]] if few else LAYOUTS[world]
    return [resolve_layout(bind(run_of(model, world, **fields)), world) for fields in chosen]
