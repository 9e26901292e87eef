"""The demo over a real language model: it learns to answer questions about pictures, and loses nothing of its text."""

from __future__ import annotations

import json
import shlex
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoProcessor, AutoTokenizer, set_seed

from .. import XAttnProcessor, freeze_base, retrofit
from ..checkpoints.model_card import write_model_card
from ..utils.transformers_api import AutoImageProcessor
from .canvases import DigitPool
from .checkpoints import language_model, make_vision_checkpoint, one_thread
from .language_scores import (
    accuracy_by_kind,
    answers,
    compare_texts,
    held_out_questions,
    images_a_second,
    most_frequent_by_kind,
    own_answers,
    places_right,
    same_logits,
    second_right,
    verdicts_right,
)
from .language_training import Recipe, block_layers, start_connector, train, training_dtype
from .questions import KINDS, PHRASINGS, Question
from .report import (
    draw_questions,
    example_images,
    prepared,
    print_table,
    save_examples,
    say,
    undo_prepared,
)
from .text_prompts import TRAINING_PROMPTS


IMAGE_TOKEN = "<image>"
BLOCK = {"qk_norm": True, "intermediate_size": 768, "initializer_range": 0.05}


def run_language(
    source: str | Path,
    output: str | Path = "hf-xattn-demo",
    seed: int = 0,
    steps: int | None = None,
    quick: bool = False,
) -> dict[str, Any]:
    """Gives sight to a language model, and measures what it learned and what it kept.

    Args:
        source (`str` or `Path`): the language model, as `language_model` takes it.
        output, seed, quick: as for `run`. The folder also gets `adapter`.
        steps (`int`, *optional*): training steps; more take longer and answer more.

    Returns:
        `dict`: the figures of the printed tables, which are also saved to `results.json`.

    Raises:
        ValueError, ImportError: as `run`; if `steps` is below 1; for a language model that does not suit, or needs what
            is not installed.
    """
    if steps is not None and steps < 1:
        raise ValueError(f"`steps` must be at least 1, got {steps}.")
    start = time.perf_counter()
    pools = DigitPool(held_out=False, seed=seed), DigitPool(held_out=True, seed=seed)
    set_seed(seed)
    say(f"1/5 The language model: {source}")
    output, text = _prepared_with(source, Path(output))
    say("2/5 A small vision tower")
    with one_thread():
        make_vision_checkpoint(output / "vision", pools[0], steps=30 if quick else 1000, seed=seed, where=True)

    say("3/5 Retrofit, and training of what was added")
    model, processor = retrofitted(text, output / "vision")
    base: Any = AutoModelForCausalLM.from_pretrained(text).eval()
    start_connector(model, base, processor, pools[0], seed)
    same_before = same_logits(model.eval(), base, processor)
    recipe = Recipe(steps=steps or (4 if quick else Recipe().steps), **({"batch_size": 6} if quick else {}))
    prompts = TRAINING_PROMPTS[:3] if quick else TRAINING_PROMPTS
    trained = time.perf_counter()
    train(model, processor, pools[0], own_answers(base, processor, prompts), recipe, seed)
    trained = (time.perf_counter() - trained) / 60
    _save(model, processor, output)
    added = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    del model, base

    say("4/5 Questions about held-out canvases")
    dtype = training_dtype(torch.device("cpu"))
    model = AutoModelForImageTextToText.from_pretrained(output / "model", dtype=dtype)
    base = AutoModelForCausalLM.from_pretrained(text, dtype=torch.bfloat16)  # rounded, as the saved model is
    if dtype != base.dtype:  # `to` would also round what a bfloat16 model keeps in float32: the angles of positions
        base = base.to(dtype)
    processor = AutoProcessor.from_pretrained(output / "model")
    count = 2 if quick else 100
    known, new = (held_out_questions(pools[1], count, new_phrasing, seed) for new_phrasing in (False, True))
    scores = _scores(model, base, processor, known, new, blind=known[:: 1 if quick else 5])
    say("5/5 Questions that no picture concerns")
    results = {
        **scores,
        "right as the second question of a chat": second_right(model, processor, known, seed),
        "questions of each kind": count,
        **compare_texts(model, base, processor, pools[1], seed),
        "text-only logits bit-identical before training": same_before,
        "images read a second": images_a_second(model, processor, [each for each in known if each.kind == "read"]),
        "parameters added, million": added / 1e6,
        "adapter-only checkpoint, MB": _megabytes(output / "adapter"),
        "whole checkpoint, MB": _megabytes(output / "model"),
        "training steps": recipe.steps,
        "questions a step": recipe.batch_size,
        "seed": seed,
        "minutes of training": trained,
        "minutes": (time.perf_counter() - start) / 60,
    }
    (output / "results.json").write_text(json.dumps(results, indent=2) + "\n")
    save_examples(output, [question.canvas for question in new if question.kind == "read"][:8])
    draw_questions(output / "questions.png", model, processor, new)
    _write_cards(model, results, output)
    _print(results, output)
    return results


