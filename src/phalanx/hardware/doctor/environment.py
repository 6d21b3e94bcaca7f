"""Checks of a rank's environment: variables and limits, compared with the machine it runs on. Pure functions."""

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
"""Similarity (0 to 1) from which on a name is taken for a misspelt other one."""
_VISIBLE = ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")
_INTERFACES = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")
_CACHES = {
    "TRITON_CACHE_DIR": "$HOME/.triton",
    "TORCHINDUCTOR_CACHE_DIR": "",
}
"""Variables of the folders of compiled kernels, and the default folders; PyTorch's own is in /tmp, on each node."""
_MANY_RANKS = 512
"""Ranks from which on Python starts slowly from a shared file system: OLCF advises a packed environment."""


@dataclass(frozen=True)
class Surroundings:
    """The job, host and file systems around a rank, which its environment has to fit."""

    world_size: int
    nodes: int
    cores: int
    """Cores that this rank may run on."""
    interfaces: frozenset[str]
    """Names of the host's network interfaces."""
    open_files: int
    """Most files and sockets that a process may have open."""
    python: str
    """Folder of the Python environment."""
    rocm: bool
    """Whether PyTorch is built for ROCm."""
    shared: Callable[[str], str | None]
    """Returns the type of the shared file system of a path; None for a file system of this host."""


def environment_findings(
    environment: Mapping[str, str], around: Surroundings, first: bool, machine: Machine | None = None
) -> list[Finding]:
    """Return all findings about `environment`.

    first: whether this is rank 0, to which all others connect. machine: whose documented settings the environment
    should have.
    """
    findings = [
        *_check_variables(environment, around),
        *_check_interfaces(environment, around),
        *_check_folders(environment, around),
        *([] if machine is None else _check_machine_settings(environment, around, machine)),
    ]
    # The store on rank 0 has a connection to each rank; the process itself needs some files more.
    if first and around.open_files < (wanted := around.world_size + 256):
        findings.append(
            Finding(
                "failed",
                "open-files",
                f"rank 0 may have {around.open_files:,} files open, and {around.world_size:,} ranks connect to it",
                f"ulimit -n {wanted}",
            )
        )
    return findings


@cache
def _read_table() -> dict[str, Any]:
    text = files("phalanx.hardware.doctor").joinpath("variables.yaml").read_text("utf-8")
    found: dict[str, Any] = yaml.safe_load(text)
    return found


@cache
def _known_names() -> dict[str, frozenset[str]]:
    """Return the known variables by prefix, longest prefixes first, so that the first match is the most specific."""
    known = _read_table()["known"]
    starts = sorted(known, key=lambda start: -len(start))
    return {start: frozenset(start + name for name in known[start].split()) for start in starts}


def _check_variables(environment: Mapping[str, str], around: Surroundings) -> Iterator[Finding]:
    """Find misspelt variables, values that are known to do harm, and those that do not suit this rank's devices or cores."""
    # Libraries ignore variables that they do not know: a slip in a name has no effect and no message.
    for name in sorted(environment):
        start = next((start for start in _known_names() if name.startswith(start)), None)
        meant = None if start is None or name in _known_names()[start] else _nearest_name(name, _known_names()[start])
        if meant is not None and meant not in environment:
            yield Finding(
                "warning",
                "misspelt",
                f"{name} is read by nothing that is known here, {meant} is",
                f"export {meant} instead, if it was meant",
            )
    for row in _read_table()["values"]:
        if environment.get(row["name"]) == row["value"]:
            message = f"{row['name']}={row['value']}: {row['message']} ({row['source']})"
            yield Finding(row["level"], "setting", message, row["fix"])
    # The runtimes of a device each hide devices, one on top of the other.
    given = [name for name in _VISIBLE if environment.get(name) is not None]
    if _VISIBLE[0] in given and len(given) > 1:
        values = " and ".join(f"{name}={environment[name]}" for name in given)
        yield Finding(
            "warning",
            "visible-devices",
            f"{values}: the second counts among what the first leaves, so that devices go missing",
            f"unset {' '.join(given[1:])}",
        )
    text = environment.get("OMP_NUM_THREADS", "")
    if text.isdecimal() and int(text) > around.cores:
        yield Finding(
            "warning",
            "threads",
            f"OMP_NUM_THREADS={text}, and the rank may run on {around.cores} core{'s' if around.cores > 1 else ''}",
            f"export OMP_NUM_THREADS={around.cores}, or give each rank more cores",
        )


