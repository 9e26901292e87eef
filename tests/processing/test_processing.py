"""`XAttnProcessor`: texts and their images to inputs."""

import json

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoProcessor, AutoTokenizer, CLIPImageProcessor, SiglipImageProcessor, ViTImageProcessorPil
from transformers.utils import logging

from helpers.inputs.chat_templates import TEXT_TEMPLATES
from helpers.inputs.chat_templates import make_processor as make_small_processor
from helpers.models.template_models import CHATML, make_processor
from helpers.models.word_models import make_picture, make_text_checkpoint, make_vision_checkpoint
from hf_xattn import XAttnProcessor, retrofit
from hf_xattn.processing.image_limits import check_image_processor
from hf_xattn.utils.transformers_api import AutoImageProcessor


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("parts")
    make_text_checkpoint(folder / "text")
    make_vision_checkpoint(folder / "vision")
    return folder, AutoTokenizer.from_pretrained(folder / "text"), AutoImageProcessor.from_pretrained(folder / "vision")


def test_one_several_and_no_images(parts):
    """Images bound to the wrong text, or padding images that count."""
    _, tokenizer, image_processor = parts
    processor = XAttnProcessor(image_processor, tokenizer)
    a, b, c = make_picture(0), make_picture(1), make_picture(2)
    inputs = processor(images=[a, [b, c], None], text=["a dog", "what is it ?", "a"])
    assert inputs["input_ids"].shape == (3, 4)
    assert inputs["pixel_values"].shape == (3, 2, 3, 32, 32)
    assert inputs["image_mask"].tolist() == [[True, False], [True, True], [False, False]]
    single = image_processor([c], return_tensors="pt")["pixel_values"][0]
    assert torch.equal(inputs["pixel_values"][1, 1], single)
    assert "image_mask" not in processor(images=[a, b], text=["a", "dog"])
    assert processor(images=a, text="a")["pixel_values"].shape == (1, 1, 3, 32, 32)
    assert processor(images=[a, b], text="a")["pixel_values"].shape == (1, 2, 3, 32, 32)
    assert processor(images=[[a, b]])["pixel_values"].shape == (1, 2, 3, 32, 32)
    assert "pixel_values" not in processor(text="a")
    assert "pixel_values" not in processor(text=["a", "dog"], images=[None, []])


def test_saved_with_the_model_and_found_by_auto(parts, tmp_path):
    """A processor that does not come back, or comes back as something else."""
    folder, tokenizer, image_processor = parts
    tokenizer = AutoTokenizer.from_pretrained(folder / "text")
    tokenizer.add_tokens(["<image>"], special_tokens=True)
    processor = XAttnProcessor(image_processor, tokenizer, image_token="<image>")
    processor.save_pretrained(tmp_path)
    retrofit(folder / "text", folder / "vision").save_pretrained(tmp_path)
    loaded = AutoProcessor.from_pretrained(tmp_path)
    assert isinstance(loaded, XAttnProcessor)
    assert (loaded.image_token, loaded.image_token_id) == ("<image>", processor.image_token_id)
    first = processor(images=make_picture(), text="<image> a dog")
    second = loaded(images=make_picture(), text="<image> a dog")
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_arrays_of_several_images(parts):
    """The first image of an array taken for all of them."""
    _, tokenizer, image_processor = parts
    processor = XAttnProcessor(image_processor, tokenizer)
    two = torch.stack([torch.zeros(3, 32, 32), torch.full((3, 32, 32), 255.0)])
    assert processor(images=two, text="a")["pixel_values"].shape == (1, 2, 3, 32, 32)
    by_text = processor(images=two, text=["a", "dog"])["pixel_values"]
    assert by_text.shape == (2, 1, 3, 32, 32) and not torch.equal(by_text[0], by_text[1])
    assert processor(images=[two, None], text=["a", "dog"])["image_mask"].tolist() == [[True, True], [False, False]]
    assert torch.equal(processor(images=two.numpy(), text="a")["pixel_values"][0], by_text[:, 0])
    assert "pixel_values" not in processor(images=[None], text="a")


