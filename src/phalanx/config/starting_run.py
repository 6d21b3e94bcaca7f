"""The run file that `phalanx init` writes from five answers: few fields, each with what the schema says of it.

What a family begins with is data: the `start.yaml` beside its presets. Knows no family, and needs no torch.
"""

from __future__ import annotations

import re
import shlex
import textwrap
from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, cast

from phalanx.config.document import parse_document
from phalanx.config.families import FAMILIES, find_family, sizes_of
from phalanx.config.fields import all_fields, run_sections
from phalanx.config.load import merge_fields, parse_run, to_yaml
from phalanx.config.presets import Preset, load_preset, preset_names
from phalanx.config.schema import Run
from phalanx.errors import ConfigError, nearest_names
from phalanx.hardware.device_facts import device_facts
from phalanx.hardware.machine import Machine, load_machine

Goal = Literal["try", "train"]
GOALS: dict[Goal, str] = {"try": "see in minutes that everything works", "train": "a model to use"}
"""What a run may be for, and what that means."""
SHARE_OF_PEAK = 0.35
"""Model FLOP/s of a training step over the nominal peak that a deadline counts on."""
MOST_DEVICES = 1_000_000
_WIDTH = 110
"""Columns of comments."""
Fields = dict[str, Any]


@dataclass(frozen=True)
class Devices:
    """What a run is to be trained on."""

    count: int
    machine: Machine | None = None
    """The cluster; None for this machine."""
    cpu: bool = False
    """Whether it is the CPU of this machine."""

    def __str__(self) -> str:
        where = " of this machine" if self.machine is None else f" of {self.machine.name}"
        return "the CPU" if self.cpu else f"{self.count:,} device{'s' if self.count > 1 else ''}{where}"


@dataclass(frozen=True)
class Size:
    """How large a model is to be: a preset, or the largest that some hours have time for."""

    preset: str
    hours: float | None = None


@dataclass(frozen=True)
class Answers:
    """What is asked before a run file is written."""

    family: str
    data: str
    """Path or address of the training data."""
    devices: Devices
    goal: Goal
    size: Size


@dataclass(frozen=True)
class StartingRun:
    """A run file, and what to do with it."""

    text: str
    commands: tuple[str, ...]
    """What makes the data where there are none, checks the file and trains."""
    remark: str | None
    """What the file takes for granted of data that are the user's own."""


# --- what is answered --------------------------------------------------------------------------------------------------


def starting_families() -> list[str]:
    """Return the families that a run file can be begun for."""
    return [name for name in FAMILIES.names() if find_family(name).start is not None]


def find_start(family: str) -> Fields:
    """Return the run file that `family` begins with. Raises ConfigError for a family that there is none for."""
    known = starting_families()
    if family not in known:
        raise ConfigError(f"--family {family} must be {_join_words(known)}{_suggest_nearest(family, known)}")
    # A copy: answers are written into it.
    return deepcopy(_read_start(family))


def read_data(text: str) -> str:
    """Return the path or address of data. Raises ConfigError for an empty one."""
    if not text.strip():
        raise ConfigError("--data is empty; give the path or address of the training data")
    _require_printable("--data", text)
    return text.strip()


def read_devices(text: str) -> Devices:
    """Return the devices that `cpu`, a number or CLUSTER:NUMBER names. Raises ConfigError for anything else."""
    if text == "cpu":
        return Devices(1, cpu=True)
    cluster, colon, number = text.rpartition(":")
    if not number.isdecimal() or not 1 <= int(number) <= MOST_DEVICES or (colon and not cluster):
        raise ConfigError(
            f"--devices {text} must be cpu, a number of devices of this machine, or CLUSTER:NUMBER as in frontier:64"
        )
    if not cluster:
        return Devices(int(number))
    machine = load_machine(cluster)
    machine.check_devices(int(number))
    return Devices(int(number), machine)


def read_goal(text: str) -> Goal:
    """Return the goal that is named. Raises ConfigError for an unknown one."""
    if text not in GOALS:
        told = _join_words([f"{name} ({meaning})" for name, meaning in GOALS.items()])
        raise ConfigError(f"--goal {text} must be {told}")
    return text


