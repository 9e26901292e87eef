"""The conversations of the visitors of a page, and where the model looked: attention weights, not explanations."""

from __future__ import annotations

import secrets
import threading
from base64 import b64decode
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from io import BytesIO
from typing import TYPE_CHECKING, Any

import torch

from ...decoders.block_stack import blocks_at
from ...maps.attention_maps import AttentionMaps
from ...processing.chat_templates import check_template
from ...processing.image_reading import read_image
from ..chat_session import ChatSession


if TYPE_CHECKING:
    from PIL.Image import Image

    from ...modeling_xattn import XAttnForConditionalGeneration

MAX_VISITORS = 256  # conversations that are kept
MAX_CACHES = 8  # conversations whose cache of the text is kept
MAX_WAITING = 8  # pictures of one message
MAX_BYTES = 20 * 2**20  # of a picture's file
MAX_PIXELS = 64 * 2**20  # a small file may unpack to gigabytes
MAX_KEPT = 2**30  # bytes of all pictures that are kept, for all visitors
MAX_SIDE = 2048  # larger pictures are scaled down: no model reads more, and they are kept while the conversation lasts
COLOUR = (255, 106, 0)
OPACITY = 165  # of the heat where the attention is largest, of 255


@dataclass(frozen=True, eq=False)
class Look:
    """Where the model looked on one picture."""

    picture: Image  # that the vision tower has read
    heat: Image  # one RGBA pixel a patch, to lay over the picture
    covered: tuple[float, float]  # share of the picture's height and width that the patches cover
    share: float  # of the attention, on the patches of this picture, from 0 to 1


class Gaze:
    """The attention of each token of an answer, as the mean over heads. Errors as [`AttentionMaps.grid`]."""

    def __init__(self, maps: AttentionMaps):
        # The weights behind the choice of a token are at the position before it.
        first = maps.num_given - 1
        weights = [each[:, :, first:-1] for each in maps.weights]
        answer = replace(maps, weights=weights, tokens=maps.tokens[:, first:-1])
        self.layers = list(dict.fromkeys(maps.layers))
        self._blocks = {layer: blocks_at(maps.layers, layer) for layer in self.layers}
        images = range(maps.num_images)
        self._grids = [answer.grid(image, head="mean") for image in images]  # (blocks, tokens, rows, columns) each
        self._pictures = [_image(maps.pixels(image)) for image in images]
        self._covered = [maps.covered(image) for image in images]

    def looks(self, tokens: range, layer: int | None = None) -> list[Look]:
        """Returns one value for each picture. All words and pictures of the answer have one scale.

        Args:
            tokens (`range`): tokens of a word. Their mean is shown.
            layer (`int`, *optional*): one of `layers`. By default the mean of all blocks.
        """
        if layer is not None and layer not in self.layers:
            raise ValueError(f"Expected `layer` to be one of {self.layers} or None, got {layer!r}.")
        grids = self._grids if layer is None else [grid[self._blocks[layer]] for grid in self._grids]
        chosen = [grid.mean(dim=0) for grid in grids]  # (tokens, rows, columns) each
        most = max(max(float(grid.max()) for grid in chosen), 1e-6)
        of_word = [grid[tokens.start : tokens.stop].mean(dim=0) for grid in chosen]
        return [
            Look(picture, _heat(grid / most), covered, float(grid.sum()))
            for picture, grid, covered in zip(self._pictures, of_word, self._covered)
        ]


def _image(pixels: torch.Tensor) -> Image:
    from PIL import Image

    return Image.fromarray((pixels * 255).round().to(torch.uint8).numpy())


def _heat(weights: torch.Tensor) -> Image:
    from PIL import Image

    # The power lifts what is faint, which could not be told from nothing on a dark picture.
    opacity = Image.fromarray((weights.clamp(0, 1) ** 0.7 * OPACITY).round().to(torch.uint8).numpy())
    heat = Image.new("RGBA", opacity.size, COLOUR)
    heat.putalpha(opacity)
    return heat


