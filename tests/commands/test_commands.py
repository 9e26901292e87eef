"""The command line, called as a person would."""

import argparse
import io
import re
import subprocess
import sys

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoProcessor,
    AutoTokenizer,
    PreTrainedModel,
)
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

from helpers.models.foreign_blocks import flamingo_block_state, flamingo_checkpoint, kempner_block_state, make_clip
from helpers.models.tiny_idefics import make_idefics, make_idefics_processor
from helpers.models.tiny_mllama import make_mllama, make_mllama_processor, picture
from helpers.models.tiny_models import make_model, make_text, randomize
from helpers.models.word_models import make_picture
from helpers.processes.command_runs import run
from hf_xattn import XAttnProcessor
from hf_xattn.checkpoints.model_card import is_fresh
from hf_xattn.commands.main import _parser, main
from hf_xattn.commands.shared import device_of
from hf_xattn.utils.architectures import markdown_table


def test_help_is_cheap():
    """A `--help` that waits for what only a command needs."""
    script = (
        "import sys, hf_xattn; before = set(sys.modules); from hf_xattn.commands.main import main\n"
        "try: main(['--help'])\n"
        "finally: print(*{name for name in set(sys.modules) - before if not name.startswith('hf_xattn')})"
    )
    output = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert output.startswith("usage: hf-xattn")
    assert {name.split(".")[0] for name in output.splitlines()[-1].split()} <= sys.stdlib_module_names


def test_retrofit_writes_model_and_processor(saved):
    """A folder that the Auto classes cannot load; one big file where shards were asked for."""
    assert len(list((saved / "model").glob("model-*.safetensors"))) > 1
    assert not list((saved / "model").glob("*.bin"))
    model = AutoModelForImageTextToText.from_pretrained(saved / "model")
    assert model.config.cross_attention_layers == [1, 3]
    assert isinstance(AutoProcessor.from_pretrained(saved / "model"), XAttnProcessor)


def test_a_checkpoint_is_imported_and_exported(tmp_path, capsys):
    """A checkpoint that cannot be brought over from the command line."""
    make_mllama().save_pretrained(tmp_path / "theirs")
    status, out, _ = run(capsys, "import", tmp_path / "theirs", "--output", tmp_path / "ours")
    assert status == 0 and "mllama_vision_model" in out and "tokens an image" in out
    status, _, _ = run(capsys, "export", tmp_path / "ours", "--output", tmp_path / "back")
    assert status == 0
    assert (tmp_path / "back" / "model.safetensors").is_file()
    status, _, error = run(capsys, "import", tmp_path / "ours", "--output", tmp_path / "again")
    assert status == 2 and "'xattn' model, which cannot be imported" in error


@pytest.mark.parametrize(
    "make, make_processor, marker",
    [(make_mllama, make_mllama_processor, "<|image|>"), (make_idefics, make_idefics_processor, "<image>")],
    ids=["mllama", "idefics"],
)
def test_imported_models_answer(make, make_processor, marker, tmp_path, capsys):
    """An imported model whose own processor the commands do not understand, or that reads a prompt about cached images
    in another way.
    """
    make().save_pretrained(tmp_path / "theirs")
    make_processor().save_pretrained(tmp_path / "theirs")
    assert run(capsys, "import", tmp_path / "theirs", "--output", tmp_path / "ours")[0] == 0
    images = []
    for index in range(2):
        picture(60, 28, index).save(tmp_path / f"{index}.png")
        images += ["--image", tmp_path / f"{index}.png"]
    question = ["--raw", "--prompt", f"{marker} w1 {marker} w2 w3", "--max-new-tokens", "6"]
    status, direct, error = run(capsys, "generate", tmp_path / "ours", *images, *question)
    assert status == 0 and direct.strip(), error
    status, _, error = run(capsys, "encode", tmp_path / "ours", *images, "--output", tmp_path / "images.safetensors")
    assert status == 0, error
    status, cached, error = run(
        capsys, "generate", tmp_path / "ours", "--image-cache", tmp_path / "images.safetensors", *question
    )
    assert status == 0 and cached == direct, error
    status, alone, error = run(capsys, "generate", tmp_path / "ours", "--prompt", "w1 w2", "--max-new-tokens", "6")
    assert status == 0 and alone.strip(), error
    status, _, error = run(capsys, "generate", tmp_path / "ours", *images, "--raw", "--prompt", f"{marker} w1")
    assert status == 2 and re.search(
        r"2 images|images per batch \(\[2\]\)", error
    )  # transformers' own words, until 5.22


