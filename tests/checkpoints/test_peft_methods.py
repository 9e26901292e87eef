"""Every method of PEFT: it trains beside images and generates what its forward says, or is refused by name."""

import dataclasses
import re

import pytest
import torch

from helpers.checkout import EXAMPLES
from helpers.models.tiny_models import VOCAB_SIZE, make_model, pixels, token_ids


peft = pytest.importorskip("peft")

from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING  # noqa: E402


IDS, PIXELS = token_ids(), pixels()
GENERATE = {"max_new_tokens": 2, "do_sample": False, "output_scores": True, "return_dict_in_generate": True}
METHODS = {kind.value: config for kind, config in PEFT_TYPE_TO_CONFIG_MAPPING.items()}
TARGETS = r".*text_model.*self_attn\.(q_proj|v_proj)"
# What a method needs on layers of width 32.
OPTIONS = {
    "ADALORA": {"total_step": 10},
    "C3A": {"block_size": 16},
    "FOURIERFT": {"n_frequency": 20},
    "IA3": {"feedforward_modules": []},
    "MISS": {"r": 4},
    "PSOFT": {"r": 4},
    "ROAD": {"group_size": 16},
    "SHIRA": {"r": 2},
    "TRAINABLE_TOKENS": {"token_indices": IDS[0, :2].tolist(), "target_modules": ["embed_tokens"]},
    "VBLORA": {"vector_length": 16, "num_vectors": 8},
    "WAVEFT": {"n_frequency": 20},
}
# Methods that put keys and values into the cache.
OF_CACHE = {"PREFIX_TUNING", "CARTRIDGE"}
# Methods that PEFT refuses for this model, or that need more than a model and a batch.
NOT_HERE = {
    "ADAPTION_PROMPT": "PEFT knows it for a few types of models",
    "CPT": "it asks for `input_type_mask`, the kind of each token, in each call",
    "MULTITASK_PROMPT_TUNING": "it asks for `task_ids` in each call",
    "POLY": "it asks for `task_ids` in each call",
    "SHADOW": "PEFT reads the number of layers of a text model's own configuration",
    "XLORA": "it mixes adapters that were trained before",
}
WORKING = sorted(METHODS.keys() - OF_CACHE - NOT_HERE.keys())


def tuned(name, model):
    config = METHODS[name]
    fields = {field.name for field in dataclasses.fields(config)}
    usual = {"target_modules": TARGETS, "num_virtual_tokens": 3, "task_type": "CAUSAL_LM"}
    options = {key: value for key, value in usual.items() if key in fields} | OPTIONS.get(name, {})
    return peft.get_peft_model(model, config(**options))


@pytest.mark.parametrize("name", WORKING)
def test_each_method_learns_beside_images_or_is_refused(name):
    """An adapter that gets no gradient, that hides the images, or that `generate` leaves out."""
    model = tuned(name, make_model())
    model.train()(input_ids=IDS, pixel_values=PIXELS, labels=IDS).loss.backward()
    learning = [weight for weight in model.parameters() if weight.requires_grad]
    assert any(weight.grad is not None and weight.grad.abs().max() > 0 for weight in learning)
    with torch.no_grad():
        for weight in learning:
            weight.add_(torch.randn_like(weight) * 0.1)
        model.eval()
        logits = model(input_ids=IDS, pixel_values=PIXELS).logits[:, -1]
        other = model(input_ids=IDS, pixel_values=-PIXELS).logits[:, -1]
        scores = model.generate(input_ids=IDS, pixel_values=PIXELS, **GENERATE).scores
    assert torch.allclose(scores[0], logits, atol=1e-4) and not torch.allclose(logits, other, atol=1e-4)


@pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning")  # PEFT passes it
@pytest.mark.parametrize("name", sorted(OF_CACHE & METHODS.keys()))
def test_keys_and_values_of_peft(name):
    """A prefix that `generate` leaves out without a word, or an error of PEFT's own."""
    model = tuned(name, make_model()).eval()
    with pytest.raises(ValueError, match=f"`generate` does not work with {name} of PEFT"):
        model.generate(input_ids=IDS, pixel_values=PIXELS, max_new_tokens=2)
    with pytest.raises(ValueError, match="Prefix tuning .PEFT. passes such a cache"):
        model(input_ids=IDS, pixel_values=PIXELS)


@pytest.mark.parametrize(
    "options",
    [{"target_modules": ["embed_tokens"]}, {"target_modules": ["q_proj"], "trainable_token_indices": [5]}],
    ids=["embedding", "tokens"],
)
def test_embeddings_beside_added_tokens(options):
    """An added token that an adapter, which has no row for it, reads as another."""
    ids = IDS.clone()
    ids[:, 2] = VOCAB_SIZE + 1
    model = peft.get_peft_model(make_model(additional_vocab_size=3), peft.LoraConfig(**options))
    for call in (model, model.generate):
        with pytest.raises(IndexError, match="out of range"):
            call(input_ids=ids, pixel_values=PIXELS)
    model = peft.get_peft_model(make_model(), peft.LoraConfig(**options))
    model(input_ids=IDS, pixel_values=PIXELS, labels=IDS).loss.backward()
    whole = {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]}
    model = peft.get_peft_model(make_model(additional_vocab_size=3), peft.LoraConfig(**whole))
    model(input_ids=ids, pixel_values=PIXELS, labels=IDS).loss.backward()


def test_the_guide_has_the_table():
    """A method that works and is not in the guide, or the other way round."""
    guide = (EXAMPLES / "training/README.md").read_text()
    works, of_cache, *_ = re.findall(r"^\| (?:works|refused by name) \| (.*) \|$", guide, re.MULTILINE)
    assert {*re.findall("`([A-Z0-9_]+)`", works)} >= {*WORKING}
    assert {*re.findall("`([A-Z0-9_]+)`", of_cache)} == OF_CACHE
    assert all(f"`{name}`" in guide for name in NOT_HERE)
