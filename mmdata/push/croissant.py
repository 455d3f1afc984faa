"""The Croissant description of a folder of shards (JSON-LD, MLCommons Croissant 1.1), made from its manifests alone.

The same manifests, URL and license give the same bytes: nothing in it is the time of the push.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from mmdata.images.probe import EXTENSIONS
from mmdata.push.files import PushedFolder, dataset_name
from mmdata.tars.members import Selector

CROISSANT_NAME = "croissant.json"

_CONTEXT: dict[str, Any] = {
    "@language": "en",
    "@vocab": "https://schema.org/",
    "cr": "http://mlcommons.org/croissant/",
    "rai": "http://mlcommons.org/croissant/RAI/",
    "data": {"@id": "cr:data", "@type": "@json"},
    "dataType": {"@id": "cr:dataType", "@type": "@vocab"},
    "dct": "http://purl.org/dc/terms/",
    "description": {"@container": "@language"},
    "examples": {"@id": "cr:examples", "@type": "@json"},
    "name": {"@container": "@language"},
    "sc": "https://schema.org/",
    "conformsTo": "dct:conformsTo",
    **{
        name: f"cr:{name}"
        for name in (
            *("arrayShape", "citeAs", "column", "containedIn", "equivalentProperty", "extract", "field", "fileObject"),
            *("fileProperty", "fileSet", "format", "includes", "isArray", "isLiveDataset", "jsonPath", "key", "md5"),
            *("parentField", "path", "recordSet", "references", "regex", "repeated", "replace", "samplingRate"),
            *("separator", "source", "subField", "transform"),
        )
    },
}
"""The context that the specification gives."""

_USUAL_IMAGES = [extension.removeprefix(".") for extension in EXTENSIONS.values()] + ["jpeg", "tiff"]
_FIRST_PART = {"regex": r"^([^.]+)"}
"""Takes the key of a sample from the name of one of its members."""


def croissant(parts: Sequence[PushedFolder], *, url: str, page: str, base: str, license: str) -> bytes:
    """The content of croissant.json.

    Args:
        parts: folders of shards.
        url: where they are pushed to.
        page: where people see them.
        base: what the URL of each file begins with; "" where HTTP cannot read it.
        license: an identifier or a URL.
    """
    rows = sum(part.manifest.rows for part in parts)
    members = [(part, kind) for part in parts for kind in _members(part)]
    content = {
        "@context": _CONTEXT,
        "@type": "sc:Dataset",
        "conformsTo": "http://mlcommons.org/croissant/1.1",
        "name": dataset_name(url),
        "description": f"{rows} samples of images, as WebDataset shards with an index of mmdata.",
        "url": page,
        "license": license,
        "distribution": [
            *(item for part in parts for item in _files(part, base)),
            *(kind.file_set(part) for part, kind in members),
        ],
        "recordSet": [kind.record_set(part) for part, kind in members],
    }
    return (json.dumps(content, indent=1, ensure_ascii=False) + "\n").encode()


def _files(part: PushedFolder, base: str) -> Iterator[dict[str, Any]]:
    """The shards and the manifest, which has the hashes of the index files."""
    formats = [*["application/x-tar"] * len(part.shards), "application/json"]
    for file, format in zip((*part.shards, part.top), formats, strict=True):
        yield {
            "@type": "cr:FileObject",
            "@id": file.name,
            "name": file.name,
            "contentUrl": base + file.name,
            "contentSize": f"{file.bytes} B",
            "encodingFormat": format,
            "sha256": file.sha256,
        }


class _Members(NamedTuple):
    """Members of the samples, of one kind. They are a set of files, and a set of records, each with its sample's key.

    Attributes:
        name: "image", "caption" or "label".
        media: type of the files.
        extensions: their names end with these.
        key: where they are a value in JSON, its key.
    """

    name: str
    media: str
    extensions: Sequence[str]
    key: str = ""

    def file_set(self, part: PushedFolder) -> dict[str, Any]:
        """The files, in all shards of a part."""
        name = f"{part.split}-{self.name}s"
        return {
            "@type": "cr:FileSet",
            "@id": name,
            "name": name,
            "encodingFormat": [self.media],
            "includes": [f"*.{extension}" for extension in dict.fromkeys(self.extensions)],
            "containedIn": [{"@id": file.name} for file in part.shards],
        }

    def record_set(self, part: PushedFolder) -> dict[str, Any]:
        """The records. mlcroissant 1.1 cannot join sets of files in tars, so each kind has records of its own."""
        name, files = f"{part.split}/{self.name}s", f"{part.split}-{self.name}s"
        kind = "sc:ImageObject" if self.name == "image" else "sc:Text"
        value = _field(f"{name}/{self.name}", kind, files, "content")
        if self.key:  # mlcroissant applies a jsonPath to no content of files: it would read the value as missing
            value["description"] = f"JSON; the {self.name} is the value of {json.dumps(self.key)}"
        key = _field(f"{name}/key", "sc:Text", files, "filename")
        key["source"]["transform"] = _FIRST_PART
        return {"@type": "cr:RecordSet", "@id": name, "name": name, "key": {"@id": key["@id"]}, "field": [key, value]}


def _field(name: str, kind: str, files: str, extracted: str) -> dict[str, Any]:
    source: dict[str, Any] = {"fileSet": {"@id": files}, "extract": {"fileProperty": extracted}}
    return {"@type": "cr:Field", "@id": name, "name": name, "dataType": kind, "source": source}


def _members(part: PushedFolder) -> Iterator[_Members]:
    """Images, and captions or labels if they are known to be in members of their own, or in a JSON of a known key."""
    members, manifest = part.manifest.members, part.manifest
    yield _Members("image", "image/*", [one.extension for one in members.image] or _USUAL_IMAGES)
    if manifest.has_captions:
        yield _texts("caption", members.caption or (Selector("txt"),))
    # Beside captions a label lies in the JSON of a sample, or in a .cls that only some tars have.
    if manifest.has_labels and (members.label or not manifest.has_captions):
        yield _texts("label", members.label or (Selector("cls"),))


def _texts(name: str, selectors: Sequence[Selector]) -> _Members:
    first = selectors[0]
    if first.key:  # of several keys the first: a field has one source
        return _Members(name, "application/json", [first.extension], first.key)
    return _Members(name, "text/plain", [one.extension for one in selectors if not one.key])
