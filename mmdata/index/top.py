"""The fields of manifest.json, their hashes, and the checks of a manifest.json that is read."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar

from pydantic import ConfigDict, NonNegativeInt, TypeAdapter, ValidationError

from mmdata.errors import DataError
from mmdata.forked import cached_property
from mmdata.index.columns import SCHEMA_VERSION
from mmdata.index.pages import PAGE_SHARDS, REMAKE, Page, page_name


@dataclass(frozen=True)
class Top:
    """The fields of manifest.json without its hashes; the attributes are those of `Manifest`."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    rows: NonNegativeInt
    bytes: NonNegativeInt
    num_shards: NonNegativeInt
    captions: NonNegativeInt
    lengths: list[tuple[NonNegativeInt, NonNegativeInt]]
    has_labels: bool
    pages: list[Page]
    tokenizer: str | None = None
    location: str = "."
    accounts: dict[str, Any] | None = None
    schema: int = SCHEMA_VERSION

    def content(self) -> dict[str, Any]:
        """The fields as values of JSON."""
        return {**{item.name: getattr(self, item.name) for item in fields(Top)}, "pages": [*map(asdict, self.pages)]}

    @cached_property
    def root(self) -> str:
        """Hash of what decides a plan: all fields but location and accounts. Moving the tars does not change it."""
        content = self.content()
        del content["location"], content["accounts"]
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def checked(content: dict[str, Any], path: str) -> Top:
    """The fields of a manifest.json, checked; `path` is for messages.

    Raises:
        DataError: it is of another schema, was edited or damaged, or its location is a URL or a command.
    """
    schema = content.get("schema")
    if isinstance(schema, int) and schema != SCHEMA_VERSION:
        remedy = "upgrade with `pip install -U mmdata`" if schema > SCHEMA_VERSION else REMAKE
        raise DataError(f"'{path}': schema {schema}, and this mmdata reads {SCHEMA_VERSION}; {remedy}")
    checksum = content.pop("checksum", None)
    expected = checksum_of(content)
    root = content.pop("root", None)
    try:
        top = _ADAPTER.validate_python(content)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise DataError(f"'{path}': '{place}': {first['msg']}; {REMAKE}") from error
    if root != top.root:
        raise DataError(f"'{path}': content does not match its root hash: edited or damaged; {REMAKE}")
    if checksum != expected:
        raise DataError(f"'{path}': content does not match its checksum: edited or damaged; {REMAKE}")
    for number, page in enumerate(top.pages):
        if page.file != page_name(number):
            raise DataError(f"'{path}': page {number} is '{page.file}', and must be '{page_name(number)}'; {REMAKE}")
    full = [PAGE_SHARDS] * (top.num_shards // PAGE_SHARDS)
    rest = top.num_shards % PAGE_SHARDS
    if [page.shards for page in top.pages] != full + [rest] * bool(rest):
        raise DataError(f"'{path}': its pages do not list {top.num_shards} shards, {PAGE_SHARDS} a page; {REMAKE}")
    if sum(page.rows for page in top.pages) != top.rows:
        raise DataError(f"'{path}': its pages do not list {top.rows} rows; {REMAKE}")
    return top


def checksum_of(content: dict[str, Any]) -> str:
    """SHA-256 over all fields of manifest.json, accounts and names of classes included.

    The root hash leaves location and accounts out, because a run may continue on another folder with equal rows.
    """
    as_read = json.loads(json.dumps(content))  # keys that are numbers become strings before they are sorted
    return hashlib.sha256(json.dumps(as_read, sort_keys=True).encode()).hexdigest()


_ADAPTER = TypeAdapter(Top)
