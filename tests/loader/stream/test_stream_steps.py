"""Epochs of a stated number of steps: equal on all ranks, nothing skipped over the passes, resumed exactly."""

from __future__ import annotations

import threading
from collections import Counter
from itertools import islice
from pathlib import Path

import pytest

import mmdata
from mmdata.batch import Batch
from mmdata.errors import ConfigError, DataError
from mmdata.loader.stream import Stream

from .conftest import targets_in


def open_ranks(shards: Path | list[str], settings: dict, world_size: int, steps: int | None) -> list[Stream]:
    return [
        mmdata.stream(shards, settings, rank=rank, world_size=world_size, steps_per_epoch=steps)
        for rank in range(world_size)
    ]


def keys(batch: Batch) -> list[str]:
    return [key for key in batch["keys"] if key]


def content(batches: list[Batch]) -> list[tuple[list[str], list[list[int]]]]:
    """What a batch holds, without the bytes: keys, and sums of pixels, tokens and boxes."""
    names = ("pixel_values", "input_ids", "boxes", "box_text_hash")
    return [
        (b["keys"], [b[name].flatten(1).double().sum(1).tolist() for name in names if name in b])  # type: ignore[literal-required]
        for b in batches
    ]


TARGETS = pytest.mark.parametrize("targets", [None, targets_in("boxes.json")], ids=["captions", "boxes"])


def test_steps_per_epoch_is_a_whole_number_from_1_on(shards, config):
    for steps in (0, True, 2.5):
        with pytest.raises(ConfigError, match="steps_per_epoch must be a whole number from 1 on: got"):
            mmdata.stream(shards, config(), steps_per_epoch=steps)  # type: ignore[arg-type]


@pytest.mark.parametrize(("shuffle", "num_workers"), [(True, 2), (False, 0)])
def test_ranks_with_very_unequal_shards_have_equal_steps_and_batch_sizes(uneven, config, shuffle, num_workers):
    folder = uneven(5, 50, 500)
    settings = config(global_batch_size=24, shuffle=shuffle, num_workers=num_workers, text_buckets=[12, 48])
    for stream in open_ranks(folder, settings, 3, 6):
        assert len(stream) == 6
        for _ in range(2):
            batches = [*stream]
            assert [len(batch["keys"]) for batch in batches] == [8] * 6
            assert all(keys(batch) for batch in batches)


def test_ranks_together_read_every_sample_once_a_pass(uneven, config):
    folder = uneven(5, 20, 41)
    everything = Counter(f"{i:04d}" for i in range(66))
    ranks = open_ranks(folder, config(global_batch_size=24), 3, 3)  # 66 samples, batches of 24: three steps a pass
    for _ in range(3):
        assert Counter(key for stream in ranks for batch in stream for key in keys(batch)) == everything


def test_rank_with_fewer_samples_than_a_batch_fills_it_up_and_never_repeats_a_sample_in_it(uneven, config):
    (stream,) = open_ranks(uneven(3), config(global_batch_size=8), 1, 4)
    for batch in stream:
        assert sorted(keys(batch)) == ["0000", "0001", "0002"]
        assert int(batch["valid"].sum()) == 3


def test_epochs_go_on_where_the_last_one_ended(uneven, config):
    folder = uneven(9, 14)
    (long,) = open_ranks(folder, config(), 1, 12)
    expected = content([*long])  # two passes of six batches
    (short,) = open_ranks(folder, config(), 1, 5)
    assert content([batch for _ in range(2) for batch in short]) == expected[:10]
    short.set_epoch(2)
    assert content([*islice(short, 2)]) == expected[10:]
    short.set_epoch(1)
    assert content([*short]) == expected[5:10]
    short.set_epoch(0)
    assert content([*short]) == expected[:5]


def test_close_by_another_thread_ends_the_iteration(uneven, config):
    (stream,) = open_ranks(uneven(9, 14), config(num_workers=2), 1, 1000)
    batches = iter(stream)
    next(batches)
    closer = threading.Thread(target=stream.close)
    closer.start()
    with pytest.raises(RuntimeError, match=r"ended early: close has moved"):
        list(batches)
    closer.join()


