"""`phalanx watch`: a frame without a terminal, a screen that follows the logs on one, and what is no run."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from cli.terminal import run_in_terminal
from command_line import Call
from phalanx.cli.models.watched import WatchedSearch, WatchedTuning, open_watched
from phalanx.files import JsonLines
from phalanx.report.dashboard import Room
from phalanx.study.store import name_study
from report.run_dirs import EVENTS, event, metric, write_lines, write_run

STORES = Path(__file__).parents[1] / "study" / "stores"
SCREEN, SCREEN_ENDS = "\x1b[?1049h", "\x1b[?1049l"


def frame(path: Path, width: int = 80) -> str:
    return "\n".join(line.plain for line in open_watched(path).picture()(Room(width)))


def test_without_a_terminal_it_is_one_frame(call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # neither must keep it running in a pipe
    monkeypatch.setenv("FORCE_COLOR", "1")
    write_run(tmp_path / "night-run")
    outcome = call("watch", str(tmp_path / "night-run"))
    assert (outcome.code, outcome.err) == (0, "")
    plain = re.sub(r"\x1b\[[0-9;]*m", "", outcome.out)
    assert plain.startswith("night-run  finished") and "Goodput" in plain and SCREEN not in outcome.out
    assert max(map(len, plain.splitlines())) <= 80
    assert sorted(path.name for path in (tmp_path / "night-run").iterdir()) == [
        *("events.jsonl", "machine.json", "metrics.jsonl", "run.yaml")
    ]


@pytest.mark.parametrize(("columns", "settings"), [(80, {}), (50, {"NO_COLOR": "1"})])
def test_on_a_terminal_it_follows_the_run_until_it_is_interrupted(
    tmp_path: Path, columns: int, settings: dict[str, str]
) -> None:
    write_run(tmp_path / "r", 20, events=EVENTS[:3])
    log = JsonLines(tmp_path / "r" / "metrics.jsonl")

    def enough(shown: str) -> bool:
        # Once the first picture is there the run goes on; once that is seen, it is enough.
        if "step 20 of 40" in shown and "step 21 of 40" not in shown and len(log.path.read_text().splitlines()) == 20:
            log.append(metric(21))
        return "step 21 of 40" in shown

    code, shown = run_in_terminal(columns, "watch", str(tmp_path / "r"), "--every", "0.2", enough=enough, **settings)
    log.close()
    assert code == 0 and "Traceback" not in shown
    assert shown.count(SCREEN) == shown.count(SCREEN_ENDS) == 1
    # what was seen last stays, below each other and within the width
    left = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", shown.rpartition(SCREEN_ENDS)[2])
    assert left.strip().startswith("r  training  step 21 of 40") and "Goodput" in left
    assert max(map(len, left.splitlines())) <= columns
    assert ("\x1b[36m" in shown) != bool(settings)


def test_a_run_that_has_not_begun_is_no_error(call: Call, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    assert "run is not there yet; it is shown once `phalanx train` has made it" in " ".join(frame(run_dir).split())
    outcome = call("watch", str(run_dir))
    assert outcome.code == 2 and "run does not exist: give the run directory" in outcome.err
    run_dir.mkdir()
    write_lines(run_dir / "events.jsonl", [event("start", 0, 0, attention="flash")])
    text = frame(run_dir)
    assert "the first step is not done yet" in text and "attention flash" in text
    (run_dir / "metrics.jsonl").write_text('{"step": 1, "lo')
    assert "holds no whole record" in frame(run_dir)
    (run_dir / "metrics.jsonl").unlink()
    (run_dir / "metrics.jsonl").symlink_to("/etc/passwd")
    assert "is a link to /etc/passwd" in frame(run_dir)
    assert call("watch", str(run_dir)).code == 0


def test_faults_are_counted_and_damaged_ones_are_no_failure(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "run")
    write_lines(run_dir / "faults.jsonl", [{"rank": 1, "step": 7, "cause": "hang"}, {"rank": "\x1b[2J"}])
    with (run_dir / "faults.jsonl").open("a") as file:
        file.write("{{{\n")
    text = frame(run_dir, 120)
    assert "2 faults, the last: rank ␛[2J in step None, None" in text
    (run_dir / "faults.jsonl").unlink()
    (run_dir / "faults.jsonl").mkdir()
    assert "fault" not in frame(run_dir)


def test_the_stamp_changes_with_the_logs_and_only_then(tmp_path: Path) -> None:
    watched = open_watched(write_run(tmp_path / "run"))
    stamps = [watched.stamp(), watched.stamp()]
    with (tmp_path / "run" / "events.jsonl").open("a") as file:
        file.write(json.dumps(event("spike", 40, 130)) + "\n")
    stamps.append(watched.stamp())
    (tmp_path / "run" / "report.html").write_text("")
    stamps.append(watched.stamp())
    assert stamps[0] == stamps[1] != stamps[2] == stamps[3]


@pytest.fixture
def stores(tmp_path: Path) -> Path:
    return Path(shutil.copytree(STORES, tmp_path / "stores"))


def test_a_search_is_shown_by_its_journal(call: Call, stores: Path) -> None:
    journal = stores / "search" / "run.search.log"
    before = journal.read_bytes()
    (stores / "search" / "run.search.log.trials").mkdir()
    texts = [frame(path) for path in (journal, journal.parent, stores / "search" / "run.search.log.trials")]
    assert texts[0] == texts[1] == texts[2]
    assert texts[0].startswith("model on 16 devices of frontier, simulated  no trial runs")
    assert re.search(r"Best step +0.289 s\n", texts[0]) and "dp_replicate=1 zero=1 microbatch=2" in texts[0]
    assert journal.read_bytes() == before and name_study(journal) == "layout"
    page = WatchedSearch(journal).page("stamp")
    assert "dp_replicate=1 zero=1 microbatch=2" in page and 'data-stamp="stamp"' in page


def test_a_study_of_hyperparameters_is_shown_with_what_runs(stores: Path) -> None:
    folder = stores / "tune"
    text = frame(folder)
    assert text.startswith("language: least loss  no trial runs") and "Failed        1  crash" in text
    assert isinstance(open_watched(folder), WatchedTuning) and "study.log" in open_watched(folder).files()[0].name
    assert "Early stopping" in open_watched(folder).page("stamp")
    # torn in the middle of a session's file
    next((folder / "sessions").glob("*.json")).write_text('{"devi')
    assert "cannot be read as a study: JSONDecodeError" in " ".join(frame(folder).split())


def test_how_far_running_trials_are(tmp_path: Path) -> None:
    journal = tmp_path / "run.search.log"
    shutil.copy(STORES / "search" / "run.search.log", journal)
    lines = journal.read_text().splitlines(keepends=True)
    # without the last trial's end it still runs
    begun = max(place for place, line in enumerate(lines) if json.loads(line)["op_code"] == 4)
    journal.write_text("".join(lines[: begun + 1]))
    folder = tmp_path / "run.search.log.trials" / "7" / "run"
    folder.mkdir(parents=True)
    write_lines(folder / "metrics.jsonl", [metric(3), metric(4)])
    text = frame(journal)
    assert "1 running" in text.splitlines()[0] and "trial 7 step 4 loss 2.500" in text


def test_what_is_no_run_and_no_study_is_named(call: Call, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("hello\n")
    (tmp_path / "list.json").write_text("[1]\n")
    for name in ("notes.txt", "list.json"):
        outcome = call("watch", str(tmp_path / name))
        assert outcome.code == 2 and f"{name} is no study; give a run directory" in outcome.err
    outcome = call("watch", "/dev/null")
    assert outcome.code == 2 and "/dev/null is neither a folder nor a file" in outcome.err
    # an empty folder may become a run
    (tmp_path / "empty").mkdir()
    assert "the first step is not done yet" in frame(tmp_path / "empty")


def test_a_terminal_without_unicode_gets_what_it_can_write(tmp_path: Path) -> None:
    write_run(tmp_path / "run")
    environment = {"PYTHONIOENCODING": "latin-1", "PYTHONUTF8": "0"}
    code, shown = run_in_terminal(60, "watch", str(tmp_path / "run"), "--once", **environment)
    assert code == 0 and "Goodput" in shown and "***" in shown and shown.isascii()


def test_text_of_others_is_no_markup(call: Call, tmp_path: Path) -> None:
    warning = event("warning", 1, 1, text="[bold]a :smile: [/nothing] \x1b[2J")
    outcome = call("watch", str(write_run(tmp_path / "[red]run", events=[warning])))
    assert outcome.code == 0 and outcome.out.startswith("[red]run") and "[bold]a :smile: [/nothing] ␛[2J" in outcome.out
