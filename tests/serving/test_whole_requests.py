"""What transformers' server reads or obeys only in part: `hf-xattn serve` obeys it, or refuses it with a sentence."""

import json
from concurrent.futures import ThreadPoolExecutor

import pytest
from chat_models import drawing


pytest.importorskip("openai")
pytest.importorskip("fastapi")
from huggingface_hub.utils import httpx
from model_server import TEXT, Served, asked

from hf_xattn.serving.served_requests import AnswerLimits


CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
USER = {"role": "user", "content": TEXT}
CALL = {"id": "1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
SCHEMA = {"format": {"type": "json_schema", "name": "a", "schema": {"type": "object"}}}


@pytest.fixture(scope="module")
def served(chat_folder):
    served = Served(chat_folder, "whole", answers=AnswerLimits(max_new_tokens=40))
    yield served
    served.stop()


def post(served, path, **fields):
    words = {CHAT: {"messages": [USER]}, COMPLETIONS: {"prompt": TEXT}, RESPONSES: {"input": TEXT}}[path]
    length = "max_output_tokens" if path == RESPONSES else "max_tokens"
    return httpx.post(served.address + path, json={**words, length: 3, **fields}, timeout=60)


def done(served, path, **fields):
    answer = post(served, path, **fields)
    assert answer.status_code == 200, answer.text
    return answer.json()


def read(served, *messages):
    """The number of tokens of a prompt: what of the messages has reached it."""
    return done(served, CHAT, messages=list(messages))["usage"]["prompt_tokens"]


def config(**fields):
    return {"generation_config": json.dumps(fields)}


IGNORED = {
    CHAT: {
        "tool_choice": ["required", "none"],
        "top_logprobs": [3],
        "reasoning_effort": ["high"],
        "function_call": ["auto"],
        "parallel_tool_calls": [False],
        "tools": [[TOOL]],
    },
    COMPLETIONS: {"logit_bias": [{"5": 100}], "logprobs": [0, 3]},
    RESPONSES: {
        "previous_response_id": ["a"],
        "conversation": ["a"],
        "prompt": [{"id": "a"}],
        "image": ["a.png"],
        "text": [SCHEMA],
        "tool_choice": ["required"],
        "reasoning": [{"effort": "high"}],
        "truncation": ["auto"],
    },
}
NOTHING = {
    CHAT: {"tool_choice": "auto", "parallel_tool_calls": True, "tools": [], "top_logprobs": None, "user": "a"},
    COMPLETIONS: {"logit_bias": {}, "logprobs": None},
    RESPONSES: {"text": {"format": {"type": "text"}}, "truncation": "disabled", "include": [], "store": False},
}


@pytest.mark.parametrize("path, field", [(path, field) for path, fields in IGNORED.items() for field in fields])
def test_fields_without_effect(served, path, field):
    """An answer without its history, in another form, or of another kind than was asked for."""
    for value in IGNORED[path][field]:
        answer = post(served, path, **{field: value})
        assert answer.status_code == 400 and f"`{field}`" in answer.json()["error"]["message"], answer.text


@pytest.mark.parametrize("path", NOTHING)
def test_fields_that_ask_for_nothing(served, path):
    """A client that writes the defaults out, and is refused."""
    for field, value in NOTHING[path].items():
        done(served, path, **{field: value})


def test_what_stands_beside_calls_of_tools(served):
    """An earlier answer, a picture or a question that is lost because its message has the key `tool_calls`."""
    said = {"role": "assistant", "content": "a red circle"}
    whole = read(served, USER, said, USER)
    assert whole > read(served, USER, {**said, "content": "a"}, USER)
    for calls in ([], None, [CALL]):
        assert read(served, USER, {**said, "tool_calls": calls}, USER) == whole
    seeing = asked(TEXT, drawing(3))
    answers = [served.text([{**seeing, **more}]) for more in ({}, {"tool_calls": []})]
    assert answers[0] == answers[1] != served.text([asked(TEXT, drawing(4))])
    call = {"type": "function_call", "call_id": "1", "name": "look", "arguments": "{}"}
    lengths = [
        done(served, RESPONSES, input=[USER, {**said, "content": words}, call])["usage"]["input_tokens"]
        for words in ("a", "a red circle")
    ]
    assert lengths[1] == lengths[0] + 2


def test_instructions_beside_a_system_message(served):
    """A system message that the instructions replace, with its words or its picture."""

    def tokens(text, **fields):
        system = [] if text is None else [{"role": "system", "content": text}]
        return done(served, RESPONSES, input=[*system, USER], **fields)["usage"]["input_tokens"]

    parts = [{"type": "input_text", "text": "a red dog"}]
    for text in ("a red dog", parts):
        assert tokens(text, instructions="what is it") == tokens("what is it a red dog")
    assert tokens(None, instructions="what is it") == tokens("what is it") > tokens(None)


def test_what_is_drawn(served):
    """A temperature without an effect on a model that takes the likeliest token by itself; one that is obeyed where the
    client wants the likeliest.
    """
    greedy = served.text([USER], max_tokens=20)
    for fields in ({"temperature": 2.0}, {"top_p": 1.0}, config(temperature=2.0, top_k=50), config(top_p=1.0)):
        said = {
            served.text([USER], **({"temperature": None, "max_tokens": 20} | self_seeded(fields, seed)))
            for seed in (1, 2)
        }
        assert len(said - {greedy}) == 2, fields
    for fields in (config(do_sample=False, temperature=2.0), {"temperature": 0.0, "top_p": 1.0}, config(temperature=0)):
        assert served.text([USER], **({"temperature": None, "max_tokens": 20} | self_seeded(fields, 1))) == greedy
    refused = post(served, CHAT, temperature=2.0, **config(do_sample=False))
    assert refused.status_code == 400 and "`temperature`" in refused.json()["error"]["message"]


def self_seeded(fields, seed):
    """Fields that OpenAI's client does not know go into its `extra_body`."""
    own = {name: value for name, value in fields.items() if name == "generation_config"}
    return {**{name: value for name, value in fields.items() if name not in own}, "seed": seed, "extra_body": own}


def test_seeds_of_requests_that_wait(served):
    """An answer that depends on the requests in front of it."""

    def ask(_):
        fields = {"seed": 7, "temperature": 1.5, "max_tokens": 20}
        return done(served, CHAT, **fields)["choices"][0]["message"]["content"]

    with ThreadPoolExecutor(4) as clients:
        assert len(set(clients.map(ask, range(8)))) == 1


def test_the_length_that_the_model_has_anyway(served):
    """A length that is forgotten because it is the model's own."""
    own = served.model.generation_config
    own.max_new_tokens = 4
    try:
        for length in (4, 5):
            body = {"messages": [USER], **config(max_new_tokens=length)}
            usage = httpx.post(served.address + CHAT, json=body, timeout=60).json()["usage"]
            assert usage["completion_tokens"] == length
    finally:
        own.max_new_tokens = None


def test_the_end_of_the_context(served):
    """A prompt that is longer than the model can read, and an answer that goes on behind its end."""
    longest = served.model.config.get_text_config().max_position_embeddings
    short = read(served, {"role": "user", "content": "a"})
    for stream in (False, True):
        long = {"role": "user", "content": "a " * longest}
        refused = post(served, CHAT, messages=[long], stream=stream)
        assert refused.status_code == 400 and f"fewer than {longest} tokens" in refused.json()["error"]["message"]
    nearly = {"role": "user", "content": "a " * (longest - short - 1)}
    answer = done(served, CHAT, messages=[nearly], max_tokens=40)
    assert answer["usage"]["total_tokens"] == longest and answer["choices"][0]["finish_reason"] == "length"
