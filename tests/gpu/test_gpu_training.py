"""Whole runs on the device: training, resuming across devices, evaluation, generation, verification, one rank of NCCL."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from device_runs import accelerator, distance, record_steps, small_run
from phalanx.cli.main import run_command_line as call
from phalanx.families.registry import bind
from phalanx.layout.data_parallel.fully_sharded import FullySharded
from phalanx.layout.mesh import ONE_RANK, Axis
from phalanx.layout.resolve import resolve_layout
from phalanx.verification.family import VerifiableModel
from phalanx.verification.record_training import record_training
from token_data import write_run_file, write_token_folder

pytestmark = pytest.mark.gpu

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="module")
def run_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("training")
    return write_run_file(folder / "run.yaml", write_token_folder(folder / "data"))


def train(run_file: Path, run_dir: Path, steps: int, *words: str) -> list[float]:
    """Train up to `steps`; returns the losses of all steps."""
    code = call(["train", str(run_file), "--run-dir", str(run_dir), f"training.steps={steps}", *words])
    assert code == 0
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, steps + 1))
    return [row["loss"] for row in rows]


@pytest.mark.parametrize(
    "words",
    [(), ("model.dropout=0.2",), ("training.lora={rank: 4}",)],
    ids=["plain", "dropout", "adapters"],
)
@pytest.mark.parametrize(
    ("precision", "tolerance"), [("fp64", 1e-7), ("fp32", 1e-4), ("fp16", 1e-2), ("bf16", 2e-2)], ids=str
)
def test_losses_are_those_of_the_cpu(
    run_file: Path, tmp_path: Path, precision: str, tolerance: float, words: tuple[str, ...]
) -> None:
    """Compiled on the device, in each precision, with the same samples, initial values and dropped elements."""
    found = train(run_file, tmp_path / "device", 6, f"layout.precision={precision}", *words)
    wanted = train(run_file, tmp_path / "cpu", 6, "layout.precision=fp64", "cluster.device=cpu", *words)
    assert found == pytest.approx(wanted, rel=tolerance)


def test_a_run_moves_from_the_cpu_to_the_device_and_back(run_file: Path, tmp_path: Path) -> None:
    words = ("optimizer.schedule=constant", "optimizer.warmup_steps=0", "model.dropout=0.1")
    straight = train(run_file, tmp_path / "straight", 12, "cluster.device=cpu", *words)
    moved = tmp_path / "moved"
    train(run_file, moved, 4, "cluster.device=cpu", *words)
    train(run_file, moved, 8, f"cluster.device={accelerator().type}", *words)
    found = train(run_file, moved, 12, "cluster.device=cpu", *words)
    assert found[:4] == straight[:4]
    assert found == pytest.approx(straight, rel=1e-4)


def test_a_resumed_run_ends_with_the_same_bits(run_file: Path, tmp_path: Path) -> None:
    """With deterministic kernels: the weights of a run that was interrupted are those of one that was not."""
    words = ("training.deterministic=true", "layout.precision=bf16", "optimizer.schedule=constant")
    whole = train(run_file, tmp_path / "whole", 8, *words)
    train(run_file, tmp_path / "parts", 5, *words)
    assert train(run_file, tmp_path / "parts", 8, *words) == whole


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_one_step_before_the_first_chooses_the_micro_batch(run_file: Path, tmp_path: Path, precision: str) -> None:
    """The device is as good as empty: the plan stays, and what training begins with is as if nothing was tried."""
    words = ("training.deterministic=true", f"layout.precision={precision}")
    found = train(run_file, tmp_path / "auto", 6, "layout.microbatch=auto", *words)
    events = [json.loads(line) for line in (tmp_path / "auto" / "events.jsonl").read_text().splitlines()]
    (event,) = [event for event in events if event["kind"] == "microbatch"]
    assert event["microbatch"] == event["planned"] and event["peak_bytes"] > 0
    stated = train(run_file, tmp_path / "stated", 6, f"layout.microbatch={event['microbatch']}", *words)
    assert found == stated


def test_a_step_that_runs_out_of_memory_is_done_again_with_smaller_micro_batches(
    run_file: Path, tmp_path: Path
) -> None:
    """The allocator may take half of what the first micro-batch needs beside the weights; it is not told beforehand."""
    words = ("model.d_model=256", "model.d_ff=1024", "layout.global_batch=1024", "checkpoint.every=null")
    words = (*words, "optimizer.warmup_steps=2", "layout.precision=fp32", "evaluation.every=null")
    words = (*words, f"cluster.device={accelerator().type}")
    device = torch.get_device_module(accelerator())
    peaks = []
    for microbatch in (16, 1024):
        device.empty_cache()
        device.reset_peak_memory_stats()
        before = device.memory_allocated()
        wanted = train(run_file, tmp_path / f"{microbatch}", 4, f"layout.microbatch={microbatch}", *words)
        peaks.append(device.max_memory_allocated() - before)
    limit = before + sum(peaks) / 2
    device.empty_cache()
    device.set_per_process_memory_fraction(limit / device.get_device_properties(accelerator()).total_memory)
    try:
        found = train(run_file, tmp_path / "full", 4, "layout.microbatch=1024", *words)
    finally:
        device.set_per_process_memory_fraction(1.0)
    assert found == pytest.approx(wanted, rel=1e-4)
    events = [json.loads(line) for line in (tmp_path / "full" / "events.jsonl").read_text().splitlines()]
    less = [event for event in events if event["kind"] == "less_memory"]
    assert less and less[0]["step"] == 1 and 16 <= less[-1]["microbatch"] < 1024


def test_a_run_that_restarts_forks_ranks_that_use_the_device(run_file: Path, tmp_path: Path) -> None:
    """What is loaded once, before ranks are forked, opens no device: ranks forked of it can."""
    schedule = tmp_path / "schedule.json"
    schedule.write_text('[{"number": 1, "kind": "kill", "rank": 0, "step": 7, "seed": 0}]')
    callbacks = json.dumps([{"name": "chaos", "options": {"schedule": str(schedule)}}])
    words = ["--nproc", "1", "training.steps=12", f"cluster.device={accelerator().type}", "training.deterministic=true"]
    command = [sys.executable, "-m", "phalanx", "train", str(run_file), *words]
    for run_dir, more in ((tmp_path / "plain", []), (tmp_path / "run", [f"training.callbacks={callbacks}"])):
        done = subprocess.run([*command, "--run-dir", str(run_dir), *more], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
    assert "restart 1" in done.stderr
    losses = [
        [json.loads(line)["loss"] for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        for name in ("plain", "run")
    ]
    assert losses[0] == losses[1] and len(losses[0]) == 12


def test_a_trained_run_is_evaluated_generates_and_is_reported(
    run_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = tmp_path / "run"
    train(run_file, run_dir, 20, "layout.precision=bf16")
    scores = []
    for device in (accelerator().type, "cpu"):
        capsys.readouterr()
        assert call(["evaluate", str(run_dir), "--device", device, "--precision", "fp32", "--json"]) == 0
        scores.append(json.loads(capsys.readouterr().out)["loss"])
    assert scores[0] == pytest.approx(scores[1], rel=1e-5)
    texts = []
    for device in (accelerator().type, "cpu"):
        assert (
            call(
                [
                    "generate",
                    str(run_dir),
                    "--prompt",
                    "abc",
                    "--tokens",
                    "12",
                    "--temperature",
                    "0",
                    "--device",
                    device,
                    "--precision",
                    "fp32",
                    "--json",
                ]
            )
            == 0
        )
        texts.append(json.loads(capsys.readouterr().out)["samples"][0]["token_ids"])
    assert texts[0] == texts[1] and len(texts[0]) == 12
    assert call(["report", str(run_dir)]) == 0


@pytest.mark.parametrize("precision", ["fp64", "fp32", "bf16"])
@pytest.mark.parametrize("example", ["llama3-8b", "mpt-1b", "climax-small", "materials-xtb"])
def test_verify_passes_on_the_device(example: str, precision: str, capsys: pytest.CaptureFixture[str]) -> None:
    code = call(["verify", str(EXAMPLES / f"{example}.yaml"), "--nproc", "1", "--precision", precision, "--json"])
    outcome = json.loads(capsys.readouterr().out)
    assert code == 0 and outcome["passed"] and len(outcome["layouts"]) == 1


@pytest.fixture
def one_rank_group(tmp_path: Path) -> Iterator[dist.ProcessGroup]:
    """Yield the group of a single rank, with the device's own backend (NCCL, RCCL).

    For one test alone: training in the same process, as other tests do, ends the groups that there are.
    """
    store = dist.FileStore(str(tmp_path / "store"), 1)
    device = accelerator()
    backend = "gloo"
    if device.type != "cpu":
        torch.accelerator.set_device_index(device.index or 0)
        backend = f"cpu:gloo,{device.type}:{dist.get_default_backend_for_device(device)}"
    dist.init_process_group(backend, store=store, rank=0, world_size=1)
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("zero", [1, 3])
def test_sharding_over_one_rank_changes_nothing(
    one_rank_group: dist.ProcessGroup, zero: int, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FSDP's gathers and reductions go through the backend; what they bring is what was there."""
    device = accelerator()
    run = small_run({"layout.zero": zero, "layout.peer_copies": False}, precision, compiled=True)
    shards = Axis("shards", 0, 1, one_rank_group, (0,), one_rank_group.group_name)
    data = DeviceMesh.from_group(one_rank_group, device.type, mesh_dim_names=("shards",))
    mesh = replace(ONE_RANK, shards=shards, data=data, world=one_rank_group)
    layout = replace(resolve_layout(bind(run), 1), zero=zero)
    if zero == 3:
        # One rank has nobody to share with, so its layout lets products add to sums over micro-batches. FSDP, which only
        # this test gives it, reduces gradients after each.
        monkeypatch.setattr(FullySharded, "begin_sums", lambda sharding, stage: None)
    found = record_training(bind(run, VerifiableModel), layout, mesh, device, steps=2, activations=False)
    alone = record_steps(run, device)
    apart = distance(found, alone)
    assert apart.loss <= 1e-6 and apart.worst <= (1e-5 if precision == "fp32" else 1e-2)


