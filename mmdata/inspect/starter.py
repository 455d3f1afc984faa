"""The first config of a corpus: settings that fit its rows and this machine, each with the reason beside it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import yaml
from numpy.typing import NDArray

from mmdata.errors import BadSample, DataError, counted
from mmdata.index import Index, ShardStore
from mmdata.plan import IndexRows
from mmdata.processes import usable_cores
from mmdata.tables.select import below_share
from mmdata.tars.captions import captions_of

CLIP = "clip"
"""Name of the tokenizer that ships with mmdata."""
ENGLISH_CAPTIONS = 100_000
"""From so many captions on, nearly all of them in ASCII, CLIP's own tokenizer is taken and none is trained."""
LOOKED_CAPTIONS = 256
"""Rows whose captions are read."""
LOOKED_ROWS = 2**20
"""Rows whose sizes, captions and labels are counted: more would tell the same."""
VAL_ROWS = 5000
"""Rows that are evaluated on, at most: retrieval among more takes longer and tells the same."""
STEPS_ON_CPU, STEPS_ON_GPU = 1_000, 20_000
"""Updates in which a small and a large model learn something."""
EXPORT_OF_SMALL = "`mmdata export` takes vit_* and pretrained, not these"

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Facts:
    """What the rows of a corpus are like.

    Attributes:
        rows: of the corpus.
        looked: rows that the other facts come from.
        heights, widths: int64 (n,), pixels as displayed, of those rows.
        captions: of those rows.
        texts: some of those captions.
        longest: tokens of the longest caption; 0 if nobody has counted them.
        repeated: captions that an earlier row has too.
    """

    rows: int
    looked: int
    heights: Ints
    widths: Ints
    captions: int
    texts: list[str]
    longest: int = 0
    repeated: int = 0

    @property
    def words(self) -> float:
        """Mean words of a caption."""
        return float(np.mean([len(text.split()) for text in self.texts])) if self.texts else 0.0

    @property
    def short_side(self) -> int:
        """Median of the shorter sides of the images, in pixels."""
        return int(np.median(np.minimum(self.heights, self.widths)))

    @property
    def captions_in_all(self) -> int:
        """Captions of all rows, by those of the rows looked at."""
        return self.captions * self.rows // max(self.looked, 1)

    def lines(self) -> Iterator[str]:
        """The facts, for people."""
        if self.looked < self.rows:
            yield f"looked at the first {self.looked:,} rows"
        if self.looked:
            short, long = np.minimum(self.heights, self.widths), np.maximum(self.heights, self.widths)
            yield (
                f"images: {int(short.min()):,} to {int(long.max()):,} pixels a side; "
                f"the median is {int(np.median(self.heights)):,} × {int(np.median(self.widths)):,} (height × width)"
            )
        if self.captions:
            mean = self.captions / max(self.looked, 1)
            longest = f"; the longest has {self.longest:,} tokens" if self.longest else ""
            yield f"captions: {mean:.3g} a row, {self.words:.1f} words on average{longest}"
        else:
            yield "captions: none"


def facts_of_index(index: Index) -> Facts:
    """What the rows of an index are like; captions of some rows are read, and no image."""
    if not len(index):
        raise DataError(f"shards '{index.sources[0].folder}': no rows in the index; see its quarantine.jsonl")
    rows = np.arange(min(len(index), LOOKED_ROWS))
    heights, widths = IndexRows(index).sizes(rows)
    hashes = index.take_lists(rows, "caption_hash")[1]
    histogram = index.token_histogram()
    return Facts(
        rows=len(index),
        looked=len(rows),
        heights=heights,
        widths=widths,
        captions=len(hashes),
        texts=list(_captions(index, _looked_rows(index, rows))),
        longest=int(np.flatnonzero(histogram)[-1]) if index.captions and index.tokenizer else 0,
        repeated=len(hashes) - len(np.unique(hashes)),
    )


