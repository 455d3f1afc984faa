"""`mmdata init`: from a folder, a table, a tar or shards to a config that trains."""

from __future__ import annotations

import csv
import re
import shlex
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import webdataset as wds
from PIL import Image

import datasets
from mmdata import Index, Loader, cli
from mmdata.config import load_config
from mmdata.config.data import evaluation_data
from mmdata.convert import ConvertConfig, convert
from mmdata.inspect.starter import Facts, Machine, Starter, choose_share, choose_tokenizer, config_text
from mmdata.text.tokenizer import Tokenizer
from tests.programs import PATIENCE_S, run_program
from tests.storage.servers import serve

CPU = Machine(cores=2)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Run a program in an empty folder; returns what it prints, or its error line."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Machine, "here", classmethod(lambda cls: CPU))

    def run_tool(name: str, *words: object, code: int = 0) -> str:
        capsys.readouterr()
        ended = cli.main([name, *map(str, words)])
        shown = capsys.readouterr()
        assert ended == code, shown.err
        return shown.err if code else shown.out

    return run_tool


def paint(path: Path, seed: int) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(seed).integers(0, 255, (40, 48, 3), np.uint8)
    Image.fromarray(pixels).save(path)
    return path


def make_folder(folder: Path, count: int = 50) -> Path:
    """Images with a caption file each."""
    for i in range(count):
        paint(folder / f"{i:03d}.png", i).with_suffix(".txt").write_text(f"a picture of thing number {i}")
    return folder


def check_config(path: Path) -> Any:
    """Load a config; each of its values has a comment."""
    lines = path.read_text().splitlines()
    assert lines[0] == f"# mmdata train {path.name}" or lines[0].endswith(str(path))
    assert all(re.fullmatch(r"  \w+: .* +# .+", line) for line in lines[1:] if line.startswith("  "))
    return load_config(path)


def test_init_of_a_folder_of_fifty_images_writes_a_config_that_trains(run, tmp_path: Path):
    make_folder(tmp_path / "photos")
    before = sorted(path.name for path in (tmp_path / "photos").iterdir())
    said = run("init", "photos")
    assert "shards/photos: 50 rows in 1 shard\n  images: 40 to 48 pixels a side; the median is 40 × 48 (he" in said
    assert "captions: 1 a row, 6.0 words on average; the longest has " in said
    assert said.startswith("$ mmdata convert photos shards/photos\n")
    assert "$ mmdata index shards/photos --train-tokenizer 512\n" in said
    assert "50 rows are few: a model memorizes them, and learns little about other images\n" in said
    assert said.endswith("\nnext: mmdata train photos.yaml\n")
    assert sorted(path.name for path in (tmp_path / "photos").iterdir()) == before

    config = check_config(tmp_path / "photos.yaml")
    val = Loader.from_config(evaluation_data(config.data)).plan.num_rows
    assert f"{val} rows are kept from training" in (tmp_path / "photos.yaml").read_text()
    assert (config.data.val.share, config.data.image_size, config.data.global_batch_size) == (0.2, 40, 8)
    assert (config.model.name, config.train.epochs) == ("tiny", 100)
    run("train", "photos.yaml", "train.epochs=null", "train.steps=2", "model.name=micro", "train.warmup_steps=1")
    assert (tmp_path / "runs" / "photos" / "evaluation.json").is_file()

    assert "config 'photos.yaml' exists: give another name with --out, or replace it with" in run(
        "init", "photos", code=2
    )
    again = run("init", "shards/photos", "--overwrite")
    assert "$ mmdata" not in again
    config_of_shards = check_config(tmp_path / "photos.yaml")
    assert config_of_shards == config
    assert "the one that counted these captions" in (tmp_path / "photos.yaml").read_text()
    assert convert(tmp_path / "photos", tmp_path / "shards/photos").was_complete  # with a tokenizer that came later
    assert run("init", "photos", "--overwrite").endswith("\nnext: mmdata train photos.yaml\n")
    words = ("shards/photos", "--tokenizer", "clip", "--overwrite")
    assert run("init", *words, code=2) == (
        "error: 'shards/photos': another tokenizer has counted their captions; name it with --tokenizer, or make "
        "another index: `mmdata index shards/photos --out FOLDER --tokenizer NAME`, and then `mmdata init FOLDER`\n"
    )