def test_collectives_of_one_rank(one_rank_group: dist.ProcessGroup) -> None:
    values = torch.arange(1000.0, device=accelerator())
    summed, gathered, scattered = values.clone(), torch.empty_like(values), torch.empty_like(values)
    dist.all_reduce(summed, group=one_rank_group)
    dist.all_gather_into_tensor(gathered, values, group=one_rank_group)
    dist.reduce_scatter_tensor(scattered, values, group=one_rank_group)
    exchanged = torch.empty_like(values)
    dist.all_to_all_single(exchanged, values, group=one_rank_group)
    for found in (summed, gathered, scattered, exchanged):
        assert torch.equal(found, values)


def test_memory_is_what_the_plan_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A decoder of 170M parameters: the allocator's peak beside the memory model's, which is meant to be within 2%."""
    folder = write_token_folder(tmp_path / "data", train_tokens=400_000)
    (tmp_path / "run.yaml").write_text(
        f"""
model: {{n_layers: 8, d_model: 1024, n_heads: 16, n_kv_heads: 4, d_ff: 4096, vocab_size: 8192, max_positions: 1024}}
data: {{sources: ["{folder}"], sequence_length: 1024}}
layout: {{global_batch: 8, microbatch: 8, precision: bf16}}
optimizer: {{lr: 1e-4}}
training: {{steps: 8, tensorboard: false, attention: flash}}
checkpoint: {{last: false}}
"""
    )
    words = ["--nproc", "1", "--steps", "6", "--skip", "3", "--cluster", "h200-x4", "--json"]
    assert call(["bench", str(tmp_path / "run.yaml"), *words]) == 0
    outcome = json.loads(capsys.readouterr().out)
    measured, planned = outcome["measured"]["memory_bytes"], outcome["planned"]["memory_bytes"]
    assert planned == pytest.approx(measured, rel=0.03)
    assert math.isfinite(outcome["measured"]["step_s"])
