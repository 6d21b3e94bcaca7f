"""A second process beside this one: what it computes, and what happens when it cannot."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from phalanx.cost import second_process as module
from phalanx.cost.second_process import SharedMemo, compute, deal, second_process

TASKS = list(range(20))


@pytest.fixture
def second(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """There is one, however many cores there are."""
    monkeypatch.setattr(module, "_can_copy", lambda: True)
    with second_process():
        yield
    assert not multiprocessing.active_children()


def square(task: int) -> tuple[int, int]:
    return task * task, os.getpid()


def square_here(task: int) -> int:
    """Ends the second process."""
    if multiprocessing.parent_process() is not None:
        os._exit(1)
    return task * task


def fail(task: int) -> int:
    raise ValueError(f"task {task}")


def by_tens(task: int) -> int | None:
    """The first ten tasks have nothing in common."""
    return task // 10 or None


def effort(task: int, first: bool) -> int:
    return 5 if first else 1


@pytest.mark.usefixtures("second")
def test_both_compute_and_results_keep_their_order() -> None:
    results = compute(square, TASKS[:12], TASKS[12:])
    assert [result for result, _ in results] == [task * task for task in TASKS]
    here, there = ({process for _, process in some} for some in (results[:12], results[12:]))
    assert here == {os.getpid()} and len(there) == 1 and not here & there


def test_alone_it_computes_everything_itself() -> None:
    assert compute(square, TASKS[:12], TASKS[12:]) == [(task * task, os.getpid()) for task in TASKS]


@pytest.mark.usefixtures("second")
def test_groups_stay_where_their_common_work_was_done() -> None:
    memo = SharedMemo(square, by_tens, effort)
    memo.compute([10, 20, 30, 40, 1, 2, 3])
    memo.compute([41, 31, 21, 11, 4, 5])
    memo.compute([12])
    assert {task: result for task, (result, _) in memo.known.items()} == {task: task * task for task in memo.known}
    processes = {task: process for task, (_, process) in memo.known.items()}
    assert all(processes[10 * group] == processes[10 * group + 1] for group in (1, 2, 3, 4))
    assert processes[10] == processes[12]
    assert len(set(processes.values())) == 2


@pytest.mark.usefixtures("second")
def test_what_is_known_is_not_computed_again() -> None:
    memo = SharedMemo(square, by_tens, effort)
    memo.compute(TASKS)
    before = dict(memo.known)
    memo.compute(reversed(TASKS))
    assert memo.known == before and memo(7) == before[7]


@pytest.mark.usefixtures("second")
def test_a_second_process_that_dies_is_done_without() -> None:
    for _ in range(2):
        assert compute(square_here, TASKS[:5], TASKS[5:]) == [task * task for task in TASKS]


@pytest.mark.usefixtures("second")
@pytest.mark.parametrize("here", [0, 1])
def test_failures_are_raised_wherever_they_happen(here: int) -> None:
    with pytest.raises(ValueError, match="task 0"):
        compute(fail, TASKS[:here], TASKS[here:])
    assert [result for result, _ in compute(square, [1], [2])] == [1, 4]


def test_efforts_are_dealt_evenly() -> None:
    efforts = dict(enumerate([50, 50, 50, 8, 8, 8, 8, 2]))
    dealt = deal(efforts, {2: 1})
    sums = [sum(efforts[name] for name, place in dealt.items() if place == each) for each in (0, 1)]
    assert dealt.keys() == efforts.keys() and dealt[2] == 1
    assert abs(sums[0] - sums[1]) <= 50


TRACED_TWICE = """
import gc
from dataclasses import replace
from phalanx.cost import parts, second_process
from phalanx.cost.family import Setting
from small_models import GPT

gc.freeze()
second_process._can_copy = lambda: True
plain = Setting(GPT, 32, tp=2, chunk_tokens=24)
settings = [replace(plain, recompute="full"), plain, replace(plain, streamed=2, compile=False)]
wanted = [(name, setting, 3) for setting in settings for name in ("embedding", "block", "head")]
with second_process.second_process():
    parts.trace_ahead(wanted)
    assert second_process._second is not None, "it did not answer"
both = dict(parts._trace.known)
parts._trace.known.clear()
parts.trace_ahead(wanted)
assert parts._trace.known == both and len(both) > 5, both.keys()
"""


def test_traces_of_the_second_process_are_those_of_the_first() -> None:
    path = os.pathsep.join(sys.path)
    found = subprocess.run(
        [sys.executable, "-c", TRACED_TWICE],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (found.returncode, found.stderr) == (0, "")
