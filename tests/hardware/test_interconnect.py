"""Links and networks as descriptions: the shipped ones, mistakes, and machines for plans only."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from described import cube_mesh, infiniband, switched
from phalanx.errors import ConfigError
from phalanx.hardware.collectives import default_constants
from phalanx.hardware.device_facts import device_facts
from phalanx.hardware.machine import described_names, load_machine, machine_names, parse_machine
from phalanx.hardware.topology import place_groups
from phalanx.launch.job_script import Job, launch_script

DOCUMENT = Path(__file__).parents[2] / "docs" / "reference" / "clusters.md"


@pytest.mark.parametrize("name", described_names())
def test_every_machine_can_be_planned_for(name: str) -> None:
    machine = load_machine(name)
    assert machine.name == name
    assert device_facts(machine.node.device).peak_tflops["bf16"] > 0
    assert default_constants(machine).launch_s > 0
    groups = place_groups(machine, [1, machine.node.devices], 1)
    assert np.all(groups.nodes == 1) and np.isfinite(groups.ring_b_s[1])
    described = [part for part in (machine.node, machine.links, machine.network) if part is not None]
    for part in described:
        assert set(re.findall(r"\[(\w+)\]", part.source)) <= set(machine.documents), part.source


def test_machines_without_slurm_are_described_but_not_launched_on() -> None:
    plans_only = set(described_names()) - set(machine_names())
    assert plans_only == {"aac-mi250", "h200-x4", "h200-x8", "selene"}
    for name in described_names():
        assert (load_machine(name).slurm is None) == (name in plans_only)
    with pytest.raises(ConfigError, match=r"selene is described for plans only.*phalanx train"):
        launch_script(
            load_machine("selene"), Job(Path("run.yaml"), 2, Path("/"), Path("run"), seconds=3600, account="abc")
        )


def test_an_unknown_machine_is_told_of_all_that_are_described() -> None:
    with pytest.raises(ConfigError, match=r"give one of dgx-h100.*\nnearest: selene\nfor plans only: aac-mi250"):
        load_machine("selen")


@pytest.mark.parametrize("name", ["frontier", "lumi", "aac-mi250"])
def test_an_mi250_node_has_the_links_of_its_diagram(name: str) -> None:
    machine = load_machine(name)
    assert machine.links is not None and machine.links.mesh is not None and machine.network is not None
    links = machine.links.mesh.links
    pairs = {(a, b): links[a][b] for a in range(8) for b in range(a) if links[a][b]}
    siblings, single = [(1, 0), (3, 2), (5, 4), (7, 6)], [(2, 0), (3, 1), (5, 1), (6, 4), (7, 3), (7, 5)]
    assert pairs == dict.fromkeys(siblings, 4) | dict.fromkeys([(6, 0), (4, 2)], 2) | dict.fromkeys(single, 1)
    # Four interfaces of 25 GB/s, one a module: 12.5 GB/s a device.
    assert sum(nic.gb_s for nic in machine.network.nics) == 100
    assert [nic.devices for nic in machine.network.nics] == [(0, 1), (2, 3), (4, 5), (6, 7)]


def test_a_switch_and_a_full_mesh() -> None:
    h100, mi300x = load_machine("dgx-h100").links, load_machine("mi300x").links
    assert h100 is not None and h100.switch is not None and (h100.switch.gb_s, h100.switch.multicast) == (450, True)
    h200 = load_machine("h200-x4").links
    assert h200 is not None and h200.switch is not None and not h200.switch.multicast
    assert mi300x is not None and mi300x.mesh is not None
    assert np.array_equal(np.array(mi300x.mesh.links), 1 - np.eye(8))


def test_the_example_of_the_document_is_a_description() -> None:
    text = DOCUMENT.read_text("utf-8")
    (example,) = [block for block in re.findall(r"```yaml\n(.*?)```", text, re.DOTALL) if block.startswith("name:")]
    machine = parse_machine(example, "example.yaml")
    assert machine.links is not None and machine.network is not None and machine.slurm is None
    groups = place_groups(machine, [8, 64], [1, 8])
    assert list(groups.nodes) == [1, 64] and default_constants(machine).efficiency_across < 1
    mesh = re.search(r"```yaml\n(links:.*?)```", text, re.DOTALL)
    assert mesh is not None
    whole = re.sub(r"links:\n.*?\n\n", mesh[1] + "\n", example, count=1, flags=re.DOTALL)
    links = parse_machine(whole.replace("devices: 8 ", "devices: 4 ").replace(MANY_NICS, ONE_NIC), "mesh.yaml").links
    assert links is not None and links.mesh is not None and len(links.mesh.links) == 4


MANY_NICS = """\
    - {gb_s: 50, devices: [0, 1, 2, 3]}      # an interface and the devices that share it
    - {gb_s: 50, devices: [4, 5, 6, 7]}
