"""`phalanx report --serve`: the page over HTTP, made anew when the logs grow, and for this machine's browsers alone."""

from __future__ import annotations

import base64
import hashlib
import re
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path

import pytest

from cli.terminal import start
from command_line import Call
from phalanx.cli.models import serve
from phalanx.cli.models.serve import PageServer
from phalanx.cli.models.watched import Watched, open_watched
from phalanx.errors import ConfigError
from phalanx.files import JsonLines
from report.pages import Page
from report.run_dirs import event, metric, write_lines, write_run


@dataclass
class Served:
    """A server in this process, and what to ask it."""

    server: PageServer

    def ask(self, path: str, method: str = "GET", **headers: str) -> tuple[HTTPResponse, str]:
        connection = HTTPConnection("127.0.0.1", self.server.server_address[1], timeout=30)
        connection.request(method, path, headers=headers)
        answer = connection.getresponse()
        body = answer.read().decode()
        connection.close()
        return answer, body

    def page(self) -> Page:
        return Page(self.ask("/")[1])


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return tmp_path / "night-run"


@pytest.fixture
def served(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    # a page that took long to make is otherwise kept for a while
    monkeypatch.setattr(serve, "LEAST_S", 0.0)
    monkeypatch.setattr(serve, "MOST_OF_TIME", 1e9)
    server = PageServer(open_watched(run_dir), "127.0.0.1", 0)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield Served(server)
    server.shutdown()
    thread.join()
    server.server_close()


def test_the_page_is_the_report_and_follows_the_logs(served: Served, run_dir: Path) -> None:
    write_run(run_dir, 20)
    page = served.page()
    assert page.figure("final_loss") == "0.5000" and page.all("h1")[0].text == "night-run"
    stamp = page.by_id("live").attributes["data-stamp"]
    assert served.ask("/stamp")[1] == stamp
    log = JsonLines(run_dir / "metrics.jsonl")
    log.append(metric(21))
    log.close()
    assert served.ask("/stamp")[1] != stamp
    page = served.page()
    assert (
        page.figure("final_loss") == "0.4762" and page.by_id("live").attributes["data-stamp"] == served.ask("/stamp")[1]
    )
    # nothing is written beside the logs
    assert not (run_dir / "report.html").exists()


def test_only_our_scripts_may_run_and_ask_only_this_server(served: Served, run_dir: Path) -> None:
    write_run(run_dir)
    page = served.page()
    (policy,) = [one.attributes["content"] or "" for one in page.all("meta") if "http-equiv" in one.attributes]
    _, *scripts = page.all("script")
    digests = [base64.b64encode(hashlib.sha256(one.text.encode()).digest()).decode() for one in scripts]
    allowed = " ".join(f"'sha256-{one}'" for one in digests)
    assert len(digests) == 2 and f"script-src {allowed};" in policy
    assert "connect-src 'self';" in policy and "default-src 'none'" in policy
    assert 'fetch("stamp"' in scripts[1].text


def test_a_run_that_has_not_begun_has_a_page_that_waits(served: Served, run_dir: Path) -> None:
    assert "night-run is not there yet" in served.page().text
    run_dir.mkdir()
    write_lines(run_dir / "events.jsonl", [event("start", 0, 0)])
    waiting = served.page()
    assert (
        "the first step is not done yet" in waiting.text and waiting.has_id("live") and len(waiting.all("script")) == 1
    )
    (run_dir / "metrics.jsonl").write_text('{"step": 1, "lo')
    assert "holds no whole record" in served.page().text
    write_run(run_dir)
    assert served.page().figure("final_loss") == "0.2500"


def test_heads_methods_and_other_paths(served: Served, run_dir: Path) -> None:
    write_run(run_dir)
    answer, body = served.ask("/")
    assert answer.getheader("Content-Type") == "text/html; charset=utf-8"
    assert answer.getheader("Cache-Control") == "no-store" and answer.getheader("X-Frame-Options") == "DENY"
    head, nothing = served.ask("/", "HEAD")
    assert (head.status, nothing, head.getheader("Content-Length")) == (200, "", str(len(body.encode())))
    for path in ("/run.yaml", "/../night-run/run.yaml", "/stamp/", "/%2e%2e/metrics.jsonl", "/?"):
        assert served.ask(path)[0].status == 404, path
    assert served.ask("/", "POST")[0].status == 501


def test_a_page_of_elsewhere_does_not_reach_it(served: Served, run_dir: Path) -> None:
    write_run(run_dir)
    port = served.server.server_address[1]
    for host in ("evil.example", f"evil.example:{port}", "localhost.evil.example", ""):
        answer, body = served.ask("/", Host=host)
        assert answer.status == 403 and "night-run" not in body, host
    for host in ("localhost", f"localhost:{port}", f"127.0.0.1:{port}", "localhost:9999"):
        assert served.ask("/stamp", Host=host)[0].status == 200, host


def test_a_page_that_takes_long_is_made_rarely(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_run(run_dir)
    clock, made = [100.0], []

    class Slow(Watched):
        def files(self) -> list[Path]:
            return [run_dir / "metrics.jsonl"]

        def stamp(self) -> str:
            return f"stamp of {clock[0]}"

        def read(self) -> None:  # type: ignore[override]
            raise AssertionError

        def render(self, live: str) -> str:
            made.append(live)
            clock[0] += 3.0
            return live

    monkeypatch.setattr(serve.time, "monotonic", lambda: clock[0])
    cache = serve.PageCache(Slow(run_dir))
    assert cache.get() == ("stamp of 100.0", b"stamp of 100.0")
    clock[0] = 129.0
    assert cache.get()[0] == "stamp of 100.0"
    clock[0] = 130.0
    assert cache.get()[0] == "stamp of 130.0" and len(made) == 2


def test_a_port_that_is_taken_and_other_refusals(call: Call, run_dir: Path) -> None:
    write_run(run_dir)
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        outcome = call("report", str(run_dir), "--serve", "--port", str(port))
        assert (outcome.code, outcome.out) == (1, "")
        assert outcome.err == f"error: --port {port} is taken; give another one, or --port 0 for any free\n"
    for words in (["--json"], ["--out", "page.html"]):
        outcome = call("report", str(run_dir), "--serve", *words)
        assert outcome.code == 2 and "leave --out and --json away" in outcome.err
    outcome = call("report", str(run_dir), "--serve", "--host", "192.0.2.1")
    assert (
        outcome.code == 2 and "--host 192.0.2.1: " in outcome.err and "give an address of this machine" in outcome.err
    )
    with pytest.raises(ConfigError, match="give an address of this machine"):
        PageServer(open_watched(run_dir), "no.such.host.invalid", 0)


def test_the_command_says_where_and_ends_quietly(run_dir: Path) -> None:
    write_run(run_dir)
    child = start("report", str(run_dir), "--serve", "--port", "0", stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert child.stdout is not None
    said = child.stdout.readline().decode()
    found = re.fullmatch(r"serving night-run at http://127\.0\.0\.1:(\d+)/\n", said)
    assert found, said
    connection = HTTPConnection("127.0.0.1", int(found[1]), timeout=30)
    connection.request("GET", "/")
    assert "night-run" in connection.getresponse().read().decode()
    connection.close()
    child.send_signal(signal.SIGINT)
    _, errors = child.communicate(timeout=30)
    assert child.returncode == 0
    assert f"ssh -N -L {found[1]}:127.0.0.1:{found[1]} " in errors.decode() and "Traceback" not in errors.decode()


def test_another_address_is_warned_of(run_dir: Path) -> None:
    write_run(run_dir)
    child = start("report", str(run_dir), "--serve", "--host", "0.0.0.0", "--port", "0", stderr=subprocess.PIPE)
    assert child.stderr is not None
    assert child.stderr.readline().startswith(b"warning: --host 0.0.0.0: whoever reaches this address can read the run")
    child.terminate()
    child.communicate(timeout=30)
    assert child.returncode == 0
