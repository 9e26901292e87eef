"""What an import or an export would lose or change without a word."""

import argparse
import json

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, MllamaForConditionalGeneration

from helpers.models.foreign_blocks import HEADS, kempner_block_state
from helpers.models.tiny_architectures import tiny_config
from helpers.models.tiny_idefics import make_idefics, make_idefics_processor
from helpers.models.tiny_mllama import make_mllama
from helpers.models.tiny_models import make_text
from hf_xattn.commands.main import main
from hf_xattn.commands.shared import load_model_and_images
from hf_xattn.importers import convert_checkpoint, export_checkpoint, import_checkpoint
from hf_xattn.importers.blocks import language_weights
from hf_xattn.importers.kempnerforge import import_kempnerforge
from hf_xattn.serving.chat_session import question


def kempner(hidden_act):
    blocks = {index: kempner_block_state(index, hidden_act, HEADS) for index in (0, 1)}
    return {
        f"cross_attention_layers.{k}.{name}": tensor for k, block in blocks.items() for name, tensor in block.items()
    }


def test_an_activation_that_no_tensor_tells():
    """Blocks with GELU that compute with SiLU."""
    options = {"num_attention_heads": HEADS, "every": 2}
    with pytest.raises(ValueError, match="Expected `hidden_act`"):
        import_kempnerforge(kempner("gelu"), make_text(), **options)
    named = import_kempnerforge(kempner("gelu"), make_text(), hidden_act="gelu", **options)
    assert named.config.cross_attention_config.hidden_act == "gelu"
    gated = import_kempnerforge(kempner("silu"), make_text(), **options)
    assert gated.config.cross_attention_config.hidden_act == "silu"


def test_options_of_the_command(tmp_path, capsys):
    """An activation that the command cannot name; options of another kind of source that are dropped."""
    make_text().save_pretrained(tmp_path / "text")
    torch.save(kempner("gelu"), tmp_path / "blocks.pt")
    make_mllama().save_pretrained(tmp_path / "theirs")
    file = ["import", tmp_path / "blocks.pt", "--text", tmp_path / "text", "--heads", HEADS, "--every", 2]
    wrong = {
        "--hidden-act": file,
        "because SOURCE is a state dict of KempnerForge, got 3": [*file, "--image-token-id", 3],
        "because SOURCE is a whole checkpoint, got 7": ["import", tmp_path / "theirs", "--heads", 7],
    }
    for words, command in wrong.items():
        assert main([str(word) for word in [*command, "--output", tmp_path / "out"]]) == 2
        assert words in capsys.readouterr().err and not (tmp_path / "out").exists()
    assert main([str(word) for word in [*file, "--hidden-act", "gelu", "--output", tmp_path / "out"]]) == 0


def test_a_quantized_folder_is_not_exported(tmp_path):
    """Integers of 8 bits that become weights."""
    import_checkpoint(make_mllama()).save_pretrained(tmp_path / "model")
    file = tmp_path / "model" / "model.safetensors"
    state = load_file(file)
    name = next(name for name in state if name.endswith("q_proj.weight") and "text_model" in name)
    scale = state[name].abs().amax(1)
    state[name] = (state[name] / scale[:, None] * 127).round().to(torch.int8)
    state[name.removesuffix("weight") + "SCB"] = scale
    save_file(state, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match="floating-point weights, got .*q_proj.weight, which is quantized"):
        export_checkpoint(tmp_path / "model", tmp_path / "out")


def test_a_tensor_without_a_place_is_not_lost(tmp_path):
    """Weights of an adapter that an export leaves out."""
    model = import_checkpoint(make_mllama())
    model.blocks[0].attn.q_proj.register_parameter("lora_A", torch.nn.Parameter(torch.ones(2, 2)))
    with pytest.raises(ValueError, match="with Mllama's tensors only, got .*lora_A"):
        export_checkpoint(model, tmp_path / "out")


def test_what_has_changed_since_the_import(tmp_path):
    """The configuration and the dtype of the source, beside weights that were trained with others."""
    model = import_checkpoint(make_mllama())
    text = model.config.text_config
    text.rope_parameters, text.eos_token_id = {"rope_type": "default", "rope_theta": 1e4}, 7
    export_checkpoint(model, tmp_path / "out")
    found = MllamaForConditionalGeneration.from_pretrained(tmp_path / "out").config.text_config
    assert found.rope_parameters["rope_type"] == "default" and found.eos_token_id == 7
    model.config.image_visibility = "all"
    with pytest.raises(ValueError, match="`image_visibility`: expected 'latest_group', found 'all'"):
        export_checkpoint(model, tmp_path / "other")
    make_mllama(torch.bfloat16).save_pretrained(tmp_path / "half")
    whole = import_checkpoint(tmp_path / "half").float()
    export_checkpoint(whole, tmp_path / "whole")
    assert json.loads((tmp_path / "whole/config.json").read_text())["dtype"] == "float32"
    assert MllamaForConditionalGeneration.from_pretrained(tmp_path / "whole").dtype == torch.float32


