"""Which captions a row has, and how they become tokens."""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from mmdata.config.settings import BelowOne, Location, OwnFunction, Positive, Settings, Share, Template


class TextsConfig(Settings):
    """Which captions a row has, and how they become tokens."""

    tokenizer: Location | None = None
    """Tokenizer of the captions: a folder that transformers' `AutoTokenizer.from_pretrained` loads, a name on the
    Hugging Face hub, or clip: CLIP's, which comes with mmdata. null: batches have no texts (no input_ids and
    attention_mask), for corpora of images and labels."""
    max_length: Positive = 77
    """Longest text in tokens; longer captions are truncated. 77 is the length of CLIP's text tower."""
    text_buckets: Positive | Annotated[list[Positive], Field(min_length=1)] = 8
    """Text lengths of batches, in tokens: a caption is padded to the smallest length that holds it. A number: choose up
    to so many lengths for the least padding; more lengths pad less and give more batch shapes. A list must rise and end
    with `max_length`."""
    caption_template: Template | None = None
    """A prompt around each caption, such as "a photo of {}", with {} where the caption stands; evaluations have it too.
    The index must have counted the captions in it (`mmdata index --caption-template`), else they are counted at each
    start. null: the captions alone."""
    caption_dropout: BelowOne = 0.0
    """Probability that a row has an empty caption, for classifier-free guidance; each row draws anew in each epoch. An
    empty caption has no template, and goes through no `text_transform`. Evaluations do without it."""
    text_transform: OwnFunction | None = None
    """A function of your own that changes captions before they are tokenized, as "module:callable"; in Python also the
    callable itself. It is called with a caption (in its template) and the row's own random.Random, and returns the
    text. Evaluations do without it. null: the captions as they are."""
    captions: Literal["one", "every"] | Annotated[dict[str, Share], Field(min_length=1)] = "one"
    """one: a row comes once an epoch with one of its captions, in turn from epoch to epoch. every: it comes once with
    each of its captions, never two of them in one batch. Or sources and their probabilities, from which each row draws
    in each epoch: {shards: 0.3, "join:recaption": 0.7} for the captions in the shards and a column of a joined
    table."""
    negative_captions: Location | None = None
    """Parquet file with the columns key and captions: wrong captions of images, as hard negatives (NegCLIP). Each batch
    then has one of them for each row. null: none."""

    @field_validator("captions")
    @classmethod
    def _sum_to_one(cls, captions: str | dict[str, float]) -> str | dict[str, float]:
        if isinstance(captions, dict) and abs((total := math.fsum(captions.values())) - 1) > 1e-6:
            raise ValueError(f"the probabilities of the sources must sum to 1: got {total:g}")
        return captions

    @model_validator(mode="after")
    def _check_texts(self) -> TextsConfig:
        if isinstance(self.text_buckets, list):
            if sorted(set(self.text_buckets)) != self.text_buckets:
                raise ValueError(f"text_buckets must rise: got {self.text_buckets}")
            if self.text_buckets[-1] != self.max_length:
                raise ValueError(
                    f"the last of text_buckets must be max_length ({self.max_length}): got {self.text_buckets[-1]}"
                )
        if self.tokenizer is None:
            of_texts = {
                "text_buckets": isinstance(self.text_buckets, list),
                "negative_captions": self.negative_captions is not None,
            }
            if given := [name for name, is_given in of_texts.items() if is_given]:
                raise ValueError(
                    f"tokenizer is missing, and without it batches have no texts, which {' and '.join(given)} are "
                    "about: give data.tokenizer, or leave them out"
                )
        return self
