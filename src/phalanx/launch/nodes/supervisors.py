"""One supervisor on each node of a run: what one finds all learn, and all ranks begin again together.

The first node's supervisor decides, as the only one of a machine does (`local_launch`, `restart`); the others start and end
their ranks as it says. What they say to each other, as lines of JSON (`links`):

    to the first    ready (with how the last attempt ended there), fault (a rank has failed here), traces (the answer)
    to the others   start (an attempt: ranks, meeting point, command), end (another node has a fault), explain, quit,
                    trace (what did your ranks do last?)
    both ways       stop (somebody asked the run to stop), beat (this supervisor is alive)
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, replace
from typing import Any

from phalanx.errors import ConfigError
from phalanx.files import write_atomically
from phalanx.launch.collectives import Collective
from phalanx.launch.faults import Fault, Limits, NodeEnd, RankView, host_name
from phalanx.launch.heartbeat import Beat
from phalanx.launch.local_launch import LOST, Attempt, OtherNodes, RankProcesses, run_attempts
from phalanx.launch.nodes.links import (
    TOKEN,
    TOKEN_FILE,
    Link,
    Membership,
    Message,
    Reception,
    join_first,
    listen_for_nodes,
    make_token,
    read_token,
)
from phalanx.launch.restart import BAD_USAGE, END_FILE, RankPlaces, RestartPolicy, Restarts
from phalanx.launch.stragglers import RankTrace
from phalanx.printable import write_stderr

_POLL_S = 0.05
_BEATS = 4.0
"""Beats of a supervisor within the time after which a silent one counts as lost."""
_ENDING_S = 120.0
"""Seconds after which a node that was told to end its ranks counts as lost."""
_COLLECTIVES = 256
"""Last collectives of a rank that other nodes are told."""
# As job scripts choose it: below the ports that Linux hands out by itself.
_FIRST_PORT, _PORTS = 10_000, 20_000


@dataclass(frozen=True)
class NodePlace:
    """The place of this node among those of a run."""

    nodes: int
    node: int
    """Number of this one, from 0."""
    address: str
    port: int
    """Where the first node's supervisor listens."""


def find_place(nodes: int | None, node: int | None, rendezvous: str | None) -> NodePlace | None:
    """Return the place of this node by the options of the command, or by Slurm's variables; None where it is the only one.

    Under srun with one task on each of several nodes, Slurm's variables say what is left out. Raises ConfigError for options
    that do not go together.
    """
    tasks, slurm_nodes = (os.environ.get(f"SLURM_STEP_NUM_{what}", "1") for what in ("TASKS", "NODES"))
    if tasks == slurm_nodes != "1" and "RANK" not in os.environ:
        nodes = int(slurm_nodes) if nodes is None else nodes
        node = int(os.environ["SLURM_PROCID"]) if node is None else node
        rendezvous = rendezvous or _slurm_rendezvous()
    if (nodes is None and node is None and rendezvous is None) or nodes == 1:
        return None
    if nodes is None or node is None or rendezvous is None:
        raise ConfigError("--nodes, --node-rank and --rendezvous go together: give all three on each node, or none")
    if not 0 <= node < nodes:
        raise ConfigError(f"--node-rank {node} is not below --nodes {nodes}; nodes count from 0")
    address, _, port = rendezvous.rpartition(":")
    if not address or not port.isascii() or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise ConfigError(
            f"--rendezvous {rendezvous} is no HOST:PORT; name the first node and a free port, such as node1:29500"
        )
    return NodePlace(nodes, node, address.strip("[]"), int(port))


