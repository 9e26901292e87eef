"""The base class of both models: loading, initialisation, training mode and parallel plans.

It differs from a plain `PreTrainedModel` because a model is put together from parts that have classes, rules and
checkpoints of their own.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedConfig, PreTrainedModel
from transformers import initialization as init

from ..configuration_xattn import XAttnConfig
from ..decoders.insertion import BLOCKS, check_insertable
from ..layers.block import GatedCrossAttentionBlock
from ..learning.activation_wrappers import refuse_reentrant
from ..learning.frozen import give_gradient_to_inputs, keep_frozen_in_eval, warn_of_half_precision
from ..learning.sharding import XAttnUnitsMixin, block_plan, fsdp_plan
from ..parts.towers import check_tower_class, check_tower_config
from ..parts.vocabulary import extend_vocabulary
from ..utils.checkpoint_files import NotesWhatIsMissing, Stored, check_class, check_complete
from ..utils.config_checks import DTYPES, check_parts
from ..utils.custom_code import trusting
from ..utils.keywords import FILE_KEYWORDS, given
from ..utils.stub import NamesItsStub
from ..utils.transformers_api import has, needs
from .adapters import SmallCheckpoint
from .folders import (
    check_adapter_folder,
    check_folder,
    check_stored,
    find_manifest,
    find_peft,
    refuse_other_files,
    warn_of_rounding,
)
from .own_parts import warn_before_training
from .quantization import adopt_quantizer, finish_quantized, keep_added_precise, share_quantizer
from .removal import leave_out_added, recorded
from .saved_names import named_as_in_memory
from .saving import XAttnSavingMixin


if TYPE_CHECKING:
    from transformers.modeling_utils import LoadStateDictInfo
    from typing_extensions import Self

# Patterns of the weights of blocks that stay in float32. They name the block, because a decoder may have an `attn_norm`
# of its own, which keeps its dtype.
PRECISE = tuple(GatedCrossAttentionBlock._keep_in_fp32_modules_strict)
PRECISE_WEIGHT = re.compile(rf"\.((?:{'|'.join(BLOCKS)})(?:\.\d+)?\.(?:{'|'.join(map(re.escape, PRECISE))}))(?:\.|$)")

MODELS = ("XAttnModel", "XAttnForConditionalGeneration")  # each of them loads what the other has saved


class XAttnPreTrainedModel(NamesItsStub, NotesWhatIsMissing, XAttnUnitsMixin, XAttnSavingMixin, PreTrainedModel):
    """Base class of [`XAttnModel`] and [`XAttnForConditionalGeneration`]."""

    config_class = XAttnConfig
    config: XAttnConfig
    base_model_prefix = "model"
    input_modalities = ["image", "text"]
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    _can_compile_fullgraph = True
    _input_hooks: tuple[RemovableHandle, ...] = ()
    _stored: dict[str, Stored] | None = None  # the headers of its files, only while a model is loaded
    _skip_keys_device_placement = ["past_key_values", "cache"]
    _keep_in_fp32_modules_strict: Any = [f"{block}.{name}" for block in BLOCKS for name in PRECISE]

    @classmethod
    def _can_set_experts_implementation(cls) -> bool:
        return True  # the decoder itself decides, if it has experts

    @torch.no_grad()
    @init.guard_torch_init_functions()
    def initialize_weights(self) -> None:
        """Initialises weights as `PreTrainedModel.initialize_weights` does, each part by the rule of its own class.

        transformers leaves modules of custom code alone if no weight is missing, and it takes this whole model for
        custom code. But some decoders of transformers need the call: Falcon-H1 fills buffers in modules without
        weights.
        """
        _initialize(self, self)

    @contextlib.contextmanager
    def taking_over(
        self, text_model: PreTrainedModel, was_given: bool, vision_tower: PreTrainedModel | None
    ) -> Iterator[None]:
        """Context in which an [`XAttnModel`] is put together from loaded parts.

        The parts keep their weights, and what changes in the text model is noted for `remove_blocks`. After an error,
        the text model is as before.

        Args:
            was_given (`bool`): whether the text model existed before, and was not built for this model.
        """
        if vision_tower is not None:
            check_tower_class("vision_tower", type(vision_tower))
        elif self.config.vision_config is not None:
            check_tower_config("vision_config", self.config.vision_config)
        with recorded(text_model, was_given) as insertion:
            if was_given:
                keep_weights(text_model)
                forget_untied(text_model)
            if vision_tower is not None:
                keep_weights(vision_tower)
            config = self.config
            if config.additional_vocab_size:
                in_head, scaled = config.additional_vocab_in_head, config.additional_vocab_scaled
                extend_vocabulary(text_model, config.additional_vocab_size, in_head, scaled)
            yield
            # After `post_init`, which would copy the list of tensors that the text model leaves out of its files.
            leave_out_added(text_model)
            self._inserted = insertion.name

    def post_init(self) -> None:
        """Calls `PreTrainedModel.post_init`, with a list of weights that stay in float32 which fits the blocks."""
        text_model, body = self._modules.get("text_model"), self._modules.get("model")
        if isinstance(text_model, PreTrainedModel):
            adopt_quantizer(self, text_model)
        elif isinstance(body, PreTrainedModel):
            share_quantizer(body, self)
        super().post_init()
        others = {kept for kept in self._keep_in_fp32_modules_strict if not kept.startswith(BLOCKS)}
        found = (PRECISE_WEIGHT.search(name) for name, _ in self.named_parameters())
        self._keep_in_fp32_modules_strict = others | {match[1] for match in found if match is not None}

    def train(self, mode: bool = True) -> Self:
        """As `nn.Module.train`, but frozen modules stay in evaluation mode.

        See `learning/frozen.py`. Warns once of things that training or saving will refuse or leave out.
        """
        if mode:
            warn_before_training(self)
        super().train(mode)
        if mode and self.base_model is self:
            self._keep_frozen_in_eval()
            warn_of_half_precision(self)
        return self

    def _keep_frozen_in_eval(self: Any) -> None:
        for part in filter(None, (self.text_model, self.connector, self.vision_tower)):
            keep_frozen_in_eval(part)
        if self.vision_tower is not None and not any(weight.requires_grad for weight in self.vision_tower.parameters()):
            self.vision_tower.eval()  # also with activation checkpointing: it has no gradients

    def _set_gradient_checkpointing(self, *args, **kwargs) -> None:
        refuse_reentrant(kwargs.get("gradient_checkpointing_func"))
        super()._set_gradient_checkpointing(*args, **kwargs)
        if self.training:
            self.train()  # frozen layers with activation checkpointing must be in training mode

    def enable_input_require_grads(self) -> None:
        """As in transformers. The vision tower is included only while it trains."""
        self.disable_input_require_grads()
        body: Any = self.base_model
        self._input_hooks = give_gradient_to_inputs(body.text_model, body.vision_tower)

    def disable_input_require_grads(self) -> None:
        """`PreTrainedModel.disable_input_require_grads`."""
        for hook in self._input_hooks:
            hook.remove()
        self._input_hooks = ()

    def _resolve_parallel_plans(self, distributed_config: Any) -> Any:
        """Adds rules for the blocks to transformers' plans. A plan that the caller gives overrides both."""
        blocks = (name for name, module in self.named_modules() if isinstance(module, GatedCrossAttentionBlock))
        places = {re.sub(r"\.\d+(?=\.|$)", ".*", name) for name in blocks}
        if distributed_config.tp_size > 1:
            rows = block_plan(self.config.cross_attention_config, distributed_config.tp_size)
            added = {f"{place}.{name}": style for place in places for name, style in rows.items()}
            self._tp_plan = added | (self._tp_plan or {})
        if distributed_config.dp_size > 1:
            self._fsdp_plan = fsdp_plan(self, places) | (self._fsdp_plan or {})
        return super()._resolve_parallel_plans(distributed_config)

    def set_attn_implementation(self, attn_implementation: str | dict, *args, **kwargs) -> None:
        """As `PreTrainedModel.set_attn_implementation`.

        Raises:
            ValueError: for a `dict` that names a part which the model does not have.
        """
        check_parts("attn_implementation", attn_implementation, self.config.sub_configs)
        super().set_attn_implementation(attn_implementation, *args, **kwargs)

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: str | os.PathLike | None,
        *model_args,
        config: PreTrainedConfig | str | os.PathLike | None = None,
        allow_missing_weights: bool = False,
        **kwargs,
    ) -> Self:
        """Loads a model, as `PreTrainedModel.from_pretrained` does.

        An `adapter_only=True` folder is put together with the bases that it names. If the text model was quantized when
        the folder was saved, it is quantized again. Without a `dtype`, all weights get the dtype of the configuration,
        and a warning names weights that were saved with more precision. With `trust_remote_code=True`, the code of a
        custom decoder or vision tower runs, too.

        Args:
            quantization_config (*optional*): quantizes the text model alone. For an `adapter_only=True` folder, None
                loads the text model in full precision, also if it was quantized before.
            text_base, vision_base (`str` or `Path`, *optional*): Hub id or folder of the bases of an
                `adapter_only=True` folder, if they have moved. `text_base` may also be a loaded text model, such as the
                one that [`remove_blocks`] returns. The blocks are then put into this model, which is not copied. (Auto
                classes copy their arguments, so call this class.)
            allow_missing_weights (`bool`, defaults to `False`): initialise weights that the checkpoint or the
                `state_dict` lacks, and warn of them, in place of an error. An empty `state_dict` initialises all.

        Raises:
            ValueError: for a folder in which a save was cut off, whose configuration no model has, whose files are
                damaged, pickled or outside of the folder, which lacks weights, or which another class has saved. For a
                base that is gone or has other weights. For a loaded text model beside a folder that changes its
                weights.

        Example:

        ```python
        >>> from transformers import AutoModelForCausalLM

        >>> from hf_xattn import XAttnForConditionalGeneration, retrofit

        >>> retrofit("HuggingFaceTB/SmolLM2-135M-Instruct", "google/siglip-base-patch16-224").save_pretrained(
        ...     "small", adapter_only=True
        ... )
        >>> text_model = AutoModelForCausalLM.from_pretrained("HuggingFaceTB/SmolLM2-135M-Instruct")
        >>> model = XAttnForConditionalGeneration.from_pretrained("small", text_base=text_model)
        ```
        """
        for name in ("tp_plan", "tp_size", "device_mesh", "distributed_config"):
            if kwargs.get(name) is not None and not has("_resolve_parallel_plans"):
                raise ValueError(needs("_resolve_parallel_plans", f"`{name}`"))
        with trusting(pretrained_model_name_or_path, kwargs):
            if isinstance(config, XAttnConfig):
                config.read_custom_code()
            peft = find_peft(pretrained_model_name_or_path, kwargs)
            source: Any = pretrained_model_name_or_path
            peft_name = kwargs.get("adapter_name") or "default"
            if peft is not None:
                check_adapter_folder(peft.name, peft.hub)
                source, kwargs = peft.base, peft.base_kwargs(kwargs)
            checked = check_folder(source, kwargs)
            if checked is not None:
                check_class(cls, checked.fields.get("architectures"), source, MODELS)
            if find_manifest(source, kwargs) is not None:
                loaded: Any = cls._from_small(source, model_args, config, kwargs, allow_missing_weights)
                if peft is not None:
                    (loaded[0] if isinstance(loaded, tuple) else loaded).load_adapter(
                        peft.name, peft_name, adapter_kwargs=peft.hub
                    )
                return loaded
            for name in ("text_base", "vision_base"):
                if kwargs.pop(name, None) is not None:
                    raise ValueError(
                        f"`{name}` is for folders of `save_pretrained(folder, adapter_only=True)`, but {source} holds "
                        "a whole model. Leave it out."
                    )
            if kwargs.get("quantization_config") is not None:
                known: Any = config
                if not isinstance(config, XAttnConfig):
                    known = XAttnConfig.from_pretrained(source, **given(FILE_KEYWORDS, kwargs))
                kwargs["quantization_config"] = keep_added_precise(kwargs["quantization_config"], known)
            info_wanted = kwargs.pop("output_loading_info", False)
            pair: Any = super().from_pretrained(source, *model_args, config=config, output_loading_info=True, **kwargs)
            model, info = pair
            if checked is None and source is not None:  # a Hub id
                check_class(cls, model.config.architectures, source, MODELS)
            what = "`state_dict`" if source is None else source
            if kwargs.get("state_dict") != {}:  # an empty one asks for a new model
                check_complete(model, what, allow_missing_weights)
            _finish(model, what, kwargs)
            if peft is not None and peft.base != peft.name:
                info = model.load_adapter(peft.name, peft_name, adapter_kwargs=peft.hub).to_dict()
        loaded = (model, info) if info_wanted else model
        return loaded

    @staticmethod
    def _load_pretrained_model(
        model: Any, state_dict: Any, checkpoint_files: Any, load_config: Any, expected_keys: Any = None
    ) -> Any:
        refuse_other_files(checkpoint_files)
        if expected_keys is None:  # otherwise these are the weights of an adapter (PEFT)
            model._stored = check_stored(model, state_dict, checkpoint_files, load_config)
        return PreTrainedModel._load_pretrained_model(model, state_dict, checkpoint_files, load_config, expected_keys)

    def load_state_dict(self, state_dict: Mapping[str, Any], *args, **kwargs) -> Any:
        """As `nn.Module.load_state_dict`. Also takes the names in a saved folder, which `Trainer` passes."""
        return super().load_state_dict(named_as_in_memory(self, state_dict), *args, **kwargs)

    def load_adapter(self, peft_model_id: str | None = None, *args, **kwargs) -> LoadStateDictInfo:
        """As `PreTrainedModel.load_adapter`. Raises a `ValueError` for a damaged folder before any layer is added."""
        check_adapter_folder(peft_model_id, kwargs.get("adapter_kwargs") or {})
        return super().load_adapter(peft_model_id, *args, **kwargs)

    @classmethod
    def _from_small(
        cls, source: Any, model_args: tuple[Any, ...], config: Any, load_kwargs: dict[str, Any], allowed: bool
    ) -> Any:
        saved: Any = SmallCheckpoint.find(source, load_kwargs)
        identity = saved.identity()
        if isinstance(text := load_kwargs.get("text_base"), PreTrainedModel):
            if model_args:
                raise ValueError(f"Beside a loaded `text_base`, pass other arguments by name, got {model_args!r}.")
            del load_kwargs["text_base"]
            check_insertable(text)  # not inside `recorded`, which would take blocks out after the error
            with recorded(text):
                model = saved.onto(cls, text, config, load_kwargs)
                _finish_small(model, saved, identity, {"dtype": text.dtype}, allowed)
            return model
        load_kwargs.setdefault("quantization_config", saved.manifest.get("quantization_config"))
        load_kwargs = saved.load_kwargs(config, load_kwargs)
        if load_kwargs["quantization_config"] is not None:
            load_kwargs["quantization_config"] = keep_added_precise(
                load_kwargs["quantization_config"], load_kwargs["config"]
            )
        info_wanted = load_kwargs.pop("output_loading_info", False)
        pair: Any = super().from_pretrained(None, *model_args, output_loading_info=True, **load_kwargs)
        _finish_small(pair[0], saved, identity, load_kwargs, allowed)
        return pair if info_wanted else pair[0]

    def add_model_tags(self, tags: list[str] | str) -> None:
        """As `PreTrainedModel.add_model_tags`, which all trainers of TRL call before they train.

        Raises:
            ValueError: for the tag `"trl"`, if the head has a second matrix for the tokens of `additional_vocab_size`.
                TRL computes probabilities from `lm_head.weight`, in which these tokens are missing.
        """
        if self.config.additional_vocab_in_head and "trl" in ([tags] if isinstance(tags, str) else tags):
            raise ValueError(
                "Expected a model with `additional_vocab_in_head=False` in a trainer of TRL, got "
                f"{self.config.additional_vocab_size} tokens behind the vocabulary that the model can generate. TRL "
                "computes probabilities from `lm_head.weight`, in which these tokens are missing. Use `Trainer`."
            )
        super().add_model_tags(tags)

    def resize_token_embeddings(self, *args, **kwargs) -> nn.Embedding:
        """As `PreTrainedModel.resize_token_embeddings`. Raises a `ValueError` for a model with added vocabulary."""
        if self.config.additional_vocab_size:
            raise ValueError(
                f"This model has {self.config.additional_vocab_size} tokens behind its vocabulary "
                "(`additional_vocab_size`): the embeddings cannot be resized. Resize those of the text model before "
                "you put blocks into it."
            )
        return super().resize_token_embeddings(*args, **kwargs)

    def _init_weights(self, module: nn.Module) -> None:
        """Does nothing: the text model, the vision tower, the connector and the blocks initialise themselves."""


