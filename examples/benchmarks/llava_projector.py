"""What people do instead of cross-attention: a LLaVA-style projector over the demo's language model and tower.

python examples/benchmarks/llava_projector.py OUTPUT [--minutes M] [--seed N] [--trial-steps N]

OUTPUT is the folder of a finished `hf-xattn demo --language-model ...`. Language model and tower are the same and
frozen, and the rows of the training and of the test are the demo's, in the same order. The projector trains as many
minutes as the blocks did. Its learning rate is the best of three in short runs, which the minutes leave out, as they
leave out those that chose the demo's. The table goes to the terminal, and with all figures to OUTPUT/llava.json.
"""

from __future__ import annotations

import argparse
import copy
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from llava_peer import LlavaChats, LlavaTraining, llava_of
from timing import seconds
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoProcessor,
    LlavaForConditionalGeneration,
    PreTrainedModel,
    set_seed,
)

from hf_xattn import XAttnProcessor
from hf_xattn.demo.canvases import DigitPool, picture_of
from hf_xattn.demo.language_scores import accuracy_by_kind, answers, compare_texts, held_out_questions, own_answers
from hf_xattn.demo.language_training import Batch, Recipe, Rows, batch_of_step, training_dtype
from hf_xattn.demo.questions import KINDS, TRAINING_PROMPTS, Question


LEARNING_RATES = (3e-4, 1e-3, 3e-3)


def compare(
    output: Path, minutes: float | None = None, seed: int | None = None, trial_steps: int = 40, repeats: int = 9
) -> dict[str, Any]:
    """Trains the projector, measures it beside the demo's model, and writes `llava.json`.

    Args:
        output (`Path`): folder of a finished demo over a language model.
        minutes (`float`, *optional*): of training. Default: as long as the demo trained.
        seed (`int`, *optional*): seed of the rows and the projector. Default: the demo's.
        trial_steps (`int`): steps of the short run of each learning rate.
        repeats (`int`): rounds of timing.

    Raises:
        ValueError: if `output` holds no finished demo over a language model, or `seed` is not the demo's.
    """
    results = _finished(output)
    its_seed = results.get("seed", seed or 0)
    if seed not in (None, its_seed):
        raise ValueError(
            f"`seed` must be the demo's ({its_seed}), got {seed}: with another one, the test would hold digits that "
            "the tower has seen."
        )
    seed = its_seed
    pools = DigitPool(held_out=False, seed=seed), DigitPool(held_out=True, seed=seed)
    processor = AutoProcessor.from_pretrained(output / "model")
    set_seed(seed)
    text_answers = own_answers(_base(output, torch.float32), processor, TRAINING_PROMPTS)
    llava = _llava(output, processor.image_token_id, torch.float32)
    chats = LlavaChats(processor, llava.config.image_seq_length)
    rows = Rows(processor, pools[0].canvas(np.random.default_rng(seed)))
    batch_size = results.get("questions a step", Recipe().batch_size)
    training = LlavaTraining(llava, chats, rows)

    def batch_of(step: int) -> Batch:
        return batch_of_step(step, rows, pools[0], text_answers, batch_size, seed)

    trained = _train(training, batch_of, results["minutes of training"] if minutes is None else minutes, trial_steps)
    trained["parameters trained, million"] = (
        sum(each.numel() for each in llava.parameters() if each.requires_grad) / 1e6
    )

    dtype = training_dtype(torch.device("cpu"))
    projector = llava.model.multi_modal_projector
    llava = _llava(output, processor.image_token_id, dtype)  # loaded as the blocks' model is: buffers stay in float32
    llava.model.multi_modal_projector.load_state_dict(projector.state_dict())
    base = _base(output, dtype)
    blocks = AutoModelForImageTextToText.from_pretrained(output / "model", dtype=dtype)
    count = results["questions of each kind"]
    known, new = (held_out_questions(pools[1], count, new_phrasing, seed) for new_phrasing in (False, True))
    compared = {
        "blocks": {
            **{name: results[name] for name in results if name not in ("accuracy", "minutes")},
            "parameters trained, million": results["parameters added, million"],
            "accuracy": {name: results["accuracy"][name] for name in ("known phrasings", "new phrasings")},
        },
        "Llava": {
            **trained,
            "accuracy": {
                "known phrasings": accuracy_by_kind(known, answers(llava, chats, known)),
                "new phrasings": accuracy_by_kind(new, answers(llava, chats, new)),
            },
            **compare_texts(llava, base, chats, pools[1], seed),
        },
        "most frequent answer": results["accuracy"]["most frequent answer"],
        **_times(blocks, llava, base, processor, chats, known, repeats),
    }
    (output / "llava.json").write_text(json.dumps(compared, indent=2) + "\n")
    return compared


def _base(output: Path, dtype: torch.dtype) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(output / "text", dtype=dtype).eval()


def _llava(output: Path, image_token_id: int, dtype: torch.dtype) -> LlavaForConditionalGeneration:
    tower = AutoModel.from_pretrained(output / "vision", dtype=dtype).eval()
    return llava_of(_base(output, dtype), tower, image_token_id)


def _finished(output: Path) -> dict[str, Any]:
    file = output / "results.json"
    results = json.loads(file.read_text()) if file.exists() else {}
    if "minutes of training" not in results or not (output / "text").exists():
        raise ValueError(
            f"Expected the folder of a finished `hf-xattn demo --language-model ...`, got {output}, without its "
            f"{'folder text' if results else 'results.json'}."
        )
    return results


