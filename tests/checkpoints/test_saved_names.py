"""The names of weights in a saved folder: those of the base's own checkpoints, whatever transformers calls them in
memory.
"""

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModel, AutoModelForCausalLM, DeiTConfig

from helpers.models.saved_models import load, same_model
from helpers.models.tiny_models import make_model, make_text, randomize, token_ids
from helpers.models.tiny_towers import ANY_SIZE, ONE_SIZE, SMALL_TOWER
from hf_xattn import XAttnForConditionalGeneration, XAttnModel, retrofit


TEXT, TOWER = "model.text_model.", "model.vision_tower."


def weights_in(folder):
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def under(prefix, weights):
    """The weights of a part, without those of blocks."""
    return {
        name.removeprefix(prefix): weights[name]
        for name in weights
        if name.startswith(prefix) and "cross_attention_block" not in name
    }


def check_equal(mine, others):
    assert mine.keys() == others.keys()
    assert [name for name in mine if not torch.equal(mine[name], others[name])] == []


@pytest.mark.parametrize("reloaded", [False, True])
@pytest.mark.parametrize("body", [False, True])
def test_experts_are_saved_one_by_one(body, reloaded, tmp_path):
    """Experts under names that engines do not know, blocks that are renamed with the decoder, or other names after
    loading.
    """
    make_text("mixtral").save_pretrained(tmp_path / "base")
    model = make_model("mixtral")
    kept = {name for name in model.state_dict() if "cross_attention_block" in name}
    model = model.model if body else model
    model.save_pretrained(tmp_path / "model")
    if reloaded:
        kind = XAttnModel if body else XAttnForConditionalGeneration
        load(kind, tmp_path / "model").save_pretrained(tmp_path / "model")
    saved = weights_in(tmp_path / "model")
    saved = {f"model.{name}": saved[name] for name in saved} if body else saved
    check_equal(under(TEXT, saved), weights_in(tmp_path / "base"))
    assert "model.layers.0.block_sparse_moe.experts.3.w1.weight" in under(TEXT, saved)
    assert {name for name in saved if "cross_attention_block" in name} == kept


@pytest.mark.parametrize("options", [{"save_original_format": False}, {"max_shard_size": "40KB"}], ids=str)
def test_both_forms_load(options, tmp_path):
    """A folder that was saved with fused experts, or one whose shards hold parts of a layer's experts, and that loads
    otherwise.
    """
    model = make_model("mixtral")
    model.save_pretrained(tmp_path, **options)
    assert any("experts.gate_up_proj" in name for name in weights_in(tmp_path)) == (
        len(options) == 1 and False in options.values()
    )
    same_model(model, load(AutoModelForCausalLM, tmp_path))


@pytest.mark.parametrize("shard", ["5GB", "20KB"])
def test_state_dict_of_a_folder(shard, tmp_path):
    """Weights of a checkpoint that `Trainer` gives to `load_state_dict`, file by file, and that are not taken."""
    model, other = make_model("mixtral"), randomize(make_model("mixtral"), 9)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(1)
    model.save_pretrained(tmp_path, max_shard_size=shard)
    for file in sorted(tmp_path.glob("*.safetensors")):
        assert not other.load_state_dict(load_file(file), strict=False).unexpected_keys
    same_model(model, other)
    other.load_state_dict(model.state_dict())  # names in memory, as ever
    with pytest.raises(RuntimeError, match="nonsense"):
        other.load_state_dict({**weights_in(tmp_path), "nonsense": torch.zeros(1)})


@pytest.mark.parametrize(
    "config",
    [ONE_SIZE["vit"], ANY_SIZE["dinov2"], ANY_SIZE["swin"], lambda: DeiTConfig(**SMALL_TOWER)],
    ids=["vit", "dinov2", "swin", "deit"],
)
def test_tower_keeps_its_names(config, tmp_path):
    """A vision tower under other names than those of its checkpoint."""
    AutoModel.from_config(config()).save_pretrained(tmp_path / "base")
    model = retrofit(make_text(), tmp_path / "base", cross_attention_layers=[1])
    model.save_pretrained(tmp_path / "model")
    check_equal(under(TOWER, weights_in(tmp_path / "model")), weights_in(tmp_path / "base"))
    loaded = load(XAttnForConditionalGeneration, tmp_path / "model")
    check_equal(model.state_dict(), loaded.state_dict())


def test_added_weights_beside_a_mixture_of_experts(tmp_path):
    """Experts that were trained and lie in the folder of the added weights under names that the base does not have."""
    make_text("mixtral").save_pretrained(tmp_path / "base")
    model = randomize(retrofit(tmp_path / "base", cross_attention_layers=[1])).eval()
    with torch.no_grad():
        model.model.text_model.model.layers[2].mlp.experts.gate_up_proj[1].add_(1)
    model.save_pretrained(tmp_path / "added", adapter_only=True)
    loaded = load(XAttnForConditionalGeneration, tmp_path / "added")
    check_equal(model.state_dict(), loaded.state_dict())
    with pytest.raises(
        ValueError, match="`adapter_only=True` does not work together with `save_original_format`, got True"
    ):
        model.save_pretrained(tmp_path / "added", adapter_only=True, save_original_format=True)


def test_experts_on_a_disk_are_saved_under_their_names(tmp_path):
    """Experts on a disk that are saved as they lie there, or not at all."""
    model = make_model("mixtral", vision=False)
    model.save_pretrained(tmp_path / "model")
    places = {f"model.text_model.model.layers.{index}": "disk" if index > 1 else "cpu" for index in range(4)}
    places |= {
        f"model.text_model.{name}": "cpu"
        for name in ("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head")
    }
    loaded = XAttnForConditionalGeneration.from_pretrained(
        tmp_path / "model", device_map=places, offload_folder=tmp_path / "offload"
    ).eval()
    assert loaded.model.text_model.model.layers[2].mlp.experts.gate_up_proj.is_meta
    states = torch.randn(2, 5, model.config.cross_attention_config.context_size)
    with torch.no_grad():
        seen = [each(token_ids(), cross_attention_states=states).logits for each in (model, loaded)]
    assert torch.equal(*seen)
    loaded.save_pretrained(tmp_path / "again")
    check_equal(weights_in(tmp_path / "again"), weights_in(tmp_path / "model"))
