"""A run's tokenizer as transformers loads it, and the token at which transformers' CLIPModel reads a text."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

import tokenizers
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from mmdata.errors import ConfigError
from mmdata.text.tokenizer import CLEANING, Tokenizer

LEGACY_EOS = 2
"""CLIPModel with this eos_token_id reads a text at its highest token number, not at this token."""
FREE_ID = 1
"""The number that the end token gets in place of `LEGACY_EOS`; the token that has it gets `LEGACY_EOS`."""


class ExportedTokenizer(NamedTuple):
    """What goes into an exported folder.

    Attributes:
        tokenizer: of transformers.
        end_id: the token that ends each text; None if there is none.
        swapped: whether the tokens `FREE_ID` and `LEGACY_EOS` have changed their numbers.
    """

    tokenizer: PreTrainedTokenizerFast
    end_id: int | None
    swapped: bool


def export_tokenizer(
    tokenizer: Tokenizer,
    *,
    max_length: int,
    pad_id: int,
    move_end: bool = False,
    inputs: Sequence[str] = ("input_ids", "attention_mask"),
) -> ExportedTokenizer:
    """The tokenizer with the numbers that the exported model has.

    Args:
        tokenizer: of the run.
        max_length: texts are cut to this many tokens.
        pad_id: the number that pads texts.
        move_end: the model is a CLIPModel: if the end token has the number 2, it gets another one.
        inputs: what the tokenizer makes of a text.

    Raises:
        ConfigError: its numbers must change, and its kind is not known.
    """
    saved: dict[str, Any] = json.loads(tokenizer.to_json())
    first, last = _ends(tokenizer)
    swapped = move_end and last == LEGACY_EOS
    if swapped:
        _swap_ids(saved)
        first, last, pad_id = first if first is None else _other(first), FREE_ID, _other(pad_id)
    backend = tokenizers.Tokenizer.from_str(json.dumps(saved))
    names = {"pad_token": pad_id, "bos_token": first, "eos_token": last}
    special = {name: backend.id_to_token(number) for name, number in names.items() if number is not None}
    if isinstance(unknown := saved["model"].get("unk_token"), str):
        special["unk_token"] = unknown
    options: dict[str, Any] = {"model_max_length": max_length, "model_input_names": list(inputs), **special}
    if tokenizer.cleaning is not None:  # for mmdata, which may load the folder; transformers ignores it
        options[CLEANING] = tokenizer.cleaning
    exported = PreTrainedTokenizerFast(tokenizer_object=backend, **options)
    return ExportedTokenizer(exported, last, swapped)


def swap_rows(embedding: Tensor) -> Tensor:
    """The rows of a token embedding after `export_tokenizer` has swapped numbers."""
    order = torch.arange(len(embedding))
    order[[FREE_ID, LEGACY_EOS]] = order[[LEGACY_EOS, FREE_ID]]
    return embedding[order]


def _ends(tokenizer: Tokenizer) -> tuple[int | None, int | None]:
    """The numbers with which every text begins and ends; None where texts differ."""
    texts = ["a", "two words"]
    ids, mask = tokenizer.encode(texts, max(tokenizer.count(texts)))
    rows: list[list[int]] = [row[kept.astype(bool)].tolist() for row, kept in zip(ids, mask, strict=True)]
    firsts, lasts = ({row[place] for row in rows} for place in (0, -1))
    return firsts.pop() if len(firsts) == 1 else None, lasts.pop() if len(lasts) == 1 else None


def _other(number: int) -> int:
    """The number that a token has after the exchange."""
    return {FREE_ID: LEGACY_EOS, LEGACY_EOS: FREE_ID}.get(number, number)


def _swap_ids(saved: dict[str, Any]) -> None:
    """Exchange the numbers `FREE_ID` and `LEGACY_EOS` in the content of a tokenizer.json."""
    vocabulary: Any = saved["model"].get("vocab")
    if isinstance(vocabulary, list):  # Unigram: the position is the number
        vocabulary[FREE_ID], vocabulary[LEGACY_EOS] = vocabulary[LEGACY_EOS], vocabulary[FREE_ID]
    elif isinstance(vocabulary, dict):
        by_number = sorted((_other(number), token) for token, number in vocabulary.items())
        saved["model"]["vocab"] = {token: number for number, token in by_number}
    else:
        kind = saved["model"].get("type")
        raise ConfigError(f"the tokenizer is of the kind {kind}, which cannot be exported to transformers' CLIPModel")
    added: dict[int, Any] = {}
    for token in saved["added_tokens"]:
        token["id"] = _other(token["id"])
        added[token["id"]] = token
    saved["added_tokens"] = [added[number] for number in sorted(added)]
    _swap_in_processor(saved["post_processor"])


def _swap_in_processor(processor: dict[str, Any] | None) -> None:
    for part in (processor or {}).get("processors", []):
        _swap_in_processor(part)
    for name in ("sep", "cls"):  # BERT's and RoBERTa's: [token, number]
        if processor and name in processor:
            processor[name][1] = _other(processor[name][1])
    for token in ((processor or {}).get("special_tokens") or {}).values():  # of a template
        token["ids"] = [_other(number) for number in token["ids"]]
