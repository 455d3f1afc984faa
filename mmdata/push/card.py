"""The dataset card of a folder of shards: README.md, whose head tells the hub and `datasets` which tars are a split.

`datasets` takes every file below a folder for data, except in folders whose names begin with "__" or ".": this is why
manifest, index and tokenizer lie in `__mmdata__`, and why the head names tars alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import yaml

from mmdata.errors import printable
from mmdata.push.croissant import dataset_name
from mmdata.push.files import PushedFolder

CARD_NAME = "README.md"
SIZES = (
    *((10**3, "n<1K"), (10**4, "1K<n<10K"), (10**5, "10K<n<100K"), (10**6, "100K<n<1M"), (10**7, "1M<n<10M")),
    *((10**8, "10M<n<100M"), (10**9, "100M<n<1B"), (10**10, "1B<n<10B"), (10**11, "10B<n<100B"), (10**12, "100B<n<1T")),
)
"""Numbers of rows below which the hub has a name for the size of a dataset."""
ACCOUNTS = ("rows", "samples", "written", "indexed", "merged", "duplicate", "filtered", "quarantined")
"""Accounts of `mmdata convert` and `mmdata index`, in the order of the table."""


def dataset_card(parts: Sequence[PushedFolder], url: str, *, license: str) -> str:
    """The text of README.md.

    Args:
        parts: folders of shards.
        url: where they are pushed to.
        license: an identifier of the hub's list.
    """
    paragraphs = [
        f"---\n{yaml.safe_dump(_head(parts, license), sort_keys=False, allow_unicode=True)}---",
        f"# {dataset_name(url)}",
        f"{_summary(parts)}, as [WebDataset](https://github.com/webdataset/webdataset) shards with an index for random "
        "access (`__mmdata__`), made by mmdata.",
        _splits(parts),
        *_accounts(parts),
        "## Load",
        *_usage(parts, url),
    ]
    if license == "unknown":
        paragraphs.append("## License\n\nNot stated. Whoever shares this dataset has to name its license here.")
    return "\n\n".join(paragraphs) + "\n"


def size_category(rows: int) -> str:
    """The hub's name for a number of rows: 55 -> "n<1K", 1000 -> "1K<n<10K"."""
    return next((name for bound, name in SIZES if rows < bound), "n>1T")


def _head(parts: Sequence[PushedFolder], license: str) -> dict[str, Any]:
    tasks = ["image-to-text", "text-to-image"] if any(part.manifest.has_captions for part in parts) else []
    tasks += ["image-classification"] if any(part.manifest.has_labels for part in parts) else []
    return {
        "license": license,
        "task_categories": tasks,
        "size_categories": [size_category(sum(part.manifest.rows for part in parts))],
        "tags": ["webdataset", "mmdata"],
        "configs": [
            {
                "config_name": "default",
                "data_files": [{"split": part.split, "path": f"{part.prefix}*.tar"} for part in parts],
            }
        ],
    }


def _summary(parts: Sequence[PushedFolder]) -> str:
    rows, captions = (sum(getattr(part.manifest, what) for part in parts) for what in ("rows", "captions"))
    return f"{rows:,} images" + (f" with {captions:,} captions" if captions else " with labels")


def _splits(parts: Sequence[PushedFolder]) -> str:
    lines = ["| split | files | rows | captions | shards | bytes |", "|---|---|---|---|---|---|"]
    for part in parts:
        numbers = (getattr(part.manifest, name) for name in ("rows", "captions", "num_shards", "bytes"))
        lines.append(f"| {part.split} | `{part.prefix}*.tar` | {' | '.join(f'{number:,}' for number in numbers)} |")
    return "\n".join(lines)


def _accounts(parts: Sequence[PushedFolder]) -> list[str]:
    """What became of each row of the source."""
    accounts = {part.split: part.manifest.accounts or {} for part in parts}
    names = [name for name in ACCOUNTS if any(type(of.get(name)) is int for of in accounts.values())]
    if not names:
        return []
    reasons = sorted({reason for of in accounts.values() for reason in of.get("reasons") or {}})
    lines = [f"| | {' | '.join(accounts)} |", "|---|" + "---|" * len(accounts)]
    lines += [f"| {name} | {' | '.join(f'{of.get(name, 0):,}' for of in accounts.values())} |" for name in names]
    for reason in reasons:
        counts = [f"{(of.get('reasons') or {}).get(reason, 0):,}" for of in accounts.values()]
        lines.append(f"| left out: `{printable(reason)}` | {' | '.join(counts)} |")
    return [
        "## Where the rows went",
        "\n".join(lines),
        "Each row that was left out is in `__mmdata__/quarantine.jsonl`.",
    ]


def _usage(parts: Sequence[PushedFolder], url: str) -> list[str]:
    part = next((part for part in parts if part.split == "train"), parts[0])
    first = part.manifest.listed(0).name if part.manifest.num_shards else "000000.tar"
    hub = url.removeprefix("hf://datasets/")
    is_hub = hub != url
    repo, _, branch = hub.partition("@")
    revision = f', revision="{branch}"' if branch else ""
    files = f'"webdataset", data_files={{"{part.split}": "{url}/{part.prefix}*.tar"}}'
    source = f'"{repo}"{revision}' if is_hub else files
    tar = f"https://huggingface.co/datasets/{repo}/resolve/{branch or 'main'}/{part.prefix}{first}"
    tar = tar if is_hub else f"pipe:aws s3 cp {url}/{part.prefix}{first} -"
    folder = f"{url}/{part.prefix}".rstrip("/")
    return [
        "With `datasets`, as a table or (`streaming=True`) without copying it first. It expects the same members in "
        "every sample, so one format of images:",
        f'```python\nfrom datasets import load_dataset\n\nrows = load_dataset({source}, split="{part.split}", '
        "streaming=True)\nprint(next(iter(rows)).keys())\n```",
        "With `webdataset`, one shard (a pattern such as `{000000..000009}.tar` names several):",
        f'```python\nimport webdataset as wds\n\nsamples = wds.WebDataset("{tar}", shardshuffle=False)'
        '.decode("pil")\nprint(next(iter(samples)).keys())\n```',
        "With `mmdata`, in planned batches for training, each row once an epoch:",
        "```python\nimport mmdata\n\n"
        f'data = {{"shards": "{folder}", "tokenizer": "clip", "global_batch_size": 32, "image_size": 224}}\n'
        "with mmdata.Loader.from_config(data) as loader:\n    for batch in loader:\n"
        '        print(batch["pixel_values"].shape)\n        break\n```',
    ]
