"""Pages from templates. What all of them share is in `base.html` and `pieces.html`, their looks in `page.css` and others."""

from __future__ import annotations

from importlib import resources
from typing import Any

from jinja2 import Environment, FunctionLoader, StrictUndefined
from markupsafe import Markup

from phalanx import __version__
from phalanx.printable import printable


def asset(name: str) -> str:
    """The text of a file beside this one."""
    return resources.files("phalanx.report").joinpath(name).read_text(encoding="utf-8")


def render(template: str, styles: tuple[str, ...], **values: Any) -> str:
    """The page that `template` makes of `values`, with these style sheets in it. Every value is escaped and printable."""
    environment = Environment(
        loader=FunctionLoader(asset),
        autoescape=True,
        undefined=StrictUndefined,
        keep_trailing_newline=True,
    )
    style = Markup("".join(map(asset, styles)))
    return printable(environment.get_template(template).render(version=__version__, style=style, **values))
