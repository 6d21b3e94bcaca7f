"""Copies that go on beside what a device computes: to and from host memory, and between devices."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Copies:
    """Copies that were asked for together on a stream of their own."""

    def __init__(self) -> None:
        self._done: torch.Event | None = None

    def record_end(self, stream: torch.Stream) -> None:
        """Note that the last of them has been given to `stream`."""
        self._done = stream.record_event()

    def wait(self) -> None:
        """Let the present stream wait for them; the process does not wait."""
        if self._done is not None:
            torch.accelerator.current_stream().wait_event(self._done)


class CopyStream:
    """A stream of copies beside the one that computes; none on a CPU, where each copy is done when it was asked for."""

    def __init__(self, device: torch.device) -> None:
        self._stream = None if device.type == "cpu" else torch.Stream(device)

    @contextmanager
    def behind_present(self) -> Iterator[Copies]:
        """Run what is inside on this stream, behind all that the present one was given so far.

        Whoever frees memory that is read or written inside waits for the copies first.
        """
        copies = Copies()
        if self._stream is None:
            yield copies
            return
        # What is copied was written on the stream that computes.
        self._stream.wait_stream(torch.accelerator.current_stream())
        with self._stream:
            yield copies
            copies.record_end(self._stream)

    def hold_present(self) -> None:
        """Let the present stream wait for all copies so far; the process does not wait."""
        if self._stream is not None:
            torch.accelerator.current_stream().wait_stream(self._stream)

    def synchronise(self) -> None:
        """Wait for all copies so far: host memory that they write may be read afterwards."""
        if self._stream is not None:
            self._stream.synchronize()
