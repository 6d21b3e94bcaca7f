"""Machine descriptions: nodes, links, network, Slurm, and the environment that a machine's documents ask for, with sources.

The shipped descriptions are the files in `machines/`; users write their own in the same form.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from difflib import get_close_matches
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import Field, PositiveFloat, PositiveInt, StringConstraints, ValidationError, model_validator

from phalanx.errors import ConfigError
from phalanx.hardware.interconnect import Links, Name, Network, OneLine, Section, Text

VariableName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
Flag = Annotated[str, StringConstraints(pattern=r"^--[a-z][^\s]*$")]
Mask = Annotated[str, StringConstraints(pattern=r"^0x[0-9a-f]+$")]


class Setting(Section):
    """Something that a machine asks for, with its reason and its source."""

    reason: Text
    source: Text


class Option(Setting):
    """An option of sbatch or srun."""

    option: Flag
    per_node: Flag | Literal[""] | None = None
    """The same, of srun, where one task starts all ranks of a node; empty leaves it out, null changes nothing."""
    some_devices: Flag | Literal[""] | None = None
    """The same where a job takes only some devices of each node: {devices} stands for their number, empty leaves it out,
    null changes nothing."""


class Line(Setting):
    """A line of shell."""

    line: OneLine


class Variable(Setting):
    """An environment variable of the ranks."""

    name: VariableName
    value: OneLine
    """The value; $NAME and ${NAME} stand for variables of the job's first shell, all else is literal."""
    nodes: Literal["any", "one", "several"] = "any"
    """Jobs that get the variable: all, those on one node, or those on several."""
    directory: bool = False
    """Whether the value is a folder that has to be made on every node."""


class Host(Section):
    """Memory of a node's processors, and each device's way to it; plans of what is offloaded need both."""

    source: Text
    memory_gb: PositiveFloat
    """GB (10^9 bytes) of a node."""
    gb_s: PositiveFloat
    """Nominal GB/s between the host's memory and one device, in each direction."""


class Node(Section):
    """One node."""

    source: Text
    """Source of the figures."""
    devices: Annotated[int, Field(ge=1, le=1024)]
    """Devices of a node; each has one rank."""
    device: OneLine
    """Name of the device in `devices.yaml`."""
    cores_per_task: PositiveInt
    """CPU cores of one rank."""
    reserved_cores: tuple[int, ...] = ()
    """Cores that jobs may not use."""
    host: Host | None = None
    """Host memory; null where nobody says it."""
    cpu_masks: tuple[Mask, ...] = ()
    """Mask of the nearest cores for each device, in order; empty leaves the binding to Slurm."""

    @model_validator(mode="after")
    def _check_masks(self) -> Node:
        if not self.cpu_masks:
            return self
        if len(self.cpu_masks) != self.devices:
            raise ValueError(f"cpu_masks has {len(self.cpu_masks)} masks for {self.devices} devices; give one for each")
        taken = dict.fromkeys(self.reserved_cores, "a reserved core")
        for device, mask in enumerate(self.cpu_masks):
            cores = cores_of(mask)
            if len(cores) != self.cores_per_task:
                raise ValueError(
                    f"cpu_masks[{device}]={mask} has {len(cores)} cores, cores_per_task={self.cores_per_task}"
                )
            for core in cores:
                if core in taken:
                    raise ValueError(f"cpu_masks[{device}]={mask} has core {core}, which is {taken[core]}")
                taken[core] = f"in cpu_masks[{device}] too"
        return self


class TimeLimit(Section):
    """The longest run of jobs of a size."""

    nodes: PositiveInt
    """Largest number of nodes that this limit holds for."""
    hours: Annotated[float, Field(gt=0.0)]


class Partition(Section):
    """A partition, with its limits from small jobs to large."""

    name: Name
    limits: Annotated[tuple[TimeLimit, ...], Field(min_length=1)]
    source: Text

    @model_validator(mode="after")
    def _check_order(self) -> Partition:
        nodes = [limit.nodes for limit in self.limits]
        if nodes != sorted(set(nodes)):
            raise ValueError(f"limits of partition {self.name} are for {nodes} nodes; give them from small to large")
        return self


class Slurm(Section):
    """Slurm options of the machine's jobs."""

    account_needed: bool = False
    """Whether every job names the project that pays for it."""
    partitions: tuple[Partition, ...] = ()
    """Known partitions, the usual one first; with none, jobs go to Slurm's default."""
    sbatch: tuple[Option, ...] = ()
    """Options of the job."""
    srun: tuple[Option, ...] = ()
    """Options of the step that trains."""