def _slurm_rendezvous() -> str | None:
    """Return where supervisors of a step of srun meet: as its job script says, else at the step's first node."""
    if "MASTER_ADDR" in os.environ and "MASTER_PORT" in os.environ:
        return f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    # node[001-004,7],other: the first of it.
    first = re.match(r"([^\[,]+)(?:\[(\d+)[^\]]*\]([^,\[]*))?", os.environ.get("SLURM_STEP_NODELIST", ""))
    job = os.environ.get("SLURM_JOB_ID", "")
    if first is None or not job.isdecimal():
        return None
    return f"{''.join(part or '' for part in first.groups())}:{_FIRST_PORT + int(job) % _PORTS}"


def launch_nodes(
    arguments: Sequence[str], ranks_each: int, place: NodePlace, *, grace_s: float, policy: RestartPolicy
) -> int:
    """Run `phalanx ARGUMENTS` on `ranks_each` ranks of this node and of the others; return the exit code, of all alike.

    See `local_launch.launch_ranks`. policy: its layouts are those of fewer nodes, by the number of ranks on them. Every node
    ends with LOST where a node that is needed is lost.
    """
    own = Membership(place.node, place.nodes, ranks_each, host_name())
    # Ranks have no use for it.
    secret = os.environ.pop(TOKEN, "").encode()
    with RankProcesses("phalanx", grace_s, policy) as ranks:
        if place.node:
            return _follow(place, own, ranks, policy, secret)
        return _lead(arguments, place, own, ranks, policy, secret)


