"""The Croissant description of a folder of shards (JSON-LD, MLCommons Croissant 1.0), made from its manifests alone.

The same manifests, URL and license give the same bytes: nothing in it is the time of the push.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from mmdata.images.probe import EXTENSIONS
from mmdata.push.files import PushedFolder
from mmdata.push.store import Store
from mmdata.storage.folder import INNER
from mmdata.tars.members import Selector

CROISSANT_NAME = "croissant.json"
MAX_LISTED = 10_000
"""Most shards of a part that are listed, each with its hash: some 4 MB. Of more, the index files are listed,
which have the hashes; mlcroissant checks such a description, and reads no records by it."""

_CONTEXT: dict[str, Any] = {
    "@language": "en",
    "@vocab": "https://schema.org/",
    "cr": "http://mlcommons.org/croissant/",
    "rai": "http://mlcommons.org/croissant/RAI/",
    "data": {"@id": "cr:data", "@type": "@json"},
    "dataType": {"@id": "cr:dataType", "@type": "@vocab"},
    "dct": "http://purl.org/dc/terms/",
    "examples": {"@id": "cr:examples", "@type": "@json"},
    "sc": "https://schema.org/",
    "conformsTo": "dct:conformsTo",
    **{
        name: f"cr:{name}"
        for name in (
            *("citeAs", "column", "equivalentProperty", "extract", "field", "fileProperty", "fileObject", "fileSet"),
            *("format", "includes", "isLiveDataset", "jsonPath", "key", "md5", "parentField", "path", "recordSet"),
            *("references", "regex", "repeated", "replace", "samplingRate", "separator", "source", "subField"),
            "transform",
        )
    },
}
"""The context that the specification gives."""

_KEY = {"regex": r"^([^.]+)"}
"""Takes the key of a sample from the name of one of its members."""


def croissant(parts: Sequence[PushedFolder], store: Store, *, license: str) -> bytes:
    """The content of croissant.json.

    Args:
        parts: folders of shards.
        store: where they are pushed to.
        license: an identifier or a URL.
    """
    rows = sum(part.manifest.rows for part in parts)
    content = {
        "@context": _CONTEXT,
        "@type": "sc:Dataset",
        "conformsTo": "http://mlcommons.org/croissant/1.0",
        "name": dataset_name(store.url),
        "description": f"{rows} samples of images, as WebDataset shards with an index of mmdata.",
        "url": store.page,
        "license": license,
        "distribution": [item for part in parts for item in _distribution(part, store.base)],
        "recordSet": [record_set for part in parts for record_set in _record_sets(part)],
    }
    return (json.dumps(content, indent=1, ensure_ascii=False) + "\n").encode()


def dataset_name(url: str) -> str:
    """The last word of a URL, without the branch."""
    return url.rpartition("/")[2].partition("@")[0]


def _distribution(part: PushedFolder, base: str) -> Iterator[dict[str, Any]]:
    """The files of a part: shards, or for very many of them the index files, and sets of members."""
    by_name = {file.name: file for file in (*part.files, part.top)}
    shards = [part.prefix + part.manifest.listed(number).name for number in range(part.manifest.num_shards)]
    index_files = [part.prefix + INNER + name for name in part.manifest.files]
    is_listed = len(shards) <= MAX_LISTED
    formats = {"tar": "application/x-tar", "json": "application/json", "arrow": "application/vnd.apache.arrow.stream"}
    for name in [*(shards if is_listed else index_files), part.top.name]:
        yield {
            "@type": "cr:FileObject",
            "@id": name,
            "name": name,
            "contentUrl": base + name,
            "contentSize": f"{by_name[name].bytes} B",
            "encodingFormat": formats.get(name.rpartition(".")[2], "application/octet-stream"),
            "sha256": by_name[name].sha256,
        }
    holders = [{"@id": name} for name in shards]
    if not is_listed:
        holders = [{"@id": f"{part.split}-shards"}]
        yield _file_set(holders[0]["@id"], ["application/x-tar"], [f"{part.prefix}*.tar"])
    for members in _members(part):
        patterns = [f"*.{extension}" for extension in members.extensions]
        yield _file_set(f"{part.split}-{members.kind}", [members.media], patterns) | {"containedIn": holders}


def _file_set(name: str, formats: list[str], patterns: list[str]) -> dict[str, Any]:
    return {"@type": "cr:FileSet", "@id": name, "name": name, "encodingFormat": formats, "includes": patterns}


@dataclass(frozen=True)
class _Members:
    """Members of the samples, of one kind.

    Attributes:
        kind: "images", "captions" or "labels".
        field: what one is called.
        media: media type.
        extensions: their names end with these.
        key: where they are a value in JSON, its key.
    """

    kind: str
    field: str
    media: str
    extensions: list[str]
    key: str = ""

    def described(self, name: str, split: str, type: str) -> dict[str, Any]:
        """The field of this name that takes one from the files."""
        field = _field(name, type, _of_files(f"{split}-{self.kind}", "content"))
        # mlcroissant applies a jsonPath to no content of files: it would read the value as missing.
        return field | (
            {"description": f"JSON; the {self.field} is the value of {json.dumps(self.key)}"} if self.key else {}
        )


def _members(part: PushedFolder) -> list[_Members]:
    """Images, and captions or labels if they are known to be in members of their own, or in a JSON of a known key."""
    members, manifest = part.manifest.members, part.manifest
    usual = [extension.removeprefix(".") for extension in EXTENSIONS.values()] + ["jpeg", "tiff"]
    found = [_Members("images", "image", "image/*", _extensions(members.image) or usual)]
    if manifest.has_captions:
        found.append(_texts("captions", "caption", members.caption or (Selector("txt"),)))
    # Beside captions a label lies in the JSON of a sample, or in a .cls that only some tars have.
    if manifest.has_labels and (members.label or not manifest.has_captions):
        found.append(_texts("labels", "label", members.label or (Selector("cls"),)))
    return found


def _texts(kind: str, field: str, selectors: Sequence[Selector]) -> _Members:
    key = selectors[0].key
    if key:  # of several keys the first: a field has one source
        return _Members(kind, field, "application/json", [selectors[0].extension], key)
    return _Members(kind, field, "text/plain", _extensions([one for one in selectors if not one.key]))


def _extensions(selectors: Sequence[Selector]) -> list[str]:
    return list(dict.fromkeys(selector.extension for selector in selectors))


def _record_sets(part: PushedFolder) -> Iterator[dict[str, Any]]:
    """The captions and the labels of a split by their keys, and its samples: images, each with its caption or label."""
    split, (images, *texts) = part.split, _members(part)
    for text in texts:
        name = f"{split}-{text.kind}-by-key"
        key = _of_files(f"{split}-{text.kind}", "filename", _KEY)
        value = text.described(f"{name}/{text.field}", split, "sc:Text")
        yield _record_set(name, [_field(f"{name}/key", "sc:Text", key), value])
    fields = [
        _field(f"{split}/key", "sc:Text", _of_files(f"{split}-images", "filename", _KEY)),
        images.described(f"{split}/image", split, "sc:ImageObject"),
    ]
    if texts:
        # One, as mlcroissant joins no third set; labels beside captions are found by their keys.
        joined = f"{split}-{texts[0].kind}-by-key"
        fields[0]["references"] = {"field": {"@id": f"{joined}/key"}}
        source = {"field": {"@id": f"{joined}/{texts[0].field}"}}
        fields.append(_field(f"{split}/{texts[0].field}", "sc:Text", source))
    yield _record_set(split, fields)


def _record_set(name: str, fields: list[dict[str, Any]]) -> dict[str, Any]:
    return {"@type": "cr:RecordSet", "@id": name, "name": name, "key": {"@id": f"{name}/key"}, "field": fields}


def _field(name: str, kind: str, source: dict[str, Any]) -> dict[str, Any]:
    return {"@type": "cr:Field", "@id": name, "name": name, "dataType": kind, "source": source}


def _of_files(files: str, what: str, transform: dict[str, str] | None = None) -> dict[str, Any]:
    source: dict[str, Any] = {"fileSet": {"@id": files}, "extract": {"fileProperty": what}}
    return source | ({"transform": transform} if transform else {})
