"""The models: identity when fresh, text that sees no image stays the base's, training, outputs, errors."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers.cache_utils import DynamicCache, EncoderDecoderCache
from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions, CausalLMOutputWithCrossAttentions

from helpers.models.tiny_models import (
    TEXT_CONFIGS,
    VOCAB_SIZE,
    make_model,
    make_text,
    pixels,
    randomize,
    token_ids,
    vision_config,
)
from hf_xattn import XAttnConfig, XAttnForConditionalGeneration, XAttnModel
from hf_xattn.decoders.decoder import find_decoder
from hf_xattn.utils.transformers_api import CACHE


# The new name of `gradient_checkpointing_enable` is not in every supported version of transformers.
pytestmark = pytest.mark.filterwarnings("ignore:`.*gradient_checkpointing.*` is deprecated:FutureWarning")

MARKER = 3
INIT_STYLES = {
    "default": {},
    "flamingo": {"zero_init": False, "gate_init": 0.0},
    "kempnerforge": {"zero_init": True, "gate": "none"},
}


def states(batch=2, num_tokens=5, width=32, seed=5):
    return torch.randn(batch, num_tokens, width, generator=torch.Generator().manual_seed(seed))


# --- identity


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", TEXT_CONFIGS)
def test_fresh_model_is_the_base(name, dtype):
    """A retrofit that changes the text model: lost causal mask, another kernel, rounding on the way, noise in zero
    weights.
    """
    ids = token_ids()
    padding = torch.ones_like(ids)
    padding[0, :2] = 0
    base = make_text(name, dtype)
    expected = base(ids, use_cache=False).logits
    padded = base(ids, attention_mask=padding).logits
    model = make_model(name, dtype=dtype, random=False)
    assert torch.equal(model(ids, use_cache=False).logits, expected)
    assert torch.equal(model(ids, pixel_values=pixels()).logits, expected)
    assert torch.equal(model(ids, cross_attention_states=states(), use_cache=False).logits, expected)
    assert torch.equal(model(ids, pixel_values=pixels(), attention_mask=padding).logits, padded)
    assert model(ids, pixel_values=pixels()).logits.dtype == dtype


@pytest.mark.parametrize("style", INIT_STYLES)
def test_every_init_style_starts_at_the_base(style):
    """A style whose zero is overwritten when the model around the blocks is initialised."""
    ids = token_ids()
    expected = make_text()(ids).logits
    model = make_model(random=False, cross_attention_config=INIT_STYLES[style])
    assert torch.equal(model(ids, pixel_values=pixels()).logits, expected)
    for block in model.blocks:
        assert block.attn.q_proj.weight.std() > 0 and block.mlp.up_proj.weight.std() > 0


# --- who sees what


@torch.no_grad()
@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2", "opt", "phi3", "gpt_neox"])
def test_images_matter_and_stay_in_their_row(name):
    """Images that change nothing, or that reach the text of another row."""
    model, ids, images = make_model(name), token_ids(3), pixels(3)
    logits = model(ids, pixel_values=images).logits
    assert not torch.allclose(logits, model(ids).logits, atol=1e-2)
    changed = images.clone()
    changed[1] = pixels(1, seed=77)[0]
    other = model(ids, pixel_values=changed).logits
    assert torch.equal(other[[0, 2]], logits[[0, 2]])
    assert not torch.allclose(other[1], logits[1], atol=1e-2)
    for row in range(3):
        alone = model(ids[row : row + 1], pixel_values=images[row : row + 1]).logits
        assert torch.allclose(alone[0], logits[row], atol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", TEXT_CONFIGS)
def test_row_without_image_is_the_base(name, dtype):
    """A text-only row of a mixed batch that is changed by the attention branch or by the MLP
    branch (Mllama, Idefics).
    """
    ids = token_ids(3)
    base = make_text(name, dtype)(ids, output_hidden_states=True)
    model = make_model(name, dtype=dtype)
    mask = torch.tensor([[True], [False], [True]])
    mixed = model(ids, pixel_values=pixels(3), image_mask=mask, output_hidden_states=True)
    # Experts multiply the tokens of all rows in one go, so the base's own rounding depends on its neighbours.
    equal = torch.allclose if name == "mixtral" else torch.equal
    assert equal(mixed.logits[1], base.logits[1])
    for before, after in zip(base.hidden_states, mixed.hidden_states):
        assert equal(before[1], after[1])
    assert not torch.equal(mixed.logits[0], base.logits[0])
    nan = pixels(3)
    nan[1] = float("nan")
    assert torch.equal(model(ids, pixel_values=nan, image_mask=mask).logits, mixed.logits)


@torch.no_grad()
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3", "gpt2"])
def test_text_before_the_image_is_the_base(name):
    """The image leaking into text before it, through an explicit mask."""
    ids = token_ids()
    base = make_text(name)(ids).logits
    model = make_model(name, vision=False)
    mask = torch.zeros(2, 7, 5, dtype=torch.bool)
    mask[:, 3:] = True
    mask[1, :, 2:] = False
    logits = model(ids, cross_attention_states=states(), cross_attention_mask=mask).logits
    assert torch.equal(logits[:, :3], base[:, :3])
    assert not torch.isclose(logits[:, 3:], base[:, 3:], atol=1e-4).all(-1).any()
    shorter = model(ids[1:], cross_attention_states=states()[1:, :2], cross_attention_mask=mask[1:, :, :2]).logits
    assert torch.allclose(logits[1], shorter[0], atol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("visibility", ["previous", "latest"])
def test_markers_decide_visibility(visibility):
    """Text that sees an image before its marker, or, with "latest", an image that another has replaced."""
    ids = token_ids(1, 9)
    ids[0, 2] = ids[0, 5] = MARKER
    base = make_text()(ids).logits
    model = make_model(image_token_id=MARKER, image_visibility=visibility)
    images = pixels(1, 2)
    logits = model(ids, pixel_values=images).logits
    assert torch.equal(logits[:, :2], base[:, :2])
    second = images.clone()
    second[:, 1] = pixels(1, 1, seed=50)[:, 0]
    other = model(ids, pixel_values=second).logits
    assert torch.equal(other[:, :5], logits[:, :5])
    assert not torch.isclose(other[:, 5:], logits[:, 5:], atol=1e-4).all(-1).any()
    # The same rule, told token by token.
    sees = torch.zeros(1, 9, 2, dtype=torch.bool)
    sees[:, 2:, 0] = True
    sees[:, 5:, 1] = True
    if visibility == "latest":
        sees[:, 5:, 0] = False
    explicit = make_model()(ids, pixel_values=images, cross_attention_mask=sees.repeat_interleave(16, -1)).logits
    assert torch.allclose(explicit, logits, atol=1e-5)


@torch.no_grad()
def test_padding_images_and_padding_tokens_equal_leaving_them_out():
    """Padding that is attended to."""
    model, ids = make_model(), token_ids()
    both = pixels(2, 2)
    mask = torch.tensor([[True, True], [True, False]])
    padded = model(ids, pixel_values=both, image_mask=mask).logits
    assert torch.allclose(padded[1], model(ids[1:], pixel_values=both[1:, :1]).logits[0], atol=1e-4)
    assert torch.allclose(padded[0], model(ids[:1], pixel_values=both[:1]).logits[0], atol=1e-4)
    tokens = torch.tensor([[True] * 5, [True, True, False, False, False]])
    padded = model(ids, cross_attention_states=states(), cross_attention_mask=tokens).logits
    short = model(ids[1:], cross_attention_states=states()[1:, :2]).logits
    assert torch.allclose(padded[1], short[0], atol=1e-4)
    # Pixels, and the features the tower makes of them, are the same thing. So are 4-D pixels of one image.
    features = model.get_image_features(both).pooler_output
    assert features.shape == (2, 2, 16, 32)
    expected = model(ids, pixel_values=both, image_mask=mask).logits
    assert torch.equal(model(ids, cross_attention_states=features, image_mask=mask).logits, expected)
    assert torch.equal(model(ids, pixel_values=both[:, 0]).logits, model(ids, pixel_values=both[:, :1]).logits)


# --- outputs


@torch.no_grad()
@pytest.mark.parametrize("kernel", ["eager", "sdpa"])
def test_attention_weights_sum_to_one_over_what_is_seen(kernel):
    """Attention maps of a wrong shape or order, or weights that do not sum to one over what a token sees."""
    model = make_model()
    model.set_attn_implementation(kernel)
    mask = torch.tensor([[True, True], [True, False]])
    arguments = {"input_ids": token_ids(), "pixel_values": pixels(2, 2), "image_mask": mask}
    outputs = model(**arguments, output_attentions=True)
    assert len(outputs.cross_attentions) == 2
    for weights in outputs.cross_attentions:
        assert weights.shape == (2, 4, 7, 32)
        assert torch.allclose(weights.sum(-1), torch.ones(2, 4, 7), atol=1e-5)
        assert (weights[1, ..., 16:] == 0).all()
    assert torch.allclose(outputs.logits, model(**arguments).logits, atol=1e-4)
    assert model(**arguments).cross_attentions is None
    assert model(arguments["input_ids"], output_attentions=True).cross_attentions is None


@torch.no_grad()
def test_outputs_are_those_of_transformers():
    """Outputs that other libraries do not know, or that change with `return_dict`."""
    model, ids, images = make_model(), token_ids(), pixels()
    outputs = model(ids, pixel_values=images, output_hidden_states=True)
    assert type(outputs) is CausalLMOutputWithCrossAttentions
    assert isinstance(outputs[CACHE], EncoderDecoderCache) and len(outputs.hidden_states) == 5
    assert model(ids, pixel_values=images, use_cache=False).get(CACHE) is None
    as_tuple = model(ids, pixel_values=images, use_cache=False, return_dict=False)
    assert isinstance(as_tuple, tuple) and torch.equal(as_tuple[0], outputs.logits)
    loss, logits = model(ids, pixel_values=images, labels=ids, use_cache=False, return_dict=False)
    assert loss.dim() == 0 and torch.equal(logits, outputs.logits)
    assert torch.equal(model(ids, pixel_values=images, logits_to_keep=2).logits, outputs.logits[:, -2:])

    body = model.model(ids, pixel_values=images)
    assert type(body) is BaseModelOutputWithPastAndCrossAttentions
    assert torch.equal(body.last_hidden_state, outputs.hidden_states[-1])
    assert torch.equal(model.get_output_embeddings()(body.last_hidden_state), outputs.logits)
    assert isinstance(model.model(ids, pixel_values=images, return_dict=False), tuple)


@torch.no_grad()
def test_body_of_every_decoder():
    """`XAttnModel` of a decoder whose body is not where Llama's is (OPT has a model around the decoder)."""
    for name in TEXT_CONFIGS:
        model, ids, images = make_model(name), token_ids(), pixels()
        hidden = model.model(ids, pixel_values=images).last_hidden_state
        assert hidden.shape == (2, 7, 32)
        logits = model.get_output_embeddings()(hidden)
        assert torch.allclose(logits, model(ids, pixel_values=images).logits, atol=1e-5), name
        assert model.get_decoder() is find_decoder(model.model.text_model)[0]