def _lead(
    arguments: Sequence[str],
    place: NodePlace,
    own: Membership,
    ranks: RankProcesses,
    policy: RestartPolicy,
    secret: bytes,
) -> int:
    """Decide for all nodes, until the run ends. secret: of the run; empty where it is to be made."""
    assert policy.run_dir is not None
    layouts = {count // own.ranks: words for count, words in policy.layouts.items() if count % own.ranks == 0}
    places = RankPlaces(place.nodes, layouts)
    with ExitStack() as opened:
        if not secret:
            secret = make_token(policy.run_dir)
            opened.callback((policy.run_dir / TOKEN_FILE).unlink, missing_ok=True)
        reception = Reception(place.address, place.port, secret, own, policy.limits.heartbeat_s)
        opened.callback(reception.close)
        others = FirstNode(place, own, ranks, reception, places, policy.limits)
        restarts = Restarts(
            replace(policy, layouts=layouts), places, others.name_node, ranks_each=own.ranks, fixed=place.node
        )
        opened.callback(_send_beats(lambda: list(reception.links.values()), policy.limits))
        code = run_attempts(
            ranks,
            restarts,
            arguments,
            lambda: Attempt(restarts.done, list(range(own.ranks)), address=place.address),
            others,
        )
        others.tell(kind="quit", code=code)
    # A run that has not begun has no directory.
    with suppress(OSError):
        write_atomically(policy.run_dir / END_FILE, f"{code}\n")
    return code


def _follow(
    place: NodePlace,
    own: Membership,
    ranks: RankProcesses,
    policy: RestartPolicy,
    secret: bytes,
) -> int:
    """Start and end the ranks of this node as the first node says, until it says that the run has ended."""
    run_dir, limits = policy.run_dir, policy.limits
    assert run_dir is not None
    link = join_first(
        place.address,
        place.port,
        lambda: secret or read_token(run_dir),
        own,
        patience_s=limits.heartbeat_s,
        wait_s=limits.slow_s,
        given_up=lambda: bool(ranks.asked),
    )
    if isinstance(link, str):
        write_stderr(f"node {own.node} does not join the first node at {place.address}:{place.port}: {link}")
        return 128 + ranks.asked if ranks.asked else BAD_USAGE
    with ExitStack() as opened:
        opened.callback(link.close)
        opened.callback(_send_beats(lambda: [link], limits))
        others = LaterNode(link, ranks, limits)
        order = others.next_order(None)
        while not isinstance(order, int):
            attempt, words = order
            order = others.next_order(ranks.run(words, replace(attempt, address=place.address), others))
    if order:
        ranks.forget_copies()
    return order


def _send_beats(links: Callable[[], Sequence[Link]], limits: Limits) -> Callable[[], None]:
    """Show by a message now and then, from a thread, that this supervisor is alive; return what ends that."""
    ended = threading.Event()

    def beat() -> None:
        while not ended.wait(limits.heartbeat_s / _BEATS):
            for link in links():
                if not link.lost:
                    link.send(kind="beat")

    threading.Thread(target=beat, name="beats", daemon=True).start()
    return ended.set


class _Node(OtherNodes):
    """What supervisors of all nodes do alike."""

    def __init__(self, ranks: RankProcesses, limits: Limits) -> None:
        self._ranks = ranks
        self._limits = limits
        self._told = (0, False)
        """The request to stop that all nodes know of: the signal's number, and whether it came twice."""

    def _is_lost(self, link: Link) -> bool:
        """Return whether a link that was just read is of a supervisor that is gone."""
        silent_s = time.monotonic() - link.heard
        if not link.lost and silent_s > self._limits.heartbeat_s:
            link.lost = f"it has said nothing for {silent_s:.1f} s"
        return bool(link.lost)

    def _new_request(self) -> dict[str, Any] | None:
        """Return the message of a request to stop that other nodes do not know of, or None."""
        request = (self._ranks.asked, self._ranks.insisted)
        if request == self._told:
            return None
        self._told = request
        return {"kind": "stop", "signal": request[0], "insist": request[1]}

    def _heed(self, message: Message) -> None:
        """Hand a request to stop from another node on to the ranks of this one."""
        signal, insist = int(message["signal"]), bool(message["insist"])
        # One request may come from several nodes, by different signals.
        if not self._ranks.asked or (insist and not self._ranks.insisted):
            self._ranks.ask(signal, insist=insist)


class FirstNode(_Node):
    """The other nodes, as the supervisor of the first sees them."""

    def __init__(
        self,
        place: NodePlace,
        own: Membership,
        ranks: RankProcesses,
        reception: Reception,
        places: RankPlaces,
        limits: Limits,
    ) -> None:
        """Begin without any. places: of the nodes that have a part in the run."""
        super().__init__(ranks, limits)
        self._place, self._own = place, own
        self._reception = reception
        self._places = places
        self._ready: dict[int, NodeEnd | None] = {}
        """Nodes that wait for the next attempt, and how the last one ended there."""
        self._traces: dict[int, dict[int, RankTrace]] = {}
        """Last traces of the ranks of each node, by the clock of this host."""
        self._attempt = 0
        self._ended_at: float | None = None
        """When all nodes were told to end their ranks."""
        self._lost: Fault | None = None
        self._began = False
        self._come_until = time.monotonic() + limits.slow_s

    def begin(self, attempt: Attempt, words: Sequence[str]) -> Attempt | None:
        """Start an attempt on all nodes, once all are ready; see `OtherNodes`."""
        self._attempt, self._traces = attempt.number, {}
        for node in self._places.used:
            link = self._reception.links.get(node)
            if link is not None and link.lost:
                self._lose(node, link.lost)
        while missing := self._missing():
            self._take()
            if not self._began and time.monotonic() > self._come_until:
                self._lose(missing[0], f"it has not come within {self._limits.slow_s:g} s")
            if self._ranks.asked or self._lost is not None:
                return None
            time.sleep(_POLL_S)
        self._began, self._ended_at = True, None
        listener = listen_for_nodes(self._place.address, 0)
        nodes = self._places.used
        attempt = replace(
            attempt, world_size=len(nodes) * self._own.ranks, port=listener.getsockname()[1], listener=listener
        )
        for index, node in enumerate(nodes):
            if node:
                del self._ready[node]
                part = asdict(replace(attempt, first_rank=index * self._own.ranks, listener=None))
                self._reception.links[node].send(kind="start", attempt=part, words=list(words))
        return attempt

    def look(self) -> bool:
        """Take what nodes say; see `OtherNodes`."""
        self._take()
        if self._lost is not None:
            self.tell_fault()
        return self._ended_at is not None

    def tell_fault(self) -> None:
        """Have all nodes end their ranks."""
        if self._ended_at is None:
            self._ended_at = time.monotonic()
            self.tell(kind="end")

    def collect(self, end: NodeEnd) -> Sequence[NodeEnd]:
        """Return how the attempt ended on each node that is not lost."""
        while self._missing():
            self.look()
            late = self._ended_at is not None and time.monotonic() - self._ended_at > _ENDING_S
            for node in self._missing() if late else ():
                self._lose(node, f"it has not ended its ranks within {_ENDING_S:g} s")
            time.sleep(_POLL_S)
        ends = [self._ready.get(node) for node in self._places.used]
        return [end, *(one for one in ends if one is not None)]

    def ask_traces(self, most: int) -> None:
        """Ask all nodes what their ranks did last; see `stragglers.OtherRanks`."""
        self._traces = {}
        self.tell(kind="trace", most=most)

    def take_traces(self) -> dict[int, RankTrace] | None:
        """Return what the ranks of other nodes did, once all have answered."""
        if any(node not in self._traces for node in self._places.used if node):
            return None
        return {rank: trace for node in self._traces.values() for rank, trace in node.items()}

    def lost_node(self) -> Fault | None:
        """Return, once, the fault of the node that was lost first since the last one."""
        fault, self._lost = self._lost, None
        return fault

    def explain(self, rank: int) -> None:
        """Have the node of a rank print its last lines."""
        self.tell(kind="explain", rank=rank)

    def tell(self, **message: Any) -> None:
        """Send a message to all nodes."""
        for link in list(self._reception.links.values()):
            if not link.lost:
                link.send(**message)

    def name_node(self, node: int) -> str:
        """Return a node's name for a person."""
        link = self._reception.links.get(node)
        return f"node {node}" if link is None else f"node {node} ({link.host})"

    def _missing(self) -> list[int]:
        """Return the nodes with a part in the run that are neither ready nor lost."""
        links = self._reception.links
        return [
            node
            for node in self._places.used
            if node and node not in self._ready and not (node in links and links[node].lost)
        ]

    def _lose(self, node: int, why: str) -> None:
        """Go on without a node, whose fault is reported if it is the first."""
        link = self._reception.links.get(node)
        if link is not None:
            link.lost = link.lost or why
            link.close()
        self._ready.pop(node, None)
        if node in self._places.used and self._lost is None:
            self._lost = Fault(
                rank=self._places.used.index(node) * self._own.ranks,
                cause="lost node",
                detail=why,
                step=None,
                phase=None,
                host=f"node-{node}" if link is None else link.host,
                attempt=self._attempt,
            )

    def _take(self) -> None:
        """Take all messages, and see who is lost."""
        for node, link in list(self._reception.links.items()):
            if link.lost:
                continue
            for message in link.receive():
                self._take_message(node, link, message)
            if self._is_lost(link):
                self._lose(node, link.lost)
        if request := self._new_request():
            self.tell(**request)

    def _take_message(self, node: int, link: Link, message: Message) -> None:
        try:
            match message.get("kind"):
                case "ready":
                    self._ready[node] = read_end(message)
                case "fault":
                    self.tell_fault()
                case "traces":
                    self._traces[node] = _read_traces(message["traces"])
                case "stop":
                    self._heed(message)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            link.lost = f"it says what this one does not understand: {error!r}"


class LaterNode(_Node):
    """The first node, as the supervisor of another one sees it."""

    def __init__(self, link: Link, ranks: RankProcesses, limits: Limits) -> None:
        """Begin with a link to it."""
        super().__init__(ranks, limits)
        self._link = link
        self._orders: deque[Message] = deque()
        self._ending = False

    def next_order(self, end: NodeEnd | None) -> tuple[Attempt, list[str]] | int:
        """Return the next attempt and the words of its command, or the exit code of the command, as the first node says.

        end: how the last attempt ended on this node.
        """
        self._link.send(kind="ready", **({} if end is None else write_end(end)))
        while True:
            gone = self._take()
            while self._orders:
                order = self._orders.popleft()
                if order["kind"] == "quit":
                    return int(order["code"])
                # What was said of the attempt before is over.
                self._ending = False
                return Attempt(**order["attempt"]), [str(word) for word in order["words"]]
            if gone:
                write_stderr(f"the supervisor of the first node ({self._link.host}) is gone: {self._link.lost}")
                return LOST
            if self._ranks.insisted:
                return 128 + self._ranks.asked
            time.sleep(_POLL_S)

    def look(self) -> bool:
        """Take what the first node says; see `OtherNodes`."""
        return self._take() or self._ending

    def tell_fault(self) -> None:
        """Tell the first node that a rank of this node has failed."""
        self._link.send(kind="fault")

    def _take(self) -> bool:
        """Take all messages; return whether the first node is lost."""
        for message in self._link.receive():
            match message.get("kind"):
                case "start" | "quit":
                    self._orders.append(message)
                case "end":
                    self._ending = True
                case "explain":
                    self._ranks.explain(int(message["rank"]))
                case "trace":
                    traces = self._ranks.read_traces(int(message["most"]))
                    self._link.send(kind="traces", traces=_write_traces(traces, self._link.ahead_s))
                case "stop":
                    self._heed(message)
        if request := self._new_request():
            self._link.send(**request)
        return self._is_lost(self._link)


def _write_traces(traces: Mapping[int, RankTrace], ahead_s: float) -> dict[int, Any]:
    """Return what a message says of ranks, by a clock that is ahead of this host's by `ahead_s`."""
    return {
        rank: asdict(
            replace(trace, collectives=[replace(one, entered_s=one.entered_s + ahead_s) for one in trace.collectives])
        )
        for rank, trace in traces.items()
    }


def _read_traces(said: Mapping[str, Any]) -> dict[int, RankTrace]:
    return {
        int(rank): RankTrace(
            Beat(**trace["beat"]), [Collective(**one) for one in trace["collectives"]], str(trace["host"])
        )
        for rank, trace in said.items()
    }


def write_end(end: NodeEnd) -> dict[str, Any]:
    """Return the fields of a message that say how an attempt ended."""
    collectives = {rank: list(records)[-_COLLECTIVES:] for rank, records in end.collectives.items()}
    return {"end": asdict(replace(end, collectives=collectives)), "now": time.monotonic()}


def read_end(message: Message) -> NodeEnd | None:
    """Return how an attempt ended on another node, by what `write_end` gave there just now; None where none did.

    Times become those of this host's clock. Raises TypeError, KeyError, ValueError or AttributeError for anything else.
    """
    if "end" not in message:
        return None
    said, ahead_s = dict(message["end"]), time.monotonic() - float(message["now"])

    def read_view(view: dict[str, Any]) -> RankView:
        beat, error = view["beat"], view["error"]
        if beat is not None:
            beat = Beat(**{**beat, "since": beat["since"] + ahead_s, "progressed": beat["progressed"] + ahead_s})
        if error is not None:
            error = {**error, "time": error["time"] + ahead_s}
        return RankView(**{**view, "beat": beat, "error": error, "started": view["started"] + ahead_s})

    for name in ("views", "last"):
        said[name] = tuple(read_view(view) for view in said[name])
    said["seen_at"] += ahead_s
    said["silent"] = tuple(said["silent"])
    # JSON has no numbers as keys.
    said["stacks"] = {int(rank): str(text) for rank, text in said["stacks"].items()}
    said["collectives"] = {
        int(rank): [Collective(**record) for record in records] for rank, records in said["collectives"].items()
    }
    return NodeEnd(**said)
