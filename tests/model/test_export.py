"""`torch.export`, and transformers' exporters: programs that give what the model gives, step after step."""

import copy
import pickle

import pytest
import torch
from torch.utils import _pytree as pytree
from transformers.cache_utils import DynamicCache

from helpers.models.exported_models import around, decode_both_ways, export, needs_exporters, small
from helpers.models.tiny_decoders import make_tiny
from helpers.models.tiny_models import make_model, pixels, randomize, token_ids
from helpers.processes import warm_processes
from hf_xattn import XAttnForConditionalGeneration
from hf_xattn.cache.exporting import register_caches
from hf_xattn.cache.xattn_cache import XAttnCache
from hf_xattn.layers.context import CrossAttentionContext, Recorder
from hf_xattn.utils.transformers_api import CACHE, is_before


MARKER = 3
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")


def of_type(model_type):
    text = make_tiny(model_type)
    return randomize(XAttnForConditionalGeneration(around(text), text_model=text).eval())


@needs_exporters
@torch.no_grad()
@pytest.mark.parametrize(
    "name, rule, mask",
    [
        pytest.param("llama", "all", None, marks=pytest.mark.slow),
        pytest.param("llama", "previous", None, marks=pytest.mark.slow),
        pytest.param("llama", "all", "images", marks=pytest.mark.slow),
        ("llama", "latest", "text"),
        ("gpt2", "all", None),
    ],
)
def test_decode_steps_of_a_program(name, rule, mask):
    """`Recorder` is no pytree node; a program that serves one length of the text, or one set of weights, because a
    cache holds what no graph reads; logits that differ from the model's.
    """
    options = {"image_token_id": MARKER, "image_visibility": rule} if rule != "all" else {}
    model, ids = small(name, **options), token_ids(2, 9)
    if rule != "all":
        ids[:, 1] = ids[:, 4] = MARKER
    inputs = {"input_ids": ids, "pixel_values": pixels(2, 2)}
    if mask == "images":
        inputs["image_mask"] = torch.tensor([[True, True], [True, False]])
    elif mask == "text":
        inputs["cross_attention_mask"] = torch.rand(2, 9, 32) < 0.5
    decode = export(model, inputs, only="decode")["decode"]
    cache = decode_both_ways(model, decode, model(**inputs), 3)
    assert type(cache) is XAttnCache and cache.text_rows == 2 and cache.get_seq_length() == 12
    if mask is None:  # images that were encoded before, other ones than those of the export
        images = model.encode_images(pixels(2, 2, seed=9)).fork(DynamicCache(config=model.config.text_config))
        decode_both_ways(model, decode, model(ids, cache=images), 2)

    # The model goes on where the program ended.
    more = model(ids[:, :2], cache=cache)
    assert more.logits.shape[1] == 2 and cache.get_seq_length() == 14
    if rule == "all" and mask != "text":
        cache.crop(-2)
        assert cache.get_seq_length() == 12
    else:
        with pytest.raises(ValueError, match="cannot be cropped.*exported program"):
            cache.crop(-2)
        assert cache.get_seq_length() == 14


@needs_exporters
@torch.no_grad()
def test_prefill_of_a_program():
    """A decoder that is exported without its images, or without a head to get logits from."""
    model, inputs = small(), {"input_ids": token_ids(2, 9), "pixel_values": pixels(2, 2)}
    from transformers.exporters.utils import decompose_for_generation

    captured = decompose_for_generation(model, inputs)["language_model"][1]
    assert isinstance(captured["cross_attention_context"], CrossAttentionContext)
    runners = export(model, inputs, dynamic=False)
    assert set(runners) == {"language_model", "lm_head", "decode"}
    given = {name: value for name, value in captured.items() if name in runners["language_model"].metadata.kwargs}
    hidden = runners["language_model"](**given).last_hidden_state
    logits = runners["lm_head"](input=hidden)
    assert torch.equal(logits, model(**inputs).logits)
    assert not torch.equal(logits, model(inputs["input_ids"]).logits)


@needs_exporters
@torch.no_grad()
@pytest.mark.parametrize("model_type", ["bloom", "mamba2"])
def test_decoders_that_images_reach_beside_their_arguments(model_type):
    """A decoder that is exported alone, without images and without a word."""
    model, inputs = of_type(model_type), {"input_ids": token_ids(2, 9), "pixel_values": pixels(2, 2)}
    from transformers.exporters.utils import decompose_for_generation

    runners = export(model, inputs, dynamic=False)
    assert set(runners) == {"prefill", "decode"}
    expected = model(**inputs, use_cache=True)
    for name, (_, captured) in decompose_for_generation(model, inputs).items():
        runner = runners[name]
        given = {key: value for key, value in captured.items() if key in runner.metadata.kwargs}
        mine = model(**copy.deepcopy(given)).logits
        assert torch.equal(runner(**given).logits, mine)
        if name == "prefill":
            assert torch.equal(mine, expected.logits)


