"""What a run is refused for before it starts: everything that does not fit, listed together."""

from __future__ import annotations

import logging
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from mmdata import Loader
from mmdata.config import Config
from mmdata.config.strict_yaml import parse
from mmdata.errors import ConfigError, Problems
from mmdata.images import probe
from mmdata.tars.write import Sample
from mmdata.text.tokenizer import train_tokenizer
from mmdata.train import DualEncoder
from mmdata.trained.check import check_run, shape_problems, warn_of_device, warn_of_false_negatives, warn_of_mining
from tests.shard_writer import ShardWriter

SMALL = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
CLIP = {
    "model_type": "clip",
    "text_config": {**SMALL, "vocab_size": 500, "max_position_embeddings": 12},
    "vision_config": {**SMALL, "patch_size": 8, "image_size": 16},
}
SIGLIP2 = {
    "model_type": "siglip2",
    "text_config": {"vocab_size": 500, "max_position_embeddings": 64},
    "vision_config": {"patch_size": 14},
}


@pytest.fixture(scope="module")
def sections(tmp_path_factory: pytest.TempPathFactory, photo: Any) -> dict[str, Any]:
    """The settings of a run that begins: two rows, one of whose captions is long."""
    folder = tmp_path_factory.mktemp("corpus")
    captions = ["a red dog", " ".join(["a dog"] * 15)]
    train_tokenizer(captions, folder / "tokenizer", vocab_size=300, max_length=77)
    with ShardWriter(folder / "shards") as writer:
        for i, caption in enumerate(captions):
            image = photo(24, 24, seed=i)
            writer.write(Sample(str(i), image, probe(image), [caption]))
    data = {"shards": str(folder / "shards"), "tokenizer": str(folder / "tokenizer"), "global_batch_size": 2}
    data |= {"image_size": 16, "loading": {"num_workers": 0}}
    return {"data": data, "model": {"name": "micro"}, "train": {"steps": 1}}


def config_of(sections: dict[str, Any], **changes: dict[str, Any]) -> Config:
    return parse(Config, {key: {**section, **changes.get(key, {})} for key, section in sections.items()}, origin="c")


def test_run_that_fits_gives_its_tokenizer(sections: dict[str, Any], tmp_path: Path):
    assert check_run(config_of(sections), tmp_path / "run", world_size=2).max_length == 77


@pytest.mark.parametrize(
    ("groups", "said"),
    [
        (None, "train.miner same_group keeps the rows of a row's own group, and batches have none: set data.groups"),
        ({"size": 2}, "train.miner.size is 4, and data.groups.size is 2: .* set train.miner.size=2"),
        ({"candidates": 1}, "train.miner.size is 4, and 1 \\+ data.groups.candidates is 2: .* set train.miner.size=2"),
    ],
)
def test_a_miner_of_groups_that_batches_do_not_have_is_refused(sections: dict[str, Any], groups: Any, said: str):
    with pytest.raises(ConfigError, match=said):
        config_of(sections, data={"groups": groups}, train={"miner": {"name": "same_group", "size": 4}})
    config_of(sections, data={"groups": {"size": 2}}, train={"miner": {"name": "same_group", "size": 2}})


def test_regions_take_no_miner_of_groups(sections: dict[str, Any]):
    miner = {"name": "same_group", "size": 2}
    with pytest.raises(
        ConfigError, match=r"'train.regions.miner': expected {name: all, gumbel_top_k, semi_hard, top_k, u"
    ):
        config_of(sections, data={"groups": {"size": 2}}, train={"regions": {"miner": miner}})


def test_run_is_refused_for_all_reasons_together(sections: dict[str, Any], tmp_path: Path):
    (tmp_path / "run").write_text("")
    (tmp_path / "folder").mkdir()
    config = config_of(
        sections,
        data={
            "shards": str(tmp_path / "none"),
            "val": {"shards": str(tmp_path / "folder")},
            "tokenizer": str(tmp_path / "folder"),
            "global_batch_size": 9,
            "groups": {"source": "none.arrow", "size": 3},
            "negative_captions": "none.parquet",
        },
        train={"steps": None, "miner": {"name": "user", "target": "no_such_module:X"}},
    )
    with pytest.raises(Problems) as caught:
        check_run(config, tmp_path / "run", world_size=2)
    lines = str(caught.value).splitlines()
    assert lines[0] == "9 things do not fit:"
    for line, beginning in zip(
        lines[1:],
        [
            "- train.epochs or train.steps is required: how long to train",
            f"- train.output '{tmp_path / 'run'}': a file, and a run needs a folder; give another train.output",
            "- data.global_batch_size 9 is not a multiple of world_size 2; 8 is",
            f"- data.shards: folder '{tmp_path / 'none'}': no such folder",
            f"- data.val.shards: folder '{tmp_path / 'folder'}': no manifest.json; `mmdata index ",
            f"- tokenizer '{tmp_path / 'folder'}': cannot be loaded",
            "- data.negative_captions 'none.parquet': no such file; expected Parquet with the columns",
            "- data.groups.source 'none.arrow': no such file; `mmdata neighbours` makes one",
            "- train.miner.target 'no_such_module:X': cannot be imported: No module named 'no_such_module'",
        ],
        strict=True,
    ):
        assert line.startswith(beginning)


