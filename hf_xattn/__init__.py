"""Gated cross-attention for any text decoder of transformers. Importing registers everything with the Auto classes."""

from transformers import AutoConfig, AutoModel

from .attention import GatedCrossAttention
from .block import GatedCrossAttentionBlock
from .configuration_xattn import CrossAttentionConfig, XAttnConfig
from .modeling_xattn import XAttnForConditionalGeneration, XAttnModel
from .version import __version__



def _register() -> None:
    import transformers

    AutoConfig.register(XAttnConfig.model_type, XAttnConfig)
    AutoConfig.register(CrossAttentionConfig.model_type, CrossAttentionConfig)
    AutoModel.register(XAttnConfig, XAttnModel)
    AutoModel.register(CrossAttentionConfig, GatedCrossAttentionBlock)
    for name in ("AutoModelForCausalLM", "AutoModelForImageTextToText", "AutoModelForMultimodalLM"):
        if (auto_class := getattr(transformers, name, None)) is not None:
            auto_class.register(XAttnConfig, XAttnForConditionalGeneration)


_register()

__all__ = [
    "CrossAttentionConfig",
    "GatedCrossAttention",
    "GatedCrossAttentionBlock",
    "XAttnConfig",
    "XAttnForConditionalGeneration",
    "XAttnModel",
    "__version__",
]
