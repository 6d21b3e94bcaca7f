"""Initial values that are the same in every layout: element i of a parameter is a function of (seed, name, i) alone.

i is the row-major index in the whole parameter, so a rank fills its own shard and reads nobody else's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatchcase

import torch
from torch import Tensor

from phalanx.counter_random import normal_values, stream_key
from phalanx.errors import PhalanxError
from phalanx.layout.place import Place, TensorSplit, TensorSplits, place_of
from phalanx.nn.adapters import ADAPTER_RULES
from phalanx.nn.parameters import InitRule, InitRules

_CHUNK_CPU = 32_000
"""Elements a thread fills at a time: its temporaries stay in the cache of its core, and PyTorch spreads no operation on
fewer than 2^15 elements over threads. A hundred operations a chunk that each wait for the slowest thread would be ten times
slower on cores that are shared with other processes."""
_CHUNK_ELSEWHERE = 2**22
"""Elements filled at a time on other devices: enough to hide the cost of a call."""


@torch.no_grad()
def initialise_parameters(
    parameters: Mapping[str, Tensor], rules: InitRules, seed: int, splits: TensorSplits | None = None
) -> None:
    """Fill every parameter, by its name in the whole model, as the first matching rule says.

    splits: which parts of them are held here. Raises PhalanxError for a parameter that no rule covers.
    """
    for name, parameter in parameters.items():
        fill_initial(parameter, name, find_rule(name, rules), seed, (splits or {}).get(name))


def find_rule(name: str, rules: InitRules) -> InitRule:
    """Return the rule of the parameter `name`; those of adapters are alike in all families. Raises PhalanxError for none."""
    for pattern, rule in (*ADAPTER_RULES, *rules):
        if fnmatchcase(name, pattern):
            return rule
    raise PhalanxError(f"no initial value is declared for parameter {name}; add a rule to its model family")


@torch.no_grad()
def fill_initial(tensor: Tensor, name: str, rule: InitRule, seed: int, split: TensorSplit | None = None) -> None:
    """Fill a tensor, or this rank's part of one (see `layout.place`), with the initial values of parameter `name`.

    Values are rounded to float32 first, whatever the format of `tensor`: all precisions start from the same weights.
    """
    fill_part(place_of(tensor, split), name, rule, seed)


@torch.no_grad()
def fill_part(part: Place, name: str, rule: InitRule, seed: int) -> None:
    """Fill a part of a tensor: see `fill_initial`."""
    local, offsets, shape = part
    if rule.kind == "constant":
        local.fill_(rule.value)
        return
    assert local.is_contiguous(), name
    draw = _draw_values(rule, stream_key("initial values", seed, name), shape)
    # Detached, since the worker threads below have gradients on: the mode belongs to a thread.
    flat = local.detach().view(-1)

    def fill_chunk(chunk: range) -> None:
        place = torch.arange(chunk.start, chunk.stop, device=flat.device)
        local_shape = tuple(local.shape)
        index = place + sum(offset * math.prod(shape[dim + 1 :]) for dim, offset in enumerate(offsets))
        # Each wrap around a split dim skips what other shards hold of it; a shard of whole rows skips nothing.
        for dim in range(1, len(shape)):
            missing = shape[dim] - local_shape[dim]
            if missing:
                index += (place // math.prod(local_shape[dim:])) * (missing * math.prod(shape[dim + 1 :]))
        values = draw(index)
        # Rounded to float32 in every precision: all start from the same weights.
        flat[chunk.start : chunk.stop] = values.to(torch.float32)

    if flat.device.type == "cpu":
        with ThreadPoolExecutor(torch.get_num_threads()) as pool:
            list(pool.map(fill_chunk, _split_chunks(flat.numel(), _CHUNK_CPU)))
    else:
        for chunk in _split_chunks(flat.numel(), _CHUNK_ELSEWHERE):
            fill_chunk(chunk)


def _draw_values(rule: InitRule, key: int, shape: tuple[int, ...]) -> Callable[[Tensor], Tensor]:
    """Return what gives values of elements, by their row-major indices in the whole parameter."""
    if rule.kind in ("normal", "fan_in"):
        std = rule.value if rule.kind == "normal" else rule.value / math.sqrt(shape[-1])
        return lambda index: normal_values(key, index).mul_(std)
    table = rule.table
    assert table is not None
    return lambda index: table(index, shape)


def _split_chunks(count: int, size: int) -> list[range]:
    return [range(start, min(start + size, count)) for start in range(0, count, size)]
