"""`hf-xattn train`: from a folder of pictures to a folder of a model, with a real `Trainer`."""

import dataclasses
import json
import re
import shutil

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoProcessor, Trainer

from helpers.inputs.training_examples import CAPTIONS, CHAT, MIXED, draw, write_examples
from helpers.models.template_models import make_processor, save_chat_model
from helpers.models.tiny_mllama import make_mllama, make_mllama_processor
from helpers.models.tiny_models import make_text, randomize
from helpers.processes.command_runs import FAST, interrupted, run_training
from hf_xattn import XAttnDataCollator, XAttnForConditionalGeneration, XAttnProcessor, retrofit
from hf_xattn.commands.main import main
from hf_xattn.commands.train import GROUPS
from hf_xattn.data.forms import FORMS
from hf_xattn.data.loading import load_rows
from hf_xattn.data.rows import ROLES
from hf_xattn.training.run_data import digest_of_pictures
from hf_xattn.training.run_folder import OPTIONS_FILE
from hf_xattn.training.training_options import TrainingOptions
from hf_xattn.utils.projection import multiplies_natively


FEW_LOGS = "--device cpu --log-steps 1000 --save-steps 1000".split()


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("train") / "model"
    save_chat_model(folder)
    return folder


def weights(folder):
    return AutoModelForImageTextToText.from_pretrained(folder).state_dict()


def test_trains_every_form(model, tmp_path, capsys):
    """A form of an example that is not trained on, weights that should stay and do not, or a folder that nothing
    loads.
    """
    data = write_examples(tmp_path / "data", MIXED)
    status, out, error = run_training(
        capsys, model, "--data", data, "--output", tmp_path / "out", "--epochs", "3", "--eval-share", "0.25", *FAST
    )
    assert status == 0, error
    assert "6 examples to train on, 2 to evaluate on" in out and "evaluation loss" in out
    trained = AutoModelForImageTextToText.from_pretrained(tmp_path / "out")
    before, after = weights(model), trained.state_dict()
    moved = {name for name, values in after.items() if not torch.equal(values, before[name])}
    assert moved == {name for name in after if "cross_attention_block" in name or "connector" in name}
    processor = AutoProcessor.from_pretrained(tmp_path / "out")
    assert isinstance(processor, XAttnProcessor) and processor.image_token == "<image>"
    assert "use_cache" not in json.loads((tmp_path / "out" / "config.json").read_text())
    assert trained.generate(**processor(text="<image> a", images=draw("red")), max_new_tokens=2).shape[1] > 2


def test_resumed_run_gives_the_same_weights(model, tmp_path, capsys, monkeypatch):
    """A run that was stopped and resumed, and is another one: other rows, another rate, a fresh optimizer."""
    data = write_examples(tmp_path / "data", MIXED)
    options = [
        model,
        "--data",
        data,
        "--epochs",
        "3",
        "--save-steps",
        "2",
        "--eval-share",
        "0.25",
        "--gradient-accumulation",
        "2",
        *FAST,
    ]
    assert run_training(capsys, *options, "--output", tmp_path / "whole")[0] == 0
    out = ["--output", tmp_path / "stopped"]
    interrupted(capsys, monkeypatch, 5, *options, *out)
    assert not (tmp_path / "stopped" / "config.json").exists()
    for step, name in ((98, "model.safetensors"), (99, "trainer_state.json")):  # cut off while they were written
        broken = tmp_path / "stopped" / "checkpoints" / f"checkpoint-{step}"
        broken.mkdir()
        (broken / name).write_text('{"global_')
    steps, step = [], Trainer.training_step
    logs, train = [], Trainer.train
    with monkeypatch.context() as patch:
        patch.setattr(
            Trainer, "train", lambda self, **given: (train(self, **given), logs.append(self.state.log_history))[0]
        )
        patch.setattr(Trainer, "training_step", lambda self, *args: steps.append(1) or step(self, *args))
        status, printed, error = run_training(capsys, *options, *out, "--resume")
    assert status == 0 and "Continuing from" in printed and "checkpoint-4" in printed, error
    assert 0 < len(steps) < 3 * 3  # of 3 epochs of 3 micro-batches, some were taken before
    assert "(mean of all steps)" not in printed
    lasts = [entry["loss"] for entry in logs[-1] if "loss" in entry and entry["step"] > 4]
    told = re.search(r"training loss ([\d.]+) \(mean of the steps 5 to (\d+)\)", printed)
    assert told and float(told[1]) == pytest.approx(sum(lasts) / len(lasts), abs=1e-3)
    whole, resumed = weights(tmp_path / "whole"), weights(tmp_path / "stopped")
    assert all(torch.equal(resumed[name], values) for name, values in whole.items())
    assert not all(torch.equal(values, weights(model)[name]) for name, values in whole.items())
    status, _, error = run_training(capsys, *options, *out, "--resume")
    assert status == 2 and "complete" in error


