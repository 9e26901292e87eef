"""Training in half precision: autocast, a gradient scaler, weights in bfloat16, and updates that
rounding takes back.
"""

import logging

import pytest
import torch
from transformers import AutoModel, AutoModelForImageTextToText

from helpers.models.saved_models import make_base, make_vision
from helpers.models.tiny_models import make_model, pixels, token_ids
from helpers.references.gradient_checks import checkpoint_activations, without_dropout
from hf_xattn import freeze, retrofit, train_in_float32
from hf_xattn.learning import frozen


IDS, PIXELS = token_ids(), pixels()
STATES = torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(5))


@pytest.fixture
def told(caplog):
    """The warnings of this package."""
    frozen.logger.warning_once.cache_clear()
    loggers = [logging.getLogger(name) for name in ("transformers", "hf_xattn")]
    before = [logger.propagate for logger in loggers]
    for logger in loggers:
        logger.propagate = True
    caplog.set_level(logging.WARNING)
    yield caplog
    for logger, propagate in zip(loggers, before):
        logger.propagate = propagate


def learning(model):
    return {name: weight for name, weight in model.named_parameters() if weight.requires_grad}


def ready(model, **frozen):
    """Frozen first: `train` tells what trains."""
    return without_dropout(freeze(model, **frozen))


def is_wide(name):
    """Whether a weight of a block stays float32."""
    return "norm" in name or name.endswith("_gate")


def run(model, steps, scaler=None, dtype=None, rate=1e-2, images=None):
    """Losses of a short run, and the weights before it."""
    before = {name: weight.detach().clone() for name, weight in learning(model).items()}
    optimizer = torch.optim.AdamW(list(learning(model).values()), lr=rate, weight_decay=0.0)
    scaler = torch.amp.GradScaler("cpu", enabled=False) if scaler is None else scaler
    images = {"pixel_values": PIXELS} if images is None else images
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=dtype or torch.bfloat16, enabled=dtype is not None):
            loss = model(IDS, labels=IDS, use_cache=False, **images).loss
        scaler.scale(loss).backward()
        assert all(weight.grad.dtype == weight.dtype for weight in learning(model).values())
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    return losses, before


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("dtype, tolerance", [(torch.bfloat16, 0.01), (torch.float16, 0.002)], ids=["bf16", "fp16"])
def test_losses_under_autocast_are_those_of_float32(dtype, tolerance, checkpointed):
    """Losses that drift from those in float32, a weight that never moves, a scaler that never finds its scale."""
    runs = []
    for half in (False, True):
        model = ready(make_model(random=False), vision=False)
        if checkpointed and half:
            checkpoint_activations(model, {"use_reentrant": False})
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**22, enabled=half and dtype == torch.float16)
        losses, before = run(model, 12, scaler, dtype if half else None, rate=3e-3)
        runs.append(losses)
        still = [name for name, weight in learning(model).items() if torch.equal(weight, before[name])]
        assert [name for name in still if not name.endswith("k_proj.bias")] == []
        assert all(weight.dtype == torch.float32 and weight.isfinite().all() for weight in model.parameters())
        if scaler.is_enabled():
            assert scaler.get_scale() < 2.0**22
            runs[1] = losses = [loss for place, loss in enumerate(losses) if not place or loss != losses[place - 1]]
    assert runs[0][-1] < runs[0][0] - 0.2
    assert all(abs(one - other) < tolerance * one for one, other in zip(*runs))


def test_scaler_skips_a_step():
    """A step with infinite gradients that is taken, or a scale that never recovers."""
    model = ready(make_model(vision=False))
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    _, before = run(model, 1, scaler, torch.float16, images={"cross_attention_states": STATES * torch.inf})
    assert all(torch.equal(weight, before[name]) for name, weight in learning(model).items())
    assert scaler.get_scale() == 128
    _, before = run(model, 1, scaler, torch.float16, images={"cross_attention_states": STATES})
    assert not any(torch.equal(weight, before[name]) for name, weight in learning(model).items() if "_proj" in name)


def moves(model, steps=60, rate=1e-6):
    """How far weights move on average in many tiny steps, in units of what a weight that always moves one way would."""
    _, before = run(model, steps, rate=rate, images={"cross_attention_states": STATES})
    return {
        name: (weight.detach().double() - before[name].double()).abs().mean().item() / steps / rate
        for name, weight in learning(model).items()
    }


@pytest.fixture(scope="module")
def moves_in_float32():
    return moves(ready(make_model(vision=False)))


def test_tiny_steps_in_bfloat16(moves_in_float32, told):
    """Gates and norms that stand still in a model in bfloat16; and projections that do, without a word."""
    model = freeze(make_model(vision=False, dtype=torch.bfloat16))
    assert not told.text
    without_dropout(model)
    assert "in bfloat16. Updates smaller than 1/512" in told.text and "train_in_float32(model)" in told.text
    found = moves(model)
    assert found.keys() == moves_in_float32.keys()
    for name, expected in moves_in_float32.items():
        assert expected > 0.3
        if is_wide(name):
            assert 0.5 * expected < found[name] < 2 * expected, name
        else:
            assert found[name] < 0.1 * expected, name  # what the warning is about


