"""Every legal layout of a run on a number of ranks, as arrays.

The rules of `layout.legality`, written for many layouts at a time; a test holds the two against each other in both
directions. Of layouts that mean the same only one is listed: a run without pipeline stages has the schedule 1f1b, one whose
ranks share nothing out the ZeRO level 3.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

import numpy as np
import numpy.typing as npt

from phalanx.config.check import global_batch_samples
from phalanx.config.schema import Run
from phalanx.families.registry import bind
from phalanx.layout.resolve import MOST_SAMPLES, divisors
from phalanx.layout.spec import DEGREES, ZERO_BUBBLE
from phalanx.planner.layouts.candidates import (
    CONTEXTS,
    GATHERS,
    RECOMPUTES,
    SCHEDULES,
    ZERO_BUBBLE_SCHEDULES,
    Candidates,
    Ints,
)
from phalanx.precision import PRECISIONS

Fixed = Mapping[str, Any]
"""Fields of the run file's `layout` with the only value they may have."""
Mask = npt.NDArray[np.bool_]
Columns = dict[str, npt.NDArray[Any]]

CHOSEN = (
    *("dp_replicate", "dp_shard", "cp", "tp", "pp", "zero", "schedule", "stages_per_rank", "context"),
    *("microbatch", "recompute", "gather", "reshard_after_forward"),
)
"""Fields of `layout` that enumeration chooses, unless they are fixed; all else stays as the run file has it."""

_SCHEDULE = {name: position for position, name in enumerate(SCHEDULES)}
_RING, _EXCHANGE = CONTEXTS.index("ring"), CONTEXTS.index("all_to_all")
_KEEP_ALL = RECOMPUTES.index("none")
_INTERLEAVED = [_SCHEDULE[name] for name in SCHEDULES if name.startswith("interleaved")]


@dataclass(frozen=True)
class Limits:
    """How far free choices go. Fixed fields know no limits."""

    microbatch: float = MOST_SAMPLES
    """Most samples a rank computes at a time."""
    stages_per_rank: float = 8
    """Most pipeline stages of a rank."""
    positions: int = 2048
    """Fewest positions of a sample that a context-parallel rank keeps."""
    streamed: float = 64
    """Most ranks around which the chunks of a block go."""

    @classmethod
    def none(cls) -> Limits:
        """Everything that is legal."""
        return cls(inf, inf, 1, inf)


def legal_candidates(
    run: Run,
    world_size: int,
    devices_per_node: int | None = None,
    fixed: Fixed | None = None,
    limits: Limits | None = None,
) -> Candidates:
    """All legal layouts of `run` on `world_size` ranks.

    fixed: fields of `layout` that keep these values, each one of CHOSEN and as in the run file, without `auto`. As in a run
    file, `stages_per_rank` has no effect where `pp` is 1, and `context` none where `cp` is. What `run` itself says of the
    fields in CHOSEN is not looked at. devices_per_node: as for `layout.resolve.resolve_layout`.
    """
    fixed, limits = fixed or {}, limits or Limits()
    rows = _degrees(run, world_size, run.cluster.devices_per_node or devices_per_node, fixed, limits)
    rows = _batches(run, rows, fixed, limits)
    rows = _schedules(run, rows, fixed, limits)
    rows = _shards(rows, fixed)
    rows = _contexts(run, rows, fixed)
    rows = _recomputes(rows, fixed)
    rows = _gathers(run, rows, fixed, limits)
    rows["global_batch"] = np.full(len(rows["tp"]), global_batch_samples(run), np.int64)
    return Candidates(**rows)


def without_twins(candidates: Candidates) -> Candidates:
    """One of those that run the same way.

    A pipeline adds gradients up whole and keeps what it gathers: the lowest ZeRO level there is stands for the others, but
    for 0, and for 3 where parameters are freed or streamed.
    """
    c = candidates
    alike = (c.pp > 1) & (c.zero > 0) & ~c.reshard_after_forward & (c.streamed == 1) & (c.dp_shard * c.cp > 1)
    return c.take(~alike | (c.zero == c.zero[alike].min(initial=3)))


