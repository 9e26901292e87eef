"""What both models share with transformers' loading, initialisation and dispatching. Saving is in `saving.py`."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel
from transformers import initialization as init
from transformers.utils import find_adapter_config_file, is_peft_available

from .adapters import Adapter
from .config_checks import check_parts
from .configuration_xattn import XAttnConfig
from .custom_code import HUB_ARGUMENTS, trusting
from .input_gradients import give_gradient_to_inputs
from .insertion import BLOCKS
from .lost_updates import warn_of_half_precision
from .no_split import XAttnUnitsMixin, fsdp_plan
from .quantization import finish_quantized, keep_added_precise
from .saving import XAttnSavingMixin
from .stub import NamesItsStub
from .tensor_parallel import block_plan
from .transformers_api import has, needs
from .whole_folder import finish_interrupted


class XAttnPreTrainedModel(NamesItsStub, XAttnUnitsMixin, XAttnSavingMixin, PreTrainedModel):
    """What both models share with transformers' loading, saving and dispatching."""

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
    _skip_keys_device_placement = ["past_key_values"]
    # Named with the block's place: a decoder may have an `attn_norm` of its own, which keeps its dtype.
    _keep_in_fp32_modules_strict = [
        f"{block}.{name}"
        for block in BLOCKS
        for name in ("attn_gate", "mlp_gate", "attn_norm", "mlp_norm", "attn.q_norm", "attn.k_norm")
    ]

    @classmethod
    def _can_set_experts_implementation(cls) -> bool:
        return True  # the decoder decides, where it has experts

    @torch.no_grad()
    @init.guard_torch_init_functions()
    def initialize_weights(self) -> None:
        """`PreTrainedModel.initialize_weights`, each part by the rule for its own code.

        Custom code may write in place, so transformers spares its modules where no weight is missing. It does so in the whole
        tree of a custom model, but decoders of transformers need that call: Falcon-H1 fills buffers in modules without weights.
        """
        _initialize(self, self)

    def train(self, mode: bool = True) -> Any:
        """`nn.Module.train`. Warns once of weights that train in half precision (see `lost_updates.py`)."""
        super().train(mode)
        if mode and self.base_model is self:
            warn_of_half_precision(self)
        return self

    def _set_gradient_checkpointing(self, *args, **kwargs) -> None:
        super()._set_gradient_checkpointing(*args, **kwargs)
        if self.training:
            self.train()  # frozen layers that are checkpointed train, see `frozen_modes.py`

    def enable_input_require_grads(self) -> None:
        """`PreTrainedModel.enable_input_require_grads`. The vision tower takes part only while it trains (see `input_gradients.py`)."""
        self.disable_input_require_grads()
        body: Any = self.base_model
        self._input_hooks = give_gradient_to_inputs(body.text_model, body.vision_tower)

    def disable_input_require_grads(self) -> None:
        """`PreTrainedModel.disable_input_require_grads`."""
        for hook in self._input_hooks:
            hook.remove()
        self._input_hooks = ()

    def _resolve_parallel_plans(self, distributed_config: Any) -> Any:
        """transformers' plans, and rows for the blocks in those of tensor parallelism and FSDP."""
        places = {re.sub(r"\.\d+\.", ".*.", name) for name, _ in self.named_modules() if name.endswith(BLOCKS)}
        # A plan that was given has the last word.
        if distributed_config.tp_size > 1:
            rows = block_plan(self.config.cross_attention_config, distributed_config.tp_size)
            added = {f"{place}.{name}": style for place in places for name, style in rows.items()}
            self._tp_plan = added | (self._tp_plan or {})
        if distributed_config.dp_size > 1:
            self._fsdp_plan = fsdp_plan(self, places) | (self._fsdp_plan or {})
        return super()._resolve_parallel_plans(distributed_config)

    def set_attn_implementation(self, attn_implementation: str | dict, *args, **kwargs) -> None:
        """`PreTrainedModel.set_attn_implementation`.

        Raises:
            ValueError: for a `dict` that names a part which the model does not have.
        """
        check_parts("attn_implementation", attn_implementation, self.config.sub_configs)
        super().set_attn_implementation(attn_implementation, *args, **kwargs)

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *model_args, config: Any = None, **kwargs) -> Any:
        """`PreTrainedModel.from_pretrained`. With `trust_remote_code=True` it runs the code of a custom decoder or vision tower.

        A folder of `save_pretrained(folder, adapter_only=True)` is put together with the bases that it names. A warning names a base
        that has changed since. A text model that was quantized is quantized again.

        Args:
            quantization_config (*optional*): quantizes the text model alone: blocks, connector and vision tower stay in high
                precision. For a folder of `adapter_only=True`, None means a text model in full precision, whatever it was.
            text_base, vision_base (`str` or `Path`, *optional*): Hub id or folder of the bases of such a folder, if they have moved.

        Raises:
            ValueError: for such a folder that is half written or damaged, or whose base is gone or of another shape.
        """
        _refuse_splitting_of_old(kwargs)
        if isinstance(pretrained_model_name_or_path, (str, os.PathLike)):
            finish_interrupted(Path(pretrained_model_name_or_path, kwargs.get("subfolder") or ""))
        with trusting(pretrained_model_name_or_path, kwargs):
            if isinstance(config, XAttnConfig):
                config.read_custom_code()
            peft_folder, source = _base_of_peft(pretrained_model_name_or_path, kwargs)
            adapter = Adapter.find(source, kwargs)
            if adapter is not None:
                peft_name = kwargs.get("adapter_name") or "default"
                loaded: Any = cls._from_adapter(adapter, model_args, config, kwargs)
                if peft_folder is not None:
                    (loaded[0] if isinstance(loaded, tuple) else loaded).load_adapter(peft_folder, peft_name)
                return loaded
            for name in ("text_base", "vision_base"):
                if kwargs.pop(name, None) is not None:
                    raise ValueError(
                        f"`{name}` is for folders of `save_pretrained(folder, adapter_only=True)`, but {pretrained_model_name_or_path} "
                        "holds a whole model."
                    )
            if kwargs.get("quantization_config") is not None:
                known = config if isinstance(config, XAttnConfig) else _read_config(source, kwargs)
                kwargs["quantization_config"] = keep_added_precise(kwargs["quantization_config"], known)
            loaded = super().from_pretrained(pretrained_model_name_or_path, *model_args, config=config, **kwargs)
        finish_quantized(loaded[0] if isinstance(loaded, tuple) else loaded)
        return loaded

    @classmethod
    def _from_adapter(
        cls, adapter: Adapter, model_args: tuple[Any, ...], config: Any, load_kwargs: dict[str, Any]
    ) -> Any:
        """Loads bases and added weights. Returns what `from_pretrained` returns."""
        load_kwargs.setdefault("quantization_config", adapter.manifest.get("quantization_config"))
        load_kwargs = adapter.load_kwargs(config, load_kwargs)
        if load_kwargs["quantization_config"] is not None:
            load_kwargs["quantization_config"] = keep_added_precise(
                load_kwargs["quantization_config"], load_kwargs["config"]
            )
        loaded: Any = super().from_pretrained(None, *model_args, **load_kwargs)
        model = loaded[0] if isinstance(loaded, tuple) else loaded
        finish_quantized(model)
        model.config.name_or_path = model.name_or_path = adapter.name
        return loaded

    def resize_token_embeddings(self, *args, **kwargs) -> nn.Embedding:
        """`PreTrainedModel.resize_token_embeddings`.

        Raises:
            ValueError: for a model with `additional_vocab_size`: those tokens lie behind the vocabulary and would move.
        """
        if self.config.additional_vocab_size:
            raise ValueError(
                f"This model has {self.config.additional_vocab_size} tokens behind its vocabulary "
                "(`additional_vocab_size`): the embeddings cannot be resized."
            )
        return super().resize_token_embeddings(*args, **kwargs)

    def _init_weights(self, module: nn.Module) -> None:
        """Nothing here has weights of its own: decoder, tower, connector and blocks initialise themselves."""


