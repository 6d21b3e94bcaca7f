"""`phalanx ensemble`: several trained models as one, with uncertainties that are calibrated and checked."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from phalanx.cli.console import make_progress_bar, print_json, print_lines, print_table, require_out_folder, write_file
from phalanx.cli.options.models import EnsembleArguments
from phalanx.cli.ranks import start_ranks
from phalanx.config.load import load_run
from phalanx.ensemble.family import Ensemble, EnsembleModel, EnsembleOptions
from phalanx.ensemble.members import ENSEMBLE, Member, Share, open_member
from phalanx.ensemble.train_members import Recipe, train_side_by_side
from phalanx.errors import ConfigError, PhalanxError
from phalanx.families.materials.data.trained_elements import untrained_in_words
from phalanx.families.registry import bind
from phalanx.formatting import format_number, format_percent
from phalanx.hardware.device import choose_device
from phalanx.hardware.host import available_cores
from phalanx.layout.mesh import Ranks, join_process_group, leave_process_group, ranks_from_environment
from phalanx.printable import write_stderr
from phalanx.report.ensemble_page import render_ensemble, saved_share, scale_label
from phalanx.report.table import Column

Row = dict[str, Any]

REPORT = "report.html"
MEMBERS = "members"
"""Folder of the runs that were trained for the ensemble."""
STUDY = "study.log"
"""File by which the folder of a study is known; its module is imported where there is one, for it needs an extra."""
TOP = 5
"""Members taken of a study where nobody says how many."""
_POOL = 4
"""Trials looked at for each member taken of a study."""
_OVERRIDE = re.compile(r"[a-z_]+(\.\w+)+=")


@dataclass(frozen=True)
class Candidate:
    """Something that may become a member."""

    path: Path
    score: float | None = None
    name: str = ""


def run_ensemble(asked: EnsembleArguments) -> None:
    """Run the subcommand."""
    ranks = ranks_from_environment()
    paths, words = split_arguments(asked.members)
    options = EnsembleOptions(
        top=asked.top,
        diversity=asked.diversity,
        weights=asked.weights,
        calibration=None if asked.calibration == "likeliest" else asked.calibration,
        samples=asked.samples,
        side_by_side=asked.side_by_side,
        hours=asked.hours,
    )
    require_out_folder(asked.out)
    candidates, options = find_candidates(paths, options, train=asked.train)
    if asked.seeds is not None and not asked.train:
        raise ConfigError(f"--seeds {asked.seeds} says what to train; add --train")
    if asked.train:
        candidates, options = _train_members(
            candidates, words, options, asked.out, asked.seeds, asked.jobs, asked.device, ranks
        )
        words = []
        paths = [one.path for one in candidates]
    # Members are trained once, here, and then read by all ranks
    if asked.nproc is not None:
        where = {"out": asked.out, "html": asked.html, "device": asked.device}
        start_ranks(_words_for_ranks([*map(str, paths), *words], options, where, as_json=asked.as_json), asked.nproc)
        return
    opened = [open_member(one.path, words, one.score) for one in candidates]
    model = bind(opened[0].run, EnsembleModel)
    if not model.selects_members and opened[0].score is not None:
        # A family that does not choose by errors takes the members of a study that scored best.
        opened, options = opened[: options.top], replace(options, top=None)
    family = model.run.model.family
    if options.hours is not None and not model.forecasts:
        raise ConfigError(f"--hours {options.hours} is for weather models, these are of model.family={family}")
    alike = EnsembleOptions(samples=options.samples, hours=options.hours)
    if not model.selects_members and (options != alike or words):
        raise ConfigError(
            f"an ensemble of model.family={family} takes all members alike, as they were trained: leave out "
            f"fields to change, --top, --diversity, --weights, --calibration and --side-by-side"
        )
    here = choose_device(asked.device, ranks.local_rank)
    join_process_group(ranks, here)
    built = _build_ensemble(model, opened, options, here, ranks)
    leave_process_group()
    if ranks.first:
        _write_ensemble(built, asked.out, asked.html or asked.out / REPORT, as_json=asked.as_json)


def split_arguments(words: Sequence[str]) -> tuple[list[Path], list[str]]:
    """Return members and `section.field=value` changes; what is there as a file or folder is a member."""
    changes = [word for word in words if _OVERRIDE.match(word) and not Path(word).exists()]
    paths = [Path(word) for word in words if word not in changes]
    if not paths:
        raise ConfigError("no member is named; give folders of runs, or of a study")
    return paths, changes


def find_candidates(
    paths: Sequence[Path], options: EnsembleOptions, *, train: bool
) -> tuple[list[Candidate], EnsembleOptions]:
    """Return the runs to choose from: of a study those of the best scores, several for each member that is to be chosen.

    Raises ConfigError for a run file where nothing is trained, and for a study beside something else.
    """
    studies = [path for path in paths if (path / STUDY).is_file()]
    if not studies:
        for path in paths:
            if path.is_file() and not train:
                raise ConfigError(
                    f"{path} is a run file, not a trained run; add --train, or name the folder of its run"
                )
            if not path.exists():
                raise ConfigError(f"{path} does not exist; name folders of runs, or of a study")
        return [Candidate(path, name=path.resolve().name if path.is_dir() else path.stem) for path in paths], options
    if len(paths) > 1:
        raise ConfigError(f"{studies[0]} is a study; name it alone, or name folders of runs")
    options = replace(options, top=options.top or TOP)
    assert options.top is not None
    found = study_candidates(studies[0])[: _POOL * options.top]
    if len(found) < 2:
        raise ConfigError(
            f"{studies[0]} has {len(found)} trials with a score, an ensemble has at least two members; let phalanx "
            "tune go on"
        )
    if len(found) < options.top:
        raise ConfigError(f"{studies[0]} has {len(found)} trials with a score; give --top {len(found)} at most")
    return found, options


def study_candidates(folder: Path) -> list[Candidate]:
    """Return the trials of a study that have a score, the best first."""
    try:
        from phalanx.study.hyperparameters.configuration import finished_trials  # noqa: PLC0415
    except ModuleNotFoundError as error:
        raise PhalanxError(f'a study needs the package {error.name}: pip install "phalanx-train[search]"') from error
    return [Candidate(trial.run_dir, trial.score, f"trial-{trial.number:04d}") for trial in finished_trials(folder)]


def _build_ensemble(
    model: EnsembleModel, members: Sequence[Member], options: EnsembleOptions, device: torch.device, ranks: Ranks
) -> Ensemble:
    with make_progress_bar() as bar:
        tasks: dict[str, Any] = {}

        def progress(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bar.add_task(what)
            bar.update(tasks[what], completed=done, total=total)

        share = Share(ranks.rank, ranks.world_size)
        return model.build_ensemble(members, options, device, share, progress)


def _train_members(
    candidates: Sequence[Candidate],
    words: Sequence[str],
    options: EnsembleOptions,
    out: Path,
    seeds: int | None,
    jobs: int | None,
    device: str,
    ranks: Ranks,
) -> tuple[list[Candidate], EnsembleOptions]:
    """Train the candidates as new runs: of trials with a score those that make the best ensemble as they are."""
    if ranks.world_size > 1:
        raise ConfigError("--train starts runs of its own; call it outside torchrun and srun")
    if options.top is not None and any(one.score is not None for one in candidates):
        opened = [open_member(one.path, (), one.score) for one in candidates]
        taken = list(range(options.top))
        model = bind(opened[0].run, EnsembleModel)
        if model.selects_members:
            selection = _build_ensemble(model, opened, options, choose_device(device), ranks).summary()
            names = [one["name"] for one in selection["candidates"]]
            taken = [names.index(name) for name in selection["selection"]["members"]]
        candidates, options = [candidates[number] for number in taken], replace(options, top=None)
    recipes = recipes_for(candidates, words, out, seeds)
    # A wrong override is found now and not when the first members have trained for hours
    for recipe in recipes:
        load_run(recipe.run, recipe.words)
    count = torch.accelerator.device_count() if device != "cpu" and torch.accelerator.is_available() else 0
    abreast = min(jobs or count or available_cores(), len(recipes))
    threads = max(1, available_cores() // abreast)
    train_side_by_side(recipes, abreast, threads, write_stderr, devices=count)
    return [Candidate(recipe.folder, name=recipe.name) for recipe in recipes], options


def recipes_for(candidates: Sequence[Candidate], words: Sequence[str], out: Path, seeds: int | None) -> list[Recipe]:
    """Return how members are trained: each candidate once, or one of them with several seeds."""
    folder = out / MEMBERS
    if seeds is None:
        names = [one.name for one in candidates]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise ConfigError(f"two members are named {twice}; each needs a name of its own")
        return [Recipe(one.name, one.path, tuple(words), folder / one.name) for one in candidates]
    if len(candidates) != 1:
        raise ConfigError(f"--seeds {seeds} is for one configuration; {len(candidates)} are named")
    (one,) = candidates
    first = load_run(one.path, list(words)).training.seed
    return [
        Recipe(f"seed-{seed}", one.path, (*words, f"training.seed={seed}"), folder / f"seed-{seed}")
        for seed in range(first, first + seeds)
    ]


def _words_for_ranks(
    members: Sequence[str], options: EnsembleOptions, where: dict[str, Any], *, as_json: bool
) -> list[str]:
    """Return this command again, as its ranks are to be given it: the members may have been trained meanwhile."""
    # By name and not as they were typed: members may have been trained, and options chosen, since.
    given: dict[str, Any] = {
        **where,
        "top": options.top,
        "diversity": options.diversity,
        "weights": options.weights,
        "calibration": options.calibration,
        "samples": options.samples,
        "side-by-side": options.side_by_side,
        "hours": options.hours,
    }
    words = [word for name, value in given.items() if value is not None for word in (f"--{name}", str(value))]
    return ["ensemble", *members, *words, *["--json"] * as_json]


def _write_ensemble(built: Ensemble, out: Path, page: Path, *, as_json: bool) -> None:
    summary = built.summary()
    try:
        built.document(out).write(out)
    except OSError as error:
        raise PhalanxError(f"cannot write in {out}: {error.strerror}; name another --out DIR") from error
    write_file(page, render_ensemble(summary))
    if as_json:
        print_json({"ensemble": str(out / ENSEMBLE), "report": str(page), **summary})
        return
    print_ensemble(summary)
    print_lines([str(page)])


# --- what is printed ---------------------------------------------------------------------------------------------------


def print_ensemble(summary: Row) -> None:
    """Print members, errors beside the best member's, and what calibration came to."""
    if summary["family"] == "weather":
        print_lines([f"{len(summary['members'])} members:"])
        print_lines(f"  {member['checkpoint']}" for member in summary["members"])
        print_table(FORECAST_COLUMNS, summary["forecasts"])
    elif summary["family"] == "language":
        print_lines(
            [f"{len(summary['members'])} members on the {summary['split']} split, {summary['tokens']:,} tokens:"]
        )
        print_lines(f"  loss {member['loss']:.4f}  {member['checkpoint']}" for member in summary["members"])
        compared = compare_with_best(summary["loss"], summary["best_member_loss"])
        mean = f"their mean (perplexity {format_number(summary['perplexity'])})"
        print_lines([f"  loss {summary['loss']:.4f}  {mean}, {compared}"])
    else:
        members, selection = summary["members"], summary["selection"]
        print_lines([f"{len(members)} of {len(summary['candidates'])} candidates:"])
        print_lines(f"  {member['weight']:>6.3f}  {member['checkpoint']}" for member in members)
        if len(members) > 1 and max(member["weight"] for member in members) == 1.0:
            warning = (
                "warning: all weight is on one member, so that members never differ and uncertainties are the same "
                "everywhere; take --weights equal, or other members"
            )
            print_lines([warning], style="yellow")
        if selection["by_score"] and set(selection["by_score"]) != set(selection["members"]):
            ours, others = selection["validation_error"][-1], selection["by_score_validation_error"][-1]
            print_lines([f"validation error, relative: {ours:.4f}, {others:.4f} by score alone"])
        print_table(LABEL_COLUMNS, [scale_label(label) for label in summary["labels"]])
        for split, found in summary["untrained_elements"].items():
            print_lines((f"warning: {split} split, {line}" for line in untrained_in_words(found)), style="yellow")


