"""Test errors after equal training time: our models of three data sets, alone and as one with three branches, and two
reference models on the same splits.

    python benchmarks/materials_training.py MOLECULES --work WORK --out OUT.json --minutes 4 [--hydragnn CHECKOUT]

Every model of one data set trains for `--minutes` of time in steps on one device; the one of three branches for
`--minutes-together` (by default as long as the three alone). Ours goes through `phalanx train`: a short run tells how long
a step takes, and so how many steps fit, recording and compiling included; the learning rate falls over just these. Where
steps are compiled there are two short runs: the second finds kernels on disk, as the run itself does.
References (`rivals/graph_run.py`) get the same splits, batch, optimizer and loss weights, and their learning rate falls over
the same time. Errors come from the whole test split at the end. Started again with the same --work, what is done is not
done again, and a run broken off goes on.
`--tiny` tries everything out on a CPU.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
from pathlib import Path
from typing import Any

import torch

from materials_files import SETS, TINY, alone, metrics, of_kind, phalanx, prepare, rival, three_sources, write
from phalanx.config.load import load_run
from phalanx.families.materials.config import MaterialsRun
from phalanx.families.materials.sizes import parameter_count

QUIET = ["evaluation.every=null", "evaluation.samples=1", "data.verify=false", "training.tensorboard=false"]
PILOT, SETTLED = 200, 40
"""Steps of the short run, and how many of them count once, not again and again."""


def ours(file: Path, name: str, minutes: float, work: Path, overrides: list[str]) -> dict[str, Any]:
    """Train one model of ours and measure it."""
    done, run_dir = work / f"ours-{name}.json", work / f"ours-{name}"
    if done.exists():
        found: dict[str, Any] = json.loads(done.read_text())
        return found
    words = [*QUIET, *overrides]
    planned = work / f"ours-{name}.steps"
    if not planned.exists():
        planned.write_text(str(steps_that_fit(file, work / f"pilot-{name}", minutes, words)))
    steps = int(planned.read_text())
    kept = [
        f"training.steps={steps}",
        f"optimizer.warmup_steps={max(1, steps // 50)}",
        f"checkpoint.every={steps // 4 + 1}",
    ]
    phalanx("train", str(file), "--run-dir", str(run_dir), *words, *kept)
    run = load_run(run_dir / "run.yaml")
    assert isinstance(run, MaterialsRun)
    tested = json.loads(phalanx("errors", str(run_dir), "--split", "test", "--json"))
    result = {
        "model": "phalanx",
        "set": name,
        "parameters": parameter_count(run.model),
        "steps": steps,
        "training_seconds": sum(row["step_seconds"] for row in metrics(run_dir)),
        "global_batch": run.layout.global_batch,
        "overrides": overrides,
        "errors": tested["errors"],
    }
    done.write_text(json.dumps(result))
    return result


def steps_that_fit(file: Path, run_dir: Path, minutes: float, words: list[str]) -> int:
    """How many steps take `minutes`, by a short run."""
    short = [f"training.steps={PILOT}", "optimizer.warmup_steps=1", "checkpoint.last=false", "training.resume=never"]
    last = run_dir / ("1" if "training.compile=true" in words else "0")
    for each in sorted({run_dir / "0", last}):
        if not (each / "metrics.jsonl").exists() or len(metrics(each)) < PILOT:
            phalanx("train", str(file), "--run-dir", str(each), *words, *short)
    seconds = [row["step_seconds"] for row in metrics(last)]
    # The first steps record or compile what later ones run. The mean: steps differ in size, and now and then one is slow.
    return max(PILOT, int((60.0 * minutes - sum(seconds[:SETTLED])) / statistics.fmean(seconds[SETTLED:])))


def reference(file: Path, model: str, name: str, work: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Train one reference and measure it."""
    done, folder = work / f"{model}-{name}.json", work / f"{model}-{name}"
    if done.exists():
        found: dict[str, Any] = json.loads(done.read_text())
        return found
    checkout = ["--hydragnn", str(arguments.hydragnn)] if model == "hydragnn" else []
    words = ["--minutes", str(arguments.minutes), "--folder", str(folder), "--workers", str(arguments.workers)]
    result = rival(file, model, work / "rival.json", 1, *words, *checkout)
    result["set"] = name
    done.write_text(json.dumps(result))
    return result


