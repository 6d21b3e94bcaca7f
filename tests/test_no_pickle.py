"""Nothing that unpickles is called on what lies on disk: a pickle runs code when it is read."""

from __future__ import annotations

import ast
from pathlib import Path

import phalanx

SOURCES = Path(phalanx.__file__).parent
UNPICKLE = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}
BETWEEN_OWN_PROCESSES = {"launch/fork_server.py"}
"""Reads a pipe to a process that it started itself, and no file."""


def unpickles(source: str) -> list[str]:
    """What in this source can read a pickle: imports of such modules, `torch.load`, `allow_pickle` not false."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if alias.name.partition(".")[0] in UNPICKLE]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in UNPICKLE:
            found.append(str(node.module))
        elif isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.load":
            found.append("torch.load")
        elif isinstance(node, ast.keyword) and node.arg == "allow_pickle":
            found += [] if ast.unparse(node.value) == "False" else ["allow_pickle"]
    return found


def test_what_unpickles_is_found() -> None:
    assert unpickles("import pickle\nfrom joblib.x import load\ntorch.load(f)\nnp.load(f, allow_pickle=True)") != []
    assert unpickles("np.load(f, allow_pickle=False)\nfrom torch import nn") == []


def test_no_file_is_unpickled() -> None:
    files = {file.relative_to(SOURCES).as_posix(): file.read_text() for file in sorted(SOURCES.rglob("*.py"))}
    found = {name: unpickles(source) for name, source in files.items()}
    assert len(found) > 100
    assert {name for name, calls in found.items() if calls} == BETWEEN_OWN_PROCESSES
