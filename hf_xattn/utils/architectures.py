"""A table of the decoder architectures of transformers that differ from the others, and the sizes in configurations.

Most architectures need no entry in `TABLE`, because `decoders/decoder.py` finds the layers of a model, and the way of
keyword arguments to them, by itself. An entry says why an architecture is not supported, or how it differs. A test
builds a small model of each architecture.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from transformers import PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from .transformers_api import OLDEST, is_before, needs


# Vision towers that cut an image into tiles. `vision_output_dim` is the width of their output.
TILED_VISION_TYPES = ("mllama_vision_model",)
# Vision towers without a class token: their first token is a patch of the image.
WITHOUT_CLASS_TOKEN = ("ijepa", "siglip_vision_model", "siglip2_vision_model")


@dataclass(frozen=True)
class Architecture:
    """One `model_type` of transformers' causal language models.

    Attributes:
        refused (`str`, *optional*): why the architecture cannot take blocks, or None if it can.
        via (`"keyword"` or `"call"`): how images reach the layers. With `"keyword"`, the decoder passes a keyword
            argument on to its layers. With `"call"`, the layer's `__call__` fetches the images (see
            `layers/context.py`).
        layer_count (`str`): the configuration field with the number of layers.
        forgets (`bool`): whether transformers' layers drop their recurrent state, without an error, when a call reads
            several tokens after cached text. Here, such text is read one token at a time.
        counts_from_zero (`bool`): whether a `forward` without `position_ids` numbers text after cached text from 0.
        since, static_since (`str`): the first version of transformers in which the decoder works, and in which it works
            with a static cache. Before, it saw later tokens, read text after cached text wrongly, or failed.
        not_static (`str`, *optional*): why the decoder is wrong with a static cache in every version.
        packs (`bool`): whether the decoder keeps the samples of a packed row apart (`parts/packed_rows.py`). A test
            compares a packed row with its samples alone. Models with recurrent layers are refused in any case.
    """

    refused: str | None = None
    via: str = "keyword"
    layer_count: str = "num_hidden_layers"
    forgets: bool = False
    counts_from_zero: bool = False
    since: str = OLDEST
    static_since: str = OLDEST
    not_static: str | None = None
    packs: bool = False


NO_CACHE = "keeps what it has read in {}, not in a cache of transformers"
COMPOSITE = "a larger model, of which the text half is served as {}"
# Each entry, with the model types that have it.
TABLE: tuple[tuple[Architecture, str], ...] = (
    # Supported, with a difference.
    (Architecture(counts_from_zero=True), "bamba"),
    (Architecture(via="call"), "falcon gpt_neox_japanese mamba2 mpt"),
    (Architecture(via="call", not_static="its local layers count their window from the end of the cache"), "gpt_neo"),
    (Architecture(via="call" if is_before("5.24.0") else "keyword"), "codegen gptj"),
    (Architecture(via="call", static_since="5.21.0"), "bloom"),
    (Architecture(via="call", since="5.18.0"), "megatron-bert rembert"),
    (Architecture(via="call", forgets=True), "falcon_mamba mamba"),
    (Architecture(forgets=True), "jamba zamba"),
    (Architecture(layer_count="num_layers"), "longcat_flash"),
    (Architecture(since="5.18.0"), "big_bird doge roformer"),
    (Architecture(since="5.20.0"), "dbrx"),
    (Architecture(since="5.21.0"), "cohere_compass_text moshi"),
    # Not supported.
    (Architecture("takes images or sound itself, in its own way"), "emu3 git musicgen musicgen_melody phi4_multimodal"),
    (
        Architecture("its layers pass several residual streams, not one"),
        "deepseek_v4 gemma3n gemma3n_text hy_v4 qwen4_exp qwen4_exp_text",
    ),
    (
        Architecture("decoder half of an encoder-decoder model, with cross-attention of its own"),
        "bart bigbird_pegasus blenderbot blenderbot-small marian mbart mvp pegasus plbart prophetnet trocr whisper",
    ),
    (Architecture("reads bytes through three stacks of layers"), "blt"),
    (Architecture("puts prompt tokens of its own in front of the text"), "cpmant"),
    (Architecture("drafts for a larger model, whose cache it reads"), "gemma4_assistant gemma4_unified_assistant"),
    (Architecture("runs the same layers several times a token"), "dory hrm_text inkling2_loop_text"),
    (Architecture("has cross-attention to images of its own: `hf-xattn import` brings it over"), "mllama"),
    (Architecture("reads its whole text again at every step: it has no cache"), "openai-gpt"),
    (Architecture("has no layer objects, but lists of their parts"), "xlm"),
    (Architecture(NO_CACHE.format("`MiniMaxCache`")), "minimax"),
    (Architecture(NO_CACHE.format("its own modules")), "recurrent_gemma"),
    (Architecture(NO_CACHE.format("`past_buckets_states`")), "reformer"),
    (Architecture(NO_CACHE.format("`state`")), "rwkv"),
    (Architecture(NO_CACHE.format("`mems`")), "xlnet"),
    (Architecture(NO_CACHE.format("`cache_params`, of a class of its own")), "xlstm"),
    (Architecture(COMPOSITE.format("dots3_note_text")), "dots3_note"),
    (Architecture(COMPOSITE.format("persimmon")), "fuyu"),
    (Architecture(COMPOSITE.format("gemma3_text")), "gemma3"),
    (Architecture(COMPOSITE.format("gemma4_text")), "gemma4"),
    (Architecture(COMPOSITE.format("gemma4_unified_text")), "gemma4_unified"),
    (Architecture(COMPOSITE.format("qwen2")), "got_ocr2"),
    (Architecture(COMPOSITE.format("llama4_text")), "llama4"),
    (Architecture(COMPOSITE.format("qwen3")), "moss_transcribe_diarize"),
    (Architecture(COMPOSITE.format("qwen3_5_text")), "qwen3_5"),
    (Architecture(COMPOSITE.format("qwen3_5_moe_text")), "qwen3_5_moe"),
)
# Types that keep the samples of packed rows apart. They may have another entry besides.
PACKS = """
apertus apertus1p5_text arcee aria_text axk1 axk2 beam bitnet codegen cohere cohere2 cohere2_moe cohere_compass_text
ctrl cwm dbrx deepseek_v2 deepseek_v3 deepseek_v32 diffllama doge dots1 dots3_note_text emu3_text_model ernie4_5
ernie4_5_moe exaone exaone4 exaone_moe flex_olmo flint gemma gemma2 gemma3_text gemma4_text gemma4_unified_text glm
glm4 glm4_moe glm4_moe_lite glm_moe_dsa gpt-sw3 gpt2 gpt_bigcode gpt_neo gpt_neox gpt_neox_japanese gptj granite
granite_swa granitemoe granitemoe_swa granitemoeshared helium hunyuan_v1_dense hunyuan_v1_moe hy_v3 hyperclovax
internlm3 iquestcoder jais2 jetmoe kolibri1 laguna lfm2 lfm2_moe lfm3 llama llama4_text longcat_flash mellum
mimo_v2_flash minicpm3 minimax_m2 minimax_m3_vl_text ministral ministral3 mistral mistral4 mixtral mllama_text_model
modernbert-decoder moshi nanochat nemotron olmo olmo2 olmo3 olmoe persimmon phi phi3 phimoe qwen2 qwen2_moe qwen3
qwen3_moe sarvam_mla sarvam_moe seed_oss smollm3 solar_open stablelm starcoder2 vaultgemma youtu
""".split()
PACKS += [] if is_before("5.24.0") else ["falcon"]
ARCHITECTURES = {name: entry for entry, names in TABLE for name in names.split()}
ARCHITECTURES |= {name: replace(ARCHITECTURES.get(name, Architecture()), packs=True) for name in PACKS}


def architecture(model_type: str) -> Architecture:
    """Returns the entry of a `model_type`, or the default. A type that needs a newer transformers is `refused`.

    Example:

    ```python
    >>> import hf_xattn

    >>> print(hf_xattn.architecture("llama").refused)  # None: served
    None
    >>> hf_xattn.architecture("xlnet").refused is None
    False
    ```
    """
    entry = ARCHITECTURES.get(model_type, Architecture())
    return replace(entry, refused=needs(entry.since, "its decoder")[:-1]) if is_before(entry.since) else entry


def causal_model_types() -> list[str]:
    """Returns each `model_type` with a causal language model in transformers."""
    return sorted(name for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if not name.startswith("xattn"))


def markdown_table() -> str:
    """Returns the table that `hf-xattn inspect --architectures` prints and the guide to decoders shows."""
    ways = {"keyword": "images as a keyword argument", "call": "images fetched by the layer"}
    served: dict[str, list[str]] = {via: [] for via in ways}
    refused: dict[str, list[str]] = {}
    for name in causal_model_types():
        entry = architecture(name)
        names = served[entry.via] if entry.refused is None else refused.setdefault(entry.refused, [])
        names.append(f"`{name}`")
    lines = [
        f"| {sum(map(len, served.values()))} of {len(causal_model_types())} model types | |",
        "|---|---|",
        *(f"| served, {way} ({len(served[via])}) | {', '.join(served[via])} |" for via, way in ways.items()),
        *(f"| not served: {reason} | {', '.join(names)} |" for reason, names in sorted(refused.items())),
    ]
    return "\n".join(lines)


def text_num_hidden_layers(text_config: PreTrainedConfig) -> int:
    """Returns the number of layers of the decoder."""
    decoder = text_config.get_text_config(decoder=True)
    return getattr(decoder, architecture(decoder.model_type).layer_count)


def text_hidden_size(text_config: PreTrainedConfig) -> int:
    """Returns the hidden size of the decoder."""
    return text_config.get_text_config(decoder=True).hidden_size


def vision_hidden_size(vision_config: PreTrainedConfig) -> int:
    """Returns the width of a vision model's `last_hidden_state`, as its configuration says.

    Raises:
        ValueError: if the configuration does not say it.
    """
    for config in (vision_config, getattr(vision_config, "vision_config", None)):
        width = "vision_output_dim" if getattr(config, "model_type", None) in TILED_VISION_TYPES else "hidden_size"
        size = getattr(config, width, None)
        if isinstance(size, int):
            return size
        sizes = getattr(config, "hidden_sizes", None)
        if sizes:
            return sizes[-1]
    raise ValueError(
        f"`vision_config` of type {vision_config.model_type!r} names no `hidden_size` or `hidden_sizes`: expected "
        "`vision_hidden_size`, the width of the vision model's `last_hidden_state`, which `retrofit` measures."
    )


def layers_width(vision_config: PreTrainedConfig | None) -> int | None:
    """Returns the width of all hidden states of a vision model. None without a vision model, and if the widths differ
    or are not known.
    """
    if vision_config is None or vision_config.model_type in TILED_VISION_TYPES:
        return None
    size = getattr(vision_config, "hidden_size", None)
    return size if isinstance(size, int) and not getattr(vision_config, "hidden_sizes", None) else None


def vision_feature_size(config: PreTrainedConfig) -> int:
    """Returns the width of the features that the connector of an [`XAttnConfig`] reads."""
    layers = config.vision_feature_layer
    width = config.vision_hidden_size or vision_hidden_size(config.vision_config)
    return width * (len(layers) if isinstance(layers, (list, tuple)) else 1)


def shared_size(config: PreTrainedConfig, field: str) -> int | None:
    """Returns a size that all layers of a decoder share. None if there is no such field, or if the layers differ."""
    try:
        value = getattr(config, field, None)
    except RuntimeError:  # raised by transformers for a field that differs between layers
        return None
    return value if isinstance(value, int) and value > 0 else None
