"""The processor of a folder of added weights that was saved without one: that of the bases."""

import pytest
import torch
from transformers import AutoModelForImageTextToText, AutoProcessor, AutoTokenizer, ProcessorMixin
from transformers.utils import logging

from helpers.models.template_models import HEADERS
from helpers.models.word_models import make_picture, make_text_checkpoint, make_vision_checkpoint
from hf_xattn import XAttnProcessor, retrofit
from hf_xattn.commands.main import main
from hf_xattn.commands.shared import load_processor
from hf_xattn.utils import stub


@pytest.fixture
def bases(tmp_path):
    make_text_checkpoint(tmp_path / "text", more_words=["<image>"])
    make_vision_checkpoint(tmp_path / "vision")
    return tmp_path


def save(bases, **options):
    model = retrofit(bases / "text", bases / "vision", every=2, **options)
    model.save_pretrained(bases / "added", adapter_only=True)
    return bases / "added"


def test_a_folder_without_a_processor_makes_one_from_its_bases(bases, caplog, capsys):
    """A folder that loads as a model, and of which nobody can ask anything; another marker of images
    than the model's.
    """
    logging.enable_propagation()
    tokenizer = AutoTokenizer.from_pretrained(bases / "text")
    tokenizer.add_tokens(["<image>"], special_tokens=True)
    tokenizer.save_pretrained(bases / "text")
    marker = tokenizer.convert_tokens_to_ids("<image>")
    added = save(bases, image_token_id=marker)
    for load in (AutoProcessor.from_pretrained, XAttnProcessor.from_pretrained, load_processor):
        processor = load(added)
        assert isinstance(processor, XAttnProcessor) and processor.image_token == "<image>"
        inputs = processor(text="<image> what is it ?", images=[make_picture()])
        assert inputs["pixel_values"].shape == (1, 1, 3, 32, 32) and inputs["input_ids"][0, 0] == marker
    assert "holds no processor. A processor is made from the tokenizer of" in caplog.text
    make_picture().save(bases / "picture.png")
    command = ["generate", added, "--prompt", "what is it ?", "--image", bases / "picture.png"]
    assert main([str(word) for word in [*command, "--max-new-tokens", 2]]) == 0, capsys.readouterr().err


def test_its_own_comes_first(bases):
    """Settings that were saved with the model, and are replaced by those of the bases; a folder that is refused
    because they were saved.
    """
    added = save(bases)
    mine = AutoProcessor.from_pretrained(added)
    mine.chat_template = "{{ messages }} mine"
    mine.save_pretrained(added)
    assert AutoProcessor.from_pretrained(added).chat_template == "{{ messages }} mine"
    AutoModelForImageTextToText.from_pretrained(added)


def test_a_processor_of_a_later_version(bases, monkeypatch):
    """A stub of another version that a processor writes into the folder, which its manifest does not know."""
    added = save(bases)
    processor = AutoProcessor.from_pretrained(added)
    monkeypatch.setattr(stub, "__version__", "99.0.0")
    processor.save_pretrained(added)
    AutoModelForImageTextToText.from_pretrained(added)
    assert isinstance(AutoProcessor.from_pretrained(added), XAttnProcessor)
    processor.save_pretrained(bases / "alone")
    assert "99.0.0" in (bases / "alone" / f"{stub.STUB}.py").read_text()


def test_bases_without_a_processor(bases, tmp_path):
    """A processor of some other model, or an error that names no base."""
    added = save(bases)
    (bases / "vision" / "preprocessor_config.json").unlink()
    with pytest.raises(
        ValueError, match="added holds no processor, and AutoImageProcessor finds none in its base .*vision"
    ):
        AutoProcessor.from_pretrained(added)
    added = save(bases, image_token_id=30, additional_vocab_size=1)
    make_vision_checkpoint(bases / "vision")
    with pytest.raises(ValueError, match="tokenizer of its base .*text has no token 30, which is the image marker"):
        AutoProcessor.from_pretrained(added)


def test_without_a_tower(bases):
    """A processor of images for a model that takes features."""
    retrofit(bases / "text", every=2).save_pretrained(bases / "added", adapter_only=True)
    tokenizer = load_processor(bases / "added")
    assert (
        not isinstance(tokenizer, ProcessorMixin) and torch.tensor(tokenizer("what is it ?")["input_ids"]).numel() == 4
    )
    with pytest.raises(ValueError, match="For texts without images, use the tokenizer"):
        AutoProcessor.from_pretrained(bases / "added")


def test_settings_of_a_processor_that_is_made_of_bases(tmp_path):
    """A template and a size that are dropped, because the folder has no processor of its own."""
    make_text_checkpoint(tmp_path / "text")
    make_vision_checkpoint(tmp_path / "vision")
    retrofit(tmp_path / "text", tmp_path / "vision", every=2).save_pretrained(tmp_path / "small", adapter_only=True)
    size = {"height": 8, "width": 8}
    processor = AutoProcessor.from_pretrained(tmp_path / "small", chat_template=HEADERS, size=size)
    assert processor.chat_template == HEADERS and dict(processor.image_processor.size) == size
