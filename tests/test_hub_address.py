"""Data at an `hf://` address, against a server of this process that answers as the Hugging Face Hub does."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from functools import partial
from http.server import ThreadingHTTPServer
from pathlib import Path

import fsspec
import numpy as np
import pytest

from phalanx import remote_files
from phalanx.errors import DataError
from phalanx.families.language.data.open_tokens import open_source, token_path
from phalanx.remote_files import use_cache
from range_server import RangeHandler
from token_data import write_token_folder

NAME = "someone/text"


class Hub(RangeHandler):
    """One data set: what it is, the files that it holds, and their bytes, by the Hub's HTTP interface."""

    def __init__(self, folder: Path, *arguments: object) -> None:
        self.folder = folder
        super().__init__(*arguments)  # type: ignore[arg-type]

    def answer(self) -> None:
        """Send what the path asks for."""
        path = self.path.partition("?")[0]
        files = f"/datasets/{NAME}/resolve/main/"
        if path.startswith(files) and (found := self.folder / path.removeprefix(files)).is_file():
            self.send_range(found.read_bytes())
        elif path.startswith(f"/api/datasets/{NAME}/tree/main"):
            self._send_json([self._describe(file) for file in sorted(self.folder.iterdir())])
        elif path in (f"/api/datasets/{NAME}", f"/api/datasets/{NAME}/revision/main"):
            self._send_json({"id": NAME, "sha": "0" * 40})
        else:
            self.send_response(404)
            self.send_header("X-Error-Code", "RepoNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()

    def _describe(self, file: Path) -> dict[str, object]:
        content = file.read_bytes()
        return {"type": "file", "path": file.name, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}

    def _send_json(self, answer: object) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_body(json.dumps(answer).encode())


@pytest.fixture
def tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder that the server offers as a data set."""
    folder = write_token_folder(tmp_path / "text")
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Hub, folder))
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    # As a user's ~/.config/fsspec does.
    monkeypatch.setitem(fsspec.config.conf, "hf", {"endpoint": f"http://127.0.0.1:{server.server_address[1]}"})
    monkeypatch.setattr(remote_files._PROCESS, "folders", {})
    use_cache(str(tmp_path / "cache"), 1.0, 10.0)
    yield folder
    server.shutdown()
    thread.join()
    server.server_close()


def test_tokens_are_those_of_the_local_folder(tokens: Path) -> None:
    near, far = open_source(tokens, "train"), open_source(token_path(f"hf://datasets/{NAME}"), "train")
    assert (far.fingerprint, far.tokens) == (near.fingerprint, near.tokens)
    starts = np.array([near.tokens - 700, 5, 29_900])
    assert (far.read(starts, 700) == near.read(starts, 700)).all()
    far.verify()
    with pytest.raises(DataError, match=r"hf://datasets/someone/else"):
        open_source(token_path("hf://datasets/someone/else"), "train")
