"""Built-in towers: a vision and a text transformer in four sizes. They take any image and text shape a bucket has.

Positions are fixed sines and cosines (two-dimensional for images), so no table bounds the height, width or length.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mmdata.train.models.region_pooling import pool_boxes


@dataclass(frozen=True, kw_only=True)
class Preset:
    """A pair of towers.

    Attributes:
        width: features of both transformers.
        depth: blocks of both.
        heads: attention heads of both.
        embed_dim: features D of the common space.
        patch_size: side of a patch in pixels; image sides must be multiples of it.
        stem: channels of the stride-2 convolutions before the transformer; empty: one linear map a patch.
        text_stem: tokens that a convolution before the text transformer looks at; 0: none.
        text_width: features of the text transformer, if it has others; its heads are as wide as those for images.
    """

    width: int
    depth: int
    heads: int
    embed_dim: int
    patch_size: int
    stem: tuple[int, ...] = ()
    text_stem: int = 0
    text_width: int | None = None


class Towers(NamedTuple):
    """What a dual encoder is made of.

    Attributes:
        image: (B, 3, H, W) floats to (B, image_width); see `DualEncoder`.
        image_width: features of the image tower.
        text: (B, L) input_ids and attention_mask to (B, text_width).
        text_width: features of the text tower.
        embed_dim: D of the common space to which both are projected; None: they end in one already.
        pixel_stats: mean and standard deviation of each channel that the image tower expects, on the scale 0 to 1.
        vocab_size: entries of the text tower's vocabulary.
        logit_scale: learned multiplier, where the model has one.
        logit_bias: learned bias, where the model has one.
        has_clips_tokenizer: the vocabulary is that of CLIP's tokenizer.
    """

    image: nn.Module
    image_width: int
    text: nn.Module
    text_width: int
    embed_dim: int | None
    pixel_stats: tuple[tuple[float, ...], tuple[float, ...]]
    vocab_size: int
    logit_scale: float | None = None
    logit_bias: float | None = None
    has_clips_tokenizer: bool = False


PRESETS = {
    "micro": Preset(width=64, depth=1, heads=4, embed_dim=64, patch_size=8, stem=(8, 16, 32), text_stem=5),
    "tiny": Preset(width=128, depth=2, heads=4, embed_dim=128, patch_size=8, stem=(16, 32, 64), text_stem=5),
    "small": Preset(width=384, depth=6, heads=6, embed_dim=256, patch_size=16, stem=(24, 48, 96, 192)),
    "base": Preset(width=768, depth=12, heads=12, embed_dim=512, patch_size=16, text_width=512),
}

# Asked once: torch.compile does not trace the question in every version of torch.
AUTOCAST_DEVICES = [kind for kind in ("cpu", "cuda", "mps", "xpu", "hpu") if torch.amp.is_autocast_available(kind)]
"""Types of devices for which torch has autocast."""


class Attention(nn.Module):
    """Multi-head self-attention, one matrix for queries, keys and values."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        batch, tokens, width = x.shape
        qkv = self.qkv(x).view(batch, tokens, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)  # (B, heads, T, width / heads) each
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, dropout_p=dropout)
        return self.out(mixed.transpose(1, 2).reshape(batch, tokens, width))  # (B, T, width)


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(width, heads, dropout)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x), mask))
        return x + self.dropout(self.mlp(self.mlp_norm(x)))  # (B, T, width)


class Transformer(nn.Module):
    """Blocks and a final norm."""

    def __init__(self, preset: Preset, width: int, dropout: float, gradient_checkpointing: bool) -> None:
        super().__init__()
        heads = width * preset.heads // preset.width
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(preset.depth))
        self.norm = nn.LayerNorm(width)
        self.gradient_checkpointing = gradient_checkpointing
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                # The two maps that write to the residual stream start smaller, so that its variance does not
                # grow with depth (Radford et al. 2019, section 2.3).
                writes = name.endswith(("attention.out.weight", "mlp.2.weight"))
                nn.init.normal_(parameter, std=width**-0.5 * ((2 * preset.depth) ** -0.5 if writes else 1.0))
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        for block in self.blocks:
            if self.gradient_checkpointing and torch.is_grad_enabled():
                x = cast(Tensor, checkpoint(block, x, mask, use_reentrant=False))
            else:
                x = block(x, mask)
        return self.norm(x)  # (B, T, width)


