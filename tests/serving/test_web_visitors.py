"""The conversations behind the page, without Gradio: visitors, what they draw on, and where the model looked."""

import numpy as np
import pytest
from chat_models import NEW_TOKENS, answer, data_url, drawing, question
from PIL import Image
from tiny_models import make_model, pixels, token_ids, vision_config
from transformers import AutoModelForImageTextToText, AutoProcessor, AutoTokenizer, SiglipImageProcessorPil

from hf_xattn import attention_maps
from hf_xattn.serving.web import visitors as module
from hf_xattn.serving.web.page import drawing_for
from hf_xattn.serving.web.visitors import Gaze, Visitors


TEXT = "what is in the picture ?"


@pytest.fixture(scope="module")
def model(chat_folder):
    return AutoModelForImageTextToText.from_pretrained(chat_folder).eval()


@pytest.fixture(scope="module")
def processor(chat_folder):
    return AutoProcessor.from_pretrained(chat_folder)


@pytest.fixture
def visitors(model, processor):
    return Visitors(model, processor, max_new_tokens=NEW_TOKENS, do_sample=False)


@pytest.fixture
def visitor(visitors):
    return visitors.find(visitors.welcome())


def test_visitors_do_not_mix(visitors, model, processor):
    """A picture or a question of one visitor in the conversation of another, while both are being answered."""
    names = [visitors.welcome(), visitors.welcome()]
    assert names[0] != names[1] and all(len(name) > 20 for name in names)
    one, other = map(visitors.find, names)
    one.add(data_url(drawing(0)), "one.png")
    assert other.waiting == []
    other.add(data_url(drawing(1)), "other.png")
    first, second = one.ask(TEXT), other.ask(TEXT)
    said = [next(first), next(second)]
    said = [said[0] + "".join(first), said[1] + "".join(second)]
    assert said == [answer(model, processor, [question(TEXT, drawing(seed))]) for seed in (0, 1)]
    assert said[0] != said[1] and one.waiting == other.waiting == []


@pytest.mark.parametrize(
    "source, words",
    [
        ("data:image/png;base64,iVBORw0KGgpub3Q=", "a.png cannot be read"),
        ("data:text/plain;base64,aGVsbG8=", "a.png cannot be read"),
        ("data:image/png;base64,%%%", "a.png cannot be read"),
        ("data:,", "a.png cannot be read"),
        ("https://localhost/a.png", "a.png is not a picture"),
        (__file__, "a.png is not a picture"),
        (None, "a.png is not a picture"),
    ],
)
def test_what_is_not_a_picture(source, words, visitor):
    """A broken file that ends the conversation; a visitor who reads the server's files, or lets it call addresses."""
    with pytest.raises(ValueError, match=words):
        visitor.add(source, "a.png")
    assert visitor.waiting == []
    visitor.add(data_url(drawing(0)), "b.png")
    assert "".join(visitor.ask(TEXT))


def test_too_much(visitor, monkeypatch):
    """A visitor who fills the memory of the server."""
    monkeypatch.setattr(module, "MAX_WAITING", 2)
    monkeypatch.setattr(module, "MAX_BYTES", 50_000)
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 255, (200, 200, 3), dtype=np.uint8))
    with pytest.raises(ValueError, match="too large"):
        visitor.add(data_url(noise), "noise.png")
    monkeypatch.setattr(module, "MAX_PIXELS", 256 * 128)
    with pytest.raises(ValueError, match="megapixels"):
        visitor.add(data_url(Image.new("RGB", (257, 128))), "bomb.png")
    monkeypatch.setattr(module, "MAX_SIDE", 64)
    visitor.add(data_url(Image.new("RGB", (256, 128), "red")), "wide.png")
    assert visitor.waiting[0].size == (64, 32)
    visitor.add(data_url(drawing(0)), "b.png")
    with pytest.raises(ValueError, match="2 pictures"):
        visitor.add(data_url(drawing(1)), "c.png")
    visitor.remove(0)
    visitor.remove(7)
    assert [picture.size for picture in visitor.waiting] == [(32, 32)]


def test_pictures_stay_after_an_error(visitor, model):
    """A visitor who has to draw again because an answer failed."""
    visitor.add(data_url(drawing(0)), "a.png")
    with pytest.raises(ValueError, match="question"):
        next(visitor.ask("  "))
    visitor.session.options["max_new_tokens"] = 10**6
    with pytest.raises(ValueError, match="Start a new conversation"):
        list(visitor.ask(TEXT))
    assert len(visitor.waiting) == 1 and not visitor.answering
    visitor.session.options["max_new_tokens"] = NEW_TOKENS
    assert "".join(visitor.ask(TEXT)) and visitor.waiting == []


