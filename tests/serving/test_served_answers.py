"""What a client of `hf-xattn serve` may ask of an answer: bounds of the operator, sentences for what is refused, stop
strings.
"""

import asyncio
import itertools
import json
import random

import pytest
import torch
from chat_models import NEW_TOKENS, drawing
from transformers import GenerationConfig

from hf_xattn.commands.main import main


pytest.importorskip("openai")
pytest.importorskip("fastapi")
from fastapi import HTTPException
from huggingface_hub.utils import httpx
from model_server import TEXT, Served, asked

from hf_xattn.serving import served_requests
from hf_xattn.serving.request_pictures import RequestBounds
from hf_xattn.serving.served_requests import AnswerLimits, check_config
from hf_xattn.serving.stop_strings import UntilStop, place_of_stop


CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
USER = {"role": "user", "content": TEXT}
CALL = {"id": "1", "type": "function", "function": {"name": "look", "arguments": "{}"}}


@pytest.fixture(scope="module")
def served(chat_folder):
    served = Served(chat_folder, "bounded", answers=AnswerLimits(max_new_tokens=40, max_beams=3))
    yield served
    served.stop()


def body_of(path, **fields):
    length = "max_output_tokens" if path == RESPONSES else "max_tokens"
    words = {CHAT: {"messages": [USER]}, COMPLETIONS: {"prompt": TEXT}, RESPONSES: {"input": TEXT}}[path]
    return {**words, length: 3, **fields}


def post(served, path, body):
    return httpx.post(served.address + path, json=body, timeout=60)


def check_refused(answer, *words):
    """A sentence in OpenAI's form, not an error of Python."""
    assert answer.status_code == 400, (answer.status_code, answer.text)
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error" and 20 < len(error["message"]) < 600
    assert not error["message"].startswith(("TypeError", "KeyError", "AttributeError", "IndexError", "UndefinedError"))
    assert all(word in error["message"] for word in words), error["message"]


def config(**fields):
    return {"generation_config": json.dumps(fields)}


WRONG_CONFIGS = {
    "num_beams": [4, 100_000, 0, -1, 2.5, True, "2", [2]],
    "max_new_tokens": [41, 10**9, 10**30, 0, -1, 1.5, "9", False],
    "min_new_tokens": [41, -1],
    "do_sample": [1, "yes"],
    "early_stopping": ["always", 3],
    "length_penalty": [11, -11, "a"],
    "temperature": [2.5, -1, "hot", True, 10**400],
    "top_k": [-1, 2.5, 10**9],
    "top_p": [5, -0.1],
    "min_p": [5],
    "typical_p": [0, 2],
    "epsilon_cutoff": [-1],
    "eta_cutoff": [2],
    "repetition_penalty": [0, -1, 100],
    "no_repeat_ngram_size": [-1, 101, 1.5],
    "stop_strings": ["", [""], [3], 3, ["a"] * 1000, "a" * 1000, {}],
}


@pytest.mark.parametrize("field", WRONG_CONFIGS)
def test_bounds_of_generation_config(served, field):
    """Three gigabytes and half a minute of everybody's time for one request."""
    for value, path in itertools.product(WRONG_CONFIGS[field], (CHAT, COMPLETIONS, RESPONSES)):
        check_refused(post(served, path, body_of(path, **config(**{field: value}))), f"generation_config.{field}")


def test_no_other_field_of_a_generation_config(served):
    """A field that nobody has thought of: another cache, a file as an assistant, hidden states in the memory of the
    server.
    """
    known = served_requests._config_fields(AnswerLimits())
    others = sorted(set(GenerationConfig().to_dict()) - set(known) - set(served_requests.WITHOUT_EFFECT))
    assert len(others) > 30 and {"cache_implementation", "num_return_sequences", "max_length"} <= set(others)
    for field in (*others, "a_field_of_a_later_release", "tokenizer", "assistant_model", "streamer"):
        check_refused(post(served, CHAT, body_of(CHAT, **config(**{field: 7}))), f"got '{field}'", "num_beams")
    for text in ("[1]", "{", '"a"', "3", "[" * 100_000, {"num_beams": 100_000}, [], 3, ""):
        check_refused(post(served, CHAT, body_of(CHAT, generation_config=text)), "generation_config")


