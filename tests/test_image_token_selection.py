"""`keep_image_tokens`: which image tokens later blocks keep, in one forward. See `cache/kept_tokens.py` for the reference."""

import numpy as np
import pytest
import torch
from kept_tokens import Case, chosen_by_hand, kept_of, lengths
from marked_models import MARKER, close, marked, sees_of
from tiny_decoders import make_tiny
from tiny_mllama import TILED, make_mllama
from tiny_models import make_model, pixels, randomize, token_ids

from hf_xattn import XAttnConfig, XAttnForConditionalGeneration
from hf_xattn.importers import import_checkpoint
from hf_xattn.layers.image_token_selection import most_important, quota
from hf_xattn.maps import attention_maps


LAYERS = [0, 1, 3]


def with_masks(kind):
    """A call with a mask."""
    model, ids, images = make_model(cross_attention_layers=LAYERS), token_ids(), pixels(2, 2)
    inputs = {"input_ids": ids, "pixel_values": images}
    real, sees = torch.ones(2, 32, dtype=torch.bool), None
    if kind == "images":
        real[1, 16:] = False
        inputs["image_mask"] = real[:, ::16]
    elif kind == "a row without images":
        real[1] = False
        inputs["image_mask"] = real[:, ::16]
    elif kind == "tokens":
        real = torch.rand(2, 32, generator=torch.Generator().manual_seed(0)) < 0.6
        inputs["cross_attention_mask"] = real
    elif kind == "text":
        sees = torch.rand(2, 7, 32, generator=torch.Generator().manual_seed(0)) < 0.3
        sees[0, :, 16:] = False  # no text sees this image
        inputs["cross_attention_mask"] = sees
    elif kind in ("left", "right"):
        inputs["attention_mask"] = torch.ones(2, 7, dtype=torch.long)
        inputs["attention_mask"][0, slice(0, 3) if kind == "left" else slice(4, 7)] = 0
    return Case(model, inputs, sees, real)


def with_markers(rule):
    ids = token_ids()
    ids[0, 1] = ids[0, 4] = ids[1, 0] = ids[1, 1] = MARKER
    inputs = {"input_ids": ids, "pixel_values": pixels(2, 2)}
    return Case(marked(rule, cross_attention_layers=LAYERS), inputs, sees_of(ids, rule, 2))


def with_options(**options):
    block = {name: options.pop(name) for name in ("quiet_softmax", "position_bias", "qk_norm") if name in options}
    kernel = options.pop("kernel", None)
    model = make_model(cross_attention_layers=LAYERS, cross_attention_config=block, **options)
    if kernel:
        model.set_attn_implementation(kernel)
    return Case(model, {"input_ids": token_ids(), "pixel_values": pixels(2, 2)})


def shared_rows():
    """Text rows in any number and order about two image rows, one about none."""
    owner = [1, 0, 1, -1, 1]
    inputs = {"input_ids": token_ids(5), "pixel_values": pixels(2), "image_rows": torch.tensor(owner)}
    return Case(make_model(cross_attention_layers=LAYERS), inputs, owner=owner)


def packed():
    """Two samples in a row, each with an image of its own."""
    ids = token_ids(1, 9)
    ids[0, 0] = ids[0, 5] = MARKER
    inputs = {"input_ids": ids, "pixel_values": pixels(1, 2)}
    inputs["position_ids"] = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]])
    sees = torch.zeros(1, 9, 2, dtype=torch.bool)
    sees[0, :4, 0] = sees[0, 5:, 1] = True
    model = marked("previous", cross_attention_layers=LAYERS)
    return Case(model, inputs, sees.repeat_interleave(16, dim=-1))


def long_text():
    """So much text that the heads of a group share a mask."""
    sees = torch.rand(1, 120, 32, generator=torch.Generator().manual_seed(0)) < 0.5
    ids = token_ids(1, 120)
    sees, ids = sees.repeat(3, 1, 1), ids.repeat(3, 1)
    inputs = {"input_ids": ids, "pixel_values": pixels(1, 2), "cross_attention_mask": sees}
    inputs["image_rows"] = torch.zeros(3, dtype=torch.long)  # 360 positions share an image row
    return Case(make_model(cross_attention_layers=LAYERS), inputs, sees)


def through_the_channel():
    """A decoder that hands no keywords to its layers."""
    text = make_tiny("bloom")
    config = XAttnConfig(text_config=text.config, cross_attention_layers=[0, 1])
    model = randomize(XAttnForConditionalGeneration(config, text_model=text).eval())
    width = config.cross_attention_config.context_size
    states = torch.randn(2, 12, width, generator=torch.Generator().manual_seed(0))
    return Case(model, {"input_ids": token_ids().remainder(20) + 4, "cross_attention_states": states})


