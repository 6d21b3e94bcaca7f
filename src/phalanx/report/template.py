"""Pages from templates. What all of them share is in `base.html` and `pieces.html`, their looks in `page.css` and others."""

from __future__ import annotations

from importlib import resources
from typing import Any

from jinja2 import Environment, FunctionLoader, StrictUndefined
from markupsafe import Markup

from phalanx import __version__

_CONTROLS = {code: chr(0x2400 + code) for code in range(0x20) if chr(code) not in "\t\n\r"} | {0x7F: "\u2421"}


def asset(name: str) -> str:
    """The text of a file beside this one."""
    return resources.files("phalanx.report").joinpath(name).read_text(encoding="utf-8")


def render(template: str, styles: tuple[str, ...], **values: Any) -> str:
    """The page that `template` makes of `values`, with these style sheets in it.

    Every value is escaped, and control characters in it become their symbols."""
    environment = Environment(
        loader=FunctionLoader(asset),
        autoescape=True,
        undefined=StrictUndefined,
        keep_trailing_newline=True,
        finalize=_printable,
    )
    style = Markup("".join(map(asset, styles)))
    return environment.get_template(template).render(version=__version__, style=style, **values)


def _printable(value: Any) -> Any:
    """Text from files and names with its control characters as their symbols (U+2400 on), which no page may hold."""
    return value.translate(_CONTROLS) if isinstance(value, str) and not isinstance(value, Markup) else value
