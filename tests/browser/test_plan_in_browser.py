"""The page of a plan in a browser: filters, sorts, points, why not; on a desktop, a phone, in print, without its script."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from phalanx.layout.legality import reasons_against
from phalanx.layout.spec import DEGREES, ResolvedLayout
from phalanx.planner.rank.enumeration import list_splits
from phalanx.report.plan_page import render_plan
from report.plans import plan

if TYPE_CHECKING:
    from playwright.sync_api import Page

    from browser.conftest import Open

pytestmark = pytest.mark.browser

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)> " + "very-long-name" * 20


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    written = tmp_path_factory.mktemp("plan") / "plan.html"
    written.write_text(render_plan(plan(), f"phalanx train {HOSTILE}"), "utf-8")
    return written


@cache
def data_of(file: Path) -> dict[str, Any]:
    text = file.read_text("utf-8").split('id="plan-data">')[1].split("</script>")[0]
    found: dict[str, Any] = json.loads(text)
    return found


def column(page: Page, head: str) -> list[str]:
    """The cells of one column of the table of all layouts, from above."""
    heads = page.locator("#layout-table th").all_inner_texts()
    place = [text.strip(" ▲▼") for text in heads].index(head) + 1
    return page.locator(f"#layout-table td:nth-child({place})").all_inner_texts()


def points(page: Page) -> int:
    return int(page.evaluate("document.querySelector('#trade-off .cloud').getAttribute('d').split('h0').length - 1"))


def ask(page: Page, **choices: Any) -> str:
    """Fill the form of "why not" and return the answer."""
    page.locator("#ask button[type=reset]").click()
    page.locator("#answer:empty").wait_for(state="attached")
    for name, value in choices.items():
        control = page.locator(f"#ask [name={name}]")
        if control.evaluate("control => control.tagName") == "SELECT":
            control.select_option(str(value))
        else:
            control.fill(str(value))
    return page.locator("#answer").inner_text()


@pytest.mark.parametrize("window", ["desktop", "phone"])
def test_everything_is_within_the_window(
    window: str, file: Path, open_page: Open, take_picture: Callable[..., None]
) -> None:
    opened = open_page(file, window)
    opened.check_whole()
    assert opened.page.locator("#filters").is_visible() and opened.page.locator("#ask").is_visible()
    for start in ("pareto", "layouts", "chosen"):
        take_picture(opened.page, f"plan-{start}-{window}", f"#{start}")
    assert ask(opened.page, tp=8, microbatch=2)
    take_picture(opened.page, f"plan-why-{window}", "#why")


def test_filters_apply_to_table_and_chart(file: Path, open_page: Open) -> None:
    page, data = open_page(file).page, data_of(file)
    listed, fitting = len(data["answers"]["cells"]), data["fitting"]
    assert points(page) == fitting
    page.locator("#filters [name=tp]").select_option("8")
    assert set(column(page, "tp")) == {"8"}
    texts = data["fields"]["tp"]["texts"]
    with_it = [row for row, cell in enumerate(data["fields"]["tp"]["cells"]) if texts[cell] == "8"]
    assert page.locator("#layout-count").inner_text().startswith(f"{len(with_it)} of {listed} layouts")
    assert 0 < points(page) == sum(row < fitting for row in with_it) < fitting
    page.locator("#filters [name=tp]").select_option("")
    page.locator("#filters [name=fits]").select_option("no")
    assert points(page) == 0 and set(column(page, "step")) == {""}
    page.locator("#filters button[type=reset]").click()
    page.locator("#layout-count", has_text=f"{listed} of {listed} layouts").wait_for()
    assert points(page) == fitting


def test_every_filter_has_an_effect(file: Path, open_page: Open) -> None:
    page, data = open_page(file).page, data_of(file)
    for control in page.locator("#filters select").all():
        name = control.get_attribute("name")
        control.select_option(index=1)
        count = int(page.locator("#layout-count").inner_text().split()[0].replace(",", ""))
        assert 0 < count < len(data["answers"]["cells"]), name
        control.select_option(index=0)


def test_heads_sort_both_ways(file: Path, open_page: Open) -> None:
    page = open_page(file).page
    for head in ("GiB", "tp", "TFLOP/s"):
        button = page.locator("#layout-table th button", has_text=head).first
        button.click()
        rising = [float(text.strip("≥ ")) for text in column(page, head) if text]
        assert rising == sorted(rising)
        button.click()
        falling = [float(text.strip("≥ ")) for text in column(page, head) if text]
        assert falling == sorted(falling, reverse=True) and falling[0] >= rising[-1]
        sorted_by = page.locator('#layout-table th[aria-sort="descending"]').all_inner_texts()
        assert [text.split()[0] for text in sorted_by] == [head]


def test_more_rows_are_shown_when_asked_for(file: Path, open_page: Open) -> None:
    page, data = open_page(file).page, data_of(file)
    assert len(column(page, "tp")) == 50
    page.locator("#more-layouts").click()
    assert len(column(page, "tp")) == min(250, len(data["answers"]["cells"]))


def test_a_row_is_chosen_with_its_pictures(file: Path, open_page: Open) -> None:
    page, data = open_page(file).page, data_of(file)
    # as the page was written, the script writes it again
    written = file.read_text("utf-8").split('chosen-name">')[2].split("<")[0]
    assert page.locator("#chosen ~ .chosen-name").inner_text() == written
    drawn = next(row for row in data["drawn"] if 0 < row < 50)
    page.locator(f'tr[data-row="{drawn}"]').click()
    assert page.locator(f"#picture-{drawn}").is_visible() and not page.locator("#picture-0").is_visible()
    assert (
        page.locator("#chosen ~ .chosen-answer").inner_text()
        == data["answers"]["texts"][data["answers"]["cells"][drawn]]
    )
    other = next(row for row in range(50) if row not in data["drawn"])
    page.locator(f'tr[data-row="{other}"]').focus()
    page.keyboard.press("Enter")
    assert page.locator("#undrawn").is_visible() and page.locator(".picture:visible").count() == 0
    fields = page.locator("#undrawn-fields").inner_text().split()
    assert f"tp={data['fields']['tp']['texts'][data['fields']['tp']['cells'][other]]}" in fields
    assert [field.split("=")[0] for field in fields] == list(data["fields"])


def test_points_are_chosen_by_click_and_key(file: Path, open_page: Open) -> None:
    page, data = open_page(file).page, data_of(file)
    dots = page.locator("#trade-off circle[role=button]")
    assert dots.count() == len(data["dots"])
    dots.nth(1).scroll_into_view_if_needed()
    box = dots.nth(1).bounding_box()
    assert box is not None
    page.mouse.click(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    name = page.locator("#chosen ~ .chosen-name").inner_text()
    assert (dots.nth(1).get_attribute("aria-label") or "").startswith(f"{name}: ")
    dots.nth(data["dots"].index(0)).focus()
    page.keyboard.press("Enter")
    assert page.locator("#chosen ~ .chosen-answer").inner_text() == "the best layout"


def test_why_not_has_the_planners_own_words(file: Path, open_page: Open) -> None:
    page = open_page(file).page
    model, batch = plan().task.model, 16
    node = plan().planner.machine.node.devices
    asked = 0
    splits = list_splits(model, 8, plan().task.fixed)
    for index in range(len(splits)):
        degrees = {name: getattr(splits.row(index), name) for name in DEGREES}
        # 1F1B with all at once: fewer micro-batches than stages
        layout = ResolvedLayout(batch, microbatch=2, recompute="full", zero=0, **degrees)
        reasons = [reason.text for reason in reasons_against(model, layout, 8, node)]
        choices = {**{name: value for name, value in degrees.items() if name != "cp"}, "microbatch": 2, "zero": 0}
        said = ask(page, **choices, schedule="1f1b", stages_per_rank=1)
        if reasons:
            asked += 1
            assert said.startswith("Not legal:") and any(reason in said for reason in reasons), (degrees, said)
        else:
            assert "Not legal" not in said, (degrees, said)
    assert 0 < asked < len(splits)


def test_why_not_answers_what_is_listed_and_what_is_not(file: Path, open_page: Open) -> None:
    page, data = open_page(file).page, data_of(file)
    said = ask(page, tp=8)
    assert "tp=8" in said and ("a step more" in said or "best layout" in said or "does not fit" in said)
    page.locator("#answer button").click()
    assert "tp=8" in page.locator("#chosen ~ .chosen-name").inner_text()
    assert "has to be 8 devices" in ask(page, tp=3)
    assert ask(page, pp=1, schedule="zbv").strip() == "schedule has no effect where pp is 1"
    # with any pp above 1 one rule refuses all that is asked for
    said = ask(page, schedule="gpipe", stages_per_rank=2)
    assert "layout.schedule=gpipe has one stage on each rank, not layout.stages_per_rank=2" in said
    assert "--why tp=1,pp=8,zero=1" in ask(page, tp=1, zero=1, pp=8)
    assert page.locator("#ask [name=recompute]").input_value() == "full", "fixed by the command line"
    unfitting = data["fitting"]
    choices = {name: data["fields"][name]["texts"][data["fields"][name]["cells"][unfitting]] for name in data["fields"]}
    free = {name: value for name, value in choices.items() if name not in ("recompute", "cp", "ep", "expert_tp")}
    assert "does not fit: " in ask(page, **free)


def test_without_its_script_it_is_a_page_of_tables(file: Path, open_page: Open) -> None:
    page = open_page(file, "phone", java_script_enabled=False).page
    assert len(column(page, "tp")) == 50
    assert not page.locator("#filters").is_visible() and not page.locator("#ask").is_visible()
    assert page.locator("noscript p").is_visible() and page.locator("#first-rows").is_visible()
    assert page.locator("#picture-0").is_visible()


def test_it_prints(file: Path, open_page: Open, tmp_path: Path) -> None:
    opened = open_page(file)
    opened.page.emulate_media(media="print")
    opened.check_whole()
    assert not opened.page.locator("#filters").is_visible() and opened.page.locator("#picture-0").is_visible()
    printed = opened.page.pdf(path=tmp_path / "plan.pdf", prefer_css_page_size=True)
    assert printed.startswith(b"%PDF") and printed.count(b"/Type /Page\n") + printed.count(b"/Type /Page ") < 40
