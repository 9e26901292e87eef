"""Several sets of blocks on one loaded base. One of them is active, or none.

A set is what `save_pretrained(folder, adapter_only=True)` writes: blocks, connector, and their settings. All sets share
the text model, and the vision tower if they were trained with the same tower. The active set is part of the
model: it is trained and saved. The others are not submodules, and move to the model's device when they are activated.

A set refuses images that another set has encoded, and conversations about them: they are noise for it.
"""

from __future__ import annotations

import os
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.utils import logging

from ..cache.cross_cache import CrossCache
from ..configuration_xattn import XAttnConfig
from ..decoders.block_stack import Blocks, BlockStack
from ..decoders.decoder import find_decoder
from ..decoders.insertion import BLOCKS
from ..images.connector import XAttnConnector
from ..layers.block import GatedCrossAttentionBlock
from ..utils.checkpoint_files import check_path, check_source
from ..utils.config_checks import check_choice
from ..utils.keywords import CONFIG_KEYWORDS, refuse_unknown
from ..utils.whole_folder import refuse_unfinished
from .own_parts import refuse_adapter_layers


logger = logging.get_logger(__name__)

WITHOUT_ADAPTER = "Merge the adapter first (`merge_and_unload()`), or load the model without it."
FIRST = "default"  # name of the set that a model was made or loaded with

# Settings of a set. The others belong to the text model.
FIELDS = """
    vision_config cross_attention_config cross_attention_layers image_token_id image_visibility connector_type
    connector_options connector_hidden_act connector_bias vision_feature_select_strategy vision_feature_layer
    perceiver_config
    """.split()


@dataclass(eq=False)
class BlockSet:
    blocks: dict[tuple[int, str], Blocks]  # by the index of a layer, and the name in it
    connector: XAttnConnector | None
    vision_tower: PreTrainedModel | None
    fields: dict[str, Any]  # values of `FIELDS`
    mark: str  # identifies caches of this set


