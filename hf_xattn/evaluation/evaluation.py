"""Asks a model questions in several ways, and compares its answers with the expected ones.

A share of right answers alone says little, because guessing also gives some. So the questions are asked without the
image and with another image, too, and the share of the most frequent answer is computed.

Questions without an image are also asked in a chat that holds an unrelated image. Without an image the blocks change
nothing, so the model answers as its base, the text model. With an unrelated image nothing ensures this, and the share
of the base's answers that is left is measured.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from huggingface_hub import EvalResult, ModelCard
from tqdm.auto import tqdm

from ..checkpoints.own_parts import refuse_adapter_layers
from ..data.pictures import digest_of
from ..data.rows import IMAGE_SOURCES, text_of
from ..modeling_xattn import XAttnForConditionalGeneration
from ..processing.chat_templates import Processor
from .answers import Scores, Share, normalised
from .questions import Messages, Question, beside_pictures, other_pictures


if TYPE_CHECKING:
    from transformers import BatchEncoding, BatchFeature

# An answer may be this many tokens longer than the longest expected one before it is cut.
MARGIN = 8
# The names of the ways to ask are keys in the output of `--json` and in results of earlier runs, so they stay.
MODEL, BLIND, ANOTHER = "the model", "without the picture", "with another picture"
FREQUENT = "always the most frequent answer"
TEXT, BESIDE = "text alone", "text beside a picture"
# Reasons why text questions beside an image were not measured.
NO_IMAGE = "the data has no image"
NO_TEXT = "the data has no question without an image"
NO_USER = "no question without an image has a user message, into which an image could be put"
NAMES = {MODEL: "accuracy", BLIND: "accuracy without the picture", FREQUENT: "accuracy of the most frequent answer"}
TASK = "visual-question-answering"
TEXT_TASK = "text-generation"
AS_BASE = "text answers beside a picture that are the base's, word for word"
CONTAINED = "text answers beside a picture that contain the right one"
BASE = "text answers of the base that contain the right one"


class Answered(NamedTuple):
    """A question with the answer of the model."""

    question: Question  # with its own images, even if it was asked without them
    said: str


Answers = dict[str, list[Answered]]  # the answers for each way to ask


class TextBesidePicture(NamedTuple):
    """Text questions, answered by the model beside an image of another row, and by its base without an image."""

    as_base: Share  # the model answers word for word as the base does without the image
    model: Scores
    base: Scores
    left_out: int = 0  # number of questions without a user message, to which no image can be added


@dataclass
class Evaluation:
    """What was measured. A field is empty or None if the data has no such questions."""

    ways: dict[str, Scores] = field(default_factory=dict)  # questions about images: scores of each way to ask
    groups: dict[str, dict[str, Scores]] = field(default_factory=dict)  # the same for each group
    text: Scores | None = None  # questions without an image
    text_groups: dict[str, Scores] = field(default_factory=dict)
    as_base: Share | None = None  # questions without an image that are answered word for word as the base does
    beside: TextBesidePicture | None = None  # the same questions beside an unrelated image
    beside_missing: str | None = None  # why `beside` was not measured
    cut: int = 0  # answers of the model that did not end within `max_new_tokens`
    max_new_tokens: int = 0
    answers: Answers = field(default_factory=dict)

    def each_question(self, questions: Sequence[Question]) -> list[dict[str, Any]]:
        """The questions that were asked, each with its expected answer and the answers that were given, by way."""
        said: dict[int, dict[str, str]] = {}
        for way, answered in self.answers.items():
            for each in answered:
                said.setdefault(id(each.question), {})[way] = each.said
        return [
            {
                "question": text_of(each.messages[-1]),
                "pictures": [_name(part) for part in each.pictures],
                "group": each.group,
                "expected": each.answer,
                "said": said[id(each)],
            }
            for each in questions
        ]

    def as_dict(self) -> dict[str, Any]:
        return {
            "pictures": _plain(self.ways),
            "groups": _plain(self.groups),
            "text": _plain(self.text),
            "text_groups": _plain(self.text_groups),
            "as_base": _plain(self.as_base),
            "text_beside_picture": None if self.beside is None else _plain(self.beside._asdict()),
            "text_beside_picture_missing": self.beside_missing,
            "cut": self.cut,
            "max_new_tokens": self.max_new_tokens,
        }


def _plain(value: Any) -> Any:
    """Returns shares and scores, or a `dict` of them, in a form for JSON."""
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items()}
    return value.as_dict() if isinstance(value, (Share, Scores)) else value


def evaluate(
    model: XAttnForConditionalGeneration,
    processor: Processor,
    questions: Sequence[Question],
    batch_size: int = 8,
    max_new_tokens: int | None = None,
    content_of: Callable[[dict[str, Any]], Any] | None = None,
) -> Evaluation:
    """Asks the questions, and compares the greedy answers with the expected ones.

    Args:
        model ([`XAttnForConditionalGeneration`]): the model.
        processor ([`XAttnProcessor`]): renders the chats.
        questions (`Sequence[Question]`): the questions, for example from [`questions_of`].
        batch_size (`int`, defaults to 8): questions at a time.
        max_new_tokens (`int`, *optional*): maximum number of tokens in an answer. Default: 8 more than in the longest
            expected answer.
        content_of (`Callable`, *optional*): maps an image part to a value that is equal for equal images. Default: the
            content of its file, its address, or its pixels.

    Returns:
        [`Evaluation`]: the scores of each way to ask, and the answers.

    Example:

    ```python
    >>> import hf_xattn
    >>> from transformers import AutoModelForImageTextToText, AutoProcessor

    >>> model = AutoModelForImageTextToText.from_pretrained("seeing")  # a folder of `hf-xattn train`
    >>> processor = AutoProcessor.from_pretrained("seeing")
    >>> questions = hf_xattn.questions_of(hf_xattn.load_rows("pictures"))
    >>> found = hf_xattn.evaluate(model, processor, questions)
    >>> sorted(found.ways)
    ['always the most frequent answer', 'the model', 'with another picture', 'without the picture']
    >>> share = found.ways["the model"].normalised.value  # of right answers
    ```
    """
    tokenizer = processor.tokenizer
    if max_new_tokens is None:
        longest = max(len(tokenizer(each.answer, add_special_tokens=False)["input_ids"]) for each in questions)
        max_new_tokens = longest + MARGIN
    asker = Asker(model, processor, batch_size, max_new_tokens)
    found = Evaluation(max_new_tokens=max_new_tokens)
    about = [each for each in questions if each.pictures]
    alone = [each for each in questions if not each.pictures]
    if about:
        shown: dict[str, Sequence[list[dict[str, Any]] | None]] = {
            MODEL: [each.pictures for each in about],
            BLIND: [[]] * len(about),
            ANOTHER: other_pictures(about, content_of or _content),
        }
        found.answers = {way: _ask(asker, way, about, pictures) for way, pictures in shown.items()}
        found.ways, found.groups = scores_of(found.answers), by_group(found.answers)
    base: list[str] = []
    if alone:
        said = _ask(asker, TEXT, alone, [[]] * len(alone))
        found.answers[TEXT] = said
        found.text = scores_of({MODEL: said})[MODEL]
        found.text_groups = {group: ways[MODEL] for group, ways in by_group({MODEL: said}).items()}
        base = asker("the base", alone, base=True)
        found.as_base = Share(sum(one.said == other for one, other in zip(said, base)), len(alone))
    beside = ask_beside(asker, alone, about, base)
    found.beside, found.beside_missing = (None, beside) if isinstance(beside, str) else (beside, None)
    found.cut = asker.cut[MODEL] + asker.cut[TEXT] + asker.cut[BESIDE]
    return found


def scores_of(answers: Answers) -> dict[str, Scores]:
    """Returns the scores of each way that has answers, and of always giving the most frequent answer.

    Answers of the way "the model" must be there.
    """
    ways = {way: ([each.said for each in said], _expected(said)) for way, said in answers.items() if said}
    expected = _expected(answers[MODEL])
    often = Counter(map(normalised, expected)).most_common(1)[0][0]
    # The most frequent answer, as the data writes it most often.
    frequent = Counter(each for each in expected if normalised(each) == often).most_common(1)[0][0]
    ways[FREQUENT] = ([frequent] * len(expected), expected)
    return {way: Scores.of(*each) for way, each in ways.items()}


def by_group(answers: Answers) -> dict[str, dict[str, Scores]]:
    """Returns [`scores_of`] for each group of questions. Questions without a group are left out."""
    groups: dict[str, Answers] = {}
    for way, said in answers.items():
        for each in said:
            if each.question.group is not None:
                groups.setdefault(each.question.group, {}).setdefault(way, []).append(each)
    return {group: scores_of(each) for group, each in groups.items()}


def ask_beside(
    asker: Asker, alone: Sequence[Question], about: Sequence[Question], base: Sequence[str]
) -> TextBesidePicture | str:
    """Asks questions without an image beside images of other questions, or returns the reason why this is not possible.

    Args:
        asker ([`Asker`]): asks the model.
        alone (`Sequence[Question]`): the questions without an image.
        about (`Sequence[Question]`): the questions whose images are shown.
        base (`list[str]`): the answers of the base to `alone`.
    """
    if not about:
        return NO_IMAGE
    if not alone:
        return NO_TEXT
    asked = beside_pictures(alone, about)
    pairs = [(question, said) for question, said in zip(asked, base, strict=True) if question is not None]
    if not pairs:
        return NO_USER
    said, without = asker(BESIDE, [question for question, _ in pairs]), [said for _, said in pairs]
    expected = [question.answer for question, _ in pairs]
    same = Share(sum(one == other for one, other in zip(said, without, strict=True)), len(pairs))
    return TextBesidePicture(
        same, Scores.of(said, expected), Scores.of(without, expected), left_out=len(alone) - len(pairs)
    )


class Asker:
    """Gets the greedy answers of a model, and counts the answers that were cut off.

    Questions are asked under a title, which the progress bar shows. Cut answers are counted for each title.

    Args:
        model ([`XAttnForConditionalGeneration`]): the model.
        processor ([`XAttnProcessor`]): renders the chats.
        batch_size (`int`): chats at a time.
        max_new_tokens (`int`): maximum number of tokens in an answer.
    """

    def __init__(self, model: Any, processor: Any, batch_size: int, max_new_tokens: int):
        self.model, self.processor = model, processor
        self.batch_size, self.max_new_tokens = batch_size, max_new_tokens
        self.cut: Counter[str] = Counter()  # number of cut answers for each title

    def __call__(self, title: str, questions: Sequence[Question], base: bool = False) -> list[str]:
        return self.processor.batch_decode(self.tokens(title, questions, base), skip_special_tokens=True)

    @torch.no_grad()
    def tokens(self, title: str, questions: Sequence[Question], base: bool = False) -> list[list[int]]:
        """Returns the tokens of the answers, including the token that ends an answer, without padding.

        The model is in evaluation mode meanwhile, so there is no dropout.

        Args:
            title (`str`): the title.
            questions (`Sequence[Question]`): the questions.
            base (`bool`, defaults to `False`): ask the text model without the blocks.

        Raises:
            ValueError: for `base` if the text model has layers of an adapter (PEFT).
        """
        generate, training, config = self.model.generate, self.model.training, self.model.generation_config
        if base:
            text_model = self.model.base_model.text_model
            refuse_adapter_layers(text_model, "An evaluation cannot ask the base of", "Merge the adapter first.")
            generate = text_model.generate
        greedy = {"max_new_tokens": self.max_new_tokens, "do_sample": False, "num_beams": 1}
        ends = set(config.eos_token_id) if isinstance(config.eos_token_id, list) else {config.eos_token_id}
        found: list[list[int]] = []
        self.model.eval()
        try:
            for start in tqdm(range(0, len(questions), self.batch_size), title, leave=False):
                chats = [each.messages for each in questions[start : start + self.batch_size]]
                inputs = inputs_of(self.processor, chats).to(self.model.device)
                rows = generate(**inputs, generation_config=config, **greedy)
                for row in rows[:, inputs["input_ids"].shape[1] :].tolist():
                    end = next((place for place, token in enumerate(row) if token in ends), None)
                    self.cut[title] += end is None and len(row) == self.max_new_tokens
                    found.append(row if end is None else row[: end + 1])
        finally:
            self.model.train(training)
        return found


def inputs_of(processor: Processor, chats: Sequence[Messages]) -> BatchFeature | BatchEncoding:
    """Returns the inputs of a model for chats that end with a question."""
    made: Any = processor.apply_chat_template(
        list(chats),
        add_generation_prompt=True,
        tokenize=True,
        return_dict=True,
        return_tensors="pt",
        # The side is given, because a tokenizer may pad on the right, which is behind the question.
        processor_kwargs={"padding": True, "padding_side": "left"},
    )
    return made


def _ask(
    asker: Asker, way: str, questions: Sequence[Question], shown: Sequence[list[dict[str, Any]] | None]
) -> list[Answered]:
    """Asks each question with the images that `shown` has for it. A question is not asked if these are None."""
    pairs = [(each, each.with_pictures(pictures)) for each, pictures in zip(questions, shown) if pictures is not None]
    said = asker(way, [asked for _, asked in pairs])
    return [Answered(each, answer) for (each, _), answer in zip(pairs, said)]


def _expected(answers: Sequence[Answered]) -> list[str]:
    return [each.question.answer for each in answers]


def _source(part: dict[str, Any]) -> Any:
    """The file, the address or the image in memory that a part of a message holds."""
    image = next(part[name] for name in IMAGE_SOURCES if part.get(name) is not None)
    return image.get("url") if isinstance(image, Mapping) else image  # {"url": ...}


def _name(part: dict[str, Any]) -> str | None:
    """The file or the address of an image; None for one in memory."""
    source = _source(part)
    return str(source) if isinstance(source, (str, Path)) else None


def _content(part: dict[str, Any]) -> Any:
    """Returns a value that is equal for equal images: from the content of a file, the pixels, or the address."""
    image = _source(part)
    if isinstance(image, bytes) or (isinstance(image, (str, Path)) and os.path.isfile(image)):
        return digest_of(image)
    if isinstance(image, (str, Path)):
        return str(image)
    pixels = np.asarray(image)
    return pixels.shape, digest_of(pixels.tobytes())


def read_card(folder: Path) -> ModelCard:
    """Returns the model card of a folder. Raises a `ValueError` if there is none, or if its metadata cannot be read."""
    file = folder / "README.md"
    if not file.is_file():
        raise ValueError(f"Expected {folder} to be a folder with a model card (README.md), got none there.")
    try:
        return ModelCard.load(file)
    except Exception as error:  # errors of the YAML reader have several types
        raise ValueError(f"The metadata of {file} cannot be read: {error}") from error


def write_results(folder: Path, found: Evaluation, data: str) -> None:
    """Adds the results to the model card of a folder. Earlier results for the same data are replaced.

    Args:
        folder (`Path`): the folder of the model.
        found ([`Evaluation`]): the results.
        data (`str`): the name of the data.
    """
    card: Any = read_card(folder)
    own = {(data, name) for name in (*NAMES.values(), AS_BASE, CONTAINED, BASE)}
    kept = [each for each in card.data.eval_results or [] if (each.dataset_name, each.metric_name) not in own]
    shares = [(TASK, name, found.ways[way].normalised) for way, name in NAMES.items() if way in found.ways]
    if (text := found.beside) is not None:
        named = {AS_BASE: text.as_base, CONTAINED: text.model.contained, BASE: text.base.contained}
        shares += [(TEXT_TASK, name, share) for name, share in named.items()]
    made = [
        EvalResult(
            task_type=task,
            dataset_type=data,
            dataset_name=data,
            metric_type="accuracy",
            metric_name=name,
            metric_value=round(share.value, 4),
        )
        for task, name, share in shares
    ]
    card.data.model_name = card.data.model_name or folder.resolve().name
    card.data.eval_results = [*kept, *made]
    card.save(folder / "README.md")