def test_resumed_before_the_first_checkpoint(model, tmp_path, capsys, monkeypatch):
    """A run that was stopped early, and cannot go on; and one that goes on as another run."""
    data = write_examples(tmp_path / "data", CAPTIONS)
    options = [model, "--data", data, "--output", tmp_path / "out", "--save-steps", "4", *FAST]
    status, _, error = run_training(capsys, *options, "--resume")
    assert status == 2 and "found no run" in error
    interrupted(capsys, monkeypatch, 2, *options)
    status, _, error = run_training(capsys, *options, "--resume", "--learning-rate", "0.5")
    assert status == 2 and "`--learning-rate` to be 0.01" in error and "0.5" in error
    write_examples(tmp_path / "data", CAPTIONS[1:])
    status, _, error = run_training(capsys, *options, "--resume")
    assert status == 2 and "got other data" in error
    write_examples(tmp_path / "data", CAPTIONS)
    status, out, error = run_training(capsys, *options, "--resume")
    assert status == 0 and "No checkpoint found" in out, error


def test_resumed_after_the_last_step(model, tmp_path, capsys):
    """A run that was stopped while it saved its model, and takes one step more than it should."""
    data = write_examples(tmp_path / "data", CAPTIONS)
    options = [model, "--data", data, "--output", tmp_path / "out", "--steps", "2", *FAST]
    assert run_training(capsys, *options)[0] == 0
    whole = weights(tmp_path / "out")
    saved = json.loads((tmp_path / "out" / OPTIONS_FILE).read_text())
    del saved["complete"]
    (tmp_path / "out" / OPTIONS_FILE).write_text(json.dumps(saved))
    status, out, error = run_training(capsys, *options, "--resume")
    assert status == 0 and "no steps left to train after step 2" in out and "training loss" not in out, error
    assert all(torch.equal(values, whole[name]) for name, values in weights(tmp_path / "out").items())


def test_pictures_are_needed(model, tmp_path, capsys):
    """A run in which nothing can learn, and which saves a model as it was."""
    data = write_examples(tmp_path / "data", [{"question": "what is it ?", "answer": "a red circle"}])
    options = [model, "--data", data, "--output", tmp_path / "out", "--steps", "1", *FAST]
    status, _, error = run_training(capsys, *options)
    assert status == 2 and "Expected an image in" in error and "`--train-text`" in error
    assert not (tmp_path / "out").exists()
    assert run_training(capsys, *options, "--train-text")[0] == 0


def test_a_half_precision_model_trains_in_float32(model, tmp_path, capsys):
    """Updates lost in half precision, or a model saved in another dtype than it had."""
    loaded = AutoModelForImageTextToText.from_pretrained(model).to(torch.bfloat16)
    loaded.save_pretrained(tmp_path / "half")
    AutoProcessor.from_pretrained(model).save_pretrained(tmp_path / "half")
    data = write_examples(tmp_path / "data", CAPTIONS)
    status, _, error = run_training(
        capsys, tmp_path / "half", "--data", data, "--output", tmp_path / "out", "--learning-rate", "1e-3", "--save-steps", "2",  # noqa: E501
        "--batch-size", "4"
    )  # fmt: skip
    assert status == 0, error
    before, after = weights(tmp_path / "half"), load_file(tmp_path / "out" / "model.safetensors")
    assert {name: values.dtype for name, values in after.items()} == {name: before[name].dtype for name in after}
    assert any(not torch.equal(values, before[name]) for name, values in after.items() if "block" in name)
    meanwhile = load_file(tmp_path / "out" / "checkpoints" / "checkpoint-2" / "model.safetensors")
    assert all(values.dtype == torch.float32 for name, values in meanwhile.items() if "block" in name)
    assert all(values.dtype == torch.bfloat16 for name, values in meanwhile.items() if "embed_tokens" in name)


