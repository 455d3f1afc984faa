"""mmdata export: a trained model as a folder that other libraries load.

    mmdata export runs/photos exports/photos --to transformers
    mmdata export runs/photos exports/photos --to open_clip
    mmdata export runs/photos exports/photos --to onnx
    mmdata export runs/photos exports/mixed --interpolate-with clip-vit-b-32 --alpha 0.5    # WiSE-FT

transformers and open_clip take towers of CLIP: vit_b_32 and its like, and pretrained ones. transformers also takes
SigLIP and SigLIP 2. onnx takes all towers but those of SigLIP 2. The folder also has the tokenizer, an image processor,
and a model card (README.md) with settings and scores; `mmdata push` sends it to the Hugging Face hub.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from mmdata.cli.paths import check_run
from mmdata.errors import ConfigError, printable

TARGETS = ("transformers", "open_clip", "onnx")


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, metavar="RUN_OR_CHECKPOINT", help="folder of a run, or one checkpoint")
    parser.add_argument("out", type=Path, metavar="OUT", help="folder to write; must not exist")
    parser.add_argument("--no-ema", action="store_true", help="the trained weights, in place of the averaged ones")
    parser.add_argument("--to", choices=TARGETS, default="transformers", help="default: transformers")
    parser.add_argument(
        "--interpolate-with", type=Path, metavar="FOLDER", help="the model it was fine-tuned from: a run, CLIP, …"
    )
    parser.add_argument("--alpha", type=float, help="share of the run's own weights, with --interpolate-with")


def run(options: argparse.Namespace) -> int:
    """Export, and print how to load the folder."""
    check_run(options.run)
    if (options.alpha is None) != (options.interpolate_with is None):
        raise ConfigError("--interpolate-with FOLDER and --alpha A, from 0 to 1, go together")
    from mmdata.trained import load_run

    trained = load_run(options.run, device="cpu", ema=False if options.no_ema else None)
    from transformers.utils.logging import disable_progress_bar

    from mmdata.trained.card import usage
    from mmdata.trained.export import export_to_open_clip, export_to_transformers
    from mmdata.trained.interpolate import interpolated
    from mmdata.trained.onnx import export_to_onnx

    disable_progress_bar()
    if options.interpolate_with is not None:
        trained = interpolated(trained, options.interpolate_with, options.alpha)
    kind = options.to
    if kind == "transformers":
        kind = export_to_transformers(trained, options.out).__name__
    elif kind == "open_clip":
        export_to_open_clip(trained, options.out)
    else:
        export_to_onnx(trained, options.out)
    size = sum(path.stat().st_size for path in options.out.iterdir()) / 1e6
    line = f"{trained.checkpoint} → {options.out} ({kind}, {size:.1f} MB); to load it:"
    print(printable(line), end="\n\n")
    print(usage(kind, str(options.out)))
    return 0
