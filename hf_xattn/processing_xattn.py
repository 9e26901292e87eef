"""A tokenizer and an image processor as one: texts and their images to a model's inputs."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from transformers import BatchFeature, ProcessorMixin
from transformers.image_utils import is_valid_image

from .keywords import refuse_unknown
from .tensor_checks import type_name


TILE_INPUTS = ("aspect_ratio_ids", "aspect_ratio_mask")
# How transformers' processors take arguments for one of their parts, and inputs that this one does not read.
NESTED = ("text_kwargs", "images_kwargs", "common_kwargs")
OTHER_SENSES = ("videos", "audio")


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
        return_tensors: str | None = "pt",
        **kwargs,
    ) -> BatchFeature:
        """
        Args:
            images (*optional*): for one text, an image or a list of images. For a list of texts, a list with, for each
                text, an image, a list of images (possibly empty) or None.
            text (`str` or `list[str]`): one text or a batch.
            return_tensors (`str`, defaults to `"pt"`): only `"pt"`.
            kwargs: for the tokenizer (`padding`, `truncation`, ...) and the image processor (`do_resize`, `size`, ...). A batch is
                padded unless `padding` says otherwise.

        Returns:
            `BatchFeature`: `input_ids` and `attention_mask` `(batch, text_len)`; with images also `pixel_values` `(batch,
            num_images, channels, height, width)`, and, where texts have different numbers of images, `image_mask`
            `(batch, num_images)`. An image processor that cuts images into tiles (Mllama's) gives `(batch, num_images,
            max_num_tiles, channels, height, width)`, `aspect_ratio_ids` and `aspect_ratio_mask`.

        Raises:
            TypeError: for texts that are no strings, images that are none, or unknown keywords.
            ValueError: where texts and images do not match in number, or images come out in different sizes.
        """
        if return_tensors != "pt":
            raise ValueError(f"`return_tensors` must be 'pt', got {return_tensors!r}.")
        if text is None and images is None:
            raise ValueError("Give `text`, `images` or both.")
        texts = None if text is None else _texts(text, images)
        for_tokenizer, for_images = self._split(kwargs)
        data: dict[str, Any] = {}
        samples = None
        if images is not None:
            samples = _samples(images, texts, one_text=isinstance(text, str))
            data.update(self._pixels(samples, for_images))
        if texts is not None:
            self._check_markers(texts, samples)
            if len(texts) > 1:
                for_tokenizer.setdefault("padding", True)
            for_tokenizer.setdefault("return_token_type_ids", False)  # decoders take none, some tokenizers make them
            data = {**self.tokenizer(texts, return_tensors="pt", **for_tokenizer), **data}
        return BatchFeature(data)

    def _split(self, kwargs: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Arguments for the tokenizer and for the image processor, given flat or as `text_kwargs` and `images_kwargs`.

        Raises:
            TypeError: for names that neither takes.
        """
        tokenizer = frozenset(inspect.signature(self.tokenizer.__call__).parameters) | {"split_special_tokens"}
        valid = getattr(self.image_processor, "valid_kwargs", None)
        image_processor = frozenset(() if valid is None else valid.__annotations__)
        known = (tokenizer | image_processor) - {"text", "return_tensors", "kwargs", "tokenizer_kwargs"}
        flat = {name: value for name, value in kwargs.items() if name not in (*NESTED, *OTHER_SENSES)}
        for name in OTHER_SENSES:
            if kwargs.get(name) is not None:
                raise TypeError(f"`{name}` was given, but this processor reads text and images only.")
        for name in NESTED:
            flat.update(kwargs.get(name) or {})
        refuse_unknown(self.__call__, flat, known)
        for_images = {name: value for name, value in flat.items() if name in image_processor and name not in tokenizer}
        return {name: value for name, value in flat.items() if name not in for_images}, for_images

    def _pixels(self, samples: list[list[Any]], kwargs: dict[str, Any]) -> dict[str, torch.Tensor]:
        flat = [image for sample in samples for image in sample]
        if not flat:
            return {}
        # One list an image: a tiled image processor then gives each a row of tiles.
        tiled = hasattr(self.image_processor, "max_image_tiles")
        try:
            made = self.image_processor([[image] for image in flat] if tiled else flat, return_tensors="pt", **kwargs)
        except ValueError as error:
            paths = [image for image in flat if isinstance(image, str)]
            if not paths:
                raise
            raise ValueError(f"`images` holds {paths[0]!r}: {error} Text goes in as `text=`.") from error
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

    def _check_markers(self, texts: list[str], samples: list[list[Any]] | None) -> None:
        if self.image_token is None:
            return
        for row, text in enumerate(texts):
            markers = text.count(self.image_token)
            images = len(samples[row]) if samples is not None else 0
            if markers != images:
                raise ValueError(
                    f"Expected one image marker ({self.image_token!r}) for each image of text {row}, got {markers} markers and {images} "
                    "images. For a model that needs no markers, make the processor without `image_token`."
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
    return list(images) if getattr(images, "ndim", None) == 4 else None


def _images(entry: Any) -> list[Any]:
    """The images of one text.

    Raises:
        TypeError: for anything that is no image, URL or path.
        ValueError: for an array of another rank.
    """
    entries = _entries(entry)
    images = [image for image in ([entry] if entries is None else entries) if image is not None]
    for image in images:
        if isinstance(image, str):
            continue  # a URL, a path or base64: the image processor loads it
        if not is_valid_image(image):
            raise TypeError(
                f"Expected `images` to hold images (PIL, numpy, torch), URLs or paths, got {type_name(image)}."
            )
        rank = getattr(image, "ndim", None)
        if rank is not None and rank != 3:
            raise ValueError(
                "Expected each of `images` to have 3 axes, (channels, height, width) or (height, width, channels), got shape "
                f"{tuple(image.shape)}."
            )
    return images


__all__ = ["XAttnProcessor"]
