"""Maps of an answer alone, against those of the whole text."""

import pytest
import torch

from helpers.models.marked_models import MARKER, marked, state_space
from helpers.models.tiny_mllama import make_mllama, mllama_inputs
from helpers.models.tiny_models import make_model, pixels, token_ids
from hf_xattn import attention_maps
from hf_xattn.importers import import_checkpoint
from hf_xattn.maps.answer_maps import answer_maps


QUIET = {"cross_attention_config": {"quiet_softmax": True}}
MODELS = {
    "llama": make_model,
    "window": lambda: make_model("mistral"),
    "two blocks at a place": lambda: make_model(cross_attention_layers=[1, 1, 3]),
    "quiet softmax": lambda: make_model(**QUIET),
    "markers": lambda: marked("latest"),
    "mamba": lambda: state_space("mamba", "previous"),
    "mamba2": lambda: state_space("mamba2"),
}


def inputs(length=9):
    ids = token_ids(1, length)
    ids[ids == MARKER] = 7
    ids[:, [0, -2]] = MARKER
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": pixels(1, 2)}


def check(model, given, answer):
    ours = answer_maps(model, given, answer)
    ids = torch.cat([given["input_ids"], answer[None]], dim=1)
    theirs = attention_maps(model, {**given, "input_ids": ids, "attention_mask": torch.ones_like(ids)})
    first = given["input_ids"].shape[1] - 1
    assert torch.equal(ours.tokens, theirs.tokens[:, first:]) and torch.equal(
        ours.text_mask, theirs.text_mask[:, first:]
    )
    assert ours.num_given == 1 and ours.layers == theirs.layers and ours.num_images == theirs.num_images
    for mine, of_all in zip(ours.weights, theirs.weights, strict=True):
        expected = of_all[:, :, first:].mean(dim=1, keepdim=True)
        torch.testing.assert_close(mine, expected, atol=1e-5, rtol=1e-4)
    for image in range(ours.num_images):
        expected = theirs.grid(image, head="mean")[:, first:]
        torch.testing.assert_close(ours.grid(image, head="mean"), expected, atol=1e-5, rtol=1e-4)
        assert torch.equal(ours.pixels(image), theirs.pixels(image)) and ours.covered(image) == theirs.covered(image)


@pytest.mark.parametrize("length", [1, 70])
@pytest.mark.parametrize("name", MODELS)
def test_maps_of_an_answer(name, length):
    """Maps of other tokens, or of tokens that saw other text or other images than in the whole text."""
    check(MODELS[name](), inputs(), torch.arange(4, 4 + length) % 90 + 4)


def test_an_answer_to_one_token():
    """Images that go with text before the answer, where there is none."""
    check(make_model(), {"input_ids": torch.tensor([[1]]), "pixel_values": pixels(1, 2)}, torch.tensor([5, 6]))


def test_pictures_in_tiles():
    """Tiles that are lost on the way to the maps."""
    model, given = import_checkpoint(make_mllama()), mllama_inputs([[96, 5, 6, 96, 9]], [[2, 4]])
    given.pop("cross_attention_mask")
    check(model, given, torch.tensor([5, 6, 7]))


def test_text_before_the_answer_has_no_maps():
    """Memory for the maps of a conversation of which one answer is shown."""
    model, made = make_model(), []
    for block in model.blocks:
        block.attn.register_forward_hook(lambda module, args, output: made.append(output))
    maps = answer_maps(model, inputs(100), torch.tensor([5, 6, 7]))
    made = [each for each in made if isinstance(each[0], torch.Tensor)]  # without keys and values of the image
    weights = [weights for _, weights in made if weights is not None]
    assert sum(output.shape[1] for output, _ in made) == 103 * len(model.blocks), "each token is read once"
    assert sum(each.shape[2] for each in weights) == 4 * len(model.blocks)
    assert all(each.shape == (1, 1, 4, 32) for each in maps.weights)


def test_maps_without_images_are_refused():
    """Maps of nothing."""
    text = {name: value for name, value in inputs().items() if name != "pixel_values"}
    with pytest.raises(ValueError, match=r"needs images, got `inputs` with \['attention_mask', 'input_ids'\] only"):
        answer_maps(make_model(), text, torch.tensor([5]))
