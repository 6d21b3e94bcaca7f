"""The space of choices: conditions, knobs, names, and the run file that a point stands for."""

from __future__ import annotations

import numpy as np
import pytest
import yaml

from layout_runs import run_from_words, run_with
from phalanx.config.load import load_run, parse_run
from phalanx.config.studies import Search, Tunable
from phalanx.errors import ConfigError
from phalanx.families.registry import bind
from phalanx.layout.resolve import resolve_layout
from phalanx.planner.rank.enumeration import Limits, enumerate_layouts
from phalanx.study.layouts.layout_space import LayoutSpace, build_layout_space
from phalanx.study.space import condition_holds

RUN = run_with(global_batch=64)


def small(search: Search) -> LayoutSpace:
    return build_layout_space(enumerate_layouts(bind(RUN), 8, limits=Limits(8, 2, 8)), search)


def test_every_point_is_the_run_it_stands_for() -> None:
    found = small(Search())
    assert len({found.key(point) for point in range(len(found))}) == len(found)
    for point in range(0, len(found), max(1, len(found) // 25)):
        run = run_from_words(RUN, found.overrides(point))
        wanted = found.layouts.row(int(found.layout_of[point]))
        assert resolve_layout(bind(run), 8) == wanted
        assert run.layout.recompute == found.values(point)["recompute"]
        assert found.find(found.values(point)) == point


def test_values_and_constraints_leave_out_the_rest() -> None:
    found = small(
        Search(layout={"tp": [1, 4], "recompute": ["full"]}, constraints=("tp * microbatch <= 8 or pp == 2",))
    )
    assert len(found)
    for point in range(len(found)):
        values = found.values(point)
        assert values["tp"] in (1, 4) and values["recompute"] == "full"
        assert values["tp"] * values["microbatch"] <= 8 or values["pp"] == 2  # type: ignore[operator]
    everything = small(Search(layout={"tp": [1, 4], "recompute": ["full"]}))
    assert len(found) < len(everything)


def test_knobs_apply_where_their_condition_holds() -> None:
    plain = small(Search(layout={"recompute": ["none"]}))
    knobs = {
        "data.prefetch": Tunable(values=[2, 0]),
        "env.NCCL_ALGO": Tunable(values=["Ring", "Tree"], when="dp_shard > 1"),
    }
    found = small(Search(layout={"recompute": ["none"]}, knobs=knobs))
    sharded = int((plain.layouts.dp_shard > 1).sum())
    assert 0 < sharded < len(plain) and len(found) == 2 * (len(plain) + sharded)
    for point in range(len(found)):
        has = found.layouts.dp_shard[found.layout_of[point]] > 1
        assert (found.env(point) in ({"NCCL_ALGO": "Ring"}, {"NCCL_ALGO": "Tree"})) == bool(has)
        assert has or not found.env(point)
        assert f"data.prefetch={found.values(point)['data.prefetch']}" in found.overrides(point)
        assert not any(word.startswith("env.") for word in found.overrides(point))


def test_a_name_is_the_same_in_a_smaller_space() -> None:
    large, less = small(Search()), small(Search(layout={"tp": [2]}))
    assert all(large.find(less.values(point)) is not None for point in range(len(less)))


def test_conditions() -> None:
    columns = {"tp": np.array([1, 2, 4]), "kind": np.array(["a", "b", "b"]), "env.X": np.array([1, 1, 0])}
    for text, wanted in (
        ("tp > 1", [False, True, True]),
        ("1 < tp <= 2 or kind == 'a'", [True, True, False]),
        ("not tp in [1, 4]", [False, True, False]),
        ("tp % 4 == 0 and env.X == 0", [False, False, True]),
        ("kind not in ('a',) and -tp < -2", [False, False, True]),
        ("true", [True, True, True]),
        ("(tp > 1) + (kind == 'b') + (tp < 4) == 2", [False, False, True]),
        ("tp in [env.X, 2 * env.X]", [True, True, False]),
        ("tp not in [env.X, 2 * env.X]", [False, False, True]),
    ):
        assert condition_holds(text, columns, 3).tolist() == wanted, text


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("tp.real > 1", "tp.real is not known"),
        ("__import__('os')", "is not known"),
        ("tq == 1", "tq is not known; known names"),
        ("tp + 1", "is a value, not a condition"),
        ("tp >", "is not a condition"),
        ("tp is 1", "not known"),
        ("tp in 4", "in wants a list"),
    ],
)
def test_what_is_no_condition_is_refused(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said.replace("(", r"\(")):
        condition_holds(text, {"tp": np.array([1, 2])}, 2)


TREE = {
    "model": {"n_layers": 2, "d_model": 32, "n_heads": 4, "d_ff": 64, "vocab_size": 64, "max_positions": 32},
    "data": {"sources": ["a"], "sequence_length": 32},
    "layout": {"global_batch": 8},
    "optimizer": {"lr": 1e-3},
    "training": {"steps": 5},
}


@pytest.mark.parametrize(
    ("section", "said"),
    [
        ({"layuot": {}}, "layuot"),
        ({"layout": {"tq": [1]}}, "search.layout.tq"),
        ({"layout": {"schedule": ["1f2b"]}}, "1f1b"),
        ({"layout": {"tp": [3]}}, "no legal layout"),
        ({"layout": {"tp": [0]}}, "numbers from 1 on"),
        ({"layout": {"tp": ["two"]}}, "numbers from 1 on"),
        ({"knobs": {"layout.tp": [1, 2]}}, "search.layout.tp"),
        ({"knobs": {"compile": [True]}}, "section.field"),
        ({"steps": 3, "skip": 3}, "leaves nothing"),
    ],
)
def test_mistakes_are_named(section: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        small(parse_run(yaml.safe_dump({**TREE, "search": section}), "run.yaml").search)


def test_the_section_stands_in_the_run_file(tmp_path) -> None:  # type: ignore[no-untyped-def]
    file = tmp_path / "run.yaml"
    file.write_text(
        "model: {n_layers: 2, d_model: 32, n_heads: 4, d_ff: 64, vocab_size: 64, max_positions: 32}\n"
        "search:\n  layout: {tp: [1, 2]}\n  knobs: {training.compile: [auto, false]}\n"
        "data: {sources: [a], sequence_length: 32}\nlayout: {global_batch: 8}\noptimizer: {lr: 1e-3}\ntraining: {steps: 5}\n"
    )
    run = load_run(file, ["search.steps=12", "layout.microbatch=2"])
    search = run.search
    assert run.layout.microbatch == 2 and search.steps == 12
    assert search.layout == {"tp": [1, 2]} and search.knobs["training.compile"].values == ["auto", False]
    file.write_text(file.read_text().replace("lr: 1e-3", "lr: -1"))
    with pytest.raises(ConfigError, match=r"run\.yaml:7"):
        load_run(file)
