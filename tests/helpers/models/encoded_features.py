"""A model, a folder of examples, and the features of its pictures, which the vision tower has made."""

import shutil

from helpers.inputs.training_examples import MIXED, write_examples
from helpers.models.template_models import save_chat_model
from hf_xattn.commands.main import main


def encode(model, data, output, *options):
    """The arguments of `hf-xattn encode-features`."""
    return ["encode-features", str(model), "--data", str(data), "--output", str(output), *options]


def save_features(folder):
    """Saves a model, every form of an example, and the features of their pictures. Returns the three folders.

    The picture `again.png` is `red.png` with another name.
    """
    model, data, features = (folder / name for name in ("model", "data", "features"))
    save_chat_model(model, connector_type="mlp")
    write_examples(data, [*MIXED, {"file_name": "again.png", "text": "red."}])
    shutil.copy(data / "red.png", data / "again.png")
    assert main(encode(model, data, features, "--batch-size", "1")) == 0
    return model, data, features
