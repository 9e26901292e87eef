"""Attention maps on pictures: where a map lies on a photo, and maps whose picture is not known."""

import io

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import (
    AutoModel,
    Dinov2Config,
    EfficientNetConfig,
    GenerationConfig,
    MobileNetV2Config,
    SiglipImageProcessorPil,
)

from helpers.models.tiny_idefics import make_idefics_processor
from helpers.models.tiny_mllama import make_mllama, make_mllama_processor
from helpers.models.tiny_models import make_model, make_text, pixels, randomize, token_ids
from helpers.models.tiny_towers import ANY_SIZE, SMALL_TOWER, model_with
from hf_xattn import XAttnProcessor, attention_maps, retrofit
from hf_xattn.importers import import_checkpoint
from hf_xattn.maps.patch_grid import patch_grid


CONVOLUTIONAL = {
    "resnet": ANY_SIZE["resnet"],
    "convnext": ANY_SIZE["convnext"],
    "efficientnet": lambda: EfficientNetConfig(width_coefficient=0.25, depth_coefficient=0.1, hidden_dim=320),
    "mobilenet_v2": lambda: MobileNetV2Config(depth_multiplier=0.25, finegrained_output=False),
}


def turned_photo():
    """A picture that is red at its left side, with an EXIF tag that turns it: red on top."""
    values = np.zeros((40, 80, 3), np.uint8)
    values[:, :20] = [255, 0, 0]
    image, file = Image.fromarray(values), io.BytesIO()
    exif = image.getexif()
    exif[0x112] = 6
    image.save(file, "PNG", exif=exif)
    return Image.open(io.BytesIO(file.getvalue()))


def test_a_photo_is_turned_as_the_processor_turns_it():
    """A map of the upright picture over a photo that lies on its side."""
    pytest.importorskip("matplotlib")
    images = SiglipImageProcessorPil(size={"height": 32, "width": 32})
    processor = XAttnProcessor(images, make_idefics_processor().tokenizer)
    photo = turned_photo()
    maps = attention_maps(make_model(), processor(images=[photo], text=["w1 w2"]))
    drawn = maps.plot([0], picture=photo).axes[0].images[0].get_array()
    assert maps.pixels()[2, 16].argmax() == 0 and drawn.shape[:2] == (80, 40)
    assert drawn[5, 20].tolist() == [255, 0, 0] and drawn[60, 20].tolist() == [0, 0, 0]


def test_a_rest_without_a_patch_is_not_covered():
    """A map that is stretched over pixels that no patch covers, if the picture is given."""
    pytest.importorskip("matplotlib")
    model = randomize(model_with(Dinov2Config(**{**SMALL_TOWER, "mlp_ratio": 2})))
    patch = model.config.vision_config.patch_size
    side = 2 * patch - 1
    picture = torch.randn(1, 1, 3, side, side)
    maps = attention_maps(model, {"input_ids": token_ids(1), "pixel_values": picture})
    for given in (None, np.zeros((side, side, 3), np.uint8)):
        extent = maps.plot([0], picture=given).axes[0].images[1].get_extent()
        assert extent[1] == patch and extent[2] == patch


def test_a_picture_of_tiles_is_refused():
    """A map of the canvas with its border, stretched over the picture alone."""
    pytest.importorskip("matplotlib")
    processor, picture = make_mllama_processor(), Image.new("RGB", (40, 10))
    made = processor(images=[picture], text="<|image|> w1 w2", return_tensors="pt")
    maps = attention_maps(randomize(import_checkpoint(make_mllama())), dict(made))
    with pytest.raises(ValueError, match="`picture` to be None, because the vision tower reads tiles"):
        maps.plot([0], picture=picture)


def test_images_beside_a_cache_are_refused():
    """The picture of a later image under the map of the first one."""
    model = make_model()
    with torch.no_grad():
        cache = model.encode_images(pixel_values=pixels(1, seed=4))
    with pytest.raises(ValueError, match="got both: `cache` and `pixel_values`"):
        attention_maps(model, {"input_ids": token_ids(1), "pixel_values": pixels(1), "cache": cache})


def test_a_grid_of_unknown_form_is_refused():
    """A square grid for a wide picture, whose size a cache does not tell."""
    model = randomize(model_with(Dinov2Config(**{**SMALL_TOWER, "mlp_ratio": 2})))
    patch, ids = model.config.vision_config.patch_size, token_ids(1)
    wide = torch.randn(1, 1, 3, 2 * patch, 8 * patch)
    with torch.no_grad():
        cache = model.encode_images(pixel_values=wide)
    assert attention_maps(model, {"input_ids": ids, "pixel_values": wide}).grid().shape[-2:] == (2, 8)
    with pytest.raises(ValueError, match="needs the size of the image"):
        attention_maps(model, {"input_ids": ids, "cache": cache}).grid()


def test_the_end_is_the_models_where_the_call_names_none():
    """Padding after an answer that counts as text."""
    model, ids = make_model(), token_ids(1)
    given = {"input_ids": ids, "pixel_values": pixels(1)}
    end = int(model.generate(**given, max_new_tokens=1, do_sample=False)[0, -1])
    model.generation_config.eos_token_id = end
    own = GenerationConfig(do_sample=False, min_new_tokens=None)
    options = ({"do_sample": False}, {"generation_config": own})
    wide = {"input_ids": token_ids(2), "pixel_values": pixels(2)}
    plain, passed = (attention_maps(model, wide, 4, **each).text_mask for each in options)
    assert torch.equal(plain, passed)


@torch.no_grad()
@pytest.mark.parametrize("name", CONVOLUTIONAL)
def test_places_of_a_convolutional_tower(name):
    """A map that is turned, or shown nowhere: the place whose token changes most is where the picture was painted."""
    tower = AutoModel.from_config(CONVOLUTIONAL[name]())
    for module in tower.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            module.momentum = 1.0  # to know the sizes of random features after one forward
    height, width = 256, 384
    tower.train()(torch.rand(4, 3, height, width))
    model = retrofit(make_text(), tower.eval(), every=2, connector_type="mlp")
    pictures = torch.rand(2, 1, 3, height, width)
    pictures[1] = pictures[0]
    pictures[1, ..., 180:240, 70:130] = torch.rand(3, 60, 60) + 0.5  # in the lower left
    features = model.get_image_features(pictures).pooler_output.flatten(0, 1).double()
    maps = attention_maps(model, {"input_ids": token_ids(1), "pixel_values": pictures[1:]})
    change = maps._patches(0, 0).lay((features[1] - features[0]).norm(dim=-1))
    rows, columns = change.shape
    assert rows / columns == height / width and rows * columns == features.shape[1]
    row, column = divmod(int(change.argmax()), columns)
    assert rows / 2 <= row < rows - 1 and 1 <= column < columns / 2
    with pytest.raises(ValueError, match="a power of two, got 7 tokens"):
        patch_grid(model.config, 7, (height, width))