class Stop(Section):
    """How a run is stopped before its job ends."""

    seconds_before_end: PositiveInt = 300
    """Seconds for the step at hand and a checkpoint."""
    requeue: bool = True
    """Whether a run that saved and stopped is queued again."""


class Container(Section):
    """How a container image is started."""

    command: Annotated[tuple[OneLine, ...], Field(min_length=1)]
    """Words of the command before the image."""
    setup: tuple[Line, ...] = ()
    """Lines that only jobs with a container need."""


class Failures(Section):
    """How often nodes fail."""

    node_mtbf_hours: Annotated[float, Field(gt=0.0)]
    """Mean hours between failures of one node that stop a job."""
    source: Text


class Machine(Section):
    """A machine: the whole description."""

    name: Name
    about: Text
    documents: dict[Name, OneLine]
    """Titles of the documents that a `[name]` in a source stands for."""
    node: Node
    links: Links | None = None
    """Links between the devices of a node; plans of more than one device need them."""
    network: Network | None = None
    """Network between nodes; plans of more than one node need it."""
    slurm: Slurm | None = Slurm()
    """Slurm of the machine; null for a machine without Slurm, which is for plans only."""
    stop: Stop = Stop()
    setup: tuple[Line, ...] = ()
    """Lines of shell before everything else, such as `module load`."""
    environment: tuple[Variable, ...] = ()
    container: Container | None = None
    failures: Failures | None = None
    """Null where nobody has counted them: plans then assume what Llama 3's training saw."""

    @property
    def mtbf_hours(self) -> float | None:
        """Mean hours between failures of a node; None where the description does not say."""
        return None if self.failures is None else self.failures.node_mtbf_hours

    @property
    def job_slurm(self) -> Slurm:
        """The Slurm section. Raises ConfigError for a machine that is for plans only."""
        if self.slurm is None:
            raise ConfigError(
                f"{self.name} is described for plans only, without Slurm: start training on it with phalanx train "
                "--nproc or torchrun, or give the path of a description of your own with a slurm section"
            )
        return self.slurm

    def with_devices(self, devices: int) -> Machine:
        """Return the machine as a job has it that takes so many devices of each node; itself where these are all."""
        if devices == self.node.devices:
            return self
        # Which devices and cores they are is for Slurm to say.
        node = self.node.model_copy(update={"devices": devices, "cpu_masks": ()})
        lists = {"sbatch": self.job_slurm.sbatch, "srun": self.job_slurm.srun}
        fewer = {name: tuple(_for_devices(options, devices)) for name, options in lists.items()}
        return self.model_copy(update={"node": node, "slurm": self.job_slurm.model_copy(update=fewer)})

    @property
    def most_devices(self) -> int | None:
        """Devices of all nodes; None where nobody says how many nodes there are."""
        known = None if self.network is None else self.network.nodes
        return None if known is None else known * self.node.devices

    def check_devices(self, wanted: int) -> None:
        """Raise ConfigError where the machine has fewer devices than `wanted`."""
        if self.most_devices is not None and wanted > self.most_devices:
            raise ConfigError(
                f"{wanted:,} devices are more than {self.name} has: {self.most_devices:,} "
                f"({self.most_devices // self.node.devices:,} nodes of {self.node.devices}); give --devices up to that"
            )

    @model_validator(mode="after")
    def _check_devices(self) -> Machine:
        devices = self.node.devices
        if self.links is not None and self.links.mesh is not None and len(self.links.mesh.links) != devices:
            raise ValueError(f"links.mesh.links has {len(self.links.mesh.links)} rows for {devices} devices of a node")
        if self.network is None:
            return self
        near = {device for nic in self.network.nics for device in nic.devices}
        if near != set(range(devices)):
            raise ValueError(
                f"network.nics name devices {sorted(near)}; each of the devices 0 to {devices - 1} needs one"
            )
        return self


def _for_devices(options: Iterable[Option], devices: int) -> Iterator[Option]:
    """Yield options as they are in a job that takes so many devices of each node."""
    for one in options:
        option = one.option if one.some_devices is None else one.some_devices.replace("{devices}", str(devices))
        if option:
            yield one.model_copy(update={"option": option})


