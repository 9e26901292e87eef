"""Checks keyword arguments, and suggests the nearest name for an unknown one.

transformers' decoders take any keyword and ignore those that they do not know. Here an unknown keyword may be a
misspelt image argument, and the model would answer without the image. So it is an error.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn
from transformers.utils import TransformersKwargs

from .transformers_api import CACHE


# Keywords that `generate`, `Trainer` and tokenizers pass to every model. Decoders that do not need them ignore them.
COMMON = frozenset({"cache_position", "token_type_ids"})
# Keywords that the loss of a causal language model takes besides logits and labels.
LOSS = frozenset({"ignore_index", "num_items_in_batch", "shift_labels"})

# Names of arguments in other models, with the names that the arguments have here.
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

# Keywords of `from_pretrained` that are about a repository, its files, its code and its configuration.
HUB_KEYWORDS = ("cache_dir", "force_download", "local_files_only", "proxies", "token")
FILE_KEYWORDS = (*HUB_KEYWORDS, "revision", "subfolder")
CODE_KEYWORDS = (*HUB_KEYWORDS, "revision", "code_revision")
CONFIG_KEYWORDS = (*FILE_KEYWORDS, "code_revision", "trust_remote_code")
# All keywords of `from_pretrained`, without `config`, `state_dict` and `output_loading_info`: `retrofit` reads a
# checkpoint as it is and returns a model alone.
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
    """Returns the keyword arguments with one of the names and a value other than None."""
    return {name: load_kwargs[name] for name in names if load_kwargs.get(name) is not None}


def keywords_of(modules: Iterable[nn.Module]) -> frozenset[str]:
    """Returns the keywords that a decoder reads. `modules` are the decoder and the models around it."""
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
    """Raises a `TypeError` for an unknown keyword, as Python does, and suggests the nearest name.

    Args:
        caller (`Callable`): the function that got the keywords. Its own arguments are suggested, too.
        given (`Iterable[str]`): the keywords.
        known (`frozenset[str]`): the names that are allowed.
        only_near (`bool`, defaults to `False`): let a keyword pass if it resembles no name.
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
    """Returns ` Did you mean ...?`, or an empty text if no known name is near.

    `cutoff` is that of `difflib`: 1 accepts only the same name.
    """
    candidates = sorted(set(known))
    if ELSEWHERE.get(name) in candidates:
        return f" Did you mean `{ELSEWHERE[name]}`?"
    near = difflib.get_close_matches(name, candidates, n=1, cutoff=cutoff)
    return f" Did you mean `{near[0]}`?" if near else ""
