"""mmdata index: give foreign WebDataset tars random access, with an index in their folder; no tar is changed."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from mmdata.cli import Parser, progress_in_bytes, run
from mmdata.errors import printable
from mmdata.shards import build_index


def main() -> int:
    """Index a folder of tars or one tar; 1 if the accounts do not balance."""
    parser = Parser("index", __doc__)
    parser.add_argument("source", type=str, help="folder of .tar files, or one tar")
    parser.add_argument("--out", type=Path, help="folder for the index; default: the folder of the tars")
    parser.add_argument(
        "--tokenizer", help="folder or Hugging Face name; counts captions, so that batches can be planned"
    )
    parser.add_argument(
        "--max-bad-share", type=float, default=0.05, help="share of unusable samples that is an error (0.05)"
    )
    options = parser.parse_args()

    tokenizer = None
    if options.tokenizer:
        from mmdata.transform.text import Tokenizer  # imports torch, which only the tokenizer needs

        tokenizer = Tokenizer.load(options.tokenizer)
    with progress_in_bytes("index") as progress:
        report = build_index(
            options.source,
            out=options.out,
            count_tokens=tokenizer.count if tokenizer else None,
            tokenizer=tokenizer.fingerprint if tokenizer else None,
            max_bad_share=options.max_bad_share,
            progress=progress,
        )
    accounts = report.accounts
    for reason, count in Counter(line["reason"] for line in report.quarantined).most_common():
        print(f"quarantined: {count} {reason}")
    for loss, first in report.lost.items():
        print(f"lost: {accounts['lost'][loss]} {loss}; the first: {first}")
    shards, ignored = report.manifest.num_shards, accounts["ignored_members"]
    print(
        f"{accounts['samples']} samples in = {accounts['indexed']} indexed + {accounts['quarantined']} quarantined; "
        f"{shards} shards, {ignored} members ignored; index in {printable(str(report.folder))}"
    )
    return 0 if accounts["samples"] == accounts["indexed"] + accounts["quarantined"] else 1


if __name__ == "__main__":
    run(main)