def test_half_precision_on_the_device_that_there_is(model, tmp_path, capsys):
    """A base in bfloat16, as most are published, that `--device auto` refuses to train where there is no GPU."""
    AutoModelForImageTextToText.from_pretrained(model).to(torch.bfloat16).save_pretrained(tmp_path / "half")
    AutoProcessor.from_pretrained(model).save_pretrained(tmp_path / "half")
    data = write_examples(tmp_path / "data", CAPTIONS[:2])
    command = ["train", tmp_path / "half", "--data", data, "--output", tmp_path / "out", "--steps", "1"]
    assert main([str(part) for part in command]) == 0, capsys.readouterr().err
    slow = not torch.accelerator.is_available() and not multiplies_natively(torch.bfloat16)
    assert ("a step takes many times as long" in capsys.readouterr().out) == slow


def test_imported_model_with_tiles(tmp_path, capsys):
    """A model of another kind, whose processor and tiled pictures this package does not know."""
    make_mllama().save_pretrained(tmp_path / "theirs")
    make_mllama_processor().save_pretrained(tmp_path / "theirs")
    assert main(["import", str(tmp_path / "theirs"), "--output", str(tmp_path / "ours")]) == 0
    lines = [
        {"file_name": "red.png", "text": "w1 w2 w3"},
        {"images": ["red.png", "blue.png"], "question": "w4", "answer": "w5 w6"},
        {"question": "w4", "answer": "w7"},
    ]
    data = write_examples(tmp_path / "data", lines)
    status, out, error = run_training(
        capsys, tmp_path / "ours", "--data", data, "--output", tmp_path / "out", "--steps", "2", "--batch-size", "3", "--prompt", "w9"  # noqa: E501
    )  # fmt: skip
    assert status == 0, error
    before, after = weights(tmp_path / "ours"), weights(tmp_path / "out")
    moved = {name for name, values in after.items() if not torch.equal(values, before[name])}
    assert any("connector" in name for name in moved) and any("attn.k_proj" in name for name in moved)
    assert AutoProcessor.from_pretrained(tmp_path / "out").image_token == "<|image|>"


def test_bad_lines_are_told_at_once(model, tmp_path, capsys):
    """A run of hours that ends at a broken line, or a list of errors that comes one a run."""
    wrong = [
        ('{"file_name": "red.png", "text": ', "broken JSON"),
        ("[1, 2]", "expected a JSON object, got list"),
        ({"file_name": "gone.png", "text": "a"}, "'gone.png' does not exist"),
        ({"file_name": "red.png", "txt": "a"}, "got ['file_name', 'txt']. Did you mean `text`?"),
        ({"file_name": "red.png"}, "expected the fields of one of"),
        ({"file_name": "red.png", "question": "a ?"}, "'answer' is missing"),
        ({"file_name": "red.png", "text": " "}, "'text' must be a text that is not empty"),
        ({"text": "a"}, "a caption needs the field 'file_name'"),
        ({"file_name": 3, "text": "a"}, "names of files, got [3]"),
        ({"file_name": "red.png", "images": ["red.png"], "text": "a"}, "got both"),
        ({"messages": "what ?"}, "list of chat messages"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "url": "https://a.b/c.png"}]}]},
            "expected images as files",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "path": "none.png"}]}]},
            "'none.png' does not exist",
        ),
        ({"messages": [CHAT[0], {**CHAT[1], "role": "assitant"}]}, "got 'assitant'. Did you mean `assistant`?"),
        ({"messages": CHAT[:1]}, "no assistant message"),
        ({"messages": [{**CHAT[0], "content": "a"}, {**CHAT[1], "content": " "}]}, "is empty"),
        ({"file_name": "broken.png", "question": "a ?", "answer": "b"}, "'broken.png' cannot be read"),
    ]
    data = write_examples(tmp_path / "data", [CAPTIONS[0], *(line for line, _ in wrong)])
    (data / "broken.png").write_bytes(b"no picture")
    status, _, error = run_training(capsys, model, "--data", data, "--output", tmp_path / "out")
    assert status == 2 and f"{len(wrong)} line(s)" in error
    for number, (_, words) in enumerate(wrong, start=2):
        told = next(line for line in error.splitlines() if line.startswith(f"  line {number}: "))
        assert words in told
    assert not (tmp_path / "out").exists()


