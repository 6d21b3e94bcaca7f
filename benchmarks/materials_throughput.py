"""Speed of training on structures, ours beside the reference models, and strong scaling with and without balancing.

    python benchmarks/materials_throughput.py MOLECULES --work WORK --out OUT.json [--hydragnn CHECKOUT] [--devices 1 2 4]

Equal models, on the molecules of xtb_6k with forces (no charges: neither reference learns them beside forces), at the same
global batch, on each number of devices: our SchNet beside `torch_geometric.nn.SchNet`, our PaiNN beside HydraGNN's; theirs
through PyG's DataLoader and DistributedDataParallel (`rivals/graph_run.py`). Ours goes through `phalanx train`, and its
seconds come from metrics.jsonl; everything a step takes counts on both sides, reading and collating included.

Scaling: our three-source run at one global batch on 1 to N devices, shared out by cost, and once more as a plain sampler
would (equal numbers of structures). A step of either kind holds about the same work; speed is counted in edges.
`--tiny` tries everything out on CPU processes.
"""

from __future__ import annotations

import argparse
import json
import platform
import shutil
import statistics
from pathlib import Path
from typing import Any

import torch

from materials_files import TINY, alone, metrics, of_kind, phalanx, prepare, rival, three_sources, write
from phalanx.config.load import load_run
from phalanx.families.materials.config import MaterialsRun
from phalanx.families.materials.data.graph_shards import open_prepared
from phalanx.families.materials.data.graph_stream import graph_order
from phalanx.families.materials.sizes import parameter_count

QUIET = ["checkpoint.last=false", "evaluation.every=null", "data.verify=false", "training.tensorboard=false"]
PLAIN = ["data.batch_by=graphs", "data.share_by=number"]
"""What a plain distributed sampler does."""


def ours(run_file: Path, run_dir: Path, devices: int, steps: int, skip: int, *words: str) -> dict[str, Any]:
    """Train `steps` steps and count what those after `skip` came to."""
    shutil.rmtree(run_dir, ignore_errors=True)
    given = [*QUIET, f"training.steps={steps}", "optimizer.warmup_steps=1", "evaluation.samples=1", *words]
    phalanx("train", str(run_file), "--run-dir", str(run_dir), "--nproc", str(devices), *given)
    run = load_run(run_file, given)
    assert isinstance(run, MaterialsRun)
    order = graph_order(
        open_prepared(run.data, "train"), run.data, seed=run.training.seed, global_batch=run.layout.global_batch
    )
    rows = metrics(run_dir)[skip:]
    found = [order.batch(row["step"]) for row in rows]
    seconds = sum(row["step_seconds"] for row in rows)
    waits = [row["rank_wait_seconds"] for row in rows if "rank_wait_seconds" in row]
    expected = [row["imbalance_expected"] for row in rows if "imbalance_expected" in row]
    return {
        "model": "phalanx",
        "parameters": parameter_count(run.model),
        "ranks": devices,
        "global_batch": run.layout.global_batch,
        "overrides": list(words),
        "atoms_per_second": sum(int(one.atoms.sum()) for one in found) / seconds,
        "edges_per_second": sum(int(one.edges.sum()) for one in found) / seconds,
        "data_wait_share": sum(row["data_wait_seconds"] for row in rows) / seconds,
        "rank_wait_share": sum(waits) / seconds if waits else None,
        "imbalance_measured": statistics.median(row["imbalance"] for row in rows) if waits else None,
        "imbalance_expected": statistics.median(expected) if expected else None,
        "step_seconds": [row["step_seconds"] for row in metrics(run_dir)],
        "memory_peak_gib": rows[-1]["memory_peak_gib"],
    }


