"""What `freeze` freezes, in which mode frozen parts are, and what an optimizer and a reader are told."""

import pytest
import torch
from transformers import AutoModel, GPT2Config, MixtralConfig, ResNetConfig

from helpers.models.tiny_models import TEXT_CONFIGS, make_model, make_text, pixels, token_ids
from helpers.references.gradient_checks import checkpoint_activations
from hf_xattn import XAttnForConditionalGeneration, freeze, freeze_base, parameter_groups, retrofit, training_table
from hf_xattn.decoders.insertion import PARTS, part_of


IDS, PIXELS = token_ids(), pixels()


def learning(model):
    return {name for name, weight in model.named_parameters() if weight.requires_grad}


@pytest.mark.parametrize("part", PARTS)
def test_each_part_on_its_own(part):
    """A part that also thaws another, or that stays frozen; what an earlier call has left."""
    model = freeze(make_model(), text=False, vision=False)
    freeze(model, **{each: each != part for each in PARTS})
    expected = {name for name, _ in model.named_parameters() if part_of(name.removeprefix("model.")) == part}
    assert expected and learning(model) == expected
    body = freeze(make_model().model, **{each: each != part for each in PARTS})
    assert learning(body) == {name.removeprefix("model.") for name in expected}


def test_names_overrule_parts_when_freezing():
    """A pattern that the parts overrule, an order that does not count, a tied weight that only its
    first name reaches.
    """
    names = {"*.layers.2.*": False, "*.layers.2.mlp.*": True, "*cross_attention_block.mlp.*": True}
    found = learning(freeze(make_model(), names=names))
    assert any(".layers.2.self_attn." in name for name in found) and not any(".layers.2.mlp." in name for name in found)
    assert not any("block.mlp." in name for name in found) and any("block.attn." in name for name in found)
    tied = freeze(make_model("llama_tied"), names={"*.lm_head.*": False})
    assert tied.get_input_embeddings().weight.requires_grad
    before = learning(tied)
    with pytest.raises(ValueError, match="`names`.*'lm_heat'"):
        freeze(tied, blocks=True, names={"lm_heat": False})
    assert learning(tied) == before


def test_a_part_that_is_misspelt():
    """Python's error, which some versions of Python end without the name that is meant."""
    model = make_model()
    before = learning(model)
    with pytest.raises(TypeError, match=r"freeze\(\) got an unexpected keyword argument 'txt'"):
        freeze(model, txt=True)
    assert learning(model) == before


def test_freeze_base_is_a_call_of_freeze():
    """Two rules of what `freeze_base` trains."""
    for vision in (True, False):
        assert learning(freeze_base(make_model(), vision)) == learning(freeze(make_model(), vision=vision))


def test_integers_stay_frozen():
    """torch's `only Tensors of floating point dtype can require gradients`, half-way through the model."""
    model = freeze(make_model())
    layer = model.get_decoder().layers[0].mlp
    layer.up_proj.weight = torch.nn.Parameter(layer.up_proj.weight.to(torch.int8), requires_grad=False)
    before = learning(model)
    with pytest.raises(ValueError, match=r"part `text` are quantized .*mlp.up_proj.weight.*LoRA"):
        freeze(model, text=False, blocks=True)
    assert learning(model) == before
    freeze(model, text=False, names={"*.layers.0.mlp.up_proj.*": True})
    freeze(model).train()
    assert (
        layer.up_proj.training and not layer.down_proj.training
    )  # a quantized layer might pack its weights for inference
    assert all(weight.is_floating_point() for group in parameter_groups(model, 1e-3) for weight in group["params"])
    everything = parameter_groups(freeze(model), 1e-3, include_frozen=True)
    assert sum(len(group["params"]) for group in everything) == len(list(model.parameters())) - 1


def with_dropout():
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 96, "n_positions": 64}
    return retrofit(make_text_of(GPT2Config(**sizes, resid_pdrop=0.5, embd_pdrop=0.5, attn_pdrop=0.5)), every=1)


def make_text_of(config):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_config(config)


def test_dropout_of_a_frozen_text_model_is_off():
    """A frozen base whose hidden states are noise in training; a block's neighbours that stay in evaluation mode once
    thawed.
    """
    model, states = freeze(with_dropout()).train(), torch.randn(2, 5, 32)
    assert model.training and all(block.training for block in model.blocks)
    first, second = (model(IDS, cross_attention_states=states, labels=IDS).loss for _ in range(2))
    assert torch.equal(first, second)
    second.backward()
    assert all(block.attn.o_proj.weight.grad.any() for block in model.blocks)
    freeze(model, text=False)  # in training mode: the modes follow at once
    assert all(module.training for module in model.modules())
    freeze(model, names={"*.h.0.mlp.*": False})
    layers = model.get_decoder().h
    assert layers[0].mlp.dropout.training and not layers[0].attn.resid_dropout.training
    assert not layers[1].mlp.dropout.training and not layers[0].ln_1.training


def test_router_noise_of_a_frozen_text_model_is_off():
    """Experts that a frozen router chooses at random."""
    config = TEXT_CONFIGS["mixtral"]().to_dict() | {"router_jitter_noise": 0.9}
    model = freeze(retrofit(make_text_of(MixtralConfig(**config)), every=2)).train()
    states = torch.randn(2, 5, 32)
    with torch.no_grad():
        assert torch.equal(*(model(IDS, cross_attention_states=states).logits for _ in range(2)))
        freeze(model, text=False)
        assert not torch.equal(*(model(IDS, cross_attention_states=states).logits for _ in range(2)))


