"""Connections between the supervisors of a run's nodes: lines of JSON, from peers that have shown that they know its secret.

Nothing is unpickled and no line is longer than a bound. What is said is signed in the greeting alone, and nothing is
encrypted: the network between nodes is trusted as far as the ranks' own store and collectives trust it.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import secrets
import select
import socket
import stat
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phalanx.errors import PhalanxError
from phalanx.hardware.host import listening_socket
from phalanx.printable import write_stderr

TOKEN = "PHALANX_TOKEN"
"""Environment variable with the secret that the supervisors of a run share; without it, it is in TOKEN_FILE."""
TOKEN_FILE = "supervisors.token"
"""File of the run directory with that secret, there while the run lasts and readable for its user alone."""

_GREETING_BYTES, _MESSAGE_BYTES = 2**11, 2**24
"""Longest lines before and after a peer has shown that it knows the secret."""
_GREETING_S = 5.0
_GREETINGS = 64
"""Connections that are greeted at once; further ones are closed, and come again."""
_CLOCK_ROUNDS = 8
"""Times that a host asks another for its clock; the quickest answer tells best how far it is ahead."""
_REFUSED_S = 10.0
"""Seconds for which a node that is refused comes again: the secret that it read may have been an earlier run's."""
_PAUSE_S = 0.2

Message = Mapping[str, Any]


class Link:
    """A connection to the supervisor of another node."""

    def __init__(self, connection: socket.socket, patience_s: float = _GREETING_S) -> None:
        """Take over `connection`. patience_s: seconds after which a peer that takes nothing counts as lost."""
        self._socket = connection
        self._sending = threading.Lock()
        self._buffer = bytearray()
        self._most = _GREETING_BYTES
        self.host = ""
        self.heard = time.monotonic()
        """When something came from there."""
        self.ahead_s = 0.0
        """Seconds by which the other host's time of day is ahead of this one's, where this side has asked."""
        self.lost = ""
        """Why nothing more can come; empty while it can."""
        connection.settimeout(patience_s)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def trust(self, host: str, patience_s: float) -> None:
        """Take long messages from now on: the peer, on `host`, knows the secret."""
        self.host, self._most = host, _MESSAGE_BYTES
        self._socket.settimeout(patience_s)

    def send(self, **message: Any) -> None:
        """Send a message, unless the peer is lost."""
        line = json.dumps(message).encode() + b"\n"
        try:
            with self._sending:
                self._socket.sendall(line)
        except OSError as error:
            self.lost = self.lost or f"it takes nothing more: {error}"

    def receive(self, wait_s: float = 0.0) -> list[Message]:
        """Return the messages that have come, after waiting up to `wait_s` for any; sets `lost` at the end of them all."""
        messages: list[Message] = []
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        while not self.lost and poll.poll(0 if messages else 1000 * wait_s):
            try:
                data = self._socket.recv(2**16)
            except OSError as error:
                self.lost = str(error)
                break
            if not data:
                self.lost = "it closed its connection"
            self.heard = time.monotonic()
            *lines, rest = (bytes(self._buffer) + data).split(b"\n")
            self._buffer = bytearray(rest)
            messages += self._parse_lines(lines)
            # Without end, a line of which little comes at a time would be waited for as long.
            wait_s = 0.0
        return messages

    def _parse_lines(self, lines: list[bytes]) -> list[Message]:
        found: list[Message] = []
        for line in [*lines, self._buffer]:
            if len(line) > self._most:
                self.lost = f"it sent a line of more than {self._most} bytes"
                return found
        for line in lines:
            try:
                message = json.loads(line)
                if not isinstance(message, dict):
                    raise ValueError
            except (ValueError, RecursionError):
                self.lost = "it sent what is no JSON object"
                return found
            found.append(message)
        return found

    def close(self) -> None:
        """Close the connection."""
        self.lost = self.lost or "closed here"
        self._socket.close()


@dataclass(frozen=True)
class Membership:
    """What a supervisor is in its run, and what all nodes must have alike."""

    node: int
    nodes: int
    ranks: int
    """Ranks of each node."""
    host: str


def listen_for_nodes(address: str, port: int) -> socket.socket:
    """Return a socket that other nodes reach at `address`, and at this node's other addresses only where that cannot be.

    port: 0 takes a free one. Raises OSError where nothing can listen.
    """
    descriptor = listening_socket(address, port, one_machine=False)
    return socket.create_server(("", port)) if descriptor is None else socket.socket(fileno=descriptor)


def make_token(run_dir: Path) -> bytes:
    """Return a new secret of a run, for its first node, written into the run directory for the other nodes.

    Raises PhalanxError where that is not possible.
    """
    token, file = secrets.token_hex(32), run_dir / TOKEN_FILE
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        file.unlink(missing_ok=True)
        with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as out:
            out.write(token)
    except OSError as error:
        raise PhalanxError(f"{file} cannot be written: {error.strerror}; set {TOKEN} on all nodes alike") from error
    return token.encode()