def read_size(text: str, family: str, devices: Devices) -> Size:
    """Return the size that a preset of `family` or a time as in 12h names.

    Raises ConfigError for another family's preset, for an unknown one, and for a time where devices or family have no known
    speed.
    """
    presets = family_presets(family)
    if found := re.fullmatch(r"(\d+(?:\.\d+)?) ?h", text):
        hours = float(found[1])
        start = find_start(family)
        if "deadline_presets" not in start:
            raise ConfigError(f"--size {text}: how long {family} models train is not known before; give a preset")
        if devices.machine is None:
            raise ConfigError(
                f"--size {text}: the speed of {devices} is not known; give a preset, or --devices CLUSTER:NUMBER"
            )
        flops = _flops_in(hours, devices)
        # Training takes some 6 FLOPs for each parameter and token.
        fitting = [
            name
            for name in start["deadline_presets"]
            if 6 * start["tokens_per_parameter"] * _count_parameters(load_preset(name)) ** 2 <= flops
        ]
        return Size((fitting or start["deadline_presets"])[-1 if fitting else 0], hours)
    if text not in presets:
        raise ConfigError(
            f"--size {text} must be a preset of {family} models (phalanx config list shows them), or hours as in 12h"
            f"{_suggest_nearest(text, presets)}"
        )
    return Size(text)


def family_presets(family: str) -> list[str]:
    """Return the names of the presets of `family`."""
    return [name for name in preset_names() if load_preset(name).family == family]


def _flops_in(hours: float, devices: Devices) -> float:
    assert devices.machine is not None
    peak_tflops = device_facts(devices.machine.node.device).peak_tflops["bf16"]
    return devices.count * peak_tflops * 1e12 * SHARE_OF_PEAK * hours * 3600.0


# --- the run file ------------------------------------------------------------------------------------------------------


def write_starting_run(answers: Answers, file: Path) -> StartingRun:
    """Return the run file for these answers. file: where it will be. Raises ConfigError where they do not go together."""
    _require_printable("FILE", str(file))
    start = find_start(answers.family)
    values = cast("Fields", merge_fields(start["run"], start["train"] if answers.goal == "train" else {}))
    values["model"]["preset"] = answers.size.preset
    values["data"]["sources"][0]["path"] = answers.data
    if "prepared" in values["data"]:
        values["data"]["prepared"] = f"data/graphs/{file.stem}"
    notes: dict[str, str] = {}
    if answers.devices.cpu:
        values["layout"]["precision"] = "fp32"
        values["cluster"] = {"device": "cpu"}
    if answers.devices.machine is not None:
        values["cluster"] = {"devices_per_node": min(answers.devices.count, answers.devices.machine.node.devices)}
    _suit_size(values, notes, start, answers)
    # Every device gets a sample: a batch that is counted in samples becomes a multiple of the devices.
    batch = values["layout"]["global_batch"]
    if isinstance(batch, int):
        values["layout"]["global_batch"] = batch + -batch % answers.devices.count
    own = answers.data != start["data"]
    commands = tuple(_next_commands(start, answers, file))
    kind = find_family(answers.family).run
    heading = [
        f"{answers.size.preset} on {answers.devices}, written by phalanx init; the next commands:",
        *(f"  {command}" for command in commands),
        "What is not here has a default: phalanx config fields explains every field.",
    ]
    remark = start.get("own_data") if own else None
    lines = [
        *(f"# {line}" for line in heading),
        *_comment_lines(remark or "", ""),
        *_commented_lines(values, kind, notes),
    ]
    text = "\n".join(lines) + "\n"
    # A file of ours that is refused is told so now, not by the next command.
    parse_run(text, str(file))
    return StartingRun(text, commands, remark)