def test_experts_report_their_balancing_loss():
    """A mixture of experts whose balancing loss or router logits are lost on the way out, of the body as well."""
    model, ids = make_model("mixtral").train(), token_ids()
    outputs = model(ids, pixel_values=pixels(), labels=ids, output_router_logits=True)
    assert outputs.aux_loss > 0 and len(outputs.router_logits) == 4
    plain = model(ids, pixel_values=pixels(), labels=ids)
    assert torch.allclose(outputs.loss, plain.loss + 0.001 * outputs.aux_loss, atol=1e-5)
    body = model.model(ids, pixel_values=pixels(), output_router_logits=True)
    assert all(torch.equal(mine, whole) for mine, whole in zip(body.router_logits, outputs.router_logits, strict=True))
    assert len(model.model(ids, output_router_logits=True, return_dict=False)[-1]) == 4
    assert "router_logits" not in model.model(ids)
    model.config.text_config.output_router_logits = True
    asked = (model(ids, pixel_values=pixels()), model.model(ids, pixel_values=pixels()))
    assert all(len(each.router_logits) == 4 for each in asked)


# --- training


def test_loss_is_the_base_loss():
    """A loss that counts other tokens than the base's, or an image marker that needs a row in the head."""
    ids = token_ids()
    labels = ids.clone()
    labels[0, :3] = -100
    expected = make_text()(ids, labels=labels).loss
    model = make_model(random=False)
    assert torch.equal(model(ids, pixel_values=pixels(), labels=labels).loss, expected)

    marked = labels.clone()
    marked[:, 4] = MARKER
    ignored = labels.clone()
    ignored[:, 4] = -100
    model = make_model(random=False, image_token_id=MARKER)
    before = marked.clone()
    assert torch.equal(model(ids, pixel_values=pixels(), labels=marked).loss, make_text()(ids, labels=ignored).loss)
    assert torch.equal(marked, before), "the caller's labels were changed"