def test_what_the_model_has_anyway(served):
    """A client that sends the configuration of the model back, as the documentation of transformers shows, and is
    refused.
    """
    own = served.model.generation_config
    for text in (
        own.to_json_string(),
        own.to_json_string(use_diff=False),
        GenerationConfig(num_beams=2).to_json_string(),
    ):
        answer = post(served, CHAT, body_of(CHAT, generation_config=text))
        assert answer.status_code == 200, answer.text
    check_refused(post(served, CHAT, body_of(CHAT, **config(eos_token_id=7, pad_token_id=8))), "'eos_token_id'")


def test_a_field_of_a_later_server(served):
    """A release of transformers whose server sets more of a configuration than it does today."""
    own = served.model.generation_config
    changed = GenerationConfig(**own.to_dict())
    changed.num_return_sequences = 1000
    with pytest.raises(HTTPException) as refused:
        check_config(changed, {}, AnswerLimits(), own)
    assert refused.value.status_code == 400 and "num_return_sequences" in refused.value.detail


def test_values_within_bounds(served):
    """A value that is allowed, and fails; an answer that is not what `generate` gives for it."""
    fields = {
        "num_beams": 3,
        "max_new_tokens": 9,
        "length_penalty": 0.5,
        "early_stopping": True,
        "no_repeat_ngram_size": 2,
    }
    text = post(served, CHAT, {"messages": [USER], **config(**fields)}).json()["choices"][0]["message"]["content"]
    assert text == expected(served, **{**fields, "max_new_tokens": 9}) != expected(served, max_new_tokens=9)
    warpers = {"top_k": 5, "top_p": 0.9, "min_p": 0.1, "typical_p": 0.9, "epsilon_cutoff": 0.1, "eta_cutoff": 0.1}
    edges = [{"top_k": 0}, {"top_p": 0}, {"top_p": 1}, {"min_p": 1}, {"typical_p": 1}, {"repetition_penalty": 10}]
    edges += [{"epsilon_cutoff": 1}, {"eta_cutoff": 1}, {"temperature": 0}, {"temperature": 2}, {"temperature": 0.01}]
    for stream, each in itertools.product((False, True), ({**warpers, "temperature": 0.5}, *edges)):
        answer = post(served, CHAT, body_of(CHAT, stream=stream, **config(do_sample=True, **each)))
        assert answer.status_code == 200 and '"error"' not in answer.text, (each, answer.text)
    check_refused(post(served, CHAT, body_of(CHAT, stream=True, **config(num_beams=2))), "num_beams", "stream")


def expected(served, **options):
    from chat_models import answer, question

    return answer(served.reference, served.processor, [question(TEXT)], **options)


def test_the_default_length(served):
    """An answer without a length that is longer than the operator allows."""
    for fields in ({}, config(do_sample=False)):
        answer = post(served, CHAT, {"messages": [USER], **fields}).json()
        assert answer["usage"]["completion_tokens"] == 40 and answer["choices"][0]["finish_reason"] == "length"