def test_one_question_at_a_time(visitor):
    """A second click that asks the question again."""
    pieces = visitor.ask(TEXT)
    next(pieces)
    with pytest.raises(ValueError, match="still being answered"):
        next(visitor.ask(TEXT))
    visitor.stop()
    list(pieces)
    visitor.stop()
    assert not visitor.answering and len(visitor.session.answers) == 1


def test_clear(visitor, model, processor):
    """Messages or pictures of before in a new conversation."""
    visitor.add(data_url(drawing(0)), "a.png")
    list(visitor.ask(TEXT))
    visitor.add(data_url(drawing(1)), "b.png")
    visitor.clear()
    assert visitor.waiting == [] and visitor.session.messages == []
    assert "".join(visitor.ask("and ?")) == answer(model, processor, [{"role": "user", "content": "and ?"}])


def test_the_oldest_are_forgotten(visitors, monkeypatch):
    """A server that keeps the cache of every visitor it ever had."""
    monkeypatch.setattr(module, "MAX_VISITORS", 3)
    monkeypatch.setattr(module, "MAX_CACHES", 1)
    names = [visitors.welcome() for _ in range(3)]
    found = [visitors.find(name) for name in names]
    for each in found[:2]:
        each.add(data_url(drawing(0)), "a.png")
        list(each.ask(TEXT))
        each.look(0, 0)
    visitors.find(names[0])
    assert found[0].session._cache is not None and found[1].session._cache is None
    assert found[0]._gaze is not None and found[1]._gaze is None
    visitors.welcome()
    with pytest.raises(ValueError, match="Reload"):
        visitors.find(names[2])  # has only opened the page
    list(visitors.find(visitors.welcome()).ask(TEXT))
    visitors.welcome()
    with pytest.raises(ValueError, match="Reload"):
        visitors.find(names[1])
    for wrong in ("", None, "somebody"):
        with pytest.raises(ValueError, match="Reload"):
            visitors.find(wrong)
    assert visitors.find(names[0]) is found[0]


def test_opened_pages_take_no_conversation(visitors, monkeypatch):
    """Anybody who opens the page often enough, and so ends the conversations of all others."""
    monkeypatch.setattr(module, "MAX_VISITORS", 3)
    talking = visitors.welcome()
    visitors.find(talking).add(data_url(drawing(0)), "a.png")
    for _ in range(10):
        visitors.welcome()
    assert len(visitors.find(talking).waiting) == 1 and len(visitors._visitors) == 3


def test_pictures_of_all_visitors_are_bounded(visitors, monkeypatch):
    """Memory that grows with every visitor's pictures: those who came longest ago are forgotten."""
    names = [visitors.welcome() for _ in range(3)]
    for seed, name in enumerate(names):
        visitors.find(name).add(data_url(drawing(seed)), "a.png")
    list(visitors.find(names[0]).ask(TEXT))  # asked about: still kept
    each = visitors.find(names[0]).kept
    assert each == visitors.find(names[1]).kept > 0
    monkeypatch.setattr(module, "MAX_KEPT", 2 * each)
    visitors.make_room(names[1])
    with pytest.raises(ValueError, match="Reload"):
        visitors.find(names[2])
    assert all(visitors.find(name).kept == each for name in names[:2])
    visitors.make_room(names[1])
    assert len(visitors._visitors) == 2


def test_looks(visitor, model, processor):
    """Heat of another word, another layer or another picture than the one that was chosen."""
    for seed in (0, 1):
        visitor.add(data_url(drawing(seed)), "a.png")
    list(visitor.ask(TEXT))
    given = visitor.session.answers[0]
    words = given.words(processor.tokenizer)
    inputs = processor.apply_chat_template(given.asked, add_generation_prompt=True, tokenize=True, return_dict=True)
    maps = attention_maps(model, inputs, max_new_tokens=NEW_TOKENS, do_sample=False)
    for layer in (None, maps.layers[-1]):
        chosen = "mean" if layer is None else layer
        grids = [maps.grid(image, layer=chosen, head="mean") for image in (0, 1)]
        positions = range(maps.num_given - 1, maps.tokens.shape[1] - 1)
        most = max(float(grid[positions].max()) for grid in grids)
        layers, looks = visitor.look(0, 1, layer)
        assert layers == maps.layers and len(looks) == 2
        assert sum(look.share for look in looks) <= 1 + 1e-5
        for look, grid, image in zip(looks, grids, (0, 1)):
            # The weights behind the choice of a word are at the position before it.
            expected = grid[maps.num_given - 1 + words[1].tokens.start]
            assert look.share == pytest.approx(float(expected.sum()), abs=1e-5)
            heat = np.asarray(look.heat)
            assert heat.shape == (*expected.shape, 4) and look.covered == (1.0, 1.0)
            np.testing.assert_allclose(heat[..., 3], (expected / most).numpy() ** 0.7 * 165, atol=0.51)
            shown = np.asarray(look.picture) / 255
            np.testing.assert_allclose(shown, maps.pixels(image).numpy(), atol=1 / 255)
    for arguments, words_of_error in (((1, 0), "no longer"), ((0, 99), "word"), ((0, 0, 99), "layer")):
        with pytest.raises(ValueError, match=words_of_error):
            visitor.look(*arguments)


