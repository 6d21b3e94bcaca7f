"""Every command that help texts, the README and the guides print runs as it stands, on small files of the reader's.

Those that take long are named in `TAKES_LONG`, and `make test-guides` runs them; those that cannot run as they stand are in
`NOT_RUN`, with the reason. Of both, arguments are parsed, the run file is loaded with its overrides and the layout is
resolved on as many ranks as the command starts. A command that is not named there runs: one that a guide gains has to work,
or its reason has to be given.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import typer

import phalanx_processes
from command_line import Call
from phalanx.cli.main import SUBCOMMANDS, app
from phalanx.config.load import load_run
from phalanx.config.schema import Run
from phalanx.families.registry import bind
from phalanx.hardware.machine import load_machine
from phalanx.layout.resolve import resolve_layout, stated_ranks
from phalanx.verification.verify_run import MOST_RANKS, with_small_batch
from reader_files import write_materials_files, write_text_files, write_weather_files

ROOT = Path(__file__).parents[2]
OWN_PACKAGE = "examples/own_model/"
"""Folder of the example that is a package of its own."""
LARGE = "gpt-175b.yaml"
"""Stands for the reader's run file where a plan or a search is for hundreds of devices."""
WRITERS = {"text": write_text_files, "weather": write_weather_files, "materials": write_materials_files}
"""Of each family, what writes the files that its guides name."""
OWN_RUN_FILES = {"text": "quickstart.yaml", "weather": "climax-small.yaml", "materials": "materials-xtb.yaml"}
"""Of each family, the example that stands for the reader's own run file."""
READERS_NAMES = ("run.yaml", "RUN.yaml", "finetune.yaml")
"""Names of that file in the guides."""
TRAINS = ("train", "tune", "chaos", "bench", "ensemble", "search", "data prepare-graphs", "data prepare-fields")
"""Commands that get examples that are shrunk."""
MAKES = ("--out", "--run-dir")
"""Options that name what a command makes anew."""

