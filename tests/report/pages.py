"""A report as a browser's parser would meet it: elements with their attributes and text."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from html.parser import HTMLParser

VOID = {"meta", "link", "input"}


@dataclass
class Element:
    tag: str
    attributes: dict[str, str | None]
    parts: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """Everything written inside, nested elements included, as it is."""
        return "".join(self.parts)

    @property
    def classes(self) -> set[str]:
        return set((self.attributes.get("class") or "").split())


class Page(HTMLParser):
    """Parses a page; an element that is closed out of order or never is an error."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.html = html
        self.elements: list[Element] = []
        self._open: list[Element] = []
        self.feed(html)
        self.close()
        assert not self._open, [element.tag for element in self._open]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        element = Element(tag, dict(attrs))
        self.elements.append(element)
        if tag not in VOID:
            self._open.append(element)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append(Element(tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open and self._open[-1].tag == tag, (tag, self.getpos())
        self._open.pop()

    def handle_data(self, data: str) -> None:
        for element in self._open:
            element.parts.append(data)

    def all(self, tag: str, *classes: str) -> list[Element]:
        return [element for element in self.elements if element.tag == tag and element.classes.issuperset(classes)]

    def by_id(self, name: str) -> Element:
        (found,) = [element for element in self.elements if element.attributes.get("id") == name]
        return found

    def has_id(self, name: str) -> bool:
        return any(element.attributes.get("id") == name for element in self.elements)

    def figure(self, key: str) -> str:
        """A headline figure, its unit included."""
        return " ".join(self.by_id(f"figure-{key}").text.split())

    @property
    def text(self) -> str:
        (body,) = self.all("body")
        return body.text

    def paths(self, chart: str, *classes: str) -> list[Element]:
        """The SVG paths of one chart's drawing that have all these classes."""
        inside = self.html.split(f'id="chart-{chart}"')[1].split("</figure>")[0].split('class="plot"')[1]
        return Page(f"<svg>{''.join(re.findall('<path [^>]*>', inside))}</svg>").all("path", *classes)


def points(path: Element) -> list[tuple[float, float]]:
    """The corners of a path of absolute M and L commands."""
    return [(float(x), float(y)) for x, y in re.findall(r"[ML]([-\d.]+) ([-\d.]+)", path.attributes["d"] or "")]
