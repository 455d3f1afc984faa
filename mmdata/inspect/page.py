"""Renders sections of plain data as one self-contained HTML file.

The file loads nothing: styles and pictures are inside, it has no script, and its content security policy forbids more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup


@dataclass(frozen=True)
class Fact:
    """A number at the head of the page: its value, what it counts, and a note in small print."""

    value: str
    label: str
    note: str = ""


@dataclass(frozen=True)
class Card:
    """One sample of the gallery.

    Attributes:
        key: of the sample.
        captions: all of them; the first is shown, the rest on request.
        note: size, tokens and the like, in small print.
        picture: data URI of a thumbnail; "" if the image cannot be shown.
        problem: why the image cannot be shown, else "".
    """

    key: str
    captions: Sequence[str]
    note: str
    picture: str = ""
    problem: str = ""


@dataclass(frozen=True)
class Chart:
    """A picture drawn by `mmdata.inspect.charts`, with a caption."""

    svg: Markup
    caption: str


@dataclass(frozen=True)
class Table:
    """Rows of text under a head; if `numeric`, columns from the second on are aligned right."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str = ""
    numeric: bool = True


@dataclass(frozen=True)
class Section:
    """A part of the page.

    Attributes:
        title: its heading.
        note: one sentence below it.
        missing: says, instead of content, how to get the content.
        cards, charts, tables: shown in this order.
    """

    title: str
    note: str = ""
    missing: str = ""
    cards: Sequence[Card] = ()
    charts: Sequence[Chart] = ()
    tables: Sequence[Table] = ()


@dataclass(frozen=True)
class Page:
    """The whole report."""

    title: str
    subtitle: str
    facts: Sequence[Fact]
    sections: Sequence[Section]


def render(page: Page) -> str:
    """The page as HTML; every text from data is escaped.

    Raises:
        ImportError: jinja2 is not installed.
    """
    try:
        from jinja2 import Environment, PackageLoader, StrictUndefined
    except ImportError as error:
        raise ImportError("the report needs Jinja: pip install 'mmdata[report]'") from error
    loader = PackageLoader("mmdata.inspect", "")
    environment = Environment(
        loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.get_template("report.html.j2").render(page=page)
