"""What `mmdata init` does: makes shards with an index of a source, counts their captions, and writes a config."""

from __future__ import annotations

import argparse
import math
import shlex
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import yaml

from mmdata.cli.data.index import trainer
from mmdata.cli.facts import facts_of_index
from mmdata.cli.paths import find_part, find_val
from mmdata.config import Config
from mmdata.config.strict_yaml import parse
from mmdata.convert import ConvertConfig, convert
from mmdata.convert.row.examine import Examiner
from mmdata.convert.sources.open import find_parts, open_source
from mmdata.convert.sources.tables import shown
from mmdata.convert.sources.tars import is_packed
from mmdata.convert.units.engines import in_order
from mmdata.errors import ConfigError, DataError, counted
from mmdata.files import write_whole
from mmdata.index import Index, build_index
from mmdata.inspect.starter import Machine, Starter, choose_share, config_text
from mmdata.plan.from_config import build_plan
from mmdata.processes import usable_cores
from mmdata.progress import progress_in_bytes, progress_in_rows
from mmdata.recognize import PARTS
from mmdata.storage.folder import find_ledger, has_manifest, local_folder
from mmdata.storage.urls import display_name, is_url
from mmdata.tables.select import below_share
from mmdata.text.tokenizer import Tokenizer, load_tokenizer

TEMPLATE = "a photo of a {}."
"""Makes the captions of a corpus of class names."""
CLIP = "clip"
"""Name of the tokenizer that ships with mmdata."""
ENGLISH_CAPTIONS = 100_000
"""From so many captions on, nearly all of them in ASCII, CLIP's own tokenizer is taken and none is trained."""
LOOKED_ROWS = 256
"""Rows of a raw source that are examined before it is converted, for the choice of a tokenizer."""
FEW_ROWS = 1_000
"""Below this, a model memorizes its images."""
VALIDATION = frozenset(("val", "valid", "validation", "dev"))
"""Names of parts of a corpus that are meant to be evaluated on during training."""
USUAL_NAMES = {"annotations", "captions", "data", "images", "labels", "metadata", "results", "shards", "train"}
"""Names that say nothing of a corpus."""


