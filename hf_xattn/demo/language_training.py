"""Trains the blocks and the connector of a real language model on questions about canvases; the rest is frozen.

A block's queries come from text and its keys from the picture, through random projections at first. The word `seven`
finds the patch with a seven in fewer steps if both are near each other before them: so the connector starts as a ridge
regression from the features of patches to the language model's hidden states at the words for them.
"""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from ..modeling_xattn import XAttnForConditionalGeneration
from ..processing_xattn import XAttnProcessor
from ..training import word_states as states_of
from ..training.collator import XAttnDataCollator
from ..training.ridge import ridge
from ..utils.projection import multiplies_natively
from .canvases import HEIGHT, PATCH, WIDTH, WORDS, DigitPool, patch_labels, picture_of, to_pixel_values
from .checkpoints import optimize
from .questions import COLUMNS, PHRASINGS, ROWS, ask, ask_about, chat, region
from .upper_layers import Example, UpperLayers


# How often each kind of question is asked. The hard kinds come more often.
SHARES = {"read": 3, "how many": 2, "leftmost": 2, "largest": 3, "smallest": 3, "is there": 2, "sum": 3, "where": 3}
SECOND = 0.15  # share of the questions that come after another one about the same canvas
TEXT_EVERY = 5  # one step in so many is on questions that the picture does not concern
DISTILLED = 4.0  # weight of its loss
WARMUP_STEPS = 20
LARGEST_DIFFERENCE = 0.05  # of bfloat16, as a share of the largest logit
BLOCK_PLACES = (0.67, 0.73, 0.8, 0.87, 0.97)  # as shares of the depth
# Of the connector's start.
CANVASES = 1000
BACKGROUND = 0.2  # share of the patches without a digit that count, as they are the most
RANDOM = 0.05  # standard deviation of what is added: what no word names must pass too, such as a digit's place


class Recipe(NamedTuple):
    """What the training is made of."""

    steps: int = 300
    batch_size: int = 48  # questions a step
    learning_rate: float = 3e-3  # its maximum


def block_layers(num_layers: int) -> list[int]:
    """The layers that get a block in front: five in the last third. The layers below run once for each text."""
    return sorted({min(round(num_layers * share), num_layers - 1) for share in BLOCK_PLACES})


class Rows:
    """Makes examples of questions and answers, through the public processor and collator. Remembers them."""

    def __init__(self, processor: XAttnProcessor, canvas):
        self._collator = XAttnDataCollator(processor, padding_side="right")
        self._picture = picture_of(canvas)  # the text is the same for every picture
        self._known: dict[tuple[tuple[tuple[str, str], ...], bool], Example] = {}
        ids, _ = self._tokens((("?", "!"),), True)
        marker: Any = processor.image_token_id
        self.beginning = ids[: ids.index(marker)]

    def example(
        self, question: str, answer: str, with_image: bool = True, before: tuple[tuple[str, str], ...] = ()
    ) -> Example:
        """Returns the tokens of a chat, after the common beginning. Earlier answers (`before`) are trained too."""
        key = (*before, (question, answer)), with_image
        if key not in self._known:
            ids, labels = self._tokens(*key)
            start = len(self.beginning)
            if ids[:start] != self.beginning:
                raise ValueError(
                    f"The chat template begins a chat about {question!r} with other words than other chats."
                )
            self._known[key] = Example(tuple(ids[start:]), tuple(labels[start:]))
        return self._known[key]

    def _tokens(self, turns: tuple[tuple[str, str], ...], with_image: bool) -> tuple[list[int], list[int]]:
        messages = chat([*itertools.chain.from_iterable(turns)], self._picture if with_image else None)
        batch = self._collator([{"messages": messages}])
        return batch["input_ids"][0].tolist(), batch["labels"][0].tolist()


class Batch(NamedTuple):
    """Rows of a training step."""

    examples: list[Example]
    pixel_values: torch.Tensor  # (rows, 1, channels, height, width)


