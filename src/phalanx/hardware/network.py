"""Links inside a node and the network between nodes, as parts of a machine's description.

Bandwidths are nominal, in GB/s (10^9 bytes) in one direction. What of it collectives really reach is in `constants.yaml`.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from phalanx.hardware.description import Name, OneLine, Part, Text

MESH_DEVICES = 8
"""Devices of the largest mesh: its rings are found by trying all of them."""


class Switch(Part):
    """Every device reaches every other through switches, at the full bandwidth of its own links (NVSwitch)."""

    gb_s: PositiveFloat
    """GB/s of one device in one direction."""
    multicast: bool = False
    """Whether the switches add up and multiply data themselves (NVLink SHARP, multicast), and it is switched on."""


class Mesh(Part):
    """Devices are wired to one another, with different numbers of links or none."""

    gb_s: PositiveFloat
    """GB/s of one link in one direction."""
    links: Annotated[tuple[tuple[NonNegativeInt, ...], ...], Field(min_length=2, max_length=MESH_DEVICES)]
    """Links between each two devices: a row and a column for each device, in the order of the ranks of a node."""

    @model_validator(mode="after")
    def _check_links(self) -> Mesh:
        count = len(self.links)
        for first, row in enumerate(self.links):
            if len(row) != count:
                raise ValueError(f"links[{first}] has {len(row)} numbers for {count} devices; give one for each")
            if row[first]:
                raise ValueError(f"links[{first}][{first}]={row[first]}: a device has no link to itself")
            for second in range(first):
                there, back = row[second], self.links[second][first]
                if there != back:
                    raise ValueError(
                        f"links[{first}][{second}]={there} and links[{second}][{first}]={back} must be equal"
                    )
        reached = {0}
        for _ in range(count):
            reached |= {other for device in reached for other, links in enumerate(self.links[device]) if links}
        if len(reached) < count:
            missing = min(set(range(count)) - reached)
            raise ValueError(f"device {missing} cannot be reached from device 0 over the links")
        return self


class Links(Part):
    """How the devices of a node are joined: by a switch or by a mesh."""

    source: Text
    kind: Name
    """A row of `links` in `constants.yaml`."""
    switch: Switch | None = None
    mesh: Mesh | None = None

    @model_validator(mode="after")
    def _check_one(self) -> Links:
        if (self.switch is None) == (self.mesh is None):
            raise ValueError("give either switch or mesh")
        return self


class Nic(Part):
    """A network interface of a node and the devices nearest to it, which share it."""

    gb_s: PositiveFloat
    """GB/s in one direction."""
    devices: Annotated[tuple[NonNegativeInt, ...], Field(min_length=1)]


class Tier(Part):
    """A part of the network that holds many nodes: a leaf of a fat tree, a group of a dragonfly."""

    name: OneLine
    nodes: PositiveInt
    """Nodes of one such part; neighbouring ones in the numbering of the job."""
    taper: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """Bandwidth out of the part over the bandwidth of all its nodes together."""
    latency_us: Annotated[float, Field(ge=0.0)] = 0.0
    """What a message that leaves the part takes longer, in microseconds."""


class Network(Part):
    """What joins the nodes."""

    source: Text
    kind: Name
    """A row of `network` in `constants.yaml`."""
    nodes: PositiveInt | None = None
    """Nodes of the machine, where there is a known number of them."""
    nics: Annotated[tuple[Nic, ...], Field(min_length=1)]
    """Network interfaces of one node."""
    tiers: tuple[Tier, ...] = ()
    """From the innermost outwards."""

    @model_validator(mode="after")
    def _check_tiers(self) -> Network:
        nodes = [tier.nodes for tier in self.tiers]
        if nodes != sorted(set(nodes)):
            raise ValueError(f"tiers have {nodes} nodes; give them from small to large")
        return self