@pytest.mark.parametrize("vision", [False, True])
def test_tiny_steps_of_float32_weights(moves_in_float32, told, vision):
    """A remedy that leaves a weight in half precision, or a model that cannot compute with both."""
    model = freeze(make_model(vision=vision, dtype=torch.bfloat16))
    if vision:
        model.model.vision_tower.bfloat16()
        model.model.connector.bfloat16()
    frozen = {name: weight.dtype for name, weight in model.named_parameters() if not weight.requires_grad}
    assert train_in_float32(model) is model
    without_dropout(model)
    assert not told.text
    assert all(weight.dtype == torch.float32 for weight in learning(model).values())
    assert all(weight.dtype == frozen.get(name, torch.float32) for name, weight in model.named_parameters())
    if vision:
        losses, _ = run(model, 5)
        assert losses[-1] < losses[0]
        return
    found = moves(model)
    for name, expected in moves_in_float32.items():
        assert 0.5 * expected < found[name] < 2 * expected, name


def test_text_in_float32_under_autocast():
    """Half of the text model in float32 beside the frozen half in bfloat16."""
    model = make_model(vision=False, dtype=torch.bfloat16)
    train_in_float32(ready(model, names={"*.layers.2.*": False, "*embed_tokens*": False}))
    losses, before = run(model, 5, dtype=torch.bfloat16, images={"cross_attention_states": STATES})
    assert losses[-1] < losses[0] and not any(torch.equal(w, before[name]) for name, w in learning(model).items())


def test_gradients_are_kept():
    """A gradient that is lost, or of a dtype that the next `backward` refuses."""
    model = freeze(make_model(vision=False, dtype=torch.bfloat16)).train()

    def backward():
        model(IDS, labels=IDS, cross_attention_states=STATES).loss.backward()

    backward()
    before = {name: weight.grad.float().clone() for name, weight in learning(model).items()}
    train_in_float32(model)
    assert all(torch.equal(weight.grad, before[name]) for name, weight in learning(model).items())
    backward()
    for name, weight in learning(model).items():
        assert (weight.grad - 2 * before[name]).norm() < 0.1 * weight.grad.norm(), name


def test_what_is_not_told(told):
    """A warning at every step, or one of weights that do not train or are float32."""
    half = make_model(dtype=torch.bfloat16)
    half.eval()
    freeze(half, blocks=True).train()  # the connector is float32 here
    freeze(half, connector=True, blocks=True).train()
    freeze(make_model(), text=False, vision=False).train()
    assert not told.text
    freeze(half).train()
    half.train()
    half.model.train()
    assert told.text.count("train_in_float32") == 1


def narrow_folder(tmp_path, kind):
    """A folder whose configuration says bfloat16, with weights in float32. Returns the names of these."""
    if kind == "adapter":
        text = make_base(tmp_path / "text", dtype=torch.bfloat16)
        model = retrofit(text, make_vision(tmp_path / "tower"), layers=[1, 3])
    else:
        model = make_model("mixtral" if kind == "decoder" else "llama", dtype=torch.bfloat16)
        model.model.vision_tower.bfloat16()
        model.model.connector.bfloat16()
    if kind == "tower":
        model.model.vision_tower.float()
    elif kind == "decoder":
        model.model.text_model.float()
    else:
        train_in_float32(freeze(model))
    model.save_pretrained(tmp_path / "saved", adapter_only=kind == "adapter")
    config = tmp_path / "saved" / "config.json"
    if kind == "decoder":  # `save_pretrained` writes the dtype of the first weight
        config.write_text(config.read_text().replace('"dtype": "float32"', '"dtype": "bfloat16"'))
    return model


@pytest.mark.parametrize("kind", ["tower", "trained", "decoder", "adapter"])
def test_rounding_is_told(kind, tmp_path, caplog, monkeypatch):
    """Weights in float32 that a load rounds without a word, because the configuration says bfloat16."""
    monkeypatch.setattr(logging.getLogger("hf_xattn"), "propagate", True)
    model = narrow_folder(tmp_path, kind)

    def told(auto_class=AutoModelForImageTextToText, **options):
        caplog.clear()
        loaded = auto_class.from_pretrained(tmp_path / "saved", **options)
        found = [record.getMessage() for record in caplog.records if "were rounded" in record.getMessage()]
        return loaded, found

    for auto_class in (AutoModelForImageTextToText, AutoModel):
        for options in ({}, {"dtype": "auto"}):
            loaded, found = told(auto_class, **options)
            assert len(found) == 1 and "in float32, and its configuration asks for bfloat16" in found[0]
            assert "pass `dtype=torch.float32`" in found[0] and str(tmp_path / "saved") in found[0]
    again, found = told(dtype=torch.float32)
    assert not found
    exact = again.state_dict()
    assert all(torch.equal(value.float(), exact[name]) for name, value in model.state_dict().items())
    assert not told(dtype=torch.bfloat16)[1]
    loaded.save_pretrained(tmp_path / "saved")
    assert not told()[1]


def test_train_in_float32_refuses_models_that_train_nothing():
    """Nothing that trains; weights that are sharded already."""
    with pytest.raises(ValueError, match="no parameter that trains"):
        train_in_float32(freeze(make_model(), connector=True, blocks=True))
    with pytest.raises(TypeError, match="got Linear"):
        train_in_float32(torch.nn.Linear(2, 2))
