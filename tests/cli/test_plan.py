"""`phalanx plan`: what it prints, writes and refuses."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from command_line import Call
from measured_runs import write_measured_runs
from phalanx.cli.planning.plan_text import write_plan_lines
from phalanx.config.load import load_run
from phalanx.families.registry import bind
from phalanx.hardware.machine import load_machine
from phalanx.layout.resolve import resolve_layout
from phalanx.planner.plan.make_plan import Plan, Wishes, make_plan
from phalanx.planner.rank.cost_models import CostModels
from phalanx.planner.rank.ranking import Planner, Task
from phalanx.planner.time.profile import default_profile, save_profile
from phalanx.planner.trace.traced_model import TracedModel
from report.pages import Page
from report.run_dirs import write_run

RUN = """\
model: {n_layers: 8, d_model: 2048, n_heads: 16, d_ff: 8192, vocab_size: 32000, max_positions: 2048, mlp: gelu}
data: {sources: [data/a], sequence_length: 2048}
layout: {global_batch: 64, microbatch: 2, recompute: full, tp: 2}
optimizer: {lr: 1e-3}
training: {steps: 10}
"""
FRONTIER = ("--cluster", "frontier", "--devices", "16")
QUICK = ("microbatch=1", "recompute=none")
"""Choices that leave little to trace."""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "run.yaml").write_text(RUN)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_measured_profile_that_lies_here_is_preferred(call: Call, folder: Path) -> None:
    plain = json.loads(call("plan", "run.yaml", *FRONTIER, *QUICK, "--json").out)
    named = default_profile("MI250X GCD")
    slow = replace(named, name="mine", profile=named.profile.scaled({"matmul_flop_s": 0.5}))
    save_profile(folder / "frontier.profile.yaml", slow)
    found = json.loads(call("plan", "run.yaml", *FRONTIER, *QUICK, "--json").out)
    assert found["profile"].startswith("mine: ") and plain["profile"].startswith("frontier: ")
    assert found["layouts"][0]["step_s"] > 1.2 * plain["layouts"][0]["step_s"]


def test_says_what_is_best_and_why(call: Call, folder: Path) -> None:
    outcome = call(
        "plan",
        "run.yaml",
        *FRONTIER,
        *QUICK,
        "--why",
        "tp=8",
        "--why",
        "zero=1",
        "--tokens",
        "1B",
        "--write",
        "out.yaml",
    )
    assert (outcome.code, outcome.err) == (0, "")
    lines = outcome.out.splitlines()
    assert lines[0] == (
        "model on 16 x MI250X GCD (2 nodes of frontier), global batch 64 x 2,048 tokens, with microbatch=1 recompute=none"
    )
    assert "legal layouts" in lines[1] and lines[2].split()[:3] == ["tp", "pp", "cp"]
    assert any(line.startswith("time of 1: matmul ") for line in lines)
    assert any(line.startswith("memory of 1: ") for line in lines)
    prose = " ".join(outcome.out.split())
    assert re.search(r"why not tp=8: [^;]*tensor-parallel exposed \+\S+ m?s", prose)
    assert re.search(r"1B tokens: 7,630 steps, .*Goodput", prose)
    launch = "phalanx launch out.yaml --cluster frontier --nodes 2"
    assert lines[-1] == f"wrote out.yaml   next: phalanx verify out.yaml, {launch}"
    assert call("config", "check", "out.yaml", "--no-data").code == 0


def test_json_and_the_written_run_agree(call: Call, folder: Path) -> None:
    outcome = call("plan", "run.yaml", *FRONTIER, *QUICK, "--json", "--write", "out.yaml", "--scale", "8..16")
    facts = json.loads(outcome.out)
    assert outcome.code == 0 and facts["written"] == {"run": "out.yaml"}
    assert facts["fixed"] == {"microbatch": 1, "recompute": "none"}
    best = facts["layouts"][0]
    layout = resolve_layout(bind(load_run(folder / "out.yaml")), 16, 8)
    for name in ("dp_replicate", "dp_shard", "cp", "tp", "pp", "zero", "schedule", "microbatch", "accumulation"):
        assert getattr(layout, name) == best[name]
    assert best["step_s"] == min(row["step_s"] for row in facts["layouts"])
    assert sum(best["time_by_cause_s"].values()) == pytest.approx(best["step_s"])
    assert sum(best["memory_by_cause_bytes"].values()) == pytest.approx(best["memory_bytes"], rel=1e-6)
    assert best["step_s_interval"][0] < best["step_s"] < best["step_s_interval"][1]
    assert best["tokens_per_s_per_device"] == pytest.approx(64 * 2048 / best["step_s"] / 16)
    assert facts["scaling"]["strong"][1]["layout"]["step_s"] == pytest.approx(best["step_s"])
    assert facts["budget"]["steps"] == 10


def test_the_run_file_is_kept_when_asked(call: Call) -> None:
    facts = json.loads(call("plan", "run.yaml", *FRONTIER, "--fix", "--json").out)
    assert facts["fixed"] == {"microbatch": 2, "recompute": "full", "tp": 2}
    assert {row["tp"] for row in facts["layouts"] + facts["pareto"]} == {2}


def test_fewest_devices(call: Call) -> None:
    facts = json.loads(call("plan", "run.yaml", "--cluster", "frontier", "--fit", *QUICK, "--json").out)
    assert facts["devices"] == 1 and facts["layouts"][0]["memory_bytes"] < 64 * 2**30


def test_page(call: Call, folder: Path) -> None:
    words = ("--html", "plan.html", "--scale", "8,16", "--why", "tp=8", "--json", "pp=4", "schedule=1f1b")
    facts = json.loads(call("plan", "run.yaml", *FRONTIER, *QUICK, *words).out)
    html = (folder / "plan.html").read_text()
    page = Page(html.replace("<br>", ""))
    assert "http" not in html.replace("http-equiv", "") and len(page.all("script")) == 2
    assert page.figure("fits") == f"{facts['layouts'][0]['p_fits']:.2f}"
    # the chart, the scaling, and three of each layout of the two tables, as no two of these have the same
    drawn = {json.dumps(row["step_s"]) for row in facts["layouts"] + facts["pareto"]}
    assert len(page.all("div", "picture")) == len(drawn)
    assert len(page.all("svg", "drawing")) == 2 + 3 * len(drawn)
    rows = [element for element in page.all("tr") if "1f1b" in element.text]
    assert rows
    assert page.all("path", "bar-forward-0") and page.all("path", "bar-backward-0")
    assert page.all("rect", "fill-c1") and page.all("line", "limit")


def _plan() -> Plan:
    machine = load_machine("frontier")
    planner = Planner(machine, CostModels(machine, default_profile(machine.node.device)))
    task = Task(bind(load_run(Path("run.yaml")), TracedModel), 16, {"microbatch": 1, "recompute": "none"})
    return make_plan(planner, task, Wishes(why=("tp=8", "tp=16"), scale=(8, 11, 16)))


def test_no_line_is_too_wide() -> None:
    plan = _plan()
    for width in (60, 80, 100, 120, 160):
        lines = list(write_plan_lines(plan, width))
        assert max(map(len, lines)) <= width, max(lines, key=len)
    # Without a terminal tables are whole, and prose has lines that can be read.
    unwrapped = list(write_plan_lines(plan, 1000))
    table = [line for line in unwrapped if line.split()[:1] in (["tp"], ["1"], ["2"])]
    assert max(map(len, unwrapped)) <= max(120, *map(len, table)), max(unwrapped, key=len)


def test_times_and_their_intervals_share_a_unit(call: Call) -> None:
    outcome = call("plan", "run.yaml", *FRONTIER, *QUICK, "--why", "tp=8", "model.d_model=8192", "model.n_layers=64")
    assert outcome.code == 0, outcome.err
    assert re.search(r"  \S+ (ms|s|min) \([\d.,]+ to [\d.,]+\)  ", outcome.out), outcome.out
    assert "e+0" not in outcome.out and "e-0" not in outcome.out


def test_the_command_that_runs_the_best_layout(call: Call, folder: Path) -> None:
    words = [*QUICK, "optimizer.lr=2e-3", "--html", "plan.html"]
    facts = json.loads(call("plan", "run.yaml", *FRONTIER, *words, "--json").out)
    best = facts["layouts"][0]
    said = call("plan", "run.yaml", *FRONTIER, *words).out.partition("to run 1:\n")[2]
    command = shlex.split(said.partition("wrote plan.html")[0].replace("\\\n", " "))
    assert command[:7] == ["phalanx", "launch", "run.yaml", "--cluster", "frontier", "--nodes", "2"]
    assert "optimizer.lr=2e-3" in command
    layout = resolve_layout(bind(load_run(folder / "run.yaml", command[7:])), 16, 8)
    for name in ("dp_replicate", "dp_shard", "cp", "tp", "pp", "zero", "schedule", "microbatch", "accumulation"):
        assert getattr(layout, name) == best[name]
    # The page has the command, the layout as YAML, and the same cells as the terminal.
    html = (folder / "plan.html").read_text()
    page = Page(html.replace("<br>", ""))
    assert any(element.text.startswith("phalanx launch run.yaml") for element in page.all("pre"))
    section = next(element.text for element in page.all("pre") if element.text.startswith("layout:"))
    assert yaml.safe_load(section)["layout"]["tp"] == best["tp"]
    resharded = [row for row in facts["pareto"] if row["dp_shard"] > 1 and row["reshard_after_forward"]]
    assert resharded and f">{resharded[0]['zero']}r<" in html


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--cluster", "fronteir", "--devices", "8"], "--cluster fronteir is not known"),
        (["--cluster", "frontier"], "give --devices N, or --fit"),
        (["--devices", "8"], "give a run file and --cluster"),
        ([*FRONTIER, "--fit"], "give --devices N, or --fit"),
        ([*FRONTIER, "layout.tp=3"], "layout.tp=3 does not divide"),
        ([*FRONTIER, "--why", "speed=1"], "speed=1: planning does not choose speed"),
        ([*FRONTIER, "--scale", "8-16"], "--scale 8-16: write LOW..HIGH"),
        ([*FRONTIER, "--tokens", "many"], "--tokens many: write a number, such as 300B"),
        ([*FRONTIER, "--profile", "./none.yaml"], "profile ./none.yaml cannot be read"),
        ([*FRONTIER, "--profile", "selene"], "profile selene is of A100-80GB, and frontier has MI250X GCD"),
        (["--cluster", "frontier", "--devices", "78856"], "78,856 devices are more than frontier has: 78,848"),
        ([*FRONTIER, "layout.tpp=2"], "layout.tpp=2: there is no such field"),
        (["--cluster", "frontier", "--devices", "0"], "--devices=0 must be at least 1"),
    ],
)
def test_mistakes(arguments: list[str], message: str, call: Call, folder: Path) -> None:
    outcome = call("plan", "run.yaml", *arguments, "--write", "out.yaml", "--html", "out.html")
    assert (outcome.code, outcome.out) == (2, "")
    assert outcome.err.startswith(f"error: {message}")
    assert not (folder / "out.yaml").exists() and not (folder / "out.html").exists()


def test_check(call: Call, folder: Path) -> None:
    write_measured_runs(
        folder / "runs.csv", {}, {"row_id": "mine-2", "recompute": "twice"}, {"row_id": "mine-3", "system": "nowhere"}
    )
    facts = json.loads(call("plan", "--check", "runs.csv", "--json").out)
    row, wrong, elsewhere = facts["rows"]
    assert row["measured_tokens_per_s_per_gpu"] == pytest.approx(16 * 256 / 0.02 / 4)
    assert row["used"] and row["error"] == pytest.approx(
        row["predicted_tokens_per_s_per_gpu"] / row["measured_tokens_per_s_per_gpu"] - 1
    )
    assert row["memory_error"] == pytest.approx(row["predicted_memory_gb"] / 1.5 - 1) and row["p_fits"] > 0.99
    assert "recompute: 'twice' is not none, selective or full" in wrong["reason"] and not wrong["used"]
    assert "no machine is described for nowhere" in elsewhere["reason"]
    assert facts["groups"][-1]["group"] == "all" and facts["groups"][-1]["rows"] == 1
    words = call("plan", "--check", "runs.csv")
    assert words.code == 0 and "2 of 3 rows could not be predicted" in words.out


def test_check_leaves_runs_of_other_frameworks_to_a_benchmark(call: Call, folder: Path) -> None:
    write_measured_runs(folder / "runs.csv", {}, {"row_id": "theirs", "framework": "Megatron-LM"})
    outcome = call("plan", "--check", "runs.csv")
    assert outcome.code == 1 and outcome.out == ""
    assert "line 3: framework: 'Megatron-LM' is not Phalanx" in outcome.err
    assert "benchmarks/published/check.py runs.csv" in outcome.err


def test_what_binds_where_nothing_fits(call: Call) -> None:
    wide = ("model.d_model=16384", "model.n_heads=128", "model.d_ff=65536")
    outcome = call("plan", "run.yaml", "--cluster", "frontier", "--devices", "2", *wide, *QUICK)
    assert outcome.code == 2 and outcome.out == ""
    assert (
        "legal layouts fits into 2 x 64 GiB" in outcome.err and "smallest number of devices that fits: " in outcome.err
    )


def test_models_that_cannot_be_planned_are_not_sent_to_a_verb_that_refuses_them(call: Call) -> None:
    run = Path(__file__).parents[2] / "examples" / "materials-xtb.yaml"
    refused = call("plan", str(run), *FRONTIER)
    assert refused.code == 2 and "blocks of one size" in refused.err
    assert call("dryrun", str(run), "--devices", "4").code == 2 and "dryrun" not in refused.err


def test_a_global_batch_past_the_critical_one_is_warned_of(call: Call, folder: Path) -> None:
    arguments = ("plan", "run.yaml", *FRONTIER, *QUICK)
    write_run(folder / "measured", 3, lambda step: {"critical_batch": 16.0 * step})
    outcome = call(*arguments, "--critical-batch", "measured", "--html", "page.html")
    words = " ".join(outcome.out.split())
    assert "warning: the global batch of 64 samples is 1.3 times the critical batch of 48: to the loss that" in words
    assert "(2.33 times)" in words and "(2.33 times)" in (folder / "page.html").read_text()
    within = call(*arguments, "--critical-batch", "128")
    assert "the global batch of 64 samples is 0.5 of the critical batch of 128" in " ".join(within.out.split())
    assert "warning" not in within.out
    write_run(folder / "silent", 3)
    refused = call(*arguments, "--critical-batch", "silent")
    assert refused.code == 2 and "the run has measured none" in refused.err


def test_energy_is_counted_by_the_power_that_a_run_measured(call: Call, folder: Path) -> None:
    arguments = ("plan", "run.yaml", *FRONTIER, *QUICK)
    # Half a second a step on eight devices: 120 W each.
    write_run(folder / "counted", 3, lambda step: {"step_joules": 480.0})
    machine = folder / "counted" / "machine.json"
    machine.write_text(json.dumps({**json.loads(machine.read_text()), "device_kind": "MI250X GCD"}))
    budgets = [json.loads(call(*arguments, "--json", *watts).out)["budget"] for watts in ((), ("--watts", "counted"))]
    assert [budget["working_w"] for budget in budgets] == [pytest.approx(0.75 * 280), pytest.approx(120.0)]
    assert budgets[1]["energy_mwh"] / budgets[0]["energy_mwh"] == pytest.approx(120 / 210)
    refused = call("plan", "run.yaml", "--cluster", "dgx-h100", "--devices", "8", *QUICK, "--watts", "counted")
    assert refused.code == 2 and "the run was on MI250X GCD, and the plan is for H100 SXM" in refused.err


def test_loads_that_a_router_has_logged_set_time_and_chance_of_fitting(call: Call, folder: Path) -> None:
    mixture = ('model.experts={"count": 4, "active": 2, "d_ff": 512}', "model.mlp=swiglu", "ep=4", "dp_shard=16")
    arguments = ("plan", "run.yaml", *FRONTIER, *QUICK, "--json")

    def write_loads(name: str, load: list[float]) -> None:
        figures = dict.fromkeys(("entropy", "violation", "dropped", "balance_loss", "z_loss"), 0.0)
        write_run(folder / name, 2, lambda step: {"experts": [{"layer": 0, "load": load, **figures}]})

    write_loads("even", [0.25] * 4)
    write_loads("uneven", [0.7, 0.1, 0.1, 0.1])
    write_loads("other", [0.5, 0.5])
    facts = {}
    for name in ("even", "uneven"):
        found = call(*arguments, *mixture, "--expert-loads", name)
        assert found.code == 0, found.err
        facts[name] = json.loads(found.out)
    assert facts["uneven"]["layouts"][0]["step_s"] > 1.02 * facts["even"]["layouts"][0]["step_s"]
    # Two of four experts in each of eight layers, with three matrices each.
    assert facts["even"]["parameters"] - facts["even"]["active_parameters"] == 8 * 2 * 3 * 2048 * 512
    text = call(*arguments[:-1], *mixture, "--expert-loads", "even").out
    assert text.startswith("model (366M parameters, 316M active) on 16 x MI250X GCD")
    refused = call(*arguments, *mixture, "--expert-loads", "other")
    assert refused.code == 2 and "loads of 2 experts a layer, and model.experts.count=4" in " ".join(
        refused.err.split()
    )
    dense = call(*arguments, "--expert-loads", "even")
    assert dense.code == 2 and "the model to plan has no experts" in " ".join(dense.err.split())