class PatchConv(nn.Conv2d):
    """A convolution whose patches do not overlap: on a GPU one matrix product, for which cuDNN's kernels are slow."""

    @classmethod
    def of(cls, conv: nn.Conv2d) -> PatchConv:
        """The same map with the same parameters, not copies of them."""
        size: Any = conv.kernel_size
        own = cls(conv.in_channels, conv.out_channels, size, stride=size, bias=conv.bias is not None, device="meta")
        own.weight, own.bias = conv.weight, conv.bias
        return own

    @staticmethod
    def can_be(conv: nn.Conv2d) -> bool:
        """Whether a convolution cuts images into patches of several pixels and does nothing else."""
        is_cut = conv.kernel_size == conv.stride and conv.kernel_size != (1, 1)
        return is_cut and conv.padding in ((0, 0), "valid") and (conv.dilation, conv.groups) == ((1, 1), 1)

    def forward(self, input: Tensor) -> Tensor:
        # On a CPU the convolution takes 0.6 to 0.7 of the product's time, forward and backward.
        return patch_product(input, self.weight, self.bias) if input.is_cuda else super().forward(input)


def patch_product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """What conv2d gives for a stride equal to the kernel, (B, width, H / p, W / p), in the memory order of tokens."""
    x = x.to(autocast_dtype(x) or x.dtype)  # before the patches are copied, not after
    rows, columns = weight.shape[2:]
    height, width = x.shape[2] // rows, x.shape[3] // columns
    whole = x[:, :, : height * rows, : width * columns]
    patches = whole.unflatten(3, (width, columns)).unflatten(2, (height, rows))  # (B, 3, h, p, w, p)
    patches = patches.permute(0, 2, 4, 1, 3, 5).flatten(3)  # (B, h, w, 3 * p * p)
    return F.linear(patches, weight.flatten(1), bias).permute(0, 3, 1, 2)


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """The type to which autocast casts x for a product; None: it does not."""
    kind = x.device.type
    if x.dtype != torch.float32 or kind not in AUTOCAST_DEVICES or not torch.is_autocast_enabled(kind):
        return None
    return torch.get_autocast_dtype(kind)