def host_of(machine: Machine) -> Host:
    """Return what a machine's description says of host memory. Raises ConfigError where it says nothing."""
    if machine.node.host is None:
        raise ConfigError(
            "layout.offload_optimizer=true and layout.offload_activations=true keep numbers in host memory, of which the "
            f"description of {machine.name} says nothing; add node.host with source, memory_gb and gb_s, or plan with both "
            "false"
        )
    return machine.node.host


def cores_of(mask: str) -> list[int]:
    """Return the cores in a hexadecimal CPU mask, ascending."""
    # Bit n of a mask is core n, as srun --cpu-bind=mask_cpu reads it.
    bits = int(mask, 16)
    return [core for core in range(bits.bit_length()) if bits >> core & 1]


@cache
def machine_names() -> tuple[str, ...]:
    """Return the names of shipped machines that jobs can be started on."""
    # These names stand in `--help`, so they are read off the text: parsing every description would take too long there.
    return tuple(name for name in described_names() if re.search("^slurm: null$", _read_shipped(name), re.M) is None)


@cache
def described_names() -> tuple[str, ...]:
    """Return the names of all shipped machines, those for plans only included."""
    folder = resources.files("phalanx.hardware").joinpath("machines")
    return tuple(sorted(file.name.removesuffix(".yaml") for file in folder.iterdir() if file.name.endswith(".yaml")))


def load_machine(cluster: str) -> Machine:
    """Return the machine that `cluster` names: a shipped name, or the path of a description (with a slash, .yaml or .yml).

    Raises ConfigError for an unknown name, an unreadable file, and anything wrong in it.
    """
    if "/" in cluster or cluster.endswith((".yaml", ".yml")):
        return parse_machine(_read_text(Path(cluster)), cluster)
    if cluster not in described_names():
        # Names are lower case.
        near = get_close_matches(cluster.lower(), described_names(), n=1)
        nearest = f"\nnearest: {near[0]}" if near else ""
        known = ", ".join(machine_names())
        planned = ", ".join(name for name in described_names() if name not in machine_names())
        raise ConfigError(
            f"--cluster {cluster} is not known; give one of {known}, or the path of a .yaml file{nearest}\n"
            f"for plans only: {planned}"
        )
    return parse_machine(_read_shipped(cluster), f"{cluster}.yaml")


MOST_BYTES = 256 * 1024
"""Bytes of the longest description; no more of a file is read."""


class _PlainLoader(yaml.SafeLoader):
    """Loads plain values; a few aliases of aliases would stand for more values than fit any memory."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("aliases (*name) have no place in a description")
        return super().compose_node(parent, index)


def parse_machine(text: str, name: str) -> Machine:
    """Return the machine that the YAML `text` describes. name: of the file, for messages. Raises ConfigError."""
    try:
        values = yaml.load(text, _PlainLoader)
    except yaml.YAMLError as error:
        raise ConfigError(f"{name} is not valid YAML: {' '.join(str(error).split())}") from None
    except RecursionError:
        raise ConfigError(f"{name} is nested too deeply to be a description") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{name} holds no mapping of fields; docs/guides/launch.md shows what a description is")
    try:
        text = json.dumps(values, default=str)
    except (TypeError, ValueError, RecursionError) as error:
        # Dates as keys, and anchors that contain themselves.
        raise ConfigError(f"{name} holds what no field of a description can be: {error}") from None
    try:
        # JSON mode is strict about types and still lets a list become a tuple.
        return Machine.model_validate_json(text)
    except ValidationError as error:
        lines = [_explain_problem(item) for item in error.errors(include_url=False)]
        raise ConfigError("\n".join(f"{name}: {line}" for line in lines)) from None


def _explain_problem(item: Any) -> str:
    field = ".".join(str(part) for part in item["loc"]) or "the description"
    message = re.sub("^Value error, ", "", item["msg"])
    if item["type"] == "extra_forbidden":
        return f"{field} is not a field of a machine description"
    if item["type"] in ("missing", "value_error"):
        return f"{field}: {message[:1].lower()}{message[1:]}"
    return f"{field}={json.dumps(item['input'])}: {message[:1].lower()}{message[1:]}"


def _read_shipped(name: str) -> str:
    return resources.files("phalanx.hardware").joinpath("machines", f"{name}.yaml").read_text("utf-8")


def _read_text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            content = file.read(MOST_BYTES + 1)
        if len(content) > MOST_BYTES:
            raise ConfigError(f"--cluster {path} is larger than {MOST_BYTES // 1024} KiB, which no description is")
        return content.decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise ConfigError(f"--cluster {path} cannot be read: {reason}") from None
