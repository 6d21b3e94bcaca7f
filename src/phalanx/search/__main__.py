"""Where a trial's processes begin: `python -m phalanx.search launch|rank FOLDER`, see `search.measure`.

They are tied to their parent before anything else: importing torch takes seconds, in which the search may be killed.
"""

from __future__ import annotations

import sys
from importlib import import_module

from phalanx.search.process import die_with_parent

if __name__ == "__main__":
    die_with_parent()
    sys.exit(import_module("phalanx.search.measure").main(sys.argv[1:]))
