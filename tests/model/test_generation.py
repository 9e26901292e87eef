"""`generate`: images are encoded once, and every way of decoding gives what the uncached model gives."""

from collections import Counter

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import AutoModelForCausalLM, GenerationConfig, LlamaConfig, PreTrainedTokenizerFast
from transformers.cache_utils import DynamicCache, EncoderDecoderCache, StaticCache

from helpers.models.template_models import make_tokenizer
from helpers.models.tiny_models import SIZES, VOCAB_SIZE, make_model, make_text, pixels, token_ids
from hf_xattn.cache.cross_cache import CrossCache
from hf_xattn.utils.transformers_api import CACHE, has


BOS = torch.tensor([[1], [1]])


MARKER = 3
NEW = 8
DECODERS = ["llama", "mistral", "gemma3", "gpt2"]  # mistral and gemma3 with a window shorter than the prompt
CACHES = {"dynamic": {}, "static": {"cache_implementation": "static"}}
METHODS = {
    "greedy": {"do_sample": False},
    "sampling": {"do_sample": True, "top_k": 20},
    "return_sequences": {"do_sample": True, "num_return_sequences": 3},
    "beams": {"do_sample": False, "num_beams": 3},
    "beams_returned": {"do_sample": False, "num_beams": 4, "num_return_sequences": 2},
    "beams_sampled": {"do_sample": True, "num_beams": 3},
}


def generate(model, ids, **kwargs):
    torch.manual_seed(7)
    return model.generate(ids, max_new_tokens=NEW, **kwargs)


@torch.no_grad()
def greedy_by_hand(model, ids, steps=NEW, **images):
    """No cache, no `generate`: one forward over all text for each new token."""
    for _ in range(steps):
        logits = model(ids, use_cache=False, **images).logits[:, -1]
        ids = torch.cat([ids, logits.argmax(-1, keepdim=True)], dim=1)
    return ids


class Calls:
    """Counts forwards of the parts that images pass."""

    def __init__(self, model):
        self.count = Counter()
        for index, block in enumerate(model.blocks):
            for name in ("k_proj", "v_proj"):
                getattr(block.attn, name).register_forward_hook(self._hook(f"{name}{index}"))
        if model.model.vision_tower is not None:
            model.model.vision_tower.register_forward_hook(self._hook("tower"))

    def _hook(self, name):
        return lambda *_: self.count.update([name])

    def once(self, tower=1):
        expected = {f"{name}{index}": 1 for name in ("k_proj", "v_proj") for index in range(2)}
        return self.count == Counter({**expected, "tower": tower})


@pytest.mark.parametrize(
    "name, method",
    [
        *(("llama", method) for method in METHODS),
        *((name, how) for name in DECODERS[1:] for how in ("greedy", "beams")),
    ],
)
@pytest.mark.parametrize("cache", CACHES)
def test_methods_equal_the_uncached_run(name, method, cache):
    """Beams or return sequences that look at another sample's image, or K/V and tower that run more than once."""
    model, ids, images = make_model(name), token_ids(), pixels()
    expected = generate(model, ids, pixel_values=images, use_cache=False, **METHODS[method])
    if method == "greedy":
        assert torch.equal(expected, greedy_by_hand(model, ids, pixel_values=images))
        assert not torch.equal(expected, generate(model, ids, do_sample=False)), "images matter"
    calls = Calls(model)
    outputs = generate(
        model, ids, pixel_values=images, return_dict_in_generate=True, **METHODS[method], **CACHES[cache]
    )
    assert torch.equal(outputs.sequences, expected)
    assert calls.once(), calls.count
    keys = outputs[CACHE].cross_attention_cache.layers[0].keys
    assert keys.shape[::2] == (2, 16), "one row an image, not one a beam; as long as the images, not the text"
    if cache == "static":
        assert isinstance(outputs[CACHE].cross_attention_cache, CrossCache)


@pytest.mark.parametrize("images", ["pixels", "states", "padded_states"])
def test_uncached_run_encodes_pixels_once(images):
    """A vision tower that runs at every step where the cache is off, or a mask that is lost there."""
    model, ids = make_model(), token_ids()
    inputs = {"pixel_values": pixels()}
    if images != "pixels":
        inputs = {"cross_attention_states": model.get_image_features(pixels()).pooler_output.flatten(1, 2).detach()}
    if images == "padded_states":
        inputs["cross_attention_mask"] = torch.arange(16)[None] < torch.tensor([[16], [9]])
    calls = Calls(model)
    for options in ({"num_beams": 3}, {}):
        calls.count.clear()
        tokens = generate(model, ids, use_cache=False, do_sample=False, **options, **inputs)
        assert calls.count["tower"] == (images == "pixels") and calls.count["k_proj0"] == 1
        assert torch.equal(tokens, generate(model, ids, do_sample=False, **options, **inputs))
    assert torch.equal(tokens, greedy_by_hand(model, ids, **inputs))


