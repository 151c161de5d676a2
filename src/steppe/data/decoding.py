"""Decode image files to uint8; the header is checked before any pixel is decoded."""

from __future__ import annotations

import io
import warnings

import numpy as np
import torch
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor

from steppe.errors import DataError

MAX_PIXELS = 50_000_000  # a large photograph


def decode(
    raw: bytes, file: str, formats: tuple[str, ...], *, exact_size: tuple[int, int] | None = None, resize: int = 0
) -> Tensor:
    """Decode an image file to RGB.

    Args:
        raw: The file's content.
        file: Its name, for errors.
        formats: The accepted formats, by Pillow's names.
        exact_size: The required (width, height). If None, any size is accepted, and the EXIF orientation is applied.
        resize: The side of the square to scale to; 0 keeps the size.

    Returns:
        The pixels as uint8, (3, height, width).

    Raises:
        DataError: It cannot be decoded, or has the wrong size or too many pixels.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Pillow warns about large images, which are errors here
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
        raise DataError(f"{file} is too large an image ({error}); remove it.") from error
    except Exception as error:  # decoders raise all kinds of errors
        reason = "unknown format or damaged" if isinstance(error, UnidentifiedImageError) else str(error)
        raise DataError(f"{file} cannot be decoded as an image ({reason}); replace or remove it.") from error
    return torch.from_numpy(np.array(pixels)).permute(2, 0, 1)


def _to_eight_bits(image: Image.Image, file: str) -> Image.Image:
    """The image with 8 bits per channel: the upper 8 of 16. Wider pixels have no known scale."""
    if image.mode.startswith("I;16"):
        return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    if image.mode in ("I", "F"):
        raise DataError(f"{file} has pixels of more than 16 bits; convert it to 8 bits per channel.")
    return image


def _check_size(size: tuple[int, int], file: str, exact_size: tuple[int, int] | None) -> None:
    width, height = size
    if exact_size is not None and size != exact_size:
        raise DataError(
            f"{file} has {width} × {height} pixels, expected {exact_size[0]} × {exact_size[1]}; fetch it again."
        )
    if width * height > MAX_PIXELS:
        raise DataError(f"{file} has {width} × {height} pixels, more than {MAX_PIXELS:,}; scale it down or remove it.")
