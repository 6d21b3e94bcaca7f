"""What the parts of a model cost on one rank: its embedding, one of its blocks, and its head with the loss.

The parts are the real ones, built on the meta device and split by the code that splits them in a run, for one rank of axes
of any size: nothing is allocated, no process group is made. `part_costs` is what memory and time models build on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cache
from itertools import count
from math import isqrt
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import keystr, tree_flatten, tree_flatten_with_path, tree_unflatten

from phalanx.config.model import Experts, LanguageModel
from phalanx.layout.layout_model import Stage, TrainingPass
from phalanx.layout.prepare_blocks import recompute_block, recompute_policy
from phalanx.layout.streamed_weights.stream_pairs import streamed_parameters
from phalanx.nn.declared_layers import gate_block
from phalanx.nn.float8_linear import HeldWeight, Operand, flatten_held
from phalanx.nn.precision import PRECISIONS
from phalanx.planner.schedule.timeline import Costs, Kept, Timeline
from phalanx.planner.trace.accelerator_kernels import ring_operations
from phalanx.planner.trace.chunked_head import Chunks, chunked_costs, shown_setting
from phalanx.planner.trace.compiled_block import Argument, compiled_timeline, fused_steps
from phalanx.planner.trace.expert_loads import PRIOR
from phalanx.planner.trace.operations import ExpertScale, ExpertShare, Scale
from phalanx.planner.trace.recorder import Recorder
from phalanx.planner.trace.streamed_block import (
    ChainSize,
    Middle,
    Shown,
    SilentRing,
    chain_sizes,
    streamed_costs,
    traced_setting,
    traced_stage,
)
from phalanx.planner.trace.traced_model import (
    BLOCKS,
    ONE_PASS,
    PartName,
    PartParameter,
    Setting,
    build_stage,
    example_batch,
    expert_parameters,
    fuse_norms,
    part_parameters,
    part_tracer,
    quantised_layers,
)
from phalanx.torch_compat.compiler import JointGraph, joint_graph, load_compiler

_PASS = TrainingPass(step=1)
_AXES = {name: name for name in ("tp", "cp", "ep", "ep_across", "ep_within")}


@dataclass(frozen=True)
class PartCosts:
    """One part of a model on one rank, for one micro-batch."""

    costs: Costs
    parameters: tuple[PartParameter, ...]
    """Parameters before data parallelism shards them."""
    shared: tuple[Kept, ...]
    """What all blocks of a stage read and one micro-batch builds once: rotary tables, attention biases."""
    chains: tuple[ChainSize, ...] = ()
    """Chains of a block whose matrices are streamed."""

    @property
    def parameter_count(self) -> int:
        """Elements of all parameters on this rank."""
        return sum(parameter.count for parameter in self.parameters)

    @property
    def largest_parameter(self) -> PartParameter:
        """The one with the most elements."""
        return max(self.parameters, key=lambda parameter: parameter.count)

    def sharded_count(self, ranks: int) -> int:
        """Return the elements that one of `ranks` data-parallel ranks holds; see `PartParameter.sharded_count`."""
        return sum(parameter.sharded_count(ranks) for parameter in self.parameters)


# Layouts with equal settings share their costs: a plan asks for the same parts again and again.
@cache
def part_costs(name: PartName, setting: Setting, microbatch: int) -> PartCosts:
    """Return the costs of a part for micro-batches of `microbatch` samples.

    A part is traced once for one sample and once for any other number: its sizes are exact multiples. Tracing a block takes
    a few tenths of a second; of a compiled one the choices of recompute share most of it.
    """
    trace = _choose_trace(name, setting, microbatch)
    traced, share, experts = _trace_part(trace), trace.setting.share, None
    if share is not None and setting.share is None:
        # One trace stands for every number of experts on a rank and of rows that arrive there.
        rows = int(share.load * share.slices * trace.samples)
        experts = ExpertScale(rows, share, part_tracer(setting).expert_share())
    scale = Scale(trace.samples, microbatch, experts=experts)
    if trace.shown:
        chains = chain_sizes(setting)
        names = frozenset(name for chain in chains for name in chain.names)
        return PartCosts(
            streamed_costs(traced.timeline, traced.middles, traced.units, chains, scale),
            _block_parameters(_plain_setting(setting), names),
            _kept_together(traced, scale),
            chains,
        )
    # A head that goes over chunks was traced with a few of them.
    if traced.chunks and trace.setting.chunk_tokens < _ALL:
        shown, wanted = Chunks.of(trace.setting, trace.samples), Chunks.of(setting, microbatch)
        return PartCosts(chunked_costs(traced.timeline, traced.chunks, shown, wanted), traced.parameters, ())
    parameters = tuple(
        replace(parameter, shape=tuple(map(scale, parameter.shape))) if parameter.expert else parameter
        for parameter in traced.parameters
    )
    return PartCosts(traced.timeline.costs(scale), parameters, _kept_together(traced, scale))


@dataclass(frozen=True)
class _Trace:
    """A part that is traced."""

    name: PartName
    setting: Setting
    samples: int
    shown: tuple[Shown, ...] = ()
    """Chains of a streamed block."""


@dataclass(frozen=True)
class _Traced:
    timeline: Timeline
    parameters: tuple[PartParameter, ...]
    shared: tuple[int, ...]
    """Buffers."""
    chunks: tuple[int, ...] = ()
    """Steps of the forward pass at which the loss of each chunk of tokens begins; empty but for a head that has chunks."""
    middles: tuple[Middle, ...] = ()
    """Middles of a streamed block's chains; see `SilentRing`."""
    units: tuple[int, ...] = ()
    """Units of a chunk of each chain, as many as one rank holds."""


