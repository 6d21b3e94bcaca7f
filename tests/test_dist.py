"""Wheel and source archive: what they hold, and that the wheel works where no repository is.

`make dist` does the same in an environment of its own, with PyTorch and more text.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with both, built from a copy without git, since building leaves files behind."""
    copy, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    for name in ("pyproject.toml", "README.md", "LICENSE", "MANIFEST.in"):
        shutil.copy(ROOT / name, copy)
    for name in ("src", "examples"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    environment = {**os.environ, "SETUPTOOLS_SCM_PRETEND_VERSION": "7.8.9"}
    subprocess.run(
        [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(copy)],
        check=True,
        env=environment,
        capture_output=True,
        timeout=300,
    )
    return out


def test_both_are_sound(dist: Path) -> None:
    files = [str(file) for file in dist.iterdir()]
    assert len(files) == 2
    subprocess.run([sys.executable, "-m", "twine", "check", "--strict", *files], check=True, timeout=120)


def test_the_wheel_holds_every_file_of_the_package(dist: Path) -> None:
    """A table, preset or template that no pattern names would be missing from it alone."""
    (wheel,) = dist.glob("*.whl")
    held = {name for name in zipfile.ZipFile(wheel).namelist() if name.startswith("phalanx/")}
    source = ROOT / "src"
    files = (file for file in (source / "phalanx").rglob("*") if file.is_file() and file.suffix != ".pyc")
    assert held == {file.relative_to(source).as_posix() for file in files}


def test_the_source_archive_holds_examples(dist: Path) -> None:
    (archive,) = dist.glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        names = {name.partition("/")[2] for name in opened.getnames()}
    assert {"examples/quickstart.yaml", "src/phalanx/py.typed", "LICENSE"} <= names


def test_the_quickstart_works_from_the_wheel_alone(dist: Path, tmp_path: Path) -> None:
    """As `make quickstart`, of fewer steps and less text, with the run file of the source archive."""
    (wheel,), (archive,) = dist.glob("*.whl"), dist.glob("*.tar.gz")
    site = tmp_path / "site"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--no-compile"]
    subprocess.run([*pip, "--target", str(site), str(wheel)], check=True, timeout=300)
    with tarfile.open(archive) as opened:
        name = next(name for name in opened.getnames() if name.endswith("examples/quickstart.yaml"))
        (tmp_path / "quickstart.yaml").write_bytes(opened.extractfile(name).read())  # type: ignore[union-attr]
    environment = {**os.environ, "PYTHONPATH": str(site), "OMP_NUM_THREADS": "1"}
    run = "--run-dir run training.steps=2 optimizer.warmup_steps=1 evaluation.every=2 evaluation.samples=2"
    for words, said in (
        ("--version", "phalanx 7.8.9 (torch "),
        ("data prepare site/phalanx/config --validation-fraction 0.3 --out data/python-stdlib --vocab-size 400", "400"),
        (f"train quickstart.yaml {run}", "trained to step 2"),
        ("generate run --tokens 4", ""),
        ("report run", "run/report.html"),
    ):
        done = subprocess.run(
            [sys.executable, "-m", "phalanx", *words.split()],
            check=False,
            env=environment,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
        assert said in done.stdout + done.stderr
    assert "2 of 2 steps" in (tmp_path / "run/report.html").read_text("utf-8")


def test_the_python_layer_of_containers_resolves(dist: Path) -> None:
    """As each recipe installs it, from packages that are here: extras that ask for more than the constraints give fail."""
    (wheel,) = dist.glob("*.whl")
    recipes = [*(ROOT / "containers").glob("*.def"), *(ROOT / "containers").glob("*Dockerfile")]
    found = {found for file in recipes for found in re.findall(r'\.whl\)(\[[\w,]+\])"', file.read_text("utf-8"))}
    (extras,) = found
    assert len(recipes) == 3
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--no-index"]
    command = [*pip, "--constraint", str(ROOT / "constraints.txt"), f"{wheel}{extras}"]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
