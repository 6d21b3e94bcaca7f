"""Makes pages from `templates/`, where `base.html`, `pieces.html` and `page.css` hold what all pages share."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

from jinja2 import Environment, FunctionLoader, StrictUndefined
from markupsafe import Markup

from phalanx import __version__
from phalanx.printable import make_printable


@dataclass(frozen=True)
class Tile:
    """One headline figure."""

    key: str
    label: str
    value: str
    unit: str = ""
    note: str = ""


def read_template(name: str) -> str:
    """Return the text of a template, style sheet or script."""
    return resources.files("phalanx.report").joinpath("templates", name).read_text(encoding="utf-8")


@dataclass(frozen=True)
class Script:
    """A script of a page, and the digest by which the page's policy allows it and no other."""

    text: Markup
    digest: str


def render_page(
    template: str, *styles: str, scripts: Sequence[str] = (), live: str | None = None, **values: Any
) -> str:
    """Return the page that `template` makes of `values`, with these style sheets after the common one.

    Every value is escaped and made printable: names of runs, texts of models and logs of others stand on these pages.

    scripts: names of the only ones that may run. live: what tells this page from the next, where a server makes it anew.
    """
    environment = Environment(
        loader=FunctionLoader(read_template),
        autoescape=True,
        # a misspelt name in a template is an error and not an empty string
        undefined=StrictUndefined,
        # files of text end with a line break
        keep_trailing_newline=True,
    )
    # Style sheets are ours: they go into the page as they are.
    style = Markup("".join(map(read_template, ("page.css", *styles))))
    allowed = []
    for name in (*scripts, *([] if live is None else ["live.js"])):
        text = read_template(name)
        # browsers run an inline script only if the policy of the page names its digest
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        allowed.append(Script(Markup(text), digest))
    page = environment.get_template(template)
    return make_printable(page.render(version=__version__, style=style, scripts=allowed, live=live, **values))


def render_message(title: str, words: str, live: str) -> str:
    """Return the page that a server shows where there is nothing to report on yet. live: see `render_page`."""
    return render_page("message.html", title=title, words=words, live=live)


def write_script_json(value: object) -> Markup:
    """Return JSON that is safe inside a script element: no character in it can end the element or open a comment.

    Raises ValueError for numbers that JSON cannot hold.
    """
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return Markup(text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e"))
