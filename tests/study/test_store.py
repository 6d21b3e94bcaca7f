"""A study on disk: who measures what, what survives a kill, what is never repeated."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import optuna
import pytest
from optuna.distributions import CategoricalDistribution
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend

from phalanx.errors import ConfigError
from phalanx.study.processes.process import Worker
from phalanx.study.store import StudyError, StudyStore, save_outcome
from phalanx.study.trial import ASKED, ATTEMPTS, INTERRUPTED, OK, Outcome, Trial

RANGES = {"x": CategoricalDistribution(tuple(range(100)))}
ABOUT = {"run": "abc", "devices": 8}
GOOD = Outcome(OK, value=1.5, losses=(3.0, 2.5), memory_bytes=1e9, seconds=4.0, more={"step_s": [1.4, 1.6]})


def claim(study: StudyStore, name: int) -> Trial | None:
    key = json.dumps({"x": name})
    return study.claim(key, {"x": name}, RANGES, sampler="test", limit_s=60.0, note={"expected_s": 1.0})


def opened(path: Path) -> StudyStore:
    return StudyStore(path, "layout", ABOUT)


def test_trials_come_back_as_they_were(tmp_path: Path) -> None:
    study = opened(tmp_path / "study.log")
    for name, outcome in enumerate((GOOD, Outcome("out_of_memory", words="no room"))):
        trial = claim(study, name)
        assert trial is not None and trial.outcome is None
        study.finish(trial, outcome)
    again = opened(tmp_path / "study.log").trials()
    assert [trial.outcome for trial in again] == [GOOD, Outcome("out_of_memory", words="no room")]
    assert again[0].good and again[1].failed and again[0].note == {"expected_s": 1.0}
    # The file is an ordinary Optuna study.
    storage = JournalStorage(JournalFileBackend(str(tmp_path / "study.log")))
    plain = optuna.load_study(study_name="layout", storage=storage)
    assert plain.best_value == 1.5 and plain.best_params == {"x": 0}


def test_what_is_known_or_running_is_not_tried_again(tmp_path: Path) -> None:
    study, other = opened(tmp_path / "study.log"), opened(tmp_path / "study.log")
    first = claim(study, 1)
    assert first is not None and claim(other, 1) is None
    study.finish(first, Outcome("crash", words="exit code 1"))
    assert claim(other, 1) is None and len(other.trials()) == 1


def test_two_searches_never_measure_the_same(tmp_path: Path) -> None:
    path = tmp_path / "study.log"
    opened(path)
    script = (
        "import json, sys\nfrom pathlib import Path\nfrom optuna.distributions import CategoricalDistribution\n"
        "from phalanx.study.store import StudyStore\n"
        "from phalanx.study.trial import Outcome\n"
        f"study = StudyStore(Path({str(path)!r}), 'layout', {ABOUT!r})\nmine = []\n"
        "ranges = {'x': CategoricalDistribution(tuple(range(100)))}\n"
        "for name in range(12):\n"
        "    trial = study.claim(json.dumps({'x': name}), {'x': name}, ranges, sampler='test', limit_s=60.0)\n"
        "    if trial is not None:\n        mine.append(name)\n        study.finish(trial, Outcome('ok', value=1.0))\n"
        "print(json.dumps(mine))\n"
    )
    racers = [subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) for _ in range(3)]
    found = [json.loads(racer.communicate(timeout=120)[0]) for racer in racers]
    assert sorted(name for mine in found for name in mine) == list(range(12))
    assert len(opened(path).trials()) == 12


def dead_process() -> Worker:
    process = subprocess.Popen([sys.executable, "-c", "pass"])
    worker = Worker(Worker.this_process().host, process.pid, "0")
    process.wait()
    return worker


def abandoned(path: Path, monkeypatch: pytest.MonkeyPatch, name: int) -> Trial:
    """A trial whose search is gone."""
    with monkeypatch.context() as patched:
        worker = dead_process()
        patched.setattr(Worker, "this_process", classmethod(lambda cls: worker))
        trial = claim(opened(path), name)
    assert trial is not None
    return trial


def test_deaths_of_a_search_do_not_count_against_its_trials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "study.log"
    for _ in range(ATTEMPTS + 1):
        abandoned(path, monkeypatch, 7)
    study = opened(path)
    assert [trial.outcome.cause for trial in study.trials() if trial.outcome] == [INTERRUPTED] * (ATTEMPTS + 1)
    assert claim(study, 7) is not None


def test_a_trial_that_is_killed_may_be_repeated_a_few_times(tmp_path: Path) -> None:
    study = opened(tmp_path / "study.log")
    for _ in range(ATTEMPTS):
        trial = claim(study, 7)
        assert trial is not None
        study.finish(trial, Outcome(INTERRUPTED))
    assert claim(study, 7) is None and claim(study, 8) is not None


def test_a_finished_trial_is_found_though_its_search_died(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "study.log"
    trial = abandoned(path, monkeypatch, 7)
    save_outcome(path.with_name("study.log.trials") / str(trial.number), GOOD)
    assert [found.outcome for found in opened(path).trials()] == [GOOD]


def test_another_hosts_trial_has_its_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "study.log"
    with monkeypatch.context() as patched:
        patched.setattr(Worker, "this_process", classmethod(lambda cls: Worker("elsewhere", os.getpid(), "")))
        claim(opened(path), 7)
    assert opened(path).trials()[0].outcome is None
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 60 + 119)
    assert opened(path).trials()[0].outcome is None
    monkeypatch.setattr(time, "time", lambda: now + 60 + 125)
    ended = opened(path).trials()[0].outcome
    assert ended is not None and ended.cause == INTERRUPTED


def test_what_was_asked_to_stop_may_always_be_repeated(tmp_path: Path) -> None:
    study = opened(tmp_path / "study.log")
    for _ in range(ATTEMPTS + 1):
        trial = claim(study, 7)
        assert trial is not None
        study.finish(trial, Outcome(INTERRUPTED, more={ASKED: True}))
    withdrawn = claim(study, 7)
    assert withdrawn is not None
    study.withdraw(withdrawn)
    assert claim(study, 7) is not None and len(study.trials()) == ATTEMPTS + 2


def test_a_reader_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "study.log"
    abandoned(path, monkeypatch, 7)
    before = path.read_bytes()
    reader = StudyStore(path, "layout", None)
    assert reader.about == ABOUT and reader.trials()[0].outcome is None and path.read_bytes() == before


def test_what_comes_late_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "study.log"
    trial = abandoned(path, monkeypatch, 7)
    study = opened(path)
    study.finish(trial, GOOD)
    assert [found.outcome for found in study.trials() if found.good] == [GOOD]
    assert claim(study, 7) is None


def test_a_torn_line_is_mended(tmp_path: Path) -> None:
    path = tmp_path / "study.log"
    study = opened(path)
    trial = claim(study, 1)
    assert trial is not None
    study.finish(trial, GOOD)
    whole = path.read_bytes()
    for cut in (1, 30):
        path.write_bytes(whole + b'{"op_code":8,"worker_id":"x","trial_id":0,"user_attr":{}}'[:-cut])
        again = opened(path)
        assert [found.outcome for found in again.trials()] == [GOOD]
        assert claim(again, 2) is not None
        path.write_bytes(whole)


def test_studies_are_not_mixed_up(tmp_path: Path) -> None:
    opened(tmp_path / "study.log")
    with pytest.raises(ConfigError, match="another devices; give another --storage"):
        StudyStore(tmp_path / "study.log", "layout", {**ABOUT, "devices": 4})
    (tmp_path / "other.log").write_text("no journal\n")
    with pytest.raises(StudyError, match=r"other\.log cannot be used"):
        opened(tmp_path / "other.log")


def test_intermediate_values(tmp_path: Path) -> None:
    study = opened(tmp_path / "study.log")
    trial = claim(study, 1)
    assert trial is not None
    study.report(trial, 10, 2.5)
    storage = JournalStorage(JournalFileBackend(str(tmp_path / "study.log")))
    assert optuna.load_study(study_name="layout", storage=storage).trials[0].intermediate_values == {10: 2.5}
