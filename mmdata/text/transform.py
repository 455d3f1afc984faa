"""From a row's caption to the text that is tokenized, under the row's own random numbers."""

from __future__ import annotations

import inspect
import logging
import random
from collections.abc import Callable
from typing import Any

from mmdata.config import DataConfig
from mmdata.config.settings import name_of
from mmdata.errors import BadSample, ConfigError, Reason, excerpt
from mmdata.images.user import CHECKED_ROWS, imported, source_of, takes
from mmdata.seeding import Purpose, random_raw, uniforms
from mmdata.tars.captions import filled

logger = logging.getLogger("mmdata")


class TextTransform:
    """Makes of a caption the text of its batch; safe to call from many threads, if the user's function itself is.

    A row that draws dropout has no text. The caption of another row is put into the template, and goes through the
    user's function.

    Args:
        function: of the user, (caption, rng) -> text, with the row's own random.Random; or its name,
            "module:attribute". None: captions stay as they are.
        template: with {} where the caption stands; None: the caption alone.
        dropout: probability of an empty text, below 1.
        seed: of the run.

    Raises:
        ConfigError: the name cannot be imported, or the function takes other arguments.

    Example:
        def drop_words(text, rng):
            return " ".join(word for word in text.split() if rng.random() < 0.9)
    """

    def __init__(
        self,
        function: str | Callable[..., Any] | None = None,
        *,
        template: str | None = None,
        dropout: float = 0.0,
        seed: int = 0,
    ) -> None:
        self.template = template
        self._dropout = dropout
        self._seed = seed
        self._name = self._source = self._function = None
        self._rows_to_check = CHECKED_ROWS
        self._has_warned = False
        if function is not None:
            self._name, of = name_of(function), f"text_transform '{name_of(function)}'"
            found = imported(function, of=of, expected="'module:callable', a function (text, rng)")
            if not takes(found, 2):
                expected = "(text, rng), the caption and the row's random.Random"
                raise ConfigError(f"{of}: takes {inspect.signature(found)}; expected {expected}")
            self._function, self._source = found, source_of(function)

    @classmethod
    def from_config(cls, data: DataConfig) -> TextTransform:
        """The transform that a section `data` describes."""
        return cls(data.text_transform, template=data.caption_template, dropout=data.caption_dropout, seed=data.seed)

    def __bool__(self) -> bool:
        """Whether it changes any text."""
        return self.has_function or self.template is not None or self._dropout > 0

    @property
    def has_function(self) -> bool:
        """Whether there is a user's function: then nobody knows how long a text becomes."""
        return self._function is not None

    def identity(self) -> dict[str, Any]:
        """What a row's text depends on besides the row, its epoch and the seed, as JSON."""
        return {
            "text_transform": self._name,
            "text_transform_source": self._source,
            "caption_template": self.template,
            "caption_dropout": self._dropout or None,
        }

    def is_dropped(self, *, number: int, epoch: int) -> bool:
        """Whether a row has an empty text in place of its caption; arguments as of a call."""
        if self._dropout == 0:
            return False
        drawn = uniforms(1, seed=self._seed, epoch=epoch, purpose=Purpose.CAPTION_DROPOUT, position=number)
        return drawn[0] < self._dropout

    def __call__(self, caption: str, *, number: int, epoch: int) -> str:
        """The text of a row.

        Args:
            caption: of the row.
            number: keys the row's random numbers, 0 or more.
            epoch: from 0.

        Raises:
            BadSample: the function raised, or returned something else than a text.
            ConfigError: a second call for the same row gave another text.
        """
        if self.is_dropped(number=number, epoch=epoch):
            return ""
        caption = filled(self.template, caption)
        if self._function is None:
            return caption
        text = self._result(caption, number, epoch)
        # A function that keeps a state, or draws from another generator, breaks resume and world-size independence
        # silently: the first rows are made twice.
        if self._rows_to_check > 0:
            self._rows_to_check -= 1
            if self._result(caption, number, epoch) != text:
                raise ConfigError(
                    f"text_transform '{self._name}': called again with the same caption and generator, it gave another "
                    "text: it keeps a state, or draws from random, numpy or a generator of its own; draw from its "
                    "second argument, a random.Random"
                )
        return text

    def warn_of_cut(self, length: int) -> None:
        """Say, once, that a text was cut to the length of its batch."""
        if self._has_warned:
            return
        self._has_warned = True
        said = (
            f"text_transform '{self._name}': a text was cut to the text length of its batch, which is planned for the "
            "caption as it is in the data; data.text_buckets gives longer ones"
            if self.has_function
            else f"a caption was cut to {length} tokens, the text length of its bucket: give the policy a longer bucket"
        )
        logger.warning("%s, and loader.stats.cut counts those cut", said)

    def _result(self, caption: str, number: int, epoch: int) -> str:
        assert self._function is not None
        raw = random_raw(1, seed=self._seed, epoch=epoch, purpose=Purpose.TEXT_TRANSFORM, position=number)
        try:
            text: Any = self._function(caption, random.Random(int(raw[0])))
        except Exception as error:
            failed = f"{type(error).__name__}: {error}"
            raise BadSample(Reason.TEXT_TRANSFORM_FAILED, failed) from error
        if not isinstance(text, str):
            raise BadSample(Reason.TEXT_TRANSFORM_FAILED, f"returned {type(text).__name__}, not a text")
        try:
            text.encode()
        except UnicodeEncodeError as error:  # the tokenizer would raise for all captions of the batch
            raise BadSample(Reason.TEXT_TRANSFORM_FAILED, f"returned {excerpt(text)}: a lone surrogate") from error
        return text
