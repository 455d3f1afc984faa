"""Pushes a folder of shards to a URL, or an exported model to the hub.

The manifests go last: a reader sees no manifest whose files are not there.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from huggingface_hub import ModelCard

from mmdata.errors import ConfigError, DataError, counted
from mmdata.hashing import file_sha256
from mmdata.index.manifest import Manifest
from mmdata.processes import map_concurrently
from mmdata.push.card import CARD_NAME, dataset_card
from mmdata.push.croissant import CROISSANT_NAME, croissant
from mmdata.push.files import SHOWN, PushedFile, PushedFolder, StoredFile, read_parts
from mmdata.push.hub import HubStore
from mmdata.push.s3 import S3Store
from mmdata.safe_read import read_regular
from mmdata.storage.folder import Location
from mmdata.storage.s3 import S3Folder
from mmdata.storage.urls import display_name

COMPARERS = 32
"""Threads that ask whether a file is there already."""

_HUB = re.compile(r"hf://(datasets/)?((?!datasets/)[\w.-]+/[\w.-]+?)(?:@([^/@]+))?/?")


Store = S3Store | HubStore
"""A place that files are pushed to, which gives each file whole or not at all. `S3Store` says what the methods do."""


def open_store(url: str, *, private: bool = False) -> Store:
    """The place that a URL names; nothing is asked of it yet.

    Args:
        url: s3://BUCKET/PREFIX or hf://datasets/OWNER/NAME[@BRANCH]; for an exported model hf://OWNER/NAME[@BRANCH].
        private: a dataset or model of the hub that is made is private.

    Raises:
        ConfigError: another URL; or the packages for the place are missing.
    """
    if match := _HUB.fullmatch(url):
        return HubStore(match[2], match[3], private=private, kind="dataset" if match[1] else "model")
    if not url.startswith("s3://") or url == "s3://":
        raise ConfigError(
            f"'{display_name(url)}': a push goes to s3://BUCKET/PREFIX or hf://datasets/OWNER/NAME, that of an "
            "exported model to hf://OWNER/NAME; for another place, copy the folder there, manifest.json last"
        )
    if private:
        raise ConfigError("--private is for hf://; who may read a bucket is a setting of the bucket")
    return S3Store(S3Folder.of_url(url))


@dataclass(frozen=True, kw_only=True)
class PushConfig:
    """How a folder is pushed.

    Attributes:
        license: an identifier of the hub's list, such as "cc-by-4.0"; None: "unknown", and what is there stays.
        card: a README.md to send in place of the one that is made.
        overwrite: replace what is there and differs, and remove what the new manifest does not list.
    """

    license: str | None = None
    card: Path | None = None
    overwrite: bool = False


@dataclass(frozen=True)
class PushPlan:
    """What a push has to do.

    Attributes:
        parts: of the folder.
        files: to send first.
        last: to send after these, in this order, manifests at the end.
        present: files that are there already with the same content.
        replaced: what is there under the names of `files` and `last`, and differs.
        withdrawn: manifests to remove before anything is sent, as what they name is replaced.
        removed: other files to remove, which no manifest lists any more.
        keeps_card: a README.md is there, and is left as it is.
    """

    parts: list[PushedFolder]
    files: list[PushedFile]
    last: list[PushedFile]
    present: list[PushedFile]
    replaced: dict[str, StoredFile] = field(default_factory=dict[str, StoredFile])
    withdrawn: list[str] = field(default_factory=list[str])
    removed: list[str] = field(default_factory=list[str])
    keeps_card: bool = False

    @property
    def is_done(self) -> bool:
        """Whether nothing is left to do."""
        return not (self.files or self.last or self.removed)

    @property
    def bytes(self) -> int:
        """Bytes to send."""
        return sum(file.bytes for file in [*self.files, *self.last])


def plan_push(folder: Location, store: Store, config: PushConfig) -> PushPlan:
    """Compare a folder of shards, or an exported model, with what is behind a URL; sends nothing.

    Raises:
        DataError: the folder is not what its manifest says (`read_parts`), or is no exported model; or what is there
            differs, and `overwrite` is False.
        ConfigError: the place cannot be asked.
    """
    if isinstance(store, HubStore) and store.kind == "model":
        return _plan_model(Path(folder), store, config)
    parts = read_parts(folder)
    there = store.listing([part.prefix for part in parts])
    files = [file for part in parts for file in (*part.shards, *part.others)]
    tops = [part.top for part in parts]
    card, description = _description(parts, store, config)
    asked = [*files, card, description, *tops]
    same = _same(asked, there, store)
    differing = {file.name: there[file.name] for file in asked if file.name in there and file.name not in same}
    is_new = any(top.name not in same for top in tops)
    stays = {
        # Its owner may have edited it since; nothing in it is needed to read the shards.
        card.name: config.card is None and not (config.overwrite and is_new),
        description.name: config.license is None and not is_new,
    }
    kept = {name for name, stay in stays.items() if stay and name in differing}
    names = {file.name for file in asked}
    strange = sorted(name for name in there if name not in names and any(part.owns(name) for part in parts))
    conflicts = [name for name in differing if name not in stays] + strange
    if conflicts and not config.overwrite:
        raise _refusal(store, parts, conflicts, strange)
    to_send = [file for file in files if file.name not in same]
    return PushPlan(
        parts=parts,
        files=to_send,
        last=[file for file in (card, description, *tops) if file.name not in same | kept],
        present=[file for file in asked if file.name in same],
        replaced=differing,
        withdrawn=[top.name for top in tops if top.name in differing] if to_send or strange else [],
        removed=strange,
        keeps_card=card.name in kept,
    )


def push(
    plan: PushPlan,
    store: Store,
    progress: Callable[[int, int], None] = lambda done, total: None,
    *,
    threads: int = 4,
) -> None:
    """Do what a plan says. It may be killed at any point: a plan made anew has what is left to do.

    Args:
        plan: of `plan_push`.
        store: the one that it was made for.
        progress: called with (bytes done, bytes in all).
        threads: files that are sent at the same time; each takes up to 64 MiB of memory.

    Raises:
        DataError: content differs from the manifest, another push writes there, or requests failed.
        ConfigError: credentials are missing or not accepted; or no threads.
    """
    if threads < 1:
        raise ConfigError(f"--threads {threads}: a push needs at least 1")
    if plan.is_done:
        return
    done, total = 0, plan.bytes
    progress(done, total)

    def send(file: PushedFile) -> int:
        store.send(file, plan.replaced.get(file.name))
        return file.bytes

    store.begin(plan.withdrawn, plan.removed)
    for sent in map_concurrently(send, plan.files, threads=threads, end=lambda: None, ahead=2):
        done += sent
        progress(done, total)
    store.publish(plan.last, {name: old for name, old in plan.replaced.items() if name not in plan.withdrawn})
    progress(total, total)


def _plan_model(folder: Path, store: HubStore, config: PushConfig) -> PushPlan:
    """The plan for a folder of `mmdata export`. Each push is a commit, so that what it replaces can be had again."""
    if not (folder / CARD_NAME).is_file() or not (folder / "tokenizer_config.json").is_file():
        raise DataError(
            f"'{folder}': not a model that `mmdata export` wrote, as hf://OWNER/NAME takes; shards go to "
            "hf://datasets/OWNER/NAME"
        )
    paths = [path for path in sorted(folder.iterdir()) if not path.name.startswith(".")]
    if others := [path.name for path in paths if not path.is_file()]:
        raise DataError(f"'{folder}' has {others}, no plain files: a model is a folder of files; move them elsewhere")
    files = [PushedFile(path.name, path.stat().st_size, file_sha256(path), path) for path in paths]
    sent = {file.name: file for file in files}
    card = ModelCard((config.card or folder / CARD_NAME).read_text(encoding="utf-8"))
    if config.license is not None:
        card.data["license"] = config.license
    sent[CARD_NAME] = PushedFile.of(CARD_NAME, str(card).encode())
    if (named := sent.get("open_clip_config.json")) and (content := json.loads(named.read())):
        text = content["model_cfg"]["text_cfg"]
        text |= {"hf_tokenizer_name": store.name} if "hf_tokenizer_name" in text else {}  # where open_clip looks for it
        sent[named.name] = PushedFile.of(named.name, json.dumps(content, indent=2).encode() + b"\n")
    there = store.listing([])
    same = _same(list(sent.values()), there, store)
    keeps_card = (
        CARD_NAME in there and CARD_NAME not in same and not (config.card or config.license or config.overwrite)
    )
    kept = {CARD_NAME} if keeps_card else set[str]()
    last = [file for name, file in sent.items() if name not in same | kept]
    return PushPlan([], [], last, [sent[name] for name in same], keeps_card=keeps_card)


def _same(files: Sequence[PushedFile], there: Mapping[str, StoredFile], store: Store) -> set[str]:
    """Names of the files that are there with the same content."""

    def ask(file: PushedFile) -> bool:
        stored = there.get(file.name)
        return stored is not None and stored.bytes == file.bytes and store.has(file, stored)

    answers = map_concurrently(ask, files, threads=COMPARERS, end=lambda: None)
    return {file.name for file, is_same in zip(files, answers, strict=True) if is_same}


def _description(parts: Sequence[PushedFolder], store: Store, config: PushConfig) -> tuple[PushedFile, PushedFile]:
    """README.md and croissant.json."""
    license = config.license or "unknown"
    card = (
        dataset_card(parts, store.url, license=license).encode()
        if config.card is None
        else read_regular(config.card, "card")
    )
    described = croissant(parts, url=store.url, page=store.page, base=store.base, license=license)
    return PushedFile.of(CARD_NAME, card), PushedFile.of(CROISSANT_NAME, described)


def _refusal(store: Store, parts: Sequence[PushedFolder], conflicts: list[str], strange: list[str]) -> DataError:
    """Says what differs between what is there and what would be sent."""
    for part in parts:
        if part.top.name in conflicts and (difference := _difference(part, store)):
            return DataError(
                f"'{store.url}': holds other shards: {difference}; another URL, or --overwrite replaces it"
            )
    named = [f"'{name}' is in no manifest here" if name in strange else f"'{name}' differs" for name in conflicts]
    more = f" and {counted(len(named) - SHOWN, 'more file')}" if len(named) > SHOWN else ""
    return DataError(
        f"'{store.url}': holds other files: {', '.join(named[:SHOWN])}{more}; another URL, or --overwrite replaces and "
        "removes them"
    )


def _difference(part: PushedFolder, store: Store) -> str:
    """How the manifest that is there differs; "" if it cannot be read."""
    try:
        there = Manifest.read(f"{store.url}/{part.name}".rstrip("/"))
    except (DataError, ConfigError):
        return ""
    names = [name for name in ("rows", "num_shards", "bytes") if getattr(there, name) != getattr(part.manifest, name)]
    shown = [f"{name} {getattr(there, name)} there, {getattr(part.manifest, name)} here" for name in names]
    return f"'{part.top.name}' differs ({', '.join(shown) or 'contents'})"