def _base_of_peft(checkpoint: Any, load_kwargs: dict[str, Any]) -> tuple[str | None, Any]:
    """For a folder with an adapter (PEFT): the folder, and the checkpoint of the model below it. Otherwise None, and `checkpoint`."""
    known = (load_kwargs.get("adapter_kwargs") or {}).get("_adapter_model_path")
    if known is not None:  # from an Auto class, which has replaced `checkpoint`
        return known, checkpoint
    if not isinstance(checkpoint, (str, os.PathLike)) or not is_peft_available():
        return None, checkpoint
    hub = {name: load_kwargs[name] for name in (*HUB_ARGUMENTS, "subfolder") if load_kwargs.get(name) is not None}
    hub.pop("code_revision", None)
    file = find_adapter_config_file(os.fspath(checkpoint), **hub)
    if file is None:
        return None, checkpoint
    if Path(checkpoint, "config.json").is_file():
        return os.fspath(checkpoint), checkpoint
    return os.fspath(checkpoint), json.loads(Path(file).read_text(encoding="utf-8"))["base_model_name_or_path"]


def _refuse_splitting_of_old(load_kwargs: dict[str, Any]) -> None:
    """Refuses to split the model over ranks where transformers does not ask it for the plans of its blocks."""
    for name in ("tp_plan", "tp_size", "device_mesh", "distributed_config"):
        if load_kwargs.get(name) is not None and not has("_resolve_parallel_plans"):
            raise ValueError(needs("_resolve_parallel_plans", f"`{name}`"))


def _read_config(checkpoint: Any, load_kwargs: dict[str, Any]) -> XAttnConfig:
    hub = {name: load_kwargs[name] for name in (*HUB_ARGUMENTS, "subfolder") if load_kwargs.get(name) is not None}
    return XAttnConfig.from_pretrained(checkpoint, **hub)


def _initialize(module: nn.Module, owner: PreTrainedModel) -> None:
    """Initialises a tree of modules, children first.

    Args:
        module (`nn.Module`): the tree.
        owner (`PreTrainedModel`): the model whose `_init_weights` it gets, which is the nearest one above.
    """
    for child in module.children():
        _initialize(child, child if isinstance(child, PreTrainedModel) else owner)
    owner._initialize_weights(module, owner.is_custom_code())


def keep_weights(model: nn.Module) -> None:
    """Marks a loaded model as initialised, so that `post_init` of the model around it leaves its weights alone."""
    part: Any
    for part in (*model.modules(), *model.parameters(), *model.buffers()):
        part._is_hf_initialized = True
