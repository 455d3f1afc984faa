"""mmdata push: share a folder of shards, on the Hugging Face hub or in a bucket of S3, or an exported model.

    mmdata push shards/photos hf://datasets/ME/photos --private --license cc-by-4.0
    mmdata push shards/photos s3://bucket/photos
    mmdata push shards/photos s3://bucket/photos --dry-run        # what would be sent
    mmdata push exports/photos hf://ME/photos --private --license apache-2.0    # of `mmdata export`

Shards are hashed while they are read, and the manifest goes last: readers see all of it or nothing. After an error or
kill -9 the same command sends the rest. README.md (a dataset card) and croissant.json are made from the manifest.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from mmdata.cli.paths import check_folder
from mmdata.errors import counted, printable
from mmdata.progress import progress_in_bytes

if TYPE_CHECKING:
    from mmdata.push import PushPlan


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "folder", metavar="OUT", help="folder with a manifest, or with sub-folders (train, val) with one, or a model"
    )
    parser.add_argument(
        "url", metavar="URL", help="hf://datasets/OWNER/NAME[@BRANCH], s3://BUCKET/PREFIX; a model: hf://OWNER/NAME"
    )
    parser.add_argument("--license", metavar="ID", help="identifier for the card, such as cc-by-4.0; default: unknown")
    parser.add_argument("--card", type=Path, metavar="FILE", help="a README.md of your own, in place of the one made")
    parser.add_argument("--private", action="store_true", help="what is made on the hub is private")
    parser.add_argument(
        "--overwrite", action="store_true", help="replace other files that are there; of shards, remove what is left"
    )
    parser.add_argument("--dry-run", action="store_true", help="print what would be sent, and send nothing")
    parser.add_argument(
        "--threads",
        type=int,
        default=4,
        metavar="N",
        help="files sent at once, up to 64 MiB of memory each; default: 4",
    )


def run(options: argparse.Namespace) -> int:
    """Push, and say what was sent."""
    check_folder(options.folder)
    from mmdata.push import PushConfig, open_store, plan_push, push

    store = open_store(options.url, private=options.private)
    config = PushConfig(license=options.license, card=options.card, overwrite=options.overwrite)
    plan = plan_push(options.folder, store, config)
    if options.dry_run:
        say_plan(plan, store.url)
        return 0
    with progress_in_bytes("push") as progress:
        push(plan, store, progress, threads=options.threads)
    present = f"; {len(plan.present):,} were there already" if plan.present else ""
    if plan.is_done:
        print(printable(f"{store.url} holds this folder already: nothing was sent"))
    else:
        files = counted(len(plan.files) + len(plan.last), "file")
        print(printable(f"{files} ({plan.bytes:,} bytes) sent to {store.url}{present}"))
    if plan.keeps_card:
        print("README.md there was left as it is; --card FILE replaces it")
    print(printable(f"see {store.page}"))
    for part in plan.parts:
        print(printable(f"load it with data.shards: {store.url}/{part.name}".rstrip("/")))
    return 0


def say_plan(plan: PushPlan, url: str) -> None:
    """Print what a push would do."""
    for name in [*plan.withdrawn, *plan.removed]:
        print(printable(f"remove  {name}"))
    for file in [*plan.files, *plan.last]:
        print(printable(f"{'replace' if file.name in plan.replaced else 'send':8}{file.name} ({file.bytes:,} bytes)"))
    files = counted(len(plan.files) + len(plan.last), "file")
    print(printable(f"{files}, {plan.bytes:,} bytes to send to {url}; {len(plan.present):,} are there already"))
