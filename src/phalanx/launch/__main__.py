"""Start ranks and watch them: `python -m phalanx.launch SPECIFICATION`, one JSON object that `become_supervisor` writes.

A process that has loaded torch to check a run hands over to this one in its place: it stays for as long as the run lasts,
and torch would cost it hundreds of megabytes for nothing.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from phalanx.launch.faults import Limits
from phalanx.launch.local_launch import launch_ranks
from phalanx.launch.restart import RestartPolicy


def become_supervisor(arguments: Sequence[str], world_size: int, grace_s: float, policy: RestartPolicy) -> None:
    """Replace this process by one that runs `launch_ranks` and ends with its exit code. Does not return."""
    given = {"arguments": list(arguments), "world_size": world_size, "grace_s": grace_s, "policy": asdict(policy)}
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, "-m", "phalanx.launch", json.dumps(given, default=str)])


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    policy = given["policy"]
    policy["limits"] = Limits(**policy["limits"])
    policy["words"], policy["preload"] = tuple(policy["words"]), tuple(policy["preload"])
    # JSON has no numbers as keys.
    policy["layouts"] = {int(ranks): words for ranks, words in policy["layouts"].items()}
    policy["run_dir"] = None if policy["run_dir"] is None else Path(policy["run_dir"])
    sys.exit(
        launch_ranks(given["arguments"], given["world_size"], grace_s=given["grace_s"], policy=RestartPolicy(**policy))
    )
