"""A small space with what a planner might expect of it, made without any model of costs."""

from __future__ import annotations

import numpy as np
import pytest

from layout_runs import run_with
from phalanx.config.search import Search
from phalanx.cost.enumerate import Limits, legal_candidates
from phalanx.search.prior import Prior
from phalanx.search.space import Space, build_space


@pytest.fixture(scope="session")
def space() -> Space:
    """The legal layouts of a small run on eight ranks."""
    run = run_with(global_batch=64)
    layouts = legal_candidates(run, 8, limits=Limits(microbatch=8, stages_per_rank=2, positions=1))
    return build_space(layouts, Search(layout={"schedule": ["1f1b"], "recompute": ["none", "full"]}))


@pytest.fixture(scope="session")
def prior(space: Space) -> Prior:
    """Larger micro-batches and fewer splits are fast and need much memory; constants scale each of the two."""
    tp, pp, micro, full = (_values(space, name) for name in ("tp", "pp", "microbatch", "recompute"))
    compute = 1.0 + 0.5 / micro + 0.3 * full
    exchange = 0.1 * np.log2(tp) + 0.15 * np.log2(pp) * (1 + 0.2 * micro)
    seconds = compute + exchange
    sensitivity = np.stack([0.1 * compute, 0.3 * exchange], axis=1) / seconds[:, None]
    peak = 20e9 / (tp * pp) + 8e9 * micro / (tp * (1 + 3 * full))
    return Prior(seconds, sensitivity, 0.1, np.log(40e9 / peak), peak)


def _values(space: Space, name: str) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    place = [one.name for one in space.parameters].index(name)
    one = space.parameters[place]
    values = np.arange(len(one.values)) if not one.ordered else np.asarray(one.values)
    return values[space.codes[:, place]].astype(np.float64)
