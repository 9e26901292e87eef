"""The visitors of the web page: their drawings, their conversations, and where the model looked.

The page shows attention weights, which say where the model has looked. They do not explain an answer.
"""

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
    from transformers.image_processing_utils import BaseImageProcessor

    from ..modeling_xattn import XAttnForConditionalGeneration

MAX_VISITORS = 256  # conversations that are kept
MAX_CACHES = 8  # conversations whose cache of the text is kept
MAX_PICTURES = 8  # images of one message
MAX_BYTES = 20 * 2**20  # bytes of an image file
MAX_PIXELS = 64 * 2**20  # pixels of an image. A small file may unpack to gigabytes.
MAX_KEPT = 2**30  # bytes of all images that are kept, for all visitors
MAX_SIDE = 2048  # Larger images are scaled down. No model reads more, and they are kept during the conversation.

# The image processor scales a drawing down to the image that the model reads. So the canvas has the same ratio of width
# to height, and a whole number of pixels for each pixel of that image. The pen is about 1.5 pixels of that image wide:
# thinner lines fade, and thicker lines close the loops of small digits.
CANVAS_SIDE = 720  # The longer side of the canvas has about this number of pixels, and at least half of it.
SMALL = 64  # If the shorter side has fewer pixels, lines are white on black, as in the usual data sets of digits.


class Drawing(NamedTuple):
    """The canvas on which visitors draw."""

    blank: Image.Image  # the empty canvas
    ink: str  # colour of lines, as in CSS
    pen: float  # width of lines in pixels
    reads: tuple[int, int]  # width and height of the image that the model reads


def drawing_for(
    image_processor: BaseImageProcessor,
    canvas: tuple[int, int] | None = None,
    ink: str | None = None,
    paper: str | None = None,
) -> Drawing:
    """Chooses a canvas. The arguments are those of [`build_page`].

    The image processor gets a square image. The shape of its result is the shape of the canvas.
    """
    made = image_processor(Image.new("RGB", (CANVAS_SIDE, CANVAS_SIDE)), return_tensors="pt")
    height, width = made["pixel_values"].shape[-2:]
    scale = max(1, round((canvas[0] / width) if canvas is not None else (CANVAS_SIDE / max(height, width))))
    size = (canvas[0], canvas[1]) if canvas is not None else (width * scale, height * scale)
    default_ink, default_paper = ("white", "black") if min(height, width) < SMALL else ("black", "white")
    blank = Image.new("RGB", size, paper or default_paper)
    return Drawing(blank, ink or default_ink, max(1.5 * scale, 0.02 * min(size)), (width, height))


def read_picture(given: str | Image.Image) -> Image.Image:
    """Reads the file or the drawing of a visitor.

    Raises:
        ValueError: for a file that is not an image, and for an image that is too large.
    """
    name = Path(given).name if isinstance(given, str) else "The drawing"
    try:
        # A `Path` is always read as a file, and never as a web address.
        opened = open_image(Path(given), name) if isinstance(given, str) else given
        if opened.width * opened.height > MAX_PIXELS:
            raise ValueError(f"Expected at most {MAX_PIXELS} pixels, got {opened.width} x {opened.height}.")
        picture = read_image(opened, name)
    except ValueError as error:
        raise ValueError(
            f"{name} cannot be read as an image of at most {MAX_PIXELS // 10**6} megapixels. Try a PNG or JPEG file."
        ) from error
    picture.thumbnail((MAX_SIDE, MAX_SIDE))
    return picture


class Visitor:
    """One visitor: a conversation, and what the page shows of it.

    Attributes:
        session ([`ChatSession`]): the conversation.
        shown (`list[dict]`): the messages of the conversation, as the page shows them.
        chosen (`tuple[int, int | None]`): index of the answer whose words are shown, and index of the word that was
            clicked.
    """

    def __init__(self, session: ChatSession):
        self.session = session
        self.shown: list[dict[str, str]] = []
        self.chosen: tuple[int, int | None] = (0, None)
        self._maps: tuple[Answer, AttentionMaps] | None = None  # The maps of the answer that was chosen last.
        self._stop = threading.Event()

    @property
    def kept(self) -> int:
        """Bytes of the images in the conversation."""
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
        """Returns where the model looked when it generated the chosen word, like [`looks`]."""
        answer, word = self.session.answers[self.chosen[0]], self.chosen[1]
        words = answer.words(self.session.tokenizer)
        if not isinstance(word, int) or not 0 <= word < len(words):
            raise ValueError(f"Expected a word from 0 to {len(words) - 1}, got {word}.")
        if self._maps is None or self._maps[0] is not answer:
            self._maps = answer, self.session.maps(answer)
        return looks(self._maps[1], words[word].tokens, layer)

    def drop_caches(self) -> None:
        """Frees the memory of the cache and of the attention maps. They are computed again when they are needed."""
        self.session.drop_cache()
        self._maps = None


def _bytes_of(pictures: list[Image.Image]) -> int:
    return sum(3 * picture.width * picture.height for picture in pictures)


class Visitors:
    """All visitors of a page. If there are too many, those who have not asked for the longest time are dropped first.

    The arguments are those of [`ChatSession`].
    """

    def __init__(self, model: XAttnForConditionalGeneration, processor: Any, system: str | None = None, **options: Any):
        self._arguments = (model, processor, system)
        self._options = options
        self._visitors: OrderedDict[str, Visitor] = OrderedDict()
        self._lock = threading.Lock()
        check_template(processor)

    def find(self, name: str) -> Visitor:
        """Returns the visitor with this name. Raises a `ValueError` if there is no such visitor, or no longer."""
        visitor = self._visitors.get(name)
        if visitor is None:
            raise ValueError("This conversation is no longer kept. Begin a new one.")
        return visitor

    def forget(self, name: str) -> None:
        """Stops the answer of a visitor and drops the conversation, if there is one."""
        with self._lock:
            visitor = self._visitors.pop(name, None)
        if visitor is not None:
            visitor.stop()

    def enter(self, name: str, begun: bool, text: str, pictures: list[Image.Image]) -> Visitor:
        """Returns the visitor who asks next. Drops other visitors until there is memory for the images.

        Only one visitor may ask at a time.

        Args:
            name (`str`): name of the visitor.
            begun (`bool`): whether the conversation has begun already. If not, it begins here.
            text (`str`): the question.
            pictures (`list[PIL.Image.Image]`): images of the question.

        Raises:
            ValueError: if the conversation is no longer kept, if there is no question, or if there are too many images
                in the message or in the conversation.
        """
        if not text:
            raise ValueError("Write a question first.")
        if len(pictures) > MAX_PICTURES:
            raise ValueError(f"A message may have {MAX_PICTURES} images.")
        with self._lock:
            visitor = self.find(name) if begun else Visitor(ChatSession(*self._arguments, **self._options))
            if visitor.kept + _bytes_of(pictures) > MAX_KEPT:
                raise ValueError("This conversation has as many images as the page keeps. Begin a new one.")
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