def test_all_that_is_wrong_in_one_round(model, tmp_path, capsys):
    """A second error after the first is repaired: of another folder, or of another picture."""
    broken = [{"type": "image", "path": name} for name in ("broken.png", "gone.png")]
    chat = [{"role": "user", "content": broken}, {"role": "assistant", "content": "a"}]
    data = write_examples(tmp_path / "data", [CAPTIONS[0], {"messages": chat}])
    (data / "broken.png").write_bytes(b"no picture")
    other = write_examples(tmp_path / "other", [{"txt": "a"}])
    status, _, error = run_training(capsys, model, "--data", data, "--eval-data", other, "--output", tmp_path / "out")
    told = next(line for line in error.splitlines() if line.startswith("  line 2: "))
    assert status == 2 and all(words in told for words in ("'broken.png' cannot", "'gone.png' does not"))
    assert f"{other / 'metadata.jsonl'} has 1 line(s)" in error and "Did you mean `text`?" in error
    weighted = ["--eval-data", f"{data}:0.5", "--output", tmp_path / "out"]
    assert "without a weight for `--eval-data`" in run_training(capsys, model, "--data", data, *weighted)[2]


def test_separators_that_are_no_ends_of_lines(tmp_path):
    """A line of valid JSON that is cut where only Python's `splitlines` sees an end."""
    texts = ["a\u2028b", "a\u0085b", "a\u2029b"]
    write_examples(tmp_path, [json.dumps({"file_name": "red.png", "text": text}, ensure_ascii=False) for text in texts])
    rows = load_rows(tmp_path)
    assert [rows.place_of(index)[1] for index in range(len(rows))] == ["line 1", "line 2", "line 3"]
    assert [row["messages"][1]["content"] for row in rows] == texts


def test_fingerprint_of_the_content(tmp_path):
    """A run resumed on other pictures, because their files have the same size."""
    write_examples(tmp_path, CAPTIONS)
    before = digest_of_pictures(load_rows(tmp_path))
    assert digest_of_pictures(load_rows(tmp_path)) == before
    content = bytearray((tmp_path / "red.png").read_bytes())
    content[-20] ^= 1
    (tmp_path / "red.png").write_bytes(content)
    assert digest_of_pictures(load_rows(tmp_path)) != before


def test_help_names_the_fields(capsys):
    """A reader who learns the fields of an example from errors."""
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    told = capsys.readouterr().out
    for form in FORMS:
        assert f"  {', '.join(form)}  " in told or f"  file_name, {', '.join(form)}  " in told
    assert "images, a list of files" in told and all(role in told for role in ROLES)


def test_each_option_is_in_one_group():
    """An option of a run that the command line does not have, or has twice."""
    options = [field.name for field in dataclasses.fields(TrainingOptions) if "argument" in field.metadata]
    assert sorted(" ".join(GROUPS.values()).split()) == sorted(options)


