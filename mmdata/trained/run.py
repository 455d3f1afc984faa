"""`load_run`: a trained model with all that it takes to use it. Features are those of `mmdata evaluate`."""

from __future__ import annotations

import logging
import os
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from mmdata.config import Config
from mmdata.config.strict_yaml import parse
from mmdata.errors import BadSample, ConfigError, DataError
from mmdata.processes import usable_cores
from mmdata.tars import clean_caption
from mmdata.text.tokenizer import Tokenizer, need_tokenizer
from mmdata.train import DualEncoder
from mmdata.train.accelerator import best_device
from mmdata.train.evaluation.prompts import Classes, read_classes
from mmdata.train.precision import AUTOCAST, Precision, choose_precision, numerics
from mmdata.train.run.checkpoint import find_checkpoint, load_trained, load_weights
from mmdata.trained.carried import kept_classes, kept_model, kept_tokenizer
from mmdata.trained.preprocess import ImageLike, Preprocess, stack

logger = logging.getLogger("mmdata")

OnError = Literal["raise", "zeros"]

TEXTS_AT_ONCE = 256
"""Texts of a forward."""


class ZeroShot(NamedTuple):
    """What `TrainedRun.zero_shot` finds for N images and C classes.

    Attributes:
        probabilities: float32 (N, C), on the CPU. Rows sum to 1, or, for a model with a bias (sigmoid loss), each
            entry is the probability of its own pair.
        labels: N names, the most probable class of each image.
        classes: C names, in the order of the columns.
    """

    probabilities: Tensor
    labels: list[str]
    classes: list[str]


def load_run(
    run: str | os.PathLike[str],
    device: torch.device | str = "auto",
    *,
    precision: Precision | None = "fp32",
    ema: bool | None = None,
) -> TrainedRun:
    """Load a trained model.

    Args:
        run: the folder of a run, of which the newest checkpoint is taken; or one checkpoint.
        device: "auto" (a GPU where there is one, also Apple's), or a device of torch.
        precision: of the towers in `embed_images`, `embed_texts` and `zero_shot`: bf16 and fp16 are faster on a GPU,
            and tf32 somewhat. None: that of the training, with which `mmdata evaluate` works.
        ema: True: the averaged weights (`train.ema`). False: those that were trained. None: the averaged ones where
            the checkpoint has them.

    Raises:
        ValueError: another precision.
        DataError: no run is there, or its checkpoint is damaged; says what was found.
        ConfigError: the weights do not fit the settings, or the tokenizer is another one than the run was trained with;
            or, for a run that keeps no copy of it in RUN/tokenizer, is not where it was; or there are no averaged
            weights, and `ema` is True.

    Example:
        run = mmdata.load_run("runs/photos")
        photos = sorted(Path("photos").glob("*.jpg"))
        similarities = run.embed_texts(["a red bicycle"]) @ run.embed_images(photos).T  # (1, N)
        nearest = [photos[i] for i in similarities[0].topk(5).indices]
    """
    if precision not in (None, *get_args(Precision)):
        raise ValueError(f"precision '{precision}': expected {', '.join(get_args(Precision))}")
    if str(device) == "auto":
        device = best_device()
    path = find_checkpoint(Path(run))
    state = load_trained(path, ema=ema)
    config = parse(Config, state["settings"], origin=f"settings in '{path}'")
    if own_tokenizer := kept_tokenizer(path, state):
        data = config.data.model_copy(update={"tokenizer": own_tokenizer})
        config = config.model_copy(update={"data": data})
    tokenizer = need_tokenizer(config.data, to="use a dual encoder")
    model = kept_model(path, config.model, vocab_size=tokenizer.vocab_size)
    load_weights(model, state, origin=str(path))
    if config.model.lora is not None:
        # Imported here: models without adapters do not need it.
        from mmdata.train.models.lora import merge_adapters

        merge_adapters(model)
    if config.train.regions is not None:
        model.compare_regions()
    return TrainedRun(
        model.to(device).eval(),
        config,
        tokenizer,
        path,
        state["step"],
        state["epoch"],
        precision=precision or choose_precision(config.train.precision, torch.device(device)),
        position=state.get("batches", {}),
        is_average=state["is_average"],
    )


