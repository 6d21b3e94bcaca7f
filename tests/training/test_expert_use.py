"""What training shows of mixtures of experts: the same in every layout, in every log, and a warning where one dies."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from noted_log import NotedLog
from phalanx.report.run_log import RunLog
from phalanx.report.run_page import render_run
from phalanx.training.expert_use import ExpertUse, measure_use
from phalanx.training.safeguards.dead_experts import DEAD_STEPS, DeadExperts
from phalanx_processes import train
from token_data import write_run_file, write_token_folder

STEPS = 3
EXPERTS = {"count": 4, "active": 2, "d_ff": 16, "dense_layers": 1, "balance_weight": 0.1, "z_loss": 0.01}
LAYOUTS = {
    "one rank": (1, ()),
    "pipeline and experts": (4, ("layout.pp=2", "layout.dp_shard=2", "layout.ep=2")),
    "tensors, recomputed": (2, ("layout.tp=2", "layout.recompute=full")),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Run directories of a mixture with a capacity, by layout."""
    folder = tmp_path_factory.mktemp("experts")
    run_file = write_run_file(folder / "run.yaml", write_token_folder(folder / "data"))
    content = yaml.safe_load(run_file.read_text())
    content["model"] |= {"n_layers": 3, "experts": EXPERTS}
    content["training"]["tensorboard"] = True
    run_file.write_text(yaml.safe_dump(content))
    common = (
        "layout.microbatch=1",
        "layout.global_batch=8",
        "checkpoint.every=null",
        "evaluation.samples=2",
        "optimizer.warmup_steps=0",
    )
    found = {}
    for name, (ranks, words) in LAYOUTS.items():
        found[name] = folder / name.split()[0]
        train(run_file, found[name], STEPS, ranks, *common, *words)
    return found


def records(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def test_every_step_tells_of_every_layer_with_experts(runs: dict[str, Path]) -> None:
    for record in records(runs["one rank"]):
        assert [use["layer"] for use in record["experts"]] == [1, 2]
        for use in record["experts"]:
            assert len(use["load"]) == 4 and sum(use["load"]) == pytest.approx(1.0, abs=1e-4)
            assert use["violation"] == pytest.approx(4 * max(use["load"]) - 1.0, abs=1e-3)
            assert 0.0 < use["entropy"] <= 1.0 and use["dropped"] == 0.0
            # Near 1 where experts are used alike; the logits of a fresh router are near 0.
            assert use["balance_loss"] == pytest.approx(0.1, rel=0.1)
            assert use["z_loss"] == pytest.approx(0.01 * math.log(4) ** 2, rel=0.1)
        assert record["expert_violation"] == max(use["violation"] for use in record["experts"])


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "one rank"])
def test_layouts_tell_the_same(layout: str, runs: dict[str, Path]) -> None:
    for mine, wanted in zip(records(runs[layout]), records(runs["one rank"]), strict=True):
        for one, other in zip(mine["experts"], wanted["experts"], strict=True):
            assert one["load"] == pytest.approx(other["load"], abs=2e-3)
            for name in ("entropy", "violation", "balance_loss", "z_loss"):
                assert one[name] == pytest.approx(other[name], rel=1e-2, abs=1e-3), name


def test_trackers_get_each_expert(runs: dict[str, Path]) -> None:
    events = EventAccumulator(str(runs["one rank"] / "tensorboard"))
    events.Reload()
    first = records(runs["one rank"])[0]["experts"][1]
    for expert, share in enumerate(first["load"]):
        points = events.Scalars(f"train/experts/layer_2/load/{expert}")
        assert len(points) == STEPS and points[0].value == pytest.approx(share, abs=1e-5)
    for name in ("entropy", "violation", "dropped", "balance_loss", "z_loss"):
        assert events.Scalars(f"train/experts/layer_2/{name}")[0].value == pytest.approx(first[name], rel=1e-5)


def test_the_report_draws_the_load(runs: dict[str, Path]) -> None:
    page = render_run(RunLog.read(runs["one rank"]))
    assert '<h2 id="experts">Experts</h2>' in page
    # Two layers of four experts, each cell with its load under the pointer.
    assert page.count(" x mean</title>") == 8
    assert "layer 2, expert 3: " in page and "chart-experts" in page


def test_figures_of_a_layer_by_hand() -> None:
    # Two layers of four experts; the first is dense. 8 tokens with 2 choices each, 4 of the 16 dropped.
    dense = [0.0] * 8
    mixture = [8.0, 4.0, 4.0, 0.0, 8.0, 4.0, 0.8, 1.6]
    (use,) = measure_use([*dense, *mixture], 4)
    assert use.layer == 1 and use.load == (0.5, 0.25, 0.25, 0.0)
    assert use.entropy == pytest.approx((0.5 * math.log(2) + 0.5 * math.log(4)) / math.log(4))
    assert (use.violation, use.dropped, use.balance_loss, use.z_loss) == (1.0, 0.25, 0.1, 0.2)
    # Recompute counts everything twice, and changes nothing.
    assert measure_use([2.0 * figure for figure in (*dense, *mixture)], 4) == (use,)


def test_an_expert_without_tokens_is_named_once() -> None:
    log = NotedLog()
    watch = DeadExperts(log)  # type: ignore[arg-type]

    def use(*load: float) -> list[ExpertUse]:
        return [ExpertUse(3, load, 0.5, 1.0, 0.0, 0.0, 0.0)]

    # Expert 1 comes back in time, expert 2 does not.
    watch.watch(1, use(1.0, 0.0, 0.0))
    watch.watch(2, use(0.5, 0.5, 0.0))
    for step in range(3, 3 * DEAD_STEPS):
        watch.watch(step, use(0.9, 0.1 * (step % 10 == 0), 0.0))
    (fields,) = log.events
    kind, step = fields.pop("kind"), fields.pop("step")
    assert (kind, step, fields["layer"], fields["experts"]) == ("dead_experts", DEAD_STEPS, 3, [2])
    assert log.notes == [f"warning: step {DEAD_STEPS}: {fields['text']}"]
    assert "no token went to expert 2 for 50 steps" in fields["text"]