class Visitor:
    """One visitor: a conversation (`session`), and pictures that wait for the next message (`waiting`)."""

    # Unpacked, a picture takes much more memory than its file: one after another.
    _unpacking = threading.Lock()

    def __init__(self, session: ChatSession):
        self.session = session
        self.waiting: list[Image] = []
        self._asked: list[Image] = []  # with the question that is being answered
        self._gaze: tuple[Any, Gaze] | None = None  # of the answer that was looked at last
        self._stop: threading.Event | None = None
        self._lock = threading.Lock()

    @property
    def answering(self) -> bool:
        return self._stop is not None

    def add(self, source: str, name: str) -> None:
        """Adds a picture to the next message. Raises a `ValueError` for anything else, or for too many.

        `source` is a data URL: a path or a web address would let visitors read files of the server.
        """
        if getattr(self.session.processor, "image_processor", None) is None:
            raise ValueError("This model was saved without an image processor: it cannot read pictures.")
        if not isinstance(source, str) or not source.startswith("data:"):
            raise ValueError(f"{name} is not a picture.")
        if len(source) * 3 // 4 > MAX_BYTES:
            raise ValueError(f"{name} is too large: a picture may have {MAX_BYTES // 2**20} MB.")
        if len(self.waiting) >= MAX_WAITING:
            raise ValueError(f"A message may have {MAX_WAITING} pictures.")
        try:
            pixels = _num_pixels(source)
            with Visitor._unpacking:
                picture = read_image(source, "picture") if pixels <= MAX_PIXELS else None
                if picture is not None:
                    picture.thumbnail((MAX_SIDE, MAX_SIDE))
        except Exception as error:  # decoders raise errors of many kinds
            raise ValueError(f"{name} cannot be read as a picture. Try a PNG or JPEG file.") from error
        if picture is None:
            raise ValueError(f"{name} is too large: a picture may have {MAX_PIXELS // 10**6} megapixels.")
        self.waiting.append(picture)

    @property
    def kept(self) -> int:
        """Bytes of the pictures that wait, of those that are asked about, and of those in the conversation."""
        contents = [message["content"] for message in self.session.messages if isinstance(message["content"], list)]
        asked = [part["image"] for content in contents for part in content if part["type"] == "image"]
        return sum(3 * picture.width * picture.height for picture in (*self.waiting, *self._asked, *asked))

    @property
    def has_begun(self) -> bool:
        """Whether there is something to lose: a picture that waits, a question."""
        return bool(self.waiting or self.session.messages)

    def remove(self, index: int) -> None:
        """Removes a picture that waits. An index that does not exist is ignored: the picture is gone already."""
        if 0 <= index < len(self.waiting):
            del self.waiting[index]

    def ask(self, text: str) -> Iterator[str]:
        """Asks a question with the pictures that wait, and yields the answer piece by piece.

        After an error the pictures wait again. If the iterator is closed, the answer ends after the current token.

        Raises:
            ValueError: without a question, while another one is being answered, and as [`ChatSession.ask`].
        """
        if not isinstance(text, str) or not text.strip():
            raise ValueError("Write a question first.")
        with self._lock:
            if self._stop is not None:
                raise ValueError("Your last question is still being answered.")
            stop = self._stop = threading.Event()
            session, images, self.waiting = self.session, self.waiting, []
            self._asked = images
        try:
            yield from session.stream(text.strip(), images, stop)
        except Exception:
            if self.session is session:  # not cleared meanwhile
                self.waiting = images + self.waiting
            raise
        finally:
            self._stop, self._asked = None, []

    def stop(self) -> None:
        """Ends the answer after the current token."""
        stop = self._stop
        if stop is not None:
            stop.set()

    def look(self, answer: int, word: int, layer: int | None = None) -> tuple[list[int], list[Look]]:
        """Returns the layers to choose from, and where the model looked when it generated a word of an answer."""
        answers = self.session.answers
        if not 0 <= answer < len(answers):
            raise ValueError("This answer is no longer kept.")
        chosen = answers[answer]
        words = chosen.words(self.session.tokenizer)
        if not 0 <= word < len(words):
            raise ValueError(f"Expected a word from 0 to {len(words) - 1}, got {word}.")
        if self._gaze is None or self._gaze[0] is not chosen:
            self._gaze = chosen, Gaze(self.session.maps(chosen))
        gaze = self._gaze[1]
        return gaze.layers, gaze.looks(words[word].tokens, layer)

    def clear(self) -> None:
        """Ends the answer, and forgets the conversation and the pictures that wait."""
        self.stop()
        session = self.session
        self.session = ChatSession(session.model, session.processor, session.system, **session.options)
        self.waiting, self._gaze = [], None


def _num_pixels(source: str) -> int:
    """Reads the size of the picture in a data URL, but not its pixels."""
    from PIL import Image

    with Image.open(BytesIO(b64decode(source.partition(",")[2]))) as picture:
        return picture.width * picture.height


class Visitors:
    """All visitors of a page. Those who have only opened it are forgotten first, then those who came longest ago.

    Arguments as in [`ChatSession`].
    """

    def __init__(self, model: XAttnForConditionalGeneration, processor: Any, system: str | None = None, **options: Any):
        self._arguments = (model, processor, system)
        self._options = options
        self._visitors: OrderedDict[str, Visitor] = OrderedDict()
        self._lock = threading.Lock()
        check_template(processor)

    def welcome(self) -> str:
        """Begins a conversation, and returns the visitor's name. Nobody can guess it."""
        name = secrets.token_urlsafe(24)
        with self._lock:
            self._visitors[name] = Visitor(ChatSession(*self._arguments, **self._options))
            for known in self._idle(name)[: max(0, len(self._visitors) - MAX_VISITORS)]:
                del self._visitors[known]
        return name

    def make_room(self, name: str) -> bool:
        """Forgets others until all kept pictures take at most `MAX_KEPT` bytes. Returns whether they do."""
        with self._lock:
            kept = {known: visitor.kept for known, visitor in self._visitors.items()}
            total = sum(kept.values())
            for known in self._idle(name):
                if total <= MAX_KEPT:
                    break
                if kept[known]:
                    total -= kept[known]
                    del self._visitors[known]
            return total <= MAX_KEPT

    def _idle(self, name: str) -> list[str]:
        """Names of the visitors that can be forgotten, in this order, except `name`."""
        idle = [known for known, visitor in self._visitors.items() if known != name and not visitor.answering]
        return sorted(idle, key=lambda known: self._visitors[known].has_begun)

    def find(self, name: str) -> Visitor:
        """Returns the visitor of a name. Raises a `ValueError` for one that is not known, or no longer."""
        with self._lock:
            if not isinstance(name, str) or name not in self._visitors:
                raise ValueError("This conversation is no longer kept. Reload the page to begin a new one.")
            self._visitors.move_to_end(name)
            for visitor in list(self._visitors.values())[:-MAX_CACHES]:
                visitor.session.drop_cache()
                visitor._gaze = None
            return self._visitors[name]