def _nearest_name(name: str, known: frozenset[str]) -> str | None:
    # A name that was cut off is likelier than one with other letters.
    longer = sorted(one for one in known if one.startswith(f"{name}_"))
    if longer:
        return longer[0]
    alike = {one: SequenceMatcher(None, name, one).ratio() for one in sorted(known)}
    best = max(alike, key=lambda one: alike[one])
    return best if alike[best] >= _ALIKE else None


def _check_interfaces(environment: Mapping[str, str], around: Surroundings) -> Iterator[Finding]:
    for name in _INTERFACES:
        value = environment.get(name, "")
        wanted = [] if value.startswith("^") else [word for word in value.removeprefix("=").split(",") if word]
        # NCCL takes prefixes of names, unless an equals sign stands in front; gloo takes whole names.
        exact = value.startswith("=") or name.startswith("GLOO")
        found = [
            w
            for w in wanted
            if any(one == w if exact else one.startswith(w.split(":")[0]) for one in around.interfaces)
        ]
        if wanted and not found:
            yield Finding(
                "failed",
                "interfaces",
                f"{name}={value} names no network interface of this host: {', '.join(sorted(around.interfaces))}",
                f"export {name}= one of them that reaches the other nodes, or unset it",
            )


def _check_folders(environment: Mapping[str, str], around: Surroundings) -> Iterator[Finding]:
    # Folders that libraries write to by default lie in HOME, which clusters share between nodes.
    home = environment.get("HOME", "/")
    if around.rocm:
        database = environment.get("MIOPEN_USER_DB_PATH") or f"{home}/.config/miopen"
        if kind := around.shared(database):
            yield Finding(
                "failed",
                "miopen-database",
                f"MIOpen's database {database} is on {kind}, where locking fails with disk I/O errors",
                "export MIOPEN_USER_DB_PATH and MIOPEN_CUSTOM_CACHE_DIR as a folder of each node's own, in /tmp say",
            )
    for name, default in _CACHES.items():
        folder = environment.get(name) or default.replace("$HOME", home)
        if around.nodes > 1 and folder and (kind := around.shared(folder)):
            yield Finding(
                "warning",
                "compile-cache",
                f"{name}: compiled kernels are kept in {folder} on {kind}, which {around.nodes:,} nodes write at once",
                f"export {name} as a folder of each node's own, in /tmp say",
            )
    # Each rank imports thousands of small files, which a shared file system looks up one by one.
    if around.world_size > _MANY_RANKS and (kind := around.shared(around.python)):
        yield Finding(
            "warning",
            "python-environment",
            f"Python is read from {around.python} on {kind} by {around.world_size:,} ranks at once",
            "send a packed environment to each node first (sbcast), or use a container",
        )


def _check_machine_settings(
    environment: Mapping[str, str], around: Surroundings, machine: Machine
) -> Iterator[Finding]:
    """Find settings that the machine's documents ask for and the environment lacks."""
    for variable in machine.environment:
        if variable.nodes != "any" and (variable.nodes == "one") != (around.nodes == 1):
            continue
        found = environment.get(variable.name)
        # A value with a job's variable in it, such as a folder named after the job, differs in every job.
        if found is None or (found != variable.value and "$" not in variable.value):
            is_so = "is not set" if found is None else f"is {found}"
            yield Finding(
                "warning",
                "machine-settings",
                f"{variable.name} {is_so}; {machine.name} wants {variable.value}: {variable.reason} ({variable.source})",
                f"export {variable.name}={variable.value}",
            )
