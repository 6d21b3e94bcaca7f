"""`phalanx watch`: a run or a study on the terminal while it goes on."""

from __future__ import annotations

import io
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live

from phalanx.cli.models.watched import Picture, Watched, open_watched
from phalanx.cli.options.models import WatchArguments
from phalanx.errors import ConfigError
from phalanx.launch.parent import is_ignored
from phalanx.printable import plain_console
from phalanx.report.dashboard import Room

MOST_OF_TIME = 0.1
"""Share of the time that may be spent reading: logs of long runs are large."""
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals of Ctrl-C, of the end of a job, and of a terminal that closes."""
_CLOCK_S = 1.0
"""Seconds between two drawings where nothing is new: times go on, and the window may have another size."""


def run_watch(asked: WatchArguments) -> None:
    """Run the subcommand."""
    watched, console = open_watched(asked.run), plain_console(stderr=False)
    # names of others may hold what the terminal's encoding has not
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    # not by the console, which can be told by the environment to take a file for a terminal
    if asked.once or not sys.stdout.isatty() or console.is_dumb_terminal:
        if not asked.run.exists():
            raise ConfigError(f"{asked.run} does not exist: give the run directory that `phalanx train` printed")
        console.print(Frame(watched.picture(), height=None))
        return
    frame = Frame(watched.picture())
    with ending_quietly():
        follow(watched, console, frame, asked.every)
    # What was seen last stays on the terminal; the screen of the dashboard is gone.
    console.print(frame)


@dataclass
class Frame:
    """Draws a picture, for whatever size the terminal has by then."""

    picture: Picture
    height: int | None = 0
    """Lines; 0 for those of the terminal, None for as many as it takes."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the lines."""
        # one line is left free: a full screen would scroll
        height = console.height - 1 if self.height == 0 else self.height
        yield from self.picture(Room(options.max_width, height, plain=options.ascii_only))


def follow(watched: Watched, console: Console, frame: Frame, every_s: float) -> None:
    """Draw `frame` on a screen of its own until somebody ends it, with a new picture whenever the files have changed."""
    stamp, due = watched.stamp(), 0.0
    with Live(frame, console=console, screen=True, auto_refresh=False) as live:
        while True:
            with _signals_waiting():
                live.refresh()
            time.sleep(min(every_s, _CLOCK_S))
            began = time.monotonic()
            if began < due or (now := watched.stamp()) == stamp:
                continue
            stamp, frame.picture = now, watched.picture()
            took = time.monotonic() - began
            due = began + max(every_s, took / MOST_OF_TIME)


@contextmanager
def _signals_waiting() -> Iterator[None]:
    """Let signals that end the program wait until the block ends: half a character would spoil what follows it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def ending_quietly() -> Iterator[None]:
    """End the block without a word at Ctrl-C, and at the signals of a closed terminal or an ended job."""

    def stop(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = {one: signal.signal(one, stop) for one in _ENDING if not is_ignored(one)}
    try:
        with suppress(KeyboardInterrupt):
            yield
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)
