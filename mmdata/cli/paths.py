"""What commands share: paths are looked at before anything slow is imported; what to type next."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmdata.errors import ConfigError, DataError
from mmdata.recognize import PARTS, TRAIN, VAL, Kind, near, recognize

if TYPE_CHECKING:
    from mmdata.config import Config
    from mmdata.config.corpus import CorpusConfig
    from mmdata.index import Manifest


def find_config(place: str) -> Path | None:
    """The config that `place` is: a file, the name of a shipped one, or that of a run's folder; None for shards."""
    path = Path(place)
    if "://" in place:
        return None
    if recognize(path) is Kind.RUN:
        return path / "config.yaml"
    return None if path.is_dir() else path


def load_settings(place: str, overrides: list[str], assumed: Mapping[str, Any] | None = None) -> Config:
    """The settings of a command that takes CONFIG_OR_SHARDS; the shards that they name are looked for.

    Args:
        place: a YAML file, the name of a config that is shipped with mmdata, the folder of a run, or a folder or URL of
            shards. Of a folder that holds `train` and `val`, as `mmdata convert --val-share` makes, `train` is taken.
        overrides: "section.key=value".
        assumed: settings of `data` for shards, where no override gives them.

    Raises:
        ConfigError: nothing is there, a setting is wrong, or the shards are not there.
    """
    from mmdata.config import Config, load_config
    from mmdata.config.strict_yaml import parse, with_overrides

    if (path := find_config(place)) is not None:
        config = load_config(path, overrides)
    else:
        content = with_overrides({"data": {"shards": find_part(place) or place}}, overrides)
        content["data"] = {**(assumed or {}), **content["data"]}
        config = parse(Config, content, origin=f"settings for shards '{place}'", overrides=overrides)
    check_shards(config.data)
    return config


def check_folder(folder: str) -> None:
    """Raise a DataError if there is no such folder of shards; a URL is taken as it is."""
    if "://" not in folder and not Path(folder).exists():
        raise DataError(f"folder '{folder}': no such folder{near(folder)}")


def check_source(source: str) -> None:
    """Raise a DataError if there is no such corpus to convert; a URL is taken as it is."""
    if "://" in source or Path(source).exists():
        return
    if ".zip" in source.lower():
        from mmdata.convert.sources.files import exists

        if exists(source):
            return
    raise DataError(f"source '{source}': no such file or folder{near(source)}")


def check_run(run: Path) -> None:
    """Raise a DataError if a path is neither a run nor a checkpoint."""
    if recognize(run) not in (Kind.RUN, Kind.CHECKPOINT):
        from mmdata.config.wrong_place import not_a_run

        raise DataError(f"'{run}': {not_a_run(run)}")


def check_shards(data: CorpusConfig) -> None:
    """Raise a ConfigError if a folder of shards that the settings name is not there."""
    from mmdata.config.corpus import sources

    named = [("data.shards", source.shards) for source in sources(data)]
    if data.val.shards is not None:
        named.append(("data.val.shards", data.val.shards))
    for setting, folder in named:
        if "://" not in folder and not Path(folder).exists():
            raise ConfigError(f"{setting}: folder '{folder}': no such folder{near(folder)}")


def find_part(place: str) -> str | None:
    """The folder of shards to train on where `place` holds one for each of PARTS; None for any other place, or a URL.

    Example:
        find_part("shards/coco") == "shards/coco/train", if `mmdata convert coco.json shards/coco --val-share 0.01`
        has made shards/coco.
    """
    folder = Path(place)
    if "://" in place or recognize(folder) is Kind.SHARDS:
        return None
    return str(folder / TRAIN) if all(recognize(folder / name) is Kind.SHARDS for name in PARTS) else None


def find_val(place: str) -> Path | None:
    """The folder to evaluate on beside `place`, if that is the folder to train on; None if there is none with rows."""
    from mmdata.index import Index

    folder = Path(place)
    val = folder.parent / VAL
    if folder.name != TRAIN or recognize(val) is not Kind.SHARDS:
        return None
    return val if len(Index.open(val)) else None


def next_commands(folder: Path | str, manifest: Manifest) -> list[str]:
    """Lines of a command's output that name the commands to type next, each with what it does.

    Args:
        folder: of the shards or of their index; text if it is a URL.
        manifest: of this folder.
    """
    quoted = shlex.quote(str(folder))
    lines = [f"mmdata plan {quoted}    # batches, shapes and padding"]
    if manifest.has_captions:  # a config for a dual encoder needs texts
        lines.insert(0, f"mmdata init {quoted}    # writes a config to train with")
    behind_urls = "://" in manifest.location
    if not behind_urls:
        lines.append(f"mmdata report {quoted}    # a page about the corpus")
    if manifest.has_captions and manifest.tokenizer is None and isinstance(folder, Path):
        reads = "fetches each tar again" if behind_urls else "reads no image again"
        words = shlex.join(words_of_tars(folder, manifest))
        lines.insert(0, f"mmdata index {words} --tokenizer clip    # counts captions; {reads}")
    return [("next: " if i == 0 else "      ") + line for i, line in enumerate(lines)]


def words_of_tars(folder: Path, manifest: Manifest) -> list[str]:
    """The arguments of `mmdata index` for the tars of an index that is there, and for what it leaves out."""
    accounts = manifest.accounts or {}
    losses = ["--skip-damaged"] if "damaged_shards" in accounts else []
    if accounts.get("quarantined", 0) > 0.05 * accounts.get("samples", math.inf):  # more than a new index may leave out
        losses += ["--max-bad-share", "1"]
    if "://" in manifest.location:
        return [str(folder), *losses]
    tars = folder
    if manifest.location != ".":
        tars = (folder / manifest.location).resolve()
        if tars.is_relative_to(Path.cwd()):
            tars = tars.relative_to(Path.cwd())
    if manifest.num_shards == 1 and len(list(tars.glob("*.tar"))) > 1:
        tars /= manifest.listed(0).name
    return [str(tars), *([] if manifest.location == "." else ["--out", str(folder)]), *losses]
