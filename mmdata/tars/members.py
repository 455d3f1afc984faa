"""Which members of a sample are its image, its caption and its label, where they are not the usual ones.

A selector is the extension of a member (`jpg`, `caption.txt`), or the extension of a JSON member with a key in it
(`json:TEXT`, `meta.json:alt`). Of several, the first that a sample can use is taken. Selectors of captions and labels
replace the usual ones, they do not add to them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from mmdata.errors import ConfigError

_SELECTOR = re.compile(r"[^\s:/,]+(:[^:,]+)?")


@dataclass(frozen=True)
class Selector:
    """A member, or a key in a JSON member.

    Attributes:
        extension: lower case, without the first dot.
        key: in the JSON object; "" for the whole member.
    """

    extension: str
    key: str = ""

    @classmethod
    def parse(cls, text: str) -> Selector:
        """Read a selector; raises ConfigError for anything else."""
        if not _SELECTOR.fullmatch(text):
            raise ConfigError(
                f"member '{text}': expected the extension of a member (jpg, caption.txt), or a JSON member and a key "
                "in it (json:TEXT)"
            )
        extension, _, key = text.partition(":")
        return cls(extension.removeprefix(".").lower(), key)

    def __str__(self) -> str:
        return f"{self.extension}:{self.key}" if self.key else self.extension

    @property
    def words(self) -> str:
        """For messages: `.txt`, or `the .json's "TEXT"`."""
        return f'the .{self.extension}\'s "{self.key}"' if self.key else f".{self.extension}"


@dataclass(frozen=True)
class Members:
    """The members of a sample, by selectors; an empty tuple stands for the usual members.

    Example:
        Members.parse(caption="json:TEXT", image="png,jpg")
    """

    image: tuple[Selector, ...] = ()
    caption: tuple[Selector, ...] = ()
    label: tuple[Selector, ...] = ()

    @classmethod
    def parse(cls, *, image: str | None = None, caption: str | None = None, label: str | None = None) -> Members:
        """Read selectors, several separated by commas, the preferred first; None and "" stand for the usual members.

        Raises:
            ConfigError: a text is no selector, an image is said to be in JSON, or captions are said to be in JSON
                members of several extensions, or in a member and in a key of it.
        """
        given = {"image": image, "caption": caption, "label": label}
        found = {
            name: tuple(Selector.parse(one.strip()) for one in (text or "").split(",") if one.strip())
            for name, text in given.items()
        }
        if in_json := [selector for selector in found["image"] if selector.key]:
            raise ConfigError(f"image '{in_json[0]}': an image is a member of its own, not a value in JSON")
        # An index keeps where the member of a row lies, but not its extension: it must be one that tells the keys.
        keyed = {selector.extension for selector in found["caption"] if selector.key}
        if len(keyed) > 1 or keyed & {selector.extension for selector in found["caption"] if not selector.key}:
            raise ConfigError(
                f"captions '{caption}': keys may be named in one JSON member only, and not beside the whole member; "
                "name those of one, such as json:TEXT,json:alt"
            )
        return cls(**found)

    @classmethod
    def from_content(cls, content: Mapping[str, Sequence[str]] | None) -> Members:
        """The inverse of `content`."""
        return cls.parse(**{name: ",".join(selectors) for name, selectors in (content or {}).items()})

    def content(self) -> dict[str, list[str]]:
        """As JSON, without what is not given."""
        given: dict[str, Any] = {name: getattr(self, name) for name in asdict(self)}
        return {name: [str(selector) for selector in selectors] for name, selectors in given.items() if selectors}

    @property
    def caption_keys(self) -> tuple[str, ...]:
        """The JSON keys among the selectors of captions."""
        return tuple(selector.key for selector in self.caption if selector.key)


USUAL = Members()
"""The usual members: see `read_texts` and `image_member`."""

GUESSED_KEYS = ("TEXT", "text", "title", "description", "alt_text", "alt")
"""Keys that hold captions in the JSON of known corpora, such as LAION's "TEXT"."""
GUESSED_EXTENSIONS = ("text", "caption.txt", "caption", "cap")
"""Extensions of known corpora's captions."""


def guess_captions(samples: Sequence[tuple[Sequence[str], Mapping[str, object]]]) -> Members | None:
    """The selector of captions that fits all samples, where exactly one of the known names does; else None.

    Args:
        samples: (extensions of the members, JSON) of some samples without usual captions.

    Example:
        guess_captions([(("jpg", "json"), {"TEXT": "a dog", "url": "…"})]) gives Members.parse(caption="json:TEXT")
    """
    fits = [
        Selector("json", key)
        for key in GUESSED_KEYS
        if samples and all(isinstance(content.get(key), str) and str(content[key]).strip() for _, content in samples)
    ]
    fits += [Selector(ext) for ext in GUESSED_EXTENSIONS if samples and all(ext in found for found, _ in samples)]
    return Members(caption=(fits[0],)) if len(fits) == 1 else None
