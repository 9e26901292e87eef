"""Gradients of a model, and how they are compared."""

import torch


def without_dropout(model):
    """The model in training mode, which draws nothing."""
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    return model.train()


def checkpoint_activations(model, options=None):
    """Layers are computed again in the backward pass. Until transformers 5.22 the method had another name."""
    (getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable)(options)


def gradients(model, **inputs):
    """The gradient of each weight that has one, by its name, without a cache."""
    return outputs_and_gradients(model, use_cache=False, **inputs)[1]


def assert_same_gradients(found, expected):
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert torch.allclose(found[name], gradient, atol=1e-5), name


def outputs_and_gradients(model, **inputs):
    """What the model returns, and the gradient of each weight that has one, by its name."""
    model.zero_grad()
    output = model(**inputs)
    output.loss.backward()
    return output, {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}


def assert_same_outputs(found, expected, atol=1e-10):
    assert torch.allclose(found[0].logits, expected[0].logits, atol=atol)
    assert torch.allclose(found[0].loss, expected[0].loss, atol=atol)
    assert found[1].keys() == expected[1].keys()
    for name, gradient in expected[1].items():
        assert torch.allclose(found[1][name], gradient, atol=atol, rtol=1e-8), name
