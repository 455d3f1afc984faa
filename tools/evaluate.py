"""mmdata evaluate: a trained model on pairs, classes and compositional tests.

    mmdata evaluate runs/scenes
    mmdata evaluate runs/scenes --pairs data/scenes/raw/test/pairs.jsonl
    mmdata evaluate runs/scenes/checkpoints/step-0000001000.pt --shards shards/other --classes classes.json
    torchrun --nproc-per-node 8 tools/evaluate.py runs/scenes

classes.json: {"classes": ["dog", "cat"], "templates": ["a photo of a {}"]}; label 0 is the first class.
Writes a JSON file (RUN/evaluation.json unless --out is given) and prints a table. Under torchrun each rank embeds its
share of the rows and pairs, and rank 0 writes; the numbers are those of one process.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from rich.console import Console
from rich.markup import escape
from rich.progress import track
from rich.table import Table
from torch import Tensor

from mmdata import Batch, Config, DataConfig, Loader
from mmdata.atomic import write_whole
from mmdata.cli import run
from mmdata.compositional import load_pairs
from mmdata.config.data import evaluation_data
from mmdata.config.strict_yaml import parse
from mmdata.errors import ConfigError, DataError, printable
from mmdata.train import DualEncoder
from mmdata.train.evaluation.evaluate import compositional, embed, score_retrieval, zero_shot
from mmdata.train.ranks import collectives
from mmdata.train.ranks.lockstep import gather
from mmdata.train.run.checkpoint import find_checkpoint, load_checkpoint, load_weights
from mmdata.train.run.trainer import AUTOCAST, EVALUATION
from mmdata.transform.text import Tokenizer

PROMPTS_AT_ONCE = 256

T = TypeVar("T")


class Classes(BaseModel):
    """A classification task in words: the file given as --classes."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    classes: list[str] = Field(min_length=1)
    templates: list[str] = Field(default=["{}"], min_length=1)


def main() -> int:
    """Evaluate, write the JSON file, print the table."""
    options = parse_arguments()
    device = collectives.init(options.device)
    path = find_checkpoint(options.run)
    state = load_checkpoint(path)
    config = parse(Config, state["settings"], origin=f"settings in '{path}'")
    classes = read_classes(options.classes) if options.classes else None
    shards = options.shards or config.data.val_shards
    if shards is None and options.pairs is None:
        raise ConfigError("nothing to evaluate on: the run has no data.val_shards; give --shards or --pairs")
    if shards is None and classes is not None:
        raise ConfigError("--classes needs images with labels: the run has no data.val_shards; give --shards")
    tokenizer = Tokenizer.load(config.data.tokenizer, max_length=config.data.max_length)
    model = DualEncoder.from_config(config.model, vocab_size=tokenizer.vocab_size)
    load_weights(model, state, origin=str(path))
    model.to(device).eval()
    dtype = AUTOCAST[config.train.precision]

    scores: dict[str, Any] = {"step": state["step"], "epoch": state["epoch"]}
    if shards is not None:
        scores["shards"] = str(shards)
        scores |= evaluate_shards(model, config.data, str(shards), dtype, (classes, tokenizer))
    if options.pairs is not None:
        scores["pairs"] = str(options.pairs)
        scores["compositional"] = evaluate_pairs(model, config.data, options.pairs, dtype)
    if collectives.rank() > 0:
        return 0
    out = options.out or (options.run / EVALUATION if options.run.is_dir() else path.with_suffix(".evaluation.json"))
    write_whole(out, (json.dumps(scores, indent=2) + "\n").encode())
    show(scores, path, out)
    return 0


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="mmdata evaluate", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, metavar="RUN_OR_CHECKPOINT", help="folder of a run, or one checkpoint file")
    parser.add_argument("--shards", help="retrieval over these; default: data.val_shards of the run")
    parser.add_argument("--pairs", type=Path, help="JSONL of a compositional test (see mmdata.compositional)")
    parser.add_argument("--classes", type=Path, help="JSON with class names and templates, for zero-shot accuracy")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    return parser.parse_args()


def read_classes(path: Path) -> Classes:
    """Read class names and templates."""
    if not path.is_file():
        raise DataError(f"classes '{path}': no such file")
    try:
        classes = Classes.model_validate_json(path.read_bytes())
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "file"
        raise DataError(f"classes '{path}': {where}: {first['msg']}") from error
    for template in classes.templates:
        if "{}" not in template:
            raise DataError(f"classes '{path}': template '{template}' has no {{}} where the class name goes")
    return classes


