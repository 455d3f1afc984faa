"""python examples/classify.py shards/flowers/train shards/flowers/val --epochs 10

Train a classifier on images with labels and without captions. A folder for each class becomes shards with
`mmdata convert flowers shards/flowers --val-share 0.1`. After a stop or a kill, the same command continues from the
last epoch.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy
from torchvision import models

import mmdata
from mmdata.batch import normalized, valid_inputs


def main() -> None:
    """Train for some epochs, and print the accuracy on the validation set after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shards")
    parser.add_argument("val_shards")
    parser.add_argument("--model", default="resnet18", help="a name of torchvision.models.list_models()")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--image-size", type=int, default=224)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--checkpoint", type=Path, default=Path("runs/classify.pt"))
    given = parser.parse_args()

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    data = {"global_batch_size": given.batch_size, "image_size": given.image_size}  # no tokenizer: no texts
    crops = {"crop_scale": [0.25, 1.0], "augment": {"horizontal_flip_prob": 0.5}}
    train = mmdata.Loader.from_config({"shards": given.shards, **data, **crops})
    val = mmdata.Loader.from_config({"shards": given.val_shards, **data, "transform": "eval", "shuffle": False})
    if train.index.class_names != val.index.class_names:  # labels are numbers, each folder's own
        parser.error(f"the classes differ: {train.index.class_names} and {val.index.class_names}")
    num_classes = int(train.index.column("label").max()) + 1
    model = models.get_model(given.model, num_classes=num_classes).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=given.lr, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, given.lr, total_steps=given.epochs * len(train))
    parts = {"model": model, "optimizer": optimizer, "schedule": schedule, "loader": train}
    first = 0
    if given.checkpoint.is_file():
        state = torch.load(given.checkpoint, weights_only=True, map_location="cpu")
        for name, part in parts.items():
            part.load_state_dict(state[name])
        first = state["epochs"]

    for epoch in range(first, given.epochs):
        model.train()
        train.set_epoch(epoch)
        for batch in train:
            inputs = {name: value.to(device) for name, value in valid_inputs(batch).items()}
            labels = inputs["labels"]  # -1 where there is none, and in a batch of which no row could be used
            loss = cross_entropy(model(normalized(inputs["pixel_values"])), labels, ignore_index=-1, reduction="sum")
            loss /= (labels >= 0).sum().clamp(min=1)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()

        model.eval()
        val.set_epoch(0)  # the same batches each time
        right = rows = 0
        with torch.no_grad():
            for batch in val:
                inputs = {name: value.to(device) for name, value in valid_inputs(batch).items()}
                found = model(normalized(inputs["pixel_values"])).argmax(dim=1)
                right += int((found == inputs["labels"]).sum())
                rows += int((inputs["labels"] >= 0).sum())
        print(f"epoch {epoch + 1} · loss {loss.item():.3f} · accuracy {right / rows:.1%} of {rows} images", flush=True)

        given.checkpoint.parent.mkdir(parents=True, exist_ok=True)
        aside = given.checkpoint.with_suffix(".part")
        torch.save({**{name: part.state_dict() for name, part in parts.items()}, "epochs": epoch + 1}, aside)
        os.replace(aside, given.checkpoint)  # a kill leaves the old checkpoint or the new one


if __name__ == "__main__":
    main()
