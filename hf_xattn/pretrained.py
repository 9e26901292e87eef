"""What both models share with transformers' loading, saving, initialisation and dispatching."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers import initialization as init

from .adapters import Adapter, forget_adapter, save_adapter
from .config_checks import check_parts
from .configuration_xattn import XAttnConfig
from .custom_code import HUB_ARGUMENTS, save_code, trusting
from .insertion import BLOCKS
from .keywords import refuse_unknown, suggestion
from .model_card import FILE, is_blank, write_model_card
from .quantization import check_savable, finish_quantized, keep_added_precise
from .stub import NamesItsStub, write_stub
from .tensor_checks import type_name


# Keywords of `save_pretrained` that `adapter_only=True` takes or refuses itself; transformers overlooks what it does not know.
SAVE_KEYWORDS = frozenset(
    """is_main_process state_dict push_to_hub max_shard_size variant token save_peft_format save_original_format
distributed_checkpoint""".split()
)


class XAttnPreTrainedModel(NamesItsStub, PreTrainedModel):
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
    _saved_as: str | None = None
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

        A `quantization_config` quantizes the text model alone: blocks, connector and vision tower stay in high precision.

        A folder of `save_pretrained(folder, adapter_only=True)` is put together with the bases that it names, and a base that has
        changed since is worth a warning.

        Args:
            text_base, vision_base (`str` or `Path`, *optional*): Hub id or folder of the bases of such a folder, where they are not
                where they were.

        Raises:
            ValueError: for such a folder that is half written or damaged, or whose base is gone or of another shape.
        """
        with trusting(pretrained_model_name_or_path, kwargs):
            if isinstance(config, XAttnConfig):
                config.read_custom_code()
            adapter = Adapter.find(pretrained_model_name_or_path, kwargs)
            quantization_config = kwargs.get("quantization_config")
            if adapter is not None:
                if quantization_config is not None:
                    raise ValueError(
                        f"`quantization_config` does not work with {pretrained_model_name_or_path}, a folder of "
                        "`save_pretrained(folder, adapter_only=True)`. Load it without, save the whole model, and quantize that."
                    )
                returns_info = kwargs.get("output_loading_info")
                loaded: Any = super().from_pretrained(None, *model_args, **adapter.load_kwargs(config, kwargs))
                model = loaded[0] if returns_info else loaded
                model.config.name_or_path = model.name_or_path = adapter.name
                return loaded
            for name in ("text_base", "vision_base"):
                if kwargs.pop(name, None) is not None:
                    raise ValueError(
                        f"`{name}` is for folders of `save_pretrained(folder, adapter_only=True)`, but {pretrained_model_name_or_path} "
                        "holds a whole model."
                    )
            if quantization_config is not None:
                known = (
                    config if isinstance(config, XAttnConfig) else _read_config(pretrained_model_name_or_path, kwargs)
                )
                kwargs["quantization_config"] = keep_added_precise(quantization_config, known)
            loaded = super().from_pretrained(pretrained_model_name_or_path, *model_args, config=config, **kwargs)
        finish_quantized(loaded[0] if isinstance(loaded, tuple) else loaded)
        return loaded

    def save_pretrained(
        self,
        save_directory: str | os.PathLike[str],
        is_main_process: bool = True,
        *args,
        adapter_only: bool = False,
        text_base: str | os.PathLike[str] | None = None,
        vision_base: str | os.PathLike[str] | None = None,
        with_code: bool = False,
        **kwargs,
    ) -> None:
        """`PreTrainedModel.save_pretrained`, under the names and shapes that the weights have in memory.

        The code of a custom decoder or vision tower is saved beside them, and the model loads with `trust_remote_code=True`. A model
        card is written too (see `model_card.py`), unless the folder holds one that a person wrote or changed.

        An original checkpoint of this model does not exist, and the renamings that give a decoder its original names are
        patterns that hit blocks too: Mixtral's turn `mlp_gate` into `block_sparse_moe.gate`, and back into `mlp.gate`.

        Args:
            adapter_only (`bool`, defaults to `False`): save only what the bases do not hold: blocks, connector, added vocabulary, and
                the weights of text model and vision tower that differ from their bases, which are loaded once more to compare them.
                `from_pretrained` of the folder fetches the bases.
            text_base, vision_base (`str` or `Path`, *optional*): with `adapter_only`, Hub id or folder of the bases; by default where
                the parts were loaded from.
            with_code (`bool`): save the code of this package too, so that the folder loads with `trust_remote_code=True` where the
                package is not installed. Without it, the folder has a stub that imports the package.

        Raises:
            TypeError: for `with_code` of another type, or misspelt.
            ValueError: if the code of a custom part is in a file of the same name as one of this package; for a quantized model that
                could not be loaded again, before anything is written; with `adapter_only`, for a base without a name or a checkpoint,
                a quantized base, or LoRA layers.
        """
        if not isinstance(with_code, bool):
            raise TypeError(f"Expected `with_code` to be a bool, got {type_name(with_code)}.")
        for name in kwargs:  # transformers takes any name
            if meant := suggestion(name, ["with_code"], cutoff=0.8):
                raise TypeError(f"save_pretrained() got an unexpected keyword argument `{name}`.{meant}")
        if self.base_model.active_cross_attention is None:
            raise ValueError(
                "No cross-attention is active, so there is nothing to save: call `set_cross_attention` first."
            )
        if adapter_only:
            for name in ("push_to_hub", "variant", "distributed_checkpoint"):
                if kwargs.get(name):
                    raise ValueError(f"`adapter_only=True` does not work together with `{name}`, got {kwargs[name]!r}.")
            refuse_unknown(self.save_pretrained, kwargs, SAVE_KEYWORDS)
            if args:
                raise ValueError(f"With `adapter_only=True` pass other arguments by name, got {args!r}.")
            state_dict = kwargs.pop("state_dict", None)
            is_unnamed = self._takes_name_of_folder()
            if is_main_process:
                bases = {"text_base": text_base, "vision_base": vision_base}

                def save(folder: Path, weights: dict[str, torch.Tensor]) -> None:
                    self.save_pretrained(folder, state_dict=weights, with_code=with_code, **kwargs)

                save_adapter(self, save_directory, save, bases, state_dict)
            if is_unnamed:
                self.name_or_path = self.config.name_or_path = self._saved_as = os.fspath(save_directory)
            return
        for name, base in (("text_base", text_base), ("vision_base", vision_base)):
            if base is not None:
                raise ValueError(f"`{name}` needs `adapter_only=True`, got {base!r}.")
        if not getattr(self, "_hf_peft_config_loaded", False):  # an adapter is saved without the weights below it
            check_savable(self)
        if is_main_process and not os.path.isfile(save_directory):
            body: Any = self.base_model
            config = self.config
            parts = ((body.text_model, config.text_config), (body.vision_tower, config.vision_config))
            forget_adapter(save_directory)
            save_code([(part, own) for part, own in parts if part is not None and own is not None], save_directory)
            write_stub(save_directory, with_code)
        card = Path(save_directory) / FILE
        # Transformers writes the repository's card over this one before it uploads.
        self._kept_card = card.read_bytes() if card.is_file() else None
        try:
            super().save_pretrained(save_directory, is_main_process, *args, **{"save_original_format": False, **kwargs})
        finally:
            del self._kept_card
        if is_main_process and Path(save_directory, "config.json").is_file():
            write_model_card(self, save_directory)
        if self._takes_name_of_folder():
            self.name_or_path = self.config.name_or_path = self._saved_as = os.fspath(save_directory)

    def _takes_name_of_folder(self) -> bool:
        """Whether saving names the model. Adapters (PEFT) record this name as their base; a retrofit has none before it is saved."""
        return self.name_or_path in ("", self._saved_as) and not getattr(self, "_hf_peft_config_loaded", False)

    def _upload_modified_files(self, working_dir: str | os.PathLike[str], *args, **kwargs) -> Any:
        """Called by `save_pretrained` and `push_to_hub`, with transformers' empty card where the repository has none."""
        card = Path(working_dir) / FILE
        if card.is_file() and is_blank(card.read_text(encoding="utf-8", errors="replace")):
            kept = getattr(self, "_kept_card", None)
            if kept is not None:
                card.write_bytes(kept)
            write_model_card(self, working_dir)
        return super()._upload_modified_files(working_dir, *args, **kwargs)

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


def _read_config(checkpoint: Any, load_kwargs: dict[str, Any]) -> XAttnConfig:
    """The configuration of a checkpoint, or of the checkpoint that an adapter (PEFT) names as its base."""
    hub = {name: load_kwargs[name] for name in (*HUB_ARGUMENTS, "subfolder") if load_kwargs.get(name) is not None}
    adapter = Path(checkpoint) / "adapter_config.json"
    if adapter.is_file() and not (adapter.parent / "config.json").is_file():
        checkpoint = json.loads(adapter.read_text(encoding="utf-8"))["base_model_name_or_path"]
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
