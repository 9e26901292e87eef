"""The page in a real browser: headless Chromium of the system, driven by playwright."""

import base64
import io
import math
import shutil

import pytest
from digit_model import QUESTION, WORDS, make_digit_model
from PIL import Image


pytest.importorskip("gradio", reason="the page needs Gradio: pip install -e '.[browser]'")
pytest.importorskip("playwright", reason="the browser is driven by playwright: pip install -e '.[browser]'")
from playwright.sync_api import expect, sync_playwright
from web_server import nobody_answers, served, slow


BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FOUND = next((found for name in BROWSERS if (found := shutil.which(name))), None)
pytestmark = pytest.mark.skipif(
    FOUND is None, reason=f"no browser is installed: none of {', '.join(BROWSERS)} (Debian: apt-get install chromium)"
)
expect.set_options(timeout=30_000)  # busy machines
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
        allowed = (server[0], "data:")
        page.on("request", lambda request: None if request.url.startswith(allowed) else wrong.append(request.url))
        page.goto(server[0])
        expect(page.locator("canvas")).to_be_visible()
        return page

    yield visit
    for context in contexts:
        context.close()
    assert not wrong


def draw(page, digit):
    box = page.locator("canvas").bounding_box()
    points = [(box["x"] + x * box["width"], box["y"] + y * box["height"]) for x, y in STROKES[digit]]
    page.mouse.move(*points[0])
    page.mouse.down()
    for point in points[1:]:
        page.mouse.move(*point, steps=3)
    page.mouse.up()


def ask(page, text=QUESTION):
    page.get_by_label("Your question").fill(text)
    page.get_by_label("Your question").press("Enter")


def answers(page):
    return page.locator(".answer:not(.waiting)")


def shown_picture(source):
    return Image.open(io.BytesIO(base64.b64decode(source.partition(",")[2])))


@pytest.mark.parametrize("size", ["desktop", "phone"])
def test_a_drawn_digit_is_answered(size, visit, server):
    """A drawing that reaches the model empty, inverted or distorted; a word that shows nothing."""
    viewport = {"desktop": {"width": 1200, "height": 800}, "phone": {"width": 390, "height": 844}}[size]
    page = visit(server, viewport=viewport)
    for number, digit in enumerate(WORDS):
        if number:
            page.get_by_role("button", name="New chat").click()
            expect(page.locator("#welcome")).to_be_visible()
        draw(page, digit)
        page.get_by_role("button", name=QUESTION).click()
        expect(answers(page)).to_have_text(f"a {digit} .")
        expect(page.locator("#hint")).to_have_js_property("hidden", False)  # the canvas is empty again
        word = page.locator(".word", has_text=digit)
        word.click()
        expect(page.locator("figure b")).to_have_text(digit)
        expect(word).to_have_attribute("aria-pressed", "true")
        picture, heat = (page.locator(f".seen img:nth-child({child})").get_attribute("src") for child in (1, 2))
        assert shown_picture(picture).size == (16, 16) and shown_picture(heat).size == (4, 4)
        assert shown_picture(picture).convert("L").getextrema()[1] > 128 > shown_picture(picture).getpixel((0, 0))[0]
        before = heat
        page.get_by_label("Layer").select_option(index=1)
        expect(page.locator(".seen .heat")).not_to_have_attribute("src", before)
        word.click()
        expect(page.locator("figure")).to_have_count(0)
    # Nothing is cut off, and nothing needs scrolling to the side.
    box = page.get_by_label("Your question").bounding_box()
    assert box["x"] >= 0 and box["x"] + box["width"] <= viewport["width"]
    assert box["y"] + box["height"] <= viewport["height"]


