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

from phalanx.errors import PhalanxError
from phalanx.launch.faults import Limits
from phalanx.launch.local_launch import launch_ranks
from phalanx.launch.nodes.supervisors import NodePlace, launch_nodes
from phalanx.launch.restart import RestartPolicy
from phalanx.printable import write_stderr


def become_supervisor(
    arguments: Sequence[str], ranks: int, grace_s: float, policy: RestartPolicy, place: NodePlace | None = None
) -> None:
    """Replace this process by one that runs `launch_ranks`, or `launch_nodes` where this node has a `place` among others.

    It ends with their exit code. Does not return. ranks: of this node.
    """
    given = {
        "arguments": list(arguments),
        "ranks": ranks,
        "grace_s": grace_s,
        "policy": asdict(policy),
        "place": None if place is None else asdict(place),
    }
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, "-m", "phalanx.launch", json.dumps(given, default=str)])


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    fields = given["policy"]
    fields["limits"] = Limits(**fields["limits"])
    fields["words"], fields["preload"] = tuple(fields["words"]), tuple(fields["preload"])
    # JSON has no numbers as keys.
    fields["layouts"] = {int(ranks): words for ranks, words in fields["layouts"].items()}
    fields["run_dir"] = None if fields["run_dir"] is None else Path(fields["run_dir"])
    arguments, ranks, grace_s = given["arguments"], given["ranks"], given["grace_s"]
    policy = RestartPolicy(**fields)
    try:
        if given["place"] is None:
            sys.exit(launch_ranks(arguments, ranks, grace_s=grace_s, policy=policy))
        sys.exit(launch_nodes(arguments, ranks, NodePlace(**given["place"]), grace_s=grace_s, policy=policy))
    except PhalanxError as error:
        write_stderr(f"error: {error}")
        sys.exit(1)
