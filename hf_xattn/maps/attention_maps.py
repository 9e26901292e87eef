"""Attention maps: the attention weights of each text token over the image tokens, in every block and head.

Fast attention kernels return no weights, so for this one call the blocks compute them with the eager implementation.
The weights say where a block has looked. They do not explain why the model gave its answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
from transformers.cache_utils import DynamicCache

from ..cache.image_cache import ImageCache
from ..configuration_xattn import XAttnConfig
from ..images.image_inputs import refuse_to_cache
from ..images.tower import image_size_of, only_image_size
from ..modeling_xattn import XAttnForConditionalGeneration, XAttnModel
from ..processing.chat_templates import Processor
from ..processing.image_reading import upright
from ..training.freezing import body_of
from ..utils.architectures import TILED_VISION_TYPES
from ..utils.tensor_checks import type_name
from ..utils.transformers_api import takes_cache
from .patch_grid import PatchGrid, patch_grid


if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from peft import PeftModel
    from PIL.Image import Image

MEAN = "mean"
Choice: TypeAlias = "int | str | None"
OF_IMAGES = ("pixel_values", "vision_features", "cross_attention_states")
MASKS = ("attention_mask", "image_mask", "cross_attention_mask", "image_attention_mask", "aspect_ratio_mask")
COLUMNS, SIDE = 4, 2.6  # number of panels in a line, and width of a panel in inches


@dataclass(eq=False, repr=False)
class AttentionMaps:
    """Attention weights of a text over its images.

    The weights at position `t` of the text axis are those with which the model read the token `tokens[:, t]` and chose
    the next token. So the weights for the choice of a word are at the position before the word.

    Attributes:
        weights (`list[torch.Tensor]`): one tensor for each block, in the order of the blocks: `(batch,
            num_attention_heads, text_len, num_image_tokens)`. The weights of a token add up to 1, or to less with quiet
            softmax (see `null`). They are 0 for padding images and for images that the token may not see. A token that
            sees no image has only zeros.
        layers (`list[int]`): the decoder layer of each block, as in `config.cross_attention_layers`.
        tokens (`torch.LongTensor`): `(batch, text_len)`, the given text, followed by the generated text.
        text_mask (`torch.BoolTensor`): `(batch, text_len)`, False for padding, which is before the text or after the
            end of an answer.
        num_given (`int`): number of tokens of the given text. The tokens after them were generated.

    Example:

    ```python
    >>> import hf_xattn
    >>> from PIL import Image
    >>> from transformers import AutoModelForImageTextToText, AutoProcessor

    >>> model = AutoModelForImageTextToText.from_pretrained("seeing")
    >>> processor = AutoProcessor.from_pretrained("seeing")
    >>> inputs = processor(images=Image.open("photo.png"), text="what is it ?", return_tensors="pt")
    >>> maps = hf_xattn.attention_maps(model, inputs)
    >>> maps.grid(image=0).shape[-2:]  # the patches of the vision tower, as they lie in the picture
    torch.Size([14, 14])
    ```
    """

    weights: list[torch.Tensor]
    layers: list[int]
    tokens: torch.Tensor
    text_mask: torch.Tensor
    num_given: int
    _config: XAttnConfig
    _sizes: tuple[int, ...]
    _pixel_values: torch.Tensor | None
    _aspect_ratio_ids: torch.Tensor | None
    _read_size: tuple[int, int] | None

    def __repr__(self) -> str:
        return f"AttentionMaps(layers={self.layers}, weights={len(self.weights)} x {tuple(self.weights[0].shape)})"

    @property
    def num_images(self) -> int:
        """Number of images of each row, including padding images."""
        return len(self._sizes)

    @property
    def null(self) -> list[torch.Tensor] | None:
        """The share of the attention that went to no image, which is 1 minus the sum of the weights.

        With quiet softmax, this is the weight of the null key. There is one tensor `(batch, num_attention_heads,
        text_len)` for each block. None for a model without quiet softmax.
        """
        if not self._config.cross_attention_config.quiet_softmax:
            return None
        return [1 - weights.float().sum(dim=-1) for weights in self.weights]

    def grid(
        self, image: int = 0, row: int = 0, layer: Choice = None, head: Choice = None, token: int | None = None
    ) -> torch.Tensor:
        """Arranges the weights of an image as its patches lie in the image that the vision tower has read.

        Tokens without a patch (class tokens, registers) are left out. One grid covers all tiles of an image.

        Args:
            image (`int`), row (`int`): index of the image, and index of the row of `tokens`.
            layer (`int` or `"mean"`, *optional*): one of `layers`, or `"mean"` for the mean of all blocks. If a layer
                has several blocks, their mean is returned. None keeps all blocks as an axis.
            head (`int` or `"mean"`, *optional*): index of a head, or `"mean"` for the mean of all heads. None keeps all
                heads as an axis.
            token (`int`, *optional*): a position in the text. Negative positions count from the end. None keeps all
                positions as an axis.

        Returns:
            `torch.Tensor`: `([blocks, heads, text_len,] patch rows, patch columns)`, in float32.

        Raises:
            ValueError: for a layer without blocks, for features without a vision tower, for a connector that does not
                keep the positions of patches, and for a vision tower whose order of patches is not known.
        """
        if layer not in (None, MEAN, *self.layers):
            raise ValueError(f"Expected `layer` to be one of {self.layers}, 'mean' or None, got {layer!r}.")
        first = sum(self._sizes[:image])
        blocks = [weights for weights, place in zip(self.weights, self.layers) if layer in (None, MEAN, place)]
        # (blocks, heads, text_len, tokens of the image)
        chosen = torch.stack([of_block[row, ..., first : first + self._sizes[image]].cpu() for of_block in blocks])
        chosen = chosen.float()
        if token is not None:
            chosen = chosen[:, :, token]
        if head is not None:
            chosen = chosen.mean(dim=1) if head == MEAN else chosen[:, int(head)]
        if layer is not None:
            chosen = chosen.mean(dim=0)
        return self._patches(image, row).lay(chosen)

    def _patches(self, image: int, row: int) -> PatchGrid:
        size, ratio = self._read_size, None
        if self._pixel_values is not None:
            size = (self._pixel_values.shape[-2], self._pixel_values.shape[-1])
        if self._aspect_ratio_ids is not None:
            ratio = int(self._aspect_ratio_ids[row * len(self._aspect_ratio_ids) // len(self.tokens), image])
        return patch_grid(self._config, self._sizes[image], size, ratio)

    def pixels(self, image: int = 0, row: int = 0) -> torch.Tensor:
        """Returns the image that the vision tower has read, `(height, width, channels)`, with values from 0 to 1.

        Raises a `ValueError` if `inputs` had no `pixel_values`.
        """
        if self._pixel_values is None:
            raise ValueError(
                "Expected `pixel_values` in `inputs`, got none, so the image is not known. Pass them, or pass an image "
                "to draw on as `picture` of `plot`."
            )
        of_row = self._pixel_values[row * len(self._pixel_values) // len(self.tokens)]
        picture = of_row[image].float().cpu() if of_row.dim() > 3 else of_row.float().cpu()
        if picture.dim() == 4:  # tiles
            patches = self._patches(image, row)
            tiles = picture[: patches.tile_rows * patches.tile_columns]
            tiles = tiles.unflatten(0, (patches.tile_rows, patches.tile_columns))
            picture = tiles.permute(2, 0, 3, 1, 4).flatten(3, 4).flatten(1, 2)
        low, high = picture.min(), picture.max()
        return ((picture - low) / (high - low).clamp(min=1e-6)).permute(1, 2, 0)

    def covered(self, image: int = 0, row: int = 0) -> tuple[float, float]:
        """Returns the share of the height and of the width of the image that the patches cover.

        Raises a `ValueError` as `grid`.
        """
        return self._patches(image, row).covered

    def plot(
        self,
        tokens: list[int] | None = None,
        *,
        processor: Processor | None = None,
        picture: Image | np.ndarray | torch.Tensor | None = None,
        image: int = 0,
        row: int = 0,
        layer: int | str = MEAN,
        head: int | str = MEAN,
    ) -> Figure:
        """Draws the weights of some tokens over the image, with one panel for each token. All panels have one scale.

        Args:
            tokens (`list[int]`, *optional*): positions in the text. By default all generated tokens. If no tokens were
                generated, all given tokens without padding.
            processor (*optional*): a processor or a tokenizer, to write the tokens as words. Without it, the panels
                show token ids.
            picture (*optional*): a PIL image or an array to draw on. It only fits if the image processor neither crops
                nor pads. By default the pixels that the vision tower has read.
            image, row (`int`), layer, head (`int` or `"mean"`): as in `grid`.

        Returns:
            `matplotlib.figure.Figure`: save it with `savefig`.

        Raises:
            ImportError: if matplotlib is not installed.
            ValueError: as `grid` and `pixels`; if `layer` or `head` is None; and for a `picture` with a tower that
                reads tiles, because tiles cover more than the image.
        """
        if layer is None or head is None:  # The axis of blocks or heads would be taken for the axis of tokens.
            raise ValueError(f"Expected one `layer` and one `head`, or 'mean', got {layer!r} and {head!r}.")
        grid, text_len = self.grid(image, row, layer=layer, head=head), self.tokens.shape[1]
        if tokens is None:
            first = self.num_given if self.num_given < text_len else 0
            tokens = [index for index in range(first, text_len) if bool(self.text_mask[row, index])]
        positions = [range(text_len)[index] for index in tokens]
        ids = [int(self.tokens[row, position]) for position in positions]
        words: Any = [str(token) if processor is None else processor.decode([token]) for token in ids]
        if picture is None:
            picture = self.pixels(image, row)
        elif self._config.vision_config is not None and self._config.vision_config.model_type in TILED_VISION_TYPES:
            raise ValueError(
                f"Expected `picture` to be None, because the vision tower reads tiles, with a border around the "
                f"image, got {type_name(picture)}. Pass `pixel_values` in `inputs`: they are drawn without `picture`."
            )
        covered = self.covered(image, row)
        of_layers = f"mean of {len(self.layers)} layers" if layer == MEAN else f"layer {layer}"
        of_heads = f"mean of {self.weights[0].shape[1]} heads" if head == MEAN else f"head {head}"
        return _draw(grid, positions, words, picture, covered, f"attention of {of_layers}, {of_heads}")


@torch.no_grad()
def attention_maps(
    model: XAttnModel | XAttnForConditionalGeneration | PeftModel,
    inputs: Mapping[str, Any],
    max_new_tokens: int | None = None,
    **generate_kwargs: Any,
) -> AttentionMaps:
    """Computes the attention weights of each text token over the image tokens.

    The model may use any attention implementation. A padded text gets the position ids that `generate` gives it.

    Args:
        model ([`XAttnForConditionalGeneration`] or [`XAttnModel`]): the model, which is not changed. An [`XAttnModel`]
            does not work with `max_new_tokens`.
        inputs (`Mapping`): output of the processor: `input_ids` and the images of one call. Encoded images of
            `encode_images` can be passed as `cache` in the place of images. `labels` are ignored.
        max_new_tokens (`int`, *optional*): generate up to this many tokens first. The maps then cover the given and the
            generated tokens.
        generate_kwargs: further arguments of `generate`, such as `do_sample` or `num_beams`.

    Returns:
        [`AttentionMaps`]: with `weights`, `layers`, `tokens`, `grid` and `plot`.

    Raises:
        TypeError: for a model without blocks, and for arguments of `generate` without `max_new_tokens`.
        ValueError: if there are no images, for a cache that holds text, and for a model that is split over ranks.

    Example:

    ```python
    >>> import hf_xattn
    >>> from transformers import AutoModelForImageTextToText, AutoProcessor

    >>> model = AutoModelForImageTextToText.from_pretrained("seeing")
    >>> processor = AutoProcessor.from_pretrained("seeing")
    >>> content = [{"type": "image", "path": "photo.png"}, {"type": "text", "text": "what is it ?"}]
    >>> inputs = processor.apply_chat_template(
    ...     [{"role": "user", "content": content}], add_generation_prompt=True, tokenize=True, return_dict=True
    ... )
    >>> maps = hf_xattn.attention_maps(model, inputs, max_new_tokens=8)
    >>> maps.plot(processor=processor).savefig("maps.png")
    ```
    """
    outer: Any = model
    inner = inner_model(outer)
    given, cache = _given(**inputs)
    num_given = given["input_ids"].shape[-1]
    if max_new_tokens is not None:
        given = _generated(outer, inner, given, cache, max_new_tokens, generate_kwargs)
    elif generate_kwargs:
        raise TypeError(f"`{next(iter(generate_kwargs))}` is an argument of `generate`: pass `max_new_tokens`, too.")
    text_mask = given.pop("_text_mask", None)
    tokens = given["input_ids"]
    mask = given.get("attention_mask")
    if mask is not None and mask.dim() == 2 and "position_ids" not in given and not bool((mask != 0).all()):
        positions = (mask.long().cumsum(-1) - 1).masked_fill(mask == 0, 0)  # `generate` counts in the same way.
        given["position_ids"] = positions
    if cache is not None:
        given["cache"] = cache.fork(DynamicCache(config=inner.config.get_text_config(decoder=True)))
    else:
        given["use_cache"] = False
    if isinstance(inner, XAttnForConditionalGeneration):
        given["logits_to_keep"] = 1
    outputs = outer(**given, output_attentions=False, output_cross_attentions=True, return_dict=True)
    if not (weights := list(outputs.cross_attentions or ())):
        raise ValueError(f"`attention_maps` needs images, got `inputs` with {sorted(inputs)} only.")
    if text_mask is None:
        text_mask = torch.ones_like(tokens, dtype=torch.bool) if mask is None or mask.dim() != 2 else mask != 0
    return described(inner, given, weights, tokens, text_mask, num_given)


def described(
    model: XAttnModel | XAttnForConditionalGeneration,
    given: dict[str, Any],
    weights: list[torch.Tensor],
    tokens: torch.Tensor,
    text_mask: torch.Tensor,
    num_given: int,
) -> AttentionMaps:
    """Builds [`AttentionMaps`] from weights. `given` are the arguments of the call that passed the images."""
    return AttentionMaps(
        weights=weights,
        layers=sorted(model.config.cross_attention_layers),
        tokens=tokens,
        text_mask=text_mask,
        num_given=num_given,
        _config=model.config,
        _sizes=_sizes_of(given, weights[0].shape[-1]),
        _pixel_values=given.get("pixel_values"),
        _aspect_ratio_ids=given.get("aspect_ratio_ids"),
        _read_size=_read_size(model, given),
    )


def inner_model(
    model: XAttnModel | XAttnForConditionalGeneration | PeftModel,
) -> XAttnModel | XAttnForConditionalGeneration:
    """Returns the model inside a wrapper of PEFT, or the model itself if there is no wrapper.

    Raises:
        TypeError: for a model without blocks.
        ValueError: for a model that is split over ranks.
    """
    inner: Any = model
    if hasattr(model, "get_base_model"):
        inner = inner.get_base_model()
    body_of(inner)  # checks its type
    if inner.tp_size not in (None, 1):
        raise ValueError(
            f"Expected `model` to be whole, got one that is split over {inner.tp_size} ranks (tensor parallelism). A "
            "rank only knows the attention of its own heads. Load the model without tensor parallelism."
        )
    return inner


@takes_cache
def _given(cache: Any = None, **inputs: Any) -> tuple[dict[str, Any], ImageCache | None]:
    """Returns the inputs that are not None, and separately the cache of images."""
    given = {name: value for name, value in inputs.items() if value is not None and name != "labels"}
    if "image_rows" in given:
        refuse_to_cache("`attention_maps`")
    if cache is not None and (not isinstance(cache, ImageCache) or int(cache.get_seq_length())):
        raise ValueError(
            "Expected `cache` in `inputs` to be images of `encode_images` without text, got a "
            f"{type(cache).__name__}{' with text' if isinstance(cache, ImageCache) else ''}."
        )
    if cache is not None and (new := [name for name in OF_IMAGES if name in given]):
        raise ValueError(
            f"Expected `inputs` with images or with `cache`, which holds encoded images, got both: `cache` and "
            f"`{new[0]}`. Encode all images in one call of `encode_images`."
        )
    return given, cache


def _generated(
    model: Any,
    inner: Any,
    given: dict[str, Any],
    cache: ImageCache | None,
    max_new_tokens: int,
    generate_kwargs: dict[str, Any],
) -> dict[str, Any]:
    """Generates text, and returns the inputs of a call that reads the given and the generated text at once.

    That call has the same attention weights as the steps of `generate`, because a token does not depend on later
    tokens. The inputs have one row of images and masks for each returned sequence.
    """
    inside = [name for name in generate_kwargs if name in (*OF_IMAGES, *MASKS)]
    if inside:
        raise TypeError(
            f"Expected `{inside[0]}` in `inputs`, because the maps need it, too, got it as an argument of `generate`."
        )
    rows, length = given["input_ids"].shape
    # Without a mask, `generate` would guess one from the token ids.
    given = {"attention_mask": torch.ones_like(given["input_ids"]), **given}
    images = {} if cache is None else {"cache": cache}
    made = model.generate(**given, **images, max_new_tokens=max_new_tokens, **generate_kwargs)
    sequences = made if isinstance(made, torch.Tensor) else made.sequences
    repeats, new = sequences.shape[0] // rows, sequences.shape[1] - length
    whole = dict(given)
    for name, value in given.items():
        if isinstance(value, torch.Tensor) and value.dim() > 0 and value.shape[0] == rows:
            whole[name] = value.repeat_interleave(repeats, dim=0)
    mask = whole["attention_mask"]
    whole["input_ids"] = sequences
    whole["attention_mask"] = torch.cat([mask, mask.new_ones(len(sequences), new)], dim=1)
    if "position_ids" in whole:
        after = torch.arange(1, new + 1, device=sequences.device)
        whole["position_ids"] = torch.cat([whole["position_ids"], whole["position_ids"][..., -1:] + after], dim=-1)
    for name in ("cross_attention_mask", "image_attention_mask"):
        # A generated token sees what the last given token sees.
        if name in whole and whole[name].dim() > 2 and whole[name].shape[1] == length:
            whole[name] = torch.cat([whole[name], whole[name][:, -1:].expand(-1, new, *whole[name].shape[2:])], dim=1)
    ended = torch.zeros_like(sequences, dtype=torch.bool)  # True at the position after a token that ends the text
    ends = _ids("eos_token_id", inner, generate_kwargs)
    for end in ends:
        ended[:, length + 1 :] |= sequences[:, length:-1] == end
    for padding in set(_ids("pad_token_id", inner, generate_kwargs)).difference(ends):
        # Padding may also follow a text that something else has ended, such as `stop_strings`.
        ended[:, length:] |= (sequences[:, length:] == padding).flip(-1).cumprod(-1).flip(-1).bool()
    whole["_text_mask"] = (whole["attention_mask"] != 0) & (ended.cumsum(dim=-1) == 0)
    return whole


def _ids(name: str, model: XAttnForConditionalGeneration, generate_kwargs: dict[str, Any]) -> list[int]:
    """Returns the ids of the end or padding tokens (`name`), from the arguments of the call or from the model."""
    config = generate_kwargs.get("generation_config") or model.generation_config
    found = generate_kwargs.get(name, getattr(config, name, None))
    if found is None:  # `generate` then uses the value of the model's configuration.
        found = getattr(model.generation_config, name)
    if isinstance(found, torch.Tensor):
        found = found.tolist()
    return [] if found is None else [found] if isinstance(found, int) else list(found)


def _sizes_of(given: dict[str, Any], num_tokens: int) -> tuple[int, ...]:
    """Returns the number of tokens of each image in a row. `num_tokens` is their sum."""
    cache = given.get("cache")
    if cache is not None:
        return tuple(cache.cross_attention_cache.layout.sizes)
    images = 1
    for name, axes in (("pixel_values", 5), ("vision_features", 4), ("cross_attention_states", 4)):
        values = given.get(name)
        if values is not None and values.dim() >= axes:
            images = values.shape[1]
    return (num_tokens // images,) * images


def _read_size(model: XAttnModel | XAttnForConditionalGeneration, given: dict[str, Any]) -> tuple[int, int] | None:
    """Returns height and width of the images if `given` has their tokens but no pixels.

    None for features that no vision tower has computed, and for a tower that reads images of several sizes.
    """
    tower, cache = body_of(model).vision_tower, given.get("cache")
    digests = () if cache is None else cache.cross_attention_cache.layout.digests or ()
    of_tower = bool(digests) and all(part.of in ("pixel_values", "vision_features") for part in digests)
    if tower is None or not ("vision_features" in given or of_tower):
        return None
    return image_size_of(tower.config) if tower.config.model_type in TILED_VISION_TYPES else only_image_size(tower)


def _draw(
    grid: torch.Tensor, positions: list[int], words: list[str], picture: Any, covered: tuple[float, float], title: str
) -> Figure:
    """Draws one panel for each text position, with the word as its title.

    `grid` has the shape `(text_len, patch rows, patch columns)`.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError('`plot` needs matplotlib: pip install "matplotlib>=3.8"') from error
    shown = np.asarray(upright(picture))
    if shown.ndim == 3 and shown.shape[2] == 1:
        shown = shown[..., 0]
    height, width = shown.shape[:2]
    extent = (0, width * covered[1], height * covered[0], 0)
    lines = -(-len(positions) // COLUMNS)
    columns = min(len(positions), COLUMNS)
    ratio = min(max(height / width, 0.3), 3.0)
    figure = Figure(figsize=(columns * SIDE, lines * (SIDE * ratio + 0.4) + 0.5), layout="constrained")
    axes = figure.subplots(lines, columns, squeeze=False).flatten()
    top = max(float(grid[positions].max()), 1e-6)
    for panel, position, word in zip(axes, positions, words):
        panel.imshow(shown, cmap="gray", extent=(0, width, height, 0))
        drawn = panel.imshow(grid[position].numpy(), cmap="inferno", alpha=0.6, vmin=0, vmax=top, extent=extent)
        panel.set_title(word.replace("$", r"\$"), fontsize=9)  # For matplotlib, a plain `$` begins a formula.
    for panel in axes:
        panel.set_axis_off()
    figure.colorbar(drawn, ax=list(axes), shrink=0.8)
    figure.suptitle(title)
    return figure


__all__ = ["AttentionMaps", "attention_maps"]
