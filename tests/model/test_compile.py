"""Compiled decoding with a static cache: one graph, whatever images and prompts come."""

import pytest
import torch
from transformers.cache_utils import DynamicCache, EncoderDecoderCache, StaticCache

from helpers.models.compiled_models import GREEDY, SAMPLING, compiled, counting_backend, replaying_backend
from helpers.models.marked_models import state_space
from helpers.models.tiny_models import make_model, pixels, token_ids
from hf_xattn.utils.transformers_api import CACHE


NEW = 5
RULES = ("all", "previous", "latest", "latest_group")
slow = pytest.mark.slow


@pytest.fixture(autouse=True)
def _fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


# A static layer with a sliding window compiles twice in the base already: before and after the window is full.
GRAPHS = {"llama": 1, "gpt2": 1, "gemma3": 2}


@pytest.mark.parametrize(
    "name, method",
    [("llama", SAMPLING), ("gemma3", GREEDY), *(pytest.param(name, GREEDY, marks=slow) for name in ("llama", "gpt2"))],
    ids=str,
)
def test_one_graph_for_all_generates(name, method):
    """A decode step that breaks the graph, or compiles again for other images, another prompt or the next step."""
    model = make_model(name)
    backend, graphs = counting_backend()
    for index in range(3):
        ids, images = token_ids(2, 7 + index, seed=index), pixels(2, 2, seed=index)
        method = {**method, "max_length": 16, "pixel_values": images}
        torch.manual_seed(0)
        expected = model.generate(ids, use_cache=False, **method)
        torch.manual_seed(0)
        # The first call compiles; later ones must find everything as it was.
        with torch.compiler.set_stance("default" if index == 0 else "fail_on_recompile"):
            tokens = model.generate(ids, **method, **compiled(backend))
        assert torch.equal(tokens, expected), index
        assert len(graphs) == GRAPHS[name], f"{len(graphs)} graphs after call {index}"


class HostCache(StaticCache):
    """A static cache that says it is offloaded, and is not: CUDA's streams are not here."""

    def update(self, *args, **kwargs):
        self.offloading = False
        try:
            return super().update(*args, **kwargs)
        finally:
            self.offloading = True


def test_offloaded_caches_are_not_compiled(caplog):
    """A compiled step with an offloaded static cache, which ends the process on a GPU (test_gpu.py)."""
    model, ids, images = make_model(), token_ids(2, 7), pixels(2, 2)
    expected = model.generate(ids, pixel_values=images, max_new_tokens=NEW, **GREEDY)
    backend, graphs = counting_backend()
    options = compiled(backend)
    del options["cache_implementation"]
    cache = HostCache(model.config.get_text_config(decoder=True), max_cache_len=7 + NEW)
    cache.offloading = True
    both = EncoderDecoderCache(cache, DynamicCache())
    tokens = model.generate(ids, pixel_values=images, cache=both, max_new_tokens=NEW, **GREEDY, **options)
    assert torch.equal(tokens, expected) and not graphs
    assert "`compile_config` has no effect" in caplog.text


@pytest.mark.parametrize(
    ("visibility", "masked"),
    [
        ("all", True),
        ("previous", False),
        ("latest", True),
        ("latest_group", False),
        *(pytest.param(*each, marks=slow) for each in zip(RULES, (False, True, False, True))),
    ],
)
def test_graphs_that_write_over_their_results(visibility, masked):
    """What a step notes of the text, and the next step reads, in memory of a CUDA graph that runs again in between."""
    model = make_model(image_visibility=visibility, image_token_id=5)
    ids, images = token_ids(2, 9), {"pixel_values": pixels(2, 2)}
    ids[ids == 5] = 6
    ids[:, [1, 4]] = 5
    if masked:
        torch.manual_seed(1)
        images["cross_attention_mask"] = torch.rand(2, 9, 2 * 16) < 0.5
    length = {"max_new_tokens": 6, "min_new_tokens": 6, **GREEDY}
    expected = model.generate(ids, use_cache=False, **images, **length)
    assert torch.equal(model.generate(ids, **images, **length, **compiled(replaying_backend())), expected)


@torch.no_grad()
def test_chunks_of_a_prompt_outlive_their_graph():
    """A count of image markers that the next chunk of a prompt writes over: `generate` compiles these forwards too."""
    model = make_model(image_token_id=3, image_visibility="previous")
    ids = token_ids(2, 9)
    ids[ids == 3] = 4
    ids[:, [1, 5]] = 3
    options = {"pixel_values": pixels(2, 2), "max_new_tokens": 4, "min_new_tokens": 4, **GREEDY}
    expected = model.generate(ids, use_cache=False, **options)
    found = model.generate(ids, prefill_chunk_size=3, **options, **compiled(replaying_backend()))
    assert torch.equal(found, expected)


