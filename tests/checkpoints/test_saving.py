"""Saving and loading: every way in gives the same model, bit for bit."""

import json

import pytest
import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForImageTextToText

from helpers.models.saved_models import load
from helpers.models.tiny_models import TEXT_CONFIGS, kernels_of, make_model, make_text, pixels, token_ids, vision_config
from hf_xattn import XAttnConfig, XAttnForConditionalGeneration, XAttnModel
from hf_xattn.checkpoints.saved_names import named_as_in_memory


AUTO_CLASSES = [
    name
    for name in ("AutoModelForCausalLM", "AutoModelForImageTextToText", "AutoModelForMultimodalLM")
    if hasattr(transformers, name)
]


@torch.no_grad()
def logits_of(model):
    ids = token_ids()
    if model.config.image_token_id is not None:
        ids[:, 1] = model.config.image_token_id
    return model.eval()(ids, pixel_values=pixels()).logits


def same_tensors(model, other):
    mine, others = model.state_dict(), other.state_dict()
    assert mine.keys() == others.keys()
    different = [n for n in mine if mine[n].dtype != others[n].dtype or not torch.equal(mine[n], others[n].cpu())]
    assert different == []


@pytest.mark.parametrize("name", TEXT_CONFIGS)
def test_a_loaded_model_has_the_logits_of_the_saved_one(name, tmp_path):
    """Loaded weights that are initialised again, a tie that is saved twice or lost, a decoder whose names change."""
    model = make_model(name)
    model.save_pretrained(tmp_path)
    loaded = load(AutoModelForImageTextToText, tmp_path)
    assert type(loaded) is XAttnForConditionalGeneration
    same_tensors(model, loaded)
    assert torch.equal(logits_of(loaded), logits_of(model))
    tied = model.config.get_text_config().tie_word_embeddings
    assert (loaded.get_input_embeddings().weight is loaded.get_output_embeddings().weight) == bool(tied)
    saved = set(named_as_in_memory(model, load_file(tmp_path / "model.safetensors")))
    assert saved <= set(model.state_dict()) and len(saved) == len(model.state_dict()) - bool(tied)
    assert any("cross_attention_block" in key for key in saved)


