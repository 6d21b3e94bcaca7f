"""The wish to stop: once in good order, a second time at once."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator

import pytest

from phalanx.errors import Interrupted
from phalanx.launch.parent import ONE_WISH_S, STOP_SIGNALS
from phalanx.training.stopping import StopRequest


@pytest.fixture
def ended() -> Iterator[list[int]]:
    """Signals that reached whoever listened before."""
    heard: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: heard.append(number))
    yield heard
    signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_each_of_these_signals_asks(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with StopRequest() as request:
        signal.raise_signal(number)
        assert request.signal_number == number
    assert signal.getsignal(number) == before
    assert Interrupted("", number).exit_code == 128 + number


def test_what_nohup_ignores_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopRequest() as request:
            signal.raise_signal(signal.SIGHUP)
            assert request.signal_number == 0
    finally:
        signal.signal(signal.SIGHUP, before)


def test_what_comes_again_within_a_second_is_the_same_wish(ended: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    with StopRequest() as request:
        assert request.signal_number == 0
        signal.raise_signal(signal.SIGTERM)
        now += 0.9 * ONE_WISH_S
        signal.raise_signal(signal.SIGTERM)
        assert (request.signal_number, ended) == (signal.SIGTERM, [])
        now += 0.2 * ONE_WISH_S
        signal.raise_signal(signal.SIGTERM)
        assert ended == [signal.SIGTERM]
