"""What the models return on request: attention of text to images, forward by forward and from `generate`."""

import pytest
import torch
from transformers import AutoModelForImageTextToText
from transformers.generation import GenerateBeamDecoderOnlyOutput, GenerateDecoderOnlyOutput

from helpers.models.tiny_models import make_model, make_text, pixels, token_ids
from hf_xattn import XAttnConfig
from hf_xattn.outputs_xattn import XAttnGenerateBeamOutput, XAttnGenerateOutput
from hf_xattn.utils.transformers_api import CACHE


NEW, HEADS, TOKENS = 5, 4, 16  # tokens to generate, heads of a block, tokens of an image
ASKED = {"output_attentions": True, "return_dict_in_generate": True, "max_new_tokens": NEW}
CACHES = {"dynamic": {}, "static": {"cache_implementation": "static"}, "uncached": {"use_cache": False}}


@torch.no_grad()
def test_config_asks_for_attentions(tmp_path):
    """`config.output_attentions=True` that gives the decoder's attentions and not the blocks', or nothing after
    loading; an explicit argument that the configuration overrules.
    """
    asks = {"output_attentions": True, "output_hidden_states": True}
    model, ids, images = make_model(), token_ids(), pixels()
    plain = model(ids, pixel_values=images)
    assert plain.cross_attentions is None and plain.attentions is None and plain.hidden_states is None
    model.save_pretrained(tmp_path)
    model.set_attn_implementation("eager")
    model.config.output_attentions = model.config.output_hidden_states = True
    loaded = AutoModelForImageTextToText.from_pretrained(tmp_path, **asks, attn_implementation="eager").eval()
    built = make_model(**asks)
    built.set_attn_implementation("eager")
    assert isinstance(built.config, XAttnConfig) and built.config.output_attentions
    expected = model(ids, pixel_values=images, output_attentions=True).cross_attentions
    for each in (model, loaded, built):
        outputs = each(ids, pixel_values=images)
        assert len(outputs.cross_attentions) == 2 and len(outputs.attentions) == 4 and len(outputs.hidden_states) == 5
        for weights, wanted in zip(outputs.cross_attentions, expected):
            assert torch.allclose(weights, wanted, atol=1e-5)
        assert len(each.model(ids, pixel_values=images).cross_attentions) == 2
        silent = each(ids, pixel_values=images, output_attentions=False, output_hidden_states=False)
        assert silent.cross_attentions is None and not silent.attentions and not silent.hidden_states


@torch.no_grad()
def test_config_asks_for_tuples():
    """`config.return_dict=False` without effect, or an argument that it overrules."""
    model, ids, images = make_model(), token_ids(), pixels()
    expected = model(ids, pixel_values=images).logits
    model.config.return_dict = False
    as_tuple = model(ids, pixel_values=images, use_cache=False)
    assert isinstance(as_tuple, tuple) and torch.equal(as_tuple[0], expected)
    assert isinstance(model.model(ids, pixel_values=images), tuple)
    assert torch.equal(model(ids, pixel_values=images, return_dict=True).logits, expected)
    assert model.generate(ids, pixel_values=images, max_new_tokens=2).shape == (2, 9)


def full_attentions(model, sequence, **images):
    """The blocks' weights of one forward over a whole sequence."""
    return model(sequence, use_cache=False, output_attentions=True, **images).cross_attentions


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("kernel", ["sdpa", "eager"])
@pytest.mark.parametrize("method", [{"do_sample": False}, {"do_sample": True, "num_return_sequences": 2}])
@torch.no_grad()
def test_generate_returns_cross_attentions(cache, kernel, method):
    """`generate(output_attentions=True)` without the attention to images; steps in a wrong order, or of another row."""
    model, ids, images = make_model(), token_ids(), pixels(2, 2)
    model.set_attn_implementation(kernel)
    mask = torch.tensor([[True, True], [True, False]])
    outputs = model.generate(ids, pixel_values=images, image_mask=mask, **ASKED, **method, **CACHES[cache])
    assert type(outputs) is XAttnGenerateOutput and isinstance(outputs, GenerateDecoderOnlyOutput)
    repeats = method.get("num_return_sequences", 1)
    whole = full_attentions(
        model,
        outputs.sequences,
        pixel_values=images.repeat_interleave(repeats, dim=0),
        image_mask=mask.repeat_interleave(repeats, dim=0),
    )
    assert len(outputs.cross_attentions) == NEW == len(outputs.attentions)
    for step, blocks in enumerate(outputs.cross_attentions):
        length = 7 + step
        first = length - 1 if step and cache != "uncached" else 0
        assert isinstance(blocks, tuple) and len(blocks) == 2
        for weights, expected in zip(blocks, whole):
            assert weights.shape == (2 * repeats, HEADS, length - first, 2 * TOKENS)
            assert torch.allclose(weights, expected[:, :, first:length], atol=1e-5)


@pytest.mark.parametrize("cache", CACHES)
@torch.no_grad()
def test_beams_return_cross_attentions(cache):
    """Attentions of beams that `beam_indices` does not lead to."""
    model, ids, images = make_model(), token_ids(), pixels()
    outputs = model.generate(
        ids, pixel_values=images, num_beams=3, output_scores=True, do_sample=False, **ASKED, **CACHES[cache]
    )
    assert type(outputs) is XAttnGenerateBeamOutput and isinstance(outputs, GenerateBeamDecoderOnlyOutput)
    assert len(outputs.cross_attentions) == NEW
    whole = full_attentions(model, outputs.sequences, pixel_values=images)
    for step, blocks in enumerate(outputs.cross_attentions):
        for weights, expected in zip(blocks, whole):
            assert weights.shape[:2] == (6, HEADS) and weights.shape[3] == TOKENS
            # A step reads the token that the step before it chose, in the row that the choice came from.
            rows = outputs.beam_indices[:, step].tolist()
            for sample, row in enumerate(rows):
                assert torch.allclose(weights[row, :, -1], expected[sample, :, 7 + step - 1], atol=1e-5)


