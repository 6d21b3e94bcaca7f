"""The folder in this node's memory in which copies of a run's state outlive its processes. Imports no torch.

Its name follows from an identity that the run directory holds, so that a new run in a folder of the same name finds none.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
from pathlib import Path

from phalanx.errors import PhalanxError
from phalanx.files import open_own_file, write_atomically

IDENTITY_FILE = "copies.id"
"""In the run directory."""
ROOT_VARIABLE = "PHALANX_NODE_MEMORY"
"""Names another file system in memory than /dev/shm, where that is small."""

_IDENTITY = re.compile(r"[0-9a-f]{32}")


def claim_identity(run_dir: Path) -> str:
    """Return the identity of the run in `run_dir`, made at its first start. For one process of the run."""
    known = _read_identity(run_dir)
    if known is None:
        known = secrets.token_hex(16)
        write_atomically(run_dir / IDENTITY_FILE, known + "\n")
    return known


def node_memory_folder(identity: str) -> Path:
    """Return this node's folder for the run of that identity, made if need be. All ranks of the node may call it at once.

    Raises PhalanxError where the node has no file system in memory, or another user has the folder.
    """
    folder = _folder_of(identity)
    try:
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        status = folder.lstat()
    except OSError as error:
        raise PhalanxError(
            f"{folder} cannot be made: {error.strerror}; set checkpoint.memory_every=null, or {ROOT_VARIABLE} to a file "
            "system in memory"
        ) from error
    # In a folder for everybody, somebody else may have been there first.
    if status.st_uid != os.getuid() or folder.is_symlink() or not folder.is_dir():
        raise PhalanxError(f"{folder} belongs to another user or is no folder; refused")
    return folder


def forget_node_memory(run_dir: Path) -> None:
    """Free the memory of this node that the run in `run_dir` has taken, if it has."""
    identity = _read_identity(run_dir)
    if identity is not None:
        shutil.rmtree(_folder_of(identity), ignore_errors=True)


def _folder_of(identity: str) -> Path:
    return Path(os.environ.get(ROOT_VARIABLE, "/dev/shm")) / f"phalanx-{os.getuid()}-{identity}"


def _read_identity(run_dir: Path) -> str | None:
    """Return the identity that a run directory holds; None where it holds none that Phalanx can have written."""
    try:
        with open_own_file(run_dir / IDENTITY_FILE) as file:
            text = file.read(100).decode(errors="replace").strip()
    except OSError:
        return None
    return text if _IDENTITY.fullmatch(text) else None
