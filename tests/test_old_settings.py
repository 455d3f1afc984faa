"""Old names of settings: each works for one release, and the log names the new one."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from mmdata.config import Config, DataConfig, load_config, settings
from mmdata.config.settings import changeable_settings, current_names
from mmdata.config.strict_yaml import parse
from mmdata.errors import ConfigError

DATA = {"shards": "shards", "tokenizer": "tokenizer", "global_batch_size": 8}
MINER = {"name": "user", "target": "m:f"}


@pytest.fixture(autouse=True)
def _warned_of_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "_warned", set[str]())


@pytest.mark.parametrize(
    ("section", "old", "new"),
    [
        ("data", {"workers": "process"}, {"loading": {"worker_type": "process"}}),
        ("data", {"prefetch": 3}, {"loading": {"prefetch_batches": 3}}),
        ("data", {"num_workers": 4}, {"loading": {"num_workers": 4}}),
        ("data", {"cache_dir": "c", "cache_gb": 3}, {"loading": {"cache_dir": "c", "cache_gb": 3}}),
        ("data", {"max_bad_share": 0.5}, {"loading": {"max_bad_share": 0.5}}),
        ("data", {"check_images": "never"}, {"loading": {"check_images": "never"}}),
        ("data", {"num_processes": 2, "loading": {"worker_type": "process"}}, {
            "loading": {"num_processes": 2, "worker_type": "process"}
        }),
        ("data", {"hashes": True, "limit": 3, "window_rows": 5}, {
            "add_hashes": True, "max_rows": 3, "shuffle_window_rows": 5
        }),
        ("data", {"extra_captions": "e.parquet"}, {"negative_captions": "e.parquet"}),
        ("data", {"groups": {"by": "g.npy", "size": 2}}, {"groups": {"source": "g.npy", "size": 2}}),
        ("train", {"miner": {"name": "user", "of": "m:f"}}, {"miner": MINER}),
        ("train", {"feature_cache": {"of": "image"}}, {"feature_cache": {"side": "image"}}),
        ("train", {"hard_negative_positive_share": 0.1}, {"hard_negative_prior": 0.1}),
        ("train", {"miner": {"name": "all", "skip_hottest": 2}}, {"miner": {"name": "all", "drop_hardest": 2}}),
        ("train", {"miner": {"name": "user", "of": "m:f", "skip_hottest": 2}}, {"miner": {**MINER, "drop_hardest": 2}}),
    ],
)  # fmt: skip
def test_old_names_give_the_same_settings(section: str, old: dict[str, Any], new: dict[str, Any]):
    written = [{"data": DATA, section: {**(DATA if section == "data" else {}), **one}} for one in (old, new)]
    first, second = (parse(Config, one, origin="c") for one in written)
    assert first == second
    assert current_names(Config, written[0]) == current_names(Config, written[1]) == written[1]


def test_old_name_is_warned_of_once(caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.WARNING, "mmdata"):
        for _ in range(2):
            parse(DataConfig, {**DATA, "workers": "thread", "hashes": True}, origin="c")
    assert caplog.messages == [
        "setting data.workers is now data.loading.worker_type; the old name goes with the next release",
        "setting data.hashes is now data.add_hashes; the old name goes with the next release",
    ]


@pytest.mark.parametrize("text", ["loading: {num_workers: 2}", "num_workers: 2"])
@pytest.mark.parametrize("override", ["data.num_workers=4", "data.loading.num_workers=4"])
def test_override_replaces_the_value_of_the_file_under_either_name(tmp_path: Path, text: str, override: str):
    (tmp_path / "c.yaml").write_text(f"data: {{shards: a, tokenizer: t, global_batch_size: 8, {text}}}")
    assert load_config(tmp_path / "c.yaml", [override]).data.loading.num_workers == 4


def test_overrides_of_groups_take_old_names(tmp_path: Path):
    (tmp_path / "c.yaml").write_text("data: {shards: a, tokenizer: t, global_batch_size: 8, groups: {size: 2}}")
    overrides = ["data.groups.by=g.npy", "train.miner={name: user, of: m:g}", "train.miner.of=m:f"]
    with pytest.raises(ConfigError, match=r"setting train.miner.of is now train.miner.target, and both are given"):
        load_config(tmp_path / "c.yaml", overrides)
    config = load_config(tmp_path / "c.yaml", ["data.groups.by=g.npy", "train.miner.name=user", "train.miner.of=m:f"])
    assert config.data.groups is not None
    assert config.data.groups.source == "g.npy"
    assert config.train.miner is not None
    assert config.train.miner.model_dump(include=set(MINER)) == MINER


def test_old_and_new_name_exclude_each_other(tmp_path: Path):
    message = "setting data.num_workers is now data.loading.num_workers, and both are given: leave the old name out"
    content = {**DATA, "num_workers": 1, "loading": {"num_workers": 1}}
    with pytest.raises(ConfigError, match=f"^c: {message}$"):
        parse(DataConfig, content, origin="c")
    (tmp_path / "c.yaml").write_text("data: {num_workers: 1, loading: {num_workers: 1}}")
    with pytest.raises(ConfigError, match=rf"^config '.*c\.yaml': {message}$"):
        load_config(tmp_path / "c.yaml")


def test_old_attribute_warns_and_gives_the_value():
    data: Any = parse(DataConfig, {**DATA, "loading": {"num_workers": 3}}, origin="c")
    with pytest.warns(DeprecationWarning, match=r"^setting data.num_workers is now data.loading.num_workers; the old"):
        assert data.num_workers == 3
    with pytest.raises(AttributeError, match="num_worker"):
        _ = data.num_worker


def test_copy_takes_old_names_and_refuses_unknown_ones():
    data = parse(DataConfig, {**DATA, "loading": {"cache_gb": 3}}, origin="c")
    copy = data.model_copy(update={"num_workers": 4, "prefetch": 1, "limit": 5})
    assert copy == data.with_loading(num_workers=4, prefetch_batches=1).model_copy(update={"max_rows": 5})
    assert copy.loading.cache_gb == 3
    with pytest.raises(ValueError, match=r"^DataConfig has no setting num_worker$"):
        data.model_copy(update={"num_worker": 4})


def test_a_resumed_run_may_change_all_of_loading_and_what_is_marked():
    data = [name for name in changeable_settings(Config) if name.startswith("data.")]
    loading = [f"data.loading.{name}" for name in settings_of("loading")]
    places = ["shards", "shards.shards", "val.shards", "join.table", "join.shards", "allow_larger_batch"]
    places += ["select.file", "shards.select.file", "val.select.file"]
    assert sorted(data) == sorted([*loading, *(f"data.{name}" for name in places)])
    assert "train.micro_batch_size" in changeable_settings(Config)
    assert "model.gradient_checkpointing" in changeable_settings(Config)
    assert "train.lr" not in changeable_settings(Config)


def settings_of(group: str) -> list[str]:
    kind: Any = DataConfig.model_fields[group].annotation
    return list(kind.model_fields)
