"""What transformers' common tests ask of every model in the library, on every kind of base, with a vision tower and
without.
"""

import copy
import re

import pytest
import torch
from transformers import SiglipVisionConfig
from transformers.utils import ModelOutput

from helpers.models.expectation_models import (
    BASES,
    CLASSES,
    KINDS,
    base_of,
    build,
    configuration,
    images_for,
    inputs_for,
)
from helpers.models.tiny_architectures import EXPERTS
from helpers.models.tiny_models import VOCAB_SIZE, token_ids
from helpers.models.tiny_towers import ANY_SIZE, ONE_SIZE, SMALL_TOWER, model_with
from hf_xattn import XAttnForConditionalGeneration, XAttnModel


LAYERS, HEADS, WIDTH = 4, 4, 32
on_every_kind = pytest.mark.parametrize(("base", "tower"), KINDS)
on_every_base = pytest.mark.parametrize("base", BASES)
# The body without its head differs by the bases, not by the towers.
on_both_classes = pytest.mark.parametrize(
    ("made", "base", "tower"),
    [(made, *kind) for made in CLASSES for kind in KINDS if made is CLASSES[1] or kind[1] != "none"],
)


def first_of(outputs):
    return outputs.logits if hasattr(outputs, "logits") else outputs.last_hidden_state


