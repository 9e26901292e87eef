"""Blocks in a decoder's own layers: the decoder stays what it was, and whatever handles its layers
handles the blocks.
"""

import copy
import gc
import pickle
import weakref

import pytest
import torch
from accelerate import dispatch_model
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSeq2SeqLM, BertConfig, T5Config

from helpers.models.tiny_models import TEXT_CONFIGS, make_model, make_text, pixels, token_ids
from hf_xattn import GatedCrossAttentionBlock, XAttnConfig, XAttnForConditionalGeneration, XAttnModel
from hf_xattn.decoders.decoder import find_decoder
from hf_xattn.decoders.insertion import check_insertable, cross_attending_class, insert_blocks, is_cross_attending
from hf_xattn.layers.context import KEYWORD


def _answer_in_child(path, queue):
    """Runs in a fresh process: only what pickle wrote is there."""
    torch.set_num_threads(1)
    with open(path, "rb") as file:
        model, ids, images = pickle.load(file)
    with torch.no_grad():
        queue.put(model(ids, pixel_values=images).logits.numpy())


@pytest.mark.parametrize("name", TEXT_CONFIGS)
def test_base_names_and_weights_stay(name):
    """Renamed, re-initialised or doubled base parameters: adapters, quantisers and checkpoints look for
    the old names.
    """
    base = {key: value.clone() for key, value in make_text(name).named_parameters(remove_duplicate=False)}
    model = make_model(name)
    after = dict(model.model.text_model.named_parameters(remove_duplicate=False))
    added = {key for key in after if "cross_attention_block" in key}
    assert after.keys() - added == base.keys()
    assert added and all(torch.equal(value, after[key]) for key, value in base.items())
    assert {key for key in model.model.text_model.state_dict() if "cross_attention_block" not in key} == set(
        make_text(name).state_dict()
    )
    _, layers = find_decoder(model.model.text_model)
    for index, layer in enumerate(layers):
        assert isinstance(getattr(layer, "cross_attention_block", None), GatedCrossAttentionBlock) == (index in (1, 3))


def test_a_layer_with_a_block_is_still_of_its_own_class():
    """A subclass that FSDP policies, device maps or `isinstance` take for something else."""
    text = make_text()
    _, layers = find_decoder(text)
    layer_class, objects = type(layers[0]), [id(layer) for layer in layers]
    config = XAttnConfig(text_config=text.config, cross_attention_layers=[1, 3])
    model = XAttnForConditionalGeneration(config, text_model=text)
    assert [id(layer) for layer in layers] == objects
    new_class = type(layers[0])
    assert all(type(layer) is new_class for layer in layers)
    assert new_class is cross_attending_class(layer_class, True)
    assert new_class.__name__ == "CrossAttendingLlamaDecoderLayer"
    assert issubclass(new_class, layer_class) and isinstance(layers[0], layer_class)
    assert is_cross_attending(layers[0]) and not is_cross_attending(find_decoder(make_text())[1][0])
    for owner in (model, model.model):
        assert {"LlamaDecoderLayer", "CrossAttendingLlamaDecoderLayer"} <= set(owner._no_split_modules)


@torch.no_grad()
def test_keyword_stops_at_the_layer(monkeypatch):
    """The keyword reaching a self-attention kernel, in layers with a block or without one."""
    model = make_model()
    _, layers = find_decoder(model.model.text_model)
    seen = []
    for layer in layers:
        layer.self_attn.register_forward_pre_hook(
            lambda module, args, kwargs: seen.append(set(kwargs)), with_kwargs=True
        )
    model(token_ids(), pixel_values=pixels())
    assert len(seen) == len(layers)
    assert not any(KEYWORD in names for names in seen)


@torch.no_grad()
@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2"])
def test_copies_answer_the_same(name, tmp_path):
    """A layer class made at run time that pickle, deepcopy or `torch.save` cannot restore, or restores without a
    block.
    """
    model, ids, images = make_model(name), token_ids(), pixels()
    expected = model(ids, pixel_values=images).logits
    torch.save(model, tmp_path / "model.pt")
    copies = {
        "pickle": pickle.loads(pickle.dumps(model)),
        "deepcopy": copy.deepcopy(model),
        "torch.save": torch.load(tmp_path / "model.pt", weights_only=False),
    }
    for how, other in copies.items():
        assert torch.equal(other(ids, pixel_values=images).logits, expected), how
        assert not torch.equal(other(ids).logits, expected), how
        mine, others = find_decoder(model.model.text_model)[1], find_decoder(other.model.text_model)[1]
        assert type(others[1]) is type(mine[1]) and others[1] is not mine[1]
        assert others[1].cross_attention_block is not mine[1].cross_attention_block
        other.blocks[0].attn.k_proj.weight.add_(1.0)
    assert torch.equal(model(ids, pixel_values=images).logits, expected)


@torch.no_grad()
def test_a_spawned_process_unpickles_the_model(tmp_path):
    """A child process that has not made the layer class yet, and cannot find it by name (data loaders, DDP spawn)."""
    model, ids, images = make_model(), token_ids(), pixels()
    with open(tmp_path / "model.pkl", "wb") as file:
        pickle.dump((model, ids, images), file)
    context = torch.multiprocessing.get_context("spawn")
    queue = context.Queue()
    child = context.Process(target=_answer_in_child, args=(str(tmp_path / "model.pkl"), queue))
    child.start()
    logits = torch.from_numpy(queue.get(timeout=120))
    child.join(30)
    assert child.exitcode == 0
    assert torch.allclose(logits, model(ids, pixel_values=images).logits, atol=1e-5)