def equal_models(config: dict[str, Any], work: Path, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Ours and theirs at each batch and number of devices."""
    base = alone(config, "xtb")
    del base["model"]["charges"]
    smaller = TINY if arguments.tiny else {}
    kinds = [("schnet", of_kind(base, "gnn-schnet-450k", **smaller))]
    if arguments.hydragnn is not None:
        kinds.append(("hydragnn", of_kind(base, "gnn-painn-600k", **smaller)))
    rows = []
    for reference, chosen in kinds:
        file = write(chosen, work / f"equal-{reference}.yaml")
        for batch in arguments.batches:
            for devices in arguments.devices:
                words = [f"layout.global_batch={batch}", f"data.microbatch_cost={arguments.microbatch_cost}"]
                words += arguments.overrides
                row = ours(file, work / "run", devices, arguments.steps, arguments.skip, *words)
                rows.append({"beside": reference, **row})
                steps = ["--steps", str(arguments.steps), "--skip", str(arguments.skip)]
                checkout = ["--hydragnn", str(arguments.hydragnn)] if reference == "hydragnn" else []
                loading = ["--workers", str(arguments.workers)]
                out = work / "rival.json"
                theirs = rival(
                    file, reference, out, devices, *steps, *checkout, *loading, f"layout.global_batch={batch}"
                )
                rows.append({"beside": "phalanx", **theirs})
                gain = row["edges_per_second"] / theirs["edges_per_second"]
                print(
                    f"{reference:9} batch {batch:5} on {devices}: ours {row['atoms_per_second']:,.0f} atoms/s "
                    f"{row['edges_per_second']:,.0f} edges/s, theirs {theirs['atoms_per_second']:,.0f} and "
                    f"{theirs['edges_per_second']:,.0f}: {gain:.2f} times",
                    flush=True,
                )
    return rows


def scaling(config: dict[str, Any], work: Path, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """The mixed set on more and more devices."""
    config["model"] |= TINY if arguments.tiny else {}
    file, rows = write(config, work / "scaling.yaml"), []
    words = [f"layout.global_batch={arguments.scaling_batch}", f"data.microbatch_cost={arguments.microbatch_cost}"]
    for way, more in (("by cost", []), ("by number", PLAIN)):
        for devices in arguments.devices:
            row = ours(file, work / "run", devices, arguments.steps, arguments.skip, *words, *more, *arguments.layout)
            rows.append({"way": way, **row})
            first = next(one for one in rows if one["ranks"] == min(arguments.devices) and one["way"] == way)
            efficiency = row["edges_per_second"] / first["edges_per_second"] * first["ranks"] / devices
            row["efficiency"] = rows[-1]["efficiency"] = efficiency
            wait = row["rank_wait_share"]
            print(
                f"shared out {way:9} on {devices}: {row['edges_per_second']:,.0f} edges/s, efficiency {efficiency:.3f}, "
                f"ranks wait {'-' if wait is None else format(wait, '.1%')}",
                flush=True,
            )
    return rows


def main() -> None:
    """Measure, print and write down."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("molecules", type=Path, help="folder with qm9_12k.npz, xtb_6k.npz and alloy_emt_1500.npz")
    parser.add_argument("--work", type=Path, required=True, help="folder for prepared structures and runs")
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--hydragnn", type=Path, help="checkout of ORNL/HydraGNN; left out where not given")
    parser.add_argument("--devices", type=int, nargs="+", default=[1])
    parser.add_argument("--batches", type=int, nargs="+", default=[32, 256], help="global batches of the equal models")
    parser.add_argument("--scaling-batch", type=int, default=1024)
    parser.add_argument(
        "--microbatch-cost", type=float, default=60000.0, help="most atoms + 0.3 edges computed at a time"
    )
    parser.add_argument("--layout", nargs="*", default=[], help="overrides of the scaling runs, such as layout.zero=0")
    parser.add_argument(
        "--set", nargs="*", default=[], dest="overrides", help="overrides of our equal models: section.field=value"
    )
    parser.add_argument("--workers", type=int, default=4, help="processes of PyG's loader, on each rank")
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--skip", type=int, default=20)
    parser.add_argument("--parts", nargs="+", choices=("equal", "scaling"), default=["equal", "scaling"])
    parser.add_argument("--tiny", action="store_true", help="narrow models, to try it out on a CPU")
    arguments = parser.parse_args()
    arguments.hydragnn = arguments.hydragnn and arguments.hydragnn.resolve()
    work = arguments.work.resolve()
    config = three_sources(arguments.molecules, work / "graphs")
    prepare(config, work)
    results: dict[str, Any] = {
        "command": {name: str(value) for name, value in vars(arguments).items()},
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    if "equal" in arguments.parts:
        results["equal"] = equal_models(config, work, arguments)
    if "scaling" in arguments.parts:
        results["scaling"] = scaling(config, work, arguments)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
