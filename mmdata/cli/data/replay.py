"""mmdata replay: one row as the loader makes it, stage by stage, or why it is masked.

mmdata replay configs/scenes.yaml 1234 --epoch 2 --save row.png
mmdata replay configs/scenes.yaml --key 00001234
mmdata replay shards/photos 1234               # a folder of shards: default settings, CLIP's tokenizer
mmdata replay runs/scenes 1234 --epoch 2       # row and epoch of a line of a run's ledger-rank0.jsonl
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmdata.cli.paths import find_config, find_part, load_settings
from mmdata.errors import ConfigError, printable

if TYPE_CHECKING:
    from mmdata.config import DataConfig


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", metavar="CONFIG_OR_SHARDS", help="YAML file, run, or folder (URL) of shards")
    parser.add_argument("words", nargs="*", metavar="ROW | section.key=value", help="the row's number in the index")
    parser.add_argument("--key", help="the row's key, in place of its number")
    parser.add_argument("--epoch", type=int, default=0, help="decides caption and crop (0)")
    parser.add_argument(
        "--save", type=Path, metavar="PNG", help="write the pixels that the model sees; NAME-crop.png shows the crop"
    )


def run(given: argparse.Namespace) -> int:
    """Print the row's stages; the exit code is 1 where it is masked."""
    row = chosen_row(given)
    if given.save:
        check_image_name(given.save)

    overrides = [word for word in given.words if "=" in word]
    data = data_of(given.config, overrides)
    from mmdata.inspect.replay import find_step, replay, row_of_key
    from mmdata.loader import Loader

    loader = Loader.from_config(data, rank=0, world_size=1)
    row = row_of_key(loader.index, given.key) if given.key else row
    found = replay(loader.builder, find_step(loader.plan, row, given.epoch))
    for name, words, seconds in found.stages():
        print(f"{name:10}{'' if seconds is None else f'{1e3 * seconds:.2f} ms':>10}  {printable(words)}")
    if found.is_masked:
        return 1
    if given.save:
        drawn = found.save(given.save)
        print(printable(f"pixels: {given.save}; crop and boxes: {drawn}"))
    return 0


def chosen_row(given: argparse.Namespace) -> int:
    """The number of the row; -1 if --key names it."""
    if given.config.isdecimal() and not Path(given.config).exists():
        raise ConfigError(f"the config comes first, then the row: `mmdata replay CONFIG {given.config}`")
    rows = [word for word in given.words if "=" not in word]
    ways = [*map(repr, rows), *(["--key"] if given.key is not None else [])]
    if len(ways) != 1:
        raise ConfigError(f"say which row: a number or --key, one of them; got {' and '.join(ways) or 'none'}")
    if not rows:
        return -1
    try:
        return int(rows[0])
    except ValueError:
        raise ConfigError(f"row '{rows[0]}': expected a number; a key is given as --key {rows[0]}") from None


def check_image_name(path: Path) -> None:
    """Refuse a file that cannot be written, before its row is made."""
    from PIL import Image

    if path.suffix.lower() not in Image.registered_extensions():
        raise ConfigError(f"--save '{path}': its ending names no image format; give a name such as row.png")
    if not path.parent.is_dir():
        raise ConfigError(f"--save '{path}': there is no folder '{path.parent}'; make it, or give another")


def data_of(place: str, overrides: list[str]) -> DataConfig:
    """The settings with which a row is made again.

    Of a folder of shards they are the defaults, in batches of one row. If there are captions, CLIP's tokenizer makes
    their tokens, all in one length: the captions of other rows are not counted for it.
    """
    assumed: dict[str, Any] = {}
    if find_config(place) is None:
        from mmdata.config import DataConfig
        from mmdata.config.strict_yaml import with_overrides
        from mmdata.index import Index

        has_captions = Index.open(find_part(place) or place).has_captions
        assumed = {"global_batch_size": 1, "tokenizer": "clip" if has_captions else None}
        given = with_overrides({"data": assumed}, overrides)["data"]
        if given["tokenizer"] is not None:
            length = given.get("max_length", DataConfig.model_fields["max_length"].default)
            assumed["text_buckets"] = [length]
    config = load_settings(place, overrides, assumed)
    from mmdata.train.models.expected_inputs import with_inputs_of_model

    return with_inputs_of_model(config).data
