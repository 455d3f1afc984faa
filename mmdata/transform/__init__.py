"""CPU work on a sample: bytes to pixels, captions to token ids. What a row becomes depends on (row, epoch, seed) alone.

- `pixels` takes a row's encoded image to its place in a batch: `PixelTransform` decodes, crops, resizes and augments.
- `image` decodes and crops; JPEG goes through libjpeg-turbo, other formats through `pillow` (and `libtiff`'s errors).
- `augment` changes flip and colours; `patches` cuts images into patches at their own aspect ratio (NaFlex).
- `user` runs a user's transform in the place of crop and augmentation, under the row's own random numbers.
- `text_transform` makes a caption the text that is tokenized: a user's function, under the row's own random numbers.
- `text` is the tokenizer. Nothing in this package knows batches or workers: each call has one image, or some captions.
"""
