"""The list of layouts on a plan's page, its chart and the data of its script, against the plan itself."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest

from phalanx.layout.spec import DEGREES
from phalanx.planner.plan.layout_list import LayoutList, list_layouts, list_questions, pick_drawn
from phalanx.planner.rank.enumeration import CHOSEN
from phalanx.report import plan_page
from phalanx.report.plan_layouts import (
    LAYOUT_COLUMNS,
    answer_rows,
    draw_trade_off,
    encode_layouts,
    encode_questions,
    explore_layouts,
    find_front,
    layout_columns,
    list_rows,
)
from phalanx.report.plan_page import render_plan
from report.pages import Page
from report.plans import plan

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)> & \" '"


@cache
def listed() -> LayoutList:
    return list_layouts(plan())


@cache
def page() -> Page:
    return Page(render_plan(plan(), f"phalanx train {HOSTILE}").replace("<br>", ""))


@cache
def data() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(page().by_id("plan-data").text)
    return found


def decode(column: dict[str, Any]) -> list[str]:
    return [column["texts"][cell] for cell in column["cells"]]


def test_every_legal_layout_is_listed_once_and_in_order() -> None:
    ranking, found = plan().ranking, listed()
    assert len(found) == len(ranking.legal) == found.legal and found.fitting == len(ranking.fitting) > 0
    assert found.fitting < len(found)
    assert sorted(found.find(ranking.legal)) == list(range(len(found)))
    assert np.all(np.diff(found.times.total) >= 0) and np.all(np.diff(found.memory_bytes[found.fitting :]) >= 0)
    models, model = plan().planner.models, plan().task.model
    known = np.flatnonzero(~np.isnan(found.p_fits))
    assert np.all(found.p_fits[: found.fitting] >= 0.9) and not np.any(found.p_fits[found.fitting :] >= 0.9)
    assert np.array_equal(models.memory(model, found.layouts.take(known)).peak, found.memory_bytes[known])
    exact = np.flatnonzero(found.exact[: found.fitting])
    assert np.allclose(models.times(model, found.layouts.take(exact)).total, found.times.total[exact], rtol=1e-12)
    # What is marked as a bound lies at or below what a simulation gives.
    bounds = np.flatnonzero(~found.exact[: found.fitting])[:20]
    assert np.all(models.times(model, found.layouts.take(bounds)).total >= found.times.total[bounds] * (1 - 1e-9))


def test_a_short_list_keeps_what_is_asked_for_first() -> None:
    whole, few = listed(), list_layouts(plan(), most=len(plan().ranking.ranked) + 40)
    assert len(few) == len(plan().ranking.ranked) + 40 < len(whole) and few.legal == len(whole)
    # all simulated ones, and the best of each choice of degrees
    few.find(plan().ranking.ranked.layouts)
    degrees = [tuple(int(getattr(whole.layouts, name)[row]) for name in DEGREES) for row in range(len(whole))]
    few.find(whole.layouts.take([degrees.index(split) for split in dict.fromkeys(degrees)]))
    assert few.times.total[0] == whole.times.total[0]


def test_cells_are_those_of_the_plan_and_sort_by_their_figures() -> None:
    rows = list_rows(plan(), listed())
    encoded = encode_layouts(rows)
    columns = {column["head"]: column for column in encoded["columns"]}
    for name in CHOSEN:
        wanted = [str(getattr(listed().layouts.row(row), name)).lower() for row in range(len(rows))]
        assert decode(encoded["fields"][name]) == wanted
    for head, figure in (("GiB", "memory_bytes"), ("step", "step_s"), ("TFLOP/s", "tflops_per_device")):
        timed = range(listed().fitting)
        by_cell = sorted(timed, key=lambda row: (columns[head]["cells"][row], row))
        figures = [rows[row][figure] for row in by_cell]
        assert figures == sorted(figures)
    assert columns["tp"]["texts"] == sorted(columns["tp"]["texts"], key=int)
    steps = decode(columns["step"])
    assert [text.startswith("≥ ") for text in steps[: listed().fitting]] == (
        ~listed().exact[: listed().fitting]
    ).tolist()
    assert set(steps[listed().fitting :]) == {""}


def test_columns_of_what_is_plain_in_all_rows_are_left_out() -> None:
    rows = [
        {"gather": "layer", "ep_chunks": chunks, "offload_optimizer": offloaded, "offload_activations": False}
        for chunks, offloaded in ((1, False), (2, False), (1, True))
    ]
    plain, chunked, offloaded = (
        {column.head for column in layout_columns(some, LAYOUT_COLUMNS)} for some in (rows[:1], rows[:2], rows[::2])
    )
    assert chunked - plain == {"chunks"} and "gather" not in chunked
    assert offloaded - plain == {"offload"}


def test_answers_say_what_is_lost_and_why_it_does_not_fit() -> None:
    rows = list_rows(plan(), listed())
    answers = answer_rows(plan(), listed(), rows)
    assert answers[0] == "the best layout" and len(answers) == len(rows)
    assert all("a step more: " in answer or answer == "as fast" for answer in answers[1 : listed().fitting])
    assert all(answer.startswith("does not fit: ") for answer in answers[listed().fitting :])
    # the first one that does not fit needs least: its causes are told
    first = answers[listed().fitting]
    assert re.search(r"of 64 GiB.*\(\w.* GiB\)$", first), first
    causes = plan().planner.memory_breakdown(plan().task.model, listed().layouts.take([listed().fitting]))
    assert f"({next(iter(causes))} " in first


def test_the_chart_marks_the_front() -> None:
    seconds, sizes = listed().times.total, listed().memory_bytes[: listed().fitting]
    front = find_front(listed())
    for row in front.tolist():
        better = (seconds < seconds[row]) | (sizes < sizes[row])
        assert not np.any((seconds <= seconds[row]) & (sizes <= sizes[row]) & better)
    best = np.asarray([place for place in range(3) if place not in front], np.int64)
    drawing, _ = draw_trade_off(listed(), front, best, 64 * 2**30)
    assert drawing.svg.count('class="on-front"') == len(front)
    assert drawing.svg.count('class="off-front"') == len(best)
    assert drawing.svg.count("h0") == listed().fitting


def test_the_script_finds_every_point_and_picture() -> None:
    assert data()["fitting"] == len(data()["across"]) == len(data()["up"]) == listed().fitting
    assert len(page().all("circle")) == len(data()["dots"])
    assert data()["drawn"][0] == 0
    pictures = page().all("div", "picture")
    shown = [element for element in pictures if "hidden" not in element.attributes]
    assert [element.attributes["id"] for element in shown] == ["picture-0"]
    assert {element.attributes["id"] for element in pictures} == {f"picture-{row}" for row in data()["drawn"]}


def test_questions_are_answered_by_the_planners_rules() -> None:
    reasons = [reason for rule in data()["rules"] for reason in rule["reasons"]]
    assert any("micro-batches a rank computes" in reason for reason in reasons)
    assert len(data()["splits"]) == len(list_questions(plan()).splits)
    for rule in data()["rules"]:
        choices = int(np.prod([len(data()["options"][name]) for name in rule["fields"]]))
        assert {len(block) for block in rule["blocks"]} == {choices}
        assert max(rule["splits"].values()) == len(rule["blocks"]) - 1
    few = list_layouts(plan(), most=len(listed()) - 5)
    found, _ = explore_layouts(plan(), few, list_rows(plan(), few), [0])
    assert "one of 5 that this page leaves out" in found["words"]["unlisted"]
    assert "leaves out" not in data()["words"]["unlisted"]


def test_choices_of_degrees_that_are_left_out_are_told() -> None:
    assert "this page knows" not in data()["words"]["no_split"]
    asked = list_questions(plan(), most=3)
    words = encode_questions(asked, "limits", "")["words"]
    assert len(asked.splits) == 3 and f"knows 3 of {asked.possible} choices of degrees" in words["no_split"]


def test_the_page_is_whole_without_its_script() -> None:
    scripted = [element for element in page().elements if "scripted" in element.classes]
    assert len(scripted) >= 5 and all("hidden" in element.attributes for element in scripted)
    assert f"The first 50 of {len(listed()):,}" in page().text
    assert "tp=4" in page().text and page().all("path", "lane") and page().all("rect", "fill-c1")


def test_hostile_text_stays_text() -> None:
    assert len(page().all("script")) == 2 and not page().all("img")
    assert any(HOSTILE in element.text for element in page().all("pre"))
    (policy,) = [one for one in page().all("meta") if one.attributes.get("http-equiv")]
    digest = base64.b64encode(hashlib.sha256(page().all("script")[1].text.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in (policy.attributes["content"] or "")
    machine = plan().planner.machine.model_copy(update={"about": HOSTILE})
    other = replace(plan(), planner=replace(plan().planner, machine=machine))
    again = Page(render_plan(other, "phalanx train").replace("<br>", ""))
    assert len(again.all("script")) == 2 and HOSTILE in again.all("p", "status")[0].text


def test_pictures_end_where_their_room_does(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = plan_page.draw_pictures(plan(), listed())
    assert [picture.place for picture in drawn] == [place for place, _ in pick_drawn(plan(), listed())]
    monkeypatch.setattr(plan_page, "MOST_DRAWN", 0)
    assert [picture.place for picture in plan_page.draw_pictures(plan(), listed())] == [0]
