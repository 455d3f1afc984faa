from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from mmdata.errors import ConfigError, DataError
from mmdata.train.memory.feature_cache import BEING_WRITTEN, FEATURES, STEPS, FeatureCache
from mmdata.train.models.dual_encoder import DualEncoderOutput
from tests.programs import Program
from tests.waiting import wait_until

ANGLE = {degrees: (np.cos(np.deg2rad(degrees)), np.sin(np.deg2rad(degrees))) for degrees in (0, 30, 60, 90)}


def put(cache: FeatureCache, step: int, rows: dict[int, int], valid: list[bool] | None = None) -> None:
    """Rows with features at an angle of so many degrees, the same on both sides."""
    features = torch.tensor([ANGLE[degrees] for degrees in rows.values()], dtype=torch.float32)
    output = DualEncoderOutput(features, features, torch.tensor(1.0), None)
    flags = torch.ones(len(rows), dtype=torch.bool) if valid is None else torch.tensor(valid)
    batch: Any = {"rows": torch.tensor(list(rows)), "valid": flags}
    cache.keep(output, batch, step)


def files(folder: Path) -> tuple[np.ndarray, np.ndarray]:
    return np.load(folder / FEATURES), np.load(folder / STEPS)


def test_cache_has_one_row_for_each_of_the_index_and_zeros_where_never_written(tmp_path: Path):
    cache = FeatureCache(tmp_path, 5)
    put(cache, 0, {3: 0, 1: 90})
    put(cache, 1, {4: 30, 0: 30}, valid=[True, False])
    cache.state_dict()
    features, steps = files(tmp_path)
    assert (features.dtype, steps.dtype) == (np.float16, np.int32)
    assert steps.tolist() == [-1, 0, -1, 0, 1]
    assert np.allclose(features, [(0, 0), (0, 1), (0, 0), (1, 0), ANGLE[30]], atol=1e-3)


def test_cache_leaves_out_padding_and_features_that_are_not_finite(tmp_path: Path):
    cache = FeatureCache(tmp_path, 3)
    image = torch.tensor([[1.0, 0.0], [torch.nan, 0.0], [1.0, 0.0]])
    batch: Any = {"rows": torch.tensor([-1, 0, 2]), "valid": torch.tensor([True, True, True])}
    cache.keep(DualEncoderOutput(image, image, torch.tensor(1.0), None), batch, 0)
    cache.state_dict()
    assert files(tmp_path)[1].tolist() == [-1, -1, 0]


@pytest.mark.parametrize("side", ["pair", "image", "text"])
def test_cache_holds_the_side_it_is_asked_for(side: Any, tmp_path: Path):
    image, text = torch.tensor([[2.0, 0.0]]), torch.tensor([[1.2, 1.6]])
    cache = FeatureCache(tmp_path, 1, side=side)
    batch: Any = {"rows": torch.tensor([0]), "valid": torch.tensor([True])}
    cache.keep(DualEncoderOutput(image, text, torch.tensor(1.0), None), batch, 0)
    cache.state_dict()
    expected = F.normalize({"pair": image + text, "image": image, "text": text}[side], dim=1)
    assert np.allclose(files(tmp_path)[0], expected, atol=1e-3)


def test_rows_that_are_never_trained_on_do_not_count_as_never_written(tmp_path: Path):
    cache = FeatureCache(tmp_path, 4, trained=2)
    put(cache, 0, {0: 0})
    assert cache.telemetry(1)["never_written_share"] == 0.5
    put(cache, 1, {1: 0})
    assert cache.telemetry(2)["never_written_share"] == 0
    index, num_rows = range(9), 7
    batches: Any = type("Selected", (), {"index": index, "num_rows": num_rows})()
    made = FeatureCache.of_loader("pair", batches, tmp_path)
    assert (made.rows, made.trained) == (9, 7)