@pytest.mark.parametrize("name", DECODERS)
def test_prompt_lookup_gives_the_greedy_tokens(name):
    """Rejected candidates that leave traces, or images that are encoded again for each candidate."""
    model, images = make_model(name), pixels(1)
    ids = token_ids(1, 4).repeat(1, 3)
    expected = generate(model, ids, pixel_values=images, do_sample=False)
    calls = Calls(model)
    tokens = generate(model, ids, pixel_values=images, do_sample=False, prompt_lookup_num_tokens=3)
    assert torch.equal(tokens, expected) and calls.once()


@pytest.mark.parametrize("name", DECODERS)
def test_prompt_lookup_in_a_conversation(name):
    """A text in the cache that is read again behind itself, as transformers' own decoders do: other positions."""
    model, images = make_model(name), pixels(1)
    config = model.config.get_text_config()
    cache = EncoderDecoderCache(DynamicCache(config=config), DynamicCache())
    first = generate(model, token_ids(1, 4).repeat(1, 3), pixel_values=images, cache=cache, do_sample=False)
    ids = torch.cat([first, first[:, -5:-1]], 1)
    expected = generate(model, ids, pixel_values=images, do_sample=False)
    calls = Calls(model)
    options = {"do_sample": False, "prompt_lookup_num_tokens": 3}
    assert torch.equal(generate(model, ids, pixel_values=images, cache=cache, **options), expected)
    assert calls.count["tower"] <= 1 and cache.get_seq_length() < expected.shape[1] + 3  # and candidates


@pytest.mark.parametrize("name", ["llama", "mistral", "gpt2"])
def test_a_text_only_assistant_gets_no_images(name):
    """Images that leak into the assistant, which has no place for them; candidates judged without the images."""
    model, ids, images = make_model(name), token_ids(1), pixels(1)
    assistant = make_text(name, seed=11)
    assistant.generation_config.num_assistant_tokens = 3
    seen = set()
    assistant.register_forward_pre_hook(
        lambda module, args, kwargs: seen.update(key for key, value in kwargs.items() if value is not None),
        with_kwargs=True,
    )
    expected = generate(model, ids, pixel_values=images, do_sample=False)
    calls = Calls(model)
    tokens = generate(model, ids, pixel_values=images, do_sample=False, assistant_model=assistant)
    assert torch.equal(tokens, expected) and calls.once()
    assert "input_ids" in seen and not seen & {"pixel_values", "image_mask", "cross_attention_states", "image_rows"}
    assert not isinstance(assistant, type(model))


def test_assistant_of_another_vocabulary():
    """Tokenizers of `generate` that do not reach the translation of the assistant's tokens."""

    def tokenizer(words):
        ids = {word: number for number, word in enumerate(words)}
        words = Tokenizer(WordLevel(ids, unk_token="w0"))
        words.pre_tokenizer = WhitespaceSplit()
        return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0")

    model, ids, images = make_model(), token_ids(1), pixels(1)
    torch.manual_seed(4)
    assistant = AutoModelForCausalLM.from_config(LlamaConfig(**{**SIZES, "vocab_size": VOCAB_SIZE + 4})).eval()
    words = [f"w{number}" for number in range(VOCAB_SIZE)]
    others = [words[0], "x1", "x2", "x3", "x4", *reversed(words[1:])]
    read = Counter()
    assistant.register_forward_pre_hook(lambda *_: read.update(["assistant"]))
    options = {"tokenizer": tokenizer(words), "assistant_tokenizer": tokenizer(others)}
    expected = generate(model, ids, pixel_values=images, do_sample=False)
    tokens = generate(model, ids, pixel_values=images, do_sample=False, assistant_model=assistant, **options)
    assert torch.equal(tokens, expected) and read["assistant"]


