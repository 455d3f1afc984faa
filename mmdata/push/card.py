"""The dataset card of a folder of shards: README.md, whose head tells the hub and `datasets` which tars are a split.

`datasets` takes every file below a folder for data, except in folders whose names begin with "__" or ".": this is why
manifest, index and tokenizer lie in `__mmdata__`, and why the head names tars alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import DatasetCard, DatasetCardData

from mmdata.errors import printable
from mmdata.push.files import PushedFolder, dataset_name

CARD_NAME = "README.md"
BOUNDS = ("1K", "10K", "100K", "1M", "10M", "100M", "1B", "10B", "100B", "1T")
"""Numbers of rows that divide the hub's sizes of a dataset."""
ACCOUNTS = ("rows", "samples", "written", "indexed", "merged", "duplicate", "filtered", "quarantined")
"""Accounts of `mmdata convert` and `mmdata index`, in the order of the table."""


def dataset_card(parts: Sequence[PushedFolder], url: str, *, license: str) -> str:
    """The text of README.md.

    Args:
        parts: folders of shards.
        url: where they are pushed to.
        license: an identifier of the hub's list.
    """
    rows, captions = (sum(getattr(part.manifest, name) for part in parts) for name in ("rows", "captions"))
    tasks = ["image-to-text", "text-to-image"] if any(part.manifest.has_captions for part in parts) else []
    tasks += ["image-classification"] if any(part.manifest.has_labels for part in parts) else []
    files = [{"split": part.split, "path": f"{part.prefix}*.tar"} for part in parts]
    head = DatasetCardData(
        license=license,
        task_categories=tasks,
        size_categories=[size_category(rows)],
        tags=["webdataset", "mmdata"],
        configs=[{"config_name": "default", "data_files": files}],
    )
    card = DatasetCard.from_template(
        head,
        template_path=str(Path(__file__).with_name("card.md.j2")),
        name=dataset_name(url),
        rows=rows,
        captions=captions,
        parts=parts,
        accounts=_accounts(parts),
        **_usage(parts, url),
    )
    return f"{card}\n"


def size_category(rows: int) -> str:
    """The hub's name for a number of rows: 55 -> "n<1K", 1000 -> "1K<n<10K"."""
    place = min(max(len(str(rows)) - 3, 0), len(BOUNDS))
    if 0 < place < len(BOUNDS):
        return f"{BOUNDS[place - 1]}<n<{BOUNDS[place]}"
    return "n>1T" if place else "n<1K"


def _accounts(parts: Sequence[PushedFolder]) -> dict[str, list[int]]:
    """What became of the rows of each part's source."""
    accounts = [part.manifest.accounts or {} for part in parts]
    reasons = [one.get("reasons") or {} for one in accounts]
    names = [name for name in ACCOUNTS if any(type(one.get(name)) is int for one in accounts)]
    table = {name: [one.get(name, 0) for one in accounts] for name in names}
    for reason in sorted({reason for one in reasons for reason in one}) if names else ():
        table[f"left out: `{printable(reason)}`"] = [one.get(reason, 0) for one in reasons]
    return table


def _usage(parts: Sequence[PushedFolder], url: str) -> dict[str, Any]:
    """What the examples of the template load: a split, by the names that each library takes."""
    part = next((part for part in parts if part.split == "train"), parts[0])
    folder = f"{url}/{part.prefix}".rstrip("/")
    tar = part.prefix + (part.manifest.listed(0).name if part.manifest.num_shards else "000000.tar")
    if url.startswith("hf://"):
        repo, _, branch = url.removeprefix("hf://datasets/").partition("@")
        source = f'"{repo}", revision="{branch}"' if branch else f'"{repo}"'
        tar = f"https://huggingface.co/datasets/{repo}/resolve/{branch or 'main'}/{tar}"
    else:
        source = f'"webdataset", data_files={{"{part.split}": "{url}/{part.prefix}*.tar"}}'
        tar = f"pipe:aws s3 cp {url}/{tar} -"
    return {"first": part, "folder": folder, "source": source, "tar": tar}
