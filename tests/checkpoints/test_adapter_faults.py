"""Adapter-only folders that are not whole, whose base has changed or is gone, and saves that fail or
meet other files.
"""

import json
import shutil

import pytest
from transformers import AutoModel, AutoModelForImageTextToText, ResNetConfig

from helpers.inputs.damaged_checkpoints import edit_json, setting
from helpers.models.saved_models import ADDED, make, make_base, same_model
from helpers.models.tiny_models import make_text, randomize
from hf_xattn import retrofit
from hf_xattn.checkpoints.folders import MANIFEST


def test_a_base_with_other_weights_is_refused(vision, tmp_path):
    """Other weights of the same shape, which answer otherwise; and a base as it was, refused."""
    model = make(tmp_path, vision)
    model.save_pretrained(tmp_path / "added", adapter_only=True)
    load = AutoModelForImageTextToText.from_pretrained
    load(tmp_path / "added")
    make_base(tmp_path / "text-llama", seed=5)
    with pytest.raises(ValueError, match="was saved on the base .*text-llama.* `text_base` .* its weights differ"):
        load(tmp_path / "added")
    same_model(model, load(tmp_path / "added", text_base=make_base(tmp_path / "moved")))
    make_base(tmp_path / "text-llama")
    tower = AutoModel.from_pretrained(vision)
    next(tower.parameters()).data.view(-1)[3] += 1
    tower.save_pretrained(vision)
    with pytest.raises(ValueError, match=f"`vision_base` {vision} is another one: its weights differ"):
        load(tmp_path / "added")


def test_bases_that_are_gone_or_of_another_shape(vision, tmp_path):
    """An error from deep inside, or weights at random in place of a base."""
    make(tmp_path, vision).save_pretrained(tmp_path / "added", adapter_only=True)
    make_base(tmp_path / "other", "llama_tied")
    load = AutoModelForImageTextToText.from_pretrained
    with pytest.raises(ValueError, match="`text_base` .*other is another one: its weights differ"):
        load(tmp_path / "added", text_base=tmp_path / "other")
    shutil.rmtree(tmp_path / "text-llama")
    with pytest.raises(ValueError, match=r"text-llama, where there is no folder now. Pass `text_base=`"):
        load(tmp_path / "added")
    with pytest.raises(ValueError, match="its base /nowhere/text, where there is no folder now"):
        load(tmp_path / "added", text_base="/nowhere/text")
    with pytest.raises(TypeError, match="PathLike object, not int"):
        load(tmp_path / "added", text_base=3)
    with pytest.raises(OSError, match="(?s)added was saved without the weights of its base a/b.*`text_base=`"):
        load(tmp_path / "added", text_base="a/b")


def test_models_that_cannot_be_saved_so(vision, tmp_path):
    """A folder that nobody can load, because a base has no name; arguments that are dropped."""
    from_memory = randomize(retrofit(make_text(), AutoModel.from_pretrained(vision), every=2))
    with pytest.raises(ValueError, match="text_model was not loaded from a checkpoint.*`text_base=`"):
        from_memory.save_pretrained(tmp_path / "added", adapter_only=True)
    make_base(tmp_path / "text")
    from_memory.save_pretrained(tmp_path / "added", adapter_only=True, text_base=tmp_path / "text")
    same_model(from_memory, AutoModelForImageTextToText.from_pretrained(tmp_path / "added"))
    model = make(tmp_path, vision)
    for options, message in (
        ({"adapter_only": True, "push_to_hub": True}, r"Call `model.push_to_hub\(repo_id, adapter_only=True\)`"),
        ({"adapter_only": True, "text_base": 3}, "PathLike object, not int"),
        ({"text_base": "a/b"}, "`text_base` needs `adapter_only=True`, got 'a/b'"),
    ):
        with pytest.raises((ValueError, TypeError), match=message):
            model.save_pretrained(tmp_path / "new", **options)
    model.save_pretrained(tmp_path / "whole")
    with pytest.raises(ValueError, match="`text_base` is for folders of"):
        AutoModelForImageTextToText.from_pretrained(tmp_path / "whole", text_base=tmp_path / "text")
    with pytest.raises(ValueError, match="holds a whole model"):
        model.save_pretrained(tmp_path / "whole", adapter_only=True)
    shutil.rmtree(tmp_path / "text-llama")
    with pytest.raises(ValueError, match="where there is no folder now. Pass `text_base=`"):
        model.save_pretrained(tmp_path / "new", adapter_only=True)
    assert not (tmp_path / "new").exists()


