"""Quantized bases: what was added stays in high precision, trains, and is saved with its base."""

import copy
import json

import pytest
import torch
from transformers import AutoModel, AutoModelForCausalLM, BitsAndBytesConfig, Trainer, TrainingArguments

from helpers.inputs.training_examples import CAPTIONS, write_examples
from helpers.models import own_parts  # noqa: F401  # registers them
from helpers.models.quantized_bases import (
    EXPECTED,
    METHODS,
    folder,
    parts_of,
    quantization,
    quantized_retrofit,
    quantized_text,
)
from helpers.models.template_models import CHATML, make_chat_model, make_processor
from helpers.models.tiny_models import make_model, pixels, randomize, token_ids
from helpers.processes.command_runs import FAST, run_training
from hf_xattn import XAttnConfig, XAttnForConditionalGeneration, XAttnModel, freeze_base, retrofit
from hf_xattn.checkpoints.quantization import KEPT, keep_added_precise


IDS, PIXELS = token_ids(), pixels().bfloat16()
ON_METHODS = pytest.mark.parametrize("method", METHODS)


@torch.no_grad()
def logits_of(model):
    return model(IDS, pixel_values=PIXELS).logits


@ON_METHODS
def test_only_the_text_model_is_quantized(method):
    """Blocks, connector or tower in 8 bit without a word, or a decoder that is not.

    https://github.com/unslothai/unsloth-zoo/issues/594
    """
    from_folder = retrofit(
        folder() / "text",
        folder() / "vision",
        every=1,
        dtype=torch.bfloat16,
        quantization_config=quantization(method),
    )
    loaded = XAttnForConditionalGeneration.from_pretrained(
        folder() / "model", quantization_config=quantization(method), dtype=torch.bfloat16
    )
    with_auto_class = AutoModel.from_pretrained(
        folder() / "model", quantization_config=quantization(method), dtype=torch.bfloat16
    )
    assert isinstance(with_auto_class, XAttnModel)
    for model in (from_folder, loaded, with_auto_class, quantized_retrofit(method)):
        assert parts_of(model) == EXPECTED
    assert {weight.dtype for block in loaded.blocks for weight in block.attn_gate.parameters()} == {torch.float32}
    given = quantization(method)
    XAttnForConditionalGeneration.from_pretrained(folder() / "model", quantization_config=given, dtype=torch.bfloat16)
    assert given.to_dict() == quantization(method).to_dict()  # the caller's configuration is not changed


@ON_METHODS
@torch.no_grad()
def test_a_fresh_retrofit_gives_the_logits_of_its_quantized_base(method):
    """Blocks in another dtype than the base computes in, or a base that was changed on the way."""
    base = quantized_text(method)
    expected = base(IDS).logits
    model = retrofit(base, AutoModel.from_pretrained(folder() / "vision", dtype=torch.bfloat16), every=1)
    assert torch.equal(logits_of(model), expected)
    model = retrofit(folder() / "text", every=1, dtype=torch.bfloat16, quantization_config=quantization(method))
    assert torch.equal(model(IDS, cross_attention_states=torch.randn(2, 3, 64).bfloat16()).logits, expected)


@ON_METHODS
def test_a_saved_model_loads_with_equal_logits(method, tmp_path):
    """A folder that loads quietly and computes nonsense, or not at all: the quantization stood inside `text_config`
    alone.
    """
    loaded = XAttnForConditionalGeneration.from_pretrained(
        folder() / "model", quantization_config=quantization(method), dtype=torch.bfloat16
    )
    for name, model in (("retrofit", quantized_retrofit(method)), ("loaded", loaded)):
        logits_of(model)
        model.save_pretrained(tmp_path / name)
        # Not before: saving 4-bit weights that have computed on a CPU, bitsandbytes rounds their scales, in any model.
        expected = logits_of(model)
        config = json.loads((tmp_path / name / "config.json").read_text())
        assert "quantization_config" in config and "quantization_config" not in config["text_config"]
        for again in (
            XAttnForConditionalGeneration.from_pretrained(tmp_path / name),
            AutoModelForCausalLM.from_pretrained(tmp_path / name),
        ):
            assert parts_of(again) == EXPECTED
            assert torch.equal(logits_of(again), expected)
        if method != "torchao_8bit":  # transformers cannot load torchao's files without the prefix, of no model
            body = XAttnModel.from_pretrained(tmp_path / name)
            assert torch.equal(_head(body), expected)
        again.save_pretrained(tmp_path / "again")
        assert torch.equal(logits_of(AutoModelForCausalLM.from_pretrained(tmp_path / "again")), logits_of(again))


