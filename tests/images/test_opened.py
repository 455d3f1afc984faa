from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import Image

from mmdata.errors import BadSample
from mmdata.images.decode import decode
from mmdata.images.pillow import pixels_of


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "I;16"])
def test_pixels_of_an_opened_image_are_those_of_its_file(mode: str):
    format = "TIFF" if mode == "CMYK" else "PNG"
    levels = np.arange(30 * 40).reshape(30, 40)
    if mode == "I;16":
        image = Image.fromarray((levels * 50).astype(np.uint16))
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


@pytest.mark.parametrize("mode", ["I", "F"])
def test_pixels_of_an_image_whose_white_is_unknown_are_refused(mode: str):
    with pytest.raises(BadSample, match=f"mode {mode} does not say which value is white; convert the image to I;16, L"):
        pixels_of(Image.new(mode, (4, 4), 1))