PLANNED = """\
model: {n_layers: 8, d_model: 512, n_heads: 16, vocab_size: 32000, max_positions: 2048}
data: {sources: [data/text], sequence_length: 2048}
layout: {global_batch: 512}
optimizer: {lr: 1e-3}
training: {steps: 10}
"""
"""A run file that is planned and searched in seconds, for hundreds of devices too."""
TAKES_LONG: dict[str, tuple[str, ...]] = {
    "It tokenizes or computes for half a minute or more; tests/cli/test_data.py and test_data_sample.py make less.": (
        "phalanx data prepare python-stdlib --out data/python-stdlib --vocab-size 2048 --validation-fraction 0.02",
        "phalanx data sample text --out data/text",
        "phalanx data sample weather --out data/weather",
        "phalanx data sample molecules --out data/molecules",
        "phalanx data sample grains --out data/grains",
    ),
    "Its layouts or ranks are so many, or so large, that it takes ten seconds to minutes; tests/planner has smaller ones.": (
        "phalanx plan examples/gpt-175b.yaml --cluster frontier --devices 1024",
        "phalanx plan run.yaml --cluster lumi --devices 512 --scale 64..4096",
        "phalanx plan run.yaml --cluster lumi --devices 512 --why tp=2 --scale 64..4096 --html plan.html",
        "phalanx plan examples/orbit-113b.yaml --cluster frontier --devices 512 --fix --why gather=stream",
        "phalanx plan examples/orbit-113b.yaml tp=8 pp=1 --cluster frontier --devices 512 --scale 512..49152",
        "phalanx plan mpt-7b --cluster frontier --devices 64",
        "phalanx dryrun examples/gpt-1t.yaml --devices 24576 --rank 0",
        "phalanx dryrun examples/gpt-1t.yaml --devices 24576 --rank 1234 layout.global_batch=76800",
        "phalanx dryrun examples/gpt-1t.yaml --devices 24576 --rank 12345 --json",
        "phalanx dryrun examples/orbit-113b.yaml --devices 512",
        "phalanx search examples/gpt-175b.yaml --cluster frontier --devices 1024 --where simulated",
    ),
    "It starts four ranks or more and compares layouts for half a minute or more; tests/verification does of each family.": (
        "phalanx verify examples/llama3-8b.yaml tp=2 dp_shard=4",
        "phalanx verify examples/materials-xtb.yaml dp_shard=2 dp_replicate=2",
        "phalanx verify RUN.yaml cp=2 dp_shard=2",
        "phalanx verify examples/materials-three-sources.yaml dp_shard=4 layout.branch_groups=[2,1,1]",
        "phalanx verify RUN.yaml tp=2 pp=2 dp_shard=2",
        "phalanx verify RUN.yaml --all 8",
        "phalanx verify examples/orbit-1b.yaml tp=2 dp_shard=2",
        "phalanx verify examples/quickstart.yaml --all 4",
    ),
    "It starts four ranks or more; those with two run here, and `train --nproc 4` of text does.": (
        "phalanx train RUN.yaml --nproc 8",
        "phalanx train RUN.yaml --nproc 8 --nodes 2 --node-rank 1 --rendezvous node1:29500",
        "phalanx train RUN.yaml --nproc 8 --nodes 4 --node-rank 0 --rendezvous node1:29500",
        "srun --nodes 4 --ntasks-per-node 1 phalanx train RUN.yaml --nproc 8",
        "phalanx train examples/llama3-8b.yaml --nproc 8",
        "phalanx train examples/materials-three-sources.yaml --nproc 4",
        "phalanx train RUN.yaml layout.cp=4 --nproc 4",
        "phalanx train examples/materials-three-sources.yaml layout.branch_groups=auto --nproc 4",
        "phalanx evaluate runs/mpt-1b --tasks tasks.yaml --nproc 4",
        "phalanx ensemble runs/* --top 5 --out ensembles/five --nproc 4",
        "phalanx select ensembles/xtb data/pool/candidates --top 200 --out next.extxyz --nproc 4",
        "phalanx predict runs/materials-xtb 'md/*.extxyz' --out predictions --nproc 4",
    ),
    "It trains thousands of steps or many runs; tests/cli/test_train.py goes on, test_ensemble.py trains seeds.": (
        "phalanx train runs/quickstart training.steps=2000",
        "phalanx ensemble run.yaml --train --seeds 5 --out ensembles/seeds",
        "phalanx ensemble examples/materials-xtb.yaml --train --seeds 5 --out ensembles/seeds",
    ),
    "torchrun starts its ranks; tests/hardware/doctor, tests/verification and tests/training join ranks started so.": (
        "torchrun --nproc-per-node 8 -m phalanx doctor --json",
        "torchrun --nproc-per-node 8 -m phalanx train RUN.yaml",
        "torchrun --nproc-per-node 8 -m phalanx train examples/quickstart.yaml",
        "torchrun --nproc-per-node 8 -m phalanx verify RUN.yaml --full --precision fp32",
        "torchrun --nproc-per-node 8 -m phalanx verify run.yaml --full --precision fp32",
    ),
    "It measures four devices for a minute; tests/cli/test_calibrate.py and test_bench.py measure less.": (
        "phalanx calibrate --nproc 4",
        "phalanx bench examples/llama3-8b.yaml --nproc 4 --cluster h200-x4",
        "phalanx bench examples/llama3-8b.yaml dp_shard=4 --nproc 4 --cluster h200-x4",
        "phalanx doctor --nproc 4",
        "phalanx doctor --nproc 4 --json",
    ),
}
"""Commands that `make test-guides` runs, exactly as a shell would, and why no other target does."""
NOT_RUN: dict[str, tuple[str, ...]] = {
    "It asks questions on a terminal; tests/cli/test_init.py answers them.": ("phalanx init",),
    "It serves until somebody stops it; tests/cli/test_serve.py does.": (
        "phalanx report runs/mpt-1b --serve",
        "phalanx report runs/quickstart --serve",
    ),
    "The harness downloads its tasks; tests/families/language/evaluation/test_lm_harness.py has tasks of its own.": (
        "phalanx evaluate runs/mpt-125m --harness hellaswag --harness arc_easy --nproc 4",
        "phalanx evaluate runs/mpt-125m --harness own_choices --harness-tasks tasks/ --questions 100 --json",
    ),
    "It needs a forecaster that makes members; tests/families/weather/test_members.py has one.": (
        "phalanx forecast RUN_DIR --members 20 --out members.zarr",
    ),
    "Its model has a billion parameters.": ("phalanx train mpt-1b 'data.sources=[data/mytext]' --nproc 8",),
    "Slurm starts its ranks, or is handed jobs; tests/launch/test_launch.py has a Slurm of its own.": (
        "srun --ntasks-per-node=8 phalanx doctor --cluster frontier",
        "srun ... python -m phalanx train RUN.yaml",
        "phalanx search run.yaml --cluster frontier --devices 1024 --where slurm --storage /shared/study.log",
        "phalanx search run.yaml --cluster frontier --devices 1024 --where slurm --storage study.log",
        "phalanx tune run.yaml --out studies/a --where slurm --cluster frontier --trials 200",
        "phalanx tune run.yaml --out studies/big --where slurm --cluster frontier --trials 200",
        "phalanx tune run.yaml --out studies/a --where sbatch --cluster frontier --nproc 32 --account ABC123",
        "phalanx bench run.yaml --devices 64 --where slurm --cluster frontier --json",
    ),
    "It starts a training job for each trial; tests/cli/test_search.py and tests/cli/test_tune.py run a few.": (
        "phalanx search run.yaml --cluster h200-x4 --devices 4 --measure 10 --write best.yaml --html search.html",
        "phalanx search run.yaml tp=2 --cluster h200-x4 --devices 4 --engine random",
        "phalanx search examples/llama3-8b.yaml --cluster h200-x4 --devices 4 --measure 8",
        "phalanx tune examples/materials-tune.yaml --out studies/xtb --trials 48",
        "phalanx tune examples/materials-tune.yaml --out studies/materials --write best.yaml --html study.html",
        "phalanx tune run.yaml --out studies/a",
        "phalanx tune run.yaml --out studies/a --devices 4 --slots 6",
        "phalanx tune run.yaml --out studies/a --devices 2 --nproc 2",
    ),
    "It measures the devices of Frontier, and is refused on others; `phalanx calibrate --nproc 4` runs.": (
        "torchrun --nproc-per-node 8 -m phalanx calibrate --cluster frontier --out frontier.profile.yaml",
    ),
    "It trains five networks for 12,000 steps each; tests/cli/test_ensemble.py chooses of a study and trains seeds.": (
        "phalanx ensemble studies/xtb --train training.steps=12000 --out e",
    ),
    "It reads an input file of LAMMPS; test_lammps_potential.py in tests/families/materials/evaluation runs the guide's.": (
        'phalanx lammps runs/materials-xtb in.ethanol --elements "H C O" --precision fp64',
    ),
    "It injects faults for minutes; tests/faults and tests/chaos do.": (
        "phalanx chaos run.yaml --nproc 8 --minutes 30 --seed 1 --out acceptance training.steps=200 restart.heartbeat_s=10",
        "phalanx chaos examples/quickstart.yaml --nproc 2 --minutes 30",
        "phalanx chaos examples/quickstart.yaml --nproc 4 --minutes 30 --seed 1 training.steps=200",
        "phalanx chaos run.yaml --nproc 8 --faults kill,hang,bitflip dp_replicate=2",
    ),
}
"""Commands that no test runs as they stand, and why."""