@dataclass(frozen=True, repr=False)
class TrainedRun:
    """A model as a checkpoint has it, and what it takes to use it.

    Attributes:
        model: in eval mode, on its device.
        config: settings of the run; `data.tokenizer` is RUN/tokenizer, if the run keeps its tokenizer.
        tokenizer: of the run.
        checkpoint: its folder.
        step: updates made.
        epoch: of those updates.
        precision: of the towers while this object embeds.
        alpha: share of the run's own weights in `model`: below 1 after `interpolated`.
        mixed_with: fingerprint of the weights of which the rest is; "" without `interpolated`.
        position: the state of the loader, which says what the run was trained on; empty in a checkpoint without one.
        is_average: the weights are the averaged ones (`train.ema`).
    """

    model: DualEncoder
    config: Config
    tokenizer: Tokenizer
    checkpoint: Path
    step: int
    epoch: int
    precision: Precision = field(default="fp32", kw_only=True)
    alpha: float = field(default=1.0, kw_only=True)
    mixed_with: str = field(default="", kw_only=True)
    position: Mapping[str, Any] = field(default_factory=dict, kw_only=True, repr=False)
    is_average: bool = field(default=False, kw_only=True)

    def __repr__(self) -> str:
        return (
            f"TrainedRun('{self.checkpoint}': {self.config.model.name}, epoch {self.epoch}, step {self.step}, "
            f"{self.precision} on {self.device})"
        )

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return self.model.logit_scale.device

    @property
    def autocast_dtype(self) -> torch.dtype | None:
        """Type of the towers' autocast; None: as they are."""
        return AUTOCAST[self.precision]

    def numerics(self) -> AbstractContextManager[None]:
        """Around a `with` block that computes in `precision`: on a GPU products in TF32 unless it is fp32."""
        return numerics(self.precision, self.device)

    @property
    def logit_scale(self) -> float:
        """The learned multiplier of cosine similarities."""
        return min(self.model.logit_scale.exp().item(), self.model.max_logit_scale)

    @property
    def logit_bias(self) -> float | None:
        """The learned bias that is added to them; None in a model without one."""
        return None if self.model.logit_bias is None else self.model.logit_bias.item()

    @cached_property
    def preprocess(self) -> Preprocess:
        """One image to uint8 pixels, as the evaluation does it."""
        return Preprocess.from_config(self.config.data)

    @cached_property
    def class_names(self) -> list[str] | None:
        """Names of the classes of the training corpus, by label, from RUN/classes.json; None where there is none."""
        return kept_classes(self.checkpoint)

    @cached_property
    def embed_dim(self) -> int:
        """Features of an image or a text."""
        return self.embed_texts(["a"]).shape[1]

    def embed_images(self, images: Iterable[ImageLike], *, batch_size: int = 64, on_error: OnError = "raise") -> Tensor:
        """Features of images; a cosine similarity is the product of two of them.

        Args:
            images: N paths, bytes of image files, images of Pillow or uint8 tensors (3, H, W), read once, in order.
                They are decoded on all cores while the model works.
            batch_size: images in a forward.
            on_error: "raise", or "zeros": an image that cannot be read is logged, and its features are zeros, whose
                similarity to everything is 0.

        Returns:
            float32 (N, D), L2-normalised, on the CPU.

        Raises:
            ValueError: there is no image: a pattern that matches no file is the usual reason.
            DataError: an image cannot be decoded; names it.
            OSError: no such file, or it cannot be read.
            TypeError: something is not an image.
        """
        if isinstance(images, str | bytes) or not hasattr(images, "__iter__"):
            raise TypeError(f"embed_images takes a list of images: got {type(images).__name__}; write [image]")
        if batch_size < 1 or on_error not in ("raise", "zeros"):
            raise ValueError(
                f"batch_size is 1 or more, and on_error 'raise' or 'zeros': got {batch_size}, {on_error!r}"
            )
        parts: list[Tensor] = []
        with ThreadPoolExecutor(usable_cores()) as pool:
            try:
                read = (pool.submit(self._read, image, on_error) for image in images)
                ahead = list(islice(read, batch_size))
                while some := ahead:
                    ahead = list(islice(read, batch_size))  # decoded while the model works
                    parts.append(self._embed_pixels([image.result() for image in some]))
            finally:
                pool.shutdown(cancel_futures=True)
        if not parts:
            raise ValueError("embed_images got no image: does the pattern of the paths match any file?")
        return torch.cat(parts)

    def embed_texts(self, texts: Iterable[str]) -> Tensor:
        """Features of texts.

        Args:
            texts: N strings; longer ones are cut to `tokenizer.max_length` tokens.

        Returns:
            float32 (N, D), L2-normalised, on the CPU.

        Raises:
            ValueError: there is no text.
            ConfigError: a text is no valid Unicode.
            TypeError: something is not a string.
        """
        if isinstance(texts, str):
            raise TypeError("embed_texts takes a list of strings: got str; write [text]")
        parts: list[Tensor] = []
        for chunk in tokenized(texts, self.tokenizer):
            with self._computing():
                parts.append(self.model.encode_text(*chunk.to(self.device).unbind(dim=1)).float().cpu())
        if not parts:
            raise ValueError("embed_texts got no text: the list is empty")
        return torch.cat(parts)

    def embed_prompts(self, classes: Classes) -> Tensor:
        """Features (C, T, D) of each class in each template, as of `embed_texts`."""
        return self.embed_texts(classes.prompts).reshape(len(classes.classes), len(classes.templates), -1)

    def zero_shot(
        self,
        images: Iterable[ImageLike] | Tensor,
        classes: Sequence[str] | str | Path | None = None,
        *,
        templates: Sequence[str] | str | None = None,
        batch_size: int = 64,
    ) -> ZeroShot:
        """Classify images by the names of classes.

        Args:
            images: as for `embed_images`; or their features, float (N, D), from it.
            classes: C names; or a JSON file of names and templates, or "imagenet". Default: `class_names`.
            templates: sentences in which {} stands for a name, such as "a photo of a {}."; the features of a class
                are the mean over them. Write them as the captions of the training set are written. "imagenet" are 80.
                Default: those of the file, or the name alone.
            batch_size: images in a forward.

        Raises:
            ValueError: no classes, a template without {}, or no such list of templates.
            DataError: no such file of classes, or it has another format.
        """
        own = ["{}"]
        if isinstance(classes, (str, Path)):
            task = read_classes(classes)
            classes, own = task.classes, task.templates
        names = list(self.class_names or [] if classes is None else classes)
        if not names:
            raise ValueError(
                "zero_shot needs classes: a list of names, such as ['dog', 'cat'], or those in the classes.json of the "
                "run's folder; a checkpoint outside such a folder has none"
            )
        given = {"classes": names, "templates": own if templates is None else templates}
        prompts = self.embed_prompts(Classes.model_validate(given))
        if isinstance(images, Tensor) and images.is_floating_point():
            features = images
        else:
            features = self.embed_images(images, batch_size=batch_size)
        of_classes = torch.nn.functional.normalize(prompts.mean(1), dim=-1)  # (C, D)
        logits = self.logit_scale * features.float().cpu() @ of_classes.T  # (N, C)
        probabilities = logits.softmax(1) if self.logit_bias is None else (logits + self.logit_bias).sigmoid()
        return ZeroShot(probabilities, [names[i] for i in probabilities.argmax(1).tolist()], names)

    @contextmanager
    def _computing(self) -> Generator[None]:
        """Without a graph, in the number format `precision`."""
        dtype = self.autocast_dtype
        autocast = torch.autocast(self.device.type, dtype=dtype, enabled=dtype is not None)
        with torch.no_grad(), self.numerics(), autocast:
            yield

    def _read(self, image: ImageLike, on_error: OnError) -> dict[str, Tensor] | None:
        try:
            return self.preprocess.inputs(image)
        except (DataError, OSError) as error:
            if on_error == "raise":
                raise
            logger.warning("left out, its features are zeros: %s", error)
            return None

    def _embed_pixels(self, images: Sequence[dict[str, Tensor] | None]) -> Tensor:
        """Features of the images of a batch, those of one shape together: (n, D)."""
        by_shape: dict[tuple[int, ...], list[int]] = {}
        for place, image in enumerate(images):
            if image is not None:
                by_shape.setdefault(tuple(image["pixel_values"].shape), []).append(place)
        features = torch.zeros(len(images), self.embed_dim)
        for places in by_shape.values():
            batch = stack([image for place in places if (image := images[place]) is not None])
            with self._computing():
                on_device = {name: value.to(self.device) for name, value in batch.items()}
                features[places] = self.model.encode_image(**on_device).float().cpu()
        return features


def tokenized(texts: Iterable[str], tokenizer: Tokenizer) -> Iterator[Tensor]:
    """The token ids and attention masks of texts, for one forward after the other: int64 (n, 2, L).

    Raises:
        ConfigError: a text is no valid Unicode.
        TypeError: something is not a string.
    """
    cleaned = [_cleaned(text, position) for position, text in enumerate(texts)]
    for start in range(0, len(cleaned), TEXTS_AT_ONCE):
        some = cleaned[start : start + TEXTS_AT_ONCE]
        length = min(max(tokenizer.count(some)), tokenizer.max_length)
        yield torch.stack([torch.from_numpy(x) for x in tokenizer.encode(some, length)], dim=1)


def _cleaned(text: object, position: int) -> str:
    """A text as a converted caption would be: without control characters and outer whitespace."""
    if not isinstance(text, str):
        raise TypeError(f"text {position} is {type(text).__name__}, not a string")
    try:
        return clean_caption(text) if text.strip() else ""
    except BadSample as error:
        raise ConfigError(f"text {position}: {error}") from error
