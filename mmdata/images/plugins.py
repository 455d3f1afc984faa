"""Pillow's decoder of each format, some of which are in packages of their own. They are imported when first needed."""

from __future__ import annotations

import importlib
from functools import cache
from typing import NamedTuple

from PIL import ImageFile, features
from PIL.AvifImagePlugin import AvifImageFile
from PIL.BmpImagePlugin import BmpImageFile
from PIL.GifImagePlugin import GifImageFile
from PIL.JpegImagePlugin import JpegImageFile
from PIL.PngImagePlugin import PngImageFile
from PIL.TiffImagePlugin import TiffImageFile
from PIL.WebPImagePlugin import WebPImageFile

# The plugin classes instead of Image.open: `Limits` replaces Pillow's limit, and no other format can be opened.
PLUGINS: dict[str, type[ImageFile.ImageFile]] = {
    "JPEG": JpegImageFile,
    "PNG": PngImageFile,
    "WEBP": WebPImageFile,
    "GIF": GifImageFile,
    "BMP": BmpImageFile,
    "TIFF": TiffImageFile,
    "AVIF": AvifImageFile,
}


class _Package(NamedTuple):
    """A package with a decoder: the module and its class, the package, and the extra of mmdata that installs it."""

    module: str
    plugin: str
    name: str
    extra: str


PACKAGES = {
    "HEIF": _Package("pillow_heif", "HeifImageFile", "pillow-heif", "heic"),
    "JXL": _Package("pillow_jxl.JpegXLImagePlugin", "JXLImageFile", "pillow-jxl-plugin", "jxl"),
}
"""Decoders that are no part of Pillow."""


def decoder(format: str) -> type[ImageFile.ImageFile] | None:
    """The plugin that decodes a format, or None if it is not installed."""
    if format in PACKAGES:
        return _imported(format)
    return None if format == "AVIF" and not features.check("avif") else PLUGINS[format]


def remedy(format: str) -> str:
    """What to install to decode a format."""
    if format in PACKAGES:
        package = PACKAGES[format]
        return f"needs {package.name}: `pip install 'mmdata[{package.extra}]'`"
    return "needs a Pillow with its codec: `pip install -U pillow`"


@cache
def _imported(format: str) -> type[ImageFile.ImageFile] | None:
    package = PACKAGES[format]
    try:
        return getattr(importlib.import_module(package.module), package.plugin)
    except ImportError:  # also of a library that it needs
        return None