def tensors_of(value):
    """All tensors of an output, in order."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [tensor for each in value for tensor in tensors_of(each)]
    return []


def model_text(model):
    return (model if isinstance(model, XAttnModel) else model.model).text_model


def equal_weights(one, other):
    state, again = one.state_dict(), other.state_dict()
    return state.keys() == again.keys() and all(torch.equal(state[name], again[name]) for name in state)


# --- outputs


@torch.no_grad()
@on_both_classes
def test_tuples_equal_outputs(made, base, tower):
    """A tuple that lacks a value, or has another order."""
    model, given = build(base, tower, made), inputs_for(tower)
    model.set_attn_implementation("eager")
    for options in ({}, {"output_hidden_states": True, "output_attentions": True}):
        with_names = model(**given, use_cache=False, **options)
        without = model(**given, use_cache=False, return_dict=False, **options)
        assert isinstance(with_names, ModelOutput) and isinstance(without, tuple)
        named, unnamed = tensors_of(with_names.to_tuple()), tensors_of(without)
        assert len(named) == len(unnamed) and all(map(torch.equal, named, unnamed))
        assert torch.equal(without[0], first_of(with_names))


@torch.no_grad()
@on_both_classes
def test_shapes_of_hidden_states_and_attentions(made, base, tower):
    """Hidden states or attentions that the base alone returns and the model around it does not, or
    in another number.
    """
    model, given = build(base, tower, made, random=False), inputs_for(tower)
    text = base_of(base)
    state = model_text(model).state_dict()
    text.load_state_dict({name: weight for name, weight in state.items() if "cross_attention_block" not in name})
    asked = {"output_hidden_states": True, "output_attentions": True}
    for each in (model, text):
        each.set_attn_implementation("eager")
    expected = text(given["input_ids"], **asked)
    outputs = model(**given, **asked)
    assert len(outputs.hidden_states) == len(expected.hidden_states) == LAYERS + 1
    assert all(each.shape == (2, 9, WIDTH) for each in outputs.hidden_states)
    assert all(map(torch.equal, outputs.hidden_states, expected.hidden_states))
    assert len(outputs.attentions) == len(expected.attentions) == (1 if base == "hybrid" else LAYERS)
    assert all(each.shape == (2, HEADS, 9, 9) for each in outputs.attentions)
    assert all(map(torch.equal, outputs.attentions, expected.attentions))
    tokens = 16 if tower != "none" else 5
    assert [tuple(each.shape) for each in outputs.cross_attentions] == [(2, HEADS, 9, tokens)] * 2
    assert model(**given).hidden_states is None and model(**given).attentions is None


@on_every_base
def test_gradients_of_hidden_states_and_attentions(base):
    """Hidden states or attentions that are copies, which the loss does not depend on."""
    model = build(base, "siglip")
    model.set_attn_implementation("eager")
    outputs = model(**inputs_for("siglip"), output_hidden_states=True, output_attentions=True, use_cache=False)
    kept = outputs.hidden_states[0], outputs.attentions[0]
    for each in kept:
        each.retain_grad()
    outputs.logits.square().sum().backward()
    assert all(each.grad is not None and each.grad.abs().sum() > 0 for each in kept)


# --- inputs


@torch.no_grad()
@on_both_classes
def test_embeddings_in_place_of_ids(made, base, tower):
    """Embeddings whose images are lost, or that are scaled twice."""
    model, given = build(base, tower, made), inputs_for(tower)
    embeds = model.get_input_embeddings()(given["input_ids"])
    expected = first_of(model(**given))
    del given["input_ids"]
    assert torch.equal(first_of(model(inputs_embeds=embeds, **given)), expected)


@torch.no_grad()
@on_every_kind
def test_runs_are_deterministic_and_rows_independent(base, tower):
    """Two equal runs that differ; a row that another row changes, or padding on its left."""
    model, given = build(base, tower), inputs_for(tower, batch=3)
    logits = model(**given).logits
    assert torch.equal(model(**given).logits, logits)
    rows = [model(**{name: value[row : row + 1] for name, value in given.items()}).logits for row in range(3)]
    assert torch.allclose(torch.cat(rows), logits, atol=1e-5)
    padded = torch.cat([torch.zeros(3, 4, dtype=torch.long), given["input_ids"]], dim=1)
    mask = (torch.arange(13) >= 4).long().expand(3, -1)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    images = images_for(tower, 3)
    shifted = model(padded, attention_mask=mask, position_ids=positions, **images).logits[:, 4:]
    assert torch.allclose(shifted, logits, atol=1e-5)


@torch.no_grad()
@on_every_base
@pytest.mark.parametrize("kernel", ["sdpa", pytest.param("flex_attention", marks=pytest.mark.slow)])
def test_all_kernels_give_the_result_of_eager_attention(base, kernel):
    """SDPA or flex attention that sees other images or other text than eager attention does, also in half precision."""
    model = build(base, "siglip")
    if (base, kernel) == ("hybrid", "flex_attention"):
        with pytest.raises(ValueError, match="does not support"):  # the base alone refuses it, too
            model.set_attn_implementation(kernel)
        return
    given = inputs_for("siglip", images=2)
    attention_mask = torch.ones(2, 9, dtype=torch.long)
    attention_mask[1, :3] = 0
    given |= {"image_mask": torch.tensor([[True, True], [True, False]]), "attention_mask": attention_mask}
    images, padding = given.pop("pixel_values"), attention_mask[..., None] == 0
    # In half precision, rounding alone may send a token to another expert.
    precisions = {torch.float32: 1e-5} if BASES[base] in EXPERTS else {torch.float32: 1e-5, torch.bfloat16: 0.1}
    for dtype, tolerance in precisions.items():
        model.to(dtype)
        found = []
        for each in ("eager", kernel):
            model.set_attn_implementation(each)
            found.append(model(**given, pixel_values=images.to(dtype)).logits.masked_fill(padding, 0).float())
        assert torch.allclose(*found, atol=tolerance, rtol=tolerance), dtype


@torch.no_grad()
def test_window_of_the_base():
    """A block, or the cache of the images, that widens or narrows the window of the text."""
    model = build("sliding", "siglip")
    model.set_attn_implementation("eager")
    window = model.config.text_config.sliding_window
    outputs = model(**inputs_for("siglip", length=12), output_attentions=True)
    distance = torch.arange(12)[:, None] - torch.arange(12)
    kinds = model.config.text_config.layer_types
    for kind, weights in zip(kinds, outputs.attentions, strict=True):
        outside = weights[..., distance >= window]
        assert (outside == 0).all() == (kind == "sliding_attention")
    assert all((weights > 0).all() for weights in outputs.cross_attentions), "all text sees all tokens of its images"


# --- vocabulary


@pytest.mark.parametrize(("base", "tied"), [*((base, True) for base in BASES), ("dense", False)])
def test_resized_embeddings_keep_their_rows_and_ties(base, tied, tmp_path):
    """Weights, sizes or ties that are lost when the vocabulary grows or shrinks, or in the files that are saved after
    it.
    """
    model = build(base, "siglip", text={"tie_word_embeddings": tied})
    given = inputs_for("siglip")
    given["input_ids"] = given["input_ids"] % 80
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    with torch.no_grad():
        expected = model(**given).logits[..., :80]
    for count, options in ((VOCAB_SIZE + 10, {}), (80, {}), (81, {"pad_to_multiple_of": 16})):
        rows = 96 if options else count
        embeddings = model.resize_token_embeddings(count, **options)
        assert embeddings is model.get_input_embeddings() and len(embeddings.weight) == rows
        assert model.config.text_config.vocab_size == rows
        head = model.get_output_embeddings()
        assert len(head.weight) == rows and (head.weight is embeddings.weight) == tied
        for name, weight in model.state_dict().items():
            kept = torch.equal(weight[:80], before[name][:80]) if weight.dim() else torch.equal(weight, before[name])
            assert kept, name
        with torch.no_grad():
            assert torch.allclose(model(**given).logits[..., :80], expected, atol=1e-6)
        tokens = model.generate(**given, max_new_tokens=2, do_sample=False, pad_token_id=0)
        assert tokens.shape == (2, 11)
        model.save_pretrained(tmp_path)
        loaded, info = XAttnForConditionalGeneration.from_pretrained(tmp_path, output_loading_info=True)
        assert not any(info[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys"))
        assert equal_weights(loaded, model) and loaded.config.text_config.vocab_size == rows
        assert (loaded.get_output_embeddings().weight is loaded.get_input_embeddings().weight) == tied


# --- files and copies


@torch.no_grad()
@on_every_kind
def test_headed_and_head_less(base, tower, tmp_path):
    """Weights that are initialised again where a body loads a whole model's files, or the other way round."""
    whole = build(base, tower)
    body = build(base, tower, XAttnModel)
    given = inputs_for(tower)
    for saved, made in ((whole, XAttnModel), (body, XAttnForConditionalGeneration)):
        saved.save_pretrained(tmp_path / made.__name__)
        loaded, info = made.from_pretrained(tmp_path / made.__name__, output_loading_info=True)
        assert not any(info[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys"))
        of_saved = saved.model if made is XAttnModel else saved
        of_loaded = loaded if made is XAttnModel else loaded.model
        assert equal_weights(of_saved, of_loaded)
        assert torch.allclose(first_of(of_loaded(**given)), first_of(of_saved(**given)), atol=1e-6)


@torch.no_grad()
@on_every_kind
def test_copies_and_pickles_give_the_same_model(base, tower, tmp_path):
    """A copy, a pickle or a `state_dict` that gives another model."""
    model, given = build(base, tower), inputs_for(tower)
    expected = model(**given).logits
    torch.save(model.state_dict(), tmp_path / "state.pt")
    torch.save(model, tmp_path / "model.pt")
    empty = build(base, tower, random=False)
    empty.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    copied = copy.deepcopy(model)
    unpickled = torch.load(tmp_path / "model.pt", weights_only=False)
    for other in (empty, copied, unpickled):
        assert equal_weights(model, other) and torch.allclose(other(**given).logits, expected, atol=1e-6)
    with torch.no_grad():
        next(copied.parameters()).add_(1.0)
        copied.blocks[0].attn.q_proj.weight.add_(1.0)
    copied.config.text_config.vocab_size = 7
    assert torch.equal(model(**given).logits, expected) and model.config.text_config.vocab_size == VOCAB_SIZE


@torch.no_grad()
@pytest.mark.parametrize("base", ["dense", "experts"])
def test_weights_of_another_size_are_refused_unless_asked_for(base, tmp_path):
    """Weights of another size that pass without a word; with `ignore_mismatched_sizes`, others that are lost beside
    them.
    """
    model = build(base, "siglip")
    model.save_pretrained(tmp_path)
    wider = configuration(base, "siglip", cross_attention_config={"intermediate_size": 40})
    with pytest.raises(RuntimeError, match="`ignore_mismatched_sizes`"):
        XAttnForConditionalGeneration.from_pretrained(tmp_path, config=wider)
    loaded, info = XAttnForConditionalGeneration.from_pretrained(
        tmp_path, config=wider, ignore_mismatched_sizes=True, output_loading_info=True
    )
    names = {name for name, *_ in info["mismatched_keys"]}
    assert names and all(re.search(r"cross_attention_block(_after)?\.mlp\.", name) for name in names)
    state, again = model.state_dict(), loaded.state_dict()
    assert state.keys() == again.keys()
    assert all(torch.equal(state[name], again[name]) for name in state if name not in names)
    assert all(again[name].shape != state[name].shape and again[name].isfinite().all() for name in names)
    assert first_of(loaded.eval()(**inputs_for("siglip"))).isfinite().all()


# --- initialisation


@on_both_classes
def test_missing_weights_start_as_new_ones(made, base, tower):
    """A weight or buffer without a start of its own where a checkpoint lacks it, or where a model comes from the meta
    device.
    """
    torch.manual_seed(5)
    new = made(configuration(base, tower))
    loaded = made.from_pretrained(None, config=configuration(base, tower), state_dict={})
    with torch.device("meta"):
        moved = made(configuration(base, tower))
    moved.to_empty(device="cpu")
    moved.init_weights()
    for other in (loaded, moved):
        state, again = new.state_dict(), other.state_dict()
        assert state.keys() == again.keys()
        for name, weight in state.items():
            assert again[name].isfinite().all() and again[name].shape == weight.shape, name
            if weight.min() == weight.max():
                assert torch.equal(again[name], weight), name
            elif weight.numel() > 250:
                assert again[name].std().item() == pytest.approx(weight.std().item(), rel=0.5), name
        buffers = dict(other.named_buffers())
        assert all(torch.equal(buffers[name], value) for name, value in new.named_buffers())
        assert first_of(other.eval()(**inputs_for(tower))).isfinite().all()


@pytest.mark.parametrize("tower", ["none", "siglip"])
def test_blocks_start_with_the_spread_of_the_configuration(tower):
    """Blocks that start with a spread of their own, whatever the configuration asks for."""
    for spread in (0.02, 0.3):
        torch.manual_seed(1)
        model = build("dense", tower, random=False, cross_attention_config={"initializer_range": spread})
        for block in model.blocks:
            for name, weight in block.named_parameters():
                if weight.dim() < 2:
                    assert weight.min() == weight.max() and weight.flatten()[0].item() in (0.0, 1.0), name
                elif weight.any():
                    assert weight.std().item() == pytest.approx(spread, rel=0.2) and abs(weight.mean()) < spread / 4, (
                        name
                    )


@pytest.mark.parametrize("base", ["dense", "hybrid"])
@pytest.mark.parametrize("made", CLASSES)
def test_float32_list_is_the_models_own(made, base, tmp_path):
    """A list of the class that names weights which the model does not have, or that one model changes for all."""
    model = build(base, "siglip", made)
    kept = model._keep_in_fp32_modules_strict
    names = list(model.state_dict())
    assert kept and all(any(re.search(rf"(?:^|\.){each}(?:\.|$)", name) for name in names) for each in kept)
    assert kept is not made._keep_in_fp32_modules_strict and isinstance(made._keep_in_fp32_modules_strict, list)
    bare = build(base, "siglip", made, cross_attention_layers=[1])
    assert not any("after" in each for each in bare._keep_in_fp32_modules_strict)
    assert any("after" in each for each in kept) and model._keep_in_fp32_modules_strict is kept
    model.save_pretrained(tmp_path)
    for dtype in (torch.float16, torch.bfloat16):
        loaded = made.from_pretrained(tmp_path, dtype=dtype)
        for name, weight in loaded.state_dict().items():
            named = set(loaded._keep_in_fp32_modules_strict)
            named |= loaded._keep_in_fp32_modules if dtype == torch.float16 else set()
            stays = any(re.search(rf"(?:^|\.){each}(?:\.|$)", name) for each in named)
            assert weight.dtype == (torch.float32 if stays else dtype), name


# --- training


@pytest.mark.parametrize(("base", "tower"), [*KINDS, ("dense", "clip"), ("hybrid", "clip")])
def test_every_weight_gets_a_gradient(base, tower):
    """Weights that DDP waits for and no loss depends on, such as the last norm of CLIP."""
    model = build(base, tower).requires_grad_(True).train()
    given = inputs_for(tower)
    model(**given, labels=given["input_ids"], use_cache=False).loss.backward()
    missing = [name for name, weight in model.named_parameters() if weight.grad is None]
    assert not missing
    assert all(weight.grad.isfinite().all() for weight in model.parameters())


TOWERS_WITH_MORE = ["vit", "dinov2", "siglip_head", "aimv2", "convnext", "beit"]


@pytest.mark.parametrize("name", TOWERS_WITH_MORE)
def test_every_weight_of_a_tower_gets_a_gradient(name):
    """A pooler, a head or a mask token behind the images: DDP would wait for its gradient. Frozen, it costs nothing."""
    towers = {**ONE_SIZE, **ANY_SIZE, "siglip_head": lambda: SiglipVisionConfig(**SMALL_TOWER)}
    model = model_with(towers[name]()).train()
    ids, images = token_ids(), torch.randn(2, 1, 3, 32, 32)
    for train in (True, False):
        model.model.vision_tower.requires_grad_(train)
        model.train()
        model.zero_grad()
        features = model.get_image_features(images)
        states = model.model.vision_tower(pixel_values=images[:, 0]).last_hidden_state
        assert torch.allclose(features.last_hidden_state, states, atol=1e-6)
        model(ids, pixel_values=images, labels=ids).loss.backward()
        gradients = [weight.grad is not None for weight in model.model.vision_tower.parameters()]
        assert all(gradients) if train else not any(gradients)
    with torch.no_grad():
        assert model.get_image_features(images).pooler_output.grad_fn is None


# --- the class


@on_every_base
def test_what_a_class_declares(base):
    """Names that tools read from every model: the main input, the prefix of the body, the embeddings, tied weights,
    small parts.
    """
    for made in CLASSES:
        model = build(base, "siglip", made)
        assert model.main_input_name == "input_ids" and model.base_model_prefix == "model"
        assert isinstance(model.base_model, XAttnModel) and model.can_generate() == (made is CLASSES[1])
        old, new = model.get_input_embeddings(), torch.nn.Embedding(VOCAB_SIZE, WIDTH)
        model.set_input_embeddings(new)
        assert model.get_input_embeddings() is new and model_text(model).get_input_embeddings() is new is not old
        assert all(weight.is_contiguous() for weight in model.parameters())
        assert model.config is model.base_model.config and model.config.text_config is model_text(model).config
        assert all(re.search(r"lm_head|embed_tokens", name) for name in model.all_tied_weights_keys)