def test_nothing_outlives_the_model():
    """Weights kept alive by a cache of classes or by a hook."""
    model = make_model()
    reference = weakref.ref(model.blocks[0])
    with torch.no_grad():
        model(token_ids(), pixel_values=pixels())
    del model
    gc.collect()
    assert reference() is None


def test_unknown_stacks_are_refused():
    """Images silently ignored by an architecture without layer objects, or with several residual streams."""
    for model_type, message in (("xlm", "no layer objects"), ("deepseek_v4", "several residual streams")):
        text = make_text()
        text.config.__class__.model_type, kept = model_type, text.config.model_type
        try:
            with pytest.raises(ValueError, match=f"{model_type}.*cannot take cross-attention blocks.*{message}"):
                check_insertable(text)
        finally:
            text.config.__class__.model_type = kept
        assert not any(is_cross_attending(module) for module in text.modules())


@pytest.mark.parametrize(
    "build, message",
    [
        (
            lambda: AutoModelForSeq2SeqLM.from_config(
                T5Config(
                    d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, vocab_size=96, decoder_start_token_id=0
                )
            ),
            "encoder-decoder.*cross-attention of its own",
        ),
        (
            lambda: AutoModelForCausalLM.from_config(
                BertConfig(
                    hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64, vocab_size=96
                )
            ),
            "is an encoder",
        ),
        (lambda: AutoModel.from_config(TEXT_CONFIGS["llama"]()), "AutoModelForCausalLM"),
        (lambda: make_model().model.text_model, "already has cross-attention blocks"),
        (lambda: make_model(), "already has cross-attention blocks"),
        (lambda: dispatch_model(make_text(), {"": "cpu"}, force_hooks=True), "dispatched with a device map"),
    ],
    ids=["t5", "bert", "headless", "twice", "xattn", "dispatched"],
)
def test_models_that_cannot_be_served_are_refused(build, message):
    """Blocks inside an encoder, twice in a layer, or under accelerate's hooks, where they would fail much later."""
    text = build()
    before = [type(module) for module in text.modules()]
    with pytest.raises(ValueError, match=message):
        check_insertable(text)
    config = XAttnConfig(text_config=TEXT_CONFIGS["llama"](), cross_attention_layers=[1])
    with pytest.raises(ValueError, match=message):
        XAttnModel(config, text_model=text)
    assert [type(module) for module in text.modules()] == before


def test_stack_of_another_length_is_refused():
    """Blocks put into a stack that is not the decoder's (a projector, a list of heads)."""
    text = make_text()
    text.config.num_hidden_layers = 3
    with pytest.raises(ValueError, match="no stack of 3 decoder layers"):
        find_decoder(text)


def test_block_takes_device_and_dtype_of_its_layer():
    """A block that differs in dtype from the layer it sits in; gates whose updates vanish in bfloat16."""
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        text = make_text(dtype=dtype)
        config = XAttnConfig(
            text_config=text.config, cross_attention_layers=[1], cross_attention_config={"qk_norm": True}
        )
        insert_blocks(text, config)
        for name, parameter in text.model.layers[1].cross_attention_block.named_parameters():
            narrow = dtype in (torch.bfloat16, torch.float16)
            expected = torch.float32 if narrow and ("gate" in name.split(".")[0] or "norm" in name) else dtype
            assert parameter.dtype == expected, (dtype, name)
            assert isinstance(parameter, nn.Parameter) and parameter.requires_grad


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_blocks_are_made_in_half_precision(dtype):
    """A float32 copy of each new weight, which doubles the memory that a retrofit needs; weights of another scale than
    in float32.
    """
    blocks = {}
    for each in (torch.float32, dtype):
        text = make_text(dtype=each)
        sizes = {"num_attention_heads": 4, "head_dim": 8, "intermediate_size": 64, "context_size": 32}
        config = XAttnConfig(text_config=text.config, cross_attention_layers=[1], cross_attention_config=sizes)
        torch.manual_seed(3)
        with _Made() as made:
            insert_blocks(text, config)
        blocks[each] = text.model.layers[1].cross_attention_block
        assert torch.get_default_dtype() == torch.float32
        assert any(size > 1000 for size in made.sizes[each])
    assert max(made.sizes[torch.float32]) <= 2 * text.config.hidden_size  # the norms
    for name, weight in blocks[
        dtype
    ].named_parameters():  # torch 2.7 draws other numbers in half precision, equally spread
        spread, expected = (
            each.float().std(correction=0) for each in (weight, blocks[torch.float32].get_parameter(name))
        )
        assert torch.allclose(spread, expected, rtol=0.15, atol=0), name


class _Made(TorchDispatchMode):
    """Notes the numbers of values of all tensors that are made, for each dtype."""

    def __init__(self):
        super().__init__()
        self.sizes = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.sizes.setdefault(result.dtype, set()).add(result.numel())
        return result
