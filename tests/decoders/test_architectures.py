"""Every decoder architecture of transformers: what the package promises holds, or the table says why it
is not served.
"""

import copy

import pytest
import torch
import transformers
from safetensors.torch import load_file
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, DynamicCache, EncoderDecoderCache, StaticCache
from transformers.utils import logging

from helpers.models.tiny_architectures import DIFFERENT, EXPERTS, tiny_config
from helpers.models.tiny_decoders import CONTEXT_SIZE, SERVED, make_tiny, retrofitted
from helpers.models.tiny_models import randomize, strengthen
from hf_xattn.decoders.decoder import find_cache_argument, layers_receive_keywords
from hf_xattn.decoders.insertion import check_insertable
from hf_xattn.utils.architectures import ARCHITECTURES, PACKS, architecture, causal_model_types, markdown_table
from hf_xattn.utils.transformers_api import CACHE, OLDEST, has, is_before


FORGETFUL = [name for name in SERVED if architecture(name).forgets]
REFUSED = [name for name in causal_model_types() if architecture(name).refused is not None]

# What the issue trackers of such packages ask for.
FAMILIES = """llama mistral mixtral ministral qwen2 qwen2_moe qwen3 qwen3_moe qwen3_next qwen3_5_text gemma gemma2 gemma3_text
gemma4_text phi phi3 phimoe gpt2 gpt_neo gpt_neox gptj opt bloom falcon mpt codegen starcoder2 olmo olmo2 olmo3 olmoe cohere
cohere2 granite granitemoe deepseek_v2 deepseek_v3 glm glm4 glm4_moe gpt_oss smollm3 stablelm nemotron llama4_text bitnet jamba
bamba falcon_h1 lfm2 mamba2""".split()  # noqa: E501


