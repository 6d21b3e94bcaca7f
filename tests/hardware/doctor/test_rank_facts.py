"""What a rank says of itself and its host."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from phalanx.hardware.doctor.finding import Finding, format_ranks, merge_findings
from phalanx.hardware.doctor.rank_facts import (
    RankFacts,
    collect_facts,
    describe_surroundings,
    find_shared_type,
    parse_cores,
    read_near_cores,
)
from phalanx.layout.mesh import Ranks

MOUNTS = [("/", "ext4"), ("/home", "nfs4"), ("/home/local", "xfs"), ("/lustre/orion", "lustre")]


@pytest.mark.parametrize(
    ("path", "kind"),
    [("/tmp/a", None), ("/home/me", "nfs4"), ("/homes", None), ("/home/local/x", None), ("/lustre/orion/p/a/b", "lustre")],
)  # fmt: skip
def test_shared_file_systems(path: str, kind: str | None) -> None:
    assert find_shared_type(path, MOUNTS) == kind


def test_lists_of_cores(tmp_path: Path) -> None:
    assert parse_cores("0-3,8,10-11\n") == (0, 1, 2, 3, 8, 10, 11)
    (tmp_path / "0000:c1:00.0").mkdir()
    (tmp_path / "0000:c1:00.0" / "local_cpulist").write_text("48-50\n")
    assert read_near_cores("0000:c1:00.0", tmp_path) == (48, 49, 50)
    assert read_near_cores("0000:d1:00.0", tmp_path) == () == read_near_cores("", tmp_path)


def test_facts_of_this_process_survive_json() -> None:
    facts = collect_facts(Ranks(), torch.device("cpu"))
    assert facts.device == "cpu" and facts.cores == tuple(sorted(os.sched_getaffinity(0)))
    assert RankFacts.of_json(json.loads(json.dumps(asdict(facts)))) == facts
    place = describe_surroundings(Ranks(0, 8, 0, 4), facts, 2)
    assert place.cores == len(facts.cores) and "lo" in place.interfaces and place.shared("/proc/self") is None


def test_findings_that_several_ranks_have_are_one() -> None:
    warning, failure = Finding("warning", "a", "m", "f"), Finding("failed", "b", "m", "f")
    both = [Finding("warning", "a", "m", "f", (rank,)) for rank in (3, 0, 1)] + [failure]
    assert merge_findings(both) == [failure, Finding("warning", "a", "m", "f", (0, 1, 3))]
    assert merge_findings([warning, warning]) == [warning]
    assert Finding.of_json(json.loads(json.dumps(asdict(both[0])))) == both[0]


@pytest.mark.parametrize(
    ("ranks", "words"),
    [([5], "rank 5"), ([3, 1, 2], "ranks 1-3"), ([0, 4, 5, 9], "ranks 0, 4-5 and 9")],
)
def test_words_for_ranks(ranks: list[int], words: str) -> None:
    assert format_ranks(ranks) == words
