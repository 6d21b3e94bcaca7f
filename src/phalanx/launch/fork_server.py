"""Runs a function on ranks of this machine; processes start quickly from a fork server that has torch loaded.

    losses = run_ranks(train_a_little, 4, path)      # train_a_little(path) on ranks 0 to 3

The function must be importable (defined at the top of a module). Its results come back, one entry per rank.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import pickle
import socket
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext, ForkServerProcess
from typing import Any

import torch
import torch.distributed as dist

from phalanx.launch.parent import interrupts_deferred, interrupts_ignored
from phalanx.torch_compat.process_groups import run_gloo_in_order

PRELOADED = (
    "torch",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.tensor.parallel",
    "torch.distributed.checkpoint.default_planner",
    "phalanx.checkpoint",
    "phalanx.layout.apply",
)


class RanksFailed(Exception):
    """Raised where a rank does not return; the text holds the traceback of each rank that failed, the first to fail last."""


def fork_server(preload: Sequence[str] = PRELOADED) -> ForkServerContext:
    """Return a context whose processes start with the modules `preload` loaded."""
    # Fork of this process would copy its threads' locks; spawn would import torch, for seconds, in every rank.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(preload))
    return context


def run_ranks(
    work: Callable[..., Any],
    world_size: int,
    *arguments: Any,
    timeout_s: float | None = 60.0,
    threads: int = 1,
    preload: Sequence[str] = PRELOADED,
) -> list[Any]:
    """Call `work(*arguments)` on every rank of a fresh gloo process group and return the results in rank order.

    timeout_s: limit for each rank, and for each collective, in seconds; None waits for ever. threads: CPU threads per rank.
    preload: modules that all ranks find loaded. Raises RanksFailed with the traceback of each rank that failed or took too
    long. No rank outlives the call.
    """
    context = fork_server(preload)
    # Ctrl-C reaches the whole foreground group; while the server loads torch it would answer with a traceback.
    with interrupts_ignored():
        forkserver.ensure_running()
    ranks: list[tuple[ForkServerProcess, Connection]] = []
    with tempfile.TemporaryDirectory() as folder:
        try:
            # A rank whose start was interrupted would be in no list of those to end.
            with interrupts_deferred():
                for rank in range(world_size):
                    here, there = context.Pipe()
                    store = os.path.join(folder, "store")
                    call = (there, work, rank, world_size, store, timeout_s, threads, arguments)
                    process = context.Process(target=_run_rank, args=call, name=f"rank {rank}")
                    process.start()
                    there.close()
                    ranks.append((process, here))
            return _collect_results(ranks, None if timeout_s is None else time.monotonic() + timeout_s)
        finally:
            for process, connection in ranks:
                # Whatever happened: a rank that waits for one that failed never ends by itself.
                process.kill()
                process.join()
                connection.close()


def _run_rank(
    connection: Connection,
    work: Callable[..., Any],
    rank: int,
    world_size: int,
    store: str,
    timeout_s: float | None,
    threads: int,
    arguments: tuple[Any, ...],
) -> None:
    if "lo" in (name for _, name in socket.if_nameindex()):
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(threads)
    # A rank that a signal ends prints its stack on standard error.
    faulthandler.enable()
    run_gloo_in_order()
    try:
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(store, world_size),
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=timeout_s or 1800.0),
        )
        _send_result(connection, True, work(*arguments))
    except BaseException:
        _send_result(connection, False, traceback.format_exc())
    else:
        # Other ranks may still be connecting to this one, so it stays until the caller ends it.
        connection.poll(None)


def _send_result(connection: Connection, succeeded: bool, value: Any) -> None:
    # Plain pickle carries tensors by value; Connection.send would leave them in memory of a process about to end.
    connection.send_bytes(pickle.dumps((succeeded, value)))


def _collect_results(ranks: list[tuple[ForkServerProcess, Connection]], deadline: float | None) -> list[Any]:
    # From whichever rank is ready: a failed one must be heard while others still wait for it.
    results: dict[int, Any] = {}
    failures: dict[int, str] = {}
    waiting = {connection: rank for rank, (_, connection) in enumerate(ranks)}
    while waiting:
        ready = wait(list(waiting), timeout=None if deadline is None else max(0.0, deadline - time.monotonic()))
        for connection in ready:
            assert isinstance(connection, Connection)
            rank = waiting.pop(connection)
            try:
                succeeded, value = pickle.loads(connection.recv_bytes())
            except EOFError:
                # It has closed the pipe, but its exit code is known only once it is gone.
                ranks[rank][0].join()
                succeeded, value = False, f"ended without a word, exit code {ranks[rank][0].exitcode}"
            (results if succeeded else failures)[rank] = value
            if not succeeded:
                # The other ranks now fail of the lost connection, or hang: two seconds are enough to collect their reports.
                soon = time.monotonic() + 2.0
                deadline = soon if deadline is None else min(deadline, soon)
        if not ready:
            failures |= dict.fromkeys(waiting.values(), "still running")
            break
    if failures:
        # The first to fail is the cause of the others, and comes last: the end of a log is what is read and kept.
        raise RanksFailed("\n".join(f"rank {rank} failed: {text}" for rank, text in reversed(failures.items())))
    return [results[rank] for rank in range(len(ranks))]