@pytest.mark.parametrize(
    ("files", "said"),
    [
        (["__mmdata__/manifest.json"], r"a folder of shards; it holds files that are not a run's \('__mmdata__'\); ch"),
        (["__mmdata__/manifest.json", "metrics.jsonl"], r"a folder of shards; .* \('__mmdata__' and 1 more\); choose"),
        (["photos/a.jpg", "b.csv", "c.csv"], r"a folder; .* \('b.csv' and 2 more\); choose another output"),
        (["config.yaml"], r"a folder; .* \('config.yaml'\); choose another output"),
        (["0.tar", "0.log"], r"a folder of tars; .* \('0.tar'\)"),
        (["step-0000000003/run.pt"], "a folder of checkpoints; "),
        (["checkpoints/step-0000000003/run.pt", "notes.txt"], None),
        ([".mmdata.lock", "features.npy", "features.steps.npy"], None),
        ([".gitkeep", "train.log", "slurm-17.out", "slurm-12.txt", "events.out.tfevents.1.host", "exp.yaml"], None),
    ],
)
def test_output_that_is_not_for_a_run_is_refused(
    sections: dict[str, Any], tmp_path: Path, files: list[str], said: str | None
):
    for name in files:
        (tmp_path / "run" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "run" / name).touch()
    if said is None:
        check_run(config_of(sections), tmp_path / "run", world_size=1)
        return
    with pytest.raises(Problems, match=rf"^train.output '{tmp_path / 'run'}': {said}"):
        check_run(config_of(sections), tmp_path / "run", world_size=1)


def test_run_with_one_fault_is_refused_in_one_line(sections: dict[str, Any], tmp_path: Path):
    with pytest.raises(Problems, match=r"^train\.epochs or train\.steps is required: how long to train$"):
        check_run(config_of(sections, train={"steps": None}), tmp_path / "run", world_size=1)


@pytest.mark.parametrize(
    ("model", "changes", "said"),
    [
        ({"name": "micro"}, {"image_size": 16}, []),
        (
            {"name": "micro"},
            {"image_size": 30},
            ["images of 30 x 30 pixels: sides must be multiples of the model's patch size 8; set data.image_size or"],
        ),
        ({"name": "micro"}, {"image_buckets": [[16, 24], [24, 20]]}, ["images of 24 x 20 pixels: sides must be mu"]),
        ({"name": "micro"}, {"image_patches": [64]}, ["data.image_patches: the image tower takes whole images: set "]),
        (
            {"name": "pretrained", "clip": CLIP},
            {"image_buckets": 2, "image_size": 36, "patch_size": 12, "max_length": 12},
            ["images of 36 x 36 pixels: "],
        ),
        (
            {"name": "pretrained", "clip": CLIP},
            {"image_size": 20},
            ["images of 20 x 20 pixels: ", "data.max_length: texts of up to "],
        ),
    ],
)
def test_shapes_that_the_model_does_not_take_are_told(
    sections: dict[str, Any], model: dict[str, Any], changes: dict[str, Any], said: list[str]
):
    plan = Loader.from_config({**sections["data"], **changes}).plan
    built = DualEncoder.from_config(model, vocab_size=300)
    found = shape_problems(built, [plan, plan])
    assert len(found) == len(said)
    for problem, beginning in zip(found, said, strict=True):
        assert problem.startswith(beginning)


@pytest.mark.parametrize(
    ("model", "refused"),
    [
        ({"name": "micro"}, True),
        ({"name": "micro", "logit_bias_init": -10.0}, False),
        ({"name": "vit_b_32"}, True),
        ({"name": "pretrained", "clip": CLIP}, False),  # once it is built
    ],
)
def test_sigmoid_loss_without_a_bias_is_refused_before_the_model_is_built(
    sections: dict[str, Any], tmp_path: Path, model: dict[str, Any], refused: bool
):
    config = config_of(sections, data={"max_length": 12, "patch_size": 14}, model=model, train={"loss": "siglip"})
    try:
        check_run(config, tmp_path / "run", world_size=1)
        said = ""
    except Problems as error:
        said = str(error)
    assert ("train.loss 'siglip' needs a bias: set model.logit_bias_init (-10 in the paper)" in said) is refused


