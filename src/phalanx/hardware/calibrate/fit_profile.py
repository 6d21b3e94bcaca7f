"""From what was measured to a profile: curves through single operations, then what whole blocks say of their sum."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from phalanx.errors import ConfigError
from phalanx.hardware.calibrate.fit_collectives import Point, fit_constants
from phalanx.hardware.calibrate.measure_machine import Measurements
from phalanx.hardware.calibrate.measured_sizes import setting_of
from phalanx.hardware.calibrate.time_exchanges import Beside
from phalanx.hardware.calibrate.time_operations import TimedBlock
from phalanx.hardware.collectives import Constants, default_constants
from phalanx.hardware.machine import Machine
from phalanx.hardware.topology import place_groups
from phalanx.planner.measured.calibration import fit_near_priors
from phalanx.planner.time.framework import COMPILED, EAGER
from phalanx.planner.time.operation_time import Direction, Floats, Form, OperationTable, PartBreakdown, compute_seconds
from phalanx.planner.time.part_time import part_times, parts_of
from phalanx.planner.time.profile import CONSTANTS, RATES, NamedProfile, Profile, default_profile
from phalanx.planner.time.timed_operations import Kind, TimedOperation

_NOISE = 0.05
"""Standard deviation of the logarithm of a single operation's time around the curves."""
_CURVES: Mapping[str, float] = {
    "matmul_flop_s": 0.5,
    "matmul32_flop_s": 1.0,
    "matmul64_flop_s": 1.0,
    "matmul8_flop_s": 1.0,
    "matmul_edge": 1.0,
    "matmul_depth": 1.0,
    "matmul_area": 1.5,
    "attention_flop_s": 0.7,
    "attention_backward_flop_s": 0.7,
    "attention_length": 1.0,
    "attention_head": 0.7,
    "attention_area": 1.5,
    "memory_b_s": 0.5,
    "kernel_s": 1.0,
}
"""Constants that single operations decide, and how far from the device's default they may lie: standard deviations of the
logarithm."""
_WIDTHS: Mapping[Kind, int] = {"matmul": 2, "matmul32": 4, "matmul64": 8, "matmul8": 1}
"""Bytes of a number in products of each kind."""
_BLOCK_NOISE = 0.02
_BLOCKS: Mapping[str, float] = {
    "matmul_flop_s": 0.05,
    "attention_flop_s": 0.1,
    "attention_backward_flop_s": 0.1,
    "memory_b_s": 0.25,
    "kernel_s": 0.4,
    "host_s": 0.5,
}
"""Constants that whole blocks may still move from where single operations put them: other kernels run beside them, under the
same power limit, and traffic is that of fused kernels."""
_EAGER: Mapping[str, float] = {"eager_share": 1.0}
"""What blocks that are not compiled decide, behind all else."""
_COLLECTIVE_SPREAD = {
    "launch_s": 1.0,
    "step_s": 1.0,
    "efficiency": 0.4,
    "pass_b_s": 1.0,
    "ramp": 1.0,
    "multicast": 0.3,
    "step_across_s": 1.0,
    "efficiency_across": 0.5,
    "tree": 0.2,
}


@dataclass(frozen=True)
class Found:
    """A profile, and how well its own measurements follow from it: relative errors, predicted over measured less 1."""

    named: NamedProfile
    operations: Floats
    """Errors of the curves alone, for the operations they were fitted to: not of whole attention."""
    exchanged: Floats
    blocks: Floats
    """Error of each block by a fit without it, forward and backward together."""


