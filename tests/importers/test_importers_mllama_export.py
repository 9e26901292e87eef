"""Retrofits written as Llama 3.2 Vision, against transformers' own model, and what is refused."""

import json

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoProcessor,
    LlamaConfig,
    LlamaForCausalLM,
    MllamaForConditionalGeneration,
    MllamaProcessor,
    MllamaVisionModel,
)
from transformers.models.mllama.configuration_mllama import MllamaVisionConfig

from helpers.models.tiny_mllama import (
    MARKER,
    MIXED,
    TEXT,
    TILED,
    VISION,
    VOCAB,
    make_mllama_processor,
    picture,
    stop_mllama,
)
from helpers.models.tiny_models import make_model
from hf_xattn import XAttnProcessor, retrofit
from hf_xattn.importers import export_checkpoint, import_checkpoint


SHAPE = {
    "cross_attention_layers": [1, 3],
    "cross_attention": {"qk_norm": True, "norm_eps": 1e-6, "gate": "tanh"},
    "connector_type": "linear",
    "image_visibility": "latest_group",
    "image_token_id": MARKER,
    "additional_vocab_size": 8,
}


def make_retrofit(dtype=torch.float32, llama=None, **options):
    """A Llama with Mllama's tower, with random weights in all that is zero in a fresh model."""
    torch.manual_seed(0)
    fields = {name: value for name, value in TEXT.items() if name != "cross_attention_layers"}
    text = LlamaForCausalLM(LlamaConfig(**{**fields, "num_hidden_layers": 4, **(llama or {})}))
    model = retrofit(text.to(dtype), MllamaVisionModel(MllamaVisionConfig(**VISION)).to(dtype), **{**SHAPE, **options})
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator) * 0.2
        parameter.data.add_(noise.to(parameter.dtype))
    model.tie_weights()
    return model.eval()


