"""The conversations behind the page, without Gradio: visitors, what they draw on, and where the model looked."""

import io

import pytest
from PIL import Image
from transformers import (
    AutoModelForImageTextToText,
    AutoProcessor,
    AutoTokenizer,
    CLIPImageProcessorPil,
    SiglipImageProcessorPil,
)

from helpers.models.chat_models import NEW_TOKENS, answer, drawing, question
from hf_xattn import attention_maps
from hf_xattn.serving import web_visitors as module
from hf_xattn.serving.web_visitors import Visitors, drawing_for, read_picture


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


def ask(visitors, name, *pictures, text=TEXT, begun=False):
    """Begins a conversation, or goes on with it."""
    visitor = visitors.enter(name, begun, text, list(pictures))
    return visitor, "".join(visitor.ask(text, list(pictures)))


def test_visitors_do_not_mix(visitors, model, processor):
    """A picture or a question of one visitor in the conversation of another, while both are being answered."""
    pictures = [[drawing(0)], [drawing(1)]]
    given = [visitors.enter(name, False, TEXT, each).ask(TEXT, each) for name, each in zip("ab", pictures)]
    said = [next(pieces) for pieces in given]
    said = [first + "".join(pieces) for first, pieces in zip(said, given)]
    assert said == [answer(model, processor, [question(TEXT, drawing(seed))]) for seed in (0, 1)]
    assert said[0] != said[1] and visitors.find("a").kept == visitors.find("b").kept == 3 * 32 * 32


def png(picture):
    buffer = io.BytesIO()
    picture.save(buffer, "PNG")
    return buffer.getvalue()


@pytest.mark.parametrize("content", [b"\x89PNG\r\n\x1a\nnot", b"hello", b"", png(Image.new("1", (8200, 8200)))[:-99]])
def test_what_is_not_a_picture(content, tmp_path):
    """A broken file, or one that unpacks to gigabytes, that ends the conversation with an error of the inside."""
    (tmp_path / "a.png").write_bytes(content)
    with pytest.raises(ValueError, match="^a.png cannot be read as an image of at most 67 megapixels"):
        read_picture(str(tmp_path / "a.png"))


def test_a_visitor_cannot_fill_the_memory(visitors, tmp_path, monkeypatch):
    """A visitor who fills the memory of the server."""
    monkeypatch.setattr(module, "MAX_PIXELS", 256 * 128)
    Image.new("RGB", (257, 128)).save(tmp_path / "bomb.png")
    for source in (str(tmp_path / "bomb.png"), Image.new("RGB", (257, 128))):
        with pytest.raises(ValueError, match="megapixels"):
            read_picture(source)
    monkeypatch.setattr(module, "MAX_SIDE", 64)
    Image.new("RGB", (256, 128), "red").save(tmp_path / "wide.png")
    assert read_picture(str(tmp_path / "wide.png")).size == (64, 32)
    monkeypatch.setattr(module, "MAX_PICTURES", 2)
    with pytest.raises(ValueError, match="2 images"):
        visitors.enter("a", False, TEXT, [drawing(seed) for seed in range(3)])


def test_a_failed_question_leaves_nothing(visitors):
    """A conversation that ends with an answer that failed."""
    visitor, _ = ask(visitors, "a", drawing(0))
    with pytest.raises(ValueError, match="question"):
        visitors.enter("a", True, "", [])
    visitor.session.options["max_new_tokens"] = 10**6
    with pytest.raises(ValueError, match="Start a new conversation"):
        ask(visitors, "a", drawing(1), begun=True)
    visitor.session.options["max_new_tokens"] = NEW_TOKENS
    assert len(visitor.session.messages) == 2 and ask(visitors, "a", begun=True)[0] is visitor


def test_a_new_conversation_forgets_the_old_one(visitors, model, processor):
    """Messages of before in a new conversation; an answer that goes on."""
    visitor, _ = ask(visitors, "a", drawing(0))
    visitor = visitors.enter("a", True, TEXT, [])
    pieces = visitor.ask(TEXT, [])
    next(pieces)
    visitor.stop()
    list(pieces)
    assert len(visitor.session.answers) == 2
    visitors.forget("a")
    visitors.forget("nobody")
    with pytest.raises(ValueError, match="no longer kept"):
        ask(visitors, "a", begun=True)
    assert ask(visitors, "a", text="and ?")[1] == answer(model, processor, [{"role": "user", "content": "and ?"}])


def test_the_oldest_are_forgotten(visitors, monkeypatch):
    """A server that keeps the cache of every visitor it ever had."""
    monkeypatch.setattr(module, "MAX_VISITORS", 3)
    monkeypatch.setattr(module, "MAX_CACHES", 1)
    found = [ask(visitors, name, drawing(0))[0] for name in "abc"]
    found[2].chosen = 0, 0
    found[2].look()
    ask(visitors, "a", begun=True)
    assert found[0].session._cache is not None
    assert all(each.session._cache is None and each._maps is None for each in found[1:])
    ask(visitors, "d")
    for wrong in ("b", "", None, "somebody"):
        with pytest.raises(ValueError, match="no longer kept"):
            visitors.find(wrong)
    assert visitors.find("a") is found[0] and visitors.find("c") is found[2]


