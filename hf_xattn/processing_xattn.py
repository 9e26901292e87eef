"""The processor: combines a tokenizer and an image processor, and turns texts, chats and images into model inputs.

In contrast to the processors of most vision-language models, it does not replace a marker by many image tokens. Images
take no place in the text.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import BatchFeature, ProcessorMixin
from transformers.processing_utils import ImagesKwargs, TextKwargs
from transformers.utils.chat_template_utils import render_jinja_template

from .checkpoints.folders import MANIFEST, find_manifest
from .processing.chat_messages import Conversation, is_batch, read_conversation, with_images
from .processing.chat_templates import default_template, template_variables, to_template
from .processing.image_limits import check_image_processor
from .processing.image_reading import read_images
from .processing.samples import OF_VIDEOS, lay_out, read_samples, read_texts
from .utils.keywords import refuse_unknown
from .utils.stub import NamesItsStub, own_code, references, write_stub
from .utils.tensor_checks import type_name
from .utils.transformers_api import has, needs
from .utils.whole_folder import refuse_unfinished, whole_folder


if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase
    from transformers.image_processing_utils import BaseImageProcessor
    from typing_extensions import Self

TILE_INPUTS = ("aspect_ratio_ids", "aspect_ratio_mask")
# Keywords with which the processors of transformers take the arguments of one part.
NESTED = ("text_kwargs", "images_kwargs", "videos_kwargs", "common_kwargs")


class XAttnProcessor(NamesItsStub, ProcessorMixin):
    r"""Combines any tokenizer with any image processor.

    The place of an image in the batch says to which text it belongs, so the text needs no markers. If the model uses
    markers (`image_visibility` other than `"all"`), the text needs one marker for each image.

    Args:
        image_processor: an image processor of transformers.
        tokenizer: a tokenizer of transformers.
        chat_template (`str` or `dict`, *optional*): as in transformers. By default the template of the tokenizer.
        image_token (`str`, *optional*): the marker of an image in the text, which must be in the vocabulary. By
            default, the text has no markers.

    Raises:
        ValueError: without an image processor, for an image processor that makes images that are too large, and for an
            `image_token` that is not in the vocabulary or is the padding token.

    Example:

    ```python
    >>> from PIL import Image
    >>> from transformers import AutoImageProcessor, AutoTokenizer

    >>> from hf_xattn import XAttnProcessor

    >>> processor = XAttnProcessor(
    ...     AutoImageProcessor.from_pretrained("google/siglip-base-patch16-224"),
    ...     AutoTokenizer.from_pretrained("HuggingFaceTB/SmolLM2-135M-Instruct"),
    ... )
    >>> inputs = processor(images=Image.open("photo.png"), text="A photo of", return_tensors="pt")
    >>> inputs["pixel_values"].shape  # (batch, num_images, channels, height, width)
    torch.Size([1, 1, 3, 224, 224])
    ```
    """

    # Returns the image inputs without reading the images, if it is set: see [`VisionFeatures.reader`].
    _look_up: Callable[[list[list[Any]]], dict[str, torch.Tensor]] | None = None

    def __init__(
        self,
        image_processor: BaseImageProcessor | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        chat_template: str | dict[str, str] | None = None,
        image_token: str | None = None,
        **kwargs,
    ):
        if image_processor is None:
            raise ValueError("Expected an `image_processor`, got None. For texts without images, use the tokenizer.")
        check_image_processor(image_processor)
        self.image_token = image_token
        self.image_token_id: int | None = None
        if image_token is not None:
            held: Any = tokenizer
            token_id = held.convert_tokens_to_ids(image_token)
            if token_id is None or token_id == held.unk_token_id:
                raise ValueError(
                    f"Expected `image_token` to be in the tokenizer's vocabulary, got {image_token!r}. Add it with "
                    f"`tokenizer.add_tokens([{image_token!r}], special_tokens=True)` and resize the model's embeddings."
                )
            if token_id == held.pad_token_id:
                raise ValueError(
                    f"Expected `image_token` to be another token than the tokenizer's `pad_token`, got {image_token!r} "
                    "for both, so that padding would count as image markers. Choose another `image_token`."
                )
            self.image_token_id = token_id
        super().__init__(image_processor, tokenizer, chat_template=chat_template, **kwargs)

    def save_pretrained(self, save_directory: str | os.PathLike[str], push_to_hub: bool = False, **kwargs) -> list[str]:
        """As in transformers. Also writes the stub that `auto_map` names. Either all files are written or none."""
        self.auto_map = {"AutoProcessor": references("xattn")["AutoProcessor"]}
        if push_to_hub:  # transformers uploads the files that are new in this folder.
            write_stub(save_directory)
            return super().save_pretrained(save_directory, push_to_hub, **kwargs)
        # The manifest of the folder has the digest of the stub, so the stub must not change.
        keeps_stub = (Path(save_directory) / MANIFEST).is_file()
        with whole_folder(save_directory, None if keeps_stub else own_code) as fresh:
            if not keeps_stub:
                write_stub(fresh, target=Path(save_directory))
            written = super().save_pretrained(fresh, **kwargs)
        return [os.path.join(save_directory, os.path.relpath(file, fresh)) for file in written]

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: str | os.PathLike[str], *args, **kwargs) -> Self:
        """As in transformers, with two differences.

        A folder in which a save was interrupted raises an error. If a model was saved with `adapter_only=True` and its
        folder has no processor, the tokenizer and the image processor of its bases are loaded.
        """
        if isinstance(pretrained_model_name_or_path, (str, os.PathLike)):
            refuse_unfinished(Path(pretrained_model_name_or_path, kwargs.get("subfolder") or ""))
            if find_manifest(pretrained_model_name_or_path, kwargs) is not None:
                from .processing.base_processors import parts_of_bases  # The code in a saved folder lacks this module.

                if (parts := parts_of_bases(pretrained_model_name_or_path, kwargs)) is not None:
                    return cls(**parts)
        return super().from_pretrained(pretrained_model_name_or_path, *args, **kwargs)

    @property
    def chat_template(self) -> str | dict[str, str] | None:
        """The chat template of the processor. If it has none, the chat template of the tokenizer."""
        own = self._chat_template
        return getattr(self.tokenizer, "chat_template", None) if own is None else own

    @chat_template.setter
    def chat_template(self, template: str | dict[str, str] | None) -> None:
        self._chat_template = template

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
            images (*optional*): for one text, an image or a list of images. For a list of texts, a list with one entry
                for each text: an image, a list of images (which may be empty) or None. An image is a PIL image, an
                array or tensor, a path, a URL, a data URL or base64. It is read as an upright RGB image, and
                transparent areas become white.
            text (`str` or `list[str]`, *optional*): one text or a batch of texts.
            videos (*optional*): as `images`, with videos in the place of images. A video is an array `(frames, height,
                width, channels)` or `(frames, channels, height, width)`, a list of images, or a video file, which needs
                a decoder (PyAV). The frames follow the images of the text. `num_frames` takes some of them, evenly
                spaced.
            return_tensors (`str`, *optional*, defaults to `"pt"`): `"pt"`, `"np"` or None. With None, token ids are
                lists, and images are tensors.
            kwargs: arguments of the tokenizer (`padding`, `truncation`, ...) and of the image processor (`do_rescale`,
                `size`, ...), directly or in `text_kwargs`, `images_kwargs` and `videos_kwargs`. A batch is padded by
                default. Texts that start with the BOS token, as rendered chats may, get no second one.

        Returns:
            `BatchFeature`: with texts, `input_ids` and `attention_mask` `(batch, text_len)`. With images, also
                `pixel_values` `(batch, num_images, channels, height, width)`. If texts have different numbers of
                images, also `image_mask` `(batch, num_images)`. An image processor that cuts images into tiles
                (Mllama's) returns `pixel_values` `(batch, num_images, max_num_tiles, channels, height, width)`,
                `aspect_ratio_ids` and `aspect_ratio_mask`.

        Raises:
            TypeError: for texts that are not strings, for images of an unknown type, and for unknown keywords.
            ValueError: if the numbers of texts and of lists of images differ, if a text lacks a marker for an image,
                or if the processed images differ in size.
        """
        if text is None and images is None and videos is None:
            raise ValueError("Expected `text`, `images` or both, got neither.")
        texts = None if text is None else read_texts(text)
        merged = self._merged(kwargs)
        return_tensors = merged["text_kwargs"].pop("return_tensors", return_tensors)
        if return_tensors not in ("pt", "np", None):
            raise ValueError(f"Expected `return_tensors` to be 'pt', 'np' or None, got {return_tensors!r}.")
        samples = None
        if images is not None or videos is not None:
            samples = read_samples(images, videos, texts, isinstance(text, str), merged["videos_kwargs"])
        data: dict[str, Any] = {} if samples is None else self._pixels(samples, merged["images_kwargs"])
        if texts is not None:
            data = {**self._tokenized(texts, samples, return_tensors, merged), **data}
        if return_tensors == "np":
            data = {name: np.asarray(value) for name, value in data.items()}
        return BatchFeature(data)

    def apply_chat_template(
        self,
        conversation: Sequence[Any],
        chat_template: str | None = None,
        tools: list[Any] | None = None,
        documents: list[dict[str, str]] | None = None,
        add_generation_prompt: bool = False,
        continue_final_message: bool | str = False,
        return_assistant_tokens_mask: bool = False,
        tokenize: bool = False,
        return_tensors: str | None = "auto",
        return_dict: bool = False,
        load_audio_from_video: bool = False,
        processor_kwargs: dict | None = None,
        sanitize_control_tokens: bool = False,
        **kwargs,
    ) -> Any:
        """Renders one chat or several chats with the template of the text model, and reads their images.

        A template that writes `image_token` itself gets messages with lists of parts. Any other template gets plain
        texts, in which the parts are joined without spaces. If there is an `image_token`, it is in the place of each
        image.

        Args:
            conversation (`list`): messages with `role` and `content`, or a list of such lists. The content is a text
                or a list of parts: `{"type": "text", "text": ...}`, `{"type": "image", "image" | "url" | "path" |
                "base64": ...}`, `{"type": "image_url", "image_url": {"url": ...}}` or `{"type": "video", "video":
                frames}`. An image part without a source takes the next one of `images` in `processor_kwargs`.
            chat_template (`str`, *optional*): a template or the name of a template. By default the template of the
                processor, then that of the tokenizer, then `chat_templates.DEFAULT_CHAT_TEMPLATE`.
            tools, documents, add_generation_prompt, continue_final_message, return_assistant_tokens_mask, tokenize,
                return_dict: as in transformers.
            return_tensors (`str`, *optional*): as in a call of the processor. `"auto"` means `"pt"` for one chat, and
                None for a list of chats, as in transformers. With None, ids are lists without padding, unless `padding`
                is given.
            load_audio_from_video (`bool`): has no effect, because the processor reads no sound.
            processor_kwargs (`dict`, *optional*): arguments for the call of the processor. By default, it adds no
                special tokens (`add_special_tokens`). With `add_generation_prompt` or `continue_final_message`, it pads
                a batch on the left (`padding_side`).
            sanitize_control_tokens (`bool`): as in transformers. The markers of image parts still count.
            kwargs: variables of the template. All other names are arguments for the call of the processor.

        Returns:
            `BatchFeature` as from a call of the processor, with `tokenize=True` and `return_dict=True`. Only its
                `input_ids` with `tokenize=True` alone. Otherwise the rendered text, or a list of texts.

        Raises:
            TypeError: for names that neither the template nor the processor takes, and for parts that are not dicts.
            ValueError: if the template loses the text of a message, or if the numbers of image parts and of images
                differ.

        Example:

        ```python
        >>> from transformers import AutoProcessor

        >>> processor = AutoProcessor.from_pretrained("seeing")  # a folder of `hf-xattn train`
        >>> content = [{"type": "image", "path": "photo.png"}, {"type": "text", "text": "what is it ?"}]
        >>> chat = [{"role": "user", "content": content}]
        >>> inputs = processor.apply_chat_template(chat, add_generation_prompt=True, tokenize=True, return_dict=True)
        >>> sorted(inputs)
        ['attention_mask', 'input_ids', 'pixel_values']
        ```
        """
        if sanitize_control_tokens and not has("_mark_chat_inputs"):
            raise ValueError(needs("_mark_chat_inputs", "`sanitize_control_tokens=True`"))
        if continue_final_message and (add_generation_prompt or return_assistant_tokens_mask):
            raise ValueError(
                "Expected `continue_final_message` without `add_generation_prompt` and `return_assistant_tokens_mask`."
            )
        template = self._template(chat_template, tools)
        variables = {name: kwargs.pop(name) for name in set(kwargs) & template_variables(template)}
        call = {**(processor_kwargs or {}), **kwargs}
        refuse_unknown(self.apply_chat_template, call, self._known_kwargs()[2] | {"images", "audio", "audio_kwargs"})
        batched = is_batch(conversation)
        chats = self._read_chats(conversation, batched, tokenize, call)
        messages = [chat.messages for chat in chats]
        if sanitize_control_tokens:
            plain = [[{**m.fields, "content": m.as_parts()} for m in chat] for chat in messages]
            plain, tools, documents, variables = self.tokenizer._mark_chat_inputs(
                template, plain, tools, documents, variables, tokenize, return_assistant_tokens_mask
            )
            messages = [read_conversation(chat, "`conversation`").messages for chat in plain]
            call["sanitize_control_tokens"] = True
        options = {**self.tokenizer.special_tokens_map, **variables, "add_generation_prompt": add_generation_prompt}

        def render(dicts: list[dict[str, Any]]) -> str:
            return render_jinja_template([dicts], tools, documents, template, **options)[0][0]

        # `super()` is not called, because its texts, images and assistant masks differ between transformers versions.
        rendered: Any = render_jinja_template(
            [to_template(chat, self.image_token, render) for chat in messages],
            tools,
            documents,
            template,
            return_assistant_tokens_mask=return_assistant_tokens_mask,
            continue_final_message=continue_final_message,
            **options,
        )
        prompts, answers = rendered
        if not tokenize:
            return prompts if batched else prompts[0]
        if return_tensors != "auto":
            call["return_tensors"] = return_tensors
        elif batched:  # The processors of transformers also return lists without padding.
            call.setdefault("return_tensors", None)
        said = answers if return_assistant_tokens_mask else None
        left = bool(add_generation_prompt or continue_final_message)
        made = self._encoded_chats(prompts, [chat.images for chat in chats], call, said, left)
        return made if return_dict else made["input_ids"]

    def _read_chats(
        self, conversation: Any, batched: bool, with_sources: bool, call: dict[str, Any]
    ) -> list[Conversation]:
        """Reads conversations. Removes the arguments about images and videos from `call`."""
        separate = call.pop("images", None)
        of_videos = {**(call.pop("videos_kwargs", None) or {}), **{n: call.pop(n) for n in OF_VIDEOS if n in call}}
        refuse_unknown(self.apply_chat_template, of_videos, frozenset(OF_VIDEOS))
        sampling = {} if of_videos.pop("do_sample_frames", None) is False else of_videos
        if batched and separate is not None and with_sources:
            if not isinstance(separate, (list, tuple)) or len(separate) != len(conversation):
                raise ValueError(
                    f"Expected `images` to be a list with one entry for each of {len(conversation)} conversations, got "
                    f"{len(separate) if isinstance(separate, (list, tuple)) else type_name(separate)}."
                )
            separate = [[] if images is None else images for images in separate]
        chats = []
        for index, chat in enumerate(conversation if batched else [conversation]):
            where = f"conversation {index}" if batched else "`conversation`"
            read = read_conversation(chat, where, **sampling)
            if with_sources:
                read = with_images(read, separate[index] if batched and separate is not None else separate, where)
            chats.append(read)
        return chats

    def _encoded_chats(
        self, prompts: list[str], images: list[list[Any]], call: dict[str, Any], answers: Any, left: bool
    ) -> BatchFeature:
        """Calls the processor for rendered chats.

        `answers` are the ranges of characters that the assistant has written, for masks. `left` says whether a batch is
        padded on the left.
        """
        defaults: dict[str, Any] = {"add_special_tokens": False}
        if left:
            defaults["padding_side"] = "left"  # `generate` continues each text at its right end.
        of_text = call.get("text_kwargs") or {}
        call = {**{name: value for name, value in defaults.items() if name not in of_text}, **call}
        bos = self.tokenizer.bos_token
        if bos is not None and prompts[0].startswith(bos):
            call["add_special_tokens"] = False
        if answers is not None:
            call["return_offsets_mapping"] = True
        made = self(images if any(images) else None, prompts, **call)
        if answers is not None:
            offsets = made.pop("offset_mapping")
            rows = zip(offsets if isinstance(offsets, list) else offsets.tolist(), answers)
            made["assistant_masks"] = [
                [int(any(first < end and last > start for start, end in said)) for first, last in row]
                for row, said in rows
            ]
            made.convert_to_tensors({torch.Tensor: "pt", np.ndarray: "np"}.get(type(made["input_ids"])))
        return made

    def _template(self, chat_template: str | None, tools: Any) -> str:
        own = self.chat_template
        named = own if isinstance(own, dict) else {}
        if chat_template is not None:
            return named.get(chat_template, chat_template)
        if isinstance(own, dict):
            name = "tool_use" if tools is not None and "tool_use" in named else "default"
            if name not in named:
                raise ValueError(
                    f"Expected `chat_template` to name one of the processor's templates, {sorted(named)}, because none "
                    "of them is called 'default', got None."
                )
            return named[name]
        return default_template(self.tokenizer) if own is None else own

    def _merged(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Returns the arguments of each part, merged as in transformers. Raises a `TypeError` for unknown names."""
        empty = ("audio", "audio_kwargs", *NESTED)  # The pipelines of transformers pass None for these.
        kwargs = {name: value for name, value in kwargs.items() if value is not None or name not in empty}
        text, images, flat = self._known_kwargs()
        refuse_unknown(self.__call__, kwargs, flat)
        for name, known in zip(NESTED, (text, images, frozenset(OF_VIDEOS), text | images)):
            refuse_unknown(self.__call__, kwargs.get(name, {}), known)
        of_call: Any = self.valid_processor_kwargs
        try:
            return self._merge_kwargs(of_call, self.tokenizer.init_kwargs, **kwargs)
        except StrictDataclassError as error:
            raise TypeError(str(error)) from error

    def _known_kwargs(self) -> tuple[frozenset[str], frozenset[str], frozenset[str]]:
        """Returns the names that the tokenizer takes, those of the image processor, and those of a call."""
        of_image_processor = getattr(getattr(self.image_processor, "valid_kwargs", None), "__annotations__", {})
        text = frozenset(TextKwargs.__annotations__)
        images = frozenset({*ImagesKwargs.__annotations__, *of_image_processor})
        of_both = ("return_mm_token_type_ids", "return_text_replacement_offsets")
        return text, images, text | images | {*NESTED, *OF_VIDEOS, *of_both}

    def _tokenized(
        self, texts: list[str], samples: list[list[Any]] | None, return_tensors: str | None, merged: dict[str, Any]
    ) -> dict[str, Any]:
        for_tokenizer = dict(merged["text_kwargs"])
        with_types = for_tokenizer.pop("return_mm_token_type_ids", None) or merged.get("return_mm_token_type_ids")
        for_tokenizer.pop("return_text_replacement_offsets", None)  # Markers are never replaced.
        for_tokenizer["return_tensors"] = return_tensors
        if len(texts) > 1 and return_tensors is not None:
            for_tokenizer.setdefault("padding", True)
        for_tokenizer.setdefault("return_token_type_ids", False)  # Decoders do not take token types.
        bos = self.tokenizer.bos_token
        starts = [bos is not None and text.startswith(bos) for text in texts]
        if all(starts):
            for_tokenizer.setdefault("add_special_tokens", False)
        elif any(starts) and self.tokenizer("")["input_ids"][:1] == [self.tokenizer.bos_token_id]:
            texts = (
                [text.removeprefix(bos) for text in texts] if for_tokenizer.get("add_special_tokens", True) else texts
            )
        made = dict(self.tokenizer(texts, **for_tokenizer))
        if len(made["input_ids"]) != len(texts):
            raise ValueError(
                f"Expected one row for each of {len(texts)} texts, got {len(made['input_ids'])}. "
                "`return_overflowing_tokens` splits texts, but their images are not repeated. Leave it out."
            )
        self._check_markers(texts, made["input_ids"], samples)
        if with_types:
            types = self.create_mm_token_type_ids(made["input_ids"])
            made["mm_token_type_ids"] = types if return_tensors is None else torch.tensor(types)
        return made

    def _pixels(self, samples: list[list[Any]], kwargs: dict[str, Any]) -> dict[str, torch.Tensor]:
        if self._look_up is not None:
            return self._look_up(samples)
        flat = read_images([image for sample in samples for image in sample], self.image_processor, kwargs)
        if not flat:
            return {}
        # Each image is in a list of its own, so that a tiled image processor returns one row of tiles for each image.
        tiled = hasattr(self.image_processor, "max_image_tiles")
        made = self.image_processor([[image] for image in flat] if tiled else flat, **kwargs, return_tensors="pt")
        if isinstance(made, torch.Tensor):  # The image processor of Idefics returns a tensor.
            made = {"pixel_values": made}
        if (shown := made.get("pixel_mask")) is not None and not bool((torch.as_tensor(shown) != 0).all()):
            raise ValueError(
                "Expected the image processor to return images without padding, got a `pixel_mask`, which the vision "
                "tower does not read. Set its `size` so that all images are equally large, or set `do_pad=False`."
            )
        pixels = made["pixel_values"]
        if not isinstance(pixels, torch.Tensor) or pixels.dim() != (6 if tiled else 4) or len(pixels) != len(flat):
            raise ValueError(
                "Expected the image processor to return one (channels, height, width) tensor for each image, all of "
                "the same size. Set its `do_resize` or `size`."
            )
        names = ("pixel_values", *(TILE_INPUTS if tiled else ()))
        return lay_out({name: made[name][:, 0] if tiled else made[name] for name in names}, samples)

    def _check_markers(self, texts: list[str], input_ids: Any, samples: list[list[Any]] | None) -> None:
        """Raises a `ValueError` if a text does not have one marker for each image. Counts ids, as the model does."""
        if self.image_token is None:
            return
        for row, text in enumerate(texts):
            markers = int((np.asarray(input_ids[row]) == self.image_token_id).sum())
            images = len(samples[row]) if samples is not None else 0
            if markers != images:
                cut = " Truncation has cut markers off." if text.count(self.image_token) == images else ""
                raise ValueError(
                    f"Expected one image marker ({self.image_token!r}) for each image of text {row}, got {markers} "
                    f"markers and {images} images.{cut} For a model without markers, leave `image_token` out of the "
                    "processor."
                )

    @property
    def model_input_names(self) -> list[str]:
        names = list(self.tokenizer.model_input_names)
        return [*names, "pixel_values", "image_mask", *TILE_INPUTS]
