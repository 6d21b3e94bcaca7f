"""Which page of the documentation tells more about an error: that of the field it names, else that of the subcommand."""

from __future__ import annotations

import re

_OF_SECTIONS = {
    "model": "reference/run_file.md",
    "data": "guides/data.md",
    "layout": "guides/layouts.md",
    "optimizer": "guides/training.md",
    "training": "guides/training.md",
    "checkpoint": "guides/checkpoints.md",
    "evaluation": "guides/generate_evaluate.md",
    "restart": "guides/training.md",
    "safeguards": "guides/training.md",
    "cluster": "reference/clusters.md",
    "remote": "guides/data.md",
    "search": "guides/search.md",
    "tune": "guides/tuning.md",
}
_OF_SUBCOMMANDS = {
    "init": "guides/training.md",
    "config": "reference/run_file.md",
    "plan": "guides/planning.md",
    "calibrate": "guides/planning.md",
    "tune": "guides/tuning.md",
    "train": "guides/training.md",
    "evaluate": "guides/generate_evaluate.md",
    "generate": "guides/generate_evaluate.md",
    "ensemble": "guides/ensembles.md",
    "select": "guides/ensembles.md",
    "forecast": "guides/weather.md",
    "errors": "guides/materials.md",
    "predict": "guides/materials.md",
    "lammps": "guides/materials.md",
    "report": "guides/watch.md",
    "completion": "index.md",
}
"""Pages of those that have no guide of their own name."""
# Names of files end like fields: search.yaml is none.
_FIELD = re.compile(rf"(?<![\w./-])({'|'.join(_OF_SECTIONS)})\.(?!ya?ml|json|html|log)[a-z]")


def find_page(message: str, subcommand: str) -> str:
    """Return the page to read on in, from the folder of the repository. subcommand: the one that failed with `message`."""
    named = _FIELD.search(message)
    page = _OF_SUBCOMMANDS.get(subcommand, f"guides/{subcommand}.md") if named is None else _OF_SECTIONS[named[1]]
    return f"docs/{page}"