@dataclass(frozen=True)
class Printed:
    """One command as it is printed."""

    where: str
    text: str
    error: str = ""
    """First line of the error that the guide shows, where it shows one."""

    def __str__(self) -> str:
        return f"{self.where}: {self.text}"

    @property
    def words(self) -> list[str]:
        """The arguments of `phalanx`."""
        words = shlex.split(self.text)
        return words[words.index("phalanx") + 1 :]

    @property
    def family(self) -> str:
        """Family of the models that it is about."""
        if self.where in ("materials.md", "ensembles.md") or re.search(r"materials-|xtb|ensemble|extxyz", self.text):
            return "materials"
        return (
            "weather" if self.where == "weather.md" or re.search(r"climax|orbit|storm|weather", self.text) else "text"
        )

    @property
    def runs(self) -> bool:
        """Whether it runs in seconds."""
        reasons = (*TAKES_LONG.values(), *NOT_RUN.values())
        return OWN_PACKAGE not in self.text and not any(self.text in texts for texts in reasons)

    @property
    def takes_long(self) -> bool:
        """Whether `make test-guides` runs it."""
        return any(self.text in texts for texts in TAKES_LONG.values())

    @property
    def ranks(self) -> int | None:
        """Ranks that the command starts: by torchrun, or by an option of its own."""
        found = re.search(r"--(?:nproc-per-node|nproc|devices) (\d+)", self.text)
        return int(found[1]) if found else None