class Start:
    """One run of `mmdata init`.

    Args:
        options: of the command line.
        machine: that will train.
        say: prints a line.

    Attributes:
        why: this tokenizer was chosen.
    """

    def __init__(self, options: argparse.Namespace, machine: Machine, say: Callable[[str], None]) -> None:
        self.machine, self.say = machine, say
        self.why = "the one that counted these captions"
        self.overwrite: bool = options.overwrite
        self.tokenizer: str | None = options.tokenizer
        self.shards: str | None = options.shards
        self.source, self.split = str(options.source), options.split
        if (part := find_part(self.source, self.split)) is not None:
            say(f"{self.source}: holds {' and '.join(PARTS)}, folders of shards; {part} is taken")
            self.source, self.split = part, None
        if is_url(self.source):
            named = display_name(self.source)
            raise ConfigError(
                f"'{named}': a URL; `mmdata index '{named}' --out FOLDER` makes an index of the tars there, for "
                f"`mmdata init FOLDER`, and `mmdata convert '{named}' OUT` shards of a table there; copy anything else "
                "to this machine first"
            )
        self.path = local_folder(self.source)
        self.name = _name_of(self.path)
        in_configs = Path("configs", f"{self.name}.yaml") if Path("configs").is_dir() else Path(f"{self.name}.yaml")
        self.config = Path(options.out or in_configs)
        if self.config.exists() and not self.overwrite:
            raise ConfigError(
                f"config '{self.config}' exists: give another name with --out, or replace it with --overwrite"
            )

    def run(self) -> str:
        """Do all of it; returns the command that trains.

        Raises:
            ConfigError: the source has labels only and no names for them, or a setting is wrong.
            DataError: the source cannot be read, or too much of it is damaged.
        """
        tars, out = self._make_index()
        tokenizer = self._count(tars, out)
        index = Index.open(out)
        starter = self._starter(out, index)
        text = config_text(
            starter,
            path=str(self.config),
            made_by=shlex.join(["mmdata", "init", self.source, *self._split_words()]),
            shards=out,
            tokenizer=tokenizer,
            about_tokenizer=f"{Tokenizer.load(tokenizer).vocab_size:,} entries, {self.why}",
        )
        # Make the plan before the config is written: what cannot train is an error here.
        data = parse(Config, yaml.safe_load(text), origin=f"config '{self.config}'").data
        build_plan(data, index, load_tokenizer(data))
        self.config.parent.mkdir(parents=True, exist_ok=True)
        write_whole(self.config, text.encode())
        self.say(f"{out}: {counted(len(index), 'row')} in {counted(index.num_shards, 'shard')}")
        for line in starter.facts.lines():
            self.say(f"  {line}")
        if len(index) < FEW_ROWS:
            self.say(f"{len(index):,} rows are few: a model memorizes them, and learns little about other images")
        length = f"{starter.epochs} epochs of {counted(starter.steps, 'step')}"
        self.say(f"wrote {self.config}: {length}; each value says why it was chosen")
        if starter.val_shards is None:
            self._say_of_validation(out, tokenizer)
        return f"{starter.launch} {shlex.quote(str(self.config))}"

    def _make_index(self) -> tuple[Path, str]:
        """The tars of the source, or the folder of their index if they lie behind URLs; and the folder of the index."""
        out = self.shards or f"shards/{self.name}"
        if not (self.path.is_dir() and has_manifest(self.path)):
            if is_packed(self.path):
                self._build_index(self.path, out)
                return self.path, out
            self._convert(out)
            return Path(out), out
        if self.split is not None:
            raise ConfigError(
                f"split '{self.split}': '{self.path}' holds shards, all of one part; give the folder of the part"
            )
        index = Index.open(self.path)
        manifest = index.manifests[0]
        tars = self.path / manifest.location
        names = [entry.name for entry in manifest]
        if "://" in manifest.location:
            tars = self.path
        elif len(names) == 1:
            tars = tars / names[0]
        known = self._known_tokenizer(str(self.path), index)
        if self.shards is None and (index.tokenizer is None or (known and self.tokenizer in (None, known))):
            return tars, str(self.path)
        if Path(out).resolve() == self.path.resolve():
            raise ConfigError(
                f"'{self.path}': another tokenizer has counted their captions; give a folder for a new index (--shards)"
            )
        self._build_index(tars, out, made=index)
        return tars, out

    def _convert(self, out: str) -> None:
        if not self.overwrite and find_part(out) is not None:
            raise ConfigError(
                f"output '{out}': holds {' and '.join(PARTS)}, which `mmdata convert --val-share` made: `mmdata init "
                f"{shlex.quote(out)}` takes them as they are; or give another folder with --shards"
            )
        words = ["mmdata", "convert", str(self.path), out, *self._split_words()]
        settings: dict[str, Any] = {"split": self.split}
        with _naming_command(words, out):
            config = parse(ConvertConfig, settings, origin="settings of the conversion")
            source = open_source(self.path, config)
            first = in_order(usable_cores(), Examiner.from_config(source, config), islice(source.rows(), LOOKED_ROWS))
            usable = [one.sample for one in first if one.sample is not None and not one.fault]
            texts = [caption for sample in usable for caption in sample.captions]
            name, entries = self._choose_tokenizer(texts, len(texts) * source.rows_at_most // max(len(usable), 1))
            settings |= {"tokenizer": name, "train_tokenizer": entries}
            words += ["--tokenizer", name] if name else ["--train-tokenizer", str(entries)]
            if not source.has_captions:
                settings["caption_templates"] = [TEMPLATE]
                words += ["--caption-template", TEMPLATE]
            self.say(f"converting: {shlex.join(words)}")
            config = parse(ConvertConfig, settings, origin="settings of the conversion")
            with progress_in_rows() as track:
                report = convert(self.path, out, config, overwrite=self.overwrite, track=track)
        if reasons := report.accounts["reasons"]:
            listed = ", ".join(f"{count:,} {reason}" for reason, count in reasons.items())
            self.say(f"left out: {listed}; each row with its reason in {find_ledger(Path(out))}")
        if texts := report.source.get("ignored_texts"):
            self.say(f"ignored: {counted(texts, 'text')} without an image of the same name")

    def _known_tokenizer(self, folder: str, index: Index) -> str | None:
        """Folder or name of the tokenizer that counted an index; None if it is not known."""
        for name in filter(None, (self.tokenizer, f"{folder}/tokenizer", CLIP)):
            is_there = name in (CLIP, self.tokenizer) or Path(name).exists()
            if is_there and Tokenizer.load(name).fingerprint == index.tokenizer:
                return name
        return None

    def _choose_tokenizer(self, texts: Sequence[str], captions: int) -> tuple[str | None, int | None]:
        """A tokenizer, or the entries of one to train; by some captions, and by how many there are."""
        if self.tokenizer:
            self.why = "as given"
            return self.tokenizer, None
        is_english = bool(texts) and sum(text.isascii() for text in texts) >= 0.9 * len(texts)
        if is_english and captions >= ENGLISH_CAPTIONS:
            self.why = "CLIP's, which fits plenty of English captions and ships with mmdata"
            return CLIP, None
        self.why = "trained on these captions"
        words = captions * sum(len(text.split()) for text in texts) / max(len(texts), 1)
        return None, min(max(2 ** int(math.log2(max(words / 8, 1))), 512), 16_384)

    def _count(self, tars: Path, out: str) -> str:
        """Count the captions, unless a known tokenizer has; returns that tokenizer."""
        index = Index.open(out)
        if not index.captions:
            raise ConfigError(
                f"'{self.path}': shards with labels and no captions, and a dual encoder needs texts: make captions of "
                f'the class names with `mmdata convert {tars} OUT --caption-template "a photo of a {{}}."`, and then '
                "`mmdata init OUT`; a loader of your own needs no texts (leave data.tokenizer out)"
            )
        found = self._known_tokenizer(out, index)
        if found is None or self.tokenizer not in (None, found):
            facts = facts_of_index(index)
            found, entries = self._choose_tokenizer(facts.texts, index.captions)
            self.say(f"counting the captions of {out}; the tars stay unchanged")
            self._build_index(tars, out, made=index, tokenizer=found, entries=entries)
            found = found or f"{out}/tokenizer"
        val = find_val(self.source)
        if val is not None and out == str(self.path) and (rows := Index.open(val)).tokenizer is None:
            self.say(f"counting the captions of {val}")
            self._build_index(val, str(val), made=rows, tokenizer=found)
        return found

    def _build_index(
        self,
        tars: Path,
        out: str,
        *,
        made: Index | None = None,
        tokenizer: str | None = None,
        entries: int | None = None,
    ) -> None:
        """Index tars, or add the lengths of their captions to an index that is there."""
        if not tokenizer and not entries:
            self.say(f"indexing into {out}; the tars stay where they are, unchanged")
        counts = Tokenizer.load(tokenizer) if tokenizer else None
        manifest = made.manifests[0] if made is not None else None
        with _naming_command(["mmdata", "index", str(tars)], str(tars)), progress_in_bytes("index") as progress:
            report = build_index(
                tars,
                out=out,
                count_tokens=counts.count if counts else None,
                tokenizer=counts.fingerprint if counts else None,
                make_tokenizer=trainer(entries) if entries else None,
                members=manifest.members if manifest is not None else None,
                # The user has accepted what the existing index leaves out.
                max_bad_share=0.05 if manifest is None else 1.0,
                skip_damaged=manifest is not None and "damaged_shards" in (manifest.accounts or {}),
                overwrite=self.overwrite and manifest is None,
                progress=progress,
            )
        if report.quarantined:
            listed = ", ".join(sorted({line["reason"] for line in report.quarantined}))
            self.say(f"left out: {counted(len(report.quarantined), 'sample')} ({listed}), in {find_ledger(Path(out))}")

    def _starter(self, out: str, index: Index) -> Starter:
        """The settings, with at least one row to evaluate on."""
        facts = facts_of_index(index)
        val = find_val(self.source)
        if val is not None and (rows := Index.open(val)).tokenizer == index.tokenizer:
            return Starter(facts, self.machine, 0.0, len(rows), str(val))
        share = choose_share(facts.rows)
        while not (kept := sum(int(below_share(index, shard, share).sum()) for shard in range(index.num_shards))):
            if share >= 0.5:
                break
            share *= 2
        return Starter(facts, self.machine, share, kept)

    def _say_of_validation(self, out: str, tokenizer: str) -> None:
        """Name the commands with which a validation set that the source has is evaluated on, in place of a share."""
        if (val := find_val(self.source)) is not None:
            command = shlex.join(["mmdata", "index", str(val), "--tokenizer", tokenizer, "--out", f"{val}-index"])
            self.say(
                f"{val} is not evaluated on, since its captions are not counted by this tokenizer: `{command}` "
                f"does it; then write `val: {{shards: {val}-index}}` in {self.config}"
            )
        others = [] if self.split is None else [name for name in find_parts(self.path) if name != self.split]
        if others:
            self.say(f"other parts: {shown(others)}")
        for part in others:
            if (name := part.split("/")[-1]).lower() in VALIDATION:
                words = ["mmdata", "convert", str(self.path), f"{out}-{name}", "--split", part]
                self.say(
                    f"to evaluate on the part '{part}': `{shlex.join([*words, '--tokenizer', tokenizer])}`; then write "
                    f"`val: {{shards: {out}-{name}}}` in {self.config}"
                )

    def _split_words(self) -> list[str]:
        return [] if self.split is None else ["--split", self.split]


def _name_of(path: Path) -> str:
    """A name for config, shards and run: the source's, or its folder's if it has a usual one such as "train"."""
    path = path.resolve()
    own = path.name if path.is_dir() else path.stem
    return path.parent.name if own.lower() in USUAL_NAMES and path.parent.name else own


@contextmanager
def _naming_command(words: list[str], out: str) -> Generator[None]:
    """Say in errors whose remedy is an option of a command how it goes on with that command."""
    try:
        yield
    except (ConfigError, DataError) as error:
        if "--" not in str(error) or "--split" in str(error) or "--out" in str(error):
            raise
        kind = ConfigError if isinstance(error, ConfigError) else DataError
        raise kind(
            f"{error}; that is an option of `{shlex.join(words)}`: then `{shlex.join(['mmdata', 'init', out])}`"
        ) from error