def check_packed(model, base, ids, states):
    """Two samples in one row, each with images of its own: as in rows of their own; or refused, where the base joins
    them.
    """
    packed, both = torch.cat([ids[:1, :5], ids[1:]], dim=1), torch.cat([states[:1], states[1:]], dim=1)
    of_row = torch.arange(12) < 5
    inputs = {
        "position_ids": torch.cat([torch.arange(5), torch.arange(7)])[None],
        "cross_attention_states": both,
        "cross_attention_mask": (of_row[:, None] == (torch.arange(10) < 5))[None],
    }
    if not model.model._interface.packs:
        with pytest.raises(ValueError, match="Packed rows"):
            model(packed, **inputs)
        if "position_ids" in model.model._interface.arguments:
            alone = torch.cat([base(row, use_cache=False).logits for row in (ids[:1, :5], ids[1:])], dim=1)
            joined = base(packed, position_ids=inputs["position_ids"], use_cache=False).logits
            assert not torch.allclose(joined, alone, atol=1e-4), "it packs: name it in `PACKS`"
        return
    parts = [
        model(row, cross_attention_states=image, use_cache=False).logits
        for row, image in ((ids[:1, :5], states[:1]), (ids[1:], states[1:]))
    ]
    assert torch.allclose(model(packed, **inputs).logits, torch.cat(parts, dim=1), atol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("model_type", SERVED)
def test_a_served_architecture_keeps_every_promise(model_type, tmp_path):
    """An architecture on which a fresh retrofit differs from its base, images change nothing or change text that may
    not see them, a cache changes the answer, or a saved model comes back different.
    """
    logging.disable_progress_bar()
    text = make_tiny(model_type)
    base = copy.deepcopy(text)
    base.save_pretrained(tmp_path / "base")
    ids = torch.randint(4, 90, (2, 7), generator=torch.Generator().manual_seed(1))
    states = torch.randn(2, 5, CONTEXT_SIZE, generator=torch.Generator().manual_seed(2))
    alone = base(ids, use_cache=True).logits
    assert torch.isfinite(alone).all()

    model = retrofitted(text)
    assert layers_receive_keywords(text) == (architecture(model_type).via == "keyword")
    assert torch.equal(model(ids).logits, alone)
    assert torch.equal(model(ids, cross_attention_states=states).logits, alone)

    randomize(model)
    seen = model(ids, cross_attention_states=states).logits
    assert torch.isfinite(seen).all()
    assert (seen - alone).abs().max() > 1e-3
    assert torch.equal(model(ids).logits, alone)
    nothing = torch.zeros(2, 5, dtype=torch.bool)
    assert torch.equal(model(ids, cross_attention_states=states, cross_attention_mask=nothing).logits, alone)
    some = torch.ones(2, 7, 5, dtype=torch.bool)
    some[0, :3] = some[1] = False
    mixed = model(ids, cross_attention_states=states, cross_attention_mask=some).logits
    blind = torch.cat([mixed[0, :3] - alone[0, :3], mixed[1] - alone[1]])
    assert blind.abs().max() <= (1e-5 if model_type in EXPERTS else 0.0)

    check_packed(model, strengthen(base), ids, states)

    options = {
        "max_new_tokens": 6,
        "do_sample": False,
        "eos_token_id": None,
        "pad_token_id": 0,
        "cross_attention_states": states,
    }
    options |= {"output_logits": True, "return_dict_in_generate": True}
    cached, uncached = (model.generate(ids, use_cache=use_cache, **options) for use_cache in (True, False))
    assert torch.equal(cached.sequences, uncached.sequences)
    assert torch.allclose(torch.stack(cached.logits), torch.stack(uncached.logits), atol=1e-4)

    model.save_pretrained(tmp_path)
    saved, theirs = (load_file(folder / "model.safetensors") for folder in (tmp_path, tmp_path / "base"))
    names = {name.removeprefix("model.text_model.") for name in saved if "cross_attention_block" not in name}
    assert names == theirs.keys()
    assert all(torch.equal(saved[f"model.text_model.{name}"], theirs[name]) for name in names)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    state, again = model.state_dict(), loaded.state_dict()
    assert state.keys() == again.keys() and all(torch.equal(state[name], again[name]) for name in state)
    # The weights are those, but lie elsewhere in memory, and some kernels round by alignment.
    assert torch.allclose(loaded(ids, cross_attention_states=states).logits, seen, atol=1e-5)


# Types that no Auto class makes, and types with recurrent layers in models of attention alone.
OTHERS = {"mistral4": "Mistral4", "emu3_text_model": "Emu3", "mllama_text_model": "Mllama"}
OF_ATTENTION = ["lfm2", "lfm2_moe", "lfm3"]


@torch.no_grad()
@pytest.mark.parametrize("model_type", [*OTHERS, *OF_ATTENTION])
def test_every_decoder_that_packs_is_in_the_table(model_type):
    """A decoder that is served, keeps samples apart, and is refused because its type is not in the table."""
    if model_type not in CONFIG_MAPPING:
        pytest.skip(f"transformers has no {model_type} here")
    config = tiny_config(model_type)
    if model_type in OF_ATTENTION:
        config.layer_types = ["full_attention"] * 4
        text = AutoModelForCausalLM.from_config(config)
    else:
        text = getattr(transformers, f"{OTHERS[model_type]}ForCausalLM")(config)
    model = randomize(retrofitted(text.eval()))
    assert model.model._interface.packs
    check_packed(model, None, torch.randint(4, 90, (2, 7)), torch.randn(2, 5, CONTEXT_SIZE))


@pytest.mark.skipif(is_before("5.24.0"), reason="the table is that of transformers 5.24")
def test_each_type_that_packs_is_tested():
    """A type in the table that no test compares."""
    assert {*PACKS} <= {*SERVED, *OTHERS, *OF_ATTENTION}


@torch.no_grad()
@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.slow)], ids=["bfloat16", "float16"]
)
@pytest.mark.parametrize("model_type", SERVED)
def test_blocks_run_in_half_precision_on_every_architecture(model_type, dtype):
    """A decoder with a float32 residual stream between half-precision weights, whose blocks raise at every image."""
    text = make_tiny(model_type, dtype)
    ids = torch.randint(4, 90, (2, 7), generator=torch.Generator().manual_seed(1))
    states = torch.randn(2, 5, CONTEXT_SIZE, generator=torch.Generator().manual_seed(2))
    if model_type == "inkling2_text" and is_before(
        "5.24.0"
    ):  # it multiplies float32 by half precision, without blocks too
        with pytest.raises(RuntimeError, match="same dtype"):
            text(ids, use_cache=True)
        return
    alone = text(ids, use_cache=True).logits

    model = retrofitted(text)
    assert model.blocks[0].attn.q_proj.weight.dtype == dtype
    assert torch.equal(model(ids, cross_attention_states=states).logits, alone)
    randomize(model)
    options = {"max_new_tokens": 3, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    options |= {"output_logits": True, "return_dict_in_generate": True}
    generated = model.generate(ids, cross_attention_states=states, **options)
    assert generated.sequences.shape == (2, 10)
    first = generated.logits[0]
    assert torch.isfinite(first).all() and not torch.equal(first, alone[:, -1].float())


@torch.no_grad()
@pytest.mark.parametrize("model_type", ["mamba2", "falcon_h1", "bamba", "llama", *FORGETFUL])
def test_text_after_cached_text_is_right_or_refused(model_type):
    """A state-space decoder whose cache does not know how much text it has read, and that reads it again; one that
    drops its state.
    """
    model = randomize(retrofitted(strengthen(make_tiny(model_type))))
    ids = torch.randint(4, 90, (2, 7), generator=torch.Generator().manual_seed(1))
    states = torch.randn(2, 5, CONTEXT_SIZE, generator=torch.Generator().manual_seed(2))
    options = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    options |= {"output_logits": True, "return_dict_in_generate": True}
    first = model.generate(ids, cross_attention_states=states, **options)
    cache = first[CACHE]
    assert cache.get_seq_length() == 10
    if model_type in FORGETFUL and not has("prefill_chunk_size"):
        with pytest.raises(ValueError, match="after cached text needs transformers 5.23.0 or newer"):
            model.generate(torch.cat([first.sequences, ids[:, :3]], dim=1), cache=cache, **options)
        return
    chat = torch.cat([first.sequences, ids[:, :3]], dim=1)
    expected = model.generate(chat, cross_attention_states=states, use_cache=False, **options)
    fork = copy.deepcopy(cache)
    second = model.generate(chat, cache=cache, **options)
    if model_type in FORGETFUL:
        with pytest.raises(
            ValueError, match="Expected `prefill_chunk_size` to be None or 1, got 3: .* drops its state"
        ):
            model.generate(chat, cache=fork, prefill_chunk_size=3, **options)
        with pytest.raises(ValueError, match="Expected no `inputs_embeds` after cached text, got it with 4 new tokens"):
            embeds = model.get_input_embeddings()(chat)
            model.generate(inputs_embeds=embeds, cache=fork, **options)
        with pytest.raises(ValueError, match="Expected `prefill_chunk_size` to be None or 1, got 3"):
            model.generate(ids, cross_attention_states=states, prefill_chunk_size=3, **options)
        in_one = model.generate(chat, cache=fork, prefill_chunk_size=1, **options)
        assert torch.equal(in_one.sequences, second.sequences)
    assert torch.allclose(torch.stack(second.logits), torch.stack(expected.logits), atol=1e-4)
    assert cache.get_seq_length() == 17


# Their steps of one token clamp time steps, or do not, other than their forward over a text.
COARSE = ("nemotron_h", "zamba2")


@torch.no_grad()
@pytest.mark.parametrize("model_type", SERVED)
def test_text_in_parts_equals_the_whole_text(model_type):
    """Layers that drop their state, or positions that start again, where a call reads text after cached text."""
    model = randomize(retrofitted(strengthen(make_tiny(model_type))))
    ids = torch.randint(4, 90, (2, 16), generator=torch.Generator().manual_seed(1))
    states = torch.randn(2, 5, CONTEXT_SIZE, generator=torch.Generator().manual_seed(2))
    whole = model(ids, cross_attention_states=states, use_cache=False).logits
    forgets = architecture(model_type).forgets
    for lengths in ([8, 8], [5, *[1] * 11]):
        images, cache, read = {"cross_attention_states": states}, None, 0
        for part in ids.split(lengths, dim=1):
            if cache is not None and forgets and part.shape[1] > 1:
                with pytest.raises(
                    ValueError, match="Expected one token at a time after the text .*, got 8: .* drops its"
                ):
                    model(part, cache=cache, use_cache=True)
                if has("prefill_chunk_size"):
                    longer = torch.cat([ids, ids[:, :1]], dim=1)
                    assert model.generate(longer, cache=cache, max_new_tokens=1).shape == (2, 18)
                break
            outputs = model(part, cache=cache, use_cache=True, **images)
            found, expected = outputs.logits, whole[:, read : read + part.shape[1]]
            assert (found - expected).abs().max() <= (0.02 if model_type in COARSE else 1e-3) * whole.std()
            images, cache, read = {}, outputs[CACHE], read + part.shape[1]


@torch.no_grad()
@pytest.mark.parametrize("model_type", [*FORGETFUL, *(name for name in SERVED if architecture(name).counts_from_zero)])
def test_what_a_decoder_does_wrong(model_type):
    """An entry of the table for a decoder that a newer transformers has repaired."""
    text = strengthen(make_tiny(model_type))
    ids = torch.randint(4, 90, (2, 16), generator=torch.Generator().manual_seed(1))
    name = find_cache_argument(text)
    first = text(ids[:, :8], use_cache=True)
    second = text(ids[:, 8:], use_cache=True, **{name: getattr(first, name)})
    expected = text(ids, use_cache=False).logits
    assert (second.logits - expected[:, 8:]).abs().max() > 0.1 * expected.std()


def of_type(model_type):
    """What is looked at before anything is built: the decoder may not be one that can be."""
    text = torch.nn.Module()
    text.config = type("Config", (), {"model_type": model_type, "is_encoder_decoder": False})()
    return text


@pytest.mark.parametrize("model_type", REFUSED)
def test_an_architecture_that_cannot_be_served_is_refused(model_type):
    """An architecture that cannot be served and is not refused before anything is built."""
    with pytest.raises(ValueError, match=f"'{model_type}'\\) cannot take cross-attention blocks: "):
        check_insertable(of_type(model_type))


@pytest.mark.parametrize("model_type", [name for name, entry in ARCHITECTURES.items() if entry.since != OLDEST])
def test_decoders_of_newer_versions(model_type):
    """A decoder that sees text to come, or forgets text, in an older transformers, and is retrofitted there without a
    word.
    """
    entry = ARCHITECTURES[model_type]
    if is_before(entry.since):
        with pytest.raises(ValueError, match=f"cannot take.*: its decoder needs transformers {entry.since} or newer"):
            check_insertable(of_type(model_type))
    else:
        assert architecture(model_type) == entry and model_type in SERVED


def test_static_caches_of_newer_versions():
    """A size that is said not to fit, or an answer of a decoder that cannot read on in a static cache."""
    model = retrofitted(make_tiny("bloom"))
    ids = torch.randint(4, 90, (2, 7), generator=torch.Generator().manual_seed(1))
    options = {"max_new_tokens": 2, "cache_implementation": "static", "pad_token_id": 0}
    if is_before(ARCHITECTURES["bloom"].static_since):
        with pytest.raises(ValueError, match="A static cache of BloomForCausalLM.* needs transformers 5.21.0 or newer"):
            model.generate(ids, **options)
    else:
        assert model.generate(ids, **options).shape == (2, 9)


@torch.no_grad()
@pytest.mark.parametrize("call", ["generate", "forward"])
def test_a_static_cache_that_no_version_reads_rightly(call):
    """GPT-Neo, whose local layers count their window from the end of the cache: other logits, without blocks, too."""
    model, ids = retrofitted(make_tiny("gpt_neo")), torch.full((1, 7), 5)
    with pytest.raises(ValueError, match="another cache than a static one with GPTNeoForCausalLM"):
        if call == "generate":
            model.generate(ids, max_new_tokens=2, cache_implementation="static", pad_token_id=0)
        else:
            static = StaticCache(config=model.config.get_text_config(decoder=True), max_cache_len=16)
            model(ids, cache=EncoderDecoderCache(static, DynamicCache()))


def test_table_is_complete():
    """An architecture that a release of transformers adds and nobody looked at; families that were served
    and are not.
    """
    assert len(SERVED) >= 120
    later = {name for name, entry in ARCHITECTURES.items() if is_before(entry.since)}
    named = {*FAMILIES, *DIFFERENT, *EXPERTS} & set(causal_model_types())
    assert not named - set(SERVED) - later
    assert len(SERVED) + len(REFUSED) == len(causal_model_types())
    table = markdown_table()
    assert all(f"`{name}`" in table for name in causal_model_types())
