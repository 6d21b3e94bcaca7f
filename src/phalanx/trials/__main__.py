"""Where a trial's processes begin: `python -m phalanx.trials launch|rank FOLDER`, see `trials.rank`.

They are tied to their parent before anything else: importing torch takes seconds, in which who started it may be killed.
"""

from __future__ import annotations

import sys
from importlib import import_module

from phalanx.cluster.parent import die_with_parent

if __name__ == "__main__":
    die_with_parent()
    sys.exit(import_module("phalanx.trials.rank").main(sys.argv[1:]))
