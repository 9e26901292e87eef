"""What is measured of a tower: how wide its features are, and whether its tokens are those of a square."""

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModel,
    CLIPImageProcessorPil,
    CLIPVisionConfig,
    Dinov2WithRegistersConfig,
    EfficientNetConfig,
    MobileNetV2Config,
    MobileViTConfig,
    ViTConfig,
)

from helpers.models.tiny_models import make_text, randomize, token_ids, vision_config
from helpers.models.word_models import make_text_checkpoint
from helpers.processes.command_runs import run
from hf_xattn import XAttnConfig, XAttnForConditionalGeneration, retrofit
from hf_xattn.parts.measured_towers import measured_features
from hf_xattn.utils.architectures import vision_hidden_size


EFFICIENTNET = EfficientNetConfig(
    width_coefficient=0.25, depth_coefficient=0.1, image_size=64, hidden_dim=320, initializer_range=0.5
)
MOBILEVIT = MobileViTConfig(
    hidden_sizes=[16, 24, 32], neck_hidden_sizes=[8, 8, 16, 16, 24, 32, 48], image_size=64, initializer_range=0.2
)
SMALL = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
UNSAID = {
    "efficientnet": (EFFICIENTNET, 320),
    "mobilenet_v2": (MobileNetV2Config(depth_multiplier=0.25, finegrained_output=False, image_size=64), 320),
    "mobilevit": (MOBILEVIT, 48),
}


@pytest.mark.parametrize("name", UNSAID)
def test_the_width_is_measured(name, tmp_path):
    """A tower that is refused because of a name in its configuration, or whose features do not fit the connector."""
    config, width = UNSAID[name]
    torch.manual_seed(0)
    tower, pixels = AutoModel.from_config(config), torch.randn(2, 1, 3, 64, 64)
    for module in tower.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            module.momentum = 1.0  # to know the sizes of random features after one forward
    tower.train()(torch.randn(8, 3, 64, 64))
    tower.eval().save_pretrained(tmp_path / "tower")
    for vision in (tower, tmp_path / "tower"):
        model = retrofit(make_text(), vision, every=2)
        assert model.config.vision_hidden_size == width and model.model.connector.layers[0].in_features == width
    randomize(model)
    model.model.vision_tower.requires_grad_(False)
    model.train()
    model(token_ids(), pixel_values=pixels, labels=token_ids()).loss.backward()
    assert model.model.connector.layers[0].weight.grad.any()
    model.eval().save_pretrained(tmp_path / "saved")
    loaded = XAttnForConditionalGeneration.from_pretrained(tmp_path / "saved").eval()
    with torch.no_grad():
        expected = model(token_ids(), pixel_values=pixels).logits
        # A convolution rounds by where in memory its weights lie.
        torch.testing.assert_close(loaded(token_ids(), pixel_values=pixels).logits, expected, rtol=0, atol=1e-5)
        assert not torch.allclose(loaded(token_ids(), pixel_values=pixels.flip(0)).logits, expected)
        features = loaded.model.vision_tower(pixels[:, 0]).last_hidden_state
        assert torch.allclose(loaded(token_ids(), vision_features=features[:, None]).logits, expected, atol=1e-5)


@pytest.mark.parametrize("connector", ["identity", "perceiver"])
def test_connectors_that_keep_the_width(connector):
    """Blocks that read tokens of another width than the tower gives."""
    model = retrofit(make_text(), AutoModel.from_config(EFFICIENTNET), every=2, connector_type=connector)
    assert model.config.cross_attention_config.context_size == 320
    with torch.no_grad():
        assert model.eval()(token_ids(), pixel_values=torch.randn(2, 1, 3, 64, 64)).logits.isfinite().all()


def test_a_width_that_is_said_is_not_saved():
    """A configuration that older versions cannot read, for nothing."""
    config = vision_config()
    assert measured_features(config).width == vision_hidden_size(config)
    assert retrofit(make_text(), AutoModel.from_config(config)).config.vision_hidden_size is None


def test_a_tower_without_a_width_is_refused():
    """An error that does not say what to pass."""
    with pytest.raises(ValueError, match="'efficientnet' names no `hidden_size`.*expected `vision_hidden_size`"):
        XAttnForConditionalGeneration(XAttnConfig(text_config=make_text().config, vision_config=EFFICIENTNET))
    config = XAttnConfig(text_config=make_text().config, vision_config=EFFICIENTNET, vision_hidden_size=320)
    assert XAttnForConditionalGeneration(config).model.connector.layers[0].in_features == 320


@pytest.mark.parametrize(
    ("tower", "expected"),
    [
        (vision_config(), "mlp_2d"),
        (CLIPVisionConfig(image_size=32, patch_size=8, **SMALL), "mlp_2d"),  # 16 tokens behind a class token
        (Dinov2WithRegistersConfig(image_size=32, patch_size=8, num_register_tokens=4, **SMALL), "mlp"),
        (ViTConfig(image_size=(32, 128), patch_size=16, **SMALL), "mlp"),  # 2 x 8 tokens behind a class token
        (EFFICIENTNET, "mlp_2d"),
        (None, "mlp"),
    ],
)
def test_the_default_connector(tower, expected):
    """A code of places on tokens that have none, which ends the first call; or no code where a text asks for a side."""
    vision = None if tower is None else AutoModel.from_config(tower)
    model = retrofit(make_text(), vision, every=2)
    assert model.config.connector_type == expected
    if tower is not None:
        size = tower.image_size if isinstance(tower.image_size, tuple) else (tower.image_size, tower.image_size)
        with torch.no_grad():
            model(token_ids(), pixel_values=torch.randn(2, 1, 3, *size))
    assert retrofit(make_text(), vision, every=2, connector_type="linear").config.connector_type == "linear"
    if tower is not None:
        other = retrofit(make_text(), vision, every=2, vision_feature_select_strategy="default")
        drops = expected == "mlp_2d" and isinstance(tower, CLIPVisionConfig)  # the class token alone, of a square
        assert other.config.connector_type == ("mlp_2d" if drops else "mlp")


def test_the_default_of_the_command(tmp_path, capsys):
    """A code of places for a processor that keeps the shape of pictures, which ends the first call."""
    make_text_checkpoint(tmp_path / "text")
    for name, size in (("square", {"height": 32, "width": 32}), ("wide", {"shortest_edge": 32})):
        AutoModel.from_config(vision_config()).save_pretrained(tmp_path / name)
        CLIPImageProcessorPil(size=size, do_center_crop=False).save_pretrained(tmp_path / name)
        output = tmp_path / f"{name}_out"
        status, _, error = run(capsys, "retrofit", tmp_path / "text", "--vision", tmp_path / name, "--output", output)
        assert not status, error
        found = AutoConfig.from_pretrained(output).connector_type
        assert found == ("mlp_2d" if name == "square" else "mlp")
