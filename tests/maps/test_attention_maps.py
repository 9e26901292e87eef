"""Attention maps against a softmax by hand, against what `generate` records, and on pictures with a known place."""

import sys
import threading

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import (
    AutoModelForCausalLM,
    BatchFeature,
    CLIPVisionConfig,
    Dinov2WithRegistersConfig,
    DINOv3ViTConfig,
    StoppingCriteria,
    StoppingCriteriaList,
    ViTConfig,
)

from helpers.models.tiny_architectures import tiny_config
from helpers.models.tiny_mllama import make_mllama, make_mllama_processor
from helpers.models.tiny_mllama import mllama_inputs as tiled_inputs
from helpers.models.tiny_models import TEXT_CONFIGS, make_model, make_text, pixels, randomize, token_ids, vision_config
from hf_xattn import AttentionMaps, XAttnConfig, XAttnForConditionalGeneration, attention_maps, register_connector
from hf_xattn.importers import import_checkpoint
from hf_xattn.utils.transformers_api import CACHE


BLOCK = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}


def inputs(batch=2, num_images=1, **more):
    return {"input_ids": token_ids(batch), "pixel_values": pixels(batch, num_images), **more}


def left_padded():
    """The second row starts with two padding tokens."""
    ids, mask = token_ids(), torch.ones(2, 7, dtype=torch.long)
    ids[1, :2], mask[1, :2] = 0, 0
    return {"input_ids": ids, "attention_mask": mask, "pixel_values": pixels()}


@torch.no_grad()
def by_hand(model, given):
    """Softmax of q · k, head by head, from what the projections of the blocks return."""
    seen = [{} for _ in model.blocks]
    hooks = []
    for block, taken in zip(model.blocks, seen):
        for name in ("q_proj", "k_proj"):
            hook = getattr(block.attn, name).register_forward_hook(
                lambda module, args, output, name=name, taken=taken: taken.__setitem__(name, output)
            )
            hooks.append(hook)
    model(**given)
    for hook in hooks:
        hook.remove()
    weights = []
    for block, taken in zip(model.blocks, seen):
        attn, config = block.attn, block.config
        query = taken["q_proj"].double().unflatten(-1, (config.num_attention_heads, config.head_dim))
        key = taken["k_proj"].double().unflatten(-1, (config.num_key_value_heads, config.head_dim))
        if attn.q_norm is not None:
            query, key = (
                part / part.pow(2).mean(-1, keepdim=True).add(config.norm_eps).sqrt() * norm.weight.double()
                for part, norm in ((query, attn.q_norm), (key, attn.k_norm))
            )
        heads = []
        for head in range(config.num_attention_heads):
            shared = head // (config.num_attention_heads // config.num_key_value_heads)
            score = torch.einsum("btd,bnd->btn", query[:, :, head], key[:, :, shared]) / config.head_dim**0.5
            exps = score.exp()
            heads.append(exps / (exps.sum(-1, keepdim=True) + bool(config.quiet_softmax)))
        weights.append(torch.stack(heads, dim=1).float())
    return weights


@pytest.mark.parametrize("kernel", ["sdpa", "eager", "flex_attention"])
@pytest.mark.parametrize("options", [{}, {"qk_norm": True}, {"quiet_softmax": True}])
def test_weights_by_hand(kernel, options):
    """Heads in another order, a scale that is missing, weights of the wrong block, or no weights from SDPA."""
    model = make_model(cross_attention_config={**BLOCK, **options})
    model.set_attn_implementation({"cross_attention_config": kernel})
    kernels = [part._attn_implementation for part in (model.config, model.blocks[0].attn.config)]
    maps = attention_maps(model, BatchFeature(inputs()))
    assert kernels == [part._attn_implementation for part in (model.config, model.blocks[0].attn.config)]
    model.set_attn_implementation({"cross_attention_config": "sdpa"})
    expected = by_hand(model, inputs())
    assert maps.layers == [1, 3] and len(maps.weights) == 2 and maps.num_given == 7
    assert torch.equal(maps.tokens, token_ids()) and bool(maps.text_mask.all())
    for ours, reference in zip(maps.weights, expected):
        assert ours.shape == (2, 4, 7, 16)
        assert torch.allclose(ours, reference, atol=1e-5)
    if "quiet_softmax" in options:
        assert torch.allclose(maps.null[1], 1 - expected[1].sum(-1), atol=1e-5) and maps.null[0].min() > 0
    else:
        assert maps.null is None
        assert torch.allclose(maps.weights[0].sum(-1), torch.ones(2, 4, 7), atol=1e-5)


