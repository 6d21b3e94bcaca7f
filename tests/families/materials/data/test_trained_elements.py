"""Which elements each branch was trained on: by its own sources, and by what its weights were trained on before."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from graph_files import graph_data, write_set
from phalanx.errors import CheckpointError
from phalanx.families.materials.data.manifest import Statistics
from phalanx.families.materials.data.prepare import prepare_graphs
from phalanx.families.materials.data.shards import open_prepared
from phalanx.families.materials.data.trained_elements import elements_of, trained_elements, untrained_in, write_elements
from phalanx.families.materials.model_config import Branch


def statistics(*elements: int) -> Statistics:
    return Statistics(
        elements=dict.fromkeys(elements, 1),
        largest_atoms=1,
        largest_edges=0,
        degrees=[1],
        labels={},
        reference_energies={},
        residual_std=None,
    )


SOURCES = [statistics(1, 8), statistics(1, 79)]
BRANCHES = [Branch(name="water"), Branch(name="gold")]


def test_each_branch_has_those_of_its_source_and_a_single_one_all() -> None:
    apart = elements_of(SOURCES, BRANCHES)
    assert apart is not None
    assert (apart.of("water"), apart.of("gold"), apart.everywhere) == ({1, 8}, {1, 79}, {1, 8, 79})
    assert (apart.branches_with(1), apart.branches_with(8), apart.branches_with(2)) == (
        ["water", "gold"],
        ["water"],
        [],
    )
    together = elements_of(SOURCES, [Branch(name="main")])
    assert together is not None and together.of("main") == together.everywhere == {1, 8, 79}


def test_a_file_says_what_was_written(tmp_path: Path) -> None:
    known = elements_of(SOURCES, BRANCHES)
    assert known is not None
    write_elements(known, tmp_path)
    assert trained_elements(tmp_path) == trained_elements(tmp_path / "checkpoints" / "step-1") == known
    assert trained_elements(tmp_path / "elsewhere") is None


@pytest.mark.parametrize("text", ["{}", "[]", '{"atomic_numbers": [1], "branches": [1]}', "{"])
def test_a_file_of_something_else_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "elements.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"elements.json: this is no list of atomic numbers"):
        trained_elements(tmp_path)


def test_weights_keep_what_they_were_trained_on_before(tmp_path: Path) -> None:
    first = elements_of([statistics(6), statistics(1, 79)], BRANCHES)
    assert first is not None
    write_elements(first, tmp_path)
    then = elements_of(SOURCES, BRANCHES, tmp_path)
    assert then is not None and (then.of("water"), then.of("gold")) == ({1, 6, 8}, {1, 79})
    # A new name can only be given to branches that share their heads, which all data trained.
    renamed = elements_of(SOURCES[:1], [Branch(name="mine")], tmp_path)
    assert renamed is not None and renamed.of("mine") == {1, 6, 8, 79}
    assert elements_of(SOURCES, BRANCHES, tmp_path / "elsewhere") is None


def test_elements_whose_reference_energy_is_gone_are_known_no_more(tmp_path: Path) -> None:
    first = elements_of([statistics(6, 7), statistics(1, 79)], BRANCHES)
    assert first is not None
    write_elements(first, tmp_path)
    named = Branch(name="water", reference_energies={"1": -13.6, "6": -1000.0})
    then = elements_of(SOURCES, [named, BRANCHES[1]], tmp_path)
    # Nitrogen would be 0 eV now; oxygen is trained on, wherever it begins.
    assert then is not None and (then.of("water"), then.of("gold")) == ({1, 6, 8}, {1, 79})


def test_a_run_that_does_not_tell_branches_apart_means_all_of_them(tmp_path: Path) -> None:
    (tmp_path / "elements.json").write_text('{"atomic_numbers": [1, 6]}')
    known = trained_elements(tmp_path)
    assert known is not None and known.of("water") == {1, 6} and known.branches_with(6) == []
    then = elements_of(SOURCES, BRANCHES, tmp_path)
    assert then is not None and (then.of("water"), then.of("gold")) == ({1, 6, 8}, {1, 6, 79})


def test_structures_of_other_elements_are_counted(tmp_path: Path) -> None:
    arrays = write_set(tmp_path / "set.npz", 30)
    source = {"name": "set", "path": str(tmp_path / "set.npz"), "labels": {"energy": "eV"}}
    data = graph_data(tmp_path / "prepared", [source], validation_fraction=0.0, test_fraction=0.0)
    prepare_graphs(data, workers=1, piece_structures=11)
    (opened,) = open_prepared(data, "train")
    items = np.array([0, 3, 12, 29])
    structures = [set(arrays["z"][arrays["ptr"][item] : arrays["ptr"][item + 1]].tolist()) for item in items]
    assert untrained_in(opened, items, frozenset({7})) == {
        element: count for element in (6, 8) if (count := sum(element in one for one in structures))
    }
    assert untrained_in(opened, items, frozenset({6, 7, 8})) == {}