@cache
def _choose_trace(name: PartName, setting: Setting, microbatch: int) -> _Trace:
    """Return what is traced to know the costs of a part."""
    setting = replace(setting, passes=ONE_PASS) if name in BLOCKS else _plain_setting(setting)
    if name == "leading":
        # The first blocks of a mixture have no experts, so one trace does for all degrees of `ep`.
        setting = setting.unspread()
    alike = replace(_plain_setting(setting), tp=1, cp=1, ep=1) if name in BLOCKS else setting
    sizes = _fixed_sizes(name, alike)
    samples = _unlike_prime(_MANY, sizes)
    mixture = setting.model.experts if isinstance(setting.model, LanguageModel) else None
    # Without experts only samples are scaled, and of a single one nothing is.
    if microbatch == 1 and mixture is None:
        samples = 1
    # How many ranks a node has changes no size.
    setting = replace(setting, ep_node=min(setting.ep_node, 2))
    if mixture is not None and setting.ep > 1 and setting.share is None:
        share = _choose_share(setting, mixture, samples, sizes)
        setting = replace(setting, ep=share.ranks // share.slices, expert_tp=share.slices, loads=PRIOR, share=share)
    if name == "embedding":
        # It computes no loss, and nothing that would be compiled.
        return _Trace(name, replace(setting, compile=False, chunk_tokens=_ALL), samples)
    if setting.streamed > 1:
        traced, shown = traced_setting(setting)
        return _Trace(name, traced, samples, shown)
    if name == "head" and isinstance(setting.model, LanguageModel):
        whole, wanted = replace(setting, chunk_tokens=_ALL), Chunks.of(setting, microbatch)
        if wanted.count == 1:
            return _Trace(name, whole, samples)
        few = wanted.shown(setting.tp, _fixed_sizes(name, whole))
        return _Trace(name, shown_setting(setting, few), few.samples)
    return _Trace(name, setting, samples)


def _choose_share(setting: Setting, mixture: Experts, samples: int, sizes: frozenset[int]) -> ExpertShare:
    """Return the share of experts that is traced: about as many rows arrive as leave, in numbers of their own.

    samples: that are traced. sizes: see `_fixed_sizes`.
    """
    hidden = part_tracer(setting).expert_share().features * setting.expert_tp
    if setting.expert_tp == 1:
        # One trace does for all degrees of `ep` and loads.
        fewest = next(ranks for ranks in range(2, mixture.count + 1) if mixture.count % ranks == 0)
        rows = _unlike_prime(samples + 1, sizes)
        return ExpertShare(fewest, _unlike_prime(rows + 1, sizes), Fraction(rows, samples), features=hidden)
    # Another one does for all degrees of `expert_tp`: rows are copied, and each rank has one expert, as in any of them.
    slices = _unlike_prime(_FEW, sizes | {mixture.active})
    # More than leave, as at the busiest rank: the larger of the two numbers says what an exchange costs.
    rows = _unlike_prime(samples * slices + 1, sizes)
    groups = _unlike_prime(samples + 1, sizes)
    load = Fraction(rows, samples * slices)
    return ExpertShare(mixture.count * slices, 1, load, slices, groups * gate_block(hidden))


_ALL = 2**62
"""Tokens of a chunk that holds all of any micro-batch."""


def _plain_setting(setting: Setting) -> Setting:
    """Return the setting without what neither ends of the model nor shapes of parameters depend on."""
    plain = replace(setting, recompute="none", streamed=1, peer_copies=False, joint_gradients=True)
    return replace(plain, passes=setting.passes.kind()).unspread()


def _kept_together(traced: _Traced, scale: Scale) -> tuple[Kept, ...]:
    shared = [traced.timeline.buffers[number] for number in traced.shared]
    return tuple(Kept(buffer.name.removeprefix(_SHARED), buffer.bytes(scale)) for buffer in shared)


_MANY, _FEW = 1000, 30
"""Least of primes that stand for sizes; of few, where the trace has a list of as many."""


def _unlike_prime(least: int, sizes: frozenset[int]) -> int:
    """Return a prime from `least` on that divides none of `sizes`, so that what it divides is known to grow with what it
    stands for."""
    numbers = (number for number in count(least) if all(number % factor for factor in range(2, isqrt(number) + 1)))
    return next(prime for prime in numbers if all(size % prime for size in sizes))


@cache
def _fixed_sizes(name: PartName, setting: Setting) -> frozenset[int]:
    """Return the sizes that do not depend on the micro-batch: of parameters, and of one sample of the part's inputs."""
    stage = build_stage(name, setting)
    shapes = [parameter.shape for parameter in stage.part.parameters()]
    shapes += [tensor.shape[1:] for tensor in example_batch(name, stage, setting, 1).values()]
    return frozenset([setting.length, *(size for shape in shapes for size in shape)])


@cache
def _trace_part(trace: _Trace) -> _Traced:
    """Trace a part."""
    if trace.shown:
        stage, ring, units = traced_stage(trace.setting, trace.shown, trace.samples)
        return replace(
            _trace_eager(stage, trace.setting, trace.samples, ring), middles=tuple(ring.middles), units=units
        )
    stage = build_stage(trace.name, trace.setting)
    if trace.name in BLOCKS and trace.setting.compile:
        load_compiler()
        # Recompute is chosen when the graph is divided: one graph serves all choices of it.
        joint, arguments = _block_graph(trace.name, replace(trace.setting, recompute="none"), trace.samples)
        policy = recompute_policy(trace.setting.recompute)
        timeline = compiled_timeline(joint, policy, arguments, _AXES, ring_operations())
        shared = [number for number, buffer in enumerate(timeline.buffers) if buffer.name.startswith(_SHARED)]
        timeline.adds_experts = trace.setting.casts_experts
        return _Traced(timeline, part_parameters(stage, trace.setting), tuple(shared))
    return _trace_eager(stage, trace.setting, trace.samples)


@cache
def _block_parameters(setting: Setting, streamed: frozenset[str]) -> tuple[PartParameter, ...]:
    """Return the parameters of a block, those in `streamed` marked."""
    found = part_parameters(build_stage("block", setting), setting)
    return tuple(replace(parameter, streamed=parameter.name in streamed) for parameter in found)


# --- compiled blocks ---------------------------------------------------------------------------------------------------


@cache
def _block_graph(name: PartName, setting: Setting, samples: int) -> tuple[JointGraph, list[Argument]]:
    """Return the joint graph of a block, and what its inputs are; recompute is chosen later."""
    if setting.casts_experts:
        # Tracing takes longer than anything else that plans do.
        joint, arguments = _block_graph(name, replace(setting, casts_experts=False), samples)
        experts = [place for place, argument in enumerate(arguments) if argument.expert]
        return joint.with_cast_inputs(experts, PRECISIONS[setting.precision].main_dtype), arguments
    return trace_block(name, setting, samples)


def trace_block(name: PartName, setting: Setting, samples: int) -> tuple[JointGraph, list[Argument]]:
    """Trace a block without recompute; return its joint graph, and what its inputs are."""
    stage = build_stage(name, setting)
    (block,) = stage.part.blocks
    parameters, buffers = dict(block.named_parameters()), dict(block.named_buffers())
    called_with = block_arguments(stage, example_batch(name, stage, setting, samples))
    inputs, spec = tree_flatten(called_with)
    places = [place for place, value in enumerate(inputs) if isinstance(value, Tensor)]
    held, quantised = [*parameters, *buffers], quantised_layers(block)
    in_8_bits = [tensor for layer in quantised for tensor in flatten_held(layer.held)]

    def run(*tensors: Tensor) -> Tensor:
        values = list(inputs)
        others = len(tensors) - len(in_8_bits)
        for place, tensor in zip(places, tensors[len(held) : others], strict=True):
            values[place] = tensor
        for number, layer in enumerate(quantised):
            q, scale, column_scale = tensors[others + 3 * number : others + 3 * (number + 1)]
            layer.held = HeldWeight(Operand(q, scale), column_scale)
        # Buffers of the block too: the compiler reads no tensor but those it is given.
        given = dict(zip(held, tensors[: len(held)], strict=True))
        result: Tensor = torch.func.functional_call(block, given, tree_unflatten(values, spec))
        return result

    x, *rest = [inputs[place] for place in places]
    spread = {id(parameter) for parameter in expert_parameters(stage)} if setting.ep > 1 else set()
    arguments = [
        Argument(name, "given", trained=p.requires_grad, expert=p.requires_grad and id(p) in spread)
        for name, p in parameters.items()
    ]
    arguments += [Argument(name, "given") for name in buffers]
    arguments += [Argument("input", "input"), *(Argument(name, "given") for name in _shared_inputs(called_with))]
    arguments += [Argument(f"in 8 bits [{number}]", "given") for number in range(len(in_8_bits))]
    return joint_graph(run, [*parameters.values(), *buffers.values(), x, *rest, *in_8_bits]), arguments


_SHARED = "shared "


def _shared_inputs(arguments: tuple[Any, ...]) -> dict[str, Tensor]:
    """Return a block's arguments besides its input, by their place: `shared rope[0]`, say."""
    leaves, _ = tree_flatten_with_path(arguments[1:])
    return {_SHARED + keystr(path[1:]).lstrip("."): leaf for path, leaf in leaves if isinstance(leaf, Tensor)}


class _Reached(Exception):
    """Ends a forward pass at the block whose arguments are wanted."""


def block_arguments(stage: Stage, batch: dict[str, Tensor]) -> tuple[Any, ...]:
    """Return the arguments with which a stage of one block calls it. batch: arguments of the stage."""
    (block,) = stage.part.blocks
    found: list[Any] = []

    def keep(_module: nn.Module, arguments: tuple[Any, ...]) -> None:
        found.extend(arguments)
        raise _Reached

    handle = block.register_forward_pre_hook(keep)
    try:
        stage(**batch, training=_PASS)
    except _Reached:
        return tuple(found)
    finally:
        handle.remove()
    raise AssertionError("the stage does not call its block")


# --- eager parts -------------------------------------------------------------------------------------------------------


def _trace_eager(stage: Stage, setting: Setting, samples: int, ring: SilentRing | None = None) -> _Traced:
    """Trace a stage as it runs uncompiled: each operation is a step, forward, recomputed and backward."""
    recorder = Recorder(_AXES, ring_operations())
    if ring is not None:
        ring.recorder = recorder
    named = part_parameters(stage, setting)
    if setting.attention != "cpu":
        fuse_norms(stage, recorder)
    # Parameters are there before the pass begins: none of its allocations.
    for parameter in stage.parameters():
        recorder.hold(parameter, "given")
    for layer in quantised_layers(stage):
        for tensor in flatten_held(layer.held):
            recorder.hold(tensor, "given")
    blocks = list(stage.part.blocks)
    shared: list[int] = []
    chunks: list[int] = []
    run: Callable[[], Tensor]
    if blocks:
        (block,) = blocks
        arguments = block_arguments(stage, example_batch("block", stage, setting, samples))
        x = arguments[0]
        # Masks and rotary tables are made once for all blocks.
        shared = [recorder.hold(tensor, "given", name) for name, tensor in _shared_inputs(arguments).items()]
        _mark_forward(block, recorder)
        recompute_block(block, setting.recompute)

        def run() -> Tensor:
            result: Tensor = block(*arguments)
            return result
    else:
        batch = example_batch("head" if stage.part.part.last else "embedding", stage, setting, samples)
        x = batch["x"]
        for key, tensor in batch.items():
            if key != "x":
                recorder.hold(tensor, "given", key)
        chunks = _watch_loss(stage, recorder, fused=setting.compile)

        def run() -> Tensor:
            result: Tensor = stage(**batch, training=_PASS)
            return result

    number = recorder.hold(x, "input", "input")
    streamed = streamed_parameters(stage)
    whole = [parameter for parameter in stage.parameters() if parameter not in streamed]
    experts = expert_parameters(stage) if setting.ep > 1 else []
    # Streamed parameters are gathered piece by piece, and their gradients leave the same way.
    _record_passes(recorder, run, whole, experts)
    timeline = recorder.timeline
    timeline.adds_experts = setting.casts_experts
    pending = {recorder.hold(p.grad, "made") for p in streamed if p.grad is not None}
    timeline.pending = sorted(pending)
    for step in timeline.backward:
        if step.makes and pending.issuperset(step.makes):
            # The first micro-batch alone allocates gradients of streamed matrices; later ones add to what is there.
            step.kind = "free"
    if not stage.part.part.first:
        # What the embedding is called with are samples, which are there all the time.
        recorder.timeline.kept.append(number)
    return _Traced(recorder.timeline, named, tuple(sorted(set(shared))), tuple(chunks))


def _record_passes(
    recorder: Recorder, run: Callable[[], Tensor], parameters: Sequence[nn.Parameter], experts: Sequence[nn.Parameter]
) -> None:
    timeline = recorder.timeline
    with recorder:
        result = run()
        timeline.output = [recorder.hold(result, "made")]
        timeline.kept = recorder.living()
        recorder.backward = True
        incoming = torch.empty_like(result)
        recorder.relabel(incoming, "incoming")
        # A gradient of the result's own format, as the next stage would send it; of a frozen embedding nobody asks for one.
        if result.requires_grad:
            result.backward(incoming)
    timeline.gradients = [recorder.hold(p.grad, "made") for p in parameters if p.grad is not None]
    timeline.expert_gradients = [recorder.hold(p.grad, "made") for p in experts if p.grad is not None]
    recorder.close()


def _mark_forward(block: nn.Module, recorder: Recorder) -> None:
    """Let the recorder know what belongs to the block's forward pass, even where it runs a second time."""
    kind: Any = type(block)

    def forward(self: nn.Module, *arguments: Any) -> Any:
        with recorder.recomputable():
            return kind.forward(self, *arguments)

    # A subclass, so that whatever wraps the block for recompute calls this forward as well.
    block.__class__ = type(f"Recorded{kind.__name__}", (kind,), {"forward": forward})


def _watch_loss(stage: Stage, recorder: Recorder, *, fused: bool) -> list[int]:
    """Note how many steps there are when the loss of each chunk of tokens begins. fused: let it run as the compiler fuses
    it."""
    begun: list[int] = []
    kernel = getattr(stage.part.head, "loss_kernel", None) if stage.part.part.last else None
    if kernel is None:
        return begun

    def watched(logits_NV: Tensor, targets_N: Tensor, z_loss: float, with_grad: bool) -> Any:
        begun.append(len(recorder.timeline.forward))
        if not fused:
            return kernel(logits_NV, targets_N, z_loss, with_grad)
        return fused_steps(lambda x, y: kernel(x, y, z_loss, with_grad), (logits_NV, targets_N), recorder)

    stage.part.head.loss_kernel = watched
    return begun
