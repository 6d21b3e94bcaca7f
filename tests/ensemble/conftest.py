"""Members that several tests look at; nobody writes into their folders."""

from __future__ import annotations

from pathlib import Path

import pytest

from ensemble_members import train_members


@pytest.fixture(scope="session")
def member_dirs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return train_members(tmp_path_factory.mktemp("members"))