def profile_of(found: Measurements, machine: Machine, source: str) -> Found:
    """Fit a profile to measurements. machine: where they were made. source: on what and when, in words."""
    prior = _prior_profile(machine.node.device, found)
    # Curves are moved to single operations. Whole attention has none of its own: what its calls take is kept as a ratio to
    # that of causal ones.
    causal = replace(found, operations=tuple(x for x in found.operations if not _is_whole(x)))
    timed = {x.kind for x in causal.operations}
    untimed = {f"{kind}_flop_s" for kind in _WIDTHS if kind not in timed}
    names = {name: spread for name, spread in _CURVES.items() if name not in untimed}
    if areas := [x.batch * x.m for x in causal.operations if x.kind not in _WIDTHS]:
        # By default 0, which no factor moves; so little costs the fewest rows a ninth of their rate.
        prior = replace(prior, attention_area=min(areas) / 8)
    curves = _fit_constants(prior, names, lambda profile: _operation_errors(profile, causal) / _NOISE)
    by_curves = np.exp(_operation_errors(curves, found))
    operations = tuple(
        replace(x, ratio=float(1 / ratio)) for x, ratio in zip(found.operations, by_curves.tolist(), strict=False)
    )
    largest = max(found.optimizer, key=lambda x: x.bytes)
    profile = replace(curves, measured=operations, host_s=found.host_s, optimizer_b_s=largest.bytes / largest.seconds)
    if (host := found.host_exchanges) is not None:
        profile = replace(profile, exchange_host_s=host.exchange_s, shard_host_s=host.shard_s)
    profile, constants, exchanged = _with_exchanges(profile, found, machine)
    # Leave one out: how well a block is predicted that the profile has not seen.
    left_out = [
        _with_blocks(profile, [*found.blocks[:place], *found.blocks[place + 1 :]], machine, _BLOCKS)
        for place in range(len(found.blocks))
    ]
    blocks = np.array(
        [_block_error(one, block, machine) for one, block in zip(left_out, found.blocks, strict=True)], np.float64
    )
    named = NamedProfile(
        name=machine.name,
        device=machine.node.device,
        source=source,
        profile=_with_blocks(
            _with_blocks(profile, found.blocks, machine, _BLOCKS), found.eager_blocks, machine, _EAGER
        ),
        fitted=_judge_profile(found, blocks),
        collectives=constants,
        beside=found.beside,
    )
    fitted_to = np.array([not _is_whole(x) for x in operations], np.bool_)
    return Found(named, by_curves[: len(operations)][fitted_to] - 1, exchanged, blocks)


def _prior_profile(device: str, found: Measurements) -> Profile:
    """Return the device's default; for an unknown device, constants with the highest rates that were measured."""
    try:
        return default_profile(device).profile
    except ConfigError:
        # No profile of this device is known: another one's constants, with the highest rates that were measured here.
        known = default_profile("A100-80GB").profile
        highest = max(2.0 * x.batch * x.m * x.n * x.k / x.seconds for x in found.operations if x.kind == "matmul")
        factor = highest / known.matmul_flop_s
        names = (*RATES, "attention_flop_s", "attention_backward_flop_s")
        scaled = known.scaled(dict.fromkeys(names, factor))
        memory = max(x.bytes / x.seconds for x in found.traffic)
        # Where nothing is compiled, the traffic that was timed is that of blocks.
        share = scaled.eager_share if found.eager_blocks else 1.0
        return replace(scaled, memory_b_s=memory, kernel_s=1e-6, eager_share=share)


def _fit_constants(start: Profile, spread: Mapping[str, float], errors: Callable[[Profile], Floats]) -> Profile:
    """Return `start` with the constants in `spread` moved to where `errors`, in units of their noise, are least."""
    names, widths = tuple(spread), np.array(list(spread.values()))

    def at(shift: Floats) -> Profile:
        return start.scaled(dict(zip(names, np.exp(shift * widths).tolist(), strict=True)))

    return at(fit_near_priors(lambda shift: errors(at(shift)), np.zeros(len(names))))


# --- single operations -------------------------------------------------------------------------------------------------


def _operation_errors(profile: Profile, found: Measurements) -> Floats:
    """Return the logarithms of predicted over measured seconds: of operations, then of traffic."""
    rows = [_operation_row(x) for x in found.operations]
    start = (0, Direction.FORWARD, PartBreakdown.MEMORY, Form.TRAFFIC, False)
    rows += [(*start, 1, 1, 1, 1, 0.0, x.bytes, 1) for x in found.traffic]
    measured = [*(x.seconds for x in found.operations), *(x.seconds for x in found.traffic)]
    return np.log(compute_seconds(OperationTable.of(rows), profile)) - np.log(measured)


def _is_whole(x: TimedOperation) -> bool:
    return x.kind.startswith("whole")


def _operation_row(x: TimedOperation) -> tuple[float, ...]:
    start = (0, Direction.FORWARD, PartBreakdown.MATMUL)
    if (width := _WIDTHS.get(x.kind)) is not None:
        traffic = width * x.batch * (x.m * x.n + x.m * x.k + x.n * x.k)
        flops = 2 * x.batch * x.m * x.n * x.k
        return (*start, Form.PRODUCT, False, x.batch, x.m, x.n, x.k, flops, traffic, width)
    # As `operations.Attention` counts: two products forward, five backward; of causal ones the half.
    backward = x.kind.endswith("backward")
    flops = (5 if backward else 2) * (2 if _is_whole(x) else 1) * x.batch * x.m * x.n * x.k
    form = Form.ATTENTION_BACKWARD if backward else Form.ATTENTION
    return (*start, form, False, x.batch, x.m, x.n, x.k, flops, 0.0, 2)


