"""A tokenizer and an image processor as one: texts and their images to a model's inputs."""

from __future__ import annotations

from typing import Any

import torch
from transformers import BatchFeature, ProcessorMixin


TILE_INPUTS = ("aspect_ratio_ids", "aspect_ratio_mask")


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
            kwargs: for the tokenizer (`padding`, `truncation`, ...). A batch is padded unless `padding` says otherwise.

        Returns:
            `BatchFeature`: `input_ids` and `attention_mask` `(batch, text_len)`; with images also `pixel_values` `(batch,
            num_images, channels, height, width)`, and, where texts have different numbers of images, `image_mask`
            `(batch, num_images)`. An image processor that cuts images into tiles (Mllama's) gives `(batch, num_images,
            max_num_tiles, channels, height, width)`, `aspect_ratio_ids` and `aspect_ratio_mask`.

        Raises:
            ValueError: where texts and images do not match in number, or images come out in different sizes.
        """
        if return_tensors != "pt":
            raise ValueError(f"`return_tensors` must be 'pt', got {return_tensors!r}.")
        if text is None and images is None:
            raise ValueError("Give `text`, `images` or both.")
        data: dict[str, Any] = {}
        samples = None
        if images is not None:
            samples = self._samples(images, text)
            data.update(self._pixels(samples))
        if text is not None:
            texts = [text] if isinstance(text, str) else list(text)
            self._check_markers(texts, samples)
            if len(texts) > 1:
                kwargs.setdefault("padding", True)
            kwargs.setdefault("return_token_type_ids", False)  # decoders take none, some tokenizers make them
            data = {**self.tokenizer(texts, return_tensors="pt", **kwargs), **data}
        return BatchFeature(data)

    @staticmethod
    def _samples(images: Any, text: str | list[str] | None) -> list[list[Any]]:
        """A list of images for each text."""
        if not isinstance(images, (list, tuple)):
            images = [images]
        if text is None or isinstance(text, str):
            nested = any(isinstance(entry, (list, tuple)) for entry in images)
            if text is None:
                return [list(entry) if isinstance(entry, (list, tuple)) else [entry] for entry in images]
            if nested and len(images) != 1:
                raise ValueError(f"`images` holds lists for {len(images)} texts, but `text` is one text.")
            return [list(images[0]) if nested else list(images)]
        if len(images) != len(text):
            raise ValueError(
                f"`images` has {len(images)} entries for {len(text)} texts: give one entry a text, None or [] where a text "
                "has no image."
            )
        samples: list[list[Any]] = []
        for entry in images:
            if entry is None:
                samples.append([])
            else:
                samples.append(list(entry) if isinstance(entry, (list, tuple)) else [entry])
        return samples

    def _pixels(self, samples: list[list[Any]]) -> dict[str, torch.Tensor]:
        flat = [image for sample in samples for image in sample]
        if not flat:
            return {}
        # One list an image: a tiled image processor then gives each a row of tiles.
        tiled = hasattr(self.image_processor, "max_image_tiles")
        made = self.image_processor([[image] for image in flat] if tiled else flat, return_tensors="pt")
        if isinstance(made, torch.Tensor):  # Idefics' image processor
            made = {"pixel_values": made}
        pixels = made["pixel_values"]
        if not isinstance(pixels, torch.Tensor) or pixels.dim() != (6 if tiled else 4):
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


__all__ = ["XAttnProcessor"]
