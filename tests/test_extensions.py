"""Extensions by name: what comes along, what a program registers, and what installed packages offer."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from phalanx.errors import ConfigError, PhalanxError
from phalanx.extensions import Registry

GROUP = "phalanx.test_shapes"


def registry() -> Registry[int]:
    return Registry(
        GROUP,
        built_in={"byte_order": "sys:maxsize", "limit": "sys:maxunicode"},
        accepts=lambda item: isinstance(item, int),
        expected="a number",
    )


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder that packages may be installed into."""
    monkeypatch.syspath_prepend(str(tmp_path))
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        del sys.modules[name]


def install(site: Path, package: str, entries: str, source: str = "") -> None:
    """Put a module and the metadata that an installer leaves for it into `site`."""
    module = package.replace("-", "_")
    (site / f"{module}.py").write_text(source)
    folder = site / f"{module}-1.5.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.5\n")
    (folder / "entry_points.txt").write_text(f"[{GROUP}]\n{entries}\n")


def test_items_that_come_along_and_registered_ones_are_found() -> None:
    shapes = registry()
    shapes.register("three", 3)
    shapes.register("three", 3)
    assert shapes.get("three") == 3
    assert shapes.get("limit") == sys.maxunicode
    assert shapes.names() == ["byte_order", "limit", "three"]


def test_an_installed_package_is_imported_at_the_first_look_up(site: Path) -> None:
    install(site, "square-shapes", "square = square_shapes:SIDES", "SIDES = 4")
    shapes = registry()
    assert "square" in shapes.names()
    assert "square_shapes" not in sys.modules
    assert shapes.get("square") == 4
    assert "square_shapes" in sys.modules


def test_an_unknown_name_tells_the_nearest_and_all() -> None:
    with pytest.raises(ConfigError) as raised:
        registry().get("limits", "training.shape")
    said = str(raised.value)
    assert said.startswith("training.shape=limits: ")
    assert "did you mean limit?" in said
    assert "known: byte_order, limit." in said


@pytest.mark.parametrize("source", ["raise ValueError('no such thing')", "import a_module_that_is_not_there", "x = ("])
def test_a_package_that_cannot_be_imported_is_named(site: Path, source: str) -> None:
    install(site, "broken-shapes", "broken = broken_shapes:ITEM", source)
    shapes = registry()
    assert shapes.get("limit") == sys.maxunicode
    with pytest.raises(PhalanxError, match=r"package broken-shapes 1\.5 offers .*'broken' as broken_shapes:ITEM"):
        shapes.get("broken")


def test_a_missing_attribute_and_another_kind_of_object_name_the_package(site: Path) -> None:
    install(site, "odd-shapes", "nothing = odd_shapes:ITEM\ntext = odd_shapes:TEXT", "TEXT = 'four'")
    with pytest.raises(PhalanxError, match=r"package odd-shapes 1\.5 .*cannot be imported: AttributeError"):
        registry().get("nothing")
    with pytest.raises(PhalanxError, match=r"package odd-shapes 1\.5 .*is 'four'; a number is expected"):
        registry().get("text")


def test_one_name_stands_for_one_item(site: Path) -> None:
    shapes = registry()
    with pytest.raises(PhalanxError, match="'limit' is registered already"):
        shapes.register("limit", 2)
    shapes.register("two", 2)
    with pytest.raises(PhalanxError, match="'two' is registered already"):
        shapes.register("two", 3)
    install(site, "first-shapes", "square = first_shapes:SIDES", "SIDES = 4")
    install(site, "second-shapes", "square = second_shapes:SIDES", "SIDES = 4")
    with pytest.raises(PhalanxError, match=r"-shapes 1\.5 offers .*'square', and so does package .*-shapes 1\.5"):
        registry().get("square")


def test_a_package_may_not_take_the_name_of_an_item_that_comes_along(site: Path) -> None:
    install(site, "greedy-shapes", "limit = greedy_shapes:SIDES", "SIDES = 4")
    with pytest.raises(PhalanxError, match=r"package greedy-shapes 1\.5 .*and so does phalanx itself"):
        registry().names()


def test_registering_an_object_of_another_kind_is_refused() -> None:
    with pytest.raises(PhalanxError, match="'text' is 'four'; a number is expected"):
        registry().register("text", "four")  # type: ignore[arg-type]
