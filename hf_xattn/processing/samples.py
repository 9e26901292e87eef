"""Assigns the images and videos of a call to its texts."""

from __future__ import annotations

from typing import Any

import torch

from ..utils.tensor_checks import type_name
from .image_reading import is_array, is_pil, read_frames


# Options that choose the frames of a video. `apply_chat_template` of transformers adds `do_sample_frames`.
OF_VIDEOS = ("num_frames", "fps", "do_sample_frames")


def read_texts(text: object) -> list[str]:
    """Returns the argument `text` of a processor as a list. Raises a `TypeError` for anything but texts."""
    texts = [text] if isinstance(text, str) else text
    if isinstance(texts, (list, tuple)) and texts and all(isinstance(entry, str) for entry in texts):
        return list(texts)
    raise TypeError(
        f"Expected `text` to be a str or a list of one str or more, got {text!r:.60}. `images` is the first argument "
        "and `text` the second: pass them by name."
    )


def read_samples(
    images: object, videos: object, texts: list[str] | None, one_text: bool, kwargs: dict[str, Any]
) -> list[list[Any]]:
    """Returns a list for each text, with the images of the text, followed by the frames of its videos.

    Args:
        images, videos: the arguments of the processor.
        texts (`list[str]`, *optional*): the texts.
        one_text (`bool`): whether the processor was called with one text and not with a list.
        kwargs (`dict`): options that choose the frames of a video.
    """
    given: Any = videos
    # With `do_sample_frames=False`, the video only holds the chosen frames already.
    chosen = () if kwargs.get("do_sample_frames") is False else ("num_frames", "fps")
    options = {name: kwargs.get(name) for name in chosen}
    if videos is None:
        return _samples(images, texts, one_text)
    if one_text:
        entries = [videos]
    elif isinstance(videos, (list, tuple)) or getattr(videos, "ndim", None) == 5:
        entries = list(given)
    else:
        raise ValueError(
            "Expected `videos` to be a list with one entry for each text (a video, a list of videos, None or []), got "
            f"{type_name(videos)}."
        )
    _check_number("videos", entries, texts)
    samples = [[] for _ in entries] if images is None else _samples(images, texts, one_text)
    if len(samples) != len(entries):
        raise ValueError(
            f"Expected `images` and `videos` to have one entry for each text, got {len(samples)} and {len(entries)} "
            "entries."
        )
    for sample, entry in zip(samples, entries):
        for video in _videos(entry):
            sample.extend(read_frames(video, **options))
    return samples


def lay_out(tensors: dict[str, torch.Tensor], samples: list[list[Any]]) -> dict[str, torch.Tensor]:
    """Arranges tensors `(number of all images, ...)` as `(texts, largest number of images of a text, ...)`.

    Texts with fewer images are padded with zeros. If there is padding, the result also has `image_mask`, False =
    padding. `samples` holds the images of each text, in the order of the tensors.
    """
    widest = max(len(sample) for sample in samples)
    batch = {name: tensor.new_zeros(len(samples), widest, *tensor.shape[1:]) for name, tensor in tensors.items()}
    mask = torch.zeros(len(samples), widest, dtype=torch.bool)
    start = 0
    for row, sample in enumerate(samples):
        for name, tensor in tensors.items():
            batch[name][row, : len(sample)] = tensor[start : start + len(sample)]
        mask[row, : len(sample)] = True
        start += len(sample)
    return batch if mask.all() else {**batch, "image_mask": mask}


def _videos(entry: Any) -> list[Any]:
    if getattr(entry, "ndim", None) == 5:
        return list(entry)
    if isinstance(entry, (list, tuple)):
        frames = [is_pil(part) or (is_array(part) and part.ndim in (2, 3)) for part in entry]
        if not entry or not all(frames):
            return [video for video in entry if video is not None]
    return [] if entry is None else [entry]


def _samples(images: Any, texts: list[str] | None, one_text: bool) -> list[list[Any]]:
    entries = _entries(images)
    if entries is None:
        entries = [images]
    if not entries and not one_text:
        raise ValueError("Expected `images` to have one entry for each text, got an empty list.")
    nested = any(_entries(entry) is not None for entry in entries)
    if one_text:
        if nested and len(entries) != 1:
            raise ValueError(f"Expected `images` to be the images of one text, got lists for {len(entries)} texts.")
        return [_images(entries[0] if nested else entries)]
    _check_number("images", entries, texts)
    return [_images(entry) for entry in entries]


def _check_number(name: str, entries: list[Any], texts: list[str] | None) -> None:
    if texts is not None and len(entries) != len(texts):
        raise ValueError(
            f"Expected `{name}` to have one entry for each text, got {len(entries)} entries for {len(texts)} texts. "
            f"The entry of a text without {name} is None or []."
        )


def _entries(images: Any) -> list[Any] | None:
    """The entries of a list, or of an array with an axis of images. None for a single image."""
    if isinstance(images, (list, tuple)):
        return list(images)
    return list(images) if getattr(images, "ndim", None) in (4, 5) else None


def _images(entry: Any) -> list[Any]:
    entries = _entries(entry)
    given = [image for image in ([entry] if entries is None else entries) if image is not None]
    return [image for part in given for image in (part if getattr(part, "ndim", None) == 4 else [part])]
