"""Images with NaN or infinite values: whom they reach, and how they are reported."""

import contextlib
import re

import pytest
import torch

from helpers.checkout import ROOT
from helpers.models.tiny_models import make_model, pixels, token_ids
from helpers.references.gradient_checks import without_dropout
from hf_xattn import freeze, freeze_base


BAD = 1  # the row
KEPT = [0, 2]
IDS = token_ids(3)


def images_of(kind: str, value: float | None = None, num_images: int = 1) -> dict[str, torch.Tensor]:
    """Three rows of pixels or features; with `value`, one of the bad row's last image is bad."""
    if kind == "pixel_values":
        images = pixels(3, num_images)
    else:
        shape = (16, 24) if kind == "vision_features" else (5, 32)  # tokens of an image, and their width
        images = torch.randn(3, num_images, *shape, generator=torch.Generator().manual_seed(5))
    if value is not None:
        images[BAD, -1].view(-1)[7] = value
    return {kind: images}


GUIDE = (ROOT / "examples/training/README.md").read_text().split("### Find a picture with NaN")[1]
RECIPE = re.search(r"```python\n(.*?)```", GUIDE, flags=re.DOTALL)[1]


@contextlib.contextmanager
def hooked(model):
    """The hooks of the guide, inside."""
    exec(RECIPE, {"model": model})
    try:
        yield
    finally:
        for part in (model.base_model.vision_tower, model.base_model.connector):
            part._forward_hooks.clear()


KINDS = ["pixel_values", "vision_features", "cross_attention_states"]
NAN, INF = float("nan"), float("inf")


def rows(model, images, labels):
    """Logits, loss and the gradients of the rows' embeddings."""
    model.zero_grad()
    embeddings = model.get_input_embeddings()(IDS).detach().requires_grad_()
    outputs = model(inputs_embeds=embeddings, labels=labels, use_cache=False, **images)
    outputs.loss.backward()
    return outputs.logits.detach(), outputs.loss.detach(), embeddings.grad


@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2"])
def test_other_rows_stay_as_they_are(name, kind, value):
    """One broken picture in a batch that changes the answers, the loss or the gradients of the other rows by a bit."""
    model = make_model(name)
    labels = IDS.clone()
    labels[BAD] = -100  # so that the loss is the one of the other rows
    logits, loss, gradients = rows(model, images_of(kind), labels)
    found = rows(model, images_of(kind, value), labels)
    assert found[0][BAD].isnan().any()
    assert torch.equal(found[0][KEPT], logits[KEPT]) and torch.equal(found[1], loss)
    assert found[2][KEPT].isfinite().all() and torch.equal(found[2][KEPT], gradients[KEPT])
    # What all rows share is lost. This is why such an image has to be reported.
    assert any(weight.grad.isnan().any() for block in model.blocks for weight in block.parameters())


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
def test_other_rows_of_generate(kind):
    """Answers to good pictures that change beside a broken one."""
    model, options = make_model(), {"max_new_tokens": 4, "do_sample": False}
    expected = model.generate(IDS, **images_of(kind), **options)
    assert torch.equal(model.generate(IDS, **images_of(kind, NAN), **options)[KEPT], expected[KEPT])


@pytest.mark.parametrize("value", [NAN, INF])
@pytest.mark.parametrize(
    "kind, mask",  # a mask of tokens says nothing of pixels: the vision tower looks at all of a real image
    [*((kind, "image_mask") for kind in KINDS), ("cross_attention_states", "cross_attention_mask")],
)
def test_padding_may_hold_anything(kind, mask, value):
    """Padding that was never written, or time series that are padded with NaN: 0 times NaN in attention, and in
    gradients.
    """
    model = without_dropout(freeze(make_model(), vision=kind == "vision_features"))
    found = []
    for held in (0.0, value):
        images = images_of(kind, num_images=2)
        real = torch.ones(3, 2, dtype=torch.bool)
        real[BAD, 1] = real[2] = False
        images[kind][~real] = held
        masks = real if mask == "image_mask" else real.repeat_interleave(5, dim=1)
        model.zero_grad()
        outputs = model(IDS, labels=IDS, **images, **{mask: masks})
        outputs.loss.backward()
        with hooked(model):  # says nothing of padding
            model(IDS, **images, **{mask: masks})
        found.append([outputs.logits, *(weight.grad for weight in model.parameters() if weight.grad is not None)])
    assert len(found[0]) == len(found[1])
    assert all(torch.equal(one, other) and one.isfinite().all() for one, other in zip(*found))


CALLS = {
    "forward": lambda model, **images: model(IDS, **images),
    "training": lambda model, **images: model.train()(IDS, labels=IDS, **images),
    "body": lambda model, **images: model.model(IDS, **images),
    "generate": lambda model, **images: model.generate(IDS, max_new_tokens=2, do_sample=False, **images),
    "uncached": lambda model, **images: model.generate(IDS, max_new_tokens=2, use_cache=False, **images),
    "encode_images": lambda model, **images: model.encode_images(**images),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("kind", ["pixel_values", "vision_features"])
def test_hooks_of_the_guide(kind, call):
    """A NaN in the loss that does not say which of 64 pictures it came from."""
    model = freeze(make_model())
    CALLS[call](model, **images_of(kind, NAN))  # without hooks: nothing is looked at
    part = "SiglipVisionModel" if kind == "pixel_values" else "XAttnConnector"
    with hooked(model):
        CALLS[call](model, **images_of(kind, num_images=2))
        for value in (NAN, -INF):
            with pytest.raises(ValueError, match=rf"{part} gets NaN or infinite values in images \[3\] of the batch"):
                CALLS[call](model, **images_of(kind, value, num_images=2))
    CALLS[call](model, **images_of(kind, NAN))  # off again


def test_hooks_name_the_part():
    """A tower in float16 that overflows at one bright picture, where the pixels themselves are finite; the tower
    blamed for a connector that overflows.
    """
    model = make_model()
    model.model.vision_tower.half()
    images = pixels(3, 2)
    images[BAD, 1] = 6e4
    with hooked(model), pytest.raises(ValueError, match=r"SiglipVisionModel makes NaN.* in images \[3\]"):
        model(IDS, pixel_values=images)
    model = make_model()
    model.model.connector.half()
    with torch.no_grad():
        model.model.connector.layers[0].weight.fill_(0)[:, ::2] = 6e4
    with hooked(model), pytest.raises(ValueError, match=r"XAttnConnector makes NaN.* in images \[0, 1, 2\]"):
        model(IDS, pixel_values=pixels(3))


def test_an_image_with_nan_destroys_no_weight():
    """Weights that one picture has destroyed before anyone is told."""
    for checked in (True, False):
        model = freeze_base(make_model()).train()
        optimizer = torch.optim.AdamW([weight for weight in model.parameters() if weight.requires_grad], lr=1e-3)
        with hooked(model) if checked else contextlib.nullcontext():
            for value in (None, NAN):
                optimizer.zero_grad()
                try:
                    model(IDS, labels=IDS, **images_of("pixel_values", value)).loss.backward()
                except ValueError:
                    break
                optimizer.step()
        assert all(weight.isfinite().all() for weight in model.parameters()) == checked
