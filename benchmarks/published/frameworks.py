"""How other training programs carry out a step, as far as that differs from ours: a few switches for each, by its name.

The time model of `phalanx.planner` is handed such a program in place of ours: it lists what a part of the model runs, and
`BlockingDataParallel` what data-parallel ranks wait for.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import torch

from phalanx.config.model import LanguageModel
from phalanx.families.weather.config import WeatherModel
from phalanx.hardware.collectives import Constants
from phalanx.hardware.machine import Machine
from phalanx.nn.precision import PRECISIONS
from phalanx.planner.time.framework import COMPILED, FrameworkProfile
from phalanx.planner.time.operation_time import Floats, PartBreakdown
from phalanx.planner.time.part_time import Parts, PartTimes, part_times
from phalanx.planner.time.profile import NamedProfile, Profile
from phalanx.planner.time.step_parts import Steps
from phalanx.planner.time.step_time import Busiest, DataParallel
from phalanx.planner.trace.operations import Attention, Matmul, Operation, Phase
from phalanx.planner.trace.traced_model import BLOCKS, PartName, Setting
from published.transformer_engine import (
    attention_in_8_bits,
    in_8_bits,
    with_8_bit_head,
    with_expert_biases,
    with_fused_experts,
    with_known_scales,
    with_recomputed_activation,
    without_weight_copies,
)


@dataclass(frozen=True)
class OtherFramework(FrameworkProfile):
    """Another program."""

    gathers_quantised: bool = False
    issues_exchanges: bool = False
    """Whether exchanges cost the host what they do in our training: each collective of activations is called from Python,
    and each parameter is gathered and reduced by itself, as FSDP2 does it. Else next to nothing."""
    fused_attention: bool = True
    """Whether scores stay on the chip; else they are written, and pass through memory several times."""
    attention_dropout: bool = False
    """Whether scores pass through memory once more for dropout; of no meaning with fused attention."""
    fused_residual: bool = False
    """Whether a bias behind a row-split matrix is added in the same pass as the residual, though nothing is compiled."""
    sequence_parallel: bool = True
    """Whether tensor-parallel ranks split what lies between the matmuls; else they sum whole activations, and each computes
    norms and sums of all positions."""
    overlap: bool = True
    """Whether data-parallel communication runs behind computing; else it comes after it."""
    even_stages: bool = False
    """Whether all pipeline stages have equally many blocks, whatever the embedding and the head cost."""
    delayed_scales: bool = False
    """Whether 8-bit numbers are made by scales of steps before, in one pass, and biases cost none."""
    quantises_once: bool = False
    """Whether weights in 8 bits are made once a step, transposed as well, and not in each pass."""
    sums_in_products: bool = False
    """Whether the product that forms a weight's gradient adds it to the sum over micro-batches."""
    experts_in_8_bits: bool = False
    """Whether products of experts multiply 8-bit numbers where all others do; ours multiply 16-bit ones."""
    fused_experts: bool = False
    """Whether the activation function between experts' products is part of these."""
    biased_experts: bool = False
    """Whether experts have biases, and clamp what their activation function gets."""
    recomputes_activation: bool = False
    """Whether that function is applied again in the backward pass."""
    attention_exponentials: float = 0.0
    """Exponentials a clock and multiprocessor where attention multiplies 8-bit numbers; 0 where it does not."""
    head_in_8_bits: bool = False
    rows_once_a_rank: bool = False
    """Whether a token's row goes once to each rank that has some of its experts, else once for each of its experts."""
    hides_rows: bool = False
    """Whether rows for experts travel behind what another micro-batch computes."""
    hides_tp: bool = False
    """Whether tensor-parallel ranks exchange activations while they multiply them."""
    projects_variables: bool = False
    """Whether a forecaster computes a key and a value of every variable at every location, and again in the backward pass;
    ours multiplies the weights first."""

    @property
    def sum_bytes(self) -> int:
        """See `FrameworkProfile`."""
        return 0 if self.sums_in_products else super().sum_bytes

    def traced_setting(self, setting: Setting) -> Setting:
        """Return the setting without recompute: what is recomputed is put together from the forward pass."""
        return replace(setting, recompute="none", quantises_once=self.quantises_once)

    def end_costs(self, setting: Setting) -> tuple[float, float]:
        """Return the costs of the embedding and of the head, in blocks, by which stages are split."""
        return (0.0, 0.0) if self.even_stages else super().end_costs(setting)

    def part_operations(self, name: PartName, setting: Setting, microbatch: int) -> tuple[Operation, ...]:
        """List what a part of the model runs.

        Recomputing a block runs all of its forward pass again, and `selective` the attention core alone.
        """
        operations = list(super().part_operations(name, self.traced_setting(setting), microbatch))
        if setting.recompute != "none" and name in BLOCKS:
            again = [
                replace(op, phase="recompute")
                for op in operations
                if op.phase == "forward" and (setting.recompute == "full" or op.attention is not None)
            ]
            forward = [op for op in operations if op.phase == "forward"]
            operations = [*forward, *again, *(op for op in operations if op.phase != "forward")]
        operations = [_with_narrow_values(op, setting) for op in operations]
        if self.delayed_scales:
            operations = with_known_scales(operations)
        if self.quantises_once:
            operations = without_weight_copies(operations)
        operations = self._with_experts(operations, setting)
        if self.projects_variables and name == "embedding" and isinstance(setting.model, WeatherModel):
            operations += _variable_projections(setting.model, setting, microbatch)
        if self.attention_exponentials:
            operations = [one for op in operations for one in attention_in_8_bits(op, self.attention_exponentials)]
        if self.head_in_8_bits and name == "head":
            operations = with_8_bit_head(operations)
        if self.rows_once_a_rank and setting.ep > 1:
            share = _ranks_of_token(setting)
            operations = [_with_fewer_rows(op, share) for op in operations]
        if setting.tp > 1 and not self.sequence_parallel:
            operations = list(_with_whole_activations(_without_moves(operations), setting.tp, self.fused_residual))
        elif setting.tp > 1 and self.fused_residual:
            operations = _with_one_sum(operations)
        if not self.fused_attention:
            operations = [one for op in operations for one in unfused(op, self.attention_dropout)]
        return tuple(operations)

    def _with_experts(self, operations: list[Operation], setting: Setting) -> list[Operation]:
        if self.biased_experts and not self.fused_experts:
            operations = with_expert_biases(operations, wide_probabilities=self.rows_once_a_rank)
        if self.recomputes_activation:
            operations = with_recomputed_activation(operations)
        if self.experts_in_8_bits and PRECISIONS[setting.precision].products is not None:
            operations = [one for op in operations for one in in_8_bits(op)]
        return with_fused_experts(operations) if self.fused_experts else operations

    def as_it_runs(self, named: NamedProfile) -> NamedProfile:
        """Return a profile without what this program does not pay for.

        Constants that were fitted to published runs hold what uncompiled blocks take, so there is no further share.
        """
        profile = replace(named.profile, eager_share=1.0)
        if not self.issues_exchanges:
            profile = replace(profile, exchange_host_s=0.0, shard_host_s=0.0)
        return replace(named, profile=profile)