def batch_of_step(step: int, rows: Rows, pool: DigitPool, batch_size: int, seed: int) -> Batch:
    """Draws questions about canvases. The seed and the step determine them."""
    rng = np.random.default_rng((seed, 4, step))
    kinds, shares = list(SHARES), np.array(list(SHARES.values())) / sum(SHARES.values())
    asked = [ask(kinds[rng.choice(len(kinds), p=shares)], pool, rng) for _ in range(batch_size)]
    examples = []
    for question in asked:
        before: tuple[tuple[str, str], ...] = ()
        if rng.random() < SECOND:
            first = ask_about(question.canvas, rng)
            before = ((first.text, first.answer),)
        examples.append(rows.example(question.text, question.answer, before=before))
    return Batch(examples, torch.stack([to_pixel_values(question.canvas) for question in asked]))


def texts_of_step(
    step: int, rows: Rows, pool: DigitPool, text_answers: dict[str, str], count: int, seed: int
) -> tuple[Batch, list[Example]]:
    """Draws questions of `text_answers` beside canvases, and returns them without the canvases, too."""
    rng = np.random.default_rng((seed, 4, step))
    prompts = list(text_answers)
    asked = [prompts[rng.integers(len(prompts))] for _ in range(count)]
    canvases = torch.stack([to_pixel_values(pool.canvas(rng)) for _ in asked])
    beside, alone = ([rows.example(each, text_answers[each], seen) for each in asked] for seen in (True, False))
    return Batch(beside, canvases), alone


def distance_from_text(upper: UpperLayers, beside: Batch, alone: list[Example]) -> torch.Tensor:
    """KL(without the canvas || beside it) of a token of an answer: a picture must not change what does not concern it.

    Without a canvas no block runs, so the teacher is the language model itself.
    """
    logits, labels, _ = upper.logits(*beside)
    with torch.no_grad():
        unseen = torch.zeros(len(alone), 1, dtype=torch.bool)
        wanted, same, _ = upper.logits(alone, beside.pixel_values, unseen)
    if not torch.equal(labels, same):
        raise ValueError(
            "Expected the chat template to write an answer beside a picture as it does without one, got other tokens. "
            "Choose another language model."
        )
    given = (logits.log_softmax(-1), wanted.log_softmax(-1))
    return nn.functional.kl_div(*given, log_target=True, reduction="batchmean")


def training_dtype(device: torch.device) -> torch.dtype:
    """bfloat16 where the machine computes in it, else float32."""
    if device.type == "cpu":
        return torch.bfloat16 if multiplies_natively(torch.bfloat16) else torch.float32
    return torch.bfloat16 if device.type == "cuda" and torch.cuda.is_bf16_supported() else torch.float32