@pytest.mark.parametrize("visibility", ["all", "previous", "latest"])
def test_chunked_prefill_encodes_images_once(visibility):
    """Images encoded for each chunk, or markers of an earlier chunk forgotten."""
    model = make_model(image_token_id=MARKER, image_visibility=visibility)
    ids, images = token_ids(2, 10), pixels(2, 2)
    ids[:, 1] = ids[:, 6] = MARKER
    expected = greedy_by_hand(model, ids, pixel_values=images)
    calls = Calls(model)
    tokens = generate(model, ids, pixel_values=images, do_sample=False, prefill_chunk_size=4)
    assert torch.equal(tokens, expected) and calls.once()


@pytest.mark.parametrize("text_only", [False, True])
def test_chunks_after_cached_text(text_only):
    """Text that the cache holds, read once more: what transformers did before 5.23."""
    model, ids = make_model(), token_ids(2, 6)
    images, cache = ({}, DynamicCache()) if text_only else ({"pixel_values": pixels()}, None)
    first = generate(model, ids, **images, cache=cache, do_sample=False, return_dict_in_generate=True)
    chat = torch.cat([first.sequences, token_ids(2, 5, seed=8)], dim=1)
    options = {"cache": first[CACHE], "do_sample": False, "prefill_chunk_size": 3}
    if not has("prefill_chunk_size"):
        with pytest.raises(
            ValueError, match="`prefill_chunk_size` after cached text needs transformers 5.23.0 or newer"
        ):
            generate(model, chat, **options)
        return
    expected = generate(model, chat, **images, do_sample=False, use_cache=False)
    assert torch.equal(generate(model, chat, **options), expected)


@pytest.mark.parametrize("visibility", ["previous", "latest"])
@pytest.mark.parametrize("cache", [*CACHES, "uncached"])
@pytest.mark.parametrize("method", ["greedy", "beams", "return_sequences"])
def test_markers_of_the_prompt_hold_while_decoding(visibility, cache, method):
    """New tokens that see another image than the last token of the prompt; beams that mix the samples' markers."""
    model = make_model(image_token_id=MARKER, image_visibility=visibility)
    ids, images = token_ids(2, 8), pixels(2, 2)
    ids[:, 2] = ids[0, 5] = MARKER
    mask = torch.tensor([[True, True], [True, False]])
    inputs = {"pixel_values": images, "image_mask": mask}
    if method == "greedy":
        expected = greedy_by_hand(model, ids, **inputs)
    else:
        expected = generate(model, ids, use_cache=False, **inputs, **METHODS[method])
    options = CACHES.get(cache, {"use_cache": False})
    assert torch.equal(generate(model, ids, **inputs, **METHODS[method], **options), expected)


@pytest.mark.parametrize(
    "options", [{}, {"cache_implementation": "static"}, {"use_cache": False}, {"prefill_chunk_size": 3}]
)
def test_explicit_mask_holds_while_decoding(options):
    """A mask as long as the prompt that runs out at the first new token, or is read from its start again."""
    model, ids = make_model(vision=False), token_ids()
    states = torch.randn(2, 6, 32)
    mask = torch.rand(2, 7, 6) < 0.5
    mask[:, 0] = False
    mask[:, -1, :] = torch.tensor([True, False, True, False, False, True])
    expected = ids
    for _ in range(NEW):
        more = mask[:, -1:].expand(-1, expected.shape[1] - 7, -1)
        logits = model(
            expected, cross_attention_states=states, cross_attention_mask=torch.cat([mask, more], 1), use_cache=False
        ).logits
        expected = torch.cat([expected, logits[:, -1].argmax(-1, keepdim=True)], 1)
    inputs = {"cross_attention_states": states, "cross_attention_mask": mask}
    assert torch.equal(generate(model, ids, do_sample=False, **inputs, **options), expected)
    beams = {"do_sample": False, "num_beams": 3}
    uncached = generate(model, ids, use_cache=False, **inputs, **beams)
    assert torch.equal(generate(model, ids, **inputs, **beams, **options), uncached)


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2"])
@pytest.mark.parametrize("method", ["greedy", "beams", "return_sequences"])
def test_a_plain_cache_of_the_caller_gives_the_same_tokens(name, method):
    """A plain `EncoderDecoderCache` of the caller, whose cross half would follow the beams or the sliding window."""
    model, ids, images = make_model(name), token_ids(), pixels()
    expected = generate(model, ids, pixel_values=images, use_cache=False, **METHODS[method])
    caches = {
        "dynamic": EncoderDecoderCache(DynamicCache(), DynamicCache()),
        "configured": EncoderDecoderCache(
            DynamicCache(config=model.config.text_config), DynamicCache(config=model.config.text_config)
        ),
        "static": EncoderDecoderCache(StaticCache(config=model.config.text_config, max_cache_len=64), DynamicCache()),
        "both_static": EncoderDecoderCache(
            StaticCache(config=model.config.text_config, max_cache_len=64),
            StaticCache(config=model.config.text_config, max_cache_len=64),
        ),
    }
    for kind, cache in caches.items():
        tokens = generate(model, ids, pixel_values=images, cache=cache, **METHODS[method])
        assert torch.equal(tokens, expected), kind
        assert cache.cross_attention_cache.layers[0].keys.shape[-2] == 16


