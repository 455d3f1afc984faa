"""Looks at the paths of a command line before torch is imported, which takes seconds: a wrong one is told at once."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from mmdata.errors import ConfigError, DataError
from mmdata.recognize import Kind, recognize

if TYPE_CHECKING:
    from mmdata.config.corpus import CorpusConfig


def check_config_or_shards(place: str, overrides: list[str] | None = None) -> None:
    """Look at a config, and at the shards that it names; or at a folder of shards. A URL is taken as it is.

    Args:
        place: a YAML file, the folder of a run, or a folder or URL of shards.
        overrides: of the config; None: the config is only looked for, and not read.

    Raises:
        ConfigError: nothing is there, the config has a mistake, or its shards are not there.
    """
    path, kind = Path(place), recognize(Path(place))
    if "://" in place:
        return
    from mmdata.config import load_config
    from mmdata.config.wrong_file import not_a_config

    if kind is Kind.ABSENT:
        raise ConfigError(not_a_config(path))
    if overrides is not None and (kind is Kind.RUN or not path.is_dir()):
        check_shards(load_config(path / "config.yaml" if kind is Kind.RUN else path, overrides).data)


def check_folder(folder: str) -> None:
    """Raise a DataError if there is no such folder of shards; a URL is taken as it is."""
    if "://" not in folder and not Path(folder).exists():
        raise DataError(f"folder '{folder}': no such folder")


def check_source(source: str) -> None:
    """Raise a DataError if there is no such corpus to convert; a URL is taken as it is."""
    if "://" in source or Path(source).exists():
        return
    if ".zip" in source.lower():
        from mmdata.convert.sources.files import exists

        if exists(source):
            return
    raise DataError(f"source '{source}': no such file or folder")


def check_run(run: Path) -> None:
    """Raise a DataError if a path is neither a run nor a checkpoint."""
    kind = recognize(run)
    is_file = run.is_file() and (run.suffix.lower() == ".pt" or kind is Kind.BINARY)
    if not is_file and kind not in (Kind.RUN, Kind.CHECKPOINT):
        from mmdata.config.run_folder import not_a_run

        raise DataError(f"'{run}': {not_a_run(run)}")


def check_shards(data: CorpusConfig) -> None:
    """Raise a ConfigError if a folder of shards that the settings name is not there."""
    from mmdata.config.corpus import sources

    named = [("data.shards", source.shards) for source in sources(data)]
    if data.val.shards is not None:
        named.append(("data.val.shards", data.val.shards))
    for setting, folder in named:
        if "://" not in folder and not Path(folder).exists():
            raise ConfigError(f"{setting}: folder '{folder}': no such folder")
