"""`retrofit`: from checkpoints and from loaded models, and what it refuses."""

import inspect
import json
import re
import subprocess
import sys
from dataclasses import fields

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import (
    CONFIG_MAPPING,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    BertConfig,
    BertModel,
    CLIPConfig,
    CLIPModel,
    CLIPVisionConfig,
    Dinov2Config,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
)

from helpers.models.saved_models import make_base, make_vision
from helpers.models.tiny_architectures import tiny_config
from helpers.models.tiny_composites import COMPOSITES, composite_class
from helpers.models.tiny_models import (
    SIZES,
    VOCAB_SIZE,
    kernels_of,
    make_text,
    pixels,
    randomize,
    token_ids,
    vision_config,
)
from hf_xattn import CrossAttentionConfig, XAttnConfig, freeze_base, remove_blocks, retrofit
from hf_xattn.commands.main import _parser
from hf_xattn.decoders import insertion
from hf_xattn.utils.keywords import LOAD_KEYWORDS


TOWERS = {
    "siglip": vision_config,
    "clip": lambda: CLIPVisionConfig(
        hidden_size=24,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=32,
        patch_size=8,
    ),
    "dinov2": lambda: Dinov2Config(
        hidden_size=24, num_hidden_layers=2, num_attention_heads=2, image_size=32, patch_size=8
    ),
    "vit": lambda: ViTConfig(
        hidden_size=24,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=32,
        patch_size=8,
    ),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A text-only and a vision checkpoint, as ordinary folders."""
    folder = tmp_path_factory.mktemp("checkpoints")
    make_text().save_pretrained(folder / "text", max_shard_size="20KB")
    torch.manual_seed(5)
    AutoModel.from_config(vision_config()).save_pretrained(folder / "vision")
    return folder


@pytest.mark.parametrize("tower", TOWERS)
def test_vision_towers_from_folders(folders, tmp_path, tower):
    """A tower whose output is not understood, or whose weights are re-initialised on the way."""
    torch.manual_seed(6)
    vision = AutoModel.from_config(TOWERS[tower]()).eval()
    vision.save_pretrained(tmp_path / "vision")
    model = retrofit(folders / "text", tmp_path / "vision", every=2)
    for name, tensor in model.model.vision_tower.state_dict().items():
        assert torch.equal(tensor, vision.state_dict()[name]), name
    base = AutoModelForCausalLM.from_pretrained(folders / "text")
    ids = token_ids()
    with torch.no_grad():
        assert torch.equal(model(ids, pixel_values=pixels()).logits, base(ids).logits)
    model.save_pretrained(tmp_path / "model")
    loaded, info = AutoModelForImageTextToText.from_pretrained(tmp_path / "model", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert loaded.get_image_features(pixels()).pooler_output.shape[:2] == (2, 1)


def test_loaded_model_keeps_changed_weights():
    """`post_init` re-initialising a module that the caller put in after loading (a resized embedding)."""
    text = make_text()
    text.resize_token_embeddings(VOCAB_SIZE + 4, mean_resizing=False)
    torch.nn.init.constant_(text.get_input_embeddings().weight, 0.5)
    text.get_input_embeddings().weight._is_hf_initialized = False
    model = retrofit(text)
    assert (model.get_input_embeddings().weight == 0.5).all()


def test_sizes_follow_the_text_config(folders):
    """Block sizes that do not fit the decoder, and options that get lost on the way."""
    block = retrofit(folders / "text", cross_attention={"num_key_value_heads": 1, "context_size": 20}).config
    block = block.cross_attention_config
    assert (block.hidden_size, block.num_attention_heads, block.num_key_value_heads, block.context_size) == (
        32,
        4,
        1,
        20,
    )
    config = CrossAttentionConfig(hidden_size=32, num_attention_heads=2, gate="none", context_size=8)
    model = retrofit(folders / "text", cross_attention=config, cross_attention_layers=[0, 2])
    assert model.config.cross_attention_config.gate == "none"
    assert model.config.cross_attention_layers == [0, 2]
    assert retrofit(folders / "text", every=3).config.cross_attention_layers == [2]


def test_each_text_token_has_its_gate_by_default(folders):
    """A default that overrides a field of the gate that was given, or that a configuration does not get."""
    for given, gate in (
        (None, "token"),
        ({"qk_norm": True}, "token"),
        ({"gate": "tanh"}, "tanh"),
        ({"gate_granularity": "channel"}, "tanh"),
        ({"gate_init": 0.0, "zero_init": False}, "tanh"),
        (CrossAttentionConfig(hidden_size=32, num_attention_heads=2, context_size=8), "tanh"),
    ):
        assert retrofit(folders / "text", cross_attention=given).config.cross_attention_config.gate == gate


def test_bfloat16_keeps_gates_and_norms_in_float32(folders):
    """Gate updates that vanish in bfloat16."""
    model = retrofit(folders / "text", folders / "vision", dtype=torch.bfloat16)
    for name, parameter in model.blocks[0].named_parameters():
        expected = torch.float32 if "_gate" in name or "norm" in name else torch.bfloat16
        assert parameter.dtype == expected, name
    assert model.dtype == torch.bfloat16
    assert model.model.vision_tower.dtype == torch.bfloat16


def test_freeze_base_leaves_what_was_added():
    """A trained base, or blocks that stay frozen."""
    model = freeze_base(retrofit(make_text(), AutoModel.from_config(vision_config()), every=2))
    trainable = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trainable == {
        name for name, _ in model.named_parameters() if "cross_attention_block" in name or ".connector." in name
    }
    freeze_base(model, vision=False)
    assert all(parameter.requires_grad for parameter in model.model.vision_tower.parameters())
    with pytest.raises(
        TypeError,
        match="`model` to be an XAttnForConditionalGeneration or an XAttnModel, got LlamaForCausalLM.*retrofit",
    ):
        freeze_base(make_text())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"every": 0}, "`every`.*0"),
        ({"cross_attention_layers": [5]}, r"4 layers.*\[5\]"),
        ({"cross_attention_layers": [-1]}, r"\[-1\]"),
        ({"cross_attention_layers": []}, "empty"),
        ({"cross_attention": {"num_attention_heads": 3, "head_dim": 4, "num_key_value_heads": 2}}, "2.*divide.*3"),
        ({"cross_attention": {"heads": 3}}, "unknown fields.*heads"),
        ({"cross_attention": 3}, "'cross_attention_config' with value 3"),
        ({"cross_attention": {"hidden_size": 16}}, "32.*got 16"),
        ({"connector_type": "conv"}, "connector_type.*conv"),
        ({"image_visibility": "first"}, "image_visibility.*first"),
        ({"image_visibility": "latest"}, "image_token_id"),
        ({"image_token_id": 1000}, "96.*1000"),
    ],
)
def test_wrong_options_are_refused_before_loading(folders, monkeypatch, arguments, message):
    """A late failure, after minutes of loading."""
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *a, **k: pytest.fail("weights were read"))
    with pytest.raises((ValueError, StrictDataclassError), match=message):
        retrofit(folders / "text", **arguments)


@torch.no_grad()
def test_options_reach_the_configuration(folders):
    """An option that ends in `from_pretrained` of the decoder, which blames its own `__init__`."""
    parameters = set(inspect.signature(retrofit).parameters)
    own = {field.name for field in fields(XAttnConfig)} - {field.name for field in fields(PreTrainedConfig)}
    assert own - parameters == {
        "text_config",
        "vision_config",
        "cross_attention_config",
        "source_config",
        "additional_vocab_scaled",
    }
    resampled = retrofit(
        folders / "text",
        folders / "vision",
        every=2,
        connector_type="perceiver",
        perceiver_config={"num_latents": 3, "num_hidden_layers": 1},
        vision_feature_select_strategy="default",
    )
    assert resampled.encode_images(pixel_values=pixels()).cross_attention_cache.layers[0].keys.shape[2] == 3
    assert resampled.config.vision_feature_select_strategy == "default"
    mlp = retrofit(folders / "text", folders / "vision", connector_hidden_act="relu", connector_bias=False)
    assert all("bias" not in name for name, _ in mlp.model.connector.named_parameters())
    assert type(mlp.model.connector.layers[1]) is torch.nn.ReLU
    base = AutoModelForCausalLM.from_pretrained(folders / "text")
    for source in (folders / "text", make_text()):
        wider = retrofit(source, additional_vocab_size=2, additional_vocab_in_head=True, image_token_id=VOCAB_SIZE + 1)
        logits = wider(token_ids()).logits
        assert logits.shape[-1] == VOCAB_SIZE + 2 and torch.equal(logits[..., :-2], base(token_ids()).logits)
        assert wider.get_input_embeddings().additional.weight.std() < 0.1


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("dtpye", "dtype"),
        ("layer", "layers"),
        ("cross_attention_config", "cross_attention"),
        ("perceiver", "perceiver_config"),
        ("attn_implementations", "attn_implementation"),
        ("bogus", None),
        ("config", None),
    ],
)
def test_unknown_keywords_are_refused_before_loading(folders, monkeypatch, name, nearest):
    """`LlamaForCausalLM.__init__() got an unexpected keyword argument`, after minutes of loading; or no word at all."""
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *a, **k: pytest.fail("weights were read"))
    message = rf"retrofit\(\) got an unexpected keyword argument `{name}`\."
    for text in (folders / "text", make_text()):
        with pytest.raises(TypeError, match=message + (rf" Did you mean `{nearest}`\?" if nearest else "")):
            retrofit(text, **{name: "float32"})


def test_two_names_of_the_layers(folders):
    """`--layers` of the command that Python does not know, and `cross_attention_layers` of Python that the command
    does not.
    """
    assert retrofit(folders / "text", layers=[1, 3]).config.cross_attention_layers == [1, 3]
    with pytest.raises(ValueError, match="`cross_attention_layers` or `layers`.*both"):
        retrofit(folders / "text", layers=[1, 3], cross_attention_layers=[1, 3])
    (commands,) = [action.choices for action in _parser()._actions if isinstance(action.choices, dict)]
    assert "  --layers I,J,..., " in commands["retrofit"].format_help()  # the first name is that of the guides
    for option in ("--layers", "--cross-attention-layers"):
        assert _parser().parse_args(["retrofit", "text", option, "1,3", "--output", "out"]).layers == [1, 3]


def test_keywords_of_from_pretrained(folders):
    """A keyword of `from_pretrained` that is refused, one that it does not have any more, and one without an effect."""
    source = inspect.getsource(PreTrainedModel.from_pretrained)
    known = set(re.findall(r'kwargs\.pop\("(\w+)"', source)) | set(
        re.findall(r'"(\w+)"', source.split("Not used anymore")[1])
    )
    known |= set(inspect.signature(PreTrainedModel.from_pretrained).parameters) | {"code_revision"}
    known |= {"attn_implementation", "experts_implementation"}  # of the configuration
    assert LOAD_KEYWORDS <= known
    assert {name for name in known - LOAD_KEYWORDS if not name.startswith("_")} >= {"config", "output_loading_info"}
    with pytest.raises(ValueError, match="`dtype` is an argument for loading a checkpoint.*already loaded"):
        retrofit(make_text(), AutoModel.from_config(vision_config()), dtype=torch.bfloat16)
    assert retrofit(make_text(), folders / "vision", dtype=torch.bfloat16).model.vision_tower.dtype == torch.bfloat16


def test_kernels_of_the_parts(folders):
    """A kernel that was asked for and that nobody calls."""
    model = retrofit(folders / "text", folders / "vision", attn_implementation={"cross_attention_config": "eager"})
    assert [kernels_of(model)[name] for name in ("text_config", "vision_config", "block")] == ["sdpa", "sdpa", "eager"]
    model = retrofit(folders / "text", folders / "vision", attn_implementation={"vision_config": "eager"})
    assert [kernels_of(model)[name] for name in ("text_config", "vision_config", "block")] == ["sdpa", "eager", "sdpa"]
    model = retrofit(folders / "text", folders / "vision", attn_implementation="eager")
    assert set(kernels_of(model).values()) == {"eager"}
    with pytest.raises(ValueError, match="`attn_implementation` names 'blocks'.*cross_attention_config"):
        retrofit(folders / "text", attn_implementation={"blocks": "eager"})


@pytest.mark.parametrize("loaded", [True, False])
def test_a_model_is_checked_once(folders, monkeypatch, loaded):
    """The same look at every module of a large model, over and over; a model that nobody looked at."""
    calls, check = [], insertion.check_insertable
    users = [
        module
        for name, module in sys.modules.items()
        if name.startswith("hf_xattn") and hasattr(module, "check_insertable")
    ]
    assert users
    for module in users:
        monkeypatch.setattr(module, "check_insertable", lambda text: (calls.append(text), check(text)))
    model = retrofit(make_text() if loaded else folders / "text")
    assert [id(text) for text in calls] == [id(model.model.text_model)]


def test_wrong_models_are_refused(folders, tmp_path):
    """Blocks inside a model they cannot serve."""
    with pytest.raises(ValueError, match="already has"):
        retrofit(retrofit(make_text()).model.text_model)
    with pytest.raises(ValueError, match="already has"):
        retrofit(retrofit(make_text()))
    bert = BertConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, vocab_size=20)
    with pytest.raises(ValueError, match="not a causal language model"):
        retrofit(BertModel(bert))
    t5 = T5ForConditionalGeneration(T5Config(d_model=16, d_ff=16, num_layers=1, num_heads=2, d_kv=8, vocab_size=20))
    with pytest.raises(ValueError, match="encoder-decoder"):
        retrofit(t5)
    t5.save_pretrained(tmp_path / "t5")
    with pytest.raises(ValueError, match="encoder-decoder"):
        retrofit(tmp_path / "t5")
    retrofit(folders / "text").save_pretrained(tmp_path / "again")
    with pytest.raises(ValueError, match="already has"):
        retrofit(tmp_path / "again")
    with pytest.raises(ValueError, match="not a causal language model"):
        retrofit(folders / "vision")
    small = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    clip = CLIPModel(CLIPConfig(vision_config={**small, "image_size": 32, "patch_size": 8}, text_config=small))
    with pytest.raises(ValueError, match="more than a vision model"):
        retrofit(make_text(), clip)


def test_pickled_weights_are_never_read(folders, tmp_path):
    """A checkpoint folder with pickled weights only."""
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "config.json").write_text((folders / "text" / "config.json").read_text())
    torch.save({}, tmp_path / "text" / "pytorch_model.bin")
    for options in ({}, {"use_safetensors": False}):
        with pytest.raises(OSError, match="no file named model.safetensors"):
            retrofit(tmp_path / "text", **options)


MEASURE = """
import json, os, resource, sys, threading, time
import torch, transformers, hf_xattn
from hf_xattn.modeling_xattn import XAttnForConditionalGeneration

def anonymous():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("RssAnon")) * 1024