class XAttnSetsMixin:
    """What [`XAttnModel`] does with several sets of blocks."""

    config: XAttnConfig
    text_model: PreTrainedModel
    vision_tower: PreTrainedModel | None
    connector: XAttnConnector | None
    training: bool
    _mark: str = ""
    _inserted: str = ""  # mark of the insertion of this model's blocks into its text model
    _active: str | None = FIRST
    _sets: dict[str, BlockSet] | None = None  # all sets, once there is more than the first

    @property
    def cross_attention_names(self) -> list[str]:
        """Names of the sets of blocks, the first one first."""
        self._check_inserted()
        return [FIRST] if self._sets is None else list(self._sets)

    @property
    def active_cross_attention(self) -> str | None:
        """Name of the active set. None if no set is active."""
        self._check_inserted()
        return self._active

    def load_cross_attention(self, folder: str | Path, name: str, **load_kwargs: Any) -> None:
        """Loads a set of blocks beside those that the model has, and activates it.

        Args:
            folder (`str` or `Path`): folder or Hub id of `save_pretrained(folder, adapter_only=True)`.
            name (`str`): name of the set in this model.
            load_kwargs: keyword arguments of `from_pretrained` that locate files: `revision`, `token`,
                `local_files_only`, ...

        Raises:
            TypeError: for a `folder` that is no path, a `name` that is no text, or an unknown keyword.
            ValueError: for a name that exists already, a folder that is damaged or was saved otherwise, a model with
                LoRA layers, and blocks that do not fit this model: their base has another shape, they were trained
                together with its text model, or they have another number of added tokens.
        """
        from .adapters import Adapter, load_set

        check_path("folder", folder)
        check_source("folder", os.fspath(folder))
        if not isinstance(name, str):
            raise TypeError(f"Expected `name` to be a text, got {type(name).__name__}.")
        if not name or name in self.cross_attention_names:
            raise ValueError(f"Expected `name` to be new, got {name!r}. The model has {self.cross_attention_names}.")
        refuse_unknown(self.load_cross_attention, load_kwargs, frozenset(CONFIG_KEYWORDS))
        refuse_adapter_layers(self.text_model, "`load_cross_attention` cannot add blocks to", WITHOUT_ADAPTER)
        refuse_unfinished(Path(folder, load_kwargs.get("subfolder") or ""))
        adapter = Adapter.find(folder, load_kwargs)
        if adapter is None:
            raise ValueError(f"Expected `folder` to be saved with `adapter_only=True`, got {folder}, which is not.")
        adapter.check_settings()
        config = XAttnConfig.from_pretrained(adapter.name, **adapter.hub)
        blocks, connector, tower = load_set(self, adapter, config, load_kwargs)
        fields = {field: getattr(config, field) for field in FIELDS}
        loaded = BlockSet(blocks, connector, tower, fields, uuid.uuid4().hex)
        self._all_sets()[name] = loaded
        self.set_cross_attention(name)

    def set_cross_attention(self, name: str | None) -> None:
        """Activates a set of blocks. With None no set is active: the model gives its base's logits for text.

        Raises:
            ValueError: for an unknown name, and for a model with LoRA layers.
        """
        names = self.cross_attention_names
        if name is not None:
            check_choice("name", name, tuple(names))
        if name == self._active:
            return
        refuse_adapter_layers(self.text_model, "`set_cross_attention` cannot change the blocks of", WITHOUT_ADAPTER)
        sets = self._all_sets()
        if self._active is not None:
            sets[self._active] = self._taken()  # with settings that the caller has changed meanwhile
        _, layers = find_decoder(self.text_model)
        if name is not None:
            self._bring(sets[name], layers)
        for layer in layers:
            for place in BLOCKS:
                layer._modules.pop(place, None)
        self._active = name
        self._mark = "none"
        if name is None:
            self.config.image_token_id, self.config.image_visibility = None, "all"  # to the base, a marker is a word
            return
        chosen = sets[name]
        for (index, place), block in chosen.blocks.items():
            setattr(layers[index], place, block)
        self.vision_tower, self.connector = chosen.vision_tower, chosen.connector
        for field, value in chosen.fields.items():
            setattr(self.config, field, value)
        self._mark = chosen.mark
        if self.training:
            model: Any = self
            model.train()  # what is frozen goes back to evaluation mode, see `learning/frozen.py`

    def _bring(self, chosen: BlockSet, layers: Any) -> None:
        """Moves the modules of a set to the devices of this model."""
        block: Any
        part: Any
        for (index, _), block in chosen.blocks.items():
            block.to(next(layers[index].parameters()).device).train(self.training)
        device = self.text_model.device if self.vision_tower is None else self.vision_tower.device
        for part in (chosen.vision_tower, chosen.connector):
            if part is not None and not any(weight.is_meta for weight in part.parameters()):
                part.to(device).train(self.training)

    def delete_cross_attention(self, name: str) -> None:
        """Removes a set of blocks. If it was active, no set is active afterwards.

        Raises:
            ValueError: for an unknown name, and for the active set of a model with LoRA layers.
        """
        check_choice("name", name, tuple(self.cross_attention_names))
        if name == self._active:
            self.set_cross_attention(None)
        del self._all_sets()[name]

    def _check_set(self, cross: CrossCache) -> None:
        if not cross.layers or torch.compiler.is_compiling():
            return
        if self._active is None or cross.read_by not in (None, self._mark):
            active = "none is active" if self._active is None else f"{self._active!r} is active"
            raise ValueError(
                f"`cache` holds images that another set of blocks has encoded, but {active}. Activate that "
                "set with `set_cross_attention`, or start from an empty cache."
            )
        cross.read_by = self._mark

    def _check_inserted(self) -> None:
        insertion: Any = getattr(self.text_model, "_insertion", None)
        if insertion is None or insertion.mark != self._inserted:
            raise ValueError(
                "`remove_blocks` took the blocks of this model out. Use its text model, or call `retrofit` with that."
            )

    def _check_active(self) -> None:
        """Called for a call with images."""
        self._check_inserted()
        if self._active is None:
            raise ValueError(
                "No cross-attention is active, so images would change nothing. Call `set_cross_attention` with one of "
                f"{self.cross_attention_names}."
            )

    def _all_sets(self) -> dict[str, BlockSet]:
        if self._sets is None:
            self._sets = {FIRST: self._taken()}
        return self._sets

    def _taken(self) -> BlockSet:
        """The blocks that are in the layers now, as a set."""
        _, layers = find_decoder(self.text_model)
        blocks = {
            (index, place): layer._modules[place]
            for index, layer in enumerate(layers)
            for place in BLOCKS
            if isinstance(layer._modules.get(place), (GatedCrossAttentionBlock, BlockStack))
        }
        fields = {field: getattr(self.config, field) for field in FIELDS}
        return BlockSet(blocks, self.connector, self.vision_tower, fields, self._mark)  # type: ignore[arg-type]
