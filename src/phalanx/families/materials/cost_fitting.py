"""Ranks that share out structures by measured times: costs are fitted while training, and what ranks wait is told.

Every rank notes the time of its micro-batches. Every so many steps the notes of all ranks are added up, the first rank fits
costs to them, and all take over its figures for the same later step, one that none has begun to read. So ranks always agree,
whatever their clocks and libraries; which structures a step holds depends on none of this.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import numpy as np
import torch
import torch.distributed as dist
from pydantic import BaseModel, ConfigDict, Field, model_validator
from torch import Tensor

from phalanx.families.materials.compute_clock import ComputeClock, Timed
from phalanx.families.materials.data.graph_stream import GraphBatchStream
from phalanx.families.materials.data.structure_cost import SUMS, CostFit, CostModel, measured
from phalanx.hardware.device import HostCopy
from phalanx.layout.mesh import Mesh
from phalanx.layout.stage import Stage
from phalanx.training.metrics import RankTimes

_WARM_UP = 3
"""Steps of a process whose times are not taken: allocators and kernels settle."""
_LAUNCHED = 1
"""Steps that may have been launched since the one whose results are there (`training.asynchronous_steps`)."""
_MEMORY = 0.7
"""Weight of earlier fits beside a new one: what was measured three fits ago counts a third."""


_Finite = Annotated[float, Field(allow_inf_nan=False)]
_Cost = Annotated[float, Field(ge=0.0, allow_inf_nan=False)]


class BalancerState(BaseModel):
    """Fields that a balancer adds to a checkpoint; a run that shares nothing out has none."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    cost_sums: Annotated[list[_Finite], Field(min_length=SUMS, max_length=SUMS)] | None = None
    costs: Annotated[list[tuple[Annotated[int, Field(ge=0)], _Cost, _Cost, _Cost]], Field(min_length=1)] | None = None
    """From which step on which costs of an atom, an edge and a structure hold."""

    @model_validator(mode="after")
    def _complete(self) -> BalancerState:
        if (self.costs is None) != (self.cost_sums is None):
            raise ValueError("of costs and cost_sums one is missing")
        if any(node + edge == 0.0 for _, node, edge, _ in self.costs or ()):
            raise ValueError("a cost of nothing")
        return self


class Balancer:
    """Times one rank's micro-batches, and keeps the costs that its stream shares out by."""

    def __init__(
        self, stream: GraphBatchStream, mesh: Mesh, device: torch.device, *, every: int | None, each_waits: bool
    ) -> None:
        """every: steps between two fits; None keeps the declared costs. each_waits: whether ranks wait for each other
        after every micro-batch, not only after the last of a step."""
        self._stream = stream
        self._mesh = mesh
        self._device = device
        self._every = every
        self._each_waits = each_waits
        self._fit = CostFit(stream.order.cost, memory=_MEMORY)
        self._sums = np.zeros(SUMS)
        self._steps = 0
        self._clock: ComputeClock | None = None

    def watch(self, stage: Stage) -> None:
        """Time `stage` from now on."""
        self._clock = ComputeClock(stage, self._device, _sizes)

    def after(self, step: int) -> Callable[[], RankTimes]:
        """What ranks computed and waited in `step`, whose results are there. All ranks call it after every step.

        What this gives waits for the other ranks' times, and for steps that were launched by the time of this call.
        """
        assert self._clock is not None
        timed = self._clock.take(step)
        self._steps += 1
        if self._every is not None:
            if self._steps > _WARM_UP:
                self._sums += _sums(timed)
            if step % self._every == 0:
                self._agree(step)
        return self._waits(step, timed)

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps: measurements that all ranks share, and from which step which costs hold."""
        costs = [[first, cost.node, cost.edge, cost.graph] for first, cost in self._stream.costs]
        return {"cost_sums": self._fit.state.tolist(), "costs": costs}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from `state`. Costs that are not to be fitted any more are the declared ones again."""
        if self._every is None or "costs" not in state:
            return
        self._fit.state = np.array(state["cost_sums"])
        self._stream.costs = tuple((int(first), CostModel(*values)) for first, *values in state["costs"])

    def _agree(self, step: int) -> None:
        sums = torch.from_numpy(self._sums).to(self._device)
        dist.all_reduce(sums, group=self._mesh.world)
        self._sums = np.zeros(SUMS)
        self._fit.update(sums.cpu().numpy())
        found = self._fit.model()
        # Fits may differ in their last bits between machines; a structure must not be dealt out twice, or to nobody.
        agreed = torch.tensor([*self._fit.state, found.node, found.edge, found.graph], dtype=torch.float64)
        agreed = agreed.to(self._device)
        dist.broadcast(agreed, src=0, group=self._mesh.world)
        values = agreed.cpu().numpy()
        self._fit.state = values[:SUMS].copy()
        self._stream.use_costs(CostModel(*values[SUMS:].tolist()), first=step + _LAUNCHED + self._stream.reach)

    def _waits(self, step: int, timed: list[Timed]) -> Callable[[], RankTimes]:
        seconds = [one.seconds for one in timed] if self._each_waits else [sum(one.seconds for one in timed)]
        mean: Tensor = torch.tensor(seconds, dtype=torch.float64).to(self._device, non_blocking=True)
        longest = mean.clone()
        dist.all_reduce(mean, group=self._mesh.world)
        dist.all_reduce(longest, op=dist.ReduceOp.MAX, group=self._mesh.world)
        both = HostCopy(torch.stack((mean.sum() / dist.get_world_size(self._mesh.world), longest.sum())))
        expected = self._stream.imbalance(step)

        def times() -> RankTimes:
            computed, lasted = both.read()
            return RankTimes(
                compute_seconds=computed,
                rank_wait_seconds=lasted - computed,
                imbalance=lasted / computed if computed else 1.0,
                imbalance_expected=expected,
            )

        return times


def _sizes(species_N: Tensor, inputs: dict[str, Any]) -> tuple[float, ...]:
    """Atoms, edges and structures."""
    return float(len(species_N)), float(inputs["edges_2E"].shape[1]), float(len(inputs["cells_G33"]))


def _sums(timed: list[Timed]) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Of micro-batches that held anything."""
    rows = [(*one.sizes, one.seconds) for one in timed if one.seconds > 0.0]
    atoms, edges, graphs, seconds = np.array(rows, dtype=np.float64).reshape(-1, 4).T
    return measured(atoms, edges, graphs, seconds)
