"""Folders and files that are written whole or not at all: full disks, several writers, links, and hidden folders of
others.
"""

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from transformers import AutoModelForImageTextToText, PreTrainedModel

from helpers.checkout import ROOT, TESTS
from helpers.models.saved_models import make_base, make_vision, same_model
from helpers.models.tiny_models import make_model, pixels, randomize
from hf_xattn import retrofit
from hf_xattn.commands.main import main
from hf_xattn.storage.image_files import load_image_cache, save_image_cache
from hf_xattn.utils.whole_folder import HIDDEN, MARKER, refuse_unfinished, replace_file, whole_file, whole_folder


posix = pytest.mark.skipif(not hasattr(os, "fork"), reason="limits and locks of POSIX")


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bases")
    bases = make_base(folder / "text"), make_vision(folder / "vision")
    return [randomize(retrofit(*bases, cross_attention_layers=places)) for places in ([1, 3], [0, 2, 3])]


def content(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


class SmallDisk:
    """In the `with` statement, this process cannot write a file of more than `size` bytes."""

    def __init__(self, size):
        self.size = size

    def __enter__(self):
        import resource

        self.before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (self.size, self.before[1]))

    def __exit__(self, *error):
        import resource

        resource.setrlimit(resource.RLIMIT_FSIZE, self.before)


# --- a full disk


@posix
@pytest.mark.parametrize("adapter_only", [False, True], ids=["whole", "added"])
def test_a_full_disk_keeps_the_model_of_before(adapter_only, models, tmp_path):
    """A model that is lost for one that was not written; an error that does not say so, or names a hidden folder."""
    models[0].save_pretrained(tmp_path / "old", adapter_only=adapter_only)
    before = content(tmp_path)
    for name in ("old", "new"):
        with pytest.raises(OSError, match=rf"{name} could not be written: File too large") as raised:
            with SmallDisk(30_000):
                models[1].save_pretrained(tmp_path / name, adapter_only=adapter_only)
        assert raised.value.errno and "hf_xattn-" not in str(raised.value)
        assert content(tmp_path) == before
    same_model(models[0], AutoModelForImageTextToText.from_pretrained(tmp_path / "old"))


@posix
def test_a_full_disk_under_a_command_and_an_image_cache(models, tmp_path, capsys):
    """A half-made folder that blocks the next try; encoded images that are lost; a traceback of safetensors."""
    folder = Path(models[0].model.text_model.name_or_path)
    arguments = ["retrofit", str(folder), "--output", str(tmp_path / "made")]
    with SmallDisk(30_000):
        assert main(arguments) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert f"{tmp_path / 'made'} could not be written: File too large" in error
    assert list(tmp_path.iterdir()) == []
    assert main(arguments) == 0
    model, file = make_model(), tmp_path / "images.safetensors"
    cache = model.encode_images(pixel_values=pixels())
    save_image_cache(cache, file, model)
    before = file.read_bytes()
    with SmallDisk(1000), pytest.raises(OSError, match="images.safetensors could not be written"):
        save_image_cache(cache, file, model)
    assert file.read_bytes() == before and len(list(tmp_path.iterdir())) == 2
    load_image_cache(file, model)


@pytest.mark.slow
def test_a_disk_that_is_full(tmp_path):
    """As above, on a file system without room: a file of that size could still be made, and mapped memory would end
    the process.
    """
    script = """
import sys
from pathlib import Path
from helpers.models.tiny_models import make_model
folder = Path(sys.argv[1])
make_model(vision=False).save_pretrained(folder / "old")
before = {path.name: path.read_bytes() for path in (folder / "old").iterdir()}
for name in ("old", "new"):
    try:
        make_model().save_pretrained(folder / name)
    except OSError as error:
        print(error)
assert before == {path.name: path.read_bytes() for path in (folder / "old").iterdir()}
assert [path.name for path in folder.iterdir()] == ["old"]
"""
    mount = f'mount -t tmpfs -o size=600k tmpfs {tmp_path} && exec "$@"'
    run = subprocess.run(
        ["unshare", "-Urm", "sh", "-c", mount, "sh", sys.executable, "-c", script, str(tmp_path)],
        env=os.environ | {"PYTHONPATH": f"{ROOT}:{TESTS}"},
        capture_output=True,
        text=True,
    )
    if "unshare" in run.stderr or "mount" in run.stderr:
        pytest.skip(f"no file system can be mounted: {run.stderr}")
    assert run.returncode == 0, run.stderr
    assert run.stdout.count("could not be written: No space left on device") == 2


