"""Captions to token ids, a batch at a time, with any fast Hugging Face tokenizer.

Counting and encoding agree: a caption that counts n tokens is encoded into min(n, max_length) tokens.
"""

from __future__ import annotations

import hashlib
import html
import json
import logging
import os
import re
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from numpy.typing import NDArray
from tokenizers import ByteLevelBPETokenizer
from tokenizers.processors import TemplateProcessing

from mmdata.config import DataConfig
from mmdata.config.texts import TextsConfig
from mmdata.errors import ConfigError
from mmdata.files import write_whole

logger = logging.getLogger("mmdata")

CLIP = Path(__file__).parent / "vocabularies" / "clip"
"""Folder of CLIP's tokenizer; AutoTokenizer loads it."""
_CLIP_SIZES = ("base-patch32", "base-patch16", "large-patch14", "large-patch14-336")
CLIP_NAMES = frozenset(("clip", *(f"openai/clip-vit-{size}" for size in _CLIP_SIZES)))
"""Names of CLIP's tokenizer: `clip`, and OpenAI's models on the hub, which have this one."""
HUB_TIMEOUT_S = 5.0
"""Longest wait for the hub's first answer, before its client begins to repeat requests for a minute."""

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
REMEDY = (
    "give a folder that AutoTokenizer.from_pretrained loads, or make one with `mmdata convert --train-tokenizer 8192` "
    "or `mmdata index --train-tokenizer 8192`; `clip` is CLIP's tokenizer and needs no network"
)
CLEANING, OPEN_CLIP = "text_cleaning", "open_clip"
"""Key and value in the tokenizer_config.json of a tokenizer before which texts are cleaned as open_clip does."""


