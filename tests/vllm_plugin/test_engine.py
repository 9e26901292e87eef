"""vLLM gives the tokens of `generate`, in float32, for every kind of request in every kind of batch."""

import json
import subprocess
import sys

import pytest


pytest.importorskip("vllm.config", reason="vLLM is not installed (see examples/vllm)")

from helpers.checkout import TESTS
from helpers.processes.engine_models import RESAMPLER, TEXTS, save_adapter, save_with_base


# The largest difference of log-probabilities, in float32. Gemma 2's soft cap is approximate in vLLM's CPU kernel.
ROUNDING, GEMMA_2, BFLOAT16 = 1e-4, 1e-2, 0.1


def run(**given):
    words = [sys.executable, "-m", "helpers.processes.engine_run", json.dumps(given)]
    made = subprocess.run(words, cwd=TESTS, capture_output=True, text=True, timeout=900)
    line = next((line for line in made.stdout.splitlines() if line.startswith("RESULT ")), None)
    assert line is not None, made.stdout[-2000:] + made.stderr[-4000:]
    return json.loads(line.removeprefix("RESULT "))


def check(result, rounding=ROUNDING):
    for row in result["rows"]:
        assert row["got"] == row["expected"]
        assert row["off"] < rounding


@pytest.mark.parametrize("mode", ["together", "alone", "staggered"])
def test_rows_of_a_batch_see_their_own_images(tmp_path, mode):
    """Rows that see another row's images, or a state that is lost when requests join and leave."""
    check(run(folder=str(tmp_path), model={"image_visibility": "previous", "block": {"qk_norm": True}}, mode=mode))


def test_pictures_with_one_name(tmp_path):
    """A client that gives different pictures the same identifier must not get an answer about another's picture."""
    check(run(folder=str(tmp_path), model={"image_visibility": "previous"}, mode="alone", one_name=True))


def test_text_without_an_image_is_answered_as_by_the_base(tmp_path):
    """Text without an image that is not what the base answers on the engine."""
    texts = [[text, []] for text in ("what is it ?", "a red circle. user system", "a b c d e")]
    whole, base = str(tmp_path / "whole"), str(tmp_path / "base")
    save_with_base(whole, base, image_visibility="previous")
    served, bare = (run(folder=whole, requests=texts), run(folder=base, bare=True, requests=texts))
    check(served)
    assert [row["all"] for row in served["rows"]] == [row["all"] for row in bare["rows"]]


def test_half_precision_gives_the_tokens_up_to_near_ties(tmp_path):
    """Gates and norms that are not float32. Where `generate` nearly takes another token, the engine may take it.

    Nearly: the two best are closer than the base alone moves them between transformers and vLLM. `-s` shows the share
    of tokens that come before the first such place.
    """
    texts = [[text, []] for text in ("what is it ?", "a red circle. user system", "a b c d e", "so a blue square.")]
    whole, base, engine = str(tmp_path / "whole"), str(tmp_path / "base"), {"dtype": "bfloat16"}
    save_with_base(whole, base, image_visibility="previous", block={"qk_norm": True})
    bare = run(folder=base, bare=True, requests=texts, engine=engine, new_tokens=30, margin=BFLOAT16)
    margin = max(row["gap_off"] for row in bare["rows"])
    result = run(folder=whole, engine=engine, margin=margin)
    check(result, 2 * BFLOAT16)
    share = sum(len(row["expected"]) for row in result["rows"]) / sum(len(row["all"]) for row in result["rows"])
    print(f"The base moves the two best by up to {margin:.3f}; share of tokens {share:.2f}")
    # 0.37 on one machine, in five runs, and 0.27 on another in one. Why was not found out.
    assert share > 0.1


def test_compiled_code_hides_images_from_text_alone(tmp_path):
    """What a token sees is frozen into compiled code: text without an image would see one."""
    model = {"image_visibility": "latest", "block": {"quiet_softmax": True}}
    check(run(folder=str(tmp_path), model=model, mode="staggered", engine={"enforce_eager": False}))