@pytest.mark.parametrize("style", INIT_STYLES)
def test_every_weight_learns_by_the_second_step(style):
    """A zero gate times a zero projection, or a connector or tower cut off from the loss: weights that never move."""
    model, ids = make_model(random=False, cross_attention_config=INIT_STYLES[style]).train(), token_ids()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        model(ids, pixel_values=pixels(), labels=ids).loss.backward()
        optimizer.step()
    added = {
        **{f"blocks.{index}.{n}": p for index, block in enumerate(model.blocks) for n, p in block.named_parameters()},
        **{f"connector.{n}": p for n, p in model.model.connector.named_parameters()},
        **{f"vision_tower.{n}": p for n, p in model.model.vision_tower.named_parameters()},
    }
    still = [name for name, parameter in added.items() if parameter.grad is None or not parameter.grad.any()]
    # The bias of SigLIP's keys shifts all scores of a query alike, which a softmax does not see.
    assert [name for name in still if not name.endswith("k_proj.bias")] == []


def test_gradient_checkpointing_is_switched_off_again():
    """A cache that stays away after `gradient_checkpointing_disable`."""
    model, ids = make_model().train(), token_ids()
    model.gradient_checkpointing_enable()
    assert model(ids, pixel_values=pixels(), use_cache=True).get(CACHE) is None
    model.gradient_checkpointing_disable()
    assert model(ids, pixel_values=pixels(), use_cache=True).get(CACHE) is not None
    model.gradient_checkpointing_enable()
    model.eval()
    assert model(ids, pixel_values=pixels(), use_cache=True).get(CACHE) is not None