def train(
    model: XAttnForConditionalGeneration,
    processor: XAttnProcessor,
    pool: DigitPool,
    text_answers: dict[str, str],
    recipe: Recipe,
    seed: int,
) -> None:
    """Trains what requires gradients, in place. Frozen matrices of decoder layers are rounded to the training's dtype.

    Raises a `RuntimeError` for a decoder whose upper layers cannot run apart.
    """
    rows = Rows(processor, pool.canvas(np.random.default_rng(seed)))
    dtype = training_dtype(model.device)
    upper = UpperLayers(model, rows.beginning, dtype)
    round_frozen(upper.body.layers, dtype)
    model.eval()  # nothing here has dropout
    if model.device.type == "cpu":
        model.set_attn_implementation("eager")  # with texts this short, a whole step takes 0.7 of its time with sdpa
    _check(upper, rows, pool, seed)

    def loss_of_step(step: int) -> torch.Tensor:
        if text_answers and step % TEXT_EVERY == TEXT_EVERY - 1:
            texts = texts_of_step(step, rows, pool, text_answers, max(1, recipe.batch_size // 3), seed)
            return DISTILLED * distance_from_text(upper, *texts)
        batch = batch_of_step(step, rows, pool, recipe.batch_size, seed)
        trained = sum(label != -100 for example in batch.examples for label in example.labels[1:])
        losses = []
        for part in parts_by_length(batch):
            logits, labels, _ = upper.logits(*part)
            losses.append(nn.functional.cross_entropy(logits, labels, reduction="sum"))
        return torch.stack(losses).sum() / trained

    learning = [parameter for parameter in model.parameters() if parameter.requires_grad]
    warmup = min(0.1, WARMUP_STEPS / recipe.steps)
    name = "blocks and connector, questions"
    optimize(learning, recipe.steps, recipe.learning_rate, loss_of_step, name, clip=1.0, warmup=warmup)


def round_frozen(layers: nn.Module, dtype: torch.dtype) -> None:
    """Puts frozen matrices of decoder layers into the dtype of autocast, which otherwise casts them in each step."""
    for module in layers.modules():
        if isinstance(module, nn.Linear) and not module.weight.requires_grad:
            module.weight.data = module.weight.data.to(dtype)


def parts_by_length(batch: Batch) -> list[Batch]:
    """Splits a batch into its short and its long rows, where this saves at least a tenth of the tokens as padding."""
    lengths = [len(example.ids) for example in batch.examples]
    order = sorted(range(len(lengths)), key=lambda row: lengths[row])

    def tokens(cut: int) -> int:
        return cut * lengths[order[cut - 1]] + (len(order) - cut) * lengths[order[-1]]

    cut = min(range(1, len(order) + 1), key=tokens)
    if tokens(cut) > 0.9 * tokens(len(order)):
        return [batch]
    batches = []
    for part in (order[:cut], order[cut:]):
        batches.append(Batch([batch.examples[row] for row in part], batch.pixel_values[part]))
    return batches


def _check(upper: UpperLayers, rows: Rows, pool: DigitPool, seed: int) -> None:
    question = ask("read", pool, np.random.default_rng(seed))
    with torch.no_grad():
        difference = upper.difference(
            rows.example(question.text, question.answer), rows.beginning, to_pixel_values(question.canvas)[None]
        )
    if difference > LARGEST_DIFFERENCE:
        raise RuntimeError(
            "Expected the layers from the first block on to give the logits of the whole model, got a difference of "
            f"{difference:.3f} of the largest. Choose another language model."
        )


@torch.no_grad()
def start_connector(
    model: XAttnForConditionalGeneration, base: PreTrainedModel, processor: XAttnProcessor, pool: DigitPool, seed: int
) -> None:
    """Sets the weights of a linear connector, in place. `base` is the language model before the retrofit."""
    rng = np.random.default_rng((seed, 7))
    canvases = [pool.canvas(rng) for _ in range(CANVASES)]
    pixel_values = torch.cat([to_pixel_values(canvas) for canvas in canvases]).to(model.device)
    tower: Any = model.model.vision_tower
    connector: Any = model.model.connector
    features = tower(pixel_values=pixel_values).last_hidden_state[:, 1:].flatten(0, 1).cpu()  # without the class token
    digits = torch.cat([patch_labels(canvas)[0] for canvas in canvases])
    kept = (digits < len(WORDS)) | torch.from_numpy(rng.random(len(digits)) < BACKGROUND)
    first = min(model.config.cross_attention_layers)
    of_digit = word_states(base, processor, first, WORDS)
    targets = torch.cat([of_digit, torch.zeros_like(of_digit[:1])])[digits]  # zeros for background
    corners = [(row, column) for row in range(0, HEIGHT, PATCH) for column in range(0, WIDTH, PATCH)]
    words = [region(*corner).split() for corner in corners]  # `top left`, ... of each patch of a canvas
    for part, names in enumerate((ROWS, COLUMNS)):
        place = word_states(base, processor, first, names)[[names.index(each[part]) for each in words]]
        targets = targets + place.repeat(CANVASES, 1) * (digits < len(WORDS))[:, None]
    weight, bias = ridge(features[kept], targets[kept])
    noise = torch.randn(weight.shape, generator=torch.Generator().manual_seed(seed)) * RANDOM
    connector.layers[0].weight.copy_(weight + noise)
    connector.layers[0].bias.copy_(bias)


def word_states(base: PreTrainedModel, processor: XAttnProcessor, layer: int, words: tuple[str, ...]) -> torch.Tensor:
    """What tells the hidden states of two words or more apart, in front of a layer, `(words, hidden_size)`."""
    tokenizer: Any = processor.tokenizer
    prompts = [
        tokenizer.apply_chat_template([{"role": "user", "content": each}], tokenize=False, add_generation_prompt=True)
        for each in PHRASINGS["read"]
    ]
    return states_of.told_apart(states_of.word_states(base, tokenizer, layer, words, prompts))