def test_arguments_of_the_parts(parts):
    """An option of the image processor that ends in the tokenizer, which ignores it."""
    _, tokenizer, image_processor = parts
    processor = XAttnProcessor(image_processor, tokenizer)
    picture = make_picture()
    whole = processor(images=picture, text="a", do_resize=False)["pixel_values"]
    assert whole.shape[-2:] == picture.size[::-1] != (32, 32)
    nested = processor(images=picture, text="a", images_kwargs={"do_resize": False}, text_kwargs={"padding": True})
    assert torch.equal(nested["pixel_values"], whole)
    assert processor(text=["a", "a dog"], max_length=1, truncation=True)["input_ids"].shape == (2, 1)
    assert "input_ids" in processor(text="a", videos=None, audio=None)


def test_texts_return_the_tensors_that_were_asked_for(parts):
    """Tensors where lists or arrays were asked for."""
    _, tokenizer, image_processor = parts
    processor = XAttnProcessor(image_processor, tokenizer)
    texts = ["a", "a dog"]
    assert [len(row) for row in processor(text=texts, return_tensors=None)["input_ids"]] == [1, 2]
    arrays = processor(text=texts, images=[make_picture(), None], return_tensors="np")
    assert {type(value) for value in arrays.values()} == {np.ndarray} and arrays["image_mask"].shape == (2, 1)
    for nested in ({"text_kwargs": {"return_tensors": "np"}}, {"common_kwargs": {"return_tensors": "np"}}):
        assert processor(text=texts, **nested)["input_ids"].tolist() == arrays["input_ids"].tolist()


def test_a_tower_of_grey_pictures(parts):
    """A grey picture made into three channels, for a tower that reads one."""
    _, tokenizer, _ = parts
    image_processor = ViTImageProcessorPil(size={"height": 8, "width": 8}, do_normalize=False, do_convert_rgb=False)
    made = XAttnProcessor(image_processor, tokenizer)(images=make_picture().convert("L"), text="a")
    assert made["pixel_values"].shape == (1, 1, 1, 8, 8)


