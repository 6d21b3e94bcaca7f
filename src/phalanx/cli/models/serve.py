"""A page that is made anew while its logs grow, served to browsers of this machine by Python's own HTTP server."""

from __future__ import annotations

import errno
import ipaddress
import platform
import sys
import threading
import time
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from phalanx.cli.console import print_warning
from phalanx.cli.models.watch import MOST_OF_TIME, ending_quietly
from phalanx.cli.models.watched import Watched
from phalanx.errors import ConfigError, PhalanxError
from phalanx.printable import make_printable, write_stderr

LEAST_S = 2.0
"""Seconds between two makings of the page."""
_OWN_NAMES = ("localhost", "127.0.0.1")
"""Names by which a browser may ask for a page that is for this machine alone."""


class PageCache:
    """The newest page: made when somebody asks and the files have changed, and by one thread at a time."""

    def __init__(self, watched: Watched) -> None:
        self._watched = watched
        self._lock = threading.Lock()
        self._stamp, self._page, self._due = "", b"", 0.0

    def get(self) -> tuple[str, bytes]:
        """Return the page's stamp and the page."""
        with self._lock:
            began = time.monotonic()
            # The stamp from before the files are read: what they get meanwhile shows in the next one.
            if began >= self._due and (now := self._watched.stamp()) != self._stamp:
                self._page = self._watched.page(now).encode("utf-8", "replace")
                self._stamp = now
                self._due = began + max(LEAST_S, (time.monotonic() - began) / MOST_OF_TIME)
            return self._stamp, self._page


class PageServer(ThreadingHTTPServer):
    """Serves one page at `/`, and at `/stamp` what tells this one from the next."""

    daemon_threads = True

    def __init__(self, watched: Watched, host: str, port: int) -> None:
        """Listen. Raises ConfigError for an address that is not this machine's, PhalanxError where the port is taken."""
        self.cache = PageCache(watched)
        self.only_here, self.host = _is_loopback(host), host
        try:
            super().__init__((host, port), PageRequest)
        except OSError as error:
            if error.errno in (errno.EADDRINUSE, errno.EACCES):
                why = "taken" if error.errno == errno.EADDRINUSE else "not for users"
                raise PhalanxError(f"--port {port} is {why}; give another one, or --port 0 for any free") from error
            raise ConfigError(f"--host {host}: {error.strerror or error}; give an address of this machine") from error

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of a browser that went away in the middle of an answer; a defect of ours keeps its traceback."""
        if not isinstance(sys.exception(), ConnectionError | TimeoutError):
            super().handle_error(request, client_address)


class PageRequest(BaseHTTPRequestHandler):
    """One request."""

    server: PageServer
    server_version, sys_version = "phalanx", ""
    timeout = 30.0

    def do_GET(self) -> None:
        """Answer with the page or its stamp."""
        self._answer(with_body=True)

    def do_HEAD(self) -> None:
        """Answer with the head alone."""
        self._answer(with_body=False)

    def _answer(self, *, with_body: bool) -> None:
        # A page of somewhere else must not reach this one by a name of its own that leads to this machine.
        name = self.headers.get("Host", "").rpartition(":")[0] or self.headers.get("Host", "")
        if self.server.only_here and name not in (*_OWN_NAMES, self.server.host):
            self.send_error(HTTPStatus.FORBIDDEN, "ask for localhost")
            return
        if self.path not in ("/", "/stamp"):
            self.send_error(HTTPStatus.NOT_FOUND)
            return
        stamp, page = self.server.cache.get()
        body, kind = (page, "text/html") if self.path == "/" else (stamp.encode(), "text/plain")
        self.send_response(HTTPStatus.OK)
        for head, value in (
            ("Content-Type", f"{kind}; charset=utf-8"),
            ("Content-Length", str(len(body))),
            ("Cache-Control", "no-store"),
            ("X-Content-Type-Options", "nosniff"),
            ("X-Frame-Options", "DENY"),
        ):
            self.send_header(head, value)
        self.end_headers()
        if with_body:
            self.wfile.write(body)

    def log_message(self, format: str, *arguments: Any) -> None:
        """Write no line for a request."""


def serve_page(watched: Watched, host: str, port: int) -> None:
    """Serve the page of `watched` until somebody ends it. Raises as `PageServer` does."""
    with PageServer(watched, host, port) as server, ending_quietly():
        # The system has chosen the port where 0 was asked for.
        port = int(server.server_address[1])
        print(f"serving {make_printable(watched.name)} at http://{host}:{port}/", flush=True)
        if server.only_here:
            # How to get there from the desk: clusters have no browser.
            write_stderr(f"from another machine: ssh -N -L {port}:{host}:{port} {platform.node()}")
            write_stderr(f"and there: http://localhost:{port}/")
        else:
            print_warning(
                f"--host {host}: whoever reaches this address can read the run; the default is for this machine alone"
            )
        write_stderr("Ctrl-C ends it")
        server.serve_forever()


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