def _prepared_with(source: str | Path, output: Path) -> tuple[Path, Path]:
    """The demo's folder, and that of the language model. Where there is no such model, no empty folder is left."""
    existed = output.exists()
    output = prepared(output)
    try:
        return output, language_model(source, output)
    except Exception:
        undo_prepared(output, existed)
        raise


def _scores(
    model, base, processor: XAttnProcessor, known: list[Question], new: list[Question], blind: list[Question]
) -> dict[str, Any]:
    """The shares of right answers to known and new phrasings. `blind` are asked of the base, without a picture."""
    said, said_to_new = answers(model, processor, known), answers(model, processor, new)
    by_kind = {
        "known phrasings": accuracy_by_kind(known, said),
        "new phrasings": accuracy_by_kind(new, said_to_new),
        "blind": accuracy_by_kind(blind, answers(base, processor, blind, see=False)),
        "most frequent answer": most_frequent_by_kind(known),
    }
    return {
        "accuracy": by_kind,
        "is there, yes or no alone right, known phrasings": verdicts_right(known, said),
        "is there, yes or no alone right, new phrasings": verdicts_right(new, said_to_new),
        "where, place alone right, known phrasings": places_right(known, said),
        "where, place alone right, new phrasings": places_right(new, said_to_new),
    }


def _write_cards(model, results: dict[str, Any], output: Path) -> None:
    examples = [phrasings[0].format(digit="seven") for phrasings in PHRASINGS.values()]
    training = {"data": "questions about canvases of scikit-learn's digits", "steps": results["training steps"]}
    shares = results["accuracy"]["new phrasings"]
    measured = {f"{kind}, new phrasings": f"{share:.1%}" for kind, share in shares.items()}
    for folder in ("model", "adapter"):
        write_model_card(model, output / folder, training=training, results=measured, questions=examples)


def retrofitted(text: Path, vision: Path, layers: list[int] | None = None, block: dict[str, Any] = BLOCK):
    """Puts fresh blocks in front of `layers` of a language model with a chat template.

    Returns the model, whose language model and tower are frozen, and its processor.
    """
    tokenizer = AutoTokenizer.from_pretrained(text, padding_side="left")
    tokenizer.add_tokens([IMAGE_TOKEN], special_tokens=True)
    marker: Any = tokenizer.convert_tokens_to_ids(IMAGE_TOKEN)
    base = AutoModelForCausalLM.from_pretrained(text)
    embedding: Any = base.get_input_embeddings()
    rows = embedding.num_embeddings  # may be more than the tokenizer has
    model = retrofit(
        base,
        vision,
        cross_attention_layers=layers or block_layers(base.config.get_text_config().num_hidden_layers),
        cross_attention=block,
        connector_type="linear",
        image_token_id=marker,
        image_visibility="previous",
        additional_vocab_size=max(0, marker + 1 - rows),
    )
    freeze_base(model)
    if marker >= rows:
        with torch.no_grad():  # an ordinary token, which the frozen layers know how to read
            embedding.additional.weight.copy_(embedding.weight.mean(0, keepdim=True))
    return model, XAttnProcessor(AutoImageProcessor.from_pretrained(vision), tokenizer, image_token=IMAGE_TOKEN)


def _save(model, processor, output: Path) -> None:
    """Saves the whole model and what was added to it, in bfloat16; norms and gates stay in float32."""
    half = model.to(torch.bfloat16)
    for folder, adapter_only in (("model", False), ("adapter", True)):
        half.save_pretrained(output / folder, adapter_only=adapter_only)
        processor.save_pretrained(output / folder)


def _megabytes(folder: Path) -> float:
    return sum(file.stat().st_size for file in folder.glob("*.safetensors")) / 1e6


def _print(results: dict[str, Any], output: Path) -> None:
    columns = list(results["accuracy"])
    print(f"\n{'whole answers right':<22}" + "".join(f"{column:>22}" for column in columns))
    for kind in KINDS:
        print(f"{kind:<22}" + "".join(f"{results['accuracy'][column][kind]:>22.0%}" for column in columns))
    print_table({name: value for name, value in results.items() if name != "accuracy"})
    print(f"\nQuestions, answers, and where the model looked: {output / 'questions.png'}")
    command, model, image = "hf-xattn", str(output / "model"), ["--image", str(example_images(output)[0])]
    print(f"In a chat: {shlex.join([command, 'chat', model, *image])}")
    print(f"For clients: {shlex.join([command, 'serve', model])}")
    print(f"Next: {shlex.join([command, 'generate', model, *image, '--prompt', PHRASINGS['read'][0]])}")
