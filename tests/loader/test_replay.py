"""mmdata replay: one row made as in its batch, and what is printed of it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
import torch
import yaml
from PIL import Image

from mmdata import cli
from mmdata.errors import ConfigError, DataError
from mmdata.inspect.replay import find_step, replay, row_of_key
from tests.flat_settings import grouped
from tests.joins import join_first

from .conftest import Corpus


def run_tool(monkeypatch: pytest.MonkeyPatch, *words: object) -> int:
    return cli.main(["replay", *map(str, words)])


def config(corpus: Corpus, folder: Path, **changes: Any) -> Path:
    path = folder / "c.yaml"
    path.write_text(yaml.safe_dump({"data": grouped(**corpus.settings, **changes)}))
    return path


@pytest.mark.parametrize("settings", [{}, {"decode": "exact"}, {"transform": "eval"}, {"image_patches": [4, 6]}])
def test_replay_gives_the_rows_of_the_batches_bit_for_bit(corpus: Corpus, settings: dict[str, Any]):
    if "image_patches" in settings:
        settings = {**settings, "image_buckets": None}
    loader = corpus.loader(**settings)
    for epoch in (0, 1):
        for step, batch in enumerate(loader):
            for place in (0, 5):
                row = int(batch["rows"][place])
                if row < 0:
                    continue
                found = replay(loader.builder, find_step(loader.plan, row, epoch))
                assert (found.step.epoch, found.step.number, found.samples.keys[0]) == (
                    epoch,
                    step,
                    batch["keys"][place],
                )
                for name, value in batch.items():
                    if isinstance(value, torch.Tensor):
                        assert torch.equal(found.made.batch[name][0], value[place]), name  # type: ignore[literal-required]


def test_replay_says_what_happened_at_each_stage(corpus: Corpus):
    loader = corpus.loader()
    found = replay(loader.builder, find_step(loader.plan, 9, 0))  # row % 9 == 0: turned by EXIF
    assert found.image.orientation == 6
    assert bytes(found.image.data) == corpus.samples[9].image
    assert found.caption in corpus.samples[9].captions
    info = corpus.samples[9].info
    assert found.size == (info.width, info.height)
    assert found.crop is not None
    top, left, height, width = found.crop
    assert 0 <= top < top + height <= found.size[0]
    assert 0 <= left < left + width <= found.size[1]
    tar = (corpus.folder / "shards" / found.samples.shard(0)).read_bytes()
    assert tar[found.samples.offset(0, "image") :].startswith(corpus.samples[9].image)
    assert found.made.masked == []


def test_replay_row_or_epoch_that_is_not_there_names_those_there_are(corpus: Corpus):
    plan = corpus.loader().plan
    for row in (50, -1):
        with pytest.raises(
            ConfigError, match=rf"^row {row}: there is no such row; the rows of these shards are 0 to 49$"
        ):
            find_step(plan, row, 3)
    for epoch in (-1, 2**20):
        with pytest.raises(ConfigError, match=rf"^epoch {epoch}: there is no such epoch; they are 0 to 1,048,575$"):
            find_step(plan, 3, epoch)


def test_replay_row_that_is_in_no_batch_is_an_error(corpus: Corpus):
    plan = corpus.loader(shards=[{"shards": corpus.settings["shards"], "repeat": 0.5}]).plan
    unused = set(range(50)).difference(*(step.rows.tolist() for step in plan.steps(0)))
    row = min(unused)
    message = rf"^row {row} is in no batch of epoch 0; a mixture leaves some .*: try --epoch 1$"
    with pytest.raises(DataError, match=message):
        find_step(plan, row, 0)
    assert find_step(plan, row, 1).rows.tolist() == [row]


def test_replay_says_which_selection_leaves_a_row_out(corpus: Corpus):
    width = corpus.index[7].image.size[0]
    plan = corpus.loader(select=f"width != {width}").plan
    message = rf"^row 7 is not loaded: data.select width != {width} \(.*\); `mmdata replay SHARDS` makes any row"
    with pytest.raises(ConfigError, match=message):
        find_step(plan, 7, 0)


@pytest.mark.parametrize(
    ("key", "meant"),
    [("42", "; did you mean '00042'?"), ("0004Z", "; did you mean '0004"), ("dog.jpg", "; the first key is '00000'")],
)
def test_replay_key_that_is_not_there_names_the_nearest(corpus: Corpus, key: str, meant: str):
    assert row_of_key(corpus.index, "00042") == 42
    with pytest.raises(DataError) as caught:
        row_of_key(corpus.index, key)
    assert str(caught.value).startswith(f"key '{key}': none of 50 rows has it{meant}")


def test_replay_program_prints_the_stages_and_saves_the_pixels(
    corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    path, png = config(corpus, tmp_path), tmp_path / "out.png"
    assert run_tool(monkeypatch, path, 7, "--epoch", 1, "--save", png) == 0
    shown = capsys.readouterr().out
    names = [line.split()[0] for line in shown.splitlines()]
    assert names == ["row", "batch", "read", "decode", "transform", "caption", "tokenize", "pixels", "pixels:"]
    loader = corpus.loader()
    step = find_step(loader.plan, 7, 1)
    assert f"epoch 1, step {step.number}: {step.bucket.length} tokens, {step.bucket.image}" in shown
    expected = replay(loader.builder, step).made.batch["pixel_values"][0].permute(1, 2, 0)
    assert np.array_equal(np.asarray(Image.open(png)), expected.numpy())
    assert run_tool(monkeypatch, path, "--key", "00007", "--epoch", 1) == 0
    first = [line for line in capsys.readouterr().out.splitlines() if " ms  " not in line]
    assert first == [line for line in shown.splitlines()[:-1] if " ms  " not in line]


def test_replay_program_says_why_a_row_of_the_ledger_is_masked(
    corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    damaged = corpus.copy(tmp_path / "corpus")
    damaged.overwrite(3, "image", bytes(400))
    loader = damaged.loader(max_bad_share=0.5)
    loader.set_epoch(1)
    loader.ledger.write_to(tmp_path / "l.jsonl", epoch=0, step=0)
    list(loader)
    (line,) = [json.loads(line) for line in (tmp_path / "l.jsonl").read_text().splitlines()]
    assert run_tool(monkeypatch, config(damaged, tmp_path), line["row"], "--epoch", line["epoch"]) == 1
    shown = capsys.readouterr().out
    assert "row                   3, key '00003', shard '000000.tar'\n" in shown
    assert f"epoch 1, step {loader.ledger[0].step}: " in shown
    assert f"at read: file_changed: {loader.ledger[0].detail}\n" in shown


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "say which row: a number or --key, one of them; got none"),
        ([3, "--key", "00003"], "say which row: a number or --key, one of them; got '3' and --key"),
        (["x"], "row 'x': expected a number; a key is given as --key x"),
        ([99], "row 99: there is no such row; the rows of these shards are 0 to 49"),
        ([-1], "row -1: there is no such row; the rows of these shards are 0 to 49"),
        ([3, "--epoch", -1], "epoch -1: there is no such epoch; they are 0 to 1,048,575"),
        ([3, "--save", "x.xyz"], "--save 'x.xyz': its ending names no image format; give a name such as row.png"),
        ([3, "--save", "none/x.png"], "--save 'none/x.png': there is no folder 'none'; make it, or give another"),
    ],
)
def test_replay_program_says_in_one_line_what_is_wrong(
    words: list[object],
    message: str,
    corpus: Corpus,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    assert run_tool(monkeypatch, config(corpus, tmp_path), *words) == 2
    assert f"error: {message}\n" == capsys.readouterr().err


def test_replay_program_takes_the_config_first(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    assert run_tool(monkeypatch, 3, "configs/scenes.yaml") == 2
    said = capsys.readouterr().err
    assert said == "error: the config comes first, then the row: `mmdata replay CONFIG 3`\n"


def test_replay_program_takes_a_folder_of_shards(
    corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    shards, png = corpus.folder / "shards", tmp_path / "out.png"
    assert run_tool(monkeypatch, shards, 7, "data.image_size=48", "data.transform=eval", "--save", png) == 0
    shown = capsys.readouterr().out
    names = [line.split()[0] for line in shown.splitlines()]
    assert names == ["row", "batch", "read", "decode", "transform", "caption", "tokenize", "pixels", "pixels:"]
    assert "row                   7, key '00007', shard '000000.tar'\n" in shown
    assert any(f"caption               {caption!r}\n" in shown for caption in corpus.samples[7].captions)
    assert Image.open(png).size == (48, 48)

    # The captions of other rows are not counted, which would read every shard: they are padded to max_length.
    monkeypatch.setattr("mmdata.plan.captions.CaptionSources.count", lambda *_: pytest.fail("captions were counted"))
    assert run_tool(monkeypatch, shards, 7) == 0
    assert ": 77 tokens, " in capsys.readouterr().out
    assert run_tool(monkeypatch, shards, 7, "data.max_length=32") == 0
    assert ": 32 tokens, " in capsys.readouterr().out
    assert run_tool(monkeypatch, shards, 7, "data.tokenizer=null") == 0
    assert "tokenize" not in capsys.readouterr().out

    assert run_tool(monkeypatch, shards, 7, "data.image_siz=48") == 2
    said = capsys.readouterr().err
    assert said == "error: on the command line: unknown key 'data.image_siz'; did you mean 'data.image_size'?\n"


def test_replay_of_a_row_of_weight_0_says_so_and_of_a_rare_one_when_it_comes(corpus: Corpus, tmp_path: Path):
    np.save(tmp_path / "weights.npy", np.where(np.arange(50) == 3, 0, np.where(np.arange(50) < 10, 0.25, 1.0)))
    plan = corpus.loader(row_weights=str(tmp_path / "weights.npy")).plan
    with pytest.raises(
        ConfigError, match=r"^row 3 is in no batch of any epoch: its weight is 0 \(data.row_weights wei"
    ):
        find_step(plan, 3, 0)
    waits = 0
    for row in (0, 1, 2, 4):
        try:
            find_step(plan, row, 0)
        except ConfigError as error:
            found = re.fullmatch(
                rf"row {row} is in no batch of epoch 0: its weight is 0.25 .*: try --epoch (\d+)", str(error)
            )
            assert found is not None
            assert find_step(plan, row, int(found[1])).rows.tolist() == [row]
            waits += 1
    assert waits


def test_replay_of_a_row_that_is_left_out_names_the_condition(
    corpus: Corpus, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    table = corpus.table(tmp_path / "scores.parquet", range(40), score=[row / 50 for row in range(40)])
    join = [{"table": table, "missing": "mask"}]
    path = config(corpus, tmp_path, join=join, select="score > 0.1 and width > 0")
    join_first(path)
    assert run_tool(monkeypatch, path, 2) == 2
    for row in (2, 45):
        assert run_tool(monkeypatch, path, row) == 2
        said = f"row {row} is not loaded: data.join.0 missing: mask and data.select score > 0.1 and width > 0 ("
        assert said in capsys.readouterr().err


def test_replay_shows_fields_and_the_source_of_the_caption(
    corpus: Corpus, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    columns = {
        "score": [row / 50 for row in range(50)],
        "text": [f"text {row}" for row in range(50)],
        "vector": pa.array([[float(row)] * 20 for row in range(50)], pa.list_(pa.float32())),
        "recaption": [["one", "two"] for _ in range(50)],
    }
    table = corpus.table(tmp_path / "table.parquet", **columns)
    fields = {"score": "join:score", "text": "join:text", "vector": "join:vector"}
    path = config(
        corpus,
        tmp_path,
        join=[{"table": table}],
        fields=fields,
        captions={"shards": 0, "join:recaption": 1},
    )
    join_first(path)
    assert run_tool(monkeypatch, path, 5) == 0
    said = capsys.readouterr().out
    assert re.search(r"^caption +'(one|two)', of join:recaption, number [01]$", said, re.MULTILINE)
    for words in ("score: 0.1", "text: 'text 5'", "vector: float32 20, mean 5"):
        assert re.search(rf"^field +{words}$", said, re.MULTILINE), said
