"""Parts and models of a user's own class: what a saved folder cannot name is refused, before it would answer
otherwise.
"""

import copy
import json
import re
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    CLIPVisionConfig,
    CLIPVisionModelWithProjection,
    LlamaForCausalLM,
    SiglipVisionModel,
)

from helpers.models.tiny_models import make_model, make_text, pixels, randomize, token_ids, vision_config
from hf_xattn import (
    CrossAttentionConfig,
    GatedCrossAttentionBlock,
    XAttnConfig,
    XAttnForConditionalGeneration,
    XAttnModel,
    retrofit,
)
from hf_xattn.images.connector import XAttnConnector


class Doubling(XAttnConnector):
    """A connector with the weights of the package's own, and other results."""

    def forward(self, features, positions=None):
        return 2 * super().forward(features, positions)


class Louder(GatedCrossAttentionBlock):
    """A block with the weights of the package's own."""

    def forward(self, hidden_states, *args, **kwargs):
        return super().forward(hidden_states, *args, **kwargs) * 2


class OwnTower(SiglipVisionModel):
    """A vision tower with the weights of SigLIP's."""


class OwnText(LlamaForCausalLM):
    """A text model with the weights of Llama's."""


class Mine(XAttnForConditionalGeneration):
    """A model with other logits, and parts that it makes itself."""

    def __init__(self, config, **parts):
        super().__init__(config, **parts)
        self.model.connector = Doubling(config)


class Plain(XAttnForConditionalGeneration):
    """A model of another name, whose parts are those of the package."""


class Body(XAttnModel):
    """A body of one's own."""


class OwnBlock(GatedCrossAttentionBlock):
    """A block that is saved on its own."""


def put_connector(model):
    model.model.connector = Doubling(model.config)


def put_any_module(model):
    model.model.connector = nn.Linear(24, 32)


def put_layer(model):
    model.model.connector.layers[1] = nn.Tanh()


def put_tower(model):
    model.model.vision_tower = OwnTower(model.config.vision_config)


def put_block(model):
    model.model.text_model.model.layers[3].cross_attention_block = Louder(model.config.cross_attention_config, 1)


def put_body(model):
    model.model.__class__ = Body


def take_tower(model):
    model.model.vision_tower = None


def take_block(model):
    del model.model.text_model.model.layers[1].cross_attention_block


def add_block(model):
    model.model.text_model.model.layers[0].cross_attention_block = GatedCrossAttentionBlock(
        model.config.cross_attention_config
    )


def compile_connector(model):
    model.model.connector = torch.compile(model.model.connector)


def compile_layer(model):
    layers = model.model.text_model.model.layers
    layers[0] = torch.compile(layers[0])


CASES = {
    put_connector: "`connector`: its class is .*Doubling, .* would be XAttnConnector",
    put_any_module: "`connector`: its class is .*Linear, .* would be XAttnConnector",
    put_layer: "`connector.layers.1`: its class is .*Tanh, .* would be GELUActivation",
    put_tower: "`vision_tower`: its class is .*OwnTower, .* would be SiglipVisionModel",
    put_block: "`.*layers.3.cross_attention_block`: its class is .*Louder, .* would be GatedCrossAttentionBlock",
    put_body: "`model`: its class is .*Body, .* would be XAttnModel",
    take_tower: "`vision_tower`: its class is .*NoneType, .* would be SiglipVisionModel",
    take_block: "`.*layers.1.cross_attention_block`: its class is .*NoneType, .* would be GatedCrossAttentionBlock",
    add_block: "`.*layers.0.cross_attention_block`: its class is .*GatedCrossAttentionBlock, .* would be NoneType",
    compile_connector: r"`torch.compile` returned \(connector\)",
    compile_layer: r"`torch.compile` returned \(text_model.model.layers.0\)",
}