def times_of_parts(
    framework: FrameworkProfile, parts: Parts, machine: Machine, constants: Constants, profile: Profile
) -> PartTimes:
    """Return the seconds of every part, with what another program does otherwise with the rows for experts.

    constants: of collectives when nothing else runs.
    """
    times = part_times(parts, machine, constants, profile)
    if not isinstance(framework, OtherFramework):
        return times
    seconds = times.seconds.copy()
    if framework.rows_once_a_rank:
        # One kernel writes to all ranks at once, where NCCL sends to one after the other.
        direct = part_times(parts, machine, replace(constants, step_s=0.0), profile)
        seconds[..., PartBreakdown.EP] = direct.seconds[..., PartBreakdown.EP]
    if framework.hides_tp:
        behind = np.minimum(seconds[..., PartBreakdown.TP], profile.hidden * seconds[..., PartBreakdown.MATMUL])
        seconds[..., PartBreakdown.TP] -= (1 - profile.slowdown) * behind
    if not framework.hides_rows:
        return replace(times, seconds=seconds)
    computing = seconds[..., [PartBreakdown.MATMUL, PartBreakdown.ATTENTION, PartBreakdown.MEMORY]].sum(axis=2)
    hidden = np.minimum(seconds[..., PartBreakdown.EP], profile.hidden * computing)
    seconds[..., PartBreakdown.EP] -= (1 - profile.slowdown) * hidden
    return replace(times, seconds=seconds)


class BlockingDataParallel(DataParallel):
    """Data-parallel ranks that exchange all they hold once a step, when everything is computed."""

    reduces_each_microbatch: ClassVar[bool] = False

    def exposed(self, steps: Steps, busiest: Busiest) -> Floats:
        """Return the seconds a step, [layouts]."""
        held = busiest.sum_parts(
            steps.block_parameters, steps.leading_parameters, steps.embedding_parameters, steps.head_parameters
        )
        return self.gather(steps, held) + self.scatter(steps, held) + self.sum_replicas(steps, held)