def _finish_small(model: Any, saved: Any, identity: str, load_kwargs: dict[str, Any], allowed: bool) -> None:
    if not os.path.isdir(saved.name):
        check_class(type(model), model.config.architectures, saved.name, MODELS)
    check_complete(model, saved.name, allowed)
    _finish(model, saved.name, load_kwargs)
    model.config.name_or_path = model.name_or_path = saved.name
    model.base_model._folder = identity


def _finish(model: Any, what: Any, load_kwargs: dict[str, Any]) -> None:
    stored = vars(model).pop("_stored", None) or {}
    if all(load_kwargs.get(name) in (None, "auto") for name in DTYPES):
        warn_of_rounding(model, stored, str(what))
    finish_quantized(model)
    if (inner := getattr(model, "model", None)) is not None:  # for callers that generate with the text model alone
        inner.text_model.generation_config = model.generation_config


def _initialize(module: nn.Module, owner: PreTrainedModel) -> None:
    """Initialises a module and its children, the children first. `owner` is the model around it that has the rule."""
    for child in module.children():
        _initialize(child, child if isinstance(child, PreTrainedModel) else owner)
    owner._initialize_weights(module, owner.is_custom_code())


def forget_untied(model: PreTrainedModel) -> None:
    """Removes weights that are no longer tied from the list of tied weights of a loaded model.

    Otherwise `post_init` would tie them again, and the values of one of them would be lost.
    """
    weights = dict(model.named_parameters(remove_duplicate=False))
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    if untied := [name for name, other in tied.items() if weights.get(name) is not weights.get(other)]:
        model.all_tied_weights_keys = {name: other for name, other in tied.items() if name not in untied}


def keep_weights(model: nn.Module) -> None:
    """Marks a loaded model as initialised, so that `post_init` of the model around it leaves its weights alone."""
    part: Any
    for part in (*model.modules(), *model.parameters(), *model.buffers()):
        part._is_hf_initialized = True