LABEL_COLUMNS: tuple[Column[Row], ...] = (
    Column("on the test split", lambda row: row["name"], "left"),
    Column("MAE", lambda row: format_number(row["scores"]["mae"])),
    Column("best one", lambda row: format_number(row["best_member"]["mae"])),
    Column("saved", lambda row: f"{saved_share(row):+.1%}"),
    Column("90% width", lambda row: format_number(row["scores"]["sharpness"])),
    Column("CRPS", lambda row: format_number(row["scores"]["crps"])),
    Column("50%", lambda row: format_percent(row["scores"]["coverage"]["0.5"])),
    Column("90%", lambda row: format_percent(row["scores"]["coverage"]["0.9"])),
    Column(
        "90% conf.",
        lambda row: (
            "-" if row["conformal"]["0.9"]["coverage"] is None else format_percent(row["conformal"]["0.9"]["coverage"])
        ),
    ),
    Column("rank", lambda row: f"{row['scores']['rank_correlation']:.2f}"),
    Column("calibration", lambda row: f"{row['calibration']['kind']}; {row['unit']}", "left"),
)


def _saved_rmse(row: Row) -> float:
    best = row["best_member_rmse"]
    return 1.0 - float(row["scores"]["rmse"]) / float(best) if best else 0.0


FORECAST_COLUMNS: tuple[Column[Row], ...] = (
    Column("on the test split", lambda row: row["variable"], "left"),
    Column("hours", lambda row: row["lead_hours"]),
    Column("RMSE", lambda row: format_number(row["scores"]["rmse"])),
    Column("best one", lambda row: format_number(row["best_member_rmse"])),
    Column("saved", lambda row: f"{_saved_rmse(row):+.1%}"),
    Column("CRPS", lambda row: format_number(row["scores"]["crps"])),
    Column("as is", lambda row: format_number(row["raw"]["crps"])),
    Column("spread/error", lambda row: f"{row['scores']['spread_skill']:.2f}"),
    Column("as is", lambda row: f"{row['raw']['spread_skill']:.2f}"),
)


def compare_with_best(loss: float, best: float) -> str:
    """Return how the ensemble's loss compares with that of its best member."""
    if loss <= best:
        return f"{best - loss:.4f} below that of the best member"
    return f"{loss - best:.4f} above that of the best member: worse than it alone"