def test_state_dict_without_buffers(tmp_path):
    """Statistics of batch norms that a `state_dict` of parameters alone lacks: they load as they began."""
    AutoModel.from_config(ResNetConfig(embedding_size=8, hidden_sizes=[8], depths=[1])).save_pretrained(
        tmp_path / "net"
    )
    model = make(tmp_path, tmp_path / "net")
    with pytest.raises(ValueError, match="expected all weights of the model.*such as model.vision_tower.*num_batches"):
        model.save_pretrained(tmp_path / "added", adapter_only=True, state_dict=dict(model.named_parameters()))
    model.save_pretrained(tmp_path / "added", adapter_only=True, state_dict=model.state_dict())
    same_model(model, AutoModelForImageTextToText.from_pretrained(tmp_path / "added"))


def test_half_written_folders_are_refused(vision, tmp_path):
    """A folder of which a part was written, cut off, or mixed with another; and leftovers of a save that failed."""
    model = make(tmp_path, vision)
    folder = tmp_path / "added"
    model.save_pretrained(folder, adapter_only=True)
    load = AutoModelForImageTextToText.from_pretrained
    whole = (folder / ADDED).read_bytes()
    (folder / ADDED).write_bytes(whole[:-100])
    with pytest.raises(ValueError, match=rf"{ADDED} is truncated"):
        load(folder)
    (folder / ADDED).unlink()
    with pytest.raises(ValueError, match=f"lacks {ADDED}"):
        load(folder)
    (folder / ADDED).write_bytes(whole)
    manifest = (folder / MANIFEST).read_text()
    (folder / MANIFEST).write_text(manifest[:-50])
    with pytest.raises(ValueError, match=f"{MANIFEST} is damaged"):
        load(folder)
    (folder / MANIFEST).write_text(json.dumps({**json.loads(manifest), "format": 99}))
    with pytest.raises(ValueError, match="format 99"):
        load(folder)
    (folder / MANIFEST).unlink()
    with pytest.raises(OSError, match="no file named model.safetensors"):
        load(folder)
    model.save_pretrained(folder, adapter_only=True)
    same_model(model, load(folder))


def test_a_failed_save_leaves_nothing(vision, tmp_path, monkeypatch):
    """A folder that looks whole after a full disk, or an older one that is lost by it."""
    model = make(tmp_path, vision)
    model.save_pretrained(tmp_path / "added", adapter_only=True)
    before = {path.name: path.read_bytes() for path in (tmp_path / "added").iterdir()}
    monkeypatch.setattr(
        type(model.config), "save_pretrained", lambda *a, **k: (_ for _ in ()).throw(OSError("disk full"))
    )
    for name in ("added", "new"):
        with pytest.raises(OSError, match="disk full"):
            model.save_pretrained(tmp_path / name, adapter_only=True)
    assert before == {path.name: path.read_bytes() for path in (tmp_path / "added").iterdir()}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["added", "text-llama", "vision"]


def test_a_failed_save_of_the_whole_model_leaves_the_adapter(vision, tmp_path):
    """Trained blocks that are deleted for a model that was never written."""
    model = make(tmp_path, vision)
    model.save_pretrained(tmp_path / "added", adapter_only=True)
    with pytest.raises(ValueError, match="not supported"):
        model.save_pretrained(tmp_path / "added", max_shard_size="huge")
    same_model(model, AutoModelForImageTextToText.from_pretrained(tmp_path / "added"))


def test_another_save_into_the_same_folder(vision, tmp_path):
    """Files of two saves that are read together; a processor's files that are lost."""
    model = make(tmp_path, vision)
    folder = tmp_path / "added"
    folder.mkdir()
    (folder / "tokenizer.json").write_text("{}")
    model.save_pretrained(folder, adapter_only=True, max_shard_size="40KB")
    randomize(model, 9).save_pretrained(folder, adapter_only=True)
    assert [path.name for path in folder.glob("*.safetensors")] == [ADDED]
    assert (folder / "tokenizer.json").read_text() == "{}"
    same_model(model, AutoModelForImageTextToText.from_pretrained(folder))
    randomize(model, 10).save_pretrained(folder)
    assert not (folder / MANIFEST).exists() and not (folder / ADDED).exists()
    same_model(model, AutoModelForImageTextToText.from_pretrained(folder))


