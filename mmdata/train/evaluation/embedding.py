"""Features of a corpus: those of all valid rows, and of all captions of rows that have several."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mmdata.batch import Batch, CaptionBatch
from mmdata.train.batches import Batches, LoaderExtras
from mmdata.train.evaluation.grounding import ground_phrases
from mmdata.train.keys import check_keys
from mmdata.train.losses.pairs import first_features
from mmdata.train.prefetch import copied
from mmdata.train.ranks import collectives
from mmdata.train.ranks.lockstep import Lockstep, gather


@dataclass(frozen=True)
class EvaluatedTexts:
    """The captions of rows that have several.

    Attributes:
        features: float32 (T, D), L2-normalised.
        image: int64 (T,), the row of each caption's image in `Features.image`.
        hashes: int64 (T,), equal for equal captions.
    """

    features: Tensor
    image: Tensor
    hashes: Tensor


@dataclass(frozen=True)
class Features:
    """Features of a corpus: one row for each valid row of the batches, in their order, rank after rank.

    Attributes:
        image: float32 (N, D), L2-normalised.
        text: float32 (N, D), likewise, of the caption that the batch holds of the row; None if the batches have no
            texts (`data.tokenizer` is left out).
        rows: int64 (N,), row numbers in the index.
        labels: int64 (N,), -1 where a row has none; None where the corpus has none.
        ids: int64 (N, 2), image and caption hashes; None where the batches have none.
        captions: all captions of rows that have several; None if no row has, or the loader gives one only.
        grounding: float32 (N, 3), see `ground_phrases`; None where the model or the batches have no regions.
    """

    image: Tensor
    text: Tensor | None
    rows: Tensor
    labels: Tensor | None
    ids: Tensor | None
    captions: EvaluatedTexts | None = None
    grounding: Tensor | None = None

    def first(self, width: int) -> Features:
        """The first `width` numbers of all features, normalised again (`train.matryoshka`)."""
        texts, more = self.text, self.captions
        return replace(
            self,
            image=first_features(self.image, width),
            text=None if texts is None else first_features(texts, width),
            captions=None if more is None else replace(more, features=first_features(more.features, width)),
        )


@torch.compiler.set_stance("force_eager")
@torch.no_grad()
def embed(
    model: nn.Module,
    batches: Iterable[Batch],
    *,
    source: object | None = None,
    autocast_dtype: torch.dtype | None = None,
) -> Features:
    """Features of all valid rows of `batches`; with several ranks, of all ranks' rows, on each of them.

    A million rows of 512 features are 4 GB, images and texts together; twice that while they are put together.

    Args:
        model: as `DualEncoder`, in eval mode; its device is where the batches go and the features stay.
        batches: this rank's, read once, to the end; as many on all ranks, of as many rows.
        source: the loader behind `batches` where something wraps them, such as a progress bar; default: `batches`. A
            `Loader` gives all captions of rows that have several, for which the model needs a method `encode_text` as
            that of `DualEncoder`, and with several ranks it judges the bad rows of all of them.
        autocast_dtype: of the towers; None: as they are.

    Raises:
        ValueError: no batch; keys that are no integers; or rows with several captions, and a model without
            `encode_text`.
        DataError: more rows than `data.loading.max_bad_share` could not be loaded, over all ranks, and on each; or a
            further caption of a row is not the one that was indexed.
        TrainingError: another rank's batches or captions raised an error, or ended early; the message names the rank.
            That rank raises its own error.
    """
    device = next(model.parameters()).device
    source = batches if source is None else source
    extras, group = LoaderExtras.of(source), collectives.cpu_group()
    columns: dict[str, list[Tensor]] = {}
    captions: list[CaptionBatch] = []

    def noted(batch: Batch) -> Batch:
        if extras.all_captions is not None and "input_ids" in batch:
            captions.append(extras.all_captions(batch["rows"][batch["valid"]].cpu().numpy()))
        return batch

    # By map, as the variable of a generator would keep a batch's memory in use.
    for on_cpu, batch in copied(Lockstep(group, ahead=False).batches(map(noted, batches)), device):
        with torch.autocast(device.type, dtype=autocast_dtype, enabled=autocast_dtype is not None):
            features = _features_of(model, batch)
        # Rows that are not valid stay in until the end: to index with a mask, the host waits for the device.
        for name, value in {**features, **_known_of(batch), "valid": batch["valid"].long()}.items():
            columns.setdefault(name, []).append(value)
        del on_cpu, batch  # their memory may be needed for the next ones
    if not columns:
        raise ValueError("no batches to evaluate on: the corpus is empty")
    if group is not None and extras.merge_states is not None and extras.check_rows is not None:
        # Judged only now: a rank that raised for its own rows would leave the others waiting for its features.
        states = gather(cast(Batches, source).state_dict(), group)
        extras.check_rows(extras.merge_states(states))
    batch_size = len(columns["valid"][0])
    valid = torch.cat(columns.pop("valid")).bool()  # (N,), of this rank's rows
    joined = {name: _of_all_ranks(torch.cat(columns.pop(name))[valid], group) for name in list(columns)}
    texts = None
    if captions:
        with torch.autocast(device.type, dtype=autocast_dtype, enabled=autocast_dtype is not None):
            texts = _embed_captions(model, captions, joined["rows"], batch_size, group)
    known = {name: joined.get(name) for name in ("text", "labels", "ids", "grounding")}
    return Features(joined["image"], rows=joined["rows"], captions=texts, **known)


@torch.compiler.set_stance("force_eager")
@torch.no_grad()
def embed_texts(model: nn.Module, chunks: Sequence[Tensor], *, autocast_dtype: torch.dtype | None = None) -> Tensor:
    """Features of texts that all ranks have; the ranks share the work. A collective.

    Args:
        model: with a method `encode_text` as that of `DualEncoder`, in eval mode.
        chunks: the texts of a forward each, one or more: int64 (n, 2, L), token ids and attention masks.
        autocast_dtype: as for `embed`.

    Returns:
        float32 (N, D), L2-normalised, in the order of the texts, on the model's device.
    """
    device, group = next(model.parameters()).device, collectives.cpu_group()
    calls = -(-len(chunks) // collectives.world_size())
    first = calls * collectives.rank()
    with torch.autocast(device.type, dtype=autocast_dtype, enabled=autocast_dtype is not None):
        features = _encode(model, chunks[first : first + calls], calls, device)
    return _of_all_ranks(features, group)


def _features_of(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
    """Features of the images, and of the texts if the batch has some."""
    if "input_ids" in batch:
        output: Any = model(batch)
        features = {"image": output[0].float(), "text": output[1].float()}
        regions = getattr(output, "region_features", None)
        if regions is not None and "boxes_valid" in batch and "box_text_hash" in batch:
            given = (batch["boxes_valid"], batch["box_text_hash"])
            features["grounding"] = ground_phrases(regions, output.phrase_features, *given)
        return features
    encode_image: Any = getattr(model, "encode_image", None)
    if encode_image is None:
        raise ValueError(
            f"the batches have no texts, and {type(model).__name__} has no method encode_image(pixel_values, "
            "pixel_attention_mask, spatial_shapes) for images alone, as DualEncoder has: set data.tokenizer"
        )
    image = encode_image(batch["pixel_values"], batch.get("pixel_attention_mask"), batch.get("spatial_shapes"))
    return {"image": image.float()}


def _known_of(batch: Batch) -> dict[str, Tensor]:
    """Row numbers, and labels and hashes where the batch has them; integers."""
    known = {"rows": batch["rows"]}
    labels, hashes = batch.get("labels"), (batch.get("image_hash"), batch.get("caption_hash"))
    for name, keys in zip(("labels", "image_hash", "caption_hash"), (labels, *hashes), strict=True):
        if keys is not None:
            check_keys(name, keys)
    if labels is not None:
        known["labels"] = labels
    if hashes[0] is not None and hashes[1] is not None:
        known["ids"] = torch.stack([hashes[0], hashes[1]], dim=1)
    return known


def _embed_captions(
    model: nn.Module, captions: list[CaptionBatch], rows: Tensor, batch_size: int, group: dist.ProcessGroup | None
) -> EvaluatedTexts | None:
    """The captions of all ranks; None if no row has several. A collective.

    Args:
        model: as for `embed`.
        captions: of this rank.
        rows: of all ranks.
        batch_size: captions of a forward.
        group: the ranks.
    """
    inputs = (torch.stack([part.input_ids, part.attention_mask], dim=1) for part in captions)
    chunks = [chunk for part in inputs for chunk in part.split(batch_size) if len(chunk)]
    calls = max(gather(len(chunks), group))
    if not calls:
        return None
    features = _encode(model, chunks, calls, rows.device)
    rows_of = torch.cat([part.rows for part in captions]).to(rows.device)
    hashes = torch.cat([part.caption_hash for part in captions]).to(rows.device)
    features, rows_of, hashes = (_of_all_ranks(values, group) for values in (features, rows_of, hashes))
    return EvaluatedTexts(features, _positions(rows, rows_of), hashes)


def _encode(model: nn.Module, chunks: Sequence[Tensor], calls: int, device: torch.device) -> Tensor:
    """Features of this rank's texts; `chunks` as for `embed_texts`.

    All ranks call the model equally often, `calls` times, since each call of a sharded model is a collective.
    """
    encode_text: Any = getattr(model, "encode_text", None)
    if encode_text is None:
        raise ValueError(
            f"there are classes, or rows with several captions, and {type(model).__name__} has no method "
            "encode_text(input_ids, attention_mask) for texts alone, as DualEncoder has: add one, or evaluate on rows "
            "of one caption and without classes"
        )
    padded = [*chunks, *[torch.ones(1, 2, 1, dtype=torch.long)] * (calls - len(chunks))]
    features = torch.cat([encode_text(*chunk.to(device).unbind(dim=1)).float() for chunk in padded])
    return features[: sum(map(len, chunks))]


def _of_all_ranks(values: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """The rows of all ranks in rank order, of which each rank may have another number. A collective."""
    counts = gather(len(values), group)
    padded = values.new_zeros(max(counts), *values.shape[1:])
    padded[: len(values)] = values
    parts = collectives.gather(padded).split([max(counts)] * len(counts))
    return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])


def _positions(rows: Tensor, wanted: Tensor) -> Tensor:
    """The position of each of the wanted row numbers in `rows`."""
    order = rows.argsort(stable=True)
    return order[torch.searchsorted(rows[order], wanted)]
