"""The ranks of a run, the process group they join, and the groups of each axis of a layout.

Neighbouring ranks share the axes that talk most: tensor-parallel ranks are innermost, pipeline ranks outermost.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from phalanx.errors import ConfigError, PhalanxError
from phalanx.hardware.host import listening_socket
from phalanx.launch.parent import STORE_SOCKET
from phalanx.layout.data_parallel.task_heads import branch_groups
from phalanx.layout.spec import (
    DATA_AXES,
    EXPERT_AXES,
    GRADIENT_AXES,
    MESH_ORDER,
    SHARDING_AXES,
    SINGLE_STAGE,
    ResolvedLayout,
)
from phalanx.torch_compat.process_groups import new_group, run_gloo_in_order


@dataclass(frozen=True)
class Ranks:
    """Place of this process among all ranks of the run, as the launcher says."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    ranks_per_node: int | None = None
    """Ranks on this node; None where the launcher does not say."""

    @property
    def first(self) -> bool:
        """Whether this rank does what is done once: printing and writing logs."""
        return self.rank == 0


def ranks_from_environment() -> Ranks:
    """Read torchrun's variables (RANK, WORLD_SIZE, LOCAL_RANK), else Slurm's of a multi-task step, else one rank.

    Raises ConfigError when only some of them are set, or to what cannot be.
    """
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    found = [name for name in names if name in os.environ]
    if found and len(found) < len(names):
        missing = ", ".join(name for name in names if name not in os.environ)
        raise ConfigError(
            f"environment has {', '.join(found)} but not {missing}; start with torchrun or srun, or unset them"
        )
    if found:
        # torchrun sets it; other launchers that set the three may not.
        on_node = os.environ.get("LOCAL_WORLD_SIZE")
        rank, world, local = (_read_number(name) for name in names)
        return _check_rank(
            Ranks(rank, world, local, None if on_node is None else _read_number("LOCAL_WORLD_SIZE")), *names[:2]
        )
    # The step's own count: a step may be smaller than its job, whose SLURM_NTASKS `srun --preserve-env` hands on.
    size = "SLURM_STEP_NUM_TASKS"
    if size in os.environ and _read_number(size) > 1:
        rank, world, local = (_read_number(name) for name in ("SLURM_PROCID", size, "SLURM_LOCALID"))
        on_node = os.environ.get("SLURM_NTASKS_PER_NODE")
        ranks = Ranks(rank, world, local, int(on_node) if on_node and on_node.isdecimal() else None)
        return _check_rank(ranks, "SLURM_PROCID", size)
    return Ranks()


def _read_number(name: str) -> int:
    """Return a variable that the launcher sets. Raises ConfigError where it is missing or no whole number."""
    text = os.environ.get(name)
    if text is None or not (text.isascii() and text.isdecimal()):
        found = "is not set" if text is None else f"is {text!r}, no whole number"
        raise ConfigError(f"environment variable {name} {found}; start with torchrun or srun, or unset what they set")
    return int(text)


def _check_rank(ranks: Ranks, name: str, size: str) -> Ranks:
    """Return `ranks`, whose number and count these variables hold. Raises ConfigError where there is no such rank."""
    if ranks.rank >= ranks.world_size:
        raise ConfigError(f"{name}={ranks.rank} is not below {size}={ranks.world_size}; ranks count from 0")
    return ranks


def join_process_group(
    ranks: Ranks, device: torch.device, *, timeout_s: float = 600.0, store: dist.Store | None = None
) -> None:
    """Join the default process group (gloo on the CPU, the device's own backend beside gloo elsewhere).

    store: through which the ranks have met already; else they meet now. Raises as `open_rendezvous` does.
    """
    if device.type != "cpu":
        # Groups without a bound device take the current one.
        torch.accelerator.set_device_index(device.index or 0)
    if ranks.world_size == 1 or dist.is_initialized():
        return
    if ranks.ranks_per_node == ranks.world_size and "lo" in (name for _, name in socket.if_nameindex()):
        # All ranks are here: gloo need not listen where others can reach it.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if store is None:
        store = open_rendezvous(ranks, timeout_s=timeout_s)
    backend = "gloo"
    if device.type != "cpu":
        backend = f"cpu:gloo,{device.type}:{dist.get_default_backend_for_device(device)}"
    run_gloo_in_order()
    with _explain_meeting(ranks):
        # No device is bound to the group: with one, a new group has to be made by all ranks of the run, not by its members.
        dist.init_process_group(
            backend,
            store=store,
            rank=ranks.rank,
            world_size=ranks.world_size,
            timeout=timedelta(seconds=timeout_s),
        )


