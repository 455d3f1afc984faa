"""mmdata bench: how fast a config's loader is, where its time goes, and what would make it faster.

mmdata bench configs/scenes.yaml
mmdata bench configs/scenes.yaml data.loading.num_workers=4 --steps 200 --step-ms 50
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from mmdata.cli.paths import check_shards
from mmdata.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

    from mmdata.inspect.profile import Profile

BAR = 30  # characters of a full bar
MOST_OF_THE_WORK = 0.5  # share of the workers' work from which a function of the user's is named


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", help="YAML file")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    parser.add_argument("--steps", type=int, default=50, help="batches to measure after the first (50)")
    parser.add_argument("--step-ms", type=float, default=0.0, help="how long a training step takes; 0: full speed")


def run(given: argparse.Namespace) -> int:
    """Measure, and print the numbers, a bar for each stage, and what to do."""
    if given.steps < 1 or given.step_ms < 0:
        raise ConfigError(f"--steps must be 1 or more and --step-ms 0 or more: got {given.steps}, {given.step_ms}")
    from mmdata.config import load_config

    config = load_config(given.config, given.overrides)
    check_shards(config.data)
    import torch
    from rich.console import Console

    from mmdata.config.settings import name_of
    from mmdata.inspect.profile import profile
    from mmdata.inspect.remedies import cores_in_words, remedies, storage_in_words
    from mmdata.loader import Loader
    from mmdata.processes import most_workers
    from mmdata.train.models.expected_inputs import with_inputs_of_model
    from mmdata.train.prefetch import DevicePrefetcher

    console = Console(highlight=False)
    data = with_inputs_of_model(config).data
    loader = Loader.from_config(data, rank=0, world_size=1)
    batches = DevicePrefetcher(loader, "cuda") if torch.cuda.is_available() else loader
    found = profile(batches, given.steps, step_s=given.step_ms / 1000)
    print_profile(console, found)
    console.print(found.in_words(), soft_wrap=True)
    own = {"transform": data.transform, "tokenize": data.text_transform}
    slow = {
        stage: name_of(code)
        for stage, code in own.items()
        if code is not None and code not in ("train", "eval") and found.work_share(stage) > MOST_OF_THE_WORK
    }
    for stage, name in slow.items():
        console.print(
            f"Your code: {name} ({stage}) takes {found.row_ms[stage]:.2f} ms a row, {found.work_share(stage):.0%} of "
            "the workers' work: make it faster first. On a CPU it also takes cores from the training step.",
            soft_wrap=True,
        )
    if found.bottleneck == "read":
        console.print(f"Storage: {storage_in_words(found)}.", soft_wrap=True)
    if found.keeps_up:
        if not slow:
            console.print("There is nothing to do: only a faster step would be felt.")
        return 0
    if cores := cores_in_words(found, most_workers(data.loading.num_workers)):
        console.print(f"Cores: {cores}.", soft_wrap=True)
    console.print("Trying what would help ...")
    helped = remedies(loader, data, found)
    for remedy in helped:
        console.print(f"  {remedy}", soft_wrap=True)
    if not helped:
        console.print("  nothing that was tried on your rows and this machine is noticeably faster")
    return 0


def print_profile(console: Console, found: Profile) -> None:
    """Numbers, and the stages as bars."""
    from rich.table import Table

    table = Table(box=None, show_header=False)
    table.add_column()
    table.add_column(justify="right")
    table.add_column(justify="right")
    table.add_column()
    table.add_row("samples/s", f"{found.samples_per_s:,.0f}")
    table.add_row("first batch", f"{found.first_batch_s:.2f} s")
    table.add_row("waiting for data", f"{found.wait_share:.1%}", "", bar(found.wait_share))
    if found.stats and found.stats.transfer_s:
        share = found.stats.transfer_s / found.seconds
        table.add_row("copying to the device", f"{share:.1%}", "", bar(share))
    if found.stage_shares:
        table.add_row("workers' time", "")
    for name, share in found.stage_shares.items():
        table.add_row(f"  {name}", f"{share:.1%}", f"{found.row_ms[name]:.2f} ms a row", bar(share))
    console.print(table)


def bar(share: float) -> str:
    """A bar of up to `BAR` characters."""
    return "█" * round(BAR * min(1.0, share))
