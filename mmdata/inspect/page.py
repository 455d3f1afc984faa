"""What a page of the report shows, as plain data: report.html.j2 makes HTML of it, and escapes every text.

The page loads nothing: styles and pictures are inside, it has no script, and its content security policy forbids more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # runs are compared without the libraries of the page
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
class FoundImage:
    """An image that a query found, or the image that it should have found.

    Attributes:
        label: its place and score, or "wanted".
        alt: the image's caption, for readers who do not see it.
        right: whether the query's caption is a caption of this image.
        picture: data URI of a thumbnail; "" if the image cannot be shown.
        problem: why the image cannot be shown, else "".
    """

    label: str
    alt: str
    right: bool
    picture: str = ""
    problem: str = ""


@dataclass(frozen=True)
class Query:
    """A caption as a query.

    Attributes:
        text: the caption.
        note: the rank of the right image and the like, in small print.
        images: the image that the query should have found, then those it found, best first.
    """

    text: str
    note: str
    images: Sequence[FoundImage]


@dataclass(frozen=True)
class Chart:
    """A picture drawn by `mmdata.inspect.charts`, with a caption."""

    svg: Markup
    caption: str


@dataclass(frozen=True)
class ReportTable:
    """Rows of text under a head; if `numeric`, columns from the second on are aligned right."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str = ""
    numeric: bool = True


@dataclass(frozen=True)
class ReportSection:
    """A part of the page.

    Attributes:
        title: its heading.
        note: one sentence below it.
        missing: says, instead of content, how to get the content.
        queries, cards, charts, tables: shown in this order.
    """

    title: str
    note: str = ""
    missing: str = ""
    queries: Sequence[Query] = ()
    cards: Sequence[Card] = ()
    charts: Sequence[Chart] = ()
    tables: Sequence[ReportTable] = ()


def flat(values: Mapping[str, Any], between: str) -> dict[str, Any]:
    """{"train": {"lr": 0.1}} → {"train.lr": 0.1} with "." between the names."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            found |= {f"{name}{between}{inner}": one for inner, one in flat(value, between).items()}
        else:
            found[name] = value
    return found