"""
ONE_NIC = "    - {gb_s: 50, devices: [0, 1, 2, 3]}\n"

MESH = """\
name: pair
about: two devices
documents: {}
node: {source: here, devices: 2, device: MI300X, cores_per_task: 1}
links: {source: here, kind: xgmi-mi300, mesh: {gb_s: 64, links: [[0, 1], [1, 0]]}}
network: {source: here, kind: roce, nics: [{gb_s: 50, devices: [0]}, {gb_s: 50, devices: [1]}], tiers: []}
"""


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("[1, 0]]", "[1, 1]]", r"links.mesh: links\[1\]\[1\]=1: a device has no link to itself"),
        ("[1, 0]]", "[2, 0]]", r"links\[1\]\[0\]=2 and links\[0\]\[1\]=1 must be equal"),
        ("[1, 0]]", "[1, 0, 0]]", r"links\[1\] has 3 numbers for 2 devices"),
        ("[[0, 1], [1, 0]]", "[[0, 0], [0, 0]]", "device 1 cannot be reached from device 0"),
        ("devices: 2,", "devices: 3,", "links.mesh.links has 2 rows for 3 devices"),
        (", {gb_s: 50, devices: [1]}", "", r"network.nics name devices \[0\]; each of the devices 0 to 1 needs one"),
        ("mesh: {gb_s: 64", "switch: {gb_s: 1}, mesh: {gb_s: 64", "give either switch or mesh"),
        ("gb_s: 64", "gb_s: -1", "links.mesh.gb_s=-1"),
        ("tiers: []", "tiers: [{name: a, nodes: 8}, {name: b, nodes: 4}]", r"tiers have \[8, 4\] nodes"),
        ("tiers: []", "tiers: [{name: a, nodes: 8, taper: 2.0}]", "taper=2.0"),
        ("kind: roce", "kinds: roce", "network.kinds is not a field"),
    ],
)
def test_mistakes(old: str, new: str, message: str) -> None:
    parse_machine(MESH, "pair.yaml")
    assert old in MESH
    with pytest.raises(ConfigError, match=message):
        parse_machine(MESH.replace(old, new), "pair.yaml")


def test_kinds_without_constants_are_refused_when_they_are_needed() -> None:
    machine = parse_machine(MESH.replace("kind: roce", "kind: carrier-pigeon"), "pair.yaml")
    with pytest.raises(ConfigError, match=r"pair: network\.kind=carrier-pigeon is not in constants\.yaml.*infiniband"):
        default_constants(machine)


def test_what_a_description_lacks_is_missed_when_a_group_needs_it() -> None:
    with pytest.raises(ConfigError, match="a group of 16 ranks, 1 apart, needs 2 nodes of 8 devices"):
        place_groups(switched(), [8, 16], 1)
    unlinked = parse_machine(re.sub("links:.*\n", "", MESH), "pair.yaml")
    assert place_groups(unlinked, 4, 2).nodes == 4
    with pytest.raises(ConfigError, match="pair describes no links within a node"):
        place_groups(unlinked, 2, 1)
    assert (
        place_groups(switched(network=infiniband(8, 4, 25)), 16, 1).nodes == 2
        and place_groups(cube_mesh(), 8, 1).nodes == 1
    )
