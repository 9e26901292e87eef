"""`hf-xattn train` in two processes with FSDP2: the saved folder is that of one process.

accelerate shards on a GPU only. Here each process is told that it does (`accelerator_with_fsdp`)."""

import json
import re

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from helpers.checkout import HELPERS
from helpers.inputs.training_examples import CAPTIONS, write_examples
from helpers.models.template_models import CHATML, make_chat_model, make_processor
from helpers.models.tiny_models import randomize
from helpers.processes.command_runs import run_training
from helpers.processes.warm_processes import run_ranks
from hf_xattn import retrofit
from hf_xattn.training.run_folder import CHECKPOINTS, OPTIONS_FILE


slow = pytest.mark.slow  # a launch more of the same kind
RANKS = HELPERS / "processes" / "train_ranks.py"
ALL = ["--train-text", "--train-vision"]
CASES = {
    # name: (dtype, options of the command, options of FSDP)
    "frozen base": ("float32", ["--eval-data", "held out"], {}),
    "all trains": ("bfloat16", ALL, {"state_dict_type": "sharded_state_dict", "checkpointing": True}),
    # Half of the batches have no text of this kind, and their process must gather weights all the same.
    "texts beside pictures": ("float32", ["--distill-text", "2"], {}),
    "adapter": ("bfloat16", ["--adapter-only"], {"state_dict_type": "sharded_state_dict"}),
}
FIXED = "--epochs 2 --save-steps 2 --log-steps 3 --learning-rate 0.01 --text-share 0".split()


def arguments(desk, case, batch_size, name):
    dtype, options, _ = CASES[case]
    data = desk / ("texts" if "--distill-text" in options else "data")
    options = [desk / option if option == "held out" else option for option in options]
    paths = (desk / dtype, "--data", data, "--output", desk / f"{case} {name}")
    return [str(part) for part in (*paths, *FIXED, *options, "--batch-size", batch_size)]


@pytest.fixture(scope="module")
def desk(tmp_path_factory):
    """A model with tied embeddings in two dtypes, and captions of several lengths."""
    folder = tmp_path_factory.mktemp("sharded_training")
    processor = make_processor(CHATML)
    chat = make_chat_model(processor)
    chat.config.text_config.tie_word_embeddings = True
    for dtype in ("float32", "bfloat16"):
        parts = (AutoModelForCausalLM.from_config(chat.config.text_config), chat.model.vision_tower)
        for name, part in zip(("text", "vision"), parts):
            part.to(getattr(torch, dtype)).save_pretrained(folder / f"{dtype} {name}")
        model = retrofit(folder / f"{dtype} text", folder / f"{dtype} vision", every=1)
        randomize(model).save_pretrained(folder / dtype)
        processor.save_pretrained(folder / dtype)
    write_examples(
        folder / "data", [{**line, "text": line["text"] * (1 + index % 3)} for index, line in enumerate(CAPTIONS)]
    )
    # `Trainer` takes the mean of the means of batches, which is the same for other batches if answers are equally long.
    held_out = [{"file_name": f"{colour}.png", "text": "a red circle."} for colour in ("red", "blue")]
    write_examples(folder / "held out", held_out)
    text = {"question": "what ?", "answer": "a red circle."}
    write_examples(folder / "texts", [*CAPTIONS[:4], *[text] * 4])
    return folder


def launch(desk, cases, *more):
    for case in cases:
        command = [*arguments(desk, case, 1, "ranks"), "--device", "cpu", *more]
        (desk / f"{case}.json").write_text(json.dumps({"arguments": command, "fsdp": CASES[case][2]}))
    return run_ranks(2, [RANKS, desk, *cases])


def read(folder):
    return load_file(next(folder.glob("*.safetensors")))


@pytest.mark.parametrize(
    "case",
    ["all trains", *(pytest.param(case, marks=slow) for case in ("frozen base", "texts beside pictures", "adapter"))],
)
def test_ranks_save_what_one_process_saves(case, desk, capsys):
    """Half of the weights, or weights in the dtype of the optimizer; a configuration that asks for it; a mean of one
    rank's rows.
    """
    launch(desk, [case])
    status, _, error = run_training(capsys, *arguments(desk, case, 2, "one"))
    assert status == 0, error
    one, ranks = desk / f"{case} one", desk / f"{case} ranks"
    assert {path.name for path in ranks.iterdir()} == {path.name for path in one.iterdir()}
    assert json.loads((ranks / "config.json").read_text()) == json.loads((one / "config.json").read_text())
    expected, found = read(one), read(ranks)
    assert {name: weight.dtype for name, weight in found.items()} == {n: weight.dtype for n, weight in expected.items()}
    half = CASES[case][0] == "bfloat16"
    for name, weight in expected.items():
        # AdamW makes much of a rounding error in a gradient near zero: half a dozen steps of the learning rate at most.
        torch.testing.assert_close(found[name], weight, rtol=1e-4, atol=6e-2 if half else 1e-4, msg=name)
    cards = [(folder / "README.md").read_text().splitlines() for folder in (one, ranks)]
    measured = [[line for line in card if " loss" in line and "|" in line] for card in cards]
    for lines in zip(*measured, strict=True):
        one_loss, ranks_loss = (float(re.search(r"\d+\.\d+", line)[0]) for line in lines)
        assert ranks_loss == pytest.approx(one_loss, rel=1e-2 if half else 1e-3), lines
    shapes = [[line for line in card if line.startswith("| K/V") or "parameters" in line] for card in cards]
    assert shapes[0] and shapes[0] == shapes[1]
    trained = AutoModelForImageTextToText.from_pretrained(ranks, dtype="auto")
    assert trained.dtype == getattr(torch, CASES[case][0])
    before = AutoModelForImageTextToText.from_pretrained(desk / CASES[case][0]).state_dict()
    assert any(not torch.equal(weight, before[name]) for name, weight in trained.state_dict().items())


@slow
def test_saved_again_after_the_last_step(desk):
    """Two ranks that are killed after their last checkpoint, which holds a part of each weight, and cannot go on."""
    cases = [case for case in CASES if "state_dict_type" in CASES[case][2]]
    if missing := [case for case in cases if not (desk / f"{case} ranks").exists()]:
        launch(desk, missing)
    expected = {}
    for case in cases:
        output = desk / f"{case} ranks"
        expected[case] = read(output)
        next(output.glob("*.safetensors")).unlink()
        options = json.loads((output / OPTIONS_FILE).read_text())
        del options["complete"]
        (output / OPTIONS_FILE).write_text(json.dumps(options))
        assert list((output / CHECKPOINTS / "checkpoint-8").rglob("*.distcp"))
    assert launch(desk, cases, "--resume").count("no steps left to train after step 8") == len(cases)
    for case, weights in expected.items():
        found = read(desk / f"{case} ranks")
        assert found.keys() == weights.keys()
        assert all(torch.equal(found[name], weight) for name, weight in weights.items())
