"""What `mmdata replay` makes a row of: the section `data` of a config, or a folder of shards with default settings."""

from __future__ import annotations

from pathlib import Path

from mmdata.config import Config, DataConfig, load_config
from mmdata.config.strict_yaml import parse, with_overrides
from mmdata.index import Index
from mmdata.train.models.expected_inputs import with_inputs_of_model


def data_of(place: str, overrides: list[str]) -> DataConfig:
    """The settings with which a row is made again.

    Of a folder of shards they are the defaults, in batches of one row, with the caption as text: no tokenizer is known.

    Args:
        place: a YAML file, or a folder or a URL of shards.
        overrides: "section.key=value".

    Raises:
        ConfigError: a setting is wrong.
        DataError: the folder has no index.
    """
    if not (Path(place).is_dir() or "://" in place):
        return with_inputs_of_model(load_config(place, overrides)).data
    given = with_overrides({"data": {"shards": place}}, overrides)
    assumed = {"global_batch_size": 1, "tokenizer": "clip" if Index.open(place).has_captions else None}
    content = {**given, "data": assumed | given["data"]}
    return parse(Config, content, origin=f"settings for shards '{place}'", overrides=overrides).data