def test_pictures_of_all_visitors_are_bounded(visitors, monkeypatch):
    """Memory that grows with every visitor's pictures: those who came longest ago are forgotten."""
    for name in "abc":
        ask(visitors, name, *([] if name == "a" else [drawing(0)]))
    each = visitors.find("b").kept
    assert each == visitors.find("c").kept > 0 == visitors.find("a").kept
    monkeypatch.setattr(module, "MAX_KEPT", 2 * each)
    ask(visitors, "d", drawing(1))
    with pytest.raises(ValueError, match="no longer kept"):
        visitors.find("b")
    assert visitors.find("a").kept == 0, "who has no pictures gives no room"
    with pytest.raises(ValueError, match="as many images as the page keeps"):
        ask(visitors, "d", drawing(2), drawing(3), begun=True)
    assert visitors.find("c").kept == each


def test_heat_is_that_of_the_chosen_word_and_layer(visitors, model, processor):
    """Heat of another word or another layer than the one that was chosen."""
    visitor, _ = ask(visitors, "a", drawing(0), drawing(1))
    given = visitor.session.answers[0]
    words = given.words(processor.tokenizer)
    inputs = processor.apply_chat_template(given.asked, add_generation_prompt=True, tokenize=True, return_dict=True)
    maps = attention_maps(model, inputs, max_new_tokens=NEW_TOKENS, do_sample=False)
    for layer in ("mean", maps.layers[-1]):
        for word in (0, 1):
            visitor.chosen = 0, word
            looks = visitor.look(layer)
            # The weights behind the choice of a word are at the position before it.
            position = maps.num_given - 1 + words[word].tokens.start
            for image, (picture, share) in enumerate(looks):
                expected = maps.grid(image, layer=layer, head="mean")[position]
                assert share == pytest.approx(float(expected.sum()), abs=1e-5)
                assert picture.size == (320, 320)
    for wrong in ((0, 99), (0, -1), (0, None)):
        visitor.chosen = wrong
        with pytest.raises(ValueError, match="word"):
            visitor.look()
    visitor.chosen = 0, 0
    with pytest.raises(ValueError, match="layer"):
        visitor.look(99)


def test_looks_without_pictures(visitors):
    """An error of the inside, where an answer has nothing to look at."""
    visitor, _ = ask(visitors, "a")
    visitor.chosen = 0, 0
    with pytest.raises(ValueError, match="images"):
        visitor.look()


def test_a_text_only_model(model, chat_folder):
    """A page for a model without an image processor that fails at its first question."""
    tokenizer = AutoTokenizer.from_pretrained(chat_folder)
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    visitors = Visitors(model, tokenizer, max_new_tokens=2)
    assert ask(visitors, "a", text="a dog")[1] is not None
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match="chat template"):
        Visitors(model, tokenizer)


SIZES = {
    "small": ({"size": {"height": 20, "width": 60}}, (720, 240), (60, 20), "white"),
    "square": ({"size": {"height": 224, "width": 224}}, (672, 672), (224, 224), "black"),
    "large": ({"size": {"height": 1024, "width": 1024}}, (1024, 1024), (1024, 1024), "black"),
}


@pytest.mark.parametrize("case", SIZES)
def test_canvases_have_the_shape_that_the_processor_reads(case):
    """A drawing that the image processor distorts, or whose lines fade when it is scaled down."""
    options, canvas, reads, ink = SIZES[case]
    chosen = drawing_for(SiglipImageProcessorPil(**options))
    assert chosen.blank.size == canvas and chosen.reads == reads and chosen.ink == ink
    assert chosen.blank.getpixel((0, 0)) == {"white": (0, 0, 0), "black": (255, 255, 255)}[ink]
    assert chosen.pen >= 1.5 * canvas[0] / reads[0] - 0.1


def test_canvases_that_are_asked_for():
    """Settings without effect."""
    processor = SiglipImageProcessorPil(size={"height": 32, "width": 32})
    chosen = drawing_for(processor, (300, 100), "#00f", "ivory")
    assert chosen.blank.size == (300, 100) and chosen.blank.getpixel((0, 0)) == (255, 255, 240)
    assert chosen.ink == "#00f"
    with pytest.raises(ValueError, match="color"):
        drawing_for(processor, paper="no colour")


def test_sizes_of_image_processors():
    """A canvas of the wrong shape for processors that name one edge, or crop."""
    for size, crop, expected in (
        ({"shortest_edge": 256}, {"height": 224, "width": 224}, (224, 224)),
        ({"shortest_edge": 48}, None, (48, 48)),
    ):
        options = {"size": size, "crop_size": crop, "do_center_crop": crop is not None}
        assert drawing_for(CLIPImageProcessorPil(**options)).reads == expected
