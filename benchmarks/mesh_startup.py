"""Time and memory that one rank takes to make its process groups, for a layout of many ranks on the fake backend.

    python benchmarks/mesh_startup.py --out benchmarks/results/mesh_startup.json

The fake backend connects to nobody: what is measured is the work of this program and of PyTorch around it, on one thread.
Bar: under 5 s and under 1 GB for 24,576 ranks.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import time
from datetime import date
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.testing._internal.distributed.fake_pg import FakeStore

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "src"))

from phalanx.layout.mesh import Groups, build_mesh  # noqa: E402
from phalanx.layout.spec import DEGREES, ResolvedLayout  # noqa: E402

BAR = {"seconds": 5.0, "mib": 1e9 / 2**20}


def peak_mib() -> float:
    """Most memory this process has held, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def measure(layout: ResolvedLayout, rank: int) -> dict[str, Any]:
    """Join a fake process group as `rank` and make the groups of `layout`."""
    torch.set_num_threads(1)
    before = peak_mib()
    start = time.perf_counter()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=layout.world_size)
    made: Groups = {}
    mesh = build_mesh(layout, torch.device("cpu"), made)
    seconds = time.perf_counter() - start
    return {
        "layout": str(layout),
        "ranks": layout.world_size,
        "rank": rank,
        "seconds": round(seconds, 3),
        "peak_mib": round(peak_mib(), 1),
        "peak_mib_before": round(before, 1),
        "axes": {name: {"rank": getattr(mesh, name).rank, "size": getattr(mesh, name).size} for name in DEGREES},
        "data_mesh": None if mesh.data is None else list(mesh.data.shape),
        "groups": [len(ranks) for ranks, _ in made],
        "groups_without_this_rank": sum(rank not in ranks for ranks, _ in made),
        "process_groups_but_the_world": len(distributed_c10d._world.pg_names) - 1,
    }


def main() -> None:
    """Measure, print and write one layout."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in zip(DEGREES, (8, 24, 1, 8, 16), strict=True):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--zero", type=int, default=3)
    parser.add_argument("--rank", type=int, default=12345)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    degrees = {name: getattr(options, name) for name in DEGREES}
    result = measure(ResolvedLayout(1, zero=options.zero, **degrees), options.rank)
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False, cwd=ROOT
    )
    result |= {
        "bar": BAR,
        "within_bar": result["seconds"] < BAR["seconds"] and result["peak_mib"] < BAR["mib"],
        "command": " ".join(["python", os.path.relpath(__file__, ROOT), *sys.argv[1:]]),
        "commit": commit.stdout.strip(),
        "date": date.today().isoformat(),
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores (shared), one thread used",
    }
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