# --- writers side by side


@posix
def test_another_writer_is_left_alone(tmp_path):
    """Files of a save that is under way, removed as leftovers of a killed one."""
    (tmp_path / "there").mkdir()
    for name in ("there", "new"):
        with whole_folder(tmp_path / name) as first:
            (first / "config.json").write_text("1")
            with whole_folder(tmp_path / name) as second:
                (second / "config.json").write_text("2")
                (second / "more.json").write_text("2")
            assert (tmp_path / name / "config.json").read_text() == "2"
        assert content(tmp_path / name) == {"config.json": b"1", "more.json": b"2"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new", "there"]


def test_threads_that_save_one_model(models, tmp_path):
    """An error, or files of two saves in one folder."""
    errors = []

    def save(folder):
        try:
            for _ in range(3):
                models[0].save_pretrained(folder)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=save, args=(tmp_path / name,)) for name in ("one", "one", "two")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    for name in ("one", "two"):
        same_model(models[0], AutoModelForImageTextToText.from_pretrained(tmp_path / name))
        assert content(tmp_path / name) == content(tmp_path / "two")


def test_other_ranks_go_on_when_all_files_are_there(models, tmp_path, monkeypatch):
    """A rank that loads the folder behind transformers' barrier, before the first one has moved its files."""
    name, seen = "barrier_after_gathered_checkpoint_save", []
    if not hasattr(PreTrainedModel, name):
        pytest.skip("this version of transformers has no such barrier")
    monkeypatch.setattr(PreTrainedModel, name, lambda self, config: seen.append(content(tmp_path / "model")))
    models[0].save_pretrained(tmp_path / "model")
    assert seen == [content(tmp_path / "model")] and "README.md" in seen[0]
    models[1].save_pretrained(tmp_path / "model", is_main_process=False)
    assert seen[1] == seen[0] and len(list(tmp_path.iterdir())) == 1


def test_an_interrupt_in_the_middle(models, tmp_path, monkeypatch):
    """Ctrl-C while files move: a folder between two models that is loaded, or that no save makes whole again."""
    models[0].save_pretrained(tmp_path / "model")
    replace, calls = os.replace, []

    def interrupted(source, target):
        replace(source, target)
        calls.append(target)
        if len(calls) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        models[1].save_pretrained(tmp_path / "model")
    monkeypatch.undo()
    assert not list((tmp_path / "model").glob(f"{HIDDEN}*"))
    with pytest.raises(ValueError, match="was cut off"):
        AutoModelForImageTextToText.from_pretrained(tmp_path / "model")
    for name in ("model", "new"):
        models[1].save_pretrained(tmp_path / name)
    assert content(tmp_path / "model") == content(tmp_path / "new")


def test_a_marker_stays_until_all_is_saved_again(tmp_path):
    """A folder that counts as whole when one of two things that were cut off is saved again."""
    folder = tmp_path / "model"

    def save(*names):
        with whole_folder(folder, lambda folder: folder.glob("weights*")) as fresh:
            for name in names:
                (fresh / name).write_text(name)

    save("config.json", "weights-1", "tokenizer.json")
    (folder / MARKER).write_text("config.json\nweights-1\nweights-2\ntokenizer.json")
    save("config.json", "weights")
    with pytest.raises(ValueError, match="was cut off"):
        refuse_unfinished(folder)
    assert (folder / MARKER).read_text() == "tokenizer.json"
    save("tokenizer.json")
    refuse_unfinished(folder)
    assert not (folder / MARKER).exists()


@posix
def test_files_move_in_turns(tmp_path, monkeypatch):
    """The configuration of one save with the weights of another one that ended at the same time."""
    replace, moved, done = os.replace, threading.Event(), threading.Event()
    (tmp_path / "model").mkdir()

    def slowly(source, target):
        replace(source, target)
        if threading.current_thread() is not threading.main_thread() and not moved.is_set():
            moved.set()
            done.wait(0.5)  # the main thread waits for its turn, and cannot be done

    def write(folder, text):
        for name in ("config.json", "weights"):
            (folder / name).write_text(text)

    def save():
        with whole_folder(tmp_path / "model") as fresh:
            write(fresh, "first")

    monkeypatch.setattr(os, "replace", slowly)
    thread = threading.Thread(target=save)
    with whole_folder(tmp_path / "model") as fresh:
        write(fresh, "second")
        thread.start()
        moved.wait()
    done.set()
    thread.join()
    assert content(tmp_path / "model") == {"config.json": b"second", "weights": b"second"}