@needs_exporters
@torch.no_grad()
@pytest.mark.parametrize("use_cache", [True, False])
def test_static_cache_and_no_cache(use_cache):
    """Encoded images that cannot be an argument of a program, where there is no cache to hold them; a static cache
    that cannot be one.
    """
    model, inputs = small(), {"input_ids": token_ids(2, 9), "pixel_values": pixels(2, 2)}
    generation_config = copy.deepcopy(model.generation_config)
    generation_config.use_cache = use_cache
    if use_cache:
        generation_config.cache_implementation, generation_config.max_cache_len = "static", 32
    runners = export(model, inputs, dynamic=False, generation_config=generation_config)
    from transformers.exporters.utils import decompose_for_generation

    captured = decompose_for_generation(model, inputs, generation_config=generation_config)["decode"][1]
    assert ("image_inputs" in captured) != use_cache
    runner = runners["decode"]
    given = {key: value for key, value in captured.items() if key in runner.metadata.kwargs}
    expected = model(**copy.deepcopy(given)).logits
    assert torch.allclose(runner(**given).logits, expected, atol=1e-5)


@needs_exporters
def test_saved_program_in_another_process(tmp_path):
    """A program that only the process which exported it can load."""
    model, inputs = small(), {"input_ids": token_ids(2, 9), "pixel_values": pixels(2, 2)}
    with torch.no_grad():
        first = model(**inputs, use_cache=True)
        token = first.logits[:, -1:].argmax(-1)
        expected = model(token, cache=copy.deepcopy(first[CACHE])).logits
    from transformers.exporters.exporter_dynamo import DynamoConfig, DynamoExporter

    DynamoExporter().export_for_generation(model, inputs, DynamoConfig()).save_pretrained(tmp_path / "programs")
    torch.save({"cache": first[CACHE], "token": token, "expected": expected}, tmp_path / "state.pt")
    trust = {} if is_before("5.24.0") else {"trust_remote_code": True}  # programs are pickled
    script = f"""
import torch
from hf_xattn.cache.exporting import register_caches
from transformers.exporters.base import ExportedModel

register_caches()
step = ExportedModel.from_pretrained({str(tmp_path / "programs")!r}, **{trust}).runners["decode"]
state = torch.load({str(tmp_path / "state.pt")!r}, weights_only=False)
outputs = step(input_ids=state["token"], position_ids=torch.full((2, 1), 9), {CACHE}=state["cache"])
assert torch.equal(outputs.logits, state["expected"])
"""
    done = warm_processes.run(["-c", script])
    assert done.returncode == 0, done.stderr


@torch.no_grad()
@pytest.mark.parametrize("strict", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("images", ["pixel_values", "cross_attention_states"])
def test_plain_export_of_a_forward(strict, images):
    """A forward that `torch.export` cannot trace, weights of blocks included."""
    model = make_model()
    inputs = {"input_ids": token_ids(), "use_cache": False, "output_attentions": True}
    inputs[images] = pixels(2, 2) if images == "pixel_values" else torch.randn(2, 6, 32)
    expected = model(**inputs)
    outputs = torch.export.export(model, (), inputs, strict=strict).module()(**inputs)
    assert torch.equal(outputs.logits, expected.logits)
    assert all(torch.equal(got, wanted) for got, wanted in zip(outputs.cross_attentions, expected.cross_attentions))


@needs_exporters
@torch.no_grad()
def test_plain_export_with_caches():
    """A cache that plain `torch.export` takes for an unknown object, as an argument or as an output."""
    model, ids, images = make_model(), token_ids(), pixels(2, 2)
    register_caches()
    from transformers.exporters.exporter_dynamo import register_pytree_node

    register_pytree_node(DynamicCache)
    inputs = {"input_ids": ids, "pixel_values": images, "use_cache": True}
    outputs = torch.export.export(model, (), inputs, strict=False).module()(**inputs)
    expected = model(**inputs)
    assert torch.equal(outputs.logits, expected.logits) and type(outputs[CACHE]) is XAttnCache
    step = {"input_ids": ids[:, :1], "cache": outputs[CACHE]}
    program = torch.export.export(model, (), copy.deepcopy(step), strict=False).module()
    logits = model(ids[:, :1], cache=expected[CACHE]).logits
    assert torch.equal(program(**step).logits, logits)


def test_there_is_one_recorder():
    """A context that is rebuilt on its way (FSDP casts arguments that way) and whose blocks report to a copy."""
    context = CrossAttentionContext(mask=torch.zeros(1, 2, 3), recorder=Recorder())
    again = pytree.tree_map(lambda leaf: leaf.half(), context)
    assert again is not context and again.recorder is context.recorder
    assert again.mask.dtype == torch.float16
    other = CrossAttentionContext(mask=torch.zeros(1, 2, 3), recorder=Recorder())
    assert pytree.tree_structure(context) == pytree.tree_structure(other)
    spec = pytree.treespec_loads(pytree.treespec_dumps(pytree.tree_structure(context)))
    assert spec == pytree.tree_structure(context)


@torch.no_grad()
@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda cache: pickle.loads(pickle.dumps(cache))])
def test_copies_of_a_cache_remember(copied):
    """What exported programs do not take, lost where a cache is copied or written as well."""
    model, ids = make_model(image_token_id=MARKER, image_visibility="previous"), token_ids(2, 9)
    ids[:, 1] = ids[:, 4] = MARKER
    cache = model.encode_images(pixels(2, 2)).fork(DynamicCache())
    model(ids, cache=cache)
    again = copied(cache)
    assert again.text_rows == 2 and again.cross_attention_cache.made_by == model.image_identity()
    again.crop(-4)
    expected = model(ids[:, :5], pixel_values=pixels(2, 2), use_cache=True)[CACHE]
    assert torch.equal(again.progress.counts, expected.progress.counts)
    assert again.progress.history.length == 5