@TARGETS
@pytest.mark.parametrize("steps", [1, 5, 7, 12])
def test_state_of_two_ranks_goes_on_exactly_on_one(uneven, config, steps, targets):
    folder = uneven(9, 14, 2)
    settings = config(transform="train", targets=targets)
    (undisturbed,) = open_ranks(folder, settings, 1, 7)
    expected = content([batch for _ in range(3) for batch in undisturbed])
    running = open_ranks(folder, settings, 2, 7)
    for stream in running:
        for _ in range(steps // 7):
            list(stream)
        list(islice(stream, steps % 7))
    (resumed,) = open_ranks(folder, settings, 1, 7)
    resumed.load_state_dict(running[0].merge_states([stream.state_dict() for stream in running]))
    rest = content([*resumed])
    while len(rest) < len(expected) - steps:
        rest += content([*resumed])
    assert rest == expected[steps:]


def test_epoch_that_was_not_reached_begins_with_the_pass_of_its_number_and_says_so(uneven, config, caplog):
    folder = uneven(9, 14)
    (stream,) = open_ranks(folder, config(), 1, 4)
    for epoch in (0, 1, 2, 0):  # as a loop does that counts its steps
        stream.set_epoch(epoch)
    list(stream)
    assert "begins with pass" not in caplog.text
    stream.set_epoch(3)
    batches = content([*stream])
    assert "epoch 3 begins with pass 3 from its start" in caplog.text
    alone = mmdata.stream(folder, config())  # whose epochs are passes
    alone.load_state_dict(alone.state_dict())
    alone.set_epoch(3)
    assert [sorted(kept) for kept, *_ in content([*alone])[:1]] == [sorted(kept) for kept, *_ in batches[:1]]


def test_state_of_another_stream_is_refused(uneven, config):
    folder = uneven(9, 14)
    (stream,) = open_ranks(folder, config(), 1, 4)
    state = stream.state_dict()
    (other,) = open_ranks(folder, config(seed=1), 1, 5)
    with pytest.raises(
        ConfigError, match=r"stream state belongs to other batches: seed was 0 and is 1, steps_per_epoch was 4 and is 5"
    ):
        other.load_state_dict(state)
    with pytest.raises(ConfigError, match="stream state: 'plan' must say what its batches depend on: got"):
        stream.load_state_dict({"epoch": 0, "step": 0})
    with pytest.raises(ConfigError, match="'step' must be a whole number from 0 on, at most 4: got 5"):
        stream.load_state_dict({**state, "step": 5})
    for change in ({"pass": -1}, {"step_of_pass": None}, {"first_pass": 1.5}, {"pass": 2**20}):
        with pytest.raises(ConfigError, match=rf"'{next(iter(change))}' must be a whole number from 0 on"):
            stream.load_state_dict({**state, **change})


def test_bad_samples_are_counted_once_over_passes_epochs_and_a_resume(uneven, tar, config):
    folder = uneven(5)
    (folder / "1.tar").write_bytes(tar([("b/0.txt", b"no image"), ("b/1.txt", b"none either")]))
    settings = config(max_bad_share=0.5)
    (stream,) = open_ranks(folder, settings, 1, 3)
    list(stream)  # a pass has two batches, and tells of both samples with the first
    assert [(entry.epoch, entry.step) for entry in stream.ledger] == [(0, 0), (0, 0), (0, 2), (0, 2)]
    list(stream)
    assert [(entry.epoch, entry.step) for entry in stream.ledger[4:]] == [(1, 1), (1, 1)]
    (running,) = open_ranks(folder, settings, 1, 3)
    list(islice(running, 2))
    (resumed,) = open_ranks(folder, settings, 1, 3)
    resumed.load_state_dict(running.state_dict())
    for _ in range(2):
        list(resumed)
    assert resumed.state_dict()["rows_masked"] == stream.state_dict()["rows_masked"]
    assert resumed.state_dict()["rows_seen"] == stream.state_dict()["rows_seen"] == 21


def test_shards_without_any_usable_sample_are_an_error_and_no_endless_loop(tmp_path, tar, config):
    for name in "ab":
        (tmp_path / f"{name}.tar").write_bytes(bytes(1024))
    with pytest.raises(DataError, match=r"no sample in any of 2 shards; the first is '.*a\.tar'"):
        open_ranks(tmp_path, config(), 2, 3)
    (tmp_path / "b.tar").write_bytes(tar([("b.txt", b"no image")]))
    with pytest.raises(DataError, match=r"none of 1 sample of 2 shards can be used: shard '.*b\.tar', sample 'b': mis"):
        open_ranks(tmp_path, config(max_bad_share=1.0), 2, 3)


def test_stream_of_native_resolution_has_the_rows_of_the_indexed_loader(shards, config):
    settings = config(shards=str(shards), image_patches=[4, 9], patch_size=8, text_buckets=[24, 48])
    del settings["image_size"]

    def rows(batches) -> dict[str, tuple]:
        return {
            key: (b["spatial_shapes"][i].tolist(), int(b["pixel_values"][i].long().sum()))
            for b in batches
            for i, key in enumerate(b["keys"])
            if key and b["pixel_values"].shape[1] == 9
        }

    streamed, loaded = rows(mmdata.stream(None, settings)), rows(mmdata.Loader.from_config(settings))
    common = streamed.keys() & loaded.keys()
    assert len(common) > 20
    assert {key: streamed[key] for key in common} == {key: loaded[key] for key in common}


@pytest.mark.parametrize(("num_processes", "steps_per_epoch"), [(1, 4), (2, None)])
@TARGETS
@pytest.mark.sweep(keep=2)
def test_worker_processes_give_the_batches_of_threads(uneven, tar, config, num_processes, steps_per_epoch, targets):
    folder = uneven(9, 14, 5)
    (folder / "bad.tar").write_bytes(tar([("b/0.txt", b"no image"), ("b/1.txt", b"none either")]))
    settings = config(max_bad_share=0.5, transform="train", fields={"own": "txt"}, targets=targets)
    expected = mmdata.stream(folder, settings, steps_per_epoch=steps_per_epoch)
    batches = content([batch for _ in range(2) for batch in expected])
    loading = {**settings["loading"], "num_processes": num_processes, "num_workers": 2}
    with mmdata.stream(folder, {**settings, "loading": loading}, steps_per_epoch=steps_per_epoch) as stream:
        found = content([batch for _ in range(2) for batch in stream])
        assert [(e.key, e.epoch, e.step) for e in stream.ledger] == [(e.key, e.epoch, e.step) for e in expected.ledger]
        state = stream.state_dict()
        assert state == expected.state_dict()
        expected.load_state_dict(state)
        assert content([next(iter(stream))]) == content([next(iter(expected))])
    assert found == batches


def test_a_step_that_was_changed_in_a_state_is_refused(shards, config):
    with mmdata.stream(shards, config()) as stream:
        next(iter(stream))
        state = stream.state_dict()
        with pytest.raises(ConfigError, match="'step' is 2 and 'step_of_pass' 1: they are equal; to skip the first 3"):
            stream.load_state_dict({**state, "step": 2})
