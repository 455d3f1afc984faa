"""python examples/linear_probe.py runs/photos shards/flowers/train shards/flowers/val

How well do the features of a trained model tell classes apart? A logistic regression on frozen features says it. The
features are kept in a folder, so that another strength of regularization costs no forward.

Source: the linear probe of Radford et al. 2021, section 3.2 (arXiv:2103.00020).
"""

from __future__ import annotations

import argparse
from hashlib import sha256
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import mmdata
from mmdata.batch import valid_inputs
from mmdata.config import evaluation_data
from mmdata.trained import TrainedRun


def features_of(run: TrainedRun, shards: str, cache: Path) -> tuple[Tensor, Tensor]:
    """Features (N, D) and labels (N,) of the rows with a label, from the cache if they are there."""
    settings = run.config.data.model_dump() | {"val": {"shards": shards}, "tokenizer": None}  # images and labels only
    loader = mmdata.Loader.from_config(evaluation_data(mmdata.DataConfig(**settings)))
    made = run.checkpoint.resolve(), run.checkpoint.stat().st_mtime_ns, run.is_average, loader.index.fingerprint
    path = cache / f"{run.checkpoint.name}-{sha256(repr(made).encode()).hexdigest()[:16]}.pt"
    if path.is_file():
        return torch.load(path, weights_only=True)
    features, labels = [], []
    with torch.no_grad(), run.numerics():
        for batch in loader:
            inputs = {name: value.to(run.device) for name, value in valid_inputs(batch).items()}
            known = inputs.pop("labels") if "labels" in inputs else torch.full((len(batch["rows"]),), -1)
            features.append(run.model.encode_image(**inputs).float().cpu()[known.cpu() >= 0])
            labels.append(known.cpu()[known.cpu() >= 0])
    found = torch.cat(features), torch.cat(labels)
    cache.mkdir(parents=True, exist_ok=True)
    torch.save(found, path)
    return found


def fit(features: Tensor, labels: Tensor, *, classes: int, penalty: float, steps: int) -> nn.Linear:
    """Logistic regression with an L2 penalty, by L-BFGS from zero: the same each time."""
    head = nn.Linear(features.shape[1], classes)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    optimizer = torch.optim.LBFGS(head.parameters(), max_iter=steps, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = cross_entropy(head(features), labels) + penalty * head.weight.square().sum() / 2
        loss.backward()
        return loss

    optimizer.step(closure)
    return head


def main() -> None:
    """Print the accuracy on the second folder of shards."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", help="a folder that `mmdata train` wrote")
    parser.add_argument("shards", help="with labels")
    parser.add_argument("val_shards")
    parser.add_argument("--penalty", type=float, default=1e-3, help="of the squared weights")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--cache", type=Path, default=Path("runs/features"))
    given = parser.parse_args()

    run = mmdata.load_run(given.run)
    names = mmdata.Index.open(given.shards).class_names
    if not names or names != mmdata.Index.open(given.val_shards).class_names:  # labels are numbers, each folder's own
        parser.error("both folders of shards need labels, of the same classes")
    features, labels = features_of(run, given.shards, given.cache)
    val_features, val_labels = features_of(run, given.val_shards, given.cache)
    head = fit(features, labels, classes=len(names), penalty=given.penalty, steps=given.steps)
    right = (head(val_features).argmax(1) == val_labels).float().mean().item()
    print(f"linear probe: {right:.1%} of {len(val_labels)} images, {len(names)} classes, {len(labels)} to learn from")


if __name__ == "__main__":
    main()
