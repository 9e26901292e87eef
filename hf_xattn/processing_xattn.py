"""A tokenizer and an image processor as one: texts, chats and their images to a model's inputs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import BatchFeature, ProcessorMixin
from transformers.processing_utils import ImagesKwargs, ProcessingKwargs, TextKwargs

from .image_reading import KINDS, is_array, is_pil, read_frames, read_image
from .keywords import refuse_unknown
from .tensor_checks import type_name


TILE_INPUTS = ("aspect_ratio_ids", "aspect_ratio_mask")
# How transformers' processors take arguments for one of their parts.
NESTED = ("text_kwargs", "images_kwargs", "videos_kwargs", "common_kwargs")
# How frames are taken of a video: they are images from there on. `apply_chat_template` adds the last.
OF_VIDEOS = ("num_frames", "fps", "do_sample_frames")


class XAttnProcessorKwargs(ProcessingKwargs, total=False):
    """Keyword arguments of [`XAttnProcessor`], beside those of its own image processor."""


class XAttnProcessor(ProcessorMixin):
    r"""Any tokenizer with any image processor.

    Images are bound to texts by their place in the batch, so text needs no markers. Where a model follows markers
    (`image_visibility` other than `"all"`), each image needs one: `image_token`, which must be in the vocabulary.

    Args:
        image_processor: an image processor of transformers.
        tokenizer: a tokenizer of transformers.
        chat_template (`str`, *optional*): as in transformers.
        image_token (`str`, *optional*): the marker of an image in the text.
    """

    valid_processor_kwargs = XAttnProcessorKwargs

    def __init__(
        self, image_processor=None, tokenizer=None, chat_template=None, image_token: str | None = None, **kwargs
    ):
        for name, part in (("tokenizer", tokenizer), ("image_processor", image_processor)):
            if part is None:
                raise ValueError(f"`{name}` is required. For text alone, the tokenizer is enough.")
        for name, given, kinds in (("chat_template", chat_template, (str, dict)), ("image_token", image_token, (str,))):
            if given is not None and not isinstance(given, kinds):
                expected = " or a ".join(kind.__name__ for kind in kinds)
                raise TypeError(f"Expected `{name}` to be a {expected}, got {type_name(given)}.")
        self.image_token = image_token
        self.image_token_id = None
        if image_token is not None:
            token_id = tokenizer.convert_tokens_to_ids(image_token)
            if token_id is None or token_id == tokenizer.unk_token_id:
                raise ValueError(
                    f"`image_token` ({image_token!r}) is not in the tokenizer's vocabulary: add it with "
                    f"`tokenizer.add_tokens([{image_token!r}], special_tokens=True)` and resize the model's embeddings."
                )
            self.image_token_id = token_id
        super().__init__(image_processor, tokenizer, chat_template=chat_template, **kwargs)

    def __call__(
        self,
        images: Any = None,
        text: str | list[str] | None = None,
        videos: Any = None,
        return_tensors: str | None = "pt",
        **kwargs,
    ) -> BatchFeature:
        """
        Args:
            images (*optional*): for one text, an image or a list of images. For a list of texts, a list with, for each
                text, an image, a list of images (possibly empty) or None. An image is a PIL image, an array or tensor, a path,
                a URL, a data URL or base64. All of them are read as upright RGB pictures; what is transparent becomes white.
            text (`str` or `list[str]`): one text or a batch.
            videos (*optional*): as `images`, with a video in place of an image: an array `(frames, height, width, channels)` or
                `(frames, channels, height, width)`, a list of images, or a video file where a decoder (PyAV) is installed. Their
                frames follow the text's images. `num_frames` takes as many of them, evenly spaced.
            return_tensors (`str`, *optional*, defaults to `"pt"`): `"pt"`, `"np"`, or None for lists of token ids, with images as
                tensors.
            kwargs: for the tokenizer (`padding`, `truncation`, ...) and the image processor (`do_rescale`, `size`, ...), flat or as
                `text_kwargs`, `images_kwargs` and `videos_kwargs`. A batch is padded unless `padding` says otherwise. A text that
                starts with the BOS token, as a rendered chat may, gets no second one.

        Returns:
            `BatchFeature`: `input_ids` and `attention_mask` `(batch, text_len)`; with images also `pixel_values` `(batch,
            num_images, channels, height, width)`, and, where texts have different numbers of images, `image_mask`
            `(batch, num_images)`. An image processor that cuts images into tiles (Mllama's) gives `(batch, num_images,
            max_num_tiles, channels, height, width)`, `aspect_ratio_ids` and `aspect_ratio_mask`.

        Raises:
            TypeError: for texts that are no strings, images that are none, or unknown keywords.
            ValueError: where texts and images do not match in number, or images come out in different sizes.
        """
        if return_tensors not in ("pt", "np", None):
            raise ValueError(f"`return_tensors` must be 'pt', 'np' or None, got {return_tensors!r}.")
        if text is None and images is None and videos is None:
            raise ValueError("Give `text`, `images` or both.")
        texts = None if text is None else _texts(text, images)
        merged = self._merged(kwargs)
        samples = None
        if images is not None or videos is not None:
            samples = _with_videos(images, videos, texts, isinstance(text, str), merged["videos_kwargs"])
        data: dict[str, Any] = {} if samples is None else self._pixels(samples, merged["images_kwargs"])
        if texts is not None:
            made = self._tokenized(texts, samples, return_tensors, merged)
            data = {**made, **data}
        if return_tensors == "np":
            data = {
                name: value.numpy() if isinstance(value, torch.Tensor) else np.asarray(value)
                for name, value in data.items()
            }
        return BatchFeature(data)

    def _merged(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Arguments for the tokenizer, the image processor and the frames of videos, merged as transformers does.

        Raises:
            TypeError: for names that none of them takes, and values of another type.
        """
        if kwargs.get("audio") is not None or kwargs.get("audio_kwargs"):
            raise TypeError("`audio` was given, but this processor reads text, images and videos without sound only.")
        kwargs = {name: value for name, value in kwargs.items() if name not in ("audio", "audio_kwargs")}
        for name in NESTED:
            if kwargs.get(name) is None:
                kwargs.pop(name, None)
            elif not isinstance(kwargs[name], dict):
                raise TypeError(f"Expected `{name}` to be a dict, got {type_name(kwargs[name])}.")
        text, images, flat = self._known_kwargs()
        by_part = {
            "text_kwargs": text,
            "images_kwargs": images,
            "videos_kwargs": frozenset(OF_VIDEOS),
            "common_kwargs": text | images,
        }
        refuse_unknown(self.__call__, kwargs, flat)
        for name, known in by_part.items():
            refuse_unknown(self.__call__, kwargs.get(name, {}), known)
        try:
            return self._merge_kwargs(tokenizer_init_kwargs=self.tokenizer.init_kwargs, **kwargs)
        except StrictDataclassError as error:
            raise TypeError(str(error)) from error

    def _known_kwargs(self) -> tuple[frozenset[str], frozenset[str], frozenset[str]]:
        """Names for the tokenizer, for the image processor, and all that a call may bring."""
        of_image_processor = getattr(getattr(self.image_processor, "valid_kwargs", None), "__annotations__", {})
        text = frozenset(TextKwargs.__annotations__) - {"return_tensors"}
        images = frozenset({*ImagesKwargs.__annotations__, *of_image_processor}) - {"return_tensors"}
        of_both = ("return_mm_token_type_ids", "return_text_replacement_offsets")
        return text, images, text | images | {*NESTED, *OF_VIDEOS, *of_both}

    def _tokenized(
        self, texts: list[str], samples: list[list[Any]] | None, return_tensors: str | None, merged: dict[str, Any]
    ) -> dict[str, Any]:
        for_tokenizer = dict(merged["text_kwargs"])
        with_types = for_tokenizer.pop("return_mm_token_type_ids", None) or merged.get("return_mm_token_type_ids")
        for_tokenizer.pop("return_text_replacement_offsets", None)  # no marker is replaced by others
        for_tokenizer["return_tensors"] = return_tensors
        if len(texts) > 1 and return_tensors is not None:
            for_tokenizer.setdefault("padding", True)
        for_tokenizer.setdefault("return_token_type_ids", False)  # decoders take none, some tokenizers make them
        bos = self.tokenizer.bos_token
        if bos is not None and all(text.startswith(bos) for text in texts):
            for_tokenizer.setdefault("add_special_tokens", False)
        made = dict(self.tokenizer(texts, **for_tokenizer))
        if len(made["input_ids"]) != len(texts):
            raise ValueError(
                f"`return_overflowing_tokens` made {len(made['input_ids'])} rows of {len(texts)} texts, whose images are not "
                "repeated: truncate without it."
            )
        self._check_markers(texts, made["input_ids"], samples)
        if with_types:
            types = self.create_mm_token_type_ids(made["input_ids"])
            made["mm_token_type_ids"] = types if return_tensors is None else torch.tensor(types)
        return made

    def _pixels(self, samples: list[list[Any]], kwargs: dict[str, Any]) -> dict[str, torch.Tensor]:
        flat = self._read([image for sample in samples for image in sample], kwargs)
        if not flat:
            return {}
        # One list an image: a tiled image processor then gives each a row of tiles.
        tiled = hasattr(self.image_processor, "max_image_tiles")
        made = self.image_processor([[image] for image in flat] if tiled else flat, **kwargs, return_tensors="pt")
        if isinstance(made, torch.Tensor):  # Idefics' image processor
            made = {"pixel_values": made}
        pixels = made["pixel_values"]
        if not isinstance(pixels, torch.Tensor) or pixels.dim() != (6 if tiled else 4) or len(pixels) != len(flat):
            raise ValueError(
                "The image processor must make one (channels, height, width) tensor of each image, all of one size. Set its "
                "`do_resize` or `size`."
            )
        names = ("pixel_values", *(TILE_INPUTS if tiled else ()))
        flat_tensors = {name: made[name][:, 0] if tiled else made[name] for name in names}
        widest = max(len(sample) for sample in samples)
        batch = {
            name: tensor.new_zeros(len(samples), widest, *tensor.shape[1:]) for name, tensor in flat_tensors.items()
        }
        mask = torch.zeros(len(samples), widest, dtype=torch.bool)
        start = 0
        for row, sample in enumerate(samples):
            for name, tensor in flat_tensors.items():
                batch[name][row, : len(sample)] = tensor[start : start + len(sample)]
            mask[row, : len(sample)] = True
            start += len(sample)
        return batch if mask.all() else {**batch, "image_mask": mask}

    def _read(self, images: list[Any], kwargs: dict[str, Any]) -> list[Any]:
        """Images as upright RGB pictures. `input_data_format` is read here, and taken out of the arguments."""
        kwargs.pop("return_tensors", None)
        if kwargs.get("do_convert_rgb") is False:  # a caller who says so brings what the tower reads
            return [read_image(image) if isinstance(image, (str, Path)) else image for image in images]
        rescale = kwargs.get("do_rescale", getattr(self.image_processor, "do_rescale", True)) is not False
        layout = kwargs.pop("input_data_format", None)
        pictures = [read_image(image, input_data_format=layout, rescale=rescale) for image in images]
        if getattr(self.image_processor, "backend", None) == "pil":
            pictures = [picture.cpu() if isinstance(picture, torch.Tensor) else picture for picture in pictures]
        if pictures and all(is_array(picture) for picture in pictures):
            kwargs["input_data_format"] = "channels_first"  # also where a side of three pixels looks like channels
        return pictures

    def _check_markers(self, texts: list[str], input_ids: Any, samples: list[list[Any]] | None) -> None:
        """Raises a `ValueError` where the model would not see one marker an image. Token ids tell: they are what it sees."""
        if self.image_token is None:
            return
        for row, text in enumerate(texts):
            markers = int((np.asarray(input_ids[row]) == self.image_token_id).sum())
            images = len(samples[row]) if samples is not None else 0
            if markers != images:
                cut = " Truncation cut markers off." if text.count(self.image_token) == images else ""
                raise ValueError(
                    f"Expected one image marker ({self.image_token!r}) for each image of text {row}, got {markers} markers and {images} "
                    f"images.{cut} For a model that needs no markers, make the processor without `image_token`."
                )

    @property
    def model_input_names(self) -> list[str]:
        names = list(self.tokenizer.model_input_names)
        return [*names, "pixel_values", "image_mask", *TILE_INPUTS]


def _texts(text: Any, images: Any) -> list[str]:
    """The texts of a call as a list."""
    if isinstance(text, str):
        return [text]
    if isinstance(text, (list, tuple)) and all(isinstance(entry, str) for entry in text):
        if not text:
            raise ValueError("`text` is an empty list: give one text or more.")
        return list(text)
    wrong = text
    if isinstance(text, (list, tuple)):
        wrong = next(entry for entry in text if not isinstance(entry, str))
    swapped = isinstance(images, str) or (isinstance(images, (list, tuple)) and any(isinstance(i, str) for i in images))
    raise TypeError(
        f"Expected `text` to be a str or a list of str, got {'' if wrong is text else 'a list with '}{type_name(wrong)}."
        + (" `images` come first, then `text`: use their names." if swapped else "")
    )


def _with_videos(
    images: Any, videos: Any, texts: list[str] | None, one_text: bool, kwargs: dict[str, Any]
) -> list[list[Any]]:
    """The images of each text, and the frames of its videos after them."""
    options = {name: kwargs.get(name) for name in OF_VIDEOS if name != "do_sample_frames"}
    if kwargs.get("do_sample_frames") is False:
        options = {}
    if videos is None:
        return _samples(images, texts, one_text)
    if one_text:
        entries = [videos]
    elif isinstance(videos, (list, tuple)) or getattr(videos, "ndim", None) == 5:
        entries = list(videos)
    else:
        raise ValueError("`videos` must be a list with one entry a text: a video, a list of videos, None or [].")
    if texts is not None and len(entries) != len(texts):
        raise ValueError(
            f"`videos` has {len(entries)} entries for {len(texts)} texts: give one entry a text, None or [] where a text has none."
        )
    samples = [[] for _ in entries] if images is None else _samples(images, texts, one_text)
    if len(samples) != len(entries):
        raise ValueError(f"`images` has {len(samples)} entries, but `videos` has {len(entries)}.")
    for sample, entry in zip(samples, entries):
        for video in _videos(entry):
            sample.extend(read_frames(video, **options))
    return samples


def _videos(entry: Any) -> list[Any]:
    """The videos of one text."""
    if getattr(entry, "ndim", None) == 5:
        return list(entry)
    if isinstance(entry, (list, tuple)):
        frames = [is_pil(part) or (is_array(part) and part.ndim in (2, 3)) for part in entry]
        if not entry or not all(frames):
            return [video for video in entry if video is not None]
    return [] if entry is None else [entry]


def _samples(images: Any, texts: list[str] | None, one_text: bool) -> list[list[Any]]:
    """A list of images for each text."""
    entries = _entries(images)
    if entries is None:
        entries = [images]
    if not entries and not one_text:
        raise ValueError(f"`images` is an empty list{'.' if texts is None else f' for {len(texts)} texts.'}")
    nested = any(_entries(entry) is not None for entry in entries)
    if one_text:
        if nested and len(entries) != 1:
            raise ValueError(f"`images` holds lists for {len(entries)} texts, but `text` is one text.")
        return [_images(entries[0] if nested else entries)]
    if texts is not None and len(entries) != len(texts):
        raise ValueError(
            f"`images` has {len(entries)} entries for {len(texts)} texts: give one entry a text, None or [] where a text has no image."
        )
    return [_images(entry) for entry in entries]


def _entries(images: Any) -> list[Any] | None:
    """The images of a list, or of an array with an axis of images; None for a single image."""
    if isinstance(images, (list, tuple)):
        return list(images)
    return list(images) if getattr(images, "ndim", None) in (4, 5) else None


def _images(entry: Any) -> list[Any]:
    """The images of one text.

    Raises:
        TypeError: for anything that is no image, URL or path.
        ValueError: for an array of another rank.
    """
    entries = _entries(entry)
    given = [image for image in ([entry] if entries is None else entries) if image is not None]
    images = [image for part in given for image in (part if getattr(part, "ndim", None) == 4 else [part])]
    for image in images:
        if isinstance(image, (str, Path)):
            continue
        if not (is_array(image) or is_pil(image)):
            raise TypeError(f"Expected `images` to hold {KINDS}, got {type_name(image)}.")
        rank = getattr(image, "ndim", None)
        if rank is not None and rank not in (2, 3):
            raise ValueError(
                "Expected each of `images` to have 3 axes, (channels, height, width) or (height, width, channels), or 2 if it is "
                f"grey, got shape {tuple(image.shape)}."
            )
    return images


__all__ = ["XAttnProcessor"]
