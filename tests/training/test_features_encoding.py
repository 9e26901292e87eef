"""`hf-xattn encode-features` and training from its folder: the vision tower runs once for each picture, and never in
training.
"""

import functools
import json
import pickle
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import AutoModelForImageTextToText, AutoProcessor, PreTrainedModel, ResNetConfig, ResNetModel

from helpers.inputs.training_examples import CAPTIONS, CHAT, COLOURS, draw, write_examples
from helpers.models.encoded_features import encode, save_features
from helpers.models.template_models import picture
from helpers.models.tiny_mllama import make_mllama, make_mllama_processor
from helpers.models.tiny_models import randomize
from helpers.processes import warm_processes
from helpers.processes.command_runs import run
from hf_xattn import VisionFeatures, XAttnDataCollator, XAttnProcessor, freeze, remove_blocks, retrofit
from hf_xattn.commands.main import main
from hf_xattn.data.loading import load_rows
from hf_xattn.training.vision_features import SHARDS
from hf_xattn.utils.checkpoint_files import sha256_of


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return save_features(tmp_path_factory.mktemp("features"))


@pytest.fixture(scope="module")
def model(folders):
    return folders[0]


@pytest.fixture(scope="module")
def data(folders):
    return folders[1]


@pytest.fixture(scope="module")
def features(folders):
    return folders[2]


def load(folder):
    return AutoModelForImageTextToText.from_pretrained(folder)


def shards(folder):
    """The pictures in each file."""
    found = {}
    for path in folder.glob(SHARDS):
        with safe_open(path, framework="pt") as file:
            found[path.name] = list(file.keys())
    return found


def tensors(folder):
    found = {}
    for path in folder.glob(SHARDS):
        with safe_open(path, framework="pt") as file:
            found.update((name, file.get_tensor(name)) for name in file.keys())
    return found


def count_runs(monkeypatch, model):
    """Counts the runs of all vision towers of this class."""
    runs, tower = [], type(load(model).model.vision_tower)
    forward = tower.forward

    @functools.wraps(forward)  # its signature is looked at
    def counted(self, pixel_values, **kwargs):
        if not pixel_values.is_meta:  # shapes for the model card
            runs.append(1)
        return forward(self, pixel_values=pixel_values, **kwargs)

    monkeypatch.setattr(tower, "forward", counted)
    return runs


def many_pictures(folder, count):
    folder.mkdir()
    for index in range(count):
        picture(index).save(folder / f"{index}.png")
    lines = [json.dumps({"file_name": f"{index}.png", "text": "a"}) for index in range(count)]
    (folder / "metadata.jsonl").write_text("\n".join(lines))
    return folder


def test_each_image_is_encoded_once(model, data, features, tmp_path, capsys, monkeypatch):
    """A picture encoded for each of its lines or names; the tower's output after the connector, or of other pixels; a
    second run that encodes all again; a picture that was added and is not encoded.
    """
    assert len(list(features.iterdir())) == 1
    stored = tensors(features)
    assert stored.keys() == {sha256_of(data / f"{colour}.png") for colour in COLOURS}
    whole, processor = load(model), AutoProcessor.from_pretrained(model)
    with torch.no_grad():
        pixels = processor(images=[[data / "red.png"]])["pixel_values"]
        expected = whole.model.vision_tower(pixel_values=pixels[0]).last_hidden_state[0]
    assert torch.equal(stored[sha256_of(data / "red.png")], expected)

    runs = count_runs(monkeypatch, model)
    folder = tmp_path / "features"
    status, out, error = run(capsys, *encode(model, data, folder, "--batch-size", "3"))
    assert status == 0 and "4 image(s) encoded, 0 known" in out and len(runs) == 2, error
    assert all(torch.allclose(tensor, stored[name], atol=1e-5) for name, tensor in tensors(folder).items())
    status, out, _ = run(capsys, *encode(model, data, folder))
    assert status == 0 and "0 image(s) encoded, 4 known, 0 bytes" in out and len(runs) == 2
    more = write_examples(tmp_path / "more", [*CAPTIONS, {"file_name": "new.png", "text": "a."}])
    draw("yellow").save(more / "new.png")
    status, out, _ = run(capsys, *encode(model, more, folder))
    assert status == 0 and "1 image(s) encoded, 4 known" in out and len(shards(folder)) == 2


