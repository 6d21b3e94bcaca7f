"""Runs that get out of memory start again with smaller micro-batches: same samples, same losses."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

import phalanx_processes
from fault_injection import fault_words, offer_callback
from layout_runs import run_with
from phalanx.config.load import load_run
from phalanx.config.schema import LessMemory
from phalanx.errors import PhalanxError
from phalanx.families.registry import bind
from phalanx.hardware.host import LESS_MEMORY
from phalanx.launch.faults import Fault
from phalanx.launch.restart import MEMORY_FILE, is_worth_restart, read_memory_limit
from phalanx.layout.resolve import resolve_layout
from phalanx.layout.spec import ResolvedLayout
from phalanx.training.safeguards.memory_limit import (
    advise_remedies,
    heed_memory_limit,
    less_memory,
    lighter_layout,
    name_layout,
    note_out_of_memory,
    smaller_microbatch,
)
from token_data import write_run_file, write_token_folder


@pytest.fixture(scope="module")
def run_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("memory")
    offer_callback(folder / "package")
    return write_run_file(folder / "run.yaml", write_token_folder(folder / "data"))


def train(run_file: Path, run_dir: Path, *words: str) -> tuple[int, str]:
    return phalanx_processes.start(["train", str(run_file), "--run-dir", str(run_dir), *words], 2).finish()


def losses(run_dir: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def note(run_dir: Path, layout: ResolvedLayout) -> str:
    """Note that memory ran out in the layout of the run file, which then takes smaller micro-batches."""
    return note_out_of_memory(run_dir, layout, layout, smaller_microbatch(layout))


EXPERTS = "model.experts={count: 4, active: 2, d_ff: 32}"


def train_undisturbed(run_file: Path, *words: str) -> list[float]:
    run_dir = run_file.parent / f"undisturbed-{len(words)}"
    code, errors = train(run_file, run_dir, "training.steps=8", *words)
    assert code == 0, errors[-2000:]
    return losses(run_dir)


@pytest.fixture(scope="module")
def undisturbed(run_file: Path) -> list[float]:
    return train_undisturbed(run_file)


@pytest.fixture(scope="module")
def undisturbed_experts(run_file: Path) -> list[float]:
    return train_undisturbed(run_file, EXPERTS)


@pytest.mark.parametrize(
    ("layout", "step"),
    [
        (["layout.dp_shard=2"], 7),
        (["layout.tp=2"], 1),
        (["layout.pp=2"], 7),
        (["layout.dp_shard=2", "layout.ep=2", EXPERTS], 7),
    ],
    ids=["dp", "tp", "pp", "ep"],
)
def test_the_same_command_continues_with_half_the_micro_batch(
    layout: list[str], step: int, run_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: Any
) -> None:
    undisturbed = request.getfixturevalue("undisturbed_experts" if EXPERTS in layout else "undisturbed")
    monkeypatch.syspath_prepend(str(run_file.parent / "package"))
    words = ("training.steps=8", *layout, fault_words(kind="full", rank=1, step=step, samples=2))
    code, errors = train(run_file, tmp_path / "run", *words)
    assert code == 1 and "rank 1" in errors and "is out of memory in step" in errors, errors[-3000:]
    assert "started again, the run computes 2 x " in errors
    code, errors = train(run_file, tmp_path / "run", *words)
    assert code == 0, errors[-3000:]
    assert losses(tmp_path / "run") == pytest.approx(undisturbed, abs=1e-5)
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    (event,) = [event for event in events if event["kind"] == "less_memory"]
    assert event["microbatch"] == 2 and event["spared"] == 2 and event["step"] == (5 if step == 7 else 0)


def test_a_process_alone_does_the_step_again(
    run_file: Path, tmp_path: Path, undisturbed: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(run_file.parent / "package"))
    # Halved twice within one step, at first in its second micro-batch: what the first has left is not counted again.
    fault = fault_words(kind="full", rank=0, step=7, samples=1, passes=1)
    words = ["training.steps=8", fault, "checkpoint.every=null"]
    words = ["train", str(run_file), "--run-dir", str(tmp_path / "run"), *words]
    code, errors = phalanx_processes.start(words).finish()
    assert code == 0, errors[-3000:]
    assert "step 7 ran out of memory: it is done again with 2 x 4 samples in place of 4 x 2" in errors
    assert losses(tmp_path / "run") == pytest.approx(undisturbed, abs=1e-5)
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    less = [event for event in events if event["kind"] == "less_memory"]
    assert [(event["step"], event["microbatch"], event["accumulation"]) for event in less] == [(7, 2, 4), (7, 1, 8)]
    # The next start begins with what was enough.
    assert json.loads((tmp_path / "run" / MEMORY_FILE).read_text())["microbatch"] == 1


def test_a_process_alone_halves_no_micro_batch_where_something_else_comes_first(
    run_file: Path, tmp_path: Path, undisturbed: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(run_file.parent / "package"))
    words = ["train", str(run_file), "--run-dir", str(tmp_path / "run"), "training.steps=8"]
    words += ["safeguards.on_out_of_memory=[offload, halve]"]
    code, errors = phalanx_processes.start([*words, fault_words(kind="full", rank=0, step=7, samples=1)]).finish()
    assert code == 1 and "started again, the run takes layout.offload_optimizer=true" in errors, errors[-3000:]
    assert "it is done again with" not in errors
    code, errors = phalanx_processes.start(words).finish()
    assert code == 0, errors[-3000:]
    assert losses(tmp_path / "run") == pytest.approx(undisturbed, abs=1e-5)


def test_the_end_names_the_cheapest_changes_that_take_less(
    run_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(run_file.parent / "package"))
    words = ["training.steps=8", fault_words(kind="full", rank=0, step=2, samples=0), "layout.microbatch=2"]
    code, errors = phalanx_processes.start(
        ["train", str(run_file), "--run-dir", str(tmp_path / "run"), *words]
    ).finish()
    assert code == 1 and "is out of memory in step 2" in errors, errors[-3000:]
    # From 2 samples to 1, and then there is nothing left but another layout.
    assert "done again with 1 x 8 samples in place of 2 x 4" in errors
    assert "the cheapest changes that take less: offload_optimizer=true (takes " in errors and "% of the time" in errors
    assert "; recompute=selective (takes " in errors
    assert (
        advise_remedies(bind(load_run(Path("examples/materials-quickstart.yaml"))), ResolvedLayout(1, 1), "cpu")
        == LESS_MEMORY
    )


def test_the_next_smaller_micro_batch_is_legal_and_none_is_below_one() -> None:
    # Of 24 samples a rank, 4 micro-batches of 6 suit both stages; so do 8 of 3.
    smaller = smaller_microbatch(ResolvedLayout(24, 6, pp=2))
    assert smaller is not None and (smaller.microbatch, smaller.accumulation) == (3, 8)
    odd = smaller_microbatch(ResolvedLayout(10, 5, dp_shard=2))
    assert odd is not None and odd.microbatch == 1
    # 6 would divide 60 as well, but not the 15 samples of a first stage of a warm-up.
    warming = smaller_microbatch(ResolvedLayout(60, 15))
    assert warming is not None and warming.microbatch == 5
    assert smaller_microbatch(ResolvedLayout(8, 1)) is None


def test_other_layouts_do_not_heed_the_limit(tmp_path: Path) -> None:
    layout = ResolvedLayout(16, 8)
    assert "computes 4 x 4 samples in place of 8 x 2" in note(tmp_path, layout)
    assert heed_memory_limit(tmp_path, layout).microbatch == 4
    for other in (ResolvedLayout(16, 8, recompute="full"), ResolvedLayout(32, 8), ResolvedLayout(16, 2)):
        assert heed_memory_limit(tmp_path, other) == other
    assert note(tmp_path, ResolvedLayout(16, 1)) == LESS_MEMORY
    (tmp_path / MEMORY_FILE).write_text('{"layout": 3}')
    with pytest.raises(PhalanxError, match="is damaged; remove it"):
        heed_memory_limit(tmp_path, layout)


def list_lighter(ways: list[LessMemory], changes: dict[str, Any] | None = None, **layout: Any) -> list[dict[str, Any]]:
    """What changes from one layout to the next, each lighter than the one before, until there is none."""
    model = bind(run_with(changes, **layout))
    present, found = resolve_layout(model, 2), []
    while (lighter := lighter_layout(model, present, ways, None)) is not None:
        before, after = asdict(present), asdict(lighter)
        found.append({name: value for name, value in after.items() if value != before[name]})
        present = lighter
    return found


def test_a_run_takes_less_memory_in_the_ways_and_the_order_that_it_allows() -> None:
    batch = {"dp_shard": 2, "global_batch": 8, "microbatch": 4}
    halved = [{"microbatch": 2}, {"microbatch": 1}]
    recomputed = [{"recompute": "selective"}, {"recompute": "full"}]
    offloaded: list[dict[str, Any]] = [{"offload_optimizer": True}, {"offload_activations": True}]
    assert list_lighter(["halve"], **batch) == halved
    assert list_lighter(["halve", "recompute", "offload"], **batch) == halved + recomputed + offloaded
    assert list_lighter(["offload", "recompute"], **batch) == offloaded + recomputed
    assert list_lighter([], **batch) == []
    assert list_lighter(["recompute", "offload"], **batch, recompute="selective") == recomputed[1:] + offloaded


def test_what_is_not_legal_is_passed_over() -> None:
    ways: list[LessMemory] = ["recompute", "offload"]
    batch = {"dp_shard": 2, "global_batch": 8, "microbatch": 1}
    assert list_lighter(ways, {"optimizer.name": "muon"}, **batch) == [
        {"recompute": "selective"},
        {"recompute": "full"},
        {"offload_activations": True},
    ]
    # Each stage has one block, whose activations stay.
    assert list_lighter(["offload"], **batch | {"dp_shard": 1}, pp=2, schedule="gpipe") == [
        {"offload_optimizer": True},
        {"offload_activations": True},
    ]
    assert list_lighter(["offload"], {"model.n_layers": 2}, **batch | {"dp_shard": 1}, pp=2, schedule="gpipe") == [
        {"offload_optimizer": True}
    ]
    # Streamed weights keep no selection.
    streamed = list_lighter(ways, **batch, gather="stream")
    assert streamed == [{"recompute": "full"}, {"offload_optimizer": True}, {"offload_activations": True}]


def test_a_start_takes_all_that_earlier_ones_were_left_to_take(tmp_path: Path) -> None:
    model = bind(run_with(dp_shard=2, global_batch=4, microbatch=2))
    stated = resolve_layout(model, 2)
    words = []
    for _ in range(5):
        present = heed_memory_limit(tmp_path, stated)
        lighter = lighter_layout(model, present, ["halve", "recompute", "offload"], None)
        words.append(note_out_of_memory(tmp_path, present, stated, lighter).partition(", which")[0])
        assert heed_memory_limit(tmp_path, stated) == lighter != present
    assert words == [
        "started again, the run computes 1 x 2 samples in place of 2 x 1",
        "started again, the run takes layout.recompute=selective in place of none",
        "started again, the run takes layout.recompute=full in place of selective",
        "started again, the run takes layout.offload_optimizer=true",
        "started again, the run takes layout.offload_activations=true",
    ]
    present = heed_memory_limit(tmp_path, stated)
    assert less_memory(present, stated) == {
        "microbatch": 1,
        "accumulation": 2,
        "spared": 1,
        "recompute": "full",
        "offload_optimizer": True,
        "offload_activations": True,
    }
    assert lighter_layout(model, present, ["halve", "recompute", "offload"], None) is None
    # Written before there was more than micro-batches.
    old = {"layout": name_layout(stated), "microbatch": 1}
    (tmp_path / MEMORY_FILE).write_text(json.dumps(old))
    assert heed_memory_limit(tmp_path, stated) == replace(stated, microbatch=1)


def test_restarts_recompute_and_offload_where_no_micro_batch_is_smaller(
    run_file: Path, tmp_path: Path, undisturbed: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(run_file.parent / "package"))
    schedule = tmp_path / "schedule.json"
    faults = [{"number": n, "kind": "oom", "rank": n % 2, "step": 2 + n, "seed": 0} for n in (1, 2, 3)]
    schedule.write_text(json.dumps(faults))
    chaos = json.dumps([{"name": "chaos", "options": {"schedule": str(schedule)}}])
    words = [
        "--nproc",
        "2",
        "training.steps=8",
        "layout.dp_shard=2",
        "layout.microbatch=1",
        f"training.callbacks={chaos}",
    ]
    words += ["safeguards.on_out_of_memory=[halve, recompute, offload]", "restart.backoff_s=0"]
    process = phalanx_processes.start(["train", str(run_file), "--run-dir", str(tmp_path / "run"), *words])
    code, errors = process.finish()
    assert code == 0, errors[-3000:]
    assert "restart 3" in errors and "restart 4" not in errors
    assert losses(tmp_path / "run") == pytest.approx(undisturbed, abs=1e-5)
    for change in (
        "recompute=selective in place of none",
        "recompute=full in place of selective",
        "offload_optimizer=true",
    ):
        assert f"started again, the run takes layout.{change}, which changes no gradient" in errors
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    # All began again from nothing, but what each start took less memory by is known.
    less = [event for event in events if event["kind"] == "less_memory"]
    assert [event["recompute"] for event in less] == ["selective", "full", "full"]
    assert ["offload_optimizer" in event for event in less] == [False, False, True]
    assert less[-1]["offload_optimizer"] and {event["microbatch"] for event in less} == {1}
    assert [event["kind"] for event in events if event["step"] == 0] == ["less_memory"] * 3 + ["start"]


def test_a_launcher_starts_again_what_takes_less(tmp_path: Path) -> None:
    fault = Fault.__new__(Fault)
    object.__setattr__(fault, "cause", "out of memory")
    object.__setattr__(fault, "phase", "compile")
    assert not is_worth_restart(fault) and is_worth_restart(fault, needs_less=True)
    assert read_memory_limit(tmp_path) is None
    note(tmp_path, ResolvedLayout(16, 8))
    first = read_memory_limit(tmp_path)
    note(tmp_path, ResolvedLayout(16, 4))
    assert first is not None and read_memory_limit(tmp_path) != first
