"""Verification of one layout, on all of its ranks: the same steps there and on one rank, side by side."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from phalanx.config.check import global_batch_samples
from phalanx.config.schema import Run
from phalanx.families.registry import bind
from phalanx.layout.mesh import ONE_RANK, Groups, build_mesh
from phalanx.layout.resolve import resolve_layout
from phalanx.layout.spec import ResolvedLayout
from phalanx.optimizers import find_optimizer
from phalanx.precision import PRECISIONS
from phalanx.verification.bound import Bound
from phalanx.verification.compare import Check, compare_records, from_first
from phalanx.verification.family import VerifiableModel
from phalanx.verification.record import Record, record_training
from phalanx.verification.reduced_run import one_rank_run


@dataclass(frozen=True)
class Verdict:
    """The outcome for one layout."""

    layout: str
    in_words: str
    """The layout with its micro-batches and what else it was computed with."""
    bound: str
    checks: list[Check]
    seconds: float

    @property
    def passed(self) -> bool:
        """Whether every check is within its bound."""
        return all(check.passed for check in self.checks)

    @property
    def first(self) -> Check | None:
        """The first check that failed, in the order of computation."""
        return next((check for check in self.checks if not check.passed), None)

    def worst(self, what: str) -> Check | None:
        """Return the check of this kind that comes nearest to its bound, or exceeds it most."""
        return max((c for c in self.checks if c.what == what), key=lambda c: c.error / c.bound, default=None)

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON: all that failed, and the worst of each kind."""
        kinds = dict.fromkeys(check.what for check in self.checks)
        worst = {what: check.as_dict() for what in kinds if (check := self.worst(what))}
        failed = [check.as_dict() for check in self.checks if not check.passed]
        return {
            "layout": self.layout,
            "in_words": self.in_words,
            "passed": self.passed,
            "bound": self.bound,
            "first": self.first.as_dict() if self.first else None,
            "worst": worst,
            "failed": failed,
            "seconds": round(self.seconds, 3),
        }


class Verifier:
    """Verifies layouts of one run, in the process group that this rank is in (or alone)."""

    def __init__(
        self, run: Run, device: torch.device, *, steps: int, activations: bool, groups: Groups | None = None
    ) -> None:
        """Compute the one-rank record on rank 0.

        activations: keep them too; they must fit in memory. groups: process groups to share with other verifiers.
        """
        self.run = run
        self.device = device
        self.steps = steps
        self.activations = activations
        self.reference: Record | None = None
        self._groups: Groups = {} if groups is None else groups
        # Once for all layouts, and on one rank only: the others get its tensors as they compare.
        if not dist.is_initialized() or dist.get_rank() == 0:
            single = one_rank_run(run)
            layout = resolve_layout(single, 1)
            self.reference = record_training(single, layout, ONE_RANK, device, steps=steps, activations=activations)

    def verify(self, layout: ResolvedLayout) -> Verdict:
        """Compare `layout` with one rank. Every rank calls it and gets the same verdict."""
        start = time.perf_counter()
        mesh = build_mesh(layout, self.device, self._groups)
        mine = record_training(self.run, layout, mesh, self.device, steps=self.steps, activations=self.activations)
        gain = find_optimizer(self.run.optimizer).update_gain(self.run.optimizer)
        vanishing = bind(self.run).vanishing
        checks = compare_records(mine, self.reference, self._bound(), gain, vanishing)
        words = layout.in_words(self.run.layout.gather_blocks)
        return Verdict(str(layout), words, str(self._bound()), checks, from_first(time.perf_counter() - start))

    def _bound(self) -> Bound:
        batch = global_batch_samples(self.run)
        samples = bind(self.run, VerifiableModel).samples(1, 0, batch, batch)
        targets = int(samples.target_counts().max())
        return Bound(PRECISIONS[self.run.layout.precision].compute_dtype, self.run.model.n_layers, targets)