# --- exchanges ---------------------------------------------------------------------------------------------------------


def _with_exchanges(
    profile: Profile, found: Measurements, machine: Machine
) -> tuple[Profile, Constants | None, Floats]:
    """Return (profile, constants of collectives, their errors). Nothing changes where nothing was measured."""
    collectives = [x for x in found.exchanged if x.collective != "copies"]
    if not collectives:
        return profile, None, np.zeros(0)
    fit = fit_constants(
        [Point(x.collective, x.size, place_groups(machine, x.members, 1), x.seconds) for x in collectives],
        default_constants(machine),
        _COLLECTIVE_SPREAD,
    )
    constants = fit.constants
    if max(x.members for x in collectives) <= machine.node.devices:
        constants = replace(constants, step_across_s=0.0, efficiency_across=1.0, tree=1.0)
    else:
        profile = replace(profile, network_share=1.0)
    # What computing beside them costs is in `slowdown`; exposed collectives run as they were timed.
    profile = replace(profile, link_share=1.0, slowdown=_slowdown_beside(found.collectives_beside, profile.slowdown))
    copies = [x for x in found.exchanged if x.collective == "copies"]
    if copies:
        largest = max(copies, key=lambda x: x.size)
        rate = largest.size * (largest.members - 1) / largest.members / largest.seconds
        share = rate / float(place_groups(machine, largest.members, 1).ring_b_s)
        slowdown = _slowdown_beside(found.copies_beside, profile.copy_slowdown)
        profile = replace(profile, copy_share=min(1.0, share), copy_slowdown=slowdown)
    return profile, constants, fit.errors


def _slowdown_beside(beside: Beside | None, known: float) -> float:
    """Return what computing loses beside an exchange, as a share of the time that the exchange takes alone."""
    if beside is None:
        return known
    hidden = min(beside.exchange, beside.products)
    return float(np.clip((beside.both - max(beside.products, beside.exchange)) / hidden, 0.0, 1.0))


# --- blocks ------------------------------------------------------------------------------------------------------------


def _with_blocks(
    profile: Profile, blocks: Sequence[TimedBlock], machine: Machine, spread: Mapping[str, float]
) -> Profile:
    """Return `profile` with the constants in `spread` moved to what `blocks` say."""
    if not blocks:
        return profile
    return _fit_constants(profile, spread, lambda one: _block_errors(one, blocks, machine) / _BLOCK_NOISE)


def _block_errors(profile: Profile, blocks: Sequence[TimedBlock], machine: Machine) -> Floats:
    """Return the logarithms of predicted over measured seconds, forward and then backward."""
    framework = EAGER if machine.node.device == "CPU" else COMPILED
    wanted = [
        ("block", replace(setting_of(x.width, x.length), compile=x.compiled, attention="flash"), x.samples)
        for x in blocks
    ]
    times = part_times(parts_of(wanted, framework), machine, _NO_COLLECTIVES, profile).seconds.sum(axis=2)  # type: ignore[arg-type]
    measured = np.array([[x.forward_s, x.backward_s] for x in blocks])
    return np.asarray((np.log(times) - np.log(measured)).T.ravel())


def _block_error(profile: Profile, block: TimedBlock, machine: Machine) -> float:
    measured = np.array([block.forward_s, block.backward_s])
    predicted = np.exp(_block_errors(profile, [block], machine)) * measured
    return float(predicted.sum() / measured.sum() - 1)


_NO_COLLECTIVES = Constants(launch_s=0.0, step_s=0.0, efficiency=1.0, pass_b_s=1e12, ramp=0.0)


def _judge_profile(found: Measurements, blocks: Floats) -> dict[str, object] | None:
    if not len(blocks):
        return None
    errors = np.abs(blocks)
    return {
        "rows": [block.name for block in found.blocks],
        "held_out": len(blocks),
        "held_out_by": "whole blocks, each by a fit without it",
        "held_out_median_error": round(float(np.median(errors)), 4),
        "held_out_p95_error": round(float(np.quantile(errors, 0.95)), 4),
    }


assert set(_CURVES) | set(_BLOCKS) | set(_EAGER) <= set(CONSTANTS)