@pytest.mark.parametrize("kernel", ["sdpa", "eager"])
@pytest.mark.parametrize("assistant", ["prompt_lookup", "text_model", "itself"])
@torch.no_grad()
def test_assisted_decoding_returns_cross_attentions(assistant, kernel):
    """Weights of rejected candidates among the tokens, or fewer entries than tokens; an assistant that gets what it
    cannot take.
    """
    model, images = make_model(), pixels(1)
    model.set_attn_implementation(kernel)
    ids = token_ids(1, 4).repeat(1, 3)
    options = {"prompt_lookup_num_tokens": 3}
    if assistant != "prompt_lookup":
        other = make_text(seed=11) if assistant == "text_model" else make_model(vision=False)
        if assistant == "itself":
            other.model.text_model.load_state_dict(model.model.text_model.state_dict())
        other.generation_config.num_assistant_tokens = 3
        options = {"assistant_model": other}
    plain = model.generate(ids, pixel_values=images, do_sample=False, **ASKED)
    outputs = model.generate(ids, pixel_values=images, do_sample=False, **ASKED, **options)
    assert torch.equal(outputs.sequences, plain.sequences)
    assert len(outputs.cross_attentions) == NEW
    for got, expected in zip(outputs.cross_attentions, plain.cross_attentions):
        for weights, wanted in zip(got, expected):
            assert weights.shape == wanted.shape and torch.allclose(weights, wanted, atol=1e-5)


@torch.no_grad()
def test_accepted_candidates_have_their_own_attentions():
    """An accepted candidate with the weights of the prompt's first tokens, as transformers' own splitting gives."""
    model, images = make_model(random=False), pixels(1)
    for block in model.blocks:  # fresh otherwise, so that a text-only assistant is always right
        torch.nn.init.normal_(block.attn.q_proj.weight, std=2.0)
        torch.nn.init.normal_(block.attn.k_proj.weight, std=2.0)
    ids, assistant = token_ids(1), make_text()
    assistant.generation_config.num_assistant_tokens = 4
    assistant.generation_config.assistant_confidence_threshold = 0.0
    forwards = []
    model.register_forward_hook(lambda *_: forwards.append(1))
    outputs = model.generate(ids, pixel_values=images, do_sample=False, assistant_model=assistant, **ASKED)
    assert len(forwards) < NEW, "candidates were accepted"
    whole = full_attentions(model, outputs.sequences, pixel_values=images)
    assert [blocks[0].shape[2] for blocks in outputs.cross_attentions] == [7] + [1] * (NEW - 1)
    for index, expected in enumerate(whole):
        got = torch.cat([blocks[index] for blocks in outputs.cross_attentions], dim=2)
        assert torch.allclose(got, expected[:, :, :-1], atol=1e-5)


@torch.no_grad()
def test_continued_generation_returns_the_new_attentions():
    """A second turn whose first entry covers the whole conversation, or that gets the entries of the first."""
    model, ids, images = make_model(), token_ids(1), pixels(1)
    for options in ({}, {"prompt_lookup_num_tokens": 2}):
        cache = model.encode_images(images)
        first = model.generate(ids, cache=cache, do_sample=False, **ASKED, **options)
        assert [blocks[0].shape[2] for blocks in first.cross_attentions] == [7] + [1] * (NEW - 1)
    chat = torch.cat([first.sequences, ids[:, :3]], dim=1)
    second = model.generate(chat, cache=first[CACHE], do_sample=False, **ASKED)
    assert [blocks[0].shape[2] for blocks in second.cross_attentions] == [4] + [1] * (NEW - 1)


@torch.no_grad()
def test_attentions_are_not_kept_without_a_request():
    """Attentions that are computed or kept without a request; a plain tensor that becomes something else."""
    model, ids, images = make_model(), token_ids(), pixels()
    asked = []
    for block in model.blocks:
        block.attn.register_forward_hook(lambda module, args, output: asked.append(output[1] is not None))
    outputs = model.generate(ids, pixel_values=images, max_new_tokens=NEW, return_dict_in_generate=True)
    assert outputs.cross_attentions is None and outputs.attentions is None and not any(asked)
    assert type(model.generate(ids, pixel_values=images, max_new_tokens=NEW)) is torch.Tensor
    assert not any(asked)
    assert model.generate(ids, **ASKED).cross_attentions is None, "no images"


@torch.no_grad()
def test_attentions_of_the_blocks_alone():
    """The decoder's weights that come along, other weights of the blocks, or a `generate` that drops the argument."""
    model, ids, images = make_model(), token_ids(), pixels()
    model.set_attn_implementation("eager")
    both = model(ids, pixel_values=images, output_attentions=True)
    alone = model(ids, pixel_values=images, output_attentions=False, output_cross_attentions=True)
    assert both.attentions and not alone.attentions
    assert len(alone.cross_attentions) == len(model.blocks)
    assert all(map(torch.equal, alone.cross_attentions, both.cross_attentions))
    without = model(ids, pixel_values=images, output_attentions=True, output_cross_attentions=False)
    assert without.attentions and without.cross_attentions is None
    with pytest.raises(ValueError, match="no `output_cross_attentions`.*`output_attentions=True`"):
        model.generate(ids, pixel_values=images, output_cross_attentions=True, return_dict_in_generate=True)
