"""Reads images and videos as upright RGB images, with the same pixels from every source.

The image processors of transformers do not rotate images upright, and some of them keep a palette or an alpha channel.
"""

from __future__ import annotations

import base64
import binascii
import math
import os
import warnings
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeGuard, TypeVar, overload
from urllib.parse import unquote, urlsplit
from urllib.request import url2pathname

import numpy as np
import torch
from huggingface_hub.utils import httpx
from transformers.image_utils import ChannelDimension
from transformers.utils import logging

from ..utils.tensor_checks import type_name
from .image_limits import LIMITS, resized_pixels


if TYPE_CHECKING:
    from PIL.Image import Image
    from transformers.video_utils import VideoMetadata

Picture: TypeAlias = "Image | np.ndarray | torch.Tensor"
Shown = TypeVar("Shown")

logger = logging.get_logger(__name__)

OVERSHOOT = 2.0  # After resizing, values from 0 to 1 may be a little above 1. A larger maximum means values up to 255.
# Formats that Pillow passes to other programs. For example, Ghostscript executes the code in an EPS file.
OTHER_PROGRAMS = ("EPS", "WMF", "EMF", "BUFR", "GRIB", "HDF5")
ORIENTATION = 0x0112  # the EXIF tag of the orientation
TURNS = {2: 0, 3: 3, 4: 1, 5: 5, 6: 4, 7: 6, 8: 2}  # from the orientation in EXIF to `Transpose` of Pillow
ADDRESSES = ("http://", "https://", "data:", "file://")
KINDS = "images (PIL, numpy, torch), URLs, data URLs, base64, paths or the bytes of files"


def is_array(image: object) -> TypeGuard[np.ndarray | torch.Tensor]:
    return isinstance(image, (np.ndarray, torch.Tensor))


def is_pil(image: object) -> TypeGuard[Image]:
    from PIL import Image

    return isinstance(image, Image.Image)


@overload
def read_image(
    image: str | Path | bytes | Image,
    name: str = ...,
    *,
    input_data_format: str | ChannelDimension | None = ...,
    rescale: bool = ...,
) -> Image: ...


@overload
def read_image(
    image: object,
    name: str = ...,
    *,
    input_data_format: str | ChannelDimension | None = ...,
    rescale: bool = ...,
) -> Picture: ...


def read_image(
    image: object,
    name: str = "images",
    *,
    input_data_format: str | ChannelDimension | None = None,
    rescale: bool = True,
) -> Picture:
    """Returns an upright RGB image.

    Transparent areas become white, as in transformers' `convert_to_rgb`.

    Args:
        image: a PIL image, an array or tensor, a path, a URL, a data URL, base64, or the bytes of a file.
        name (`str`): name of the argument in errors.
        input_data_format (*optional*): as in the image processor. Only used for arrays.
        rescale (`bool`): whether the image processor will divide the values by 255.

    Returns:
        An array or tensor `(3, height, width)` for an array or tensor, and a PIL image for anything else.

    Raises:
        TypeError: for an image of any other type.
        ValueError: for a file that is not an image, is broken, or is larger than [`LIMITS`] allow; for an address that
            cannot be loaded; and for an array with a wrong shape or wrong values.
    """
    if isinstance(image, (str, Path, bytes)):
        image = open_image(image, name)
    if is_pil(image):
        _check_size(image, name)
        return _rgb(image, name)
    if is_array(image):
        return _rgb_array(image, name, input_data_format, rescale)
    raise TypeError(f"Expected `{name}` to hold {KINDS}, got {type_name(image)}.")