@pytest.mark.parametrize(
    ("train", "model", "warns"),
    [
        ({"miner": {"name": "top_k", "k": 1}}, {}, True),
        ({"regions": {"miner": {"name": "top_k", "k": 1}}}, {}, True),
        ({"miner": {"name": "top_k", "k": 1}, "mining_after_steps": 300}, {}, False),
        ({"miner": {"name": "top_k", "k": 1}}, {"init_from": "runs/first"}, False),
        ({"miner": {"name": "all"}}, {}, False),
        ({}, {}, False),
    ],
)
def test_miner_that_begins_with_new_weights_is_told(
    sections: dict[str, Any], train: Any, model: Any, warns: bool, caplog: pytest.LogCaptureFixture
):
    targets = {"boxes": "json:boxes", "box_texts": "json:boxes.phrase"}
    data = {"global_batch_size": 64, "targets": targets}
    warn_of_mining(config_of(sections, data=data, train=train, model=model))
    key = "train.regions.miner" if "regions" in train else "train.miner"
    said = f"{key} top_k begins with update 0, and the weights are new: their hardest negatives are noise"
    assert [record.getMessage()[: len(said)] for record in caplog.records] == [said] * warns


@pytest.mark.parametrize(
    ("miner", "message"),
    [
        (
            {"name": "top_k", "k": 1},
            "train.miner.k is 1, and a row has 1 negatives in a batch of 2: the miner keeps al",
        ),
        (
            {"name": "same_group", "size": 2, "k": 64},
            "train.miner.k is 64, and a row has 1 negatives in a group of 2: the miner keeps all of them; set",
        ),
        (None, ""),
    ],
)
def test_miner_that_keeps_all_is_told(
    sections: dict[str, Any], miner: Any, message: str, caplog: pytest.LogCaptureFixture
):
    train = {"miner": miner, "mining_after_steps": 5} if miner else {}
    config = config_of(sections, data={"groups": {"size": 2}}, train=train)
    with caplog.at_level(logging.WARNING, "mmdata"):
        warn_of_mining(config)
    assert "".join(record.getMessage() for record in caplog.records)[: len(message) or None] == message


def test_parts_that_do_not_divide_a_batch_are_told_where_shapes_are_compiled(
    sections: dict[str, Any], caplog: pytest.LogCaptureFixture
):
    for compiled in (False, True):
        train = {"micro_batch_size": 24, "compile": compiled}
        config = config_of(sections, data={"global_batch_size": 128}, train=train)
        warn_of_device(config, torch.device("cpu"), world_size=2)
    (record,) = caplog.records
    assert record.getMessage() == (
        "train.micro_batch_size is 24, and a rank has 64 rows of a batch: each shape is compiled twice, the second "
        "time for the 16 rows that are left; a divisor of 64 is compiled once"
    )


@pytest.mark.parametrize(
    ("device", "precision", "message"),
    [
        ("cpu", "tf32", "train.precision is tf32, and the run is on a CPU, which has no TF32: it computes in fp32; "),
        ("cpu", "fp16", "train.precision is fp16, and the run is on a CPU, where fp16 is slow; "),
        ("cpu", "bf16", ""),
        ("cuda", "tf32", ""),
    ],
)
def test_number_formats_that_gain_nothing_on_a_cpu_are_told(
    sections: dict[str, Any], device: str, precision: str, message: str, caplog: pytest.LogCaptureFixture
):
    warn_of_device(config_of(sections, train={"precision": precision}), torch.device(device), world_size=1)
    said = "".join(record.getMessage() for record in caplog.records)
    assert said == (message and f"{message}fp32 and bf16 are for CPUs")


def test_false_negatives_are_counted_by_the_column_of_the_hash(
    sections: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    config = config_of(sections, data={"caption_hash": "height"})  # both images have one
    with Loader.from_config(config.data) as loader:
        warn_of_false_negatives(config.train, loader.plan)
    said = "false negatives: in the first 1 batches, of 2 rows, 1 rows meet their own image or caption in a batch"
    assert any(message.startswith(said) for message in caplog.messages)


@pytest.mark.parametrize(
    ("captions", "train", "message"),
    [
        (
            ["a photo of a dog", "a photo of a cat"],
            {},
            "false negatives: in the first 8 batches, of 32 rows, {} rows meet their own image or caption in a batch; "
            "train.mask_false_negatives=true makes them no negatives",
        ),
        (["a photo of a dog", "a photo of a cat"], {"mask_false_negatives": True}, ""),
        (["a photo of a dog", "a photo of a cat"], {"loss": "multi_positive"}, ""),
        ([f"photo {i}" for i in range(40)], {}, ""),
    ],
)
def test_captions_that_meet_themselves_are_told(
    sections: dict[str, Any],
    tmp_path: Path,
    photo: Any,
    captions: list[str],
    train: dict[str, Any],
    message: str,
    caplog: pytest.LogCaptureFixture,
):
    with ShardWriter(tmp_path / "shards") as writer:
        for i in range(40):
            image = photo(24, 24, seed=i)
            writer.write(Sample(str(i), image, probe(image), [captions[i % len(captions)]]))
    data = {"shards": str(tmp_path / "shards"), "global_batch_size": 4}
    config = config_of(sections, data=data, train=train)
    loader = Loader.from_config(config.data)
    caplog.clear()
    with caplog.at_level(logging.WARNING, "mmdata"):
        warn_of_false_negatives(config.train, loader.plan)
    equal = sum(4 - len(batch["caption_hash"].unique()) for batch in islice(loader, 8))
    assert "".join(record.getMessage() for record in caplog.records) == message.format(equal)
