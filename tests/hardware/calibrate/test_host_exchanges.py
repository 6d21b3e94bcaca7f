"""What the host does for exchanges, timed on ranks of this CPU."""

import torch

from distributed_ranks import run_ranks
from phalanx.hardware.calibrate.clock import Clock
from phalanx.hardware.calibrate.host_exchanges import HostExchanges, time_host_exchanges


def _timed() -> HostExchanges:
    return time_host_exchanges(Clock(torch.device("cpu"), 0.001, samples=1))


def test_ranks_agree_on_what_exchanges_cost_them() -> None:
    first, second = run_ranks(_timed, 2)
    assert first == second
    # Ranks of a CPU wait for each other in both.
    assert first.exchange_s > 0 and first.shard_s > 0
