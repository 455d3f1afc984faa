"""Settings of the section model: the towers and the space they meet in."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from mmdata.config.settings import NOT_BOOLEAN, BelowOne, Location, MayChange, Positive, Settings


class LoraConfig(Settings):
    """LoRA: small matrices beside linear layers of the towers learn in place of the towers' own weights."""

    r: Positive = 8
    """Rank of the matrices."""
    alpha: Annotated[float, Field(gt=0.0), NOT_BOOLEAN] = 16.0
    """Their product counts alpha / r times."""
    match: Annotated[list[str], Field(min_length=1)] | None = None
    """Which linear layers get them: names of modules, in which * stands for any text, such as "text_tower.*.fc1" or
    "*.blocks.11.*"; a tower in which none match is frozen. null: those that make queries, keys and values."""
    dropout: BelowOne = 0.0
    """Share of their inputs that are dropped in training."""


class ModelConfig(Settings):
    """The towers, and how their features are compared."""

    name: Literal["micro", "tiny", "small", "base", "vit_b_32", "vit_b_16", "vit_l_14", "pretrained"] = "tiny"
    """Which towers. micro, tiny, small and base: this library's own, for any image shape and text length. vit_b_32,
    vit_b_16 and vit_l_14: CLIP's, of open_clip's sizes, for texts of at most 77 tokens. pretrained: those that `clip`,
    or `vision` and `text`, name (transformers), or `open_clip`."""
    clip: str | dict[str, Any] | None = None
    """A whole CLIP, SigLIP or SigLIP 2 model, with `name: pretrained`: a folder, a name on the Hugging Face hub, or a
    config {model_type: clip, …} for random weights."""
    vision: str | dict[str, Any] | None = None
    """The image tower, with `name: pretrained`, if not `clip`: a folder or name of any image model that transformers'
    AutoModel loads, or a config with a model_type for random weights."""
    text: str | dict[str, Any] | None = None
    """The text tower, with `name: pretrained`, if not `clip`: a folder, a name or a config, as for `vision`."""
    open_clip: Location | None = None
    """Weights of an open_clip model with CLIP's architecture, such as ViT-B-32, in place of `clip`: a folder with
    open_clip_config.json, or a file of weights (.safetensors, .pt, also a checkpoint of its training). `name` is then
    pretrained. Set data.tokenizer to clip, unless the folder has a tokenizer of its own."""
    quick_gelu: bool | None = None
    """Whether the activation of the weights in `open_clip` is QuickGELU, as in OpenAI's and in models whose name ends
    in -quickgelu, or else GELU. A file alone does not say it. null: as open_clip_config.json says."""
    init_from: Location | None = None
    """Weights to begin with: a run, or one of its checkpoints, of the architecture that these settings name; the
    averaged ones, if it has them (`train.ema`). The run begins at step 0. A CLIP or SigLIP of transformers, such as an
    exported folder, goes to `clip`."""
    embed_dim: Positive | None = None
    """Length of the image and text features that are compared. null: that of the built-in size, or 512 with `vision`
    and `text`; `clip` has its own."""
    freeze: list[Literal["image", "text", "logit_scale"]] = Field(default_factory=list)
    """Parts whose weights stay as they are. image, text: that tower, which runs in eval mode; a new projection above it
    is still trained (LiT). logit_scale: the factor of the similarities stays at `logit_scale_init`, as a fixed
    temperature."""
    lora: LoraConfig | None = None
    """LoRA with peft: of the towers only small matrices are trained. The scale, the bias and new projections above the
    towers are trained as without it. A tower in `freeze` gets no matrices. `mmdata.load_run` and exports have them
    merged into the weights. null: all weights are trained."""
    gradient_checkpointing: MayChange[bool] = False
    """Computes activations again in the backward pass instead of keeping them: less memory, about a third more time."""
    dropout: BelowOne = 0.0
    """Share of activations that are dropped in training, in micro, tiny, small and base; the towers of transformers
    have theirs in their config."""
    patch_dropout: BelowOne = 0.0
    """Share of the patches that training leaves out of each image, at random (FLIP); 0.5 makes a step of the image
    tower about twice as fast. Evaluation sees all patches. mmdata's own image towers have it, and those of CLIP, SigLIP
    and SigLIP 2."""
    logit_scale_init: Annotated[float, Field(gt=0.0, le=100.0), NOT_BOOLEAN] | None = None
    """Factor of the cosine similarities at the start of training (1 / temperature); it is learned. It overrides that of
    `init_from`'s weights. null: that of those weights or of the pretrained model, otherwise 1 / 0.07 as in CLIP."""
    logit_bias_init: Annotated[float, NOT_BOOLEAN] | None = None
    """Bias of the logits at the start of training; it is learned, and the loss siglip needs it (-10 in the paper).
    null: that of the pretrained model, otherwise no bias."""

    @model_validator(mode="before")
    @classmethod
    def _name(cls, content: Any) -> Any:
        if isinstance(content, dict) and content.get("open_clip") is not None:
            return {"name": "pretrained", **content}
        return content

    @model_validator(mode="after")
    def _check(self) -> ModelConfig:
        pair = (self.vision, self.text)
        if self.name != "pretrained" and ((self.clip, self.open_clip) != (None, None) or pair != (None, None)):
            raise ValueError(f"name '{self.name}' is built in: clip, vision, text and open_clip need name 'pretrained'")
        if self.quick_gelu is not None and self.open_clip is None:
            raise ValueError("quick_gelu is for open_clip; other models have their activation in their config")
        if self.dropout and self.name not in ("micro", "tiny", "small", "base"):
            raise ValueError(f"dropout is for micro, tiny, small and base, and name is '{self.name}': leave it out")
        if self.patch_dropout and "image" in self.freeze:
            raise ValueError(f"patch_dropout {self.patch_dropout}: a frozen image tower drops no patches; leave it out")
        if self.lora is not None and {"image", "text"} <= {*self.freeze}:
            raise ValueError("lora: a frozen tower gets no adapters, and both are in freeze; leave one of them out")
        if self.name != "pretrained":
            return self
        given = [self.clip is not None, self.open_clip is not None, pair != (None, None)]
        if sum(given) != 1 or (given[2] and None in pair):
            both = f"; model.clip={self.init_from} takes the towers from there, too" if self.init_from else ""
            ways = "either model.clip, or both model.vision and model.text, or model.open_clip"
            raise ValueError(f"name 'pretrained': give {ways}{both}")
        if pair == (None, None) and self.embed_dim is not None:
            raise ValueError("embed_dim: the model in model.clip or model.open_clip brings its own; leave it out")
        return self
