"""`align_connector`: a connector that starts where the words of captions are."""

import itertools
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import (
    AutoTokenizer,
    ResNetConfig,
    ResNetModel,
    SiglipImageProcessorPil,
)

from helpers.inputs.training_examples import COLOURS
from helpers.models import own_parts
from helpers.models.word_models import make_text_checkpoint, make_vision_checkpoint
from helpers.references.ridge_regression import ridge
from hf_xattn import XAttnProcessor, align_connector, retrofit
from hf_xattn.parts.grid_code import GridCode
from hf_xattn.training.alignment_words import CannotAlign, RidgeSums, ToldWords, told_apart, word_states
from hf_xattn.training.block_start import KEY_PLACES, PLACES, VALUES
from hf_xattn.utils.transformers_api import AutoImageProcessor


RGB = {"red": (255, 0, 0), "blue": (0, 0, 255), "green": (0, 255, 0), "black": (0, 0, 0)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("alignment")
    make_text_checkpoint(folder / "text", ["green", "black", "and", "of", "square"])
    make_vision_checkpoint(folder / "vision")
    return folder


def fresh(folder, **options):
    torch.manual_seed(3)
    options.setdefault("connector_type", "linear")
    model = retrofit(folder / "text", folder / "vision", layers=[2, 3], **options)
    images, tokenizer = (
        AutoImageProcessor.from_pretrained(folder / "vision"),
        AutoTokenizer.from_pretrained(folder / "text"),
    )
    return model.eval(), XAttnProcessor(images, tokenizer)


def caption(picture, text):
    image = {"type": "image", "image": picture}
    return {
        "messages": [
            {"role": "user", "content": [image, {"type": "text", "text": "describe the picture"}]},
            {"role": "assistant", "content": text},
        ]
    }


def halves(size, count=60):
    """Pictures of two colours, left and right, with a caption that does not say which is where."""
    rng, rows, sides = np.random.default_rng(0), [], []
    pairs = list(itertools.permutations(COLOURS, 2))
    for index in range(count):
        pair = pairs[index % len(pairs)]
        pixels = np.zeros((size, size, 3))
        for side, colour in enumerate(pair):
            pixels[:, side * size // 2 : (side + 1) * size // 2] = RGB[colour]
        pixels = (pixels + rng.normal(0, 20, pixels.shape)).clip(0, 255).astype(np.uint8)
        rows.append(caption(Image.fromarray(pixels), f"a picture of {' and '.join(sorted(pair))}"))
        sides.append(pair)
    return rows, sides


@torch.no_grad()
@pytest.mark.parametrize("connector_type", ["linear", "mlp", "mlp_2d"])
def test_patches_are_near_the_words_for_them(folder, connector_type):
    """Keys that are nearer to other words, a layer of the connector that is left out, weights of others that move."""
    model, processor = fresh(folder, connector_type=connector_type)
    for layer in model.model.vision_tower.encoder.layers:  # a random tower would mix what the patches show
        for weight in layer.self_attn.out_proj.parameters():
            weight.zero_()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    rows, sides = halves(model.config.vision_config.image_size)
    found = align_connector(model, processor, rows, noise=0.0, blocks=False)
    assert found.pictures == 60 and found.words == 4  # `a picture of ... and` is said of all
    assert 0 < found.explained < 1
    last = f"connector.layers.{0 if connector_type == 'linear' else 2}."
    moved = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    assert moved == {f"model.{last}weight", f"model.{last}bias"}

    prompt = processor.apply_chat_template(rows[0]["messages"][:1], tokenize=False, add_generation_prompt=True)
    states = word_states(model.model.text_model, processor.tokenizer, 2, COLOURS, [prompt])
    images = processor(images=[[row["messages"][0]["content"][0]["image"]] for row in rows])["pixel_values"]
    tokens = model.get_image_features(images).pooler_output[:, 0]
    torch.testing.assert_close(tokens.square().mean(), torch.tensor(1.0), atol=0.15, rtol=0)  # a word for each
    side = int(tokens.shape[1] ** 0.5)
    nearest = (tokens.unflatten(1, (side, side)) @ told_apart(states).T).argmax(-1)
    right = torch.tensor([[COLOURS.index(colour) for colour in pair] for pair in sides])
    halved = right.repeat_interleave(side // 2, dim=1)[:, None].expand(-1, side, -1)
    assert (nearest == halved).float().mean() > 0.9  # by chance 0.25; a picture's words alone would give 0.5


def tokens_of_spots(folder, colours, noise):
    """Aligns a model with pictures of one coloured patch each. Returns their image tokens, and which has the colour."""
    model, processor = fresh(folder)
    for layer in model.model.vision_tower.encoder.layers:  # a random tower would mix what the patches show
        for weight in layer.self_attn.out_proj.parameters():
            weight.zero_()
    vision = model.config.vision_config
    patch, size = vision.patch_size, vision.image_size
    rng, rows, places = np.random.default_rng(0), [], []
    for colour in colours:
        pixels = np.full((size, size, 3), 200.0)
        row, column = rng.integers(size // patch, size=2)
        pixels[row * patch : (row + 1) * patch, column * patch : (column + 1) * patch] = RGB[colour]
        pixels = (pixels + rng.normal(0, noise, pixels.shape)).clip(0, 255).astype(np.uint8)
        rows.append(caption(Image.fromarray(pixels), f"a picture of {colour}"))
        places.append(row * (size // patch) + column)
    align_connector(model, processor, rows, noise=0.0)
    images = processor(images=[[row["messages"][0]["content"][0]["image"]] for row in rows])["pixel_values"]
    tokens = model.get_image_features(images).pooler_output[:, 0]
    spot = torch.zeros(tokens.shape[:2], dtype=torch.bool)
    spot[torch.arange(len(rows)), torch.tensor(places)] = True
    return tokens, spot


@torch.no_grad()
def test_a_word_is_given_to_the_patch_it_is_about(folder):
    """Patches around a thing that are near its words, because they are in the same pictures."""
    tokens, thing = tokens_of_spots(folder, [COLOURS[index % 4] for index in range(80)], noise=10)
    sizes = tokens.square().mean(-1)
    assert sizes[thing].mean() > 0.5
    assert sizes[~thing].mean() < 0.005 * sizes[thing].mean()


@torch.no_grad()
def test_rare_words_are_as_large_as_frequent_ones(folder):
    """Image tokens that hold next to nothing of a word that few pictures have."""
    colours = [COLOURS[3 if index % 40 == 0 else index % 3] for index in range(240)]
    tokens, thing = tokens_of_spots(folder, colours, noise=60)
    sizes = tokens[thing].square().mean(-1).sqrt()
    rare = torch.tensor([colour == COLOURS[3] for colour in colours])
    assert rare.sum() == 6
    assert 0.5 < sizes[rare].mean() / sizes[~rare].mean() < 1.5


@torch.no_grad()
def test_the_same_rows_give_the_same_weights(folder):
    """Weights that depend on the batch, or on what was random before; noise that is not there."""
    rows, _ = halves(32, 12)
    weights = []
    for noise, batch_size, seed in ((0.0, 1, 0), (0.0, 5, 1), (0.5, 5, 0), (0.5, 5, 0), (0.5, 5, 1)):
        model, processor = fresh(folder)
        model.train()
        align_connector(model, processor, rows, noise=noise, batch_size=batch_size, seed=seed)
        assert model.training and model.model.text_model.training
        weights.append(model.model.connector.layers[0].weight)
    torch.testing.assert_close(weights[0], weights[1], atol=1e-4, rtol=1e-4)
    assert torch.equal(weights[2], weights[3])
    assert not torch.equal(weights[2], weights[4]) and not torch.allclose(weights[1], weights[2], atol=1e-2)


HEADS = {
    "as the text": {},
    "multi-query, normed, biased": {"num_key_value_heads": 1, "qk_norm": True, "attention_bias": True, "head_dim": 24},
    "heads wider than the model": {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 96},
}


@torch.no_grad()
@pytest.mark.parametrize("options", HEADS.values(), ids=HEADS)
def test_text_attends_to_what_it_has_read(folder, options):
    """Queries of another word, of another place or another layer; keys and queries in different directions."""
    model, processor = fresh(folder, cross_attention=options)
    for block in model.blocks:  # a norm that is no mere scale: queries are fitted behind it
        block.attn_norm.weight[::2] = -1.0
    before = {name: value.clone() for name, value in model.state_dict().items()}
    for layer in model.model.vision_tower.encoder.layers:
        for weight in layer.self_attn.out_proj.parameters():
            weight.zero_()
    rows, sides = halves(model.config.vision_config.image_size)
    align_connector(model, processor, rows, noise=0.0)
    moved = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    parts = {name.rsplit(".", 2)[-2] for name in moved if "cross_attention_block" in name}
    assert parts - {"q_norm"} == {"q_proj", "k_proj", "v_proj"}
    both = []
    for row, pair in list(zip(rows, sides))[:12]:
        picture = row["messages"][0]["content"][0]["image"]
        said = sorted(pair)  # `a picture of blue and red`
        text = processor.apply_chat_template(
            [{"role": "user", "content": "describe the picture"}, row["messages"][1]], tokenize=False
        )
        inputs = processor(images=[[picture]], text=[text], return_tensors="pt")
        ends = [text.index(colour) + len(colour) for colour in said]
        offsets = processor.tokenizer(text, return_offsets_mapping=True)["offset_mapping"]
        at = [next(place for place, (_, end) in enumerate(offsets) if end == wanted) for wanted in ends]
        maps = model(**inputs, output_attentions=True).cross_attentions
        for weights in maps:  # of each block (1, heads, text_len, tokens)
            side = int(weights.shape[-1] ** 0.5)
            left = weights[0].unflatten(-1, (side, side))[..., : side // 2].sum((-1, -2))
            on = torch.stack([left, 1 - left])  # (sides, heads, text_len)
            first, second = (pair.index(colour) for colour in said)
            assert on[first, 0, at[0]] > 0.8 and on[second, 0, at[1]] > 0.8  # the word read last
            both.append(on[first, 1, at[1]])  # it and the one before it
            assert on[first, 0, at[0] + 1] > 0.8  # also at `and`, as at the colon of `blue circle: left`
    assert 0.3 < torch.stack(both).mean() < 0.7


@torch.no_grad()
def test_keys_tell_words_apart(folder):
    """Words whose states are near each other, and whose keys are, too."""
    model, processor = fresh(folder)
    rows, _ = halves(32, 36)
    align_connector(model, processor, rows, noise=0.0)
    prompt = processor.apply_chat_template(rows[0]["messages"][:1], tokenize=False, add_generation_prompt=True)
    states = told_apart(word_states(model.model.text_model, processor.tokenizer, 2, COLOURS, [prompt]))
    keys = states @ model.blocks[0].attn.k_proj.weight[: model.blocks[0].config.head_dim].T
    of_states, of_keys = (torch.linalg.svdvals(each)[:3] for each in (states, keys))  # four words, without their mean
    assert of_states[2] / of_states[0] < 0.9 < of_keys[2] / of_keys[0]


@torch.no_grad()
def test_a_name_of_two_words_finds_what_is_both(folder):
    """Queries of one word alone, which another thing of this colour or of this shape answers to, too."""
    model, processor = fresh(folder, cross_attention={"qk_norm": True})
    for layer in model.model.vision_tower.encoder.layers:
        for weight in layer.self_attn.out_proj.parameters():
            weight.zero_()
    size, rng = model.config.vision_config.image_size, np.random.default_rng(0)
    names = [(colour, kind) for colour in ("red", "blue") for kind in ("circle", "square")]
    rows, last = [], []
    for index in range(300):
        said = [names[which] for which in rng.permutation(4)[: 1 + index % 3]]
        columns = rng.permutation(4)[:3]
        pixels = np.full((size, size, 3), 128.0)
        for column, (colour, kind) in zip(columns, said):
            part = pixels[:, column * size // 4 : (column + 1) * size // 4]
            part[:] = RGB[colour]
            (part if kind == "square" else part.swapaxes(0, 1))[::2, :, 1] = 255  # green stripes stand for the shape
        pixels = (pixels + rng.normal(0, 20, pixels.shape)).clip(0, 255).astype(np.uint8)
        rows.append(caption(Image.fromarray(pixels), " and ".join(" ".join(name) for name in said)))
        alike = [sum(word in said[-1] for word in other) for other in said[:-1]]
        last.append(columns[2] if alike == [1, 1] else None)  # one has its colour, and the other one its shape
    align_connector(model, processor, rows, noise=0.0)
    found = []
    for row, column in zip(rows, last):
        if column is not None:
            text = processor.apply_chat_template(row["messages"], tokenize=False)
            picture = row["messages"][0]["content"][0]["image"]
            inputs = processor(images=[[picture]], text=[text], return_tensors="pt")
            weights = model(**inputs, output_attentions=True).cross_attentions[0][0]
            side = int(weights.shape[-1] ** 0.5)
            on = weights.unflatten(-1, (side, 4, side // 4)).sum((2, 4))[..., column]  # (heads, text_len)
            said = row["messages"][1]["content"]
            offsets = processor.tokenizer(text, return_offsets_mapping=True)["offset_mapping"]
            end = text.rindex(said) + len(said)
            found.append(on[:2, next(place for place, (_, stop) in enumerate(offsets) if stop == end)])
    by_one, by_both = torch.stack(found).T
    # The tiny decoder, of random weights, holds little of the word before. Queries of one word find no more than half.
    assert by_both.mean() > by_one.mean() + 0.1 and by_both.mean() > 0.4


@torch.no_grad()
def test_trained_blocks_are_not_written_over(folder):
    """A start that takes what blocks have learned."""
    model, processor = fresh(folder)
    model.blocks[1].attn.o_proj.weight.fill_(0.1)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    rows, _ = halves(32, 12)
    with pytest.raises(ValueError, match="with fresh blocks, .* got trained ones"):
        align_connector(model, processor, rows)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    align_connector(model, processor, rows, blocks=False)
    assert not torch.equal(model.model.connector.layers[0].weight, before["model.connector.layers.0.weight"])


def test_blocks_with_positions_are_not_started(folder):
    """Keys that are turned away from the queries that were made for them."""
    model, processor = fresh(folder, cross_attention={"position": own_parts.TURNING})
    rows, _ = halves(32, 12)
    with pytest.raises(ValueError, match="without a position encoding .* `position='turning'`. Pass `blocks=False`"):
        align_connector(model, processor, rows)
    align_connector(model, processor, rows, blocks=False)


def test_questions_about_a_picture_count_once(folder):
    """A picture with four questions that counts four times, or of which one answer alone counts."""
    model, processor = fresh(folder)
    (first, second), _ = halves(32, 2)
    picture = first["messages"][0]["content"][0]["image"]
    rows = [caption(picture, "red"), caption(picture, "blue"), second]
    rows.append({"messages": [{"role": "user", "content": "what is it ?"}, {"role": "assistant", "content": "text"}]})
    found = align_connector(model, processor, rows)
    assert (found.pictures, found.words) == (2, len({"red", "blue", *"a picture of and green".split()} - {"blue"}))


@torch.no_grad()
def test_states_in_front_of_a_layer(folder):
    """States of another layer or token, of padding, or of a batch whose rows see one another."""
    model, processor = fresh(folder)
    text, tokenizer = model.model.text_model, processor.tokenizer
    words, prompts = ("red", "blue circle", "a green house"), ("what is it ?\n", "describe\n")
    together = word_states(text, tokenizer, 2, words, prompts, at_once=64)
    for word, state in zip(words, together):
        expected = []
        for prompt in prompts:
            ids = torch.tensor([tokenizer(prompt + word, add_special_tokens=False)["input_ids"]])
            expected.append(text(input_ids=ids, output_hidden_states=True).hidden_states[2][0, -1])
        torch.testing.assert_close(state, torch.stack(expected).mean(0), atol=1e-5, rtol=1e-5)
    assert not any(layer._forward_pre_hooks for layer in text.model.layers)


@pytest.mark.parametrize("bias", [True, False])
def test_sums_are_those_of_all_rows(bias):
    """A regression of the last rows alone, or with a bias that the connector has not."""
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(5, 8, 6, generator=generator)
    targets = torch.randn(5, 3, generator=generator)
    sums = RidgeSums(bias)
    for each, target in zip(features, targets):
        sums.add(each, target)
    inputs = features.flatten(0, 1).double().numpy()
    inputs = np.hstack([inputs, np.ones((40, 1))]) if bias else inputs
    rows = targets.repeat_interleave(8, dim=0).double().numpy()
    size = inputs.shape[1]
    expected = np.linalg.lstsq(np.vstack([inputs, np.eye(size)]), np.vstack([rows, np.zeros((size, 3))]), rcond=None)[0]
    np.testing.assert_allclose(sums.solve().numpy(), expected, atol=1e-9)


@torch.no_grad()
def test_words_as_the_norm_of_a_block_gives_them(folder):
    """Image tokens of another size than the words that the norm gives to queries."""
    model, processor = fresh(folder)
    for block in model.blocks:
        block.attn_norm.weight.fill_(0.25)
    rows, _ = halves(32, 12)
    align_connector(model, processor, rows, noise=0.5)
    images = processor(images=[[row["messages"][0]["content"][0]["image"]] for row in rows])["pixel_values"]
    size = model.get_image_features(images).pooler_output.square().mean()
    torch.testing.assert_close(size, torch.tensor(0.0625 * 1.25), atol=0.015, rtol=0)  # with the noise


@torch.no_grad()
def test_what_most_captions_say_is_no_direction(folder):
    """Image tokens that all lie at the word which most captions have."""
    model, processor = fresh(folder)
    rows, sides = halves(32, 36)
    pairs = [(row, pair) for row, pair in zip(rows, sides) if "red" in pair]
    rows = [row for row, _ in pairs] * 2 + [row for row, pair in zip(rows, sides) if "red" not in pair][:4]
    align_connector(model, processor, rows, noise=0.0)
    images = processor(images=[[row["messages"][0]["content"][0]["image"]] for row in rows])["pixel_values"]
    tokens = model.get_image_features(images).pooler_output.flatten(0, 2)
    assert tokens.mean(0).norm() < 0.02 * tokens.square().sum(-1).mean().sqrt()


def test_what_cannot_be_aligned(folder):
    """A connector that stays random without a word, or NaN in its weights."""
    rows, _ = halves(32, 4)
    for options, message in (
        ({"connector_type": "perceiver", "perceiver_config": {"num_hidden_layers": 1}}, "of .*'mlp_2d'.*perceiver"),
        ({"cross_attention": {"context_size": 20}}, "`context_size` 64, got 20"),
    ):
        model, processor = fresh(folder, **options)
        with pytest.raises(ValueError, match=message):
            align_connector(model, processor, rows)
    model, processor = fresh(folder)
    before = model.model.connector.layers[0].weight.clone()
    said_alike = [caption(row["messages"][0]["content"][0]["image"], "a picture") for row in rows]
    no_picture = [{"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "red"}]}]
    for given, message in (
        (said_alike, r"4 image\(s\) whose texts differ in 0"),
        (no_picture, "none in 1 rows"),
        ([], "none in 0 rows"),
        ([*rows, {"messages": 3}], r"`rows\[4\]`.*messages"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            align_connector(model, processor, given)
    assert torch.equal(model.model.connector.layers[0].weight, before)
    model.model.vision_tower.post_layernorm.weight.data.fill_(float("nan"))
    with pytest.raises(ValueError, match="finite"):
        align_connector(model, processor, rows)
    tower = ResNetModel(ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic"))
    wide = retrofit(folder / "text", tower, connector_type="mlp_2d")
    wide_pictures = XAttnProcessor(SiglipImageProcessorPil(size={"height": 16, "width": 32}), processor.tokenizer)
    with pytest.raises(ValueError, match="square images .* height of 16 and a width of 32"):
        align_connector(wide, wide_pictures, rows)
    text_only = retrofit(folder / "text")
    with pytest.raises(ValueError, match="vision tower"):
        align_connector(text_only, processor, rows)


@torch.no_grad()
def test_keys_and_values_tell_places(folder):
    """A place that is mixed with the word there, or is missing; a code of another wave; queries that prefer one."""
    model, processor = fresh(folder, connector_type="mlp_2d")
    rows, _ = halves(model.config.vision_config.image_size)
    align_connector(model, processor, rows)
    side, width = 4, model.config.cross_attention_config.context_size
    code = GridCode()(torch.zeros(1, side * side, width))
    place = torch.arange(side * side)
    waves = [
        torch.cos(torch.pi * wave * ((place // side if axis == 0 else place % side) + 0.5) / side)
        for wave in (1, 2, 3, 4)
        for axis in (0, 1)
    ]
    prompt = processor.apply_chat_template(rows[0]["messages"][:1], tokenize=False, add_generation_prompt=True)
    words = told_apart(word_states(model.model.text_model, processor.tokenizer, 2, COLOURS, [prompt]))
    for block in model.model.blocks:
        width, heads = block.config.head_dim, block.config.num_key_value_heads
        count = min(width // 4, len(waves))
        expected = torch.stack(waves[:count], dim=1)
        values, keys = block.attn.v_proj, block.attn.k_proj
        torch.testing.assert_close(values(code)[0, :, -count:], PLACES * VALUES * expected, atol=0.3, rtol=0)
        assert values(words)[:, -count:].abs().max() < 1e-3 < values(words).abs().max()
        for head in keys(code)[0].unflatten(-1, (heads, width)).unbind(1):
            torch.testing.assert_close(head[:, -count:], KEY_PLACES * expected, atol=0.1 * KEY_PLACES, rtol=0)
        assert keys(words).unflatten(-1, (heads, width))[..., -count:].abs().max() < 1e-3 < keys(words).abs().max()
        queries = block.attn.q_proj.weight.unflatten(0, (-1, width))
        assert not bool(queries[:, -count:].any()) and bool(queries[:, :-count].any())


def test_words_that_no_picture_tells_are_left_out(folder):
    """Image tokens at the states of `the` and `square`, with which answers begin by chance."""
    model, processor = fresh(folder)
    rows, _ = halves(model.config.vision_config.image_size, 240)
    coins = np.random.default_rng(1).random(len(rows)) < 0.5
    for row, coin in zip(rows, coins):
        row["messages"][1]["content"] = f"{'the' if coin else 'square'} {row['messages'][1]['content']}"
    found = align_connector(model, processor, rows, blocks=False)
    assert (found.pictures, found.words) == (240, len(COLOURS))
    few = align_connector(fresh(folder)[0], processor, rows[:60], blocks=False)
    assert few.words == len(COLOURS) + 2  # in 60 pictures chance tells too little of a word
    with pytest.raises(ValueError, match="240 images that tell 0 of 2 words"):
        blind = [caption(Image.new("RGB", (32, 32)), "the" if coin else "square") for coin in coins]
        align_connector(fresh(folder)[0], processor, blind, blocks=False)


def test_what_the_other_half_finds():
    """A correlation with pictures that were fitted, which every word has; halves or words that are confused."""
    rng = np.random.default_rng(0)
    shown = rng.random((300, 3)) < [0.3, 0.5, 0.5]
    tokens = rng.normal(size=(300, 4, 40)) + 2.0 * shown[:, None, :1]  # of the first word alone
    said = [{word for word, there in zip("abc", row) if there} for row in shown]
    shares = dict(zip("abc", shown.mean(0)))
    texts = SimpleNamespace(words=list("abc"), shares=shares)
    told = ToldWords(True, texts)
    for own, words in zip(tokens, said):
        told.add(torch.tensor(own, dtype=torch.float32), words)
    targets = shown - shown.mean(0)
    expected = np.zeros(3)
    for half in (0, 1):
        weight, bias = ridge(
            torch.tensor(tokens[half::2].reshape(-1, 40)), torch.tensor(np.repeat(targets[half::2], 4, axis=0))
        )
        there = tokens[1 - half :: 2].mean(1) @ weight.double().T.numpy() + bias.numpy()
        wanted = targets[1 - half :: 2]
        both = (there * wanted).sum(0).clip(0)
        expected += both**2 / ((there**2).sum(0) * (wanted**2).sum(0)) / 2
    assert expected[0] > 0.5 > 0.04 > expected[1:].max()
    torch.testing.assert_close(told.told(), torch.tensor(expected), rtol=1e-3, atol=1e-5)
    with pytest.raises(CannotAlign, match="tell 1 of 3 words"):
        told.keep()