def read_images(images: list[Any], image_processor: object, kwargs: dict[str, Any]) -> list[Any]:
    """Returns upright RGB images for a call of an image processor with `kwargs`.

    Changes `kwargs`: `return_tensors` is removed, and `input_data_format` is set to that of the returned images.
    """
    kwargs.pop("return_tensors", None)
    if kwargs.get("do_convert_rgb", getattr(image_processor, "do_convert_rgb", None)) is False:
        # The caller passes images in the form that the vision tower reads, so their channels stay.
        pictures = [upright(image) if is_pil(image) or is_array(image) else read_image(image) for image in images]
        _check_resized(list(filter(is_pil, pictures)), image_processor, kwargs)
        return pictures
    rescale = kwargs.get("do_rescale", getattr(image_processor, "do_rescale", True)) is not False
    layout = kwargs.pop("input_data_format", None)
    pictures = [read_image(image, input_data_format=layout, rescale=rescale) for image in images]
    _check_resized(pictures, image_processor, kwargs)
    normalizes = kwargs.get("do_normalize", getattr(image_processor, "do_normalize", True)) is not False
    if kwargs.get("do_rescale") is False and normalizes:
        for image in images:
            _check_unit_range(image)
    if getattr(image_processor, "backend", None) == "pil":
        pictures = [picture.cpu() if isinstance(picture, torch.Tensor) else picture for picture in pictures]
    if pictures and all(is_array(picture) for picture in pictures):
        # Without this, the image processor would guess, and take a height of 3 pixels for 3 channels.
        kwargs["input_data_format"] = "channels_first"
    return pictures


def _check_resized(pictures: list[Any], image_processor: Any, kwargs: dict[str, Any]) -> None:
    """Raises a `ValueError` for an image that is so narrow that the image processor would enlarge it too much."""
    for picture in pictures:
        height, width = picture.shape[-2:] if is_array(picture) else picture.size[::-1]
        pixels = resized_pixels(width, height, image_processor, **kwargs)
        if pixels > LIMITS.max_pixels:
            raise ValueError(
                f"`images` holds an image of {width} x {height} pixels, of which the image processor would make "
                f"{pixels} pixels: expected at most {LIMITS.max_pixels}. Cut it into less narrow pieces, or set a "
                "larger limit with `hf_xattn.IMAGE_LIMITS.max_pixels`."
            )


def upright(image: Shown) -> Shown:
    """Returns the image, rotated as its EXIF data say. Its channels stay.

    Pillow's `exif_transpose` also writes the EXIF data again, which fails if a part of them is broken. A viewer shows
    such an image, so this function reads it, too.
    """
    if not is_pil(image):
        return image
    picture: Any = image
    picture.load()
    try:
        method = TURNS.get(picture.getexif().get(ORIENTATION))
    except Exception:  # Broken EXIF data are ignored. Pillow raises errors of many kinds for them.
        method = None
    if method is None:
        return picture
    turned = picture.transpose(method)
    # Without these data, no later code rotates the image a second time.
    for name in ("exif", "Raw profile type exif", "XML:com.adobe.xmp", "xmp"):
        turned.info.pop(name, None)
    return turned


def _check_unit_range(image: Any) -> None:
    got = f"an array of {image.dtype}" if is_array(image) else type_name(image)
    if is_array(image) and not str(image.dtype).removeprefix("torch.").startswith(("uint", "int", "bool")):
        lowest, highest = (float(image.min()), float(image.max())) if math.prod(image.shape) else (0.0, 1.0)
        if 1 - OVERSHOOT < lowest and highest <= OVERSHOOT:
            return
        got += f" with values from {lowest:g} up to {highest:g}"
    raise ValueError(
        f"Expected floating-point images with values from 0 to 1 for `do_rescale=False`, got {got}. For values up to "
        "255, leave `do_rescale` out. Pass normalised images to the model, as `pixel_values`."
    )


def read_frames(
    video: str | Path | np.ndarray | torch.Tensor | Sequence[Any],
    num_frames: int | None = None,
    fps: float | None = None,
) -> list[Any]:
    """Returns the frames of a video as images.

    Args:
        video: an array or tensor `(frames, height, width, channels)` or `(frames, channels, height, width)`, a list of
            images, or the path or URL of a video file. A file needs a decoder (PyAV).
        num_frames (`int`, *optional*): number of frames to take, evenly spaced. By default, all frames are taken.
        fps (`float`, *optional*): number of frames per second to take. Only for a video file.

    Raises:
        TypeError: for a video of any other type.
        ValueError: for a video without frames or with more than `LIMITS.max_frames`, for a file that is not a video or
            is broken, and for `fps` without a video file.
        ImportError: for a video file if no decoder is installed.
    """
    if num_frames is not None and num_frames < 1:
        raise ValueError(f"`num_frames` must be at least 1, got {num_frames}.")
    if isinstance(video, (str, Path)):
        return _frames_of_file(video, num_frames, fps)
    if fps is not None:
        raise ValueError("`fps` needs a video file, got frames, whose speed is not known. Pass `num_frames` instead.")
    if not isinstance(video, (list, tuple)) and not is_array(video):
        raise TypeError(
            f"Expected each of `videos` to be an array of frames, a list or a file, got {type_name(video)}."
        )
    if is_array(video) and video.ndim != 4:
        raise ValueError(
            "Expected each of `videos` to have 4 axes, (frames, height, width, channels) or (frames, channels, height, "
            f"width), got shape {tuple(video.shape)}."
        )
    if not len(video):
        raise ValueError("Expected each of `videos` to have one frame or more, got a video with no frames.")
    _check_frames(len(video) if num_frames is None else min(num_frames, len(video)))
    if num_frames is None or len(video) <= num_frames:
        return list(video)
    places = np.linspace(0, len(video) - 1, num_frames).tolist()
    return [video[round(place)] for place in places]  # The first and the last frame are among them.


