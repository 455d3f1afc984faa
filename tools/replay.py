"""One row as the loader makes it: what happens to it at each stage, or why it is masked.

mmdata replay configs/scenes.yaml 1234 --epoch 2 --save row.png
mmdata replay configs/scenes.yaml --key 00001234
mmdata replay runs/scenes/config.yaml --ledger runs/scenes/ledger-rank0.jsonl --line 1
"""

from __future__ import annotations

from pathlib import Path

from mmdata.cli import Parser, run
from mmdata.config import load_config
from mmdata.errors import ConfigError, printable
from mmdata.inspect.replay import find_step, place_in_ledger, replay, row_of_key
from mmdata.loader import Loader


def main() -> int:
    """Print the row's stages; the exit code is 1 where it is masked."""
    parser = Parser("replay", __doc__)
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
    for name, words, seconds in found.stages():
        print(f"{name:10}{'' if seconds is None else f'{1e3 * seconds:.2f} ms':>10}  {printable(words)}")
    if found.made.masked:
        return 1
    if given.save:
        found.save(given.save)
        print(printable(f"pixels: {given.save}"))
    return 0


if __name__ == "__main__":
    run(main)
