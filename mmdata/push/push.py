"""Pushes a folder of shards to a URL. The manifests go last: a reader sees no manifest whose files are not there."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from mmdata.errors import DataError, counted
from mmdata.processes import map_concurrently
from mmdata.push.card import CARD_NAME, dataset_card
from mmdata.push.croissant import CROISSANT_NAME, croissant
from mmdata.push.files import SHOWN, PushedFile, PushedFolder, belongs_to, read_parts
from mmdata.push.store import COMPARERS, Store, StoredFile
from mmdata.safe_read import read_regular
from mmdata.storage.folder import Location


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
    """Compare a folder with what is behind a URL; sends nothing.

    Raises:
        DataError: the folder is not what its manifest says (`read_parts`); or what is there differs, and `overwrite`
            is False.
        ConfigError: the place cannot be asked.
    """
    parts = read_parts(folder)
    there = store.listing([part.prefix for part in parts])
    files = [file for part in parts for file in part.files]
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
    strange = sorted(name for name in there if name not in names and _is_ours(name, parts))
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


def push(plan: PushPlan, store: Store, progress: Callable[[int, int], None] = lambda done, total: None) -> None:
    """Do what a plan says. It may be killed at any point: a plan made anew has what is left to do.

    Args:
        plan: of `plan_push`.
        store: the one that it was made for.
        progress: called with (bytes done, bytes in all).

    Raises:
        DataError: content differs from the manifest, another push writes there, or requests failed.
        ConfigError: credentials are missing or not accepted.
    """
    if plan.is_done:
        return
    done, total = 0, plan.bytes
    progress(done, total)

    def sent(file: PushedFile) -> None:
        nonlocal done
        done += file.bytes
        progress(done, total)

    store.begin()
    store.remove(plan.withdrawn)
    store.remove(plan.removed)
    store.send(plan.files, plan.replaced, sent)
    store.publish(plan.last, {name: old for name, old in plan.replaced.items() if name not in plan.withdrawn})
    progress(total, total)


def _same(files: Sequence[PushedFile], there: Mapping[str, StoredFile], store: Store) -> set[str]:
    """Names of the files that are there with the same content."""

    def ask(file: PushedFile) -> bool:
        stored = there.get(file.name)
        return stored is not None and stored.bytes == file.bytes and store.is_same(file, stored)

    answers = map_concurrently(ask, files, threads=COMPARERS, end=lambda: None)
    return {file.name for file, is_same in zip(files, answers, strict=True) if is_same}


def _is_ours(name: str, parts: Sequence[PushedFolder]) -> bool:
    """Whether a file that is there is one that a push of these parts could have sent."""
    return any(belongs_to(name, part.prefix) for part in parts)


def _description(parts: Sequence[PushedFolder], store: Store, config: PushConfig) -> tuple[PushedFile, PushedFile]:
    """README.md and croissant.json."""
    license = config.license or "unknown"
    card = (
        dataset_card(parts, store.url, license=license).encode()
        if config.card is None
        else read_regular(config.card, "card")
    )
    return PushedFile.of(CARD_NAME, card), PushedFile.of(CROISSANT_NAME, croissant(parts, store, license=license))


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
        content = json.loads(store.read(part.top.name))
    except ValueError:
        return ""
    ours = part.manifest.content()
    if not isinstance(content, dict):
        return ""
    names = [name for name in ("rows", "num_shards", "bytes", "tokenizer", "accounts") if name in ours]
    first = [name for name in names if content.get(name) != ours[name]]
    shown = [f"{name} {content.get(name)} there, {ours[name]} here" for name in first if name != "accounts"]
    return f"'{part.top.name}' differs ({', '.join(shown[:SHOWN]) or 'accounts' * bool(first) or 'contents'})"