@ON_METHODS
def test_own_parts_on_a_quantized_base(method, tmp_path):
    """A connector or gate of the caller's own in 8 bit, or a gate that gets another dtype than it has."""
    model = retrofit(
        quantized_text(method),
        AutoModel.from_pretrained(folder() / "vision", dtype=torch.bfloat16),
        every=1,
        connector_type="pooling",
        cross_attention={"gate": "offset_sigmoid"},
    )
    model = randomize(model).eval()
    logits_of(model)
    model.save_pretrained(tmp_path / "saved")
    loaded = XAttnForConditionalGeneration.from_pretrained(tmp_path / "saved")
    for each in (model, loaded):
        assert each.model.connector.layers[0].conv.weight.dtype == torch.bfloat16
        assert {weight.dtype for weight in each.blocks[0].mlp_gate.parameters()} == {torch.float32}
    assert torch.equal(logits_of(loaded), logits_of(model))


@torch.no_grad()
def _head(body):
    return body.get_output_embeddings()(body(IDS, pixel_values=PIXELS).last_hidden_state)


@ON_METHODS
@pytest.mark.parametrize("saved", [False, True])
def test_blocks_train_on_a_quantized_base(method, saved, tmp_path):
    """A loss that does not fall, gradients for the base, or a `Trainer` that refuses a model with a quantizer."""
    model = quantized_retrofit(method)
    if saved:
        model.save_pretrained(tmp_path / "model")
        model = XAttnForConditionalGeneration.from_pretrained(tmp_path / "model")
    freeze_base(model)
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    rows = [{"input_ids": row, "labels": row, "pixel_values": image} for row, image in zip(IDS, PIXELS)]
    arguments = TrainingArguments(
        output_dir=tmp_path,
        max_steps=12,
        learning_rate=2e-2,
        per_device_train_batch_size=2,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=rows)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[-1] < 0.8 * losses[0], losses
    for name, weight in model.named_parameters():
        added = "cross_attention_block" in name or "connector" in name
        assert weight.requires_grad == added, name
        if not added and weight.is_floating_point() and type(weight) is torch.nn.Parameter:
            assert torch.equal(weight, before[name]), name
    assert not torch.equal(model.blocks[0].attn.o_proj.weight, before[_name_of(model.blocks[0], model)])


def _name_of(block, model):
    return next(name for name, weight in model.named_parameters() if weight is block.attn.o_proj.weight)


@ON_METHODS
@torch.no_grad()
def test_images_are_encoded_once_on_a_quantized_base(method):
    """A cache that does not recognise the weights it was made with, or generation that differs with a store."""
    model = quantized_retrofit(method)
    encoded = model.encode_images(pixel_values=PIXELS)
    options = {"max_new_tokens": 5, "do_sample": False}
    expected = model.generate(IDS, pixel_values=PIXELS, **options)
    assert model.generate(IDS, cache=encoded, **options).equal(expected)
    model.enable_image_store()
    for _ in range(2):
        assert model.generate(IDS, pixel_values=PIXELS, **options).equal(expected)
    assert model.image_store.hits == 2


@ON_METHODS
def test_a_quantized_tower_is_not_saved_inside_the_model(method, tmp_path):
    """A tower whose own quantization the saved configuration cannot express."""
    vision = AutoModel.from_pretrained(folder() / "vision", quantization_config=quantization(method))
    model = retrofit(AutoModelForCausalLM.from_pretrained(folder() / "text"), vision, every=1)
    assert model.model.connector.layers[0].weight.dtype == torch.bfloat16
    logits_of(model)
    model.image_identity()
    with pytest.raises(ValueError, match="The vision tower is quantized"):
        model.save_pretrained(tmp_path / "model")
    assert not (tmp_path / "model").exists()
    with pytest.raises(ValueError, match=r"part `vision` are quantized .* vision=True"):
        freeze_base(model, vision=False)
    freeze_base(model)


def test_weights_quantized_by_hand_are_not_saved(tmp_path):
    """A folder whose configuration says nothing of integers in it; or a block in 8 bit that shall train."""
    pytest.importorskip("torchao")
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    text = AutoModelForCausalLM.from_pretrained(folder() / "text")
    quantize_(text, Int8WeightOnlyConfig())
    model = retrofit(text, every=1)
    with pytest.raises(ValueError, match="quantized without a quantizer"):
        model.save_pretrained(tmp_path / "model")
    quantize_(model.blocks[1].mlp, Int8WeightOnlyConfig())
    before = [weight.requires_grad for weight in model.parameters()]
    with pytest.raises(ValueError, match="part `blocks` are quantized.*Load the base with `quantization_config`"):
        freeze_base(model)
    assert before == [weight.requires_grad for weight in model.parameters()]


def test_freeze_base_explains_itself_on_integer_weights():
    """torch's `only Tensors of floating point dtype can require gradients`, which names nothing."""
    model = make_model()
    projection = model.blocks[0].attn.q_proj
    projection.weight = torch.nn.Parameter(projection.weight.to(torch.int8), requires_grad=False)
    with pytest.raises(ValueError, match=r"part `blocks` are quantized \(.*attn.q_proj.weight: torch.int8\)"):
        freeze_base(model)
    model = make_model()
    weight = model.model.vision_tower.get_parameter("encoder.layers.0.mlp.fc1.weight")
    model.model.vision_tower.encoder.layers[0].mlp.fc1.weight = torch.nn.Parameter(
        weight.to(torch.uint8), requires_grad=False
    )
    with pytest.raises(ValueError, match="leave it frozen"):
        freeze_base(model, vision=False)


