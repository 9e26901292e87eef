"""Images with NaN or infinite values: whom they reach, and how they are reported."""

import copy

import pytest
import torch
from gradient_checks import without_dropout
from marked_models import MARKER, marked
from tiny_models import make_model, pixels, token_ids

from hf_xattn import check_images, freeze, freeze_base


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
        with check_images(model):  # says nothing of padding
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
@pytest.mark.parametrize("kind", KINDS)
def test_report(kind, call):
    """A NaN in the loss that does not say which of 64 pictures it came from."""
    model = freeze(make_model())
    CALLS[call](model, **images_of(kind, NAN))  # off: nothing is looked at
    with check_images(model):
        CALLS[call](model, **images_of(kind, num_images=2))
        for value, word in ((NAN, "nan"), (-INF, "inf")):
            with pytest.raises(ValueError, match=rf"^Expected finite `{kind}`, got {word} in row 1, image 1\. "):
                CALLS[call](model, **images_of(kind, value, num_images=2))
    CALLS[call](model, **images_of(kind, NAN))  # off again


def test_report_names_several_images():
    """A second run for each broken picture, or a message of a thousand lines."""
    model = make_model()
    images = pixels(3, 4)
    images[0, 1] = NAN
    images[2, 3, 0, 0, 0] = INF
    with check_images(model), pytest.raises(ValueError, match=r"nan in row 0, image 1; inf in row 2, image 3\. Leave"):
        model(IDS, pixel_values=images)
    with check_images(model), pytest.raises(ValueError, match=r"nan in row 1, image 3; and 4 more images\. Leave"):
        model(IDS, pixel_values=torch.full_like(images, NAN))


def test_report_of_the_tower():
    """A tower in float16 that overflows at one bright picture, where the pixels themselves are finite."""
    model = make_model()
    model.model.vision_tower.half()
    images = pixels(3, 2)
    images[BAD, 1] = 1e6
    model(IDS, pixel_values=images)
    told = r"from the vision tower \(siglip_vision_model\) for finite `pixel_values`, got nan in row 1, image 1 \(torch.float16\).*bfloat16"  # noqa: E501
    with check_images(model), pytest.raises(ValueError, match=told):
        model(IDS, pixel_values=images)
    model.enable_image_store()
    model.encode_images(pixel_values=images[:, :1])
    with torch.no_grad(), check_images(model), pytest.raises(ValueError, match=told):  # the store has the first images
        model.eval().encode_images(pixel_values=images)
    # An index among the images of the call, of which the first is known already.
    cache = model.encode_images(pixel_values=images[:, :1])
    with check_images(model), pytest.raises(ValueError, match=told):
        model(IDS, pixel_values=images, cache=cache)


@pytest.mark.parametrize("kind", ["pixel_values", "vision_features"])
def test_report_of_the_connector(kind):
    """The tower blamed for a connector that overflows, or nobody, where the tower has run before."""
    model = make_model()
    model.model.connector.half()
    with torch.no_grad():
        model.model.connector.layers[0].weight.fill_(0)[:, ::2] = 6e4
    with (
        check_images(model),
        pytest.raises(ValueError, match=rf"values from the connector for finite `{kind}`.* in row 0, image 0.*float16"),
    ):
        model(IDS, **images_of(kind))


def test_padding_beside_known_images():
    """An image named by its place among the new ones, where rows have different numbers of images."""
    model = marked("previous")
    model.model.vision_tower.half()
    images, ids = pixels(2, 2), token_ids(2, 8)
    ids[:, 1] = ids[:, 3] = ids[:, 5] = MARKER
    more = torch.cat([images, pixels(2, 1, seed=9)], dim=1)
    more[1, 1] = 1e6
    mask = torch.tensor([[True, True, True], [True, True, False]])
    cache = model.encode_images(pixel_values=images, image_mask=torch.tensor([[True, True], [True, False]]))
    with check_images(model), pytest.raises(ValueError, match=r"got nan in row 1, image 1 \("):
        model(ids, pixel_values=more, image_mask=mask, cache=cache)


def test_switch():
    """Checks that stay on after a `with`, or that a call without `with` does not turn on."""
    model, bad = make_model(), images_of("pixel_values", NAN)

    def raises() -> bool:
        try:
            model(IDS, **bad)
        except ValueError:
            return True
        return False

    assert not raises()
    check_images(model)
    assert raises()
    with check_images(model, False):
        assert not raises()
    assert raises()
    check_images(model.model, enabled=False)
    assert not raises()
    with pytest.raises(ZeroDivisionError), check_images(model):
        raise ZeroDivisionError
    assert not raises()
    with check_images(model):
        copied = copy.deepcopy(model)
    assert not raises()
    with pytest.raises(ValueError, match="row 1"):
        copied(IDS, **bad)


def test_switch_in_pefts_wrapper():
    """A wrapper that the switch does not see through."""
    peft = pytest.importorskip("peft")
    from hf_xattn import lora_targets

    model = make_model()
    wrapped = peft.get_peft_model(model, peft.LoraConfig(target_modules=lora_targets(model)))
    with check_images(wrapped), pytest.raises(ValueError, match="row 1, image 0"):
        wrapped(input_ids=IDS, **images_of("pixel_values", NAN))


def test_weights_survive():
    """Weights that one picture has destroyed before anyone is told."""
    model = freeze_base(make_model()).train()
    for checked in (True, False):
        optimizer = torch.optim.AdamW([weight for weight in model.parameters() if weight.requires_grad], lr=1e-3)
        with check_images(model, checked):
            for value in (None, NAN):
                optimizer.zero_grad()
                try:
                    model(IDS, labels=IDS, **images_of("pixel_values", value)).loss.backward()
                except ValueError:
                    break
                optimizer.step()
        assert all(weight.isfinite().all() for weight in model.parameters()) == checked


def test_compiled():
    """Compiled code that looks at nothing although it was asked to, or that pays where it was not."""
    torch._dynamo.reset()
    model, (good, bad) = make_model(vision=False), (images_of("cross_attention_states", value) for value in (None, NAN))
    whole = torch.compile(model.forward, backend="eager", fullgraph=True)
    with torch.no_grad(), check_images(model):
        with pytest.raises(torch._dynamo.exc.Unsupported, match="check_given"):
            whole(IDS, use_cache=False, **good)
        torch._dynamo.reset()
        forward = torch.compile(model.forward, backend="eager")
        expected = model(IDS, use_cache=False, **good).logits
        assert torch.allclose(forward(IDS, use_cache=False, **good).logits, expected, atol=1e-5)
        with pytest.raises(ValueError, match="row 1, image 0"):
            forward(IDS, use_cache=False, **bad)
    torch._dynamo.reset()
