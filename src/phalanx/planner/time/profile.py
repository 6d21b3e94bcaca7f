"""How fast a device works: a few constants, from which the time of any operation and any step follows.

Defaults follow from the facts in `devices.yaml` and the shares in `profiles/defaults.yaml`. A profile that was measured, or
fitted to runs, is a file of the same constants, and takes their place. Knows no model and no layout.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from phalanx.errors import ConfigError
from phalanx.files import write_atomically
from phalanx.hardware.collectives import Constants, default_constants
from phalanx.hardware.device_facts import DeviceFacts, device_facts
from phalanx.hardware.machine import Machine
from phalanx.planner.time.timed_operations import KINDS, TimedOperation


@dataclass(frozen=True)
class Profile:
    """The constants. Rates are what a long-running job reaches, clocks and power limit included."""

    matmul_flop_s: float
    """Operations a second of a large matrix product of 16-bit numbers."""
    matmul32_flop_s: float
    """The same of 32-bit numbers."""
    matmul64_flop_s: float
    """The same of 64-bit numbers."""
    matmul8_flop_s: float
    """The same of 8-bit numbers; of devices without such products as of 16-bit ones."""
    matmul_edge: float
    """Rows, and columns, of a product's result at which half of the rate is lost."""
    matmul_depth: float
    """Terms a sum at which half of the rate is lost."""
    matmul_area: float
    """Numbers of a product's results at which half of the rate is lost: too few to keep the whole device busy."""
    grouped_share: float
    """Rate of products of groups of rows with a matrix each in one kernel, over that of one product as large."""
    matmul_odd: float
    """How much longer a product takes, as a share, where rows of its factors have an odd number of elements; half as much
    where it is even, and so on up to 64."""
    attention_flop_s: float
    """Operations a second of a fused attention kernel over long sequences, forward."""
    attention_backward_flop_s: float
    """The same backward."""
    attention_length: float
    """Keys at which half of the rate is lost."""
    attention_head: float
    """Size of a head at which half of the rate is lost."""
    attention_area: float
    """Rows of queries, of all samples and heads together, at which half of the rate is lost: the last of them keep only a
    part of the device busy."""
    attention_biased: float
    """Rate with a bias on the scores (ALiBi, document masks), over that without."""
    memory_b_s: float
    """Bytes a second that kernels read and write."""
    eager_share: float
    """What kernels of blocks that are not compiled reach of that: each reads and writes activations for one operation."""
    kernel_s: float
    """What any kernel takes beyond its work: start, and filling and draining the device."""
    optimizer_b_s: float
    """Bytes a second at which the optimizer passes over what it reads and writes."""
    host_s: float
    """Seconds in which the host issues one operation; where the device is faster, it waits."""
    exchange_host_s: float
    """Seconds in which the host issues one exchange of activations, or of a streamed chunk, with the Python around it."""
    shard_host_s: float
    """Seconds in which the host prepares one parameter for being gathered, or its gradient for being reduced."""
    step_s: float
    """Seconds of an optimizer step that nothing else accounts for: data, learning rate, logging."""
    link_share: float
    """What collectives between devices of a node reach in training, of what they reach alone."""
    network_share: float
    """The same between nodes."""
    pipeline_ramp: float
    """How long pipelines take to fill and to drain, over what the times of their stages add up to. More than 1 where ranks
    meet their neighbours for the first time in a step, or block them."""
    hidden: float
    """Share of the computing time behind which collectives can hide."""
    slowdown: float
    """What computing loses while a collective runs beside it, as a share of that time."""
    straggling: float
    """What computing takes longer, as a share, for every doubling of the nodes that wait for one another in each block."""
    copy_share: float
    """Bytes a second that copy engines move between devices of a node, over the links' nominal rate."""
    copy_slowdown: float
    """What computing loses beside them, as a share of that time."""
    measured: tuple[TimedOperation, ...] = ()
    """Single operations, which correct the curves for shapes like theirs."""

    def __post_init__(self) -> None:
        for name in CONSTANTS:
            value = getattr(self, name)
            assert np.isfinite(value) and value >= 0, f"{name}={value}"

    def scaled(self, factors: Mapping[str, float]) -> Profile:
        """Return the profile with these constants multiplied; shares stay at most 1."""
        values = {name: getattr(self, name) * factor for name, factor in factors.items()}
        return replace(self, **{name: min(value, 1.0) if name in SHARES else value for name, value in values.items()})


