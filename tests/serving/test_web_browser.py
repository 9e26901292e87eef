"""The page in a real browser: headless Chromium of the system, driven by playwright."""

import io
import math
import shutil

import pytest
from PIL import Image

from helpers.models.digit_model import QUESTION, WORDS, make_digit_model


pytest.importorskip("gradio", reason="the page needs Gradio: pip install -e '.[browser]'")
pytest.importorskip("playwright", reason="the browser is driven by playwright: pip install -e '.[browser]'")
from playwright.sync_api import expect, sync_playwright

from helpers.processes.web_server import nobody_answers, served, slow


BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FOUND = next((found for name in BROWSERS if (found := shutil.which(name))), None)
pytestmark = pytest.mark.skipif(
    FOUND is None, reason=f"no browser is installed: none of {', '.join(BROWSERS)} (Debian: apt-get install chromium)"
)
expect.set_options(timeout=120_000)  # busy machines
# Lines on the unit square.
RING = [
    (0.5 + 0.22 * math.cos(angle / 20 * math.tau), 0.5 + 0.28 * math.sin(angle / 20 * math.tau)) for angle in range(21)
]
STROKES = {"zero": RING, "one": [(0.5, 0.2), (0.5, 0.5), (0.5, 0.8)]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_digit_model(tmp_path_factory.mktemp("digits"))


@pytest.fixture(scope="module")
def server(folder):
    greedy = {"max_new_tokens": 6, "do_sample": False}
    with served(folder, title="Digits", questions=[QUESTION], generate_kwargs=greedy) as found:
        yield found


@pytest.fixture(scope="module")
def endless(folder):
    with served(folder, questions=[QUESTION], generate_kwargs={"max_new_tokens": 200, "min_new_tokens": 200}) as found:
        yield found


@pytest.fixture(scope="module")
def browser():
    with sync_playwright() as playwright:
        yield playwright.chromium.launch(executable_path=FOUND, args=["--no-sandbox"])


@pytest.fixture
def visit(browser):
    """Opens the page as a new visitor. Fails for errors on the page, and for requests to other hosts."""
    contexts, wrong = [], []

    def visit(server, **options):
        context = browser.new_context(**options)
        contexts.append(context)
        page = context.new_page()
        page.on("pageerror", lambda error: wrong.append(str(error)))
        allowed = (server[0], "data:", "blob:")
        page.on("request", lambda request: None if request.url.startswith(allowed) else wrong.append(request.url))
        page.goto(server[0])
        expect(page.locator("#canvas canvas").first).to_be_visible()
        expect(page.get_by_label("Brush", exact=True).first).to_be_visible()
        return page

    yield visit
    for context in contexts:
        context.close()
    assert not wrong


def draw(page, digit):
    """Draws on the canvas, which is square and stands in the middle of its part of the page."""
    box = page.locator("#canvas canvas").first.bounding_box()
    side = 0.8 * min(box["width"], box["height"])
    left, top = box["x"] + (box["width"] - side) / 2, box["y"] + (box["height"] - side) / 2
    points = [(left + x * side, top + y * side) for x, y in STROKES[digit]]
    page.mouse.move(*points[0])
    page.mouse.down()
    for point in points[1:]:
        page.mouse.move(*point, steps=2)
    page.mouse.up()


def ask(page, text=QUESTION):
    page.get_by_test_id("textbox").fill(text)
    page.get_by_test_id("textbox").press("Enter")


def answers(page):
    return page.locator("#chat").get_by_test_id("bot")


def idle(page):
    """Waits until the answer is there."""
    expect(page.get_by_test_id("submit-button")).to_be_visible()


def add(page, name, content):
    page.locator("#box input[type=file]").set_input_files({"name": name, "mimeType": "image/png", "buffer": content})


def png(colour):
    buffer = io.BytesIO()
    Image.new("RGB", (50, 40), colour).save(buffer, "PNG")
    return buffer.getvalue()


@pytest.mark.parametrize("size", ["desktop", "phone"])
def test_a_drawn_digit_is_answered(size, visit, server):
    """A drawing that reaches the model empty, inverted or distorted; a word that shows nothing."""
    viewport = {"desktop": {"width": 1200, "height": 800}, "phone": {"width": 390, "height": 844}}[size]
    page = visit(server, viewport=viewport)
    for number, digit in enumerate(WORDS):
        if number:
            page.locator("#chat").get_by_label("Clear").click()
            expect(answers(page)).to_have_count(0)
        draw(page, digit)
        page.get_by_role("button", name=QUESTION).click()
        expect(answers(page)).to_have_text(f"a {digit} .")
        page.locator("#words").get_by_text(digit).click()
        shown = page.locator("#looked img").first
        expect(shown).to_be_visible()
        before = shown.get_attribute("src")
        picture = Image.open(io.BytesIO(page.request.get(before).body()))
        assert picture.size == (320, 320) and picture.convert("L").getextrema()[1] > 128
        page.get_by_label("Layer").click()
        page.get_by_role("option", name=f"layer {number}").click()  # another one than before
        expect(shown).not_to_have_attribute("src", before)
    # Nothing needs scrolling to the side.
    assert page.evaluate("document.documentElement.scrollWidth") <= viewport["width"]


def test_several_pictures_and_turns(visit, server):
    """A picture that replaces the one before, or a second turn that forgets the first."""
    page = visit(server)
    draw(page, "zero")
    add(page, "a.png", png("navy"))
    expect(page.locator("#box img")).to_have_count(1)
    ask(page)
    expect(answers(page)).to_have_count(1)
    expect(page.locator("#chat").get_by_test_id("user").locator("img")).to_have_count(2)
    idle(page)
    expect(page.locator("#box img")).to_have_count(0)
    ask(page)
    expect(answers(page)).to_have_count(2)
    expect(page.locator("#chat").get_by_test_id("user").locator("img")).to_have_count(2)
    idle(page)
    page.locator("#words").get_by_role("button").first.click()
    expect(page.locator("#looked")).to_contain_text("% of the attention")


def test_errors_get_a_message(visit, server, monkeypatch):
    """A broken file that nobody hears of, a page or a server that stays broken, a drawing that is lost."""
    page = visit(server)
    add(page, "broken.png", b"\x89PNG\r\n\x1a\nnot")
    expect(page.locator("#box img")).to_have_count(1)
    ask(page)
    expect(page.get_by_test_id("toast-text").first).to_contain_text("broken.png cannot be read as an image")
    page.reload()
    expect(page.locator("#canvas canvas").first).to_be_visible()
    draw(page, "one")
    with monkeypatch.context() as broken:
        broken.setattr(server[1], "generate", lambda **_: 1 / 0)
        ask(page)
        expect(page.get_by_test_id("toast-text").first).to_contain_text("Something went wrong on the server")
    expect(answers(page)).to_have_count(0)
    expect(page.get_by_test_id("textbox")).to_have_value(QUESTION)
    page.get_by_test_id("textbox").press("Enter")
    expect(answers(page)).to_have_text("a one .")


def test_visitors_do_not_mix(visit, server):
    """The picture, the question or the answer of somebody else."""
    pages = [visit(server), visit(server)]
    for page, digit in zip(pages, WORDS):
        draw(page, digit)
    for page in pages:
        ask(page)
    for page, digit in zip(pages, WORDS):
        expect(answers(page)).to_have_text(f"a {digit} .")


def test_stop_and_close(visit, endless):
    """A model that goes on for a tab that is closed; a button that stops nothing."""
    _, model, _ = endless
    with slow(model, 0.05) as steps:
        page = visit(endless)
        ask(page)
        expect(answers(page)).not_to_be_empty()
        page.locator("#box .stop-button").click()
        idle(page)
        assert nobody_answers() and len(steps) < 200
        stopped = len(steps)
        ask(page)
        expect(answers(page)).to_have_count(2)
        page.close()
        assert nobody_answers() and len(steps) - stopped < 200
    page = visit(endless)
    ask(page)
    expect(answers(page)).to_have_count(1)