def evaluate_shards(
    model: DualEncoder, data: DataConfig, shards: str, dtype: torch.dtype | None, task: tuple[Classes | None, Tokenizer]
) -> dict[str, Any]:
    """Retrieval both ways, and zero-shot accuracy where classes are given."""
    classes, tokenizer = task
    rank, ranks = collectives.rank(), collectives.world_size()
    data = evaluation_data(data.model_copy(update={"val_shards": shards}), hashes=True)
    # The ranks share each batch, so its rows are a multiple of their number; that changes no row's features.
    data = data.model_copy(update={"global_batch_size": -(-data.global_batch_size // ranks) * ranks})
    loader = Loader.from_config(data, rank=rank, world_size=ranks)
    features = embed(model, progress(loader, "embedding", len(loader)), source=loader, autocast_dtype=dtype)
    masked: dict[str, int] = loader.merge_states(states_of_ranks(loader))["rows_masked"]
    for reason, count in masked.items():
        line = f"left out: {count:,} rows that could not be loaded ({reason})"
        Console(stderr=True, quiet=rank > 0).print(line, soft_wrap=True)
    if not len(features.rows):
        raise DataError(f"shards '{shards}': none of the {len(loader.index):,} rows could be loaded")
    scores = score_retrieval(features, share=True)
    if classes is not None:
        if features.labels is None:
            raise DataError(f"--classes needs labels, and shards '{shards}' have none")
        prompts = embed_prompts(model, classes, tokenizer)
        scores |= zero_shot(features.image, features.labels, prompts)
    return {**scores, "rows_masked": masked}


def progress(batches: Iterable[T], name: str, total: int | None = None) -> Iterable[T]:
    """The same, with a bar on the first rank."""
    console = Console(stderr=True)
    return track(batches, name, total=total, console=console, disable=collectives.rank() > 0)


def states_of_ranks(loader: Loader) -> list[dict[str, Any]]:
    """The loader's state on each rank. A collective."""
    return gather(loader.state_dict(), dist.group.WORLD if collectives.world_size() > 1 else None)


@torch.no_grad()
def embed_prompts(model: DualEncoder, classes: Classes, tokenizer: Tokenizer) -> Tensor:
    """(C, T, D): features of each class in each template."""
    prompts = [template.replace("{}", name) for name in classes.classes for template in classes.templates]
    length = min(max(tokenizer.count(prompts)), tokenizer.max_length)
    device = model.logit_scale.device
    parts: list[Tensor] = []
    for start in range(0, len(prompts), PROMPTS_AT_ONCE):
        ids, mask = tokenizer.encode(prompts[start : start + PROMPTS_AT_ONCE], length)
        parts.append(model.encode_text(torch.from_numpy(ids).to(device), torch.from_numpy(mask).to(device)))
    return torch.cat(parts).reshape(len(classes.classes), len(classes.templates), -1)


def evaluate_pairs(
    model: DualEncoder, data: DataConfig, path: Path, dtype: torch.dtype | None
) -> dict[str, dict[str, float]]:
    """Scores of a compositional test, per type."""
    types: list[str] = []

    def batches() -> Iterator[Batch]:
        rank, ranks = collectives.rank(), collectives.world_size()
        for batch, names in progress(load_pairs(path, data, rank=rank, world_size=ranks), "pairs"):
            types.extend(names)
            yield batch

    features = embed(model, batches(), autocast_dtype=dtype)
    return compositional(features.image, features.text, types)


def show(scores: dict[str, Any], checkpoint: Path, out: Path) -> None:
    """Print the tables of what was measured."""
    console = Console()
    if "image_to_text_r1" in scores:
        title = f"{scores['images']:,} images, {scores['texts']:,} captions of {scores['shards']}"
        table = Table("retrieval", "R@1", "R@5", "R@10", title=escape(printable(title)))
        for name in ("image_to_text", "text_to_image", "chance"):
            table.add_row(name.replace("_", " "), *(percent(scores[f"{name}_r{k}"]) for k in (1, 5, 10)))
        console.print(table)
    if "zero_shot_top1" in scores:
        table = Table("zero-shot", "top 1", "top 5", "chance")
        table.add_row("accuracy", *(percent(scores[f"zero_shot_{name}"]) for name in ("top1", "top5", "chance")))
        console.print(table)
    if "compositional" in scores:
        table = Table("swap", "pairs", "accuracy", "text", "image", "group", title=escape(printable(scores["pairs"])))
        for kind, values in scores["compositional"].items():
            columns = (percent(values[name]) for name in ("accuracy", "text", "image", "group"))
            table.add_row(escape(printable(kind)), f"{values['pairs']:.0f}", *columns)
        table.add_row("chance", "", *(percent(share) for share in (0.5, 0.25, 0.25, 1 / 6)), style="dim")
        console.print(table)
    console.print(printable(f"{checkpoint} → {out}"), highlight=False, markup=False, soft_wrap=True)


def percent(share: float) -> str:
    """A share for a table: 0.1234 gives "12.3 %"."""
    return f"{100 * share:.1f} %"


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    run(main, under_torchrun=True)
