"""What `hf-xattn train` leaves behind: a model that answers what it learnt, in whatever way the folder and the
commands offer.
"""

import json
import re

import pytest
import transformers
from tokenizers import AddedToken, processors
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoProcessor,
    AutoTokenizer,
    LlamaConfig,
    SiglipImageProcessorPil,
)
from transformers.testing_utils import CaptureLogger

from helpers.inputs.collator_rows import row
from helpers.inputs.training_examples import CAPTIONS, COLOURS, draw, write_examples
from helpers.models.template_models import (
    CHATML,
    TEXT,
    make_chat_model,
    make_processor,
    make_tokenizer,
    save_chat_model,
)
from helpers.processes.command_runs import FAST, interrupted, run, run_training
from hf_xattn import XAttnDataCollator, XAttnProcessor, retrofit
from hf_xattn.data.forms import CAPTION_PROMPT
from hf_xattn.training import collator
from hf_xattn.training.run_folder import CHECKPOINTS
from hf_xattn.utils.transformers_api import is_before


FEW_LOGS = "--device cpu --log-steps 1000 --save-steps 1000".split()


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A model that has learnt four captions, its pictures beside it, and what the command printed."""
    folder = tmp_path_factory.mktemp("trained")
    save_chat_model(folder / "model")
    data = write_examples(folder / "data", CAPTIONS[:4])
    command = [
        "train",
        folder / "model",
        "--data",
        data,
        "--output",
        folder / "out",
        "--steps",
        "60",
        "--eval-data",
        data,
    ]
    options = ["--batch-size", "4", "--learning-rate", "0.02", "--train-text", "--train-vision", "--device", "cpu"]
    with pytest.MonkeyPatch.context() as patch:
        printed = []
        patch.setattr("hf_xattn.training.training_run.say", lambda text: printed.append(str(text)))
        from hf_xattn.commands.main import main

        assert main([*map(str, command), *options]) == 0
    return folder / "out", data, printed


def test_captions_are_learned(trained):
    """A model that trains and learns nothing of the pictures."""
    folder, _, printed = trained
    model, processor = (auto.from_pretrained(folder) for auto in (AutoModelForImageTextToText, AutoProcessor))
    losses = [float(line.split()[-1]) for line in printed if line.startswith("evaluation loss")]
    assert losses[-1] < 0.3
    for colour in COLOURS:
        parts = [{"type": "image", "image": draw(colour)}, {"type": "text", "text": CAPTION_PROMPT}]
        inputs = processor.apply_chat_template(
            [{"role": "user", "content": parts}],
            tokenize=True,
            return_dict=True,
            return_tensors="pt",
            add_generation_prompt=True,
        )
        tokens = model.generate(**inputs, max_new_tokens=30, do_sample=False)[0, inputs["input_ids"].shape[1] :]
        assert processor.decode(tokens) == f"a {colour} circle.<|im_end|>"


def test_the_code_of_the_card_gives_the_learnt_answer(trained, capsys):
    """A card whose lines, copied, get other answers than the model has learnt, because they leave the chat template
    out.
    """
    folder, data, _ = trained
    (code,) = re.findall("```python\n(.*?)```", (folder / "README.md").read_text(), re.DOTALL)
    code = code.replace('name = "..."', f"name = {str(folder)!r}").replace(
        '"text": "..."', f'"text": {CAPTION_PROMPT!r}'
    )
    for colour in COLOURS:
        exec(compile(code.replace("picture.png", str(data / f"{colour}.png")), "README.md", "exec"), {})
        assert capsys.readouterr().out == f"a {colour} circle.\n"


def test_generate_answers_in_the_form_that_was_trained(trained, tmp_path, capsys):
    """A prompt that goes to the model as it is, in a form that it has never read; encoded pictures that are asked in
    another form.
    """
    folder, data, _ = trained
    question = ["--prompt", CAPTION_PROMPT, "--max-new-tokens", "30"]
    for colour in COLOURS:
        image = ["--image", data / f"{colour}.png"]
        status, out, error = run(capsys, "generate", folder, *image, *question)
        assert status == 0 and out == f"a {colour} circle.\n", error
    file = tmp_path / "encoded.safetensors"
    assert run(capsys, "encode", folder, *image, "--output", file)[0] == 0
    status, out, error = run(capsys, "generate", folder, "--image-cache", file, *question)
    assert status == 0 and out == f"a {colour} circle.\n", error
    model, processor = (auto.from_pretrained(folder) for auto in (AutoModelForImageTextToText, AutoProcessor))
    prompt = f"{processor.image_token} a"
    inputs = processor(text=prompt, images=draw(colour))
    tokens = model.generate(**inputs, max_new_tokens=9, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    raw = ["--raw", "--prompt", prompt, "--max-new-tokens", "9"]
    for given in (image, ["--image-cache", file]):
        status, out, error = run(capsys, "generate", folder, *given, *raw)
        assert status == 0 and out == processor.decode(tokens, skip_special_tokens=True) + "\n", error
    status, _, error = run(capsys, "generate", folder, *image, *raw[1:])
    assert status == 2 and "`--prompt` contains <image>, which the chat template writes" in error and "`--raw`" in error


def test_the_last_line_gives_the_loss_of_the_last_steps(trained):
    """A loss of all steps, which is far from where the model is, as the last word on the run."""
    folder, _, printed = trained
    state = json.loads((folder / CHECKPOINTS / "checkpoint-60" / "trainer_state.json").read_text())
    losses = [entry["loss"] for entry in state["log_history"] if "loss" in entry]
    assert printed[-1] == f"training loss {losses[-1]:.4f} (mean of the steps 51 to 60)"
    assert losses[-1] < sum(losses) / len(losses) / 3


def test_the_last_line_of_few_steps(tmp_path, capsys):
    """A last line that is the loss of a single batch, because the log ended one step before."""
    save_chat_model(tmp_path / "model")
    data = write_examples(tmp_path / "data", CAPTIONS)
    options = [
        "--data",
        data,
        "--output",
        tmp_path / "out",
        "--steps",
        "3",
        "--save-steps",
        "3",
        "--text-share",
        "0",
        "--device",
        "cpu",
        *FAST,
    ]
    status, out, error = run(capsys, "train", tmp_path / "model", *options)
    assert status == 0, error
    state = json.loads((tmp_path / "out" / CHECKPOINTS / "checkpoint-3" / "trainer_state.json").read_text())
    first, second = (entry["loss"] for entry in state["log_history"] if "loss" in entry)  # of two steps, and of one
    told = f"training loss {(2 * first + second) / 3:.4f} (mean of the steps 1 to 3)"
    assert out.splitlines()[-1] == told


def test_tied_weights_of_a_checkpoint(tmp_path, capsys, monkeypatch, caplog):
    """A resumed run that warns of `lm_head.weight`, which is tied to the embeddings and stands in no file."""
    transformers.logging.enable_propagation()
    processor = make_processor()
    seeing = make_chat_model(processor)
    sizes = {**seeing.config.text_config.to_dict(), "tie_word_embeddings": True}
    tied = retrofit(AutoModelForCausalLM.from_config(LlamaConfig(**sizes)), seeing.model.vision_tower, every=2)
    assert tied.all_tied_weights_keys
    tied.save_pretrained(tmp_path / "model")
    processor.save_pretrained(tmp_path / "model")
    data = write_examples(tmp_path / "data", CAPTIONS)
    options = [tmp_path / "model", "--data", data, "--steps", "4", "--save-steps", "2", "--text-share", "0", *FAST]
    assert run(capsys, "train", *options, "--output", tmp_path / "whole", "--device", "cpu")[0] == 0
    interrupted(capsys, monkeypatch, 3, *options, "--output", tmp_path / "out")
    caplog.clear()
    status, out, error = run(capsys, "train", *options, "--output", tmp_path / "out", "--device", "cpu", "--resume")
    assert status == 0 and "Continuing from" in out, error
    assert "missing keys" not in caplog.text + error
    one, other = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", "out"))
    assert one == other


@pytest.fixture
def data(tmp_path):
    return write_examples(tmp_path / "data", CAPTIONS)


@pytest.mark.parametrize("eos", ["<|im_end|>", "</s>"])
def test_answers_end_where_the_template_ends_a_turn(eos, data, tmp_path, capsys):
    """A model that has learned where an answer ends, and is not stopped there."""
    processor = make_processor(CHATML, eos=eos)
    make_chat_model(processor).save_pretrained(tmp_path / "fresh")
    processor.save_pretrained(tmp_path / "fresh")
    options = ["--steps", "1", *FEW_LOGS]
    status, said, error = run_training(
        capsys, tmp_path / "fresh", "--data", data, "--output", tmp_path / "out", *options
    )
    assert status == 0, error
    ends = AutoModelForImageTextToText.from_pretrained(tmp_path / "out").generation_config.eos_token_id
    turn, own = (processor.tokenizer.convert_tokens_to_ids(token) for token in ("<|im_end|>", eos))
    if is_before("5.18.0"):  # `Trainer` lists the tokenizer's token twice
        ends = list(dict.fromkeys(ends))
        ends = ends[0] if len(ends) == 1 else ends
    assert ends == (turn if own == turn else [own, turn])
    assert ("ends a turn with it" in said) == (own != turn)


@pytest.mark.parametrize("runs", [(), ("    ", "  ")], ids=["spaces", "runs of spaces"])
def test_spaces_with_trimmed_offsets_are_labels(runs, tmp_path):
    """A model that learns code without its indentation, because a space has no width for its tokenizer."""
    tokenizer = make_tokenizer(CHATML)
    tokenizer.backend_tokenizer.post_processor = processors.ByteLevel(add_prefix_space=False, trim_offsets=True)
    tokenizer.add_tokens([AddedToken(each, normalized=True) for each in runs])
    tokenizer.save_pretrained(tmp_path)
    size = {"height": 32, "width": 32}
    processor = XAttnProcessor(SiglipImageProcessorPil(size=size), AutoTokenizer.from_pretrained(tmp_path))
    answer = "def f(x):\n    if x:\n        return 1"
    labels = XAttnDataCollator(processor)([row(answer)])["labels"][0]
    assert processor.tokenizer.decode(labels[labels != -100]).startswith(answer)


@pytest.mark.parametrize("space, told", [("", False), (" ", True)])
def test_a_prompt_that_ends_inside_a_token(space, told):
    """A model that is trained on one token for the end of the prompt and its answer, and asked with another."""
    template = TEXT + (
        f"{{%- for m in messages -%}}{{{{ m.role + ':{space}' + text(m.content) + '<|im_end|>' }}}}{{%- endfor -%}}"
        f"{{%- if add_generation_prompt -%}}{{{{ 'assistant:{space}' }}}}{{%- endif -%}}"
    )
    processor = make_processor(template)
    collator.logger.warning_once.cache_clear()
    with CaptureLogger(collator.logger) as said:
        XAttnDataCollator(processor)([row("red circle")])
    assert ("begins in the generation prompt" in said.out) == told, said.out
