"""From a source of images and captions to a config that trains: look, convert or index, choose settings, write."""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import yaml

from mmdata.commands.look import Facts, Look, facts_of_index, look, refuse_labels_only
from mmdata.commands.parts import find_part, find_val
from mmdata.commands.starter import Machine, Starter, choose_share, config_text, default_path
from mmdata.config import Config
from mmdata.config.strict_yaml import parse
from mmdata.convert import ConvertConfig, convert
from mmdata.convert.opening import PARTS
from mmdata.convert.settle.accounts import CannotPublish
from mmdata.convert.sources.tables import shown
from mmdata.errors import ConfigError, DataError, counted
from mmdata.files import write_whole
from mmdata.index import Index, build_index
from mmdata.index.encode import CountTokens
from mmdata.plan.from_config import build_plan
from mmdata.progress import SILENT, Track
from mmdata.storage.folder import find_ledger
from mmdata.tables.select import below_share
from mmdata.text.tokenizer import Tokenizer, load_tokenizer, train_tokenizer

TEMPLATE = "a photo of a {}."
"""Makes the captions of a corpus of class names."""
ENGLISH_CAPTIONS = 100_000
"""From so many captions on, nearly all of them in ASCII, CLIP's own tokenizer is taken and none is trained."""
FEW_ROWS = 1_000
"""Below this, a model learns its images by heart."""
VALIDATION = frozenset(("val", "valid", "validation", "dev"))
"""Names of parts of a corpus that are meant to be evaluated on during training."""
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Request:
    """What `mmdata init` was asked for.

    Attributes:
        source: a table, a folder, a tar or shards.
        config: the YAML file to write; None: configs/NAME.yaml or NAME.yaml.
        shards: folder for the shards or the index; None: shards/NAME.
        tokenizer: folder or name of a tokenizer to use; None: one is chosen.
        overwrite: replace an existing config, and another conversion in `shards`.
        dry_run: write nothing.
        split: part of the source, where it has several.
    """

    source: str
    config: str | None = None
    shards: str | None = None
    tokenizer: str | None = None
    overwrite: bool = False
    dry_run: bool = False
    split: str | None = None


class ChosenTokenizer(NamedTuple):
    """A tokenizer to use, or the entries of one to train."""

    name: str | None
    entries: int | None
    why: str


