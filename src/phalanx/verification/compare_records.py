"""Every rank's record beside the one-rank record that rank 0 holds.

Whole reference tensors travel from rank 0 in buckets; each rank compares the part it has, and the largest error of any
rank counts, so that a single wrong replica or shard shows. All ranks call these functions alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from phalanx.layout.place import Place
from phalanx.nn.parameters import matches_any
from phalanx.verification.error_bounds import Bound, layer_of
from phalanx.verification.exchange_records import Exchange
from phalanx.verification.record_training import Record, StepRecord
from phalanx.verification.replay_routing import StepRouting
from phalanx.verification.watch_modules import Rows

_VANISHING = torch.finfo(torch.float32).eps
"""Size of a gradient beside those of its module below which it is taken for rounding."""


@dataclass(frozen=True)
class Check:
    """One comparison with its bound."""

    what: str
    """activations, choices, loss, gradient, input gradient, gradient norm, state, parameter or update."""
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

    @property
    def module(self) -> str:
        """Return the module that the value belongs to, as finely as modules are watched; empty for the gradient norm."""
        if self.what == "loss":
            return "head"
        parts = self.name.split(".")
        return ".".join(parts[: 3 if parts[0] == "blocks" else 1])

    def as_dict(self) -> dict[str, Any]:
        """Return plain values; an error that is no number becomes a word."""
        error = self.error if math.isfinite(self.error) else str(self.error)
        return {**asdict(self), "module": self.module, "error": error, "passed": self.passed}


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
    mine: Record,
    reference: Record | None,
    bound: Bound,
    layers: int,
    update_gain: float | None,
    vanishing: Sequence[str] = (),
    *,
    alone: bool = False,
) -> list[Check]:
    """Return all checks, in the order in which a mistake would first show: forward, loss, then back from the loss.

    mine: this rank's record. reference: the one-rank record, on rank 0 alone. layers: blocks of the model. update_gain: see
    `OptimizerKind.update_gain`; None leaves parameters out, but for updates that were recorded as such. vanishing: patterns
    of the parameters whose gradients are 0 but for rounding. alone: whether this rank compares two records of its own.
    """
    return _Comparison(mine, reference, bound, layers, vanishing, Exchange(alone)).run(update_gain)


@dataclass(frozen=True)
class _Comparison:
    """See `compare_records`."""

    mine: Record
    reference: Record | None
    bound: Bound
    layers: int
    vanishing: Sequence[str]
    exchange: Exchange

    def run(self, update_gain: float | None) -> list[Check]:
        """Return all checks."""
        errors = self._compare_rows(self.mine.activations, _take_from(self.reference, lambda one: one.activations))
        checks = [self._check("activations", name, 1, errors[name]) for name in errors]
        # Largest of any step: a task head that one step has no sample of has moved in others.
        norms: dict[str, float] = {}
        for number, step in enumerate(self.mine.steps, 1):
            wanted = None if self.reference is None else self.reference.steps[number - 1]
            found, sizes = self._compare_step(number, step, wanted)
            checks += found
            norms |= {name: max(size, norms.get(name, 0.0)) for name, size in sizes.items()}
        steps = len(self.mine.steps)
        if self.mine.updates:
            errors = self._compare_tensors(self.mine.updates, _take_from(self.reference, lambda one: one.updates))
            return checks + [self._check("update", name, steps, errors[name]) for name in errors]
        # How far parameters may differ follows from gradients only where an update is known to be smooth in them.
        if update_gain is None:
            return checks
        errors = self._compare_tensors(self.mine.parameters, _take_from(self.reference, lambda one: one.parameters))
        for name, error in errors.items():
            # In units of the parameter: how much of it a relative error of its gradient can move in all steps.
            gain = steps * update_gain * norms.get(name, 0.0) / max(error.norm, 1e-30)
            checks.append(self._check("parameter", name, steps, error, gain))
        return checks

    def _check(self, what: str, name: str, step: int, error: _Error, gain: float = 0.0) -> Check:
        return Check(what, name, step, error.relative, self.bound.of(what, name, step, gain))

    def _compare_step(
        self, number: int, mine: StepRecord, reference: StepRecord | None
    ) -> tuple[list[Check], dict[str, float]]:
        """Return the checks of one step, and the 2-norm of every gradient on one rank."""
        checks: list[Check] = [
            *self._compare_choices(number, mine.routing, _take_from(reference, lambda one: one.routing))
        ]
        # Only rank 0 has the record of one rank; the exchange sends it on.
        wanted = _take_from(reference, lambda one: [one.loss, one.grad_norm])
        loss, norm = self._compare_numbers([mine.loss, mine.grad_norm], wanted)
        checks.append(Check("loss", "", number, loss, self.bound.of("loss", "", number, 0.0)))
        errors = self._compare_tensors(mine.gradients, _take_from(reference, lambda one: one.gradients))
        errors = _measure_by_module(errors, self.vanishing)
        inputs = {}
        # After an update input gradients differ by as much as the update may.
        if number == 1:
            inputs = self._compare_rows(
                self.mine.input_gradients, _take_from(self.reference, lambda one: one.input_gradients)
            )
        for what, name in _backward_order(errors, inputs, self.layers):
            error = errors[name] if what == "gradient" else inputs[name]
            checks.append(self._check(what, name, number, error))
        checks.append(Check("gradient norm", "", number, norm, self.bound.of("gradient norm", "", number, 0.0)))
        state = self._compare_tensors(mine.state, _take_from(reference, lambda one: one.state))
        checks += [self._check("state", name, number, error) for name, error in state.items()]
        return checks, {name: error.norm for name, error in errors.items()}

    def _compare_rows(self, mine: dict[str, list[Rows]], reference: dict[str, list[Rows]] | None) -> dict[str, _Error]:
        """Return the error of what each module of `reference` gave or took; infinite where ranks lack some of it."""
        whole = None
        if reference is not None:
            whole = {name: torch.cat([piece.value_BSD for piece in seen]) for name, seen in reference.items()}
        # One rank sees micro-batches in order, and all positions.
        names = self.exchange.from_first(None if whole is None else list(whole)) or []
        counts = torch.tensor([sum(p.value_BSD.numel() for p in mine.get(name, [])) for name in names]).double()
        sizes = torch.zeros_like(counts)

        def difference(name: str, wanted: Tensor) -> float:
            sizes[names.index(name)] = wanted.numel()
            # In float64: the difference of two equal formats must not be rounded again.
            squares = [
                (part.value_BSD.double() - wanted[part.samples_B][:, part.positions_S].double()).square().sum()
                for part in mine.get(name, [])
            ]
            return math.sqrt(float(sum(squares)))

        errors = self._relative_differences(names, whole, difference)
        held = self.exchange.total(counts) >= sizes
        return {name: errors[name] if have else MISSING for name, have in zip(names, held.tolist(), strict=True)}

    def _compare_choices(self, step: int, mine: StepRouting, reference: StepRouting | None) -> list[ChoiceCheck]:
        """Return for each router how many tokens would choose otherwise, and by how much the furthest."""
        described = None if reference is None else {name: tuple(one.shape) for name, one in reference.margins.items()}
        shapes = self.exchange.from_first(described) or {}
        furthest = torch.zeros(len(shapes), dtype=torch.float64)
        counts = torch.zeros((len(shapes), 2), dtype=torch.float64)
        for index, name in enumerate(shapes):
            margins = mine.margins.get(name, torch.full((1, 1), torch.nan, dtype=torch.float64))
            here = margins[~margins.isnan()]
            counts[index] = torch.tensor([here.numel(), here.count_nonzero()])
            furthest[index] = here.max() if here.numel() else 0.0
        self.exchange.largest(furthest)
        self.exchange.total(counts)
        checks = []
        for name, far, (seen, otherwise) in zip(shapes, furthest.tolist(), counts.tolist(), strict=True):
            tokens = math.prod(shapes[name])
            # A token that no rank routed, or that two did, is wrong whatever the others chose.
            error = far if seen == tokens else math.inf
            limit = self.bound.of("choices", name, step, 0.0)
            checks.append(ChoiceCheck("choices", name, step, error, limit, int(otherwise), tokens))
        return checks

    def _compare_tensors(self, mine: dict[str, Place], reference: dict[str, Place] | None) -> dict[str, _Error]:
        """Return the error of each tensor of `reference`; infinite for one whose parts do not fit or that no rank holds."""
        names = self.exchange.from_first(None if reference is None else list(reference)) or []
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

        errors = self._relative_differences(names, whole, difference)
        # Counted over all ranks: one rank alone need not hold a part of every tensor.
        held = torch.tensor([mine[name].local.numel() if name in mine else 0 for name in names]).double()
        # A tensor that no rank holds would otherwise differ nowhere.
        have = self.exchange.total(held).tolist()
        return {name: errors[name] if count else MISSING for name, count in zip(names, have, strict=True)}

    def _relative_differences(
        self, names: list[str], whole: dict[str, Tensor] | None, difference: Callable[[str, Tensor], float]
    ) -> dict[str, _Error]:
        """Return, for each name, the largest difference of any rank over the norm of the whole."""
        errors, norms = torch.zeros((2, len(names)), dtype=torch.float64)
        for index, (name, wanted) in enumerate(self.exchange.send_from_first(names, whole)):
            errors[index] = difference(name, wanted)
            norms[index] = wanted.double().norm()
        found = zip(names, self.exchange.largest(errors).tolist(), norms.tolist(), strict=True)
        return {name: _Error(error, norm) for name, error, norm in found}

    def _compare_numbers(self, mine: list[float], reference: list[float] | None) -> list[float]:
        """Return the largest relative difference of any rank's values from rank 0's reference, for each value."""
        wanted = self.exchange.from_first(reference) or []
        errors = torch.tensor(
            [abs(m - w) / abs(w) if w and math.isfinite(m) else math.inf for m, w in zip(mine, wanted, strict=True)],
            dtype=torch.float64,
        )
        found: list[float] = self.exchange.largest(errors).tolist()
        return found


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


MISSING = _Error(math.inf, 0.0)
"""Of what no rank has."""


def _backward_order(gradients: Iterable[str], inputs: Iterable[str], layers: int) -> list[tuple[str, str]]:
    """Return (kind, name) of all gradients in the order in which they are formed: back from the loss, module by module.

    gradients: parameters in the order in which modules use them. inputs: modules in the order in which they began; of each
    the parameters' gradients come first, since that of its input may also be wrong because a later one's is.
    """
    began = {name: place for place, name in enumerate(inputs)}

    def place(name: str) -> tuple[int, int]:
        # A parameter belongs to the innermost module that is watched.
        parts = name.split(".")
        prefixes = (".".join(parts[:count]) for count in range(len(parts), 0, -1))
        return layer_of(name, layers), next((began[prefix] for prefix in prefixes if prefix in began), -1)

    keyed = [((*place(name), use + 1), "gradient", name) for use, name in enumerate(gradients)]
    keyed += [((*place(name), 0), "input gradient", name) for name in began]
    return [(what, name) for _, what, name in sorted(keyed, reverse=True)]


def _measure_by_module(errors: dict[str, _Error], vanishing: Sequence[str]) -> dict[str, _Error]:
    """Return the same errors, but measure those of vanishing gradients by the gradients of all parameters of their module.

    Vanishing gradients are 0 by the laws of the model and consist of rounding errors alone: that of a bias, for example,
    which is subtracted again where charges are made to add up. The gradient of the module's matrix has the scale of the
    terms that cancel. Others vanish by chance in a batch: that of an output's bias, say, where as many errors have one sign
    as have the other and a loss of absolute errors counts signs.
    """
    found = dict(errors)
    for name, error in errors.items():
        module = name.rpartition(".")[0]
        whole = math.hypot(*(other.norm for key, other in errors.items() if key.rpartition(".")[0] == module))
        if error.norm < _VANISHING * whole or matches_any(name, vanishing):
            found[name] = _Error(error.size, whole)
    return found


def _take_from(record: Any, part: Callable[[Any], Any]) -> Any:
    """Return a part of a record; None on ranks that have no record."""
    return None if record is None else part(record)