class Tokenizer:
    """A fast tokenizer, safe to use from many threads concurrently.

    Attributes:
        fingerprint: 16 hexadecimal digits; equal for tokenizers that give equal ids.
        max_length: captions are truncated to this many tokens, special ones included.
        vocab_size: ids are below this.
        pad_id: the id that pads a row after its tokens.
        name: the folder or name it was loaded from, for messages; "" if it was made otherwise.
        cleaning: "open_clip": HTML entities are decoded, and letters lower-cased, before a text is tokenized; or None.

    Raises:
        ConfigError: max_length leaves no room for a caption's own tokens.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        max_length: int,
        pad_id: int,
        name: str = "",
        cleaning: str | None = None,
    ) -> None:
        self._backend = tokenizers.Tokenizer.from_str(backend.to_str())
        self._backend.no_truncation()
        self._backend.no_padding()
        self.cleaning = cleaning if cleaning == OPEN_CLIP else None
        self.fingerprint = hashlib.sha256(f"{self._backend.to_str()}{self.cleaning or ''}".encode()).hexdigest()[:16]
        special = int(self._backend.num_special_tokens_to_add(False))
        if max_length <= special:
            raise ConfigError(
                f"max_length {max_length}: {special} special tokens alone are that long; set data.max_length"
            )
        self.max_length = max_length
        self.vocab_size = int(backend.get_vocab_size(with_added_tokens=True))
        self.pad_id = pad_id
        self.name = name

    @classmethod
    def load(cls, name: str | os.PathLike[str], *, max_length: int = 77) -> Tokenizer:
        """Load a tokenizer as `AutoTokenizer.from_pretrained` does.

        Args:
            name: a folder; `clip`, or one of OpenAI's CLIP models, for the tokenizer that ships with mmdata; or another
                name on the Hugging Face hub.
            max_length: in tokens, special ones included.

        Raises:
            ConfigError: the tokenizer cannot be loaded, or has no fast (Rust) version; or the hub cannot be reached.
        """
        found = locate_tokenizer(name)
        if plain := _plain_backend(Path(found)):
            return cls(**plain, max_length=max_length, name=str(name))
        tokenizer = _from_transformers(found, name)
        if not tokenizer.is_fast:
            raise ConfigError(f"tokenizer '{name}': has no fast version; mmdata needs one with a tokenizer.json")
        pad_id = next((i for i in (tokenizer.pad_token_id, tokenizer.eos_token_id) if i is not None), 0)
        options: dict[str, Any] = {"name": str(name), "cleaning": tokenizer.init_kwargs.get(CLEANING)}
        return cls(tokenizer.backend_tokenizer, max_length=max_length, pad_id=int(pad_id), **options)

    @property
    def identity(self) -> str:
        """Equal for tokenizers that give equal ids and pad with the same id."""
        return f"{self.fingerprint}-{self.pad_id}"

    def to_json(self) -> str:
        """The content of tokenizer.json, without truncation, padding and `cleaning`."""
        return self._backend.to_str()

    def count(self, captions: Sequence[str]) -> list[int]:
        """Tokens of each caption, special ones included, untruncated."""
        return [len(encoding) for encoding in self._encoded(captions)]

    def encode(self, captions: Sequence[str], length: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Encode captions into rows of one length.

        Args:
            captions: B strings.
            length: L; every caption must fit after truncation to `max_length`.

        Returns:
            input_ids int64 (B, L), padded at the end, and attention_mask int64 (B, L).
        """
        input_ids, attention_mask, num_cut = self.encode_cut(captions, length)
        what = f"{num_cut} captions of more than {length} tokens in a bucket of {length}"
        assert num_cut == 0, f"{what}: the policy must give each row a bucket that holds its caption"
        return input_ids, attention_mask

    def encode_cut(self, texts: Sequence[str], length: int) -> tuple[NDArray[np.int64], NDArray[np.int64], int]:
        """Encode texts of any length as `encode`; those of more than `length` tokens are cut to it.

        Special tokens at the end, such as the one by which CLIP's text tower finds the end of the text, are kept.

        Args:
            texts: B strings.
            length: L, at least as many as the tokenizer's special tokens.

        Returns:
            input_ids and attention_mask, int64 (B, L) each, and how many of the texts were cut.
        """
        input_ids = np.full((len(texts), length), self.pad_id, np.int64)
        attention_mask = np.zeros((len(texts), length), np.int64)
        num_cut = 0
        for row, encoding in enumerate(self._encoded(texts)):
            ids = _cut(encoding, min(length, self.max_length))
            input_ids[row, : len(ids)] = ids
            attention_mask[row, : len(ids)] = 1
            num_cut += min(len(encoding), self.max_length) > length
        return input_ids, attention_mask, num_cut

    def _encoded(self, texts: Sequence[str]) -> list[tokenizers.Encoding]:
        """The tokens of each text, special ones included, untruncated."""
        if self.cleaning is not None:
            # Twice, as web pages hold "&amp;amp;". A Greek final s is missed by lower-casing letter by letter.
            texts = [(html.unescape(html.unescape(text)) if "&" in text else text).lower() for text in texts]
        return self._backend.encode_batch_fast(list(texts))


def _cut(encoding: tokenizers.Encoding, length: int) -> list[int]:
    """The tokens of a text, at most `length`: the first ones, and the special tokens at the end."""
    ids: list[int] = encoding.ids
    if len(ids) <= length:
        return ids
    # 1 for tokens that the tokenizer adds, 0 for those of the text, also where the text spells a special token.
    mask: list[int] = encoding.special_tokens_mask
    begin = len(ids)  # of the special tokens at the end
    while begin and mask[begin - 1]:
        begin -= 1
    return ids[: length - (len(ids) - begin)] + ids[begin:]


