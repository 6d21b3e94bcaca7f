"""`phalanx calibrate`: really measures this CPU in seconds, writes whole profiles or none, and refuses early."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from command_line import Call
from phalanx.cli.planning import calibrate as subcommand
from phalanx.hardware.calibrate.measured_sizes import PROCESSOR
from phalanx.planner.time.profile import CONSTANTS, load_profile

SHORT = replace(
    PROCESSOR, span_s=0.001, models=((64, 64, 1), (64, 64, 4)), matmuls=6, singles=1, doubles=1, attentions=1,
    exchanged=(2**16, 2**18), blocks=((128, 64, 1),) * 2,
)  # fmt: skip


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(subcommand, "effort_for", lambda _device: SHORT)
    return tmp_path


def test_measures_this_cpu_and_writes_a_profile_that_loads(call: Call, here: Path) -> None:
    outcome = call("calibrate", "--device", "cpu", "--json")
    assert outcome.code == 0, outcome.err
    facts = json.loads(outcome.out)
    assert facts["written"] == "cpu.profile.yaml" and facts["device"] == "CPU"
    assert len(facts["blocks"]) == 2 and facts["operations"] >= 6
    named = load_profile(str(here / "cpu.profile.yaml"))
    # Units, not speed: processors without 16-bit products, and busy ones, are a thousand times slower than others.
    assert 1e7 < named.profile.matmul_flop_s < 1e14 and 1e7 < named.profile.memory_b_s < 1e14
    assert len(named.profile.measured) == facts["operations"]
    rates = [2 * x.batch * x.m * x.n * x.k / x.seconds for x in named.profile.measured]
    assert min(rates) > 1e5 and max(rates) < 1e14 and all(x.ratio > 0 for x in named.profile.measured)
    assert set(facts["constants"]) == set(CONSTANTS)
    assert "measured by phalanx calibrate on 1 x cpu" in named.source


def test_ctrl_c_leaves_nothing_behind(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "phalanx", "calibrate", "--device", "cpu"]
    process = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    process.stderr.readline()
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=60) == 130
    assert "Traceback" not in process.stderr.read()
    process.stderr.close()
    assert list(tmp_path.iterdir()) == []


@contextmanager
def full_disk() -> Iterator[None]:
    """No file of this process may grow beyond a kilobyte: for a moment, since that of the test's own output is one too."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1024, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)


def test_a_full_disk_is_found_before_anything_is_measured(
    call: Call, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subcommand, "measure_rank", None)
    with full_disk():
        outcome = call("calibrate", "--device", "cpu", "--out", str(here / "mine.yaml"))
    assert outcome.code == 2 and "cannot write" in outcome.err and "--out" in outcome.err
    assert list(here.iterdir()) == []


def test_a_folder_is_refused_before_anything_is_measured(
    call: Call, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subcommand, "measure_rank", None)
    monkeypatch.setattr(subcommand, "read_runs", None)
    for words in (["--device", "cpu"], ["--from-runs", "runs.csv"]):
        outcome = call("calibrate", *words, "--out", str(here))
        assert outcome.code == 2 and f"cannot write {here}: it is a folder; name a file" in outcome.err


def test_a_disk_that_fills_up_meanwhile_loses_nothing(call: Call, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subcommand, "require_writable", lambda _path: None)
    with full_disk():
        outcome = call("calibrate", "--device", "cpu")
    assert outcome.code == 1 and "the profile stands above" in outcome.err
    assert "matmul_flop_s:" in outcome.err and "operations:" in outcome.err
    assert list(here.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--cluster", "frontier"], "frontier has MI250X GCD devices, this is CPU"),
        (["--profile", "selene"], "--from-runs"),
        (["--out", "/proc/nowhere/mine.yaml"], "cannot write"),
        (["--from-runs", "missing.csv"], "missing.csv"),
    ],
)
def test_what_cannot_be_is_refused(call: Call, here: Path, words: list[str], message: str) -> None:
    outcome = call("calibrate", "--device", "cpu", *words)
    assert outcome.code in (1, 2) and message in outcome.err
    assert os.listdir(here) == []
