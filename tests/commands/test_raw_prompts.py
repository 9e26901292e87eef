"""`hf-xattn generate --raw` with an image of an earlier call reads the text that it reads with the image itself."""

import numpy as np
import pytest
from PIL import Image
from tokenizers.processors import TemplateProcessing
from transformers import SiglipImageProcessorPil

from helpers.models.tiny_idefics import make_idefics_processor
from helpers.models.tiny_models import make_model
from hf_xattn import XAttnProcessor
from hf_xattn.commands.main import main


@pytest.fixture
def saved(tmp_path):
    """Saves a model with its processor, whose tokenizer writes `<s>`, and one picture."""
    tokenizer = make_idefics_processor().tokenizer
    start = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer.backend_tokenizer.post_processor = start
    picture = np.random.default_rng(0).integers(0, 255, (32, 32, 3), dtype=np.uint8)
    Image.fromarray(picture).save(tmp_path / "picture.png")

    def save(marker=None, **config):
        make_model(**config).save_pretrained(tmp_path / "model")
        images = SiglipImageProcessorPil(size={"height": 32, "width": 32})
        XAttnProcessor(images, tokenizer, image_token=marker).save_pretrained(tmp_path / "model")
        return tmp_path

    return save


def answers(folder, capsys, prompt):
    """Status, answer and error with the image, and with its cache."""
    model, picture, cache = folder / "model", folder / "picture.png", folder / "cache.safetensors"
    encode = ["encode", model, "--image", picture, "--output", cache]
    assert main([str(word) for word in encode]) == 0, capsys.readouterr().err
    capsys.readouterr()
    found = []
    for given in (["--image", picture], ["--image-cache", cache]):
        command = ["generate", model, "--raw", "--prompt", prompt, *given, "--max-new-tokens", 6]
        found.append((main([str(word) for word in command]), *capsys.readouterr()))
    return found


def test_a_prompt_without_its_marker(saved, capsys):
    """An answer that has not seen the image."""
    folder = saved("w46", image_token_id=50, image_visibility="latest")
    for status, _, error in answers(folder, capsys, "w1 w2"):
        assert status == 2 and "Expected one image marker" in error
