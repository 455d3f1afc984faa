"""The corpus that a section `data` names: index, tokenizer and negative captions, opened once."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

from mmdata.config import DataConfig
from mmdata.config.data import sources
from mmdata.errors import ConfigError, excerpt
from mmdata.index import Index
from mmdata.loader.negative_captions import NegativeCaptions
from mmdata.loader.shard_prefetch import warn_of_small_cache
from mmdata.loader.workers.open_files import ensure_files, files_needed
from mmdata.plan import CaptionSources
from mmdata.plan.caption_sources import caption_sources
from mmdata.storage import ShardCache
from mmdata.storage.cache import GB
from mmdata.tables.joined import Joined
from mmdata.text.tokenizer import Tokenizer, load_tokenizer

logger = logging.getLogger("mmdata")


@dataclass(frozen=True)
class Corpus:
    """The open data of a section `data`, from which plan and batches are made."""

    index: Index
    tokenizer: Tokenizer | None
    joined: Joined
    negatives: NegativeCaptions | None = None
    captions: CaptionSources | None = None


def open_corpus(data: DataConfig) -> Corpus:
    """Open the corpus of a section `data`.

    Raises:
        ConfigError: the tokenizer does not exist, the negative captions are of another corpus, or this process may
            not open as many files as a loader needs.
        DataError: the shards have no index, or the file of negative captions is damaged.
    """
    tokenizer = load_tokenizer(data)
    index = open_index(data)
    joined = Joined.from_config(data, index)
    negatives = None
    if data.negative_captions is not None and tokenizer is not None:
        negatives = NegativeCaptions.read(
            Path(data.negative_captions), index, tokenizer, template=data.caption_template
        )
    return Corpus(index, tokenizer, joined, negatives, caption_sources(data, index, joined))


def open_index(data: DataConfig) -> Index:
    """Open the index of a section `data`, with a cache for shards behind URLs.

    Raises:
        ConfigError: this process may not open as many files as a loader needs.
        DataError: the shards have no index.
    """
    if of_streams := [name for name in ("members", "skip_damaged") if getattr(data, name)]:
        raise ConfigError(
            f"data.{of_streams[0]} is for a stream (mmdata.stream): an index knows its members and its damaged shards; "
            f"leave it out, and give --{'skip-damaged' if data.skip_damaged else 'caption'} to `mmdata index`"
        )
    cache = ShardCache(data.loading.cache_dir, max_bytes=int(data.loading.cache_gb * GB))
    index = Index.open([source.shards for source in sources(data)], cache=cache)
    for part in index.manifests:
        if not part.has_images:
            raise ConfigError(
                f"data.shards: '{part.folder}': samples without images, whose members come to the rows of others: "
                f"data.join: [{{shards: {part.folder}, name: NAME}}] beside a data.shards with images"
            )
    warn_of_small_cache(index, data.shuffle_window_rows)
    # A batch mixes the rows of a window, and prefetching reaches into the next window: with fewer rows held, each batch
    # would open the columns of its shards anew.
    index.held_rows = max(index.held_rows, 4 * data.shuffle_window_rows)
    _check_captions(data, index)
    _check_class_names(data, index)
    ensure_files(files_needed(data, index.num_shards))
    return index


def needs_hashes(data: DataConfig) -> bool:
    """Whether batches have hashes: they are set, or a batch may hold a row twice, which is no negative of itself."""
    again = any((source.repeat or 1.0) != 1.0 or source.weight is not None for source in sources(data))
    return (
        data.add_hashes
        or data.meaning is not None
        or again
        or (data.groups is not None and data.groups.candidates is not None)
    )


def _check_captions(data: DataConfig, index: Index) -> None:
    """Raise a ConfigError if batches are to have the text of captions, and a folder holds labels only."""
    for part in index.manifests:
        if data.add_captions and isinstance(data.captions, str) and not part.has_captions:
            raise ConfigError(
                f"data.add_captions: shards '{part.folder}' hold labels and no captions: leave data.add_captions out"
            )


def _check_class_names(data: DataConfig, index: Index) -> None:
    """Refuse a mixture whose datasets give a label to different classes, if the labels are what it is for.

    Raises:
        ConfigError: names both classes.
    """
    needed = data.tokenizer is None or (data.groups is not None and data.groups.source == "label")
    known = [(part.folder, names) for part in index.manifests if (names := (part.accounts or {}).get("classes"))]
    for folder, names in known[1:]:
        pairs = enumerate(zip(known[0][1], names, strict=False))
        if (differing := next((pair for pair in pairs if pair[1][0] != pair[1][1]), None)) is None:
            continue
        label, (first, other) = differing
        said = f"label {label} is {excerpt(first)} in '{known[0][0]}' and {excerpt(other)} in '{folder}'"
        if needed:
            raise ConfigError(f"{said}: convert both sources together, so that their classes are numbered alike")
        logger.warning("%s: the labels of batches mix them", said)
        return