def _frames_of_file(video: str | Path, num_frames: int | None, fps: float | None) -> list[Any]:
    from transformers.video_utils import load_video

    if not str(video).startswith(("http://", "https://")) and not _is_file(str(video)):
        raise ValueError(f"Expected `videos` to hold a video file or a URL, got {_short(video)}, which is neither.")
    if num_frames is not None and fps is not None:
        raise ValueError("`num_frames` and `fps` both choose frames: pass one of them.")
    file: Any = str(video)  # `load_video` accepts a `str`, but its annotation does not say so.
    try:
        frames = load_video(file, sample_indices_fn=lambda metadata, **_: frames_to_read(metadata, num_frames, fps))[0]
        if not len(frames):
            raise ValueError("it has no frames.")
        return list(frames)
    except MemoryError:
        raise
    except ImportError as error:
        raise ImportError(f"Reading the video file {_short(video)} needs a decoder: `pip install av`.") from error
    except Exception as error:  # Decoders raise errors of many kinds for a broken file.
        why = str(error) or type(error).__name__
        raise ValueError(f"`videos` holds {_short(video)}, which cannot be read as a video: {why}") from error


def frames_to_read(metadata: VideoMetadata, num_frames: int | None, fps: float | None) -> np.ndarray:
    """Returns the indices of the frames to read from a video file, evenly spaced. No frame is decoded before."""
    total = metadata.total_num_frames
    rate: Any = metadata.fps  # no number, if the file does not say it
    if total < 1:
        raise ValueError("it has no frames.")
    if fps is not None and not (fps > 0 and rate and rate > 0):
        raise ValueError(
            f"expected `fps` above 0, and a file that says its own frames per second, got {fps} and {rate}."
        )
    number = num_frames or (total if fps is None else max(1, min(total, int(total / rate * fps))))
    if number > total:
        raise ValueError(f"expected `num_frames` of at most {total}, the number of its frames, got {number}.")
    _check_frames(number)
    pixels = (metadata.height or 0) * (metadata.width or 0)
    if pixels > LIMITS.max_pixels or pixels * number > 8 * LIMITS.max_pixels:
        raise ValueError(
            f"{number} frames of {metadata.width} x {metadata.height} pixels are too large: expected at most "
            f"{LIMITS.max_pixels} pixels in one, and 8 times as many in all "
            "(`hf_xattn.IMAGE_LIMITS.max_pixels`). Choose fewer frames with `num_frames`."
        )
    return np.arange(number) * total // number


def _check_frames(number: int) -> None:
    if number > LIMITS.max_frames:
        raise ValueError(
            f"Expected each of `videos` to have at most {LIMITS.max_frames} frames, got {number}. Choose fewer with "
            "`num_frames`, or set a larger limit with `hf_xattn.IMAGE_LIMITS.max_frames`."
        )


