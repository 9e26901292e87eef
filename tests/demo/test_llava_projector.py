"""The peer of the demo over a language model: transformers' Llava on the same rows, with the same features and
prompts.
"""

import json

import llava_projector
import numpy as np
import pytest
import torch
from llava_peer import LlavaChats, LlavaTraining, llava_of
from tiny_gguf import write_gguf
from tiny_models import needs_part
from transformers import AutoModel, AutoModelForCausalLM, LlavaProcessor

from hf_xattn.demo.canvases import DigitPool, picture_of, to_pixel_values
from hf_xattn.demo.checkpoints import language_model, make_vision_checkpoint
from hf_xattn.demo.language_run import retrofitted
from hf_xattn.demo.language_scores import same_logits
from hf_xattn.demo.language_training import Batch, Rows
from hf_xattn.demo.questions import ask


pytestmark = needs_part("special tokens of a GGUF file")
IMAGE_TOKENS = 13  # two rows of six patches, and the class token


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("parts")
    pool = DigitPool(held_out=False)
    make_vision_checkpoint(folder / "vision", pool, steps=1, seed=0, where=True)
    text = language_model(write_gguf(folder / "tiny.gguf"), folder)
    processor = retrofitted(text, folder / "vision")[1]
    tower = AutoModel.from_pretrained(folder / "vision").eval()
    torch.manual_seed(0)
    llava = llava_of(AutoModelForCausalLM.from_pretrained(text).eval(), tower, processor.image_token_id)
    return llava, AutoModelForCausalLM.from_pretrained(text).eval(), processor, pool


def test_text_alone_is_the_base(parts):
    """A token for pictures that gets a logit of its own, or changes the head; a layer or a tower that trains."""
    llava, base, processor, _ = parts
    assert same_logits(llava, base, processor)
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
        chats, tokenize=True, return_dict=True, add_generation_prompt=True
    )
    theirs = LlavaProcessor(processor.image_processor, processor.tokenizer, 10, "full", num_additional_image_tokens=1)
    texts = processor.apply_chat_template(chats, add_generation_prompt=True)
    expected = theirs(
        images=pictures, text=texts, padding=True, padding_side="left", add_special_tokens=False, return_tensors="pt"
    )
    for name in ("input_ids", "attention_mask", "pixel_values"):
        assert torch.equal(found[name], expected[name])


def test_training_gives_the_loss_of_the_whole_model(parts):
    """Positions, masks, labels or a beginning that are not those of the whole model, which would train
    the peer badly.
    """
    llava, _, processor, pool = parts
    rng = np.random.default_rng(1)
    questions = [ask(kind, pool, rng) for kind in ("read", "is there", "how many")]
    rows = Rows(processor, pool.canvas(rng))
    chats = LlavaChats(processor, IMAGE_TOKENS)
    training = LlavaTraining(llava, chats, rows, torch.float32)
    examples = [rows.example(question.text, question.answer) for question in questions]
    examples.append(rows.example("Hello!", "Hello.", False))
    pixel_values = torch.stack([to_pixel_values(question.canvas) for question in [*questions, questions[0]]])
    ids = [torch.tensor([*rows.beginning, *example.ids]) for example in examples]
    labels = [torch.tensor([*[-100] * len(rows.beginning), *example.labels]) for example in examples]
    counts = [torch.where(row == processor.image_token_id, IMAGE_TOKENS, 1) for row in ids]
    ids, labels = ([row.repeat_interleave(count) for row, count in zip(each, counts)] for each in (ids, labels))
    pad = torch.nn.utils.rnn.pad_sequence
    whole = llava(
        input_ids=pad(ids, batch_first=True),
        attention_mask=pad([torch.ones_like(each) for each in ids], batch_first=True),
        labels=pad(labels, batch_first=True, padding_value=-100),
        pixel_values=pixel_values[:3, 0],
    ).loss
    projector = list(llava.model.multi_modal_projector.parameters())
    expected = torch.autograd.grad(whole, projector)
    loss = training.loss(Batch(examples, pixel_values, torch.tensor([[True]] * 3 + [[False]])))
    torch.testing.assert_close(loss, whole)
    for found, gradient in zip(torch.autograd.grad(loss, projector), expected):
        torch.testing.assert_close(found, gradient, rtol=1e-3, atol=1e-6)


def test_what_is_not_a_finished_demo_is_refused(tmp_path):
    """Minutes of work before a missing file, or a seed that puts digits of the test into the tower's training."""
    with pytest.raises(ValueError, match="finished"):
        llava_projector.compare(tmp_path)
    (tmp_path / "results.json").write_text(json.dumps({"minutes of training": 1.0, "seed": 0}))
    (tmp_path / "text").mkdir()
    with pytest.raises(ValueError, match="`seed` must be the demo's"):
        llava_projector.compare(tmp_path, seed=1)
