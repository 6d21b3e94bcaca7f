"""Members that train side by side: which device each is on."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from phalanx.ensemble import training
from phalanx.ensemble.training import LOG, Recipe, train_side_by_side

MEMBERS = 5


@pytest.mark.parametrize(("devices", "taken"), [(0, {0}), (1, {0}), (2, {0, 1}), (8, {0, 1, 2})])
def test_members_share_the_devices_where_there_are_fewer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, devices: int, taken: set[int]
) -> None:
    """Three at a time, in place of training a process that says which device it was given."""
    shown = tmp_path / "python"
    shown.write_text(f"#!{sys.executable}\nimport os\nprint('device', os.environ['LOCAL_RANK'])\n")
    shown.chmod(0o755)
    monkeypatch.setattr(training.sys, "executable", str(shown))
    recipes = [Recipe(f"m{number}", tmp_path / "run.yaml", (), tmp_path / f"m{number}") for number in range(MEMBERS)]
    train_side_by_side(recipes, 3, 1, devices=devices)
    words = [(recipe.folder / LOG).read_text().split() for recipe in recipes]
    assert [word for word, _ in words] == ["device"] * MEMBERS
    assert {int(number) for _, number in words} == taken
