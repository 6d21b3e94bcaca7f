"""Every rank's record beside the one-rank record that rank 0 holds, and how far the two may differ.

Whole reference tensors travel from rank 0 in buckets; each rank compares the part it has, and the largest error of any
rank counts, so that a single wrong replica or shard shows. All ranks call these functions alike.

A layout changes the order of sums. The sum of n terms in another order differs by about sqrt(n) eps of their size, and what
goes wrong in one layer is carried, and grows a little, through each further layer on the way back from the loss. Hence

    bound(l) = K * sqrt(T) * C^(L + 1 - l) * eps

with T the targets that a gradient sums over, L the layers, l the layer (0 the embedding, L + 1 the head), eps the spacing
of the format's numbers at 1; C and its exponent follow Megatron-LM's gradient tests. Wrong arithmetic is not of this size:
a gradient left out, counted twice or scaled is off by parts of itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.layout.place import Place
from phalanx.verification.record_training import Record
from phalanx.verification.replay_routing import StepRouting

_SCALE = 16.0
"""K of the bound."""
_GROWTH_PER_LAYER = 1.03
"""C of the bound."""
_BUCKET = 2**22
"""Elements of small tensors that travel together."""


@dataclass(frozen=True)
class Check:
    """One comparison with its bound."""

    what: str
    """activations, choices, loss, gradient, gradient norm, state or parameter."""
    name: str
    """Module, parameter or state; empty for loss and norm."""
    step: int
    error: float
    """2-norm of the difference over the 2-norm of the one-rank value (of gradients that vanish: over that of all gradients
    of the parameter's module), the largest of any rank's part."""
    bound: float

    @property
    def passed(self) -> bool:
        """Return whether the error is within the bound; NaN is not."""
        return self.error <= self.bound

    def __str__(self) -> str:
        of = f" of {self.name}" if self.name else ""
        return f"{self.what}{of} in step {self.step} differs by {self.error:.2g} (bound {self.bound:.2g})"

    def as_dict(self) -> dict[str, Any]:
        """Return plain values; an error that is no number becomes a word."""
        error = self.error if math.isfinite(self.error) else str(self.error)
        return {**asdict(self), "error": error, "passed": self.passed}


@dataclass(frozen=True)
class ChoiceCheck(Check):
    """Whether the tokens that a router would have sent to other experts are near-ties.

    The error is the largest move of a token's logits, in their standard deviations, that makes it choose as one rank does.
    """

    otherwise: int
    """Tokens that would have chosen other experts than on one rank."""
    tokens: int
    """Tokens of the global batch."""

    def __str__(self) -> str:
        return (
            f"{self.what} of {self.name} in step {self.step}: {self.otherwise:,} of {self.tokens:,} tokens would go to "
            f"other experts than on one rank, by {self.error:.2g} deviations of their logits (bound {self.bound:.2g})"
        )


def compare_records(
    mine: Record, reference: Record | None, bound: ErrorBound, update_gain: float | None, vanishing: Sequence[str] = ()
) -> list[Check]:
    """Return all checks, in the order in which a mistake would first show: forward, loss, then gradients back from the loss.

    mine: this rank's record. reference: the one-rank record, on rank 0 alone. update_gain: see `OptimizerKind.update_gain`;
    None leaves parameters out. vanishing: patterns of the parameters whose gradients are 0 but for rounding.
    """
    checks = _compare_activations(mine, reference, bound)
    # Largest of any step: a task head that one step has no sample of has moved in others.
    norms: dict[str, float] = {}
    for number, step in enumerate(mine.steps, 1):
        wanted = None if reference is None else reference.steps[number - 1]
        checks += _compare_choices(number, step.routing, None if wanted is None else wanted.routing, bound)
        losses = _compare_numbers(
            [step.loss, step.grad_norm], None if wanted is None else [wanted.loss, wanted.grad_norm]
        )
        checks.append(Check("loss", "", number, losses[0], bound.loss))
        errors = _compare_tensors(step.gradients, None if wanted is None else wanted.gradients)
        errors = _measure_by_module(errors, vanishing)
        # Back from the loss, also within a layer: parameters are named in the order in which they are used.
        use = {name: place for place, name in enumerate(errors)}
        names = sorted(errors, key=lambda name: (layer_of(name, bound.layers), use[name]), reverse=True)
        checks += [Check("gradient", n, number, errors[n].relative, bound.gradient(n)) for n in names]
        checks.append(Check("gradient norm", "", number, losses[1], bound.gradient("embedding")))
        state = _compare_tensors(step.state, None if wanted is None else wanted.state)
        checks += [Check("state", name, number, error.relative, bound.state) for name, error in state.items()]
        norms |= {name: max(error.norm, norms.get(name, 0.0)) for name, error in errors.items()}
    # How far parameters may differ follows from gradients only where an update is known to be smooth in them.
    if update_gain is None:
        return checks
    errors = _compare_tensors(mine.parameters, None if reference is None else reference.parameters)
    for name, error in errors.items():
        # In units of the parameter: how much of it a relative error of its gradient can move in all steps.
        gain = len(mine.steps) * update_gain * norms[name] / max(error.norm, 1e-30)
        checks.append(Check("parameter", name, len(mine.steps), error.relative, bound.parameter(name, gain=gain)))
    return checks


@dataclass(frozen=True)
class ErrorBound:
    """Largest relative errors (2-norm of the difference over the 2-norm of the one-rank value) that rounding explains.

    Each kind of number has a method of its own, so that a module or a number format may get a threshold of its own here.
    """

    dtype: torch.dtype
    """Number format of activations."""
    layers: int
    """Blocks of the model."""
    targets: int
    """Targets of a global batch, of the task that has most."""

    @property
    def eps(self) -> float:
        """Return the spacing of the numbers at 1 of the format of activations."""
        return torch.finfo(self.dtype).eps

    @property
    def loss(self) -> float:
        """Return the bound for a loss."""
        return _SCALE * math.sqrt(self.targets) * self.eps

    def activations(self, module: str) -> float:
        """Return the bound for the activations behind `module`.

        It is the embedding's for all of them: activations are followed forward, and the farther from the embedding, the more
        may have gathered.
        """
        return self.gradient("embedding")

    def gradient(self, name: str) -> float:
        """Return the bound for the gradient of the parameter `name`."""
        return self.loss * _GROWTH_PER_LAYER ** (self.layers + 1 - layer_of(name, self.layers))

    def choices(self, router: str, step: int) -> float:
        """Return the bound for how far logits of a router are from those of one rank, in standard deviations of a token's.

        A logit is no sum over targets: it has the rounding of the layers before it, and in later steps that of the updates.
        """
        return step * _SCALE * _GROWTH_PER_LAYER ** layer_of(router, self.layers) * self.eps

    @property
    def state(self) -> float:
        """Return the bound for what a model keeps beside parameters: what follows from counts, in float32 at least."""
        return 8.0 * torch.finfo(torch.float32).eps

    def parameter(self, name: str, *, gain: float) -> float:
        """Return the bound for a parameter after updates.

        gain: change of the parameter for a change of its gradient, both relative.
        """
        return self.gradient(name) * gain + 8.0 * torch.finfo(torch.promote_types(self.dtype, torch.float32)).eps

    def __str__(self) -> str:
        return (
            f"{_SCALE:g} * sqrt({self.targets} targets) * {_GROWTH_PER_LAYER:g}^(layers to the loss) * {self.eps:.3g}, "
            f"at most {self.gradient('embedding'):.2g}"
        )


def layer_of(name: str, layers: int) -> int:
    """Return the layer of a module or parameter: 0 for the embedding, 1 to `layers` for blocks, then the head."""
    first, *rest = name.split(".")
    if first == "blocks":
        return int(rest[0]) + 1
    return 0 if first == "embedding" else layers + 1


@dataclass(frozen=True)
class _Error:
    """How far a tensor is from the one-rank tensor."""

    size: float
    """2-norm of the difference, the largest of any rank's part."""
    norm: float
    """Scale of the error: 2-norm of the one-rank tensor, or of all gradients of its module."""

    @property
    def relative(self) -> float:
        """Return size over norm."""
        return self.size / self.norm if self.norm else (0.0 if self.size == 0.0 else math.inf)


def _compare_activations(mine: Record, reference: Record | None, bound: ErrorBound) -> list[Check]:
    """Compare the activations behind each recorded module in the first step, from the embedding on."""
    if not from_first(None if reference is None else bool(reference.activations)):
        return []
    whole = None
    if reference is not None:
        whole = {name: torch.cat([piece.value_BSD for piece in seen]) for name, seen in reference.activations.items()}
    # Modules within a block before the block.
    order = None if whole is None else sorted(whole, key=lambda name: (layer_of(name, bound.layers), -name.count(".")))
    names = from_first(order)

    def difference(name: str, wanted: Tensor) -> float:
        parts = mine.activations.get(name, [])
        # In float64: the difference of two equal formats must not be rounded again.
        squares = [
            (part.value_BSD.double() - wanted[part.samples_B][:, part.positions_S].double()).square().sum()
            for part in parts
        ]
        return math.sqrt(float(sum(squares)))

    errors = _relative_differences(names, whole, difference)
    return [Check("activations", name, 1, errors[name].relative, bound.activations(name)) for name in names]


def _compare_choices(
    step: int, mine: StepRouting, reference: StepRouting | None, bound: ErrorBound
) -> list[ChoiceCheck]:
    """Return for each router how many tokens would choose otherwise, and by how much the furthest."""
    described = None if reference is None else {name: tuple(one.shape) for name, one in reference.margins.items()}
    shapes: dict[str, tuple[int, int]] = from_first(described)
    furthest = torch.zeros(len(shapes), dtype=torch.float64)
    counts = torch.zeros((len(shapes), 2), dtype=torch.float64)
    for index, name in enumerate(shapes):
        margins = mine.margins.get(name, torch.full((1, 1), torch.nan, dtype=torch.float64))
        here = margins[~margins.isnan()]
        counts[index] = torch.tensor([here.numel(), here.count_nonzero()])
        furthest[index] = here.max() if here.numel() else 0.0
    _reduce_over_ranks(furthest, "max")
    _reduce_over_ranks(counts, "sum")
    checks = []
    for name, far, (seen, otherwise) in zip(shapes, furthest.tolist(), counts.tolist(), strict=True):
        tokens = shapes[name][0] * shapes[name][1]
        # A token that no rank routed, or that two did, is wrong whatever the others chose.
        error = far if seen == tokens else math.inf
        checks.append(ChoiceCheck("choices", name, step, error, bound.choices(name, step), int(otherwise), tokens))
    return checks


def _compare_tensors(mine: dict[str, Place], reference: dict[str, Place] | None) -> dict[str, _Error]:
    """Return the error of each tensor of `reference`; infinite for one whose parts do not fit or that no rank holds."""
    names: list[str] = from_first(None if reference is None else list(reference))
    whole = None if reference is None else {name: place.local for name, place in reference.items()}

    def difference(name: str, wanted: Tensor) -> float:
        place = mine.get(name)
        if place is None:
            return 0.0
        # A part that claims another shape, or lies outside the whole, is wrong whatever its values.
        if place.shape != tuple(wanted.shape):
            return math.inf
        box = wanted[tuple(slice(o, o + n) for o, n in zip(place.offsets, place.local.shape, strict=True))]
        if box.shape != place.local.shape:
            return math.inf
        error = float((place.local.double() - box.double()).norm())
        return error if math.isfinite(error) else math.inf

    errors = _relative_differences(names, whole, difference)
    # Counted over all ranks: one rank alone need not hold a part of every tensor.
    held = torch.zeros(len(names), dtype=torch.float64)
    for index, name in enumerate(names):
        held[index] = mine[name].local.numel() if name in mine else 0
    _reduce_over_ranks(held, "sum")
    # A tensor that no rank holds would otherwise differ nowhere.
    missing = [name for name, count in zip(names, held.tolist(), strict=True) if not count]
    return {**errors, **{name: _Error(math.inf, 0.0) for name in missing}}


def _relative_differences(
    names: list[str], whole: dict[str, Tensor] | None, difference: Callable[[str, Tensor], float]
) -> dict[str, _Error]:
    """Return, for each name, the largest difference of any rank over the norm of the whole."""
    errors, norms = torch.zeros((2, len(names)), dtype=torch.float64)
    for index, (name, wanted) in enumerate(send_from_first(names, whole)):
        errors[index] = difference(name, wanted)
        norms[index] = wanted.double().norm()
    _reduce_over_ranks(errors, "max")
    return {name: _Error(error, norm) for name, error, norm in zip(names, errors.tolist(), norms.tolist(), strict=True)}


def _measure_by_module(errors: dict[str, _Error], vanishing: Sequence[str]) -> dict[str, _Error]:
    """Return the same errors, but measure those of vanishing gradients by the gradients of all parameters of their module.

    Vanishing gradients are 0 by the laws of the model and consist of rounding errors alone: that of a bias, for example,
    which is subtracted again where charges are made to add up. The gradient of the module's matrix has the scale of the
    terms that cancel.
    """
    found = dict(errors)
    for name, error in errors.items():
        if any(fnmatchcase(name, pattern) for pattern in vanishing):
            module = name.rpartition(".")[0]
            norms = [other.norm for key, other in errors.items() if key.rpartition(".")[0] == module]
            found[name] = _Error(error.size, math.hypot(*norms))
    return found


def send_from_first(names: list[str], whole: dict[str, Tensor] | None) -> Iterator[tuple[str, Tensor]]:
    """Yield rank 0's tensors, in order, on every rank; small ones are sent together."""
    described = from_first(None if whole is None else [(list(whole[n].shape), whole[n].dtype) for n in names])
    start = 0
    while start < len(names):
        end, size = start, 0
        while end < len(names) and (end == start or size + math.prod(described[end][0]) <= _BUCKET):
            size += math.prod(described[end][0])
            end += 1
        dtype = described[start][1]
        # Small tensors travel together: a message for each of thousands of biases would take longer than the step.
        flat = torch.empty(size, dtype=dtype)
        if whole is not None:
            flat = torch.cat([whole[name].flatten() for name in names[start:end]]).to(dtype)
        if dist.is_initialized():
            dist.broadcast(flat, src=0)
        parts = flat.split([math.prod(shape) for shape, _ in described[start:end]])
        for name, part, (shape, _) in zip(names[start:end], parts, described[start:end], strict=True):
            yield name, part.view(shape)
        start = end


def _compare_numbers(mine: list[float], reference: list[float] | None) -> list[float]:
    """Return the largest relative difference of any rank's values from rank 0's reference, for each value."""
    wanted: list[float] = from_first(reference)
    errors = torch.tensor(
        [abs(m - w) / abs(w) if w and math.isfinite(m) else math.inf for m, w in zip(mine, wanted, strict=True)],
        dtype=torch.float64,
    )
    _reduce_over_ranks(errors, "max")
    return errors.tolist()


def from_first(value: Any) -> Any:
    """Return rank 0's value on every rank."""
    # As an object: names and shapes are unknown to the others.
    if not dist.is_initialized():
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def _reduce_over_ranks(values: Tensor, how: str) -> None:
    if dist.is_initialized():
        dist.all_reduce(values, op=dist.ReduceOp.MAX if how == "max" else dist.ReduceOp.SUM)