def _degrees(run: Run, world: int, devices_per_node: int | None, fixed: Fixed, limits: Limits) -> Columns:
    """The degrees: what divides the world, heads, layers and positions."""
    every = divisors(world)
    rows = _take({"tp": np.asarray(every)}, _tensor_fits(run, np.asarray(every), devices_per_node))
    rows = _take(rows, _is(rows["tp"], fixed.get("tp")))

    rows = _cross(rows, {"pp": every})
    rows = _take(rows, (world % (rows["tp"] * rows["pp"]) == 0) & (rows["pp"] <= run.model.n_layers))
    rows = _take(rows, _is(rows["pp"], fixed.get("pp")))

    length = bind(run).positions().count
    cps = [fixed["cp"]] if "cp" in fixed else [cp for cp in every if cp == 1 or length // cp >= limits.positions]
    rows = _cross(rows, {"cp": cps})
    inside = rows["tp"] * rows["pp"] * rows["cp"]
    rows = _take(rows, (world % inside == 0) & (length % rows["cp"] == 0) & (length // rows["cp"] % rows["tp"] == 0))

    rows = _cross(rows, {"dp_replicate": every})
    data_ranks = world // (rows["tp"] * rows["pp"] * rows["cp"])
    rows["dp_shard"] = data_ranks // rows["dp_replicate"]
    rows = _take(rows, data_ranks % rows["dp_replicate"] == 0)
    rows = _take(rows, _is(rows["dp_replicate"], fixed.get("dp_replicate")))
    rows = _take(rows, _is(rows["dp_shard"], fixed.get("dp_shard")))
    for name in set(DEGREES) - bind(run).axes:
        rows = _take(rows, rows[name] == 1)
    return rows


def _tensor_fits(run: Run, tp: Ints, devices_per_node: int | None) -> Mask:
    fits = np.ones(len(tp), bool)
    model = bind(run)
    for split in model.split_counts():
        fits &= split.count % tp == 0
    table = model.split_rows()
    if table is not None:
        fits &= -(-table.count // tp) * (tp - 1) < table.count
    if devices_per_node is not None and not run.layout.tp_across_nodes:
        fits &= (tp == 1) | ((tp <= devices_per_node) & (devices_per_node % tp == 0))
    return fits


def _batches(run: Run, rows: Columns, fixed: Fixed, limits: Limits) -> Columns:
    """Micro-batches that divide what a data-parallel rank computes."""
    batch = global_batch_samples(run)
    choices = [size for size in divisors(batch) if size <= limits.microbatch]
    rows = _cross(rows, {"microbatch": [fixed["microbatch"]] if "microbatch" in fixed else choices})
    return _take(rows, batch % (rows["dp_replicate"] * rows["dp_shard"] * rows["microbatch"]) == 0)


def _schedules(run: Run, rows: Columns, fixed: Fixed, limits: Limits) -> Columns:
    """Pipeline schedules and stages a rank; one stage without a schedule where `pp` is 1."""
    schedule = _SCHEDULE[fixed.get("schedule", "1f1b")]
    alone = _cross(_take(rows, rows["pp"] == 1), {"schedule": [schedule], "stages_per_rank": [1]})
    most = int(min(limits.stages_per_rank, run.model.n_layers))
    per_rank = [fixed["stages_per_rank"]] if "stages_per_rank" in fixed else range(1, most + 1)
    pairs = [(name, count) for name in _among(SCHEDULES, fixed, "schedule") for count in per_rank]
    pairs = [(name, count) for name, count in pairs if _stages_fit(run, name, count)]
    piped = _cross(
        _take(rows, rows["pp"] > 1),
        {"schedule": [_SCHEDULE[name] for name, _ in pairs], "stages_per_rank": [count for _, count in pairs]},
    )
    stages = piped["pp"] * piped["stages_per_rank"]
    count = global_batch_samples(run) // (piped["dp_replicate"] * piped["dp_shard"] * piped["microbatch"])
    short = (piped["schedule"] == _SCHEDULE["1f1b"]) & (count < stages)
    uneven = np.isin(piped["schedule"], _INTERLEAVED) & (count % np.maximum(1, count // piped["pp"]) != 0)
    piped = _take(piped, (stages <= run.model.n_layers) & ~short & ~uneven)
    return {name: np.concatenate([alone[name], piped[name]]) for name in alone}


def _stages_fit(run: Run, schedule: str, per_rank: int) -> bool:
    """Whether a schedule can have so many stages a rank, and run this model at all."""
    if schedule in ZERO_BUBBLE and run.training.compile is True:
        return False
    if schedule == "zbv":
        return per_rank == 2 and not bind(run).tied()
    return per_rank >= 2 if schedule.startswith("interleaved") else per_rank == 1


def _shards(rows: Columns, fixed: Fixed) -> Columns:
    """ZeRO levels and resharding, as far as there is something to share out."""
    levels = [(0, False), (1, False), (2, False), (3, False), (3, True)]
    levels = [x for x in levels if fixed.get("zero", x[0]) == x[0] and fixed.get("reshard_after_forward", x[1]) is x[1]]
    rows = _cross(rows, {"zero": [zero for zero, _ in levels], "reshard_after_forward": [word for _, word in levels]})
    zero, reshard = rows["zero"], rows["reshard_after_forward"] == 1
    rows["reshard_after_forward"] = reshard
    sharded = rows["dp_shard"] * rows["cp"] > 1
    several = sharded | (rows["dp_replicate"] > 1)
    level = np.where(sharded, (zero > 0) | (rows["dp_shard"] == 1), (zero == 3) | (several & (zero == 0)))
    # Where nothing is shared out, what a field is fixed to stands for all it could be.
    level |= ~sharded & ("zero" in fixed)
    freed = sharded | ~reshard | ("reshard_after_forward" in fixed)
    twice = np.isin(rows["schedule"], ZERO_BUBBLE_SCHEDULES) & (rows["pp"] > 1) & reshard & several
    return _take(rows, level & freed & ~twice)


def _contexts(run: Run, rows: Columns, fixed: Fixed) -> Columns:
    """Kinds of context parallelism; the ring stands where `cp` is 1."""
    alone = _cross(_take(rows, rows["cp"] == 1), {"context": [_RING]})
    kinds = [CONTEXTS.index(name) for name in _among(CONTEXTS, fixed, "context")]
    spread = _cross(_take(rows, rows["cp"] > 1), {"context": kinds})
    ring = spread["context"] == _RING
    model = bind(run)
    early_and_late = model.positions().count % (2 * spread["cp"]) == 0
    whole_heads = model.context_heads().count // spread["tp"] % spread["cp"] == 0
    spread = _take(spread, np.where(ring, early_and_late, whole_heads))
    return {name: np.concatenate([alone[name], spread[name]]) for name in alone}


def _recomputes(rows: Columns, fixed: Fixed) -> Columns:
    rows = _cross(rows, {"recompute": [RECOMPUTES.index(name) for name in _among(RECOMPUTES, fixed, "recompute")]})
    twice = np.isin(rows["schedule"], ZERO_BUBBLE_SCHEDULES) & (rows["pp"] > 1)
    return _take(rows, ~twice | (rows["recompute"] == _KEEP_ALL))


def _gathers(run: Run, rows: Columns, fixed: Fixed, limits: Limits) -> Columns:
    """Blocks gathered whole, or streamed wherever shards of ZeRO-3 share them."""
    rows = _cross(rows, {"gather": [GATHERS.index(name) for name in _among(GATHERS, fixed, "gather")]})
    ranks, piped = rows["dp_shard"] * rows["cp"], rows["pp"] > 1
    able = (rows["zero"] == 3) & (rows["recompute"] != RECOMPUTES.index("selective"))
    able &= ~((rows["cp"] > 1) & (rows["context"] == _EXCHANGE))
    able &= ~(piped & np.isin(rows["schedule"], ZERO_BUBBLE_SCHEDULES))
    able &= (
        (not PRECISIONS[run.layout.precision].scales_loss)
        & (run.training.compile is not True)
        & bind(run).streams_weights
    )
    # Of one rank, the one kind stands for both, as with other fields that have no effect.
    able = np.where(ranks > 1, able, "gather" in fixed)
    if "gather" not in fixed:
        able &= ranks <= limits.streamed
    rows = _take(rows, (rows["gather"] == 0) | able)
    rows["gather"] = np.where(rows["dp_shard"] * rows["cp"] > 1, rows["gather"], 0)
    return rows


def _among(names: Sequence[str], fixed: Fixed, field: str) -> list[str]:
    return [name for name in names if fixed.get(field, name) == name]


def _is(column: npt.NDArray[Any], value: Any) -> Mask:
    return np.ones(len(column), bool) if value is None else np.asarray(column == value)


def _take(rows: Columns, which: Mask) -> Columns:
    return {name: column[which] for name, column in rows.items()}


def _cross(rows: Columns, options: Mapping[str, Iterable[Any]]) -> Columns:
    """Each row with each option; `options` are columns of equal length."""
    count = len(next(iter(rows.values())))
    added = {name: np.asarray(list(values), np.int64) for name, values in options.items()}
    each = len(next(iter(added.values())))
    crossed = {name: np.repeat(column, each) for name, column in rows.items()}
    for name, values in added.items():
        crossed[name] = np.tile(values, count)
    return crossed
