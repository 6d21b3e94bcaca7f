"""Every example from a copy of `examples/` with nothing beside it: with the data that its first lines make, or a dry run."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import yaml

from command_line import Call
from graph_files import write_set
from phalanx.config.load import load_run
from phalanx.config.schema import Run
from phalanx.families.language.config import LanguageRun

EXAMPLES = Path(__file__).parents[2] / "examples"
FILES = sorted(path.relative_to(EXAMPLES).as_posix() for path in EXAMPLES.rglob("*.yaml"))
ONE_STEP = (
    "training.steps=1 optimizer.warmup_steps=0 training.tensorboard=false evaluation.samples=2 evaluation.every=null"
)
ONE_RANK = (
    "layout.tp=1 layout.pp=1 layout.cp=1 layout.ep=1 layout.dp_shard=1 layout.dp_replicate=1 layout.precision=fp32"
)
SMALL_BATCH = "layout.global_batch=4 layout.microbatch=2 checkpoint.every=null checkpoint.last=false"
SHORT = {
    "weather": "--days 40",
    "molecules": "--trajectories 12",
    "grains": "--polycrystals 24",
    "plate": "--plates 24",
    "text": "--workers 1",
}
"""Options that make less of each sample."""
DAYS = "data.splits={train: {first: step 0, last: step 39}, validation: {first: step 46, last: step 59}}"


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that holds a copy of the examples and nothing else."""
    folder = tmp_path_factory.mktemp("clone")
    shutil.copytree(EXAMPLES, folder / "examples")
    return folder


@pytest.fixture(autouse=True)
def _beside_nothing(clone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(clone)


def _opening(name: str) -> str:
    """Return the comment that a file begins with."""
    text = (EXAMPLES / name).read_text()
    return "\n".join(line for line in text.split("\n\n")[0].splitlines() if line.startswith("#"))


def _smaller(run: Run) -> list[str]:
    """Return overrides that leave a model of the same kind that any test has time for."""
    if not isinstance(run, LanguageRun):
        return ["model.d_model=32", "model.n_layers=1", *(["model.n_heads=4"] if run.model.family == "weather" else [])]
    model = run.model
    sizes = {"n_layers": 2, "d_model": 64, "n_heads": 4, "d_ff": 128, "vocab_size": 2048}
    if model.n_kv_heads is not None:
        sizes["n_kv_heads"] = 2
    words = [f"model.{name}={size}" for name, size in sizes.items()]
    if model.experts is not None:
        words += ["model.experts.count=16", "model.experts.active=8", "model.experts.d_ff=32"]
        # Blocks in front without experts are a part of some models: one of the two is left to them.
        words += ["model.experts.dense_layers=1"] if model.experts.dense_layers else []
    return [*words, "data.sequence_length=64"]


def test_each_says_what_makes_its_data_or_what_to_prepare() -> None:
    for name in FILES:
        opening = _opening(name)
        assert ("phalanx data sample " in opening) != ("# To prepare: " in opening), name


@pytest.mark.parametrize("name", [name for name in FILES if "phalanx data sample " in _opening(name)])
def test_it_trains_on_the_sample_that_it_names(name: str, call: Call) -> None:
    found = re.search(r"phalanx data sample (\w+) --out ([\w/-]+)", _opening(name))
    assert found is not None
    kind, out = found.groups()
    if not Path(out).exists():
        made = call("data", "sample", kind, "--out", out, *SHORT[kind].split())
        assert made.code == 0, made.err
    path = f"examples/{name}"
    words = [*ONE_STEP.split(), *ONE_RANK.split(), *SMALL_BATCH.split(), *_smaller(load_run(path))]
    if name.startswith("materials-"):
        assert call("data", "prepare-graphs", path, "--workers", "1").code == 0
    if kind == "weather":
        words.append(DAYS)
    done = call("train", path, *words)
    assert done.code == 0, done.err
    assert len(Path("runs", Path(name).stem, "metrics.jsonl").read_text().splitlines()) == 1


TO_PREPARE = [name for name in FILES if "# To prepare: " in _opening(name)]
STRUCTURES = [name for name in TO_PREPARE if name.startswith("materials-")]


@pytest.mark.parametrize("name", sorted({*TO_PREPARE} - {*STRUCTURES, "own_model/run.yaml"}))
def test_it_runs_dry_without_what_is_to_be_prepared(name: str, call: Call) -> None:
    path = f"examples/{name}"
    run = load_run(path)
    words = [*ONE_RANK.split(), *SMALL_BATCH.split(), *_smaller(run)]
    done = call("dryrun", path, "--devices", "1", *words)
    assert done.code == 0, done.err
    assert "took" in done.out


@pytest.mark.parametrize("name", STRUCTURES)
def test_it_trains_on_structures_as_it_describes_them(name: str, call: Call) -> None:
    """Steps of structures have no one shape to run dry with: files stand in that hold what the example says they do."""
    folder = Path("data/stand-ins")
    folder.mkdir(parents=True, exist_ok=True)
    copies = np.arange(40)
    charges = write_set(folder / "xtb_6k.npz", 40, qm9_index=copies)["charges"]
    props = np.random.default_rng(0).normal(size=(40, 15))
    write_set(folder / "qm9_12k.npz", 40, qm9_index=copies, mulliken=charges, props=props)
    write_set(folder / "alloy_emt_1500.npz", 40, periodic=True)
    copy = Path("examples", f"stand-in-{name}")
    copy.write_text((EXAMPLES / name).read_text().replace("data/molecules/", f"{folder}/"))
    prepared = f"data.prepared=data/graphs/{Path(name).stem}"
    made = call("data", "prepare-graphs", str(copy), prepared, "--workers", "1")
    assert made.code == 0, made.err
    words = [*ONE_STEP.split(), *SMALL_BATCH.split(), *_smaller(load_run(copy)), prepared]
    done = call("train", str(copy), *words)
    assert done.code == 0, done.err


def test_what_an_own_model_needs_is_told(call: Call) -> None:
    """Its run file is run, with its package installed, by `test_own_model`."""
    assert yaml.safe_load(Path("examples/own_model/run.yaml").read_text())["data"]["source"] == "chirps"
    assert "gated_conv is not a model family" in call("config", "check", "examples/own_model/run.yaml").err