def _looked_rows(index: Index, rows: Ints) -> Ints:
    """The rows whose captions are read. Behind a URL they are the first, as each shard that is read is fetched."""
    return rows[:LOOKED_CAPTIONS] if index.caches else rows[:: -(-len(rows) // LOOKED_CAPTIONS)]


def _captions(index: Index, rows: Ints) -> Iterator[str]:
    """The captions of some rows, as they are in the tars."""
    if not index.captions:
        return
    store = ShardStore(index)
    columns = index.take(rows, ["caption_offset", "caption_bytes", "caption_format"])
    shards, _ = index.locate(rows)
    for i, shard in enumerate(shards.tolist()):
        data = store.read(shard, int(columns["caption_offset"][i]), int(columns["caption_bytes"][i]))
        try:
            yield from captions_of(data, int(columns["caption_format"][i]))
        except BadSample:
            continue


def choose_tokenizer(facts: Facts) -> tuple[list[str], str]:
    """The option of `mmdata index` that counts the captions of a corpus, and the reason for it."""
    texts, captions = facts.texts, facts.captions_in_all
    is_english = bool(texts) and sum(text.isascii() for text in texts) >= 0.9 * len(texts)
    if is_english and captions >= ENGLISH_CAPTIONS:
        return ["--tokenizer", CLIP], "CLIP's, which fits plenty of English captions and ships with mmdata"
    entries = min(max(2 ** int(math.log2(max(captions * facts.words / 8, 1))), 512), 16_384)
    return ["--train-tokenizer", str(entries)], "trained on these captions"


def kept_for_validation(index: Index) -> tuple[float, int]:
    """A share of the rows to evaluate on, and how many these are: at least one."""
    share = choose_share(len(index))
    while not (kept := sum(int(below_share(index, shard, share).sum()) for shard in range(index.num_shards))):
        if share >= 0.5:
            break
        share *= 2
    return share, kept


@dataclass(frozen=True)
class Machine:
    """What a run may use.

    Attributes:
        cores: of the processor.
        gpus: number of GPUs.
        gpu_gb: memory of the smallest of them, in 10⁹ bytes.
    """

    cores: int
    gpus: int = 0
    gpu_gb: float = 0.0

    @classmethod
    def here(cls) -> Machine:
        """This machine."""
        gpus = torch.cuda.device_count()
        if not gpus:
            return cls(usable_cores())
        memory = min(torch.cuda.get_device_properties(i).total_memory for i in range(gpus))
        return cls(usable_cores(), gpus, memory / 1e9)

    def __str__(self) -> str:
        if not self.gpus:
            return f"a CPU with {self.cores} cores" if self.cores > 1 else "a CPU with one core"
        return f"{self.gpus} GPU{'s' if self.gpus > 1 else ''} of {self.gpu_gb:.0f} GB"


class ConfigLine(NamedTuple):
    """A line of the config: the key, its value as YAML, and why it has this value."""

    key: str
    value: str
    why: str


@dataclass(frozen=True)
class Starter:
    """The settings of a first run.

    Args:
        facts: of the corpus.
        machine: that trains.
        share: of the rows that are evaluated on.
        val_rows: how many these are.
        val_shards: folder of the shards that are evaluated on; None: a share of the corpus is.
    """

    facts: Facts
    machine: Machine
    share: float
    val_rows: int
    val_shards: str | None = None

    @property
    def train_rows(self) -> int:
        """Rows to train on."""
        return self.facts.rows - (self.val_rows if self.val_shards is None else 0)

    @property
    def model(self) -> str:
        """Name of the towers."""
        if not self.machine.gpus or self.train_rows < 2_000:
            return "tiny"
        return "vit_b_16" if self.train_rows >= 500_000 and self.machine.gpu_gb >= 20 else "small"

    @property
    def image_size(self) -> int:
        """Side of the crops in pixels, a multiple of the towers' patches, not more than most images have."""
        largest, patch = (64, 8) if self.model == "tiny" else (224, 16)
        if self.model == "vit_b_16":
            return largest
        return max(32, min(largest, self.facts.short_side // patch * patch))

    @property
    def batch_size(self) -> int:
        """Rows of a batch over all GPUs: a power of two that fits the memory and leaves an epoch eight batches."""
        if self.machine.gpus:
            rows_a_gb = {"tiny": 64, "small": 16, "vit_b_16": 8}[self.model]
            fitting = 2 ** int(math.log2(max(self.machine.gpu_gb * rows_a_gb, 8))) * self.machine.gpus
        else:
            fitting = 128
        sensible = 2 ** int(math.log2(max(self.train_rows // 8, 1)))
        size = min(max(min(fitting, sensible), 8), self.train_rows)
        return max(size // max(self.machine.gpus, 1), 1) * max(self.machine.gpus, 1)

    @property
    def steps(self) -> int:
        """Updates of an epoch."""
        return -(-self.train_rows // self.batch_size)

    @property
    def epochs(self) -> int:
        """Passes over the data: as many as bring the updates that a model of this size needs, 3 to 100."""
        wanted = STEPS_ON_GPU if self.machine.gpus and self.model != "tiny" else STEPS_ON_CPU
        return min(max(-(-wanted // self.steps), 3), 100)

    @property
    def launch(self) -> str:
        """The command that trains, without the config's name."""
        if self.machine.gpus < 2:
            return "mmdata train"
        return f"torchrun --nproc-per-node {self.machine.gpus} -m mmdata train"

    def data(self, shards: str, tokenizer: str, about_tokenizer: str) -> Iterator[ConfigLine]:
        """The section `data`."""
        facts = self.facts
        yield ConfigLine("shards", _quoted(shards), f"{facts.rows:,} images with {facts.captions_in_all:,} captions")
        yield self._val()
        yield ConfigLine("tokenizer", _quoted(tokenizer), about_tokenizer)
        if facts.longest > 77 and self.model != "vit_b_16":
            length = min(-(-facts.longest // 8) * 8, 256)
            yield ConfigLine(
                "max_length", f"{length}", f"tokens; the longest caption has {facts.longest:,}, the default is 77"
            )
        reason = f"the images' shorter side is {facts.short_side:,} (median)"
        if self.image_size < facts.short_side and not self.machine.gpus:
            reason = f"small, so that a CPU is quick; {reason}"
        yield ConfigLine("image_size", f"{self.image_size}", f"pixels; {reason}")
        yield ConfigLine(
            "global_batch_size",
            f"{self.batch_size}",
            f"{self.steps:,} steps an epoch; contrast needs large batches, and training needs many",
        )

    def _val(self) -> ConfigLine:
        if self.val_shards is not None:
            return ConfigLine(
                "val", f"{{shards: {_quoted(self.val_shards)}}}", f"{self.val_rows:,} rows to evaluate on"
            )
        return ConfigLine(
            "val",
            f"{{share: {np.format_float_positional(self.share)}}}",  # YAML takes 5e-06 for a text
            f"{self.val_rows:,} rows are kept from training and evaluated on; the image's hash decides which",
        )

    def train(self) -> Iterator[ConfigLine]:
        """The section `train`."""
        total = self.epochs * self.steps
        yield ConfigLine("epochs", f"{self.epochs}", f"{total:,} updates")
        if self.model == "tiny":
            yield ConfigLine("lr", "1.0e-3", "small towers learn with twice the default")
        warmup = max(1, min(total // 10, 2_000))
        yield ConfigLine("warmup_steps", f"{warmup}", "a tenth of the run, while the learning rate rises")
        if self.facts.repeated:
            share = self.facts.repeated / max(self.facts.captions, 1)
            repeated = f"{share:.1%} of the captions occur more than once"
            reason = f"{repeated}: such pairs are not used as negatives for each other"
            yield ConfigLine("mask_false_negatives", "true", reason)
        yield ConfigLine("evaluate_every_epochs", f"{max(1, self.epochs // 5)}", "about five times in the run")
        if total // 20 < 1_000:  # the default
            yield ConfigLine("checkpoint_every_steps", f"{max(1, total // 20)}", "what a kill -9 may cost at most")
        yield ConfigLine("log_every_steps", f"{min(max(1, total // 50), 50)}", "about fifty lines, or one for 50 steps")


def choose_share(rows: int) -> float:
    """Share of the rows to evaluate on: a tenth, at most `VAL_ROWS` rows, and more than a tenth of fewer than 200.

    Example:
        choose_share(50) == 0.2, choose_share(3_544) == 0.1, choose_share(1_000_000) == 0.005
    """
    share = min(0.1, VAL_ROWS / max(rows, 1))
    if rows < 200:
        share = min(0.2, 20 / max(rows, 1))
    return float(f"{share:.1g}")


def config_text(starter: Starter, *, path: str, shards: str, tokenizer: str, about_tokenizer: str) -> str:
    """The YAML file, with a comment behind each value."""
    sections = {
        "data": list(starter.data(shards, tokenizer, about_tokenizer)),
        "model": [ConfigLine("name", starter.model, _about_model(starter))],
        "train": list(starter.train()),
    }
    lines = [
        f"# {starter.launch} {path}",
        f"# made by `mmdata init` for {counted(starter.facts.rows, 'row')} and {starter.machine}; change what you know "
        "better",
    ]
    for section, settings in sections.items():
        lines.append(f"{section}:")
        width = max(len(f"{one.key}: {one.value}") for one in settings)
        lines += [f"  {f'{one.key}: {one.value}':{width}}  # {one.why}" for one in settings]
    return "\n".join(lines) + "\n"


def _about_model(starter: Starter) -> str:
    if starter.model == "tiny":
        why = "towers that a CPU trains" if not starter.machine.gpus else "so few rows ask for small towers"
        return f"{why}; {EXPORT_OF_SMALL}"
    if starter.model == "small":
        return f"vit_b_16, CLIP's towers, are for half a million rows and more; {EXPORT_OF_SMALL}"
    return "CLIP's towers of this name"


def _quoted(text: str) -> str:
    """A text as YAML: in quotes where it would mean something else without them."""
    return yaml.safe_dump([text], default_flow_style=True, allow_unicode=True, width=math.inf).strip()[1:-1]