@pytest.mark.parametrize("name", TEXT_CONFIGS)
@pytest.mark.parametrize("given", [inputs, left_padded])
def test_generated_weights_are_those_of_the_steps(name, given):
    """One reading of the whole text that differs from the steps which generated it: positions of padded text, a
    shifted token.
    """
    model, given = make_model(name), given()
    maps = attention_maps(model, given, max_new_tokens=5, do_sample=False)
    steps = model.generate(
        **given, max_new_tokens=5, do_sample=False, return_dict_in_generate=True, output_attentions=True
    )
    assert torch.equal(maps.tokens, steps.sequences) and maps.num_given == 7
    for block, weights in enumerate(maps.weights):
        of_steps = torch.cat([step[block] for step in steps.cross_attentions], dim=2)
        assert weights.shape == (2, 4, 12, 16) and of_steps.shape[2] == 11  # the last token was not read again
        real = maps.text_mask[:, None, :11, None]
        assert torch.allclose(weights[:, :, :11] * real, of_steps * real, atol=1e-5)
    if "attention_mask" in given:
        assert maps.text_mask.sum(dim=1).tolist() == [12, 10]


def test_beams_and_return_sequences():
    """Weights of another beam or another image's row."""
    model, given = make_model(), inputs()
    options = {"max_new_tokens": 4, "num_beams": 4, "num_return_sequences": 2, "do_sample": False}
    maps = attention_maps(model, given, **options)
    assert torch.equal(maps.tokens, model.generate(**given, **options))
    for row in range(4):
        alone = {"input_ids": maps.tokens[row : row + 1], "pixel_values": given["pixel_values"][row // 2 :][:1]}
        for ours, expected in zip(maps.weights, by_hand(model, alone)):
            assert torch.allclose(ours[row], expected[0], atol=1e-5)
    assert torch.equal(maps.pixels(row=3), maps.pixels(row=2)) and not torch.equal(maps.pixels(row=3), maps.pixels())


def test_padding_after_the_end_is_no_text():
    """Padding after the end that is taken for text."""
    model, given = make_model(), inputs()
    free = model.generate(**given, max_new_tokens=6, do_sample=False)
    end = int(free[0, 8])
    maps = attention_maps(model, given, max_new_tokens=6, do_sample=False, eos_token_id=end, pad_token_id=0)
    for row in range(2):
        new = maps.tokens[row, 7:].tolist()
        length = new.index(end) + 1 if end in new else len(new)
        assert maps.text_mask[row].sum() == 7 + length
    assert not maps.text_mask.all()


def test_images_from_a_cache():
    """A cache that the maps have written into, or another image than the cached one."""
    model, given = make_model(), inputs()
    with torch.no_grad():
        cache = model.encode_images(pixel_values=given["pixel_values"])
    question = {"input_ids": given["input_ids"], "cache": cache}
    for _ in range(2):
        maps = attention_maps(model, question)
        for ours, expected in zip(maps.weights, attention_maps(model, given).weights):
            assert torch.allclose(ours, expected, atol=1e-6)
    assert maps.grid(head=0, layer=3, token=2).equal(maps.weights[1][0, 0, 2].view(4, 4))
    longer = attention_maps(model, question, max_new_tokens=3)
    assert longer.weights[0].shape[2] == 10 and cache.text_rows is None
    used = model(given["input_ids"], pixel_values=given["pixel_values"], use_cache=True)[CACHE]
    with pytest.raises(ValueError, match="without text"):
        attention_maps(model, {**question, "cache": used})


def test_what_is_not_seen():
    """NaN where a row sees nothing, or a share for padding."""
    model = make_model(image_token_id=4, image_visibility="previous")
    ids = torch.tensor([[9, 4, 8, 7, 4, 6], [9, 4, 8, 7, 5, 6]])
    given = {
        "input_ids": ids,
        "pixel_values": pixels(2, 2),
        "image_mask": torch.tensor([[True, True], [True, False]]),
    }
    for maps in (attention_maps(model, given), attention_maps(model, given, max_new_tokens=3)):
        for weights in maps.weights:
            assert weights.isfinite().all() and not weights[:, :, 0].any()  # before the first marker
            assert not weights[:, :, 1:4, 16:].any() and not weights[1, :, :, 16:].any()
            assert torch.allclose(weights[0, :, 1:].sum(-1), torch.ones(4, weights.shape[2] - 1), atol=1e-5)
            assert weights[0, :, 4:, 16:].all()
        assert not maps.grid(image=1, row=1).any() and maps.grid(image=1).any()
        assert maps.grid(image=1, layer=3, head=2, token=5).equal(maps.weights[1][0, 2, 5, 16:].view(4, 4))
    with pytest.raises(ValueError, match="needs images"):
        attention_maps(make_model(), {"input_ids": token_ids()})


def test_masks_of_the_text():
    """A mask for each text token that ends before the generated text."""
    model = make_model()
    given = inputs(cross_attention_mask=torch.ones(2, 7, 16, dtype=torch.bool))
    given["cross_attention_mask"][:, 3:, :8] = False
    maps = attention_maps(model, given, max_new_tokens=3, do_sample=False)
    assert not maps.weights[0][:, :, 3:, :8].any() and maps.weights[0][:, :, :3].all()
    assert torch.equal(maps.tokens, model.generate(**given, max_new_tokens=3, do_sample=False))


def test_the_decoder_gives_no_weights(monkeypatch):
    """Weights of a long text to itself, which take memory and which nobody has asked for."""
    model, asked = make_model(), []
    forward = type(model.model.text_model).forward
    monkeypatch.setattr(
        type(model.model.text_model),
        "forward",
        lambda self, *args, **kwargs: asked.append(kwargs["output_attentions"]) or forward(self, *args, **kwargs),
    )
    attention_maps(model, inputs())
    assert asked == [False]


def test_a_decoder_that_computes_something_else_where_weights_are_asked_for():
    """Maps of another text than the model's own: transformers' Falcon is not causal with `output_attentions=True` and
    SDPA.
    """
    text = AutoModelForCausalLM.from_config(tiny_config("falcon")).eval()
    config = XAttnConfig(text_config=text.config, vision_config=vision_config(), cross_attention_layers=[1, 3])
    model = randomize(XAttnForConditionalGeneration(config, text_model=text).eval())
    for ours, reference in zip(attention_maps(model, inputs()).weights, by_hand(model, inputs())):
        assert torch.allclose(ours, reference, atol=1e-5)


def test_another_thread_meanwhile():
    """A kernel that is switched on the model, so that another thread gets other logits or weights it did
    not ask for.
    """
    model, given = make_model(), inputs()
    with torch.no_grad():
        expected = model(**given).logits
    wrong, done = [], threading.Event()

    def ask():
        with torch.no_grad():
            while not done.is_set():
                outputs = model(**given)
                if not torch.equal(outputs.logits, expected) or outputs.cross_attentions is not None:
                    wrong.append(outputs)

    thread = threading.Thread(target=ask)
    thread.start()
    for _ in range(10):
        attention_maps(model, given)
    done.set()
    thread.join()
    assert not wrong


TOWERS = {
    "clip": (CLIPVisionConfig, {}, 1),
    "vit": (ViTConfig, {}, 1),
    "dinov2_with_registers": (Dinov2WithRegistersConfig, {"num_register_tokens": 3}, 4),
    "dinov3": (DINOv3ViTConfig, {"num_register_tokens": 2}, 3),
}


def tower_model(config_class, **config):
    vision = config_class(
        hidden_size=24,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=32,
        patch_size=8,
        **config.pop("tower", {}),
    )
    text = make_text()
    config = XAttnConfig(text_config=text.config, vision_config=vision, cross_attention_layers=[1, 3], **config)
    return randomize(XAttnForConditionalGeneration(config, text_model=text).eval())


@pytest.mark.parametrize("strategy", ["full", "default"])
@pytest.mark.parametrize("name", TOWERS)
def test_class_tokens_do_not_shift_the_grid(name, strategy):
    """A map that is one patch to the right, because the tower's first tokens belong to no patch."""
    config_class, tower, prefix = TOWERS[name]
    model = tower_model(config_class, tower=tower, vision_feature_select_strategy=strategy, connector_type="linear")
    maps = attention_maps(model, inputs(num_images=2))
    prefix -= strategy == "default"
    assert maps.weights[0].shape[-1] == 2 * (16 + prefix)
    grid = maps.grid(image=1, row=1)
    assert grid.shape == (2, 4, 7, 4, 4)
    of_image = torch.stack([weights[1, ..., 16 + prefix :] for weights in maps.weights])
    assert torch.equal(grid.flatten(3), of_image[..., prefix:])
    assert torch.allclose(maps.grid(1, 1, layer="mean", head="mean"), grid.mean(dim=(0, 1)))
    assert torch.equal(maps.grid(1, 1, layer=3, head=2, token=-1), grid[1, 2, -1])


def bright_patch(row, column, height=32, width=32):
    picture = torch.zeros(1, 1, 3, height, width)
    picture[..., row * 8 : row * 8 + 8, column * 8 : column * 8 + 8] = 1
    return picture


@torch.no_grad()
@pytest.mark.parametrize("connector", ["linear", "mlp"])
def test_the_grid_lies_on_the_picture(connector):
    """Rows and columns that are exchanged: the key of the patch that was painted is the one that changes most."""
    model = tower_model(ViTConfig, connector_type=connector)
    for row, column in ((0, 3), (2, 1)):
        given = {"input_ids": token_ids(1), "pixel_values": bright_patch(row, column)}
        maps = attention_maps(model, given)
        features = model.get_image_features(given["pixel_values"]).pooler_output
        plain = model.get_image_features(torch.zeros(1, 1, 3, 32, 32)).pooler_output
        change = (features - plain).norm(dim=-1)[0]
        laid = maps._patches(0, 0).lay(change)[0]
        assert divmod(int(laid.argmax()), 4) == (row, column)
        assert maps.pixels()[row * 8, column * 8].tolist() == [1, 1, 1]


def test_tiles_in_their_order():
    """Tiles that are exchanged, or laid beside each other where they stand one upon the other."""
    model = import_checkpoint(make_mllama())
    processor = make_mllama_processor()
    for height, width, tiles in ((28, 56, (1, 2)), (84, 28, (3, 1)), (56, 56, (2, 2))):
        array = np.random.default_rng(0).integers(0, 255, (height, width, 3), dtype=np.uint8)
        given = processor(images=[[Image.fromarray(array)]], text=["<|image|> w1 w2"], return_tensors="pt")
        maps = attention_maps(model, given)
        assert (maps._patches(0, 0).tile_rows, maps._patches(0, 0).tile_columns) == tiles
        shown = maps.pixels()
        assert shown.shape == (height, width, 3)
        wanted = torch.from_numpy(array.astype(np.float32))
        close = torch.corrcoef(torch.stack([shown.flatten(), wanted.flatten()]))[0, 1]
        assert close > 0.9, "the canvas is not the picture"
        grid = maps.grid(layer=1, head=0, token=-1)
        assert grid.shape == (2 * tiles[0], 2 * tiles[1])
        for row in range(tiles[0]):
            for column in range(tiles[1]):
                first = (row * tiles[1] + column) * 5  # a class token and four patches
                expected = maps.weights[0][0, 0, -1, first + 1 : first + 5].view(2, 2)
                assert torch.equal(grid[2 * row : 2 * row + 2, 2 * column : 2 * column + 2], expected)


def test_padding_tiles_and_images():
    """A share for a tile or an image that is padding."""
    model = import_checkpoint(make_mllama())
    given = tiled_inputs([[96, 5, 6, 7, 96, 9], [96, 11, 12, 13, 14, 15]], [[2, 1], [4]])
    maps = attention_maps(model, given, max_new_tokens=2)
    assert not maps.weights[0][0, ..., 10:20].any() and not maps.weights[0][1, ..., 20:].any()
    assert maps.grid(image=0).shape[-2:] == (2, 4) and not maps.grid(image=1, row=1).any()
    with torch.no_grad():
        cache = model.encode_images(
            **{name: given[name] for name in ("pixel_values", "aspect_ratio_ids", "aspect_ratio_mask")}
        )
    with pytest.raises(ValueError, match="arrangement of the tiles"):
        attention_maps(model, {"input_ids": given["input_ids"], "cache": cache}).grid()


class Plain(torch.nn.Linear):
    keeps_positions = True

    def __init__(self, config):
        super().__init__(config.vision_config.hidden_size, config.cross_attention_config.context_size)


class Reversed(Plain):
    keeps_positions = False

    def forward(self, features):
        return super().forward(features).flip(-2)


def test_masks_belong_to_the_inputs():
    """Maps over an image that the text was generated without."""
    with pytest.raises(TypeError, match="Expected `image_mask` in `inputs`"):
        attention_maps(make_model(), inputs(), max_new_tokens=2, image_mask=torch.ones(2, 1, dtype=torch.bool))


def test_padding_behind_a_text_that_a_criterion_ended():
    """A map of padding as if it were text."""

    class Stop(StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            return torch.tensor([input_ids.shape[1] >= 9, False])

    options = {"stopping_criteria": StoppingCriteriaList([Stop()]), "pad_token_id": 2, "do_sample": False}
    options["eos_token_id"] = 3  # without one, `generate` goes on in all rows
    maps = attention_maps(make_model(), inputs(), max_new_tokens=5, **options)
    assert maps.tokens.shape[1] == 12 and maps.text_mask.tolist() == [[True] * 9 + [False] * 3, [True] * 12]


def test_grids_that_do_not_exist():
    """A map of positions that a connector or a caller did not keep."""
    perceiver = make_model(
        connector_type="perceiver",
        perceiver_config={"num_latents": 16, "num_hidden_layers": 1},
        cross_attention_config={"context_size": 24},
    )
    with pytest.raises(ValueError, match="keeps positions, got `connector_type='perceiver'`"):
        attention_maps(perceiver, inputs()).grid()
    register_connector("reversed", Reversed)
    with pytest.raises(ValueError, match="keeps positions, got `connector_type='reversed'`"):
        attention_maps(make_model(connector_type="reversed"), inputs()).grid()
    register_connector("plain", Plain)
    assert attention_maps(make_model(connector_type="plain"), inputs()).grid().shape[-2:] == (4, 4)
    states = {"input_ids": token_ids(), "cross_attention_states": torch.randn(2, 16, 32)}
    for model in (make_model(), make_model(vision=False)):
        with pytest.raises(ValueError, match="needs the size of the image"):
            attention_maps(model, states).grid()
    with torch.no_grad():
        cache = make_model().encode_images(cross_attention_states=states["cross_attention_states"])
    with pytest.raises(ValueError, match="needs the size of the image"):
        attention_maps(make_model(), {"input_ids": token_ids(), "cache": cache}).grid()
    maps = attention_maps(make_model(), inputs())
    with pytest.raises(ValueError, match=r"`layer`.*\[1, 3\]"):
        maps.grid(layer=2)
    for wrong in ({"image": 1}, {"row": 2}, {"head": 4}, {"token": 7}):
        with pytest.raises(IndexError):
            maps.grid(**wrong)


def test_maps_need_a_model_with_blocks():
    """A model without a head that is refused, or a model without blocks that fails somewhere inside."""
    model, given = make_model(), inputs()
    expected = attention_maps(model, given).weights
    assert all(map(torch.equal, attention_maps(model.model, given).weights, expected))
    with pytest.raises(TypeError, match="`num_beams`.*`max_new_tokens`"):
        attention_maps(model, given, num_beams=2)
    with pytest.raises(TypeError, match="got .*LlamaForCausalLM"):
        attention_maps(make_text(), given)


def test_a_plot_names_its_words_layers_and_heads(tmp_path):
    """A panel under the wrong word, a mean that is labelled as one head, or one scale a panel."""
    pytest.importorskip("matplotlib")
    maps = attention_maps(make_model(), inputs(), max_new_tokens=3)
    figure = maps.plot()
    panels = [axes for axes in figure.axes if axes.images]
    assert [panel.get_title() for panel in panels] == [str(int(token)) for token in maps.tokens[0, 7:]]
    assert "mean of 2 layers, mean of 4 heads" in figure.get_suptitle()
    for panel, position in zip(panels, range(7, 10)):
        drawn = panel.images[1]
        assert np.allclose(drawn.get_array(), maps.grid(layer="mean", head="mean")[position])
        assert drawn.get_clim() == panels[0].images[1].get_clim()
    figure.savefig(tmp_path / "maps.png")
    one = maps.plot([2, -1], row=1, layer=3, head=2, picture=Image.new("RGB", (64, 64)))
    assert "layer 3, head 2" in one.get_suptitle()
    assert np.allclose(one.axes[1].images[1].get_array(), maps.grid(row=1, layer=3, head=2)[-1])
    with pytest.raises(IndexError):
        maps.plot([10])
    with pytest.raises(ValueError, match="one `layer`"):
        maps.plot(layer=None)


def test_plot_without_matplotlib(monkeypatch):
    """A traceback about a module that the reader has never heard of."""
    for name in ("matplotlib", "matplotlib.figure"):
        monkeypatch.setitem(sys.modules, name, None)
    maps = attention_maps(make_model(), inputs())
    assert isinstance(maps, AttentionMaps) and repr(maps) == "AttentionMaps(layers=[1, 3], weights=2 x (2, 4, 7, 16))"
    with pytest.raises(ImportError, match="`plot` needs matplotlib: pip install"):
        maps.plot()