@pytest.mark.parametrize("cache", CACHES)
def test_three_generates_with_different_images(cache):
    """The images of an earlier call in a later one: a cache kept on the model, or one that reports
    "updated" for ever.
    """
    model = make_model()
    for seed in (1, 2, 3):
        ids, images = token_ids(2, 6 + seed), pixels(2, 1 + seed % 2, seed=seed)
        tokens = generate(model, ids, pixel_values=images, do_sample=False, **CACHES[cache])
        assert torch.equal(tokens, greedy_by_hand(model, ids, pixel_values=images))


def test_text_without_images_is_the_bases_answer():
    """A model that no longer answers plain questions like its base."""
    ids = token_ids()
    expected = generate(make_text(), ids, do_sample=False)
    model = make_model()
    for options in ({}, {"cache_implementation": "static"}, {"use_cache": False}):
        assert torch.equal(generate(model, ids, do_sample=False, **options), expected)
    mask = torch.tensor([[True], [False]])
    mixed = generate(model, ids, pixel_values=pixels(), image_mask=mask, do_sample=False)
    assert torch.equal(mixed[1], expected[1]) and not torch.equal(mixed[0], expected[0])


def test_markers_and_images_belong_together():
    """An answer about an image that was not there, or about another one than the text means."""
    model = make_model(image_token_id=MARKER, image_visibility="previous")
    ids = token_ids()
    ids[0, 1] = ids[0, 3] = ids[1, 2] = MARKER
    with pytest.raises(ValueError, match=r"token 3; \[2, 1\] a row\), but no images were given"):
        generate(model, ids)
    with pytest.raises(ValueError, match=r"\[2, 1\] image markers.*\[2, 2\] images"):
        generate(model, ids, pixel_values=pixels(2, 2))
    mask = torch.tensor([[True, True], [True, False]])
    assert generate(model, ids, pixel_values=pixels(2, 2), image_mask=mask).shape == (2, 7 + NEW)
    assert generate(model, token_ids(), do_sample=False).shape == (2, 7 + NEW)
    with pytest.raises(ValueError, match="no images were given"):
        generate(make_model(image_token_id=MARKER), ids)


def test_bad_input_is_named():
    """Errors from deep inside `generate`, or images dropped without a word."""
    model, ids = make_model(), token_ids()
    with pytest.raises(ValueError, match="not both"):
        generate(model, ids, pixel_values=pixels(), cross_attention_states=torch.zeros(2, 5, 32))
    with pytest.raises(ValueError, match="a cache for text and images, got a DynamicCache"):
        generate(model, ids, pixel_values=pixels(), cache=DynamicCache())
    with pytest.raises(ValueError, match="`image_mask` was given without images"):
        generate(model, ids, image_mask=torch.ones(2, 1, dtype=torch.bool))
    with pytest.raises(ValueError, match="no vision tower"):
        generate(make_model(vision=False), ids, pixel_values=pixels())
    with pytest.raises(ValueError, match="use_cache=False"):
        generate(model, ids, cache=model.encode_images(pixels()), use_cache=False)
    with pytest.raises(ValueError, match="pixel_value"):
        generate(model, ids, pixel_value=pixels())
    for options in ({}, {"use_cache": False}):
        with pytest.raises(ValueError, match="batch 2, got batch 3"):
            generate(model, ids, pixel_values=pixels(3), **options)
        with pytest.raises(ValueError, match="batch 2, got batch 1"):
            generate(model, ids, pixel_values=pixels(1), **options)
        with pytest.raises(ValueError, match="batch 2, got batch 1"):
            generate(model, ids, cross_attention_states=torch.zeros(1, 5, 32), **options)


def say(model, *args, **given):
    return model.generate(*args, max_new_tokens=4, do_sample=False, **given)


