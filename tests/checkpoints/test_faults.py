"""Processes that are killed while they write: what they leave is the old state, the new one, or a folder that is
refused.
"""

import os

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForImageTextToText, AutoProcessor

from helpers.models.saved_models import make_base, make_vision, same_model
from helpers.models.tiny_mllama import make_mllama
from helpers.models.tiny_models import make_model, pixels, randomize
from helpers.models.word_models import make_text_checkpoint, make_vision_checkpoint
from helpers.processes.killed_saves import at_moments
from hf_xattn import retrofit
from hf_xattn.commands.main import main
from hf_xattn.storage.image_files import load_image_cache, save_image_cache
from hf_xattn.utils.whole_folder import HIDDEN, MARKER, refuse_unfinished


pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are forked, which only POSIX has")
slow = pytest.mark.slow
FOREIGN = ("tokenizer.json", "notes/mine.txt", "checkpoint-3/model.safetensors")
REFUSED = "refused"


def files_of(path):
    """What a folder or a file holds, `REFUSED` where no load takes it, or None if there is no such path."""
    if not path.exists():
        return None
    if path.is_file():  # the order of its metadata is random
        with safe_open(path, "pt") as file:
            return {name: file.get_tensor(name).numpy().tobytes() for name in file.keys()} | file.metadata()
    if (path / MARKER).exists():
        with pytest.raises(ValueError, match="was cut off"):
            refuse_unfinished(path)
        return REFUSED
    refuse_unfinished(path)
    files = (each for each in path.rglob("*") if each.is_file() and not any(HIDDEN in part for part in each.parts))
    return {str(each.relative_to(path)): each.read_bytes() for each in files}


def check_moments(before, work, name, action, new, at_most):
    """Kills `action` at moments, and runs it again after some kills. Returns the states in which the kills left a
    path.
    """
    old, states = files_of(before / name), []
    for index, moment in enumerate(at_moments(before, work, action, at_most)):
        states.append(files_of(work / name))
        assert states[-1] in (old, new, REFUSED), f"{name} is neither old nor new after a kill at moment {moment}"
        if index % 4 == 3 and (states[-1] == old or name != "made"):  # commands refuse a folder that is complete
            action()
            assert files_of(work / name) == new
            assert not list(work.rglob(f"{HIDDEN}*/*"))
    assert files_of(work / name) == new and states[0] == old
    assert states == sorted(states, key=[old, REFUSED, new].index)  # once new, always new
    return states


# --- a save over another one


def small_shards(model, folder):
    model.save_pretrained(folder, max_shard_size="40KB")


def whole(model, folder):
    model.save_pretrained(folder)