def test_skip_lists_without_a_backend():
    """A quantizer that does not run here, with a list that misses a block, or that forgets its own names."""
    config = XAttnConfig.from_pretrained(folder() / "model")
    filled = keep_added_precise(BitsAndBytesConfig(load_in_4bit=True), config)
    assert [*KEPT] == filled.llm_int8_skip_modules[-len(KEPT) :]
    assert any("lm_head" in name for name in filled.llm_int8_skip_modules)
    given = BitsAndBytesConfig(load_in_4bit=True, llm_int8_skip_modules=["q_proj"])
    names = keep_added_precise(given, config).llm_int8_skip_modules
    assert names[0] == "q_proj" and {*KEPT} <= {*names} and not any("lm_head" in name for name in names)
    assert keep_added_precise(keep_added_precise(given, config), config).llm_int8_skip_modules == names
    assert given.llm_int8_skip_modules == ["q_proj"]
    as_dict = keep_added_precise({"quant_method": "bitsandbytes", "load_in_8bit": True}, config)
    assert {*KEPT} <= {*as_dict.llm_int8_skip_modules}


def test_the_skip_list_of_torchaos_4_bit():
    """Blocks in 4 bit where this configuration runs: its weights have no kernel for a CPU."""
    pytest.importorskip("torchao")
    from torchao.quantization import Int4WeightOnlyConfig
    from transformers import TorchAoConfig

    config = XAttnConfig.from_pretrained(folder() / "model")
    filled = keep_added_precise(TorchAoConfig(Int4WeightOnlyConfig(group_size=32)), config)
    assert {*KEPT} <= {*filled.modules_to_not_convert}
    assert any("lm_head" in name for name in filled.modules_to_not_convert)


def test_the_skip_list_covers_every_added_module():
    """A block after the last layer, or a model without prefix, whose names the patterns miss."""
    from transformers.quantizers.quantizers_utils import should_convert_module

    model = make_model(cross_attention_layers=[0, 3, 4])
    text = [make_model(cross_attention_layers=[4]).model]
    for body in (model, model.model, *text):
        for name, _ in body.named_parameters():
            added = any(part in name for part in ("cross_attention_block", "connector", "vision_tower"))
            for pattern_target in (name, name.rpartition(".")[0]):
                assert should_convert_module(pattern_target, list(KEPT)) != added, name


def test_a_quantization_config_for_a_loaded_text_model_is_refused():
    """A base that stays in full precision although its caller asked for 4 bit."""
    text = AutoModelForCausalLM.from_pretrained(folder() / "text")
    with pytest.raises(ValueError, match="`text` is loaded already"):
        retrofit(text, folder() / "vision", every=1, quantization_config=BitsAndBytesConfig(load_in_8bit=True))


@ON_METHODS
def test_a_copy_of_a_quantized_retrofit(method):
    """A copy that shares its quantizer's lists with the original, or lacks them."""
    model = quantized_retrofit(method)
    expected = logits_of(model)
    assert torch.equal(logits_of(copy.deepcopy(model)), expected)


@ON_METHODS
def test_the_train_command_on_a_saved_quantized_model(method, tmp_path, capsys):
    """A command that fails in the middle, or that writes a model which no longer loads."""
    if method == "bitsandbytes_4bit":
        pytest.skip(
            "bitsandbytes' 4-bit kernel for a CPU takes widths that are multiples of 64, and this model is narrower"
        )
    folder_in, folder_out = tmp_path / "model", tmp_path / "trained"
    processor = make_processor(CHATML)
    make_chat_model(processor).save_pretrained(tmp_path / "full")
    model = XAttnForConditionalGeneration.from_pretrained(
        tmp_path / "full", quantization_config=quantization(method), dtype=torch.bfloat16
    )
    model.save_pretrained(folder_in)
    processor.save_pretrained(folder_in)
    data = write_examples(tmp_path / "data", CAPTIONS)
    status, output, errors = run_training(
        capsys, folder_in, "--data", data, "--output", folder_out, "--steps", 4, *FAST
    )
    assert status == 0, errors
    trained = XAttnForConditionalGeneration.from_pretrained(folder_out)
    parts = parts_of(trained)
    assert parts.pop("decoder") == {"quantized"} and "quantized" not in set().union(*parts.values())
    assert not torch.equal(trained.blocks[0].attn.o_proj.weight, model.blocks[0].attn.o_proj.weight)
    status, _, errors = run_training(
        capsys, folder_in, "--data", data, "--output", tmp_path / "text", "--train-text", *FAST
    )
    assert status != 0 and "The weights of the part `text` are quantized" in errors
