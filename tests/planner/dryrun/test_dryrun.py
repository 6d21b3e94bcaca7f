"""A dry run takes what a real run takes: memory to a hundredth, collectives one by one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor._sharding_prop import ShardingPropagator

from distributed_ranks import run_ranks
from dry_layouts import NAMES, WORLD, real_steps, run_named
from layout_runs import run_with
from phalanx.families.language.decoder import Block
from phalanx.families.registry import bind
from phalanx.layout.resolve import resolve_layout
from phalanx.layout.spec import ResolvedLayout
from phalanx.planner.dryrun.rank_report import RankReport
from phalanx.planner.dryrun.run_step import dry_run, fake_rank
from phalanx.planner.trace.traced_model import TracedModel
from phalanx.torch_compat import common as compat
from phalanx.training.step import build_full_step
from state_bytes import state_bytes

WATCHED = {name: (0, WORLD - 1)[number % 2] for number, name in enumerate(NAMES)}
"""The rank that is compared, by the name of the run."""


@pytest.fixture(scope="module")
def real() -> list[dict[str, dict[str, Any]]]:
    """What each rank of real runs that it watches takes, by the name of the run."""
    ranks: list[dict[str, dict[str, Any]]] = run_ranks(real_steps, WORLD, WATCHED, timeout_s=240.0)
    return ranks


@pytest.mark.parametrize(("name", "rank"), WATCHED.items())
def test_memory_and_collectives_are_those_of_real_ranks(
    name: str, rank: int, real: list[dict[str, dict[str, Any]]]
) -> None:
    expected, found = real[rank][name], dry(name, rank)
    calls: dict[tuple[str, str, int, int], int] = {}
    for t in found.traffic:
        calls[t.operation, t.axis, t.size, t.bytes] = calls.get((t.operation, t.axis, t.size, t.bytes), 0) + t.count
    assert calls == expected["calls"]
    assert found.peak == pytest.approx(expected["peak"], rel=0.01), (found.categories, expected["categories"])
    assert sum(found.categories.values()) == found.peak
    for name in ("parameters", "gradients", "optimizer"):
        assert found.categories[name] == expected["categories"][name]


def test_outputs_that_are_kept_show(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "zero 3, seven micro-batches"
    kept: list[Tensor] = []
    forward = Block.forward

    def keeping(self: Block, *arguments: Any, **options: Any) -> Tensor:
        kept.append(forward(self, *arguments, **options))
        return kept[-1]

    right = dry(name, 0)
    monkeypatch.setattr(Block, "forward", keeping)
    wrong = dry(name, 0)
    layout = resolve_layout(bind(run_named(name)), WORLD)
    model, length = run_named(name).model, run_named(name).data.sequence_length
    each = layout.microbatch * length * model.d_model * 2
    assert wrong.peak - right.peak >= each * model.n_layers * (layout.accumulation - 1) > 0.01 * right.peak


def test_a_rank_counts_its_part_of_sharded_state() -> None:
    run = run_with(dp_shard=64, precision="bf16", global_batch=64)
    layout = resolve_layout(bind(run), 64)
    found = dry_run(bind(run, TracedModel), layout, 63, build_full_step, accelerator=True, devices_per_node=8)
    expected = state_bytes(bind(run), layout)
    # 512 bytes of rounding for each of the small parts, two moments and a count of steps for each.
    parts = 9 * run.model.n_layers + 3
    assert expected.parameters <= found.categories["parameters"] <= expected.parameters + 512 * parts
    assert expected.optimizer <= found.categories["optimizer"] <= expected.optimizer + 3 * 512 * parts


def test_nothing_fake_is_left_behind() -> None:
    methods = [DeviceMesh.__getitem__, torch.UntypedStorage.resize_, dist.isend, ShardingPropagator.propagate]
    dry("heads exchanged", 3)
    with pytest.raises(ValueError, match="illegal"), fake_rank(ResolvedLayout(8, dp_shard=8), 5, accelerator=True):
        assert dist.get_world_size() == 8 and dist.get_rank() == 5
        raise ValueError("illegal")
    assert not dist.is_initialized()
    assert methods == [DeviceMesh.__getitem__, torch.UntypedStorage.resize_, dist.isend, ShardingPropagator.propagate]
    assert type(torch.ones(2)) is Tensor and compat.has_attention_kernel(torch.ones(1))


def test_131072_ranks_take_no_more_than_the_rank_that_runs() -> None:
    run = run_with(dp_replicate=2048, dp_shard=64, global_batch=131072)
    layout = resolve_layout(bind(run), 131072)
    found = dry_run(bind(run, TracedModel), layout, 131071, build_full_step, accelerator=True, devices_per_node=8)
    small = run_with(dp_replicate=2, dp_shard=64, global_batch=128)
    same = dry_run(
        bind(small, TracedModel),
        resolve_layout(bind(small), 128),
        127,
        build_full_step,
        accelerator=True,
        devices_per_node=8,
    )
    assert found.peak == same.peak and found.collectives == same.collectives


def test_bytes_over_the_node_boundary() -> None:
    run = run_with(tp=2, pp=2, dp_shard=2, global_batch=8)
    layout = resolve_layout(bind(run), 8)
    report = dry_run(bind(run, TracedModel), layout, 0, build_full_step, accelerator=True, devices_per_node=4)
    of = {(t.axis, t.operation): t for t in report.traffic}
    # Nodes hold a pipeline stage each: tensor-parallel and data-parallel groups stay inside, transfers between stages cross.
    assert of["tp", "all_gather"].crossing == of["dp_shard", "all_gather"].crossing == 0.0
    send = of["pp", "send"]
    assert send.crossing == 1.0 and send.count == layout.accumulation
    assert send.bytes == 32 // 2 * 32 * 2 and send.crossing_in_all == send.count * send.bytes
    # A ring of two nodes with four ranks each crosses twice in eight transfers.
    assert of["all ranks", "all_reduce"].crossing == 2 / 8
    unknown = dry_run(bind(run, TracedModel), layout, 0, build_full_step, accelerator=True, devices_per_node=None)
    assert sum(t.crossing_in_all for t in unknown.traffic) == 0.0


def test_norms_are_computed_again_by_the_kernel_that_computed_them_first() -> None:
    def activations(recompute: str) -> int:
        run = run_with({"model.norm": "rmsnorm", "data.sequence_length": 64}, recompute=recompute, global_batch=1)
        report = dry_run(
            bind(run, TracedModel),
            resolve_layout(bind(run), 1),
            0,
            build_full_step,
            accelerator=True,
            devices_per_node=None,
        )
        return report.categories["activations"]

    # Operations that are chosen one by one have to come in the same order again.
    assert 0 < activations("full") < activations("selective") < activations("none")


def test_attention_keeps_what_the_accelerators_kernel_keeps() -> None:
    run = run_with({"model.positions": "alibi", "data.sequence_length": 64}, dp_shard=2, global_batch=2)
    kernels = {}
    for kernel in ("flash", "flex", "math", "efficient"):
        training = run.training.model_copy(update={"attention": kernel})
        asked = run.model_copy(update={"training": training})
        report = dry_run(
            bind(asked, TracedModel),
            resolve_layout(bind(asked), 2),
            0,
            build_full_step,
            accelerator=True,
            devices_per_node=None,
        )
        kernels[kernel] = report.categories["activations"]
    # FlexAttention has no bias in memory, the math kernel keeps its probabilities.
    assert kernels["flex"] < kernels["efficient"] < kernels["math"]


def dry(name: str, rank: int) -> RankReport:
    """The dry run of a named run on the CPU's kernels."""
    run = run_named(name)
    return dry_run(
        bind(run, TracedModel),
        resolve_layout(bind(run), WORLD),
        rank,
        build_full_step,
        accelerator=False,
        devices_per_node=None,
    )


def test_what_was_sent_goes_when_it_has_arrived_on_accelerators_alone() -> None:
    def peak(count: int, *, accelerator: bool) -> int:
        layout = {"pp": 2, "schedule": "interleaved_1f1b", "recompute": "full", "microbatch": 4}
        run = run_with({"model.d_model": 64}, global_batch=4 * count, **layout)
        resolved = resolve_layout(bind(run), 2)
        return dry_run(
            bind(run, TracedModel), resolved, 0, build_full_step, accelerator=accelerator, devices_per_node=None
        ).peak

    samples, message = 4 * 2 * 32 * 8, 4 * 32 * 64 * 2
    assert peak(24, accelerator=True) - peak(12, accelerator=True) == 12 * samples
    assert peak(24, accelerator=False) - peak(12, accelerator=False) >= 12 * (samples + 2 * message)