@torch.no_grad()
def test_returned_states_outlive_their_graph():
    """Attentions and hidden states that the next step writes over."""
    model = make_model()
    model.set_attn_implementation("eager")
    asked = {"output_attentions": True, "output_hidden_states": True, "return_dict_in_generate": True}
    options = {"pixel_values": pixels(2, 2), "max_new_tokens": 4, "min_new_tokens": 4, **GREEDY, **asked}
    expected = model.generate(token_ids(2, 7), cache_implementation="static", disable_compile=True, **options)
    found = model.generate(token_ids(2, 7), **options, **compiled(replaying_backend()))
    for name in ("cross_attentions", "attentions", "hidden_states"):
        assert len(found[name]) == 4
        for step, steps in zip(expected[name], found[name]):
            torch.testing.assert_close(steps, step, msg=name)


def test_other_numbers_of_images():
    """A number of image tokens that becomes a symbol of the graph, and is counted on with what torch 2.11 cannot."""
    model, (backend, graphs) = make_model(), counting_backend()
    for images in (2, 3, 4):
        options = {"pixel_values": pixels(2, images), "max_length": 12, **GREEDY}
        expected = model.generate(token_ids(2, 7), use_cache=False, **options)
        assert torch.equal(model.generate(token_ids(2, 7), **options, **compiled(backend)), expected)
    assert len(graphs) == 2  # for one number, and for all others


@torch.no_grad()
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_one_graph_with_shared_images(name):
    """Beams or questions that share an image row, whose number becomes a guard. (`generate` compiles
    no beam search.)
    """
    model = make_model(name)
    backend, graphs = counting_backend()
    step = torch.compile(model.forward, backend=backend, fullgraph=True)
    for index in range(3):
        ids, images = token_ids(6, 10, seed=index), pixels(2, seed=index)
        expected = model(ids, pixel_values=images.repeat_interleave(3, dim=0), use_cache=False).logits
        static = StaticCache(config=model.config.text_config, max_cache_len=16)
        cache = model.encode_images(pixel_values=images).fork(static)
        model(ids[:, : 4 + index], cache=cache)
        with torch.compiler.set_stance("default" if index == 0 else "fail_on_recompile"):
            for now in range(4 + index, 10):
                position_ids = torch.full((6, 1), now)
                logits = step(ids[:, now : now + 1], cache=cache, position_ids=position_ids).logits
                assert torch.allclose(logits[:, 0], expected[:, now], atol=1e-4)
        assert len(graphs) == 1, f"{len(graphs)} graphs after case {index}"


@torch.no_grad()
@pytest.mark.parametrize(
    "visibility", ["previous", *(pytest.param(rule, marks=slow) for rule in RULES if rule != "previous")]
)
def test_one_graph_with_masks_and_markers(visibility):
    """Padding images or image markers that become a branch of the graph."""
    model = make_model(image_token_id=3, image_visibility=visibility)
    backend, graphs = counting_backend()
    for index in range(3):
        ids = token_ids(2, 8, seed=index)
        ids[:, 1] = ids[0, 3 + index] = 3
        inputs = {
            "pixel_values": pixels(2, 2, seed=index),
            "image_mask": torch.tensor([[True, True], [True, False]]),
        }
        expected = model.generate(ids, max_new_tokens=NEW, use_cache=False, do_sample=False, **inputs)
        with torch.compiler.set_stance("default" if index == 0 else "fail_on_recompile"):
            tokens = model.generate(ids, max_new_tokens=NEW, do_sample=False, **inputs, **compiled(backend))
        assert torch.equal(tokens, expected)
        assert len(graphs) == 1


@pytest.mark.parametrize(
    "name", ["bamba", *(pytest.param(name, marks=slow) for name in ("mamba2", "qwen3_next", "jamba", "mamba"))]
)
def test_one_graph_for_stateful_decoders(name):
    """A graph for every token beside a decoder that keeps states: a growing mask, or a length that is a Python
    integer.
    """
    model, images = state_space(name), pixels()
    backend, graphs = counting_backend()
    for index in range(2):
        ids = token_ids(2, 6 + index, seed=index)
        expected = model.generate(ids, pixel_values=images, max_length=14, use_cache=False, do_sample=False)
        with torch.compiler.set_stance("default" if index == 0 else "fail_on_recompile"):
            tokens = model.generate(ids, pixel_values=images, max_length=14, do_sample=False, **compiled(backend))
        assert torch.equal(tokens, expected)
        assert len(graphs) == 1, f"{len(graphs)} graphs, the bare decoder has 1"


