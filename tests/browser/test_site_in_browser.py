"""The built documentation in a browser: every page within its window, without complaints; search and navigation work."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from browser.conftest import Open

pytestmark = pytest.mark.browser

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(file.relative_to(DOCS).with_suffix(".html").as_posix() for file in DOCS.rglob("*.md"))


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *arguments: object) -> None:
        """Requests are no news."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of the site. From a server, not from files: search loads its index."""
    out = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(out)]
    subprocess.run([*command, "--config-file", str(ROOT / "mkdocs.yml")], check=True, timeout=300)
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=str(out)))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize("window", ["desktop", "phone"])
def test_every_page_is_within_its_window(window: str, site: str, open_page: Open) -> None:
    assert len(PAGES) > 25
    opened = open_page(f"{site}/index.html", window)
    for name in PAGES:
        opened.page.goto(f"{site}/{name}")
        opened.check_whole()
        assert opened.page.locator("h1").first.is_visible(), name
        broken = "[...document.images].filter(one => one.complete && !one.naturalWidth).map(one => one.src)"
        assert opened.page.evaluate(broken) == [], name


def test_pictures_of_the_site(site: str, open_page: Open, take_picture: Callable[..., None]) -> None:
    for window in ("desktop", "phone"):
        opened = open_page(f"{site}/guides/planning.html", window)
        assert opened.page.locator("#the-page").count() == 1
        take_picture(opened.page, f"site-planning-{window}", "#the-page")


def test_search_finds_a_guide(site: str, open_page: Open) -> None:
    page = open_page(f"{site}/index.html").page
    page.locator("input[name=query]").click()
    # before its index is loaded the search takes no words
    page.locator(".md-search-result__meta", has_text="Type to start searching").wait_for(timeout=60_000)
    page.locator("input[name=query]").press_sequentially("goodput")
    found = page.locator(".md-search-result__link").first
    found.wait_for(timeout=60_000)
    found.click()
    page.wait_for_url(lambda url: "/index.html" not in url)
    assert "goodput" in page.locator("article").inner_text().lower()


def test_navigation_leads_to_a_guide(site: str, open_page: Open) -> None:
    page = open_page(f"{site}/index.html", "phone").page
    page.locator(".md-header__button[for=__drawer]").click()
    links = page.locator(".md-nav--primary a:visible")
    links.first.wait_for()
    assert links.count() > 3