IMAGE = "IMAGE"
WRONG = {
    "swapped": (("a dog", IMAGE), {}, "`text`.*str.*got <PIL.*`images` is the first"),
    "swapped_lists": ((["a"], [IMAGE]), {}, "`text`.*got .<PIL.*`images` is the first"),
    "text_type": ((), {"text": 3}, "`text`.*str or a list of one str or more, got 3"),
    "text_entry": ((), {"text": ["a", None]}, "`text`.*got .*None"),
    "image_type": ((3, "a"), {}, "`images`.*PIL, numpy, torch.*got int"),
    "image_entry": (([3], ["a"]), {}, "`images`.*got int"),
    "misspelt": ((), {"text": "a", "paddin": True}, "`paddin`. Did you mean `padding`"),
    "image": ((), {"text": "a", "image": IMAGE}, "`image`. Did you mean `images`"),
    "nested": ((), {"text": "a", "text_kwargs": {"paddin": True}}, "`paddin`. Did you mean `padding`"),
    "size_type": ((), {"text": "a", "images": IMAGE, "do_resize": "yes"}, "do_resize.*bool"),
    "twice_nested": ((), {"text": "a", "images_kwargs": {"padding": True}}, "`padding`"),
    "audio": ((), {"text": "a", "audio": [0.0]}, "argument `audio`"),
    "audio_kwargs": ((), {"text": "a", "audio_kwargs": {"sampling_rate": 1}}, "argument `audio_kwargs`"),
    "video": ((), {"text": "a", "videos": [3]}, "`videos`.*array of frames.*got int"),
    "dtype": ((), {"text": "a", "images": np.full((4, 4, 3), "x")}, "`images` to hold numbers"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_types_are_named(parts, case):
    """`object of type 'Image' has no len()`, or a misspelt option that changes nothing."""
    _, tokenizer, image_processor = parts
    processor = XAttnProcessor(image_processor, tokenizer)
    args, kwargs, message = WRONG[case]
    picture = make_picture()
    args = [picture if a is IMAGE else [picture] if a == [IMAGE] else a for a in args]
    kwargs = {name: picture if value is IMAGE else value for name, value in kwargs.items()}
    with pytest.raises(TypeError, match=message):
        processor(*args, **kwargs)


def test_texts_and_images_that_do_not_match_are_refused(parts):
    """Silent truncation where texts and images do not match."""
    folder, tokenizer, image_processor = parts
    processor = XAttnProcessor(image_processor, tokenizer)
    picture = make_picture()
    with pytest.raises(ValueError, match="2 entries for 3 texts"):
        processor(images=[picture, picture], text=["a", "a", "a"])
    with pytest.raises(ValueError, match="one text"):
        processor(images=[[picture], [picture]], text="a")
    with pytest.raises(ValueError, match="`text`, `images` or both"):
        processor()
    with pytest.raises(TypeError, match="`text` to be .* one str or more, got \\[\\]"):
        processor(text=[])
    with pytest.raises(ValueError, match="`images` to have one entry for each text, got an empty list"):
        processor(images=[], text=["a", "dog"])
    with pytest.raises(ValueError, match=r"`images` to have 3 axes.*\(32,\)"):
        processor(images=torch.zeros(32), text="a")
    with pytest.raises(ValueError, match="`images`.*got 'a dog'.*Pass text as `text=`"):
        processor("a dog")
    with pytest.raises(ValueError, match="return_tensors.*tf"):
        processor(text="a", return_tensors="tf")
    with pytest.raises(ValueError, match="vocabulary, got .<image>"):
        XAttnProcessor(image_processor, tokenizer, image_token="<image>")
    marked = AutoTokenizer.from_pretrained(folder / "text")
    marked.add_tokens(["<image>"], special_tokens=True)
    processor = XAttnProcessor(image_processor, marked, image_token="<image>")
    with pytest.raises(ValueError, match="text 0, got 2 markers and 1 images"):
        processor(text="<image> <image> a", images=picture)
    with pytest.raises(ValueError, match="text 1, got 0 markers and 1 images"):
        processor(text=["<image> a", "a"], images=[picture, picture])


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


@pytest.mark.parametrize(
    "size",
    [
        {"height": 10**6, "width": 10**6},
        {"height": float("nan"), "width": 4},
    ],
)
def test_image_processors_with_other_sizes(size, tmp_path):
    """A processor from a file that scales every picture up to a terabyte."""
    processor = make_small_processor(TEXT_TEMPLATES["guard"])
    with pytest.raises(ValueError, match="`size` of the image processor"):
        images = SiglipImageProcessor()
        images.size = size
        XAttnProcessor(images, processor.tokenizer)
    processor.save_pretrained(tmp_path)
    file = next(path for path in tmp_path.glob("*processor_config.json") if "size" in path.read_text())
    content = json.loads(file.read_text())
    (content.get("image_processor") or content)["size"] = size
    file.write_text(json.dumps(content))
    with pytest.raises((ValueError, TypeError)):
        XAttnProcessor.from_pretrained(tmp_path)


def test_sizes_of_published_image_processors():
    """A processor that is refused because its edges are numbers of pixels."""
    from transformers import MllamaImageProcessor, Qwen2VLImageProcessor

    for kind in (SiglipImageProcessor, CLIPImageProcessor, MllamaImageProcessor, Qwen2VLImageProcessor):
        check_image_processor(kind())
    with pytest.raises(ValueError, match="max_image_tiles"):
        check_image_processor(MllamaImageProcessor(max_image_tiles=10**9))
