"""How idle devices are while hyperparameters are tuned, with packing and without, and what tuning is worth.

    phalanx data prepare-graphs examples/materials-tune.yaml data.sources.0.path=MOLECULES/xtb_6k.npz
    python benchmarks/tune_packing.py --devices 2 --device cpu --out benchmarks/results/tune/packing-cpu.json \\
        data.sources.0.path=MOLECULES/xtb_6k.npz
    python benchmarks/tune_packing.py --devices 4 --slots 6 --out benchmarks/results/tune/packing-gpu.json ...

Runs `phalanx tune` on a run file twice, with `--engine random` and one seed so that both see the same configurations, each
in a study of its own below --work. Real trials, real processes. Killed and started again it goes on: studies do. The result
holds the report of both studies: idle time of each device (a device is busy while a trial on it is in its training loop),
how long the study took, how many trials reached each rung, the best configuration and the run file as it stands.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
WAYS = {"packed": "--packing", "unpacked": "--no-packing"}


def main() -> None:
    """Run what is asked for and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="section.field=value for the run file")
    parser.add_argument("--run", type=Path, default=ROOT / "examples" / "materials-tune.yaml")
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "tune-packing", help="holds studies")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--trials", type=int, default=48)
    parser.add_argument("--engine", default="random")
    parser.add_argument("--devices", type=int, required=True)
    parser.add_argument("--slots", type=int, default=None, help="of a device with packing")
    parser.add_argument("--device", default="auto", help="cpu or an accelerator, as cluster.device")
    parser.add_argument("--way", choices=[*WAYS, "both"], default="both")
    parser.add_argument("--note", default="", help="what else ran on the machine")
    asked = parser.parse_args()
    ways = list(WAYS) if asked.way == "both" else [asked.way]
    studies = {way: tune(asked, way) for way in ways}
    result = {
        "command": shlex.join(["python", "benchmarks/tune_packing.py", *sys.argv[1:]]),
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": subprocess.check_output(["git", "rev-parse", "HEAD"], cwd=ROOT, text=True).strip(),
        "versions": {name: metadata.version(name) for name in ("torch", "optuna", "torch-geometric")},
        "machine": {"system": platform.platform(), "cpus": os.cpu_count(), "load": os.getloadavg(), "note": asked.note},
        "summary": {way: summary(facts) for way, facts in studies.items()},
        "studies": studies,
    }
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    asked.out.write_text(json.dumps(result, indent=1) + "\n")
    json.dump(result["summary"], sys.stdout, indent=1)


def tune(asked: argparse.Namespace, way: str) -> dict[str, Any]:
    """One study; what `phalanx tune --json` prints."""
    words = [f"cluster.device={asked.device}", *asked.words]
    options = ["--trials", str(asked.trials), "--engine", asked.engine, "--devices", str(asked.devices), WAYS[way]]
    if asked.slots is not None:
        options += ["--slots", str(asked.slots)]
    command = [
        sys.executable,
        "-m",
        "phalanx",
        "tune",
        str(asked.run),
        *words,
        "--out",
        str(asked.work / way),
        *options,
    ]
    done = subprocess.run([*command, "--json"], stdout=subprocess.PIPE, text=True, check=True)
    facts: dict[str, Any] = json.loads(done.stdout)
    return facts


def summary(facts: dict[str, Any]) -> dict[str, Any]:
    """The figures that matter."""
    devices, best, default = facts["devices"], facts["best"], facts["default"]
    return {
        "idle": devices["idle"],
        "seconds": devices["seconds"],
        "idle_of_each": {one["device"]: one["idle"] for one in devices["each"]},
        "trials": len(facts["trials"]),
        "reached": {str(row["steps"]): row["reached"] for row in facts["stopped"]},
        "failures": facts["failures"],
        "longest_to_shortest": facts["costs"] and facts["costs"]["longest_to_shortest"],
        "expected_time_off_by": facts["costs"] and facts["costs"]["median_factor_last_half"],
        "best": best and {"score": best["score"], "steps": best["steps"], "values": best["values"]},
        "default": default and {"score": default["score"], "steps": default["steps"]},
    }


if __name__ == "__main__":
    main()