CONSTANTS = tuple(field.name for field in fields(Profile) if field.name != "measured")
RATES = ("matmul_flop_s", "matmul32_flop_s", "matmul64_flop_s", "matmul8_flop_s")
"""Those of matrix products."""
_NEWER = frozenset(
    {
        "grouped_share",
        "matmul64_flop_s",
        "matmul8_flop_s",
        "attention_area",
        "eager_share",
        "exchange_host_s",
        "shard_host_s",
    }
)
"""Constants that a profile may lack, since it was written before they were thought of: the device's default stands."""
SHARES = frozenset({"hidden", "copy_share"})
"""Constants that cannot be more than 1."""


@dataclass(frozen=True)
class NamedProfile:
    """A profile and where it is from."""

    name: str
    device: str
    """Name of the device in `devices.yaml`."""
    source: str
    """Where the constants are from, in words."""
    profile: Profile
    fitted: dict[str, Any] | None = None
    """What a fit adds: the rows it used, its errors, how well each constant is known."""
    collectives: Constants | None = None
    """Constants of the links and the network that were measured; None where they were not."""
    beside: Mapping[str, float] | None = None
    """Measured bytes beside the tensors: `context`, and `communicator` for each group; None where they were not."""

    def collectives_on(self, machine: Machine) -> Constants:
        """Return the constants of collectives on `machine`: what was measured inside a node, and between nodes if it was.

        Raises ConfigError as `default_constants` does.
        """
        if self.collectives is None:
            return default_constants(machine)
        if self.collectives.step_across_s > 0 or machine.network is None:
            return self.collectives
        # One node was measured: what lies between nodes is as it is by default.
        across = default_constants(machine)
        names = ("step_across_s", "efficiency_across", "tree")
        return replace(self.collectives, **{name: getattr(across, name) for name in names})


def default_profile(device: str) -> NamedProfile:
    """Return what is expected of a device on which nothing was measured. Raises ConfigError for an unknown one or a CPU."""
    facts = device_facts(device)
    ratios = _ratios(device)
    rate = _rate(facts, ratios)
    if facts.bandwidth_gb_s is None:
        raise ConfigError(f"device {device}: devices.yaml has no memory bandwidth, which its profile needs")
    bandwidth = facts.bandwidth_gb_s * 1e9
    single, double = _wider(facts)
    derived = {
        "matmul_flop_s": rate,
        "matmul32_flop_s": rate * single,
        "matmul64_flop_s": rate * double,
        "matmul8_flop_s": rate * _eighth(facts),
        "attention_flop_s": rate * ratios["attention"],
        "attention_backward_flop_s": rate * ratios["attention_backward"],
        "memory_b_s": bandwidth * ratios["memory"],
        "optimizer_b_s": bandwidth * ratios["optimizer"],
    }
    plain = {name: float(ratios[name]) for name in CONSTANTS if name not in derived}
    return NamedProfile(device, device, _defaults()["source"], Profile(**derived, **plain, measured=()))


def _ratios(device: str) -> dict[str, float]:
    """Return the shares and constants that a device has by default; of an unknown one those of all."""
    table = _defaults()
    return {**table["shares"], **table["devices"].get(device, {})}


def _rate(facts: DeviceFacts, ratios: Mapping[str, float]) -> float:
    """Return operations a second of large products of 16-bit numbers: the highest anybody saw, or a share of the peak."""
    for precision in ("bf16", "fp16"):
        if precision in facts.matmul_tflops:
            return facts.matmul_tflops[precision] * 1e12 * ratios["matmul"]
        if precision in facts.peak_tflops:
            return facts.peak_tflops[precision] * 1e12 * ratios["matmul_of_peak"]
    raise ConfigError(f"device {facts.name}: devices.yaml has no 16-bit rate, which its profile needs")


def _wider(facts: DeviceFacts) -> tuple[float, float]:
    """Return the rates of 32-bit and 64-bit products over that of 16-bit ones, in proportion to the nominal peaks."""
    peaks = facts.peak_tflops
    half = peaks.get("bf16") or peaks.get("fp16")
    if half is None:
        return _SINGLE, _SINGLE * _DOUBLE
    single = peaks.get("fp32", half * _SINGLE) / half
    return single, peaks.get("fp64", half * single * _DOUBLE) / half


def _eighth(facts: DeviceFacts) -> float:
    """Return the rate of 8-bit products over that of 16-bit ones, by the highest published rates, else the nominal peaks."""
    for rates in (facts.matmul_tflops, facts.peak_tflops):
        if "fp8" in rates and "bf16" in rates:
            return rates["fp8"] / rates["bf16"]
    return 1.0


