"""What visitors of a page draw and ask, and where the model looked: attention weights, not explanations."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from PIL import Image

from ..maps.answer_maps import looks
from ..maps.attention_maps import AttentionMaps
from ..processing.chat_templates import check_template
from ..processing.image_reading import open_image, read_image
from .chat_session import Answer, ChatSession


if TYPE_CHECKING:
    from ..modeling_xattn import XAttnForConditionalGeneration

MAX_VISITORS = 256  # conversations that are kept
MAX_CACHES = 8  # conversations whose cache of the text is kept
MAX_PICTURES = 8  # of one message
MAX_BYTES = 20 * 2**20  # of a picture's file
MAX_PIXELS = 64 * 2**20  # a small file may unpack to gigabytes
MAX_KEPT = 2**30  # bytes of all pictures that are kept, for all visitors
MAX_SIDE = 2048  # larger pictures are scaled down: no model reads more, and they are kept while the conversation lasts

# The image processor scales a drawing down. So the canvas has the picture's ratio of width to height, a whole number of
# pixels for each of the picture, and a pen about 1.5 of these wide: thinner lines fade, thicker ones close the loops of
# small digits.
CANVAS_SIDE = 720  # pixels of the longer side, at least half of it
SMALL = 64  # pictures of fewer pixels on the shorter side are drawn white on black, like the usual data sets of digits


class Drawing(NamedTuple):
    """How visitors draw."""

    blank: Image.Image
    ink: str  # colour of lines, as in CSS
    pen: float  # width of lines in pixels
    reads: tuple[int, int]  # width and height of the picture that the model reads


def drawing_for(
    image_processor: Any, canvas: tuple[int, int] | None = None, ink: str | None = None, paper: str | None = None
) -> Drawing:
    """Chooses a canvas. Arguments as in [`build_page`]. The image processor tells what the model reads of a square."""
    made = image_processor(Image.new("RGB", (CANVAS_SIDE, CANVAS_SIDE)), return_tensors="pt")
    height, width = made["pixel_values"].shape[-2:]
    scale = max(1, round((canvas[0] / width) if canvas is not None else (CANVAS_SIDE / max(height, width))))
    size = (canvas[0], canvas[1]) if canvas is not None else (width * scale, height * scale)
    default_ink, default_paper = ("white", "black") if min(height, width) < SMALL else ("black", "white")
    blank = Image.new("RGB", size, paper or default_paper)
    return Drawing(blank, ink or default_ink, max(1.5 * scale, 0.02 * min(size)), (width, height))


def read_picture(given: str | Image.Image) -> Image.Image:
    """Reads the file or the drawing of a visitor. Raises a `ValueError` for anything else, or for a too large one."""
    name = Path(given).name if isinstance(given, str) else "The drawing"
    try:
        opened = open_image(Path(given), name) if isinstance(given, str) else given  # a file, never an address
        if opened.width * opened.height > MAX_PIXELS:
            raise ValueError(f"Expected at most {MAX_PIXELS} pixels, got {opened.width} x {opened.height}.")
        picture = read_image(opened, name)
    except ValueError as error:
        raise ValueError(
            f"{name} cannot be read as a picture of at most {MAX_PIXELS // 10**6} megapixels. Try a PNG or JPEG file."
        ) from error
    picture.thumbnail((MAX_SIDE, MAX_SIDE))
    return picture


class Visitor:
    """One visitor: a conversation, and what the page shows of it.

    Attributes:
        session ([`ChatSession`]): the conversation.
        shown (`list[dict]`): its messages, as the page shows them.
        chosen (`tuple[int, int | None]`): index of the answer whose words are shown, and of the word that was clicked.
    """

    def __init__(self, session: ChatSession):
        self.session = session
        self.shown: list[dict[str, str]] = []
        self.chosen: tuple[int, int | None] = (0, None)
        self._maps: tuple[Answer, AttentionMaps] | None = None  # of the answer that was looked at last
        self._stop = threading.Event()

    @property
    def kept(self) -> int:
        """Bytes of the pictures in the conversation."""
        contents = [message["content"] for message in self.session.messages if isinstance(message["content"], list)]
        return _bytes_of([part["image"] for content in contents for part in content if part["type"] == "image"])

    def ask(self, text: str, images: list[Image.Image]) -> Iterator[str]:
        """Yields an answer piece by piece. If the iterator is closed, the answer ends after the current token."""
        self._stop = threading.Event()
        yield from self.session.stream(text, images, self._stop)

    def stop(self) -> None:
        """Ends the answer after the current token."""
        self._stop.set()

    def look(self, layer: int | str = "mean") -> list[tuple[Image.Image, float]]:
        """Where the model looked when it generated the chosen word, as [`looks`]."""
        answer, word = self.session.answers[self.chosen[0]], self.chosen[1]
        words = answer.words(self.session.tokenizer)
        if not isinstance(word, int) or not 0 <= word < len(words):
            raise ValueError(f"Expected a word from 0 to {len(words) - 1}, got {word}.")
        if self._maps is None or self._maps[0] is not answer:
            self._maps = answer, self.session.maps(answer)
        return looks(self._maps[1], words[word].tokens, layer)

    def drop_caches(self) -> None:
        """Frees memory. What was in it is computed again where it is needed."""
        self.session.drop_cache()
        self._maps = None


def _bytes_of(pictures: list[Image.Image]) -> int:
    return sum(3 * picture.width * picture.height for picture in pictures)


class Visitors:
    """All visitors of a page. Those who asked longest ago are forgotten first. Arguments as in [`ChatSession`]."""

    def __init__(self, model: XAttnForConditionalGeneration, processor: Any, system: str | None = None, **options: Any):
        self._arguments = (model, processor, system)
        self._options = options
        self._visitors: OrderedDict[str, Visitor] = OrderedDict()
        self._lock = threading.Lock()
        check_template(processor)

    def find(self, name: str) -> Visitor:
        """Returns the visitor of a name. Raises a `ValueError` for one that is not known, or no longer."""
        visitor = self._visitors.get(name)
        if visitor is None:
            raise ValueError("This conversation is no longer kept. Begin a new one.")
        return visitor

    def forget(self, name: str) -> None:
        """Ends the answer and the conversation of a visitor, if there is one."""
        with self._lock:
            visitor = self._visitors.pop(name, None)
        if visitor is not None:
            visitor.stop()

    def enter(self, name: str, begun: bool, text: str, pictures: list[Image.Image]) -> Visitor:
        """Returns the visitor who asks next, and forgets others until there is room for the pictures.

        Only one visitor may ask at a time. A conversation begins here, unless it has `begun`.

        Raises:
            ValueError: as [`find`]; without a question; for too many pictures in a message or in one conversation.
        """
        if not text:
            raise ValueError("Write a question first.")
        if len(pictures) > MAX_PICTURES:
            raise ValueError(f"A message may have {MAX_PICTURES} pictures.")
        with self._lock:
            visitor = self.find(name) if begun else Visitor(ChatSession(*self._arguments, **self._options))
            if visitor.kept + _bytes_of(pictures) > MAX_KEPT:
                raise ValueError("This conversation has as many pictures as the page keeps. Begin a new one.")
            self._visitors[name] = visitor
            self._visitors.move_to_end(name)
            kept = {known: each.kept for known, each in self._visitors.items()}
            total = sum(kept.values()) + _bytes_of(pictures)
            for known in list(kept)[:-1]:
                if len(self._visitors) > MAX_VISITORS or (total > MAX_KEPT and kept[known]):
                    total -= kept[known]
                    del self._visitors[known]
            for each in list(self._visitors.values())[:-MAX_CACHES]:
                each.drop_caches()
            return visitor
