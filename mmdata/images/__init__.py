"""Bytes to pixels. What an image becomes depends on its bytes and on (row, epoch, seed) alone.

- `probe` lists the formats, tells them apart by their first bytes and reads a header; no pixel is decoded.
- `pixels` takes a row's encoded image to its place in a batch: `PixelTransform` decodes, crops, resizes and augments.
- `decode` makes pixels of files: JPEG by libjpeg-turbo, others by `pillow`.
- `crop` chooses and resizes the part of an image that a batch shows, or cuts it into patches (NaFlex).
- `augment` changes flip and colours.
- `user` runs a user's transform in the place of crop and augmentation, under the row's own random numbers.
"""

from mmdata.images.probe import EXTENSIONS, FORMATS, ImageInfo, Limits, probe

__all__ = ["EXTENSIONS", "FORMATS", "ImageInfo", "Limits", "probe"]