def _with_narrow_values(op: Operation, setting: Setting) -> Operation:
    """Return attention to latents whose values are as narrow as they are; other operations as they are.

    PyTorch's flash attention, which ours is traced with, takes values as wide as keys; cuDNN's does not
    (NVIDIA/TransformerEngine@d0067d0d, transformer_engine/pytorch/attention/dot_product_attention/utils.py,
    `get_attention_backend`, `head_dim_qk != head_dim_v`).
    """
    model = setting.model
    if op.attention is None or not isinstance(model, LanguageModel) or model.latent is None:
        return op
    return replace(op, attention=replace(op.attention, value_size=model.latent.value_size))


def _variable_projections(model: WeatherModel, setting: Setting, microbatch: int) -> list[Operation]:
    """List the products of keys and values of all variables, which tensor-parallel ranks share by heads."""
    rows = microbatch * model.n_locations * len(model.input_names)
    width, split = model.d_model, 2 * model.d_model // setting.tp
    products: list[tuple[Phase, int, int, int]] = [
        ("forward", rows, split, width),
        ("recompute", rows, split, width),
        ("backward", rows, width, split),
        ("backward", width, split, rows),
    ]
    return [
        Operation(
            name="mm",
            kind="matmul",
            phase=phase,
            dtype=torch.bfloat16,
            flops=2 * m * n * k,
            bytes_read=2 * (m * k + k * n),
            bytes_written=2 * m * n,
            matmul=Matmul(1, m, n, k),
            weight_gradient=k == rows,
        )
        for phase, m, n, k in products
        if phase != "recompute" or setting.recompute == "full"
    ]


def _ranks_of_token(setting: Setting) -> float:
    """Return the ranks that have some of a token's experts, over its experts.

    Each expert is as likely as another, but for routers that choose groups of experts first, whose ranks are the only ones
    (DeepSeek-V3, arXiv:2412.19437, section 2.1.2).
    """
    assert isinstance(setting.model, LanguageModel) and setting.model.experts is not None
    experts = setting.model.experts
    grouped = experts.groups > 1 and setting.ep % experts.groups == 0
    ranks = setting.ep // experts.groups * experts.active_groups if grouped else setting.ep
    return ranks * (1 - (1 - 1 / ranks) ** experts.active) / experts.active


def _with_fewer_rows(op: Operation, share: float) -> Operation:
    """Return an exchange of rows for experts that sends `share` of them; other operations as they are."""
    sent = op.collective
    if sent is None or sent.axis != "ep":
        return op
    return replace(op, collective=replace(sent, bytes=round(sent.bytes * share)))


def _without_moves(operations: Sequence[Operation]) -> list[Operation]:
    """Without the copies that bring activations in the order in which they are gathered and scattered."""
    kept = []
    for before, op, after in zip([None, *operations], operations, [*operations[1:], None], strict=False):
        gathered = before is not None and _moves(before, "all_gather")
        scattered = after is not None and _moves(after, "reduce_scatter")
        if not (op.kind == "copy" and (gathered or scattered)):
            kept.append(op)
    return kept


def _with_one_sum(operations: Sequence[Operation]) -> list[Operation]:
    """Without the pass that adds the bias of a row-split matrix where another adds the residual right after."""
    kept = []
    for before, op, after in zip([None, *operations], operations, [*operations[1:], None], strict=False):
        scattered = before is not None and _moves(before, "reduce_scatter")
        if not (scattered and op.kind == "pointwise" and after is not None and after.kind == "pointwise"):
            kept.append(op)
    return kept


def _with_whole_activations(operations: Sequence[Operation], tp: int, fused_residual: bool) -> Iterator[Operation]:
    """With sums of whole activations in place of gathers and scatters; norms and sums pass over all positions."""
    inside = {"forward": False, "recompute": False, "backward": False}
    for op in _with_one_sum(operations) if fused_residual else operations:
        collective = op.collective
        if collective is not None and collective.axis == "tp":
            inside[op.phase] = collective.operation == "all_gather"
            if not inside[op.phase]:
                yield replace(op, collective=replace(collective, operation="all_reduce"))
            continue
        split = collective is None and op.attention is None and op.matmul is None and not inside[op.phase]
        spread = tp if split else 1
        yield replace(op, bytes_read=op.bytes_read * spread, bytes_written=op.bytes_written * spread)


def _moves(op: Operation, collective: str) -> bool:
    return op.collective is not None and op.collective.axis == "tp" and op.collective.operation == collective


def unfused(op: Operation, dropout: bool) -> list[Operation]:
    """Return attention as products and passes over the scores, one byte an element of dropout's mask; other operations as
    they are."""
    x = op.attention
    if x is None:
        return [op]
    batch, scores = x.samples * x.heads, x.samples * x.heads * x.queries * x.keys
    queries, keys, size, values = x.queries, x.keys, x.head_size, x.value_size or x.head_size
    products = [(queries, keys, size), (queries, values, keys)]
    if x.backward:
        products = [(keys, values, queries), (queries, keys, values), (queries, size, keys), (keys, size, queries)]
    one = replace(op, attention=None, flops=0, bytes_written=0, weight_gradient=False)
    found = []
    for m, n, k in products:
        traffic = x.width * batch * (m * n + m * k + n * k)
        found.append(replace(one, matmul=Matmul(batch, m, n, k, x.width), bytes_read=traffic))
    passes = [*_softmax_passes(x), *[2 * x.width + 1] * dropout]
    return found + [replace(one, bytes_read=each * scores) for each in passes]


