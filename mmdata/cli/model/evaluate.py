"""mmdata evaluate: a trained model on pairs, classes and compositional tests.

    mmdata evaluate runs/scenes
    mmdata evaluate runs/scenes data.decode=exact data.loading.num_workers=2
    mmdata evaluate runs/scenes --pairs data/scenes/raw/test/pairs.jsonl
    mmdata evaluate runs/finetuned --interpolate-with clip-vit-b-32    # scores of weights between the two, too
    mmdata evaluate runs/scenes/checkpoints/step-0000001000 --shards shards/other --classes classes.json
    mmdata evaluate runs/scenes --shards shards/imagenet-val --classes imagenet
    torchrun --nproc-per-node 8 -m mmdata evaluate runs/scenes

classes.json: {"classes": ["dog", "cat"], "templates": ["a photo of a {}"]}; label 0 is the first class. "templates":
"imagenet" are the 80 of --classes imagenet.
Shards that name their classes need no file: prompts are then made as `mmdata convert --caption-template` made the
captions, or are the names alone.
Writes a JSON file and prints a table. The file is --out, or RUN/evaluation.json; or RUN/evaluation-NAME.json for
--shards DIR/NAME where the run has rows of its own to evaluate on, whose scores stay. Under torchrun each rank embeds
its share of the rows; rank 0 scores the pairs and writes. The numbers are those of one process.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from mmdata.cli.paths import check_folder, check_run
from mmdata.errors import ConfigError, printable
from mmdata.files import write_whole

SHOWN_TEMPLATES = 3


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, metavar="RUN_OR_CHECKPOINT", help="folder of a run, or one checkpoint")
    parser.add_argument(
        "overrides", nargs="*", metavar="section.key=value", help="data.decode or a setting of data.loading"
    )
    parser.add_argument("--shards", help="retrieval over these; default: data.val of the run")
    parser.add_argument("--select", help="rows of these shards: a condition or a file, as for data.select")
    parser.add_argument("--pairs", type=Path, help="a compositional test, also Winoground, SugarCrepe")
    parser.add_argument("--classes", type=Path, help="JSON with class names and templates, or imagenet")
    parser.add_argument("--no-ema", action="store_true", help="the trained weights, in place of the averaged ones")
    parser.add_argument(
        "--interpolate-with",
        type=Path,
        metavar="FOLDER",
        help="the model it was fine-tuned from: scores in between, too",
    )
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda", "mps"), default="auto")


def run(options: argparse.Namespace) -> int:
    """Evaluate, write the JSON file, print the table."""
    check_run(options.run)
    if options.shards is not None:
        check_folder(options.shards)
    from mmdata.config.corpus import ValConfig, val_in_words
    from mmdata.train.evaluation.prompts import read_classes
    from mmdata.train.ranks import collectives
    from mmdata.train.run.report import EVALUATION
    from mmdata.trained import load_run
    from mmdata.trained.evaluation import evaluate_shards, given_classes, named_classes, with_settings
    from mmdata.trained.interpolate import curve
    from mmdata.trained.pairs import read_pairs, score_pairs

    classes = read_classes(options.classes) if options.classes else None  # a mistake is told before the model is loaded
    device = collectives.init(options.device)
    loaded = load_run(options.run, device, precision=None, ema=False if options.no_ema else None)
    trained = with_settings(loaded, options.overrides)
    if options.select and not options.shards:
        raise ConfigError("--select chooses rows of --shards, which is missing")
    val = ValConfig(shards=options.shards, select=options.select) if options.shards else trained.config.data.val
    if not val and options.pairs is None:
        raise ConfigError("nothing to evaluate on: the run has no data.val; give --shards or --pairs")
    if not val and options.interpolate_with is not None:
        raise ConfigError("--interpolate-with needs images and captions: the run has no data.val; give --shards")
    data = trained.config.data.model_copy(update={"val": val})
    if val and classes is None:
        classes = given_classes(data) or named_classes(data)
    if not val and classes is not None:
        raise ConfigError("--classes needs images with labels: the run has no data.val; give --shards")
    if options.pairs is not None:
        read_pairs(options.pairs)  # a mistake in the file is told before the shards are embedded
    between = curve(trained, options.interpolate_with) if options.interpolate_with is not None else ()
    scores: dict[str, Any] = {"step": trained.step, "epochs_done": trained.epoch}
    scores |= {"ema": True} if trained.is_average else {}
    path = trained.checkpoint
    out = options.out or (options.run / EVALUATION if options.run.is_dir() else path.with_suffix(".evaluation.json"))
    if options.out is None and options.shards and trained.config.data.val:  # the scores of the run's own rows stay
        out = out.with_stem(f"{out.stem}-{Path(options.shards).name}")
    out.parent.mkdir(parents=True, exist_ok=True)
    if val:
        scores["shards"] = val_in_words(data)
        scores |= evaluate_shards(trained, val, classes, out=out)
        if options.interpolate_with is not None:
            entries = [{"alpha": x.alpha, "with": x.mixed_with, **evaluate_shards(x, val, classes)} for x in between]
            scores["interpolation"] = [*entries, {"alpha": 1.0, **scores}]
    if collectives.rank() > 0:
        return 0
    if options.pairs is not None:
        scores["pairs"] = str(options.pairs)
        scores["compositional"] = score_pairs(trained, options.pairs)
    write_whole(out, (json.dumps(scores, indent=2) + "\n").encode())
    show(scores, path, out)
    return 0


def show(scores: dict[str, Any], checkpoint: Path, out: Path) -> None:
    """Print the tables of what was measured."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from mmdata.inspect.runs import CHANCE, INTERPOLATED, RECALLS

    console = Console()
    if "image_to_text_r1" in scores:
        title = f"{scores['images']:,} images, {scores['texts']:,} captions of {scores['shards']}"
        table = Table("retrieval", "R@1", "R@5", "R@10", title=escape(printable(title)))
        for name in (key.removesuffix("_r1") for key in scores if key.endswith("_r1")):
            table.add_row(name.replace("_", " "), *(percent(scores[f"{name}_r{k}"]) for k in (1, 5, 10)))
        console.print(table)
    if "zero_shot_top1" in scores:
        prompts = ", ".join(f'"{template}"' for template in scores["templates"][:SHOWN_TEMPLATES])
        if (more := len(scores["templates"]) - SHOWN_TEMPLATES) > 0:
            prompts += f" and {more} more"
        table = Table("zero-shot", "top 1", "top 5", "chance", title=escape(printable(f"classes named by {prompts}")))
        table.add_row("accuracy", *(percent(scores[f"zero_shot_{name}"]) for name in ("top1", "top5", "chance")))
        console.print(table)
    if "grounding_accuracy" in scores:
        title = f"{scores['phrases']:,} phrases, each among the boxes of its image"
        table = Table("grounding", "accuracy", "chance", title=title)
        table.add_row("phrase → box", *(percent(scores[f"grounding_{name}"]) for name in ("accuracy", "chance")))
        console.print(table)
    if "interpolation" in scores:
        keys = {name: RECALLS[name][0] for name in INTERPOLATED if RECALLS[name][0] in scores}
        table = Table("alpha", *keys, title="interpolated weights")
        for entry in scores["interpolation"]:
            table.add_row(f"{entry['alpha']:g}", *(percent(entry[key]) for key in keys.values()))
        console.print(table)
    if "compositional" in scores:
        scored = {name for values in scores["compositional"].values() for name in values}
        table = Table("swap", "pairs", *CHANCE, title=escape(printable(scores["pairs"])))
        for kind, values in scores["compositional"].items():
            # Pairs with one image have an accuracy alone.
            columns = [percent(values[name]) if name in values else "" for name in CHANCE]
            table.add_row(escape(printable(kind)), f"{values['pairs']:.0f}", *columns)
        columns = [percent(share) if name in scored else "" for name, share in CHANCE.items()]
        table.add_row("chance", "", *columns, style="dim")
        console.print(table)
    console.print(printable(f"{checkpoint} → {out}"), highlight=False, markup=False, soft_wrap=True)


def percent(share: float) -> str:
    """A share for a table: 0.1234 gives "12.3 %"."""
    return f"{100 * share:.1f} %"
