"""What tests on a device share: the device, and the same steps there and in float64 on the CPU."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from layout_runs import Fields, run_with
from phalanx.families.language.config import LanguageRun
from phalanx.families.registry import bind
from phalanx.layout.mesh import ONE_RANK
from phalanx.layout.place import Place
from phalanx.layout.resolve import resolve_layout
from phalanx.verification.family import VerifiableModel
from phalanx.verification.record_training import Record, record_training

CPU = torch.device("cpu")


def accelerator() -> torch.device:
    """Return the device under test. Fails where there is none: these tests are asked for by name."""
    found = torch.accelerator.current_accelerator(check_available=True)
    assert found is not None, "no accelerator is visible; `make test-gpu` needs one"
    return torch.device(found.type, 0)


def busy(intervals: Iterable[tuple[float, float]]) -> float:
    """How long at least one of these intervals lasts."""
    total, end = 0.0, float("-inf")
    for start, stop in sorted(intervals):
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total


def small_run(changes: Fields, precision: str, *, compiled: bool) -> LanguageRun:
    """Return a decoder of head size 16 with `section.field` changes, 8 samples a step in micro-batches of 4."""
    fields: Fields = {
        "model.n_layers": 2,
        "model.d_model": 128,
        "model.d_ff": 256,
        "model.vocab_size": 257,
        "model.max_positions": 64,
        "data.sequence_length": 64,
        "training.compile": compiled,
        "optimizer.schedule": "constant",
        "optimizer.eps": 1e-3,
        **changes,
    }
    layout = {name.split(".")[1]: value for name, value in fields.items() if name.startswith("layout.")}
    others = {name: value for name, value in fields.items() if not name.startswith("layout.")}
    return run_with(others, precision=precision, global_batch=8, microbatch=4, **layout)


def record_steps(run: LanguageRun, device: torch.device, steps: int = 2) -> Record:
    """Return losses, gradients and updated parameters of `steps` steps of one rank on `device`."""
    return record_training(
        bind(run, VerifiableModel), resolve_layout(bind(run), 1), ONE_RANK, device, steps=steps, activations=False
    )


@dataclass(frozen=True)
class Distance:
    """Relative errors of a record beside the same steps in float64."""

    loss: float
    gradients: dict[str, float]
    """By parameter: 2-norm of the difference over the 2-norm of the reference, of the first step."""

    @property
    def worst(self) -> float:
        """The largest error of any gradient."""
        return max(self.gradients.values())


def distance(found: Record, reference: Record) -> Distance:
    """Measure how far `found` is from `reference`, in the first step's loss and gradients."""
    first, wanted = found.steps[0], reference.steps[0]
    return Distance(
        abs(first.loss - wanted.loss) / abs(wanted.loss),
        {name: relative_error(first.gradients[name], place) for name, place in wanted.gradients.items()},
    )


def relative_error(found: Place | Tensor, wanted: Place | Tensor) -> float:
    """Return the 2-norm of the difference over the 2-norm of `wanted`: 0 where they are equal, infinite where not finite."""
    a, b = ((x.local if isinstance(x, Place) else x).cpu().double() for x in (found, wanted))
    # Both can be nothing but zeros, as where experts get no rows.
    error = 0.0 if torch.equal(a, b) else float((a - b).norm() / b.norm())
    return error if error == error else float("inf")