@torch.no_grad()
def test_encoded_images_do_not_compile_again():
    """Encoded images whose keys and values count as new inputs for each question."""
    model, (backend, graphs) = make_model(), counting_backend()
    encoded = model.encode_images(pixel_values=pixels(1))
    for index in range(3):
        ids = token_ids(2, 6, seed=index)
        expected = model.generate(ids, cache=encoded, max_new_tokens=NEW, do_sample=False)
        with torch.compiler.set_stance("default" if index == 0 else "fail_on_recompile"):
            tokens = model.generate(ids, cache=encoded, max_new_tokens=NEW, do_sample=False, **compiled(backend))
        assert torch.equal(tokens, expected) and len(graphs) == 1


@torch.no_grad()
def test_a_forward_with_images_is_one_graph():
    """A forward with images that breaks the graph: training and prefill compile too."""
    model, ids, images = make_model(), token_ids(), pixels()
    backend, graphs = counting_backend()
    forward = torch.compile(model.forward, backend=backend, fullgraph=True)
    expected = model(ids, pixel_values=images, use_cache=False).logits
    assert torch.allclose(forward(ids, pixel_values=images, use_cache=False).logits, expected, atol=1e-4)
    with torch.compiler.set_stance("fail_on_recompile"):
        other = pixels(seed=50)
        logits = forward(ids, pixel_values=other, use_cache=False).logits
    assert torch.allclose(logits, model(ids, pixel_values=other, use_cache=False).logits, atol=1e-4)
    assert len(graphs) == 1
    cache = EncoderDecoderCache(
        StaticCache(config=model.config.text_config, max_cache_len=32),
        StaticCache(config=model.config.text_config, max_cache_len=32),
    )
    assert model(ids, pixel_values=images, cache=cache)[CACHE] is cache


def test_a_compiled_training_step_gives_the_same_gradients():
    """Gradients that differ, or vanish, under compilation (backward through the blocks and the connector)."""
    gradients = []
    for compile_it in (False, True):
        model, ids = make_model().train(), token_ids()
        forward = torch.compile(model.forward, backend="aot_eager", fullgraph=True) if compile_it else model.forward
        forward(ids, pixel_values=pixels(), labels=ids, use_cache=False).loss.backward()
        gradients.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    assert gradients[0].keys() == gradients[1].keys()
    for name, expected in gradients[0].items():
        assert torch.allclose(gradients[1][name], expected, atol=1e-5), name


@torch.no_grad()
def test_compiled_prefill_makes_its_cache():
    """A forward that breaks the graph where it makes a cache, and a cache of it that the next forward cannot use."""
    model, ids, images = make_model(image_token_id=3, image_visibility="previous"), token_ids(), pixels()
    ids[:, 1] = 3
    backend, graphs = counting_backend()
    forward = torch.compile(model.forward, backend=backend, fullgraph=True)
    outputs, expected = forward(ids, pixel_values=images, use_cache=True), model(ids, pixel_values=images)
    assert torch.allclose(outputs.logits, expected.logits, atol=1e-4) and len(graphs) == 1
    cache, wanted = outputs[CACHE], expected[CACHE]
    assert (cache.text_rows, cache.get_seq_length()) == (2, 7)
    cache.crop(-2)
    wanted.crop(-2)
    assert torch.equal(cache.progress.counts, wanted.progress.counts)
    again = model(ids[:, :2], cache=wanted).logits
    assert torch.allclose(model(ids[:, :2], cache=cache).logits, again, atol=1e-4)


@torch.no_grad()
def test_compiled_attention_weights_are_the_same():
    """Weights of blocks that break the graph."""
    model, ids, images = make_model(), token_ids(), pixels()
    model.set_attn_implementation("eager")  # under sdpa the text model warns, and logging breaks the graph
    expected = model(ids, pixel_values=images, use_cache=False, output_attentions=True).cross_attentions
    forward = torch.compile(model.forward, backend=counting_backend()[0], fullgraph=True)
    outputs = forward(ids, pixel_values=images, use_cache=False, output_attentions=True)
    for weights, wanted in zip(outputs.cross_attentions, expected):
        assert torch.allclose(weights, wanted, atol=1e-5)
