"""`phalanx ensemble` as a person calls it."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from ensemble_members import train_members
from materials_runs import write_materials_run
from phalanx.cli.models import ensemble as subcommand
from phalanx.cli.models.ensemble import (
    Candidate,
    compare_with_best,
    find_candidates,
    print_ensemble,
    recipes_for,
    split_arguments,
)
from phalanx.config.load import load_run
from phalanx.errors import ConfigError
from phalanx.families.materials.data.prepare_structures import prepare_graphs
from phalanx.families.materials.ensemble.build_ensemble import EnsembleOptions

if TYPE_CHECKING:
    from command_line import Call


@pytest.fixture(scope="module")
def member_dirs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return train_members(tmp_path_factory.mktemp("verb"))


class _Page(HTMLParser):
    """Tags that must be closed, and every address."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.addresses: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in ("meta", "link", "rect", "line", "circle", "polyline", "img"):
            self.open.append(tag)
        self.addresses += [value or "" for name, value in attrs if name in ("src", "href")]

    def handle_endtag(self, tag: str) -> None:
        if self.open and self.open[-1] == tag:
            self.open.pop()


def test_an_ensemble_from_runs(
    call: Call, member_dirs: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "ensemble"
    runs = [str(folder) for folder in member_dirs]
    done = call("ensemble", *runs, "--out", str(out), "--top", "2", "--weights", "equal", "--device", "cpu", "--json")
    assert done.code == 0, done.err
    found = json.loads(done.out)
    assert len(found["members"]) == 2 and len(found["candidates"]) == 3
    assert {label["quantity"] for label in found["labels"]} == {"energy", "forces", "charges"}
    document = json.loads((out / "ensemble.json").read_text())
    assert [member["weight"] for member in document["members"]] == [0.5, 0.5]
    assert document["facts"]["selection"] == found["selection"]
    page = (out / "report.html").read_text()
    parser = _Page()
    parser.feed(page)
    assert parser.open == [] and parser.addresses == ["data:,"]
    for label in found["labels"]:
        assert f"toy {label['quantity']}" in page
    assert "nan" not in page.lower().replace("ensemble", "") and page.count("<svg viewBox") > 6
    said = []
    for weights in ((0.5, 0.5), (1.0, 0.0)):
        members = [member | {"weight": one} for member, one in zip(found["members"], weights, strict=True)]
        print_ensemble(found | {"members": members})
        said.append("warning: all weight is on one member" in capsys.readouterr().out)
    assert said == [False, True]


def test_a_person_reads_errors_and_coverage(call: Call, member_dirs: list[Path], tmp_path: Path) -> None:
    runs = [str(folder) for folder in member_dirs]
    words = ["--diversity", "0", "--calibration", "floor", "--device", "cpu"]
    done = call("ensemble", *runs, "--out", str(tmp_path), "--html", str(tmp_path / "a.html"), *words)
    assert done.code == 0, done.err
    first, *rest = done.out.splitlines()
    assert first == "3 of 3 candidates:"
    (forces,) = [line for line in rest if "toy forces" in line]
    assert forces.endswith("floor; meV/A") and forces.count("%") >= 4
    assert rest[-1] == str(tmp_path / "a.html")


def test_seeds_are_trained_as_real_runs(call: Call, tmp_path: Path) -> None:
    shares = {"data.validation_fraction": 0.4, "data.test_fraction": 0.4}
    run_file = write_materials_run(tmp_path, shares, structures=60)
    prepare_graphs(load_run(run_file).data, workers=1)  # type: ignore[arg-type]
    words = ["--train", "--seeds", "2", "training.steps=1", "--device", "cpu", "--json"]
    done = call("ensemble", str(run_file), "--out", str(tmp_path / "e"), *words)
    assert done.code == 0, done.err
    assert done.err.count(": trained\n") == 2
    found = json.loads(done.out)
    assert [member["name"] for member in found["members"]] in (["seed-0", "seed-1"], ["seed-1", "seed-0"])
    for seed in (0, 1):
        run = load_run(tmp_path / "e" / "members" / f"seed-{seed}")
        assert (run.training.seed, run.training.steps) == (seed, 1)


def test_of_a_study_the_best_trials_are_candidates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "study.log").touch()
    trials = [Candidate(tmp_path / str(number), 0.1 * number, f"trial-{number:04d}") for number in range(30)]
    monkeypatch.setattr(subcommand, "study_candidates", lambda folder: trials)
    found, wanted = find_candidates([tmp_path], EnsembleOptions(), train=False)
    assert (found, wanted.top) == (trials[:20], 5)
    found, wanted = find_candidates([tmp_path], EnsembleOptions(top=3), train=False)
    assert (found, wanted.top) == (trials[:12], 3)
    with pytest.raises(ConfigError, match="has 30 trials with a score; give --top 30 at most"):
        find_candidates([tmp_path], EnsembleOptions(top=31), train=False)
    monkeypatch.setattr(subcommand, "study_candidates", lambda folder: trials[:1])
    with pytest.raises(
        ConfigError, match="has 1 trials with a score, an ensemble has at least two members; let phalanx"
    ):
        find_candidates([tmp_path], EnsembleOptions(), train=False)
    with pytest.raises(ConfigError, match="is a study; name it alone"):
        find_candidates([tmp_path, tmp_path / "other"], EnsembleOptions(), train=False)