before, peak, done = anonymous(), 0, False

def watch():
    global peak
    while not done:
        peak = max(peak, anonymous())
        time.sleep(0.001)

watcher = threading.Thread(target=watch)
watcher.start()
model = hf_xattn.retrofit(sys.argv[1], cross_attention_layers=[0], cross_attention=dict(intermediate_size=8))
done = True
watcher.join()
size = sum(p.numel() * p.element_size() for p in model.parameters())
print(json.dumps({"peak": peak - before, "size": size}))
"""


@pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="the memory of a process is in /proc/self/status, which only Linux has"
)
def test_retrofit_holds_one_copy_of_the_weights(tmp_path):
    """A second copy of the weights while loading."""
    sizes = {**SIZES, "hidden_size": 512, "intermediate_size": 4096, "num_hidden_layers": 12, "vocab_size": 8192}
    AutoModelForCausalLM.from_config(LlamaConfig(**sizes)).save_pretrained(tmp_path)
    output = subprocess.run([sys.executable, "-c", MEASURE, str(tmp_path)], capture_output=True, text=True, check=True)
    measured = json.loads(output.stdout.splitlines()[-1])
    assert measured["peak"] < 1.15 * measured["size"], measured


@torch.no_grad()
@pytest.mark.parametrize("connector_type", ["linear", "mlp", "mlp_2d", "perceiver", "identity"])
def test_half_precision_with_a_tower(folders, connector_type):
    """A new connector in float32 behind a tower in bfloat16."""
    model = retrofit(folders / "text", folders / "vision", dtype=torch.bfloat16, every=2, connector_type=connector_type)
    assert {parameter.dtype for parameter in model.model.connector.parameters()} <= {torch.bfloat16}
    logits = model(token_ids(), pixel_values=pixels()).logits
    assert logits.dtype == torch.bfloat16 and torch.equal(logits, model(token_ids()).logits)


@torch.no_grad()
def test_a_head_that_was_untied(tmp_path):
    """A trained head (PEFT's `modules_to_save`, merged) that the embedding replaces."""
    text = AutoModelForCausalLM.from_pretrained(make_base(tmp_path / "text", "llama_tied")).eval()
    text.config.tie_word_embeddings = False
    text.lm_head.weight = torch.nn.Parameter(text.lm_head.weight * 1.5)
    ids, head = token_ids(), text.lm_head.weight.clone()
    expected = text(ids).logits
    model = retrofit(text, layers=[1]).eval()
    assert torch.equal(model(ids).logits, expected)
    model.save_pretrained(tmp_path / "saved")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved").eval()
    assert torch.equal(again(ids).logits, expected)
    assert torch.equal(remove_blocks(model).lm_head.weight, head)


@torch.no_grad()
@pytest.mark.parametrize("outer", [True, False])
def test_a_larger_model_ties_by_its_own_configuration(outer, tmp_path):
    """A head that is replaced by the embedding, or a folder that cannot be loaded."""
    config = COMPOSITES["smolvlm"]()
    config.tie_word_embeddings, config.text_config.tie_word_embeddings = outer, not outer
    whole = composite_class(config)
    whole(config).save_pretrained(tmp_path / "whole")
    expected = whole.from_pretrained(tmp_path / "whole").eval()(token_ids()).logits
    model = retrofit(tmp_path / "whole", every=2).eval()
    assert torch.allclose(model(token_ids()).logits, expected, atol=1e-6)
    model.save_pretrained(tmp_path / "saved")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved").eval()
    assert torch.allclose(again(token_ids()).logits, expected, atol=1e-6)


@torch.no_grad()
def test_a_tower_follows_the_text_model(tmp_path):
    """`dtype="auto"` that keeps a tower in float32, which a load then rounds."""
    text, tower = make_base(tmp_path / "text", dtype=torch.bfloat16), make_vision(tmp_path / "tower")
    model = randomize(retrofit(text, tower, layers=[1, 3], dtype="auto")).eval()
    given = {"pixel_values": pixels()}
    assert model.model.vision_tower.dtype == torch.bfloat16
    model.save_pretrained(tmp_path / "small", adapter_only=True)
    again = AutoModelForImageTextToText.from_pretrained(tmp_path / "small").eval()
    assert torch.equal(again(token_ids(), **given).logits, model(token_ids(), **given).logits)


def test_generation_settings_of_the_text_model(tmp_path):
    """An end token that the text model inside a loaded model does not know."""
    text = make_text()
    text.generation_config.eos_token_id = [5, 6]
    text.save_pretrained(tmp_path / "text")
    retrofit(tmp_path / "text").save_pretrained(tmp_path / "saved")
    for take in (lambda model: model, lambda model: model.model.text_model):
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
        assert model.model.text_model.generation_config.eos_token_id == [5, 6]
        assert remove_blocks(take(model)).generation_config.eos_token_id == [5, 6]


@pytest.mark.skipif("flint" not in CONFIG_MAPPING, reason="this transformers has no such decoder")
def test_blocks_have_the_dtype_of_matrices(tmp_path):
    """Blocks in float32, because the first weight of a layer is a vector that stays so."""
    AutoModelForCausalLM.from_config(tiny_config("flint")).save_pretrained(tmp_path / "text")
    model = retrofit(tmp_path / "text", dtype=torch.bfloat16, every=2)
    assert model.blocks[0].attn.q_proj.weight.dtype == torch.bfloat16
