"""Folders that are looked at again and again while they grow: of a run, of a study of hyperparameters, of a search.

Each gives the same three things, whatever it is: what it looks like on a terminal, its page, and a stamp that changes with
its files. Nothing here is written, and files that are missing, torn or strange are told and no failure.
"""

from __future__ import annotations

import hashlib
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from rich.text import Text

from phalanx.errors import ConfigError, PhalanxError
from phalanx.files import read_json_lines, read_last_record
from phalanx.formatting import format_number
from phalanx.launch.faults import FAULT_LOG
from phalanx.report.dashboard import Room, RunFigures, draw_message, draw_run, draw_search, draw_tune
from phalanx.report.page import render_message
from phalanx.report.run_log import Event, RunLog, metrics_problem, read_events
from phalanx.report.run_page import render_run
from phalanx.report.study_page import render_search, render_tune

Picture = Callable[[Room], list[Text]]
"""Draws what was read for any size of the terminal."""
Row = dict[str, Any]
_RUN_FILES = ("metrics.jsonl", "events.jsonl", FAULT_LOG, "run.yaml", "machine.json")
_TUNE_JOURNAL, _SEARCH_TRIALS = "study.log", ".trials"
_MOST_PROGRESS = 4
"""Running trials of which is said how far they are."""


class Watched(ABC):
    """A folder that grows."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def name(self) -> str:
        """Return the name of the folder."""
        return self.path.resolve().name

    @abstractmethod
    def files(self) -> list[Path]:
        """Return the files of which one changes whenever something has happened."""

    @abstractmethod
    def read(self) -> Picture:
        """Read the files. Raises PhalanxError where there is nothing to draw yet."""

    @abstractmethod
    def render(self, live: str) -> str:
        """Return the page. live: see `render_page`. Raises as `read` does."""

    def stamp(self) -> str:
        """Return a word that changes whenever one of the files does."""
        seen = []
        for file in self.files():
            with suppress(OSError):
                status = file.stat()
                seen.append((file.name, status.st_mtime_ns, status.st_size))
        return hashlib.sha256(repr(seen).encode()).hexdigest()[:16]

    def picture(self) -> Picture:
        """Return what to draw, be it why there is nothing."""
        try:
            return self.read()
        except (PhalanxError, OSError) as error:
            words, events = str(error), self.recent_events()
            return lambda room: draw_message(self.name, words, room, events)

    def page(self, live: str) -> str:
        """Return the page, be it one that says why there is nothing. live: see `render_page`."""
        try:
            return self.render(live)
        except (PhalanxError, OSError) as error:
            return render_message(self.name, str(error), live)

    def recent_events(self) -> tuple[Event, ...]:
        """Return what has happened although there is nothing to draw."""
        return ()


class WatchedRun(Watched):
    """A run directory, which need not be there yet."""

    def files(self) -> list[Path]:
        """Return its logs, and what describes it."""
        return [self.path / name for name in _RUN_FILES]

    def read(self) -> Picture:
        """Read the log."""
        figures, faults = RunFigures.of(self._read_log()), self._read_faults()
        changed = max((self.path / name).stat().st_mtime for name in _RUN_FILES if (self.path / name).exists())
        # a clock of another host may be ahead
        return lambda room: draw_run(figures, room, quiet_s=max(0.0, time.time() - changed), faults=faults)

    def render(self, live: str) -> str:
        """Return the run's report."""
        return render_run(self._read_log(), live)

    def recent_events(self) -> tuple[Event, ...]:
        """Return the events before the first step, such as which attention was chosen."""
        try:
            return read_events(self.path / "events.jsonl", [])
        except (PhalanxError, OSError):
            return ()

    def _read_log(self) -> RunLog:
        if not self.path.exists():
            raise ConfigError(f"{self.path} is not there yet; it is shown once `phalanx train` has made it")
        if self.path.is_dir() and not (self.path / "metrics.jsonl").exists():
            raise ConfigError("the first step is not done yet: there is no metrics.jsonl")
        return RunLog.read(self.path)

    def _read_faults(self) -> list[str]:
        """Return each fault of the run in a few words; none where the file is not there or strange."""
        try:
            records = read_json_lines(self.path / FAULT_LOG).records
        except (PhalanxError, OSError):
            return []
        return [f"rank {one.get('rank')} in step {one.get('step')}, {one.get('cause')}" for one in records]


