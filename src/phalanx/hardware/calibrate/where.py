"""Finds the description of this machine for a profile: the one that was named, a shipped one that fits, or a plain one."""

from __future__ import annotations

import re

import torch

from phalanx.errors import ConfigError
from phalanx.hardware.device import device_kind, device_name
from phalanx.hardware.machine import Machine, Node, described_names, load_machine
from phalanx.hardware.network import Links, Switch


def describe_this_machine(device: torch.device, per_node: int, cluster: str | None) -> Machine:
    """Return the machine that `device` belongs to.

    per_node: ranks on this node. cluster: a shipped name or a description's path. Raises ConfigError for a description of
    other devices, or of fewer on a node.
    """
    name = device_kind(device_name(device))
    if cluster is None:
        return _find_shipped(name, per_node) or plain_machine(name, per_node)
    machine = load_machine(cluster)
    if machine.node.device != name:
        raise ConfigError(
            f"--cluster {cluster} has {machine.node.device} devices, this is {name} ({device_name(device)}); "
            "leave --cluster out, or give the description of this machine"
        )
    if machine.node.devices < per_node:
        raise ConfigError(
            f"--cluster {cluster} has {machine.node.devices} devices a node, {per_node} ranks run on this one"
        )
    return machine


def _find_shipped(device: str, per_node: int) -> Machine | None:
    """Return the smallest shipped description of such devices; None where there is none."""
    machines = [load_machine(name) for name in described_names()]
    fitting = [one for one in machines if one.node.device == device and one.node.devices >= per_node]
    return min(fitting, key=lambda one: (one.node.devices, one.name), default=None)


def plain_machine(device: str, per_node: int) -> Machine:
    """Return a machine of one node whose devices all reach one another alike."""
    name = re.sub("[^a-z0-9]+", "-", device.lower()).strip("-")
    # Measured rates are stored as shares of this nominal bandwidth, so any figure will do.
    links = Links(source="assumption", kind="nvlink3", switch=Switch(gb_s=100.0))
    return Machine(
        name=name if name and name[0].isalpha() else f"device-{name}",
        about=f"one node of {device}",
        documents={},
        node=Node(source="this machine", devices=max(per_node, 1), device=device, cores_per_task=1),
        links=links,
        slurm=None,
    )
