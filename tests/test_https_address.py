"""Data at an `https://` address, against a server of this process with a certificate of its own."""

from __future__ import annotations

import datetime
import ipaddress
import ssl
import threading
from collections.abc import Iterator
from functools import partial
from http.server import ThreadingHTTPServer
from pathlib import Path

import fsspec
import numpy as np
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from phalanx import remote_files
from phalanx.errors import DataError
from phalanx.families.language.data.open_tokens import open_source, token_path
from phalanx.remote_files import use_cache
from range_server import RangeHandler
from token_data import write_token_folder


class Files(RangeHandler):
    """Files of a folder by name, and no list of them."""

    def __init__(self, folder: Path, *arguments: object) -> None:
        self.folder = folder
        super().__init__(*arguments)  # type: ignore[arg-type]

    def answer(self) -> None:
        """Send the file that the path names."""
        path = self.folder / self.path.removeprefix("/text/")
        if path.is_file():
            self.send_range(path.read_bytes())
        else:
            self.send_error(404)


def write_certificate(folder: Path) -> Path:
    """Write a key and a certificate of 127.0.0.1, signed by that key, into one file."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "127.0.0.1")])
    now, day = datetime.datetime.now(datetime.UTC), datetime.timedelta(days=1)
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number(), now - day, now + day)
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False)
        .sign(key, hashes.SHA256())
    )
    plain = serialization.NoEncryption()
    secret = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, plain)
    path = folder / "certificate.pem"
    path.write_bytes(secret + certificate.public_bytes(serialization.Encoding.PEM))
    return path


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Path, str]]:
    """A folder of tokens, and the address at which the server offers it."""
    folder, certificate = write_token_folder(tmp_path / "text"), write_certificate(tmp_path)
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Files, folder))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    # As a user's ~/.config/fsspec does; other clients do not know this certificate.
    known = ssl.create_default_context(cafile=str(certificate))
    monkeypatch.setitem(fsspec.config.conf, "https", {"ssl": known})
    monkeypatch.setattr(remote_files._PROCESS, "folders", {})
    use_cache(str(tmp_path / "cache"), 1.0, 5.0)
    yield folder, f"https://127.0.0.1:{server.server_address[1]}/text"
    server.shutdown()
    thread.join()
    server.server_close()


def test_tokens_are_those_of_the_local_folder(served: tuple[Path, str]) -> None:
    folder, address = served
    near, far = open_source(folder, "train"), open_source(token_path(address), "train")
    assert (far.fingerprint, far.tokens, far.vocab_size) == (near.fingerprint, near.tokens, near.vocab_size)
    starts = np.array([near.tokens - 700, 5, 29_900, 0])
    assert (far.read(starts, 700) == near.read(starts, 700)).all()


def test_a_server_without_the_folder_is_told(served: tuple[Path, str]) -> None:
    address = served[1].removesuffix("text") + "other"
    with pytest.raises(DataError, match=r"https://127\.0\.0\.1"):
        open_source(token_path(address), "train")


def test_a_certificate_that_nobody_knows_is_refused(served: tuple[Path, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(fsspec.config.conf, "https", {})
    with pytest.raises(DataError, match=r"https://127\.0\.0\.1"):
        open_source(token_path(served[1]), "train")