SAMPLING = {
    "temperature": [2.5, -1, "0.5", True, [1]],
    "top_p": [5, -1, "a", {}],
    "seed": ["a", 2**70, 1.5, -(2**64)],
}
WRONG = {
    CHAT: {
        **SAMPLING,
        "max_tokens": [0, -3, 41, 10**9, "a", 1.5, True],
        "max_completion_tokens": [0, 10**9],
        "frequency_penalty": [-1, 3, "a"],
        "stop": ["", [""], [3], 3, ["a"] * 1000, "a" * 1000, {"a": "b"}],
        "logit_bias": [{"a": 1}, {"5": 1000}, {"5": "a"}, {"-1": 1}, {"100000": 1}, {"٣": 1}, [], "a", {str(n): 1 for n in range(999)}],  # noqa: E501
        "stream": ["yes", 1, []],
        "n": [2, 0, "a"],
        "chat_template_kwargs": [[], "a", {"a": 1}],
        "messages": [
            None,
            [],
            {},
            "a",
            [3],
            [{}],
            [{"role": "user"}],
            [{"role": "user", "content": None}],
            [{"role": "user", "content": []}],
            [{"role": "user", "content": 3}],
            [{"role": "user", "content": {}}],
            [{"role": "user", "content": [3]}],
            [{"role": "user", "content": [{}]}],
            [{"role": "user", "content": [{"type": "text"}]}],
            [{"role": "wizard", "content": "a"}],
            [{"role": None, "content": "a"}],
            [{"role": ["user"], "content": "a"}],
            [{"role": 3, "content": "a"}],
            [{"role": "User", "content": "a"}],
            [USER, {"role": "assistant", "content": None}],
            [USER, {"role": "assistant", "content": None, "tool_calls": []}],
            [USER, {"role": "assistant", "content": None, "tool_calls": "look"}],
            [USER, {"role": "assistant", "content": None, "tool_calls": [{}]}],
            [USER, {"role": "assistant", "tool_calls": [{"function": {"name": "look"}}]}],
            [USER, {"role": "assistant", "tool_calls": [{"function": {"name": "look", "arguments": 3}}]}],
            [USER, {"role": "tool", "content": None, "tool_call_id": "1"}],
            [USER, {"role": "assistant", "content": "a", "refusal": "no"}],
            [USER, {"role": "assistant", "content": "a", "audio": {"id": "1"}}],
            [USER, {"role": "assistant", "content": "a", "function_call": {"name": "look", "arguments": "{}"}}],
        ],
    },
    COMPLETIONS: {
        **SAMPLING,
        "max_tokens": [0, 41, 10**9],
        "frequency_penalty": [-1],
        "stop": ["", ["a"] * 1000],
        "prompt": [3, ["a"], [1, 2], {}],
        "n": [2],
        "best_of": [3],
        "echo": [True],
        "logprobs": [3],
        "suffix": ["a"],
    },
    RESPONSES: {
        **SAMPLING,
        "max_output_tokens": [0, 41, 10**9],
        "instructions": [3, ["a"]],
        "input": [
            [],
            3,
            {},
            [3],
            [{"role": "user", "content": None}],
            [{"role": "user", "content": []}],
            [{"role": "user", "content": "a", "images": ["b"]}],
            [{"role": "user", "content": "a", "image_url": "data:image/png;base64,AAAA"}],
            [{"role": "wizard", "content": "a"}],
            [{"type": "function_call", "name": "look"}, USER],
            [USER, {"type": "function_call", "call_id": "1", "name": "look"}],
            [USER, {"type": "function_call_output", "call_id": "1"}],
            [USER, {"type": "function_call_output", "output": "a"}],
        ],
    },
}  # fmt: skip
CASES = [(path, field) for path in WRONG for field in WRONG[path]]


@pytest.mark.parametrize("path, field", CASES, ids=[f"{path.split('/')[2]}-{field}" for path, field in CASES])
def test_a_table_of_wrong_values(served, path, field):
    """A value that stops the server, takes its memory, is passed over, or is answered with an error of Python or
    without words.
    """
    for value, stream in itertools.product(WRONG[path][field], (False, True)):
        check_refused(post(served, path, {**body_of(path), "stream": stream, field: value}))
    assert post(served, path, body_of(path)).status_code == 200


def test_a_seed_is_of_one_request(served):
    """A request that decides what later requests, without a seed, are answered."""
    torch.manual_seed(0)
    before = torch.get_rng_state()
    first, again = (
        post(served, CHAT, body_of(CHAT, seed=7, temperature=1.5, max_tokens=20)).json()["choices"][0] for _ in range(2)
    )
    assert first == again and torch.equal(torch.get_rng_state(), before)
    post(served, CHAT, body_of(CHAT, temperature=1.5))
    assert not torch.equal(torch.get_rng_state(), before)