def test_a_place_that_cannot_be_written_is_refused_before_anything_is_computed(call: Call, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for out in (tmp_path / "file", tmp_path / "file" / "below"):
        done = call("ensemble", "nowhere", "--out", str(out))
        assert done.code == 2 and " ".join(done.err.split()).endswith(f"{tmp_path}/file is a file; name a folder")


def test_words_are_told_from_members(tmp_path: Path) -> None:
    strange = tmp_path / "a.b=c"
    strange.mkdir()
    paths, words = split_arguments(["runs/a", "data.prepared=x=y", str(strange), "model.energy.weight=2"])
    assert paths == [Path("runs/a"), strange]
    assert words == ["data.prepared=x=y", "model.energy.weight=2"]


def test_recipes_have_names_and_seeds_of_their_own(tmp_path: Path) -> None:
    run_file = write_materials_run(tmp_path)
    one = Candidate(run_file, name="run")
    recipes = recipes_for([one], ["training.seed=7", "training.steps=3"], tmp_path / "out", 3)
    assert [recipe.words[-1] for recipe in recipes] == [f"training.seed={seed}" for seed in (7, 8, 9)]
    assert len({recipe.folder for recipe in recipes}) == 3
    with pytest.raises(ConfigError, match="two members are named run"):
        recipes_for([one, Candidate(tmp_path / "other" / "run.yaml", name="run")], [], tmp_path, None)
    with pytest.raises(ConfigError, match="--seeds 2 is for one configuration; 2 are named"):
        recipes_for([one, one], [], tmp_path, 2)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nowhere"], "nowhere does not exist; name folders of runs, or of a study"),
        (["training.steps=3"], "no member is named"),
        (["RUN"], "run.yaml is a run file, not a trained run; add --train, or name the folder of its run"),
        (["FOLDER", "--seeds", "3"], "--seeds 3 says what to train; add --train"),
        (["FOLDER"], "holds no whole checkpoint"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(call: Call, tmp_path: Path, words: list[str], message: str) -> None:
    places: dict[str, Any] = {"RUN": write_materials_run(tmp_path / "run"), "FOLDER": tmp_path}
    done = call("ensemble", *(str(places.get(word, word)) for word in words), "--out", str(tmp_path / "out"))
    assert done.code in (1, 2)
    assert done.err.startswith("error: ") and message in done.err and done.err.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_an_ensemble_that_is_worse_than_its_best_member_is_called_so() -> None:
    assert compare_with_best(1.5, 1.75) == "0.2500 below that of the best member"
    assert compare_with_best(4.0859, 3.5) == "0.5859 above that of the best member: worse than it alone"
