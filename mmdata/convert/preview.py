"""What a conversion would give, predicted from a sample of the rows. Nothing is written where the shards would lie."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from mmdata.config.convert import TEXT_LENGTH, ConvertConfig
from mmdata.convert.fetch import FetchStage, is_unfetched
from mmdata.convert.opening import open_alone
from mmdata.convert.packing import Packing, pack
from mmdata.convert.row.examine import Examiner
from mmdata.convert.sampled_row import RowLook, SampledRow
from mmdata.convert.sampling import Estimate, SampleOf
from mmdata.convert.settle.merges import Merges
from mmdata.convert.sources.chosen import ChosenRows
from mmdata.convert.sources.given_rows import Rows
from mmdata.convert.sources.rows import images_of
from mmdata.convert.survey import Survey
from mmdata.convert.units.engines import in_order
from mmdata.errors import Reason
from mmdata.processes import usable_cores
from mmdata.progress import SILENT, Track

NONE = Estimate(0, 0, 0, 0)
"""Of what cannot be."""


@dataclass(frozen=True)
class Lengths:
    """Tokens of the captions in the sample, special ones included.

    Attributes:
        captions: how many were counted.
        half, most, longest: tokens that half of them have at most, 95 % of them, and all.
        cut: captions longer than a text of CLIP's length.
    """

    captions: int
    half: int
    most: int
    longest: int
    cut: int


@dataclass(frozen=True)
class Preview:
    """What a conversion would give.

    Duplicates cannot be predicted: an image and its copy are hardly ever in one sample. `duplicate` has only rows that
    the table itself shows to add nothing to an earlier row of their image.

    Attributes:
        rows: of the corpus; known, not estimated.
        sample: the rows that were examined.
        written, merged, duplicate, filtered, quarantined: rows of the corpus that will be so.
        reasons: rows that are left out, by reason, those of the sample.
        examples: place and detail of the first row of the sample with each reason.
        bytes: of the shards, without their indexes, which take some hundred bytes a row.
        packing: number of the shards, and bytes that are written twice.
        cpu_s: seconds of CPU that a row took; the images of URLs are not fetched in them.
        workers: that can be at work at once on this machine, of those that were asked for.
        seconds: that the conversion takes; None where images are behind URLs, whose servers decide it.
        urls: rows of the sample whose image is behind a URL.
        fetched: the images among them that were had.
        lengths: of captions; None without a tokenizer, or without captions.
        free_bytes: on the disk of the output; None if no output was named, or it is no folder of this machine.
        knows_merges: whether rows of one image were looked for: not where images must be read to find them.
        keeps_duplicates: whether duplicates are written, so that there is nothing to predict.
        bad: rows that are quarantined, and not because their URL gives no image.
        unfetched: rows that are quarantined because their URL gives no image.
        largest_shares: of the settings: of bad rows, and of unfetched ones.
    """

    rows: int
    sample: SampleOf
    written: Estimate
    merged: Estimate
    duplicate: Estimate
    filtered: Estimate
    quarantined: Estimate
    reasons: dict[Reason, Estimate]
    examples: dict[Reason, str]
    bytes: Estimate
    packing: Packing
    cpu_s: float
    workers: int
    seconds: float | None
    urls: int
    fetched: int
    lengths: Lengths | None
    free_bytes: int | None
    knows_merges: bool
    keeps_duplicates: bool
    bad: Estimate
    unfetched: Estimate
    largest_shares: tuple[float, float]

    @property
    def room_bytes(self) -> tuple[int, int]:
        """Bytes that the output's disk needs: what is likely, and at most.

        Shards are second names of what was made, and take no room of their own, unless they are put together of tars
        that are not full, or leave out samples that are duplicates. In the worst case that is so of all.
        """
        return self.bytes.likely + self.packing.copied_bytes, 2 * self.bytes.high

    @property
    def fails(self) -> bool | None:
        """Whether more rows are quarantined than the settings allow; None if the sample leaves it open."""
        counts = [(self.bad, self.largest_shares[0] * self.rows), (self.unfetched, self.largest_shares[1] * self.rows)]
        if any(count.low > most for count, most in counts):
            return True
        return None if any(count.high > most for count, most in counts) else False


def preview(
    source: str | os.PathLike[str] | Rows,
    config: ConvertConfig | None = None,
    *,
    out: str | os.PathLike[str] | None = None,
    workers: int | None = None,
    chosen: ChosenRows | None = None,
    track: Track = SILENT,
) -> Preview:
    """Predict what `convert` would give, from about 1 % of the rows: at least 500, at most 5,000.

    The rows are read as a conversion reads them, but only the images of the sample. Images behind URLs are fetched, of
    the sample only and by the same rules. Temporary files are in the system's folder for them.

    Args:
        source: as for `convert`. A generator is used up; give a list or a function.
        config: settings; None takes the defaults.
        out: the output folder, of which only the disk is looked at.
        workers: processes that would convert; None stands for one a core.
        chosen: as for `convert`.
        track: shows progress.

    Raises:
        DataError, ConfigError: as `convert`, where the corpus or the settings cannot be used.
    """
    cores = usable_cores()
    workers = min(workers or cores, cores)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mmdata-preview-")))
        corpus, config, tokenizer = open_alone(stack, source, config or ConvertConfig(), chosen, folder, out=out)
        examiner = Examiner.from_config(corpus, config)
        survey = Survey(corpus, config, examiner, track)
        merges = stack.enter_context(Merges(folder))
        began = time.monotonic()
        rows = survey.count(merges)
        passes_s = time.monotonic() - began
        sample = SampleOf.choose(rows, in_runs=images_of(corpus) is not None)
        look = RowLook(examiner, config.val_share, tokenizer.count if tokenizer else None)
        with FetchStage.from_config(config) as fetch:
            wanted = fetch(survey.rows(sample, survey.merges_of(sample, merges)))
            seen = {one.number: one for one in in_order(workers, look, wanted)}
    found = _SampleCounts(sample, seen, config, survey)
    return found.preview(passes_s, workers, free_bytes(out))


class _SampleCounts:
    """Adds up what was seen in a sample."""

    def __init__(self, sample: SampleOf, seen: dict[int, SampledRow], config: ConvertConfig, survey: Survey) -> None:
        self._sample = sample
        self._survey = survey
        self._config = config
        self._seen = [seen[number] for number in sample.numbers()]
        self._faults = [_fault(one, seen) for one in self._seen]

    def preview(self, passes_s: float, workers: int, free_bytes: int | None) -> Preview:
        """The prediction."""
        sample, count, seen = self._sample, self._sample.count, self._seen
        reasons = [fault and fault[0] for fault in self._faults]
        kinds = Counter(reason for reason in reasons if reason)
        apart = (Reason.DUPLICATE_IMAGE, Reason.FILTERED)
        quarantined = [reason is not None and reason not in apart for reason in reasons]
        unfetched = [
            reason is not None and is_unfetched(one.path, reason) for one, reason in zip(seen, reasons, strict=True)
        ]
        urls = [one for one in seen if one.is_url]
        merged = [one.into is not None and fault is None for one, fault in zip(seen, self._faults, strict=True)]
        grouped, split = self._survey.finds_merges, self._config.split
        cpu_s = sum(one.cpu_s for one in seen) / max(sample.size, 1)
        seconds = None if urls else passes_s + cpu_s * sample.rows / workers
        return Preview(
            rows=sample.rows,
            sample=sample,
            written=count([one.is_written for one in seen]),
            merged=count(merged) if grouped else NONE,
            duplicate=count([reason is Reason.DUPLICATE_IMAGE for reason in reasons]) if grouped else NONE,
            filtered=count([reason is Reason.FILTERED for reason in reasons]) if split else NONE,
            quarantined=count(quarantined),
            reasons={kind: count([reason is kind for reason in reasons]) for kind in sorted(kinds)},
            examples=self._examples(),
            bytes=sample.total([one.bytes for one in seen]),
            packing=self._pack(),
            cpu_s=cpu_s,
            workers=workers,
            seconds=seconds,
            urls=len(urls),
            fetched=sum(one.was_fetched for one in urls),
            lengths=self._lengths(),
            free_bytes=free_bytes,
            knows_merges=self._survey.knows_merges,
            keeps_duplicates=self._config.keep_duplicates,
            bad=count([out and not lost for out, lost in zip(quarantined, unfetched, strict=True)]),
            unfetched=count([out and lost for out, lost in zip(quarantined, unfetched, strict=True)]),
            largest_shares=self._config.largest_shares,
        )

    def _examples(self) -> dict[Reason, str]:
        examples: dict[Reason, str] = {}
        for one, fault in zip(self._seen, self._faults, strict=True):
            if fault is not None:
                examples.setdefault(fault[0], f"{one.place}: {fault[1]}")
        return examples

    def _pack(self) -> Packing:
        parts = [[one for one in self._seen if one.is_written and one.part == part] for part in (0, 1)]
        size = max(self._sample.size, 1)
        means = [(len(part) / size, sum(one.bytes for one in part) / max(len(part), 1)) for part in parts if part]
        return pack(self._sample.rows, means, shard_rows=self._config.shard_rows, shard_bytes=self._config.shard_bytes)

    def _lengths(self) -> Lengths | None:
        tokens = sorted(length for one in self._seen if one.is_written for length in one.tokens)
        if not tokens:
            return None
        cut = sum(length > TEXT_LENGTH for length in tokens)
        half, most = (tokens[max(0, -(-len(tokens) * share // 100) - 1)] for share in (50, 95))
        return Lengths(len(tokens), half, most, tokens[-1], cut)


def free_bytes(out: str | os.PathLike[str] | None) -> int | None:
    """Bytes that are free on the disk on which a folder would be made; None if that is not known."""
    if out is None or "://" in os.fspath(out):
        return None
    place = Path(out).absolute()
    return shutil.disk_usage(next(one for one in (place, *place.parents) if one.exists())).free


def _fault(one: SampledRow, seen: dict[int, SampledRow]) -> tuple[Reason, str] | None:
    """Why a row is left out: a row whose captions another one takes is left out with that one."""
    return seen[one.into].fault or one.fault if one.into is not None else one.fault
