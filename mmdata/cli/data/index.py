"""mmdata index: give existing WebDataset tars random access, with an index in their folder; no tar is changed.

    mmdata index /data/cc12m --tokenizer clip
    mmdata index /data/cc12m --train-tokenizer 8192
    mmdata index /data/laion --caption json:TEXT           # member .json, its key "TEXT"
    mmdata index /data/pets --image png,jpg --label json:breed
    mmdata index /data/cc12m --skip-damaged
    mmdata index "https://host/cc12m-{0000..1023}.tar" --out index --tokenizer clip
    mmdata index "s3://bucket/cc12m/{0000..1023}.tar" --out index --fill-cache
    mmdata index /data/features                            # tars without images, for data.join

Tars behind URLs are fetched into the loader's cache, four at a time, read there and removed. The index is written to
--out, and the loader fetches a tar from its URL when it needs it. --fill-cache keeps the tars in the cache.

All tars are checked, and all damaged ones are listed at once. What was read is kept until the index is finished: if you
run the same command again, it reads only new and changed tars.

Tars without images, such as embeddings or synthetic captions for the images of other tars, get an index too:
data.join adds their members to the rows of other tars by key.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from mmdata.cli.flags import CACHE, add_flags, cache_of
from mmdata.cli.paths import next_commands
from mmdata.config import LoadingConfig
from mmdata.errors import ConfigError, Reason, counted, printable
from mmdata.progress import progress_in_bytes

if TYPE_CHECKING:
    from mmdata.index import IndexReport
    from mmdata.index.builder import MakeTokenizer
    from mmdata.index.encode import CountTokens


def run(options: argparse.Namespace) -> int:
    """Index a folder of tars or one tar; 1 if a sample is not accounted for."""
    report = do(options)
    for line in next_commands(report.folder, report.manifest) if report.manifest.has_images else []:
        print(printable(line))
    accounts = report.accounts
    if "samples" not in accounts:  # those of the conversion that made the tars, which has compared them
        return 0
    return 0 if accounts["samples"] == accounts.get("indexed", 0) + accounts.get("quarantined", 0) else 1


def do(options: argparse.Namespace) -> IndexReport:
    """Index, and print what was indexed and what was not."""
    if (template := options.caption_template) is not None and (options.tokenizer is None or template.count("{}") != 1):
        raise ConfigError(
            f"--caption-template {template!r}: needs --tokenizer, which counts, and {{}} once, where the caption stands"
        )
    from mmdata.index import build_index
    from mmdata.index.caption_lengths import counts_of
    from mmdata.tars.members import USUAL, Members

    count_tokens, tokenizer = None, None
    if options.tokenizer:
        from mmdata.text.tokenizer import Tokenizer  # imports torch, which only the tokenizer needs

        loaded = Tokenizer.load(options.tokenizer)
        counts = counts_of(loaded, options.caption_template)
        count_tokens, tokenizer = counts.count, counts.fingerprint
    cache = cache_of(options)
    members = Members.parse(image=options.image, caption=options.caption, label=options.label)
    with progress_in_bytes("index") as progress:
        report = build_index(
            options.source,
            out=options.out,
            count_tokens=count_tokens,
            tokenizer=tokenizer,
            make_tokenizer=trainer(options.train_tokenizer) if options.train_tokenizer else None,
            members=None if members == USUAL else members,
            max_bad_share=options.max_bad_share,
            skip_damaged=options.skip_damaged,
            overwrite=options.overwrite,
            progress=progress,
            cache=cache,
            fill_cache=options.fill_cache,
            num_workers=options.workers,
        )
    for line in account_lines(report):
        print(printable(line))
    return report


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "source",
        nargs="+",
        help="folder of .tar files, one tar, or URLs of tars (https, s3, gs, hf); URLs may have {0..9} in them",
    )
    parser.add_argument(
        "--out", type=Path, help="folder for the index; default: the folder of the tars; needed for URLs"
    )
    tokenizer = parser.add_mutually_exclusive_group()
    tokenizer.add_argument(
        "--tokenizer",
        help="clip, a folder, or a Hugging Face name; counts captions, so that batches can be planned. To an existing "
        "index only the lengths are added",
    )
    tokenizer.add_argument(
        "--train-tokenizer", type=int, metavar="N", help="train a tokenizer of N entries on the captions"
    )
    parser.add_argument(
        "--caption-template",
        metavar="TEXT",
        help='counts captions in a prompt, such as "a photo of {}", for runs with this data.caption_template',
    )
    member = "extension of a member, or json:KEY; several with commas, the preferred first"
    parser.add_argument("--image", metavar="EXT", help="extension of the image; several with commas")
    parser.add_argument("--caption", metavar="MEMBER", help=f"{member}; default: json:captions, txt, json:caption")
    parser.add_argument("--label", metavar="MEMBER", help=f'{member}; "": none; default: cls, json:label')
    parser.add_argument(
        "--max-bad-share", type=float, default=0.05, help="largest share of unusable samples; above it, an error (0.05)"
    )
    parser.add_argument(
        "--skip-damaged", action="store_true", help="index the samples before the damage in damaged tars"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace an index that differs")
    parser.add_argument("--workers", type=int, help="processes that read local tars; default: one for each core")
    parser.add_argument(
        "--fill-cache",
        action="store_true",
        help="keep the fetched tars in the loader's cache, as many as it holds",
    )
    add_flags(parser, LoadingConfig, CACHE)


_WITHOUT_JSON = ("json_unreadable", "json_too_large")
"""Losses of samples that are indexed with what their other members hold."""


def account_lines(report: IndexReport) -> list[str]:
    """What was indexed and what was not, a line each."""
    accounts = report.accounts
    lines: list[str] = []
    if report.guessed:
        selector = report.manifest.members.caption[0]
        lines.append(
            f'captions: {selector.words}, as no sample looked at has a .txt, or "captions" or "caption" in its JSON '
            f"(--caption {selector})"
        )
    if not report.manifest.has_images:
        lines.append(
            f"images: none; data.join: [{{shards: {report.folder}, name: NAME}}] brings these members to rows of others"
        )
    elif not report.manifest.has_captions:
        lines.append(
            "captions: none, a corpus of labels; leave data.tokenizer out, or name their member with --caption"
        )
    reasons = Counter(line["reason"] for line in report.quarantined)
    lines += [f"quarantined: {count} {reason}" for reason, count in reasons.most_common()]
    for loss, first in report.lost.items():
        how = " (used without its JSON)" if loss in _WITHOUT_JSON else ""
        lines.append(f"lost: {accounts['lost'][loss]} {loss}{how}; the first: {first}")
    for name, damage in accounts.get("damaged_shards", {}).items():
        lines.append(f"damaged: {damage}; the samples before it are indexed{_unread(report, name)}")
    folder, shards = report.folder, report.manifest.num_shards
    if report.cached is not None:
        lines.append(f"in the loader's cache: {report.cached:,} of {counted(shards, 'shard')}")
    if report.unchanged:
        return [
            *lines,
            f"{counted(shards, 'shard')}, the same as those of the index in {folder}, which stays; --overwrite reads "
            "them again",
        ]
    if report.only_counted:
        return [
            *lines,
            f"{counted(report.manifest.captions, 'caption')} counted, of {counted(shards, 'shard')}; index in {folder}",
        ]
    return [
        *lines,
        f"{counted(accounts['samples'], 'sample')} in = {accounts['indexed']:,} indexed + "
        f"{accounts['quarantined']:,} quarantined; {counted(shards, 'shard')}, "
        f"{counted(accounts['ignored_members'], 'member')} ignored; index in {folder}",
    ]


def _unread(report: IndexReport, shard: str) -> str:
    """What of a damaged tar nobody has counted, in words; "" if the place of the damage is not known."""
    reason = Reason.DAMAGED_SHARD.value
    found = [line for line in report.quarantined if (line["shard"], line["reason"]) == (shard, reason)]
    size = sum(entry.bytes for entry in report.manifest if entry.name == shard)
    return f", what follows byte {found[0]['offset']:,} of {size:,} is not counted" if found else ""


def trainer(vocab_size: int) -> MakeTokenizer:
    """What trains the tokenizer of the index."""

    def train(captions: Iterable[str], folder: Path) -> tuple[CountTokens, str]:
        from mmdata.text.tokenizer import Tokenizer, train_tokenizer

        train_tokenizer(captions, folder, vocab_size=vocab_size)
        tokenizer = Tokenizer.load(folder)
        return tokenizer.count, tokenizer.fingerprint

    return train
