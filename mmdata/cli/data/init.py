"""mmdata init: write a config that trains, from images and captions.

SOURCE is whatever `mmdata convert` takes (a table, a folder of images, class folders, …), a WebDataset tar or a folder
of tars, or shards with an index. It is converted or indexed into shards/NAME, and its captions are counted by a
tokenizer. SOURCE itself is not changed, except that shards with an index get the counts in that index. Then a config is
written whose values fit the corpus and this machine. Each value has a comment that explains it:

    mmdata init photos/captions.csv
    mmdata train photos.yaml
"""

from __future__ import annotations

import argparse
import re
import shlex
from contextlib import suppress
from pathlib import Path

from mmdata.cli import parsed
from mmdata.cli.paths import check_source, find_part, find_val, words_of_tars
from mmdata.errors import ConfigError, DataError, counted, printable
from mmdata.files import write_whole
from mmdata.recognize import PARTS, TRAIN, VAL, refuse_unfinished
from mmdata.storage.folder import has_manifest, local_folder
from mmdata.storage.urls import display_name, is_url

TEMPLATE = "a photo of a {}."
"""Makes the captions of a corpus of class names."""
FEW_ROWS = 1_000
"""Below this, a model memorizes its images."""
OWN_OPTIONS = {"--overwrite", "--tokenizer"}
"""Options of `mmdata convert` and `mmdata index` that this command has too."""
USUAL_NAMES = {"annotations", "captions", "data", "images", "labels", "metadata", "results", "shards", "train"}
"""Names that say nothing of a corpus."""


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", metavar="SOURCE")
    parser.add_argument("--out", metavar="CONFIG", help="YAML file; default: configs/NAME.yaml or NAME.yaml")
    parser.add_argument("--shards", metavar="OUT", help="folder for the shards or the index; default: shards/NAME")
    parser.add_argument("--tokenizer", help="folder or Hugging Face name; default: a trained one, or CLIP's")
    parser.add_argument("--overwrite", action="store_true", help="replace the config, and another conversion in OUT")


def run(options: argparse.Namespace) -> int:
    """Make an index of the source, count its captions, write the config, and print the next command."""
    check_source(options.source)
    if is_url(options.source):
        named = display_name(options.source)
        raise ConfigError(
            f"'{named}': a URL; `mmdata index '{named}' --out FOLDER` makes an index of the tars there, for "
            f"`mmdata init FOLDER`, and `mmdata convert '{named}' OUT` shards of a table there; copy anything else "
            "to this machine first"
        )
    if (part := find_part(options.source)) is not None:
        say(f"{options.source}: holds {' and '.join(PARTS)}, folders of shards; {part} is taken")
    source = local_folder(part or options.source)
    name = name_of(source)
    config = Path(options.out or (f"configs/{name}.yaml" if Path("configs").is_dir() else f"{name}.yaml"))
    if config.exists() and not options.overwrite:
        raise ConfigError(f"config '{config}' exists: give another name with --out, or replace it with --overwrite")
    if options.tokenizer is not None:  # a wrong one is told before anything slow
        from mmdata.text.tokenizer import Tokenizer

        Tokenizer.load(options.tokenizer)
    if options.shards is not None and source.is_dir() and has_manifest(source):
        from mmdata.index import Manifest

        tars = words_of_tars(source, Manifest.read(source))[0]
        raise ConfigError(
            f"'{source}': has an index, which is taken as it is: leave --shards out, or make another one with "
            f"`{shlex.join(['mmdata', 'index', tars, '--out', options.shards])}`, and then "
            f"`{shlex.join(['mmdata', 'init', options.shards])}`"
        )
    out = make_index(source, options.shards or f"shards/{name}", overwrite=options.overwrite)
    tokenizer, why = count_captions(out, options.tokenizer)
    print("\nnext:", printable(write_config(config, out, tokenizer, why)))
    return 0


def make_index(source: Path, out: str, *, overwrite: bool) -> str:
    """The folder of an index of the source: `out`, or the source itself if it has one."""
    from mmdata.convert import ConvertConfig
    from mmdata.convert.sources.open import open_source
    from mmdata.convert.sources.tars import is_packed

    if source.is_dir() and has_manifest(source):
        return str(source)
    refuse_unfinished(source)
    if find_part(out) is not None:
        raise ConfigError(
            f"output '{out}': holds {' and '.join(PARTS)} of a conversion; `{shlex.join(['mmdata', 'init', out])}` "
            "takes them as they are, and --shards names another folder"
        )
    words = ["--overwrite"] if overwrite else []
    if is_packed(source):
        do("index", str(source), "--out", out, *words, out=out)
        return out
    refuse_parts(source, out)
    with suppress(ConfigError, DataError):  # the conversion raises them again
        words += [] if open_source(source, ConvertConfig()).has_captions else ["--caption-template", TEMPLATE]
    do("convert", str(source), out, *words, out=out)
    return out


def refuse_parts(source: Path, out: str) -> None:
    """Raise a ConfigError for a folder with a part for training and one for validation, with the commands for both."""
    from mmdata.convert import ConvertConfig
    from mmdata.convert.sources.open import find_parts, open_source

    names = find_parts(source)
    train = next((name for name in names if "train" in name.lower()), None)
    val = next((name for word in ("val", "test") for name in names if word in name.lower() and name != train), None)
    if train is None or val is None:
        return
    has_captions = open_source(source, ConvertConfig(split=train)).has_captions
    template = [] if has_captions else ["--caption-template", TEMPLATE]
    words = [["convert", str(source), f"{out}/{TRAIN}", "--split", train, *template]]
    words += [["convert", str(source), f"{out}/{VAL}", "--split", val, *template], ["init", out]]
    commands = ", ".join(f"`{shlex.join(['mmdata', *one])}`" for one in words)
    raise ConfigError(f"'{source}': has {len(names)} parts, which are converted one by one: {commands}")


