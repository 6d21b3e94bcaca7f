"""Machines for tests of placement and of the collective model."""

from __future__ import annotations

from phalanx.hardware.machine import Machine, parse_machine


def switched(devices: int = 8, *, multicast: bool = False, network: str = "") -> Machine:
    """Nodes of `devices` devices on an NVLink 3 switch of 300 GB/s; network: the text of that part."""
    return parse_machine(
        "name: switched\nabout: for tests\ndocuments: {}\n"
        f"node: {{source: here, devices: {devices}, device: A100-80GB, cores_per_task: 1}}\n"
        f"links: {{source: here, kind: nvlink3, switch: {{gb_s: 300, multicast: {str(multicast).lower()}}}}}\n"
        f"{network}",
        "switched.yaml",
    )


def infiniband(devices: int, nics: int, gb_s: float, tiers: str = "[]") -> str:
    """A network of `nics` interfaces of `gb_s` GB/s on nodes of `devices` devices, each shared by neighbours."""
    share = devices // nics
    rows = ", ".join(f"{{gb_s: {gb_s}, devices: {list(range(nic * share, (nic + 1) * share))}}}" for nic in range(nics))
    return f"network: {{source: here, kind: infiniband, nics: [{rows}], tiers: {tiers}}}\n"


def cube_mesh() -> Machine:
    """Eight V100 with six NVLinks each, in the hybrid cube mesh of DGX-1 and p3dn.24xlarge (`nvidia-smi topo -m`)."""
    return parse_machine(
        """\
name: cube-mesh
about: 8 V100, six NVLinks each
documents: {}
node: {source: here, devices: 8, device: V100, cores_per_task: 1}
links:
  source: here
  kind: nvlink2
  mesh:
    gb_s: 25
    links:
      - [0, 1, 1, 2, 2, 0, 0, 0]
      - [1, 0, 2, 1, 0, 2, 0, 0]
      - [1, 2, 0, 2, 0, 0, 1, 0]
      - [2, 1, 2, 0, 0, 0, 0, 1]
      - [2, 0, 0, 0, 0, 1, 1, 2]
      - [0, 2, 0, 0, 1, 0, 2, 1]
      - [0, 0, 1, 0, 1, 2, 0, 2]
      - [0, 0, 0, 1, 2, 1, 2, 0]
slurm: null
""",
        "cube-mesh.yaml",
    )