def open_image(source: str | Path | bytes, name: str) -> Image:
    """Opens an image from a path, a URL, a data URL, base64 or the bytes of a file. Its pixels are not decoded yet.

    Raises the errors of [`read_image`].
    """
    from PIL import UnidentifiedImageError

    text = "" if isinstance(source, bytes) else str(source)
    try:
        image = _decoder(_file_of(source))
    except (UnidentifiedImageError, binascii.Error, UnicodeError) as error:
        if isinstance(source, (Path, bytes)) or _is_file(text) or text.startswith(ADDRESSES):
            raise ValueError(f"`{name}` holds {_short(source)}, which cannot be read as an image.") from error
        as_text = " Pass text as `text=`." if name == "images" and " " in text.strip() else ""
        raise ValueError(
            f"Expected `{name}` to hold an image, or its path, URL, data URL or base64, got {_short(source)}: there is "
            f"no such file.{as_text}"
        ) from error
    except Exception as error:  # Decoders raise errors of many kinds for broken files.
        raise ValueError(f"`{name}` holds {_short(source)}, which cannot be read: {error}") from error
    _check_size(image, name)
    return image


def _file_of(source: str | Path | bytes) -> Path | BytesIO:
    """Returns the file of an image. transformers' `load_image` is not used: it drops the alpha channel, so that
    transparent areas would not become white, and it reads the error page of a server.
    """
    if isinstance(source, bytes):
        return BytesIO(source)
    if isinstance(source, Path):
        return source
    if source.startswith(("http://", "https://")):
        return BytesIO(httpx.get(source, timeout=60.0, follow_redirects=True).raise_for_status().content)
    if source.startswith("file://"):
        return Path(url2pathname(urlsplit(source).path))
    if _is_file(source):
        return Path(source)
    encoded = unquote(source.partition(",")[2]) if source.startswith("data:") else source
    return BytesIO(base64.b64decode("".join(encoded.split()), validate=True))


def _is_file(text: str) -> bool:
    try:
        return os.path.isfile(text)
    except ValueError:  # The text has a null character.
        return False


def _decoder(file: Any) -> Image:
    from PIL import Image

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # `LIMITS.max_pixels` decides instead.
        image = Image.open(file)
    if image.format in OTHER_PROGRAMS:
        raise OSError(f"another program reads {image.format} files, and it is not started for an image.")
    return image


def _check_size(image: Image, name: str) -> None:
    """Raises a `ValueError` for an image that is too large. Only the header of the image was read before."""
    if image.width * image.height > LIMITS.max_pixels:
        raise ValueError(
            f"`{name}` holds an image of {image.width} x {image.height} pixels: expected at most {LIMITS.max_pixels} "
            "pixels. Set a larger limit with `hf_xattn.IMAGE_LIMITS.max_pixels`."
        )


def _short(source: str | Path | bytes) -> str:
    if isinstance(source, bytes):
        return f"{len(source)} bytes"
    text = str(source)
    return repr(text) if len(text) <= 120 else f"{text[:80]!r}... ({len(text)} characters)"


