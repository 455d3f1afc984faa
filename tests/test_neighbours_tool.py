"""mmdata neighbours: from a run, or from features that exist, to batches of neighbours."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from mmdata import Config, Index, Loader, cli
from mmdata.config.corpus import ValConfig
from mmdata.config.data import evaluation_data
from mmdata.config.strict_yaml import parse
from mmdata.convert import ConvertConfig, convert
from mmdata.errors import ConfigError
from mmdata.train import DualEncoder
from mmdata.train.evaluation.embedding import embed
from mmdata.train.run.checkpoint import find_checkpoint, load_checkpoint


def run_tool(name: str, *words: object) -> int:
    """Run a command in this process."""
    return cli.main([name, *map(str, words)])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, make_corpus: Callable[..., Path]) -> Path:
    """config.yaml of a run of two steps over shards/ (42 images), which lies in run/; other/ holds other shards."""
    folder = tmp_path_factory.mktemp("neighbours")
    raw = make_corpus(folder / "raw", 42)
    convert(raw / "captions.jsonl", folder / "shards", ConvertConfig(train_tokenizer=300, shard_rows=10))
    tokenizer = str(folder / "shards" / "tokenizer")
    other = make_corpus(folder / "raw-other", 42, seed=1)
    convert(other / "captions.jsonl", folder / "other", ConvertConfig(tokenizer=tokenizer, shard_rows=10))
    data = {
        "shards": str(folder / "shards"),
        "tokenizer": tokenizer,
        "global_batch_size": 8,
        "loading": {"num_workers": 1},
    }
    data |= {"image_buckets": [[32, 32], [24, 40]], "text_buckets": 2, "max_length": 32}
    train = {"output": str(folder / "run"), "steps": 2, "warmup_steps": 0}
    (folder / "config.yaml").write_text(yaml.safe_dump({"data": data, "train": train}))
    assert run_tool("train", folder / "config.yaml") == 0
    return folder


@pytest.fixture(scope="module")
def made(folder: Path) -> Path:
    """groups.npy, which the program made with the run: 42 rows in 10 groups of 4."""
    out = folder / "made" / "groups.npy"
    assert run_tool("neighbours", folder / "config.yaml", "--run", folder / "run", "--size", 4, "--out", out) == 0
    return out


def data_of(folder: Path, **changes: Any) -> dict[str, Any]:
    return {**yaml.safe_load((folder / "config.yaml").read_text())["data"], **changes}


def rows_of(loader: Loader) -> np.ndarray:
    """(units, 4): the rows of all batches by fours."""
    return np.concatenate([batch["rows"].numpy() for batch in loader]).reshape(-1, 4)


def test_file_has_the_group_of_each_row(made: Path):
    groups = np.load(made)["group"]
    assert groups.dtype == np.int64
    assert np.bincount(groups[groups >= 0]).tolist() == [4] * 10
    assert (groups < 0).sum() == 2


def test_groups_stand_together_in_batches_and_do_so_again(folder: Path, made: Path):
    data = data_of(folder, groups={"source": str(made), "size": 4})
    groups = np.load(made)["group"]
    for epoch in (0, 1):
        loaders = [Loader.from_config(data) for _ in range(2)]
        for loader in loaders:
            loader.set_epoch(epoch)
        units, again = map(rows_of, loaders)
        assert np.array_equal(units, again)
        assert sorted(units[units >= 0].tolist()) == list(range(42))
        whole = [unit for unit in units if unit.min() >= 0 and groups[unit[0]] >= 0]
        assert len(whole) == 10
        assert all(set(groups[unit]) == {groups[unit[0]]} for unit in whole)


def test_features_are_those_of_the_rows_in_the_order_of_the_index(folder: Path, made: Path):
    state = load_checkpoint(find_checkpoint(folder / "run"))
    config = parse(Config, state["settings"], origin="test")
    model = DualEncoder.from_config(config.model, vocab_size=300).eval()
    model.load_state_dict(state["model"])
    data = config.data.model_copy(update={"val": ValConfig(shards=str(folder / "shards"))})
    found = embed(model, Loader.from_config(evaluation_data(data)))
    pair = torch.nn.functional.normalize(found.image + found.text, dim=1)
    features = np.load(made.with_name("groups.features.npy"))
    assert features.dtype == np.float16
    assert np.allclose(features[found.rows], pair.numpy(), atol=2e-3)


def test_program_says_what_to_put_into_a_config(folder: Path, made: Path, capsys: pytest.CaptureFixture[str]):
    features = made.with_name("groups.features.npy")
    out = folder / "again.npy"
    words = ("--features", features, "--size", 6, "--out", out, "--seed", 3)
    overrides = ("data.shuffle_window_rows=20", "data.num_lanes=2")
    assert run_tool("neighbours", folder / "config.yaml", *overrides, *words) == 0
    said = capsys.readouterr().out
    assert said.startswith("42 rows in 7 groups of 6; 0 without a group\nmean similarity: ")
    near, random = map(float, re.findall(r"(0\.\d{3}) within", said))
    assert near > random
    settings = yaml.safe_load(said[said.index("\ndata:") :])
    assert settings == {
        "data": {
            "groups": {"source": str(out), "size": 6, "share": 0.5},
            "shuffle_window_rows": 42,
            "num_lanes": 1,
            "global_batch_size": 12,
        }
    }
    settings["data"]["groups"]["share"] = 1.0
    units = np.concatenate([b["rows"].numpy() for b in Loader.from_config(data_of(folder, **settings["data"]))])
    groups = np.load(out)["group"]
    assert (groups[units[units >= 0]].reshape(-1, 6) == groups[units[units >= 0]].reshape(-1, 6)[:, :1]).all()


def test_program_takes_ranks_and_margins_and_a_second_model(folder: Path, made: Path):
    words = ("--run", folder / "run", "--size", 2, "--range-min", 1, "--absolute-margin", -0.1, "--out")
    assert run_tool("neighbours", folder / "config.yaml", *words, folder / "hard.npy") == 0
    both = np.load(folder / "hard.features.npy").astype(np.float32)
    assert both.shape[:2] == (42, 2)
    pair = np.load(made.with_name("groups.features.npy")).astype(np.float32)
    assert np.allclose(both.sum(1) / np.linalg.norm(both.sum(1), axis=1, keepdims=True), pair, atol=4e-3)
    assert run_tool("neighbours", folder / "config.yaml", *words, folder / "two.npy", "--rescore", folder / "run") == 0
    groups, rescored = (np.load(folder / name)["group"] for name in ("hard.npy", "two.npy"))
    assert np.array_equal(np.load(folder / "two.rescored.npy"), np.load(folder / "hard.features.npy"))
    assert np.array_equal(groups, rescored), "a second model that is the first"
    scores = both[:, 0] @ both[:, 1].T
    for number in range(groups.max() + 1):
        a, b = (groups == number).nonzero()[0]
        assert max(scores[a, b], scores[b, a]) <= min(scores[a, a], scores[b, b]) + 0.101


def test_program_says_that_groups_exclude_weights(folder: Path, capsys: pytest.CaptureFixture[str]):
    np.save(folder / "random.npy", np.random.default_rng(0).normal(size=(84, 4)))
    for share, told in (("weight", 1), ("repeat", 0)):
        shards = (
            f"data.shards=[{{shards: {folder / 'shards'}, {share}: 3}}, {{shards: {folder / 'other'}, {share}: 1}}]"
        )
        words = ("--features", folder / "random.npy", "--size", 4, "--out", folder / "weighted.npy")
        assert run_tool("neighbours", folder / "config.yaml", shards, *words) == 0
        assert capsys.readouterr().out.count("a repeat for each dataset in place of its weight") == told


def test_mixture_is_grouped_as_one_corpus(folder: Path):
    shards = [{"shards": str(folder / "shards"), "repeat": 2}, {"shards": str(folder / "other"), "repeat": 1}]
    config = folder / "mixture.yaml"
    config.write_text(yaml.safe_dump({"data": data_of(folder, shards=shards)}))
    out = folder / "mixture.npy"
    assert run_tool("neighbours", config, "--run", folder / "run", "--size", 2, "--out", out, "--of", "text") == 0
    groups = np.load(out)["group"]
    assert np.bincount(groups).tolist() == [2] * 42
    assert len(Loader.from_config(data_of(folder, shards=shards, groups={"source": str(out), "size": 2}))) == 16


def test_row_that_cannot_be_decoded_has_no_group(
    folder: Path, tmp_path: Path, make_corpus: Callable[..., Path], capsys: pytest.CaptureFixture[str]
):
    raw = make_corpus(tmp_path / "raw", 42)
    convert(raw / "captions.jsonl", tmp_path / "shards", ConvertConfig(tokenizer=data_of(folder)["tokenizer"]))
    index = Index.open(tmp_path / "shards")
    with index.shard_path(0).open("r+b") as tar:
        tar.seek(int(index.take(np.array([7]), ["image_offset"])["image_offset"][0]))
        tar.write(b"no image at all")
    words = (f"data.shards={tmp_path / 'shards'}", "--run", folder / "run", "--size", 2)
    assert run_tool("neighbours", folder / "config.yaml", *words, "--out", tmp_path / "g.npy") == 0
    groups = np.load(tmp_path / "g.npy")["group"]
    assert groups[7] == -1
    assert (groups < 0).sum() == 2  # 41 rows by twos leave one over
    said = capsys.readouterr().out
    assert "rows that could not be loaded (file_changed) and have no group: 1\n" in said
    assert "42 rows in 20 groups of 2; 2 without a group (not trained on, not loaded, or left over)\n" in said
    assert not np.load(tmp_path / "g.features.npy")[7].any()


def test_rows_that_are_not_trained_on_are_said_to_have_no_group(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    out = tmp_path / "g.npy"
    words = ("data.val.share=0.3", "data.select=width > 0", "--run", folder / "run", "--size", 4, "--out", out)
    assert run_tool("neighbours", folder / "config.yaml", *words) == 0
    with Loader.from_config(data_of(folder, val={"share": 0.3}, select="width > 0")) as loader:
        trained = loader.num_rows
    assert f"; {42 - trained + trained % 4} without a group (not trained on, not " in capsys.readouterr().out


def test_rows_may_be_selected_by_a_table_that_the_run_did_not_have(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    keys = Index.open(folder / "shards").keys(np.arange(42))
    (tmp_path / "t.csv").write_text("key,good\n" + "".join(f"{key},{int(row < 20)}\n" for row, key in enumerate(keys)))
    which, out = (f"data.join=[{{table: {tmp_path / 't.csv'}}}]", "data.select=good == 1"), tmp_path / "g.npy"
    assert run_tool("join", folder / "config.yaml", *which) == 0
    words = (*which, "--run", folder / "run", "--size", 4, "--out", out)
    assert run_tool("neighbours", folder / "config.yaml", *words) == 0
    assert (
        "in 5 groups of 4; 22 without a group (not trained on, not loaded, or left over)\n" in capsys.readouterr().out
    )


def test_features_kept_while_training_become_batches_of_neighbours(folder: Path, capsys: pytest.CaptureFixture[str]):
    run, out = folder / "caching", folder / "cached.npy"
    words = ("train.feature_cache=image", f"train.output={run}", "train.steps=4", "train.log_every_steps=4")
    assert run_tool("train", folder / "config.yaml", *words) == 0
    steps = np.load(run / "features.steps.npy")
    never = int((steps < 0).sum())
    assert 0 < never < 42 - 3 * 8, "four batches of 8, some rows in none of them"
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    (cache,) = [line for line in lines if line["kind"] == "feature_cache"]
    assert cache["never_written_share"] == pytest.approx(never / 42)
    features = ("--features", run / "features.npy", "--size", 4, "--out", out)
    capsys.readouterr()
    assert run_tool("neighbours", folder / "config.yaml", *features) == 0
    assert f"{never + (42 - never) % 4} without a group" in capsys.readouterr().out
    groups = np.load(out)["group"]
    assert (groups[steps < 0] == -1).all()
    assert np.bincount(groups[groups >= 0]).tolist() == [4] * ((42 - never) // 4)
    again = (f"data.groups={{source: {out}, size: 4}}", f"train.output={folder / 'neighbours'}")
    assert run_tool("train", folder / "config.yaml", *again) == 0


def test_file_made_for_other_shards_is_refused(folder: Path, made: Path):
    data = data_of(folder, shards=str(folder / "other"), groups={"source": str(made), "size": 4})
    with pytest.raises(ConfigError, match=r"groups.npy' was made for another corpus; make it anew with"):
        Loader.from_config(data)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--run", "run", "--size", 1), "--size 1: must be 2 to 42, the rows of data.shards"),
        (("--run", "run", "--size", 43), "--size 43: must be 2 to 42, the rows of data.shards"),
        (
            ("--run", "raw", "--size", 4),
            "'raw': a folder, and a run is expected; `mmdata train CONFIG` makes one",
        ),
        (("--features", "none.npy", "--size", 4), "'none.npy': no such file or directory; check the path"),
        (
            ("--features", "short.npy", "--size", 4),
            "features 'short.npy': 41 rows, and data.shards has 42; "
            "give one row of features for each row of the index, in its order",
        ),
        (
            ("--features", "whole.npy", "--size", 4),
            "features 'whole.npy': expected float (rows, dimensions), got int64 (42, 2); "
            "make them with --run, or convert them",
        ),
        (
            ("--features", "raw/captions.jsonl", "--size", 4),
            "features 'raw/captions.jsonl': cannot be read: the magic string is not correct; expected "
            "b'\\x93NUMPY', got b'{\"imag'; expected a .npy file, float",
        ),
        (
            ("--features", "empty.npy", "--size", 4),
            "features 'empty.npy': cannot be read: EOF: reading magic string, expected 8 bytes got 0; "
            "expected a .npy file, float",
        ),
        (
            ("--features", "zip.npy", "--size", 4),
            "features 'zip.npy': cannot be read: EOF: reading magic string, expected 8 bytes got 4; "
            "expected a .npy file, float",
        ),
        (
            ("--features", "zeros.npy", "--size", 4),
            "groups of 4 rows: the size must be 2 to 0, the rows with features (finite, and not all zero)",
        ),
        (
            ("--features", "zeros.npy", "--size", 4, "--relative-margin", 0.05),
            "features 'zeros.npy': expected float (rows, 2, dimensions) of images and captions, got float16 (42, 2); "
            "make them with --run --of both, or convert them",
        ),
        (
            ("--run", "run", "--size", 4, "--absolute-margin", 0.1, "--of", "image"),
            "--of image: the margins and --rescore compare images with captions, and need features of both; "
            "leave --of out",
        ),
        (
            ("--run", "run", "--size", 4, "--range-min", 5, "--range-max", 7),
            "--range-min 5 and --range-max 7: from 0 on, and 8 or more for groups",
        ),
        (("--run", "run", "--size", 4, "--rescore", "raw"), "'raw': a folder, and a run is expected; `mmdata train "),
    ],
)
def test_program_refuses_and_leaves_the_file_there_is(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: tuple[object, ...],
    message: str,
):
    monkeypatch.chdir(folder)
    np.save("short.npy", np.ones((41, 2), np.float16))
    np.save("whole.npy", np.ones((42, 2), np.int64))
    np.save("zeros.npy", np.zeros((42, 2), np.float16))
    Path("empty.npy").write_bytes(b"")
    Path("zip.npy").write_bytes(b"PK\x03\x04")
    Path("there.npy").write_bytes(b"as it was")
    capsys.readouterr()
    assert run_tool("neighbours", "config.yaml", *words, "--out", "there.npy") == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith(f"error: {message}")
    assert Path("there.npy").read_bytes() == b"as it was"
    assert not list(folder.glob(".*.part"))


def test_program_refuses_a_folder_as_the_file_to_write(folder: Path, capsys: pytest.CaptureFixture[str]):
    words = ("--run", folder / "run", "--size", 4, "--out", folder / "raw")
    assert run_tool("neighbours", folder / "config.yaml", *words) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert said == f"error: --out '{folder / 'raw'}': a folder; give the .npy file to write, such as groups.npy"


def test_program_takes_settings_after_options(folder: Path, capsys: pytest.CaptureFixture[str]):
    words = ("--run", folder / "run", "--size", 43, "--out", "g.npy", f"data.shards={folder / 'other'}")
    assert run_tool("neighbours", folder / "config.yaml", *words) == 2
    assert "error: --size 43: must be 2 to 42, the rows of data.shards" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["groups.arrow", "groups.csv", "groups"])
def test_program_refuses_another_kind_of_file(folder: Path, capsys: pytest.CaptureFixture[str], name: str):
    words = ("--run", folder / "run", "--size", 4, "--out", name)
    assert run_tool("neighbours", folder / "config.yaml", *words) == 2
    assert f"error: --out '{name}': the file is an array of numpy; end its name with .npy" in capsys.readouterr().err


def test_program_is_one_process(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    for name, value in {"WORLD_SIZE": "2", "RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    words = ("--run", folder / "run", "--size", 4, "--out", folder / "none.npy")
    assert run_tool("neighbours", folder / "config.yaml", *words) == 2
    assert (
        "neighbours is one process, and torchrun started 2 of it (WORLD_SIZE): start it without torchrun"
        in capsys.readouterr().err
    )


def test_a_folder_of_shards_takes_settings_from_the_command_line(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    np.save(tmp_path / "f.npy", np.random.default_rng(0).normal(size=(42, 4)).astype(np.float32))
    words = ("--features", tmp_path / "f.npy", "--size", 6, "--out", tmp_path / "g.npy")
    assert run_tool("neighbours", folder / "shards", "data.select=width > 0", *words) == 0
    assert "42 rows in 7 groups of 6" in capsys.readouterr().out
    assert run_tool("neighbours", folder / "shards", "data.sede=1", *words) == 2
    assert "unknown key 'data.sede'; did you mean 'data.seed'" in capsys.readouterr().err