def test_init_of_a_table_says_what_is_left_out_and_writes_into_configs(run, tmp_path: Path):
    folder = tmp_path / "corpus"
    rows = [(f"{i}.png", ["red", "blue", "green"][i % 3]) for i in range(60)]
    for i, (name, _) in enumerate(rows):
        paint(folder / name, i % 58)  # two images come again
    (folder / "0.png").write_bytes(b"no image")
    with (folder / "captions.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("filepath", "caption"), *rows])
    (tmp_path / "configs").mkdir()
    said = run("init", folder / "captions.csv")
    assert "58 images, 58 captions; 2 left out, each with its reason in shards/corpus/" in said
    assert said.endswith("next: mmdata train configs/corpus.yaml\n")
    config = check_config(Path("configs/corpus.yaml"))
    assert config.train.mask_false_negatives  # three captions
    assert "of the captions occur more than once" in Path("configs/corpus.yaml").read_text()


def test_init_of_a_tar_leaves_its_folder_alone(run, tmp_path: Path):
    (tmp_path / "theirs").mkdir()
    tar = tmp_path / "theirs" / "pairs-0000.tar"
    with wds.TarWriter(str(tar)) as writer:
        for i in range(40):
            writer.write({"__key__": f"{i:04d}", "png": paint(tmp_path / "p.png", i).read_bytes(), "txt": f"thing {i}"})
    before = tar.read_bytes()
    said = run("init", tar)
    assert said.startswith(f"$ mmdata index {tar} --out shards/pairs-0000\n")
    assert ([path.name for path in tar.parent.iterdir()], tar.read_bytes()) == (["pairs-0000.tar"], before)
    config = check_config(tmp_path / "pairs-0000.yaml")
    loader = Loader.from_config(config.data)
    assert sum(int(batch["valid"].sum()) for batch in loader) == loader.plan.num_rows < 40
    assert loader.index.tokenizer == loader.builder.spec.tokenizer.fingerprint


def test_init_of_an_index_by_clips_tokenizer_takes_the_index_as_it_is(run, tmp_path: Path):
    """CLIP's tokenizer ships with mmdata, so that none lies in the folder."""
    with wds.TarWriter(str(tmp_path / "0.tar")) as writer:
        for i in range(40):
            writer.write({"__key__": f"{i:04d}", "png": paint(tmp_path / "p.png", i).read_bytes(), "txt": f"thing {i}"})
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (tmp_path / "0.tar").rename(theirs / "0.tar")
    run("index", "theirs", "--tokenizer", "clip")
    assert "theirs: 40 rows in 1 shard\n" in run("init", "theirs")
    data = check_config(tmp_path / "theirs.yaml").data
    assert (data.shards, data.tokenizer) == ("theirs", "clip")
    assert not (tmp_path / "shards").exists()


def test_init_counts_the_captions_of_an_index_of_urls_in_it(run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    (tmp_path / "theirs").mkdir()
    for shard in range(2):
        with wds.TarWriter(str(tmp_path / "theirs" / f"{shard}.tar")) as writer:
            for i in range(20):
                image = paint(tmp_path / "p.png", 20 * shard + i).read_bytes()
                writer.write({"__key__": f"{shard}{i:04d}", "png": image, "txt": f"thing {i}"})
    with serve(tmp_path / "theirs") as server:
        said = run("init", f"{server.url}/{{0..1}}.tar", code=2)
        assert f"`mmdata index '{server.url}/{{0..1}}.tar' --out FOLDER` makes an index of the tars there, for" in said
        run("index", f"{server.url}/{{0..1}}.tar", "--out", "index")
        said = run("init", "index", "--tokenizer", "clip")
        assert said.startswith("$ mmdata index index --tokenizer clip\n")
        data = check_config(tmp_path / "index.yaml").data
    assert (data.shards, data.tokenizer) == ("index", "clip")
    assert Index.open("index").tokenizer == Tokenizer.load("clip").fingerprint
    assert not (tmp_path / "shards").exists()


def test_init_takes_a_given_tokenizer(run, tmp_path: Path):
    convert(make_folder(tmp_path / "a"), tmp_path / "s", ConvertConfig(train_tokenizer=300))
    make_folder(tmp_path / "b", 40)
    said = run("init", "b", "--tokenizer", "s/tokenizer", "--shards", "here", "--out", "named.yaml")
    assert "$ mmdata index here --tokenizer s/tokenizer\n" in said
    data = check_config(tmp_path / "named.yaml").data
    assert (data.shards, data.tokenizer) == ("here", "s/tokenizer")


def test_init_tells_a_wrong_option_before_it_converts(run: Callable[..., str], tmp_path: Path):
    convert(make_folder(tmp_path / "photos", 40), tmp_path / "s")
    assert "error: tokenizer './none': " in run("init", "photos", "--tokenizer", "./none", code=2)
    assert run("init", "s", "--shards", "other", code=2) == (
        "error: 's': has an index, which is taken as it is: leave --shards out, or make another one with `mmdata index "
        "s --out other`, and then `mmdata init other`\n"
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["photos", "s"]
    (tmp_path / "one.csv").write_text("filepath,caption\nphotos/000.png,one\n")
    convert("one.csv", "shards/photos")
    said = run("init", "photos", code=2)
    assert "--overwrite" in said
    assert "that is an option of" not in said


def test_init_of_class_folders_makes_captions_of_the_names(run, tmp_path: Path):
    for i in range(40):
        paint(tmp_path / "pets" / ("cat", "sea_lion")[i % 2] / f"{i}.png", i)
    said = run("init", "pets")
    assert said.startswith("$ mmdata convert pets shards/pets --caption-template 'a photo of a {}.'\n")
    config = check_config(tmp_path / "pets.yaml")
    assert config.train.mask_false_negatives
    index = Index.open("shards/pets")
    assert (index.captions, index.has_labels) == (40, True)


@pytest.mark.parametrize("out", ["theirs", "apart"])
def test_init_of_damaged_tars_takes_what_their_index_has(run, tmp_path: Path, out: str):
    (tmp_path / "theirs").mkdir()
    for t in range(2):
        with wds.TarWriter(str(tmp_path / f"theirs/{t}.tar")) as writer:
            for i in range(20 * t, 20 * t + 20):
                image = paint(tmp_path / "p.png", i).read_bytes()
                writer.write({"__key__": f"{i:04d}", "png": image, "txt": f"thing {i}"})
    tar = tmp_path / "theirs/1.tar"
    tar.write_bytes(tar.read_bytes()[: tar.stat().st_size // 2])
    assert (
        "--skip-damaged, which counts what is lost; that is an option of `mmdata index theirs --out shards/theirs`:"
        in run("init", "theirs", code=2)
    )
    run("index", "theirs", "--skip-damaged", "--out", out, "--max-bad-share", "0.5")
    indexed = len(Index.open(out))
    where = "theirs" if out == "theirs" else "theirs --out apart"
    assert f"$ mmdata index {where} --skip-damaged --train-tokenizer 512\n" in run("init", out)
    loader = Loader.from_config(check_config(tmp_path / f"{out}.yaml").data)
    assert 0 < loader.plan.num_rows < len(Index.open(out)) == indexed < 40


def test_init_accepts_what_an_index_leaves_out(run, tmp_path: Path):
    (tmp_path / "theirs").mkdir()
    with wds.TarWriter(str(tmp_path / "theirs" / "0.tar")) as writer:
        for i in range(20):
            image = b"no image" if i < 5 else paint(tmp_path / "p.png", i).read_bytes()
            writer.write({"__key__": f"{i:04d}", "png": image, "txt": f"thing {i}"})
    run("index", "theirs", "--max-bad-share", "0.5")
    assert "$ mmdata index theirs --max-bad-share 1 --train-tokenizer 512\n" in run("init", "theirs")


def make_hub(hub: Path) -> None:
    rows = [paint(hub.parent / "photos" / f"{i}.png", i).read_bytes() for i in range(45)]
    table = datasets.Dataset.from_dict({"image": rows, "text": [f"thing {i}" for i in range(45)]})
    (hub / "data").mkdir(parents=True)
    table.select(range(40)).to_parquet(str(hub / "data/train-00000-of-00001.parquet"))
    table.select(range(40, 45)).to_parquet(str(hub / "data/test-00000-of-00001.parquet"))


def make_class_folders(hub: Path) -> None:
    """The part for validation lacks a class."""
    for i in range(45):
        part, kind = ("train", ["cat", "dog", "fox"][i % 3]) if i < 40 else ("val", ["dog", "fox"][i % 2])
        paint(hub / part / kind / f"{i}.png", i)


@pytest.mark.parametrize("make", [make_hub, make_class_folders])
def test_init_of_a_folder_with_parts_names_the_commands_that_convert_them(
    run: Callable[..., str], tmp_path: Path, make: Callable[[Path], None]
) -> None:
    make(tmp_path / "hub")
    said = run("init", "hub", code=2)
    assert said.startswith("error: 'hub': has 2 parts, which are converted one by one: `mmdata convert hub ")
    *commands, init = (shlex.split(command) for command in re.findall("`mmdata (.*?)`", said))
    for command in commands:
        run_program([sys.executable, "-m", "mmdata", *command], check=True, timeout=PATIENCE_S, cwd=tmp_path)
    run(*init)
    data = check_config(tmp_path / "hub.yaml").data
    assert (data.shards, data.val.shards) == ("shards/hub/train", "shards/hub/val")
    assert Loader.from_config(evaluation_data(data)).plan.num_rows == 5


def write_labels_only(tar: Path) -> None:
    tar.parent.mkdir()
    with wds.TarWriter(str(tar)) as writer:
        for i in range(8):
            image = paint(tar.parent.parent / "p.png", i).read_bytes()
            writer.write({"__key__": f"{i}", "png": image, "cls": str(i % 2).encode()})


def test_init_says_in_one_line_what_it_cannot_do(run, tmp_path: Path):
    (tmp_path / "nothing").mkdir()
    assert run("init", "nothing", code=2) == "error: source 'nothing': no images in it; the corpus is empty\n"
    assert run("init", "gone", code=2) == "error: source 'gone': no such file or folder\n"
    message = "error: source 'notihng': no such file or folder; did you mean 'nothing'?\n"
    assert run("init", "notihng", code=2) == message
    write_labels_only(tmp_path / "labels" / "a.tar")
    said = run("init", "labels", code=2)
    assert ": shards with labels and no captions, and a dual encoder needs texts: make captions of the" in said
    assert 'mmdata convert labels OUT --caption-template "a photo of a {}."`, and then `mmdata init OUT`' in said
    for i in range(3):
        (tmp_path / "broken").mkdir(exist_ok=True)
        (tmp_path / "broken" / f"{i}.png").write_bytes(b"no image")
        (tmp_path / "broken" / f"{i}.txt").write_text("a caption")
    said = run("init", "broken", code=2)
    assert "error: 3 of 3 rows are unusable, over max_bad_share=0.05; nothing is published. 3 not_an_image " in said
    make_folder(tmp_path / "a --split in a name", 40)
    for name in ("one.csv", "two.csv"):
        (tmp_path / "a --split in a name" / name).write_text("a,b\n")
    for caption in (tmp_path / "a --split in a name").glob("*.txt"):
        caption.unlink()
    said = run("init", "a --split in a name", code=2)
    assert "it has tables (one.csv, two.csv): give one as the source" in said
    assert said.endswith("/a --split in a name/one.csv'\n")
    (tmp_path / "odd.csv").write_text("picture,words\n1.png,one\n")
    said = run("init", "odd.csv", code=2)
    assert re.search(
        r"--image-column.*; that is an option of `mmdata convert odd\.csv shards/odd`: then `mmdata init shards/odd`",
        said,
    )
    (tmp_path / "gone.csv").write_text("filepath,caption\ngone.png,one\n")
    said = run("init", "gone.csv", code=2)
    assert "error: 1 of 1 rows are unusable, over max_bad_share=0.05; nothing is published. 1 missing_image " in said
    assert f"; the table's paths are relative to '{tmp_path}', and '{tmp_path}/gone.png' does not exist: " in said
    assert said.endswith(
        "; that is an option of `mmdata convert gone.csv shards/gone`: then `mmdata init shards/gone`\n"
    )
    assert "a conversion into it was stopped or refused, or still runs; run the same `mmdata convert` command" in run(
        "init", "shards/gone", code=2
    )
    assert not list(tmp_path.glob("*.yaml"))


def test_init_of_the_train_part_of_a_conversion_evaluates_on_its_val_part(run, tmp_path: Path):
    make_folder(tmp_path / "photos")
    convert(tmp_path / "photos", tmp_path / "out", ConvertConfig(val_share=0.3))
    parts = [len(Index.open(tmp_path / "out" / part)) for part in ("train", "val")]
    assert sum(parts) == 50
    shutil.copytree(tmp_path / "out", tmp_path / "other")
    run("index", "other/train", "--tokenizer", "clip")
    run("index", "other/val", "--train-tokenizer", "300")
    said = run("init", "other/train")
    assert "other/val is not evaluated on: another tokenizer has counted its captions\n" in said
    assert check_config(tmp_path / "other.yaml").data.val.shards is None

    (tmp_path / "out.yaml").write_text("")
    said = run("init", "out/train", "--overwrite")  # counts both in their place; the config is replaced
    assert "$ mmdata index out/train --train-tokenizer 512\n" in said
    assert "$ mmdata index out/val --tokenizer out/train/tokenizer\n" in said
    assert "not evaluated on" not in said
    assert not (tmp_path / "shards").exists()
    config = check_config(tmp_path / "out.yaml")
    assert (config.data.val.shards, config.data.val.share) == ("out/val", None)
    assert f"# {parts[1]} rows to evaluate on" in (tmp_path / "out.yaml").read_text()
    assert f"{-(-parts[0] // config.data.global_batch_size)} steps an epoch" in (tmp_path / "out.yaml").read_text()


def test_init_of_the_source_of_a_whole_conversion_replaces_nothing(run, tmp_path: Path):
    make_folder(tmp_path / "photos")
    convert(tmp_path / "photos", tmp_path / "shards/photos", ConvertConfig(val_share=0.3, tokenizer="clip"))
    before = sorted((tmp_path / "shards").rglob("*"))
    assert run("init", "photos", code=2) == (
        "error: output 'shards/photos': holds train and val of a conversion; `mmdata init shards/photos` takes them as "
        "they are, and --shards names another folder\n"
    )
    assert sorted((tmp_path / "shards").rglob("*")) == before


def test_init_and_plan_of_a_whole_conversion_take_its_train_part(run, tmp_path: Path):
    make_folder(tmp_path / "photos")
    convert(tmp_path / "photos", tmp_path / "shards/coco", ConvertConfig(val_share=0.3, tokenizer="clip"))
    said = run("init", "shards/coco")
    assert "shards/coco: holds train and val, folders of shards; shards/coco/train is taken\n" in said
    config = check_config(tmp_path / "coco.yaml")
    assert (config.data.shards, config.data.val.shards) == ("shards/coco/train", "shards/coco/val")
    said = run("plan", "shards/coco")
    assert said.startswith("no config is given; assumed: data.shards=shards/coco/train, data.global_batch_size=")
    assert f" {len(Index.open('shards/coco/train'))} rows in " in said

    (tmp_path / "class_folders" / "train").mkdir(parents=True)
    (tmp_path / "class_folders" / "val").mkdir()
    assert "class_folders" in run("init", "class_folders", code=2), "folders that are no shards are left to `look`"


def facts_of(rows: int, *, short_side: int = 480, longest: int = 20, repeated: int = 0) -> Facts:
    sides = np.full(4, short_side)
    return Facts(rows, 4, sides, sides + 100, 4, ["a red square"] * 4, longest, repeated)


GPU, NODE = Machine(16, 1, 80.0), Machine(64, 8, 80.0)


@pytest.mark.parametrize(
    ("machine", "rows", "expected"),
    [  # model, image size, batch, epochs
        (CPU, 40, ("tiny", 64, 8, 100)),
        (CPU, 3_500, ("tiny", 64, 128, 40)),
        (CPU, 1_000_000, ("tiny", 64, 128, 3)),
        (GPU, 1_000, ("tiny", 64, 64, 67)),
        (GPU, 50_000, ("small", 224, 1024, 100)),
        (GPU, 3_000_000, ("vit_b_16", 224, 512, 4)),
        (NODE, 3_000_000, ("vit_b_16", 224, 4096, 28)),
    ],
)
def test_starter_fits_machine_and_corpus(machine: Machine, rows: int, expected: tuple[object, ...]):
    share = choose_share(rows)
    starter = Starter(facts_of(rows), machine, share, round(share * rows))
    assert (starter.model, starter.image_size, starter.batch_size, starter.epochs) == expected
    assert starter.batch_size % max(machine.gpus, 1) == 0
    kept = {one.key: int(one.value) for one in starter.train() if one.key == "checkpoint_every_steps"}
    total = starter.steps * starter.epochs  # a run of 20,000 updates has the default, 1,000
    assert kept == ({"checkpoint_every_steps": total // 20} if total < 20_000 else {})


def test_starter_says_how_to_launch_and_what_it_does_for_the_captions():
    starter = Starter(facts_of(100_000, longest=130, repeated=2, short_side=100), NODE, 0.05, 5_000)
    text = config_text(starter, path="a.yaml", shards="shards/a b", tokenizer="clip", about_tokenizer="CLIP's")
    assert text.startswith("# torchrun --nproc-per-node 8 -m mmdata train a.yaml\n# made by `mmdata init` for 100,000")
    for line in (
        "  shards: shards/a b ",
        "  max_length: 136 ",
        "  image_size: 96 ",
        "  mask_false_negatives: true  # 50.0% of the captions occur more than once",
    ):
        assert f"\n{line}" in text


@pytest.mark.parametrize(("machine", "rows"), [(CPU, 40), (GPU, 50_000), (GPU, 3_000_000)])
def test_starter_says_beside_its_model_how_it_is_exported(machine: Machine, rows: int):
    starter = Starter(facts_of(rows), machine, 0.1, rows // 10)
    text = config_text(starter, path="a.yaml", shards="shards/a", tokenizer="clip", about_tokenizer="CLIP's")
    (line,) = [line for line in text.splitlines() if line.startswith("  name: ")]
    told = line.endswith("; `mmdata export` takes vit_* and pretrained, not these")
    assert told is (starter.model != "vit_b_16")


@pytest.mark.parametrize(
    ("text", "captions", "words"),
    [
        ("a red square", 200_000, ["--tokenizer", "clip"]),
        ("ein rotes Viereck über Köln", 200_000, ["--train-tokenizer", "16384"]),
        ("a red square", 5_000, ["--train-tokenizer", "1024"]),
    ],
)
def test_init_takes_clips_tokenizer_for_many_english_captions_and_trains_one_for_others(
    text: str, captions: int, words: list[str]
):
    facts = replace(facts_of(captions), captions=4, texts=[text] * 4)
    assert choose_tokenizer(facts)[0] == words


@pytest.mark.parametrize(
    ("rows", "share"), [(1, 0.2), (50, 0.2), (190, 0.1), (3_544, 0.1), (1_000_000, 0.005), (10**9, 5e-06)]
)
def test_share_is_a_tenth_of_few_rows_and_at_most_five_thousand_of_many(rows: int, share: float):
    assert choose_share(rows) == share
    starter = Starter(facts_of(rows), CPU, share, 1)
    (val,) = [one for one in starter.data("s", "t", "…") if one.key == "val"]
    assert re.fullmatch(r"\{share: 0\.\d+\}", val.value)  # YAML takes 5e-06 for a text


def test_init_of_too_many_bad_rows_says_how_it_goes_on(run: Callable[..., str], tmp_path: Path):
    make_folder(tmp_path / "photos", 8)
    (tmp_path / "photos/000.png").write_bytes(b"no image")
    said = run("init", "photos", code=2)
    assert said.endswith(
        "Repair the corpus, or allow more with --max-bad-share; that is an option of `mmdata convert photos "
        "shards/photos`: then `mmdata init shards/photos`\n"
    )
