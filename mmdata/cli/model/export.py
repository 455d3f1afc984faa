"""mmdata export: a trained model as a folder that other libraries load.

    mmdata export runs/photos exports/photos --to transformers

It takes towers of CLIP, SigLIP and SigLIP 2: vit_b_32 and its like, and pretrained ones. They are then loaded by
CLIPModel, SiglipModel or Siglip2Model.from_pretrained.
The folder also has the tokenizer, an image processor, and a model card (README.md) with settings and scores.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from mmdata.cli.paths import check_run
from mmdata.errors import printable


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, metavar="RUN_OR_CHECKPOINT", help="folder of a run, or one checkpoint")
    parser.add_argument("out", type=Path, metavar="OUT", help="folder to write; must not exist")
    parser.add_argument("--no-ema", action="store_true", help="the trained weights, in place of the averaged ones")
    parser.add_argument("--to", choices=("transformers",), default="transformers", help="default: transformers")


def run(options: argparse.Namespace) -> int:
    """Export, and print how to load the folder."""
    check_run(options.run)
    from mmdata.trained import load_run

    trained = load_run(options.run, device="cpu", ema=False if options.no_ema else None)
    from transformers.utils.logging import disable_progress_bar

    from mmdata.trained.card import usage
    from mmdata.trained.export import export_to_transformers

    disable_progress_bar()
    kind = export_to_transformers(trained, options.out)
    size = sum(path.stat().st_size for path in options.out.iterdir()) / 1e6
    line = f"{trained.checkpoint} → {options.out} ({kind.__name__}, {size:.1f} MB); to load it:"
    print(printable(line), end="\n\n")
    print(usage(kind.__name__, str(options.out)))
    return 0
