"""How fast a config's loader is, and where its time goes.

mmdata bench configs/scenes.yaml
mmdata bench configs/scenes.yaml data.num_workers=4 --steps 200 --step-ms 50
"""

from __future__ import annotations

import argparse

from rich.console import Console
from rich.table import Table

from mmdata.cli import run
from mmdata.config import load_config
from mmdata.errors import ConfigError
from mmdata.inspect.profile import profile
from mmdata.loader import Loader

BAR = 40  # characters of a full bar


def main() -> None:
    """Measure, and print the numbers, a bar a stage, and one sentence."""
    parser = argparse.ArgumentParser(
        prog="mmdata bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("config", help="YAML file")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    parser.add_argument("--steps", type=int, default=50, help="batches to measure after the first (50)")
    parser.add_argument("--step-ms", type=float, default=0.0, help="how long a training step takes; 0: full speed")
    given = parser.parse_intermixed_args()
    if given.steps < 1 or given.step_ms < 0:
        raise ConfigError(f"--steps must be 1 or more and --step-ms 0 or more: got {given.steps}, {given.step_ms}")

    loader = Loader.from_config(load_config(given.config, given.overrides).data)
    found = profile(loader, given.steps, step_s=given.step_ms / 1000)
    table = Table(box=None, show_header=False)
    table.add_column()
    table.add_column(justify="right")
    table.add_column()
    table.add_row("samples/s", f"{found.samples_per_s:,.0f}")
    table.add_row("first batch", f"{found.first_batch_s:.2f} s")
    table.add_row("waiting for data", f"{found.wait_share:.1%}")
    table.add_row("padding", f"{found.padding_share:.1%}")
    for name, share in found.stage_shares.items():
        table.add_row(f"  {name}", f"{share:.1%}", "█" * round(BAR * share))
    console = Console(highlight=False)
    console.print(table)
    console.print(found.in_words(), soft_wrap=True)


if __name__ == "__main__":
    run(main)