def test_looks_without_pictures(visitor):
    """An error of the inside, where an answer has nothing to look at."""
    list(visitor.ask(TEXT))
    with pytest.raises(ValueError, match="images"):
        visitor.look(0, 0)


def test_looks_of_several_blocks_at_a_place():
    """Heat of the first of two blocks, shown as that of their layer; a layer that is offered twice."""
    model = make_model(cross_attention_layers=[1, 1, 3])
    inputs = {"input_ids": token_ids(batch=1), "pixel_values": pixels(batch=1)}
    maps = attention_maps(model, inputs, max_new_tokens=2, do_sample=False)
    gaze = Gaze(maps)
    assert gaze.layers == [1, 3]
    for layer in gaze.layers:
        expected = maps.grid(layer=layer, head="mean")[maps.num_given - 1]
        assert gaze.looks(range(1), layer)[0].share == pytest.approx(float(expected.sum()), abs=1e-5)
        heat = np.asarray(gaze.looks(range(2), layer)[0].heat)[..., 3]
        both = maps.grid(layer=layer, head="mean")[maps.num_given - 1 : -1]
        opacity = (both.mean(dim=0) / both.max()).numpy() ** 0.7 * 165
        np.testing.assert_allclose(heat, opacity, atol=0.51)


def test_looks_need_patches():
    """Heat on a picture whose tokens lie nowhere on it."""
    perceiver = {"num_latents": 4, "num_hidden_layers": 1}
    blocks = {"context_size": vision_config().hidden_size}
    model = make_model(connector_type="perceiver", perceiver_config=perceiver, cross_attention_config=blocks)
    inputs = {"input_ids": token_ids(batch=1), "pixel_values": pixels(batch=1)}
    with pytest.raises(ValueError, match="perceiver"):
        Gaze(attention_maps(model, inputs))


def test_a_text_only_model_has_no_pictures(model, chat_folder):
    """A page for a model without an image processor that fails at its first picture."""
    tokenizer = AutoTokenizer.from_pretrained(chat_folder)
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    visitors = Visitors(model, tokenizer, max_new_tokens=2)
    visitor = visitors.find(visitors.welcome())
    with pytest.raises(ValueError, match="cannot read pictures"):
        visitor.add(data_url(drawing(0)), "a.png")
    assert "".join(visitor.ask("a dog")) is not None
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match="chat template"):
        Visitors(model, tokenizer)


SIZES = {
    "small": ({"size": {"height": 20, "width": 60}}, (720, 240), (20, 60), "white"),
    "square": ({"size": {"height": 224, "width": 224}}, (672, 672), (224, 224), "black"),
    "large": ({"size": {"height": 1024, "width": 1024}}, (1024, 1024), (1024, 1024), "black"),
}


@pytest.mark.parametrize("case", SIZES)
def test_canvases(case, model):
    """A drawing that the image processor distorts, or whose lines fade when it is scaled down."""
    options, canvas, reads, ink = SIZES[case]
    chosen = drawing_for(model.config, SiglipImageProcessorPil(**options))
    assert (chosen.width, chosen.height) == canvas and chosen.reads == reads and chosen.ink == ink
    assert chosen.paper == {"white": "black", "black": "white"}[ink]
    assert chosen.width / chosen.height == reads[1] / reads[0]
    assert chosen.pen >= 1.5 * chosen.width / reads[1] - 0.1


def test_canvases_that_are_asked_for(model):
    """Settings without effect."""
    processor = SiglipImageProcessorPil(size={"height": 32, "width": 32})
    chosen = drawing_for(model.config, processor, (300, 100), "#00f", "ivory")
    assert chosen[:4] == (300, 100, "#00f", "ivory")
    assert chosen.patches == (4, 4)  # of the tower's 8 pixels each


def test_sizes_of_image_processors(model):
    """A canvas of the wrong shape for processors that name one edge, or crop."""
    processor = SiglipImageProcessorPil()
    for size, crop, expected in (
        ({"shortest_edge": 256}, {"height": 224, "width": 224}, (224, 224)),
        ({"shortest_edge": 48}, None, (48, 48)),
    ):
        processor.size, processor.crop_size, processor.do_center_crop = size, crop, crop is not None
        assert drawing_for(model.config, processor).reads == expected
