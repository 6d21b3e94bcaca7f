"""Ranks that share out structures by measured times: costs are fitted while training, and what ranks wait is told.

Every rank notes the time of its micro-batches. Every so many steps the notes of all ranks are added up, the first rank fits
costs to them, and all take over its figures for the same later step, one that none has begun to read. So ranks always agree,
whatever their clocks and libraries; which structures a step holds depends on none of this.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from pydantic import BaseModel, ConfigDict, Field, model_validator
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from phalanx.families.materials.data.balance import CostModel
from phalanx.families.materials.data.graph_stream import GraphBatchStream
from phalanx.hardware.device import HostCopy, Moment
from phalanx.layout.layout_model import Stage, TrainingPass
from phalanx.layout.mesh import Mesh
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

        def count_inputs(species_N: Tensor, inputs: dict[str, Any]) -> tuple[float, ...]:
            """Return the atoms, edges and structures of a micro-batch."""
            return float(len(species_N)), float(inputs["edges_2E"].shape[1]), float(len(inputs["cells_G33"]))

        self._clock = ComputeClock(stage, self._device, count_inputs)

    def after(self, step: int) -> Callable[[], RankTimes]:
        """Return what gives the times that ranks computed and waited in `step`, whose results are there. All ranks call it
        after every step.

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
        # Where ranks wait for each other after every micro-batch, the slowest of each counts; else the slowest step.
        seconds = [one.seconds for one in timed] if self._each_waits else [sum(one.seconds for one in timed)]
        mean: Tensor = torch.tensor(seconds, dtype=torch.float64).to(self._device, non_blocking=True)
        longest = mean.clone()
        dist.all_reduce(mean, group=self._mesh.world)
        dist.all_reduce(longest, op=dist.ReduceOp.MAX, group=self._mesh.world)
        # Read later, when it is there anyway: reading now would wait for the device.
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

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps: measurements that all ranks share, and from which step on which costs hold."""
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
        # The only wait for the device here, once every so many steps.
        self._fit.update(sums.cpu().numpy())
        found = self._fit.model()
        # Fits may differ in their last bits between machines; a structure must not be dealt out twice, or to nobody.
        agreed = torch.tensor([*self._fit.state, found.node, found.edge, found.graph], dtype=torch.float64)
        agreed = agreed.to(self._device)
        dist.broadcast(agreed, src=0, group=self._mesh.world)
        values = agreed.cpu().numpy()
        self._fit.state = values[:SUMS].copy()
        self._stream.use_costs(CostModel(*values[SUMS:].tolist()), first=step + _LAUNCHED + self._stream.reach)


def _sums(timed: list[TimedMicrobatch]) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Return `sum_timings` of the micro-batches that held anything."""
    rows = [(*one.sizes, one.seconds) for one in timed if one.seconds > 0.0]
    atoms, edges, graphs, seconds = np.array(rows, dtype=np.float64).reshape(-1, 4).T
    return sum_timings(atoms, edges, graphs, seconds)


Sizes = tuple[float, ...]


@dataclass(frozen=True)
class TimedMicrobatch:
    """One micro-batch."""

    sizes: Sizes
    """Its atoms, edges and structures."""
    seconds: float
    """Forward and backward pass; 0 where nothing was to be computed."""


@dataclass
class _Span:
    step: int
    sizes: Sizes
    start: Moment
    end: Moment | None = None

    @property
    def seconds(self) -> float:
        # Without any gradient nothing ended it: nothing was to be computed.
        return 0.0 if self.end is None else self.end.seconds_since(self.start)


