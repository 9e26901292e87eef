"""Small models with heads that the CPU kernels of vLLM take, and requests for them."""

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    OPTConfig,
    Phi3Config,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from helpers.models.template_models import make_processor
from helpers.models.template_models import picture as plain_picture
from helpers.models.tiny_mllama import make_mllama, make_mllama_processor
from helpers.models.tiny_mllama import picture as wide_picture
from helpers.models.tiny_models import PERCEIVER, randomize, strengthen, vision_config
from hf_xattn import XAttnConfig, XAttnForConditionalGeneration, XAttnProcessor, retrofit
from hf_xattn.importers import export_checkpoint, import_checkpoint


IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 256,
    **IDS,
}
HEAD = {"head_dim": 32}
WINDOW = {"sliding_window": 64, "layer_types": ["sliding_attention", "full_attention"] * 2}
EXPERTS = {"num_experts_per_tok": 2}
TEXTS = {
    "gemma2": lambda **v: Gemma2Config(**SIZES, **HEAD, **v, query_pre_attn_scalar=32),
    "gemma3_text": lambda **v: Gemma3TextConfig(**SIZES, **HEAD, **WINDOW, **v, query_pre_attn_scalar=32),
    "gpt2": lambda **v: GPT2Config(n_embd=64, n_layer=4, n_head=2, n_positions=256, **IDS, **v),
    "granite": lambda **v: GraniteConfig(**SIZES, **v),
    "llama": lambda **v: LlamaConfig(**SIZES, **HEAD, **v),
    "mistral": lambda **v: MistralConfig(**SIZES, **HEAD, **v, sliding_window=None),
    "mixtral": lambda **v: MixtralConfig(**SIZES, **EXPERTS, **v, num_local_experts=4),
    "olmo2": lambda **v: Olmo2Config(**SIZES, **v),
    "opt": lambda **v: OPTConfig(
        hidden_size=64,
        num_hidden_layers=4,
        num_attention_heads=2,
        ffn_dim=96,
        word_embed_proj_dim=64,
        max_position_embeddings=256,
        **IDS,
        **v,
    ),
    "phi3": lambda **v: Phi3Config(**SIZES, **v),
    "qwen2": lambda **v: Qwen2Config(**SIZES, **v),
    "qwen3": lambda **v: Qwen3Config(**SIZES, **HEAD, **v),
    "qwen3_moe": lambda **v: Qwen3MoeConfig(**SIZES, **HEAD, **EXPERTS, **v, num_experts=4, moe_intermediate_size=48),
}
RESAMPLER = {
    "connector_type": "perceiver",
    "perceiver_config": {**PERCEIVER, "num_latents": 3, "num_image_positions": 4},
    "block": {"context_size": 24},
}


def save_model(folder, text="llama", block=None, vocab_size=None, tied=None, bos=True, with_code=False, **config):
    """Saves a model with strong random weights, and its processor. Returns both."""
    processor = make_processor(**({} if bos else {"bos_token": None}))
    torch.manual_seed(0)
    sizes = {"vocab_size": vocab_size or len(processor.tokenizer)}
    if tied is not None:
        sizes["tie_word_embeddings"] = tied
    made = AutoModelForCausalLM.from_config(TEXTS[text](**sizes), dtype=torch.float32)
    config = {"cross_attention_layers": [1, 3], "image_token_id": processor.image_token_id, **config}
    blocks = {"head_dim": 32, "num_attention_heads": 4, "num_key_value_heads": 2, **(block or {})}
    full = XAttnConfig(
        text_config=strengthen(made).config, vision_config=vision_config(), cross_attention_config=blocks, **config
    )
    model = XAttnForConditionalGeneration(full, text_model=made).eval()
    if config.get("additional_vocab_size"):
        with torch.no_grad():
            model.get_input_embeddings().additional.weight.normal_()
    randomize(model)
    model.save_pretrained(folder, with_code=with_code)
    processor.save_pretrained(folder)
    return model, processor


