"""Inputs of a run: the training stream of this rank, the held-out samples, and what of its data a run keeps.

A bound model opens them: training asks `TrainableModel`, below.
"""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Protocol, Self

import torch

from phalanx.config.model import Model
from phalanx.data.batch_stream import BatchStream
from phalanx.errors import DataError
from phalanx.families.family import DataModel
from phalanx.layout.apply import ParallelModel
from phalanx.layout.execute import Executor
from phalanx.layout.layout_model import LayoutModel
from phalanx.layout.mesh import Mesh
from phalanx.layout.spec import ResolvedLayout
from phalanx.nn.resizing import Resizes
from phalanx.training.metrics import RankTimes


@dataclass(frozen=True)
class Finding:
    """One result of an evaluation, for the log and for a person."""

    kind: str
    """Kind of the event in the run's log: evaluation, sample."""
    fields: dict[str, Any]
    """Fields of the event, ready for JSON."""
    words: str
    """The result in words."""
    parts: dict[str, float] = field(default_factory=dict)
    """Scores of parts of the evaluation by name, for trackers, beside the numbers among the fields."""

    @property
    def curves(self) -> dict[str, float]:
        """Return every number by the name that trackers draw it under."""
        plain = {name: value for name, value in self.fields.items() if type(value) in (int, float)}
        return {f"{self.kind}/{name}": float(value) for name, value in {**plain, **self.parts}.items()}


@dataclass(frozen=True)
class ExpectedEvaluation:
    """Form of what the evaluations of a run will give, known before there is one."""

    fields: dict[str, Any]
    """Fields of the event, as the code that evaluates forms them, with a meaningless number for everything measured."""
    less_is_better: frozenset[str]
    """Names of the numbers there that are smaller for a better model."""


class Evaluator(Protocol):
    """Evaluates one model again and again, the same way each time."""

    def evaluate(self, executor: Executor) -> list[Finding]:
        """Return what the present parameters give. Every rank calls it."""


@dataclass(frozen=True)
class ScheduledEvaluator:
    """An evaluator with an interval of its own."""

    every: int | None
    """Steps between evaluations; None evaluates after the last step only."""
    evaluator: Evaluator


class Verifiable(Protocol):
    """A source of data that can tell whether its files are as they were written."""

    def verify(self) -> None:
        """Read everything and compare checksums. Raises DataError for an altered file."""


@dataclass(frozen=True)
class Inputs:
    """Opened data of a run."""

    stream: BatchStream
    evaluator: Evaluator
    verification: Verification
    """Checks the training data's checksums while training begins."""
    saved: dict[str, Any] = field(default_factory=dict)
    """Facts of the data for every checkpoint, as JSON values."""
    in_words: str = ""
    """Amount of training data, for a person."""
    others: tuple[ScheduledEvaluator, ...] = ()
    """Evaluators beside `evaluator`, which `evaluation.every` calls."""

    def write(self, run_dir: Path) -> None:
        """Put beside the run what using the model will need of its data; by default nothing."""

    def watch(self, applied: ParallelModel) -> None:
        """Learn from the model that is about to run how to share samples among ranks; by default nothing."""

    def after(self, step: int) -> Callable[[], RankTimes] | None:
        """Return what gives the times of the ranks in `step`, which is finished; None by default.

        Every rank calls it. Calling the result waits for other ranks, and for steps that were launched by now.
        """
        return None

    def state(self) -> dict[str, Any]:
        """Return what changes of the data as training goes on, for every checkpoint beside `saved`."""
        return {}

    def check(self, state: dict[str, Any], where: str) -> None:
        """Refuse a checkpoint's state that such inputs cannot have saved. where: the file. Raises CheckpointDamaged."""

    def restore(self, state: dict[str, Any]) -> None:
        """Resume from a checkpoint's state; by default nothing changes."""


class Verification:
    """Reads all of some sources in the background and compares checksums, so that training need not wait for it."""

    def __init__(self, sources: Sequence[Verifiable]) -> None:
        self._sources = sources
        self._error: DataError | None = None
        if sources:
            threading.Thread(target=self._run, name="verify-data", daemon=True).start()

    def raise_if_failed(self) -> None:
        """Raise the DataError of the first altered file found so far, if any."""
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            for source in self._sources:
                source.verify()
        except DataError as error:
            self._error = error


class TrainableModel(LayoutModel, DataModel):
    """A bound model that can be trained: it opens its data and evaluates itself."""

    absent: ClassVar[str] = (
        "model.family={family} cannot be trained: its class is no phalanx.training.inputs.TrainableModel"
    )

    def settle(self, run_dir: Path) -> Self:
        """Return the model with what its run file leaves to the data or to the checkpoint it resumes; by default as it is.

        Every rank calls it, and all get the same.
        """
        return self

    def resizes(self, path: Path, before: Model) -> Resizes:
        """Return how parameters are made of those of a model of another shape, whose weights the run begins with.

        path: of the weights' run directory or checkpoint. before: the model section that they were trained with, perhaps of
        another family. By default nothing is resized. A pattern counts for tensors of equal shape too: where rows stand for
        something else than before, the family names them here, and the run file must agree (`training.transfer.resize`).
        """
        return []

    def how_to_import(self, path: Path) -> str:
        """Return the command that makes a checkpoint of `path`, as the rest of an error message; by default nothing."""
        return ""

    def notes_of_kernels(self, device: torch.device) -> Sequence[str]:
        """Return which kernels compute on `device`, for a person who may wonder or wait; by default nothing."""
        return ()

    @abstractmethod
    def open_inputs(self, layout: ResolvedLayout, mesh: Mesh, device: torch.device, *, first: bool) -> Inputs:
        """Open every source of the run file. first: whether this rank does what is done once.

        Raises DataError for missing, truncated or unsuitable data.
        """

    def expected_evaluation(self) -> ExpectedEvaluation | None:
        """Return the form of what evaluations will give; None where the run holds nothing out to evaluate on.

        Raises DataError for data that are not there or not prepared.
        """
        return None