def open_rendezvous(ranks: Ranks, *, timeout_s: float) -> dist.Store:
    """Return the store through which several ranks find each other, at MASTER_ADDR and MASTER_PORT.

    Its keys carry torchrun's restart count: torchrun keeps one store for all attempts, and a restarted gloo rank would
    otherwise find the addresses of the dead attempt. Raises ConfigError where nobody says where to meet, PhalanxError where
    the others are not to be found there.
    """
    address, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    if address is None or port is None:
        raise ConfigError(
            "MASTER_ADDR and MASTER_PORT are not set; torchrun sets them, under srun export them in the job"
        )
    if not 0 < _read_number("MASTER_PORT") < 2**16:
        raise ConfigError(f"MASTER_PORT={port} is no port; take one between 1 and {2**16 - 1}")
    # torchrun's agent listens itself then, and every rank is a client.
    agent_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    timeout = timedelta(seconds=timeout_s)
    with _explain_meeting(ranks):
        if ranks.first and not agent_store:
            one_machine = ranks.ranks_per_node == ranks.world_size
            listener = _inherited_socket() or listening_socket(address, int(port), one_machine=one_machine)
            tcp = dist.TCPStore(address, int(port), is_master=True, timeout=timeout, master_listen_fd=listener)
        else:
            tcp = dist.TCPStore(address, int(port), is_master=False, timeout=timeout)
    attempt = (
        f"{os.environ.get('TORCHELASTIC_RUN_ID', 'run')}/attempt_{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    )
    return dist.PrefixStore(attempt, tcp)


def _inherited_socket() -> int | None:
    """Return the descriptor that the launcher left listening for this rank, once; None without one."""
    # The store takes it over: a second one must not.
    text = os.environ.pop(STORE_SOCKET, None)
    if text is None or not text.isdecimal():
        return None
    # Processes that this rank starts have no use for it.
    os.set_inheritable(int(text), False)
    return int(text)


@contextmanager
def _explain_meeting(ranks: Ranks) -> Iterator[None]:
    """Raise PhalanxError for ranks that do not come together in here."""
    try:
        yield
    except (dist.DistError, socket.gaierror) as error:
        said = str(error).strip().partition("\n")[0]
        raise PhalanxError(
            f"rank {ranks.rank} of {ranks.world_size} does not meet the others at "
            f"MASTER_ADDR={os.environ.get('MASTER_ADDR')} MASTER_PORT={os.environ.get('MASTER_PORT')}: {said}"
        ) from error


def leave_process_group() -> None:
    """Leave the default process group, where this rank has joined one, with the others.

    Not after an error of this rank alone: its collectives would wait for ranks that know nothing of it, and what it has to
    say would never be read.
    """
    if dist.is_initialized():
        dist.destroy_process_group()


@dataclass(frozen=True)
class Axis:
    """This rank's group along one axis of the layout."""

    name: str
    rank: int = 0
    """Place along the axis."""
    size: int = 1
    group: dist.ProcessGroup | None = None
    """None where the axis has one rank."""
    ranks: tuple[int, ...] = (0,)
    """Global ranks, in the order of the axis."""
    group_name: str = ""
    """The name by which compiled code finds the group."""
    links: tuple[dist.ProcessGroup, ...] = ()
    """Further groups of the same ranks, each with its own order of messages; see `_make_links`."""


@dataclass(frozen=True)
class Mesh:
    """All axes of a layout as this rank sees them."""

    pp: Axis
    dp_replicate: Axis
    dp_shard: Axis
    cp: Axis
    tp: Axis
    shards: Axis
    """Ranks that share one copy of parameters, gradients or optimizer state: `dp_shard` and `cp` together, or one rank
    where nothing is sharded."""
    replicas: Axis
    """Ranks that hold the same share: `dp_replicate`, with `dp_shard` and `cp` too where nothing is sharded."""
    tie: Axis
    """First and last stage, for a parameter that both hold."""
    ep: Axis = Axis("ep")
    """Ranks over which the experts of a mixture are sharded; each expert over `expert_tp` neighbours among them."""
    ep_across: Axis = Axis("ep_across")
    """Ranks of `ep` of like place on all nodes, where rows go to the node of their expert first; else one rank."""
    ep_within: Axis = Axis("ep_within")
    """Ranks of `ep` on this node, in that case."""
    expert_shards: Axis = Axis("expert_shards")
    """Ranks that share one copy of what `zero` shards of the same experts."""
    expert_replicas: Axis = Axis("expert_replicas")
    """Ranks that hold the same share of the same experts."""
    expert_data: DeviceMesh | None = None
    """[replicas, shards] of the ranks that hold the same experts, for FSDP2; None where that is one rank."""
    branch: Axis = Axis("branch")
    """Ranks that hold the heads of the same branches, where `layout.data_parallel.task_heads` places them; else one rank."""
    data: DeviceMesh | None = None
    """[replicas, shards] for FSDP2; None where both are one rank."""
    world: dist.ProcessGroup | None = None
    """All ranks; None where there is one."""

    @property
    def axes(self) -> tuple[Axis, ...]:
        """All axes; of those that share a group, the one that it is known by comes first."""
        degrees = (getattr(self, name) for name in reversed(MESH_ORDER))
        experts = (self.ep, self.ep_across, self.ep_within, self.expert_shards, self.expert_replicas)
        return *degrees, self.shards, self.replicas, *experts, self.tie, self.branch

    @property
    def data_rank(self) -> int:
        """Number of the share of each global batch that this rank reads."""
        return self.dp_replicate.rank * self.dp_shard.size + self.dp_shard.rank

    @property
    def reads_first(self) -> bool:
        """Whether this rank is the first of those that read the same samples."""
        return self.cp.rank == self.tp.rank == self.pp.rank == 0


ONE_RANK = Mesh(
    pp=Axis("pp"),
    dp_replicate=Axis("dp_replicate"),
    dp_shard=Axis("dp_shard"),
    cp=Axis("cp"),
    tp=Axis("tp"),
    shards=Axis("shards"),
    replicas=Axis("replicas"),
    tie=Axis("tie"),
)
"""The mesh of a single rank."""


Groups = dict[tuple[tuple[int, ...], str], dist.ProcessGroup]
"""Process groups by their global ranks; of groups of the same ranks, by the name of the link as well."""


def build_mesh(layout: ResolvedLayout, device: torch.device, made: Groups | None = None) -> Mesh:
    """Return the axes of `layout` among the ranks of the default process group.

    Each rank makes only the groups it is in, which costs the same however many ranks there are. made: groups of earlier
    meshes of this process, to use again and add to (a group cannot be made twice under one store).
    """
    if layout.world_size == 1:
        return ONE_RANK
    assert dist.get_world_size() == layout.world_size
    sizes = [getattr(layout, name) for name in MESH_ORDER]
    # The rank grid: global ranks by their places along all axes.
    grid = torch.arange(layout.world_size).view(sizes)
    here = [int(i) for i in torch.unravel_index(torch.tensor(dist.get_rank()), sizes)]
    made = {} if made is None else made

    def ranks_along(*axes: str) -> torch.Tensor:
        """Return the ranks that differ from this one in their places along `axes` alone."""
        return grid[tuple(slice(None) if name in axes else at for name, at in zip(MESH_ORDER, here, strict=True))]

    def axis(name: str, *axes: str) -> Axis:
        return _make_axis(name, ranks_along(*axes).flatten().tolist(), made)

    axes = {name: axis(name, name) for name in MESH_ORDER}
    if layout.pp > 1 and layout.schedule not in SINGLE_STAGE:
        axes["pp"] = replace(axes["pp"], links=_make_links(axes["pp"], device, made))
    sharding = SHARDING_AXES if layout.zero else ()
    shards = axis("shards", *sharding)
    replicas = axis("replicas", *(name for name in GRADIENT_AXES if name not in sharding))
    members = ranks_along(*GRADIENT_AXES).reshape(replicas.size, shards.size)
    ends = [int(grid[(stage, *here[1:])]) for stage in (0, layout.pp - 1)]
    tie = _make_axis("tie", ends, made) if layout.pp > 1 and dist.get_rank() in ends else Axis("tie")
    experts, expert_data = _expert_axes(layout, ranks_along("dp_replicate", *EXPERT_AXES), device, made)
    ep, expert_shards, expert_replicas = experts
    ep_across, ep_within = _node_axes(ep, layout.ep_node, made)
    return Mesh(
        **axes,
        ep=ep,
        ep_across=ep_across,
        ep_within=ep_within,
        expert_shards=expert_shards,
        expert_replicas=expert_replicas,
        expert_data=expert_data,
        shards=shards,
        replicas=replicas,
        data=_data_mesh(members, replicas, shards, device, made),
        tie=tie,
        branch=_branch_axis(layout, ranks_along(*DATA_AXES).flatten().tolist(), made),
        world=dist.group.WORLD,
    )


def _expert_axes(
    layout: ResolvedLayout, ranks: torch.Tensor, device: torch.device, made: Groups
) -> tuple[tuple[Axis, Axis, Axis], DeviceMesh | None]:
    """Return the axes of experts (ranks that divide them, shards and replicas of this rank's) and FSDP2's mesh.

    ranks: of this stage, [dp_replicate, *EXPERT_AXES].
    """
    if layout.ep == 1:
        return (Axis("ep"), Axis("expert_shards"), Axis("expert_replicas")), None
    # [replicas of everything, copies of the experts, ranks with different experts]: neighbours exchange tokens.
    grid = ranks.reshape(layout.dp_replicate, -1, layout.ep * layout.expert_tp)
    replica, copy, place = (int(i) for i in (grid == dist.get_rank()).nonzero()[0])
    # Copies share what ZeRO shards, as dp_shard and cp do elsewhere; without ZeRO all are replicas.
    members = grid[:, :, place] if layout.zero else grid[:, :, place].reshape(-1, 1)
    column = copy if layout.zero else 0
    shards = _make_axis("expert_shards", members[(members == dist.get_rank()).any(1)].flatten().tolist(), made)
    replicas = _make_axis("expert_replicas", members[:, column].tolist(), made)
    ep = _make_axis("ep", grid[replica, copy].tolist(), made)
    return (ep, shards, replicas), _data_mesh(members, replicas, shards, device, made)


def _node_axes(ep: Axis, node: int, made: Groups) -> tuple[Axis, Axis]:
    """Return the ranks of `ep` of this rank's place on all nodes, and those on its node of `node` ranks; itself where 1."""
    if node == 1:
        return Axis("ep_across"), Axis("ep_within")
    members, place = list(ep.ranks), ep.rank % node
    first = ep.rank - place
    return (
        _make_axis("ep_across", members[place::node], made),
        _make_axis("ep_within", members[first : first + node], made),
    )


def _branch_axis(layout: ResolvedLayout, readers: list[int], made: Groups) -> Axis:
    """Return the ranks that hold the same task heads as this one. readers: ranks by the share of the batch they read."""
    groups = branch_groups(layout)
    if groups is None:
        return Axis("branch")
    # Groups count ranks by the share of the batch that they read, not by their global numbers.
    members = groups.of_rank(readers.index(dist.get_rank())).ranks
    return _make_axis("branch", readers[members.start : members.stop], made)


def _make_axis(name: str, ranks: list[int], made: Groups) -> Axis:
    place = ranks.index(dist.get_rank())
    # A group of one would cost connections and buffers for nothing.
    if len(ranks) == 1:
        return Axis(name, place, ranks=tuple(ranks))
    group = _find_group(ranks, made)
    return Axis(name, place, len(ranks), group, tuple(ranks), group.group_name)


def _data_mesh(
    members: torch.Tensor, replicas: Axis, shards: Axis, device: torch.device, made: Groups
) -> DeviceMesh | None:
    if members.numel() == 1:
        return None
    # FSDP2 takes two dims for replicas of shards; with one dim it shards alone.
    if replicas.group is None:
        assert shards.group is not None
        return DeviceMesh.from_group(shards.group, device.type, mesh_dim_names=("shards",))
    alone = shards.group or _find_group([dist.get_rank()], made)
    return DeviceMesh.from_group(
        [replicas.group, alone], device.type, mesh=members, mesh_dim_names=("replicas", "shards")
    )


def _make_links(pp: Axis, device: torch.device, made: Groups) -> tuple[dist.ProcessGroup, ...]:
    """Make groups for activations and for gradients, those sent by even and by odd ranks.

    The messages of one group go in order: a rank that waits for its neighbour to take what it sends could not receive
    meanwhile. With these, what a rank sends and what it receives never share a group, where the number of ranks is even.

    NCCL and RCCL connect a group when it is first used, and wait for all of its ranks. In a pipeline of over two ranks the
    others would be waiting in other groups by then, for ever; so all ranks meet in each group here.
    """
    names = [f"pp {what} of {who} ranks" for what in ("activations", "gradients") for who in ("even", "odd")]
    fresh = [name for name in names if (pp.ranks, name) not in made]
    for name in fresh:
        dist.all_reduce(torch.zeros(1, device=device), group=_find_group(list(pp.ranks), made, link=name))
    return tuple(made[pp.ranks, name] for name in names)


def _find_group(ranks: list[int], made: Groups, link: str = "") -> dist.ProcessGroup:
    """Return the group of `ranks`. Axes with the same ranks share one: each costs connections and buffers."""
    key = (tuple(ranks), link)
    if key not in made:
        made[key] = new_group(ranks, link or "ranks")
    return made[key]
