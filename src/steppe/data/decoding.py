"""Image files, decoded to uint8: the header is checked before any pixel is unpacked."""

from __future__ import annotations

import io
import warnings

import numpy as np
import torch
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor

from steppe.errors import DataError

MAX_PIXELS = 50_000_000  # a large photograph; what unpacks to more is refused before it is unpacked


def decode(
    raw: bytes, file: str, formats: tuple[str, ...], *, exact_size: tuple[int, int] | None = None, resize: int = 0
) -> Tensor:
    """An image file's content as RGB, (3, height, width).

    `exactly` is the (width, height) that the header must announce; `resized` scales to a square of that side, after
    turning the image the way its camera says it should be seen.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Pillow warns of large images, which are refused here
            image: Image.Image = Image.open(io.BytesIO(raw), formats=formats)
            _check_size(image.size, file, exact_size)
            if exact_size is None:
                image = ImageOps.exif_transpose(image)
            pixels = _to_eight_bits(image, file).convert("RGB")
            if resize and pixels.size != (resize, resize):
                pixels = pixels.resize((resize, resize), Image.Resampling.BILINEAR)
    except DataError:
        raise
    except Image.DecompressionBombError as error:
        raise DataError(f"{file} announces too large an image ({error}): remove it.") from error
    except Exception as error:  # decoders raise whatever their format makes them stumble over
        reason = "it is none, or broken" if isinstance(error, UnidentifiedImageError) else str(error)
        raise DataError(f"{file} cannot be decoded as an image ({reason}): replace or remove it.") from error
    return torch.from_numpy(np.array(pixels)).permute(2, 0, 1)


def _to_eight_bits(image: Image.Image, file: str) -> Image.Image:
    """The image with a byte per channel; of sixteen bits the upper eight. Anything wider has no scale of its own."""
    if image.mode.startswith("I;16"):
        return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    if image.mode in ("I", "F"):
        raise DataError(f"{file} has pixels of more than sixteen bits: convert it to eight bits a channel.")
    return image


def _check_size(size: tuple[int, int], file: str, exactly: tuple[int, int] | None) -> None:
    width, height = size
    if exactly is not None and size != exactly:
        raise DataError(f"{file} is of {width} × {height} pixels instead of {exactly[0]} × {exactly[1]}: get it again.")
    if width * height > MAX_PIXELS:
        raise DataError(
            f"{file} is of {width} × {height} pixels, more than {MAX_PIXELS:,}: scale it down or remove it."
        )
