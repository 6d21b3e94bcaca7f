"""The metric of a study: found before anything trains to be one that evaluations have, by what evaluations really gave."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from materials_runs import write_two_branches
from phalanx.config.load import load_run
from phalanx.errors import ConfigError, DataError
from phalanx.families.materials.data.prepare_structures import prepare_graphs
from phalanx.families.registry import bind
from phalanx.files import read_last_record
from phalanx.study.hyperparameters.metric import (
    check_metric,
    evaluation_at,
    read_events,
    read_figure,
    read_metrics,
    step_problem,
)
from phalanx.training.inputs import ExpectedEvaluation, TrainableModel
from phalanx.training.start import train
from token_data import write_run_file, write_token_folder
from weather_runs import write_weather_run

MATERIALS = ExpectedEvaluation(
    {
        "loss": 0.0,
        "structures": 0,
        "errors": [
            {"source": "xtb", "quantity": "forces", "unit": "eV/A", "mae": 0.0, "rmse": 0.0, "numbers": 1},
            {"source": "qm9", "quantity": "gap", "unit": "", "mae": 0.0, "rmse": 0.0, "numbers": 1},
        ],
    },
    frozenset(("loss", "mae", "rmse")),
)


@pytest.mark.parametrize(
    "name", ["loss", "errors.forces.mae", "errors.xtb.forces.rmse", "errors.qm9.gap.mae", "errors.xtb.mae"]
)
def test_a_metric_that_evaluations_have_is_taken(name: str) -> None:
    check_metric(name, MATERIALS)


def test_a_misspelt_metric_is_refused_with_those_there_are_the_nearest_first() -> None:
    with pytest.raises(ConfigError) as caught:
        check_metric("errors.force.mae", MATERIALS)
    said, nearest = str(caught.value).splitlines()
    first, _, known = said.partition("choose among ")
    assert first == "tune.metric=errors.force.mae: an evaluation of this run has no such figure; "
    assert nearest == "nearest: tune.metric=errors.forces.mae"
    names = known.split(", ")
    assert names[0] == "errors.forces.mae"
    assert sorted(names) == sorted(
        [
            "loss",
            *(f"errors.{row}.{kind}" for row in ("forces", "gap", "xtb.forces", "qm9.gap") for kind in ("mae", "rmse")),
        ]
    )


@pytest.mark.parametrize("name", ["structures", "errors.forces.numbers"])
def test_a_figure_of_which_less_is_not_better_is_refused(name: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"metric={name}: it is minimised, but less of it is not better; choose among"
    ):
        check_metric(name, MATERIALS)


def test_a_run_that_evaluates_nothing_has_no_metric() -> None:
    with pytest.raises(ConfigError, match=r"tune.metric=loss: .* hold nothing out for validation"):
        check_metric("loss", None)


def test_a_long_list_is_cut() -> None:
    many = ExpectedEvaluation(
        {f"loss_{number}": 0.0 for number in range(40)}, frozenset(f"loss_{n}" for n in range(40))
    )
    with pytest.raises(ConfigError, match=r"loss_\d+ and 10 more"):
        check_metric("nothing", many)


def test_text(tmp_path: Path) -> None:
    file = write_run_file(tmp_path / "run.yaml", write_token_folder(tmp_path / "data"))
    _as_an_evaluation_has_it(file, {"loss", "perplexity"})


def test_materials(tmp_path: Path) -> None:
    file = write_two_branches(tmp_path)
    with pytest.raises(DataError, match="prepare the source first"):
        bind(load_run(file), TrainableModel).expected_evaluation()
    prepare_graphs(load_run(file).data, workers=1)  # type: ignore[arg-type]
    found = _as_an_evaluation_has_it(file, {"loss", "mae", "rmse"})
    for name in ("errors.charges.mae", "errors.nitrides.forces.rmse"):
        check_metric(name, found)
    with pytest.raises(ConfigError, match=r"no such figure; choose among"):
        check_metric("errors.stress.mae", found)


def test_weather(tmp_path: Path) -> None:
    file = write_weather_run(tmp_path)
    found = _as_an_evaluation_has_it(file, {"loss", "rmse", "mae"})
    check_metric("scores.t850.rmse", found)
    for name in ("skill_by_lead_hours.24", "scores.t850.acc", "scores.t850.bias"):
        with pytest.raises(ConfigError, match=rf"{name}: it is minimised, but less of it is not better"):
            check_metric(name, found)
    alone = write_weather_run(tmp_path, {"data.splits": {"train": {"first": "step 0", "last": "step 159"}}})
    assert bind(load_run(alone), TrainableModel).expected_evaluation() is None


def _as_an_evaluation_has_it(file: Path, smaller: set[str]) -> ExpectedEvaluation:
    """What is expected of the run's evaluations, after comparing it with one that a run of one step wrote."""
    run = load_run(file, ["training.steps=1", "optimizer.warmup_steps=0", "evaluation.every=null"])
    expected = bind(run, TrainableModel).expected_evaluation()
    assert expected is not None and expected.less_is_better >= smaller
    train(run, file.parent / "run")
    wrote = evaluation_at(file.parent / "run", 1)
    assert wrote is not None
    assert _paths(expected.fields) == _paths({key: value for key, value in wrote.items() if key not in _LOG})
    assert read_figure(wrote, "loss") > 0.0
    return expected


_LOG = ("kind", "step", "time", "without_climatology")


def _paths(value: Any, before: str = "") -> set[str]:
    """Every number that is there, with the words of its row."""
    if isinstance(value, dict):
        words = ".".join(word for word in value.values() if isinstance(word, str))
        return {path for key, item in value.items() for path in _paths(item, f"{before}/{words}/{key}")}
    if isinstance(value, list):
        return {path for item in value for path in _paths(item, before)}
    return {before} if isinstance(value, int | float) else set()


def test_damaged_lines_of_a_log_do_not_count(tmp_path: Path) -> None:
    rows = [json.dumps({"step": step, "step_seconds": 1.0}).encode() for step in range(1, 5)]
    bad = [b"\0" * 50, b"\xc3", b'{"step": 4}', b'{"stgp": 4, "step_seconds": 1.0}', b"[" * 100_000, b"null"]
    (tmp_path / "metrics.jsonl").write_bytes(b"\n".join([rows[0], bad[0], *rows[1:], *bad, b'{"step": 5']))
    assert [row["step"] for row in read_metrics(tmp_path)] == [1, 2, 3, 4]
    last = read_last_record(tmp_path / "metrics.jsonl", step_problem)
    assert last is None, "brackets fill the end"
    (tmp_path / "metrics.jsonl").write_bytes(b"\n".join([*rows, *bad[:4], b'{"step": 5']))
    assert read_last_record(tmp_path / "metrics.jsonl", step_problem) == {"step": 4, "step_seconds": 1.0}
    evaluation = {"kind": "evaluation", "step": 4, "loss": 1.0}
    lines = [b"rubbish", json.dumps(evaluation).encode(), b'{"step": 4, "kjnd": "evaluation"}', b""]
    (tmp_path / "events.jsonl").write_bytes(b"\n".join(lines))
    assert read_events(tmp_path) == [evaluation] == [evaluation_at(tmp_path, 4)]
