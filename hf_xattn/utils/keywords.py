"""Which keyword arguments a call may bring, and the nearest name for one that it may not.

Transformers' decoders take any keyword and ignore those they do not know. Here such a keyword may be a misspelt image
argument, and the model would answer without the image.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn
from transformers.utils import TransformersKwargs

from .transformers_api import CACHE


# What `generate`, `Trainer` and tokenizers hand to every model, and decoders without a use for it ignore.
COMMON = frozenset({"cache_position", "token_type_ids"})
# What the loss of a causal language model takes beside logits and labels.
LOSS = frozenset({"ignore_index", "num_items_in_batch", "shift_labels"})

# Names that other models have for what is meant.
ELSEWHERE = {
    "images": "pixel_values",
    "image": "pixel_values",
    "image_embeds": "cross_attention_states",
    "image_features": "cross_attention_states",
    "encoder_hidden_states": "cross_attention_states",
    "encoder_attention_mask": "cross_attention_mask",
    "pixel_attention_mask": "image_mask",
    "pixel_mask": "image_mask",
    "cache_params": CACHE,
    "layers": "cross_attention_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
}

# Keywords of `from_pretrained`: to reach a repository, for its files, its code and its configuration.
HUB_KEYWORDS = ("cache_dir", "force_download", "local_files_only", "proxies", "token")
FILE_KEYWORDS = (*HUB_KEYWORDS, "revision", "subfolder")
CODE_KEYWORDS = (*HUB_KEYWORDS, "revision", "code_revision")
CONFIG_KEYWORDS = (*FILE_KEYWORDS, "code_revision", "trust_remote_code")
# All that go to `from_pretrained`, but `config`, `state_dict` and `output_loading_info`: `retrofit` reads the
# checkpoint unchanged, and returns only a model.
LOAD_KEYWORDS = frozenset(CONFIG_KEYWORDS) | frozenset(
    """
    adapter_kwargs adapter_name allow_all_kernels attn_implementation device_map device_mesh disable_mmap
    distributed_config dtype experts_implementation fusion_config generation_config gguf_file
    ignore_mismatched_sizes kernel_config key_mapping low_cpu_mem_usage max_memory offload_buffers
    offload_folder quantization_config torch_dtype tp_plan tp_size tqdm_class use_kernels use_safetensors
    variant weights_only
    """.split()
)


def given(names: Iterable[str], load_kwargs: dict[str, Any]) -> dict[str, Any]:
    """Those of the keyword arguments that have one of the names and a value."""
    return {name: load_kwargs[name] for name in names if load_kwargs.get(name) is not None}


def keywords_of(modules: Iterable[nn.Module]) -> frozenset[str]:
    """Keywords that a decoder reads. `modules`: the decoder and the models around it."""
    known: set[str] = set()
    open_ended = False
    for module in modules:
        parameters = inspect.signature(module.forward).parameters
        known |= parameters.keys()
        open_ended |= any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    return frozenset(known | COMMON | TransformersKwargs.__optional_keys__ if open_ended else known | COMMON)


def refuse_unknown(
    caller: Callable[..., Any], given: Iterable[str], known: frozenset[str], only_near: bool = False
) -> None:
    """Raises a `TypeError` for keywords that are not known, as Python does, with the nearest name.

    Args:
        caller (`Callable`): whose arguments they are; its own names are suggested too.
        only_near (`bool`): let a name pass that resembles none of them.
    """
    for name in given:
        if name in known:
            continue
        own = [
            parameter.name
            for parameter in inspect.signature(caller).parameters.values()
            if parameter.kind is not parameter.VAR_KEYWORD and parameter.name != "self"
        ]
        meant = suggestion(name, [*own, *known])
        if meant or not only_near:
            raise TypeError(f"{caller.__qualname__}() got an unexpected keyword argument `{name}`.{meant}")


def suggestion(name: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """` Did you mean ...?`, or nothing where no known name is near (`cutoff`: of `difflib`, 1 = the same name)."""
    candidates = sorted(set(known))
    if ELSEWHERE.get(name) in candidates:
        return f" Did you mean `{ELSEWHERE[name]}`?"
    near = difflib.get_close_matches(name, candidates, n=1, cutoff=cutoff)
    return f" Did you mean `{near[0]}`?" if near else ""
