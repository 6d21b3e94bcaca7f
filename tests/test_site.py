"""The documentation as a site: it builds without a link or anchor that leads nowhere, and its diagrams are current."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def _build(folder: Path, out: Path) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "--strict",
        "--config-file",
        str(folder / "mkdocs.yml"),
    ]
    return subprocess.run([*command, "--site-dir", str(out)], check=False, capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("site")
    done = _build(ROOT, out)
    assert done.returncode == 0, done.stderr
    return out


def test_every_guide_is_a_page(site: Path) -> None:
    """Strictness reports a guide that the navigation leaves out, too; here its page is looked for."""
    guides = [file.relative_to(ROOT / "docs") for file in (ROOT / "docs").rglob("*.md")]
    assert len(guides) > 25
    for guide in guides:
        assert (site / guide.with_suffix(".html")).stat().st_size > 5_000, guide


def test_the_python_interface_is_generated(site: Path) -> None:
    page = (site / "reference" / "api.html").read_text("utf-8")
    for name in ("phalanx.api.train", "phalanx.api.plan", "phalanx.training.callbacks.Callback"):
        assert f'id="{name}"' in page, name


def test_pages_read_nothing_from_elsewhere(site: Path) -> None:
    page = (site / "index.html").read_text("utf-8")
    assert 'src="http' not in page and 'rel="stylesheet" href="http' not in page


def test_broken_links_fail_the_build(tmp_path: Path) -> None:
    """A small site with the validation of ours: a page that is not there, and a part of one that is."""
    settings = (ROOT / "mkdocs.yml").read_text("utf-8")
    validation = settings[settings.index("validation:") : settings.index("nav:\n")]
    (tmp_path / "mkdocs.yml").write_text(f"site_name: small\nuse_directory_urls: false\n{validation}", "utf-8")
    (tmp_path / "docs" / "guides").mkdir(parents=True)
    (tmp_path / "docs" / "guides" / "planning.md").write_text("# Planning\n", "utf-8")
    links = ("guides/nowhere.md", "guides/planning.md#no-such-part")
    (tmp_path / "docs" / "index.md").write_text("".join(f"[a link]({link})\n" for link in links), "utf-8")
    done = _build(tmp_path, tmp_path / "site")
    assert done.returncode != 0 and done.stderr.count("WARNING") == 2
    assert "guides/nowhere.md" in done.stderr and "#no-such-part" in done.stderr, done.stderr


def test_diagrams_are_what_the_script_draws(tmp_path: Path) -> None:
    pictures = ROOT / "docs" / "pictures"
    spec = importlib.util.spec_from_file_location("draw", pictures / "draw.py")
    assert spec is not None and spec.loader is not None
    draw = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(draw)
    draw.write_pictures(tmp_path)
    for name in ("layout.svg", "architecture.svg"):
        assert (pictures / name).read_text("utf-8") == (tmp_path / name).read_text("utf-8"), name