def test_rows_that_cannot_be_trained_on(model, tmp_path, capsys):
    """A picture that is none, an answer that is empty or cut off, found when the run is under way."""
    empty = {"messages": [*CHAT[:1], {"role": "assistant", "content": ""}]}
    data = write_examples(
        tmp_path / "data", [CAPTIONS[0], {"file_name": "broken.png", "text": "a"}, empty, {"messages": CHAT[:1]}]
    )
    whole = (data / "red.png").read_bytes()
    (data / "broken.png").write_bytes(whole[: len(whole) // 2])
    status, _, error = run_training(capsys, model, "--data", data, "--output", tmp_path / "out")
    assert status == 2 and "3 line(s)" in error
    for number, words in ((2, "broken.png"), (3, "an assistant message, is empty"), (4, "no assistant message")):
        assert any(line.startswith(f"  line {number}: ") and words in line for line in error.splitlines()), error
    data = write_examples(tmp_path / "more", CAPTIONS[:1])
    status, _, error = run_training(capsys, model, "--data", data, "--output", tmp_path / "out", "--max-length", "10")
    assert status == 2 and "line 1: `max_length=10` cuts all answers off" in error
    assert not (tmp_path / "out").exists()


def test_wrong_options_and_folders(model, tmp_path, capsys):
    """A traceback, or work done before the error."""
    data = write_examples(tmp_path / "data", CAPTIONS)
    questions = write_examples(tmp_path / "questions", MIXED[4:])
    make_text().save_pretrained(tmp_path / "text")
    (tmp_path / "blocks").mkdir()
    shutil.copytree(model, tmp_path / "blocks", dirs_exist_ok=True)
    for name in ("processor_config.json", "preprocessor_config.json"):
        (tmp_path / "blocks" / name).unlink(missing_ok=True)
    shutil.copytree(model, tmp_path / "refuses")
    make_processor("{{ raise_exception('roles must alternate') }}").save_pretrained(tmp_path / "refuses")
    write_examples(tmp_path / "empty", [])
    write_examples(tmp_path / "two", [], "a.jsonl")
    write_examples(tmp_path / "two", [], "b.jsonl")
    (tmp_path / "two" / "metadata.jsonl").unlink(missing_ok=True)
    out = ["--output", tmp_path / "out"]
    wrong = [
        ([model, "--data", data, "--output", data], "not an empty folder"),
        ([model, "--data", tmp_path / "no", *out], "there is no such file or folder"),
        ([model, "--data", tmp_path / "text", *out], "or Parquet or tar files, got no such file"),
        ([model, "--data", tmp_path / "two", *out], "got ['a.jsonl', 'b.jsonl']"),
        ([model, "--data", tmp_path / "empty", *out], "to hold examples"),
        ([tmp_path / "text", "--data", data, *out], "hf-xattn retrofit"),
        ([tmp_path / "blocks", "--data", data, *out], "saved without a processor"),
        ([tmp_path / "refuses", "--data", data, *out], "this one fails: roles must alternate"),
        ([model, "--data", data, "--batch-size", "0", *out], "`--batch-size` must be at least 1"),
        ([model, "--data", data, "--learning-rate", "0", *out], "`--learning-rate` must be above 0"),
        ([model, "--data", data, "--eval-share", "1.5", *out], "`--eval-share` must be above 0 and below 1, got 1.5"),
        ([model, "--data", data, "--eval-share", "1", *out], "above 0 and below 1"),
        ([model, "--data", data, "--warmup", "1", *out], "at least 0 and below 1"),
        ([model, "--data", data, "--eval-steps", "2", *out], "`--eval-data` or `--eval-share` with `--eval-steps 2`"),
        ([model, "--data", questions, "--prompt", "what ?", *out], "the field `text` for `--prompt`"),
        ([model, "--data", data, "--prompt", " ", *out], "`prompt`"),
    ]
    for arguments, message in wrong:
        status, _, error = run_training(capsys, *arguments)
        assert status == 2 and message in error, (arguments, error)
    assert not (tmp_path / "out").exists()


def test_options_of_the_parser(tmp_path):
    """An option of the command that the run does not know, or with another default."""
    import dataclasses

    from hf_xattn.commands.main import _parser
    from hf_xattn.training.training_options import TrainingOptions

    parsed = vars(_parser().parse_args(["train", "a", "--data", "b", "--output", "c"]))
    fields = {field.name: field.default for field in dataclasses.fields(TrainingOptions)}
    assert parsed.keys() - {"command", "run", "resume"} == fields.keys()
    for name in fields.keys() - {"model", "data", "output"}:
        assert parsed[name] == fields[name], name


def test_rows_of_a_folder(tmp_path):
    """A question or an answer that comes out as another one, and pictures in another order."""
    rows = load_rows(write_examples(tmp_path, ["", *MIXED]), prompt="what is it ?")
    assert [rows.place_of(index)[1] for index in range(len(rows))] == [f"line {2 + each}" for each in range(len(MIXED))]
    caption = rows[0]["messages"]
    assert caption[0]["content"] == [
        {"type": "image", "path": str(tmp_path / "red.png")},
        {"type": "text", "text": "what is it ?"},
    ]
    assert caption[1] == {"role": "assistant", "content": "a red circle."}
    assert [part.get("path") for part in rows[-1]["messages"][0]["content"]] == [
        str(tmp_path / "red.png"),
        str(tmp_path / "blue.png"),
        None,
    ]
    assert rows[6].keys() == {"prompt", "completion"}
    assert OPTIONS_FILE.endswith(".json")


def test_adapter_only_saves_what_was_added(model, tmp_path, capsys):
    """A folder with the weights of the bases; or one that is found to be impossible after the training."""
    data = write_examples(tmp_path / "data", CAPTIONS)
    arguments = (model, "--data", data, "--output", tmp_path / "out", "--steps", "2", *FAST, "--adapter-only")
    status, _, error = run_training(capsys, *arguments)
    assert status == 2 and "was not loaded from a checkpoint" in error and not (tmp_path / "out").exists()
    seeing = XAttnForConditionalGeneration.from_pretrained(model)
    AutoModelForCausalLM.from_config(seeing.config.text_config).save_pretrained(tmp_path / "text")
    seeing.model.vision_tower.save_pretrained(tmp_path / "tower")
    seeing = randomize(retrofit(tmp_path / "text", tmp_path / "tower", every=2))
    seeing.save_pretrained(tmp_path / "model", adapter_only=True)
    AutoProcessor.from_pretrained(model).save_pretrained(tmp_path / "model")
    for options in ([], ["--train-vision"]):
        output = tmp_path / f"out{len(options)}"
        command = (tmp_path / "model", "--data", data, "--output", output, "--steps", "2", *FAST, "--adapter-only")
        status, _, error = run_training(capsys, *command, *options)
        assert status == 0, error
        assert not list(output.glob("model*.safetensors"))
        saved = load_file(output / "cross_attention.safetensors")
        assert any("vision_tower" in name for name in saved) == bool(options)
        assert not any(".self_attn." in name and "text_model.model.layers" in name for name in saved)
        trained = AutoModelForImageTextToText.from_pretrained(output)
        assert not torch.equal(trained.model.blocks[0].attn.o_proj.weight, seeing.model.blocks[0].attn.o_proj.weight)


@pytest.fixture(scope="module")
def fresh(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fresh")
    save_chat_model(folder)
    return folder


@pytest.fixture
def data(tmp_path):
    return write_examples(tmp_path / "data", CAPTIONS)


def test_a_run_that_diverges(fresh, data, tmp_path, capsys):
    """A folder of NaN weights, and a loss of 0."""
    options = ["--steps", "12", "--batch-size", "2", "--learning-rate", "100", "--warmup", "0", *FEW_LOGS]
    status, _, error = run_training(capsys, fresh, "--data", data, "--output", tmp_path / "out", *options)
    assert status != 0 and "has diverged" in error and "Lower `--learning-rate` (100)" in error
    assert not (tmp_path / "out" / "config.json").exists()


def test_a_run_of_one_step(fresh, data, tmp_path, capsys):
    """A step whose learning rate is 0, because it is all warm-up."""
    options = ["--batch-size", str(len(CAPTIONS)), "--learning-rate", "0.1", *FEW_LOGS]
    status, _, error = run_training(capsys, fresh, "--data", data, "--output", tmp_path / "out", *options)
    assert status == 0, error
    states = [AutoModelForImageTextToText.from_pretrained(each).state_dict() for each in (fresh, tmp_path / "out")]
    assert any(not torch.equal(weight, states[1][name]) for name, weight in states[0].items())


def test_evaluation_loss_is_a_mean_over_labels(fresh, tmp_path, capsys):
    """A loss that depends on the size of a batch, because each batch counts the same."""
    lines = []
    (tmp_path / "data").mkdir()
    for index, answer in enumerate(["red"] * 4 + ["a red circle and a blue square " * 4] * 2):
        draw("red").save(tmp_path / "data" / f"{index}.png")
        lines.append({"file_name": f"{index}.png", "question": "what ?", "answer": answer})
    (tmp_path / "data" / "metadata.jsonl").write_text("\n".join(map(json.dumps, lines)))
    total, count = 0.0, 0
    model = AutoModelForImageTextToText.from_pretrained(fresh)
    collate = XAttnDataCollator(AutoProcessor.from_pretrained(fresh))
    for each in load_rows(str(tmp_path / "data")):
        batch = collate([each])
        labels = int((batch["labels"][:, 1:] != -100).sum())
        with torch.no_grad():
            total, count = total + model(**batch).loss.item() * labels, count + labels
    for size in (1, 4):
        given = [
            fresh,
            "--data",
            tmp_path / "data",
            "--eval-data",
            tmp_path / "data",
            "--output",
            tmp_path / f"out{size}",
        ]
        options = ["--steps", "1", "--batch-size", str(size), "--learning-rate", "1e-12", *FEW_LOGS]
        status, said, error = run_training(capsys, *given, *options)
        assert status == 0, error
        found = float(said.partition("evaluation loss ")[2].split()[0])
        assert found == pytest.approx(total / count, abs=2e-4)
