"""One row as the loader makes it: what happens to it at each stage, or why it is masked.

mmdata replay configs/scenes.yaml 1234 --epoch 2 --save row.png
mmdata replay configs/scenes.yaml --key 00001234
mmdata replay runs/scenes/config.yaml --ledger runs/scenes/ledger-rank0.jsonl --line 1
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from PIL import Image

from mmdata.cli import run
from mmdata.config import load_config
from mmdata.errors import ConfigError, printable
from mmdata.inspect.replay import Replay, find_step, place_in_ledger, replay, row_of_key
from mmdata.loader import Loader


def main() -> int:
    """Print the row's stages; the exit code is 1 where it is masked."""
    parser = argparse.ArgumentParser(
        prog="mmdata replay", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("config", help="YAML file")
    parser.add_argument("words", nargs="*", metavar="ROW | section.key=value", help="the row's number in the index")
    parser.add_argument("--key", help="the row's key, in place of its number")
    parser.add_argument("--ledger", type=Path, metavar="FILE", help="a run's ledger-rankN.jsonl, in place of ROW")
    parser.add_argument("--line", type=int, default=1, metavar="N", help="of the ledger, from 1 (1)")
    parser.add_argument("--epoch", type=int, default=0, help="decides caption and crop (0, or what the ledger says)")
    parser.add_argument("--save", type=Path, metavar="PNG", help="write the pixels that the model sees")
    given = parser.parse_intermixed_args()
    rows = [word for word in given.words if "=" not in word]
    if len(rows) + (given.key is not None) + (given.ledger is not None) != 1 or not all(
        row.isdecimal() for row in rows
    ):
        raise ConfigError(f"say which row: a number, --key or --ledger, one of them: got {rows or 'none'}")

    loader = Loader.from_config(
        load_config(given.config, [word for word in given.words if "=" in word]).data, rank=0, world_size=1
    )
    epoch, step = given.epoch, 0
    if given.ledger:
        row, epoch, step = place_in_ledger(given.ledger, given.line, loader.index)
    else:
        row = row_of_key(loader.index, given.key) if given.key else int(rows[0])
    found = replay(loader.maker, find_step(loader.plan, row, epoch, step=step))
    show(found)
    if found.made.masked:
        return 1
    if given.save:
        save(found, given.save)
    return 0


def show(found: Replay) -> None:
    """A line a stage, with its time."""
    step, stats, batch = found.step, found.made.stats, found.made.batch
    _line("row", f"{step.rows[0]}, key '{found.key}', shard '{found.shard}'")
    _line("batch", f"epoch {step.epoch}, step {step.number}: {step.bucket.length} tokens, {step.bucket.image}")
    bytes_read = f"image {len(found.image.data):,} bytes at {found.image_offset}; caption at {found.caption_offset}"
    _line("read", bytes_read, stats.wall_s["read"])
    image = f"{found.image.format} {_size(found.size)}, EXIF orientation {found.image.orientation}"
    if found.decoded is None:
        _line("decode", image, stats.wall_s["decode"])
    else:
        box, decoded = found.decoded.box, _size(found.decoded.image.shape[1:])
        _line("decode", f"{image}, to {decoded}", stats.wall_s["decode"])
        crop = f"{box.height:.1f} × {box.width:.1f} at ({box.top:.1f}, {box.left:.1f})"
        _line("transform", f"crop {crop}, to {_size(found.decoded.size)}", stats.wall_s["transform"])
    _line("caption", repr(found.caption))
    ids = batch["input_ids"][0][batch["attention_mask"][0] == 1].tolist()
    _line("tokenize", f"{len(ids)} tokens: {' '.join(map(str, ids))}", stats.wall_s["tokenize"])
    pixels = batch["pixel_values"][0]
    _line("pixels", f"uint8 {_size(pixels.shape)}, mean {float(pixels.float().mean()):.1f}")
    for entry in found.made.masked:
        _line("masked", f"at {entry.stage}: {entry.reason}: {entry.detail}")


def _line(name: str, words: str, seconds: float | None = None) -> None:
    print(f"{name:10}{'' if seconds is None else f'{1e3 * seconds:.2f} ms':>10}  {printable(words)}")


def _size(size: Sequence[int]) -> str:
    return " × ".join(map(str, size))


def save(found: Replay, path: Path) -> None:
    """Write the row's pixels as an image.

    Raises:
        ConfigError: they are patches.
    """
    if found.step.bucket.patches:
        raise ConfigError("--save: the row is patches at native resolution, not an image; leave --save out")
    pixels = found.made.batch["pixel_values"][0]
    Image.fromarray(pixels.permute(1, 2, 0).contiguous().numpy()).save(path)
    print(printable(f"pixels: {path}"))


if __name__ == "__main__":
    run(main)
