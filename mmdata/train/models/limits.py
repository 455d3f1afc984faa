"""Which shapes a model takes, before it is built: built-in towers by their names. Others say it once they are built."""

from __future__ import annotations

from mmdata.config import DataConfig, ModelConfig
from mmdata.config.images import ImagesConfig
from mmdata.train.models.clip_sizes import CLIP_SIZES, TEXT_POSITIONS
from mmdata.train.models.towers import PRESETS


def shape_problems(model: ModelConfig, data: DataConfig) -> list[str]:
    """What a section `data` asks for and built-in towers do not take, one message each."""
    if model.name == "pretrained":
        return []
    is_clip = model.name in CLIP_SIZES
    patch_size = CLIP_SIZES[model.name]["vision_config"]["patch_size"] if is_clip else PRESETS[model.name].patch_size
    problems = [image_problem(patch_size, data)]
    # With a number of text_buckets the longest caption decides, which the plan knows: see `length_problem`.
    if is_clip and isinstance(data.text_buckets, list):
        problems.append(length_problem(data.text_buckets[-1], TEXT_POSITIONS))
    return [problem for problem in problems if problem]


def length_problem(longest: int, positions: int | None) -> str:
    """A message if texts of `longest` tokens are too long for a text tower, else ""."""
    if positions is None or longest <= positions:
        return ""
    return (
        f"data.max_length: texts of up to {longest} tokens are longer than the {positions} positions of the text "
        f"tower; set data.max_length={positions}"
    )


def image_problem(patch_size: int | None, data: ImagesConfig, *, takes_patches: bool = False) -> str:
    """A message if an image tower does not take the images that settings ask for, else "".

    Args:
        patch_size: of the tower; None: it takes images of any size.
        data: settings of the images.
        takes_patches: whether the tower takes patches, besides whole images.
    """
    if data.image_patches is not None and takes_patches:
        if data.patch_size == patch_size:
            return ""
        return (
            f"data.patch_size {data.patch_size}: the model's patches are {patch_size} pixels wide; set "
            f"data.patch_size={patch_size}"
        )
    if data.image_patches is not None:
        return (
            "data.image_patches: the image tower takes whole images: set data.image_size or data.image_buckets in its "
            "place, or choose a SigLIP 2 NaFlex model (model_type siglip2)"
        )
    if patch_size is None:
        return ""
    if isinstance(data.image_buckets, list):
        wrong = [list(shape) for shape in data.image_buckets if any(side % patch_size for side in shape)]
        if not wrong:
            return ""
        return f"data.image_buckets {wrong}: sides must be multiples of the model's patch size {patch_size}"
    # Sides that image_buckets chooses by itself are multiples of data.patch_size.
    key = "image_size" if data.image_buckets is None else "patch_size"
    side = getattr(data, key)
    near = max(1, round(side / patch_size)) * patch_size
    if side % patch_size == 0:
        return ""
    return f"data.{key} {side}: not a multiple of the model's patch size {patch_size}; set data.{key}={near}"
