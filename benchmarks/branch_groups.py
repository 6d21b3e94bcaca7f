"""What multi-task parallelism saves and what it costs, by computation: bytes of heads, sums over ranks, and uneven loads.

    python benchmarks/branch_groups.py examples/materials-three-sources.yaml --out OUT.json

reads a run file with several branches and its prepared data. Bytes and traffic follow from the parameters of its model;
the imbalance is that of real steps, shared out as `layout.branch_groups=auto` does and over all ranks alike. Beside it stand
bytes and traffic of sixteen branches with heads as large as those of ORNL/HydraGNN's
examples/multibranch/multibranch_GFM260_SC25.json (EGNN, 4 layers of 866; graph heads 866-50-50-889-889-889-1, node heads
866-889-889-889-3), whose cost of steps nobody but its owners knows.

Counted for float32 training with AdamW: 16 bytes a parameter (parameter, gradient, two moments). A sum over r ranks sends
2 (r - 1) / r of its bytes from each rank, a gather or a reduce-scatter half of that. Nothing is run.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

import torch

from phalanx.config.load import load_run
from phalanx.families.materials.config import MaterialsRun
from phalanx.families.materials.data.balance import step_balance, summarise_balance
from phalanx.families.materials.data.graph_batches import graph_columns
from phalanx.families.materials.data.graph_shards import open_prepared
from phalanx.families.materials.data.graph_stream import GraphBatchStream, graph_order
from phalanx.families.materials.model.network import MaterialsNetwork
from phalanx.families.materials.model_config import MaterialsModel
from phalanx.families.registry import bind
from phalanx.layout.data_parallel.task_heads import BranchGroups, sizes_by_cost

RANKS = (4, 16, 64)
STEPS = 100
PER_RANK = (12, 48)
"""Structures a rank and step, on average."""
STATE, GRADIENT = 16, 4
"""Bytes a parameter."""
MIB = 2**20


@dataclass(frozen=True)
class Model:
    """Numbers of parameters."""

    name: str
    body: int
    head: int
    """Of the heads of one branch."""
    branches: int


@dataclass(frozen=True)
class Saving:
    """One rank of the largest sub-group, without and with sub-groups, in MiB."""

    model: str
    ranks: int
    group: int
    state_replicated: tuple[float, float]
    """Parameters, gradients and moments under replication."""
    sent_replicated: tuple[float, float]
    """A step."""
    state_sharded: tuple[float, float]
    """Under FSDP over all ranks, the gathered copy counted; heads of a sub-group are replicated in it."""
    sent_sharded: tuple[float, float]


@dataclass(frozen=True)
class Wait:
    """How uneven steps are: largest cost of a rank over the mean, and the share of time that ranks wait."""

    ranks: int
    structures: int
    sizes: list[int]
    imbalance: tuple[float, float]
    """Mean of steps without and with sub-groups."""
    wait: tuple[float, float]


def saving(model: Model, ranks: int, sizes: tuple[int, ...]) -> Saving:
    """By the formulas above."""
    group, body, head = max(sizes), model.body, model.head
    heads = head * model.branches
    everywhere, within = (ranks - 1) / ranks, (group - 1) / group
    pairs = {
        "state_replicated": (STATE * (body + heads), STATE * (body + head)),
        "sent_replicated": (
            2 * everywhere * GRADIENT * (body + heads),
            2 * GRADIENT * (everywhere * body + within * head),
        ),
        "state_sharded": ((STATE / ranks + 4) * (body + heads), (STATE / ranks + 4) * body + STATE * head),
        "sent_sharded": (
            everywhere * (4 + GRADIENT) * (body + heads),
            everywhere * (4 + GRADIENT) * body + 2 * within * GRADIENT * head,
        ),
    }
    rounded = {name: (round(a / MIB, 2), round(b / MIB, 2)) for name, (a, b) in pairs.items()}
    return Saving(model.name, ranks, group, **rounded)


def model_of(config: MaterialsModel, name: str) -> Model:
    """Counted in the network itself."""
    with torch.device("meta"):
        network = MaterialsNetwork(config)
    heads = sum(parameter.numel() for parameter in network.head.branch_parameters())
    whole = sum(parameter.numel() for parameter in network.parameters())
    return Model(name, whole - heads, heads // len(config.branches), len(config.branches))


def hydragnn_like() -> Model:
    """Our EGNN of their size with their heads."""
    egnn = {"family": "materials", "body": "egnn", "n_layers": 4, "d_model": 866, "properties": {"names": ["energy"]}}
    body = model_of(MaterialsModel.model_validate(egnn), "").body
    widths = ([866, 50, 50, 889, 889, 889, 1], [866, 889, 889, 889, 3])
    head = sum(a * b + b for sizes in widths for a, b in pairwise(sizes))
    return Model("EGNN 4 x 866, sixteen branches", body, head, 16)


def waiting(run: MaterialsRun, ranks: int, structures: int, costs: list[float]) -> Wait:
    """Of the first steps of a run at this size."""
    sources = open_prepared(run.data, "train")
    order = graph_order(sources, run.data, seed=run.training.seed, global_batch=ranks * structures)
    sizes = sizes_by_cost(costs, ranks)
    found = []
    for groups in (None, BranchGroups(sizes)):
        stream = GraphBatchStream(order, graph_columns(sources), ranks=ranks, branches=groups, prefetch=0)
        found.append(summarise_balance(step_balance(stream.division(step)) for step in range(1, STEPS + 1)))
    plain, apart = found
    return Wait(
        ranks,
        structures,
        list(sizes),
        (round(plain.imbalance_mean, 4), round(apart.imbalance_mean, 4)),
        (round(plain.wait_mean, 4), round(apart.wait_mean, 4)),
    )


def main() -> None:
    """Print one JSON object, and write it where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    run = load_run(arguments.run, arguments.overrides)
    assert isinstance(run, MaterialsRun)
    costs = bind(run).branch_costs()
    models = [(model_of(run.model, run.model.body), costs), (hydragnn_like(), [1.0] * 16)]
    content = {
        "cost_shares": {b.name: round(c / sum(costs), 4) for b, c in zip(run.model.branches, costs, strict=True)},
        "models": [asdict(model) for model, _ in models],
        "savings": [
            asdict(saving(model, ranks, sizes_by_cost(shares, ranks)))
            for model, shares in models
            for ranks in RANKS
            if ranks >= model.branches
        ],
        "waits": [asdict(waiting(run, ranks, each, costs)) for ranks in RANKS for each in PER_RANK],
    }
    text = json.dumps(content, indent=1)
    print(text)
    if arguments.out:
        arguments.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