@pytest.mark.parametrize("change", CASES, ids=lambda change: change.__name__)
def test_parts_put_in_by_hand(change, tmp_path):
    """A part that trains, is saved without a word, and loads as another."""
    model = make_model()
    change(model)
    for save in (
        lambda: model.save_pretrained(tmp_path / "model"),
        lambda: model.save_pretrained(tmp_path / "model", adapter_only=True),
        lambda: model.push_to_hub("somebody/model"),
    ):
        with pytest.raises(ValueError, match=CASES[change]):
            save()
    assert not (tmp_path / "model").exists()


def put_other_tower(model):
    config = vision_config()
    config.hidden_act = "relu"
    model.model.vision_tower = AutoModel.from_config(config)


def put_other_text(model):
    model.config.text_config = copy.deepcopy(model.config.text_config)
    model.config.text_config.rope_parameters["rope_theta"] = 500.0


def setting(name, value):
    def change(model):
        setattr(model.config.cross_attention_config, name, value)

    change.__name__ = name
    return change


OF_BLOCK = ".* would be {}"
SETTINGS = {
    put_other_tower: "`vision_tower`: its hidden_act is relu, .* would be gelu",
    put_other_text: "`text_model`: its rope_parameters is .*10000.0.*would be .*500.0",
    setting("quiet_softmax", True): "`.*attn`: its quiet_softmax is False, " + OF_BLOCK.format(True),
    setting("attention_dropout", 0.1): "`.*attn`: its attention_dropout is 0.0, " + OF_BLOCK.format(0.1),
    setting("norm_eps", 1e-3): "`.*attn_norm`: its eps is 1e-06, " + OF_BLOCK.format(0.001),
    setting("qk_norm_eps", 1e-3): "`.*[kq]_norm`: its eps is 1e-06, " + OF_BLOCK.format(0.001),
    setting("gate", "none"): r"`.*cross_attention_block.attn_gate`: its shape is \(1,\), .* would be None",
}


@pytest.mark.parametrize("change", SETTINGS, ids=lambda change: change.__name__)
def test_settings_that_do_not_reach_a_built_part(change, tmp_path, caplog):
    """A tower put in by hand, or a setting changed after the model was built, that loads as another model."""
    make_model(cross_attention_config={"qk_norm": True}).train()
    assert "cannot save" not in caplog.text
    model = make_model(cross_attention_config={"qk_norm": True})
    change(model)
    model.train()
    assert re.search("This model trains, but `save_pretrained` cannot save " + SETTINGS[change], caplog.text)
    for options in ({}, {"adapter_only": True}):
        with pytest.raises(ValueError, match="`save_pretrained` cannot save " + SETTINGS[change]):
            model.save_pretrained(tmp_path / "model", **options)
    assert not (tmp_path / "model").exists()


BUILT = {
    "head_dim": ("perceiver_config", 4, "`connector.layers.0.layers.0.attn`: its head_dim is 8, .* would be 4"),
    "norm_eps": ("perceiver_config", 1e-3, r"`connector.*norm`: its eps is 1e-05, .* would be 0.001"),
    "hidden_act": ("perceiver_config", "relu", "`connector.*act_fn`: its class is .*GELUActivation, .* would be ReLU"),
    "qk_norm": ("perceiver_config", True, "`connector.*norm`: its class is .*Identity, .* would be LayerNorm"),
    "num_hidden_layers": (
        "perceiver_config",
        1,
        "`connector.layers.0.layers.1`: its class is .*, .* would be NoneType",
    ),
    "num_latents": ("perceiver_config", 3, r"latents`: its shape is \(5, 24\), .* would be \(3, 24\)"),
    "num_image_positions": ("perceiver_config", 0, r"image_positions`: its shape is .* would be None"),
    "connector_bias": ("mlp", False, r"`connector.layers.0.bias`: its shape is \(32,\), .* would be None"),
    "attention_bias": ("block", True, r"[kq]_proj.bias`: its shape is None, .* would be"),
    "gate_granularity": ("block", "channel", r"attn_gate`: its shape is \(1,\), .* would be \(32,\)"),
    "additional_vocab_size": ("mlp", 3, "`text_model`: its additional_vocab_size is 2, .* would be 3"),
    "additional_vocab_in_head": ("mlp", False, "its additional_vocab_in_head is True, .* would be False"),
    "additional_vocab_scaled": ("mlp", False, "its additional_vocab_scaled is True, .* would be False"),
}