def test_gradient_checkpointing_with_a_cache():
    """Images written twice by the recomputation, or those of a cache ignored in training.

    https://github.com/huggingface/transformers/issues/46572
    """
    model, ids, images = make_model().train(), token_ids(), pixels()
    expected = model(ids, pixel_values=images, labels=ids, use_cache=False)
    encoded = model.encode_images(pixel_values=images)
    model.gradient_checkpointing_enable()
    cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
    for past in (cache, encoded):
        model.zero_grad()
        given = {} if past is encoded else {"pixel_values": images}
        outputs = model(ids, labels=ids, cache=past, **given)
        assert torch.allclose(outputs.loss, expected.loss, atol=1e-5)
        outputs.loss.backward()
        assert all(block.attn.q_proj.weight.grad.any() for block in model.blocks)
    assert not any(layer.get_seq_length() for layer in cache.cross_attention_cache.layers)
    with pytest.raises(ValueError, match="Gradient checkpointing.*all images in one call"):
        model(ids, pixel_values=pixels(seed=60), cache=encoded)


# --- parts


def test_attn_implementation_reaches_every_part():
    """A part that keeps another kernel, or none: with None the causal mask of some decoders vanishes."""
    model = make_model()
    parts = [model.model.text_model, model.model.vision_tower, *model.blocks]
    assert {part.config._attn_implementation for part in parts} == {"sdpa"}
    ids = token_ids()
    expected = model(ids, pixel_values=pixels()).logits
    model.set_attn_implementation("eager")
    assert {part.config._attn_implementation for part in parts} == {"eager"}
    assert torch.allclose(model(ids, pixel_values=pixels()).logits, expected, atol=1e-4)
    config = XAttnConfig(text_config=TEXT_CONFIGS["llama"](), vision_config=vision_config(), cross_attention_layers=[1])
    for kernel in ("eager", "sdpa"):
        built = XAttnForConditionalGeneration._from_config(config, attn_implementation=kernel)
        parts = [built.model.text_model, built.model.vision_tower, *built.blocks]
        assert [part.config._attn_implementation for part in parts] == [kernel] * 3


def test_construction_from_configuration():
    """A model built from its configuration that differs from one put together of parts."""
    config = XAttnConfig(text_config=TEXT_CONFIGS["gemma3"](), vision_config=vision_config())
    model = XAttnForConditionalGeneration(config)
    assert config.cross_attention_layers == [3] and len(model.blocks) == 1
    ids = token_ids()
    model.eval()
    assert torch.equal(model(ids, pixel_values=pixels()).logits, model(ids).logits)
    randomize(model)
    assert not torch.equal(model(ids, pixel_values=pixels()).logits, model(ids).logits)
    assert isinstance(XAttnModel(config), XAttnModel)


def test_tensors_without_values():
    """Checks that read values of fake tensors, on which torch's own tools trace a model (`FakeTensorMode`)."""
    model = make_model(image_token_id=MARKER, image_visibility="latest").train()
    with FakeTensorMode(allow_non_fake_inputs=True):
        ids = torch.zeros(2, 9, dtype=torch.long)
        outputs = model(
            ids, pixel_values=torch.zeros(2, 1, 3, 32, 32), labels=ids, use_cache=False, logits_to_keep=ids[0]
        )
    assert outputs.logits.shape == (2, 9, VOCAB_SIZE) and outputs.loss.shape == ()
