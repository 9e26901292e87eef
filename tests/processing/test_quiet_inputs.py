"""Inputs of a processor that are read in another way than they are meant."""

import numpy as np
import pytest
import torch
from PIL import Image
from tiny_checkpoints import make_text_checkpoint, make_vision_checkpoint
from tokenizers.processors import TemplateProcessing
from transformers import AutoProcessor
from transformers.utils import logging

from helpers.models.template_models import CHATML, HEADERS, make_processor
from hf_xattn import retrofit


def test_settings_of_a_processor_that_is_made_of_bases(tmp_path):
    """A template and a size that are dropped, because the folder has no processor of its own."""
    make_text_checkpoint(tmp_path / "text")
    make_vision_checkpoint(tmp_path / "vision")
    retrofit(tmp_path / "text", tmp_path / "vision", every=2).save_pretrained(tmp_path / "small", adapter_only=True)
    size = {"height": 8, "width": 8}
    processor = AutoProcessor.from_pretrained(tmp_path / "small", chat_template=HEADERS, size=size)
    assert processor.chat_template == HEADERS and dict(processor.image_processor.size) == size


def test_a_picture_that_becomes_black(caplog):
    """Values from 0 to 1 with a rest of resizing, or of 12 bits in 16, that are read as dark pictures."""
    logging.enable_propagation()
    processor, dark = make_processor(CHATML, marker=None), np.full((32, 32), 4095, np.uint16)
    with pytest.raises(ValueError, match="almost black"):
        processor(images=torch.rand(3, 32, 32) * 1.02, text="a")
    processor(images=Image.fromarray(dark), text="a")
    assert "almost black" in caplog.text


def test_values_up_to_255_are_not_rescaled_ones():
    """A picture 255 times too bright."""
    processor = make_processor(CHATML, marker=None)
    bright = (torch.rand(3, 32, 32) * 255).round()
    with pytest.raises(ValueError, match="values from 0 to 1 for `do_rescale=False`, got an array of .* up to 25"):
        processor(images=bright, text="a", do_rescale=False)


def test_a_start_token_in_some_texts():
    """A second start token, because another text of the batch has none."""
    processor = make_processor(CHATML, marker=None)
    backend = processor.tokenizer.backend_tokenizer
    backend.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    ids = processor(text=["<s>hi", "hi"])["input_ids"]
    assert ids[0].tolist() == ids[1].tolist() and (ids[0] == 1).sum() == 1


def test_a_mask_of_pixels_is_refused():
    """Padding of a wider picture that a tower reads as picture."""
    processor = make_processor(CHATML, marker=None)
    own = processor.image_processor

    class Padding(type(own)):
        def __call__(self, images, **kwargs):
            made = super().__call__(images, **kwargs)
            made["pixel_mask"] = torch.ones(len(images), 32, 32)
            made["pixel_mask"][0, :, 16:] = 0
            return made

    processor.image_processor = Padding(size={"height": 32, "width": 32})
    with pytest.raises(ValueError, match="images without padding, got a `pixel_mask`"):
        processor(images=[[torch.rand(3, 32, 32) * 255]], text=["a"])


def test_normalised_values_are_not_rescaled_ones():
    """A picture that is normalised twice."""
    processor = make_processor(CHATML, marker=None)
    with pytest.raises(ValueError, match="from 0 to 1 for `do_rescale=False`, got an array of .* from -1 up to 1"):
        processor(images=torch.rand(3, 32, 32).round() * 2 - 1, text="a", do_rescale=False)


@pytest.mark.parametrize("name, value", [("images", [Image.new("RGB", (8, 8))]), ("image_url", "photo.png")])
def test_a_picture_beside_the_content(name, value):
    """A chat in Ollama's form, whose pictures nobody reads."""
    message = {"role": "user", "content": "what ?", name: value}
    with pytest.raises(ValueError, match=f"the images of message 0 .* in its `content`, got `{name}` beside it"):
        make_processor(CHATML).apply_chat_template([message], tokenize=True)


@pytest.mark.parametrize("name", ["contents", "text"])
def test_a_message_without_content(name):
    """A misspelt question, and an answer to an empty one."""
    with pytest.raises(ValueError, match=f"Expected `content` in message 0 .*, got a message with role, {name} alone"):
        make_processor(CHATML).apply_chat_template([{"role": "user", name: "what ?"}], tokenize=True)
