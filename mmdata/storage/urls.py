"""The URLs of tars that `mmdata index` is given: which are accepted, and the folder that all of them lie in."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from urllib.parse import unquote

from mmdata.errors import ConfigError
from mmdata.safe_read import path_of_url
from mmdata.storage.fetch import display_name, is_http
from mmdata.storage.listed import check_plain_name
from mmdata.tars.foreign import expand_braces

PROTOCOLS = ("http", "https", "s3", "gs", "hf")
"""What the manifest of a folder on this machine may name as the place of its tars."""
_PACKED = (".tar.gz", ".tgz", ".tar.zst", ".tar.bz2", ".tar.xz")


@dataclass(frozen=True)
class TarUrls:
    """Tars in one folder behind a URL.

    Attributes:
        folder: URL, with the query that each file's URL ends with.
        names: of the files, not quoted, sorted as those of a folder on a disk.
    """

    folder: str
    names: list[str]

    def __str__(self) -> str:
        return display_name(self.folder)


def is_url(name: str | os.PathLike[str]) -> bool:
    """Whether a source is a URL; a `file:` URL is a path."""
    return "://" in os.fspath(name) and path_of_url(os.fspath(name)) is None


def is_followed(url: str) -> bool:
    """Whether a URL is of one of PROTOCOLS, and not a chain of them."""
    return url.partition("://")[0] in PROTOCOLS and "://" in url and "::" not in url


def find_urls(given: Sequence[str]) -> TarUrls:
    """The tars that URLs and brace patterns name.

    Raises:
        ConfigError: another protocol, no tar, a compressed one, tars of several folders, one twice, or what
            `expand_braces` raises.
        DataError: a name that no manifest can hold.
    """
    for url in given:
        if not is_followed(url):
            raise ConfigError(
                f"'{display_name(url)}': tars are indexed from a folder of this machine, or from URLs of "
                f"{', '.join(PROTOCOLS)}; copy them to one of these"
            )
    urls = [one for url in given for one in expand_braces(url)]
    folders: dict[str, str] = {}  # to the first URL of each
    for url in urls:
        folders.setdefault(_split(url)[0], url)
    names = sorted(_split(url)[1] for url in urls)
    for url in urls:
        _check_is_tar(url)
    if len(folders) > 1:
        first, second, *_ = (display_name(url) for url in folders.values())
        raise ConfigError(
            f"'{first}' and '{second}' lie in different folders: make an index of each with an --out of its own, and "
            "list both in data.shards"
        )
    if twice := next((name for name, following in pairwise(names) if name == following), None):
        raise ConfigError(f"'{display_name(given[0])}': names '{twice}' twice; each tar is indexed once")
    (folder,) = folders
    for name in names:
        check_plain_name(name, f"URL '{display_name(folder)}'")
    return TarUrls(folder, names)


def _split(url: str) -> tuple[str, str]:
    """The URL of a tar's folder, with the query of the tar's URL, and the tar's name."""
    head, question, query = url.partition("?") if is_http(url) else (url, "", "")
    folder, _, name = head.rpartition("/")
    return f"{folder}{question}{query}", unquote(name) if is_http(url) else name


def _check_is_tar(url: str) -> None:
    name = _split(url)[1]
    if name.endswith(_PACKED):
        raise ConfigError(
            f"'{display_name(url)}': compressed, which has no random access; unpack it first, or train from it "
            "without an index: `mmdata.stream(webdataset.WebDataset(URL), config)`"
        )
    if not name.endswith(".tar"):
        shown = display_name(url)
        raise ConfigError(
            f"'{shown}': not the URL of a .tar; name the tars, such as {shown.rstrip('/')}/{{0000..0009}}.tar"
        )
