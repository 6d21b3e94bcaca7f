"""Recipes of containers: what can be known of them without building one."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

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
