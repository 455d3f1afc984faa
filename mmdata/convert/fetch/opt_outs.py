"""How owners say that their images are not to be taken: headers, robots.txt (RFC 9309) and TDMRep. Pure functions."""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, cast

from protego import Protego

from mmdata.convert.fetch.settings import PRODUCT

DIRECTIVES = frozenset({"noai", "noimageai", "noindex", "noimageindex", "noml", "none"})
"""Words of X-Robots-Tag that opt out. "none" is "noindex, nofollow"."""
MAX_RULES_BYTES = 512 * 1024
"""Bytes of robots.txt and tdmrep.json that are read; RFC 9309 asks for 500 KiB."""
_WITH_VALUE = frozenset({"unavailable_after", "max-snippet", "max-image-preview", "max-video-preview"})
_TOKEN = re.compile(r"[A-Za-z0-9_.*-]+")


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
    return "tdm-reservation: 1" if any(value.strip() == "1" for value in tdm_reservation) else ""


def _directive(value: str) -> str:
    """The word of an X-Robots-Tag that opts us out; "" for none."""
    is_for_us = True
    for part in value.split(","):
        name, colon, rest = part.strip().partition(":")
        if colon and name.strip().lower() not in _WITH_VALUE and _TOKEN.fullmatch(name.strip()):
            is_for_us = name.strip().lower() in (PRODUCT, "*")
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
    tdm: tuple[tuple[str, bool], ...] = ()
    is_whole: bool = True

    @classmethod
    def of(cls, robots: bytes) -> Rules:
        """The rules of a robots.txt."""
        return cls(zlib.compress(robots) if b"disallow" in robots.lower() else b"")

    def forbid(self, url: str) -> str:
        """The file that forbids a URL; "" for none."""
        if self.robots and not _parsed(self.robots).can_fetch(url, PRODUCT):
            return "robots.txt disallows it"
        for pattern, reserved in self.tdm:
            if _matches(pattern, url):
                return "tdmrep.json reserves it" if reserved else ""
        return ""


@lru_cache(maxsize=256)
def _parsed(compressed: bytes) -> Protego:
    return Protego.parse(zlib.decompress(compressed).decode("utf-8-sig", "replace"))


def _matches(pattern: str, url: str) -> bool:
    """Whether a location of tdmrep.json fits a URL; such patterns are those of robots.txt."""
    return not _parsed(zlib.compress(f"User-agent: *\nDisallow: {pattern}\n".encode())).can_fetch(url, PRODUCT)


def parse_tdmrep(data: bytes) -> tuple[tuple[str, bool], ...]:
    """Locations and reservations of a tdmrep.json, in its order; none if it is no such file."""
    try:
        found: Any = json.loads(data)
    except (ValueError, RecursionError):
        return ()
    rules: list[tuple[str, bool]] = []
    for one in cast("list[Any]", found) if isinstance(found, list) else []:
        if not isinstance(one, dict):
            continue
        rule = cast("dict[str, Any]", one)
        location, reservation = rule.get("location"), rule.get("tdm-reservation")
        if isinstance(location, str) and location.isprintable() and reservation is not None:
            rules.append((location, str(reservation) == "1"))
    return tuple(rules)