def test_import_does_not_load_the_model(tmp_path, capsys, monkeypatch):
    """A checkpoint larger than memory that is converted file by file, and then read whole for a report."""
    make_mllama().save_pretrained(tmp_path / "theirs")

    def load(*args, **kwargs):
        raise MemoryError

    monkeypatch.setattr(PreTrainedModel, "from_pretrained", load)
    assert run(capsys, "import", tmp_path / "theirs", "--output", tmp_path / "ours")[0] == 0
    assert run(capsys, "export", tmp_path / "ours", "--output", tmp_path / "back")[0] == 0


@pytest.mark.parametrize("kind", ["OpenFlamingo", "KempnerForge"])
def test_import_of_a_state_dict(kind, saved, tmp_path, capsys):
    """A file of blocks that needs Python to be brought over."""
    text = AutoModelForCausalLM.from_pretrained(saved / "text")
    width, last = text.config.hidden_size, text.config.num_hidden_layers - 1
    if kind == "OpenFlamingo":
        prefix = f"lang_encoder.model.layers.{last}.gated_cross_attn_layer."
        block = flamingo_block_state(hidden=width)
        state = {"epoch": 3, "model_state_dict": {prefix + name: tensor for name, tensor in block.items()}}
        options = {"--image-token-id": 5, "--head-dim": 8}
    else:
        block = kempner_block_state(hidden=width)
        state = {f"cross_attention_layers.0.{name}": tensor for name, tensor in block.items()}
        options = {"--heads": 2, "--every": 4}
    torch.save(state, tmp_path / "blocks.pt")
    output, needed = tmp_path / "ours", []
    for option, value in ({"--text": saved / "text"} | options).items():
        if option != "--head-dim":
            status, _, error = run(capsys, "import", tmp_path / "blocks.pt", "--output", output, *needed)
            assert status == 2 and option in error and not output.exists()
        needed += [option, value]
    status, out, _ = run(capsys, "import", tmp_path / "blocks.pt", "--output", output, *needed)
    assert status == 0 and "parameters added (blocks)" in out
    model = AutoModelForCausalLM.from_pretrained(output)
    assert model.config.cross_attention_layers == ([last] if kind == "OpenFlamingo" else [4])
    assert AutoTokenizer.from_pretrained(output)("what is it ?")["input_ids"]
    (tmp_path / "blocks.pt").write_bytes(b"no state dict")
    status, _, error = run(capsys, "import", tmp_path / "blocks.pt", "--output", tmp_path / "again", *needed)
    assert status == 2 and "hf-xattn import: error: " in error and not (tmp_path / "again").exists()


@pytest.mark.parametrize("marker", [97, 98])
def test_processor_of_a_state_dict(marker, tmp_path, capsys):
    """A model that follows markers, with a processor that knows none, and nobody says so."""
    make_text().save_pretrained(tmp_path / "text")
    make_idefics_processor().tokenizer.save_pretrained(tmp_path / "text")  # <image> is token 97
    make_clip().save_pretrained(tmp_path / "clip")
    CLIPImageProcessorPil(size={"height": 16, "width": 16}).save_pretrained(tmp_path / "clip")
    torch.save(flamingo_checkpoint(), tmp_path / "checkpoint.pt")
    command = ["import", tmp_path / "checkpoint.pt", "--text", tmp_path / "text", "--vision", tmp_path / "clip"]
    options = ["--image-token-id", marker, "--head-dim", 8, "--output", tmp_path / "ours"]
    status, out, error = run(capsys, *command, *options)
    assert status == 0, error
    processor = AutoProcessor.from_pretrained(tmp_path / "ours")
    assert processor.image_token == ("<image>" if marker == 97 else None)
    assert ("has no token 98" in out) == (marker == 98)


