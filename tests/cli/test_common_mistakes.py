"""Common mistakes: each message names the field, its value and the fix, and stands in the guide as it is printed."""

from __future__ import annotations

import re
import shlex
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from command_line import Call
from graph_files import write_set
from token_data import write_token_folder

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/reference/mistakes.md"


@dataclass(frozen=True)
class Mistake:
    """One mistake, and what its message must name."""

    what: str
    command: str
    field: str
    """Field, option or file that is wrong."""
    value: str
    fix: str
    """What would be right."""
    absent: str = ""
    """Package that is not installed."""


QUICKSTART = "phalanx config check examples/quickstart.yaml"
NO_DATA = "--no-data"
MISTAKES: dict[str, tuple[Mistake, ...]] = {
    "Names": (
        Mistake(
            "A field is misspelt.", f"{QUICKSTART} layout.microbach=2", "layout.microbach", "2", "layout.microbatch"
        ),
        Mistake(
            "A field is in another section.", f"{QUICKSTART} training.lr=1e-3", "training.lr", "0.001", "optimizer.lr"
        ),
        Mistake("A section is misspelt.", f"{QUICKSTART} optimiser.lr=1e-3", "optimiser", "optimiser", "optimizer"),
        Mistake(
            "A preset is misspelt.",
            "phalanx config check examples/llama3-8b.yaml model.preset=llama3-8",
            "model.preset",
            "llama3-8",
            "model.preset=llama3-8b",
        ),
        Mistake(
            "An optimizer has another name.", f"{QUICKSTART} optimizer.name=adam", "optimizer.name", "adam", "adamw"
        ),
        Mistake("A subcommand is misspelt.", "phalanx trian examples/quickstart.yaml", "command", "trian", "train"),
        Mistake(
            "A run file is misspelt.",
            "phalanx train examples/quikstart.yaml",
            "run file",
            "examples/quikstart.yaml",
            "examples/quickstart.yaml",
        ),
        Mistake(
            "A cluster is misspelt.",
            "phalanx plan examples/gpt-175b.yaml --cluster frontir --devices 64",
            "--cluster",
            "frontir",
            "frontier",
        ),
    ),
    "Values": (
        Mistake(
            "Text stands where a number does.", f"{QUICKSTART} optimizer.lr=fast", "optimizer.lr", "fast", "a number"
        ),
        Mistake(
            "A count is written as a float.",
            f"{QUICKSTART} training.steps=1e3",
            "training.steps",
            "1000.0",
            "training.steps=1000",
        ),
        Mistake(
            "A number format is not one of those.",
            f"{QUICKSTART} layout.precision=fp8",
            "layout.precision",
            "fp8",
            "fp8-tensor, fp8-row, fp8-row-experts, fp8-block or mxfp8",
        ),
        Mistake(
            "An override has no value.",
            f"{QUICKSTART} training.steps",
            "training.steps",
            "not an override",
            "section.field=value",
        ),
        Mistake(
            "A field stands twice in the file.", "phalanx config check twice.yaml", "training.seed", "twice", "line 27"
        ),
        Mistake(
            "A tab indents a line.", "phalanx config check tabs.yaml", "tabs.yaml:27", r"'\t'", "cannot start any token"
        ),
        Mistake(
            "Heads do not divide the width.",
            f"{QUICKSTART} model.n_heads=7",
            "n_heads",
            "7",
            "give head_dim or change one",
        ),
        Mistake(
            "A field has no effect in this run.",
            f"{QUICKSTART} optimizer.momentum=0.9",
            "optimizer.momentum",
            "0.9",
            "optimizer.name=muon",
        ),
        Mistake(
            "The warm-up is longer than the run.",
            f"{QUICKSTART} optimizer.warmup_steps=1000",
            "optimizer.warmup_steps",
            "1000",
            "optimizer.warmup_steps=300",
        ),
    ),
    "Units and batches": (
        Mistake(
            "A batch in tokens is no whole number of samples.",
            f"{QUICKSTART} 'layout.global_batch=100000 tokens'",
            "layout.global_batch",
            "100000 tokens",
            "99840 tokens",
        ),
        Mistake(
            "A batch of fields is counted in tokens.",
            "phalanx config check examples/climax-small.yaml 'layout.global_batch=4096 tokens'",
            "layout.global_batch",
            "4096 tokens",
            "layout.global_batch=16",
        ),
        Mistake(
            "A batch is written with a unit of its own.",
            f"{QUICKSTART} layout.global_batch=4k",
            "layout.global_batch",
            "4k",
            '"524288 tokens"',
        ),
        Mistake(
            "A micro-batch does not divide the batch.",
            f"{QUICKSTART} microbatch=3",
            "layout.microbatch",
            "3",
            "layout.microbatch=2",
        ),
        Mistake(
            "Energies are given per amount of matter.",
            "phalanx data prepare-graphs examples/materials-quickstart.yaml"
            " 'data.sources.0.labels={energy: kcal, forces: eV/A}'",
            "data.sources.clusters.labels.energy",
            '"kcal"',
            "kcal/mol",
        ),
        Mistake(
            "Forces have the unit of an energy.",
            "phalanx data prepare-graphs examples/materials-quickstart.yaml"
            " 'data.sources.0.labels={energy: eV, forces: eV}'",
            "data.sources.clusters.labels.forces",
            '"eV"',
            "energy * length^-1",
        ),
        Mistake(
            "Lead times in hours miss the last one.",
            "phalanx config check examples/climax-small.yaml data.lead_hours.step=7",
            "data.lead_hours",
            "step=7",
            "take last=68",
        ),
        Mistake(
            "A job asks for more hours than the queue gives.",
            "phalanx launch examples/llama3-8b.yaml --cluster frontier --nodes 2 --account ABC123 --time 48:00:00",
            "--time",
            "48:00:00",
            "--time 02:00:00",
        ),
    ),
    "Degrees": (
        Mistake(
            "A degree does not divide the heads.",
            f"{QUICKSTART} {NO_DATA} tp=4",
            "layout.tp",
            "4",
            "nearest legal: dp_shard=2 tp=2",
        ),
        Mistake(
            "Degrees do not divide the ranks.",
            f"{QUICKSTART} {NO_DATA} --nproc 6 tp=4",
            "layout.tp",
            "4",
            "nearest legal: tp=2 pp=3",
        ),
        Mistake(
            "More stages than layers.",
            f"{QUICKSTART} {NO_DATA} pp=8",
            "layout.pp",
            "8",
            "nearest legal: dp_shard=2 pp=4",
        ),
        Mistake(
            "Two degrees are left open.",
            f"{QUICKSTART} {NO_DATA} tp=auto pp=auto",
            "layout.tp",
            "auto",
            "give the rest",
        ),
        Mistake(
            "More data-parallel ranks than samples.",
            f"{QUICKSTART} {NO_DATA} --nproc 32",
            "layout.global_batch",
            "16",
            "nearest legal: dp_shard=16 tp=2",
        ),
        Mistake(
            "Tensor parallelism leaves the node.",
            "phalanx config check examples/orbit-113b.yaml --no-data tp=16",
            "layout.tp",
            "16",
            "nearest legal: tp_across_nodes=true",
        ),
        Mistake(
            "Fewer ranks are started than the degrees multiply to.",
            "phalanx train examples/quickstart.yaml --nproc 2 tp=4",
            "layout.tp",
            "4",
            "nearest legal: tp=2",
        ),
    ),
    "Data": (
        Mistake(
            "Text was not prepared.",
            "phalanx config check examples/text-30m.yaml",
            "data/text",
            "nothing there",
            "phalanx data prepare TEXT --out data/text",
        ),
        Mistake(
            "Raw text is named in place of prepared.",
            f"{QUICKSTART} data.sources=[texts]",
            "texts",
            "novel.txt",
            "phalanx data prepare texts --out FOLDER",
        ),
        Mistake(
            "Fields are not where they are looked for.",
            "phalanx config check examples/climax-small.yaml",
            "data/weather/weather.nc",
            "nothing there",
            "name a netCDF file, a zarr store",
        ),
        Mistake(
            "Structures were not prepared.",
            "phalanx config check examples/materials-quickstart.yaml",
            "data/graphs/quickstart/clusters",
            "No such file",
            "phalanx data prepare-graphs",
        ),
        Mistake(
            "The vocabulary is smaller than the tokenizer's.",
            f"{QUICKSTART} model.vocab_size=128",
            "model.vocab_size",
            "128",
            "at least 257",
        ),
        Mistake(
            "Samples are longer than the model's positions.",
            f"{QUICKSTART} data.sequence_length=512",
            "data.sequence_length",
            "512",
            "model.max_positions=512",
        ),
        Mistake(
            "There is nothing to resume.",
            "phalanx train examples/quickstart.yaml training.resume=must",
            "training.resume",
            "must",
            "training.resume=auto",
        ),
    ),
    "Memory, machines and packages": (
        Mistake(
            "The model does not fit into these devices.",
            "phalanx plan examples/llama3-8b.yaml --cluster h200-x4 --devices 1",
            "1 x 141 GiB",
            "needs 141.7 GiB",
            "smallest number of devices that fits: 2",
        ),
        Mistake(
            "A job asks for more nodes than there are.",
            "phalanx launch examples/llama3-8b.yaml --cluster frontier --nodes 20000 --account ABC123",
            "--nodes",
            "20000",
            "--nodes 9472",
        ),
        Mistake(
            "A job names no account.",
            "phalanx launch examples/llama3-8b.yaml --cluster frontier --nodes 2",
            "frontier",
            "no job without an account",
            "--account PROJECT",
        ),
        Mistake(
            "An extra is not installed.",
            "phalanx train examples/quickstart.yaml training.wandb=mine",
            "training.wandb",
            "mine",
            "pip install 'phalanx-train[wandb]'",
            absent="wandb",
        ),
    ),
}
ALL = [mistake for group in MISTAKES.values() for mistake in group]


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the examples, prepared text, raw text and structures, and two run files that are badly written."""
    folder = tmp_path_factory.mktemp("clone")
    shutil.copytree(ROOT / "examples", folder / "examples")
    write_token_folder(folder / "data" / "python-stdlib")
    (folder / "texts").mkdir()
    (folder / "texts" / "novel.txt").write_text("It was a dark and stormy night.")
    for name, periodic in (("clusters", False), ("crystals", True)):
        file = folder / "data" / "molecules" / f"{name}.npz"
        file.parent.mkdir(exist_ok=True)
        write_set(file, 6, periodic=periodic, trajectory=np.arange(6))
    quickstart = (ROOT / "examples" / "quickstart.yaml").read_text()
    (folder / "twice.yaml").write_text(quickstart.replace("training:\n", "training:\n  seed: 1\n  seed: 2\n"))
    (folder / "tabs.yaml").write_text(quickstart.replace("  steps", "\tsteps"))
    return folder


@pytest.mark.parametrize("mistake", ALL, ids=lambda mistake: mistake.what)
def test_field_value_and_fix_are_named(
    mistake: Mistake, clone: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(clone)
    if mistake.absent:
        # As Python has it of a package that cannot be imported.
        monkeypatch.setitem(sys.modules, mistake.absent, None)
    outcome = call(*shlex.split(mistake.command)[1:])
    assert outcome.code in (1, 2) and outcome.out == ""
    # What has gone wrong before a subcommand is known has no page of its own.
    assert (outcome.page.startswith("docs/") and (ROOT / outcome.page).is_file()) or mistake.value == "trian"
    for named in (mistake.field, mistake.value, mistake.fix):
        assert named in outcome.err, outcome.err
    assert f"{mistake.what}\n\n    $ {mistake.command}\n{_indent(outcome.err)}" in PAGE.read_text()


def test_the_guide_has_these_and_no_others() -> None:
    page = PAGE.read_text()
    assert re.findall(r"^    \$ (.*)$", page, re.MULTILINE) == [mistake.command for mistake in ALL]
    assert re.findall(r"^## (.*)$", page, re.MULTILINE) == list(MISTAKES)
    assert len({mistake.what for mistake in ALL}) == len(ALL) >= 30


def _indent(text: str) -> str:
    return "".join(f"    {line}\n" for line in text.splitlines())
