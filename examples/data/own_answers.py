"""Lets a text model answer the questions of rows without a picture, for `hf-xattn train --distill-text`.

`hf-xattn train` does this by itself for prompts, one a line (`--text-prompts`); this is for rows of any form.

python examples/data/own_answers.py MODEL --data SOURCE... --output FILE.jsonl [--max-new-tokens 32]

With `--distill-text` a model learns how likely its text model finds each next token of an answer. If the answers were
written by someone else, it would learn that for beginnings that the text model would never have written. MODEL is a
folder of `hf-xattn retrofit` or `train`: without a picture it answers as its text model. Each question is answered
once; an answer is cut after `--max-new-tokens`.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForImageTextToText, AutoProcessor

from hf_xattn import load_rows, questions_of


@torch.no_grad()
def answered(model: Any, processor: Any, questions: list[Any], batch_size: int, tokens: int) -> list[Any]:
    """A row `{"messages": [...]}` for each different question: its chat, and the greedy answer without a picture."""
    different = list({json.dumps(each.messages): each for each in questions}.values())
    said: list[str] = []
    for start in range(0, len(different), batch_size):
        chats = [each.messages for each in different[start : start + batch_size]]
        inputs = processor.apply_chat_template(
            chats,
            add_generation_prompt=True,
            tokenize=True,
            return_dict=True,
            return_tensors="pt",
            processor_kwargs={"padding": True},
        ).to(model.device)
        made = model.eval().generate(**inputs, max_new_tokens=tokens, do_sample=False, num_beams=1)
        said += processor.batch_decode(made[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return [
        {"messages": [*each.messages, {"role": "assistant", "content": answer}]}
        for each, answer in zip(different, said)
        if answer
    ]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a folder of `hf-xattn retrofit` or `train`, or a Hub id")
    parser.add_argument("--data", nargs="+", required=True, help="rows, as for `hf-xattn train --data`")
    parser.add_argument("--output", type=Path, required=True, metavar="FILE", help="a new file, .jsonl")
    parser.add_argument("--max-new-tokens", type=int, default=32)
    parser.add_argument("--batch-size", type=int, default=16)
    options = parser.parse_args(arguments)
    if options.output.exists() or options.output.suffix != ".jsonl":
        parser.error(f"expected --output to be a new file whose name ends with .jsonl, got {options.output}")
    questions = [each for each in questions_of(load_rows(options.data)) if not each.pictures]
    if not questions:
        parser.error(f"expected rows without a picture in {options.data}, got none")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModelForImageTextToText.from_pretrained(options.model).to(device)
    processor = AutoProcessor.from_pretrained(options.model)
    rows = answered(model, processor, questions, options.batch_size, options.max_new_tokens)
    options.output.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    print(f"{len(rows)} of {len(questions)} questions answered: {options.output}")


if __name__ == "__main__":
    main()
