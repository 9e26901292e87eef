"""Uploads: what reaches the Hub loads there. The Hub alone is a stand-in: it takes commits, and its files land in a
folder.
"""

import shutil

import pytest
import torch
from huggingface_hub import ModelCard
from transformers import AutoModel, AutoModelForImageTextToText
from transformers.utils import hub

from helpers.models.tiny_models import make_model, make_text, pixels, randomize, token_ids, vision_config
from hf_xattn import retrofit


class Api:
    """`HfApi` without a network."""

    folder = None
    created: list = []

    def create_repo(self, repo_id, **options):
        self.created.append(repo_id)
        return type("Repository", (), {"repo_id": repo_id})

    def create_commit(self, repo_id, operations, **options):
        for operation in operations:
            place = self.folder / operation.path_in_repo
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(operation.path_or_fileobj, place)


OF_REPOSITORY = "---\nlicense: mit\n---\n# The repository's\n"


@pytest.fixture
def uploaded(tmp_path, monkeypatch):
    def blank(repo_id, tags=None, token=None):
        told = "This is the model card of a 🤗 transformers model that has been pushed on the Hub. This model card has been automatically generated."  # noqa: E501
        return ModelCard(f"---\nlibrary_name: transformers\n---\n# Model Card\n{told}\n")

    monkeypatch.setattr(Api, "folder", tmp_path / "uploaded")
    monkeypatch.setattr(Api, "created", [])
    for name, fake in (("hf_api", Api), ("create_and_tag_model_card", blank)):
        monkeypatch.setattr(hub, name, fake)
        monkeypatch.setattr(f"transformers.modeling_utils.{name}", fake)
    return tmp_path / "uploaded"


@pytest.fixture
def model(tmp_path, monkeypatch):
    """A retrofit of two repositories, which the Hub's cache holds."""
    torch.manual_seed(7)
    cache = tmp_path / "cache"
    for name, part in (("text", make_text()), ("vision", AutoModel.from_config(vision_config()))):
        part.save_pretrained(cache / f"models--org--{name}" / "snapshots" / ("c" * 40))
        refs = cache / f"models--org--{name}" / "refs"
        refs.mkdir()
        (refs / "main").write_text("c" * 40)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
    return randomize(retrofit("org/text", "org/vision", every=2, cache_dir=cache)).eval(), cache


@torch.no_grad()
def logits_of(model):
    return model(token_ids(), pixel_values=pixels()).logits


def test_an_upload_of_added_weights_leaves_the_bases_out(model, uploaded):
    """The bases' weights on the Hub, a card that is transformers' empty form, or a name of a folder that is gone."""
    model, cache = model
    model.push_to_hub("somebody/added", adapter_only=True, with_code=True)
    files = {path.name for path in uploaded.iterdir()}
    added = {"cross_attention.json", "cross_attention.safetensors", "config.json"}
    assert added | {"xattn_stub.py", "xattn_code.py"} <= files
    assert not any(name.startswith("model") and name.endswith(".safetensors") for name in files)
    assert "## What was added" in (uploaded / "README.md").read_text()
    loaded = AutoModelForImageTextToText.from_pretrained(uploaded, cache_dir=cache)
    assert torch.equal(logits_of(loaded), logits_of(model))
    assert "save_pretrained" not in vars(model)


def test_a_base_that_is_a_folder_is_refused(uploaded, tmp_path):
    """A repository that only this machine can load, and that names its folders."""
    make_text().save_pretrained(tmp_path / "text")
    model = retrofit(tmp_path / "text")
    with pytest.raises(ValueError, match="the base of the text_model, a folder of this machine.*pass its Hub id"):
        model.push_to_hub("somebody/added", adapter_only=True)
    with pytest.raises(ValueError, match="`text_base` needs `adapter_only=True`"):
        model.push_to_hub("somebody/added", text_base="org/text")
    assert Api.created == [] and not uploaded.exists()
    with pytest.raises(ValueError, match=r"Call `model.push_to_hub\(repo_id, adapter_only=True\)`"):
        model.save_pretrained(tmp_path / "saved", adapter_only=True, push_to_hub=True)
    assert not (tmp_path / "saved").exists()


def test_name_of_a_model_that_was_pushed(uploaded, tmp_path):
    """An adapter (PEFT) that records a temporary folder as its base."""
    model = make_model()
    model.push_to_hub("somebody/whole")
    assert model.name_or_path == model.config.name_or_path == "somebody/whole"
    model.save_pretrained(tmp_path / "saved")
    model.push_to_hub("somebody/whole")
    assert model.name_or_path == model.config.name_or_path == str(tmp_path / "saved")


def test_an_upload_of_a_whole_model_loads_with_equal_logits(uploaded):
    """An argument of this package that transformers drops on the way."""
    model = make_model()
    model.push_to_hub("somebody/whole", with_code=True)
    assert (uploaded / "xattn_code.py").is_file()
    assert torch.equal(logits_of(AutoModelForImageTextToText.from_pretrained(uploaded)), logits_of(model))


def test_a_link_is_pushed_under_its_own_name(uploaded, tmp_path):
    """A repository with the name of the folder that a link leads to; files of others that are uploaded."""
    (tmp_path / "run-7f3a").mkdir()
    (tmp_path / "run-7f3a" / "mine.txt").write_text("mine")
    (tmp_path / "reader").symlink_to("run-7f3a")
    make_model().save_pretrained(tmp_path / "reader", push_to_hub=True)
    assert Api.created == ["reader"]
    assert (uploaded / "model.safetensors").is_file() and not (uploaded / "mine.txt").exists()
    make_model().save_pretrained(tmp_path / "reader", push_to_hub=True, repo_id="somebody/other")
    assert Api.created == ["reader", "somebody/other"]


def test_an_upload_that_fails(uploaded, tmp_path, monkeypatch):
    """A save that is lost with its upload."""
    model = make_model()

    def broken(*args, **kwargs):
        raise ConnectionError("no route")

    monkeypatch.setattr(Api, "create_commit", broken)
    saved = tmp_path / "saved"
    for push in (lambda: model.push_to_hub("somebody/whole"), lambda: model.save_pretrained(saved, push_to_hub=True)):
        with pytest.raises(ConnectionError, match="no route"):
            push()
    assert Api.created == ["somebody/whole", "saved"]
    assert torch.equal(logits_of(AutoModelForImageTextToText.from_pretrained(saved)), logits_of(model))


def test_two_cards_that_people_wrote(tmp_path, uploaded, monkeypatch):
    """A card in the folder that is lost, or that of the repository."""
    monkeypatch.setattr(hub, "create_and_tag_model_card", lambda *args, **options: ModelCard(OF_REPOSITORY))
    model, folder = make_model(), tmp_path / "saved"
    model.save_pretrained(folder, push_to_hub=True)
    assert (folder / "README.md").read_text() == (uploaded / "README.md").read_text() == OF_REPOSITORY
    (folder / "README.md").write_text("# Mine\n")
    model.save_pretrained(folder, push_to_hub=True)
    assert (folder / "README.md").read_text() == "# Mine\n"
    assert (uploaded / "README.md").read_text() == OF_REPOSITORY
