"""Of a damaged tar, index and stream use the same samples, and the accounts add up."""

from __future__ import annotations

import gzip
import tempfile
from pathlib import Path

from hypothesis import example, given, settings
from hypothesis import strategies as st

import mmdata
from mmdata.errors import DataError
from mmdata.index import Index, build_index, verify
from tests.conftest import make_photo
from tests.made_shards import make_tar

NUM = 5


def whole_tar() -> bytes:
    """Five samples of a photo and a caption; a folder of some, a long name of one, and a member of none."""
    members: list[tuple[str, bytes]] = []
    for i in range(NUM):
        key = ("n" * 120 if i == 3 else "sub/" if i == 2 else "") + f"{i:04d}"
        members += [(f"{key}.jpg", make_photo(20, 30 + i, seed=i)), (f"{key}.txt", b"a dog %d" % i)]
    return make_tar([*members[:4], ("README", b"read me"), *members[4:]], format=1)  # GNU


WHOLE = whole_tar()
PLACES = st.integers(0, len(WHOLE) - 1)
BLOCKS = st.integers(0, len(WHOLE) // 512)
GARBAGE = st.binary(min_size=1, max_size=1500)
DAMAGES = st.one_of(
    PLACES.map(lambda place: WHOLE[:place]),
    BLOCKS.map(lambda block: WHOLE[: 512 * block]),
    st.tuples(PLACES, st.integers(0, 7)).map(lambda at: WHOLE[: at[0]] + flipped(at) + WHOLE[at[0] + 1 :]),
    st.tuples(PLACES, st.integers(1, 4000)).map(
        lambda at: (WHOLE[: at[0]] + bytes(at[1]) + WHOLE[sum(at) :])[: len(WHOLE)]
    ),
    st.tuples(BLOCKS, st.integers(1, 6)).map(lambda at: WHOLE[: 512 * at[0]] + WHOLE[512 * sum(at) :]),
    st.tuples(BLOCKS, BLOCKS).map(lambda at: WHOLE[: 512 * at[0]] + WHOLE[512 * at[1] :]),
    GARBAGE.map(lambda tail: WHOLE + tail),
    st.just(WHOLE + WHOLE),
    st.just(WHOLE + gzip.compress(WHOLE)),
)


def flipped(at: tuple[int, int]) -> bytes:
    place, bit = at
    return bytes([WHOLE[place] ^ 1 << bit])


def streamed(path: Path) -> list[tuple[str, list[str]]] | None:
    """Keys and captions of the usable samples of a stream; None: the tar is damaged, or has none."""
    settings = {"image_size": 16, "global_batch_size": 1, "shuffle": False, "tokenizer": "clip"}
    try:
        stream = mmdata.stream(path, {**settings, "loading": {"num_workers": 0, "max_bad_share": 1.0}})
        return [(batch["keys"][0], batch["captions"]) for batch in stream]
    except DataError:
        return None


def start_of(name: bytes) -> int:
    return WHOLE.index(name)


@settings(max_examples=50, deadline=None)
@given(DAMAGES)
@example(WHOLE)
@example(WHOLE[: start_of(b"0001.jpg\0") + 700])  # cut in the first member of a sample: the one before it is whole
@example(WHOLE[: start_of(b"0001.jpg\0") + 100])  # in its header: nobody knows whether the one before it is whole
@example(WHOLE[: start_of(b"0001.txt\0") + 600])  # in the padding of a caption
@example(WHOLE[: start_of(b"README\0") + 514])
@example(WHOLE[: start_of(b"0004.txt\0") + 1024])  # the end blocks are missing
def test_index_and_stream_find_the_same_samples_and_the_same_damage(data: bytes) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        path = folder / "x.tar"
        path.write_bytes(data)
        found = streamed(path)
        try:
            report = build_index(folder, skip_damaged=True, max_bad_share=1.0)
        except DataError:  # no usable sample
            assert found is None
            return
        accounts = report.accounts
        assert (
            accounts["samples"]
            == accounts["indexed"] + accounts["quarantined"]
            == accounts["indexed"] + len(report.quarantined)
        )
        index = Index.open(folder)
        indexed = [(index[i].key, index[i].captions) for i in range(len(index))]
        assert found == (None if "damaged_shards" in accounts or not indexed else indexed)
        assert len(index) == accounts["indexed"] == report.manifest.rows
        assert verify(folder) == []