_SINGLE, _DOUBLE = 1 / 16, 1 / 2
"""Rate of 32-bit products over that of 16-bit ones, and of 64-bit over 32-bit ones, where no peak is known."""


def spread_of(name: str) -> float:
    """Return the standard deviation of the logarithm of a constant before anything is measured."""
    return float(_defaults()["spread"][name])


@cache
def _defaults() -> dict[str, Any]:
    values: dict[str, Any] = yaml.safe_load(
        files("phalanx.planner.time").joinpath("profiles", "defaults.yaml").read_text("utf-8")
    )
    return values


_DEFAULTS = "defaults"
"""The file beside the profiles that is none."""


@cache
def shipped_profiles() -> tuple[str, ...]:
    """Return the names of the fitted profiles that come with the package."""
    folder = files("phalanx.planner.time").joinpath("profiles")
    names = (file.name.removesuffix(".yaml") for file in folder.iterdir() if file.name.endswith(".yaml"))
    return tuple(sorted(name for name in names if name != _DEFAULTS))


def profile_beside(machine: Machine, cluster: str) -> Path | None:
    """Return the file that `phalanx calibrate` wrote for `machine`: in the folder of its description `cluster`, or here."""
    described = Path(cluster).parent if "/" in cluster or cluster.endswith((".yaml", ".yml")) else Path()
    folders = dict.fromkeys((described, Path()))
    return next((path for folder in folders if (path := folder / measured_name(machine.name)).is_file()), None)


def measured_name(name: str) -> str:
    """Return the name of the file of a measured profile."""
    return f"{name}.profile.yaml"


def profile_for(machine: Machine) -> NamedProfile:
    """Return the best profile known for `machine`: the shipped profile of its name, else the default of its device."""
    if machine.name in shipped_profiles():
        return load_profile(machine.name)
    return default_profile(machine.node.device)


def choose_profile(machine: Machine, cluster: str, asked: str | None = None) -> NamedProfile:
    """Return the profile that is asked for, else the one beside the machine's description `cluster`, else the best known.

    Raises ConfigError as `load_profile` does, and for one of another device than the machine has.
    """
    beside = None if asked else profile_beside(machine, cluster)
    if asked is None and beside is None:
        return profile_for(machine)
    # A path, so that it cannot be taken for a name.
    name = asked or str(Path(beside or "").absolute())
    named = load_profile(name)
    # Rates of one device say nothing of another.
    if named.device and named.device != machine.node.device:
        raise ConfigError(
            f"profile {name} is of {named.device}, and {machine.name} has {machine.node.device}; "
            "leave --profile out, or measure one there with phalanx calibrate"
        )
    return named


def load_profile(name: str) -> NamedProfile:
    """Return a shipped profile by its name, or one from a file (anything with a slash or ending in .yaml or .yml).

    Raises ConfigError for an unknown name, an unreadable file, and constants that are missing, unknown or no numbers.
    """
    if "/" in name or name.endswith((".yaml", ".yml")):
        try:
            return _parse(Path(name).read_text("utf-8"), name)
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"profile {name} cannot be read: {error}") from None
    if name not in shipped_profiles():
        raise ConfigError(f"profile {name} is not known; give one of {', '.join(shipped_profiles())}, or a .yaml file")
    return _parse(files("phalanx.planner.time").joinpath("profiles", f"{name}.yaml").read_text("utf-8"), f"{name}.yaml")


def _parse(text: str, name: str) -> NamedProfile:
    """Return the profile in a file. Raises ConfigError naming what is missing, unknown or no number."""
    try:
        values = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{name} is not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(values, dict) or not isinstance(values.get("constants"), dict):
        raise ConfigError(f"{name} holds no constants; phalanx calibrate writes such a file")
    constants = values["constants"]
    # Profiles of earlier versions lack what was added since.
    constants = _completed(constants, str(values.get("device", "")))
    for problem, names in (
        ("lacks", set(CONSTANTS) - set(constants)),
        ("has unknown", set(constants) - set(CONSTANTS)),
    ):
        if names:
            raise ConfigError(f"{name} {problem} constants {', '.join(sorted(names))}")
    for constant, value in constants.items():
        _check_number(f"{name}: constants.{constant}", value, above_zero=constant.endswith(_DIVISORS))
    measured = _operations(values.get("operations") or [], name)
    profile = Profile(**{constant: float(value) for constant, value in constants.items()}, measured=measured)
    words = {key: str(values.get(key, "")) for key in ("name", "device", "source")}
    collectives = _numbers(values.get("collectives"), name, "collectives", [field.name for field in fields(Constants)])
    return NamedProfile(
        **words,
        profile=profile,
        fitted=values.get("fitted"),
        collectives=None if collectives is None else Constants(**collectives),
        beside=_numbers(values.get("beside"), name, "beside", ["context", "communicator"]),
    )