def save_with_base(folder, base, **model):
    """Saves a model, and its text model alone."""
    made, processor = save_model(folder, **model)
    made.model.text_model.save_pretrained(base)
    processor.tokenizer.save_pretrained(base)


def save_adapter(folder, **model):
    """Saves what a model adds to its bases, which lie beside it, and its processor."""
    made, processor = save_model(folder / "whole", **model)
    made.model.text_model.save_pretrained(folder / "text")
    made.model.vision_tower.save_pretrained(folder / "vision")
    block = made.config.cross_attention_config.to_dict()
    sizes = {name: block[name] for name in ("head_dim", "num_attention_heads", "num_key_value_heads")}
    layers = made.config.cross_attention_layers
    again = retrofit(folder / "text", folder / "vision", cross_attention_layers=layers, cross_attention=sizes)
    again.load_state_dict(made.state_dict(), strict=False)
    again.save_pretrained(folder / "added", adapter_only=True)
    processor.save_pretrained(folder / "added")
    return str(folder / "added")


REQUESTS = [
    ("what is it ?", []),
    ("<image>what is it ?", [1]),
    ("a red circle. user system", []),
    ("so <image> and <image> a blue square.", [2, 3]),
    ("<image>what is it ?", [4]),
    ("a " * 20 + "<image>picture of<image><image>b", [5, 1, 2]),
    ("system system<image>", [6]),
]


# Text that sees no image, images of several tiles, images in a row.
TILED_REQUESTS = [
    ("w5 w6 w7", []),
    ("<|image|> w5 w6", [1]),
    ("w3 w4 <|image|> w5 w6", [2]),
    ("<|image|> w5 <|image|> w6 w7", [3, 4]),
    ("<s> <|image|> <|image|> w6", [5, 1]),
    ("w8 <|image|> w2 <|image|> <|image|> w3", [2, 3, 4]),
]
TILES = [(28, 28), (60, 28), (28, 60), (56, 56), (90, 28)]


def picture(seed, tiled=False):
    """With `tiled`, a picture of another shape for each of five seeds: one to four tiles."""
    return wide_picture(*TILES[seed % len(TILES)], seed) if tiled else plain_picture(seed)


def save_tiled(folder, kind):
    """Saves a Llama 3.2 Vision. `kind`: "mllama", transformers' own; "exported", by this package; or "imported"."""
    model, processor = (
        make_mllama(hidden_size=64, num_attention_heads=2, num_key_value_heads=1),
        make_mllama_processor(),
    )
    if kind == "mllama":
        model.save_pretrained(folder)
        processor.save_pretrained(folder)
        return
    own = folder if kind == "imported" else f"{folder}-imported"
    import_checkpoint(model, own)
    parts = processor.image_processor, processor.tokenizer
    XAttnProcessor(*parts, image_token=processor.image_token).save_pretrained(own)
    if kind == "exported":
        export_checkpoint(own, folder)


def answers(model, processor, requests, new_tokens, tiled=False):
    """Of `generate`, for each request: greedy tokens, their log-probabilities, and how far the next best one is."""
    found = []
    for text, images in requests:
        pictures = [picture(each, tiled) for each in images] or None
        # transformers' Mllama writes a second BOS token, if it is not told.
        plain = {"add_special_tokens": False} if text.startswith("<s>") else {}
        inputs = processor(text=text, images=pictures, return_tensors="pt", **plain)
        length = inputs["input_ids"].shape[1]
        out = model.generate(
            **inputs,
            max_new_tokens=new_tokens,
            do_sample=False,
            eos_token_id=None,
            return_dict_in_generate=True,
            output_logits=True,
        )
        tokens = out.sequences[0, length:].tolist()
        scores = [float(each.log_softmax(-1)[0, token]) for each, token in zip(out.logits, tokens)]
        best = [each[0].topk(2).values for each in out.logits]
        found.append((tokens, scores, [float(first - second) for first, second in best]))
    return found


__all__ = [
    "REQUESTS",
    "RESAMPLER",
    "TEXTS",
    "TILED_REQUESTS",
    "answers",
    "picture",
    "save_adapter",
    "save_model",
    "save_tiled",
    "save_with_base",
]