@pytest.mark.parametrize("batch_size", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_training_from_features(model, data, features, tmp_path, capsys, monkeypatch, batch_size):
    """Other losses than from pixels; a vision tower that runs in an epoch."""
    runs = count_runs(monkeypatch, model)
    options = [
        "--data",
        data,
        "--epochs",
        "2",
        "--batch-size",
        batch_size,
        "--learning-rate",
        "0.01",
        "--log-steps",
        "1",
    ]
    options += ["--eval-share", "0.25", "--text-share", "0", "--device", "cpu"]
    trained, losses = {}, {}
    for name, more in (("pixels", []), ("features", ["--features", features])):
        before = len(runs)
        status, out, error = run(capsys, "train", model, *options, *more, "--output", tmp_path / name)
        assert status == 0, error
        assert (len(runs) > before) == (name == "pixels")
        trained[name] = load(tmp_path / name).state_dict()
        state = max(
            (tmp_path / name / "checkpoints").glob("*/trainer_state.json"), key=lambda path: path.stat().st_mtime
        )
        history = json.loads(state.read_text())["log_history"]
        losses[name] = [entry.get("loss", entry.get("eval_loss")) for entry in history]
    assert len(losses["pixels"]) > 6
    start = load(model).state_dict()
    moved = {name for name, weight in trained["features"].items() if not torch.equal(weight, start[name])}
    assert any("connector" in name for name in moved) and any("cross_attention_block" in name for name in moved)
    assert losses["pixels"] == pytest.approx(losses["features"], rel=1e-4)
    assert all(
        torch.allclose(weight, trained["pixels"][name], atol=1e-4) for name, weight in trained["features"].items()
    )


def test_bit_identical_training(model, tmp_path, capsys):
    """Features rounded on the way to the disk or back. Batches of one picture: the tower's outputs depend on the
    batch's size.
    """
    data = write_examples(tmp_path / "data", CAPTIONS)
    features = tmp_path / "tower"
    assert main(encode(model, data, features, "--batch-size", "1")) == 0
    options = ["--data", data, "--steps", "6", "--batch-size", "1", "--learning-rate", "0.01"]
    options += ["--text-share", "0", "--device", "cpu"]
    for name, more in (("pixels", []), ("features", ["--features", features])):
        status, _, error = run(capsys, "train", model, *options, *more, "--output", tmp_path / name)
        assert status == 0, error
    pixels, trained = (load(tmp_path / name).state_dict() for name in ("pixels", "features"))
    assert all(torch.equal(weight, trained[name]) for name, weight in pixels.items())


@pytest.mark.parametrize("worker", [False, True])
def test_the_collator_takes_features_in_place_of_pixels(model, data, features, worker):
    """Features of another picture, or a padding image that counts, in rows with two pictures, one and none."""
    whole, processor = freeze(load(model)), AutoProcessor.from_pretrained(model)
    held = VisionFeatures(features, whole)
    assert len(held) == 4 and str(features) in repr(held)
    rows = [*load_rows(data)[-4:], {"messages": [{**CHAT[0], "content": "hi"}, CHAT[1]]}]
    collators = XAttnDataCollator(processor), XAttnDataCollator(processor, features=held)
    expected = collators[0](rows)
    collate = (
        pickle.loads(pickle.dumps(collators[1])) if worker else collators[1]
    )  # as a worker of a `DataLoader` gets it
    batch = collate(rows)
    assert batch["vision_features"].shape == (5, 2, 16, 24) and "pixel_values" not in batch
    same = ("input_ids", "attention_mask", "labels", "image_mask")
    assert all(torch.equal(batch[name], expected[name]) for name in same)
    assert batch.keys() == {*same, "vision_features"} and not batch["image_mask"][-1].any()
    with torch.no_grad():
        assert torch.allclose(whole(**batch).loss, whole(**expected).loss, rtol=1e-5)
    alone = collate(rows[-1:])
    assert alone.keys() == {"input_ids", "attention_mask", "labels"}


def test_files_of_features_are_memory_mapped(model, features, data):
    """A whole file in memory for each process that reads one picture."""
    held = VisionFeatures(features, load(model))
    collator = XAttnDataCollator(AutoProcessor.from_pretrained(model), features=held)
    collator(load_rows(data)[:1])
    (path,) = features.glob(SHARDS)
    assert str(path) in Path("/proc/self/maps").read_text()


def test_what_is_refused(model, data, features, tmp_path, capsys):
    """Features of another tower or other pixels taken for those of this one: shapes fit, and the model learns noise."""
    whole, processor = load(model), AutoProcessor.from_pretrained(model)
    status, _, error = run(
        capsys, "train", model, "--data", data, "--features", features, "--train-vision", "--output", tmp_path / "out"
    )
    assert status == 2 and "`--features` or `--train-vision`, got both" in error

    with torch.no_grad():
        next(whole.model.vision_tower.parameters()).view(-1)[0] += 1e-3
    other = tmp_path / "other"
    whole.save_pretrained(other)
    processor.save_pretrained(other)
    with pytest.raises(ValueError, match=f"tower that has made the features in {features}, .* other weights or"):
        VisionFeatures(features, whole)
    status, _, error = run(capsys, "train", other, "--data", data, "--features", features, "--output", tmp_path / "out")
    assert status == 2 and "other weights" in error and not (tmp_path / "out").exists()
    status, _, error = run(capsys, *encode(other, data, features))
    assert status == 2 and "features of another vision tower" in error and "new folder" in error

    with pytest.raises(ValueError, match=r"in torch.float32, got another.*another dtype \(torch.bfloat16\)"):
        VisionFeatures(features, load(model).bfloat16())
    status, _, error = run(capsys, *encode(model, data, features, "--dtype", "bfloat16"))
    assert status == 2 and "another" in error
    retrained = load(model)
    with torch.no_grad():  # what trains is behind the features
        for parameter in retrained.model.connector.parameters():
            parameter.zero_()
    VisionFeatures(features, retrained.model)

    processor.image_processor.size = {"height": 32, "width": 24}
    with pytest.raises(ValueError, match="`processor` with the image processor that has made"):
        XAttnDataCollator(processor, features=VisionFeatures(features, load(model)))
    with pytest.raises(ValueError, match="got none there"):
        VisionFeatures(data, load(model))


def test_pictures_without_features(model, features, tmp_path, capsys):
    """A picture that was changed after it was encoded; pictures that are no files; all of them in one error."""
    data = write_examples(
        tmp_path / "data",
        [*CAPTIONS[:2], {"file_name": "new.png", "text": "a."}, {"file_name": "broken.png", "text": "b"}],
    )
    draw("yellow").save(data / "new.png")
    draw("yellow", 24).save(data / "red.png")
    (data / "broken.png").write_bytes(b"no picture")
    status, _, error = run(
        capsys, "train", model, "--data", data, "--features", features, "--output", tmp_path / "out", "--device", "cpu"
    )
    assert status == 2 and "3 line(s)" in error
    lines = {line.split(":")[0].strip(): line for line in error.splitlines()}
    assert "holds no features of the image" in lines["line 1"] and "red.png" in lines["line 1"]
    assert "new.png" in lines["line 3"] and "encode-features" in lines["line 3"]
    assert "'broken.png' cannot be read" in lines["line 4"]
    collator = XAttnDataCollator(AutoProcessor.from_pretrained(model), features=VisionFeatures(features, load(model)))
    rows = load_rows(data)[:]
    collator(rows[1:2])
    draw("yellow", 20).save(data / "blue.png")
    with pytest.raises(ValueError, match="holds no features of the image.*blue.png"):
        collator(rows[1:2])
    for image, words in (
        (draw("red"), "to be files.*got PIL.Image.Image"),
        ("https://a.b/c.png", "got str 'https://a.b/c.png'"),
        ("A" * 5000, "got str 'AAAA"),
    ):
        with pytest.raises((TypeError, ValueError), match=words):
            collator([{"images": [image], "messages": [{"role": "user", "content": "a"}, CHAT[1]]}])


def test_unreadable_images_are_named_at_the_end(model, tmp_path, capsys):
    """A run of hours that ends at a broken picture, or ends well without it."""
    lines = [*CAPTIONS, {"file_name": "broken.png", "text": "a"}]
    data = write_examples(tmp_path / "data", lines)
    (data / "broken.png").write_bytes(b"no picture")
    status, out, error = run(capsys, *encode(model, data, tmp_path / "features"))
    assert status == 2 and "4 image(s) encoded" in out
    assert "1 image(s) cannot be read" in error and "broken.png" in error
    assert len(tensors(tmp_path / "features")) == 4
    write_examples(data, [*lines, {"file_name": "gone.png", "text": "a"}, "[]"])
    status, _, error = run(capsys, *encode(model, data, tmp_path / "features"))
    assert status == 2 and "3 image(s) cannot be read" in error and "gone.png" in error


def test_options_of_encode_that_cannot_act_are_refused(model, data, tmp_path, capsys):
    """An option without a meaning that is taken without a word."""
    for option, value in (("--batch-size", "0"), ("--workers", "-1"), ("--shard-size", "0")):
        with pytest.raises(SystemExit):
            run(capsys, *encode(model, data, tmp_path / "out", option, value))
        assert f"{option}: invalid" in capsys.readouterr().err


FOREIGN = {
    "tensors": lambda path: save_file({"a": torch.ones(2)}, str(path)),
    "tensors with a format": lambda path: save_file({"a": torch.ones(2)}, str(path), {"format": "pt"}),
    "a text": lambda path: path.write_text("mine"),
    "nothing": lambda path: path.touch(),
}


@pytest.mark.parametrize("made", FOREIGN)
def test_files_of_somebody_else(made, model, data, tmp_path, capsys):
    """A file of another program that goes without a word, since its name is like ours; or ours that go beside it."""
    folder, name = tmp_path / "features", "features-mine.safetensors"
    assert main(encode(model, data, folder)) == 0
    FOREIGN[made](folder / name)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    status, _, error = run(capsys, *encode(model, data, folder))
    assert status == 2 and str(folder / name) in error
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    with pytest.raises(ValueError, match=f"{name} is .*not a file of `hf-xattn encode-features`"):
        VisionFeatures(folder, load(model))


KILLED = """
import os, signal, sys
from hf_xattn.training import feature_encoder
from hf_xattn.commands.main import main
save, written = feature_encoder.save_file, []
def save_half(tensors, path, metadata):
    save(tensors, path, metadata)
    written.append(path)
    if len(written) == 3:
        os.truncate(path, os.path.getsize(path) // 2)
        os.kill(os.getpid(), signal.SIGKILL)
feature_encoder.save_file = save_half
main(sys.argv[1:])
"""


def test_killed_run_goes_on(model, tmp_path, capsys):
    """A half-written file that is taken for a whole one; pictures that are encoded twice, or not at all."""
    data, folder = many_pictures(tmp_path / "data", 12), tmp_path / "features"
    small = ["--shard-size", "0.002", "--batch-size", "1"]  # two pictures a file
    killed = warm_processes.run(["-c", KILLED, *encode(model, data, folder, *small)])
    assert killed.returncode == warm_processes.KILLED, killed.stderr
    (partial,) = folder.glob("*.partial")
    assert [len(names) for names in shards(folder).values()] == [2, 2]
    assert len(VisionFeatures(folder, load(model))) == 4
    before = {path: path.stat().st_mtime_ns for path in folder.glob(SHARDS)}
    status, out, error = run(capsys, *encode(model, data, folder, *small))
    assert status == 0 and "8 image(s) encoded, 4 known" in out, error
    assert not partial.exists() and all(path.stat().st_mtime_ns == time for path, time in before.items())
    assert main(encode(model, data, tmp_path / "whole", *small)) == 0
    assert shards(folder) == shards(tmp_path / "whole")
    whole = tensors(tmp_path / "whole")
    assert len(whole) == 12 and all(torch.equal(tensor, whole[name]) for name, tensor in tensors(folder).items())

    damaged = next(folder.glob(SHARDS))  # by a disk that was full, not by a run that was killed
    damaged.write_bytes(damaged.read_bytes()[:-8])
    with pytest.raises(ValueError, match=f"{damaged} is damaged.*Remove it, and run `hf-xattn encode-features` again"):
        VisionFeatures(folder, load(model))
    status, _, error = run(capsys, *encode(model, data, folder, *small))
    assert status == 2 and f"{damaged} is damaged" in error
    damaged.unlink()
    status, out, _ = run(capsys, *encode(model, data, folder, *small))
    assert status == 0 and "2 image(s) encoded, 10 known" in out and shards(folder) == shards(tmp_path / "whole")


LAUNCHERS = {
    "torchrun": ["torch.distributed.run", "--standalone", "--nproc-per-node", "2"],
    # One process on CPUs, in spite of its options: accelerate starts several there through mpirun only.
    "accelerate": ["accelerate.commands.launch", "--cpu", "--num_processes", "2", "--num_machines", "1"],
}


@pytest.mark.parametrize("launcher", ["torchrun", pytest.param("accelerate", marks=pytest.mark.slow)])
def test_processes_share_the_pictures(model, tmp_path, launcher):
    """A picture that two processes encode, or none; a file that both write."""
    data, folder = many_pictures(tmp_path / "data", 9), tmp_path / "features"
    words = encode(model, data, folder, "--shard-size", "0.002")
    command = [sys.executable, "-m", *LAUNCHERS[launcher], "-m", "hf_xattn", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    if launcher == "torchrun":
        encoded = [int(count) for count in re.findall(r"process [01]: (\d+) image\(s\) encoded", done.stdout)]
        assert len(encoded) == 2 and sum(encoded) == 9 and min(encoded) > 0
    names = [name for each in shards(folder).values() for name in each]
    assert len(names) == 9 and set(names) == {sha256_of(path) for path in data.glob("*.png")}
    assert not list(folder.glob("*.partial"))
    assert len(VisionFeatures(folder, load(model))) == 9


def test_features_of_tiles_train_as_their_pixels_do(tmp_path, capsys, monkeypatch):
    """Aspect ratios that are lost, or files with the tower's output for padding tiles."""
    make_mllama().save_pretrained(tmp_path / "theirs")
    make_mllama_processor().save_pretrained(tmp_path / "theirs")
    ours = tmp_path / "ours"
    assert main(["import", str(tmp_path / "theirs"), "--output", str(ours)]) == 0
    lines = [
        {"file_name": "wide.png", "text": "w1 w2 w3"},
        {"images": ["red.png", "wide.png"], "question": "w4", "answer": "w5 w6"},
        {"question": "w4", "answer": "w7"},
    ]
    data = write_examples(tmp_path / "data", lines)
    draw("red").resize((60, 25)).save(data / "wide.png")
    status, out, error = run(capsys, *encode(ours, data, tmp_path / "features"))
    assert status == 0 and "2 image(s) encoded" in out, error
    tiles = {len(tensor) for name, tensor in tensors(tmp_path / "features").items() if "." not in name}
    assert len(tiles) == 2 and max(tiles) <= 4  # the wide picture has more tiles than the other
    whole, processor = freeze(load(ours)), AutoProcessor.from_pretrained(ours)
    processor = XAttnProcessor(processor.image_processor, processor.tokenizer, image_token="<|image|>")
    rows = load_rows(data)[:]
    batches = [
        XAttnDataCollator(processor)(rows),
        XAttnDataCollator(processor, features=VisionFeatures(tmp_path / "features", whole))(rows),
    ]
    assert {*batches[0]} - {*batches[1]} == {"pixel_values"} and {*batches[1]} - {*batches[0]} == {"vision_features"}
    assert all(torch.equal(batches[1][name], batches[0][name]) for name in batches[0] if name != "pixel_values")
    losses = [whole.train()(**batch).loss for batch in batches]
    assert torch.allclose(*losses, rtol=1e-5)
    status, _, error = run(
        capsys,
        "train",
        ours,
        "--data",
        data,
        "--features",
        tmp_path / "features",
        "--output",
        tmp_path / "out",
        "--steps",
        "1",
        "--text-share",
        "0",
    )
    assert status == 0, error


def test_model_without_a_tower(model, data, tmp_path, capsys):
    """An error from deep inside."""
    whole: PreTrainedModel = load(model)
    whole.config.vision_config = whole.model.vision_tower = None
    with pytest.raises(ValueError, match="Expected `model` to have a vision tower"):
        VisionFeatures(tmp_path, whole)


def test_a_convolutional_tower(model, data, tmp_path, capsys):
    """Features by channel, row and column, which training takes for a damaged file."""
    sizes = {"embedding_size": 4, "hidden_sizes": [4, 8, 8], "depths": [1, 1, 1], "layer_type": "basic"}
    torch.manual_seed(0)
    text = remove_blocks(load(model))
    seeing = randomize(retrofit(text, ResNetModel(ResNetConfig(**sizes)), every=2)).eval()
    seeing.save_pretrained(tmp_path / "model")
    processor = AutoProcessor.from_pretrained(model)
    processor.save_pretrained(tmp_path / "model")
    assert main(encode(tmp_path / "model", data, tmp_path / "features")) == 0
    rows = load_rows(data)[:4]
    features = VisionFeatures(tmp_path / "features", seeing)
    pixels, encoded = (XAttnDataCollator(processor, features=each)(rows) for each in (None, features))
    assert encoded["vision_features"].shape == (4, 1, 4, 8) and "pixel_values" not in encoded
    with torch.no_grad():
        assert torch.equal(seeing(**encoded).logits, seeing(**pixels).logits)