@torch.no_grad()
@pytest.mark.parametrize("cached", [True, False])
def test_images_alone_need_a_first_token(cached):
    """A caption that is asked for by the pictures alone: one row for two pictures, of a model that saw none."""
    model, images = make_model(), pixels(2, 1)
    options = {} if cached else {"use_cache": False}
    for given in (
        {"pixel_values": images},
        {"cross_attention_states": model.get_image_features(images).pooler_output},
        {"cache": model.encode_images(images), "pixel_values": images + 1},
        {"cache": model.encode_images(images), "cross_attention_mask": torch.ones(2, 16, dtype=torch.bool)},
        {"image_mask": torch.ones(2, 1, dtype=torch.bool)},
    ):
        with pytest.raises(ValueError, match="`input_ids` or `inputs_embeds` beside images, got neither"):
            say(model, **given, **options)
    assert not torch.equal(say(model, BOS, pixel_values=images, **options), say(model, BOS, **options))
    if cached:  # the images are in the cache, and are seen
        alone = say(model, cache=model.encode_images(images[:1]))
        assert torch.equal(alone, say(model, BOS[:1], pixel_values=images[:1]))


@torch.no_grad()
def test_the_code_of_a_custom_generate(tmp_path):
    """A folder with a way of decoding, which calls `generate` again: without the pictures."""
    folder = tmp_path / "custom_generate"
    folder.mkdir()
    (folder / "requirements.txt").touch()
    (folder / "generate.py").write_text(
        "def generate(model, *args, **kwargs):\n"
        "    ids = kwargs.pop('inputs', None)\n"
        "    if ids is None:\n"
        "        ids = args[0] if args else kwargs.pop('input_ids')\n"
        "    return model.generate(ids, **kwargs)\n"
    )
    model, ids, images = make_model(), token_ids(2, 5), pixels(2, 1)
    expected = say(model, ids, pixel_values=images)
    custom = {"custom_generate": str(tmp_path), "trust_remote_code": True}
    assert torch.equal(say(model, ids, pixel_values=images, **custom), expected)
    assert not torch.equal(say(model, ids), expected) and torch.equal(say(model, ids, **custom), say(model, ids))
    for given in ({}, {"pixel_values": images}):
        with pytest.raises(TypeError, match="no `image_inputs` in `generate`, got str"):
            say(model, ids, image_inputs="a", **given)


@torch.no_grad()
@pytest.mark.parametrize("way", ["keyword", "argument", "positional", "partial_argument", "of_the_model"])
def test_token_healing_beside_images_is_refused(way):
    """The last token of a prompt, asked for anew without the pictures, wherever `generate` finds the option."""
    model, ids, images = make_model(), torch.tensor([[4, 5, 6, 7, 5]]), pixels(1, 1)
    args, options = (), {"tokenizer": make_tokenizer()}
    if way in ("of_the_model", "partial_argument"):
        model.generation_config.token_healing = True
    if way == "keyword":
        options["token_healing"] = True
    elif way in ("argument", "partial_argument"):
        options["generation_config"] = GenerationConfig(token_healing=True if way == "argument" else None)
    elif way == "positional":
        args = (GenerationConfig(token_healing=True),)
    for given in ({"pixel_values": images}, {"cache": model.encode_images(images)}):
        with pytest.raises(ValueError, match="`token_healing=False` beside images, got True"):
            say(model, ids, *args, **given, **options)
    if way == "of_the_model":  # a keyword has the last word
        say(model, ids, pixel_values=images, token_healing=False)


@torch.no_grad()
def test_continuous_batching_is_refused_by_name():
    """The prompt without a new token after half a minute, with the error in a log: its steps carry no images."""
    model, ids, images = make_model(), token_ids(2, 5), pixels(2, 1)
    with pytest.raises(ValueError, match="`generate_batch`.* is not supported by XAttnForConditionalGeneration"):
        say(model, ids, pixel_values=images, cache_implementation="paged")
    for given in ({"pixel_values": images}, {}):
        with pytest.raises(ValueError, match="Call `generate` with a batch"):
            model.generate_batch(ids.tolist(), **given)
    for call in (model.init_continuous_batching, model.continuous_batching_context_manager().__enter__):
        with pytest.raises(ValueError, match="For text alone, call `generate_batch` of `model.model.text_model`"):
            call()
    expected = say(model, ids, pixel_values=images)  # transformers reads the option as a keyword alone
    assert torch.equal(say(model, ids, GenerationConfig(cache_implementation="paged"), pixel_values=images), expected)