def locate_tokenizer(name: str | os.PathLike[str]) -> str:
    """What `AutoTokenizer.from_pretrained` can load: the path of a folder, or a name on the hub that is worth asking.

    Raises:
        ConfigError: the name is that of a folder that does not exist; or the hub is needed and cannot be reached.

    Example:
        locate_tokenizer("clip") == str(CLIP)
    """
    text = os.fspath(name)
    if Path(text).exists():
        return text
    if text in CLIP_NAMES:
        return str(CLIP)
    if why := _why_a_folder(name):
        raise ConfigError(f"tokenizer '{text}': no such folder ({why}); {REMEDY}")
    if not _is_in_cache(text):
        _check_hub(text)
    return text


def _why_a_folder(name: str | os.PathLike[str]) -> str:
    """Why a name cannot be one of the hub; "" if it can."""
    text = os.fspath(name)
    if not isinstance(name, str):
        return "it is a path"
    if not _HUB_NAME.fullmatch(text):
        return "names on the Hugging Face hub are NAME or OWNER/NAME"
    parent = Path(text).parent
    if parent != Path() and parent.is_dir():
        return f"the folder '{parent}' exists, so the Hugging Face hub was not asked"
    return ""


def _is_in_cache(name: str) -> bool:
    """Whether the hub's cache on this machine has the tokenizer's settings."""
    from huggingface_hub import try_to_load_from_cache

    files = ("tokenizer_config.json", "tokenizer.json", "config.json")
    return any(isinstance(try_to_load_from_cache(name, file), str) for file in files)


def _check_hub(name: str) -> None:
    """Raise a ConfigError if the hub does not answer within `HUB_TIMEOUT_S`."""
    from huggingface_hub import constants
    from huggingface_hub.utils import get_session

    try:
        get_session().head(constants.ENDPOINT, timeout=HUB_TIMEOUT_S)
    except Exception as error:  # the client's errors depend on its version; HF_HUB_OFFLINE is one
        raise ConfigError(
            f"tokenizer '{name}': no such folder, and the Hugging Face hub cannot be asked ({type(error).__name__}: "
            f"{error}); if a folder was meant, check its path; if the hub, connect to it once, and its files stay in "
            f"the cache. Else {REMEDY}"
        ) from error


def save_tokenizer(name: str | os.PathLike[str], folder: str | os.PathLike[str]) -> None:
    """Copy a tokenizer, and nothing else that lies with it, such as a model's weights.

    Args:
        name: as for `Tokenizer.load`.
        folder: created if it does not exist; `Tokenizer.load` and `AutoTokenizer.from_pretrained` load it.

    Raises:
        ConfigError: see `Tokenizer.load`.
        OSError: the disk is full or read-only.
    """
    found = locate_tokenizer(name)
    Path(folder).mkdir(parents=True, exist_ok=True)
    if _plain_backend(Path(found)):
        for file in PLAIN_FILES:
            shutil.copyfile(Path(found) / file, Path(folder) / file)
        return
    _from_transformers(found, name).save_pretrained(str(folder))


def load_tokenizer(data: TextsConfig) -> Tokenizer | None:
    """The tokenizer of a section `data`; None if it names none, and batches have no texts.

    Raises:
        ConfigError: see `Tokenizer.load`.
    """
    return None if data.tokenizer is None else Tokenizer.load(data.tokenizer, max_length=data.max_length)


def need_tokenizer(data: DataConfig, *, to: str) -> Tokenizer:
    """The tokenizer of a section `data`; `to` says what needs it, as in "train a dual encoder".

    Raises:
        ConfigError: the section names no tokenizer; or see `Tokenizer.load`.
    """
    if (tokenizer := load_tokenizer(data)) is None:
        raise ConfigError(f"data.tokenizer is not set, and to {to} captions must be tokenized: {REMEDY}")
    return tokenizer


