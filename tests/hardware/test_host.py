"""How idle threads wait."""

from __future__ import annotations

import pytest

from phalanx.hardware.host import passive_waits


def test_idle_threads_sleep_unless_the_user_says_otherwise() -> None:
    assert passive_waits({"OMP_NUM_THREADS": "2"}) == {"OMP_WAIT_POLICY": "PASSIVE"}


@pytest.mark.parametrize("name", ["OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"])
def test_what_the_user_says_stays(name: str) -> None:
    assert passive_waits({name: "1"}) == {}