@pytest.mark.parametrize("field", BUILT)
def test_settings_of_connector_and_vocabulary_that_come_too_late(field, tmp_path):
    """A resampler or added rows that load with other settings, or without some of their weights."""
    where, value, words = BUILT[field]
    perceiver = {"num_latents": 5, "num_hidden_layers": 2, "num_attention_heads": 3, "head_dim": 8}
    perceiver |= {"num_image_positions": 2}
    options = {"connector_type": "perceiver", "perceiver_config": perceiver} if where == "perceiver_config" else {}
    options |= {"cross_attention_config": {"context_size": 24}} if options else {}
    model = make_model("gemma3", additional_vocab_size=2, additional_vocab_in_head=True, **options)
    model.save_pretrained(tmp_path / "right")
    config = {"perceiver_config": model.config.perceiver_config, "block": model.config.cross_attention_config}
    setattr(config.get(where, model.config), field, value)
    with pytest.raises(ValueError, match="(?s)`save_pretrained` cannot save .*" + words):
        model.save_pretrained(tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_text_model_of_a_class_of_ones_own(tmp_path):
    """A subclass of a decoder that loads as the decoder."""
    text = OwnText(make_text().config)
    with pytest.raises(ValueError, match="`text_model`: its class is .*OwnText, .* would be LlamaForCausalLM"):
        retrofit(text, cross_attention_layers=[1]).save_pretrained(tmp_path / "model")


def test_tower_of_another_class_of_transformers(tmp_path):
    """A tower with a projection, which is not used, that is refused; one of another type that is not."""
    sizes = {"hidden_size": 24, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = CLIPVisionConfig(**sizes, image_size=32, patch_size=8)
    model = retrofit(make_text(), CLIPVisionModelWithProjection(config), cross_attention_layers=[1]).eval()
    model.save_pretrained(tmp_path / "model")
    loaded = XAttnForConditionalGeneration.from_pretrained(tmp_path / "model")
    with torch.no_grad():
        inputs = {"input_ids": token_ids(), "pixel_values": pixels()}
        assert torch.equal(loaded(**inputs).logits, model(**inputs).logits)
    model.model.vision_tower = AutoModel.from_config(vision_config())
    with pytest.raises(
        ValueError, match="`vision_tower`: its class is .*SiglipVisionModel, .* would be CLIPVisionModel"
    ):
        model.save_pretrained(tmp_path / "model")


def test_training_warns_before_the_first_save(caplog):
    """Hours of training before the save that refuses."""
    text = make_text()
    Mine(XAttnConfig(text_config=text.config, vision_config=vision_config()), text_model=text).train()
    assert "cannot save" not in caplog.text
    model = make_model()
    put_connector(model)
    for _ in range(2):
        model.train()
    assert caplog.text.count("`save_pretrained` cannot save `connector`: its class is") == 1


def test_what_is_not_of_ones_own(tmp_path):
    """A model that is refused because it was compiled, wrapped, copied, or got another tower of the same kind."""
    model = make_model()
    model.model.vision_tower = AutoModel.from_config(vision_config())
    model.model.connector.compile()
    model.blocks[0].compile()
    torch.compile(model).save_pretrained(tmp_path / "compiled")
    layers = model.model.text_model.model.layers
    layers[1].cross_attention_block = checkpoint_wrapper(layers[1].cross_attention_block)
    layers[2] = checkpoint_wrapper(layers[2])
    model.model.connector = checkpoint_wrapper(model.model.connector)
    model.save_pretrained(tmp_path / "wrapped")
    for name in ("compiled", "wrapped"):
        loaded = XAttnForConditionalGeneration.from_pretrained(tmp_path / name)
        state = model.state_dict()
        assert all(torch.equal(state[key], value) for key, value in loaded.state_dict().items())


def save_as(model_class, folder):
    text = make_text()
    torch.manual_seed(2)
    config = XAttnConfig(text_config=text.config, vision_config=vision_config(), cross_attention_layers=[1, 3])
    model = randomize(model_class(config, text_model=text)).eval()
    model.save_pretrained(folder)
    assert json.loads((folder / "config.json").read_text())["architectures"] == [model_class.__name__]
    return model


@pytest.mark.parametrize("model_class", [Mine, Plain])
def test_model_of_a_class_of_ones_own(model_class, tmp_path):
    """A subclass whose folder opens as the plain class, with other logits."""
    model = save_as(model_class, tmp_path / "model")
    name = model_class.__name__
    for load in (
        AutoModelForImageTextToText.from_pretrained,
        AutoModelForCausalLM.from_pretrained,
        AutoModel.from_pretrained,
        XAttnForConditionalGeneration.from_pretrained,
        XAttnModel.from_pretrained,
    ):
        with pytest.raises(ValueError, match=rf"was saved by a class {name}.*`{name}.from_pretrained`"):
            load(tmp_path / "model")
    with pytest.raises(ValueError, match=f"was saved by a class {name}"):
        XAttnForConditionalGeneration.from_pretrained(tmp_path / "model", config=model.config)
    loaded = model_class.from_pretrained(tmp_path / "model")
    with torch.no_grad():
        inputs = {"input_ids": token_ids(), "pixel_values": pixels()}
        assert torch.equal(loaded(**inputs).logits, model(**inputs).logits)


def test_added_weights_of_a_class_of_ones_own(tmp_path):
    """The same, in a folder of added weights."""
    make_text().save_pretrained(tmp_path / "text")
    text = AutoModelForCausalLM.from_pretrained(tmp_path / "text")
    config = XAttnConfig(text_config=text.config, cross_attention_layers=[1])
    Plain(config, text_model=text).save_pretrained(tmp_path / "added", adapter_only=True, text_base=tmp_path / "text")
    with pytest.raises(ValueError, match="was saved by a class Plain"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "added")
    assert type(Plain.from_pretrained(tmp_path / "added")) is Plain


def test_names_of_classes_that_are_ours(tmp_path):
    """A folder of the package's own that is refused: of the other model, sharded by FSDP2, or without a name."""
    model = make_model()
    model.save_pretrained(tmp_path)
    path = Path(tmp_path / "config.json")
    for names in (["XAttnModel"], ["FSDPXAttnForConditionalGeneration"], [], None):
        fields = json.loads(path.read_text())
        path.write_text(json.dumps({**fields, "architectures": names}))
        XAttnForConditionalGeneration.from_pretrained(tmp_path)
        AutoModel.from_pretrained(tmp_path)
    Mine.from_pretrained(tmp_path)  # asked for by name
    config = XAttnConfig.from_pretrained(tmp_path)
    config.architectures = ["Mine"]  # of another model
    XAttnForConditionalGeneration.from_pretrained(tmp_path, config=config)
    XAttnForConditionalGeneration.from_pretrained(None, config=config, state_dict=model.state_dict())


def test_block_of_a_class_of_ones_own(tmp_path):
    """A block that is saved on its own, and opens as the plain one."""
    OwnBlock(CrossAttentionConfig(hidden_size=32, num_attention_heads=4)).save_pretrained(tmp_path)
    for load in (AutoModel.from_pretrained, GatedCrossAttentionBlock.from_pretrained):
        with pytest.raises(ValueError, match="was saved by a class OwnBlock.*`OwnBlock.from_pretrained`"):
            load(tmp_path)
    assert type(OwnBlock.from_pretrained(tmp_path)) is OwnBlock
