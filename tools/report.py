"""mmdata report: one self-contained HTML page about a corpus, and about a run on it."""

from __future__ import annotations

from pathlib import Path

from mmdata.cli import Parser, run
from mmdata.config import load_config
from mmdata.config.data import sources
from mmdata.errors import ConfigError, printable
from mmdata.inspect.report import write_report
from mmdata.shards.folder import local_folder
from mmdata.train.run.find import check_run_folder


def main() -> None:
    """Write the page and print its path."""
    parser = Parser("report", __doc__)
    parser.add_argument(
        "shards", nargs="*", type=Path, help="folders with a manifest; default: data.shards of the config"
    )
    parser.add_argument("--config", type=Path, help="YAML file: adds buckets and padding; default: that of the run")
    parser.add_argument("--run", type=Path, help="folder that `mmdata train` wrote: adds curves and scores")
    parser.add_argument("--out", type=Path, default=Path("report.html"), help="default: report.html")
    given = parser.parse_args()
    if given.run:
        check_run_folder(given.run)
    of_run = given.run / "config.yaml" if given.run else None
    path = given.config or (of_run if of_run and of_run.is_file() else None)
    config = load_config(path) if path else None
    shards: list[Path] = given.shards
    if config and not shards:
        shards = [local_folder(source.shards) for source in sources(config.data)]
    if not shards:
        raise ConfigError("say what to report on: `mmdata report SHARDS` or `mmdata report --config CONFIG`")
    data, settings = (config.data, config.model_dump(mode="json")) if config else (None, None)
    write_report(given.out, shards=shards, data=data, run=given.run, settings=settings)
    print(f"{printable(str(given.out))}: {given.out.stat().st_size / 1000:.0f} kB; open it in a browser")


if __name__ == "__main__":
    run(main)