@dataclass(frozen=True)
class Init:
    """One run of `mmdata init`.

    Args:
        request: what was asked for.
        machine: that will train.
        say: prints a line.
        rows_bar: shows progress of a conversion.
        bytes_bar: shows progress of an index.
    """

    request: Request
    machine: Machine
    say: Callable[[str], None]
    rows_bar: Callable[[], AbstractContextManager[Track]] = lambda: nullcontext(SILENT)
    bytes_bar: Callable[[], AbstractContextManager[Progress | None]] = nullcontext

    def run(self) -> str:
        """Do all of it; returns the command that trains.

        Raises:
            ConfigError: the config exists, the source has labels only and no names for them, or a setting is wrong.
            DataError: the source cannot be read, or too much of it is damaged.
        """
        if (part := find_part(self.request.source, self.request.split)) is not None:
            self.say(f"{self.request.source}: holds {' and '.join(PARTS)}, folders of shards; {part} is taken")
            return replace(self, request=replace(self.request, source=part, split=None)).run()
        found = look(self.request.source, tokenizer=self.request.tokenizer, split=self.request.split)
        path = Path(self.request.config or default_path(found.name))
        if path.exists() and not self.request.overwrite:
            raise ConfigError(f"config '{path}' exists: give another name with --out, or replace it with --overwrite")
        self.say(f"{found.path}: {_kind(found)}, {found.facts.rows_in_words}")
        for line in found.facts.lines():
            self.say(f"  {line}")
        if found.other_parts:
            self.say(f"  other parts: {shown(found.other_parts)}")
        if found.kind == "tars":
            refuse_labels_only(found)
        out = self._out(found)
        if found.kind == "raw" and not self.request.overwrite and find_part(out) is not None:
            raise ConfigError(
                f"output '{out}': holds {' and '.join(PARTS)}, which `mmdata convert --val-share` made: `mmdata init "
                f"{shlex.quote(out)}` takes them as they are; or give another folder with --shards"
            )
        chosen = self._choose_tokenizer(found)
        if self.request.dry_run:
            return self._rehearse(found, path, out, chosen)
        if found.kind == "raw":
            self._convert(found, out, chosen)
        elif found.kind == "tars":
            self._index(found, out, chosen)
        if found.kind == "shards" or _counts_only(found, out):
            self._count_val(chosen.name or f"{out}/tokenizer")
        index = Index.open(out)
        facts = facts_of_index(index)
        if found.kind != "shards":
            self.say(f"{out}: {counted(facts.rows, 'row')} in {counted(index.num_shards, 'shard')}")
            for line in facts.lines():
                self.say(f"  {line}")
        starter = self._starter(facts, index)
        name = chosen.name or f"{out}/tokenizer"
        why = f"{Tokenizer.load(name).vocab_size:,} entries, {chosen.why}"
        text = self._text(starter, path, shards=out, tokenizer=name, about_tokenizer=why)
        self._check(text, path, index)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, text.encode())
        if facts.rows < FEW_ROWS:
            self.say(f"{facts.rows:,} rows are few: a model learns them by heart, and little about other images")
        length = f"{starter.epochs} epochs of {counted(starter.steps, 'step')}"
        self.say(f"wrote {path}: {length}; each value says why it was chosen")
        if starter.val_shards is None:
            self._say_of_validation(found, path, out, name)
        return f"{starter.launch} {shlex.quote(str(path))}"

    def _out(self, found: Look) -> str:
        """The folder for the shards or their index; that of shards which were converted or lie behind URLs stays."""
        stays = found.is_converted or found.is_of_urls
        if found.kind == "shards" or (stays and self.request.shards is None):
            return str(found.path)
        return self.request.shards or f"shards/{found.name}"

    def _say_of_validation(self, found: Look, path: Path, out: str, tokenizer: str) -> None:
        """Name the commands with which a validation set that the source has is evaluated on, in place of a share."""
        if (val := find_val(self.request.source)) is not None:
            command = shlex.join(["mmdata", "index", str(val), "--tokenizer", tokenizer, "--out", f"{val}-index"])
            self.say(
                f"{val} is not evaluated on, since its captions are not counted by this tokenizer: `{command}` "
                f"does it; then write `val: {{shards: {val}-index}}` in {path}"
            )
        for part in found.other_parts:
            if (name := part.split("/")[-1]).lower() in VALIDATION:
                words = ["mmdata", "convert", str(found.path), f"{out}-{name}", "--split", part]
                words += ["--tokenizer", tokenizer, *self._template_words(found)]
                self.say(
                    f"to evaluate on the part '{part}': `{shlex.join(words)}`; then write "
                    f"`val: {{shards: {out}-{name}}}` in {path}"
                )

    def _choose_tokenizer(self, found: Look) -> ChosenTokenizer:
        facts = found.facts
        if found.kind == "shards":
            return ChosenTokenizer(found.tokenizer, None, "the one that counted these captions")
        if self.request.tokenizer:
            return ChosenTokenizer(self.request.tokenizer, None, "as given")
        if facts.is_english and facts.captions_in_all >= ENGLISH_CAPTIONS:
            return ChosenTokenizer("clip", None, "CLIP's, which fits plenty of English captions and ships with mmdata")
        words = facts.words * facts.captions_in_all
        entries = 2 ** int(math.log2(max(words / 8, 1)))
        return ChosenTokenizer(None, min(max(entries, 512), 16_384), "trained on these captions")

    def _convert(self, found: Look, out: str, chosen: ChosenTokenizer) -> None:
        self.say(f"converting: {self._convert_command(found, out, chosen)}")
        settings: dict[str, object] = {"tokenizer": chosen.name, "train_tokenizer": chosen.entries}
        if self.request.split is not None:
            settings["split"] = self.request.split
        if not found.facts.captions:
            settings["caption_templates"] = [TEMPLATE]
        config = parse(ConvertConfig, settings, origin="settings of the conversion")
        try:
            with self.rows_bar() as track:
                report = convert(found.path, out, config, overwrite=self.request.overwrite, track=track)
        except CannotPublish as error:
            command = shlex.join(["mmdata", "init", out])
            raise DataError(f"{error}; that is an option of the command above: then `{command}`") from error
        if reasons := report.accounts["reasons"]:
            listed = ", ".join(f"{count:,} {reason}" for reason, count in reasons.items())
            self.say(f"left out: {listed}; each row with its reason in {find_ledger(Path(out))}")
        if texts := report.source.get("ignored_texts"):
            self.say(f"ignored: {counted(texts, 'text')} without an image of the same name")

    def _convert_command(self, found: Look, out: str, chosen: ChosenTokenizer) -> str:
        words = ["mmdata", "convert", str(found.path), out]
        words += self._split_words()
        words += ["--tokenizer", chosen.name] if chosen.name else ["--train-tokenizer", str(chosen.entries)]
        return shlex.join([*words, *self._template_words(found)])

    def _template_words(self, found: Look) -> list[str]:
        return [] if found.facts.captions else ["--caption-template", TEMPLATE]

    def _split_words(self) -> list[str]:
        return [] if self.request.split is None else ["--split", self.request.split]

    def _index(self, found: Look, out: str, chosen: ChosenTokenizer) -> None:
        self.say(_indexing(found, out))
        given, made = Tokenizer.load(chosen.name) if chosen.name else None, found.indexed

        def train(captions: Iterable[str], folder: Path) -> tuple[CountTokens, str]:
            train_tokenizer(captions, folder, vocab_size=chosen.entries or 0)
            trained = Tokenizer.load(folder)
            return trained.count, trained.fingerprint

        with self.bytes_bar() as progress:
            report = build_index(
                found.tars,
                out=out,
                count_tokens=given.count if given else None,
                tokenizer=given.fingerprint if given else None,
                make_tokenizer=None if given else train,
                members=None if made is None else made.members,
                # The user has accepted what the existing index leaves out.
                max_bad_share=0.05 if made is None else 1.0,
                skip_damaged=made is not None and "damaged_shards" in (made.accounts or {}),
                # Of what `mmdata convert` made nothing is replaced: the lengths are added to its index.
                overwrite=self.request.overwrite and not _counts_only(found, out),
                progress=progress,
            )
        if report.quarantined:
            listed = ", ".join(sorted({line["reason"] for line in report.quarantined}))
            self.say(f"left out: {len(report.quarantined):,} samples ({listed}), listed in {find_ledger(Path(out))}")

    def _count_val(self, tokenizer: str) -> None:
        """Count the captions of the folder `val` beside the folder `train`, if nobody has counted them yet."""
        val = find_val(self.request.source)
        if val is None or Index.open(val).tokenizer is not None:
            return
        self.say(f"counting the captions of {val}")
        loaded = Tokenizer.load(tokenizer)
        with self.bytes_bar() as progress:
            build_index(val, count_tokens=loaded.count, tokenizer=loaded.fingerprint, progress=progress)

    def _starter(self, facts: Facts, index: Index | None) -> Starter:
        """The settings; with an index, the rows to evaluate on are counted, and are at least one."""
        share = choose_share(facts.rows)
        if index is None:
            return Starter(facts, self.machine, share, round(share * facts.rows))
        if (val := _val_beside(self.request.source, index)) is not None:
            return Starter(facts, self.machine, 0.0, len(Index.open(val)), val)
        while not (val := sum(int(below_share(index, shard, share).sum()) for shard in range(index.num_shards))):
            if share >= 0.5:
                break
            share *= 2
        return Starter(facts, self.machine, share, val)

    def _rehearse(self, found: Look, path: Path, out: str, chosen: ChosenTokenizer) -> str:
        """Say what would be done, and print the config as far as it is known."""
        if found.kind == "raw":
            self.say(f"would convert: {self._convert_command(found, out, chosen)}")
        elif found.kind == "tars":
            self.say(f"would do so: {_indexing(found, out)}")
        starter = self._starter(found.facts, Index.open(found.path) if found.kind == "shards" else None)
        name = chosen.name or f"{out}/tokenizer"
        why = f"at most {chosen.entries:,} entries, {chosen.why}" if chosen.entries else chosen.why
        self.say(f"would write {path}, about so:\n")
        self.say(self._text(starter, path, shards=out, tokenizer=name, about_tokenizer=why))
        return f"{starter.launch} {shlex.quote(str(path))}"

    def _text(self, starter: Starter, path: Path, *, shards: str, tokenizer: str, about_tokenizer: str) -> str:
        return config_text(
            starter,
            path=str(path),
            made_by=shlex.join(["mmdata", "init", self.request.source, *self._split_words()]),
            shards=shards,
            tokenizer=tokenizer,
            about_tokenizer=about_tokenizer,
        )

    def _check(self, text: str, path: Path, index: Index) -> None:
        """Make the plan of the config before it is written: what cannot train is an error here."""
        data = parse(Config, yaml.safe_load(text), origin=f"config '{path}'").data
        build_plan(data, index, load_tokenizer(data))


def _counts_only(found: Look, out: str) -> bool:
    """Whether lengths are added to the index of a conversion or of URLs, in place of a new index."""
    return (found.is_converted or found.is_of_urls) and out == str(found.path)


def _indexing(found: Look, out: str) -> str:
    if _counts_only(found, out):
        return f"counting the captions of {out}; the tars stay unchanged"
    return f"indexing into {out}; the tars stay where they are, unchanged"


def _val_beside(source: str, index: Index) -> str | None:
    """The folder `val` of a `convert --val-share`, if the tokenizer that counted the folder `train` counted it too."""
    if (val := find_val(source)) is None:
        return None
    other = Index.open(val)
    return str(val) if other.tokenizer == index.tokenizer else None


def _kind(found: Look) -> str:
    if found.kind == "shards":
        return "shards with an index"
    if found.indexed is not None:
        return "shards with an index without caption lengths"
    if found.kind == "tars" or found.source is None:
        return "WebDataset tars"
    described = found.source.describe()
    kind, files = str(described.get("kind", "corpus")), described.get("files", ())
    return f"{kind} {files[0]['name']}" if found.path.is_dir() and len(files) == 1 else kind
