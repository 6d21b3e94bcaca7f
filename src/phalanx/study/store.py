"""The store of a study: an Optuna journal of every trial as it starts and ends, shared by processes on any number of nodes.

The journal's order decides who measures what: a choice belongs to the first trial that names it. Nothing is held in memory
that is not in the file, so a killed study resumes where it was. Optuna's own tools read the file as it is.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution
from optuna.exceptions import DuplicatedStudyError, UpdateFinishedTrialError
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend, JournalFileSymlinkLock
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState, create_trial

from phalanx.errors import ConfigError, PhalanxError
from phalanx.files import open_own_file, write_atomically
from phalanx.study.processes.process import Worker
from phalanx.study.trial import ASKED, ATTEMPTS, INTERRUPTED, OK, Outcome, Trial

_OUTCOME_FILE = "outcome.json"
_OTHER_HOST_S = 120.0
"""Seconds past its time limit after which a trial of another host counts as abandoned: clocks of a cluster differ less."""
_FIRST_LINE_BYTES = 4096
_DUPLICATE = "duplicate"
"""Cause of a trial that never began: another process was first, or the study had enough."""


class StudyError(PhalanxError):
    """The study's file cannot be used."""


class StudyStore:
    """The trials of one study, on disk.

    about: what the trials have in common, as plain values; a file that was begun for something else is refused with
    ConfigError. None only reads. folder: where trials keep their files, by default beside the file. option: of the command
    line, which names another file.
    """

    def __init__(
        self,
        path: Path,
        name: str,
        about: Mapping[str, Any] | None,
        *,
        folder: Path | None = None,
        option: str = "--storage FILE",
    ) -> None:
        self.path = path
        self.folder = folder or path.with_name(f"{path.name}.trials")
        # Optuna writes a line for each trial to stderr, where those of the study are.
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            # A reader changes nothing: the line may still be being written.
            if about is not None:
                mend_torn_line(path)
            self._storage = JournalStorage(JournalFileBackend(str(path)))
            with suppress(DuplicatedStudyError):
                # Of two processes that begin at once the second finds the study made.
                if name not in [study.study_name for study in self._storage.get_all_studies()]:
                    self._storage.create_new_study([StudyDirection.MINIMIZE], name)
            self._id = self._storage.get_study_id_from_name(name)
        except (OSError, ValueError, KeyError) as error:
            raise StudyError(f"{path} cannot be used as a study: {error}; give another {option}") from error
        found = self._storage.get_study_user_attrs(self._id).get("about")
        # As JSON gives it back: tuples are lists there.
        wanted = found if about is None else json.loads(json.dumps(dict(about)))
        if found is None and wanted is not None:
            self._storage.set_study_user_attr(self._id, "about", wanted)
        elif found is not None and wanted is not None and found != wanted:
            differs = [key for key in {*found, *wanted} if found.get(key) != wanted.get(key)]
            raise ConfigError(f"{path} holds a study of another {', '.join(sorted(differs))}; give another {option}")
        self.about: dict[str, Any] = wanted or {}
        if about is not None:
            self.recover()

    def trials(self) -> list[Trial]:
        """Return the trials in the order in which they began, without those whose choice another process claimed first."""
        found: list[Trial] = []
        for frozen in self._frozen_trials():
            known = frozen.user_attrs
            # The outcome is written before the state: with it alone a process was killed in between.
            ended = frozen.state.is_finished() and "outcome" in known
            outcome = Outcome.from_dict(known["outcome"]) if ended else None
            found.append(
                Trial(frozen.number, known["key"], dict(frozen.params), known["engine"], outcome, known.get("note", {}))
            )
        owner: dict[str, int] = {}
        for trial in found:
            if not trial.interrupted:
                owner.setdefault(trial.key, trial.number)
        return [trial for trial in found if trial.interrupted or owner[trial.key] == trial.number]

    def taken(self) -> set[str]:
        """Return keys that are not to be tried (again): they run, are known, or were interrupted too often."""
        attempts: dict[str, int] = {}
        keys = set()
        for trial in self.trials():
            if trial.attempt_failed:
                attempts[trial.key] = attempts.get(trial.key, 0) + 1
            elif not trial.interrupted:
                keys.add(trial.key)
        return keys | {key for key, count in attempts.items() if count >= ATTEMPTS}

    def claim(
        self,
        key: str,
        values: Mapping[str, Any],
        ranges: Mapping[str, BaseDistribution],
        *,
        sampler: str,
        limit_s: float,
        note: Mapping[str, Any] | None = None,
        worker: Worker | None = None,
    ) -> Trial | None:
        """Return a trial that begins now; None where another process was first.

        ranges: what each of `values` might have been. sampler: its name. limit_s: seconds after which processes on
        other hosts take the trial for abandoned. note: what is expected of it. worker: whose it is, by default this
        process's.
        """
        # A look saves most races a line in the journal; the check below decides.
        if key in self.taken():
            return None
        # The trial and its owner become known in one line of the journal: there is no moment to be killed in between.
        frozen = create_trial(
            state=TrialState.RUNNING,
            params=dict(values),
            distributions={name: ranges[name] for name in values},
            user_attrs={
                "key": key,
                "engine": sampler,
                "note": dict(note or {}),
                "worker": (worker or Worker.this_process()).as_dict(),
                "deadline": time.time() + limit_s,
            },
        )
        number = self._storage.get_trial(self._storage.create_new_trial(self._id, frozen)).number
        # Optuna's numbers follow the journal's order: of two that claimed the same choice, the lower one has it.
        mine = next((trial for trial in self.trials() if trial.number == number), None)
        if mine is None:
            self._end(self._trial_id(number), Outcome(_DUPLICATE))
        return mine

    def running_of(self, worker: Worker) -> list[Trial]:
        """Return the trials that run and are this worker's."""
        running = [one for one in self._frozen_trials() if one.state == TrialState.RUNNING]
        mine = {one.number for one in running if one.user_attrs["worker"] == worker.as_dict()}
        return [trial for trial in self.trials() if trial.number in mine]

    def withdraw(self, trial: Trial) -> None:
        """Take back a trial that was claimed and not begun."""
        self._end(self._trial_id(trial.number), Outcome(_DUPLICATE))

    def finish(self, trial: Trial, outcome: Outcome) -> None:
        """Record the outcome of a trial."""
        try:
            self._end(self._trial_id(trial.number), outcome)
        except UpdateFinishedTrialError:
            # Another process gave it up for lost; its outcome is worth keeping all the same, as a trial of its own.
            state, values = _final_state(outcome)
            late = create_trial(
                state=state,
                value=None if values is None else values[0],
                params=dict(trial.values),
                distributions={name: CategoricalDistribution((value,)) for name, value in trial.values.items()},
                user_attrs={
                    "key": trial.key,
                    "engine": trial.sampler,
                    "note": dict(trial.note),
                    "outcome": outcome.as_dict(),
                },
            )
            self._storage.create_new_trial(self._id, late)

    def report(self, trial: Trial, step: int, value: float) -> None:
        """Record an intermediate value of a running trial at a step, for Optuna's tools."""
        self._storage.set_trial_intermediate_value(self._trial_id(trial.number), step, value)

    def recover(self) -> list[int]:
        """End running trials whose process is gone, with the outcome they left or as interrupted; return their numbers."""
        ended = []
        for frozen in self._frozen_trials():
            if frozen.state != TrialState.RUNNING:
                continue
            worker = Worker(**frozen.user_attrs["worker"])
            # Another host's processes cannot be asked: its trials have the time that they were given.
            given = time.time() < frozen.user_attrs["deadline"] + _OTHER_HOST_S
            if worker.alive() if worker.host == socket.gethostname() else given:
                continue
            left, file = frozen.user_attrs.get("outcome"), self.folder / str(frozen.number) / _OUTCOME_FILE
            if left is None and file.exists():
                left = json.loads(file.read_text())
            # That its process died says nothing against a trial: it is no failed attempt.
            gone = Outcome(INTERRUPTED, words="the search ended first", more={ASKED: True})
            outcome = gone if left is None else Outcome.from_dict(left)
            # Another process may find the same at the same time: the first to say so is believed.
            with suppress(UpdateFinishedTrialError):
                self._end(self._trial_id(frozen.number), outcome)
                ended.append(frozen.number)
        return ended

    def _end(self, trial_id: int, outcome: Outcome) -> None:
        # Optuna takes no attributes for a finished trial: the outcome comes first, and a kill in between leaves it running.
        self._storage.set_trial_user_attr(trial_id, "outcome", outcome.as_dict())
        self._storage.set_trial_state_values(trial_id, *_final_state(outcome))

    def _frozen_trials(self) -> list[FrozenTrial]:
        # A copy of every trial at every look would take longer than all else here; nobody changes them.
        trials = self._storage.get_all_trials(self._id, deepcopy=False)
        ours = [one for one in trials if "key" in one.user_attrs]
        return [one for one in ours if one.user_attrs.get("outcome", {}).get("cause") != _DUPLICATE]

    def _trial_id(self, number: int) -> int:
        return self._storage.get_trial_id_from_study_id_trial_number(self._id, number)


