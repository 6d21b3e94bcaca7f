"""Where the first rank listens for the others."""

from __future__ import annotations

import socket

import pytest

from phalanx.hardware.host import listening_socket


def listens_at(address: str, *, one_machine: bool) -> str | None:
    """The address that is listened at; None where the store would choose."""
    descriptor = listening_socket(address, 0, one_machine=one_machine)
    if descriptor is None:
        return None
    with socket.socket(fileno=descriptor) as listener:
        found: str = listener.getsockname()[0]
        return found


@pytest.mark.parametrize("one_machine", [True, False])
def test_the_store_listens_at_the_meeting_point_alone(one_machine: bool) -> None:
    assert listens_at("127.0.0.1", one_machine=one_machine) == "127.0.0.1"


def test_a_name_that_means_loopback_here_alone_is_not_listened_at(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.1.1", 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    assert listens_at("node-7", one_machine=False) is None
    assert listens_at("node-7", one_machine=True) == "127.0.1.1"


def test_an_address_that_is_not_this_machines_is_left_to_the_store() -> None:
    # Of the block that is kept for documents.
    assert listens_at("192.0.2.7", one_machine=False) is None