class ImageTower(nn.Module):
    """Vision transformer; the mean over patches is the image.

    A convolutional stem trains faster and steadier than one linear patch map (Xiao et al. 2021, arXiv:2106.14881).

    Attributes:
        width: features of the output.
        patch_size: sides of images must be multiples of it.
        patch_dropout: share of patches that training leaves out; see `drop_patches`.
    """

    takes_boxes = True

    def __init__(
        self, preset: Preset, *, dropout: float = 0.0, patch_dropout: float = 0.0, gradient_checkpointing: bool = False
    ) -> None:
        super().__init__()
        self.width = preset.width
        self.patch_size = preset.patch_size
        self.patch_dropout = patch_dropout
        layers: list[nn.Module] = []
        channels = 3
        for out in preset.stem:
            # One group is each image by itself: a micro-batch gives what the whole batch gives, unlike batch norm.
            layers += [nn.Conv2d(channels, out, 3, stride=2, padding=1, bias=False), nn.GroupNorm(1, out), nn.ReLU()]
            channels = out
        rest = preset.patch_size // 2 ** len(preset.stem)
        self.patches = nn.Sequential(*layers, PatchConv(channels, self.width, rest, stride=rest))
        self.transformer = Transformer(preset, self.width, dropout, gradient_checkpointing)

    def forward(self, pixel_values: Tensor, boxes: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """(B, 3, H, W) normalised floats to (B, width); with boxes (B, M, 4) in pixels also theirs, (B, M, width).

        Raises:
            ValueError: H or W is not a multiple of the patch size.
        """
        height, width = pixel_values.shape[-2:]
        if height % self.patch_size or width % self.patch_size:
            raise ValueError(
                f"images of {height} x {width} pixels: sides must be multiples of the patch size {self.patch_size}; "
                "set data.image_size or data.image_buckets"
            )
        # Channels last: the tokens are then contiguous without a copy.
        grid = self.patches(pixel_values.contiguous(memory_format=torch.channels_last))  # (B, width, H / p, W / p)
        x = grid.flatten(2).transpose(1, 2).contiguous()  # (B, T, width)
        x = x + positions_2d(grid.shape[2], grid.shape[3], self.width, like=x)
        if self.patch_dropout and self.training:
            x = drop_patches(x, self.patch_dropout)  # (B, K, width)
        x = self.transformer(x)
        pooled = x.mean(1)  # (B, width)
        return pooled if boxes is None else (pooled, pool_boxes(x, boxes / self.patch_size, tuple(grid.shape[2:])))


def drop_patches(x: Tensor, share: float, *, prefix: int = 0, valid: Tensor | None = None) -> Tensor:
    """Leave out a random share of each image's patches, as many of each image.

    Args:
        x: (B, prefix + N, width), positions added.
        share: of the N patches that are left out, below 1.
        prefix: tokens before the patches that stay, such as a class token.
        valid: (B, N), which of them are patches; None: all. They come before those that are none.

    Returns:
        (B, prefix + `patches_left(N, share)`, width); the patches in a random order.

    Source: Li et al. 2023, FLIP (arXiv:2212.00794). From equal random numbers the patches are those of open_clip's
    PatchDropout.
    """
    order = torch.randn(x.shape[0], x.shape[1] - prefix, device=x.device)
    if valid is not None:
        order = order.masked_fill(~valid, -math.inf)
    kept = order.topk(patches_left(order.shape[1], share)).indices  # (B, K)
    patches = x[:, prefix:].gather(1, kept[..., None].expand(-1, -1, x.shape[2]))
    return torch.cat([x[:, :prefix], patches], dim=1) if prefix else patches


def patches_left(count: int, share: float) -> int:
    """How many of so many patches stay; at least one."""
    return max(1, int(count * (1 - share)))


class TextTower(nn.Module):
    """Text transformer, bidirectional; the mean over tokens is the text.

    A convolution over neighbouring tokens ties an adjective to its noun from the first steps on; two blocks of
    attention alone need many more samples to find out that word order matters (measured: docs/benchmarks.md).

    Attributes:
        width: features of the output.
    """

    def __init__(
        self, preset: Preset, vocab_size: int, *, dropout: float = 0.0, gradient_checkpointing: bool = False
    ) -> None:
        super().__init__()
        self.width = preset.text_width or preset.width
        self.tokens = nn.Embedding(vocab_size, self.width)
        nn.init.normal_(self.tokens.weight)
        kernel = preset.text_stem
        self.stem = nn.Conv1d(self.width, self.width, kernel, padding=kernel // 2) if kernel else None
        self.transformer = Transformer(preset, self.width, dropout, gradient_checkpointing)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """(B, L) token numbers and mask to (B, width)."""
        first = torch.arange(input_ids.shape[1], device=input_ids.device) == 0  # (L,)
        mask = attention_mask.bool() | first  # (B, L); attention over no token at all would be 0 / 0
        x = self.tokens(input_ids)  # (B, L, width)
        if self.stem is not None:
            # Padding is zeros for the convolution, so that a text's features do not depend on its bucket.
            x = x + F.gelu(self.stem((x * mask[..., None]).transpose(1, 2)).transpose(1, 2))
        x = x + positions_1d(input_ids.shape[1], self.width, like=x)
        x = self.transformer(x, mask[:, None, None, :])
        return masked_mean(x, mask)  # (B, width)


def masked_mean(x: Tensor, mask: Tensor) -> Tensor:
    """Mean of x (B, T, D) over the tokens where mask (B, T) is set: (B, D)."""
    weights = mask[..., None].to(x.dtype)  # (B, T, 1)
    return (x * weights).sum(1) / weights.sum(1).clamp(min=1)


def positions_1d(length: int, width: int, *, like: Tensor) -> Tensor:
    """Sines and cosines of `length` positions, (length, width); dtype and device of `like`.

    Source: Vaswani et al. 2017, section 3.5.
    """
    half = width // 2
    frequencies = torch.exp(torch.arange(half, device=like.device) * (-math.log(10_000.0) / half))
    angles = torch.arange(length, device=like.device)[:, None] * frequencies  # (length, half)
    return torch.cat([angles.sin(), angles.cos()], dim=1).to(like.dtype)


def positions_2d(height: int, width: int, channels: int, *, like: Tensor) -> Tensor:
    """Half of the channels tell the row, half the column: (height * width, channels).

    Source: Beyer et al. 2022 (arXiv:2205.01580).
    """
    rows = positions_1d(height, channels // 2, like=like)  # (height, channels / 2)
    columns = positions_1d(width, channels // 2, like=like)  # (width, channels / 2)
    grid = [rows[:, None].expand(-1, width, -1), columns[None].expand(height, -1, -1)]
    return torch.cat(grid, dim=-1).flatten(0, 1)