def test_dropout_of_the_text_model():
    """Layers that train without the dropout of the source."""
    assert import_checkpoint(make_mllama(dropout=0.5)).config.text_config.attention_dropout == 0.5


def test_the_prompt_of_idefics(tmp_path):
    """Images without the tokens around them, a text without its start."""
    make_idefics().save_pretrained(tmp_path / "theirs")
    theirs = make_idefics_processor()
    theirs.save_pretrained(tmp_path / "theirs")
    convert_checkpoint(tmp_path / "theirs", tmp_path / "ours")
    Image.fromarray(np.zeros((16, 16, 3), np.uint8)).save(tmp_path / "p.png")
    images = [str(tmp_path / "p.png")] * 2
    given = {"model": str(tmp_path / "ours"), "image": images, "device": "cpu", "dtype": "auto"}
    _, processor, images = load_model_and_images(argparse.Namespace(**given, trust_remote_code=False))
    asked = processor.apply_chat_template(
        [question("w1 w2", images)], add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
    )
    made = [asked, theirs(text=[[*images, "w1 w2"]], return_tensors="pt")]
    ours, expected = (processor.tokenizer.convert_ids_to_tokens(each["input_ids"][0]) for each in made)
    assert [token for token in ours if token != "<unk>"] == expected


def test_a_head_that_the_text_ties():
    """A head of the state dict that is lost, because the text model ties its own."""
    text = make_text("llama_tied")
    state = dict(text.state_dict())
    language_weights(text, state)
    with pytest.raises(ValueError, match="lm_head.weight with other values than model.embed_tokens.weight"):
        language_weights(text, {**state, "lm_head.weight": state["lm_head.weight"] + 1})


@pytest.mark.parametrize("source", ["model", "folder"])
def test_a_head_that_is_no_longer_tied_is_exported(source, tmp_path):
    """The embedding in place of a head that was trained by itself."""
    model = import_checkpoint(make_mllama())
    model.config.text_config.tie_word_embeddings = True
    head = model.get_output_embeddings()
    assert not torch.equal(head.weight, model.get_input_embeddings().weight[: len(head.weight)])
    if source == "folder":
        model.save_pretrained(tmp_path / "ours")
    export_checkpoint(model if source == "model" else tmp_path / "ours", tmp_path / "theirs")
    assert torch.equal(MllamaForConditionalGeneration.from_pretrained(tmp_path / "theirs").lm_head.weight, head.weight)


def test_two_tensors_of_one_place(tmp_path):
    """One of two tensors that is lost: averaged blocks beside those of the model, or an old name beside a new one."""
    state = kempner("silu")
    twice = {f"model.{name}": tensor for name, tensor in state.items()}
    twice |= {f"ema.{name}": tensor.clone() for name, tensor in state.items()}
    options = {"num_attention_heads": HEADS, "every": 2}
    import_kempnerforge(twice, make_text(), **options)
    twice["ema.cross_attention_layers.1.attn.q_proj.weight"] += 1
    with pytest.raises(ValueError, match="ema.cross_attention_layers.1.attn.q_proj.weight and a tensor of the same"):
        import_kempnerforge(twice, make_text(), **options)
    make_mllama().save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["lm_head.weight"] = tensors["language_model.lm_head.weight"] + 1
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match="two tensors for model.text_model.lm_head.weight"):
        import_checkpoint(tmp_path)


def test_the_second_name_of_tied_weights_alone():
    """Trained embeddings that are dropped, because the file names them as the head (`safetensors.torch.save_model`)."""
    text = make_text("llama_tied")
    table = torch.randn(len(text.get_input_embeddings().weight) + 3, text.config.hidden_size)
    taken, config = language_weights(text, {"lm_head.weight": table})
    assert torch.equal(taken["model.embed_tokens.weight"], table) and config.vocab_size == len(table)


def test_numbers_that_are_learned_without_a_gradient():
    """The balance of experts, a buffer, which stays that of the base."""
    with torch.no_grad():
        text = AutoModelForCausalLM.from_config(tiny_config("deepseek_v3"))
    name = next(name for name in text.state_dict() if name.endswith("e_score_correction_bias"))
    balance = torch.arange(len(text.state_dict()[name]), dtype=torch.float32)
    assert torch.equal(language_weights(text, {name: balance})[0][name], balance)
    with pytest.raises(ValueError, match=f"holds {name} of shape"):
        language_weights(text, {name: balance[:-1]})
