"""Where a trial's processes begin: `python -m phalanx.study.trials launch|rank FOLDER`, see `study.trials.rank`.

They are tied to their parent before anything else: importing torch takes seconds, in which who started it may be killed.
What starts the ranks loads no more than that takes: the trainer would be as many seconds again, in every trial.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module

from phalanx.hardware.host import passive_waits, prefer_to_be_killed
from phalanx.launch.parent import die_with_parent

if __name__ == "__main__":
    die_with_parent()
    # Else the kernel may take the search instead, which knows what its trials found.
    prefer_to_be_killed()
    os.environ.update(passive_waits(os.environ))
    what, folder, *ranks = sys.argv[1:]
    if what == "launch":
        launch_ranks = import_module("phalanx.launch.local_launch").launch_ranks
        sys.exit(launch_ranks(["rank", folder], int(*ranks), module="phalanx.study.trials"))
    sys.exit(import_module("phalanx.study.trials.rank").main(folder))
