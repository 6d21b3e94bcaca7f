"""Data at a `gs://` address, against an emulator of Google Cloud Storage that this process serves."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from gcp_storage_emulator.server import create_server

from phalanx import remote_files
from phalanx.errors import DataError
from phalanx.families.language.data.open_tokens import open_source, token_path
from phalanx.remote_files import use_cache
from token_data import write_token_folder


@pytest.fixture
def stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Path, str]]:
    """A folder of tokens, and the address at which the emulator holds it."""
    # Else gcsfs asks Google over the network what kind of bucket it is; read when the package is imported.
    monkeypatch.setenv("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
    import gcsfs  # noqa: PLC0415

    folder = write_token_folder(tmp_path / "text")
    server = create_server("127.0.0.1", 0, in_memory=True)
    server.start()
    endpoint = f"http://127.0.0.1:{server._api._httpd.server_address[1]}"
    # What Google's own clients read, too.
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", endpoint)
    request = urllib.request.Request(
        f"{endpoint}/storage/v1/b?project=test",
        data=json.dumps({"name": "corpora"}).encode(),
        headers={"Content-Type": "application/json"},
    )
    urllib.request.urlopen(request).close()
    gcsfs.GCSFileSystem.clear_instance_cache()
    files = gcsfs.GCSFileSystem(token="anon")
    for file in folder.iterdir():
        files.pipe_file(f"corpora/text/{file.name}", file.read_bytes())
    monkeypatch.setattr(remote_files._PROCESS, "folders", {})
    use_cache(str(tmp_path / "cache"), 1.0, 5.0)
    yield folder, "gs://corpora/text"
    server.stop()
    gcsfs.GCSFileSystem.clear_instance_cache()


def test_tokens_are_those_of_the_local_folder(stored: tuple[Path, str]) -> None:
    folder, address = stored
    near, far = open_source(folder, "train"), open_source(token_path(address), "train")
    assert (far.fingerprint, far.tokens, far.vocab_size) == (near.fingerprint, near.tokens, near.vocab_size)
    starts = np.array([near.tokens - 700, 5, 29_900, 0])
    assert (far.read(starts, 700) == near.read(starts, 700)).all()


def test_a_folder_that_is_not_there_is_told(stored: tuple[Path, str]) -> None:
    with pytest.raises(DataError, match="gs://corpora/other"):
        open_source(token_path("gs://corpora/other"), "train")