def _commands(where: str, text: str) -> Iterator[Printed]:
    lines = text.replace("\\\n", " ").splitlines()
    for line, following in pairwise([*lines, ""]):
        stripped = line.strip().removeprefix("$ ")
        if not (line.startswith(("    ", "$ ")) or where.endswith("--help") or stripped == line):
            continue
        # Behind two blanks or a mark stands what the command is for.
        command = re.split(r"\s{2,}(?=[^-])|\s#\s", stripped)[0]
        # In brackets stands what may follow, in a line that is no command.
        if "[section.field=value" not in command and re.match(
            r"(phalanx [a-z]|torchrun .*-m phalanx |srun .*phalanx )", command
        ):
            yield Printed(where, command, following.strip() if following.strip().startswith("error:") else "")


def _in_code(text: str) -> str:
    """Return the code blocks of a guide, fenced and indented, and the commands in the second column of its tables."""
    fenced = "\n".join(re.findall(r"^```\w*\n(.*?)^```", text, re.MULTILINE | re.DOTALL))
    rest = re.sub(r"^```\w*\n.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    in_tables = re.findall(r"^\| [^|]+ \| `(phalanx [^`]+)` \|$", rest, re.MULTILINE)
    return "\n".join([fenced, *in_tables, *(line for line in rest.splitlines() if line.startswith("    "))])


@cache
def _printed() -> tuple[Printed, ...]:
    found = [
        command
        for guide in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
        # Its commands are all wrong: test_common_mistakes runs them.
        if guide.name != "mistakes.md"
        for command in _commands(guide.name, _in_code(guide.read_text("utf-8")))
    ]
    for verb in SUBCOMMANDS:
        found += [Printed(f"{verb.name} --help", text) for text in verb.examples]
        found += [
            Printed(f"{verb.name} {name} --help", command.text)
            for name, epilog in _epilogs(verb.name)
            for command in _commands("--help", epilog)
        ]
    return tuple({(one.text, one.family): one for one in reversed(found)}.values())[::-1]


def _epilogs(verb: str) -> Iterator[tuple[str, str]]:
    """Examples of the subcommands of a subcommand."""
    group: Any = typer.main.get_command(app)
    context = group.make_context("phalanx", [verb, "--help-is-not-asked"], resilient_parsing=True)
    command = group.get_command(context, verb)
    with_subcommands = command.make_context(verb, [], parent=context, resilient_parsing=True).command
    for name, each in getattr(with_subcommands, "commands", {}).items():
        yield name, each.epilog or ""


def test_all_commands_are_found() -> None:
    found = [str(command) for command in _printed()]
    for known in (
        "train --help: torchrun --nproc-per-node 8 -m phalanx train examples/quickstart.yaml",
        "config check --help: phalanx config check examples/llama3-8b.yaml --nproc 64 --no-data",
        "README.md: phalanx train examples/llama3-8b.yaml --nproc 8",
        "verify.md: phalanx verify RUN.yaml tp=2 pp=2 dp_shard=2",
        "doctor.md: srun --ntasks-per-node=8 phalanx doctor --cluster frontier",
    ):
        assert known in found
    assert len(found) > 120


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Gives the folder with what the guides to a family name; it is written when it is first asked for."""

    @cache
    def write(family: str) -> Path:
        folder = tmp_path_factory.mktemp(family)
        WRITERS[family](folder)
        return folder

    return write


def _fill(folder: Path, source: Path, command: Printed) -> None:
    """Fill a folder for one command: with all that its guide takes for granted, and without what the command makes."""
    shutil.copytree(source, folder)
    words = command.words
    if " ".join(words).startswith(TRAINS):
        shutil.copytree(folder / "small", folder / "examples", dirs_exist_ok=True)
    if words[0] != "init":
        for name in READERS_NAMES:
            if not (folder / name).exists():
                shutil.copy(folder / "examples" / OWN_RUN_FILES[command.family], folder / name)
        shutil.copy(folder / "examples" / "llama3-8b.yaml", folder)
    if words[0] in ("plan", "search"):
        (folder / "run.yaml").write_text(PLANNED)
    for before, made in pairwise(words):
        if (before in MAKES or (words[0] == "convert" and made == words[2])) and (folder / made).is_dir():
            shutil.rmtree(folder / made)


@pytest.mark.parametrize("command", [one for one in _printed() if one.runs], ids=str)
def test_a_printed_command_works(
    command: Printed,
    folder_of: Callable[[str], Path],
    call: Call,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    _fill(tmp_path / "here", folder_of(command.family), command)
    monkeypatch.chdir(tmp_path / "here")
    if "--nproc" in command.words and command.words[0] != "config":
        # It becomes the supervisor of its ranks, which takes a process of its own.
        phalanx_processes.finish(command.words)
        return
    outcome = call(*command.words)
    assert outcome.code == (2 if command.error else 0), outcome.err
    # Numbers are those of the file that stands for the reader's.
    assert _without_numbers(command.error) in _without_numbers(" ".join(outcome.err.split()))


@pytest.mark.guides
@pytest.mark.parametrize("command", [one for one in _printed() if one.takes_long], ids=str)
def test_a_command_that_takes_long_works(
    command: Printed, folder_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    here = tmp_path / "here"
    _fill(here, folder_of(command.family), command)
    # Programs of this environment, such as torchrun, and of a folder of the tree those that it has.
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=os.pathsep)
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "src"))
    monkeypatch.setenv("COLUMNS", "100")
    began = time.monotonic()
    done = subprocess.run(command.text, shell=True, check=False, cwd=here, capture_output=True, text=True, timeout=1800)
    print(f"{time.monotonic() - began:7.1f} s  exit {done.returncode}  {command}", flush=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]


def _without_numbers(text: str) -> str:
    return re.sub(r"\d+", "N", text)


@pytest.mark.parametrize("command", [one for one in _printed() if not one.runs], ids=str)
def test_what_cannot_run_here_is_understood(command: Printed, monkeypatch: pytest.MonkeyPatch) -> None:
    """Arguments are parsed, the run file is loaded with its overrides, and the layout is legal on as many ranks."""
    monkeypatch.chdir(ROOT)
    words = ["quickstart.yaml" if word == "..." else word for word in command.words]
    options = _parsed(words)
    file = options.get("run")
    # The run file of the package needs it installed; tests/examples/test_own_model.py does, and runs these commands.
    if OWN_PACKAGE in command.text or file is None or Path(file).suffix != ".yaml":
        return
    overrides = options.get("overrides") or options.get("layout") or []
    run = load_run(_example(Path(file), command, options), overrides)
    if run.layout.branch_groups == "auto":
        # Sizes by cost are read from prepared data; the guide gives those of this example.
        run = run.model_copy(update={"layout": run.layout.model_copy(update={"branch_groups": [2, 1, 1]})})
    if options.get("cluster") is not None:
        load_machine(options["cluster"])
    if words[0] in ("train", "dryrun", "bench"):
        resolve_layout(bind(run), command.ranks or 1)
    if words[0] == "verify":
        _require_verifiable(run, command, options["all_ranks"], full=options["full"])


def test_reasons_are_given_for_commands_that_are_printed() -> None:
    tables = TAKES_LONG | NOT_RUN
    reasons = {text: reason for reason, texts in tables.items() for text in texts}
    assert len(reasons) == sum(map(len, tables.values()))
    assert reasons.keys() <= {command.text for command in _printed()}
    for reason in tables:
        for file in re.findall(r"tests/[\w/.]*\w", reason):
            assert (ROOT / file).exists(), file


def _parsed(words: list[str]) -> dict[str, Any]:
    """What the subcommand makes of its arguments. Raises typer's usage errors."""
    group: Any = typer.main.get_command(app)
    context = group.make_context("phalanx", [words[0]], resilient_parsing=True)
    command = group.get_command(context, words[0])
    inner = command.make_context(words[0], words[1:], parent=context)
    if hasattr(inner.command, "commands"):
        name, subcommand, rest = inner.command.resolve_command(inner, words[1:])
        inner = subcommand.make_context(name, rest, parent=inner)
    parameters: dict[str, Any] = inner.params
    return parameters


def _example(file: Path, command: Printed, options: dict[str, Any]) -> Path:
    """Return the example that a command names, or the one that stands for the reader's own run file."""
    if (ROOT / "examples" / file.name).exists():
        return Path("examples", file.name)
    many = (options.get("devices") or 1) >= 64 or "cluster" in options
    return Path("examples", LARGE if many else OWN_RUN_FILES[command.family])


def _require_verifiable(run: Run, command: Printed, ranks: int | None, *, full: bool) -> None:
    """As `verify` starts it: on as many ranks as the degrees multiply to, with a batch of the small model's own."""
    ranks = ranks or command.ranks or stated_ranks(run)
    assert command.text.startswith(("torchrun", "srun")) or ranks <= MOST_RANKS
    resolve_layout(bind(run if full else with_small_batch(run, ranks)), ranks)
