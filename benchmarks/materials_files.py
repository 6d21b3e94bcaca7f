"""Run files of the materials benchmarks: the three sets of one folder together and alone, made from examples/."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parent.parent
EXAMPLE = ROOT / "examples" / "materials-three-sources.yaml"
SETS = ("xtb", "alloy", "qm9")
TINY = {"d_model": 32, "n_layers": 3}
"""Of a model with which a benchmark is tried out."""


def three_sources(molecules: Path, prepared: Path) -> dict[str, Any]:
    """The example of three sources with its structures read from `molecules`."""
    config: dict[str, Any] = yaml.safe_load(EXAMPLE.read_text())
    for source in config["data"]["sources"]:
        source["path"] = str((molecules / Path(source["path"]).name).resolve())
    config["data"]["prepared"] = str(prepared.resolve())
    return config


def alone(config: dict[str, Any], name: str) -> dict[str, Any]:
    """One source of `config` with the branch and the heads that it has labels for; its splits stay what they were."""
    config = copy.deepcopy(config)
    (source,) = [source for source in config["data"]["sources"] if source["name"] == name]
    model = config["model"]
    config["data"]["sources"] = [source]
    model["branches"] = [branch for branch in model["branches"] if branch["name"] == name]
    if "energy" not in source["labels"]:
        # The preset would bring it back.
        model["energy"] = None
    elif "stress" not in source["labels"]:
        model["energy"].pop("stress_weight")
    if "charges" not in source["labels"]:
        del model["charges"]
    if "properties" not in source:
        del model["properties"]
    model["mean_neighbors"] = mean_neighbours(Path(config["data"]["prepared"]) / name)
    return config


def mean_neighbours(folder: Path) -> float:
    """Edges an atom of the training split, from what was prepared."""
    degrees = json.loads((folder / "manifest.json").read_text())["statistics"]["degrees"]
    return float(round(sum(degree * atoms for degree, atoms in enumerate(degrees)) / sum(degrees), 1))


def of_kind(config: dict[str, Any], preset: str, **changes: Any) -> dict[str, Any]:
    """The same with another body."""
    config = copy.deepcopy(config)
    config["model"] |= {"preset": preset, **changes}
    return config


def write(config: dict[str, Any], path: Path) -> Path:
    """The run file, written."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(config, sort_keys=False))
    return path


def prepare(config: dict[str, Any], folder: Path) -> None:
    """Neighbours of all sources, found once."""
    phalanx("data", "prepare-graphs", str(write(config, folder / "three.yaml")))


def phalanx(*words: str) -> str:
    """Run a command of ours; returns what it prints. Ends the benchmark when it fails."""
    return command(sys.executable, "-m", "phalanx", *words)


def command(*words: str) -> str:
    """Run a command in this Python's environment."""
    done = subprocess.run(words, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"failed with {done.returncode}: {' '.join(words)}")
    return done.stdout


def rival(run: Path, model: str, out: Path, devices: int, *words: str) -> dict[str, Any]:
    """One call of `rivals/graph_run.py`, under torchrun where there are several devices; what it found."""
    start = [sys.executable]
    if devices > 1:
        start += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(devices)]
    script = str(ROOT / "benchmarks" / "rivals" / "graph_run.py")
    command(*start, script, str(run), "--model", model, "--json", str(out), *words)
    found: dict[str, Any] = json.loads(out.read_text())
    return found


def metrics(run_dir: Path) -> list[dict[str, Any]]:
    """The steps of one of our runs."""
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