def table(results: list[dict[str, Any]]) -> str:
    """Mean absolute errors side by side."""
    together = next((one for one in results if one["set"] == "three"), None)
    columns = [
        "phalanx",
        "phalanx, three branches",
        *dict.fromkeys(one["model"] for one in results if one["model"] != "phalanx"),
    ]
    cells: dict[tuple[str, str], dict[str, float]] = {}
    for one in results:
        for row in one["errors"] if one is not together else []:
            cells.setdefault((one["set"], row["quantity"]), {})[one["model"]] = row["mae"]
    for row in together["errors"] if together else []:
        cells.setdefault((row["source"], row["quantity"]), {})[columns[1]] = row["mae"]
    lines = [f"{'MAE on the test split':24}" + "".join(f"{column:>26}" for column in columns)]
    for (name, quantity), by_model in cells.items():
        numbers = [f"{by_model[column]:.5g}" if column in by_model else "-" for column in columns]
        lines.append(f"{name + ' ' + quantity:24}" + "".join(f"{number:>26}" for number in numbers))
    return "\n".join(lines)


def main() -> None:
    """Train, measure, print and write down."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("molecules", type=Path, help="folder with qm9_12k.npz, xtb_6k.npz and alloy_emt_1500.npz")
    parser.add_argument(
        "--work", type=Path, required=True, help="folder for prepared structures, runs and what is done"
    )
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--minutes", type=float, default=4.0, help="of each model of one set")
    parser.add_argument("--minutes-together", type=float, help="of the model of three branches")
    parser.add_argument("--hydragnn", type=Path, help="checkout of ORNL/HydraGNN; left out where not given")
    parser.add_argument("--sets", nargs="+", choices=SETS, default=list(SETS))
    parser.add_argument("--models", nargs="+", choices=("ours", "together", "schnet", "hydragnn"), default=None)
    parser.add_argument("--workers", type=int, default=4, help="processes of PyG's loader")
    parser.add_argument(
        "--set", nargs="*", default=[], dest="overrides", help="overrides of our runs: section.field=value"
    )
    parser.add_argument("--batch", type=int, help="structures a step of each model of one set; 32, and 16 with --tiny")
    parser.add_argument("--tiny", action="store_true", help="narrow models and batches of 16, to try it out on a CPU")
    arguments = parser.parse_args()
    arguments.hydragnn = arguments.hydragnn and arguments.hydragnn.resolve()
    wanted = arguments.models or ["ours", "together", "schnet", *(["hydragnn"] if arguments.hydragnn else [])]
    work = arguments.work.resolve()
    config = three_sources(arguments.molecules, work / "graphs")
    smaller = TINY if arguments.tiny else {}
    config["model"] |= smaller
    config["layout"]["global_batch"] = arguments.batch or (16 if arguments.tiny else 32)
    prepare(config, work)
    results = []
    for name in arguments.sets:
        base = alone(config, name)
        file = write(base, work / f"{name}.yaml")
        if "ours" in wanted:
            results.append(ours(file, name, arguments.minutes, work, arguments.overrides))
        if "schnet" in wanted:
            plain = write(of_kind(base, "gnn-schnet-450k", **smaller), work / f"{name}-schnet.yaml")
            results.append(reference(plain, "schnet", name, work, arguments))
        if "hydragnn" in wanted:
            results.append(reference(file, "hydragnn", name, work, arguments))
        print(table(results), flush=True)
    if "together" in wanted:
        file = write(config, work / "three.yaml")
        minutes = arguments.minutes_together or len(SETS) * arguments.minutes
        results.append(ours(file, "three", minutes, work, ["layout.global_batch=48", *arguments.overrides]))
    print(table(results))
    command = {key: str(value) for key, value in vars(arguments).items()}
    about = {"command": command, "torch": torch.__version__, "python": platform.python_version()}
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps({**about, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
