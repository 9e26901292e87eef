"""Runs an example as its reader does."""

import pytest

from helpers.checkout import EXAMPLES
from helpers.processes.warm_processes import run
from hf_xattn.utils.transformers_api import has, needs


TRAINED = ("training", "checkpoints", "own_parts", "garments")  # folders of examples that train
EXPECTED = {
    "blocks/retrofit_text_model": ["bit-identical to the base: True", "parameters train"],
    "chat_and_serving/load_and_generate": ["its words mean nothing", "one image: ", "two images: ", "no image: "],
    "import_export/import_checkpoint": ["largest difference of a logit: ", "written back, bit for bit: True"],
    "benchmarks/capacity": ["| Llama-3.2-1B"],
    "benchmarks/against_llava --hidden 64 --images 1 --questions --repeats 1": [
        "| InternVL / ours |",
        "1 image(s): decode step, static caches",
        "one question, prefix kept, static caches",
    ],
    "benchmarks/bench --quick": ["decode attention, 4 beam(s)", "growth of a decode step"],
    "benchmarks/decode_attention --tokens 100 --repeats 1": ["read bandwidth", "| float16 | 100 | 32 | 1 |"],
    "benchmarks/side_by_side --only attention --repeats 1 --images": ["the same, 4 beams, N 1601", "| times better |"],
    "benchmarks/int8_images --quick --repeats 1": ["| bfloat16 | 1 | 1601 | 0.516 |", "| float32 | 1601 | 0.258 |"],
    "chat_and_serving/chat_about_two_images": [
        "its words mean nothing",
        "first answer: ",
        "pictures encoded: 2, taken from the store: 2",
    ],
    "chat_and_serving/ask_server": ["its words mean nothing", "answer: ", "streamed: "],
    "training/train_on_your_pictures": ["eval_loss", "evaluation loss", "captions right after training: 4 of 4"],
    "data/at_size --rows 2000 --shards 4 --steps 20 --questions 40": [
        "killed behind step 5 of 20",
        "640 rows of 2000",
        "right answers: ",
    ],
    "data/plan --text-tokens 20": ["| TFLOP of a row", "5196 steps of 128 rows"],
    "benchmarks/reading --pictures 64 --rows 2000 --steps 1": ["| rows read and collated (224) |", "share of a step"],
    "garments/run": [
        "its scores mean nothing",
        "questions about 24 pictures",
        "saved to ",
        "| caption: the model | ",
        "| the model answers as its base, word for word | 1 | 100.0%",
    ],
    "training/freeze_schedule": ["the text model trains from step 4 on: True"],
    "training/caption_with_trainer": ["loss falls: True", "captions right: 4 of 4"],
    "checkpoints/adapter_only": [
        "shapes: ['circle', 'square', 'circle', 'square']",
        "colours: ['red', 'red', 'blue', 'blue']",
        "bit-identical to the base: True",
    ],
    "training/keep_text_ability --steps 60 --text-steps 400": [
        "| yes |",
        "frozen, the perplexity stays: True",
        "on pictures alone it doubles or worse: True",
        "with rows of text it stays within a tenth: True",
    ],
    "checkpoints/lora": ["captions right: 4 of 4", "captions right after merging: 4 of 4"],
    "checkpoints/quantized_base": ["text model: torch.uint8", "blocks: torch.float32", "captions right: 4 of 4"],
    "training/fine_tune_with_trl": ["loss falls: True", "captions right: 4 of 4"],
    "evaluation/with_lm_eval": [
        "all figures are the base's, digit for digit: True",
        "log-likelihoods and answers too: True",
        "the same answers: 8 of 8",
    ],
    "vllm/serve_and_ask": [
        "one picture: the answer of `generate`: True",
        "two pictures: the answer of `generate`: True",
        "no picture: the answer of `generate`: True",
        "a broken picture: 400",
    ],
    "own_parts/train_on_digits --quick": ["in the folder: True", "held-out digits right: "],
    "blocks/time_series": ["frequencies right: ", "learnt: True"],
    "caches/encode_once_ask_many": [
        "its words mean nothing",
        "K/V projections: 2 for 2 blocks and 4 questions",
        "the same answers from the file: True",
    ],
}


NEEDS = {
    "training/fine_tune_with_trl": "trl",
    "checkpoints/lora": "peft",
    "checkpoints/quantized_base": "bitsandbytes",
    "evaluation/with_lm_eval": "lm_eval",
    "vllm/serve_and_ask": "vllm.config",  # `examples/vllm` looks like a package of this name
}


# Longer than half a minute. What they call has tests of its own; `bench --quick` stays for the benchmarks.
LONG = {
    "training/keep_text_ability --steps 60 --text-steps 400",
    "data/at_size --rows 2000 --shards 4 --steps 20 --questions 40",
    "garments/run",
    "evaluation/with_lm_eval",
    "benchmarks/against_llava --hidden 64 --images 1 --questions --repeats 1",
    "benchmarks/decode_attention --tokens 100 --repeats 1",
    "benchmarks/int8_images --quick --repeats 1",
    "benchmarks/reading --pictures 64 --rows 2000 --steps 1",
    "benchmarks/side_by_side --only attention --repeats 1 --images",
}


def examples(*folders, others=False):
    """The examples of some folders, or of all others, as parameters of a test."""
    chosen = [each for each in EXPECTED if (each.split("/")[0] in folders) != others]
    return [pytest.param(each, marks=pytest.mark.slow if each in LONG else ()) for each in chosen]


def run_example(example, folder):
    """Runs an example in a folder, and looks for what it has to print."""
    if example in NEEDS:
        pytest.importorskip(NEEDS[example])
    name, *options = example.split()
    source = (EXAMPLES / f"{name}.py").read_text()
    if ("AutoImageProcessor" in source or "tiny_chat" in source) and not has("AutoImageProcessor without torchvision"):
        pytest.skip(needs("AutoImageProcessor without torchvision", name))
    output = run([EXAMPLES / f"{name}.py", *options], cwd=folder)
    assert output.returncode == 0, output.stderr
    for line in EXPECTED[example]:
        assert line in output.stdout