def added(model, folder):
    model.save_pretrained(folder, adapter_only=True)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Two models on one pair of bases, with other blocks in other places."""
    folder = tmp_path_factory.mktemp("bases")
    bases = make_base(folder / "text"), make_vision(folder / "vision")
    return [randomize(retrofit(*bases, cross_attention_layers=places)) for places in ([1, 3], [0, 2, 3])]


WAYS = {
    "whole over whole": (whole, whole),
    "shards over whole": (whole, small_shards),
    "whole over shards": (small_shards, whole),
    "fewer shards": (small_shards, lambda model, folder: model.save_pretrained(folder, max_shard_size="100KB")),
    "added over added": (added, added),
    "whole over added": (added, whole),
    "nothing there": (None, whole),
    "nothing there, added": (None, added),
}


@pytest.mark.parametrize(
    "way, at_most",
    [(way, 6) for way in ("whole over whole", "shards over whole", "nothing there")]
    + [pytest.param(way, None, marks=slow) for way in WAYS],
)
def test_a_killed_save_leaves_the_old_model_or_the_new_one(way, at_most, models, tmp_path):
    """Weights of two saves, or of one with the configuration of the other; files of others that are lost; leftovers
    for ever.
    """
    first, then = WAYS[way]
    before = tmp_path / "before"
    before.mkdir()
    if first is not None:
        first(models[0], before / "model")
        for name in FOREIGN:
            (before / "model" / name).parent.mkdir(exist_ok=True)
            (before / "model" / name).write_text("mine")
    then(models[1], tmp_path / "new")
    new = files_of(tmp_path / "new") | {name: b"mine" for name in FOREIGN if first is not None}
    work = tmp_path / "work"
    check_moments(before, work, "model", lambda: then(models[1], work / "model"), new, at_most)
    same_model(models[1], AutoModelForImageTextToText.from_pretrained(work / "model"))


def test_a_save_that_was_cut_off_is_refused(models, tmp_path):
    """A folder that a load finds in the middle: the configuration of one model with the weights of another."""
    before, work = tmp_path / "before", tmp_path / "work"
    whole(models[0], before / "model")
    refused = 0
    for _ in at_moments(before, work, lambda: whole(models[1], work / "model"), 20):
        if not (work / "model" / MARKER).exists():
            continue
        refused += 1
        with pytest.raises(ValueError, match=rf"A save into {work / 'model'} was cut off .*Save again into it"):
            AutoModelForImageTextToText.from_pretrained(work / "model")
        assert main(["export", str(work / "model"), "--output", str(tmp_path / "no")]) == 2
    assert refused > 2
    whole(models[1], work / "model")
    same_model(models[1], AutoModelForImageTextToText.from_pretrained(work / "model"))


# --- commands, processors and files


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoints")
    make_text_checkpoint(folder / "text")
    make_vision_checkpoint(folder / "vision")
    make_mllama().save_pretrained(folder / "theirs")
    assert main(["import", str(folder / "theirs"), "--output", str(folder / "imported")]) == 0
    assert (
        main(["retrofit", str(folder / "text"), "--vision", str(folder / "vision"), "--output", str(folder / "made")])
        == 0
    )
    return folder


def command(folder, name, output):
    arguments = {
        "retrofit": [
            "retrofit",
            folder / "text",
            "--vision",
            folder / "vision",
            "--every",
            "2",
            "--max-shard-size",
            "100KB",
        ],
        "retrofit --adapter-only": ["retrofit", folder / "text", "--vision", folder / "vision", "--adapter-only"],
        "import": ["import", folder / "theirs"],
        "export": ["export", folder / "imported"],
    }[name]
    torch.manual_seed(0)
    assert main([str(argument) for argument in [*arguments, "--output", output]]) == 0


@pytest.mark.parametrize(
    "name, is_there, at_most",
    [("retrofit", False, 4), ("import", True, 4), ("export", False, 4)]
    + [
        pytest.param(name, is_there, None, marks=slow)
        for name in ("retrofit", "retrofit --adapter-only", "import", "export")
        for is_there in (False, True)
    ],
)
def test_a_killed_command_can_run_again(name, is_there, at_most, checkpoints, tmp_path):
    """A half-made folder that blocks its own rerun; hidden folders that nobody removes; a model
    without its processor.
    """
    before, work = tmp_path / "before", tmp_path / "work"
    before.mkdir()
    if is_there:
        (before / "made").mkdir()
    command(checkpoints, name, tmp_path / "made")
    new = files_of(tmp_path / "made")
    check_moments(before, work, "made", lambda: command(checkpoints, name, work / "made"), new, at_most)


@pytest.mark.parametrize("at_most", [3, pytest.param(None, marks=slow)], ids=["some", "all"])
def test_a_killed_save_leaves_a_whole_processor(at_most, checkpoints, tmp_path):
    """A tokenizer that is cut off, or with the settings of another one."""
    processor = AutoProcessor.from_pretrained(checkpoints / "made")
    before, work = tmp_path / "before", tmp_path / "work"
    processor.save_pretrained(before / "saved")
    (before / "saved" / "mine.txt").write_text("mine")
    processor.tokenizer.add_tokens(["another"])
    processor.chat_template = "{{ messages }}"
    assert processor.save_pretrained(tmp_path / "new") == [str(tmp_path / "new" / "processor_config.json")]
    new = files_of(tmp_path / "new") | {"mine.txt": b"mine"}
    check_moments(before, work, "saved", lambda: processor.save_pretrained(work / "saved"), new, at_most)
    assert "another" in AutoProcessor.from_pretrained(work / "saved").tokenizer.get_vocab()


def test_a_killed_save_leaves_a_whole_file_of_images(tmp_path):
    """A file of encoded images that is cut off, in place of one that could be read."""
    model = make_model()
    before, work = tmp_path / "before", tmp_path / "work"
    before.mkdir()
    first, second = (model.encode_images(pixel_values=pixels(seed=seed)) for seed in (1, 2))
    save_image_cache(first, before / "images.safetensors", model)
    save_image_cache(second, tmp_path / "new", model)

    def save():
        save_image_cache(second, work / "images.safetensors", model)

    check_moments(before, work, "images.safetensors", save, files_of(tmp_path / "new"), None)
    load_image_cache(work / "images.safetensors", model)
