"""Whether the kernel has killed processes because memory ran out. Loads nothing that takes time."""

from __future__ import annotations

from pathlib import Path

KILLED_FOR_MEMORY = "killed by the kernel because the memory of this host, or of this job, ran out"
"""What became of such a process, in words."""
LESS_MEMORY = (
    "lower layout.microbatch, set layout.recompute=full, or shard over more ranks (layout.dp_shard, layout.tp)"
)
"""What a user may change where memory runs out."""


class KillCount:
    """Notices processes that the kernel kills because memory ran out, from the moment this is made."""

    def __init__(self, file: Path = Path("/proc/vmstat")) -> None:
        """file: of the kernel's counters."""
        self._file = file
        self._before = self._count()

    def grew(self) -> bool:
        """Return whether the kernel has killed since; False where it does not say (other systems than Linux)."""
        return self._count() > self._before

    def _count(self) -> int:
        try:
            lines = self._file.read_text().splitlines()
        except OSError:
            return 0
        return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)


def prefer_to_be_killed() -> None:
    """Ask the kernel to kill this process and its children before others when memory runs out: before who started it."""
    file = Path("/proc/self/oom_score_adj")
    if file.exists():
        file.write_text("500")