@pytest.mark.parametrize("auto_class", AUTO_CLASSES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_auto_class_loads_the_model_with_float32_gates(auto_class, dtype, tmp_path):
    """An Auto class that does not know the model, or loads gates and norms in bfloat16."""
    model = make_model(dtype=dtype)
    if dtype == torch.bfloat16:
        model.model.vision_tower.to(dtype)
        model.model.connector.to(dtype)
    model.save_pretrained(tmp_path)
    loaded = load(getattr(transformers, auto_class), tmp_path, dtype="auto")
    assert isinstance(loaded, XAttnForConditionalGeneration) and loaded.dtype == dtype
    same_tensors(model, loaded)
    assert torch.equal(logits_of(loaded), logits_of(model))
    assert loaded.blocks[0].attn_gate.dtype == torch.float32 and loaded.blocks[0].attn.q_proj.weight.dtype == dtype


def test_auto_model_loads_the_body_of_a_model_with_a_head(tmp_path):
    """`AutoModel` of a saved model with a head: the same hidden states."""
    model = make_model()
    model.save_pretrained(tmp_path)
    body = AutoModel.from_pretrained(tmp_path).eval()
    assert isinstance(body, XAttnModel)
    with torch.no_grad():
        expected = model.model(token_ids(), pixel_values=pixels()).last_hidden_state
        assert torch.equal(body(token_ids(), pixel_values=pixels()).last_hidden_state, expected)


def test_dtype_of_the_caller_comes_first(tmp_path):
    """Gates and norms narrowed by `dtype=torch.bfloat16`, or the rest of the model left wide."""
    make_model(cross_attention_config={"qk_norm": True}).save_pretrained(tmp_path)
    loaded = load(AutoModelForCausalLM, tmp_path, dtype=torch.bfloat16)
    for name, parameter in loaded.named_parameters():
        kept = "cross_attention_block" in name and ("norm" in name or name.endswith("_gate"))
        assert parameter.dtype == (torch.float32 if kept else torch.bfloat16), name
    assert logits_of(loaded).isfinite().all()


def test_configuration_survives(tmp_path):
    """Fields that are dropped, or defaults that are resolved anew and come out otherwise."""
    model = make_model(
        "gemma3",
        image_token_id=3,
        image_visibility="latest",
        connector_type="linear",
        cross_attention_config={"qk_norm": True, "num_key_value_heads": 1, "gate_granularity": "channel"},
    )
    model.save_pretrained(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path)
    assert isinstance(config, XAttnConfig)
    fields = json.loads((tmp_path / "config.json").read_text())
    assert fields["model_type"] == "xattn" and fields["cross_attention_layers"] == [1, 3]
    for ours, theirs in (
        (model.config.cross_attention_config, config.cross_attention_config),
        (model.config.vision_config, config.vision_config),
        (model.config.text_config, config.text_config),
    ):
        # The dtype is written by `save_pretrained`; it belongs to the weights.
        ours, theirs = ours.to_dict(), theirs.to_dict()
        assert {**ours, "dtype": None} == {**theirs, "dtype": None}
    loaded = load(AutoModelForCausalLM, tmp_path)
    assert torch.equal(logits_of(loaded), logits_of(model))


@pytest.mark.parametrize("auto_class", [AutoModelForImageTextToText, XAttnForConditionalGeneration])
def test_kernels_of_the_parts(auto_class, tmp_path):
    """A kernel that was asked for and that nobody calls."""
    make_model().save_pretrained(tmp_path)
    for asked in ({"cross_attention_config": "eager"}, {"text_config": "eager", "vision_config": "eager"}):
        kernels = kernels_of(auto_class.from_pretrained(tmp_path, attn_implementation=asked))
        expected = {name: asked.get(name, "sdpa") for name in kernels if name != "block"}
        assert kernels == {**expected, "block": expected["cross_attention_config"]}
    model = auto_class.from_pretrained(tmp_path)
    model.set_attn_implementation({"cross_attention_config": "eager"})
    assert kernels_of(model)["block"] == "eager"
    for change in (
        lambda: auto_class.from_pretrained(tmp_path, attn_implementation={"block": "eager"}),
        lambda: model.set_attn_implementation({"block": "eager"}),
    ):
        with pytest.raises(ValueError, match="`attn_implementation` names 'block'.*'cross_attention_config'"):
            change()


@pytest.mark.parametrize("auto_class", [AutoModelForImageTextToText, XAttnForConditionalGeneration])
@pytest.mark.parametrize(
    ("override", "message"),
    [
        ({"image_visibility": "latest"}, "image_visibility='latest'.*expected `image_token_id` to be set"),
        ({"image_visibility": "first"}, "'image_visibility' expected one of.*got first"),
        ({"image_token_id": 1000}, "`image_token_id`.*96 entries, got 1000"),
        ({"image_token_id": "<image>"}, "'image_token_id' with value '<image>'"),
        ({"cross_attention_layers": [9]}, "`cross_attention_layers`.*4 layers.*got \\[9\\]"),
        ({"connector_type": "conv"}, "`connector_type` to name a connector: .*'conv'"),
        ({"perceiver_config": {"num_latents": 3}}, "`perceiver_config` needs.*got 'mlp'"),
        ({"cross_attention_config": {"hidden_size": 8}}, "`cross_attention_config.hidden_size` to be .*32.*got 8"),
    ],
    ids=str,
)
def test_overrides_are_checked(auto_class, override, message, tmp_path):
    """A setting that `from_pretrained` puts over the saved one, and that fails in the middle of a forward, or never."""
    make_model().save_pretrained(tmp_path)
    with pytest.raises((ValueError, StrictDataclassError), match=message):
        auto_class.from_pretrained(tmp_path, **override)


def test_arguments_of_from_pretrained_override_saved_fields(tmp_path):
    """A setting that `from_pretrained` puts over the saved one, and that is lost."""
    make_model().save_pretrained(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path, image_visibility="latest", image_token_id=3, connector_bias=False)
    assert (config.image_visibility, config.image_token_id, config.connector_bias) == ("latest", 3, False)
    config = AutoConfig.from_pretrained(
        tmp_path,
        connector_type="perceiver",
        perceiver_config={"num_latents": 3},
        cross_attention_config={"context_size": 24},
    )
    assert (config.perceiver_config.num_latents, config.perceiver_config.hidden_size) == (3, 24)
    with pytest.raises(TypeError, match="image_visibilty"):
        AutoModelForImageTextToText.from_pretrained(tmp_path, image_visibilty="latest")


def test_attributes_of_a_later_version_survive(tmp_path):
    """A file that cannot be read because it says more than this version knows."""
    make_model().save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    saved["image_visibility_window"] = saved["cross_attention_config"]["gate_inits"] = 3
    (tmp_path / "config.json").write_text(json.dumps(saved))
    config = AutoConfig.from_pretrained(tmp_path)
    assert (config.image_visibility_window, config.cross_attention_config.gate_inits) == (3, 3)


def test_a_model_for_features_loads_without_a_tower(tmp_path):
    """A tower that appears when a model for features is loaded."""
    model = make_model(vision=False)
    model.save_pretrained(tmp_path)
    loaded = load(AutoModelForImageTextToText, tmp_path)
    assert loaded.model.vision_tower is None and loaded.model.connector is None
    same_tensors(model, loaded)


def test_generation_settings_survive(tmp_path):
    """A model that has forgotten its end-of-text token."""
    text = make_text()
    text.generation_config.eos_token_id = 17
    config = XAttnConfig(text_config=text.config, vision_config=vision_config(), cross_attention_layers=[1])
    model = XAttnForConditionalGeneration(config, text_model=text)
    assert model.generation_config.eos_token_id == 17
    model.save_pretrained(tmp_path)
    assert AutoModelForCausalLM.from_pretrained(tmp_path).generation_config.eos_token_id == 17


def test_a_sharded_checkpoint_holds_the_blocks(tmp_path):
    """Blocks that fall between the files of a sharded checkpoint."""
    model = make_model("llama_tied")
    model.save_pretrained(tmp_path, max_shard_size="40KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    same_tensors(model, load(AutoModelForCausalLM, tmp_path))


@pytest.mark.parametrize("style", [{}, {"zero_init": False, "gate_init": 0.0}, {"gate": "none"}], ids=str)
def test_blocks_that_may_be_missing_start_at_the_base(style, tmp_path):
    """Weights that the decoder's own initialiser, or meta memory, fills in: noise or NaN where zero must be."""
    base = make_text()
    expected = base(token_ids()).logits
    model = make_model(random=False, cross_attention_config=style)
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    kept = {key: value for key, value in load_file(file).items() if "cross_attention_block" not in key}
    save_file(kept, file, {"format": "pt"})
    for dtype in (torch.float32, torch.bfloat16):
        loaded, info = AutoModelForCausalLM.from_pretrained(
            tmp_path, dtype=dtype, output_loading_info=True, allow_missing_weights=True
        )
        assert info["missing_keys"] and all("cross_attention_block" in key for key in info["missing_keys"])
        if dtype == torch.float32:
            assert torch.equal(logits_of(loaded), expected)
        for block in loaded.blocks:
            assert block.attn.q_proj.weight.std() > 0 and block.attn.q_proj.weight.isfinite().all()
            if block.attn_gate is not None:
                assert block.attn_gate.item() == style.get("gate_init", 1.0) and block.attn_gate.dtype == torch.float32
            if style.get("zero_init", True):
                assert not block.attn.o_proj.weight.any() and not block.mlp.down_proj.weight.any()
            assert (block.attn_norm.weight == 1).all()


def test_a_model_is_built_without_memory_on_the_meta_device():
    """A model that cannot be built without memory for its weights (accelerate, FSDP, size estimates)."""
    with torch.device("meta"):
        model = XAttnForConditionalGeneration(
            XAttnConfig(text_config=TEXT_CONFIGS["llama"](), vision_config=vision_config())
        )
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}


@pytest.mark.parametrize("name", ["llama", "llama_tied", "gpt2"])
def test_device_map_with_disk_offload(name, tmp_path):
    """Blocks torn from their layer, or images that stay behind, under accelerate's hooks."""
    model, ids, images = make_model(name), token_ids(), pixels()
    expected = model.generate(ids, pixel_values=images, max_new_tokens=5, do_sample=False)
    model.save_pretrained(tmp_path)
    device_map = {"": "cpu"}
    prefix = {"gpt2": "model.text_model.transformer.h"}.get(name, "model.text_model.model.layers")
    for part in (f"{prefix}.1", f"{prefix}.3", "model.vision_tower", "model.connector"):
        device_map[part] = "disk"
    del device_map[""]
    for part, _ in model.named_modules():
        below = [key for key in device_map if key == part or key.startswith(part + ".") or part.startswith(key + ".")]
        if part and not below and not any(part.startswith(key + ".") for key in device_map):
            device_map[part] = "cpu"
    loaded = AutoModelForImageTextToText.from_pretrained(
        tmp_path, device_map=device_map, offload_folder=tmp_path / "offload"
    ).eval()
    assert loaded.blocks[0].attn.q_proj.weight.device.type == "meta"
    with torch.no_grad():
        assert torch.equal(logits_of(loaded), logits_of(model))
        for options in ({}, {"cache_implementation": "static"}, {"use_cache": False}):
            tokens = loaded.generate(ids, pixel_values=images, max_new_tokens=5, do_sample=False, **options)
            assert torch.equal(tokens, expected)
        encoded = loaded.encode_images(pixel_values=images)
        tokens = loaded.generate(ids, cache=encoded, max_new_tokens=5, do_sample=False)
        assert torch.equal(tokens, expected)


def test_device_map_auto_keeps_blocks_with_their_layers(tmp_path):
    """A layer split from its block by `device_map="auto"` when memory is short."""
    model = make_model()
    model.save_pretrained(tmp_path)
    loaded = AutoModelForImageTextToText.from_pretrained(
        tmp_path, device_map="auto", max_memory={"cpu": "120KB"}, offload_folder=tmp_path / "offload"
    ).eval()
    places = loaded.hf_device_map
    assert "disk" in places.values()
    assert not any("cross_attention_block" in part or ".self_attn" in part for part in places), places
    assert torch.equal(logits_of(loaded), logits_of(model))
