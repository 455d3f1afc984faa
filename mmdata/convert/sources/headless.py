"""Names the columns of a table of URLs without a header line. What the first lines hold decides, and is said."""

from __future__ import annotations

import re
from collections.abc import Sequence

URL, CAPTION = "url", "caption"
"""Names of the columns that are found; the others are called by their place: "column3"."""
_URL = re.compile(r"https?://\S+", re.IGNORECASE)
_IMAGE = re.compile(r"\.(?:jpe?g|png|gif|webp|bmp|tiff?|avif)\b", re.IGNORECASE)
_WORD = re.compile(r"[^\W\d_]+")


def is_data(fields: Sequence[str]) -> bool:
    """Whether the first line of a table is plainly a row, and no header: one of its fields is a URL."""
    return any(_URL.fullmatch(field.strip()) for field in fields)


def name_columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Names of the columns of a table without a header, from its first rows.

    The URLs of the images are in the column with the most URLs, and among those with as many in the one with the most
    that name a kind of image; the captions in the column with the most words, of those without URLs.

    Example:
        [["a dog", "http://a.example/1.jpg", "7"]] gives ["caption", "url", "column3"].
    """
    width = len(rows[0])
    names = [f"column{place + 1}" for place in range(width)]
    columns = [[row[place] for row in rows if len(row) == width] for place in range(width)]
    urls = [sum(bool(_URL.fullmatch(cell.strip())) for cell in column) for column in columns]
    images = [sum(bool(_IMAGE.search(cell)) for cell in column) for column in columns]
    names[max(range(width), key=lambda place: (urls[place], images[place], -place))] = URL
    words = [0 if urls[place] else sum(len(_WORD.findall(cell)) for cell in columns[place]) for place in range(width)]
    if max(words):
        names[words.index(max(words))] = CAPTION
    return names
