"""What servers of files in tests answer with: parts of a file by HTTP's Range."""

from __future__ import annotations

from http.server import BaseHTTPRequestHandler


class RangeHandler(BaseHTTPRequestHandler):
    """Sends bodies; `answer` of a subclass says which."""

    def do_GET(self) -> None:
        self.answer()

    def do_HEAD(self) -> None:
        self.answer()

    def answer(self) -> None:
        """Answer the request with one of the methods below, or with an error."""
        raise NotImplementedError

    def send_range(self, content: bytes) -> None:
        """Answer with the part of `content` that the request asks for; with all of it where it asks for none."""
        asked = self.headers.get("Range")
        first, _, last = (asked or "bytes=0-").removeprefix("bytes=").partition("-")
        part = content[int(first) : int(last) + 1 if last else None]
        self.send_response(206 if asked else 200)
        if asked:
            self.send_header("Content-Range", f"bytes {first}-{int(first) + len(part) - 1}/{len(content)}")
        self.send_header("Accept-Ranges", "bytes")
        self.send_body(part)

    def send_body(self, body: bytes) -> None:
        """End the headers, and send `body` unless the request is for headers alone."""
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *arguments: object) -> None:
        """Requests are no news."""