def read_token(run_dir: Path) -> bytes | None:
    """Return the secret of a run, for its other nodes; None while there is no file of it that only this user can read."""
    with suppress(OSError):
        descriptor = os.open(run_dir / TOKEN_FILE, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with os.fdopen(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            if stat.S_ISREG(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o077:
                return file.read(128) or None
    return None


def _sign(token: bytes, *said: object) -> str:
    return hmac.new(token, json.dumps(said).encode(), hashlib.sha256).hexdigest()


def _wait_for_one(link: Link) -> Message:
    """Return the next message of a greeting; empty where none comes in time."""
    deadline = time.monotonic() + _GREETING_S
    while not link.lost and (left := deadline - time.monotonic()) > 0:
        if messages := link.receive(left):
            return messages[0]
    return {}


class Reception:
    """The first node's end of all connections: listens, greets, and keeps those that know the secret."""

    def __init__(self, address: str, port: int, token: bytes, own: Membership, patience_s: float) -> None:
        """Listen at `address`. patience_s: see `Link`. Raises PhalanxError where that is not possible."""
        self._token, self._own, self._patience_s = token, own, patience_s
        self._greeting = threading.BoundedSemaphore(_GREETINGS)
        self.links: dict[int, Link] = {}
        """By node; lost ones too."""
        try:
            self._listener = listen_for_nodes(address, port)
        except OSError as error:
            raise PhalanxError(
                f"--rendezvous {address}:{port}: the first node cannot listen there ({error.strerror}); name an address "
                "of it and a free port"
            ) from error
        threading.Thread(target=self._accept, name="reception", daemon=True).start()

    def close(self) -> None:
        """Listen no more, and close all connections."""
        with suppress(OSError):
            # Ends the wait in accept, which closing alone does not.
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for link in list(self.links.values()):
            link.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, address = self._listener.accept()
            except OSError:
                return
            if not self._greeting.acquire(blocking=False):
                connection.close()
                continue
            # Each for itself: one that says nothing must not keep out the others.
            threading.Thread(target=self._greet, args=(connection, str(address[0])), daemon=True).start()

    def _greet(self, connection: socket.socket, address: str) -> None:
        link = Link(connection)
        try:
            challenge = secrets.token_hex(16)
            link.send(challenge=challenge)
            answer = _wait_for_one(link)
            if why := self._find_mistake(answer, challenge):
                write_stderr(f"refused a connection from {address}: {why}")
                link.send(refused=why)
                link.close()
                return
            link.send(welcome=_sign(self._token, "first", answer["nonce"], challenge), host=self._own.host)
            for _ in range(_CLOCK_ROUNDS):
                _wait_for_one(link)
                link.send(clock=time.time())
            link.trust(str(answer["host"]), self._patience_s)
            self.links[answer["node"]] = link
        finally:
            self._greeting.release()

    def _find_mistake(self, answer: Message, challenge: str) -> str:
        said = [answer.get(name) for name in ("nonce", "node", "nodes", "ranks", "host")]
        expected = _sign(self._token, "other", challenge, *said)
        if not hmac.compare_digest(expected.encode(), str(answer.get("mac", "")).encode()):
            return "it does not know the secret of this run"
        node, nodes, ranks = said[1:4]
        own = self._own
        if (nodes, ranks) != (own.nodes, own.ranks) or not isinstance(node, int) or not 0 < node < own.nodes:
            return (
                f"it says --nodes {nodes} --node-rank {node} --nproc {ranks}, "
                f"the first node --nodes {own.nodes} --nproc {own.ranks}"
            )
        known = self.links.get(node)
        return "" if known is None or known.lost else f"node {node} is there already, on {known.host}"


def join_first(
    address: str,
    port: int,
    read_secret: Callable[[], bytes | None],
    own: Membership,
    *,
    patience_s: float,
    wait_s: float,
    given_up: Callable[[], bool],
) -> Link | str:
    """Return the connection to the first node's supervisor, or why there is none after `wait_s` seconds.

    read_secret: asked again as long as it is not accepted. given_up: asked whether to wait no longer.
    """
    deadline, why = time.monotonic() + wait_s, "nobody listens there"
    refused_until = deadline
    while not given_up() and time.monotonic() < min(deadline, refused_until):
        token = read_secret()
        if token is None:
            why = f"neither {TOKEN} nor {TOKEN_FILE} in the run directory holds its secret"
        else:
            try:
                link = Link(socket.create_connection((address, port), timeout=_GREETING_S))
            except OSError as error:
                why = str(error)
            else:
                refusal = _introduce(link, token, own, patience_s)
                if refusal is None:
                    return link
                link.close()
                why, refused_until = refusal, min(refused_until, time.monotonic() + _REFUSED_S)
                time.sleep(10.0 * _PAUSE_S)
        time.sleep(_PAUSE_S)
    return why


def _introduce(link: Link, token: bytes, own: Membership, patience_s: float) -> str | None:
    """Show that this node knows the secret, and see that the first does; return why it does not work out, or None."""
    challenge, nonce = str(_wait_for_one(link).get("challenge", "")), secrets.token_hex(16)
    said = {"nonce": nonce, "node": own.node, "nodes": own.nodes, "ranks": own.ranks, "host": own.host}
    link.send(**said, mac=_sign(token, "other", challenge, *said.values()))
    answer = _wait_for_one(link)
    if "refused" in answer:
        return f"the first node refuses this one: {answer['refused']}"
    if not hmac.compare_digest(_sign(token, "first", nonce, challenge), str(answer.get("welcome", ""))):
        # It would say what ranks of this node run.
        return "what listens there does not know the secret of this run"
    link.ahead_s = _compare_clocks(link)
    link.trust(str(answer.get("host", "")), patience_s)
    return None


def _compare_clocks(link: Link) -> float:
    """Return by how many seconds the time of day of the peer, which answers with it, is ahead."""
    rounds = []
    for _ in range(_CLOCK_ROUNDS):
        asked = time.time()
        link.send(kind="clock")
        said = float(_wait_for_one(link).get("clock", asked))
        answered = time.time()
        rounds.append((answered - asked, said - 0.5 * (asked + answered)))
    return min(rounds)[1]
