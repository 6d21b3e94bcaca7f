"""The report of a run in a browser: charts are read out by pointer and keys, axes are chosen, and logs are followed."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from phalanx.cli.models.serve import PageServer
from phalanx.cli.models.watched import open_watched
from phalanx.files import JsonLines
from phalanx.report.run_log import RunLog
from phalanx.report.run_page import write_page
from report.run_dirs import EVENTS, event, metric, write_run

if TYPE_CHECKING:
    from browser.conftest import Open

pytestmark = pytest.mark.browser

HOSTILE = "</pre></script><script>alert(1)</script><img src=x onerror=alert(2)>" + "long" * 200


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    samples = [event("sample", 30, 2, prompt=HOSTILE, text=HOSTILE), event("warning", 31, 2, message=HOSTILE)]
    run_dir = write_run(tmp_path_factory.mktemp("runs") / "night-run", events=[*EVENTS, *samples])
    return write_page(RunLog.read(run_dir))


@pytest.mark.parametrize("window", ["desktop", "phone"])
def test_everything_is_within_the_window(
    window: str, report: Path, open_page: Open, take_picture: Callable[..., None]
) -> None:
    opened = open_page(report, window)
    opened.check_whole()
    take_picture(opened.page, f"report-{window}")
    for summary in opened.page.locator("details:not([open]) > summary").all():
        summary.click()
    opened.check_whole()


def test_charts_are_read_out_together(report: Path, open_page: Open) -> None:
    page = open_page(report).page
    before = page.locator("[data-column]").all_inner_texts()
    plots = page.locator(".plot")
    plots.first.hover(position={"x": 30, "y": 40})
    at_pointer = page.locator("[data-column]").all_inner_texts()
    assert at_pointer != before
    assert page.locator(".plot .cursor:visible").count() == plots.count() > 1
    plots.first.focus()
    page.keyboard.press("Home")
    first = page.locator("[data-column]").all_inner_texts()
    page.keyboard.press("ArrowRight")
    assert page.locator("[data-column]").all_inner_texts() != first
    page.keyboard.press("Escape")
    assert page.locator("[data-column]").all_inner_texts() == before


def test_axes_are_chosen(report: Path, open_page: Open) -> None:
    page = open_page(report).page
    for axis in ("tokens", "time", "step"):
        page.locator("label", has=page.locator(f"#axis-{axis}")).click()
        assert page.locator(f"path.curve.x-{axis}:visible").count() > 0
        others = [other for other in ("tokens", "time", "step") if other != axis]
        assert all(page.locator(f"path.curve.x-{other}:visible").count() == 0 for other in others)


def test_it_prints(report: Path, open_page: Open) -> None:
    opened = open_page(report)
    opened.page.emulate_media(media="print")
    opened.check_whole()
    assert not opened.page.locator(".axis-choice").is_visible()
    assert opened.page.pdf().startswith(b"%PDF")


def test_the_served_page_is_loaded_anew_when_the_logs_grow(tmp_path: Path, open_page: Open) -> None:
    run_dir = write_run(tmp_path / "day-run", 20)
    server = PageServer(open_watched(run_dir), "localhost", 0)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        page = open_page(f"http://localhost:{server.server_address[1]}/").page
        assert page.locator("#figure-final_loss").inner_text() == "0.5000"
        page.locator("label", has=page.locator("#axis-tokens")).click()
        log = JsonLines(run_dir / "metrics.jsonl")
        log.append(metric(21))
        log.close()
        page.locator("#figure-final_loss", has_text="0.4762").wait_for()
        assert "This page follows the logs." in page.inner_text("body")
        # what the reader chose stays
        assert page.locator("#axis-tokens").is_checked()
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