def test_several_pictures_and_turns(visit, server):
    """A picture that replaces the one before, or a second turn that forgets the first."""
    page = visit(server)
    draw(page, "zero")
    page.get_by_role("button", name="Add another").click()
    expect(page.locator("#tray img")).to_have_count(1)
    buffer = io.BytesIO()
    Image.new("RGB", (50, 40), "navy").save(buffer, "JPEG")
    page.set_input_files("#files", {"name": "a.jpg", "mimeType": "image/jpeg", "buffer": buffer.getvalue()})
    expect(page.locator("#tray img")).to_have_count(2)
    page.get_by_label("Remove picture 2").click()
    expect(page.locator("#tray img")).to_have_count(1)
    draw(page, "one")
    ask(page)
    expect(answers(page)).to_have_count(1)
    expect(page.locator(".question img")).to_have_count(2)
    expect(page.locator("#tray img")).to_have_count(0)
    ask(page)
    expect(answers(page)).to_have_count(2)
    page.locator(".answer").nth(1).locator(".word").first.click()
    expect(page.locator(".seen")).to_have_count(2)
    expect(page.locator(".seen").first).to_contain_text("% of the attention")


def test_a_dropped_picture(visit, server):
    """A picture that the browser opens in place of the page."""
    page = visit(server)
    buffer = io.BytesIO()
    Image.new("RGB", (16, 16), "white").save(buffer, "PNG")
    script = """(node, data) => {
        const bytes = Uint8Array.from(atob(data), (letter) => letter.charCodeAt(0));
        const transfer = new DataTransfer();
        transfer.items.add(new File([bytes], "a.png", { type: "image/png" }));
        node.dispatchEvent(new DragEvent("drop", { dataTransfer: transfer, bubbles: true, cancelable: true }));
    }"""
    page.locator("canvas").evaluate(script, base64.b64encode(buffer.getvalue()).decode())
    expect(page.locator("#tray img")).to_have_count(1)


def test_errors_get_a_message(visit, server, monkeypatch):
    """A broken file that nobody hears of, a page or a server that stays broken, a drawing that is lost."""
    page = visit(server)
    page.set_input_files("#files", {"name": "broken.png", "mimeType": "image/png", "buffer": b"\x89PNG\r\n\x1a\nnot"})
    expect(page.locator("#notice")).to_contain_text("broken.png cannot be read as a picture")
    page.set_input_files("#files", {"name": "notes.txt", "mimeType": "text/plain", "buffer": b"hello"})
    expect(page.locator("#notice")).to_contain_text("notes.txt cannot be read")
    page.get_by_role("button", name="Ask", exact=True).click()
    expect(page.locator("#notice")).to_contain_text("Write a question")
    draw(page, "one")
    with monkeypatch.context() as broken:
        broken.setattr(server[1], "generate", lambda **_: 1 / 0)
        ask(page)
        expect(page.locator("#notice")).to_contain_text("Something went wrong on the server")
    expect(page.locator(".answer")).to_have_count(0)
    expect(page.locator("#tray img")).to_have_count(1)
    assert page.get_by_label("Your question").input_value() == QUESTION
    page.get_by_label("Your question").press("Enter")
    expect(answers(page)).to_have_text("a one .")
    expect(page.locator("#notice")).to_be_hidden()


def test_visitors_do_not_mix(visit, server):
    """The picture, the question or the answer of somebody else."""
    pages = [visit(server), visit(server)]
    for page, digit in zip(pages, WORDS):
        draw(page, digit)
    for page in pages:
        ask(page)
    for page, digit in zip(pages, WORDS):
        expect(answers(page)).to_have_text(f"a {digit} .")
        expect(page.locator(".question")).to_have_count(1)


def test_stop_and_close(visit, endless):
    """A model that goes on for a tab that is closed; a button that stops nothing."""
    _, model, _ = endless
    with slow(model, 0.05) as steps:
        page = visit(endless)
        ask(page)
        expect(page.locator(".answer.waiting")).not_to_be_empty()
        page.get_by_role("button", name="Stop").click()
        expect(answers(page)).to_have_count(1)
        assert nobody_answers() and len(steps) < 200
        stopped = len(steps)
        ask(page)
        expect(page.locator(".answer.waiting")).not_to_be_empty()
        page.close()
        assert nobody_answers() and len(steps) - stopped < 200
    page = visit(endless)
    ask(page)
    expect(answers(page)).to_have_count(1)