class ComputeClock:
    """Times every micro-batch that `stage` is trained on, from now on.

    Of a stage that gathers parameters block by block, the waits for these gathers count as computing.
    """

    def __init__(self, stage: Stage, device: torch.device, sizes: Callable[[Any, dict[str, Any]], Sizes]) -> None:
        """sizes: what to note of a micro-batch, from the stage's first input and those by name."""
        self._device = device
        self._sizes = sizes
        self._spans: list[_Span] = []
        self._watched: set[nn.Parameter] = set()
        # Behind the hooks of data parallelism, which come first: the parameters are there.
        stage.register_forward_pre_hook(self._begin, with_kwargs=True)
        for module in stage.modules():
            if module is stage or isinstance(module, FSDPModule):
                module.register_forward_pre_hook(self._watch)

    def take(self, step: int) -> list[TimedMicrobatch]:
        """Return the micro-batches of `step`, in order, and forget earlier ones; the device must have computed them."""
        spans = [span for span in self._spans if span.step == step]
        self._spans = [span for span in self._spans if span.step > step]
        return [TimedMicrobatch(span.sizes, span.seconds) for span in spans]

    def _begin(self, stage: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        training: TrainingPass | None = named.get("training")
        if training is not None:
            self._spans.append(_Span(training.step, self._sizes(args[0], named), Moment(self._device)))

    def _watch(self, module: nn.Module, _: tuple[Any, ...]) -> None:
        """Note parameters that this unit has gathered for the first time: their gradients end a micro-batch."""
        if not module.training:
            return
        fresh = [
            parameter
            for parameter in module.parameters()
            if parameter.requires_grad and not isinstance(parameter, DTensor) and parameter not in self._watched
        ]
        if fresh:
            self._watched.update(fresh)
            register_multi_grad_hook(fresh, self._end)

    def _end(self, _: Any) -> None:
        # Several units end one after another: the last one counts.
        if self._spans:
            self._spans[-1].end = Moment(self._device)


FloatArray = npt.NDArray[np.float64]
_TERMS = 4
"""Atoms, edges, structures, and a constant for each micro-batch."""
SUMS = _TERMS * _TERMS + _TERMS + 1
"""Numbers that `sum_timings` returns."""


def sum_timings(atoms: FloatArray, edges: FloatArray, graphs: FloatArray, seconds: FloatArray) -> FloatArray:
    """Return sums [SUMS] over the micro-batches that one rank timed [n], for `CostFit.update`, to be added over ranks."""
    terms = np.stack([atoms, edges, graphs, np.ones_like(atoms)], axis=1)
    return np.concatenate(((terms.T @ terms).ravel(), terms.T @ seconds, [seconds @ seconds]))


class CostFit:
    """Recursive least squares with forgetting: each update multiplies what came before by `memory`.

    Atoms and edges go together in most data, so that time alone may not tell their costs apart. What the measurements
    leave open is taken from the ratios of `prior`, which weigh as much as `trust` times the measurements. No cost is
    negative.
    """

    def __init__(self, prior: CostModel, *, memory: float = 0.99, trust: float = 1e-4) -> None:
        """Start without a measurement."""
        assert 0.0 < memory <= 1.0
        self._prior = np.array([prior.node, prior.edge, prior.graph, 0.0])
        self._fallback = prior
        self._memory = memory
        self._trust = trust
        self.state = np.zeros(SUMS)
        """Sums so far [SUMS]: all there is to save and restore."""

    def update(self, sums: FloatArray) -> None:
        """Take in `sum_timings` of one step, added over ranks."""
        assert sums.shape == (SUMS,)
        # What came before fades: clocks and neighbours on a machine change while a run goes on.
        self.state = self._memory * self.state + sums

    def seconds(self) -> FloatArray:
        """Return the seconds of an atom, an edge, a structure and a micro-batch [4]; zeros before the first measurement."""
        matrix = self.state[: _TERMS**2].reshape(_TERMS, _TERMS)
        right, squares = self.state[_TERMS**2 : -1], self.state[-1]
        if squares == 0.0:
            return np.zeros(_TERMS)
        # The prior knows ratios alone: its scale is the one that explains the times best.
        scale = (self._prior @ right) / (self._prior @ matrix @ self._prior)
        weight = self._trust * np.diag(matrix)
        # The constant has no declared cost: it is only held at 0 until several micro-batches tell it from the rest.
        weight[3] = 0.0 if matrix[3, 3] > 1.0 else self._trust
        return _solve_non_negative(matrix + np.diag(weight), right + weight * scale * self._prior)

    def model(self) -> CostModel:
        """Return the costs as measured, in seconds; the prior before the first measurement."""
        node, edge, graph, _ = self.seconds().tolist()
        # A cost model needs one of these two above 0, and before the first measurement both are 0.
        return CostModel(node, edge, graph) if max(node, edge) > 0.0 else self._fallback


def _solve_non_negative(matrix: FloatArray, right: FloatArray) -> FloatArray:
    """Return the x >= 0 with least x' matrix x / 2 - right x, by trying which of its few entries are zero."""
    # Fifteen systems of at most four unknowns: trying all is simpler than an active-set method, and exact.
    best, least = np.zeros(len(right)), 0.0
    # Scaled so that the diagonal is one: atoms and edges are many, structures few.
    size = np.sqrt(np.maximum(np.diag(matrix), 1e-300))
    scaled, target = matrix / np.outer(size, size), right / size
    for count in range(1, len(right) + 1):
        for chosen in itertools.combinations(range(len(right)), count):
            rows = list(chosen)
            part = np.linalg.lstsq(scaled[np.ix_(rows, rows)], target[rows], rcond=1e-13)[0]
            value = float(part @ scaled[np.ix_(rows, rows)] @ part / 2 - target[rows] @ part)
            if (part >= 0.0).all() and value < least:
                best, least = np.zeros(len(right)), value
                best[rows] = part / size[rows]
    return best
