"""A real browser for tests of pages: Chromium, driven by Playwright. Without them tests fail and say so; none is skipped.

`make test-browser` installs what drives the browser. Pages are looked at in windows of a desktop and of a phone; whatever a
page writes to the console, throws or fails to load fails its test.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page, Playwright, Request

    Open = Callable[..., "Opened"]

WIDTHS = {"desktop": (1280, 900), "phone": (390, 844)}


class Opened:
    """A page in the browser, and what it complained about."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.complaints: list[str] = []
        page.on("console", lambda said: self.complaints.append(f"{said.type}: {said.text}"))
        page.on("pageerror", lambda error: self.complaints.append(f"error: {error}"))
        page.on("dialog", lambda dialog: self.complaints.append(f"dialog: {dialog.message}"))
        page.on("requestfailed", self._note_failure)
        page.on(
            "response", lambda answer: answer.status < 400 or self.complaints.append(f"{answer.status}: {answer.url}")
        )

    def _note_failure(self, request: Request) -> None:
        # What a page was still loading when the next one was opened has not failed.
        if "ERR_ABORTED" not in (request.failure or ""):
            self.complaints.append(f"failed: {request.url}")

    def check_whole(self) -> None:
        """No complaint so far, and nothing reaches beyond the right edge of the window."""
        assert self.complaints == []
        wide, window = self.page.evaluate("[document.documentElement.scrollWidth, window.innerWidth]")
        assert wide <= window, f"{self.page.url} is {wide} wide in a window of {window}"


def find_chromium() -> str:
    """Return the path of the browser: BROWSER, or the first one installed."""
    names = [os.environ.get("BROWSER") or "", "chromium", "chromium-browser", "google-chrome"]
    found = next((path for name in names if name and (path := shutil.which(name))), None)
    assert found is not None, "no Chromium was found: apt-get install chromium, or make test-browser BROWSER=path"
    return found


@contextmanager
def drive() -> Iterator[Playwright]:
    try:
        from playwright.sync_api import sync_playwright  # noqa: PLC0415
    except ImportError:
        pytest.fail('Playwright is not installed: make test-browser does that, or pip install -e ".[browser]"')
    with sync_playwright() as playwright:
        yield playwright


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    # Chromium has no sandbox for the superuser, as in a container.
    arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
    with drive() as playwright:
        launched = playwright.chromium.launch(executable_path=find_chromium(), args=arguments)
        yield launched
        launched.close()


@pytest.fixture
def open_page(browser: Browser) -> Iterator[Open]:
    """Opens an address or a file in a window of a given kind; afterwards nothing may have been complained about."""
    opened: list[Opened] = []

    def open_one(address: str | Path, window: str = "desktop", **settings: Any) -> Opened:
        width, height = WIDTHS[window]
        context = browser.new_context(viewport={"width": width, "height": height}, **settings)
        one = Opened(context.new_page())
        one.page.goto(address.as_uri() if isinstance(address, Path) else address)
        opened.append(one)
        return one

    yield open_one
    for one in opened:
        one.check_whole()
        one.page.context.close()


@pytest.fixture
def take_picture() -> Callable[..., None]:
    """Takes a picture of the window from an element on, into the folder SCREENSHOTS; without one it takes none."""
    folder = os.environ.get("SCREENSHOTS")

    def take(page: Page, name: str, start: str | None = None) -> None:
        if folder:
            if start is not None:
                page.evaluate("start => document.querySelector(start).scrollIntoView()", start)
            page.screenshot(path=Path(folder) / f"{name}.png")

    return take