def _completed(constants: Mapping[str, Any], device: str) -> dict[str, Any]:
    """Return `constants` with defaults of `device` for those that were introduced after the profile was written."""
    added = {name: _ratios(device)[name] for name in _NEWER - set(constants) if name not in RATES}
    single: Any = constants.get("matmul32_flop_s")
    if "matmul64_flop_s" not in constants and _is_number(single):
        try:
            of_single, of_double = _wider(device_facts(device))
        except ConfigError:
            of_single, of_double = 1.0, _DOUBLE
        added["matmul64_flop_s"] = float(single) * of_double / of_single
    half: Any = constants.get("matmul_flop_s")
    if "matmul8_flop_s" not in constants and _is_number(half):
        try:
            added["matmul8_flop_s"] = float(half) * _eighth(device_facts(device))
        except ConfigError:
            added["matmul8_flop_s"] = float(half)
    return {**constants, **added}


def _numbers(values: Any, name: str, part: str, wanted: Sequence[str]) -> dict[str, float] | None:
    """Return one part of a profile: exactly the numbers in `wanted`. Raises ConfigError."""
    if values is None:
        return None
    if not isinstance(values, dict) or set(values) != set(wanted):
        raise ConfigError(f"{name}: {part} has to hold {', '.join(wanted)}, and nothing else")
    for key, value in values.items():
        _check_number(f"{name}: {part}.{key}", value, above_zero=key.endswith(_DIVISORS))
    return {key: float(value) for key, value in values.items()}


_DIVISORS = ("_b_s", "_flop_s", "_share", "_biased", "efficiency", "efficiency_across", "tree")
"""How the names of constants end that say how fast something is."""


def _check_number(where: str, value: Any, *, above_zero: bool) -> None:
    if not _is_number(value) or (above_zero and value == 0):
        raise ConfigError(f"{where}={value} is not a number {'above zero' if above_zero else 'of zero or more'}")


def _is_number(value: Any) -> bool:
    return not isinstance(value, bool) and isinstance(value, int | float) and 0 <= value < float("inf")


def _operations(rows: Any, name: str) -> tuple[TimedOperation, ...]:
    """Raises ConfigError for a row that is not [kind, batch, m, n, k, seconds, ratio]."""
    found = []
    for number, row in enumerate(rows if isinstance(rows, list) else [rows]):
        right = isinstance(row, list) and len(row) == 7 and row[0] in KINDS
        if not right or not all(_is_number(value) and value > 0 for value in row[1:]):
            raise ConfigError(f"{name}: operations[{number}]={row} is not [kind, batch, m, n, k, seconds, ratio]")
        kind, batch, m, n, k, seconds, ratio = row
        found.append(TimedOperation(kind, int(batch), int(m), int(n), int(k), float(seconds), float(ratio)))
    return tuple(found)


def save_profile(path: Path, named: NamedProfile) -> None:
    """Write a profile as `load_profile` reads it; numbers with five digits."""
    write_atomically(path, profile_text(named))


def profile_text(named: NamedProfile) -> str:
    """Return the text of a profile's file."""
    values: dict[str, Any] = {"name": named.name, "device": named.device, "source": named.source}
    values["constants"] = {name: _rounded(getattr(named.profile, name)) for name in CONSTANTS}
    if named.collectives is not None:
        values["collectives"] = {name: _rounded(value) for name, value in asdict(named.collectives).items()}
    if named.beside is not None:
        values["beside"] = {name: _rounded(value) for name, value in named.beside.items()}
    if named.fitted is not None:
        values["fitted"] = named.fitted
    text = yaml.safe_dump(values, sort_keys=False, width=120, allow_unicode=True)
    # One timed operation a line: the file stays short enough to be read.
    rows = [
        f"- [{x.kind}, {x.batch}, {x.m}, {x.n}, {x.k}, {_rounded(x.seconds)!r}, {_rounded(x.ratio)!r}]\n"
        for x in named.profile.measured
    ]
    return text + ("operations:\n" + "".join(rows) if rows else "")


def _rounded(value: float) -> float:
    return float(f"{value:.5g}")
