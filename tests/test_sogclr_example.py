"""examples/sogclr.py against InfoNCE of the whole corpus, and over two real ranks."""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor

from mmdata.images import probe
from mmdata.tars.write import Sample
from mmdata.text.tokenizer import train_tokenizer
from mmdata.train import DualEncoderOutput, losses
from tests.programs import run_ranks
from tests.shard_writer import ShardWriter
from tests.train import sogclr_ranks
from tests.train.compare import assert_equal, features, scalar, value_and_gradients

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

import sogclr
from sogclr import SogCLR


def loss_of(loss: SogCLR, inputs: tuple[Tensor, Tensor, Tensor], **batch: Tensor) -> Tensor:
    rows = torch.arange(len(inputs[0]))
    found = {"rows": rows, "valid": torch.ones(len(rows), dtype=torch.bool)} | batch
    return loss(DualEncoderOutput(*inputs), found)


def global_means(images: Tensor, texts: Tensor, scale: Tensor) -> Tensor:
    """g of each row over all others, (N, 2)."""
    logits = scale * images @ texts.T
    ratios = (logits - logits.diagonal()[:, None]).exp(), (logits.T - logits.diagonal()[:, None]).exp()
    others = 1 - torch.eye(len(images), dtype=logits.dtype)
    return torch.stack([(ratio * others).sum(1) / (len(images) - 1) for ratio in ratios], dim=1)


@pytest.mark.parametrize("scale", [1.0, 14.3, 100.0])
@pytest.mark.parametrize("gamma", [0.8, 1.0])
def test_with_the_whole_corpus_as_batch_it_is_infonce(scale: float, gamma: float):
    inputs = (*features(9), scalar(scale))
    valid = torch.tensor([True] * 7 + [False] * 2)
    with torch.no_grad():
        inputs[0][8] = torch.nan  # what is not valid may hold anything
    found = loss_of(SogCLR(9, trained=7, gamma=gamma), inputs, valid=valid)
    expected = losses.clip_loss(*inputs, valid=valid)
    assert_equal(value_and_gradients(found, *inputs), value_and_gradients(expected, *inputs), 1e-10)


def test_gradient_of_all_batches_is_that_of_the_corpus():
    """With exact averages the mean over all batches of 3 of 6 rows is the full gradient; InfoNCE's is another."""
    inputs = (*features(6), scalar(5.0))
    full = torch.autograd.grad(losses.clip_loss(*inputs), inputs)
    loss = SogCLR(6, gamma=1e-14).double().eval()  # as small as a float64 can tell: the averages stay exact
    loss.log_averages.copy_(global_means(*inputs).detach().log())
    ours, infonce = ([torch.zeros_like(x) for x in inputs] for _ in range(2))
    batches = list(itertools.combinations(range(6), 3))
    for batch in batches:
        rows = torch.tensor(batch)
        some = inputs[0][rows], inputs[1][rows], inputs[2]
        for sums, value in ((ours, loss_of(loss, some, rows=rows)), (infonce, losses.clip_loss(*some))):
            for total, grad in zip(sums, torch.autograd.grad(value, inputs, retain_graph=True), strict=True):
                total += grad / len(batches)
    assert_equal(ours, full, 1e-10)
    cosine = torch.cosine_similarity(infonce[0].flatten(), full[0].flatten(), dim=0)
    assert 0.5 < cosine < 0.999


def test_averages_move_in_train_mode_for_rows_with_negatives():
    inputs = (*features(4), scalar(3.0))
    loss = SogCLR(10, gamma=0.75).double()
    loss.log_averages[:3] = torch.tensor([[0.5, 2.0], [0.25, 1.0], [-torch.inf, -torch.inf]], dtype=torch.float64).log()
    loss.log_averages[2] = -torch.inf
    before = loss.log_averages.clone()
    loss_of(loss.eval(), inputs)
    assert torch.equal(loss.log_averages, before)
    loss_of(loss.train(), inputs, image_hash=torch.arange(4))
    g = global_means(*inputs).detach()
    expected = 0.25 * before[:4].exp() + 0.75 * g
    expected[2:] = g[2:]
    assert_equal([loss.log_averages[:4].exp()], [expected])
    kept = loss.log_averages.clone()
    alone = loss_of(loss, inputs, caption_hash=torch.tensor([7, 7, 7, 7]))  # nobody has a negative
    assert alone == 0
    assert torch.equal(loss.log_averages, kept)


def test_corpus_of_the_example_is_that_of_the_rows_that_are_trained(
    tmp_path: Path, photo: Callable[..., bytes], monkeypatch: pytest.MonkeyPatch
):
    train_tokenizer(["a red dog"], tmp_path / "tokenizer", vocab_size=300)
    with ShardWriter(tmp_path / "shards") as writer:
        for i, side in enumerate((24, 24, 24, 24, 16, 16)):
            image = photo(side, side, seed=i)
            writer.write(Sample(str(i), image, probe(image), [f"a red dog {i}"]))
    data = {"shards": str(tmp_path / "shards"), "tokenizer": str(tmp_path / "tokenizer"), "global_batch_size": 4}
    data |= {"image_size": 16, "select": "width > 16", "loading": {"num_workers": 0}}
    (tmp_path / "small.yaml").write_text(yaml.safe_dump({"data": data, "model": {"name": "micro"}}))
    made: list[SogCLR] = []

    class Noted(SogCLR):
        def __init__(self, *rows: int, **settings: Any) -> None:
            super().__init__(*rows, **settings)
            made.append(self)

    monkeypatch.setattr(sogclr, "SogCLR", Noted)
    monkeypatch.setattr(sys, "argv", ["sogclr.py", str(tmp_path / "small.yaml"), "--steps", "1"])
    sogclr.main()
    (loss,) = made
    assert loss.log_eps == -math.log(4 - 1)
    assert len(loss.log_averages) == 6


def test_weight_out_of_range():
    with pytest.raises(ValueError, match=r"gamma must be above 0 to 1: got 0\.0"):
        SogCLR(4, gamma=0.0)


def test_two_ranks_are_one_process(tmp_path: Path):
    run_ranks(Path(sogclr_ranks.__file__), tmp_path)
    steps = [[sogclr_ranks.batch_of(step, rank) for rank in range(2)] for step in range(sogclr_ranks.STEPS)]
    expected = sogclr_ranks.run(
        [{key: torch.cat([b[key] for b in both]) for key in both[0] if key != "keys"} for both in steps]  # type: ignore[misc]
    )
    for rank in range(2):
        torch.testing.assert_close(torch.load(tmp_path / f"{rank}.pt"), expected, rtol=1e-12, atol=1e-12)
    seen = expected["averages"].isfinite().all(1).nonzero().flatten().tolist()
    assert seen == [0, 1, 2, 4, 5, 6, 7, 9, 10, 12]