def test_cache_measures_age_and_drift(tmp_path: Path):
    cache = FeatureCache(tmp_path, 4)
    put(cache, 0, {0: 0, 1: 0})
    first = cache.telemetry(1)
    assert (first["never_written_share"], first["age_steps_mean"], first["age_steps_max"]) == (0.5, 1.0, 1)
    assert first["rewritten"] == 0
    assert np.isnan(first["similarity"])
    put(cache, 1, {0: 60})  # cosine 0.5 after 1 step
    put(cache, 5, {0: 60, 1: 90})  # cosine 1 after 4 steps, 0 after 5
    second = cache.telemetry(6)
    assert (second["never_written_share"], second["age_steps_mean"], second["age_steps_max"]) == (0.5, 1.0, 1)
    assert second["rewritten"] == 3
    assert second["similarity"] == pytest.approx(0.5, abs=1e-3)
    assert cache.telemetry(6)["rewritten"] == 0


def test_cache_that_ran_ahead_of_the_checkpoint_goes_on_and_compares_no_row_with_itself(tmp_path: Path):
    cache = FeatureCache(tmp_path, 4)
    for step, rows in enumerate([{0: 0}, {1: 0}, {0: 60}]):
        put(cache, step, rows)
    state = cache.state_dict()
    put(cache, 3, {0: 90, 2: 30})
    put(cache, 4, {0: 30})
    cache.telemetry(5)
    again = FeatureCache(tmp_path, 4)
    again.load_state_dict(state)
    assert files(tmp_path)[1].tolist() == [4, 1, 3, -1]
    put(again, 3, {0: 90, 2: 30})
    first = again.telemetry(4)
    assert first["rewritten"] == 1, "row 0, before the checkpoint; it was written again after it"
    assert first["age_steps_mean"] == pytest.approx((1 + 3 + 1) / 3)
    put(again, 4, {0: 30})
    assert again.telemetry(5)["rewritten"] == 1
    assert files(tmp_path)[1].tolist() == [4, 1, 3, -1]


def last_step(folder: Path) -> int:
    """The latest step of any row; -1 before the file has its header, and its length."""
    try:
        return int(np.load(folder / STEPS, mmap_mode="r").max())
    except (OSError, ValueError, EOFError):
        return -1


WRITER = """
import itertools, sys
from pathlib import Path
import numpy as np
from mmdata.train.memory.feature_cache import FeatureCache

cache, rows, width = FeatureCache(Path(sys.argv[1]), 64), np.arange(64), 20_000
for step in itertools.count():
    cache.write(rows, np.full((64, width), step % 1000, dtype=np.float16), step)
"""


def test_cache_that_is_killed_while_it_writes_has_whole_rows_only(tmp_path: Path):
    with Program([sys.executable, "-c", WRITER, str(tmp_path)]) as writer:
        wait_until(lambda: last_step(tmp_path) >= 3, program=writer)
        writer.kill()
    FeatureCache(tmp_path, 64).open(20_000)
    features, steps = files(tmp_path)
    for values, step in zip(features, steps, strict=True):
        assert (values == (step % 1000 if step >= 0 else 0)).all()


def test_cache_that_was_killed_in_the_middle_of_a_row_has_never_written_it(tmp_path: Path):
    cache = FeatureCache(tmp_path, 3)
    put(cache, 0, {0: 0, 1: 90})
    state = cache.state_dict()
    np.load(tmp_path / STEPS, mmap_mode="r+")[1] = BEING_WRITTEN
    FeatureCache(tmp_path, 3).load_state_dict(state)
    features, steps = files(tmp_path)
    assert steps.tolist() == [0, -1, -1]
    assert features.tolist() == [[1, 0], [0, 0], [0, 0]]


def test_cache_refuses_other_files(tmp_path: Path):
    cache = FeatureCache(tmp_path, 4)
    put(cache, 0, {0: 0})
    state = cache.state_dict()
    with pytest.raises(DataError, match=r"float16 \(4, 2\) with steps \(4,\), expected float16 \(9, 2\)"):
        FeatureCache(tmp_path, 9).load_state_dict(state)
    (tmp_path / FEATURES).unlink()
    with pytest.raises(DataError, match=r"the checkpoint has one, and it cannot be read .*No such file"):
        FeatureCache(tmp_path, 4).load_state_dict(state)


def test_cache_needs_an_index(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"train.feature_cache: set has no index"):
        FeatureCache.of_loader("pair", set(), tmp_path)  # type: ignore[arg-type]