def test_frozen_layers_are_still_checkpointed():
    """Memory for the activations of every frozen layer: transformers checkpoints in training mode only."""
    model = freeze(make_model(random=False)).train()
    checkpoint_activations(model)
    for layer in model.get_decoder().layers:
        assert layer.training and not layer.mlp.training and not layer.post_attention_layernorm.training
    assert not any(module.training for module in model.model.vision_tower.modules())
    model.gradient_checkpointing_disable()
    assert not model.train().get_decoder().layers[0].training


def test_batch_norms_of_a_tower_that_trains_in_part():
    """Statistics of frozen batch norms that follow the pictures because another layer of the tower trains."""
    config = ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic")
    model = retrofit(make_text(), AutoModel.from_config(config))
    freeze(model, names={"*vision_tower.encoder.stages.1.*": False}).train()
    before = {name: buffer.clone() for name, buffer in model.named_buffers() if "running" in name}
    model(IDS, pixel_values=PIXELS, labels=IDS).loss.backward()
    moved = {name for name, buffer in model.named_buffers() if name in before and not buffer.equal(before[name])}
    assert moved == {name for name in before if "stages.1." in name}


def test_each_weight_is_in_one_group_with_its_rate():
    """A gate, norm or bias that decays, a parameter in two groups or in none, another part's learning rate."""
    model = freeze(make_model(), text=False, vision=False)
    rates = {"text": 1e-5, "vision": 2e-5, "connector": 1e-3, "blocks": 2e-3}
    groups = parameter_groups(model, rates, {"text": 0.1, "blocks": 0.2})
    held = [id(weight) for group in groups for weight in group["params"]]
    assert len(held) == len(set(held)) == len(list(model.parameters()))
    names = {id(weight): name for name, weight in model.named_parameters()}
    for group in groups:
        for weight in group["params"]:
            name = names[id(weight)]
            part = part_of(name.removeprefix("model."))
            spared = "norm" in name or "gate" in name.split(".")[-1] or name.endswith("bias")
            assert group["lr"] == rates[part] and group["name"].startswith(part)
            assert group["weight_decay"] == (0.0 if spared else {"text": 0.1, "blocks": 0.2}.get(part, 0.0)), name
    torch.optim.AdamW(groups)
    assert {group["name"] for group in parameter_groups(freeze(model), 1e-3)} == {
        "connector", "connector, no decay", "blocks", "blocks, no decay"
    }  # fmt: skip
    with pytest.raises(ValueError, match=r"none for \['connector'\]"):
        parameter_groups(model, {"blocks": 1e-3})
    with pytest.raises(ValueError, match="no parameter that trains"):
        parameter_groups(freeze(model, connector=True, blocks=True), 1e-3)


def test_the_table_counts_every_weight_once():
    """Counts that do not add up, a tied weight counted twice, gradients of frozen parts."""
    model = freeze(make_model("llama_tied"), connector=True)
    rows = {line.split()[0]: line.split() for line in training_table(model).splitlines()}
    assert rows.keys() == {"part", *PARTS, "total"}
    in_blocks = sum(weight.numel() for block in model.blocks for weight in block.parameters())
    assert rows["blocks"][1:3] == [f"{in_blocks:,}"] * 2 and rows["text"][2] == "0"
    assert rows["total"][1] == f"{sum(weight.numel() for weight in model.parameters()):,}"
    assert rows["total"][2] == f"{in_blocks:,}"
    assert float(rows["total"][5]) == round(in_blocks * 4 / 2**20, 1)


def test_weights_of_an_adapter_are_left_to_peft():
    """A call that silently takes an adapter's weights, or thaws the original beside its trained copy."""
    peft = pytest.importorskip("peft")
    from hf_xattn import added_modules, lora_targets

    model = freeze(make_model())
    config = peft.LoraConfig(target_modules=lora_targets(model), modules_to_save=added_modules(model))
    wrapped = peft.get_peft_model(model, config)
    before = learning(wrapped)
    with pytest.raises(TypeError, match=r"got PeftModel.*get_base_model"):
        freeze(wrapped)
    with pytest.raises(ValueError, match="PEFT decides what trains"):
        freeze(wrapped.get_base_model())
    assert learning(wrapped) == before
    groups = {group["name"]: group["params"] for group in parameter_groups(wrapped, 1e-3)}
    assert set(groups) == {"text", "connector", "connector, no decay", "blocks", "blocks, no decay"}
    assert sum(map(len, groups.values())) == len(before)
    assert "0" not in [line.split()[2] for line in training_table(wrapped).splitlines() if line.startswith("text")]
    wrapped.train()
    layer = wrapped.get_base_model().get_decoder().layers[0]
    assert layer.mlp.up_proj.training and not layer.input_layernorm.training


def test_prompts_are_in_no_part():
    """Prompts that PEFT trains, and an optimizer that never sees them."""
    peft = pytest.importorskip("peft")
    wrapped = peft.get_peft_model(make_model(), peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2))
    wrapped.get_base_model().model.connector.requires_grad_(True)
    with pytest.raises(ValueError, match="got prompt_encoder.*of PEFT's wrapper"):
        parameter_groups(wrapped, 1e-3)


def test_a_frozen_run_gives_the_base_its_bits():
    """Text that a frozen base reads differently after training."""
    model = freeze(make_model(random=False), connector=True)
    assert isinstance(model, XAttnForConditionalGeneration)
    with torch.no_grad():
        expected = make_text()(IDS).logits
        assert torch.equal(model.train()(IDS).logits, expected)
