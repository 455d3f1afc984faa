"""Does decoding at a fraction of the size change what a model learns? Pairs of runs, fast and exact, of one seed each.

PYTHONPATH=. python docs/benchmarks/fidelity.py
PYTHONPATH=. python docs/benchmarks/fidelity.py --photos FOLDER_OF_JPG    # only how far the pixels are apart, 224 × 224

The scenes of datasets/scenes, drawn twice as large (shorter side 160 to 224) and all stored as JPEG, for a tower of 32
pixels: libjpeg-turbo decodes them at a fourth or so. Weights, order, crops and captions of the two runs of a seed are
equal; only the pixels differ. Each model is evaluated as it was trained, and once more on the exact pixels.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from statistics import mean, stdev
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import numpy as np
import torch

from mmdata import Loader
from mmdata.config import DataConfig, LoadingConfig, ModelConfig, TrainConfig
from mmdata.config.corpus import ValConfig
from mmdata.config.data import evaluation_data
from mmdata.files import shipped
from mmdata.images import probe
from mmdata.images.pixels import EncodedImage, PixelTransform
from mmdata.storage.folder import has_manifest
from mmdata.tars import clean_caption
from mmdata.tars.write import Sample
from mmdata.text.tokenizer import Tokenizer, train_tokenizer
from mmdata.train import DualEncoder
from mmdata.train.evaluation.evaluate import evaluate_retrieval
from mmdata.train.run.trainer import Trainer
from tests.shard_writer import ShardWriter

HOME = Path(os.environ.get("MMDATA_BENCH_DIR", "/tmp/mmdata-fidelity"))
LARGER, VAL, SIDE = 2, 500, 32
MODES = ("fast", "exact")


def make(rows: int) -> None:
    """Shards of `rows` scenes to train on and `VAL` others, and a tokenizer."""
    sys.path.insert(0, str(shipped("datasets", "scenes")))
    import draw
    import render

    settings = render.Settings(seed=0, train=rows, val=VAL, pairs=0)
    pictures = {
        part: [render.make_picture(settings, part, number) for number in range(getattr(settings, part))]
        for part in ("train", "val")
    }
    train_tokenizer([text for p in pictures["train"] for text in p.captions], HOME / "tokenizer", vocab_size=2000)
    tokenizer = Tokenizer.load(str(HOME / "tokenizer"), max_length=77)
    for part, found in pictures.items():
        folder = HOME / f"{part}-{len(found)}"
        with ShardWriter(folder, count_tokens=tokenizer.count, tokenizer=tokenizer.fingerprint) as writer:
            for number, picture in enumerate(found):
                height, width = (LARGER * side for side in (picture.look.height, picture.look.width))
                look = replace(picture.look, height=height, width=width, format="JPEG")
                image = draw.encode(draw.draw(picture.scene, look), look)
                captions = [clean_caption(text) for text in picture.captions]
                writer.write(Sample(f"{number:06d}", image, probe(image), captions))


def settings_of(rows: int, mode: str, seed: int) -> DataConfig:
    """What a run reads; the two modes differ in `decode` alone."""
    return DataConfig(
        shards=str(HOME / f"train-{rows}"),
        val=ValConfig(shards=str(HOME / f"val-{VAL}")),
        tokenizer=str(HOME / "tokenizer"),
        global_batch_size=64,
        image_size=SIDE,
        decode=mode,  # type: ignore[arg-type]
        seed=seed,
        loading=LoadingConfig(num_workers=1),
    )


def recall(model: torch.nn.Module, data: DataConfig) -> tuple[float, float]:
    """R@1 and R@10 over the images and texts never seen in percent, the mean of both directions."""
    loader = Loader.from_config(evaluation_data(data), rank=0, world_size=1)
    scores = evaluate_retrieval(model, loader)
    r1, r10 = (50 * (scores[f"image_to_text_r{k}"] + scores[f"text_to_image_r{k}"]) for k in (1, 10))
    return r1, r10


def run(rows: int, epochs: int, mode: str, seed: int) -> dict[str, tuple[float, float]]:
    """Train one model; its recall by the decoding of the evaluation."""
    torch.manual_seed(seed)
    model = DualEncoder.from_config(ModelConfig(), vocab_size=2000)
    loader = Loader.from_config(settings_of(rows, mode, seed), rank=0, world_size=1)
    train = TrainConfig(epochs=epochs, lr=2e-3, weight_decay=0.1, warmup_steps=20, seed=seed, mask_false_negatives=True)
    with tempfile.TemporaryDirectory() as folder:
        Trainer(model, loader, train, output=Path(folder)).run()
    return {other: recall(model.eval(), settings_of(rows, other, seed)) for other in MODES}


def decoding_differs(rows: int) -> str:
    """How far the pixels of the two modes are apart, over the rows of the evaluation."""
    found: dict[str, dict[int, Any]] = {mode: {} for mode in MODES}
    for mode in MODES:
        loader = Loader.from_config(evaluation_data(settings_of(rows, mode, 0)), rank=0, world_size=1)
        for batch in loader:
            for row, pixels, valid in zip(batch["rows"].tolist(), batch["pixel_values"], batch["valid"], strict=True):
                if valid:
                    found[mode][row] = pixels.double().clone()
    errors = [float((found["fast"][row] - found["exact"][row]).square().mean()) for row in found["exact"]]
    psnr = 10 * np.log10(255**2 / np.maximum(errors, 1e-9))
    return f"PSNR of fast to exact over {len(psnr)} images: mean {psnr.mean():.1f} dB, worst {psnr.min():.1f} dB"


def photos_differ(folder: Path) -> str:
    """How far the pixels of the two modes are apart for photos, as evaluation crops them to 224 × 224."""
    found: list[float] = []
    for path in sorted(folder.glob("*.jpg")):
        data = path.read_bytes()
        image = EncodedImage(data, "JPEG", probe(data).orientation, 0)
        crops: list[torch.Tensor] = []
        for exact in (False, True):
            transform = PixelTransform("eval", exact=exact)
            decoded = transform.decode(image, shape=(224, 224), patches=0, epoch=0)
            crops.append(torch.empty(3, 224, 224, dtype=torch.uint8))
            transform.write(decoded, crops[-1], number=0, epoch=0)
        error = float((crops[0].double() - crops[1].double()).square().mean())
        if error:  # decoded at its own size otherwise
            found.append(10 * np.log10(255**2 / error))
    worst = ", ".join(f"{value:.1f}" for value in sorted(found)[:3])
    return f"{len(found)} photos decoded at a fraction: mean {mean(found):.1f} dB to exact, the worst {worst}"


def main() -> None:
    """Print a line for each run, and the differences."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--photos", type=Path, metavar="FOLDER")
    parser.add_argument("--rows", type=int, default=3000)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.photos:
        print(photos_differ(options.photos))
        return
    if not has_manifest(HOME / f"train-{options.rows}"):
        make(options.rows)
    print(decoding_differs(options.rows), flush=True)
    scores: dict[str, list[tuple[float, float]]] = {mode: [] for mode in MODES}
    for seed in range(options.seeds):
        for mode in MODES:
            found = run(options.rows, options.epochs, mode, seed)
            scores[mode].append(found[mode])
            (r1, r10), exact = found[mode], found["exact"]
            print(f"seed {seed}, {mode}: R@1 {r1:.1f}, R@10 {r10:.1f}; ", end="")
            print(f"on exact pixels {exact[0]:.1f}, {exact[1]:.1f}", flush=True)
    for number, (name, chance) in enumerate((("R@1", 100 / VAL), ("R@10", 1000 / VAL))):
        fast, exact_too = ([pair[number] for pair in scores[mode]] for mode in MODES)
        differences = [a - b for a, b in zip(fast, exact_too, strict=True)]
        print(f"{name} (chance {chance:.1f}): fast {mean(fast):.1f}, exact {mean(exact_too):.1f}; ", end="")
        print(f"fast - exact {', '.join(f'{d:+.1f}' for d in differences)}, mean {mean(differences):+.1f}")
        if options.seeds > 1:
            print(f"  standard deviation over seeds: fast {stdev(fast):.1f}, exact {stdev(exact_too):.1f}, ", end="")
            print(f"of the difference {stdev(differences):.1f}")


if __name__ == "__main__":
    main()