def _rgb(image: Image, name: str) -> Image:
    from PIL import Image

    if image.mode in ("I", "F"):
        raise ValueError(
            f"Expected `{name}` to hold PIL images with values in 0..255, got mode {image.mode!r}, whose range is not "
            "known. Scale the values to 0..255 and call `convert('L')`."
        )
    try:
        image = upright(image)
        if image.mode.startswith("I;16"):  # `convert` would clip the values at 255.
            values = np.array(image)
            if isinstance(clear := image.info.get("transparency"), int):
                values[values == clear] = 65535
            if 0 < values.max(initial=0) < 4096:
                logger.warning_once(
                    f"`{name}` holds an image of 16 bits with values up to {values.max()}, which is almost black. "
                    "Scale the values of fewer bits to 0..65535."
                )
            return Image.fromarray((values // 257).astype(np.uint8)).convert("RGB")
        if "A" in image.getbands() or "a" in image.getbands() or image.info.get("transparency") is not None:
            image = image.convert("RGBA")
            white = Image.new("RGBA", image.size, (255, 255, 255, 255))
            white.alpha_composite(image)
            image = white
        return image.convert("RGB")
    except Exception as error:  # Decoders raise errors of many kinds for a broken file.
        raise ValueError(f"`{name}` holds an image that cannot be read: {error}") from error


def _rgb_array(image: Any, name: str, input_data_format: Any, rescale: bool) -> Any:
    if not isinstance(image, torch.Tensor) and image.dtype.kind not in "biuf":
        raise TypeError(f"Expected `{name}` to hold numbers, got a numpy.ndarray of {image.dtype}.")
    # The copy of an array may be written, and has no negative strides, as torch needs it.
    tensor = image.detach() if isinstance(image, torch.Tensor) else torch.from_numpy(np.array(image, order="C"))
    if tensor.ndim == 2:
        tensor = tensor[None]
    elif tensor.ndim == 3:
        if input_data_format is None:
            last = tensor.shape[0] not in (1, 3, 4) and tensor.shape[2] in (1, 3, 4)
            input_data_format = ChannelDimension.LAST if last else ChannelDimension.FIRST
        if ChannelDimension(input_data_format) == ChannelDimension.LAST:
            tensor = tensor.permute(2, 0, 1)
    if tensor.ndim != 3 or tensor.shape[0] not in (1, 3, 4) or 0 in tensor.shape:
        raise ValueError(
            f"Expected each of `{name}` to have 3 axes, (channels, height, width) or (height, width, channels), with "
            f"1, 3 or 4 channels, or 2 axes if it is grayscale, got shape {tuple(image.shape)}."
        )
    if tensor.shape[0] == 4 and float(tensor[:3].max()) > OVERSHOOT and 0 < float(tensor[3].max()) <= 1:
        raise ValueError(
            f"Expected the opacity (fourth channel) of `{name}` in 0..255, as its colours, got values up to "
            f"{float(tensor[3].max()):g}. Multiply it by 255."
        )
    tensor = _bytes_or_floats(tensor, name, rescale)
    if tensor.shape[0] == 1:
        tensor = tensor.expand(3, -1, -1)
    elif tensor.shape[0] == 4:
        tensor = _over_white(tensor, name)
    tensor = tensor.contiguous()
    return tensor if isinstance(image, torch.Tensor) else tensor.numpy()


def _bytes_or_floats(tensor: torch.Tensor, name: str, rescale: bool) -> torch.Tensor:
    """Returns integers as uint8, and floats as float32."""
    if tensor.dtype == torch.uint8:
        return tensor
    if tensor.dtype == torch.bool:
        return tensor.to(torch.uint8) * 255
    if not tensor.is_floating_point():
        tensor = tensor.to(torch.int64)  # torch has no `min` for uint16, uint32 and uint64.
    low, high = float(tensor.min()), float(tensor.max())
    if not math.isfinite(low + high):
        raise ValueError(f"Expected `{name}` to hold finite values, got some that are NaN or infinite.")
    if not tensor.is_floating_point():
        if low < 0 or high > 255:
            raise ValueError(f"Expected integers of `{name}` to be in 0..255, got {low:.0f}..{high:.0f}.")
        return tensor.to(torch.uint8)
    if rescale and (low < 0 or high > 255):
        raise ValueError(
            f"Expected `{name}` to be in 0..255, got values from {low:.3g} to {high:.3g}. Pass `do_rescale=False` for "
            "rescaled values. Pass normalised images to the model, as `pixel_values`."
        )
    if rescale and 0 < high <= OVERSHOOT:
        raise ValueError(
            f"Expected `{name}` to be in 0..255, got an array of {tensor.dtype} with values from {low:.3g} to "
            f"{high:.3g}: divided by 255, the image becomes almost black. Pass `do_rescale=False` for values in 0..1, "
            "such as torchvision's `ToTensor` gives. Pass an image that really is this dark as uint8."
        )
    tensor = tensor.to(torch.float32)
    return tensor.round() if rescale and high > 1 else tensor  # The PIL backend only takes whole numbers.


def _over_white(tensor: torch.Tensor, name: str) -> torch.Tensor:
    """Puts an image `(4, height, width)` on a white background, and returns `(3, height, width)`."""
    if tensor.dtype == torch.uint8:  # PIL does this for arrays, too, so that arrays and files give the same bytes.
        from PIL import Image

        picture = Image.fromarray(tensor.permute(1, 2, 0).cpu().contiguous().numpy())
        return torch.from_numpy(np.array(_rgb(picture, name))).permute(2, 0, 1)
    white = 1.0 if float(tensor.max()) <= OVERSHOOT else 255.0
    alpha = (tensor[3:] / white).clamp(0, 1)
    laid = tensor[:3] * alpha + (1 - alpha) * white
    return laid if white == 1 else laid.round()
