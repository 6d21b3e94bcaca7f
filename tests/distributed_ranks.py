"""Run a function on several gloo ranks of this machine, quickly: processes come from a fork server that has torch loaded.

    losses = run_ranks(train_a_little, 4, tmp_path)      # train_a_little(tmp_path) on ranks 0 to 3

The function must be importable (defined at the top of a module); what it returns, one entry a rank, comes back.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import socket
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext, ForkServerProcess
from typing import Any

import torch
import torch.distributed as dist

PRELOADED = [
    "pytest",
    "torch",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "torch.distributed.checkpoint.default_planner",
    "phalanx.train.checkpoint",
]


def fork_server() -> ForkServerContext:
    """The context to start processes from that have torch loaded already."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


def run_ranks(work: Callable[..., Any], world_size: int, *arguments: Any, timeout_s: float = 60.0) -> list[Any]:
    """Call `work(*arguments)` on every rank of a fresh default process group; returns the results in rank order.

    Raises AssertionError with the traceback of each rank that failed, and when a rank takes longer than `timeout_s`.
    No rank outlives the call.
    """
    context = fork_server()
    ranks: list[tuple[ForkServerProcess, Connection]] = []
    with tempfile.TemporaryDirectory() as folder:
        try:
            for rank in range(world_size):
                here, there = context.Pipe()
                call = (there, work, rank, world_size, os.path.join(folder, "store"), timeout_s, arguments)
                process = context.Process(target=_run_rank, args=call, name=f"rank {rank}")
                process.start()
                there.close()
                ranks.append((process, here))
            return _collect(ranks, time.monotonic() + timeout_s)
        finally:
            for process, connection in ranks:
                process.kill()
                process.join()
                connection.close()


def _run_rank(
    connection: Connection,
    work: Callable[..., Any],
    rank: int,
    world_size: int,
    store: str,
    timeout_s: float,
    arguments: tuple[Any, ...],
) -> None:
    if "lo" in (name for _, name in socket.if_nameindex()):
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(store, world_size),
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=timeout_s),
        )
        result = work(*arguments)
        dist.destroy_process_group()
        _send(connection, True, result)
    except BaseException:
        _send(connection, False, traceback.format_exc())


def _send(connection: Connection, succeeded: bool, value: Any) -> None:
    # Plain pickle carries tensors by value; Connection.send would leave them in memory of a process about to end.
    connection.send_bytes(pickle.dumps((succeeded, value)))


def _collect(ranks: list[tuple[ForkServerProcess, Connection]], deadline: float) -> list[Any]:
    results: dict[int, Any] = {}
    failures: dict[int, str] = {}
    waiting = {connection: rank for rank, (_, connection) in enumerate(ranks)}
    while waiting:
        ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
        for connection in ready:
            assert isinstance(connection, Connection)
            rank = waiting.pop(connection)
            try:
                succeeded, value = pickle.loads(connection.recv_bytes())
            except EOFError:
                ranks[rank][0].join()
                succeeded, value = False, f"ended without a word, exit code {ranks[rank][0].exitcode}"
            (results if succeeded else failures)[rank] = value
            if not succeeded:
                # The others now fail of the lost connection, or hang: a moment is enough to hear from them.
                deadline = min(deadline, time.monotonic() + 2.0)
        if not ready:
            failures |= dict.fromkeys(waiting.values(), "still running")
            break
    if failures:
        raise AssertionError("\n".join(f"rank {rank} failed: {text}" for rank, text in failures.items()))
    return [results[rank] for rank in range(len(ranks))]