def _from_transformers(found: str, name: str | os.PathLike[str]) -> Any:
    """A tokenizer as transformers loads it; `name` is for messages."""
    # transformers takes a second and 26 MB to import, so it is imported only if it is needed.
    from transformers import AutoTokenizer

    if not Path(found).exists():
        logger.warning("tokenizer '%s': no such folder here; asking the Hugging Face hub", name)
    try:
        tokenizer = AutoTokenizer.from_pretrained(found)
    except Exception as error:  # transformers checks little: a broken folder may raise a KeyError or anything else
        first_line = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ConfigError(f"tokenizer '{name}': cannot be loaded ({first_line}); {REMEDY}") from error
    # Of a folder that holds a model only, transformers makes a tokenizer that knows no word: all captions look alike.
    if set(tokenizer.get_vocab()) <= set(tokenizer.all_special_tokens):
        raise ConfigError(
            f"tokenizer '{name}': it has special tokens only, as transformers makes it of a folder with a model and no "
            "tokenizer files; save the model's tokenizer into the folder too, or give another one, such as `clip`"
        )
    return tokenizer


PLAIN_FILES = {"tokenizer.json", "tokenizer_config.json"}
PLAIN_CLASS = "PreTrainedTokenizerFast"
"""The files of a folder that `train_tokenizer` makes, and their class."""
SPECIAL = {"pad_token": "<pad>", "eos_token": "<end>", "bos_token": "<start>"}
"""The special tokens of a tokenizer that is trained here, by number. CLIPModel would not look for an `<end>` of 2."""


def _plain_backend(folder: Path) -> dict[str, Any] | None:
    """Arguments of `Tokenizer` for CLIP's folder, or one that `train_tokenizer` has made; None for any other.

    transformers would load the same: nothing else in the folder adds a token or an option. All other folders, broken
    ones too, are left to transformers.
    """
    try:
        if {path.name for path in folder.iterdir()} != PLAIN_FILES:
            return None
        config: Any = json.loads((folder / "tokenizer_config.json").read_text("utf-8"))
        is_own = config.keys() == {"tokenizer_class", "model_max_length", *SPECIAL}
        if folder != CLIP and not (is_own and config["tokenizer_class"] == PLAIN_CLASS):
            return None
        backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        special = {token.content: id for id, token in backend.get_added_tokens_decoder().items() if token.special}
        ids = {key: special[config[key]] for key in SPECIAL}
    except Exception:  # transformers loads the folder next, and says what is wrong with it
        return None
    if backend.num_special_tokens_to_add(False) == 0:  # then transformers adds none either
        return None
    return {"backend": backend, "pad_id": ids["pad_token"], "cleaning": config.get(CLEANING)}


def train_tokenizer(
    captions: Iterable[str], folder: str | os.PathLike[str], *, vocab_size: int = 8192, max_length: int = 77
) -> None:
    """Train a byte-level BPE on captions and save it as a folder that `AutoTokenizer.from_pretrained` loads.

    Text is lower-cased and NFC-normalised, as CLIP's is; every string can be encoded.

    Args:
        captions: the corpus, read once.
        folder: created if it does not exist.
        vocab_size: largest number of entries, with the 256 bytes and three special tokens.
        max_length: the model's text length in tokens, written into the folder.
    """
    if vocab_size < 300:
        raise ConfigError(f"a byte-level vocabulary needs at least 300 entries: got {vocab_size}")
    tokens: list[Any] = list(SPECIAL.values())
    backend = ByteLevelBPETokenizer(add_prefix_space=True, lowercase=True, unicode_normalizer="nfc")
    backend.train_from_iterator(iter(captions), vocab_size, min_frequency=0, show_progress=False, special_tokens=tokens)
    backend.post_processor = TemplateProcessing(
        single="<start> $A <end>", special_tokens=[(token, backend.token_to_id(token)) for token in tokens[1:]]
    )
    config = {"tokenizer_class": PLAIN_CLASS, "model_max_length": max_length, **SPECIAL}
    Path(folder).mkdir(parents=True, exist_ok=True)
    write_whole(Path(folder) / "tokenizer.json", backend.to_str(pretty=True).encode())
    write_whole(Path(folder) / "tokenizer_config.json", json.dumps(config, indent=2).encode() + b"\n")
