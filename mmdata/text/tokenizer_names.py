"""What the name of a tokenizer means: a folder, CLIP's tokenizer, which ships with mmdata, or a name on the hub.

The hub is asked only for a name that can be one of its own, and only if it answers within seconds.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from mmdata.errors import ConfigError

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

    why = "HF_HUB_OFFLINE is set"
    if not constants.HF_HUB_OFFLINE:
        try:
            get_session().head(constants.ENDPOINT, timeout=HUB_TIMEOUT_S)
            return
        except Exception as error:  # the client's errors depend on its version
            why = f"{type(error).__name__}: {error}"
    raise ConfigError(
        f"tokenizer '{name}': no such folder, and the Hugging Face hub cannot be asked ({why}); if a folder was meant, "
        f"check its path; if the hub, connect to it once, and its files stay in the cache. Else {REMEDY}"
    )