def test_inspect_prints_the_table_of_decoders(capsys):
    """A table of decoders that is not printed, or not the one the tests check."""
    status, out, _ = run(capsys, "inspect", "--architectures")
    assert status == 0 and out.strip() == markdown_table()


def test_inspect_prints_figures_that_follow_from_the_sizes(saved, capsys):
    """Figures that do not follow from the model's sizes."""
    status, out, _ = run(capsys, "inspect", saved / "model")
    assert status == 0
    figures = {line[:34].strip(): line[35:] for line in out.splitlines()}
    assert figures["blocks in front of layers"] == "1, 3"
    # 2 blocks, keys and values, 2 heads of 16, 4 bytes; 16 patches an image
    assert figures["K/V bytes an image token"].startswith(f"{2 * 2 * 2 * 16 * 4}")
    assert figures["K/V bytes an image"] == f"{16 * 2 * 2 * 2 * 16 * 4:,}"
    model = AutoModelForImageTextToText.from_pretrained(saved / "model")
    added = sum(parameter.numel() for block in model.blocks for parameter in block.parameters())
    assert figures["parameters added (blocks)"] == f"{added:,}"
    # a block: q and o projections 2 * 2 * 64 * 64, scores and sum 2 * 2 * 64 * 16, MLP 2 * 3 * 64 * 128
    flops = 2 * (2 * 2 * 64 * 64 + 2 * 2 * 64 * 16 + 2 * 3 * 64 * 128)
    assert figures["compute added a text token"].startswith(f"{flops:,} FLOP")


def test_encoded_images_give_the_answer_of_the_image(saved, capsys, tmp_path):
    """An image cache that answers otherwise than the image."""
    question = ["--prompt", "what is it ?", "--max-new-tokens", "5"]
    status, direct, _ = run(capsys, "generate", saved / "model", "--image", saved / "picture.png", *question)
    assert status == 0 and direct.strip()
    file = tmp_path / "picture.safetensors"
    assert run(capsys, "encode", saved / "model", "--image", saved / "picture.png", "--output", file)[0] == 0
    status, cached, _ = run(capsys, "generate", saved / "model", "--image-cache", file, *question)
    assert status == 0 and cached == direct
    assert run(capsys, "generate", saved / "model", *question)[0] == 0


def test_retrofit_without_the_bases(saved, tmp_path, capsys):
    """A folder with the weights of the bases, or without a processor."""
    command = [
        "retrofit",
        saved / "text",
        "--vision",
        saved / "vision",
        "--output",
        tmp_path / "model",
        "--adapter-only",
    ]
    assert run(capsys, *command)[0] == 0
    assert (tmp_path / "model" / "cross_attention.json").is_file() and not (
        tmp_path / "model/model.safetensors"
    ).exists()
    question = ["--prompt", "what is it ?", "--max-new-tokens", "5", "--image", saved / "picture.png"]
    status, out, error = run(capsys, "generate", tmp_path / "model", *question)
    assert status == 0 and out.strip(), error


def test_a_model_that_was_saved_with_a_tokenizer_alone(saved, tmp_path, capsys):
    """An error about an image processor, for text alone."""
    command = ["retrofit", saved / "text", "--every", "2", "--output", tmp_path / "model"]
    assert run(capsys, *command)[0] == 0
    question = ["--prompt", "what is it ?", "--max-new-tokens", "5"]
    status, out, error = run(capsys, "generate", tmp_path / "model", *question)
    assert status == 0 and out.strip(), error
    status, _, error = run(capsys, "generate", tmp_path / "model", "--image", saved / "picture.png", *question)
    assert status == 2 and "saved without an image processor" in error


