"""The peer over a language model and a tower: transformers' Llava, with the same features and prompts as the blocks."""

import numpy as np
import pytest
import torch
from llava_peer import LlavaChats, llava_of
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer, LlavaProcessor

from helpers.models.tiny_gguf import write_gguf
from helpers.models.tiny_models import needs_part
from hf_xattn import XAttnProcessor
from hf_xattn.demo.canvases import DigitPool, make_vision_checkpoint, picture_of, to_pixel_values
from hf_xattn.evaluation.evaluation import inputs_of
from hf_xattn.utils.transformers_api import AutoImageProcessor


pytestmark = needs_part("special tokens of a GGUF file")
IMAGE_TOKENS = 13  # two rows of six patches, and the class token


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("parts")
    pool = DigitPool(held_out=False)
    make_vision_checkpoint(folder / "vision", pool, steps=1, seed=0)
    text = {"pretrained_model_name_or_path": folder, "gguf_file": write_gguf(folder / "tiny.gguf").name}
    tokenizer = AutoTokenizer.from_pretrained(**text, padding_side="left")
    tokenizer.add_tokens(["<image>"], special_tokens=True)
    images = AutoImageProcessor.from_pretrained(folder / "vision")
    processor = XAttnProcessor(images, tokenizer, image_token="<image>")
    tower = AutoModel.from_pretrained(folder / "vision").eval()
    torch.manual_seed(0)
    llava = llava_of(AutoModelForCausalLM.from_pretrained(**text).eval(), tower, processor.image_token_id)
    return llava, AutoModelForCausalLM.from_pretrained(**text).eval(), processor, pool


def test_text_alone_is_the_base(parts):
    """A token for pictures that gets a logit of its own, or changes the head; a layer or a tower that trains."""
    llava, base, processor, _ = parts
    chats = [[{"role": "user", "content": text}] for text in ("Hello hello?", "Hi!")]
    inputs = inputs_of(processor, chats)
    with torch.no_grad():
        assert torch.equal(llava(**inputs).logits, base(**inputs).logits)
    trained = {name for name, parameter in llava.named_parameters() if parameter.requires_grad}
    assert len(trained) == 4 and all(name.startswith("model.multi_modal_projector.") for name in trained)


def test_the_projector_reads_what_the_blocks_read(parts):
    """Features in front of the tower's last norm, or without the class token: the tower was trained on the ones behind
    it.
    """
    llava, _, _, pool = parts
    pixel_values = to_pixel_values(pool.canvas(np.random.default_rng(0)))
    with torch.no_grad():
        features = llava.model.vision_tower(pixel_values=pixel_values).last_hidden_state
        expected = llava.model.multi_modal_projector(features)
        found = llava.get_image_features(pixel_values).pooler_output[0]
    assert found.shape[0] == IMAGE_TOKENS and torch.allclose(found, expected[0], atol=1e-6)


def test_inputs_are_those_of_llavas_own_processor(parts):
    """Another number of image tokens, or another prompt than the blocks get."""
    _, _, processor, pool = parts
    pictures = [picture_of(pool.canvas(np.random.default_rng(seed))) for seed in range(2)]
    chats = [
        [{"role": "user", "content": [{"type": "image", "image": picture}, {"type": "text", "text": text}]}]
        for picture, text in zip(pictures, ("Hello hello?", "Hi!"))
    ]
    found = LlavaChats(processor, IMAGE_TOKENS).apply_chat_template(
        chats, tokenize=True, return_dict=True, return_tensors="pt", add_generation_prompt=True
    )
    theirs = LlavaProcessor(processor.image_processor, processor.tokenizer, 10, "full", num_additional_image_tokens=1)
    texts = processor.apply_chat_template(chats, add_generation_prompt=True)
    expected = theirs(
        images=pictures, text=texts, padding=True, padding_side="left", add_special_tokens=False, return_tensors="pt"
    )
    for name in ("input_ids", "attention_mask", "pixel_values"):
        assert torch.equal(found[name], expected[name])