def count_captions(out: str, wanted: str | None) -> tuple[str, str]:
    """Count the captions of an index where nobody has; returns the tokenizer that has, and why it is this one.

    Args:
        out: folder of the index; of the part for validation beside it the captions are counted too.
        wanted: the tokenizer that the user has named.

    Raises:
        ConfigError: shards of labels only, or another tokenizer has counted.
    """
    from mmdata.index import Index
    from mmdata.inspect.starter import CLIP, choose_tokenizer, facts_of_index
    from mmdata.text.tokenizer import Tokenizer

    index, why = Index.open(out), "the one that counted these captions"
    tars = words_of_tars(Path(out), index.manifests[0])
    if not index.captions:
        raise ConfigError(
            f"'{out}': shards with labels and no captions, and a dual encoder needs texts: make captions of the class "
            f'names with `mmdata convert {shlex.quote(tars[0])} OUT --caption-template "{TEMPLATE}"`, and then '
            "`mmdata init OUT`; a loader of your own needs no texts (leave data.tokenizer out)"
        )
    if index.tokenizer is None:
        chosen, why = (["--tokenizer", wanted], "as given") if wanted else choose_tokenizer(facts_of_index(index))
        do("index", *tars, *chosen, out=out)
        index = Index.open(out)
    own = f"{out}/tokenizer"
    for name in [wanted] if wanted else [*([own] if Path(own).exists() else []), CLIP]:
        if Tokenizer.load(name).fingerprint == index.tokenizer:
            val = find_val(out)
            if val is not None and (rows := Index.open(val)).tokenizer is None:
                do("index", *words_of_tars(val, rows.manifests[0]), "--tokenizer", name, out=str(val))
            return name, why
    raise ConfigError(
        f"'{out}': another tokenizer has counted their captions; name it with --tokenizer, or make another index: "
        f"`mmdata index {shlex.quote(tars[0])} --out FOLDER --tokenizer NAME`, and then `mmdata init FOLDER`"
    )


def write_config(path: Path, out: str, tokenizer: str, why: str) -> str:
    """Write the config of an index whose captions are counted; returns the command that trains."""
    import yaml

    from mmdata.config import Config
    from mmdata.config.strict_yaml import parse
    from mmdata.index import Index
    from mmdata.inspect.starter import Machine, Starter, config_text, facts_of_index, kept_for_validation
    from mmdata.plan.from_config import build_plan
    from mmdata.text.tokenizer import Tokenizer, load_tokenizer

    index, val = Index.open(out), find_val(out)
    if val is not None and Index.open(val).tokenizer != index.tokenizer:
        say(f"{val} is not evaluated on: another tokenizer has counted its captions")
        val = None
    share, rows = kept_for_validation(index) if val is None else (0.0, len(Index.open(val)))
    starter = Starter(facts_of_index(index), Machine.here(), share, rows, None if val is None else str(val))
    about = f"{Tokenizer.load(tokenizer).vocab_size:,} entries, {why}"
    text = config_text(starter, path=str(path), shards=out, tokenizer=tokenizer, about_tokenizer=about)
    # Make the plan before the config is written: what cannot train is an error here.
    data = parse(Config, yaml.safe_load(text), origin=f"config '{path}'").data
    build_plan(data, index, load_tokenizer(data))
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, text.encode())
    say(f"{out}: {counted(len(index), 'row')} in {counted(index.num_shards, 'shard')}")
    for line in starter.facts.lines():
        say(f"  {line}")
    if len(index) < FEW_ROWS:
        say(f"{len(index):,} rows are few: a model memorizes them, and learns little about other images")
    say(f"wrote {path}: {starter.epochs} epochs of {counted(starter.steps, 'step')}; each value says why it was chosen")
    return f"{starter.launch} {shlex.quote(str(path))}"


def do(name: str, *words: str, out: str) -> None:
    """Run `mmdata convert` or `mmdata index` in this process; errors say how `mmdata init` continues with `out`."""
    command = ["mmdata", name, *words]
    say(f"$ {shlex.join(command)}")
    module, options = parsed([name, *words])
    try:
        module.do(options)
    except (ConfigError, DataError) as error:
        raise remedied(error, f"`{shlex.join(command)}`", out) from error


def remedied(error: ConfigError | DataError, command: str, out: str) -> ConfigError | DataError:
    """The error, and how `mmdata init` continues if its remedy is an option that only another command has."""
    without_names = re.sub(r"(?<!\w)'[^']*'", "", str(error))  # the quote in "table's" opens none
    if not set(re.findall(r"--[a-z][a-z-]*", without_names)) - OWN_OPTIONS:
        return error
    kind = ConfigError if isinstance(error, ConfigError) else DataError
    return kind(f"{error}; that is an option of {command}: then `{shlex.join(['mmdata', 'init', out])}`")


def name_of(path: Path) -> str:
    """A name for config, shards and run: the source's, or its folder's if it has a usual one such as "train"."""
    path = path.resolve()
    own = path.name if path.is_dir() else path.stem
    return path.parent.name if own.lower() in USUAL_NAMES and path.parent.name else own


def say(line: str) -> None:
    """Print a line that may have names of files in it."""
    print(printable(line), flush=True)
