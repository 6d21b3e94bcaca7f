"""Recipes of containers: what can be known of them without building one, and their Python layer, built from a registry."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
DEFINITIONS = sorted((ROOT / "containers").glob("*.def"))
DOCKERFILE = ROOT / "containers" / "cuda.Dockerfile"
SECTIONS = {"arguments", "files", "post", "environment", "test", "runscript"}


def _sections(text: str) -> dict[str, str]:
    parts = re.split(r"^%(\w+)\n", text, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


@pytest.mark.parametrize("file", DEFINITIONS, ids=lambda file: file.stem)
def test_a_definition_is_whole(file: Path) -> None:
    text = file.read_text("utf-8")
    sections = _sections(text)
    assert text.startswith("Bootstrap: docker\nFrom: ") and set(sections) == SECTIONS
    # Each template has a default, and each default is used.
    assert set(re.findall(r"\{\{ (\w+) \}\}", text)) == set(
        re.findall(r"^ +(\w+)=", sections["arguments"], re.MULTILINE)
    )
    assert "--with-rocm" in sections["post"] and "/opt/aws-ofi-rccl/lib" in sections["environment"]


@pytest.mark.parametrize("file", DEFINITIONS, ids=lambda file: file.stem)
def test_the_scripts_of_a_definition_pass_their_linter(file: Path) -> None:
    scripts = _sections(file.read_text("utf-8"))
    for section in ("post", "environment", "test", "runscript"):
        assert _lint(scripts[section].replace("{{", "").replace("}}", ""), "sh") == "", section


def test_the_script_that_tries_wheels_passes_it() -> None:
    assert _lint((ROOT / "containers" / "try_wheel.sh").read_text("utf-8"), "bash") == ""


def test_the_linter_finds_a_mistake() -> None:
    assert "SC2086" in _lint("rm -r $1", "sh")


def _lint(script: str, shell: str) -> str:
    """Return what shellcheck has to say of a script; empty for a sound one."""
    linter = Path(sys.executable).with_name("shellcheck")
    command = [str(linter), f"--shell={shell}", "-"]
    return subprocess.run(command, input=script, text=True, capture_output=True, check=False, timeout=60).stdout


def test_the_dockerfile_passes_its_linter() -> None:
    hadolint = Path(sys.executable).with_name("hadolint")
    done = subprocess.run([str(hadolint), str(DOCKERFILE)], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stdout


def test_the_dockerfile_is_in_order() -> None:
    lines = re.sub(r"^#.*\n", "", DOCKERFILE.read_text("utf-8").replace("\\\n", " "), flags=re.MULTILINE).splitlines()
    words = [line.split(None, 1) for line in lines if line]
    known = {"FROM", "ARG", "ENV", "RUN", "COPY", "WORKDIR", "ENTRYPOINT", "CMD"}
    assert words[0][0] == "FROM" and ":" in words[0][1] and {word for word, _ in words} <= known
    for word, rest in words:
        if word == "RUN":
            assert subprocess.run(["sh", "-n", "-c", rest], check=False, timeout=20).returncode == 0, rest
            assert "apt-get install" not in rest or "rm -rf /var/lib/apt/lists" in rest
            assert "pip install" not in rest or "--no-cache-dir" in rest


@pytest.mark.parametrize("file", [*DEFINITIONS, DOCKERFILE], ids=lambda file: file.name)
def test_they_install_what_there_is(file: Path) -> None:
    """Extras that the package has, and a PyTorch that it takes."""
    text = file.read_text("utf-8")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    (extras,) = re.findall(r'\.whl\)\[([\w,]+)\]"', text)
    assert set(extras.split(",")) <= set(project["optional-dependencies"])
    (least, most) = re.findall(r"torch>=2\.(\d+),<2\.(\d+)", " ".join(project["dependencies"]))[0]
    (minor,) = set(re.findall(r"torch==2\.(\d+)\.", text))
    assert int(least) <= int(minor) < int(most)


def test_there_is_one_for_each_machine() -> None:
    assert [file.stem for file in DEFINITIONS] == ["frontier", "lumi"]


PYTHON_LAYERS = {
    "def": r"^    (python3 -m venv .*?)\n    rm -rf",
    "Dockerfile": r"^RUN (python3 -m venv .*?\n)^WORKDIR",
}
"""What follows the system's packages in each kind of recipe, up to where it ends."""


def _python_layer(file: Path, place: Path) -> str:
    """Return the commands of a recipe that fill `/opt/phalanx`, for a shell, with `place` where the root would be.

    PyTorch is left out: an environment gets the one that runs these tests, which is not downloaded again.
    """
    pattern = PYTHON_LAYERS[file.name.rpartition(".")[2]]
    (lines,) = re.findall(pattern, file.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    commands = re.sub(r"^(COPY .*|#.*)\n|^RUN ", "", lines.replace("\\\n", " "), flags=re.MULTILINE)
    commands, installs = re.subn(
        r"\S*pip install --no-cache-dir [^\n]*index[^\n]*", "true", commands, flags=re.IGNORECASE
    )
    assert installs == 1
    return re.sub(r"/(opt|tmp)/", rf"{place}/\1/", commands)


def _lend_torch(place: Path) -> None:
    """Let the environment in `place` find the PyTorch of these tests, and none of the packages beside it."""
    installed, alone = Path(torch.__file__).parents[1], place / "torch"
    alone.mkdir()
    for path in installed.iterdir():
        if re.fullmatch(r"torch|torchgen|functorch|torch-.*dist-info", path.name):
            (alone / path.name).symlink_to(path)
    (site,) = (place / "opt" / "phalanx").glob("lib/python3*/site-packages")
    (site / "torch.pth").write_text(str(alone))


@pytest.mark.registry
@pytest.mark.parametrize("file", [DEFINITIONS[0], DOCKERFILE], ids=lambda file: file.name)
def test_the_python_layer_of_a_recipe_is_built_and_works(file: Path, tmp_path: Path) -> None:
    copy, wheel = tmp_path / "source", tmp_path / ("opt" if file in DEFINITIONS else "tmp") / "wheel"
    shutil.copytree(ROOT / "src", copy / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    for name in ("pyproject.toml", "README.md", "LICENSE", "MANIFEST.in"):
        shutil.copy(ROOT / name, copy)
    words = ["--no-isolation", "--wheel", "--outdir", str(wheel), str(copy)]
    environment = {**os.environ, "SETUPTOOLS_SCM_PRETEND_VERSION": "7.8.9"}
    subprocess.run([sys.executable, "-m", "build", *words], check=True, env=environment, capture_output=True)
    shutil.copy(ROOT / "constraints.txt", wheel)
    program = tmp_path / "opt" / "phalanx" / "bin"
    environment = {**os.environ, "PATH": f"{program}:{os.environ['PATH']}"}
    del environment["PYTHONPATH"]
    first, *others = _python_layer(file, tmp_path).split("\n", 1)
    subprocess.run(["sh", "-euc", first], check=True, env=environment)
    _lend_torch(tmp_path)
    done = subprocess.run(["sh", "-euc", *others], check=False, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for words in (["phalanx", "--version"], ["pip", "check"]):
        done = subprocess.run(
            [str(program / words[0]), *words[1:]], check=False, env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout == "No broken requirements found.\n"


def test_both_machines_have_the_same_layer() -> None:
    frontier, lumi = (_sections(file.read_text("utf-8"))["post"] for file in DEFINITIONS)
    assert frontier == lumi
