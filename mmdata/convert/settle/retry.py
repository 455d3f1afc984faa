"""Rows that an earlier conversion left out, tried again: `mmdata convert SOURCE OUT --retry SHARDS --reason REASON`.

The earlier folders are read and never changed. The source must be theirs, and so must all settings that decide what a
sample is.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute
from numpy.typing import NDArray

from mmdata.config.convert import ConvertConfig
from mmdata.convert.settle.differences import Run, differences
from mmdata.convert.settle.earlier import Earlier
from mmdata.convert.settle.output import TOKENIZER_NAME
from mmdata.convert.settle.retried import RetriedRows
from mmdata.convert.sources.chosen import ChosenRows
from mmdata.convert.sources.rows import Source
from mmdata.errors import ConfigError, DataError, Reason, did_you_mean
from mmdata.hashing import hash64
from mmdata.storage.folder import local_folder

compute: Any = pyarrow.compute  # pyarrow's functions have no types

MAY_DIFFER = frozenset(
    {
        *("images", "min_side", "max_aspect", "max_pixels", "max_image_bytes", "shard_rows", "shard_bytes"),
        *("ignore_opt_outs", "allow_private_addresses"),
    }
)
"""Settings in a manifest that may be others in a retry: they decide which images are had, and not what is stored."""
DID_NOT_FAIL = frozenset({Reason.DUPLICATE_IMAGE, Reason.FILTERED})
WHILE_LOADING = frozenset(
    {
        *(Reason.DAMAGED_SHARD, Reason.TRANSFORM_FAILED, Reason.TEXT_TRANSFORM_FAILED, Reason.MISSING_FIELD),
        Reason.BAD_FIELD,
    }
)
RETRIED = sorted(str(reason) for reason in Reason if reason not in DID_NOT_FAIL | WHILE_LOADING)
"""The reasons whose rows can be tried again."""


@dataclass(frozen=True)
class Retry:
    """Which rows to try again.

    Attributes:
        folders: of the earlier conversion, and then of its earlier retries, in their order.
        reasons: of the rows, as the ledger has them; see `RETRIED`.
        chosen: of tars, the rows that the earlier conversion took.

    Raises:
        ConfigError: no folder, or a reason that is none.

    Example:
        convert("laion.parquet", "shards-retry", chosen=Retry(["shards"], ["unreachable", "timed_out"]))
    """

    folders: Sequence[str | Path]
    reasons: Sequence[str]
    chosen: ChosenRows | None = None

    def __post_init__(self) -> None:
        if not self.folders:
            raise ConfigError("retry: no folder; name the one of the conversion whose rows are tried again")
        for reason in self.reasons:
            if reason in {str(one) for one in DID_NOT_FAIL}:
                raise ConfigError(f"reason '{reason}': these rows did not fail; the reasons are {', '.join(RETRIED)}")
            if reason not in RETRIED:
                meant = did_you_mean(reason, RETRIED) or f"; the reasons are {', '.join(RETRIED)}"
                raise ConfigError(f"reason '{reason}': no row is left out for it{meant}")

    def prepare(self, out: Path, config: ConvertConfig) -> ConvertConfig:
        """The settings of the retry, before anything is opened.

        Rows that fail again were left out by a conversion that was published all the same, so no share of them is too
        large. The tokenizer that the earlier conversion has trained counts the captions.

        Raises:
            ConfigError: `out` is one of the earlier folders, or in one.
            DataError: one of them is no conversion's.
        """
        for folder in map(local_folder, self.folders):
            ours, theirs = out.resolve(), folder.resolve()
            if ours.is_relative_to(theirs) or theirs.is_relative_to(ours):
                raise ConfigError(
                    f"output '{out}': is, holds or lies in '{folder}', which is retried and stays as it is; "
                    "choose a folder beside it"
                )
        first = Earlier.read(local_folder(self.folders[0]))
        changed: dict[str, Any] = {"max_bad_share": 1.0, "max_unfetched_share": 1.0}
        if config.train_tokenizer and config.train_tokenizer == first.settings.get("train_tokenizer"):
            changed |= {"train_tokenizer": None, "tokenizer": str(first.inner / TOKENIZER_NAME)}
        return config.model_copy(update=changed)

    def rows(self, corpus: Source, run: Run) -> RetriedRows:
        """The rows to try again.

        Args:
            corpus: the whole source.
            run: what decides a conversion of all its rows.

        Raises:
            ConfigError: no reason is given.
            DataError: the earlier folders are of another source or of other settings, do not belong together, or none
                of their rows has such a reason.
        """
        earlier = [Earlier.read(local_folder(folder)) for folder in self.folders]
        for number, one in enumerate(earlier):
            _check_order(earlier[:number], one)
            _check_same(one, run)
        if not self.reasons:
            raise ConfigError(f"retry: name with --reason what is tried again; {_said(earlier)}")
        numbers = _failed(earlier, self.reasons)
        if not len(numbers):
            raise DataError(f"nothing to retry: no row is left out as {' or '.join(self.reasons)}; {_said(earlier)}")
        description = {
            "reasons": sorted(set(self.reasons)),
            "rows": len(numbers),
            "rows_hash": hash64(numbers.tobytes()),
            "of": [one.digest for one in earlier],
        }
        return RetriedRows(corpus, numbers, earlier, description)


def _check_order(before: Sequence[Earlier], one: Earlier) -> None:
    """Raise DataError unless a folder is the first and no retry, or a retry of those before it."""
    retry = one.source.get("retry")
    if not before and retry:
        raise DataError(
            f"retry '{one.folder}': is a retry itself; give the folder that it retries before it, with --retry"
        )
    if before and not retry:
        raise DataError(f"retry '{one.folder}': is no retry of '{before[0].folder}', but a conversion of its own")
    if retry and not set(retry["of"]) <= {other.digest for other in before}:
        raise DataError(
            f"retry '{one.folder}': retries a folder that is not given before it, or has been changed since; give all "
            "of them with --retry, in the order in which they were made"
        )


def _check_same(one: Earlier, run: Run) -> None:
    """Raise DataError if source or settings are others than in an earlier folder."""
    if changes := differences(_comparable(one.run, one.tokenizer), _comparable(run, run["settings"]["tokenizer"])):
        raise DataError(
            f"retry '{one.folder}': it was made of another source, or with other settings ({'; '.join(changes)}); give "
            f"the same ones again, but for {', '.join(sorted(MAY_DIFFER))}, or convert anew"
        )


def _comparable(run: Run, tokenizer: str | None) -> Run:
    """What must be equal: a trained tokenizer is the same as one that is given."""
    settings = {name: value for name, value in run["settings"].items() if name not in MAY_DIFFER}
    source = {name: value for name, value in run["source"].items() if name not in ("images", "retry")}
    if tokenizer is not None:
        settings |= {"tokenizer": tokenizer, "train_tokenizer": None}
    return json.loads(json.dumps({"source": source, "settings": settings}))


def _failed(earlier: Sequence[Earlier], reasons: Sequence[str]) -> NDArray[np.int64]:
    """Numbers of the rows that were left out for one of some reasons the last time that they were tried, ascending."""
    failed = np.zeros(0, np.int64)
    wanted = pa.array(list(reasons), pa.string())
    for one in earlier:
        found, tried = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
        for batch in one.rows(["row", "reason"]):
            rows = batch.column("row").to_numpy()
            found.append(rows[compute.is_in(batch.column("reason"), value_set=wanted).to_numpy(zero_copy_only=False)])
            if one is not earlier[0]:
                tried.append(rows)
        numbers = np.unique(np.concatenate(found))
        if len(numbers) != sum(one.accounts["reasons"].get(reason, 0) for reason in {*reasons}):
            raise DataError(f"retry '{one.folder}': its list of rows and its manifest differ; convert anew")
        failed = np.union1d(np.setdiff1d(failed, np.concatenate(tried)), numbers)
    return failed


def _said(earlier: Sequence[Earlier]) -> str:
    """For messages: what was left out of each folder."""
    return "; ".join(f"'{one.folder}' left out {', '.join(_counts(one)) or 'none that failed'}" for one in earlier)


def _counts(one: Earlier) -> Iterator[str]:
    for reason, count in sorted(one.accounts["reasons"].items(), key=lambda item: (-item[1], item[0])):
        if reason in RETRIED:
            yield f"{count:,} {reason}"