def _suit_size(values: Fields, notes: dict[str, str], start: Fields, answers: Answers) -> None:
    """Set what follows from the number of parameters, for families that say so: samples, batch, learning rate, steps."""
    if "by_size" not in start:
        return
    preset = load_preset(answers.size.preset)
    count = _count_parameters(preset)
    length = values["data"]["sequence_length"] = preset.sequence_length
    row = [row for row in start["by_size"] if row["parameters"] <= count][-1]
    values["optimizer"]["lr"] = row["lr"]
    if answers.goal == "try" and answers.size.hours is None:
        return
    # At least one sample for each device.
    samples = max(1, row["tokens"] // length)
    samples += -samples % answers.devices.count
    values["layout"]["global_batch"] = f"{samples * length} tokens"
    per_parameter = start["tokens_per_parameter"]
    tokens, why = per_parameter * count, f"{per_parameter} tokens for each parameter (arXiv:2203.15556)."
    if answers.size.hours is not None:
        tokens = _flops_in(answers.size.hours, answers.devices) / (6 * count)
        why = f"What {answers.devices} compute in {answers.size.hours:g} h at {SHARE_OF_PEAK:.0%} of their peak."
    values["training"]["steps"] = max(1, round(tokens / (samples * length)))
    warmup = min(values["optimizer"]["warmup_steps"], values["training"]["steps"])
    values["optimizer"]["warmup_steps"] = warmup
    notes["training.steps"] = why


def _next_commands(start: Fields, answers: Answers, file: Path) -> Iterator[str]:
    data, run, devices = shlex.quote(answers.data), shlex.quote(str(file)), answers.devices
    there = "://" in answers.data or Path(answers.data).exists()
    own = answers.data != start["data"]
    if not own and not there:
        yield start["sample"]
    for command in start["prepare"]:
        # What is prepared by the run file always is; a folder of the user's own only where it is not there.
        if "{file}" in command or (own and not there):
            yield command.format(data=data, file=run)
    yield f"phalanx config check {run}" + (f" --devices {devices.count}" if devices.count > 1 else "")
    machine = devices.machine
    if machine is not None:
        yield f"phalanx plan {run} --cluster {machine.name} --devices {devices.count}"
    if machine is not None and machine.slurm is not None:
        nodes = -(-devices.count // machine.node.devices)
        yield f"phalanx launch {run} --cluster {machine.name} --nodes {nodes} --submit"
    else:
        yield f"phalanx train {run}" + (f" --nproc {devices.count}" if devices.count > 1 else "")


def _commented_lines(values: Fields, kind: type[Run], notes: Mapping[str, str]) -> Iterator[str]:
    """Yield the lines of a run file; above each section and field stands what the schema says of it, and a note."""
    known = all_fields(kind)
    for info in run_sections(kind):
        if info.name not in values:
            continue
        yield from ("", *_comment_lines(info.description, ""), f"{info.name}:")
        for name, value in values[info.name].items():
            field = known[f"{info.name}.{name}"]
            choices = f"May be {field.allowed}." if field.choices else ""
            told = (field.description, choices, notes.get(field.name, ""))
            yield from _comment_lines(" ".join(part for part in told if part), "  ")
            yield from textwrap.indent(to_yaml({name: value}), "  ").splitlines()


def _comment_lines(text: str, margin: str) -> list[str]:
    head = f"{margin}# "
    return textwrap.wrap(text, _WIDTH, initial_indent=head, subsequent_indent=head, break_long_words=False)


# --- small things ------------------------------------------------------------------------------------------------------


@cache
def _read_start(family: str) -> Fields:
    file = find_family(family).start
    assert file is not None
    return cast("Fields", parse_document(file.read_text("utf-8"), file.name).value)


def _count_parameters(preset: Preset) -> int:
    model = preset.model()
    return sizes_of(model).parameter_count(model)


def _require_printable(option: str, text: str) -> None:
    # It stands in comments of the file, which a line break would end.
    if not text.isprintable():
        raise ConfigError(f"{option} {text!a} holds characters that cannot be printed; give another path")


def _join_words(words: list[str]) -> str:
    return f"{', '.join(words[:-1])} or {words[-1]}" if len(words) > 1 else words[0]


def _suggest_nearest(text: str, known: list[str]) -> str:
    found = nearest_names(text, known)
    return f"\nnearest: {found[0]}" if found else ""