class WatchedTuning(Watched):
    """A folder of a study of hyperparameters."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._running: list[Path] = []

    def files(self) -> list[Path]:
        """Return the journal, and the metrics of the trials that ran when it was last read."""
        sessions = sorted((self.path / "sessions").glob("*.json"))
        return [self.path / _TUNE_JOURNAL, *sessions, *(folder / "metrics.jsonl" for folder in self._running)]

    def read(self) -> Picture:
        """Read the journal, and how far running trials are."""
        summary = self._summarise()
        return lambda room: draw_tune(summary, room)

    def render(self, live: str) -> str:
        """Return the study's page."""
        return render_tune(self._summarise(), live)

    def _summarise(self) -> Row:
        with _reading_study(self.path):
            from phalanx.study.hyperparameters.study_summary import summarise_study  # noqa: PLC0415

            summary = summarise_study(self.path, quick=True)
        self._running = [Path(row["run_dir"]) for row in summary["trials"] if row["state"] == "running"]
        _tell_progress(summary, lambda row: Path(row["run_dir"]))
        return summary


class WatchedSearch(Watched):
    """A journal of a search of layouts."""

    def files(self) -> list[Path]:
        """Return the journal: trials take seconds each."""
        return [self.path]

    def read(self) -> Picture:
        """Read the journal, and how far the running trial is."""
        summary = self._summarise()
        return lambda room: draw_search(summary, room)

    def render(self, live: str) -> str:
        """Return the search's page, without what only the planner knows."""
        return render_search(self._summarise(), live)

    def _summarise(self) -> Row:
        with _reading_study(self.path):
            from phalanx.study.layouts.read_search import read_search  # noqa: PLC0415

            summary = read_search(self.path)
        trials = self.path.with_name(self.path.name + _SEARCH_TRIALS)
        _tell_progress(summary, lambda row: trials / str(row["number"]) / "run")
        return summary


def open_watched(path: Path) -> Watched:
    """Return what `path` is: a run directory, there or not yet, or a study.

    Raises ConfigError for a file that is no study, and PhalanxError where studies cannot be read without an extra.
    """
    if path.name.endswith(_SEARCH_TRIALS) and path.is_dir():
        path = path.with_name(path.name.removesuffix(_SEARCH_TRIALS))
    journals = [path] if path.is_file() else []
    # A run directory may lie in a study, and holds none.
    if path.is_dir() and not (path / "metrics.jsonl").exists():
        journals = [file for file in (path / _TUNE_JOURNAL, *sorted(path.glob("*.search.log"))) if file.is_file()]
    if not journals:
        if path.exists() and not path.is_dir():
            raise ConfigError(f"{path} is neither a folder nor a file; give a run directory or a study")
        return WatchedRun(path)
    with _reading_study(path):
        from phalanx.study.store import name_study  # noqa: PLC0415

    found = {name: journal for journal in journals if (name := name_study(journal)) is not None}
    if "tune" in found:
        return WatchedTuning(found["tune"].parent)
    if "layout" in found:
        return WatchedSearch(found["layout"])
    raise ConfigError(f"{path} is no study; give a run directory, the folder of a phalanx tune study or a *.search.log")


@contextmanager
def _reading_study(path: Path) -> Iterator[None]:
    """Turn what goes wrong with a study that is damaged, or half written, into PhalanxError."""
    try:
        yield
    except ImportError as error:
        # Optuna and scikit-learn are an extra
        raise PhalanxError(f'the study {path} needs {error.name}: pip install "phalanx-train[search]"') from None
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise PhalanxError(f"{path} cannot be read as a study: {type(error).__name__}: {error}") from error


def _tell_progress(summary: Row, folder_of: Callable[[Row], Path]) -> None:
    """Add to running trials of a summary, as "progress", how far they are."""
    running = [row for row in summary["trials"] if row["state"] == "running"]
    for row in running[:_MOST_PROGRESS]:
        try:
            last = read_last_record(folder_of(row) / "metrics.jsonl", metrics_problem)
        except (PhalanxError, OSError):
            continue
        if last is not None:
            row["progress"] = f"trial {row['number']} step {last['step']:,} loss {format_number(float(last['loss']))}"