def exported(model, folder, dtype=torch.float32):
    export_checkpoint(model, folder)
    theirs, loading = MllamaForConditionalGeneration.from_pretrained(
        folder, dtype=dtype, attn_implementation="eager", output_loading_info=True
    )
    assert not any(loading[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return theirs.eval()


VARIANTS = {
    "as Mllama": {},
    "tied head": {"llama": {"tie_word_embeddings": True}},
    "marker in the vocabulary": {"image_token_id": 90, "additional_vocab_size": 0},
    "one token added": {"additional_vocab_size": 1},
    "scaled rotary embedding, other norm": {
        "llama": {"rms_norm_eps": 1e-5, "rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}},
        "cross_attention": {"qk_norm": True, "norm_eps": 1e-5, "gate": "tanh"},
    },
    "neighbouring blocks, one after the last layer": {"cross_attention_layers": [1, 2, 4]},
    "several blocks at one place": {"cross_attention_layers": [1, 1, 3, 4, 4]},
    "fresh": {"cross_attention": {"qk_norm": True, "norm_eps": 1e-6, "zero_init": False, "gate_init": 0.0}},
}


def with_marker(case, marker):
    return {**case, "input_ids": case["input_ids"].masked_fill(case["input_ids"] == MARKER, marker)}


@torch.no_grad()
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("through", ["model", "folder"])
def test_a_retrofit_of_the_shape_gives_equal_logits(variant, through, tmp_path):
    """A block in front of the wrong layer, a head or marker rows that are lost, or another rotary embedding."""
    ours = make_retrofit(**VARIANTS[variant])
    marker = ours.config.image_token_id
    source = ours
    if through == "folder":
        source = tmp_path / "ours"
        ours.save_pretrained(source)
    theirs = exported(source, tmp_path / "theirs")
    for case in TILED.values():
        case = with_marker(case, marker)
        expected = ours(**{name: value for name, value in case.items() if name != "cross_attention_mask"}).logits
        assert torch.allclose(theirs(**case).logits[..., :VOCAB], expected[..., :VOCAB], atol=5e-5)
        assert not torch.allclose(ours(case["input_ids"]).logits[0, -1], expected[0, -1], atol=1e-2)
    text = with_marker(TILED["one"], marker)["input_ids"][:, 1:]
    assert torch.allclose(theirs(text).logits, ours(text).logits, atol=5e-5)
    options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    case = with_marker(TILED["several"], marker)
    assert torch.equal(theirs.generate(**case, **options), ours.generate(**case, **options))
    again = import_checkpoint(tmp_path / "theirs").eval()
    assert torch.allclose(again(**case).logits, ours(**case).logits, atol=5e-5)


@torch.no_grad()
def test_text_that_sees_no_image_is_the_one_difference(tmp_path):
    """More of a difference than the attention branch which Mllama adds there."""
    ours = make_retrofit()
    theirs = exported(ours, tmp_path / "theirs")
    logits = ours(**MIXED).logits
    assert not torch.allclose(theirs(**MIXED).logits[1], logits[1], atol=1e-3)
    assert torch.allclose(stop_mllama(theirs)(**MIXED).logits, logits, atol=5e-5)


@torch.no_grad()
def test_an_export_in_bfloat16_keeps_its_dtype(tmp_path):
    """Gates that make the file larger, or a checkpoint in another dtype than the model."""
    ours = make_retrofit(torch.bfloat16)
    theirs = exported(ours, tmp_path / "theirs", dtype="auto")
    assert theirs.dtype == torch.bfloat16
    case = TILED["several"]
    expected = ours.float()(**case).logits
    assert torch.allclose(theirs.float()(**case).logits, expected, atol=0.02 * expected.abs().max())


@torch.no_grad()
@pytest.mark.parametrize("marker", ["<|image|>", "<picture>"])
def test_the_processor_is_mllamas(tmp_path, marker):
    """A folder whose processor only this package can load, or one that looks for another marker."""
    parts = make_mllama_processor()
    tokenizer = parts.tokenizer
    if marker != "<|image|>":
        tokenizer.add_special_tokens({"additional_special_tokens": [marker]})
    ours = make_retrofit(image_token_id=tokenizer.convert_tokens_to_ids(marker))
    ours.save_pretrained(tmp_path / "ours")
    XAttnProcessor(parts.image_processor, tokenizer, image_token=marker).save_pretrained(tmp_path / "ours")
    theirs = exported(tmp_path / "ours", tmp_path / "theirs")
    processor = AutoProcessor.from_pretrained(tmp_path / "theirs")
    assert isinstance(processor, MllamaProcessor) and processor.image_token == marker
    assert "XAttn" not in "".join(path.read_text() for path in (tmp_path / "theirs").glob("*.json"))
    images = [[picture(60, 28, 1), picture(28, 90, 2)]]
    batch = processor(images=images, text=[f"{marker} w3 {marker} w4 w5"], return_tensors="pt")
    own = AutoProcessor.from_pretrained(tmp_path / "ours")
    given = own(images=images, text=[f"{marker} <s> w3 {marker} w4 w5"])  # Mllama's adds the start
    assert torch.equal(batch["input_ids"], given["input_ids"])
    options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    assert torch.equal(theirs.generate(**batch, **options), ours.generate(**given, **options))


REFUSED = {
    "connector_type": ({"connector_type": "mlp"}, "expected 'linear', found 'mlp'"),
    "connector_bias": ({"connector_bias": False}, "expected True, found False"),
    "image_visibility": ({"image_visibility": "all"}, "expected 'latest_group', found 'all'"),
    "image_token_id": (
        {"image_token_id": None, "image_visibility": "all"},
        "expected the id of the image marker, found None",
    ),
    "cross_attention_layers": (
        {"cross_attention_layers": [0, 2]},
        r"expected no block in front of layer 0, found \[0, 2\]",
    ),
    "additional_vocab_size": ({"additional_vocab_size": 9}, "expected at most 8, as in Mllama, found 9"),
    "additional_vocab_in_head": ({"additional_vocab_in_head": True}, "expected False, found True"),
    "text_config.attention_bias": ({"llama": {"attention_bias": True}}, "expected False, found True"),
    "text_config.mlp_bias": ({"llama": {"mlp_bias": True}}, "expected False, found True"),
    "text_config.head_dim": ({"llama": {"head_dim": 16}}, "expected 8, found 16"),
    **{
        f"cross_attention_config.{name}": ({"cross_attention": {**SHAPE["cross_attention"], name: value}}, words)
        for name, value, words in (
            ("qk_norm", False, "expected True, found False"),
            ("norm_eps", 1e-5, "expected 1e-06, found 1e-05"),
            ("norm_type", "layernorm", "expected 'rmsnorm', found 'layernorm'"),
            ("context_size", 16, "expected 32, found 16"),
            ("num_key_value_heads", 4, "expected 2, found 4"),
            ("head_dim", 16, "expected 8, found 16"),
            ("intermediate_size", 32, "expected 64, found 32"),
            ("hidden_act", "gelu", "expected 'silu', found 'gelu'"),
            ("mlp_type", "plain", "expected 'gated', found 'plain'"),
            ("gate", "none", "expected 'tanh', found 'none'"),
            ("gate_granularity", "channel", "expected 'scalar', found 'channel'"),
            ("attention_bias", True, "expected False, found True"),
            ("mlp_bias", True, "expected False, found True"),
            ("quiet_softmax", True, "expected False, found True"),
            ("position_bias", True, "expected False, found True"),
            ("context_norm", True, "expected False, found True"),
        )
    },
}


@pytest.mark.parametrize("name", REFUSED)
def test_another_shape_is_refused(name, tmp_path):
    """A checkpoint that loads, and silently computes something else."""
    options, words = REFUSED[name]
    with pytest.raises(ValueError, match=f"`{name}`: {words}"):
        export_checkpoint(make_retrofit(**options), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_all_differences_are_listed(tmp_path):
    """A user who learns of one difference a training run."""
    with pytest.raises(ValueError) as error:
        export_checkpoint(make_model("qwen3"), tmp_path / "out")
    for difference in (
        "`text_config.model_type`: expected 'llama', found 'qwen3'",
        "`vision_config.model_type`: expected 'mllama_vision_model', found 'siglip_vision_model'",
        "`connector_type`: expected 'linear', found 'mlp'",
        "`image_token_id`: expected the id of the image marker, found None",
    ):
        assert f"\n- {difference}" in str(error.value)
    make_model(vision=False).model.text_model.save_pretrained(tmp_path / "text")
    with pytest.raises(ValueError, match="with cross-attention blocks, got a 'llama' model"):
        export_checkpoint(tmp_path / "text", tmp_path / "out")


def test_configuration_holds_nothing_of_this_package(tmp_path):
    """A configuration that other engines cannot read."""
    export_checkpoint(make_retrofit(), tmp_path / "out")
    text = (tmp_path / "out" / "config.json").read_text()
    assert "xattn" not in text.lower() and "auto_map" not in text
    config = AutoConfig.from_pretrained(tmp_path / "out")
    assert config.model_type == "mllama" and config.text_config.cross_attention_layers == [1, 4]
    assert json.loads(text)["architectures"] == ["MllamaForConditionalGeneration"]
