"""Program of one rank for test_distributed.py: gradients under real DDP, one file a case.

usage: ranks.py FOLDER RANK. Three processes start; the first two also form a world of two.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from mmdata.batch import Batch
from mmdata.config import ModelConfig
from mmdata.train import DualEncoder, losses, miners, train_step
from mmdata.train.losses.pairs import ExtraNegatives
from mmdata.train.models.dual_encoder import DualEncoderOutput
from mmdata.train.ranks import collectives, parallel
from mmdata.train.run.objective import ContrastiveLoss
from mmdata.train.run.step import LossFunction

ROWS, LENGTH, VOCABULARY = 4, 5, 30


def make_model(dropout: float, **settings: Any) -> DualEncoder:
    torch.manual_seed(0)
    config = ModelConfig(**{"dropout": dropout, "logit_bias_init": -10.0, **settings})
    model = DualEncoder.from_config(config, vocab_size=VOCABULARY).double()
    model.compare_regions()
    for name, parameter in model.named_parameters():
        if "lora_B" in name:  # they begin at 0, and then those beside them have no gradient
            torch.nn.init.normal_(parameter)
    return model


def make_batch(rank: int, case: dict) -> Batch:
    """`ROWS` rows of one rank; hashes collide within and between ranks, also those of negative captions."""
    generator = torch.Generator().manual_seed(100 + rank)
    batch: Batch = {
        "pixel_values": torch.randint(0, 256, (ROWS, 3, 16, 16), dtype=torch.uint8, generator=generator),
        "input_ids": torch.randint(0, VOCABULARY, (ROWS, LENGTH), generator=generator),
        "attention_mask": torch.ones(ROWS, LENGTH, dtype=torch.long),
        "image_hash": torch.tensor([1, 10 * rank + 2, 10 * rank + 3, 10 * rank + 3]),
        "caption_hash": torch.tensor([10 * rank, 10 * rank + 1, 7, 10 * rank + 4]),
        "valid": torch.tensor(case["valid"][rank]).bool(),
        "rows": torch.arange(ROWS) + ROWS * rank,
        "keys": [f"{rank}-{i}" for i in range(ROWS)],
    }
    if case.get("negative_captions"):
        batch["negative_input_ids"] = torch.randint(0, VOCABULARY, (ROWS, LENGTH), generator=generator)
        batch["negative_attention_mask"] = torch.ones(ROWS, LENGTH, dtype=torch.long)
        batch["negative_caption_hash"] = torch.tensor([7, 10 * rank + 5, 10 * rank + 6, 1])
        batch["negative_valid"] = torch.arange(ROWS) != rank
    if case.get("regions"):  # phrases that ranks share, a box without phrase, and rows with fewer boxes
        corners = torch.rand(ROWS, 3, 2, 2, generator=generator).sort(2).values * 16
        batch["boxes"] = corners.flatten(2)
        batch["boxes_valid"] = (torch.rand(ROWS, 3, generator=generator) < 0.8) & batch["valid"][:, None]
        if rank in case.get("without_boxes", []):
            batch["boxes_valid"].zero_()
        batch["box_input_ids"] = torch.randint(0, VOCABULARY, (ROWS, 3, LENGTH), generator=generator)
        batch["box_attention_mask"] = torch.ones(ROWS, 3, LENGTH, dtype=torch.long)
        batch["box_text_hash"] = torch.randint(0, 9, (ROWS, 3), generator=generator)
    if case.get("settings"):  # features of a teacher; a row has none
        teacher = torch.randn(2, ROWS, 6, generator=generator, dtype=torch.float64)
        teacher[0, rank] = torch.nan
        return {**batch, "i": teacher[0], "t": teacher[1]}  # type: ignore[typeddict-unknown-key, return-value]
    return batch


def loss_function(case: dict) -> LossFunction:
    """The loss that a case names, with its miner, masks and labels; see `DIRECT` for those that no objective names."""
    miner = miners.TopK(case["top_k"]) if case.get("top_k") else None
    if case["loss"] in ("clip", "siglip", "multi_positive", "triplet"):
        settings = {"mask_false_negatives": case.get("mask_same", False), "positives": "image_hash"}
        if case.get("regions"):
            settings |= {"regions": {"weight": 0.7}, "region_miner": miner}
        return ContrastiveLoss(case["loss"], miner=miner, **settings, **case.get("settings", {}))

    def loss(output: DualEncoderOutput, batch: Batch) -> Tensor:
        same = (batch["image_hash"], batch["caption_hash"]) if case.get("mask_same") else ()
        settings = {"valid": batch["valid"], "same": same} | ({} if miner is None else {"miner": miner})
        # Under DDP each rank gives each parameter a gradient: 0 where the loss does not look at scale or bias.
        unused = 0.0 * (output.logit_scale + output.logit_bias)
        return DIRECT[case["loss"]](output, batch, settings) + unused

    return loss


def with_own_extra_texts(output: DualEncoderOutput, batch: Batch, settings: dict) -> Tensor:
    """Extra texts that stay on their rank, rank + 1 of them. In one process that holds all rows: written out."""
    images, texts, scale = output[:3]
    if collectives.world_size() > 1:
        extra = ExtraNegatives(texts[: collectives.rank() + 1].flip(1))
        return losses.clip_loss(images, texts, scale, extra_texts=extra, **settings)
    valid, rank_of = batch["valid"], torch.arange(len(images)) // ROWS
    extra_rows = torch.arange(len(images)) % ROWS <= rank_of
    logits = scale * images @ texts.T
    of_extra = scale * images @ texts[extra_rows].flip(1).T
    of_extra = of_extra.masked_fill(rank_of[:, None] != rank_of[extra_rows], -1e30)
    targets, own = torch.arange(int(valid.sum())), logits[valid][:, valid]
    of_images = F.cross_entropy(torch.cat([own, of_extra[valid]], dim=1), targets)
    return (of_images + F.cross_entropy(own.T, targets)) / 2


DIRECT: dict[str, Callable[[DualEncoderOutput, Batch, dict], Tensor]] = {
    "clip_own_extra": with_own_extra_texts,
}


def run_case(case: dict, rank: int, out: Path) -> None:
    model = make_model(case.get("dropout", 0.0), **case.get("model", {}))
    if case.get("compile"):
        parallel.BACKEND = "aot_eager"
        parallel.compile_blocks(model)
    wrapped = collectives.wrap(model, torch.device("cpu"))
    torch.manual_seed(50 + rank)
    step = train_step(
        wrapped,
        make_batch(rank, case),
        loss_function(case),
        micro_batch_size=case.get("micro_batch_size"),
    )
    torch.save({"loss": step.loss, "gradients": {n: p.grad for n, p in model.named_parameters()}}, out)


def main() -> None:
    torch.set_num_threads(1)
    folder, rank = Path(sys.argv[1]), int(sys.argv[2])
    cases = json.loads((folder / "cases.json").read_text())
    for world_size in (3, 2):
        if rank >= world_size:
            break
        rendezvous = f"file://{folder}/rendezvous{world_size}"
        dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=world_size)
        for name, case in cases.items():
            if len(case["valid"]) == world_size:
                run_case(case, rank, folder / f"{name}.{rank}.pt")
        collectives.finish()


if __name__ == "__main__":
    main()
