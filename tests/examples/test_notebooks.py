"""The notebooks: each runs from top to bottom, in a copy of the examples and with nothing beside it."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "examples" / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("file", NOTEBOOKS, ids=lambda file: file.stem)
def test_a_notebook_runs(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    examples = tmp_path / "examples"
    shutil.copytree(ROOT / "examples", examples)
    programs = tmp_path / "bin"
    programs.mkdir()
    # `phalanx` as it is installed, for this interpreter and these sources.
    (programs / "phalanx").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m phalanx "$@"\n')
    (programs / "phalanx").chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "src"))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    notebook = nbformat.read(file, as_version=4)
    # The first failing cell raises, with its traceback.
    done = NotebookClient(
        notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": str(examples / "notebooks")}}
    ).execute()
    assert any(cell.get("outputs") for cell in done.cells)


@pytest.mark.parametrize("file", NOTEBOOKS, ids=lambda file: file.stem)
def test_a_notebook_holds_no_output(file: Path) -> None:
    """What is printed belongs to whoever runs it; committed output is stale with the next change."""
    code = [cell for cell in nbformat.read(file, as_version=4).cells if cell.cell_type == "code"]
    assert code and not any(cell.outputs or cell.execution_count for cell in code)


def test_there_are_three() -> None:
    assert [file.stem for file in NOTEBOOKS] == ["own_model", "plan_a_trillion", "weather_maps"]