def with_tiles():
    """Images of several tiles, of which some are padding, each seen from its marker on."""
    model = import_checkpoint(make_mllama())
    inputs = dict(TILED["batch"])
    features = model.get_image_features(
        **{name: inputs[name] for name in ("pixel_values", "aspect_ratio_ids", "aspect_ratio_mask")}
    ).pooler_output
    tokens = features.shape[2] // 4  # of a tile
    sees = inputs["cross_attention_mask"].bool().repeat_interleave(tokens, dim=-1).flatten(2)
    real = inputs["aspect_ratio_mask"].bool().repeat_interleave(tokens, dim=-1).flatten(1)
    real &= (inputs["aspect_ratio_ids"] > 0).repeat_interleave(4 * tokens, dim=-1)
    return Case(model, inputs, sees, real, features=features)


CASES = {
    "plain": lambda: with_options(),
    "qwen3": lambda: with_options(name="qwen3"),
    "quiet softmax": lambda: with_options(quiet_softmax=True),
    "position bias": lambda: with_options(position_bias=True),
    "normed queries": lambda: with_options(qk_norm=True),
    "eager": lambda: with_options(kernel="eager"),
    **{
        f"mask of {kind}": lambda kind=kind: with_masks(kind)
        for kind in ("images", "a row without images", "tokens", "text", "left", "right")
    },
    **{rule: lambda rule=rule: with_markers(rule) for rule in ("previous", "latest")},
    "image rows": shared_rows,
    "packed rows": packed,
    "long text": long_text,
    "channel": through_the_channel,
    "tiles": with_tiles,
}


@torch.no_grad()
@pytest.mark.parametrize("share", [0.5, 0.1])
@pytest.mark.parametrize("name", CASES)
def test_later_blocks_see_the_chosen_tokens(name, share):
    """Other tokens than those that the text looks at most; padding that chooses or is chosen; masks, positions or rows that do not go
    along with the tokens."""
    case = CASES[name]()
    alone = {} if name in ("image rows", "packed rows", "long text") else {"use_cache": True}
    outputs = case.model(**case.inputs, keep_image_tokens=share, **alone)
    assert close(outputs.logits, case.expected(share))
    plain = case.model(**case.inputs, use_cache=False).logits
    assert not close(outputs.logits, plain), "the reference would pass with all tokens"
    if alone:
        tokens = case.states.shape[1]
        assert torch.equal(kept_of(outputs.past_key_values, tokens), case.kept(share))
        null = case.model.config.cross_attention_config.quiet_softmax
        first, *later = lengths(outputs.past_key_values)
        unseen = name == "mask of text"  # an image that no text of a row sees stays whole
        kept = sum(quota(share, size) for size in case.sizes[unseen:]) + unseen * case.sizes[0]
        assert first == tokens + null and set(later) == {kept + null}


@torch.no_grad()
def test_all_tokens_are_the_plain_path():
    """Logits or keys that differ in a bit, because 1.0 takes another way."""
    case = with_masks("images")
    plain = case.model(**case.inputs)
    for share in (1.0, 1, None, 0.97):  # 0.97 of 16 tokens, rounded up, are all
        outputs = case.model(**case.inputs, keep_image_tokens=share)
        assert torch.equal(outputs.logits, plain.logits), share
        cache = outputs.past_key_values.cross_attention_cache
        assert cache.layout.kept is None
        for layer, expected in zip(cache.layers, plain.past_key_values.cross_attention_cache.layers, strict=True):
            assert torch.equal(layer.keys, expected.keys) and torch.equal(layer.values, expected.values)


@torch.no_grad()
def test_later_blocks_project_only_what_they_keep():
    """Time and memory of tokens that are then thrown away."""
    model, seen = make_model(cross_attention_layers=LAYERS), []
    for block in model.blocks:
        for projection in (block.attn.k_proj, block.attn.v_proj):
            projection.register_forward_hook(lambda module, inputs, output: seen.append(tuple(output.shape[:2])))
    for options in ({"use_cache": False}, {}):
        model(token_ids(), pixel_values=pixels(2, 2), keep_image_tokens=0.25, **options)
        assert seen == [(2, 32)] * 2 + [(2, 8)] * 4
        seen.clear()


@torch.no_grad()
def test_weights_are_computed_part_by_part(monkeypatch):
    """All attention weights of a long text in memory at a time, or parts that are put together wrongly."""
    from hf_xattn.layers import image_token_selection

    expected = [CASES[name]().kept(0.25) for name in ("plain", "mask of text", "mask of left")]
    monkeypatch.setattr(image_token_selection, "WEIGHTS_AT_A_TIME", 2 * 4 * 32 * 3)  # three positions
    for name, kept in zip(("plain", "mask of text", "mask of left"), expected):
        case = CASES[name]()
        cache = case.model(**case.inputs, keep_image_tokens=0.25).past_key_values
        assert torch.equal(kept_of(cache, 32), kept), name


def test_a_union_of_heads():
    """A token that one head needs and the sum over heads hides."""
    weights = torch.tensor([[[0.40, 0.3, 0.2, 0.1, 0], [0.40, 0.3, 0.2, 0.1, 0], [0, 0, 0, 0.01, 0.02]]])
    chosen, counts = most_important(weights, None, 0.4)
    assert chosen.tolist() == [[0, 4]] and counts is None
    real = torch.tensor([[True, True, True, True, False]])
    chosen, counts = most_important(weights, real, 0.5)
    assert chosen.tolist() == [[0, 3, 1]] or chosen[0, counts[0]].tolist() == [0, 3]
    assert counts.tolist() == [[True, True, False]]


