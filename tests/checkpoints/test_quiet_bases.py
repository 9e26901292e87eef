"""Bases whose weights, configuration or options a retrofit would change or drop without a word."""

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModel, AutoModelForCausalLM, AutoModelForImageTextToText

from helpers.models import tiny_gguf
from helpers.models.saved_models import make_base, make_vision
from helpers.models.tiny_architectures import tiny_config
from helpers.models.tiny_composites import COMPOSITES, composite_class
from helpers.models.tiny_models import make_text, pixels, randomize, token_ids, vision_config
from hf_xattn import remove_blocks, retrofit


@torch.no_grad()
def test_a_head_that_was_untied(tmp_path):
    """A trained head (PEFT's `modules_to_save`, merged) that the embedding replaces."""
    text = AutoModelForCausalLM.from_pretrained(make_base(tmp_path / "text", "llama_tied")).eval()
    text.config.tie_word_embeddings = False
    text.lm_head.weight = torch.nn.Parameter(text.lm_head.weight * 1.5)
    ids, head = token_ids(), text.lm_head.weight.clone()
    expected = text(ids).logits
    model = retrofit(text, layers=[1]).eval()
    assert torch.equal(model(ids).logits, expected)
    model.save_pretrained(tmp_path / "saved")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved").eval()
    assert torch.equal(again(ids).logits, expected)
    assert torch.equal(remove_blocks(model).lm_head.weight, head)


@torch.no_grad()
@pytest.mark.parametrize("outer", [True, False])
def test_a_larger_model_ties_by_its_own_configuration(outer, tmp_path):
    """A head that is replaced by the embedding, or a folder that cannot be loaded."""
    config = COMPOSITES["smolvlm"]()
    config.tie_word_embeddings, config.text_config.tie_word_embeddings = outer, not outer
    whole = composite_class(config)
    whole(config).save_pretrained(tmp_path / "whole")
    expected = whole.from_pretrained(tmp_path / "whole").eval()(token_ids()).logits
    model = retrofit(tmp_path / "whole", every=2).eval()
    assert torch.allclose(model(token_ids()).logits, expected, atol=1e-6)
    model.save_pretrained(tmp_path / "saved")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved").eval()
    assert torch.allclose(again(token_ids()).logits, expected, atol=1e-6)


@torch.no_grad()
def test_a_tower_follows_the_text_model(tmp_path):
    """`dtype="auto"` that keeps a tower in float32, which a load then rounds."""
    text, tower = make_base(tmp_path / "text", dtype=torch.bfloat16), make_vision(tmp_path / "tower")
    model = randomize(retrofit(text, tower, layers=[1, 3], dtype="auto")).eval()
    given = {"pixel_values": pixels()}
    assert model.model.vision_tower.dtype == torch.bfloat16
    model.save_pretrained(tmp_path / "small", adapter_only=True)
    again = AutoModelForImageTextToText.from_pretrained(tmp_path / "small").eval()
    assert torch.equal(again(token_ids(), **given).logits, model(token_ids(), **given).logits)


def test_the_subfolder_of_a_tower_beside_a_gguf_file(tmp_path):
    """Another tower than the one that is named."""
    tiny_gguf.write_gguf(tmp_path / "text.gguf")
    for seed, folder in enumerate((tmp_path / "vision", tmp_path / "vision" / "tower")):
        torch.manual_seed(seed)
        AutoModel.from_config(vision_config()).save_pretrained(folder)
    model = retrofit(tmp_path / "text.gguf", tmp_path / "vision", subfolder="tower")
    expected = AutoModel.from_pretrained(tmp_path / "vision" / "tower").state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in model.model.vision_tower.state_dict().items())


def test_generation_settings_of_the_text_model(tmp_path):
    """An end token that the text model inside a loaded model does not know."""
    text = make_text()
    text.generation_config.eos_token_id = [5, 6]
    text.save_pretrained(tmp_path / "text")
    retrofit(tmp_path / "text").save_pretrained(tmp_path / "saved")
    for take in (lambda model: model, lambda model: model.model.text_model):
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
        assert model.model.text_model.generation_config.eos_token_id == [5, 6]
        assert remove_blocks(take(model)).generation_config.eos_token_id == [5, 6]


@pytest.mark.skipif("flint" not in CONFIG_MAPPING, reason="this transformers has no such decoder")
def test_blocks_have_the_dtype_of_matrices(tmp_path):
    """Blocks in float32, because the first weight of a layer is a vector that stays so."""
    AutoModelForCausalLM.from_config(tiny_config("flint")).save_pretrained(tmp_path / "text")
    model = retrofit(tmp_path / "text", dtype=torch.bfloat16, every=2)
    assert model.blocks[0].attn.q_proj.weight.dtype == torch.bfloat16
