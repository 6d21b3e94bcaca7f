"""What the first rank makes of looks at the ranks: a line, an event and figures, once for each that has become slow."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from noted_log import NotedLog
from phalanx.launch import stragglers
from phalanx.launch.heartbeat import Heartbeat
from phalanx.launch.stragglers import RankReport, RankTime, SlowLink, Straggler
from phalanx.training.metrics import StepMetrics
from phalanx.training.safeguards import straggler_log
from phalanx.training.safeguards.straggler_log import StragglerLog

TIMES = tuple(RankTime(rank, 0.1, 0.09, 0.01) for rank in range(4))
LINK = SlowLink((2, 3), ("node1", "node2"), 0.024, 0.24)


def test_a_slow_link_is_told_once_and_is_in_the_figures_as_long_as_it_is_slow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(straggler_log, "_LOOK_S", 0.0)
    lines = NotedLog()
    log = StragglerLog(Heartbeat(tmp_path, 0), lines)  # type: ignore[arg-type]
    reports = [
        RankReport(TIMES, None, LINK),
        RankReport(TIMES[::-1], None, LINK),
        RankReport(TIMES, Straggler(1, "node1", "host", 0.03, 0.3), None),
        RankReport(TIMES, None, LINK),
    ]
    found = []
    for step, report in enumerate(reports, 1):
        (tmp_path / stragglers.FILE).write_text(json.dumps(asdict(report)))
        found.append(log.add_times(StepMetrics(step, *[0] * 14)))  # type: ignore[arg-type]
    assert [(one.slow_link, one.straggler) for one in found] == [
        ((2, 3), None),
        ((2, 3), None),
        (None, 1),
        ((2, 3), None),
    ]
    assert [(event["kind"], event["step"]) for event in lines.events] == [
        ("slow_link", 1),
        ("straggler", 3),
        ("slow_link", 4),
    ]
    assert lines.events[0]["ranks"] == (2, 3) and lines.events[0]["hosts"] == ("node1", "node2")
    assert "the link of ranks 2, 3 between node1 and node2 is slow" in lines.notes[0]
    assert found[0].as_dict()["slow_link"] == (2, 3) and "slow_link" not in found[0].numbers()
