"""What is wrong with a rank's environment: variables and limits, held against the machine it runs on. Pure functions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from difflib import SequenceMatcher
from functools import cache
from importlib.resources import files
from typing import Any

import yaml

from phalanx.hardware.doctor.finding import Finding
from phalanx.hardware.machine import Machine

_ALIKE = 0.9
"""From which on one name is taken for another misspelt."""
_VISIBLE = ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")
_INTERFACES = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")
_CACHES = {
    "TRITON_CACHE_DIR": "$HOME/.triton",
    "TORCHINDUCTOR_CACHE_DIR": "",
}
"""Folders of compiled kernels, and where they are by default; PyTorch's own default is a folder in /tmp."""
_MANY_RANKS = 512
"""From which on reading a Python environment from a shared file system is slow: OLCF advises a packed one."""


@dataclass(frozen=True)
class Place:
    """Where a rank runs, as far as its environment has to fit."""

    world_size: int
    nodes: int
    cores: int
    """That this rank may run on."""
    interfaces: frozenset[str]
    """Names of the host's network interfaces."""
    open_files: int
    """That a process may have, sockets too."""
    python: str
    """Folder of the Python environment."""
    rocm: bool
    """Whether PyTorch is built for ROCm."""
    shared: Callable[[str], str | None]
    """The type of the shared file system that a path lies on; None where it is a file system of this host."""


def environment_findings(
    environment: Mapping[str, str], place: Place, first: bool, machine: Machine | None = None
) -> list[Finding]:
    """Everything found. first: whether this is rank 0, which all others connect to. machine: whose settings are wanted."""
    findings = [
        *_misspelt(environment),
        *_known_values(environment),
        *_devices_shown(environment),
        *_interfaces(environment, place),
        *_threads(environment, place),
        *_folders(environment, place),
        *([] if machine is None else _asked_for(environment, place, machine)),
    ]
    if first and place.open_files < (wanted := place.world_size + 256):
        findings.append(
            Finding(
                "failed",
                "open-files",
                f"rank 0 may have {place.open_files:,} files open, and {place.world_size:,} ranks connect to it",
                f"ulimit -n {wanted}",
            )
        )
    return findings


@cache
def _table() -> dict[str, Any]:
    text = files("phalanx.hardware.doctor").joinpath("variables.yaml").read_text("utf-8")
    found: dict[str, Any] = yaml.safe_load(text)
    return found


@cache
def _known() -> dict[str, frozenset[str]]:
    """Full names, by what they begin with; the longest beginnings first."""
    known = _table()["known"]
    starts = sorted(known, key=lambda start: -len(start))
    return {start: frozenset(start + name for name in known[start].split()) for start in starts}


def _misspelt(environment: Mapping[str, str]) -> Iterator[Finding]:
    for name in sorted(environment):
        start = next((start for start in _known() if name.startswith(start)), None)
        meant = None if start is None or name in _known()[start] else _nearest(name, _known()[start])
        if meant is not None and meant not in environment:
            yield Finding(
                "warning",
                "misspelt",
                f"{name} is read by nothing that is known here, {meant} is",
                f"export {meant} instead, if it was meant",
            )


def _nearest(name: str, known: frozenset[str]) -> str | None:
    longer = sorted(one for one in known if one.startswith(f"{name}_"))
    if longer:
        return longer[0]
    alike = {one: SequenceMatcher(None, name, one).ratio() for one in sorted(known)}
    best = max(alike, key=lambda one: alike[one])
    return best if alike[best] >= _ALIKE else None


def _known_values(environment: Mapping[str, str]) -> Iterator[Finding]:
    for row in _table()["values"]:
        if environment.get(row["name"]) == row["value"]:
            message = f"{row['name']}={row['value']}: {row['message']} ({row['source']})"
            yield Finding(row["level"], "setting", message, row["fix"])


def _devices_shown(environment: Mapping[str, str]) -> Iterator[Finding]:
    given = [name for name in _VISIBLE if environment.get(name) is not None]
    if _VISIBLE[0] in given and len(given) > 1:
        values = " and ".join(f"{name}={environment[name]}" for name in given)
        yield Finding(
            "warning",
            "visible-devices",
            f"{values}: the second counts among what the first leaves, so that devices go missing",
            f"unset {' '.join(given[1:])}",
        )


def _interfaces(environment: Mapping[str, str], place: Place) -> Iterator[Finding]:
    for name in _INTERFACES:
        value = environment.get(name, "")
        wanted = [] if value.startswith("^") else [word for word in value.removeprefix("=").split(",") if word]
        exact = value.startswith("=") or name.startswith("GLOO")
        found = [
            w for w in wanted if any(one == w if exact else one.startswith(w.split(":")[0]) for one in place.interfaces)
        ]
        if wanted and not found:
            yield Finding(
                "failed",
                "interfaces",
                f"{name}={value} names no network interface of this host: {', '.join(sorted(place.interfaces))}",
                f"export {name}= one of them that reaches the other nodes, or unset it",
            )


def _threads(environment: Mapping[str, str], place: Place) -> Iterator[Finding]:
    text = environment.get("OMP_NUM_THREADS", "")
    if text.isdecimal() and int(text) > place.cores:
        yield Finding(
            "warning",
            "threads",
            f"OMP_NUM_THREADS={text}, and the rank may run on {place.cores} core{'s' if place.cores > 1 else ''}",
            f"export OMP_NUM_THREADS={place.cores}, or give each rank more cores",
        )


def _folders(environment: Mapping[str, str], place: Place) -> Iterator[Finding]:
    home = environment.get("HOME", "/")
    if place.rocm:
        database = environment.get("MIOPEN_USER_DB_PATH") or f"{home}/.config/miopen"
        if kind := place.shared(database):
            yield Finding(
                "failed",
                "miopen-database",
                f"MIOpen's database {database} is on {kind}, where locking fails with disk I/O errors",
                "export MIOPEN_USER_DB_PATH and MIOPEN_CUSTOM_CACHE_DIR as a folder of each node's own, in /tmp say",
            )
    for name, default in _CACHES.items():
        folder = environment.get(name) or default.replace("$HOME", home)
        if place.nodes > 1 and folder and (kind := place.shared(folder)):
            yield Finding(
                "warning",
                "compile-cache",
                f"{name}: compiled kernels are kept in {folder} on {kind}, which {place.nodes:,} nodes write at once",
                f"export {name} as a folder of each node's own, in /tmp say",
            )
    if place.world_size > _MANY_RANKS and (kind := place.shared(place.python)):
        yield Finding(
            "warning",
            "python-environment",
            f"Python is read from {place.python} on {kind} by {place.world_size:,} ranks at once",
            "send a packed environment to each node first (sbcast), or use a container",
        )


def _asked_for(environment: Mapping[str, str], place: Place, machine: Machine) -> Iterator[Finding]:
    """Settings that the machine's own documents ask for."""
    for variable in machine.environment:
        if variable.nodes != "any" and (variable.nodes == "one") != (place.nodes == 1):
            continue
        found = environment.get(variable.name)
        # Values that name the job's own variables are another folder in each job.
        if found is None or (found != variable.value and "$" not in variable.value):
            is_so = "is not set" if found is None else f"is {found}"
            yield Finding(
                "warning",
                "machine-settings",
                f"{variable.name} {is_so}; {machine.name} wants {variable.value}: {variable.reason} ({variable.source})",
                f"export {variable.name}={variable.value}",
            )
