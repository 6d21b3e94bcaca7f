"""Start a trial's processes: `python -m phalanx.study.processes launch FOLDER RANKS FIRST | rank FOLDER | devices TYPE`.

Each process ties itself to its parent before it imports torch, which takes seconds in which the parent may be killed. The
trainer is imported by ranks alone: `launch` would spend as many seconds on it again in every trial.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module

from phalanx.hardware.host import passive_waits, prefer_to_be_killed
from phalanx.launch.parent import die_with_parent

if __name__ == "__main__":
    die_with_parent()
    # Else the kernel, short of memory, may kill the study's process, which knows what its trials found.
    prefer_to_be_killed()
    os.environ.update(passive_waits(os.environ))
    match sys.argv[1:]:
        case ["launch", folder, ranks, first]:
            launch_trial = import_module("phalanx.study.processes.trial_launch").launch_trial
            sys.exit(launch_trial(folder, int(ranks), int(first)))
        case ["rank", folder]:
            sys.exit(import_module("phalanx.study.processes.rank").run_rank(folder))
        case ["devices", requested]:
            import_module("phalanx.study.processes.rank").print_devices(requested)
        case _:
            sys.exit(__doc__)
