"""Parity with flamingo-pytorch, an independent implementation of Flamingo: gated block, perceiver resampler and mask
of the latest image.
"""

import random

import pytest
import torch

from helpers.models.foreign_blocks import MARKER, VISION, make_clip
from helpers.models.tiny_models import make_model, make_text, pixels, token_ids
from hf_xattn import GatedCrossAttentionBlock
from hf_xattn.configuration_xattn import PerceiverConfig
from hf_xattn.importers.open_flamingo import import_open_flamingo, open_flamingo_block, open_flamingo_resampler
from hf_xattn.parts.perceiver import PerceiverResampler
from hf_xattn.utils.transformers_api import CACHE


flamingo = pytest.importorskip("flamingo_pytorch", reason="of the extra `test`")

LAYERS = (0, 2)


@torch.no_grad()
def randomized(module, seed):
    """Gates start at zero and norms at one there: with random numbers, a wrong one shows."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in module.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.copy_(noise * 0.1 + 1 if parameter.dim() == 1 and name.endswith("weight") else noise * 0.3)
    return module.eval()


def seen_by(ids, images, tokens, latest):
    """What each text position may see, `(batch, text_len, images * tokens)`."""
    number = (ids == MARKER).cumsum(dim=1)[..., None]
    image = torch.arange(1, images + 1)
    return (number == image if latest else number >= image).repeat_interleave(tokens, dim=-1)


@torch.no_grad()
@pytest.mark.parametrize("seed", range(20))
def test_the_block_gives_the_output_of_flamingo_pytorch(seed):
    """Heads that are split in another order, keys for values, another norm, activation or scale, or another image."""
    draw = random.Random(seed)
    heads, head_dim, latest = draw.choice([1, 2, 3]), draw.choice([4, 8]), draw.random() < 0.7
    width, images, tokens = draw.choice([16, 24]), draw.randint(1, 3), draw.randint(1, 4)
    theirs = flamingo.GatedCrossAttentionBlock(
        dim=width, dim_head=head_dim, heads=heads, ff_mult=draw.choice([1, 4]), only_attend_immediate_media=latest
    )
    randomized(theirs, seed)
    config, state = open_flamingo_block(theirs.state_dict(), head_dim)
    ours = GatedCrossAttentionBlock(config).eval()
    ours.load_state_dict(state)
    torch.manual_seed(seed)
    ids = torch.randint(MARKER, MARKER + 3, (2, 9))
    text, media = torch.randn(2, 9, width), torch.randn(2, images, tokens, width)
    expected = theirs(text, media, media_locations=ids == MARKER)
    mask = seen_by(ids, images, tokens, latest)
    output = ours(text, media.flatten(1, 2), mask)
    seen = mask.any(dim=-1)
    assert torch.allclose(output[seen], expected[seen], atol=1e-5)
    assert torch.equal(output[~seen], text[~seen])  # there, theirs adds its MLP branch
    assert torch.allclose(ours(text, media.flatten(1, 2)), theirs(text, media), atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("seed", range(20))
def test_the_resampler_gives_the_output_of_flamingo_pytorch(seed):
    """Latents or tokens in another order among the keys, or the position of another image."""
    draw = random.Random(seed)
    heads, head_dim, images = draw.choice([1, 2]), draw.choice([4, 8]), draw.randint(1, 4)
    theirs = flamingo.PerceiverResampler(
        dim=VISION,
        depth=draw.randint(1, 3),
        dim_head=head_dim,
        heads=heads,
        num_latents=draw.randint(1, 5),
        num_media_embeds=4,
        ff_mult=draw.choice([1, 4]),
    )
    randomized(theirs, seed)
    config, state = open_flamingo_resampler(theirs.state_dict(), head_dim)
    assert config.num_image_positions == 4
    ours = PerceiverResampler(config).eval()
    ours.load_state_dict(state)
    torch.manual_seed(seed)
    features = torch.randn(2, images, 6, VISION)
    assert torch.allclose(ours(features, torch.arange(images).expand(2, -1)), theirs(features), atol=1e-5)
    one = features[:, :1]
    assert torch.allclose(ours(one), theirs(one), atol=1e-5)


class Reference:
    """A Llama with blocks and resampler of flamingo-pytorch in front of its layers. Text without an image skips a
    block.
    """

    def __init__(self):
        self.blocks = [
            randomized(flamingo.GatedCrossAttentionBlock(dim=VISION, dim_head=8, heads=2), at) for at in LAYERS
        ]
        for index, block in enumerate(self.blocks):  # the text is wider than the image tokens, as in OpenFlamingo
            block.attn.norm, block.ff = torch.nn.LayerNorm(32), flamingo.flamingo_pytorch.FeedForward(32)
            block.attn.to_q, block.attn.to_out = (
                torch.nn.Linear(32, 16, bias=False),
                torch.nn.Linear(16, 32, bias=False),
            )
            randomized(block, 10 + index)
        self.resampler = randomized(
            flamingo.PerceiverResampler(dim=VISION, depth=2, dim_head=8, heads=2, num_latents=3, num_media_embeds=3), 5
        )
        self.text, self.media = make_text(), None
        self.text.model.register_forward_pre_hook(self.read_ids, with_kwargs=True)
        for block, index in zip(self.blocks, LAYERS):
            layer = self.text.model.layers[index]
            layer.register_forward_pre_hook(self.before(block))

    def state(self):
        state = {f"perceiver.{name}": tensor for name, tensor in self.resampler.state_dict().items()}
        for block, index in zip(self.blocks, LAYERS):
            for name, tensor in block.state_dict().items():
                state[f"lang_encoder.model.layers.{index}.gated_cross_attn_layer.{name}"] = tensor
        return state

    def read_ids(self, module, args, kwargs):
        self.ids = kwargs["input_ids"]

    def before(self, block):
        def run(layer, args):
            found = self.ids == MARKER
            changed = block(args[0], self.media, media_locations=found)
            return (torch.where(found.cumsum(dim=1)[..., None] > 0, changed, args[0]), *args[1:])

        return run

    def see(self, images):
        features = make_clip()(images.flatten(0, 1)).last_hidden_state[:, 1:]
        self.media = self.resampler(features.unflatten(0, images.shape[:2]))
        return self.text


def documents():
    """Two rows, left-padded, with three images and with one."""
    ids = torch.tensor([[4, MARKER, 7, 8, MARKER, MARKER, 9, 10], [0, 0, 6, 7, MARKER, 9, 8, 11]])
    images = torch.randn(2, 3, 3, 16, 16, generator=torch.Generator().manual_seed(3))
    real = torch.tensor([[True, True, True], [True, False, False]])
    return {"input_ids": ids, "attention_mask": (ids != 0).long()}, images, real


@torch.no_grad()
def test_model_and_generated_tokens(tmp_path):
    """The second image with the position of the first; images of a padded row; positions lost in a file or after the
    first step.
    """
    reference = Reference()
    model = import_open_flamingo(reference.state(), make_text(), make_clip(), image_token_id=MARKER, head_dim=8)
    model.save_pretrained(tmp_path)
    model = type(model).from_pretrained(tmp_path).eval()
    assert model.config.perceiver_config.num_image_positions == 3
    text, images, real = documents()
    theirs = reference.see(images)
    given = {"pixel_values": images, "image_mask": real}
    found = text["attention_mask"].bool()
    expected = theirs(**text, use_cache=False).logits
    assert torch.allclose(model(**text, **given).logits[found], expected[found], atol=2e-5)
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    generated = theirs.generate(**text, **options, use_cache=False)
    for use_cache in (True, False):
        assert torch.equal(model.generate(**text, **given, **options, use_cache=use_cache), generated)
    cache = model.encode_images(**given)
    assert torch.equal(model.generate(**text, cache=cache, **options), generated)


def with_positions():
    """A model whose resampler has four positions."""
    perceiver = {"num_latents": 3, "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 8}
    perceiver = {**perceiver, "num_image_positions": 4}
    block = {"context_size": 24}
    return make_model(connector_type="perceiver", perceiver_config=perceiver, cross_attention_config=block)


def keys(cache):
    return torch.stack([layer.keys for layer in cache.cross_attention_cache.layers])


@torch.no_grad()
@pytest.mark.parametrize("store", [False, True])
def test_positions_go_on_in_later_turns(store):
    """Images of a second turn, or from the store, with the positions of the first; padding images that take a
    position.
    """
    model = with_positions()
    if store:
        model.enable_image_store()
    twice = pixels(2, 2)
    twice[:, 1] = twice[:, 0]
    both = keys(model.encode_images(twice))
    assert not torch.allclose(both[..., :3, :], both[..., 3:, :], atol=1e-3)
    images = pixels(2, 3, seed=8)
    whole = keys(model.encode_images(images))
    cache = model.encode_images(images[:, :1])
    assert torch.allclose(keys(model.encode_images(images[:, 1:], cache=cache)), whole, atol=1e-5)
    again = model.encode_images(images[:, :2])
    assert torch.allclose(keys(model.encode_images(images, cache=again)), whole, atol=1e-5)
    padded = torch.cat([images[:, :1], torch.zeros_like(images[:, :1]), images[:, 1:]], dim=1)
    real = torch.tensor([[True, False, True, True]] * 2)
    cache = model.encode_images(padded[:, :2], image_mask=real[:, :2])
    later = model.encode_images(padded[:, 2:], cache=cache)
    for found in (keys(later), keys(model.encode_images(padded, image_mask=real))):
        found = torch.cat([found[..., :3, :], found[..., 6:, :]], dim=-2)
        assert torch.allclose(found, whole, atol=1e-5)
    features = model.model.vision_tower(images.flatten(0, 1)).last_hidden_state.unflatten(0, (2, 3))
    assert torch.allclose(keys(model.encode_images(vision_features=features)), whole, atol=1e-5)
    states = model.get_image_features(images).pooler_output
    assert torch.allclose(keys(model.encode_images(cross_attention_states=states)), whole, atol=1e-5)


@torch.no_grad()
def test_more_images_than_positions():
    """An IndexError from inside torch, or a position that is used twice."""
    model = with_positions()
    with pytest.raises(ValueError, match=r"at most 4 images .*`pixel_values` with image 5"):
        model.encode_images(pixels(1, 5))
    cache = model.encode_images(pixels(1, 3))
    with pytest.raises(ValueError, match=r"`pixel_values` with image 5"):
        model.encode_images(pixels(1, 2, seed=9), cache=cache)
    real = torch.tensor([[True, False, True, True, True]])
    assert model.encode_images(pixels(1, 5), image_mask=real).cross_attention_cache.layout.num_images == 5


@torch.no_grad()
def test_positions_of_text_rows_that_share_images():
    """A new image that gets the place that it has for the first of its text rows, or an old one whose place is no
    longer right.
    """
    model, images = with_positions(), pixels(1, 3)
    ids, mask = token_ids(2), torch.tensor([[True, True], [True, False]])
    cache = model.encode_images(images[:, :2])
    with pytest.raises(ValueError, match=r"`image_mask`.*row 1: .*`encode_images`"):
        model(ids, cache=cache, image_mask=~mask | mask.flip(1))
    padded = torch.tensor([[True, False, True]])
    model(ids, cache=model.encode_images(images, image_mask=padded), image_mask=padded)
    model(ids, cache=cache, image_mask=mask)
    with pytest.raises(ValueError, match=r"\[\[2, 1\]\].*`batch_select_indices`"):
        model(ids, cache=cache, pixel_values=images[:, 2:])
    cache.batch_select_indices(torch.arange(2))
    logits = model(ids, cache=cache, pixel_values=images[:, 2:].expand(2, -1, -1, -1, -1)).logits
    for row in range(2):
        cache = model(ids[row : row + 1], pixel_values=images[:, :2][:, mask[row]])[CACHE]
        alone = model(ids[row : row + 1], cache=cache, pixel_values=images[:, 2:]).logits
        assert torch.allclose(logits[row], alone[0], atol=1e-5)


def test_positions_of_images_get_gradients_in_every_row():
    """Positions without a gradient; a row of text alone that waits for one."""
    model = with_positions().train()
    model(token_ids(), pixel_values=pixels(2, 4), labels=token_ids()).loss.backward()
    assert model.model.connector.layers[0].image_positions.grad.abs().min() > 0


def test_positions_are_off_by_default():
    """A weight that old checkpoints lack."""
    assert PerceiverConfig().num_image_positions == 0
    assert PerceiverResampler(PerceiverConfig(hidden_size=8, head_dim=4)).image_positions is None