def _train(training: LlavaTraining, batch_of, minutes: float, trial_steps: int) -> dict[str, Any]:
    projector = training.model.model.multi_modal_projector
    fresh = copy.deepcopy(projector.state_dict())
    reached = {}
    training.loss(batch_of(0))  # warms up
    start = time.perf_counter()
    for rate in LEARNING_RATES:
        losses = training.train(batch_of, trial_steps, rate, f"projector, short run with {rate:g}")
        reached[rate] = float(np.mean(losses[-(trial_steps // 4 + 1) :]))
        projector.load_state_dict(fresh)
    a_step = (time.perf_counter() - start) / (len(LEARNING_RATES) * trial_steps)
    rate, steps = min(reached, key=lambda each: reached[each]), max(1, round(60 * minutes / a_step))
    start = time.perf_counter()
    training.train(batch_of, steps, rate, "projector, questions")
    return {
        "loss of short runs": {f"{each:g}": loss for each, loss in reached.items()},
        "learning rate": rate,
        "training steps": steps,
        "minutes of training": (time.perf_counter() - start) / 60,
    }


def _times(
    blocks, llava, base, processor: XAttnProcessor, chats: LlavaChats, questions: list[Question], repeats: int
) -> dict[str, dict[str, float]]:
    """One prompt of each kind, alone: the time to its first token. And the pictures read a second, all at once."""
    prompts = [next(each for each in questions if each.kind == kind) for kind in KINDS]

    def inputs_of(processor, see: bool) -> list[dict[str, torch.Tensor]]:
        made = []
        for question in prompts:
            picture = [{"type": "image", "image": picture_of(question.canvas)}] * see
            chat = [{"role": "user", "content": [*picture, {"type": "text", "text": question.text}]}]
            made.append(
                processor.apply_chat_template([chat], tokenize=True, return_dict=True, add_generation_prompt=True)
            )
        return made

    inputs = {
        "blocks": (blocks, inputs_of(processor, True)),
        "Llava": (llava, inputs_of(chats, True)),
        "base, without a picture": (base, inputs_of(processor, False)),
    }

    def first_tokens(name: str) -> None:
        model, prompts = inputs[name]
        for prompt in prompts:
            model.generate(**prompt, max_new_tokens=1, do_sample=False)

    first = seconds({name: lambda name=name: first_tokens(name) for name in inputs}, repeats)
    reads = [each for each in questions if each.kind == "read"]
    read = seconds(
        {"blocks": lambda: answers(blocks, processor, reads), "Llava": lambda: answers(llava, chats, reads)},
        max(1, repeats // 3),
    )
    tokens = {name: sum(each["input_ids"].shape[1] for each in made) / len(made) for name, (_, made) in inputs.items()}
    return {
        "first token, ms": {name: 1000 * value / len(prompts) for name, value in first.items()},
        "tokens of the prompt": tokens,
        "images read a second": {name: len(reads) / value for name, value in read.items()},
    }


def table(compared: dict[str, Any]) -> str:
    """Returns the comparison as Markdown."""
    blocks, llava = compared["blocks"], compared["Llava"]
    lines = [
        "| whole answers right | blocks | Llava | blocks, new phrasings | Llava, new phrasings | most frequent answer |"
    ]
    lines.append("|---" * 6 + "|")
    for kind in KINDS:
        shares = [side["accuracy"][f"{name} phrasings"][kind] for name in ("known", "new") for side in (blocks, llava)]
        shares.append(compared["most frequent answer"][kind])
        lines.append(f"| {kind} | " + " | ".join(f"{share:.0%}" for share in shares) + " |")
    lines += ["", "| | blocks | Llava | Llava / blocks |", "|---|---|---|---|"]
    questions = blocks["text-only questions"]
    for name, title in (
        ("answered token for token as the base", f"of {questions} text-only answers, the base's token for token"),
        ("the same, beside a picture that does not matter", "... with a picture in the chat that does not matter"),
        ("right, with sight", f"right (base: {blocks['right, base']})"),
        ("right, with sight, beside a picture", "... with the picture"),
    ):
        lines.append(f"| {title} | {blocks[name]} | {llava[name]} | |")
    bit = [("no", "yes")[side["text-only logits bit-identical"]] for side in (blocks, llava)]
    lines.append(f"| text-only logits the base's, bit for bit | {bit[0]} | {bit[1]} | |")
    without = compared["first token, ms"]["base, without a picture"]
    for title, pair in (
        (f"first token, ms (base without a picture: {without:.1f})", compared["first token, ms"]),
        ("tokens of the prompt", compared["tokens of the prompt"]),
        ("images read a second", compared["images read a second"]),
        *(
            (name, {"blocks": blocks[name], "Llava": llava[name]})
            for name in ("parameters trained, million", "training steps", "minutes of training")
        ),
    ):
        ours, theirs = pair["blocks"], pair["Llava"]
        lines.append(f"| {title} | {ours:.1f} | {theirs:.1f} | {theirs / ours:.2f} |")
    rates = ", ".join(f"{rate}: {loss:.3f}" for rate, loss in llava["loss of short runs"].items())
    lines += ["", f"Llava's learning rate: {llava['learning rate']:g} (loss at the end of short runs: {rates})."]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", metavar="OUTPUT", type=Path, help="folder of a finished demo over a language model")
    parser.add_argument("--minutes", type=float, help="of training (default: as many as the demo's)")
    parser.add_argument("--seed", type=int, help="seed of the rows and the projector (default: the demo's)")
    parser.add_argument("--trial-steps", type=int, default=40, help="steps of the short runs (default: 40)")
    arguments = parser.parse_args()
    print(table(compare(arguments.output, arguments.minutes, arguments.seed, arguments.trial_steps)))


if __name__ == "__main__":
    main()