def _softmax_passes(x: Attention) -> list[int]:
    """Bytes an element of each pass over the scores: one where Megatron's softmax kernel scales and masks as well, else one
    to and from 32 bits each, one each for scale and mask, and the softmax itself.

    The kernel wants score matrices in fours, rows in fours and at most 4,096 columns (Megatron-LM,
    megatron/core/fusions/fused_softmax.py, `is_kernel_available`).
    """
    if x.samples * x.heads % 4 == 0 and x.queries % 4 == 0 and x.keys <= 4096:
        return [3 * x.width if x.backward else 2 * x.width]
    return [x.width + 4, 8, 8, 12 if x.backward else 8, 4 + x.width]


_MEGATRON = OtherFramework(
    compiled=False,
    host_work=3.0,
    fused_attention=False,
    attention_dropout=True,
    fused_residual=True,
    sequence_parallel=False,
    reduce_bytes=2,
    overlap=False,
    even_stages=True,
    single_rank_overhead=1.0,
    low_precision_copy=False,
    optimizer_bytes=46,
)
"""Gradients are copied to 32-bit and checked for overflow on their way to the optimizer."""

_BRIDGE = replace(
    _MEGATRON,
    compiled=True,
    host_work=2.0,
    fused_attention=True,
    attention_dropout=False,
    sequence_parallel=True,
    overlap=True,
    experts_in_8_bits=True,
    quantises_once=True,
    sums_in_products=True,
)
"""Transformer Engine's kernels are fused as a compiler fuses them; data-parallel exchanges run behind computing. Weights in
8 bits are kept between the micro-batches of a step (Megatron-LM, megatron/core/extensions/transformer_engine.py,
`is_first_microbatch`), and gradients of weights are summed by their products (`gradient_accumulation_fusion`, which
Megatron-Bridge has on where Transformer Engine is)."""

_FSDP = OtherFramework(
    compiled=False,
    host_work=2.0,
    reduce_bytes=2,
    single_rank_overhead=1.0,
    low_precision_copy=False,
)

_FOUNDRY = replace(_FSDP, delayed_scales=True)
"""In 8 bits its linear layers are Transformer Engine's, with Composer's default recipe, which is delayed scaling
(mosaicml/llm-foundry@b2a43a14, scripts/train/benchmarking/submit_benchmarks.py, `fc_type`; mosaicml/composer@915fab73,
composer/core/precision.py)."""

_ORBIT = replace(_FSDP, sequence_parallel=False, projects_variables=True)
"""FSDP around tensor-parallel layers that sum whole activations; gradients travel in 16 bits, and blocks and aggregation are
computed again. Its first trainer is public in a fork for other data (train.py: `MixedPrecision`, `check_fn`)."""

_KNOWN: tuple[tuple[str, FrameworkProfile], ...] = (
    ("llm foundry", _FOUNDRY),
    ("hf accelerate", _FSDP),
    ("torchtitan", replace(_FSDP, compiled=True, host_work=1.0, issues_exchanges=True, reduce_bytes=4)),
    ("nanotron", replace(_MEGATRON, fused_attention=True, reduce_bytes=4)),
    ("megatron-bridge", _BRIDGE),
    ("primus megatron", replace(_BRIDGE, sums_in_products=False)),
    ("megatron-lm", replace(_MEGATRON, reduce_bytes=4)),
    ("megatron-deepspeed", _MEGATRON),
    ("gpt-neox", _MEGATRON),
    ("orbit", _ORBIT),
    ("phalanx", COMPILED),
)
"""By what the lower-case name of a program begins with."""


def framework_of(name: str, attention: str = "", sequence_parallel: bool | None = None) -> FrameworkProfile | None:
    """Return what the program called `name` does, None for a program that is not known.

    attention, sequence_parallel: the kernel and whether activations are split, where a source states them; "" and None
    where it does not.
    """
    found = next((framework for start, framework in _KNOWN if name.lower().startswith(start)), None)
    if not isinstance(found, OtherFramework):
        return found
    words = attention.lower()
    if words and "no flash" not in words and ("flash" in words or "sdpa" in words):
        found = replace(found, fused_attention=True)
    elif "unfused" in words or "no flash" in words:
        found = replace(found, fused_attention=False)
    return found if sequence_parallel is None else replace(found, sequence_parallel=sequence_parallel)
