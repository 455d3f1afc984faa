"""How owners say that their images are not to be taken: headers, robots.txt (RFC 9309) and TDMRep. Pure functions."""

from __future__ import annotations

import json
import re
import zlib
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, cast
from urllib.parse import unquote, urlsplit

from protego import Protego

from mmdata.convert.fetch.settings import PRODUCT

DIRECTIVES = frozenset({"noai", "noimageai", "noindex", "noimageindex", "noml", "none"})
"""Words of X-Robots-Tag that opt out. "none" is "noindex, nofollow"."""
MAX_RULES_BYTES = 512 * 1024
"""Bytes of robots.txt and tdmrep.json that are read; RFC 9309 asks for 500 KiB."""
MAX_LOCATIONS = 1000
"""Locations of a tdmrep.json that are compared one by one."""
MAX_PARSED_BYTES = 32 * 2**20
"""Bytes of robots.txt files that stay parsed; others are parsed again for each URL."""
_WITH_VALUE = frozenset({"unavailable_after", "max-snippet", "max-image-preview", "max-video-preview"})
_TOKEN = re.compile(r"[A-Za-z0-9_./*-]+")
_DISALLOWS = re.compile(rb"disallow|dissallow|dissalow|disalow|diasllow|disallaw", re.IGNORECASE)
"""Disallow, and how protego lets it be misspelled."""
_VERSION = re.compile(rf"^([ \t]*user[- ]?agent[ \t]*:?[ \t]*){PRODUCT}/[^\s#]*", re.IGNORECASE | re.MULTILINE)
"""A User-agent that names a version, which is none by RFC 9309, but means us."""
_ONES = frozenset({"1", "1.0", "true"})
_KEPT = re.compile(r"%(2[45AF]|3F)")
"""Escapes of `$`, `%`, `*`, `/` and `?`."""
_ESCAPE = re.compile(r"(?:%[0-9A-Fa-f]{2})+")


def opted_out_by_headers(robots_tags: Iterable[str], tdm_reservation: Iterable[str]) -> str:
    """The header by which an answer opts out; "" for none.

    Args:
        robots_tags: values of X-Robots-Tag. A name before a colon addresses one program, until the next name of the
            same value; what is addressed to another program is not for us.
        tdm_reservation: values of tdm-reservation.

    Example:
        opted_out_by_headers(["otherbot: noindex", "noai"], []) == "X-Robots-Tag: noai"
    """
    for value in robots_tags:
        if word := _directive(value):
            return f"X-Robots-Tag: {word}"
    return "tdm-reservation: 1" if any(_reserves(one) for value in tdm_reservation for one in value.split(",")) else ""


def _directive(value: str) -> str:
    """The word of an X-Robots-Tag that opts us out; "" for none."""
    is_for_us = True
    for part in value.split(","):
        name, colon, rest = part.strip().partition(":")
        if colon and name.strip().lower() not in _WITH_VALUE and _TOKEN.fullmatch(name.strip()):
            is_for_us = name.strip().lower().partition("/")[0] in (PRODUCT, "*")
            name = rest
        if is_for_us and name.strip().lower() in DIRECTIVES:
            return name.strip().lower()
    return ""


@dataclass(frozen=True)
class Rules:
    """What the files of a site allow.

    Attributes:
        robots: content of robots.txt, compressed; empty allows all.
        tdm: patterns of tdmrep.json with their reservations, in the order of the file.
        is_whole: whether both files were read, or are not there.
    """

    robots: bytes = b""
    tdm: tuple[tuple[Location, bool], ...] = ()
    is_whole: bool = True

    @classmethod
    def of(cls, robots: bytes) -> Rules:
        """The rules of a robots.txt."""
        return cls(zlib.compress(robots) if _DISALLOWS.search(robots) else b"")

    def forbid(self, url: str) -> str:
        """The file that forbids a URL; "" for none."""
        if self.robots and not _PARSERS.of(self.robots).can_fetch(url, PRODUCT):
            return "robots.txt disallows it"
        path = path_of(url) if self.tdm else ""
        for location, reserved in self.tdm:
            if location.fits(path):
                return "tdmrep.json reserves it" if reserved else ""
        return ""


class _Parsers:
    """Parsed robots.txt files, those used last. Bounded by the bytes of their text, so that small ones all stay."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._size = 0
        self._known: OrderedDict[bytes, tuple[Protego, int]] = OrderedDict()

    def of(self, compressed: bytes) -> Protego:
        """The parser of a compressed robots.txt."""
        if known := self._known.get(compressed):
            self._known.move_to_end(compressed)
            return known[0]
        text = zlib.decompress(compressed).decode("utf-8-sig", "replace")
        parser = Protego.parse(_VERSION.sub(rf"\1{PRODUCT}", text))
        self._known[compressed] = parser, len(text)
        self._size += len(text)
        while self._size > self._most and len(self._known) > 1:
            _, (_, size) = self._known.popitem(last=False)
            self._size -= size
        return parser


_PARSERS = _Parsers(MAX_PARSED_BYTES)


class Location:
    """A location of tdmrep.json. Its pattern is one of robots.txt: a prefix, with `*` for any text and `$` for the end.

    Args:
        text: as the file has it. Characters beyond ASCII stand for themselves and for their escapes alike.
    """

    __slots__ = ("_ends", "_parts")

    def __init__(self, text: str) -> None:
        self._ends = text.endswith("$")
        self._parts = [_unescaped(part) for part in re.sub(r"\*+", "*", text.removesuffix("$")).split("*")]

    def fits(self, path: str) -> bool:
        """Whether the pattern fits a path with its query, as `path_of` gives it. Linear in both."""
        first, *rest = self._parts
        if not path.startswith(first):
            return False
        if not rest:
            return not self._ends or path == first
        place = len(first)
        last = rest.pop()
        for part in rest:
            found = path.find(part, place)
            if found < 0:
                return False
            place = found + len(part)
        return len(path) - len(last) >= place and path.endswith(last) if self._ends else path.find(last, place) >= 0


def path_of(url: str) -> str:
    """The path and query of a URL, in the spelling in which locations are compared."""
    parts = urlsplit(url)
    return _unescaped((parts.path or "/") + (f"?{parts.query}" if parts.query else ""))


def _unescaped(text: str) -> str:
    """A text in one spelling: escapes become characters, except those of the characters that patterns and paths use."""
    return _ESCAPE.sub(lambda found: unquote(_KEPT.sub(r"%25\1", found[0].upper()), errors="replace"), text)


def parse_tdmrep(data: bytes) -> tuple[tuple[Location, bool], ...]:
    """Locations and reservations of a tdmrep.json, in its order; none if it is no such file.

    Those beyond MAX_LOCATIONS are not compared one by one: if any of them reserves, it stands for all of the site.
    """
    try:
        found: Any = json.loads(data)
    except (ValueError, RecursionError):
        return ()
    rules: list[tuple[Location, bool]] = []
    for one in cast("list[Any]", found) if isinstance(found, list) else []:
        if not isinstance(one, dict):
            continue
        rule = cast("dict[str, Any]", one)
        location, reservation = rule.get("location"), rule.get("tdm-reservation")
        if not isinstance(location, str) or not location.strip() or not location.isprintable() or reservation is None:
            continue
        if len(rules) < MAX_LOCATIONS:
            rules.append((Location(location), _reserves(reservation)))
        elif _reserves(reservation):
            return (*rules, (Location("/"), True))
    return tuple(rules)


def _reserves(value: object) -> bool:
    """Whether a value of tdm-reservation is 1, in any spelling of JSON or of a header."""
    return str(value).strip().strip('"').lower() in _ONES