# --- what lies in a folder


def test_links_stay_links_and_their_targets_stay(models, tmp_path):
    """A link to a folder, or to a file in a cache of downloads, that is replaced, or written through."""
    models[0].save_pretrained(tmp_path / "real")
    blob = tmp_path / "blob"
    (tmp_path / "real" / "model.safetensors").rename(blob)
    (tmp_path / "real" / "model.safetensors").symlink_to(blob)
    before = blob.read_bytes()
    (tmp_path / "link").symlink_to("real")
    models[1].save_pretrained(tmp_path / "link")
    assert (tmp_path / "link").is_symlink() and blob.read_bytes() == before
    assert not (tmp_path / "real" / "model.safetensors").is_symlink()
    same_model(models[1], AutoModelForImageTextToText.from_pretrained(tmp_path / "real"))


def test_a_folder_in_the_place_of_a_file(models, tmp_path):
    """A save that fails when a part of its files has moved."""
    models[0].save_pretrained(tmp_path / "model", max_shard_size="100KB")
    (tmp_path / "model" / "model.safetensors").mkdir()
    before = content(tmp_path)
    with pytest.raises(IsADirectoryError, match="Expected a file, got a folder"):
        models[1].save_pretrained(tmp_path / "model")
    assert content(tmp_path) == before
    with pytest.raises(NotADirectoryError), whole_folder(tmp_path / "model" / "config.json"):
        pass
    with pytest.raises(FileNotFoundError, match="no"), whole_file(tmp_path / "no" / "a"):
        pass
    assert content(tmp_path) == before


@posix
def test_what_killed_processes_have_left(tmp_path):
    """Folders that fill the disk for ever; a link of a stranger that is followed, or a folder of a save
    that goes on.
    """
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "mine").write_text("mine")
    (tmp_path / f"{HIDDEN}link").symlink_to(tmp_path / "elsewhere")
    with whole_folder(tmp_path / "other") as fresh:
        name = fresh.parent.name
    (tmp_path / name).mkdir()
    (tmp_path / name / "config.json").write_text("half")
    with whole_folder(tmp_path / "model") as first:
        (first / "config.json").write_text("1")
        with whole_file(tmp_path / "file") as file:
            file.write_text("2")
        assert {path.name for path in tmp_path.glob(f"{HIDDEN}*")} == {first.parent.name, f"{HIDDEN}link"}
    assert (tmp_path / "elsewhere" / "mine").exists() and (tmp_path / "model" / "config.json").exists()


def test_a_save_of_another_machine(tmp_path, monkeypatch):
    """A save that is under way on another machine, whose lock a network file system does not show here."""
    monkeypatch.setattr("socket.gethostname", lambda: "other")
    with whole_folder(tmp_path / "model") as fresh:
        left = fresh.parent.with_name(f"{fresh.parent.name}x")
    left.mkdir()
    (left / "config.json").write_text("half")
    monkeypatch.undo()
    with whole_file(tmp_path / "file") as file:
        file.write_text("2")
    assert left.exists()


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path):
    """A file that is gone after an error; hidden folders beside it."""
    path = tmp_path / "file"
    path.write_text("old")
    with pytest.raises(ValueError), whole_file(path) as fresh:
        fresh.write_text("half")
        raise ValueError
    assert content(tmp_path) == {"file": b"old"}
    with whole_file(path) as fresh:
        fresh.write_text("new")
    (tmp_path / "partial").write_text("newer")
    assert path.read_text() == "new"
    replace_file(tmp_path / "partial", path)
    assert content(tmp_path) == {"file": b"newer"}
    assert [each.name for each in tmp_path.iterdir()] == ["file"]


def test_a_save_works_where_folders_cannot_be_locked(tmp_path, monkeypatch):
    """A system that cannot lock folders, where a save fails, or removes files of one that is under way."""
    monkeypatch.setitem(sys.modules, "fcntl", None)
    left = tmp_path / f"{HIDDEN}left"
    left.mkdir()
    (left / "config.json").write_text("half")
    for text in ("1", "2"):
        with whole_folder(tmp_path / "made") as fresh:
            (fresh / "config.json").write_text(text)
        assert (tmp_path / "made" / "config.json").read_text() == text and left.exists()