def test_commands_read_images_as_the_processor_does(saved, capsys, tmp_path):
    """A photograph on its side, or a transparent picture, read otherwise than by the processor."""
    exif = Image.Exif()
    exif[0x0112] = 6
    picture = make_picture()
    clear = picture.convert("RGBA")
    clear.putalpha(0)
    picture.save(tmp_path / "lying.png", exif=exif)
    picture.transpose(Image.Transpose.ROTATE_270).save(tmp_path / "upright.png")
    clear.save(tmp_path / "clear.png")
    Image.new("RGB", picture.size, "white").save(tmp_path / "white.png")
    made = {}
    for name in ("lying", "upright", "clear", "white"):
        file = tmp_path / f"{name}.safetensors"
        run(capsys, "encode", saved / "model", "--image", tmp_path / f"{name}.png", "--output", file)
        made[name] = load_file(file)
    for first, second in (("lying", "upright"), ("clear", "white")):
        assert all(torch.equal(made[first][name], made[second][name]) for name in made[first])


def test_errors_are_one_line(saved, capsys, tmp_path):
    """A traceback, or work done before the error."""
    text, vision, model = saved / "text", saved / "vision", saved / "model"
    wrong = [
        (["retrofit", text, "--output", model], "not an empty folder"),
        (["retrofit", tmp_path / "missing", "--output", tmp_path / "a"], "missing"),
        (["retrofit", vision, "--output", tmp_path / "a"], "not a causal language model"),
        (["retrofit", text, "--layers", "9", "--output", tmp_path / "a"], "4 layers"),
        (["inspect", text], "without cross-attention blocks"),
        (["generate", model, "--prompt", "a", "--image", tmp_path / "no.png"], "no.png"),
        (["generate", model, "--prompt", "a", "--image", "https://a.org/no.png"], "a.org/no.png"),
        (["chat", model, "--image", "https://a.org/no.png"], "a.org/no.png"),
        (["generate", text, "--prompt", "a"], "hf-xattn retrofit"),
        (["generate", model, "--prompt", "a", "--image-cache", tmp_path / "no"], "does not exist"),
        (["encode", model, "--image", saved / "picture.png", "--output", saved / "picture.png"], "exists already"),
    ]
    for arguments, message in wrong:
        status, _, error = run(capsys, *arguments)
        assert status == 2, arguments
        last = error.strip().splitlines()
        assert any(message in line for line in last), (arguments, error)
    assert not (tmp_path / "a").exists()
    for arguments, message in (
        (["retrofit", text, "--layers", "a,b", "--output", tmp_path / "a"], "invalid list of integers value: 'a,b'"),
        (["retrofit", text, "--every", "0", "--output", tmp_path / "a"], "--every: invalid int of at least 1"),
        (["generate", model, "--prompt", "a", "--num-beams", "0"], "--num-beams: invalid int of at least 1"),
        (["chat", model, "--temperature", "nan"], "--temperature: invalid float of at least 0"),
        (["web", model, "--image-store", "-1"], "--image-store: invalid int of at least 0"),
        (["generate", model, "--prompt", "a", "--image", "a", "--image-cache", "b"], "--image-cache: not allowed with"),
        (["inspect"], "one of the arguments MODEL --architectures --towers is required"),
        (["inspect", text, "--architectures"], "not allowed with argument"),
    ):
        with pytest.raises(SystemExit):
            main(list(map(str, arguments)))
        assert message in capsys.readouterr().err


def float_options():
    (commands,) = (each for each in _parser()._actions if isinstance(each, argparse._SubParsersAction))
    for action in commands.choices["train"]._actions:
        if action.type is float:
            yield action.option_strings[0]