def name_study(path: Path) -> str | None:
    """Return the name of the study that a journal begins with; None for any other file. Creates and changes nothing."""
    # a journal may be long, and its first line says what it is
    with open_own_file(path.resolve()) as file:
        first = file.readline(_FIRST_LINE_BYTES)
    try:
        name = json.loads(first).get("study_name")
    except (ValueError, AttributeError, RecursionError):
        return None
    return name if isinstance(name, str) else None


def mend_torn_line(path: Path) -> None:
    """Drop the last line of a journal where it is torn: its writer's machine stopped in the middle of it."""
    if not path.exists():
        return
    # Under the lock of the writers: a line that is just being written is torn as well.
    lock = JournalFileSymlinkLock(str(path))
    lock.acquire()
    try:
        with path.open("rb+") as file:
            content = file.read()
            whole = content.rfind(b"\n") + 1
            if whole != len(content):
                file.truncate(whole)
    finally:
        lock.release()


def save_outcome(folder: Path, outcome: Outcome) -> None:
    """Write an outcome into the trial's folder, for whoever finds the trial without its process."""
    write_atomically(folder / _OUTCOME_FILE, json.dumps(outcome.as_dict()))


def _final_state(outcome: Outcome) -> tuple[TrialState, list[float] | None]:
    """Return the state and the values that Optuna's tools are to see."""
    if outcome.cause != OK:
        return TrialState.FAIL, None
    return TrialState.COMPLETE, None if outcome.value is None else [outcome.value]
