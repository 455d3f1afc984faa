from __future__ import annotations

import importlib.util
import math
from pathlib import Path

import pytest
import torch
from scipy.stats import entropy
from torch import Tensor

from mmdata.train import miners
from tests.programs import run_ranks
from tests.rounding import rounding
from tests.train.compare import telemetry_of

COSINES = torch.tensor([[0.9, 0.7, 0.12], [0.2, 0.8, 0.63], [0.5, 0.34, 0.67]])  # images down, texts across
IMAGES, TEXTS = torch.eye(3), COSINES.T

PROGRAM = Path(__file__).with_name("mining_ranks.py")
_spec = importlib.util.spec_from_file_location("mining_ranks", PROGRAM)
assert _spec is not None
assert _spec.loader is not None
program = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(program)


def test_telemetry_of_all_negatives():
    scale = torch.tensor(4.0)
    found = telemetry_of(IMAGES, TEXTS, scale)
    lines = [[0.7, 0.12], [0.2, 0.63], [0.5, 0.34], [0.2, 0.5], [0.7, 0.34], [0.12, 0.63]]
    perplexities = [math.exp(entropy((4 * torch.tensor(line)).softmax(0).double())) for line in lines]
    assert found == telemetry_of(IMAGES, TEXTS, 4.0)
    assert found["kept_share"] == 1
    # text 2's own 0.67 is above its 0.63 and 0.12, and so are all others above theirs
    assert found["in_batch_accuracy"] == 1
    assert found["known_false_negative_share"] == 0
    assert found["effective_negatives"] == pytest.approx(sum(perplexities) / 6, rel=0, abs=rounding(4.0, sums=6))
    # the positive's cosine is 0.9, 0.8, 0.67; text 2's negative 0.63 is less than 0.05 below its own
    assert found["false_negative_share"] == pytest.approx(1 / 12)


def test_telemetry_of_what_a_miner_keeps():
    found = telemetry_of(IMAGES, TEXTS, torch.tensor(4.0), miner=miners.TopK(1))
    assert (found["kept_share"], found["effective_negatives"]) == (0.5, pytest.approx(1))
    worse = COSINES.clone()
    worse[1, 2] = 0.85  # above image 1's 0.8 and text 2's 0.67
    for miner in (None, miners.TopK(1), miners.SemiHard(0.01)):  # of all admissible negatives, whatever is kept
        assert telemetry_of(IMAGES, worse.T, 4.0, miner=miner)["in_batch_accuracy"] == pytest.approx(4 / 6)
    alone = telemetry_of(IMAGES, TEXTS, torch.tensor(4.0), miner=miners.SemiHard(0.01))
    assert alone["kept_share"] == 0
    assert math.isnan(alone["false_negative_share"])


def test_false_negatives_are_counted_among_all_negatives_too_whatever_the_miner_keeps():
    worse = COSINES.clone()
    worse[1, 2] = 0.85  # above image 1's 0.8 and text 2's 0.67; text 2's 0.12 is far below
    found = telemetry_of(IMAGES, worse.T, 4.0, miner=miners.TopK(1))
    assert found["false_negative_share"] == pytest.approx(2 / 6)
    assert found["admissible_false_negative_share"] == pytest.approx(2 / 12)
    everything = telemetry_of(IMAGES, worse.T, 4.0)
    assert everything["false_negative_share"] == everything["admissible_false_negative_share"]
    assert found["rows"] == 3


def test_telemetry_counts_weights_as_so_many_negatives():
    def half(scores: Tensor, positives: Tensor, negatives: Tensor) -> Tensor:
        return negatives * 0.5

    found = telemetry_of(IMAGES, TEXTS, torch.tensor(4.0), miner=half)
    assert found["kept_share"] == 0.5
    everything = telemetry_of(IMAGES, TEXTS, torch.tensor(4.0))
    assert found["effective_negatives"] == pytest.approx(everything["effective_negatives"])


def test_telemetry_leaves_out_rows_that_do_not_count_and_counts_known_false_negatives():
    broken = torch.cat([IMAGES, torch.full((1, 3), torch.nan)]), torch.cat([TEXTS, torch.full((1, 3), torch.nan)])
    valid = torch.tensor([True, True, True, False])
    found = telemetry_of(*broken, torch.tensor(4.0), valid=valid, same=[torch.tensor([5, 6, 5, 5])])
    assert found["rows"] == 3
    assert found["known_false_negative_share"] == pytest.approx(1 / 3)  # rows 0 and 2, of three pairs
    lines = [[0.7], [0.2, 0.63], [0.34], [0.2], [0.7, 0.34], [0.63]]  # of what is left, in both directions
    perplexities = [math.exp(entropy((4 * torch.tensor(line)).softmax(0).double())) for line in lines]
    assert found["effective_negatives"] == pytest.approx(sum(perplexities) / 6, rel=1e-5)


def test_telemetry_takes_no_draw_from_the_run():
    state = torch.get_rng_state()
    telemetry_of(IMAGES, TEXTS, torch.tensor(4.0), miner=miners.GumbelTopK(1))
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.sweep
def test_telemetry_and_mining_with_global_knowledge_are_those_of_one_process_on_two_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    # torch's old names of the collectives warn, and the log of each run would say so.
    monkeypatch.setenv("PYTHONWARNINGS", "error::FutureWarning:torch.distributed.c10d_logger")
    run_ranks(PROGRAM, tmp_path)
    expected = program.results(slice(0, 12))
    found = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    for rank in range(2):
        torch.testing.assert_close(found[rank]["loss"], expected["loss"], rtol=1e-12, atol=0)
        for name in expected["telemetry"]:
            assert found[rank]["telemetry"][name] == pytest.approx(expected["telemetry"][name], rel=1e-9), name
    # what DDP makes of the ranks' gradients: their mean; each row's gradient is on its own rank only
    for i in range(2):
        both = torch.cat([each["gradients"][i] for each in found]) / 2
        torch.testing.assert_close(both, expected["gradients"][i], rtol=1e-10, atol=1e-12)
    scale = (found[0]["gradients"][2] + found[1]["gradients"][2]) / 2
    torch.testing.assert_close(scale, expected["gradients"][2], rtol=1e-10, atol=1e-12)
