"""The process that watches the ranks of a node which another launcher started; ranks here are short-lived processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from phalanx.launch.faults import FAULT_FILE, Limits
from phalanx.launch.watch import NodeWatch

RANK = """
import sys
from pathlib import Path
from phalanx.launch.heartbeat import Heartbeat
heart = Heartbeat(Path(sys.argv[1]), int(sys.argv[2]))
heart.fail("exception", ValueError("no device"))
"""


def test_a_rank_that_ends_before_the_others_begin_is_named_at_once(tmp_path: Path) -> None:
    hearts, run_dir = tmp_path / "hearts", tmp_path / "run"
    hearts.mkdir()
    run_dir.mkdir()
    subprocess.run([sys.executable, "-c", RANK, str(hearts), "0"], check=True, env=dict(os.environ))
    # It would wait two minutes for the other rank.
    NodeWatch(hearts, run_dir, [0, 1], Limits()).run()
    report = json.loads((run_dir / FAULT_FILE).read_text())
    assert (report["rank"], report["cause"], report["phase"]) == (0, "exception", "start")
    assert report["detail"] == "ValueError: no device"