@pytest.mark.parametrize("value", ["nan", "inf"])
@pytest.mark.parametrize("option", list(float_options()))
def test_numbers_that_are_none(option, value, tmp_path, capsys):
    """NaN, which is neither above nor below a bound, so that a run fails after it has loaded a model, or learns NaN."""
    words = ["train", tmp_path / "no model", "--data", tmp_path / "no data", "--output", tmp_path / "out"]
    status, _, error = run(capsys, *words, option, value)
    assert status == 2 and f"`{option}` must be" in error and f"got {value}" in error


@pytest.mark.parametrize("kind", ["mps", "xpu", "cuda", None])
def test_the_device_that_is_there(kind, monkeypatch):
    """A command that computes on the processor beside a GPU that `hf-xattn train` takes."""
    found = None if kind is None else torch.device(kind)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: found)
    assert device_of("auto") == (kind or "cpu")


def test_commands_say_that_a_model_cannot_see_yet(saved, tmp_path, capsys):
    """A first day that ends with figures: a model that cannot see, or not yet, and nobody says so; one block where
    every fourth layer was meant.
    """
    command = ["retrofit", saved / "text", "--every", "2", "--output"]
    status, out, _ = run(capsys, *command, tmp_path / "my model", "--vision", saved / "vision")
    *_, state, following = out.splitlines()
    assert status == 0 and "see nothing yet" in state and "blind" not in out
    assert following == f"Next: hf-xattn train '{tmp_path}/my model' --data PICTURES --output TRAINED"
    status, out, _ = run(capsys, *command, tmp_path / "blind")
    *_, state, following = out.splitlines()
    assert "The model is blind" in state and "see nothing yet" in state
    assert following == f"To let it see images: hf-xattn retrofit {saved / 'text'} --vision TOWER --output DIR"
    for every, told in (("100", True), ("4", False)):
        _, out, _ = run(capsys, "retrofit", saved / "text", "--every", every, "--output", tmp_path / every)
        assert ("`--every 100` is more than the 4 layers: there is one block" in out) == told


def test_a_model_that_does_not_see(saved, tmp_path, capsys, monkeypatch):
    """An hour with a model that was never trained, whose answers have nothing to do with the pictures."""
    assert run(capsys, "retrofit", saved / "text", "--output", tmp_path / "blind")[0] == 0
    question = ["--prompt", "what is it ?", "--max-new-tokens", "2"]
    for name, told in (("model", "see nothing yet, and images change no answer"), ("blind", "The model is blind")):
        model = (saved if name == "model" else tmp_path) / name
        status, out, error = run(capsys, "generate", model, *question)
        assert status == 0 and told in error and told not in out
    monkeypatch.setattr(sys, "stdin", io.StringIO("what is it ?\n"))
    status, out, error = run(capsys, "chat", saved / "model", "--max-new-tokens", "2")
    assert status == 0 and "see nothing yet" in error and "see nothing" not in out
    trained = randomize(AutoModelForImageTextToText.from_pretrained(saved / "model"))
    trained.save_pretrained(tmp_path / "trained")
    AutoProcessor.from_pretrained(saved / "model").save_pretrained(tmp_path / "trained")
    status, _, error = run(capsys, "generate", tmp_path / "trained", *question)
    assert status == 0 and "see nothing" not in error and "blind" not in error


@pytest.mark.parametrize("mlp_type", ["gated", "none"])
@pytest.mark.parametrize("gated", [False, True])
def test_blocks_that_are_fresh(gated, mlp_type):
    """A trained model that is said to see nothing, because one of its factors is zero; a fresh one that is not known
    by its gates.
    """
    options = {"zero_init": not gated, "gate_init": 0.0 if gated else 0.5, "mlp_type": mlp_type}
    model = make_model(random=False, cross_attention_config={"hidden_size": 32, "num_attention_heads": 4, **options})
    assert is_fresh(model)
    block = model.blocks[0]
    with torch.no_grad():
        (block.attn_gate if gated else block.attn.o_proj.weight).view(-1)[0] = 0.1
    assert not is_fresh(model)