def test_a_preempted_request_gets_its_own_images_again(tmp_path):
    """A request that starts again, in one step with a new one, gets the images of the other."""
    engine = {"num_gpu_blocks_override": 20, "block_size": 32, "max_model_len": 128, "max_num_batched_tokens": 160}
    model = {"image_visibility": "previous"}
    result = run(folder=str(tmp_path), model=model, repeat=3, new_tokens=60, engine=engine)
    assert result["preempted"] and result["reordered"]
    check(result)


OPTIONS = {
    "all, one tanh gate a channel": {"block": {"gate_granularity": "channel", "qk_norm": True}},
    "previous, quiet softmax, a gate for each token": {
        "image_visibility": "previous",
        "block": {"gate": "token", "quiet_softmax": True, "qk_norm": True},
    },
    "latest, layer norms, biases, plain MLP, no GQA": {
        "image_visibility": "latest",
        "block": {
            "norm_type": "layernorm",
            "attention_bias": True,
            "mlp_bias": True,
            "mlp_type": "plain",
            "hidden_act": "gelu",
            "num_key_value_heads": 4,
        },
    },
    "latest_group, a resampler that counts images, no gate, several blocks at a place and after the last layer": {
        **RESAMPLER,
        "image_visibility": "latest_group",
        "block": {"gate": "none", "context_size": 24, "quiet_softmax": True},
        "cross_attention_layers": [0, 2, 2, 4],
    },
    "latest_group, one head, no MLP": {
        "image_visibility": "latest_group",
        "connector_type": "linear",
        "vision_feature_select_strategy": "default",
        "block": {"num_attention_heads": 1, "num_key_value_heads": 1, "context_size": 40, "mlp_type": "none"},
    },
    "added tokens, no BOS token, code in the folder": {
        "image_visibility": "previous",
        "vocab_size": 355,
        "additional_vocab_size": 10,
        "bos": False,
        "with_code": True,
    },
    "added tokens that are generated, tied": {
        "vocab_size": 355,
        "additional_vocab_size": 10,
        "additional_vocab_in_head": True,
        "tied": True,
    },
}


@pytest.mark.parametrize("name", OPTIONS)
def test_each_option_of_blocks_gives_the_tokens_of_generate(tmp_path, name):
    """An option of blocks or connector that the engine leaves out."""
    check(run(folder=str(tmp_path), model=OPTIONS[name]))


@pytest.mark.parametrize(
    "text", [each if each == "gpt2" else pytest.param(each, marks=pytest.mark.slow) for each in TEXTS]
)
def test_each_served_decoder_gives_the_tokens_of_generate(tmp_path, text):
    """A decoder whose layers get the sum of hidden states in another way."""
    model = {"text": text, "image_visibility": "previous", "cross_attention_layers": [0, 2, 4]}
    capped = text == "gemma2"
    result = run(folder=str(tmp_path), model=model, margin=GEMMA_2 if capped else 0.0)
    check(result, GEMMA_2 if capped else ROUNDING)


@pytest.mark.parametrize("text", ["llama", pytest.param("mixtral", marks=pytest.mark.slow)])
def test_added_weights_load_on_their_bases(tmp_path, text):
    """Weights of the bases under names that the engine does not know: experts are one tensor in transformers."""
    folder = save_adapter(tmp_path, text=text)
    assert not list((tmp_path / "added").glob("model*.safetensors"))
    check(run(folder=folder))


@pytest.mark.parametrize("kind", ["mllama", "exported", "imported"])
def test_llama_3_2_vision(tmp_path, kind):
    """Tiles of padding that text sees, or text in front of its image, to which Mllama adds something."""
    check(run(folder=str(tmp_path / "model"), tiled=kind))


@pytest.mark.slow
def test_two_ranks_give_the_tokens_of_generate(tmp_path):
    """A rank with the keys of another's heads."""
    model = {"image_visibility": "previous", "block": {"qk_norm": True, "quiet_softmax": True}}
    check(run(folder=str(tmp_path), model=model, engine={"tensor_parallel_size": 2}))
