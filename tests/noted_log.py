"""Stands for a run's log: keeps what is noted."""

from __future__ import annotations

from typing import Any


class NotedLog:
    """Keeps the lines and events of a run."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.events: list[dict[str, Any]] = []

    def note(self, text: str) -> None:
        """Keep a line."""
        self.notes.append(text)

    def event(self, kind: str, step: int, **fields: Any) -> None:
        """Keep an event, with its kind and step among its fields."""
        self.events.append({"kind": kind, "step": step, **fields})
