from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import Image

from mmdata.errors import BadSample
from mmdata.images.decode import decode
from mmdata.images.pillow import pixels_of


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "I;16", "F"])
def test_pixels_of_an_opened_image_are_those_of_its_file(mode: str):
    format = "TIFF" if mode in ("CMYK", "F") else "PNG"
    levels = np.arange(30 * 40).reshape(30, 40)
    if mode == "I;16":
        image = Image.fromarray((levels * 50).astype(np.uint16))
    elif mode == "F":
        image = Image.fromarray((levels / levels.max()).astype(np.float32))
    else:
        image = Image.fromarray(np.stack([levels % 256, levels // 5, levels // 9], axis=2).astype(np.uint8))
        if mode in ("LA", "RGBA"):
            image.putalpha(Image.linear_gradient("L").resize(image.size))
        image = image.convert(mode)
    file = io.BytesIO()
    image.save(file, format)
    expected = decode(file.getvalue(), format=format).permute(1, 2, 0).numpy()
    np.testing.assert_array_equal(pixels_of(Image.open(file)), expected)
    np.testing.assert_array_equal(pixels_of(image), expected)


def test_pixels_of_an_image_whose_white_is_unknown_are_refused():
    with pytest.raises(BadSample, match="mode I does not say which value is white; convert the image to I;16, L or"):
        pixels_of(Image.new("I", (4, 4), 300))
    with pytest.raises(BadSample, match="floats from 0 to 255: only from 0"):
        pixels_of(Image.fromarray(np.array([[0.0, 255.0]], np.float32)))
