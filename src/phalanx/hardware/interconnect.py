"""Links inside a node and the network between nodes, as sections of a machine's description.

Bandwidths are nominal, in GB/s (10^9 bytes) in one direction; `constants.yaml` says which share of them collectives reach.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    StringConstraints,
    model_validator,
)

Text = Annotated[str, StringConstraints(min_length=1)]
OneLine = Annotated[str, StringConstraints(pattern=r"^[^\r\n]+$")]
Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")]

MESH_DEVICES = 8
"""Devices of the largest mesh; rings are found by trying all orders of its devices, of which there are 5,040."""


class Section(BaseModel):
    """A section of a machine's description; it refuses unknown fields and silent conversions, and cannot change."""

    model_config = ConfigDict(
        extra="forbid", strict=True, frozen=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


class Switch(Section):
    """Switches that join every device to every other at the full bandwidth of its own links, such as NVSwitch."""

    gb_s: PositiveFloat
    """GB/s of one device in one direction."""
    multicast: bool = False
    """Whether the switches reduce and multicast by themselves (NVLink SHARP), and this is switched on."""


class Mesh(Section):
    """Direct links between devices: some pairs have several, some none."""

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
        # As many rounds as devices: a path over all of them is found by then.
        reached = {0}
        for _ in range(count):
            reached |= {other for device in reached for other, links in enumerate(self.links[device]) if links}
        if len(reached) < count:
            missing = min(set(range(count)) - reached)
            raise ValueError(f"device {missing} cannot be reached from device 0 over the links")
        return self


class Links(Section):
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


class Nic(Section):
    """A network interface of a node and the devices nearest to it, which share it."""

    gb_s: PositiveFloat
    """GB/s in one direction."""
    devices: Annotated[tuple[NonNegativeInt, ...], Field(min_length=1)]


class Tier(Section):
    """A group of nodes in the network: a leaf of a fat tree, a group of a dragonfly."""

    name: OneLine
    nodes: PositiveInt
    """Nodes of one such group, which neighbour one another in the numbering of the job."""
    taper: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """Bandwidth out of the group over the bandwidth of all its nodes together."""
    latency_us: Annotated[float, Field(ge=0.0)] = 0.0
    """Added latency of a message that leaves the group, microseconds."""


class Network(Section):
    """The network that joins the nodes."""

    source: Text
    kind: Name
    """A row of `network` in `constants.yaml`."""
    nodes: PositiveInt | None = None
    """Nodes of the machine; None where nobody says how many there are."""
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