def test_a_save_keeps_the_files_of_others(vision, tmp_path):
    """A user's backup of trained blocks that a save removes; a trainer's files that make the folder one of pickled
    weights.
    """
    model = make(tmp_path, vision)
    folder = tmp_path / "added"
    folder.mkdir()
    others = {
        "cross_attention_best.safetensors",
        "cross_attention-old.safetensors",
        "training_args.bin",
        "optimizer.pt",
    }
    for name in others:
        (folder / name).write_text("mine")
    model.save_pretrained(folder, adapter_only=True)
    same_model(model, AutoModelForImageTextToText.from_pretrained(folder))
    randomize(model, 9).save_pretrained(folder)
    assert others < {path.name for path in folder.iterdir()} and not (folder / ADDED).exists()


def test_into_the_folder_of_a_base(vision, tmp_path):
    """A base whose configuration is replaced by that of the model that needs it: neither can be loaded again."""
    base = make_base(tmp_path / "text")
    (base / "model.safetensors").rename(base / "weights.safetensors")
    edit_json("config.json", setting("weights.safetensors", "transformers_weights"))(base)
    model = randomize(retrofit(base, vision, cross_attention_layers=[1]))
    (tmp_path / "link").symlink_to(base)
    before = (base / "config.json").read_text()
    with pytest.raises(ValueError, match="link is the folder of the base, whose configuration would be lost"):
        model.save_pretrained(tmp_path / "link", adapter_only=True)
    assert (base / "config.json").read_text() == before


@pytest.mark.parametrize("folder", [".", "..", "../other/.."])
def test_folders_without_a_name(folder, vision, tmp_path, monkeypatch):
    """Files of the working folder that are moved into the folder above, or deleted; a second save that fails."""
    model = make(tmp_path, vision)
    here = tmp_path / "runs" / "here"
    here.mkdir(parents=True)
    monkeypatch.chdir(here)
    for name in ("model_notes.txt", "rows.jsonl"):
        (here / name).write_text("mine")
    for _ in range(2):
        model.save_pretrained(folder, adapter_only=True)
        assert (here / "model_notes.txt").is_file() and (here / "rows.jsonl").is_file()
    same_model(model, AutoModelForImageTextToText.from_pretrained(folder if folder == "." else here.parent))


@pytest.mark.parametrize("saved", [True, False], ids=["card and settings edited", "no settings"])
def test_settings_of_a_person(saved, vision, tmp_path):
    """A setting that somebody has changed by hand, as in the folder of any model, and that is refused."""
    folder = tmp_path / "added"
    model = make(tmp_path, vision)
    model.save_pretrained(folder, adapter_only=True)
    if saved:
        edit_json("generation_config.json", setting(7, "max_new_tokens"))(folder)
        edit_json("config.json", setting(7, "image_token_id"))(folder)
    else:
        (folder / "generation_config.json").unlink()
    loaded = AutoModelForImageTextToText.from_pretrained(folder)
    assert loaded.generation_config.max_new_tokens == (7 if saved else None)
    assert loaded.config.image_token_id == (7 if saved else None)
    same_model(model, loaded)


def test_folders_of_the_first_format(vision, tmp_path):
    """A folder of an earlier version, whose manifest names digests of files and of shapes, that is not read."""
    folder = tmp_path / "added"
    model = make(tmp_path, vision)
    model.model.text_model.model.norm.weight.data[0] = 3
    model.save_pretrained(folder, adapter_only=True)
    manifest = json.loads((folder / MANIFEST).read_text())
    for argument in ("text_base", "vision_base"):
        manifest[argument]["shapes"] = "0" * 64
    names = ("config.json", "generation_config.json", "xattn_stub.py", ADDED)
    manifest |= {"format": 1, "files": {name: {"sha256": "0" * 64, "bytes": 1} for name in names}}
    (folder / MANIFEST).write_text(json.dumps(manifest))
    same_model(model, AutoModelForImageTextToText.from_pretrained(folder))