def test_quotas():
    """Rounding errors that keep a token too many, or an image without tokens."""
    assert [quota(0.1, 30), quota(0.5, 1601), quota(0.01, 13), quota(1 / 3, 9)] == [3, 801, 1, 3]


@torch.no_grad()
def test_weights_of_all_blocks_have_all_tokens():
    """Weights of later blocks that stand for other tokens than those of the first."""
    case = with_masks("tokens")
    outputs = case.model(**case.inputs, keep_image_tokens=0.5, output_attentions=True)
    kept = case.kept(0.5)
    first, *later = outputs.cross_attentions
    assert all(weights.shape == first.shape == (2, 4, 7, 32) for weights in later)
    for weights in later:
        assert not weights[~kept[:, None, None].expand_as(weights)].any()
        assert torch.allclose(weights.sum(-1), torch.ones(2, 4, 7))


def test_gradients_reach_what_was_kept():
    """A broken graph in evaluation mode, for example in a saliency map of the pixels."""
    case = with_masks("images")
    states = case.states.clone().unflatten(1, (2, 16)).requires_grad_()
    inputs = {**case.inputs, "pixel_values": None, "cross_attention_states": states}
    case.model(**inputs, keep_image_tokens=0.25, use_cache=False).logits.sum().backward()
    kept = case.kept(0.25)
    assert states.grad.flatten(1, 2)[case.real].abs().sum(-1).min() > 0, "the first block sees all real tokens"
    for block in case.model.blocks:
        assert block.attn.k_proj.weight.grad.abs().sum() > 0
    assert kept.sum() == 4 * 3


BAD = [0, -0.5, 1.5, True, False, "half", float("nan"), float("inf"), torch.tensor(0.5), [0.5], 0.5j]


@pytest.mark.parametrize("share", BAD, ids=repr)
def test_bad_shares_are_refused(share):
    """A share that is ignored, or an error from deep inside."""
    model, inputs = make_model(cross_attention_layers=LAYERS), {"pixel_values": pixels()}
    for call in (model, model.model, lambda *args, **kwargs: model.generate(*args, max_new_tokens=2, **kwargs)):
        with pytest.raises(ValueError, match="Expected `keep_image_tokens` to be a number above 0 and at most 1"):
            call(token_ids(), **inputs, keep_image_tokens=share)


def test_numbers_of_other_libraries():
    """A share from numpy that is refused."""
    model, ids, images = make_model(cross_attention_layers=LAYERS), token_ids(), pixels()
    expected = model(ids, pixel_values=images, keep_image_tokens=0.5).logits
    for share in (np.float64(0.5), np.float32(0.5)):
        assert torch.equal(model(ids, pixel_values=images, keep_image_tokens=share).logits, expected)


def test_models_that_cannot_choose():
    """Weights that silently do not learn, a single block that drops nothing, and maps of other tokens."""
    inputs = {"input_ids": token_ids(), "pixel_values": pixels()}
    model = make_model(cross_attention_layers=LAYERS)
    with pytest.raises(ValueError, match="`keep_image_tokens` in evaluation mode"):
        model.train()(**inputs, keep_image_tokens=0.5)
    model.eval()
    with pytest.raises(ValueError, match="`keep_image_tokens` for a model of 2 or more cross-attention blocks, got 1"):
        make_model(cross_attention_layers=[1])(**inputs, keep_image_tokens=0.5)
    for options in ({"max_new_tokens": 2, "keep_image_tokens": 0.5}, {}):
        given = inputs if options else {**inputs, "keep_image_tokens": 0.5}
        with pytest.raises(ValueError, match="`attention_maps` without `keep_image_tokens`"):
            attention_maps(model, given, **options)
    assert model(token_ids(), keep_image_tokens=0.5).logits.shape[:2] == (2, 7), "a turn without images"


def test_compiled_prompts_are_refused():
    """Graphs with the tokens of the first prompt."""
    model = make_model(cross_attention_layers=LAYERS)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with pytest.raises(Exception, match="`keep_image_tokens` outside of compiled and exported code"):
        compiled(token_ids(), pixel_values=pixels(), keep_image_tokens=0.5)
    torch._dynamo.reset()


def test_the_reference_is_a_union():
    """A reference that ranks by the sum over heads alone, as the code must not."""
    weights = torch.tensor([[0.40, 0.3, 0.2, 0.1, 0], [0.40, 0.3, 0.2, 0.1, 0], [0, 0, 0, 0.01, 0.02]])[None, :, None]
    everything = torch.ones(1, 1, 5, dtype=torch.bool)
    kept = chosen_by_hand(weights, everything[..., 0], everything[0], everything, (5,), 0.4, [0])
    assert kept.tolist() == [[True, False, False, False, True]]
