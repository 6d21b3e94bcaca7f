"""Where processes of this machine listen, as the kernel says."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import sys
from pathlib import Path

_LISTEN = "0A"


def listening_at(pid: int) -> set[str]:
    """Return the addresses at which a process listens for TCP connections."""
    inodes = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            inodes.add(os.readlink(descriptor))
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            (
                _,
                local,
                _,
                state,
                *_,
            ) = fields = line.split()
            if state == _LISTEN and f"socket:[{fields[9]}]" in inodes:
                found.add(_address(local.partition(":")[0]))
    return found


def _address(digits: str) -> str:
    """Of the kernel's words of four bytes, each in the machine's order."""
    words = [bytes.fromhex(digits[place : place + 8]) for place in range(0, len(digits), 8)]
    packed = b"".join(word[::-1] if sys.byteorder == "little" else word for word in words)
    return str(ipaddress.ip_address(packed))