def test_what_stays_allowed(served):
    """A conversation of a real client, refused with the rest: calls of tools, defaults that are written out, null for
    what is not set.
    """
    turns = [
        {"role": "developer", "content": "be brief"},
        USER,
        {"role": "assistant", "content": "", "refusal": None},
        {"role": "user", "content": [{"type": "text", "text": TEXT}]},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "1", "content": "a dog"},
    ]
    unset = dict.fromkeys(
        ("temperature", "top_p", "stop", "seed", "generation_config", "chat_template_kwargs", "stream")
    )
    for fields in ({}, unset, {"stop": []}, {"logit_bias": {}}, {"logit_bias": {"5": -100, "6": 1.5}}, {"seed": 2**62}):
        answer = post(served, CHAT, body_of(CHAT, messages=turns, **fields))
        assert answer.status_code == 200, (fields, answer.text)
    items = [
        {"type": "message", "role": "user", "content": TEXT},
        {"type": "message", "role": "assistant", "content": "a", "id": "m1", "status": "completed"},
        {"role": "user", "content": TEXT},
        {"type": "function_call", "call_id": "1", "name": "look", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": "a dog"},
    ]
    for fields in ({"input": items}, {"stream": None}, {"instructions": "be brief"}):
        answer = post(served, RESPONSES, body_of(RESPONSES, **fields))
        assert answer.status_code == 200 and answer.headers["content-type"] == "application/json", answer.text


# --- stop strings


def pieces(text, seed):
    """A text in pieces, as tokens come."""
    rng = random.Random(seed)
    while text:
        cut = rng.randint(1, 4)
        yield text[:cut]
        text = text[cut:]


async def read(queue, seed):
    """Reads as transformers' server does: waits for one item, then takes what is there."""
    found, rng = [], random.Random(seed)
    while True:
        found.append(await queue.get())
        while found[-1] is not None and rng.random() < 0.7:
            try:
                found.append(queue.get_nowait())
            except asyncio.QueueEmpty:
                break
        if None in found:
            return found[: found.index(None)]


class Thought(str):
    """A text of another kind, as the reasoning of a model."""


def test_stops_that_are_split_over_pieces():
    """A beginning of a stop string that is shown before the rest comes; text that is held back for ever; the wrong one
    of two.
    """
    alphabet = "ab<"
    for seed in range(300):
        rng = random.Random(seed)
        text = "".join(rng.choice(alphabet) for _ in range(rng.randint(0, 12)))
        stops = ["".join(rng.choice(alphabet) for _ in range(rng.randint(1, 4))) for _ in range(rng.randint(1, 3))]

        async def stream(text=text, stops=stops, seed=seed):
            queue = asyncio.Queue()
            for piece in pieces(text, seed):
                queue.put_nowait(piece)
            queue.put_nowait(None)
            return await read(UntilStop(queue, stops), seed)

        # A model stops at the first piece that completes a stop string, so what comes behind that piece is not seen.
        seen = ""
        for piece in pieces(text, seed):
            seen += piece
            if place_of_stop(seen, stops) is not None:
                break
        found = asyncio.run(stream())
        assert "".join(found) == seen[: place_of_stop(seen, stops)], (text, stops, found)
        assert all(found)


def test_other_items_of_a_stream():
    """A call of a tool or an error that is lost or comes before the text in front of it; reasoning that is joined to
    the answer.
    """

    async def stream(*items):
        queue = asyncio.Queue()
        for item in (*items, None):
            queue.put_nowait(item)
        return await read(UntilStop(queue, ["<end>"]), 0)

    call = object()
    assert asyncio.run(stream("a<e", call, "nd>b")) == ["a", "<e", call, "nd>b"]
    found = asyncio.run(stream(Thought("a<e"), "nd>b", "c<en", "d>x"))
    assert "".join(found) == "a<end>bc" and [type(each) for each in found[:2]] == [Thought, Thought]
    assert asyncio.run(stream("<end>")) == []


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_stops_are_not_part_of_the_answer(served, path):
    """An answer that ends with the string it should end before, or with a part of it; a stop string within a word, or
    over two words.
    """

    def ask(stream=False, **fields):
        answer = post(served, path, body_of(path, max_tokens=NEW_TOKENS, temperature=0, stream=stream, **fields))
        assert answer.status_code == 200, answer.text
        if not stream:
            (choice,) = answer.json()["choices"]
            return choice["text"] if path == COMPLETIONS else choice["message"]["content"]
        *lines, end = filter(None, answer.text.splitlines())
        assert end == "data: [DONE]"
        chunks = [json.loads(line.removeprefix("data: ")) for line in lines]
        parts = [chunk["choices"][0] for chunk in chunks]
        return "".join((part["text"] if path == COMPLETIONS else part["delta"].get("content")) or "" for part in parts)

    whole = ask()
    words = whole.split()
    assert len(words) > 3 and ask(stream=True) == whole
    stops = [
        words[1],
        words[0],
        words[2][-1],
        f"{words[1]} {words[2]}",
        f"{words[0][-1]} {words[1][0]}",
        "no such text",
        whole,
    ]
    for stop in (*stops, [words[2], words[1]], ["zzz", f"{words[2]} {words[3]}"]):
        place = place_of_stop(whole, [stop] if isinstance(stop, str) else stop)
        for stream in (False, True):
            assert ask(stream=stream, stop=stop) == whole[:place], (stop, stream)
    assert ask(**config(stop_strings=[words[1]], max_new_tokens=NEW_TOKENS)) == whole[: whole.index(words[1])]


def test_generation_ends_at_a_stop(served):
    """A model that goes on to the end of its length behind a stop string: alone, as a stream and with beams."""
    body = body_of(CHAT, max_tokens=40, temperature=0)
    words = post(served, CHAT, body).json()["choices"][0]["message"]["content"].split()
    for stop in (words[1], f"{words[1]} {words[2]}"):
        done = post(served, CHAT, {**body, "stop": stop}).json()
        streamed = {**body, "stop": stop, "stream": True, "stream_options": {"include_usage": True}}
        *_, last, usage, _ = filter(None, post(served, CHAT, streamed).text.splitlines())
        last, usage = (json.loads(each.removeprefix("data: ")) for each in (last, usage))
        for each in (done, {**usage, "choices": last["choices"]}):
            assert each["usage"]["completion_tokens"] < 10 and each["choices"][0]["finish_reason"] == "stop"
    beams = {"messages": [USER], **config(num_beams=3, max_new_tokens=40, do_sample=False)}
    stop = post(served, CHAT, beams).json()["choices"][0]["message"]["content"].split()[1]
    done = post(served, CHAT, {**beams, "stop": stop}).json()
    assert done["usage"]["completion_tokens"] < 40 and stop not in done["choices"][0]["message"]["content"]


def test_a_stop_beside_a_template_of_answers(served, monkeypatch):
    """An answer that transformers' server reads a second time, from its tokens, with the stop string."""
    template = {"defaults": {"role": "assistant"}, "start_anchor": "? a", "fields": {"content": {"content": "text"}}}
    body = body_of(CHAT, max_tokens=NEW_TOKENS, temperature=0)
    monkeypatch.setattr(served.processor.tokenizer, "response_template", template, raising=False)
    whole = post(served, CHAT, body).json()["choices"][0]["message"]["content"]
    stop = whole.split()[2]
    done = post(served, CHAT, {**body, "stop": stop}).json()["choices"][0]["message"]["content"]
    assert done.strip() == whole[: whole.index(stop)].strip() and done


def test_special_tokens_stop(served):
    """A model that does not know its own end, and a client that names it: no special token stands in a text."""
    tokenizer = served.processor.tokenizer
    body = body_of(CHAT, max_tokens=40, temperature=0)
    end = tokenizer.eos_token
    biased = {**body, "logit_bias": {str(tokenizer.eos_token_id): 100}, "stop": end}
    done = post(served, CHAT, biased).json()
    assert done["usage"]["completion_tokens"] == 1 and done["choices"][0]["message"]["content"] == ""


def test_the_options(chat_folder, monkeypatch, capsys):
    """Options without effect, or bounds that no request meets."""
    from hf_xattn.serving import serving

    for option in ("--max-new-tokens", "--max-beams", "--max-images", "--max-request-megapixels", "--max-requests"):
        assert main(["serve", str(chat_folder), option, "0"]) == 2
        assert f"`{option}` must be at least 1, got 0" in capsys.readouterr().err
    given, build_app = [], serving.build_app
    monkeypatch.setattr(serving, "build_app", lambda *arguments: given.append(arguments[-2:]) or build_app(*arguments))
    monkeypatch.setattr(serving.Server, "run", lambda *_, **__: None)
    images = ("--max-images", "3", "--max-request-megapixels", "4", "--max-requests", "6")
    for options in ((), ("--max-new-tokens", "5", "--max-beams", "2", *images)):
        assert main(["serve", str(chat_folder), "--port", "0", *options]) == 0
    assert given == [(AnswerLimits(4096, 8), RequestBounds()), (AnswerLimits(5, 2), RequestBounds(3, 4 * 10**6, 6))]
    assert given[0][1] == RequestBounds(64, 68 * 10**6, 16)


def test_others_are_answered_meanwhile(served):
    """One request that takes the server's memory and time from all others."""
    for fields in (config(num_beams=100_000), {"max_tokens": 10**9}, {"stop": ["a"] * 1000}, {"top_p": 5}):
        check_refused(post(served, CHAT, body_of(CHAT, **fields)))
    assert served.text([asked(TEXT, drawing(5))], max_tokens=3)
