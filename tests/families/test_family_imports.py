"""Who may import a family: nobody below it, and no other family."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "phalanx"
FAMILIES = ("language", "weather", "materials", "blocks")
GENERIC = (
    "checkpoint",
    "config",
    "data",
    "kernels",
    "launch",
    "layout",
    "nn",
    "optimizers",
    "planner",
    "torch_compat",
    "training",
    "verification",
)
"""Rooms that ask a bound model instead."""


def _imports_of_families(folder: Path) -> Iterator[tuple[str, str]]:
    """Files in `folder` with each family that they import."""
    for file in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            for name in names:
                found = re.match(r"phalanx\.families\.(\w+)", name)
                if found and found[1] in FAMILIES:
                    yield str(file.relative_to(SOURCE)), found[1]


@pytest.mark.parametrize("family", FAMILIES)
def test_no_family_imports_another(family: str) -> None:
    found = list(_imports_of_families(SOURCE / "families" / family))
    assert found
    assert not [pair for pair in found if pair[1] != family]


@pytest.mark.parametrize("room", GENERIC)
def test_generic_rooms_import_no_family(room: str) -> None:
    assert (SOURCE / room).is_dir()
    # The table of a user's own measured runs is one of language runs.
    assert not [pair for pair in _imports_of_families(SOURCE / room) if not pair[0].startswith("planner/measured/")]
