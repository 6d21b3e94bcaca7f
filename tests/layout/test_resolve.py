"""From a run file and a number of ranks to a layout: `auto`, overrides that lead back, and properties of all layouts."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from layout_runs import Fields, refusal, run_from_words, run_with
from phalanx.config.load import load_run, parse_run
from phalanx.errors import ConfigError
from phalanx.families.registry import bind
from phalanx.layout.legality import reasons_against
from phalanx.layout.resolve import (
    all_factorisations,
    every_layout,
    fallback_layouts,
    legal_layouts,
    resolve_layout,
    stated_ranks,
)
from phalanx.layout.spec import DEGREES, ZERO_BUBBLE, ResolvedLayout

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.yaml"))
GPT_175B = """
model: {preset: gpt-175b}
data: {sources: [nowhere], sequence_length: 2048}
layout: {global_batch: 24576, microbatch: 1, dp_replicate: 8, tp: 8, pp: 16}
optimizer: {lr: 1e-4}
training: {steps: 10}
"""

# --- auto --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", DEGREES)
def test_any_one_degree_may_be_auto(name: str) -> None:
    fields = {other: 2 if other in ("dp_replicate", "cp") else 1 for other in DEGREES}
    layout = resolve_layout(bind(run_with(**{**fields, name: "auto"})), 8)
    expected = 8 // (4 if fields[name] == 1 else 2)
    assert getattr(layout, name) == expected
    assert layout.world_size == 8


def test_dp_shard_gives_way_to_another_auto() -> None:
    assert str(resolve_layout(bind(run_with(pp="auto", tp=2)), 8)) == "tp=2 pp=4 schedule=1f1b stages_per_rank=1"


def test_two_degrees_are_not_auto() -> None:
    assert refusal(run_with(tp="auto", pp="auto"), 8) == [
        "layout.tp and layout.pp are both auto, but only one degree can take what the others leave; give the rest"
    ]


def test_what_auto_cannot_share_out() -> None:
    assert refusal(run_with(tp=3), 8) == ["layout.tp=3 does not divide the world size 8", "nearest legal: tp=2"]
    assert refusal(run_with(tp=3, cp=2), 8) == [
        "layout.cp=2 x layout.tp=3 = 6 does not divide the world size 8",
        "nearest legal: tp=2",
    ]


def test_what_is_offered_instead_of_an_indivisible_degree_is_legal() -> None:
    # 4 is the divisor next to 5, but not one of 2 key/value heads.
    assert refusal(run_with({"model.n_kv_heads": 2}, tp=5), 8)[1:] == ["nearest legal: tp=2"]
    # Whatever else tp is, 2 samples are too few for 4 data-parallel ranks.
    few = run_with(tp=3, dp_replicate=4, dp_shard=1, cp="auto", global_batch=2)
    assert refusal(few, 8)[1:] == ["nearest legal: dp_replicate=2 tp=4, or dp_replicate=1 dp_shard=2 tp=4"]
    assert refusal(run_with({"model.n_layers": 1}, pp=3, global_batch=1, tp=1, cp=1), 5)[1:] == [
        "no choice of degrees is legal for 5 ranks with the other fields as they are"
    ]


@pytest.mark.parametrize(
    ("fields", "elsewhere", "expected"),
    [
        ({"cp": 2}, {}, "ring"),
        ({"cp": 2}, {"data.document_mask": True}, "all_to_all"),
        ({"cp": 2}, {"model.positions": "alibi"}, "all_to_all"),
        ({"cp": 2, "tp": 4}, {"model.positions": "alibi"}, "ring"),
        ({"cp": 1, "context": "all_to_all"}, {}, "ring"),
    ],
)
def test_context_is_chosen_by_mask_and_heads(fields: Fields, elsewhere: Fields, expected: str) -> None:
    assert resolve_layout(bind(run_with(elsewhere, **fields)), 8).context == expected


@pytest.mark.parametrize(("zero", "pp", "expected"), [(3, 1, True), (3, 2, False), (2, 1, False), (1, 2, False)])
def test_resharding_is_chosen_by_zero_and_stages(zero: int, pp: int, expected: bool) -> None:
    assert resolve_layout(bind(run_with(zero=zero, pp=pp)), 4).reshard_after_forward is expected


# --- the micro-batch that auto becomes ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "world", "expected"),
    [
        ({"global_batch": 16}, 1, 16),
        ({"global_batch": 16}, 2, 8),
        ({"global_batch": 16, "tp": 2}, 4, 8),
        ({"global_batch": 24}, 4, 6),
        ({"global_batch": 256}, 1, 64),
        ({"global_batch": 67}, 1, 1),
        # Four micro-batches for each pipeline rank, as long as there are samples for them.
        ({"global_batch": 64, "pp": 2}, 2, 8),
        ({"global_batch": 16, "pp": 4}, 4, 1),
        ({"global_batch": 4, "pp": 4}, 4, 1),
        ({"global_batch": 8, "pp": 2, "schedule": "interleaved_1f1b"}, 2, 1),
        ({"global_batch": 11, "pp": 4, "schedule": "gpipe"}, 4, 1),
    ],
)
def test_auto_is_the_largest_micro_batch_that_divides_and_fills_the_pipeline(
    fields: Fields, world: int, expected: int
) -> None:
    layout = resolve_layout(bind(run_with(microbatch="auto", **fields)), world)
    assert layout.microbatch == expected
    assert layout.microbatch * layout.accumulation * layout.data_ranks == layout.global_batch


def test_a_number_in_the_run_file_stays() -> None:
    assert resolve_layout(bind(run_with(microbatch=2, global_batch=16)), 1, fits=lambda layout: False).microbatch == 2


@pytest.mark.parametrize(("room", "expected"), [(64, 16), (15, 8), (3, 2), (0, 1)])
def test_auto_is_the_largest_that_fits_else_the_smallest(room: int, expected: int) -> None:
    run = run_with(microbatch="auto", global_batch=16)
    assert resolve_layout(bind(run), 1, fits=lambda layout: layout.microbatch <= room).microbatch == expected


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_twice_the_ranks_need_no_other_override(example: Path) -> None:
    """A layout that is asked for on the command line is enough: micro-batches and their number follow."""
    stated = load_run(example)
    ranks = max(stated_ranks(stated), stated.layout.ep)
    once = resolve_layout(bind(stated), ranks)
    twice = resolve_layout(bind(load_run(example, [f"dp_shard={2 * once.dp_shard}"])), 2 * ranks)
    assert twice.dp_shard == 2 * once.dp_shard and twice.global_batch == once.global_batch
    assert twice.microbatch * twice.accumulation * twice.data_ranks == twice.global_batch


def test_auto_meets_what_schedules_ask_for() -> None:
    for schedule in ("gpipe", "1f1b", "interleaved_1f1b", *ZERO_BUBBLE):
        for batch in (8, 12, 24, 56):
            run = run_with(microbatch="auto", global_batch=batch, pp=4, schedule=schedule)
            if schedule in ("interleaved_1f1b", *ZERO_BUBBLE):
                run = run.model_copy(update={"model": run.model.model_copy(update={"n_layers": 8})})
            assert resolve_layout(bind(run), 4).pp == 4


# --- hints -------------------------------------------------------------------------------------------------------------


def test_a_hint_changes_the_micro_batch_and_not_the_experiment() -> None:
    assert refusal(run_with(microbatch=16, global_batch=16, dp_shard=2), 2) == [
        "layout.global_batch=16 samples is not a multiple of layout.microbatch=16 x 2 data-parallel ranks = 32",
        "nearest legal: microbatch=8",
    ]


def test_another_batch_is_proposed_as_another_experiment_where_nothing_else_is_legal() -> None:
    sections = {"model.n_layers": 1, "model.n_heads": 1, "model.n_kv_heads": 1, "data.sequence_length": 31}
    assert refusal(run_with(sections, global_batch=2, microbatch="auto"), 4) == [
        "layout.global_batch=2 samples is not a multiple of 4 data-parallel ranks",
        "nearest legal, but another experiment: global_batch=4",
    ]


def test_who_has_started_one_rank_is_told_to_start_more() -> None:
    assert refusal(run_with(tp=2, pp=2), 1) == [
        "layout.tp=2 x layout.pp=2 = 4 does not divide the world size 1",
        "start 4 ranks: --nproc 4, or with torchrun or srun",
        "nearest legal: tp=1 pp=1",
    ]
    assert refusal(run_with(tp=2, dp_shard=1), 1)[1] == "start 2 ranks: --nproc 2, or with torchrun or srun"
    # Three ranks could not run it either.
    assert "start" not in "".join(refusal(run_with(tp=3), 1))


# --- properties --------------------------------------------------------------------------------------------------------


def test_every_layout_of_1_to_64_ranks_fits_the_world_and_has_no_reason_against_it() -> None:
    run, found = run_with(), 0
    for world in range(1, 65):
        layouts = list(legal_layouts(bind(run), world))
        assert all(layout.world_size == world and not reasons_against(bind(run), layout, world) for layout in layouts)
        legal = {tuple(getattr(layout, name) for name in DEGREES) for layout in layouts}
        assert len(legal) == len(layouts)
        assert legal <= set(all_factorisations(world, len(DEGREES)))
        found += len(layouts)
    assert found > 400


EIGHT = list(every_layout(bind(run_with()), 8))


@pytest.mark.parametrize(
    ("fields", "ranks", "expected"),
    [
        ({"dp_shard": 4, "global_batch": 12}, 4, {3: "dp_shard=3", 2: "dp_shard=2", 1: ""}),
        # Three ranks share out neither 8 samples nor 8 heads: one of them stays idle.
        ({"dp_shard": 2, "tp": 2, "global_batch": 8}, 4, {2: "tp=2", 1: ""}),
        ({"dp_shard": 4, "global_batch": 24, "microbatch": 6}, 4, {3: "dp_shard=3 microbatch=2", 2: "dp_shard=2"}),
    ],
)
def test_fewer_ranks_have_the_nearest_legal_layout_with_the_same_batch(
    fields: Fields, ranks: int, expected: dict[int, str]
) -> None:
    run = run_with(**fields)
    wanted = resolve_layout(bind(run), ranks)
    found = fallback_layouts(bind(run), wanted)
    for left, words in found.items():
        # Each is a layout that can be started, and trains on the same global batch.
        layout = resolve_layout(bind(run_from_words(run, words)), left, left)
        assert layout.world_size == left and layout.global_batch == wanted.global_batch
    told = {left: " ".join(w.removeprefix("layout.") for w in words if w[-2:] != "=1") for left, words in found.items()}
    assert {left: told.get(left) for left in expected} == expected
    assert set(found) <= set(range(1, ranks)) and 1 in found


def test_no_layout_reshards_under_a_split_backward_pass() -> None:
    sharded = [layout for layout in EIGHT if layout.schedule in ZERO_BUBBLE and layout.pp > 1 and layout.shards > 1]
    assert len(sharded) > 20
    assert not any(layout.reshard_after_forward for layout in sharded)
    assert any(layout.reshard_after_forward for layout in EIGHT if layout.pp > 1)


@settings(max_examples=80, deadline=None, derandomize=True)
@given(st.sampled_from(EIGHT))
def test_a_layout_written_as_overrides_resolves_to_itself(layout: ResolvedLayout) -> None:
    for plain in (run_with(), run_with(tp=2, pp=2, cp=2, schedule="zbv", zero=1, context="all_to_all")):
        assert resolve_layout(bind(run_from_words(plain, layout.overrides())), 8) == layout


@settings(max_examples=80, deadline=None, derandomize=True)
@given(st.sampled_from(EIGHT))
def test_what_is_printed_of_a_layout_leads_back_to_it(layout: ResolvedLayout) -> None:
    words = [f"layout.{word}" for word in str(layout).split()]
    back = resolve_layout(bind(run_from_words(run_with(dp_shard=1), words)), 8)
    assert str(back) == str(layout)


def test_one_rank_is_called_so() -> None:
    layout = resolve_layout(bind(run_with()), 1)
    assert str(layout) == "one rank"
    assert resolve_layout(bind(run_from_words(run_with(tp=2), layout.overrides())), 1) == layout


CHOICES = st.fixed_dictionaries(
    {
        "global_batch": st.sampled_from([4, 8, 24, 64]),
        "microbatch": st.sampled_from([1, 2, "auto"]),
        "zero": st.sampled_from([0, 1, 3]),
        "schedule": st.sampled_from(["gpipe", "1f1b", "interleaved_1f1b", "interleaved_zero_bubble", "zbv"]),
        "stages_per_rank": st.sampled_from(["auto", 1, 2, 3]),
        "context": st.sampled_from(["auto", "ring", "all_to_all"]),
        "recompute": st.sampled_from(["none", "full"]),
        "reshard_after_forward": st.sampled_from(["auto", True, False]),
    }
)
ELSEWHERE = st.fixed_dictionaries(
    {
        "data.sequence_length": st.sampled_from([8, 12, 32, 64]),
        "model.n_layers": st.sampled_from([2, 4, 7]),
        "model.tied_head": st.booleans(),
        "training.compile": st.sampled_from(["auto", True]),
    }
)
DEGREES_OF_WORLD = st.sampled_from([2, 6, 7, 13, 16, 31, 32]).flatmap(
    lambda world: st.sampled_from(list(all_factorisations(world, len(DEGREES))))
)


def proposals(line: str) -> list[list[str]]:
    """The choices that a line of a message offers, each in the words of the command line."""
    choices: list[list[str]] = []
    stated = line.removeprefix("nearest legal").removeprefix(", but another experiment").removeprefix(": ")
    for text in re.split(r", or | or ", stated):
        whole = text if "=" in text else f"{choices[-1][0].partition('=')[0]}={text}"
        choices.append([word if "." in word else f"layout.{word}" for word in whole.split()])
    return choices


@settings(max_examples=120, deadline=None, derandomize=True)
@given(DEGREES_OF_WORLD, CHOICES, ELSEWHERE)
def test_whatever_is_called_legal_is(degrees: tuple[int, ...], fields: Fields, elsewhere: Fields) -> None:
    stated = dict(zip(DEGREES, degrees, strict=True))
    run = run_with(elsewhere, **fields, **stated)
    world = math.prod(degrees)
    try:
        resolve_layout(bind(run), world)
    except ConfigError as error:
        last = str(error).splitlines()[-1]
        if last.startswith("no choice of degrees"):
            assert not list(legal_layouts(bind(run), world))
            return
        for words in proposals(last):
            assert resolve_layout(bind(run_from_words(run, words)), world).world_size == world


@pytest.mark.parametrize("world", [7, 13, 61])
def test_a_prime_number_of_ranks_has_a_nearest_legal_layout(world: int) -> None:
    line = refusal(run_with(global_batch=world, tp=world, dp_shard=1), world)[-1]
    assert line == f"nearest legal: dp_shard={world} tp=1, or dp_replicate={world} tp=1"


# --- scale -------------------------------------------------------------------------------------------------------------


def test_24576_ranks_of_gpt_175b() -> None:
    run = parse_run(GPT_175B, "run.yaml")
    layout = resolve_layout(bind(run), 24576, devices_per_node=8)
    assert (layout.dp_shard, layout.accumulation, layout.n_stages) == (24, 128, 16)
    assert sum(1 for _ in legal_layouts(bind(run), 24576, devices_per_node=8)) > 1000
    assert refusal(parse_run(GPT_175B, "run.yaml", ["layout.dp_shard=23"]), 24576, devices_per_node=8) == [
        "layout.dp_replicate=8 x layout.dp_shard=23 x layout.tp=8 x layout.pp=16 = 23552 ranks, but 24576 were started",
        "nearest legal: dp_replicate=8 dp_shard=24 tp=8 pp=16, or dp_replicate=6 dp_shard=32 tp=8 pp=16",
    ]
